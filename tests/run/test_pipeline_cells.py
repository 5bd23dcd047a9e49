"""The pipeline with cells that are dealt to several lanes: every voxel once, whoever is late, lost or fails."""

from __future__ import annotations

import random
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

from tests.support.fake_pipeline import (
    COLUMNS,
    FAULTS,
    SIZE,
    WALKER,
    Hook,
    Output,
    Session,
    Source,
    dense,
    is_fault,
    no_thread_is_left,
    quiet,
    run_session,
    volume,
)
from tests.support.simulated_queue import GRID, NamedLane
from znnpy.errors import DeviceError
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.patches import Box, Column, Cover
from znnpy.run import pipeline
from znnpy.run.balanced_queue import BalancedQueue, WorkerProfile
from znnpy.run.work_queue import Lease
from znnpy.run.worker import Worker
from znnpy.shapes import Vec3

MARGINS: Vec3 = (2, 3, 5)  # of WALKER
STEP: Vec3 = (1, 2, 2)  # of a GPU


def columns_within(box: Box, patch: Vec3, axis: int) -> tuple[Column, ...]:
    found = Cover(box.size, patch, axis, 3 * patch[axis], MARGINS[axis])
    return tuple(column.shifted(box.lo) for column in found)


class Late(Session):
    """One step is under way, as on a GPU."""

    max_in_flight = 1


class Lenient(Output):
    """An output that accepts a second, equal write of the items of a lost worker."""

    def write(self, box: Any, voxels: Any, number: int = 0) -> None:
        old = self.written[(slice(None), *box.slices)].copy()
        self.written[(slice(None), *box.slices)] = -1
        super().write(box, voxels)
        assert ((old == -1) | (old == self.written[(slice(None), *box.slices)])).all()

    def finish_column(self, index: int) -> None:
        assert index not in self.finished
        super().finish_column(index)


