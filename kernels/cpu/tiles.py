"""Which tiles are worth trying for an overlap-save convolution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from znnpy.shapes import Vec3


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
def elongation(tile: Vec3, counts: Vec3) -> float:
    """The longest side by the shortest, of those along which an image has more than one tile: the others lose nothing.

    A slab is covered by tiles as thin as it is.
    """
    divided = [side for side, count in zip(tile, counts, strict=True) if count > 1]
    return max(divided) / min(divided) if divided else 1.0
