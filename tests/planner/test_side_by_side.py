"""Plans with the processor beside GPUs: cells of the GPU's grid, memory for both, and as fast as both are together."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.brute_force import BASELINE
from tests.support.fake_plans import MIXED
from tests.support.fake_primitives import FAST, FILTER, MAXOUT, POOL, RATES, WITH_GPU, on_gpu
from tests.support.flat_requests import costs_of, request_of
from tests.support.simulated_queue import Played
from znnpy.errors import NoPlanError, PlanFileError
from znnpy.machine import Limits
from znnpy.network import Conv, Network
from znnpy.planner import co_execution
from znnpy.planner.alternatives import idle, kind_of
from znnpy.planner.co_execution import (
    SLOWDOWNS,
    cpu_seconds,
    cpu_share,
    expected_seconds,
    gpu_item_seconds,
    gpu_seconds,
    seconds,
)
from znnpy.planner.memory import CONTEXT_BYTES, MIB, context_bytes
from znnpy.planner.multi_gpu import plan_on_devices
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.side_by_side import Processor, _leaving, _next_to, _Trials, _widths, plan_beside
from znnpy.planner.validate import check_cpu_plan, check_runs
from znnpy.report.plan_text import explain
from znnpy.run.balanced_queue import BalancedQueue
from znnpy.run.workers import _shares
from znnpy.shapes import Vec3

TABLE = (*on_gpu(FAST, POOL, FILTER, MAXOUT), FAST, POOL, FILTER, MAXOUT)
HEAVY = RATES.scaled(1e-5, 1e-5)  # so that the edges of a run are nothing beside it
PLENTY = Limits(2**40, 3, 2**40)  # a thread feeds each GPU
LITTLE = Limits(2**40, 3, context_bytes(CONTEXT_BYTES) + MIB)
OUTPUT: Vec3 = (40, 44, 48)
SMALL: Vec3 = (16, 18, 20)


def on(
    times: float, network: Network, output: Vec3, limits: Limits, patch: Vec3 | None = None, columns: bool | None = None
) -> Plan:
    """Return the plan of a GPU that is so many times as fast as the fakes are."""
    request = asked(network, output, limits, columns=columns, patch=patch)
    return plan_on_devices(request, costs_of("gpu", table=TABLE, rates=HEAVY.scaled(times, times)))


def asked(network: Network, output: Vec3, limits: Limits, gpus: int = 1, **words: Any) -> PlanRequest:
    """Return a request for GPUs."""
    return request_of(network, output, WITH_GPU, limits, baseline=BASELINE, device="gpu", devices=gpus, **words)


def costs(processor: float, limits: Limits, gpus: int = 1) -> CostModel:
    """Return rates of a GPU like the fakes, and of a CPU that is so many times as fast."""
    times = processor * limits.threads / limits.without_feed_threads(gpus).threads
    return costs_of("gpu", table=TABLE, rates=HEAVY, host_rates=HEAVY.scaled(times, times))


def processor_of(times: float, network: Network, limits: Limits, **words: Any) -> Processor:
    """Return the plan of a CPU by itself that is so many times as fast as the fakes are."""
    request = asked(network, OUTPUT, limits, **words)
    return Processor.beside(request, costs(times, limits), limits.ram_bytes)


@cache
def beside(
    processor: float,
    network: Network = MIXED,
    output: Vec3 = OUTPUT,
    limits: Limits = PLENTY,
    gpus: int = 1,
    **words: Any,
) -> tuple[Plan, Plan]:
    """Return the plan of GPUs alone, and the one with a CPU that is so many times as fast as one of them."""
    request, model = asked(network, output, limits, gpus, **words), costs(processor, limits, gpus)
    alone = plan_on_devices(request, model)
    return alone, plan_beside(alone, request, model)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("processor", [0.3, 0.7])
@pytest.mark.parametrize("gpus", [1, 2])
def test_both_devices_end_together(columns: bool, processor: float, gpus: int) -> None:
    """The GPU has many steps to take."""
    alone, both = beside(processor, columns=columns, gpus=gpus, limits=LITTLE)
    assert both.mode == "side-by-side"
    assert both.cpu_plan is not None
    assert both.single_device_seconds == alone.seconds
    assert both.devices == gpus
    own = cpu_seconds(both, both.cpu_items)
    assert both.seconds == max(own, gpu_seconds(both, both.cpu_items))
    assert cpu_seconds(both, both.cpu_items + 1) >= gpu_seconds(both, both.cpu_items), "another would end it no sooner"
    gain = alone.seconds / both.seconds - 1
    assert (0.4 * processor / gpus if columns else 0) <= gain <= 1.3 * processor / gpus
    check_runs(both, MIXED, WITH_GPU, table=TABLE)
    assert Plan.from_json(both.to_json()) == both


@pytest.mark.slow
def test_cpu_seconds_sum_the_steps_of_its_items() -> None:
    """Its items lie behind each other and are counted step by step."""
    for columns in (True, False):
        _, both = beside(0.5, columns=columns, limits=LITTLE)
        own = both.cpu_plan
        assert own is not None
        ahead = own.warmup_work(MIXED) if columns else ()
        steps = ceil(own.output[both.axis] / own.patch_out[both.axis])
        assert own.seconds_to_begin == pytest.approx(sum(ahead) * own.seconds_per_step, rel=1e-6)
        assert own.seconds == pytest.approx((sum(ahead) + steps) * own.seconds_per_step, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("wider", [0, 2])
def test_gpu_seconds_count_only_its_columns(wider: int) -> None:
    """Columns of which the CPU computes a part count for the rest."""
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 6, 6), columns=True)
    both = plan_beside(alone, asked(MIXED, OUTPUT, LITTLE, columns=True), costs(0.1, LITTLE))
    assert both.cpu_plan is not None
    z, y, x = (side if i == both.axis else side + wider for i, side in enumerate((8, 18, 18)))  # not even
    both = replace(both, cpu_plan=replace(both.cpu_plan, patch_out=(z, y, x)))
    axis, step, long = both.axis, both.patch_out[both.axis], both.cells.counts[both.axis]
    assert both.patch_out == (4, 6, 6)
    assert long > 1
    assert both.column_planes >= both.output[axis]
    steps, ahead = ceil(both.output[axis] / step), sum(both.warmup_work(MIXED))
    others = [i for i in range(3) if i != axis]
    rows, row = ([ceil(size / both.patch_out[i]) for size in both.cells.sizes(i)] for i in others)
    for count in range(len(both.cells)):
        columns = [np.full(a * b, ahead + steps) for a, b in product(rows, row)]
        for index in range(count):
            stack, depth = divmod(index, long)  # along the axis first
            columns[stack] -= both.cells.patch[axis] // step if depth < long - 1 else columns[stack].copy()
        each = sum(there.sum() for there in columns)
        spent = gpu_seconds(both, count)
        assert spent == pytest.approx(each * both.seconds_per_step, rel=0.02), "the edges of a run are little"
    begins, one = np.array(gpu_item_seconds(both)) / both.seconds_per_step / rows[0] / row[0]
    assert begins == pytest.approx(ahead, rel=0.02)
    assert one == pytest.approx(both.cells.patch[axis] // step)


@pytest.mark.slow
def test_items_hold_whole_steps_of_the_gpu() -> None:
    """No item is for a part of a step, along the axis or across it, except the first across."""
    _, both = beside(0.3)
    assert both.cpu_plan is not None
    assert both.cells.patch[both.axis] % both.patch_out[both.axis] == 0
    assert both.cells.later is not None
    assert not any(cell % step for cell, step in zip(both.cells.later, both.patch_out, strict=True))
    box = both.cells[len(both.cells) - 1].steps[0].write
    for plan in (both, both.cpu_plan):
        written = np.zeros(OUTPUT, int)
        for column in plan.columns_in(box, MIXED):
            for step in column.steps:
                written[step.write.slices] += 1
        assert written[box.slices].min() == written[box.slices].max() == 1
        assert written.sum() == box.voxels


def test_cpu_takes_the_planes_that_fill_no_column_of_the_gpu() -> None:
    """19 columns of 10 cover 188; with the processor's cells of 38 or 48 in front of them no more do."""
    gpu = on(1.0, MIXED, (188, 188, 188), LITTLE, patch=(10, 10, 10), columns=True)
    its = processor_of(1.0, MIXED, LITTLE).plan(SMALL)
    rests = set()
    for width in _widths(gpu, (2, 2, 2), 0.05 * prod(gpu.output)):
        both = replace(gpu, cpu_plan=replace(its, patch_out=width), memory=replace(gpu.memory, cpu_plan=1))
        for axis in {0, 1, 2} - {both.axis}:
            first, *others, last = both.cells.sizes(axis)
            assert first == width[axis]
            assert not any(size % 10 for size in others)
            assert first + sum(others) + last == 188
            rests.add(last % 10)
            if first % 10:
                assert sum(ceil(size / 10) for size in (first, *others, last)) == 19
                assert last % 10 == 0
    assert rests == {0, 8}


