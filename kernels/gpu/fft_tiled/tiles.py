"""Tiles of the fused tiled FFT: their sizes, how they cover a layer, and the blocks that process them. Arithmetic only.

A slab is one row of tiles along z of one image. Tiles are processed in groups: several slabs or, if one is too large,
some rows of tiles along y of one slab. If results are max-pooled, slabs overlap along z and groups along y, so that
each contains its windows completely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from znnpy.shapes import ConvShape, Vec3, ceil_divide, valid

Spectra = Literal["half", "quick", "split"]

MAPS = 8  # maps of a spectrum are padded to a multiple of it: 16 real numbers, a step of the tensor cores
SIDES_Z = (8, 16, 24, 32)
SIDES = (16, 24, 32)  # along y and x, which are equal
COLUMN_THREADS = 256  # threads of a block of forward_z and inverse_z
POOL_THREADS = 128  # threads of a block of inverse_z_pool
POOL_ROWS = 16  # windows along y per block
POOL_COLUMNS = 8  # results along x of a warp
NUMBER = {"half": 4, "quick": 4, "split": 8}  # bytes of a complex number


# C++ types: of spectra, of numbers between the kernels, of a lane's data in a pass along y or x.
TYPES: dict[Spectra, tuple[str, str, str]] = {
    "half": ("Halves", "half2", "Lane<half2>"),
    "quick": ("Quick", "half2", "TwinLane"),
    "split": ("Split", "float2", "Lane<float2>"),
}
# Blocks of forward_plane and inverse_plane by the side of a plane: maps (the first choice that divides the layer's maps
# and fits shared memory is used), threads, and blocks per multiprocessor that registers must suffice for.
PLANE_BLOCKS: dict[tuple[int, Spectra], tuple[tuple[int, int, int], ...]] = {
    (16, "half"): ((16, 128, 5), (8, 128, 5)),
    (24, "half"): ((16, 192, 3), (8, 192, 3)),
    (32, "half"): ((16, 256, 2), (8, 256, 2)),
    (16, "quick"): ((16, 128, 6), (8, 64, 6)),
    (24, "quick"): ((16, 192, 3), (8, 96, 3)),
    (32, "quick"): ((16, 256, 2), (8, 128, 2)),
    (16, "split"): ((16, 128, 5), (8, 128, 5)),
    (24, "split"): ((8, 192, 3),),
    (32, "split"): ((8, 256, 2),),
}


@dataclass(frozen=True, slots=True)
class PlaneBlock:
    """The block of forward_plane or inverse_plane for a plane of a tile."""

    side: int
    spectra: Spectra
    maps: int
    threads: int
    per_multiprocessor: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block: `Plane::NUMBERS`."""
        return self.side * (self.side + 1) * self.maps * NUMBER[self.spectra]

    def forward(self, stored: str | None = None) -> str:
        """Return the C++ name of `forward_plane`; `stored`: a type of spectra other than the block's own."""
        return f"forward_plane<{self._sizes}, {stored or TYPES[self.spectra][0]}, {self._launch}>"

    @property
    def inverse(self) -> str:
        """C++ name of `inverse_plane`."""
        _, number, lane = TYPES[self.spectra]
        return f"inverse_plane<{self._sizes}, {number}, {lane}, {self._launch}>"

    @property
    def _sizes(self) -> str:
        return f"{self.side}, {self.side}, {self.maps}"

    @property
    def _launch(self) -> str:
        return f"{self.threads}, {self.per_multiprocessor}"


def plane_block(side: int, spectra: Spectra, maps: int, shared_bytes: int) -> PlaneBlock | None:
    """Return the first block for `maps` maps, padded, that fits shared memory; None if none does."""
    for count, threads, per_multiprocessor in PLANE_BLOCKS[side, spectra]:
        block = PlaneBlock(side, spectra, count, threads, per_multiprocessor)
        if maps % count == 0 and block.shared_bytes <= shared_bytes:
            return block
    return None


