"""Plans with the CPU and GPUs side by side: cells of the GPU's grid, memory for both, as fast as both are together."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
import pytest

from tests.support.brute_force import BASELINE
from tests.support.fake_plans import MIXED, changed, sharing_of
from tests.support.fake_primitives import FAST, FILTER, MAXOUT, POOL, RATES, WITH_GPU, on_gpu
from tests.support.flat_requests import costs_of, request_of
from tests.support.simulated_queue import Played
from tests.support.tiers import one_in
from znnpy.errors import NoPlanError, PlanFileError
from znnpy.machine import Limits
from znnpy.network import Conv, Network
from znnpy.planner.alternatives import idle, kind_of
from znnpy.planner.co_execution import SLOWDOWNS, CoExecution
from znnpy.planner.memory import CONTEXT_BYTES, MIB, context_bytes
from znnpy.planner.multi_gpu import plan_on_devices
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import PlannedWorker, RunPlan
from znnpy.planner.side_by_side import CpuPlanner, _leaving, _next_to, _Trials, _widths, plan_side_by_side
from znnpy.planner.validate import _check_sharing, check_runs
from znnpy.report.plan_text import explain
from znnpy.run.balanced_queue import BalancedQueue
from znnpy.run.workers import queue_of
from znnpy.shapes import Vec3

TABLE = (*on_gpu(FAST, POOL, FILTER, MAXOUT), FAST, POOL, FILTER, MAXOUT)
HEAVY = RATES.scaled(1e-5, 1e-5)  # so that the edges of a run are nothing compared to it
PLENTY = Limits(2**40, 3, 2**40)  # a thread feeds each GPU
LITTLE = Limits(2**40, 3, context_bytes(CONTEXT_BYTES) + MIB)
OUTPUT: Vec3 = (40, 44, 48)
SMALL: Vec3 = (16, 18, 20)


def on(
    times: float, network: Network, output: Vec3, limits: Limits, patch: Vec3 | None = None, columns: bool | None = None
) -> RunPlan:
    """Return the plan of a GPU that is so many times as fast as the fakes are."""
    request = asked(network, output, limits, columns=columns, patch=patch)
    return plan_on_devices(request, costs_of("gpu", table=TABLE, rates=HEAVY.scaled(times, times)))


def asked(network: Network, output: Vec3, limits: Limits, gpus: int = 1, **words: Any) -> PlanRequest:
    """Return a request for GPUs."""
    return request_of(network, output, WITH_GPU, limits, baseline=BASELINE, device="gpu", devices=gpus, **words)


def costs(cpu_speed: float, limits: Limits, gpus: int = 1) -> CostModel:
    """Return rates of a GPU like the fakes, and of a CPU that is so many times as fast."""
    times = cpu_speed * limits.threads / limits.without_feed_threads(gpus).threads
    return costs_of("gpu", table=TABLE, rates=HEAVY, host_rates=HEAVY.scaled(times, times))


def cpu_planner(times: float, network: Network, limits: Limits, **words: Any) -> CpuPlanner:
    """Return the plan of a CPU by itself that is so many times as fast as the fakes are."""
    request = asked(network, OUTPUT, limits, **words)
    return CpuPlanner.of(request, costs(times, limits), limits.ram_bytes)


@cache
def side_by_side(
    cpu_speed: float,
    network: Network = MIXED,
    output: Vec3 = OUTPUT,
    limits: Limits = PLENTY,
    gpus: int = 1,
    **words: Any,
) -> tuple[RunPlan, RunPlan]:
    """Return the plan of GPUs alone, and the one with a CPU that is so many times as fast as one of them."""
    request, model = asked(network, output, limits, gpus, **words), costs(cpu_speed, limits, gpus)
    alone = plan_on_devices(request, model)
    return alone, plan_side_by_side(alone, request, model)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "cpu_speed", "gpus"), one_in(3, product([True, False], [0.3, 0.7], [1, 2])))
def test_both_devices_end_together(columns: bool, cpu_speed: float, gpus: int) -> None:
    """The GPU has many steps to take."""
    alone, both = side_by_side(cpu_speed, columns=columns, gpus=gpus, limits=LITTLE)
    assert both.mode == "side-by-side"
    assert both.single_device_seconds == alone.seconds
    assert both.devices == gpus
    own = sharing_of(both).cpu_seconds(both.cpu_items)
    assert both.seconds == max(own, sharing_of(both).gpu_seconds(both.cpu_items))
    assert sharing_of(both).cpu_seconds(both.cpu_items + 1) >= sharing_of(both).gpu_seconds(both.cpu_items), (
        "another would end it no sooner"
    )
    gain = alone.seconds / both.seconds - 1
    assert (0.4 * cpu_speed / gpus if columns else 0) <= gain <= 1.3 * cpu_speed / gpus
    check_runs(both, MIXED, WITH_GPU, table=TABLE)
    assert RunPlan.from_json(both.to_json()) == both


@pytest.mark.slow
def test_cpu_seconds_sum_the_steps_of_its_items() -> None:
    """Its items lie behind each other and are counted step by step."""
    for columns in (True, False):
        _, both = side_by_side(0.5, columns=columns, limits=LITTLE)
        own = both.workers[1].plan
        assert own is not None
        ahead = own.warmup_work(MIXED) if columns else ()
        steps = ceil(own.output[both.main.axis] / own.patch_out[both.main.axis])
        assert own.seconds_to_begin == pytest.approx(sum(ahead) * own.seconds_per_step, rel=1e-6)
        assert own.seconds == pytest.approx((sum(ahead) + steps) * own.seconds_per_step, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("wider", [0, 2])
def test_gpu_seconds_count_only_its_columns(wider: int) -> None:
    """Columns of which the CPU computes a part count for the rest."""
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 6, 6), columns=True)
    both = plan_side_by_side(alone, asked(MIXED, OUTPUT, LITTLE, columns=True), costs(0.1, LITTLE))
    z, y, x = (side if i == both.main.axis else side + wider for i, side in enumerate((8, 18, 18)))  # not even
    both = both.shared_with(PlannedWorker(replace(both.workers[1].plan, patch_out=(z, y, x))), None)
    axis, step, long = both.main.axis, both.patch_out[both.main.axis], sharing_of(both).cells.counts[both.main.axis]
    assert both.patch_out == (4, 6, 6)
    assert long > 1
    assert both.main.column_planes >= both.output[axis]
    steps, ahead = ceil(both.output[axis] / step), sum(both.main.warmup_work(MIXED))
    others = [i for i in range(3) if i != axis]
    rows, row = ([ceil(size / both.patch_out[i]) for size in sharing_of(both).cells.sizes(i)] for i in others)
    for count in range(len(sharing_of(both).cells)):
        columns = [np.full(a * b, ahead + steps) for a, b in product(rows, row)]
        for index in range(count):
            stack, depth = divmod(index, long)  # along the axis first
            columns[stack] -= sharing_of(both).cells.patch[axis] // step if depth < long - 1 else columns[stack].copy()
        each = sum(there.sum() for there in columns)
        spent = sharing_of(both).gpu_seconds(count)
        assert spent == pytest.approx(each * both.main.seconds_per_step, rel=0.02), "the edges of a run are little"
    begins, one = np.array(sharing_of(both).gpu_item_seconds()) / both.main.seconds_per_step / rows[0] / row[0]
    assert begins == pytest.approx(ahead, rel=0.02)
    assert one == pytest.approx(sharing_of(both).cells.patch[axis] // step)


@pytest.mark.slow
def test_items_hold_whole_steps_of_the_gpu() -> None:
    """No item is for a part of a step, along the axis or across it, except the first across."""
    _, both = side_by_side(0.3)
    assert sharing_of(both).cells.patch[both.main.axis] % both.patch_out[both.main.axis] == 0
    later = sharing_of(both).cells.later
    assert later is not None
    assert not any(cell % step for cell, step in zip(later, both.patch_out, strict=True))
    box = sharing_of(both).cells[len(sharing_of(both).cells) - 1].steps[0].write
    for plan in (worker.plan for worker in both.workers):
        written = np.zeros(OUTPUT, int)
        for column in plan.columns_in(box, MIXED):
            for step in column.steps:
                written[step.write.slices] += 1
        assert written[box.slices].min() == written[box.slices].max() == 1
        assert written.sum() == box.voxels


def test_cpu_takes_the_planes_that_fill_no_column_of_the_gpu() -> None:
    """19 columns of 10 cover 188; with the CPU's cells of 38 or 48 in front of them no more do."""
    gpu = on(1.0, MIXED, (188, 188, 188), LITTLE, patch=(10, 10, 10), columns=True)
    its = cpu_planner(1.0, MIXED, LITTLE).plan(SMALL)
    rests = set()
    for width in _widths(gpu.main, (2, 2, 2), 0.05 * prod(gpu.output)):
        both = gpu.shared_with(PlannedWorker(replace(its, patch_out=width)), None)
        for axis in {0, 1, 2} - {both.main.axis}:
            first, *others, last = sharing_of(both).cells.sizes(axis)
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
        both = plan_side_by_side(alone, request, costs(times, LITTLE))
        z, y, x = (side if i == both.main.axis else side + 2 for i, side in enumerate((8, 18, 18)))
        both = both.shared_with(PlannedWorker(replace(both.workers[1].plan, patch_out=(z, y, x))), alone.seconds)
        long = sharing_of(both).cells.counts[both.main.axis]
        stacks: dict[Vec3, list[int]] = {}
        for cell in sharing_of(both).cells:
            z, y, x = (0 if i == both.main.axis else at for i, at in enumerate(cell.steps[0].write.lo))
            stacks.setdefault((z, y, x), []).append(cell.voxels)
        assert {len(stack) for stack in stacks.values()} == {long}
        in_order = [voxels for stack in stacks.values() for voxels in stack]
        assert sharing_of(both).cpu_share() == pytest.approx(sum(in_order[: both.cpu_items]) / prod(both.output))
        assert f"which computes {sharing_of(both).cpu_share():.1%}" in explain(both)
        cut.add(both.cpu_items % long > 0)
    assert True in cut, "not whole stacks alone"


