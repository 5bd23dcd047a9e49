"""Test when a processor is calibrated, for how long, and how well plans are predicted afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from tests.support.fake_primitives import FAST, MACHINE, POOL, SLOW
from tests.support.flat_requests import request_of
from znnpy.costs.cost_file import Costs
from znnpy.costs.model import Rates, assumed_rates
from znnpy.costs.store import NO_CALIBRATION, CostStore, read_stored, stored_path
from znnpy.kernels.contract import Primitive, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits, this_machine
from znnpy.measure import calibrate
from znnpy.measure.budget import bytes_of
from znnpy.measure.calibrate import LAYER_SECONDS, Calibration, calibration_tasks
from znnpy.measure.survey import Survey
from znnpy.network import Conv, Network, Pool
from znnpy.network_files import read_network
from znnpy.planner.memory import MARGIN_BYTES
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.run.target import OpenTarget
from znnpy.shapes import Vec3

pytestmark = pytest.mark.slow

NETWORK = Network("three", 1, (Conv((2, 2, 2), 3), Pool((2, 2, 2)), Conv((2, 2, 2), 2)))
LIMITS = Limits(2**34, 2)
FAKES = (SLOW, FAST, POOL)
LARGE, SMALL, LONG_RUN = (60, 60, 60), (20, 20, 20), 1e-3  # outputs, and the seconds between their runs
PREPARING = 0.05  # seconds of allocating and filling the buffers of a layer that is timed


@pytest.fixture(autouse=True)
def _may_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores calibrate for runs of LONG_RUN, each test in a cache folder of its own."""
    monkeypatch.setattr(calibrate, "LONG_RUN", LONG_RUN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(NO_CALIBRATION)


@dataclass
class Clock:
    """A machine on which every layer takes `factor` times what is assumed; time passes as layers run."""

    factor: float
    table: tuple[Primitive, ...] = FAKES
    now: float = 100.0
    load: float = 0.0
    runs: list[tuple[Primitive, LayerShape, Variant]] = field(default_factory=list)
    touched: list[tuple[int, int]] = field(default_factory=list)

    @property
    def truth(self) -> Rates:
        rates = assumed_rates(MACHINE, LIMITS.threads).scaled(1 / self.factor, 1 / self.factor)
        return replace(rates, first_touch=2.0**32)

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        self.runs.append((primitive, shape, variant))
        took = self.truth.seconds(primitive, shape, variant)
        self.now += PREPARING + 5 * took
        return took

    @contextmanager
    def on(self, target: OpenTarget, threads: int) -> Iterator[Clock]:
        assert (target.machine, threads) == (MACHINE, LIMITS.threads)
        yield self

    def touch(self, threads: int, nbytes: int) -> float:
        self.touched.append((threads, nbytes))
        self.now += nbytes / 2**30
        return 2.0**32

    @property
    def calibration(self) -> Calibration:
        return Calibration(self.on, self.touch, lambda: self.now, lambda: self.load, CostModel(table=self.table))

    def plan(self, store: CostStore, output: Vec3 = LARGE, **words: Any) -> RunPlan:
        return self.calibration.best_plan(target_with(store), replace(asked(output), **words))


def target_with(store: CostStore) -> OpenTarget:
    return OpenTarget(machine=MACHINE, costs=store)


def store_of(**words: Any) -> CostStore:
    return CostStore(table=FAKES, **{"calibrate": True, **words})


def asked(output: Vec3 = LARGE) -> PlanRequest:
    return request_of(NETWORK, output, MACHINE, LIMITS, baseline=0)


def stored() -> Costs:
    found = read_stored(MACHINE, "cpu", LIMITS.threads, FAKES, calibrated=True)
    assert found is not None
    return found


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.3, 8.0])
def test_the_first_plan_predicts_a_machine_of_any_speed(factor: float) -> None:
    clock, store = Clock(factor), store_of()
    made = clock.plan(store)
    truly = make_plan(asked(), CostModel({"cpu": clock.truth}, FAKES))
    assert made.seconds == pytest.approx(truly.seconds, rel=0.1)
    assert made.fitted
    assert clock.now - 100.0 < 5, "seconds"
    (sentence,) = store.sentences
    assert sentence.startswith("calibrated fake for ")
    assert f"with {len(clock.runs)} short runs" in sentence
    assert "calibrate=False" in sentence
    costs = stored()
    assert costs.calibrated
    assert set(costs.units) == {"product", "pool"}
    assert costs.first_touch == 2**32
    assert clock.touched == [(LIMITS.threads, calibrate.TOUCHED_BYTES)]


