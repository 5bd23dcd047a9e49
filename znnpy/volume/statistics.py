"""Compute statistics of a whole volume, a part of it at a time: mean and standard deviation, and percentiles.

All are of the finite voxels. Percentiles are exact: those of numpy's method "linear". Voxels are sorted by 16 bits at a
time: a histogram of the highest bits tells in which of its bins a wanted voxel lies, and the next pass through the
volume counts the next bits of the voxels in that bin alone. So a volume of 8 or 16 bits is read once, one of 32 bits
twice, and one of 64 bits four times. Mean and deviation of up to 16 bits are exact too; others are summed in float64,
in an order that depends on nothing but the volume and its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import floor, isfinite, prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.network import Network, Normalise
from znnpy.normalisation import VolumeStatistics
from znnpy.patches import Box
from znnpy.run_log import log_phase
from znnpy.shapes import Vec3
from znnpy.volume.base import Volume

READ_VOXELS = 2**19  # at once, of all channels together, unless chunks are larger
MOST_CHUNK = 2**22  # voxels of a chunk that is read at once; larger ones are read several times
DIGIT = 16  # bits that one pass through the volume sorts by
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[Any]


def with_statistics(network: Network, volume: Volume, kept: object = None) -> Network:
    """Return a network whose normalisation follows from the volume, if it has one that does; else the network.

    kept  what `statistics_record` gave for a run of the same network on the same volume; then nothing is computed

    VolumeError: no voxel is finite, or values are beyond those of float32.
    """
    if network.statistics is None or volume.channels != network.input_channels:  # the latter is refused elsewhere
        return network
    found = normalise_of(network, kept)
    if found is None:
        found = network.statistics.normalise(statistics_of(volume, network.statistics))
        log_phase("opened", f"{volume}: {network.statistics.of} of the whole volume, {found}")
    return replace(network, normalise=found)


def statistics_record(network: Network) -> dict[str, Any]:
    """Return what a run keeps of the statistics of its volume, with keys of its own: nothing without statistics."""
    if network.statistics is None or network.normalise is None:
        return {}
    values = {"mean": list(network.normalise.mean), "std": list(network.normalise.std)}
    return {"statistics": {**network.statistics.described, **values}}


def normalise_of(network: Network, kept: object) -> Normalise | None:
    """Return the normalisation that a record holds; None if it is none of this network."""
    if not isinstance(kept, Mapping) or network.statistics is None:
        return None
    mean, std = kept.get("mean"), kept.get("std")
    if {key: value for key, value in kept.items() if key not in ("mean", "std")} != network.statistics.described:
        return None
    for values in (mean, std):
        if not isinstance(values, list | tuple) or len(values) != network.input_channels:
            return None
        if not all(isinstance(value, float) and abs(value) <= FLOAT32_MAX for value in values):
            return None
    made = Normalise(tuple(mean), tuple(std))  # type: ignore[arg-type]
    return made if min(made.std) >= FLOAT32_TINY else None


def statistics_of(volume: Volume, what: VolumeStatistics) -> list[tuple[float, float]]:
    """Return mean and standard deviation, or the low and the high percentile, of each channel of a volume."""
    groups = [tuple(range(volume.channels))] if what.jointly else [(channel,) for channel in range(volume.channels)]
    if what.of == "percentiles":
        found = _percentiles(volume, groups, what.percentiles)
    elif volume.dtype.kind in "iu" and volume.dtype.itemsize <= 2:
        found = [_moments_of_counts(volume, counts) for counts in _counts(volume, groups, {})]
    else:
        found = _moments(volume, groups)
    for pair in found:
        if not all(isfinite(value) and abs(value) <= FLOAT32_MAX for value in pair):
            raise VolumeError(
                f"{volume}: {what.of.replace('_', ' ')} of the whole volume are {pair[0]:.6g} and {pair[1]:.6g}, "
                f"beyond float32's largest number {FLOAT32_MAX:.6g}; rescale the volume"
            )
    return found * volume.channels if what.jointly else found


# --- parts of the volume ---


def _parts(volume: Volume) -> Iterator[Values]:
    """Yield all voxels of a volume in parts (c, z, y, x), each chunk once."""
    box = _part_size(volume)
    for lo in product(*(range(0, n, side) for n, side in zip(volume.size, box, strict=True))):
        part = Box(lo, tuple(at + side for at, side in zip(lo, box, strict=True)))  # type: ignore[arg-type]
        part = part.clipped(Box((0, 0, 0), volume.size))
        voxels = np.empty((volume.channels, *part.size), volume.dtype)
        volume.read(part, voxels)
        yield voxels


def _part_size(volume: Volume) -> Vec3:
    """Return the size of parts to read: whole chunks, as many as READ_VOXELS allows, rows of them first."""
    chunk = [min(side, n) for side, n in zip(volume.chunk_size, volume.size, strict=True)]
    while volume.channels * prod(chunk) > MOST_CHUNK and max(chunk) > 1:
        longest = next(axis for axis in range(3) if chunk[axis] > 1)
        chunk[longest] = -(-chunk[longest] // 2)
    for axis in (2, 1, 0):
        times = READ_VOXELS // (volume.channels * prod(chunk))
        chunk[axis] = min(volume.size[axis], chunk[axis] * max(1, times))
    return chunk[0], chunk[1], chunk[2]


def _pieces(voxels: Values, group: Sequence[int]) -> Iterator[Values]:
    """Yield the finite voxels of the channels of a group, flat, in pieces of about READ_VOXELS, as `_dtype` says."""
    dtype = _dtype(voxels.dtype)
    for channel in group:
        flat = voxels[channel].reshape(-1)
        for first in range(0, flat.size, READ_VOXELS):
            piece = flat[first : first + READ_VOXELS].astype(dtype, copy=False)
            if piece.dtype.kind == "f":
                finite = np.isfinite(piece)
                piece = piece if finite.all() else piece[finite]
            yield piece


def _dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that voxels are sorted in: their own, up to 64 bits."""
    return dtype if dtype.itemsize <= np.float64().itemsize else np.dtype(np.float64)