@pytest.mark.slow
def test_share_of_the_cpu_is_counted_in_voxels() -> None:
    """Items behind each other along the axis come first, and some are narrower."""
    request = asked(MIXED, OUTPUT, LITTLE, columns=True)
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 6, 6), columns=True)
    cut = set()
    for times in (0.05, 0.1, 0.2, 0.3, 0.4):
        both = plan_beside(alone, request, costs(times, LITTLE))
        assert both.cpu_plan is not None
        z, y, x = (side if i == both.axis else side + 2 for i, side in enumerate((8, 18, 18)))
        both = replace(both, cpu_plan=replace(both.cpu_plan, patch_out=(z, y, x)))
        long = both.cells.counts[both.axis]
        stacks: dict[Vec3, list[int]] = {}
        for cell in both.cells:
            z, y, x = (0 if i == both.axis else at for i, at in enumerate(cell.steps[0].write.lo))
            stacks.setdefault((z, y, x), []).append(cell.voxels)
        assert {len(stack) for stack in stacks.values()} == {long}
        in_order = [voxels for stack in stacks.values() for voxels in stack]
        assert cpu_share(both) == pytest.approx(sum(in_order[: both.cpu_items]) / prod(both.output))
        assert f"which computes {cpu_share(both):.1%}" in explain(both)
        cut.add(both.cpu_items % long > 0)
    assert True in cut, "not whole stacks alone"