def test_a_very_slow_machine_is_not_measured_for_longer() -> None:
    clock = Clock(100.0)
    clock.plan(store_of())
    assert clock.now - 100.0 < 5, "seconds"
    assert clock.runs


def test_the_next_plan_takes_what_was_kept() -> None:
    first, second, store = Clock(3.0), Clock(3.0), store_of()
    made = first.plan(store_of())
    assert second.plan(store) == made
    assert second.plan(store, SMALL).fitted
    assert (second.runs, store.sentences) == ([], [])


def test_layers_that_were_kept_alone_do_not_replace_a_calibration() -> None:
    store_of().keep(replace(Costs.empty(MACHINE, "cpu", LIMITS.threads, FAKES), first_touch=1e9))
    clock = Clock(3.0)
    clock.plan(store_of())
    assert clock.runs


def test_costs_that_cannot_be_kept_serve_the_plan_they_were_measured_for(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    clock, store = Clock(3.0), store_of()
    assert clock.plan(store).fitted
    assert [sentence[:9] for sentence in store.sentences] == ["what was ", "calibrate"]


def not_allowed() -> CostStore:
    return store_of(calibrate=False)


def measured_before() -> CostStore:
    units = Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES)
    store_of().keep(units.costs(units.assumed, {"product": 3}, []))
    return store_of()


def with_a_cost_file(*, word: str) -> CostStore:
    measured_before()
    return store_of(**{word: stored_path(MACHINE, "cpu", LIMITS.threads)})


@pytest.mark.parametrize(
    "store",
    [not_allowed, measured_before, partial(with_a_cost_file, word="file"), partial(with_a_cost_file, word="machine")],
    ids=["not allowed", "measured before", "cost file", "another machine"],
)
def test_nothing_is_measured_if(store: Callable[[], CostStore]) -> None:
    clock = Clock(3.0)
    clock.plan(store())
    assert (clock.runs, clock.touched) == ([], [])


def test_nothing_is_measured_for_a_short_run() -> None:
    clock, store = Clock(3.0), store_of()
    made = clock.plan(store, SMALL)
    assert made.seconds < LONG_RUN
    assert made == make_plan(asked(SMALL), CostModel({}, FAKES))
    assert (clock.runs, store.sentences) == ([], [])
    assert not stored_path(MACHINE, "cpu", LIMITS.threads, calibrated=True).exists()
    assert clock.plan(store, SMALL, kinds=True).alternatives, "the plan is as it was asked for"


@pytest.mark.parametrize(("grown", "counted"), [(-(2**20), 0), (MARGIN_BYTES, 0), (MARGIN_BYTES + 2**22, 2**22)])
def test_memory_that_calibrating_leaves_behind_is_counted_beyond_the_margin(
    monkeypatch: pytest.MonkeyPatch, grown: int, counted: int
) -> None:
    process = iter([2**30, 2**30 + grown])
    monkeypatch.setattr(calibrate, "process_bytes", lambda: next(process))
    assert Clock(3.0).plan(store_of(), baseline=2**25).memory.baseline == 2**25 + counted