def frequencies(tile: Vec3) -> int:
    """Return the number of complex numbers kept of a real tile's spectrum."""
    z, y, x = tile
    return (z // 2 - 1) * y * x + 2 * y * (x // 2 + 1)


def padded(maps: int) -> int:
    """Return the maps of a spectrum, including zero padding."""
    return -(-maps // MAPS) * MAPS


class Group(NamedTuple):
    """Tiles whose spectra are in memory at the same time."""

    first: int  # index of the first slab
    slabs: int
    row: int  # index of the first row of tiles along y
    rows: int
    columns: int
    overlap: int = 0  # rows of results shared with the previous groups of the slab

    @property
    def tiles(self) -> int:
        return self.slabs * self.rows * self.columns


class Tiling(NamedTuple):
    """The arrangement of tiles over a layer, independent of their groups."""

    unpooled: Vec3  # results of an image
    step: Vec3  # outputs of one tile along y and x, windows along z
    windows: Vec3  # windows of an image
    grid: Vec3  # tiles of one image, as in groups of whole slabs
    tiles: int  # tiles of all images

    @classmethod
    @lru_cache(maxsize=64)  # the planner requests all groups of a tile, and all tiles of a shape, in turn
    def of(cls, shape: ConvShape, tile: Vec3) -> Tiling:
        unpooled = shape.unpooled
        z, y, x = valid(tile, shape.k)
        step, windows = (z - (shape.pool[0] - 1), y, x), valid(unpooled, shape.pool)
        grid = ceil_divide((windows[0], unpooled[1], unpooled[2]), step)
        return cls(unpooled, step, windows, grid, shape.batch * prod(grid))


@dataclass(frozen=True)
class Cover:
    """The tiles that cover a layer, in groups of about `group` or fewer; at least one row of them along x.

    Windows of a pooling are counted by their first voxel: `windows` of an image.
    """

    shape: ConvShape
    tile: Vec3
    group: int
    unpooled: Vec3 = field(init=False)  # this and the next fields are those of Tiling
    step: Vec3 = field(init=False)
    windows: Vec3 = field(init=False)
    grid: Vec3 = field(init=False)
    tiles: int = field(init=False)
    count: int = field(init=False)  # number of groups; the planner requests thousands of covers and needs only this
    _rows: Sequence[tuple[int, int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = vars(self)
        known.update(zip(Tiling._fields, Tiling.of(self.shape, self.tile), strict=True))
        known["_rows"] = rows = self._rows_of_slab()
        _, y, x = self.grid
        known["count"] = self._slabs * len(rows) if rows else -(-self._slabs // max(1, self.group // (y * x)))

    @property
    def groups(self) -> Sequence[Group]:
        """Groups of nearly equal size."""
        _, y, x = self.grid
        if not self._rows:
            return [Group(lo, hi - lo, 0, y, x) for lo, hi in _pieces(self._slabs, self.count)]
        return [Group(slab, 1, lo, hi - lo, x, twice) for slab in range(self._slabs) for lo, hi, twice in self._rows]

    @property
    def largest(self) -> Sequence[Group]:
        """Groups that include the largest: one of whole slabs, or those of the first slab."""
        _, y, x = self.grid
        if not self._rows:
            return [Group(0, -(-self._slabs // self.count), 0, y, x)]
        return [Group(0, 1, lo, hi - lo, x, twice) for lo, hi, twice in self._rows]

    @property
    def _slabs(self) -> int:
        return self.shape.batch * self.grid[0]

    def _rows_of_slab(self) -> Sequence[tuple[int, int, int]]:
        """Return start, end and shared rows of the groups of one slab; empty if groups consist of whole slabs."""
        _, y, x = self.grid
        if self.group >= y * x:
            return ()
        more = self.shape.pool[1] - 1
        at_most = max(1, self.group // x, -(-(more + 1) // self.step[1]))
        pieces = -(-self.windows[1] // (at_most * self.step[1] - more))
        return [
            (lo, hi, more * piece)
            for piece, (lo, hi) in enumerate(_pieces(-(-(self.windows[1] + more * pieces) // self.step[1]), pieces))
            if lo * self.step[1] - more * piece < self.windows[1]
        ]

    def rows_in(self, group: Group) -> tuple[int, int]:
        """Return the first row along y of the input that a group reads, and the number of rows."""
        first = group.row * self.step[1] - group.overlap
        return first, min(self.shape.n[1] - first, group.rows * self.step[1] + self.shape.k[1] - 1)

    def rows_out(self, group: Group) -> tuple[int, int]:
        """Return the first row along y of a group's results, and their number; no windows start in the last py - 1."""
        first = group.row * self.step[1] - group.overlap
        return first, min(self.unpooled[1] - first, group.rows * self.step[1])

    def bytes_of(self, group: Group, spectra: Spectra) -> tuple[int, int, int, int]:
        """Return the bytes between the kernels: columns transformed along z, spectra, products, result columns."""
        fin, fout = padded(self.shape.fin), padded(self.shape.fout)
        planes = NUMBER[spectra] * (group.slabs * self.tile[0] // 2)
        kept = NUMBER[spectra] * frequencies(self.tile) * group.tiles
        return (
            planes * self.rows_in(group)[1] * self.shape.n[2] * fin,
            kept * fin,
            kept * fout,
            planes * self.rows_out(group)[1] * self.unpooled[2] * fout,
        )

    def most_bytes(self, spectra: Spectra) -> tuple[int, int, int, int]:
        """Return the largest of these bytes over all groups."""
        first, *others = (self.bytes_of(group, spectra) for group in self.largest)
        if not others:
            return first
        a, b, c, d = map(max, zip(first, *others, strict=True))
        return a, b, c, d


def _pieces(count: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Split `range(count)` into nearly equal pieces."""
    return pairwise(count * i // pieces for i in range(pieces + 1))
