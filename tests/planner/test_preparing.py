"""Preparing memory takes time: plans count it, and of those that are about as fast the leanest is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from tests.support.brute_force import SMALL, Known, everything, planned, planned_on_gpu
from tests.support.fake_plans import changed
from tests.support.fake_primitives import BOTH, CARRYING, FAST, FILTER, MACHINE, POOL, SLOW, Fake, on_gpu
from tests.support.flat_requests import make_plan
from znnpy.costs.model import CPU_FIRST_TOUCH, assumed_rates
from znnpy.machine import Limits
from znnpy.network import Network
from znnpy.network_files import read_network
from znnpy.planner.pareto import LayerOption, fastest_within, total_seconds
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.search import ALIKE
from znnpy.report.plan_text import explain

TABLE: tuple[Fake, ...] = (SLOW, replace(FAST, scale=(1, 4)), BOTH, POOL, FILTER)  # none has an allowance
MakeNetwork = Callable[..., Network]
GIB = 2**30


def prepared(plan: RunPlan) -> int:
    """Bytes that are written to before the first step."""
    return plan.main.memory.last.arena + plan.main.memory.last.carries + plan.main.memory.last.weights


@pytest.mark.slow
@pytest.mark.parametrize("touching", [1e9, 1e11])
def test_no_plan_is_faster_by_more_than_the_tolerance(tiny_network: MakeNetwork, touching: float) -> None:
    network = tiny_network()
    every = everything(network, SMALL, TABLE)

    def whole_seconds(known: Known) -> float:
        return known.seconds + (known.peak - known.around) / touching

    rates = replace(CARRYING, first_touch=touching)
    fastest = min(every, key=lambda known: (whole_seconds(known), known.peak))
    plan = planned(network, SMALL, 2**40, table=TABLE, rates=rates)
    assert plan.main.preparing_seconds == pytest.approx(prepared(plan) / touching)
    assert plan.seconds == pytest.approx(
        plan.main.preparing_seconds + sum(c.executions * c.seconds for c in plan.choices)
    )
    assert whole_seconds(fastest) * (1 - 1e-9) <= plan.seconds <= ALIKE * whole_seconds(fastest) * (1 + 1e-9)
    assert plan.memory.peak <= fastest.peak
    free = planned(network, SMALL, 2**40, table=TABLE)
    assert free.main.preparing_seconds == 0.0
    assert plan.memory.peak <= free.memory.peak


@pytest.mark.slow
def test_costlier_preparing_gives_leaner_plans(tiny_network: MakeNetwork) -> None:
    """Leaner plans run their layers more slowly."""
    network = tiny_network()
    plans = [
        planned(network, (40, 40, 40), 2**40, table=TABLE, rates=replace(CARRYING, first_touch=touching))
        for touching in (1e9, 1e11, 1e13)
    ]
    assert prepared(plans[0]) < prepared(plans[1]) < prepared(plans[2])
    computing = [plan.seconds - plan.main.preparing_seconds for plan in plans]
    assert computing[0] > computing[1] > computing[2]


def test_preparing_on_a_gpu_costs_nothing(tiny_network: MakeNetwork) -> None:
    network, rates = tiny_network(), replace(CARRYING, first_touch=1e9)
    words = {"table": on_gpu(*TABLE)}
    plan = planned_on_gpu(network, SMALL, 2**40, 2**40, rates=rates, **words)
    assert plan == planned_on_gpu(network, SMALL, 2**40, 2**40, **words)
    assert plan.main.preparing_seconds == 0.0


def test_assumed_rates_have_a_price_for_memory() -> None:
    assert assumed_rates(MACHINE, 2).first_touch == CPU_FIRST_TOUCH
    assert assumed_rates(MACHINE, 8).first_touch == CPU_FIRST_TOUCH, "the host of a virtual machine is not asked faster"


@pytest.mark.slow
def test_small_volume_takes_little_memory() -> None:
    """The whole output of 224^3 in one patch would be 25 % faster to compute, and 4.5 GiB take over 4 s to prepare."""
    network = read_network("fib25_boundary").network
    plan = make_plan(network, (224, 224, 224), MACHINE, Limits(8 * GIB, 2), baseline=2**27)
    assert plan.memory.peak < GIB
    assert plan.seconds < 2.5
    other = make_plan(network, (224, 224, 224), MACHINE, Limits(8 * GIB, 2), baseline=2**27, patch=(224, 224, 224))
    assert other.seconds > ALIKE * plan.seconds


@pytest.mark.slow
def test_plan_stores_and_prints_its_preparing_seconds(tiny_network: MakeNetwork) -> None:
    plan = planned(tiny_network(), (40, 40, 40), 2**40, table=TABLE, rates=replace(CARRYING, first_touch=1e9))
    assert RunPlan.from_json(plan.to_json()) == plan
    assert "of memory, at an assumed rate" in explain(plan)
    rates = replace(CARRYING, first_touch=1e9, first_touch_measured=True)
    measured = planned(tiny_network(), (40, 40, 40), 2**40, table=TABLE, rates=rates)
    assert measured == changed(plan, preparing_measured=True)
    assert "of memory, at a measured rate" in explain(measured)
    assert plan.voxels_per_second == pytest.approx(40**3 / plan.seconds)


def test_arena_bytes_are_paid_once_and_weights_for_each_layer() -> None:
    """There are two layers with two options each: prices decide between seconds and bytes."""

    def option(seconds: float, resident: int, live: int) -> LayerOption:
        return LayerOption((), seconds, resident, live, 0)

    fronts = [(option(1.0, 0, 100), option(3.0, 0, 10)), (option(1.0, 50, 100), option(2.0, 0, 10))]
    fast = (fronts[0][0], fronts[1][0])
    assert fastest_within(fronts, 10**6) == fast
    assert fastest_within(fronts, 10**6, inf, 0.01) == fast, "2 + 1 + 0.5 s"
    assert fastest_within(fronts, 10**6, inf, 0.021) == (fronts[0][0], fronts[1][1]), "3 + 2.1 s; the others 0.05 more"
    assert fastest_within(fronts, 10**6, inf, 0.1) == (fronts[0][1], fronts[1][1]), "5 + 1 s"
    assert fastest_within(fronts, 10**6, 5.9, 0.1) is None
    chosen = fastest_within(fronts, 60, inf, 0.01)
    assert chosen is not None
    assert total_seconds(chosen) == 5.0