def test_calibration_on_a_busy_machine_serves_its_own_process_only() -> None:
    clock, store = Clock(3.0, load=2 + MACHINE.cores / 2), store_of()
    assert clock.plan(store).fitted
    assert f"(load {clock.load:.1f}), so that it is not kept" in store.sentences[0]
    runs = len(clock.runs)
    assert clock.plan(store).fitted
    assert len(clock.runs) == runs
    clock.plan(store_of())
    assert len(clock.runs) == 2 * runs


def test_calibration_never_replaces_measured_costs_of_other_libraries() -> None:
    machine = replace(MACHINE, versions=(("numpy", "1.9"),))
    survey = Survey(machine, "cpu", LIMITS, 2**34, FAKES)
    store_of().keep(survey.costs(survey.assumed, {"product": 500}, []))
    before = stored_path(MACHINE, "cpu", LIMITS.threads).read_text()
    clock, store = Clock(3.0), store_of()
    assert clock.plan(store).fitted
    assert "stored costs of the CPU are not used" in store.sentences[0]
    assert stored_path(MACHINE, "cpu", LIMITS.threads).read_text() == before


def test_measured_layers_are_used_with_calibrated_units() -> None:
    clock = Clock(3.0)
    clock.plan(store_of())
    empty = Costs.empty(MACHINE, "cpu", LIMITS.threads, FAKES)
    store_of().keep(replace(empty, first_touch=1e9))
    joined = store_of().stored(MACHINE, "cpu", LIMITS.threads)
    assert joined is not None
    assert (set(joined.units), joined.first_touch) == ({"product", "pool"}, 1e9)


def test_nothing_is_measured_where_little_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(3.0)
    monkeypatch.setattr(OpenTarget, "free_bytes_within", lambda self, limits: calibrate.LEAST_BYTES - 1)
    assert not clock.plan(store_of()).fitted
    assert (clock.runs, clock.touched) == ([], [])


def test_layers_of_very_many_weights_are_left_out() -> None:
    limits = Limits(2**33, 2)
    network = Network("wide", 1, (Conv((1, 1, 1), 512), Conv((5, 5, 5), 512), Conv((1, 1, 1), 2)))
    made = make_plan(request_of(network, (90, 90, 90), MACHINE, limits, baseline=0), CostModel())
    shapes = [task.shape for task in calibration_tasks(made, Survey(MACHINE, "cpu", limits, 2**32))]
    weights = [shape.weight_bytes for shape in shapes if shape.kind == "conv"]
    assert max(weights) <= calibrate.MOST_WEIGHT_BYTES < 4 * 512 * 512 * 125


@pytest.mark.parametrize("name", ["fib25_boundary", "n337"])
def test_layers_of_the_plan_are_timed_at_small_sizes_first(name: str) -> None:
    network = read_network(name).network
    limits = Limits(2**31, 2)
    survey = Survey(MACHINE, "cpu", limits, 2**30)
    made = make_plan(request_of(network, (500, 500, 500), MACHINE, limits, baseline=0), CostModel())
    tasks = calibration_tasks(made, survey)
    assert len({task.case for task in tasks}) == len(tasks)
    layers = {(choice.primitive, kind_of(choice.shape)) for choice in made.choices}
    assert {(task.primitive.name, kind_of(task.shape)) for task in tasks[: len(layers)]} == layers
    assert (tasks[-1].primitive.name, kind_of(tasks[-1].shape)) in layers
    assert tasks[-1].expected > LAYER_SECONDS[1], "the largest come last"
    assert max(task.expected for task in tasks[: len(layers)]) <= LAYER_SECONDS[0]
    assert max(task.expected for task in tasks) <= LAYER_SECONDS[-1]
    assert sum(task.expected for task in tasks) < 1.0, "seconds, without repeats"
    assert {task.primitive.name for task in tasks} >= {"cpu.conv.direct", "cpu.conv.fft_lanes", "cpu.conv.direct_lanes"}


