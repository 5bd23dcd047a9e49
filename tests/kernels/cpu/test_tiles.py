"""Tiles worth trying, against their definition in words."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from znnpy.kernels.cpu.tiles import EXCESS, tiles_worth
from znnpy.shapes import Vec3

SIDES = (4, 6, 8, 12, 16, 24)


def useful_sides(outputs: int, reach: int) -> list[int]:
    """Return the sides that hold the reach and cover the outputs with less than all smaller ones do."""
    if reach == 1:
        return [1]
    covered = {side: -(-outputs // (side - reach + 1)) * side for side in SIDES if side >= reach}
    return [side for side in covered if all(covered[side] < covered[other] for other in covered if other < side)]


def longest_by_shortest(tile: Vec3, counts: Vec3) -> float:
    sides = [side for side, count in zip(tile, counts, strict=True) if count > 1]
    return max(sides, default=1) / min(sides, default=1)


@pytest.mark.parametrize(
    ("outputs", "reach"),
    [
        ((1, 1, 1), (2, 3, 4)),
        ((5, 90, 90), (3, 3, 3)),
        ((90, 31, 57), (5, 2, 1)),
        ((200, 200, 200), (4, 4, 4)),
        ((2, 1, 300), (1, 4, 2)),
    ],
    ids=str,
)
def test_tiles_equal_those_of_the_definition(outputs: Vec3, reach: Vec3) -> None:
    found: dict[Vec3, Vec3] = {}
    for z, y, x in product(*(useful_sides(m, r) for m, r in zip(outputs, reach, strict=True))):
        alike = outputs[1] == outputs[2] and reach[1] == reach[2]
        if not (alike and y > x):
            a, b, c = (-(-m // (t - r + 1)) for m, t, r in zip(outputs, (z, y, x), reach, strict=True))
            found[z, y, x] = a, b, c
    longest = max(2.0, min(longest_by_shortest(*tile) for tile in found.items()))
    short = {tile: prod(counts) for tile, counts in found.items() if longest_by_shortest(tile, counts) <= longest}
    least = min(count * prod(tile) for tile, count in short.items())
    expected = {tile: count for tile, count in short.items() if count * prod(tile) <= EXCESS * least}
    assert list(tiles_worth(outputs, reach, SIDES).items()) == list(expected.items())