def _none_finite(volume: Volume) -> VolumeError:
    return VolumeError(
        f"{volume} has a channel without a finite voxel, so it has no mean and no percentiles; repair the volume"
    )


# --- mean and standard deviation ---


def _moments_of_counts(volume: Volume, counts: Counts) -> tuple[float, float]:
    """Return mean and standard deviation of voxels of up to 16 bits from how often each value occurs."""
    values = _values(np.flatnonzero(counts).astype(np.uint64), volume.dtype)
    pairs = [(int(value), int(count)) for value, count in zip(values, counts[counts > 0], strict=True)]
    count = sum(n for _, n in pairs)
    total, squares = sum(n * value for value, n in pairs), sum(n * value * value for value, n in pairs)
    mean = Fraction(total, count)
    return float(mean), sqrt(Fraction(squares, count) - mean * mean)


def _moments(volume: Volume, groups: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each group, combined from those of parts."""
    count, mean, squares = ([0.0] * len(groups) for _ in range(3))
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite result is refused
        for voxels in _parts(volume):
            for index, group in enumerate(groups):
                for piece in _pieces(voxels, group):
                    if not piece.size:
                        continue
                    wide = piece.astype(np.float64)
                    own = float(wide.mean())
                    total = count[index] + wide.size
                    away = own - mean[index]
                    wide -= own
                    squares[index] += float(np.square(wide).sum()) + away * away * count[index] * wide.size / total
                    mean[index] += away * wide.size / total
                    count[index] = total
    if not all(count):
        raise _none_finite(volume)
    return [(m, sqrt(s / n) if isfinite(s) else s) for n, m, s in zip(count, mean, squares, strict=True)]


# --- percentiles ---


def _percentiles(
    volume: Volume, groups: Sequence[Sequence[int]], percentiles: tuple[float, float]
) -> list[tuple[float, float]]:
    first = _counts(volume, groups, {})
    if not all(counts.any() for counts in first):
        raise _none_finite(volume)
    places = [[percentile / 100 * (int(counts.sum()) - 1) for percentile in percentiles] for counts in first]
    ranks = [sorted({rank for at in own for rank in (floor(at), floor(at) + 1)}) for own in places]
    keys = _sorted_at(volume, groups, first, ranks)
    found = []
    for own, by_rank in zip(places, keys, strict=True):
        low, high = (_between(by_rank[floor(at)], by_rank[floor(at) + 1], at - floor(at)) for at in own)
        found.append((low, high))
    return found


def _between(low: float, high: float, share: float) -> float:
    """Return the value a share of the way from one value to the next."""
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def _sorted_at(
    volume: Volume, groups: Sequence[Sequence[int]], counts: Sequence[Counts], ranks: Sequence[Sequence[int]]
) -> list[dict[int, float]]:
    """Return for each group the voxel that has a rank in sorted order, for several ranks.

    counts  of the first bits of each group
    """
    left: list[dict[int, tuple[int, int]]] = [{} for _ in groups]  # of each rank: bits so far, rank among their voxels
    for index, own in enumerate(counts):
        last = int(own.sum()) - 1
        for rank in ranks[index]:
            left[index][rank] = _bin(own, 0, min(rank, last))
    dtype = _dtype(volume.dtype)
    for done in range(DIGIT, 8 * dtype.itemsize, DIGIT):
        wanted = {(index, bits) for index, own in enumerate(left) for bits, _ in own.values()}
        order = sorted(wanted)
        found = dict(zip(order, _counts(volume, groups, dict(enumerate(order)), done), strict=True))
        for index, own_left in enumerate(left):
            for rank, (bits, among) in own_left.items():
                own_left[rank] = _bin(found[index, bits], bits, among)
    return [
        {rank: float(_values(np.array([bits], np.uint64), dtype)[0]) for rank, (bits, _) in own.items()} for own in left
    ]


def _bin(counts: Counts, bits: int, rank: int) -> tuple[int, int]:
    """Return the bits with those of the bin in which a rank lies, and the rank within it."""
    ends = np.cumsum(counts)
    at = int(np.searchsorted(ends, rank, side="right"))
    return (bits << DIGIT) + at, rank - int(ends[at] - counts[at])


def _counts(
    volume: Volume, groups: Sequence[Sequence[int]], within: Mapping[int, tuple[int, int]], done: int = 0
) -> list[Counts]:
    """Return how often each value of the next bits occurs, in one pass through the volume.

    within  of each histogram: the group, and the bits so far of its voxels; empty for one of each group, of all voxels
    done    bits that are known
    """
    bits = 8 * _dtype(volume.dtype).itemsize
    wanted = within or {index: (index, 0) for index in range(len(groups))}
    found = [np.zeros(2 ** min(bits, DIGIT), np.int64) for _ in wanted]
    for voxels in _parts(volume):
        for index, group in enumerate(groups):
            own = [(at, before) for at, (of, before) in wanted.items() if of == index]
            for piece in _pieces(voxels, group):
                keys = _keys(piece)
                for at, before in own:
                    some = keys if not done else keys[keys >> keys.dtype.type(bits - done) == before]
                    digit = some >> keys.dtype.type(max(0, bits - done - DIGIT))
                    digit = digit & keys.dtype.type(len(found[at]) - 1)
                    found[at] += np.bincount(digit.astype(np.intp), minlength=len(found[at]))
    return found


def _keys(values: Values) -> Values:
    """Return unsigned integers that are in the order of values, which are finite."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    top = unsigned.type(2 ** (8 * unsigned.itemsize - 1))
    keys: Values = np.ascontiguousarray(values).view(unsigned)
    if values.dtype.kind == "i":
        keys = keys ^ top
    if values.dtype.kind == "f":
        keys = np.where(keys & top, ~keys, keys | top)
    return keys


def _values(keys: npt.NDArray[np.uint64], dtype: np.dtype[Any]) -> Values:
    """Return the values of a type that have these keys."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    top = unsigned.type(2 ** (8 * unsigned.itemsize - 1))
    found: Values = keys.astype(unsigned)
    if dtype.kind == "i":
        found = (found ^ top).view(dtype)
    if dtype.kind == "f":
        found = np.where(found & top, found ^ top, ~found).view(dtype) + dtype.type(0)  # no negative zero
    return found