def grid(cell: Vec3, axis: int) -> Cover:
    """Cells of SIZE, those behind the first across the axis as wide as the steps of a GPU that fit."""
    whole = (max(1, size // step) * step for size, step in zip(cell, STEP, strict=True))
    z, y, x = (cell[i] if i == axis else size for i, size in enumerate(whole))
    return Cover(SIZE, cell, later=(z, y, x))


def went(
    hooks: dict[str, Hook],
    axis: int,
    cell: Vec3,
    *,
    hook: Hook = quiet,
    done: frozenset[int] = frozenset(),
    output: Output | None = None,
    progress: Any = None,
    walks: bool = False,
    hangs: int = -1,
    late: float = inf,
    deaf: bool = False,
) -> tuple[Output, pipeline.Timings]:
    """Run workers whose GPUs step by 1, 2 and 2 voxels along other axes than the CPU's 1, 1 and 3.

    walks  the processor's are cells along the axis of the GPU's, and go on from one to the next
    hangs  the processor's step that does not end before it is stopped, or `late` seconds are over
    deaf   it does not end before, though it is stopped
    """
    cells, patches = grid(cell, axis), {"GPU": STEP, "CPU": cell if walks else (1, 1, 3)}
    output = output or Lenient(hook, done)
    with ThreadPool(1) as gpus, ThreadPool(1) as cpu:
        hands, sessions = {}, {}
        for name in hooks:
            gpu = name.startswith("GPU")
            pool, other = (gpus, hooks[name]) if gpu else (cpu, until_stopped(hooks[name], cpu, hangs, late, deaf))
            patch, along = patches[name[:3]], axis if gpu or walks else (axis + 1) % 3
            columns, seconds = partial(columns_within, patch=patch, axis=along), 0.01 if gpu else 0.03
            hands[name] = WorkerProfile(
                columns, seconds, runs=gpu, walks=walks and not gpu, begins=0.0 if gpu else 0.02
            )
            whole = Cover(SIZE, patch, along, 3 * patch[along], MARGINS[along])
            sessions[name] = (Late if gpu else Session)(other, pool, WALKER, whole)
        shares = BalancedQueue(cells, axis, hands, done)
        lanes = [Worker(name, sessions[name], gpus if name.startswith("GPU") else cpu, shares) for name in hooks]
        timings = pipeline.run_workers(lanes, Source(volume(WALKER), hook), output, progress)
        cpu.check()  # another run may have it
    return output, timings


def until_stopped(hook: Hook, pool: ThreadPool, hangs: int, late: float, deaf: bool) -> Hook:
    def stalled(stage: str, patch: int) -> None:
        hook(stage, patch)
        began = time.perf_counter()
        while patch == hangs and time.perf_counter() < began + late:
            if not deaf:
                pool.check()
            time.sleep(0.001)

    return stalled


@pytest.mark.parametrize("walks", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("cell", [(1, 2, 2), (2, 4, 4), (3, 2, 6), (8, 6, 10), (2, 3, 5), (3, 5, 7)])
def test_every_voxel_is_written_once(axis: int, cell: Vec3, walks: bool) -> None:
    events: list[pipeline.Event] = []
    output, timings = went({"GPU": quiet, "CPU": quiet}, axis, cell, progress=events.append, walks=walks)
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))
    cells = len(grid(cell, axis))
    assert sorted(output.finished) == list(range(cells))
    assert timings.columns == cells
    assert timings.voxels == sum(lane.voxels for lane in timings.workers) == 7 * 5 * 9
    last = events[-1]
    assert (last.columns_done, last.steps_done, last.voxels_done, last.work_done) == (cells, cells, 315, 1.0)
    assert all(a.work_done <= b.work_done + 1e-9 for a, b in pairwise(events))
    assert no_thread_is_left()


@pytest.mark.usefixtures("collects_nothing")
def test_cpu_that_gave_up_keeps_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.run.work_queue.LOOK_SECONDS", 0.005)

    def go() -> weakref.ref[Any]:
        output, timings = went({"GPU": quiet, "CPU": quiet}, 0, (2, 4, 4), hangs=0)
        assert timings.workers[1].given_up
        return weakref.ref(output)

    assert go()() is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_gpus_take_over_from_a_hanging_cpu(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Work of the CPU that the GPUs compute again is not counted twice."""
    monkeypatch.setattr("znnpy.run.work_queue.LOOK_SECONDS", 0.005)
    rng, events = random.Random(seed), list[pipeline.Event]()
    axis, cell = rng.randrange(3), (rng.choice([1, 2, 4]), rng.choice([2, 3, 4]), rng.choice([2, 5, 6]))
    names, slow = ["GPU 0", "GPU 1", "CPU"][rng.randrange(2) :], rng.choice([0.0, 0.0005])
    rng.shuffle(names)

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * slow)

    hangs, walks = rng.randrange(6), rng.random() < 0.7
    hooks: dict[str, Hook] = dict.fromkeys(names, hook)
    output, timings = went(hooks, axis, cell, hook=hook, progress=events.append, walks=walks, hangs=hangs)
    cells = len(grid(cell, axis))
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))
    assert sorted(output.finished) == list(range(cells))
    assert timings.columns == cells
    assert timings.voxels == sum(lane.voxels for lane in timings.workers) == 7 * 5 * 9
    last = events[-1]
    assert (last.columns_done, last.steps_done, last.voxels_done, last.work_done) == (cells, cells, 315, 1.0)
    assert not any(lane.given_up or lane.lost for lane in timings.workers if lane.name != "CPU")
    assert no_thread_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_late_cpu_and_lost_gpus_leave_correct_columns(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A GPU that fails when the processor has given up ends the run; what is finished is right in any case."""
    monkeypatch.setattr("znnpy.run.work_queue.LOOK_SECONDS", 0.002)
    rng = random.Random(seed)
    axis, cell = rng.randrange(3), (rng.choice([2, 4]), rng.choice([2, 4]), rng.choice([5, 6]))
    names, output = ["GPU 0", "GPU 1", "CPU"][rng.randrange(2) :], Lenient(quiet)
    fails = {name: rng.randrange(150) for name in names if name != "CPU" and rng.random() < 0.7}

    def hook_of(name: str) -> Hook:
        def hook(stage: str, patch: int) -> None:
            time.sleep(rng.random() * 0.0005)
            if stage == "compute" and patch == fails.get(name):
                raise DeviceError("cudaErrorIllegalAddress")

        return hook

    words: Any = {"hangs": rng.randrange(4), "late": rng.choice([0.02, 0.2, 0.5]), "walks": rng.random() < 0.7}
    timings: pipeline.Timings | None = None
    with suppress(DeviceError):
        _, timings = went({name: hook_of(name) for name in names}, axis, cell, output=output, **words)
    assert fails or timings is not None
    if timings is not None:
        assert sorted(output.finished) == list(range(len(grid(cell, axis))))
        assert timings.columns == len(output.finished)
        assert timings.voxels == sum(lane.voxels for lane in timings.workers) == 7 * 5 * 9
    exact = dense(volume(WALKER), WALKER)
    for index in output.finished:
        box = (slice(None), *grid(cell, axis)[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[box], exact[box])
    assert no_thread_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_revoked_items_count_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The sum never exceeds the whole, even while the CPU is in a step that it cannot leave."""
    monkeypatch.setattr("znnpy.run.work_queue.LOOK_SECONDS", 0.005)
    monkeypatch.setattr("znnpy.run.pipeline.REPORT_SECONDS", 0.01)
    rng, events = random.Random(seed), list[pipeline.Event]()
    hooks: dict[str, Hook] = {"GPU": lambda *_: time.sleep(0.0005), "CPU": quiet}
    words: Any = {"hangs": rng.randrange(1, 6), "late": 0.3, "deaf": True}
    _, timings = went(hooks, rng.randrange(3), (4, 3, 5), progress=events.append, **words)
    assert timings.voxels == sum(lane.voxels for lane in timings.workers) == 7 * 5 * 9
    assert all(event.voxels_done <= event.voxels and event.work_done <= 1 + 1e-9 for event in events)
    assert all(event.steps_done <= event.steps for event in events)


def test_late_cpu_is_reported() -> None:
    _, timings = went({"GPU": lambda *_: time.sleep(0.005), "CPU": quiet}, 0, (2, 4, 4), hangs=0)
    assert {lane.name: lane.given_up > 0 for lane in timings.workers} == {"GPU": False, "CPU": True}
    assert {lane.name: lane.voxels for lane in timings.workers} == {"GPU": 315, "CPU": 0}


@pytest.mark.parametrize("seed", range(60))
def test_cpu_computes_the_items_of_lost_gpus(seed: int) -> None:
    """The processor computes what is left of any GPU, unless it had given up."""
    rng = random.Random(seed)
    axis, cell = rng.randrange(3), (rng.choice([1, 2, 4]), rng.choice([2, 3, 4]), rng.choice([2, 5, 6]))
    slow = {stage: rng.choice([0.0, 0.0, 0.0002, 0.0005]) for stage in ("read", "compute", "write")}
    names = ["GPU 0", "GPU 1", "CPU"][rng.randrange(2) :]
    fails = {name: rng.randrange(20) for name in names if name != "CPU" and rng.random() < 0.5}

    def hook_of(name: str) -> Hook:
        def hook(stage: str, patch: int) -> None:
            time.sleep(rng.random() * slow[stage])
            if stage == "compute" and patch == fails.get(name):
                raise DeviceError("cudaErrorIllegalAddress")

        return hook

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * slow[stage])

    cells = grid(cell, axis)
    done = frozenset(rng.sample(range(len(cells)), rng.randrange(1 + len(cells) // 2)))
    hooks = {name: hook_of(name) for name in names}
    output, timings = went(hooks, axis, cell, hook=hook, done=done, walks=rng.random() < 0.7)
    whole = np.ones(SIZE, bool)
    for index in done:
        whole[cells[index].steps[0].write.slices] = False
    np.testing.assert_array_equal(output.written[:, whole], dense(volume(WALKER), WALKER)[:, whole])
    assert sorted(output.finished) == sorted(set(range(len(cells))) - done)
    assert {lane.name for lane in timings.workers if lane.lost} <= set(fails)
    assert timings.voxels == sum(lane.voxels for lane in timings.workers) == whole.sum()
    assert no_thread_is_left()


@pytest.mark.parametrize("seed", range(40))
def test_any_failure_stops_all_workers(seed: int) -> None:
    rng = random.Random(seed)
    fault, where, when = FAULTS[seed % len(FAULTS)], rng.choice(["read", "compute", "write"]), rng.randrange(4)
    faulty = rng.choice(["GPU", "CPU"])

    def hook_of(name: str) -> Hook:
        def hook(stage: str, patch: int) -> None:
            if stage == where and (stage != "compute" or name == faulty) and patch == when:
                raise fault

        return hook

    output = Lenient(hook_of("") if where == "write" else quiet)
    hook = hook_of("") if where == "read" else quiet
    raised: BaseException | None = None
    try:
        went({name: hook_of(name) for name in ("GPU", "CPU")}, 0, (2, 2, 2), hook=hook, output=output)
    except BaseException as error:
        raised = error
    if raised is None:
        assert where == "compute", "one that computes may have fewer steps"
    else:
        assert is_fault(raised, fault)
    kept, cells = dense(volume(WALKER), WALKER), Cover(SIZE, (2, 2, 2))
    for index in output.finished:
        box = (slice(None), *cells[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[box], kept[box])
    assert no_thread_is_left()


def test_waiting_worker_is_woken() -> None:
    """The processor begins nothing while the GPU is faster with all that is left, and takes over when it is lost."""
    cells = BalancedQueue(
        GRID,
        2,
        {"GPU": WorkerProfile(lambda box: (), 1.0, runs=True), "CPU": WorkerProfile(lambda box: (), 1e9, runs=False)},
    )
    gpu, cpu = NamedLane("GPU"), NamedLane("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    assert cells.take(gpu) is not None
    got: list[Lease | None] = []
    thread = threading.Thread(target=lambda: got.append(cells.take(cpu)))
    thread.start()
    time.sleep(0.05)
    assert not got
    cells.lose(gpu)
    thread.join(10)
    assert [lease.indices for lease in got if lease] == [(0,)]


def test_item_is_taken_only_when_it_can_be_read() -> None:
    """One of two buffers is computed from and one is read ahead, so the third item is free."""
    computing, go_on = threading.Event(), threading.Event()

    def hook(stage: str, patch: int) -> None:
        if stage == "compute" and patch == 0:
            computing.set()
            assert go_on.wait(10)

    def patches(box: Box) -> tuple[Column, ...]:
        return tuple(column.shifted(box.lo) for column in Cover(box.size, (1, 5, 9)))

    cells = whole = Cover(SIZE, (1, 5, 9))
    hands = {"CPU": WorkerProfile(patches, 1.0, runs=False)}
    shares, output = BalancedQueue(cells, 0, hands), Lenient(quiet)
    with ThreadPool(1) as pool:
        lane = Worker("CPU", Session(hook, pool, WALKER, whole), pool, shares)
        words = ((lane,), Source(volume(WALKER), quiet), output)
        thread = threading.Thread(target=pipeline.run_workers, args=words)
        thread.start()
        assert computing.wait(10)
        time.sleep(0.1)
        assert len(shares._held) == 2
        go_on.set()
        thread.join(10)
    assert len(output.finished) == len(cells)


def test_worker_without_reads_ends() -> None:
    """A session that is told of no reads makes no buffers; the run ends all the same."""
    with ThreadPool(1) as pool:
        session = Session(quiet, pool)
        output = Output(quiet, frozenset(range(len(COLUMNS))))
        timings = run_session(session, pool, Source(volume(), quiet), output, COLUMNS)
    assert timings.voxels == 0
