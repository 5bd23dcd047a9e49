"""Curves of throughput against memory: the best plan of one kind at every limit, down to the least that any needs."""

from __future__ import annotations

from math import log2

import pytest
from brute_force import planned
from plans import MIXED, WIDE

from znnpy.errors import NoPlanError
from znnpy.planner.plan import Plan
from znnpy.planner.throughput import points

MOST = 3 * 2**25 + 5  # no power of the root of 2


@pytest.mark.parametrize("columns", [True, False])
def test_each_point_is_the_best_plan_within_its_limit(columns: bool) -> None:
    asked: list[int] = []

    def make(nbytes: int) -> Plan:
        asked.append(nbytes)
        return planned(WIDE, (30, 21, 17), nbytes, columns=columns)

    found = list(points(make, MOST))
    limits = [point.limit for point in found]
    assert limits[0] == MOST
    assert limits == sorted(set(limits), reverse=True)
    for limit in limits[1:-1]:
        assert 2 * log2(limit) == pytest.approx(round(2 * log2(limit)), abs=1e-5)
    for point in found:
        assert point.plan.memory.held <= point.limit
        assert point.plan.walks == columns
        best = planned(WIDE, (30, 21, 17), point.limit, columns=columns)
        assert point.plan.voxels_per_second == best.voxels_per_second
    least = found[-1].plan
    assert least.memory.held == limits[-1]
    with pytest.raises(NoPlanError):
        planned(WIDE, (30, 21, 17), limits[-1] - 1, columns=columns)
    assert len(asked) < len(limits)  # a plan that fits within several limits is made once
    done = [point.done for point in found]
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert all(point.as_json()["cover"] == ("columns" if columns else "patches") for point in found)


def test_what_never_fits_has_no_points() -> None:
    assert list(points(lambda nbytes: planned(MIXED, (20, 11, 8), nbytes), 1000)) == []