def test_widths_are_multiples_of_the_period_of_their_axis() -> None:
    gpu = on(1.0, MIXED, (39, 35, 33), LITTLE, patch=(4, 4, 4), columns=True)
    period = {0: (4, 1, 2), 1: (1, 4, 2), 2: (1, 2, 4)}[gpu.axis]
    widths = _widths(gpu, period, 0.3 * prod(gpu.output))
    across = [i for i in range(3) if i != gpu.axis]
    assert not any(width[i] % period[i] for width in widths for i in across)
    assert not any(width[i] >= gpu.output[i] + 4 for width in widths for i in across)
    assert any((gpu.output[i] - width[i]) % 4 == 0 and width[i] % 4 for width in widths for i in across), "period 1"


def test_planes_left_by_the_cpu_are_whole_steps() -> None:
    """Behind about 30 planes, whole steps of 26 are left; a step is the least."""
    assert _leaving(101, 30, 26, 4) == 52
    assert _leaving(10, 30, 4, 2) == 10
    assert _leaving(3, 1, 4, 2) == 4
    for whole, length, step in product(range(1, 60), range(1, 70, 7), (2, 4, 10)):
        width = _leaving(whole, length, step, 2)
        assert width >= step
        assert width % 2 == 0
        assert whole <= width < max(whole, step) + 2 or -(-(whole - width) // step) * step - (whole - width) < 2


def test_neighbouring_sizes_equal_those_by_hand() -> None:
    gpu = on(1.0, MIXED, (40, 44, 48), LITTLE, patch=(4, 4, 4), columns=True)
    own, (a, b) = gpu.axis, [i for i in range(3) if i != gpu.axis]
    cell = [8, 8, 8]
    cell[a] = gpu.output[a]
    moves = set()
    for near in _next_to(gpu, (cell[0], cell[1], cell[2])):
        (axis,) = (i for i in range(3) if near[i] != cell[i])
        moves.add((axis, near[axis] - cell[axis]))
    assert moves == {(own, -4), (own, 4), (own, 8), (a, -4), (b, -4), (b, 4)}


@pytest.mark.slow
def test_queue_gets_the_seconds_of_each_device() -> None:
    _, both = beside(0.3, columns=True, limits=LITTLE)
    assert both.cpu_plan is not None
    sessions: Any = {"GPU": SimpleNamespace(plan=both), "CPU": SimpleNamespace(plan=both.cpu_plan)}
    queue = _shares(both, sessions, MIXED, frozenset())
    assert isinstance(queue, BalancedQueue)
    gpu, cpu = queue._profiles["GPU"], queue._profiles["CPU"]
    gpu, cpu = queue._profiles["GPU"], queue._profiles["CPU"]
    assert (gpu.begins, gpu.seconds) == gpu_item_seconds(both)
    assert gpu.begins > 0
    assert (cpu.begins, cpu.seconds) == (both.cpu_plan.seconds_to_begin, both.cpu_plan.seconds_per_step)
    assert (gpu.runs, cpu.runs, cpu.walks) == (True, False, True)


@pytest.mark.slow
def test_output_narrower_than_an_item_counts_its_own_size() -> None:
    """The plan is run on a smaller volume than it was made for."""
    _, both = beside(0.5, columns=True, limits=LITTLE)
    z, y, x = (whole if i == both.axis else both.patch_out[i] for i, whole in enumerate(both.output))
    there = both.for_output((z, y, x), MIXED, both.memory)
    assert there.cells.patch != there.patch_out
    sessions: Any = {"GPU": SimpleNamespace(plan=there), "CPU": SimpleNamespace(plan=there.cpu_plan)}
    queue = _shares(there, sessions, MIXED, frozenset())
    assert isinstance(queue, BalancedQueue)
    assert set(queue._wide.values()) == {1.0}
    begins, each = gpu_item_seconds(there)
    assert begins + queue._free() * each == pytest.approx(there.seconds_for(1.0), rel=0.02)


@pytest.mark.slow
def test_slow_cpu_computes_nothing() -> None:
    alone, both = beside(1e-6)
    assert both.cpu_items == 0
    assert both.seconds == pytest.approx(alone.seconds, rel=1e-6)
    assert idle(both).startswith("the GPU is done in ")
    kind = kind_of(MIXED, alone, both, "beside")
    assert kind.reason == idle(both)
    assert kind.ram_bytes == both.memory.peak


@pytest.mark.slow
def test_memory_covers_both_devices() -> None:
    alone, both = beside(0.5, output=SMALL, masks=True)
    assert both.cpu_plan is not None
    assert both.memory.cpu_plan == both.cpu_plan.memory.peak > 0
    assert both.cpu_plan.memory.baseline == 0
    assert both.memory.peak == replace(both.memory, cpu_plan=0).peak + both.memory.cpu_plan
    most = alone.memory.peak + 100
    with pytest.raises(NoPlanError, match=r"and the processor needs at least [\d.]+ MiB; allow at least ram="):
        beside(0.5, output=SMALL, limits=replace(PLENTY, ram_bytes=most), masks=True)


@pytest.mark.slow
def test_columns_are_narrower_if_wide_ones_do_not_fit() -> None:
    """Wide ones hold more than a quarter of the CPU's part."""

    class Narrow(Processor):
        def plan(self, output: Vec3, patch: Vec3 | None = None) -> Plan:
            if patch is not None and max(patch[1:]) > 4:
                error = NoPlanError("too wide")
                error.needed_bytes = 2**40
                raise error
            return Processor.plan(self, output, patch)

    of = processor_of(0.5, MIXED, LITTLE, columns=True)
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 4, 4), columns=True)
    speed = of.plan(OUTPUT).voxels_per_second
    trials = _Trials(alone, alone.seconds, speed, Narrow(of.request, of.costs), MIXED, masks=False)
    trials.run()
    both = trials.best(1)[0]
    assert both.cells.patch[1:] == (4, 4)
    assert both.cpu_items > 0