def test_widths_are_multiples_of_the_period_of_their_axis() -> None:
    gpu = on(1.0, MIXED, (39, 35, 33), LITTLE, patch=(4, 4, 4), columns=True)
    period = {0: (4, 1, 2), 1: (1, 4, 2), 2: (1, 2, 4)}[gpu.main.axis]
    widths = _widths(gpu.main, period, 0.3 * prod(gpu.output))
    across = [i for i in range(3) if i != gpu.main.axis]
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
    own, (a, b) = gpu.main.axis, [i for i in range(3) if i != gpu.main.axis]
    cell = [8, 8, 8]
    cell[a] = gpu.output[a]
    moves = set()
    for near in _next_to(gpu.main, (cell[0], cell[1], cell[2])):
        (axis,) = (i for i in range(3) if near[i] != cell[i])
        moves.add((axis, near[axis] - cell[axis]))
    assert moves == {(own, -4), (own, 4), (own, 8), (a, -4), (b, -4), (b, 4)}


@pytest.mark.slow
def test_queue_gets_the_seconds_of_each_device() -> None:
    _, both = side_by_side(0.3, columns=True, limits=LITTLE)
    queue = queue_of(both, {"GPU": both.main, "CPU": both.workers[1].plan}, MIXED)
    assert isinstance(queue, BalancedQueue)
    gpu, cpu = queue._profiles["GPU"], queue._profiles["CPU"]
    gpu, cpu = queue._profiles["GPU"], queue._profiles["CPU"]
    assert (gpu.begins, gpu.seconds) == sharing_of(both).gpu_item_seconds()
    assert gpu.begins > 0
    assert (cpu.begins, cpu.seconds) == (both.workers[1].plan.seconds_to_begin, both.workers[1].plan.seconds_per_step)
    assert (gpu.runs, cpu.runs, cpu.walks) == (True, False, True)


