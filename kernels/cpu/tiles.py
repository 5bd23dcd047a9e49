"""Select tile sizes for overlap-save convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from znnpy.shapes import Vec3

Sizes = npt.NDArray[np.int64]  # a row per tile: z, y, x
EXCESS = 1.15  # tiles may cover this many times the smallest total volume: the time grows with the volume


@cache
def sides(m: int, k: int, all_sides: tuple[int, ...]) -> Sequence[int]:
    """Return the tile sides worth trying for `m` outputs along an axis.

    These are 1 if the kernel is 1, else the sides that hold the kernel and cover the outputs with a smaller total
    extent than every smaller side.
    """
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
    """Return the tiles worth trying for `m` outputs that depend on `reach` inputs each, and the number covering them.

    Tiles are skipped if they cover more than EXCESS times the volume of the best, if they are elongated, and if they
    are the mirror image of another tile where y and x are alike (x keeps the long side).
    """
    along = (sides(size, extent, all_sides) for size, extent in zip(m, reach, strict=True))
    tiles = np.array(list(product(*along)), np.int64)
    if (m[1], reach[1]) == (m[2], reach[2]):
        tiles = tiles[tiles[:, 1] <= tiles[:, 2]]
    counts: Sizes = -(-np.array(m, np.int64) // (tiles - np.array(reach, np.int64) + 1))
    elongation = _elongation(tiles, counts)
    short = elongation <= max(2.0, elongation.min())  # elongated tiles overlap more
    tiles, counts = tiles[short], counts[short].prod(axis=1)
    covered = counts * tiles.prod(axis=1)
    worth = covered <= EXCESS * covered.min()
    return {(z, y, x): count for (z, y, x), count in zip(tiles[worth].tolist(), counts[worth].tolist(), strict=True)}


def _elongation(tiles: Sizes, counts: Sizes) -> npt.NDArray[np.float64]:
    """Return the ratio of the longest to the shortest side, over axes along which an image has more than one tile.

    The other axes lose nothing: a slab is covered by tiles as thin as it is.
    """
    divided = counts > 1
    longest = np.where(divided, tiles, 1).max(axis=1)
    shortest = np.where(divided, tiles, longest[:, np.newaxis]).min(axis=1)
    elongation: npt.NDArray[np.float64] = longest / shortest
    return elongation
