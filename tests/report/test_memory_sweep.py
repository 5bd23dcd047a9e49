"""Curves of throughput against memory: the best plan of one kind at every limit, down to the least that any needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.brute_force import planned
from tests.support.fake_plans import MIXED, WIDE
from znnpy.errors import NoPlanError
from znnpy.planner.plan import Plan
from znnpy.planner.run_plan import RunPlan
from znnpy.report.memory_sweep import FLAT, in_order, points


@dataclass(frozen=True)
class Within:
    """Plans that a function makes."""

    make: Callable[[int], RunPlan]

    def plan(self, nbytes: int) -> Plan:
        return self.make(nbytes).main


MOST = 3 * 2**25 + 5  # no power of the root of 2


@pytest.mark.slow
@pytest.mark.parametrize("columns", [True, False])
def test_each_point_equals_the_best_plan_within_its_limit(columns: bool) -> None:
    """Plans at limits that are left out are about as fast as their neighbours."""
    asked: list[int] = []

    def make(nbytes: int) -> RunPlan:
        asked.append(nbytes)
        return planned(WIDE, (30, 21, 17), nbytes, columns=columns)

    told = list(points(Within(make), MOST))
    done = [point.done for point in told]
    assert done == sorted(done)
    assert done[-1] == 1.0
    found = sorted(told, key=in_order)
    limits = [point.limit for point in found]
    assert limits[0] == MOST
    assert limits == sorted(set(limits), reverse=True)
    for limit in limits[1:-1]:
        assert 2 * log2(limit) == pytest.approx(round(2 * log2(limit)), abs=1e-5)
    for point in found:
        assert point.plan.memory.device_bytes <= point.limit
        assert point.plan.streams == columns
        best = planned(WIDE, (30, 21, 17), point.limit, columns=columns)
        assert point.plan.voxels_per_second == best.voxels_per_second
    for larger, smaller in pairwise(found[:-1]):
        if larger.limit > 1.5 * smaller.limit and larger.limit != MOST:
            assert larger.plan.voxels_per_second <= FLAT * smaller.plan.voxels_per_second
    least = found[-1].plan
    assert least.memory.device_bytes == limits[-1]
    with pytest.raises(NoPlanError):
        planned(WIDE, (30, 21, 17), limits[-1] - 1, columns=columns)
    assert len(asked) == len(set(asked))
    assert len(asked) < len(limits)  # a plan that fits within several limits is made once
    assert all(point.as_json()["cover"] == ("columns" if columns else "patches") for point in found)


@pytest.mark.slow
def test_network_beyond_every_limit_has_no_points() -> None:
    asked: list[int] = []

    def make(nbytes: int) -> RunPlan:
        asked.append(nbytes)
        return planned(MIXED, (20, 11, 8), nbytes)

    assert list(points(Within(make), 1000)) == []
    assert asked == [1000]


@pytest.mark.slow
@pytest.mark.parametrize("each", [1.0, 3.0])
@pytest.mark.parametrize("seconds", [0.5, 4.0, 9.0])
def test_sweep_ends_with_its_time_limit(seconds: float, each: float) -> None:
    """The first point is always there; then come those far apart, then those between."""
    clock, rng = [100.0], Random(3)

    def make(nbytes: int) -> RunPlan:
        clock[0] += each * rng.uniform(0.99, 1.0)
        return planned(WIDE, (30, 21, 17), nbytes, columns=False)

    found = list(points(Within(make), MOST, seconds=seconds, now=lambda: clock[0]))
    assert found[0].limit == MOST
    assert clock[0] - 100.0 <= max(each, seconds + 0.02 * each)
    assert clock[0] - 100.0 > min(seconds - 2 * each, 3 * each)
    if seconds == 9.0 and each == 1.0:
        assert found[-1].done == 1.0


@pytest.mark.slow
def test_network_beyond_host_memory_is_planned_once() -> None:
    """The GPU would have enough memory."""
    asked: list[int] = []

    def make(nbytes: int) -> RunPlan:
        asked.append(nbytes)
        error = NoPlanError("nothing fits in 1 byte of RAM")
        error.needed_bytes = 2**20
        raise error

    assert list(points(Within(make), MOST)) == []
    assert asked == [MOST]


@pytest.mark.slow
def test_flat_part_of_a_curve_takes_no_further_plans() -> None:
    """The curve is flat from 2^18 bytes up, and steep below, where each plan takes all memory."""
    asked: list[int] = []

    def make(nbytes: int) -> Any:
        asked.append(nbytes)
        if nbytes < 2**10:
            error = NoPlanError("nothing fits")
            error.needed_bytes = 2**10
            raise error
        plan = SimpleNamespace(memory=SimpleNamespace(device_bytes=nbytes), voxels_per_second=float(min(nbytes, 2**18)))
        return SimpleNamespace(main=plan)

    found = sorted(point.limit for point in points(Within(make), 2**30))
    assert [limit for limit in found if limit > 2**19] == [2**22, 2**26, 2**30]
    assert [limit for limit in found if limit < 2**18] == [int(2 ** (half / 2)) for half in range(20, 36)]
    assert sorted(set(asked) - set(found)) == [2**6]