@pytest.mark.slow
def test_output_narrower_than_an_item_counts_its_own_size() -> None:
    """The plan is run on a smaller volume than it was made for."""
    _, both = side_by_side(0.5, columns=True, limits=LITTLE)
    z, y, x = (whole if i == both.main.axis else both.patch_out[i] for i, whole in enumerate(both.output))
    there = both.with_main(both.main.for_output((z, y, x), MIXED))
    assert sharing_of(there).cells.patch != there.patch_out
    queue = queue_of(there, {"GPU": there.main, "CPU": there.workers[1].plan}, MIXED)
    assert isinstance(queue, BalancedQueue)
    assert set(queue._wide.values()) == {1.0}
    begins, each = sharing_of(there).gpu_item_seconds()
    assert begins + queue._free() * each == pytest.approx(there.main.seconds_for(1.0), rel=0.02)


@pytest.mark.slow
def test_slow_cpu_computes_nothing() -> None:
    alone, both = side_by_side(1e-6)
    assert both.cpu_items == 0
    assert both.seconds == pytest.approx(alone.seconds, rel=1e-6)
    assert idle(both).startswith("the GPU is done in ")
    kind = kind_of(MIXED, alone, both, "side by side")
    assert kind.reason == idle(both)
    assert kind.ram_bytes == both.memory.peak