def trials_beside(processor: float) -> _Trials:
    """Return trials on a volume hardly larger than the field of view, with a CPU of this relative speed."""
    deep = Network("deep", 1, (Conv((17, 3, 3), 2, "relu"), Conv((17, 3, 3), 1, "none")))
    output: Vec3 = (48, 16, 16)
    alone = on(1.0, deep, output, PLENTY, patch=(1, 4, 4), columns=True)
    speed = processor * alone.voxels_per_second
    whole = processor_of(1.0, deep, PLENTY, columns=True).plan(output)
    times = speed / whole.voxels_per_second
    return _Trials(alone, alone.seconds, speed, processor_of(times, deep, PLENTY, columns=True), deep, masks=False)


@pytest.mark.slow
def test_cpu_may_compute_a_single_item() -> None:
    """Four items would take a third longer."""
    trials = trials_beside(1.0)
    trials.run()
    best = min(trials.found.values(), key=expected_seconds)
    assert best.cpu_items == 1
    assert best.seconds == pytest.approx(0.58 * trials.alone, rel=0.02)


@pytest.mark.slow
def test_item_size_suits_a_slower_cpu_than_predicted() -> None:
    """Thicker items would end first, but lose to the GPU alone if the CPU is slow."""
    trials = trials_beside(0.4)
    trials.run()
    best = trials.best(1)[0]
    hoped = min(trials.found.values(), key=seconds)
    assert seconds(hoped, SLOWDOWNS[-1]) > trials.alone
    assert seconds(best, SLOWDOWNS[-1]) < 0.97 * trials.alone
    assert expected_seconds(best) < 0.99 * expected_seconds(hoped)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [(40, 11, 12), (40, 22, 12), (40, 22, 24)])
