"""Measurements of a machine and their order, by clocks that show whatever a test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.support.fake_primitives import FAST, GPU, MACHINE, POOL, SLOW, WITH_GPU
from tests.support.flat_requests import request_of
from tests.support.simulated_timing import time_all
from znnpy.costs.model import UNPROVEN_UNITS, Rates
from znnpy.costs.samples import samples
from znnpy.costs.size_trend import SIZES
from znnpy.errors import DeviceError, DeviceLostError, NoPlanError, VramError
from znnpy.kernels.contract import Primitive, Variant, device_of
from znnpy.kernels.table import TABLE, find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits, Machine
from znnpy.measure import layer_timer
from znnpy.measure.budget import FreeBytes, LayerTask, Progress, TimeBudget
from znnpy.measure.layer_timer import CLOCK_SECONDS, MOST_TOUCHING, TOUCHED_PART, CpuTimer, touching_rate
from znnpy.measure.refine import Refiner
from znnpy.measure.survey import FAR, SHORT_SECONDS, Survey, sample_tasks
from znnpy.network import Conv, Network, Pool
from znnpy.option_values import COVERS, Cover, DeviceKind
from znnpy.planner.modes import make_plan
from znnpy.planner.request import Constraints, CostModel
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import GPU_PRECISIONS, ConvShape

LIMITS = Limits(2**34, 2, 2**34)
FAKES = (SLOW, FAST, POOL)
NETWORK = Network("three", 1, (Conv((2, 2, 2), 3), Pool((2, 2, 2)), Conv((2, 2, 2), 2)))


@dataclass
class Clock:
    """Layers take `factor` times what rates say, and so does the wall's clock."""

    factor: float = 3.0
    machine: Machine = MACHINE
    refuses: str = ""
    now: float = 100.0
    runs: list[tuple[str, LayerShape, Variant]] = field(default_factory=list)
    refused: list[tuple[str, LayerShape, Variant]] = field(default_factory=list)
    error: type[Exception] = DeviceError

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        if primitive.name == self.refuses:
            self.refused.append((primitive.name, shape, variant))
            raise self.error("no")
        self.runs.append((primitive.name, shape, variant))
        took = self.factor * Rates().seconds(primitive, shape, variant)
        self.now += 4 * took
        return took


def timer(clock: Clock, seconds: float = 1e9, tell: Callable[[Progress], None] = lambda progress: None) -> TimeBudget:
    return TimeBudget(seconds, tell, now=lambda: clock.now)


def tasks(device: DeviceKind = "cpu", table: Sequence[Primitive] = TABLE, room: int = 2**34) -> list[LayerTask]:
    machine = MACHINE if device == "cpu" else WITH_GPU
    precisions = GPU_PRECISIONS if device == "gpu" else GPU_PRECISIONS[:1]
    return sample_tasks(machine, device, precisions, LIMITS, room, table)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_unit_that_a_primitive_names_is_measured(device: DeviceKind) -> None:
    """But for kernels whose results no card has shown."""
    machine = MACHINE if device == "cpu" else replace(WITH_GPU, gpu=replace(GPU, capability=(9, 0)))
    named = {
        work.unit
        for precision in (GPU_PRECISIONS if device == "gpu" else GPU_PRECISIONS[:1])
        for shape in samples(device, precision)
        for primitive in TABLE
        if device_of(primitive.name) == device and primitive.kind == shape.kind
        if primitive.why_not(shape, machine) is None
        for variant in primitive.variants(shape, machine)
        for work in primitive.work(shape, variant)
    }
    found = tasks(device)
    assert {work.unit for task in found for work in task.primitive.work(task.shape, task.variant)} == (
        named - UNPROVEN_UNITS
    )
    assert {device_of(task.primitive.name) for task in found} == {device}