@pytest.mark.slow
def test_memory_covers_both_devices() -> None:
    alone, both = side_by_side(0.5, output=SMALL, masks=True)
    gpu, cpu = (worker.plan.memory for worker in both.workers)
    assert (gpu.baseline, cpu.baseline) == (BASELINE, 0)
    assert both.memory.peak == gpu.peak + cpu.peak
    assert both.memory.vram == gpu.vram
    most = alone.memory.peak + 100
    with pytest.raises(NoPlanError, match=r"and the CPU needs at least [\d.]+ MiB; allow at least ram="):
        side_by_side(0.5, output=SMALL, limits=replace(PLENTY, ram_bytes=most), masks=True)


@pytest.mark.slow
def test_columns_are_narrower_if_wide_ones_do_not_fit() -> None:
    """Wide ones hold more than a quarter of the CPU's part."""

    class Narrow(CpuPlanner):
        def plan(self, output: Vec3, patch: Vec3 | None = None) -> Plan:
            if patch is not None and max(patch[1:]) > 4:
                error = NoPlanError("too wide")
                error.needed_bytes = 2**40
                raise error
            return CpuPlanner.plan(self, output, patch)

    of = cpu_planner(0.5, MIXED, LITTLE, columns=True)
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 4, 4), columns=True)
    speed = of.plan(OUTPUT).voxels_per_second
    trials = _Trials(alone, alone.seconds, speed, Narrow(of.request, of.costs, of.options))
    trials.run()
    best = trials.best(1)[0]
    assert best[1:] == (4, 4)
    assert trials.found[best].cpu_items > 0


def trials_of(cpu_speed: float) -> _Trials:
    """Return trials on a volume hardly larger than the field of view, with a CPU of this relative speed."""
    deep = Network("deep", 1, (Conv((17, 3, 3), 2, "relu"), Conv((17, 3, 3), 1, "none")))
    output: Vec3 = (48, 16, 16)
    alone = on(1.0, deep, output, PLENTY, patch=(1, 4, 4), columns=True)
    speed = cpu_speed * alone.voxels_per_second
    whole = cpu_planner(1.0, deep, PLENTY, columns=True).plan(output)
    times = speed / whole.voxels_per_second
    return _Trials(alone, alone.seconds, speed, cpu_planner(times, deep, PLENTY, columns=True))


@pytest.mark.slow
def test_cpu_may_compute_a_single_item() -> None:
    """Four items would take a third longer."""
    trials = trials_of(1.0)
    trials.run()
    best = min(trials.found.values(), key=lambda plan: sharing_of(plan).expected_seconds())
    assert best.cpu_items == 1
    assert best.seconds == pytest.approx(0.58 * trials.alone, rel=0.02)


@pytest.mark.slow
def test_item_size_suits_a_slower_cpu_than_predicted() -> None:
    """Thicker items would end first, but lose to the GPU alone if the CPU is slow."""
    trials = trials_of(0.4)
    trials.run()
    best = trials.found[trials.best(1)[0]]
    hoped = min(trials.found.values(), key=lambda plan: plan.seconds)
    assert sharing_of(hoped).seconds(SLOWDOWNS[-1]) > trials.alone
    assert sharing_of(best).seconds(SLOWDOWNS[-1]) < 0.97 * trials.alone
    assert sharing_of(best).expected_seconds() < 0.99 * sharing_of(hoped).expected_seconds()


