"""Ranges of numbers hold what a set of the same numbers holds."""

from __future__ import annotations

from random import Random

import pytest

from znnpy.cluster.number_ranges import NumberRanges

MOST = 40


def pieces(numbers: set[int]) -> int:
    """Count the ranges that a set of numbers consists of."""
    return sum(number - 1 not in numbers for number in numbers)


@pytest.mark.parametrize("seed", range(50))
def test_ranges_equal_a_set_after_any_changes(seed: int) -> None:
    random, ranges, numbers = Random(seed), NumberRanges(), set[int]()
    without, left_out = NumberRanges(), set[int]()
    for _ in range(100):
        start, stop = sorted(random.sample(range(MOST + 1), 2))
        match random.randrange(4):
            case 0:
                ranges.add(start, stop)
                numbers |= set(range(start, stop))
            case 1:
                ranges.remove(start, stop)
                numbers -= set(range(start, stop))
            case 2:
                without.add(start, stop)
                left_out |= set(range(start, stop))
                if random.random() < 0.5:
                    without.remove(0, MOST)
                    left_out.clear()
            case _:
                count = random.randrange(1, 9)
                taken = ranges.take(count, without)
                assert taken == sorted(numbers - left_out)[:count]
                numbers -= set(taken)
        assert list(ranges) == sorted(numbers)
        assert len(ranges) == len(numbers)
        assert len(ranges._starts) == pieces(numbers)
        assert [number in ranges for number in range(MOST)] == [number in numbers for number in range(MOST)]