def test_what_looks_fastest_comes_first_and_large_layers_need_room() -> None:
    found = tasks()
    names = [task.primitive.name for task in found]
    first = names[: len(set(names))]
    assert len(set(first)) == len(first), "each primitive once before any is run again"
    later: dict[LayerShape, list[float]] = {}
    for task in found[len(first) :]:
        later.setdefault(task.shape, []).append(task.expected)
    assert all(of_shape == sorted(of_shape) for of_shape in later.values())
    rest = [task.shape for task in found[len(first) : len(first) + len(later) // 2]]
    assert len(set(rest)) == len(rest), "the best of each sample before the second best of any"
    small = tasks(room=2**22)
    assert 0 < len(small) < len(found)
    assert max(task.shape.in_bytes + task.shape.out_bytes for task in small) <= 2**22


def test_what_looks_slow_runs_only_where_it_is_short() -> None:
    found = tasks()
    for shape in {task.shape for task in found}:
        of_shape = [task for task in found if task.shape == shape]
        least = min(task.expected for task in of_shape)
        assert all(task.expected <= max(FAR * least, SHORT_SECONDS) for task in of_shape)
    slow = [task for task in found if task.primitive.name == "cpu.conv.direct_naive"]
    assert 0 < len(slow) < len([task for task in found if task.primitive.name == "cpu.conv.fft_lanes"]) / 4


def test_two_variants_run_where_there_are_more() -> None:
    found = [task for task in tasks() if task.primitive.name == "cpu.conv.fft_lanes"]
    variants: dict[LayerShape, set[Variant]] = {}
    for task in found:
        variants.setdefault(task.shape, set()).add(task.variant)
    assert sum(len(of_shape) == 2 for of_shape in variants.values()) > len(variants) / 2


def test_rates_are_fitted_to_what_the_clock_says() -> None:
    clock = Clock(factor=3.0)
    bench = Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES)
    told: list[Progress] = []
    rates, runs = bench.survey(tasks(table=FAKES), clock, timer(clock, tell=told.append))
    assert rates.fitted == {"product", "pool"}
    assert set(runs) == {"product", "pool"}
    assert rates.of("product").flops == pytest.approx(bench.assumed.of("product").flops / 3, rel=0.3)
    assert rates.of("fft") == bench.assumed.of("fft")
    assert [progress.done for progress in told] == list(range(len(told)))
    assert told[-1].done == told[-1].total == sum(runs.values())
    assert told[0].seconds_left > told[-1].seconds_left


def test_nothing_is_begun_that_does_not_fit_the_time() -> None:
    found = tasks(table=FAKES)
    clock = Clock(factor=1.0)
    limit = sum(task.expected for task in found) / 2
    done = list(timer(clock, limit).times(found, clock))
    assert 0 < len(done) < len(found)
    assert clock.now - 100.0 <= limit
    with pytest.raises(NoPlanError, match=r"no layer could be measured within .* of memory for it; raise `minutes`"):
        Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES).survey(found, clock, timer(Clock(), 1e-12))


def test_tasks_that_took_longer_than_expected_say_how_long_others_take() -> None:
    found, clock = tasks(), Clock(factor=4.0)
    limit = 2 * sum(task.expected for task in found)
    assert len(list(timer(clock, limit).times(found, clock))) > 1
    assert clock.now - 100.0 <= limit


def test_what_a_device_refuses_is_left_out() -> None:
    clock = Clock(refuses=FAST.name)
    found = list(timer(clock).times(tasks(table=FAKES), clock))
    assert {task.primitive.name for task, spent in found if spent == "no"} == {FAST.name}
    assert {task.primitive.name for task, spent in found if isinstance(spent, float)} == {SLOW.name, POOL.name}


@pytest.mark.parametrize("error", [MemoryError, VramError])
def test_a_layer_that_has_no_room_says_nothing_of_smaller_ones(error: type[Exception]) -> None:
    clock = Clock(refuses=FAST.name, error=error)
    found = list(timer(clock).times(tasks(table=FAKES), clock))
    assert {task.primitive.name for task, spent in found if spent is None} == {FAST.name}
    free: FreeBytes = {"cpu": 2**34}
    refiner = Refiner(
        {"cpu": Rates()}, timer(clock), lambda *_: nullcontext(clock), LIMITS.threads, free, CostModel(table=FAKES)
    )
    time_all(refiner, made(Rates()))
    assert refiner.rates["cpu"].refused == {}


def test_why_nothing_could_be_measured() -> None:
    bench = Survey(MACHINE, "cpu", LIMITS, 2**34, (FAST,))
    found = tasks(table=(FAST,))
    with pytest.raises(DeviceError, match=rf"^none of {len(found)} layers could be measured; the first is .*: no$"):
        bench.survey(found, Clock(refuses=FAST.name), timer(Clock()))


def test_a_gpu_that_a_layer_broke_ends_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        gpu = GPU

        def synchronize(self) -> None:
            raise DeviceError("an illegal address")

    def fails(*_: object) -> float:
        raise DeviceError("no plan")

    monkeypatch.setattr(layer_timer, "measure", fails)
    broken: Any = Broken()
    task = tasks(table=(FAST,))[0]
    with pytest.raises(DeviceLostError, match=f"{GPU.name} runs nothing any more: no plan"):
        list(TimeBudget(1e9, lambda progress: None).times([task], layer_timer.GpuTimer(broken)))


ASKED = request_of(NETWORK, (40, 40, 40), MACHINE, Limits(2**30, 2), baseline=0)


def made(rates: Rates, cover: Cover | None = None, part: int = 1) -> RunPlan:
    within = replace(ASKED, limits=ASKED.limits.part(part), constraints=Constraints(cover=cover))
    return make_plan(within, CostModel({"cpu": rates}, FAKES))


@pytest.mark.slow
def test_the_layers_of_the_best_plans_are_measured_until_all_are_known() -> None:
    clock = Clock()
    bench = Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES)
    layers = bench.deepen(bench.assumed, ASKED, clock, timer(clock))
    rates = bench.assumed
    for layer in layers:
        rates = rates.with_measurement(
            next(p for p in FAKES if p.name == layer.primitive), layer.shape, layer.variant, layer.seconds
        )
    for cover in (None, *COVERS):
        assert all(choice.measured for choice in made(rates, cover).choices)
    assert all(choice.measured for choice in made(rates, part=16).choices)
    assert len(clock.runs) == len(set(clock.runs)) == len(layers)
    assert bench.deepen(rates, ASKED, clock, timer(clock)) == [], "nothing is left to do"