@pytest.mark.slow
@pytest.mark.parametrize("cell", [(40, 11, 12), (40, 22, 12), (40, 22, 24)])
@pytest.mark.parametrize("cpu_speed", [0.2, 0.5, 0.9])
def test_predicted_end_equals_that_of_the_queue(cpu_speed: float, cell: Vec3) -> None:
    """The queue is simulated with a CPU that is faster or slower than predicted."""
    _, both = side_by_side(cpu_speed, columns=True, limits=LITTLE)
    own = both.workers[1].plan
    assert own is not None
    times = prod(cell) / prod(own.patch_out)
    slower = own.with_choices(lambda choice: replace(choice, seconds=times * choice.seconds))
    both = both.shared_with(PlannedWorker(replace(slower, patch_out=cell)), None)
    begins, each = sharing_of(both).gpu_item_seconds()
    ends = []
    for pace in (*SLOWDOWNS, 2.0):
        seen = {"GPU": 1e3 * each, "CPU": 1e3 * times * own.seconds_per_step}  # nobody looks for some seconds
        begin = {"GPU": 1e3 * begins, "CPU": 1e3 * times * own.seconds_to_begin}
        played = Played(sharing_of(both).cells, both.main.axis, seen | {"CPU": pace * seen["CPU"]}, seen, begin)
        ends.append(max(played.ends().values()) / 1e3)
        assert sharing_of(both).seconds(pace) == pytest.approx(ends[-1], rel=1e-4 if pace == 1 else 0.1)
    assert sharing_of(both).expected_seconds() == pytest.approx(np.mean(ends[:-1]), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("times", [0.5, 2.0])
def test_best_of_all_gpu_plans_is_chosen(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is best alone; another is for parts and takes so many times as long for a step."""
    alone = on(1.0, MIXED, OUTPUT, LITTLE, columns=True)
    part = alone.main.with_choices(lambda choice: replace(choice, seconds=times * choice.seconds))
    monkeypatch.setattr("znnpy.planner.side_by_side._plans_of_parts", lambda *asked, **words: [alone.with_main(part)])
    both = plan_side_by_side(alone, asked(MIXED, OUTPUT, LITTLE, columns=True), costs(0.5, LITTLE))
    assert both.main.choices == (part if times < 1 else alone.main).choices


@pytest.mark.slow
def test_gpu_gets_the_last_item_from_the_start() -> None:
    """The speed of the CPU makes no difference."""
    _, both = side_by_side(50.0, columns=True, limits=LITTLE)
    assert both.cpu_items == len(sharing_of(both).cells) - 1 > 0


@pytest.mark.parametrize(("pace", "ends"), [(1.0, 10.0), (1.9, 19.0), (2.1, 30.0), (2.9, 30.0)])
def test_gpu_waits_as_long_as_its_own_item_takes(pace: float, ends: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 10 seconds for one of two items."""
    monkeypatch.setattr(CoExecution, "cells", range(2))
    monkeypatch.setattr(CoExecution, "gpu_seconds", lambda sharing, count: 10.0 * (2 - count))
    monkeypatch.setattr(CoExecution, "cpu_seconds", lambda sharing, count: 10.0 * count)
    monkeypatch.setattr(CoExecution, "gpu_item_seconds", lambda sharing: (4.0, 6.0))
    plan: Any = None
    assert CoExecution(plan, 1, plan).seconds(pace) == ends


@pytest.mark.slow
def test_best_size_beats_its_neighbours() -> None:
    """The search looked at all of them, and one beat those before."""
    planner = cpu_planner(0.9, MIXED, PLENTY, columns=True)
    alone = on(1.0, MIXED, OUTPUT, LITTLE, patch=(4, 6, 6), columns=True)
    found = []
    for around in (False, True):
        trials = _Trials(alone, alone.seconds, 0.9 * alone.voxels_per_second, planner)
        with pytest.MonkeyPatch.context() as patched:
            if not around:
                patched.setattr(_Trials, "_look_around", lambda _: None)
            trials.run()
        found.append(min(trials.found.values(), key=lambda plan: sharing_of(plan).expected_seconds()))
    assert sharing_of(found[1]).expected_seconds() < sharing_of(found[0]).expected_seconds()
    assert set(_next_to(alone.main, sharing_of(found[1]).cells.patch)) <= trials.found.keys()


@pytest.mark.slow
def test_gpu_alone_is_an_alternative_with_a_reason() -> None:
    alone, both = side_by_side(0.5)
    why = kind_of(MIXED, both, alone).reason
    assert re.fullmatch(r"1\.\d+ times as long, without the CPU", why)
    text = explain(both)
    assert f"{alone.seconds / both.seconds:.2f} times as fast as without the CPU" in text
    assert "everything for computing on the CPU at the same time" in text


@pytest.mark.slow
def test_plan_extends_to_a_larger_volume() -> None:
    """The plan is run on another volume than it was made for."""
    _, both = side_by_side(0.3)
    larger: Vec3 = (80, 44, 48)
    there = both.with_main(both.main.for_output(larger, MIXED))
    cells = sharing_of(there).cells
    assert len(cells) == prod(map(ceil, np.array(larger) / cells.patch))
    assert there.seconds == pytest.approx(both.seconds * len(cells) / len(sharing_of(both).cells), rel=0.3)


@pytest.mark.slow
def test_items_off_the_gpus_grid_are_refused() -> None:
    _, both = side_by_side(0.3)
    z, y, x = both.workers[1].plan.patch_out
    for patch in ((z + 1, y, x), (z, both.workers[1].plan.patch_out[1] + 1, x)):
        with pytest.raises(PlanFileError, match=r"hold no whole number of its steps of .*, or are narrower"):
            _check_sharing(sharing_of(changed(both, patch_out=patch)))
    _, both = side_by_side(0.3, columns=True)
    other = both.with_main(replace(both.main, axis=(both.main.axis + 1) % 3))
    with pytest.raises(PlanFileError, match="the CPU's columns are along axis"):
        _check_sharing(sharing_of(other))
