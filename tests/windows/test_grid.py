"""Windows lie where MONAI and nnU-Net place them."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from znnpy.option_values import WindowRule
from znnpy.patches import Box
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 0.9)


def line(length: int, size: int, overlap: float, rule: WindowRule) -> WindowGrid:
    """Return windows that lie one behind the other along y."""
    return WindowGrid((3, length, 5), Windows((3, size, 5), (0.0, overlap, 0.0), rule=rule))


@pytest.mark.parametrize(
    ("length", "size", "overlap", "starts"),
    [
        (20, 8, 0.5, (0, 4, 8, 12)),
        (21, 8, 0.5, (0, 4, 8, 12, 13)),
        (20, 7, 0.25, (0, 5, 10, 13)),  # 5.25 voxels become 5
        (16, 8, 0.0, (0, 8)),
        (17, 8, 0.0, (0, 8, 9)),
        (9, 9, 0.75, (0,)),
        (13, 10, 0.8, (0, 1, 2, 3)),  # 10 * (1 - 0.8) is less than 2 in binary numbers
        (5, 3, 0.9, (0, 1, 2)),  # 0.3 voxels become 1
        (5, 8, 0.5, (0,)),
    ],
)
def test_monai_shifts_the_last_window_back(length: int, size: int, overlap: float, starts: tuple[int, ...]) -> None:
    grid = line(length, size, overlap, "monai")
    assert grid.starts == ((0,), starts, (0,))
    assert grid.counts == (1, len(starts), 1)


@pytest.mark.parametrize(
    ("length", "size", "overlap", "starts"),
    [
        (110, 64, 0.5, (0, 23, 46)),  # the example in nnU-Net's code
        (20, 8, 0.5, (0, 4, 8, 12)),
        (21, 8, 0.5, (0, 3, 6, 10, 13)),  # steps of 3.25; 6.5 is rounded to the even number
        (20, 7, 0.25, (0, 4, 9, 13)),
        (16, 8, 0.0, (0, 8)),
        (17, 8, 0.0, (0, 4, 9)),  # 4.5
        (9, 9, 0.75, (0,)),
        (12, 10, 0.8, (0, 2)),  # as `tile_step_size=0.2` does
        (13, 10, 0.9, (0, 1, 2, 3)),
        (5, 8, 0.5, (0,)),
        (4, 1, 0.5, (0, 1, 2, 3)),
    ],
)
def test_nnunet_spreads_windows_evenly(length: int, size: int, overlap: float, starts: tuple[int, ...]) -> None:
    grid = line(length, size, overlap, "nnunet")
    assert grid.starts == ((0,), starts, (0,))
    assert grid.counts == (1, len(starts), 1)


def one_by_one(length: int, size: int, interval: int) -> list[int]:
    """Return MONAI's positions: move by the interval until a window reaches the end."""
    starts = [0]
    while starts[-1] + size < length:
        starts.append(min(starts[-1] + interval, length - size))
    return starts


def spread(length: int, size: int, overlap: str) -> list[Fraction]:
    """Return nnU-Net's positions before they are rounded, in exact fractions."""
    longest = size * (1 - Fraction(overlap))
    steps = 0
    while steps * longest < length - size:
        steps += 1
    return [Fraction(length - size, steps or 1) * i for i in range(steps + 1)]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_positions_equal_those_found_one_by_one(overlap: float) -> None:
    for length, size in product(range(10, 90), range(10, 40)):
        padded = max(length, size)
        interval = next(d for d in range(size, 0, -1) if d <= size * (1 - overlap) or d == 1)
        assert line(length, size, overlap, "monai").starts[1] == tuple(one_by_one(padded, size, interval))
        found = line(length, size, overlap, "nnunet").starts[1]
        rounded = zip(found, spread(padded, size, str(overlap)), strict=True)
        assert all(abs(start - exact) <= 0.5 for start, exact in rounded)  # halves may go either way in binary numbers
        assert list(found) == sorted(set(found))


@pytest.mark.parametrize("rule", ["monai", "nnunet"])
def test_small_volumes_are_centred_in_zeros_with_the_odd_one_behind(rule: WindowRule) -> None:
    grid = WindowGrid((5, 30, 6), Windows((8, 10, 10), rule=rule))
    assert grid.before == (1, 0, 2)
    assert grid.behind == (2, 0, 2)
    assert grid.padded == (8, 30, 10)
    assert grid.inside == Box((1, 0, 2), (6, 30, 8))
    assert grid.counts == (1, 5, 1)


@pytest.mark.parametrize("rule", ["monai", "nnunet"])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.75])
def test_touching_windows_are_those_that_share_a_voxel_with_the_box(rule: WindowRule, overlap: float) -> None:
    grid = line(37, 8, overlap, rule)
    for lo, hi in product(range(37), range(1, 38)):
        if lo < hi:
            shared = [start for start in grid.starts[1] if set(range(start, start + 8)) & set(range(lo, hi))]
            assert grid.touching(Box((0, lo, 0), (3, hi, 5))) == ((0,), tuple(shared), (0,))


@pytest.mark.parametrize("rule", ["monai", "nnunet"])
def test_more_windows_than_can_be_listed_are_counted(rule: WindowRule) -> None:
    huge = 2**40
    grid = WindowGrid((huge, huge, 9), Windows((2, 2, 9), (0.0, 0.5, 0.0), rule=rule))
    assert grid.counts == (huge // 2, huge - 1, 1)
    why = grid.why_too_many(Box((0, 0, 0), grid.volume))
    assert why is not None
    assert f"are {huge // 2 * (huge - 1):,} in a volume of {huge}x{huge}x9, more than the 10,000,000" in why
    few = Box((huge - 6, 6, 0), (huge, 9, 9))
    assert grid.touching(few) == ((huge - 6, huge - 4, huge - 2), (5, 6, 7, 8), (0,))
    assert grid.why_too_many(few) is None
    assert grid.why_too_many(Box((0, 0, 0), (2 * 10**7, 1, 1))) is None
    assert grid.why_too_many(Box((0, 0, 0), (2 * 10**7 + 1, 1, 1))) is not None
