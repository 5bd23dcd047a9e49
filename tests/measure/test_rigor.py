"""Plans are chosen after their layers were timed, here by clocks that show whatever a test sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.fake_primitives import FAST, MACHINE, POOL, SLOW, Fake
from tests.support.flat_requests import request_of
from tests.support.simulated_timing import time_all
from znnpy.costs.model import Rates
from znnpy.costs.size_trend import SIZES
from znnpy.costs.store import CostStore
from znnpy.errors import DeviceError, NoPlanError
from znnpy.kernels.contract import Primitive, Variant
from znnpy.layer_shapes import LayerShape, with_batch
from znnpy.machine import Limits
from znnpy.measure.budget import Placement, Progress, TimeBudget, bytes_of
from znnpy.measure.refine import Refiner
from znnpy.measure.rigor import HOPE, RigorMeasurement, _in_turn, _learnt, rigor_of
from znnpy.network import Conv, Network, Pool
from znnpy.option_values import RigorLevel
from znnpy.options import PlanOptions
from znnpy.planner.modes import make_plan
from znnpy.planner.request import Constraints, CostModel, KnownRates, PlanRequest, Rigor
from znnpy.planner.run_plan import RunPlan
from znnpy.run.target import OpenTarget

NETWORK = Network("three", 1, (Conv((2, 2, 2), 3), Pool((2, 2, 2)), Conv((2, 2, 2), 2)))
LIMITS = Limits(2**34, 2)
RATES = Rates(stage_seconds=0.0)
THIRD = Fake("cpu.conv.third", "conv", flops=4.5)  # FAST's best variant takes 2.5
TABLE = (SLOW, FAST, THIRD, POOL)
SITE = OpenTarget(machine=MACHINE, costs=CostStore(table=TABLE))


@dataclass
class Clock:
    """A machine on which each primitive takes so many times its estimate; so does the wall's clock."""

    factors: dict[str, float]
    refuses: str = ""
    now: float = 100.0
    runs: list[tuple[str, LayerShape, Variant]] = field(default_factory=list)

    @property
    def truth(self) -> Rates:
        return replace(RATES, by_size={f"{name} fp32": (factor,) * len(SIZES) for name, factor in self.factors.items()})

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        self.runs.append((primitive.name, shape, variant))
        if primitive.name == self.refuses:
            raise DeviceError("cuDNN has no plan")
        took = self.truth.seconds(primitive, shape, variant)
        self.now += 4 * took
        return took

    @contextmanager
    def on(self, site: OpenTarget, where: Placement, seconds: float) -> Iterator[Clock]:
        assert (site, where) == (SITE, Placement("cpu", LIMITS.threads))
        assert seconds > 0
        yield self

    def measurement(self, told: list[Progress] | None = None) -> RigorMeasurement:
        tell = (lambda progress: None) if told is None else told.append
        return RigorMeasurement(tell, clock=self.on, now=lambda: self.now, costs=CostModel(table=TABLE))


KNOWN: KnownRates = {"cpu": RATES}


def asked(rigor: RigorLevel, seconds: float = inf) -> PlanRequest:
    request = request_of(NETWORK, (40, 40, 40), MACHINE, LIMITS, baseline=0)
    return replace(request, rigor=Rigor(rigor, seconds))


def made(known: KnownRates) -> RunPlan:
    return make_plan(asked("estimate"), CostModel(known, TABLE))


def primitives(plan: RunPlan) -> set[str]:
    return {choice.primitive for choice in plan.choices}


def test_what_is_slower_than_its_estimate_makes_way_for_the_next_best() -> None:
    told: list[Progress] = []
    clock = Clock({FAST.name: 5.0, THIRD.name: 1.2})
    assert primitives(made(KNOWN)) == {FAST.name, POOL.name}
    measurement = clock.measurement(told=told)
    rates = measurement.rates(SITE, asked("measure"), KNOWN)
    assert primitives(made(rates)) == primitives(made({"cpu": clock.truth})) == {THIRD.name, POOL.name}
    assert made(rates).seconds == pytest.approx(made({"cpu": clock.truth}).seconds, rel=0.02)
    assert all(choice.measured for choice in made(rates).choices)
    assert len(clock.runs) == len(set(clock.runs)), "each shape is timed once"
    assert {name for name, _, _ in clock.runs} == {FAST.name, THIRD.name, POOL.name}, "SLOW cannot be the best"
    assert (measurement.done, measurement.sentences) == ("measure", [])
    assert measurement.found == rates
    assert told[0].total > 0
    assert told[0].doing.startswith("cpu.")


