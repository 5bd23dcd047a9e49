"""Choose the chunks of an output so that each lies in one column of the plan, and slabs of chunks fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

from znnpy.patches import Box, Columns
from znnpy.shapes import Vec3, ceil_divide
from znnpy.volume import store
from znnpy.volume.chunked_formats import Layout
from znnpy.volume.store import OutputArray

SAMPLED = 12  # columns along each axis of the grid whose edges are looked at: further ones repeat them
SHARD = 512  # largest number of voxels of a shard along an axis that no column ends in


@dataclass(frozen=True, slots=True)
class Edges:
    """The columns of one output along one axis.

    common   greatest common divisor of the places where columns begin and end; 0: none does within the output
    longest  voxels of the longest column
    walked   whether columns give their voxels along this axis in several steps
    """

    common: int
    longest: int
    walked: bool


def layouts_of(
    plans: Sequence[Columns],
    arrays: Sequence[OutputArray],
    itemsize: int,
    budget: int,
    *,
    sharded: bool = False,
    whole_maps: bool = False,
    inside: bool = False,
) -> list[Layout]:
    """Return the layout of each array.

    plans       the columns that are computed; several, where workers share the output
    itemsize    bytes of a value
    budget      bytes in which chunks are gathered, for all arrays together
    whole_maps  whether a chunk holds all maps
    inside      whether each chunk has to lie inside one column, as where processes share the output
    """
    share = budget // (2 * len(arrays))  # half of it is for chunks on their way to the disk
    return [
        _layout(
            _edges(plans, number, array.size),
            array,
            itemsize,
            share,
            sharded=sharded,
            whole_maps=whole_maps,
            inside=inside,
        )
        for number, array in enumerate(arrays)
    ]


def _edges(plans: Sequence[Columns], number: int, size: Vec3) -> list[Edges]:
    common, longest, walked = [0, 0, 0], [1, 1, 1], [False] * 3
    for columns in plans:
        for box, step in _sampled(columns, number):
            for axis in range(3):
                for at in (box.lo[axis], box.hi[axis]):
                    if 0 < at < size[axis]:
                        common[axis] = gcd(common[axis], at)
                longest[axis] = max(longest[axis], box.size[axis])
                walked[axis] |= step.size[axis] < box.size[axis]
    return [Edges(*one) for one in zip(common, longest, walked, strict=True)]


def _sampled(columns: Columns, number: int) -> Iterator[tuple[Box, Box]]:
    """Yield the voxels that some columns give of an output, and those of their first step."""
    counts = columns.counts
    for axis in range(3):
        for place in range(min(counts[axis], SAMPLED)):
            at = [0, 0, 0]
            at[axis] = place
            index = (at[0] * counts[1] + at[1]) * counts[2] + at[2]
            written = [step.pieces[number].write for step in columns[index].steps]
            written = [box for box in written if box.voxels]
            if written:
                yield _around(written), written[0]


def _around(boxes: Sequence[Box]) -> Box:
    lo = [min(box.lo[axis] for box in boxes) for axis in range(3)]
    hi = [max(box.hi[axis] for box in boxes) for axis in range(3)]
    return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))


def _layout(
    edges: Sequence[Edges],
    array: OutputArray,
    itemsize: int,
    share: int,
    *,
    sharded: bool,
    whole_maps: bool,
    inside: bool,
) -> Layout:
    """Return the layout of an array whose slabs of chunks take `share` bytes, if chunks of one voxel do."""
    size = array.size
    chunk = [chunk_along(most, one.common, inside=inside) for most, one in zip(size, edges, strict=True)]

    def spans(axis: int) -> bool:
        """Return whether chunks reach over several columns along an axis."""
        return chunk[axis] > edges[axis].longest

    def open_along(axis: int) -> int:
        """Return the voxels of open chunks along an axis: of a column, or of all where a slower axis is spanned."""
        if edges[axis].walked or spans(axis):
            return chunk[axis]
        reach = size[axis] if any(map(spans, range(axis))) else min(edges[axis].longest, size[axis])
        return -(-reach // chunk[axis]) * chunk[axis]

    def slab() -> int:
        """Return the bytes of the chunks that are open while a column walks, or columns follow one another."""
        return array.shape[0] * prod(map(open_along, range(3))) * itemsize

    for axis, one in enumerate(edges):
        # Thin chunks cost less than chunks written twice.
        while (one.walked or spans(axis)) and slab() > share and chunk[axis] > 1:
            thinner = max(1, chunk[axis] * share // slab())
            chunk[axis] = _divisor(one.common or size[axis], min(thinner, chunk[axis] - 1))
    found = chunk[0], chunk[1], chunk[2]
    if not sharded:
        return Layout(found)
    return Layout(found, _shard(found, edges, size, share // 4 // itemsize // (array.shape[0] if whole_maps else 1)))


def chunk_along(size: int, common: int, *, inside: bool = False) -> int:
    """Return the voxels of a chunk along an axis of `size` voxels, where columns end at multiples of `common`.

    Chunks have about CHUNK voxels, at least 3/8 and at most twice as many; they divide `common`, or are a multiple of
    it where it is small. Where neither is possible, chunks of CHUNK voxels lie across the columns' edges.

    inside  whether chunks must divide `common`, however small they become
    """
    most = store.CHUNK
    least = most * 3 // 8
    if not common or (size <= least and not inside):
        return ceil_divide((size,) * 3, ceil_divide((size,) * 3, (most,) * 3))[0]
    divisors = [each for each in range(1, 2 * most + 1) if common % each == 0]
    good = [each for each in divisors if least <= each <= most] or [each for each in divisors[::-1] if each > most][-1:]
    if inside and not good:
        good = divisors[-1:]
    if good:
        return min(size, good[-1])
    return min(size, common * (most // common) if common < least else most)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to a limit, or the limit where that would be less than half of it."""
    found = next(each for each in range(most, 0, -1) if number % each == 0)
    return found if 2 * found >= most else most


def _shard(chunk: Vec3, edges: Sequence[Edges], size: Vec3, most: int) -> Vec3:
    """Return the voxels of a shard: across columns as many chunks as they hold, within `most` voxels in all."""
    counts = []
    for each, one, whole in zip(chunk, edges, size, strict=True):
        if one.walked:
            counts.append(1)
        elif one.common and one.common % each == 0:
            counts.append(one.common // each)
        else:
            counts.append(1 if one.common else -(-min(whole, SHARD) // each))
    while prod(counts) > 1 and prod(counts) * prod(chunk) > most:
        axis = counts.index(max(counts))
        counts[axis] = next(fewer for fewer in range(counts[axis] - 1, 0, -1) if counts[axis] % fewer == 0)
    z, y, x = (count * each for count, each in zip(counts, chunk, strict=True))
    return z, y, x
