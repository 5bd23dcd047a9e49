"""What is timed before a plan is chosen, by clocks that go as they are told, and what is chosen then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import pytest

from tests.support.fake_primitives import FAST, MACHINE, POOL, SLOW, Fake
from znnpy.errors import DeviceError, NoPlanError
from znnpy.kernels.primitive import Primitive, Variant
from znnpy.machine import Limits
from znnpy.network import Conv, Network, Pool
from znnpy.planner.cost_model import Rates
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.planner.size_trend import SIZES
from znnpy.run.devices import Site
from znnpy.run.learning import Known, Learner
from znnpy.run.rigor import HOPE, Study, rigor_of
from znnpy.run.timing import Progress, Timer, Where, bytes_of
from znnpy.shapes import LayerShape

NETWORK = Network("three", 1, (Conv((2, 2, 2), 3), Pool((2, 2, 2)), Conv((2, 2, 2), 2)))
LIMITS = Limits(2**34, 2)
SITE = Site(MACHINE)
RATES = Rates(stage_seconds=0.0)
THIRD = Fake("cpu.conv.third", "conv", flops=4.5)  # FAST's best variant takes 2.5
TABLE = (SLOW, FAST, THIRD, POOL)


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
    def on(self, site: Site, where: Where, seconds: float) -> Iterator[Clock]:
        assert (site, where) == (SITE, Where("cpu", LIMITS.threads))
        assert seconds > 0
        yield self

    def study(self, rigor: Any, seconds: float = inf, told: list[Progress] | None = None) -> Study:
        tell = (lambda progress: None) if told is None else told.append
        return Study(rigor, seconds, tell, clock=self.on, now=lambda: self.now, table=TABLE)


KNOWN: Known = {"cpu": RATES}


def made(known: Known) -> Plan:
    return make_plan(NETWORK, (40, 40, 40), MACHINE, LIMITS, table=TABLE, rates=known["cpu"], baseline=0)


def primitives(plan: Plan) -> set[str]:
    return {choice.primitive for choice in plan.choices}


def test_what_is_slower_than_its_estimate_makes_way_for_the_next_best() -> None:
    told: list[Progress] = []
    clock = Clock({FAST.name: 5.0, THIRD.name: 1.2})
    assert primitives(made(KNOWN)) == {FAST.name, POOL.name}
    study = clock.study("measure", told=told)
    rates = study.rates(SITE, LIMITS, KNOWN, made)
    assert primitives(made(rates)) == primitives(made({"cpu": clock.truth})) == {THIRD.name, POOL.name}
    assert made(rates).seconds == pytest.approx(made({"cpu": clock.truth}).seconds, rel=0.02)
    assert all(choice.measured for choice in made(rates).choices)
    assert len(clock.runs) == len(set(clock.runs)), "each shape is timed once"
    assert {name for name, _, _ in clock.runs} == {FAST.name, THIRD.name, POOL.name}, "SLOW cannot be the best"
    assert (study.done, study.sentences) == ("measure", [])
    assert study.found == rates
    assert told[0].total > 0
    assert told[0].doing.startswith("cpu.")


def test_exhaustive_finds_what_is_faster_than_its_estimate() -> None:
    clock = Clock({THIRD.name: 0.51})
    rates = clock.study("measure").rates(SITE, LIMITS, KNOWN, made)
    assert primitives(made(rates)) == {FAST.name, POOL.name}
    study = clock.study("exhaustive")
    rates = study.rates(SITE, LIMITS, KNOWN, made)
    assert study.done == "exhaustive"
    assert rates["cpu"].optimism == 1
    assert primitives(made(rates)) == primitives(made({"cpu": clock.truth})) == {THIRD.name, POOL.name}
    assert SLOW.name not in {name for name, _, _ in clock.runs}, f"it takes more than {1 / HOPE} times the best"


def test_nothing_is_timed_for_an_estimate() -> None:
    clock = Clock({})
    study = clock.study("estimate")
    assert study.rates(SITE, LIMITS, KNOWN, made) is KNOWN
    assert (study.done, clock.runs, study.found) == ("estimate", [], {})


@pytest.mark.parametrize("rigor", ["measure", "exhaustive"])
def test_when_the_time_is_up_the_best_so_far_is_kept_and_that_is_said(rigor: str) -> None:
    whole = Clock({FAST.name: 5.0})
    whole.study(rigor).rates(SITE, LIMITS, KNOWN, made)
    clock = Clock({FAST.name: 5.0})
    limit = 0.3 * (whole.now - 100.0)
    study = clock.study(rigor, limit)
    rates = study.rates(SITE, LIMITS, KNOWN, made)
    assert 0 < len(clock.runs) < len(whole.runs)
    assert study.done == "measure"
    (sentence,) = study.sentences
    assert sentence.startswith(f"the time limit of {limit:,.3g} s was up after {len(clock.runs)} layers were measured")
    assert sentence.endswith("give more `time_limit`")
    assert made(rates).seconds > 0


@pytest.mark.parametrize("rigor", ["measure", "exhaustive"])
def test_who_makes_plans_sooner_is_asked_first(rigor: str) -> None:
    """And may find none; the first plan of each costs none of the time."""
    clock, asked = Clock({FAST.name: 5.0}), list[str]()

    def sooner(known: Known) -> Plan:
        asked.append("sooner")
        clock.now += 0.0 if clock.runs else 1000.0
        return made(known)

    def none(known: Known) -> Plan:
        asked.append("none")
        raise NoPlanError("not so")

    def whole(known: Known) -> Plan:
        asked.append("whole")
        clock.now += 1000.0
        return made(known)

    found = clock.study(rigor, 999.0)
    rates = found.rates(SITE, LIMITS, KNOWN, none, sooner, whole)
    turns = 1 if rigor == "measure" else 2
    assert asked.count("whole") == asked.count("none") == turns
    assert asked.index("none") < asked.index("sooner") < asked.index("whole")
    assert (found.done, found.sentences) == (rigor, [])
    assert primitives(made(rates)) == {THIRD.name, POOL.name}
    with pytest.raises(NoPlanError, match="not so"):
        clock.study(rigor).rates(SITE, LIMITS, KNOWN, made, none)


def test_a_layer_that_does_not_fit_the_time_leaves_it_undone() -> None:
    """Whatever else was timed."""
    expected = max(c.seconds for c in made(KNOWN).choices)
    clock = Clock({})
    study = clock.study("measure", 4 * expected)
    study.rates(SITE, LIMITS, KNOWN, made)
    assert len(clock.runs) > 0
    assert len(study.sentences) == 1


def test_what_is_refused_is_remembered_with_its_words_and_not_chosen() -> None:
    clock = Clock({}, refuses=FAST.name)
    rates = clock.study("measure").rates(SITE, LIMITS, KNOWN, made)
    assert set(rates["cpu"].refused.values()) == {"cuDNN has no plan"}
    assert primitives(made(rates)) == {THIRD.name, POOL.name}
    assert len(clock.runs) == len(set(clock.runs))


def test_long_and_large_layers_run_on_fewer_images() -> None:
    """Their fragments are of one size: a layer on all takes as many times as long."""
    plan = made(KNOWN)
    last = plan.choices[-1]
    assert last.shape.batch == 8
    primitive = next(p for p in TABLE if p.name == last.primitive)
    one = bytes_of(primitive, replace(last.shape, batch=1), last.variant, 2)
    for factor, room, most in ((1.0, 2**34, 8), (1e9, 2**34, 1), (1.0, 3 * one, 2), (1.0, one - 1, 0)):
        clock = Clock({})
        slow = RATES.scaled(1 / factor, 1 / factor)
        timer = Timer(inf, lambda progress: None, lambda: 0.0)
        learner = Learner({"cpu": slow}, timer, partial(clock.on, SITE), LIMITS.threads, {"cpu": room}, TABLE)
        learner.learn(lambda known: plan)
        batches = [shape.batch for name, shape, _ in clock.runs if name == last.primitive and shape.in_shape[4] == 3]
        assert batches == [most] * (most > 0)
        assert ((primitive, last.shape, last.variant) in learner.too_large.get("cpu", ())) == (most == 0)


@pytest.mark.parametrize("rigor", ["measure", "exhaustive"])
def test_layers_for_which_there_is_no_room_are_told(rigor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "room", lambda *_: 1000)
    found = Clock({}).study(rigor)
    rates = found.rates(SITE, LIMITS, KNOWN, made)
    assert rates["cpu"].measured == {}
    assert found.done == "measure"
    (sentence,) = found.sentences
    assert sentence == (
        "layers that one image of needs more than the 1000 B of RAM that are free for them, 3 in all, were not "
        "measured and count as estimated"
    )


def test_words_that_there_are_not() -> None:
    assert rigor_of("estimate", None) == ("estimate", inf)
    assert rigor_of("measure", None) == ("measure", 60.0)
    assert rigor_of("measure", 5.0) == ("measure", 5.0)
    assert rigor_of("exhaustive", None) == ("exhaustive", inf)
    with pytest.raises(ValueError, match="there is no rigor 'patient'; choose one of estimate, measure, exhaustive"):
        rigor_of("patient", None)
    with pytest.raises(ValueError, match="a time limit is for layers that are measured"):
        rigor_of("estimate", 5.0)
    for seconds in (0.0, -1.0, inf, float("nan")):
        with pytest.raises(ValueError, match="a time limit is a positive number of seconds"):
            rigor_of("measure", seconds)