@pytest.mark.parametrize("processor", [0.2, 0.5, 0.9])
def test_predicted_end_equals_that_of_the_queue(processor: float, cell: Vec3) -> None:
    """The queue is simulated with a CPU that is faster or slower than predicted."""
    _, both = beside(processor, columns=True, limits=LITTLE)
    own = both.cpu_plan
    assert own is not None
    times = prod(cell) / prod(own.patch_out)
    slower = own.with_choices(lambda choice: replace(choice, seconds=times * choice.seconds))
    both = replace(both, cpu_plan=replace(slower, patch_out=cell))
    begins, each = gpu_item_seconds(both)
    ends = []
    for pace in (*SLOWDOWNS, 2.0):
        seen = {"GPU": 1e3 * each, "CPU": 1e3 * times * own.seconds_per_step}  # nobody looks for some seconds
        begin = {"GPU": 1e3 * begins, "CPU": 1e3 * times * own.seconds_to_begin}
        played = Played(both.cells, both.axis, seen | {"CPU": pace * seen["CPU"]}, seen, begin)
        ends.append(max(played.ends().values()) / 1e3)
        assert seconds(both, pace) == pytest.approx(ends[-1], rel=1e-4 if pace == 1 else 0.1)
    assert expected_seconds(both) == pytest.approx(np.mean(ends[:-1]), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("times", [0.5, 2.0])
def test_best_of_all_gpu_plans_is_chosen(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is best alone; another is for parts and takes so many times as long for a step."""
    alone = on(1.0, MIXED, OUTPUT, LITTLE, columns=True)
    part = alone.with_choices(lambda choice: replace(choice, seconds=times * choice.seconds))
    monkeypatch.setattr("znnpy.planner.side_by_side._of_parts", lambda *asked, **words: [part])
    both = plan_beside(alone, asked(MIXED, OUTPUT, LITTLE, columns=True), costs(0.5, LITTLE))
    assert both.choices == (part if times < 1 else alone).choices


@pytest.mark.slow
def test_gpu_gets_the_last_item_from_the_start() -> None:
    """The speed of the CPU makes no difference."""
    _, both = beside(50.0, columns=True, limits=LITTLE)
    assert both.cpu_items == len(both.cells) - 1 > 0


@pytest.mark.parametrize(("pace", "ends"), [(1.0, 10.0), (1.9, 19.0), (2.1, 30.0), (2.9, 30.0)])
def test_gpu_waits_as_long_as_its_own_item_takes(pace: float, ends: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 10 seconds for one of two items."""
    both: Any = SimpleNamespace(cells=range(2))
    monkeypatch.setattr(co_execution, "gpu_seconds", lambda plan, count: 10.0 * (2 - count))
    monkeypatch.setattr(co_execution, "cpu_seconds", lambda plan, count: 10.0 * count)
    monkeypatch.setattr(co_execution, "gpu_item_seconds", lambda plan: (4.0, 6.0))
    assert seconds(both, pace) == ends


@pytest.mark.slow
def test_best_size_beats_its_neighbours() -> None:
    """The search looked at all of them, and one beat those before."""
    processor = processor_of(0.9, MIXED, PLENTY, columns=True)
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 6, 6), columns=True)
    found = []
    for around in (False, True):
        trials = _Trials(alone, alone.seconds, 0.9 * alone.voxels_per_second, processor, MIXED, masks=False)
        with pytest.MonkeyPatch.context() as patched:
            if not around:
                patched.setattr(_Trials, "_look_around", lambda _: None)
            trials.run()
        found.append(min(trials.found.values(), key=expected_seconds))
    assert expected_seconds(found[1]) < expected_seconds(found[0])
    assert set(_next_to(alone, found[1].cells.patch)) <= trials.found.keys()