def test_layers_that_need_too_much_memory_are_left_out() -> None:
    limits = Limits(2**31, 2)
    network = read_network("n337").network
    made = make_plan(request_of(network, (500, 500, 500), MACHINE, limits, baseline=0), CostModel())
    room = 2**23
    roomy, tight = (calibration_tasks(made, Survey(MACHINE, "cpu", limits, some)) for some in (2**30, room))
    assert 0 < len(tight) < len(roomy)
    assert all(bytes_of(*task.case, limits.threads) <= room for task in tight)


def kind_of(shape: LayerShape) -> tuple[object, ...]:
    """Return what does not change when a layer becomes smaller."""
    return shape.kind, shape.in_shape[4], shape.out_shape[4], getattr(shape, "k", None), getattr(shape, "pool", None)


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """Return the first plans for which this machine was calibrated, in no time and whatever the run takes."""
    found: list[RunPlan] = []

    def rates(self: Calibration, target: OpenTarget, plan: RunPlan) -> Rates:
        found.append(plan)
        target.costs.sentences.append("it was calibrated")
        return assumed_rates(target.machine, plan.limits.threads)

    monkeypatch.setattr(Calibration, "_calibrated", rates)
    monkeypatch.setattr(calibrate, "LONG_RUN", 0.0)
    return found


def test_plans_runs_and_sessions_calibrate(place: Place, calibrated: list[RunPlan]) -> None:
    network, said = place.folder / "net.yaml", list[str]()
    znnpy.plan(network, shape=(30, 31, 32), device="cpu", tell=said.append)
    assert (len(calibrated), said) == (1, ["it was calibrated"])
    report = znnpy.infer(place.volume, network, out=place.folder / "out.h5", device="cpu")
    assert len(calibrated) == 2
    assert "it was calibrated" in report.warnings
    znnpy.load_network(network)(np.zeros((20, 21, 22), np.uint8), device="cpu")
    assert len(calibrated) == 3


def test_nothing_is_calibrated_where_a_plan_is_given_or_measured_or_it_is_not_wanted(
    place: Place, calibrated: list[RunPlan]
) -> None:
    network, shape = place.folder / "net.yaml", (30, 31, 32)
    made = znnpy.plan(network, shape=shape, device="cpu", calibrate=False)
    znnpy.plan(network, shape=shape, device="cpu", rigor="measure", time_limit=0.1)
    znnpy.infer(place.volume, network, out=place.folder / "a.h5", plan=made)
    znnpy.infer(place.volume, network, out=place.folder / "b.h5", device="cpu", calibrate=False)
    result = place.run("plan", network, "--shape", "30,31,32", "--device", "cpu", "--no-calibrate")
    assert result.exit_code == 0
    assert calibrated == []


@pytest.mark.slow
def test_this_machine_is_calibrated_within_the_memory_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take half a second for it, whatever the run takes, and whatever else the machine does."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibrate, "LONG_RUN", 0.0)
    monkeypatch.setattr(calibrate, "SECONDS", 0.5)
    monkeypatch.setattr(calibrate, "TOUCHED_BYTES", 2**24)
    said: list[str] = []
    words: dict[str, Any] = {"shape": (80, 81, 82), "device": "cpu", "ram": "4G", "threads": 2}
    made = znnpy.plan("fib25_boundary", **words, tell=said.append)
    assert len(said) == 1
    assert said[0].startswith(f"calibrated {this_machine().processor} for ")
    assert made.main.preparing_measured
    costs = read_stored(this_machine(), "cpu", 2, calibrated=True)
    assert costs is not None
    assert costs.calibrated
    assert {"lane_fft", "lane_product", "lane_stream"} & set(costs.units) or "product" in costs.units
    again = znnpy.plan("fib25_boundary", **words, tell=said.append)
    assert len(said) == 1
    assert again.seconds == pytest.approx(made.seconds, rel=0.2), "the process may hold a little more"