def test_exhaustive_finds_what_is_faster_than_its_estimate() -> None:
    clock = Clock({THIRD.name: 0.51})
    rates = clock.measurement().rates(SITE, asked("measure"), KNOWN)
    assert primitives(made(rates)) == {FAST.name, POOL.name}
    measurement = clock.measurement()
    rates = measurement.rates(SITE, asked("exhaustive"), KNOWN)
    assert measurement.done == "exhaustive"
    assert rates["cpu"].optimism == 1
    assert primitives(made(rates)) == primitives(made({"cpu": clock.truth})) == {THIRD.name, POOL.name}
    assert SLOW.name not in {name for name, _, _ in clock.runs}, f"it takes more than {1 / HOPE} times the best"


@pytest.mark.slow
@pytest.mark.parametrize("rigor", ["measure", "exhaustive"])
def test_layers_that_were_timed_are_kept_and_not_timed_again(
    rigor: RigorLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = Clock({FAST.name: 5.0, THIRD.name: 0.8}), Clock({FAST.name: 5.0, THIRD.name: 0.8})
    learnt = first.measurement().rates(SITE, asked(rigor), {})
    assert first.runs
    costs = CostStore(table=TABLE).of(MACHINE, "cpu", LIMITS.threads)
    assert costs is not None
    again = second.measurement().rates(SITE, asked(rigor), {"cpu": costs.rates(TABLE)})
    assert second.runs == []
    assert made(again) == made(learnt)


@pytest.mark.slow
def test_refusals_are_kept_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Clock({}, refuses=FAST.name).measurement().rates(SITE, asked("measure"), {})
    costs = CostStore(table=TABLE).of(MACHINE, "cpu", LIMITS.threads)
    assert costs is not None
    second = Clock({}, refuses=FAST.name)
    assert FAST.name not in primitives(
        made(second.measurement().rates(SITE, asked("measure"), {"cpu": costs.rates(TABLE)}))
    )
    assert second.runs == []


def test_nothing_is_timed_for_an_estimate() -> None:
    clock = Clock({})
    measurement = clock.measurement()
    assert measurement.rates(SITE, asked("estimate"), KNOWN) is KNOWN
    assert (measurement.done, clock.runs, measurement.found) == ("estimate", [], {})


@pytest.mark.parametrize("rigor", ["measure", "exhaustive"])
def test_when_the_time_is_up_the_best_so_far_is_kept_and_that_is_said(rigor: RigorLevel) -> None:
    whole = Clock({FAST.name: 5.0})
    whole.measurement().rates(SITE, asked(rigor), KNOWN)
    clock = Clock({FAST.name: 5.0})
    limit = 0.3 * (whole.now - 100.0)
    measurement = clock.measurement()
    rates = measurement.rates(SITE, asked(rigor, limit), KNOWN)
    assert 0 < len(clock.runs) < len(whole.runs)
    assert measurement.done == "measure"
    (sentence,) = measurement.sentences
    assert sentence.startswith(f"the time limit of {limit:,.3g} s was up after {len(clock.runs)} layers were measured")
    assert sentence.endswith("give more `time_limit`")
    assert made(rates).seconds > 0


class Noted(Refiner):
    """Notes whose plans it makes: each first plan takes long, and one request has none."""

    asked: ClassVar[list[str]] = []

    def plan(self, request: PlanRequest) -> RunPlan:
        name = {1: "none", 2: "sooner", 4: "whole"}[request.itemsize_in]
        Noted.asked.append(name)
        if name == "none":
            raise NoPlanError("not so")
        return made(self.rates)


def test_requests_are_learnt_in_turn() -> None:
    """One before the last may have no plan; the first plan of each costs none of the time."""
    clock = Clock({FAST.name: 5.0})
    Noted.asked.clear()
    costs = CostModel(table=TABLE)
    timer = TimeBudget(999.0, lambda progress: None, lambda: clock.now + 1000.0 * len(Noted.asked) * (not clock.runs))
    refiner = Noted({"cpu": RATES}, timer, partial(clock.on, SITE), LIMITS.threads, {"cpu": 2**34}, costs)
    none, sooner, whole = (replace(asked("measure"), itemsize_in=count) for count in (1, 2, 4))
    assert _learnt(refiner, [none, sooner, whole])
    assert Noted.asked.count("whole") == Noted.asked.count("none") == 1
    assert Noted.asked.index("none") < Noted.asked.index("sooner") < Noted.asked.index("whole")
    assert primitives(made(refiner.rates)) == {THIRD.name, POOL.name}
    with pytest.raises(NoPlanError, match="not so"):
        _learnt(refiner, [whole, none])


def test_one_device_is_measured_before_several() -> None:
    """Modes that need many plans of one device begin with the plain plan of that device."""
    request = asked("measure")
    assert _in_turn(request) == [request]
    gpu = replace(request, target=replace(request.target, device="gpu", mode="gpu"))
    assert _in_turn(gpu) == [gpu]
    for target in (replace(gpu.target, mode="side-by-side"), replace(gpu.target, devices=2)):
        both = replace(gpu, target=target, constraints=Constraints(only=("gpu.conv.a", "cpu.conv.b")))
        alone, last = _in_turn(both)
        assert last == both
        assert (alone.target.mode, alone.target.devices) == ("gpu", 1)
        assert ("cpu.conv.b" in alone.constraints.only) == (target.mode == "gpu")


def test_a_layer_that_does_not_fit_the_time_leaves_it_undone() -> None:
    """The measurement is not complete then, whatever else was timed."""
    expected = max(c.seconds for c in made(KNOWN).choices)
    clock = Clock({})
    measurement = clock.measurement()
    measurement.rates(SITE, asked("measure", 4 * expected), KNOWN)
    assert len(clock.runs) > 0
    assert len(measurement.sentences) == 1


def test_what_is_refused_is_remembered_with_its_words_and_not_chosen() -> None:
    clock = Clock({}, refuses=FAST.name)
    rates = clock.measurement().rates(SITE, asked("measure"), KNOWN)
    assert set(rates["cpu"].refused.values()) == {"cuDNN has no plan"}
    assert primitives(made(rates)) == {THIRD.name, POOL.name}
    assert len(clock.runs) == len(set(clock.runs))


def test_long_and_large_layers_run_on_fewer_images() -> None:
    """Their fragments are of one size: a layer on all takes as many times as long."""
    plan = made(KNOWN)
    last = plan.choices[-1]
    assert last.shape.batch == 8
    primitive = next(p for p in TABLE if p.name == last.primitive)
    one = bytes_of(primitive, with_batch(last.shape, 1), last.variant, 2)
    for factor, room, most in ((1.0, 2**34, 8), (1e9, 2**34, 1), (1.0, 3 * one, 2), (1.0, one - 1, 0)):
        clock = Clock({})
        slow = RATES.scaled(1 / factor, 1 / factor)
        timer = TimeBudget(inf, lambda progress: None, lambda: 0.0)
        refiner = Refiner(
            {"cpu": slow}, timer, partial(clock.on, SITE), LIMITS.threads, {"cpu": room}, CostModel(table=TABLE)
        )
        time_all(refiner, plan)
        batches = [shape.batch for name, shape, _ in clock.runs if name == last.primitive and shape.in_shape[4] == 3]
        assert batches == [most] * (most > 0)
        assert ((primitive, last.shape, last.variant) in refiner.too_large.get("cpu", ())) == (most == 0)


@pytest.mark.parametrize("rigor", ["measure", "exhaustive"])
def test_layers_for_which_there_is_no_room_are_told(rigor: RigorLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenTarget, "free_bytes_within", lambda *_: 1000)
    found = Clock({}).measurement()
    rates = found.rates(SITE, asked(rigor), KNOWN)
    assert rates["cpu"].measured == {}
    assert found.done == "measure"
    (sentence,) = found.sentences
    assert sentence == (
        "layers that one image of needs more than the 1000 B of RAM that are free for them, 3 in all, were not "
        "measured and count as estimated"
    )


def test_words_that_there_are_not() -> None:
    assert rigor_of("estimate", None) == Rigor("estimate", inf)
    assert rigor_of("measure", None) == Rigor("measure", 60.0)
    assert rigor_of("measure", 5.0) == Rigor("measure", 5.0)
    assert rigor_of("exhaustive", None) == Rigor("exhaustive", inf)
    with pytest.raises(ValueError, match="there is no rigor 'patient'; choose one of estimate, measure, exhaustive"):
        PlanOptions(rigor="patient")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a time limit is for layers that are measured"):
        rigor_of("estimate", 5.0)
    for seconds in (0.0, -1.0, inf, float("nan")):
        with pytest.raises(ValueError, match="a time limit is a positive number of seconds"):
            rigor_of("measure", seconds)
