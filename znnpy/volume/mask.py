"""A mask: a volume that says where output is wanted. Voxels that are not zero are wanted.

A mask may be as large as the volume, so that it is not held. It is read once to find which of its blocks hold no wanted
voxel, some or only such, and once more where voxels are written of which some are wanted and others not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.messages import option
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3, ceil_divide, text
from znnpy.volume.base import Volume
from znnpy.volume.lengths import meters
from znnpy.volume.source import Predicted, Source
from znnpy.volume.space import Space

LEAST_BLOCK = 4  # voxels of a block along each axis
MOST_BLOCKS = 2**21  # of a mask: what is known of each takes BLOCK_BYTES
BLOCK_BYTES = 13  # of a block: its state, sums of blocks, and while a mask is read the number of its wanted voxels
PIECE_BYTES = 4 * 2**20  # voxels of a mask that are read at once
PIECES = 3  # copies of a piece: as read, whether each voxel is wanted, and the same for the voxels of the output
MOST_TIMES = 64  # voxels of a volume on one of a mask along an axis, or the reverse, without voxel sizes
MOST_TERM = 5  # largest number in another quotient of their sizes
TIE = 1e-6  # of a voxel: a position this close below the face between two voxels belongs to the later one
NONE, SOME, ALL = 0, 1, 2  # states of a block

Numbers = npt.NDArray[np.int32]
Positions = npt.NDArray[np.float64]
Wanted = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A volume that was read once.

    block   voxels of a block along each axis
    states  of the blocks: NONE, SOME or ALL of its voxels are wanted
    sums    number of blocks with wanted voxels before each corner of a block
    voxels  number of wanted voxels
    digest  of the numbers of wanted voxels of all blocks
    """

    volume: Volume
    block: int
    states: npt.NDArray[np.uint8]
    sums: Numbers
    voxels: int
    digest: str

    @classmethod
    def of(cls, volume: Volume) -> Mask:
        """Read a volume as a mask; VolumeError if it has several channels, or cannot be read."""
        if volume.channels != 1:
            raise VolumeError(
                f"{volume} has {volume.channels} channels, and a mask has one; name another array with "
                f"{option('mask')} FILE::DATASET"
            )
        block = LEAST_BLOCK
        while prod(ceil(n / block) for n in volume.size) > MOST_BLOCKS:
            block *= 2
        counts = np.zeros(ceil_divide(volume.size, (block, block, block)), np.int32 if block <= 2**10 else np.int64)
        whole = np.ones(counts.shape, counts.dtype)
        for axis, n in enumerate(volume.size):
            sizes = np.minimum(block, n - block * np.arange(counts.shape[axis]))
            whole *= sizes.reshape([-1 if i == axis else 1 for i in range(3)]).astype(counts.dtype)
        for box in _boxes(volume, block):
            voxels = np.empty((1, *box.size), volume.dtype)
            volume.read(box, voxels)
            found: npt.NDArray[Any] = voxels[0] != 0
            for axis in (2, 1, 0):
                places = np.arange(0, box.size[axis], block)
                found = np.add.reduceat(found, places, axis=axis, dtype=counts.dtype)
            z, y, x = (lo // block for lo in box.lo)
            counts[z : z + found.shape[0], y : y + found.shape[1], x : x + found.shape[2]] = found
        states = np.where(counts == whole, ALL, np.where(counts > 0, SOME, NONE)).astype(np.uint8)
        sums = np.zeros([n + 1 for n in counts.shape], np.int32)
        sums[1:, 1:, 1:] = states > 0
        for axis in range(3):
            np.cumsum(sums, axis=axis, out=sums)
        digest = hashlib.sha256(counts.astype("<i8").tobytes()).hexdigest()
        return cls(volume, block, states, sums, int(counts.sum(dtype=np.int64)), digest)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held, or were while the mask was read."""
        return BLOCK_BYTES * self.states.size + PIECES * PIECE_BYTES + READER_BYTES + self.volume.extra_bytes

    def identity(self) -> dict[str, Any]:
        """Return what identifies the mask, which a resumed run compares."""
        return {**self.volume.identity(), "wanted_voxels": self.voxels, "blocks_sha256": self.digest}

    def state(self, box: Box) -> int:
        """Return whether NONE, SOME or ALL voxels of a box are wanted, as far as it is known of its blocks."""
        if not self.touches(box):
            return NONE
        (z, y, x), (a, b, c) = self._blocks(box)
        return ALL if (self.states[z:a, y:b, x:c] == ALL).all() else SOME

    def touches(self, box: Box) -> bool:
        """Return whether a block that the box touches has wanted voxels."""
        (z, y, x), (a, b, c) = self._blocks(box)
        s = self.sums
        front = s[a, b, c] - s[z, b, c] - s[a, y, c] - s[a, b, x]
        return bool(front + s[z, y, c] + s[z, b, x] + s[a, y, x] - s[z, y, x])

    def _blocks(self, box: Box) -> tuple[Vec3, Vec3]:
        """Return the first blocks of a box along each axis, and those behind its last."""
        b = self.block
        (z, y, x), (a, c, e) = box.lo, box.hi
        return (z // b, y // b, x // b), ((a - 1) // b + 1, (c - 1) // b + 1, (e - 1) // b + 1)

    def read(self, box: Box) -> Wanted:
        """Return whether each voxel of a box is wanted."""
        voxels = np.empty((1, *box.size), self.volume.dtype)
        self.volume.read(box, voxels)
        wanted: Wanted = voxels[0] != 0
        return wanted


def _boxes(volume: Volume, block: int) -> Iterator[Box]:
    """Yield boxes that cover a volume and begin with blocks; they hold whole chunks where these are not too large."""
    row, chunk = volume.size[2] * volume.dtype.itemsize, volume.chunk_size
    high = _whole(chunk[1], block, max(1, PIECE_BYTES // (row * block)), volume.size[1])
    thick = _whole(chunk[0], block, max(1, PIECE_BYTES // (row * high)), volume.size[0])
    wide = block * max(1, PIECE_BYTES // (high * thick * volume.dtype.itemsize * block))
    for lo in product(*(range(0, n, step) for n, step in zip(volume.size, (thick, high, wide), strict=True))):
        hi = (lo[0] + thick, lo[1] + high, lo[2] + wide)
        yield Box((lo[0], lo[1], lo[2]), hi).clipped(Box((0, 0, 0), volume.size))


def _whole(chunk: int, block: int, most: int, size: int) -> int:
    """Return a multiple of a block, and of a chunk if one fits into `most` voxels, that needs not exceed `size`."""
    unit = block * chunk // np.gcd(block, chunk)
    unit = int(unit if unit <= most else block)
    return unit * max(1, min(most, size + unit - 1) // unit)


@dataclass(frozen=True, slots=True, eq=False)
class WantedOutput:
    """The places at which one output is wanted.

    mask    the mask
    places  for each axis the voxel of the mask at each voxel of the output, -1 where the mask ends before
    inside  the voxels of the output that lie in the mask
    """

    mask: Mask
    places: tuple[Numbers, Numbers, Numbers]
    inside: Box

    def touches(self, box: Box) -> bool:
        """Return whether output may be wanted in a box: blocks of the mask decide, so it may be none after all."""
        there = box.clipped(self.inside)
        return there.voxels > 0 and self.mask.touches(self._of_mask(there))

    def touched(self, edges: Sequence[Numbers]) -> Wanted:
        """Return what `touches` says of all boxes of a grid: each lies between neighbouring edges along every axis."""
        found = self.mask.sums
        for axis, (along, ends) in enumerate(zip(self.places, edges, strict=True)):
            ends = np.clip(ends, self.inside.lo[axis], self.inside.hi[axis])
            lo, hi = ends[:-1], ends[1:]
            first = along[np.minimum(lo, len(along) - 1)] // self.mask.block
            end = np.where(hi > lo, along[hi - 1] // self.mask.block + 1, first)
            found = found.take(end, axis) - found.take(first, axis)
        wanted: Wanted = found > 0
        return wanted

    def clear(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        """Set the voxels (maps, *box.size) of a box to zero that are not wanted."""
        there = box.clipped(self.inside)
        state = self.mask.state(self._of_mask(there)) if there.voxels else NONE
        if state == ALL and there == box:
            return
        if state == NONE:
            voxels[...] = 0
            return
        for part in self._pieces(box):
            wanted = self._wanted(part)
            some = voxels[(slice(None), *part.shifted((-box.lo[0], -box.lo[1], -box.lo[2])).slices)]
            np.copyto(some, 0, where=np.logical_not(wanted, out=wanted))

    def at(self, positions: npt.NDArray[np.int64]) -> Wanted:
        """Return whether output is wanted at each of some positions (n, 3)."""
        found = np.zeros(len(positions), np.bool_)
        for number, (z, y, x) in enumerate(positions.tolist()):
            found[number] = self._wanted(Box((z, y, x), (z + 1, y + 1, x + 1)))[0, 0, 0]
        return found

    def _of_mask(self, box: Box) -> Box:
        """Return the box of the mask that a box inside it takes its voxels from."""
        lo = [int(along[first]) for along, first in zip(self.places, box.lo, strict=True)]
        hi = [int(along[end - 1]) + 1 for along, end in zip(self.places, box.hi, strict=True)]
        return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))

    def _wanted(self, box: Box) -> Wanted:
        """Return whether each voxel of a box is wanted."""
        found, there = np.zeros(box.size, np.bool_), box.clipped(self.inside)
        if there.voxels and (state := self.mask.state(of := self._of_mask(there))) != NONE:
            part = found[there.shifted((-box.lo[0], -box.lo[1], -box.lo[2])).slices]
            if state == ALL:
                part[...] = True
            else:
                z, y, x = (
                    along[lo:hi] - first
                    for along, lo, hi, first in zip(self.places, there.lo, there.hi, of.lo, strict=True)
                )
                part[...] = self.mask.read(of)[z][:, y][:, :, x]
        return found

    def _pieces(self, box: Box) -> Iterator[Box]:
        """Yield parts of a box for which little of the mask is read at once: whole planes, or rows of one plane."""
        there = box.clipped(self.inside)
        size = self._of_mask(there).size
        times = [max(1.0, n / m) for n, m in zip(size, there.size, strict=True)]  # voxels of the mask for each
        row = max(size[2], box.size[2]) * self.mask.volume.dtype.itemsize * times[0] * times[1]
        rows = max(1, int(PIECE_BYTES // row))
        thick, high = max(1, rows // box.size[1]), min(rows, box.size[1])
        for z, y in product(range(box.lo[0], box.hi[0], thick), range(box.lo[1], box.hi[1], high)):
            yield Box((z, y, box.lo[2]), (z + thick, y + high, box.hi[2])).clipped(box)


@dataclass(frozen=True, slots=True, eq=False)
class WantedOutputs:
    """The places at which the outputs of a run are wanted.

    how  the rule by which voxels of the mask were found, for the report
    """

    mask: Mask
    outputs: tuple[WantedOutput, ...]
    how: str

    @classmethod
    def of(cls, mask: Volume, source: Source, read: Mask | None = None) -> WantedOutputs:
        """Read a mask, unless it was read, and find its voxels at the voxels of the outputs of a run.

        By physical position if volume and mask state one in known units, or both in none; else by the proportion of
        their sizes. VolumeError if that is not a quotient of small numbers.
        """
        its, volume = mask.space, source.volume.space
        factors = _factors(volume, its)
        if factors is not None and volume is not None and its is not None:
            places = [_by_position(one, volume, its, factors) for one in source.outputs]
            how = "by physical position"
        else:
            shares = [_share(mask, source.volume, axis) for axis in range(3)]
            places = [_by_proportion(mask, one, shares) for one in source.outputs]
            same = all(over == under for over, under in shares)
            how = "voxel by voxel" if same else f"with {text(mask.size)} voxels for {text(source.volume.size)}"
        read = Mask.of(mask) if read is None else read
        return cls(read, tuple(_wanted_output(read, along) for along in places), how)

    def touches(self, boxes: list[Box]) -> bool:
        """Return whether output may be wanted in one of these boxes, one of each output; empty ones are left out."""
        return any(one.touches(box) for one, box in zip(self.outputs, boxes, strict=True) if box.voxels)

    def doubts(self) -> tuple[str, ...]:
        """Return a sentence if no output is wanted at all."""
        if any(one.touches(one.inside) for one in self.outputs):
            return ()
        return (
            f"the mask {self.mask.volume} selects nothing of the output, which is zero everywhere: it has "
            f"{self.mask.voxels:,} voxels that are not zero, and was laid on the volume {self.how}",
        )

    @property
    def held_bytes(self) -> int:
        """Bytes that are held, in the worst case."""
        return self.mask.held_bytes + sum(along.nbytes for one in self.outputs for along in one.places)


def _factors(volume: Space | None, mask: Space | None) -> tuple[float, float, float] | None:
    """Return how many units of the mask one of the volume is along each axis; None if positions cannot be compared."""
    if volume is None or mask is None:
        return None
    found = []
    for mine, its in zip(volume.units, mask.units, strict=True):
        if mine == its:
            found.append(1.0)
            continue
        over, under = meters(mine), meters(its)
        if over is None or under is None:
            return None
        found.append(float(over / under))
    return found[0], found[1], found[2]


def _by_position(one: Predicted, volume: Space, its: Space, factors: tuple[float, float, float]) -> list[Positions]:
    """Find the nearest voxels of a mask by physical position."""
    places = []
    for axis, n in enumerate(one.size):
        at = one.position[axis] + one.step[axis] * np.arange(n)
        at = ((volume.translation[axis] + volume.scale[axis] * at) * factors[axis] - its.translation[axis]) / its.scale[
            axis
        ]
        places.append(np.floor(at + 0.5 + TIE))
    return places


def _by_proportion(mask: Volume, one: Predicted, shares: list[tuple[int, int]]) -> list[Positions]:
    """Find the voxels of a mask of which `under` lie on `over` voxels of the volume along each axis."""
    places = []
    for axis, (n, (over, under)) in enumerate(zip(one.size, shares, strict=True)):
        at = one.position[axis] + one.step[axis] * np.arange(n)
        places.append(np.clip(np.floor((at + 0.5) * under / over + TIE), 0, mask.size[axis] - 1))
    return places


def _wanted_output(mask: Mask, places: Sequence[Positions]) -> WantedOutput:
    """Return where an output is wanted, with the voxels of the mask that `places` names, some outside of it."""
    lo, hi, found = [], [], []
    for at, n in zip(places, mask.volume.size, strict=True):
        inside = np.flatnonzero((at >= 0) & (at < n))
        lo.append(int(inside[0]) if inside.size else 0)
        hi.append(int(inside[-1]) + 1 if inside.size else 0)
        found.append(np.where((at >= 0) & (at < n), at, -1).astype(np.int32))
    return WantedOutput(mask, (found[0], found[1], found[2]), Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2])))


def _share(mask: Volume, volume: Volume, axis: int) -> tuple[int, int]:
    """Return how many voxels of a volume lie on how many of a mask; VolumeError if that is no small quotient."""
    n, m = volume.size[axis], mask.size[axis]
    both = int(np.gcd(n, m))
    most = MOST_TIMES if both in (n, m) else MOST_TERM
    if max(n, m) // both <= most:
        return n // both, m // both
    times = round(n / m)
    if 1 < times <= MOST_TIMES and m in (n // times, -(-n // times)):  # the last voxels of a mask are cut off
        return times, 1
    raise VolumeError(
        f"the mask {mask} has {m:,} voxels along {'zyx'[axis]} and the volume {n:,}, which is neither a whole "
        f"multiple nor a quotient of numbers up to {MOST_TERM}; give a mask of the volume's size or a whole "
        "fraction of it, or state voxel sizes in the "
        "metadata of both"
    )
