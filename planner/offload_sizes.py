"""Step sizes that the search for two stages looks at: some to begin with, and the neighbours of the best one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from znnpy.planner.tilings import Tiling, TilingSpace, all_sizes, log_spaced
from znnpy.shapes import Vec3

SIZES_PER_AXIS = 6  # sizes of an axis, or of all axes together
MAX_COMBINATIONS = 100  # combinations of sizes that are all looked at


def initial_sizes(space: TilingSpace) -> list[Vec3]:
    """Return the sizes of the steps that a search looks at first, with the axis of the space in front."""
    z, y, x = all_sizes(space)
    if len(z) * len(y) * len(x) <= MAX_COMBINATIONS:
        return [(a, b, c) for a in z for b in y for c in x]
    thick, across = log_spaced(z, SIZES_PER_AXIS), [log_spaced(along, SIZES_PER_AXIS) for along in (y, x)]
    most = max(len(across[0]), len(across[1]), len(thick))
    together = [(_nth(thick, i, most), _nth(across[0], i, most), _nth(across[1], i, most)) for i in range(most)]
    if not space.streams:
        return together
    return [(a, b, c) for a in thick for _, b, c in together]


def _nth(sizes: Sequence[int], index: int, of: int) -> int:
    """Return the size that is as far down its axis as `index` is of `of`."""
    return sizes[min(len(sizes) - 1, index * len(sizes) // of)]


def neighbouring_sizes(whole: Tiling) -> Iterator[Vec3]:
    """Yield the sizes that are one larger or smaller along one axis, or along all axes but that of columns."""
    sizes = all_sizes(whole.space)
    here = [
        min(range(len(along)), key=lambda i, own=own, along=along: abs(along[i] - own))  # type: ignore[misc]
        for along, own in zip(sizes, whole.patch, strict=True)
    ]
    moves = [tuple(move if i == axis else 0 for i in range(3)) for axis in range(3) for move in (-1, 1)]
    moves += [(0 if whole.space.streams else move, move, move) for move in (-1, 1)]
    for move in moves:
        at = [i + by for i, by in zip(here, move, strict=True)]
        if all(0 <= i < len(along) for i, along in zip(at, sizes, strict=True)):
            z, y, x = (along[i] for i, along in zip(at, sizes, strict=True))
            yield z, y, x
