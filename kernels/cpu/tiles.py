"""Which tiles are worth trying for an overlap-save convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from math import prod

from znnpy.shapes import Vec3, ceil_divide, valid

EXCESS = 1.2  # times the least volume that tiles cover together: those that cover more are slower by as much


@cache
def sides(m: int, k: int, all_sides: tuple[int, ...]) -> Sequence[int]:
    """Tile sides worth trying for `m` outputs along an axis: 1 where the kernel is 1, else those that hold the kernel
    and cover the outputs with less than every smaller one does."""
    if k == 1:
        return (1,)
    worth: list[int] = []
    least = 0
    for side in all_sides:
        covered = -(-m // (side - k + 1)) * side if side >= k else 0
        if covered and (not worth or covered < least):
            worth.append(side)
            least = covered
    return tuple(worth)


@cache
def tiles_worth(m: Vec3, reach: Vec3, all_sides: tuple[int, ...]) -> Mapping[Vec3, int]:
    """Tiles worth trying for `m` outputs, each of which looks at `reach` inputs, and how many cover an image.

    Left out are those that cover more than EXCESS times what the best do together, long ones, and of a tile and its
    turned twin, where y and x are alike, the one with the short side along x.
    """
    z, y, x = (sides(size, extent, all_sides) for size, extent in zip(m, reach, strict=True))
    alike = (m[1], reach[1]) == (m[2], reach[2])
    covers = {tile: ceil_divide(m, valid(tile, reach)) for tile in product(z, y, x) if not alike or tile[1] <= tile[2]}
    longest = max(2.0, min(_elongation(*cover) for cover in covers.items()))  # longer ones overlap more
    counts = {tile: prod(count) for tile, count in covers.items() if _elongation(tile, count) <= longest}
    most = EXCESS * min(count * prod(tile) for tile, count in counts.items())
    return {tile: count for tile, count in counts.items() if count * prod(tile) <= most}


def _elongation(tile: Vec3, counts: Vec3) -> float:
    """The longest side by the shortest, of those along which an image has more than one tile: the others lose nothing.

    A slab is covered by tiles as thin as it is.
    """
    divided = [side for side, count in zip(tile, counts, strict=True) if count > 1]
    return max(divided) / min(divided) if divided else 1.0