@pytest.mark.slow
def test_gpu_alone_is_an_alternative_with_a_reason() -> None:
    alone, both = beside(0.5)
    why = kind_of(MIXED, both, alone).reason
    assert re.fullmatch(r"1\.\d+ times as long, without the processor", why)
    text = explain(both)
    assert f"{alone.seconds / both.seconds:.2f} times as fast as without the processor" in text
    assert "all that the processor computes with beside it" in text


@pytest.mark.slow
def test_plan_extends_to_a_larger_volume() -> None:
    """The plan is run on another volume than it was made for."""
    _, both = beside(0.3)
    larger: Vec3 = (80, 44, 48)
    there = both.for_output(larger, MIXED, both.memory)
    assert there.cpu_plan == both.cpu_plan
    assert len(there.cells) == prod(map(ceil, np.array(larger) / both.cells.patch))
    assert there.seconds == pytest.approx(both.seconds * len(there.cells) / len(both.cells), rel=0.3)


@pytest.mark.slow
def test_items_off_the_gpus_grid_are_refused() -> None:
    _, both = beside(0.3)
    assert both.cpu_plan is not None
    z, y, x = both.cpu_plan.patch_out
    for patch in ((z + 1, y, x), (z, both.cpu_plan.patch_out[1] + 1, x)):
        with pytest.raises(PlanFileError, match=r"hold no whole number of its steps of .*, or are narrower"):
            check_cpu_plan(replace(both, patch_out=patch), both.cpu_plan, MIXED, WITH_GPU, TABLE)
    _, both = beside(0.3, columns=True)
    assert both.cpu_plan is not None
    other = replace(both, axis=(both.axis + 1) % 3)
    with pytest.raises(PlanFileError, match="the processor's columns are along axis"):
        check_cpu_plan(other, both.cpu_plan, MIXED, WITH_GPU, TABLE)