def test_no_plan_is_made_when_the_time_is_up() -> None:
    clock = Clock()
    late = timer(clock, seconds=1.0)
    clock.now += 2.0

    nothing_fits = replace(ASKED, limits=Limits(1, 2))  # a plan for it would be an error
    assert Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES).deepen(Rates(), nothing_fits, clock, late) == []


def test_refused_layers_are_tried_once() -> None:
    clock = Clock(refuses=FAST.name)
    layers = Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES).deepen(Rates(), ASKED, clock, timer(clock))
    assert {layer.primitive for layer in layers} <= {SLOW.name, POOL.name}
    assert len(clock.refused) == len(set(clock.refused)) > 0


@pytest.mark.slow
def test_an_earlier_measurement_is_kept_as_far_as_it_was_not_made_again() -> None:
    bench = Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES)
    clock = Clock()
    layers = bench.deepen(bench.assumed, ASKED, clock, timer(clock))
    before = replace(bench.assumed, by_size={"cpu.conv.fast fp32": (2.0,) * len(SIZES)})
    old = bench.costs(before, {"product": 3, "pool": 1}, layers)
    assert old.by_size == before.by_size
    new = old.with_newer(bench.costs(bench.assumed.scaled(2, 2), {"product": 5}, [replace(layers[0], seconds=9.0)]))
    assert new.units["product"].runs == 5
    assert new.units["product"].flops == 2 * old.units["product"].flops
    assert new.units["pool"] == old.units["pool"]
    assert new.by_size == {}, "factors belong to the rates that they were fitted with"
    assert new.layers == (*layers[1:], replace(layers[0], seconds=9.0))
    assert new.why_not(MACHINE, 2, FAKES) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_new_memory_is_written_to_by_all_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[int, int]] = []

    def touch(block: Any, hands: ThreadPool) -> None:
        touched.append((block.size, hands.threads))
        seconds.append(seconds[-1] + 0.25)

    seconds = [5.0]
    monkeypatch.setattr(layer_timer, "touch", touch)
    assert touching_rate(threads, TOUCHED_PART + 4096, lambda: seconds[-1]) == (TOUCHED_PART + 4096) / 0.5
    assert touched == [(TOUCHED_PART, threads), (4096, threads)]
    touched.clear()
    assert touching_rate(threads, 2**30, lambda: seconds[-1]) == TOUCHED_PART / 0.25
    assert len(touched) == MOST_TOUCHING / 0.25, "slow memory is not waited for"


def test_the_rate_of_new_memory_is_that_of_real_memory() -> None:
    assert 1e6 < touching_rate(2, 2**25) < 1e13


def test_new_memory_is_measured_within_what_is_free_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def rate(threads: int, nbytes: int) -> float:
        asked.append((threads, nbytes))
        return 5e9

    monkeypatch.setattr("znnpy.measure.survey.touching_rate", rate)
    bench = Survey(MACHINE, "cpu", LIMITS, 2**34, FAKES)
    assert bench.touched(None, again=False) == 5e9
    plain = bench.costs(bench.assumed, {"product": 1}, [])
    assert plain.first_touch is None, "what is assumed is not kept as measured"
    old = bench.costs(replace(bench.assumed, first_touch=4e9, first_touch_measured=True), {"product": 1}, [])
    assert old.first_touch == 4e9
    assert bench.touched(old, again=False) == 4e9
    assert bench.touched(old, again=True) == 5e9
    assert replace(bench, free_bytes=2**27).touched(plain, again=False) == 5e9
    assert asked == [(2, 2**29), (2, 2**29), (2, 2**26)]
    assert replace(bench, free_bytes=2**20).touched(old, again=True) == 4e9
    assert replace(bench, free_bytes=2**20).touched(None, again=True) is None
    assert Survey(WITH_GPU, "gpu", LIMITS, 2**34, FAKES).touched(None, again=True) is None
    assert len(asked) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_a_processor_is_timed_warm_long_enough_and_at_its_best(threads: int) -> None:
    ticks: list[float] = []

    def now() -> float:  # every reading is later by less than a clock can tell
        ticks.append((ticks[-1] if ticks else 0.0) + CLOCK_SECONDS / (3 if len(ticks) < 8 else 0.5))
        return ticks[-1]

    shape = ConvShape(2, 2, 3, (6, 7, 5), (2, 3, 1), "relu")
    primitive: Any = find("cpu.conv.direct")
    with ThreadPool(threads) as pool:
        spent = CpuTimer(pool, now).seconds(primitive, shape, primitive.variants(shape, MACHINE)[0])
    assert 0 < spent < CLOCK_SECONDS, "of one run of many"
