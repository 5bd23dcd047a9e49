"""Cells of an output, dealt to lanes with plans of their own: every voxel once, and all end together."""

from __future__ import annotations

import heapq
import random
import threading
import time
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from probes import (
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
    volume,
)

from znnpy.errors import DeviceError, Stopped
from znnpy.kernels.crew import Crew
from znnpy.patches import Box, Column, Cover
from znnpy.run import pipeline
from znnpy.run.lane import Lane
from znnpy.run.shares import Cells, Hand, Lease
from znnpy.shapes import Vec3

MARGINS: Vec3 = (2, 3, 5)  # of WALKER


def columns_within(box: Box, patch: Vec3, axis: int) -> tuple[Column, ...]:
    found = Cover(box.size, patch, axis, 3 * patch[axis], MARGINS[axis])
    return tuple(column.shifted(box.lo) for column in found)


class Late(Session):
    """One step is under way, as on a GPU."""

    under_way = 1


class Lenient(Output):
    """What a lost lane wrote of a cell is written again, and is the same."""

    def write(self, box: Any, voxels: Any) -> None:
        old = self.written[(slice(None), *box.slices)].copy()
        self.written[(slice(None), *box.slices)] = -1
        super().write(box, voxels)
        assert ((old == -1) | (old == self.written[(slice(None), *box.slices)])).all()

    def finish_column(self, index: int) -> None:
        assert index not in self.finished
        super().finish_column(index)


STEP: Vec3 = (1, 2, 2)  # of a GPU


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
) -> tuple[Output, pipeline.Timings]:
    """A GPU's lane walks in steps of 1, 2 and 2 voxels along other axes than the processor's of 1, 1 and 3.

    walks  the processor's are cells along the axis of the GPU's, and go on from one to the next
    """
    cells, patches = grid(cell, axis), {"GPU": STEP, "CPU": cell if walks else (1, 1, 3)}
    output = output or Lenient(hook, done)
    with Crew(1) as crew:
        hands, sessions = {}, {}
        for name in hooks:
            gpu = name.startswith("GPU")
            patch, along = patches[name[:3]], axis if gpu or walks else (axis + 1) % 3
            columns, seconds = partial(columns_within, patch=patch, axis=along), 0.01 if gpu else 0.03
            hands[name] = Hand(columns, seconds, runs=gpu, walks=walks and not gpu, begins=0.0 if gpu else 0.02)
            whole = Cover(SIZE, patch, along, 3 * patch[along], MARGINS[along])
            sessions[name] = (Late if gpu else Session)(hooks[name], crew, WALKER, whole)
        shares = Cells(cells, axis, hands, done)
        lanes = [Lane(name, sessions[name], crew, shares) for name in hooks]
        timings = pipeline.run_lanes(lanes, Source(volume(WALKER), hook), output, progress)
    return output, timings


@pytest.mark.parametrize("walks", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("cell", [(1, 2, 2), (2, 4, 4), (3, 2, 6), (8, 6, 10), (2, 3, 5), (3, 5, 7)])
def test_every_voxel_once(axis: int, cell: Vec3, walks: bool) -> None:
    events: list[pipeline.Event] = []
    output, timings = went({"GPU": quiet, "CPU": quiet}, axis, cell, progress=events.append, walks=walks)
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))
    cells = len(grid(cell, axis))
    assert sorted(output.finished) == list(range(cells))
    assert timings.columns == cells
    assert timings.voxels == sum(lane.voxels for lane in timings.lanes) == 7 * 5 * 9
    last = events[-1]
    assert (last.columns_done, last.steps_done, last.voxels_done, last.work_done) == (cells, cells, 315, 1.0)
    assert all(a.work_done <= b.work_done + 1e-9 for a, b in pairwise(events))
    assert no_thread_is_left()


@pytest.mark.parametrize("seed", range(60))
def test_delays_and_lost_gpus(seed: int) -> None:
    """The processor computes what is left of any GPU."""
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
    assert {lane.name for lane in timings.lanes if lane.lost} <= set(fails)
    assert timings.voxels == sum(lane.voxels for lane in timings.lanes) == whole.sum()
    assert no_thread_is_left()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_stops_all(seed: int) -> None:
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


class Played:
    """Lanes that take so long for a cell, and more for the first of a run, on a clock of their own."""

    def __init__(
        self,
        cells: Cover,
        axis: int,
        true: dict[str, float],
        predicted: dict[str, float] | None = None,
        begins: dict[str, float] | None = None,
    ) -> None:
        self.now, self.true = 0.0, true
        self.begins = dict.fromkeys(true, 0.0) | (begins or {})
        hands = {
            name: Hand(
                lambda box: (),
                (predicted or true)[name],
                runs=name.startswith("GPU"),
                walks=not name.startswith("GPU"),
                begins=self.begins[name],
            )
            for name in true
        }
        self.cells = Cells(cells, axis, hands, now=lambda: self.now)
        self.lanes: dict[str, Any] = {name: SimpleNamespace(name=name) for name in true}
        self.taken: dict[str, list[int]] = {name: [] for name in true}
        self.runs: list[tuple[int, ...]] = []

    def ends(self) -> dict[str, float]:
        """When each lane ended its last lease."""
        lanes = {name: _Hashed(name) for name in self.true}
        for lane in lanes.values():
            self.cells.join(lane)
        under_way: list[tuple[float, int, str, Lease]] = []
        ended, order = dict.fromkeys(self.true, 0.0), count()
        idle = list(self.true)
        while True:
            for name in list(idle):
                lease = _taken(self.cells, lanes[name])
                if lease is not None:
                    idle.remove(name)
                    self.taken[name] += lease.indices
                    self.runs.append(lease.indices)
                    spent = len(lease.indices) * self.true[name] + (0 if lease.goes_on else self.begins[name])
                    heapq.heappush(under_way, (self.now + spent, next(order), name, lease))
            if not under_way:
                return ended
            self.now, _, name, lease = heapq.heappop(under_way)
            self.cells.finish(lease)
            ended[name] = self.now
            idle.append(name)


class _Hashed:
    def __init__(self, name: str) -> None:
        self.name = name


def _taken(cells: Cells, lane: Any) -> Lease | None:
    """What `take` gives without waiting."""
    found: list[Lease | None] = []

    def stops(timeout: float | None = None) -> bool:
        cells.stop()
        return True

    cells._turn.wait = stops  # type: ignore[method-assign]
    try:
        found.append(cells.take(lane))
    except Stopped:
        cells._stopped = False
    return found[0] if found else None


GRID = Cover((40, 40, 40), (10, 10, 10))  # 64 cells


@pytest.mark.parametrize("axis", [0, 1, 2, pytest.param(3, id="one stack")])
@pytest.mark.parametrize(
    ("true", "predicted"),
    [
        ({"GPU": 1.0, "CPU": 4.0}, None),
        ({"GPU": 1.0, "CPU": 9.0}, None),
        ({"GPU": 1.0, "CPU": 1.0}, None),
        ({"GPU": 3.0, "CPU": 1.0}, None),
        ({"GPU 0": 1.0, "GPU 1": 1.0, "CPU": 7.0}, None),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 1.3, "CPU": 3.0}),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 0.8, "CPU": 6.0}),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 4.0, "CPU": 1.0}),
    ],
)
def test_all_end_together(axis: int, true: dict[str, float], predicted: dict[str, float] | None) -> None:
    """No later than perfect, but for a cell of the slowest: within what the others would have taken for it."""
    played = Played(GRID if axis < 3 else Cover((640, 10, 10), (10, 10, 10)), axis % 3, true, predicted)
    ends = played.ends()
    assert sorted(index for some in played.taken.values() for index in some) == list(range(64))
    perfect = 64 / sum(1 / seconds for seconds in true.values())
    slowest = max(true.values())
    assert max(ends.values()) <= perfect + slowest
    if predicted is None:
        assert max(ends.values()) <= perfect + 1.01 * max(min(true.values()) * 2, 0.5 * slowest)


@given(st.data())
def test_somebody_takes_every_cell(data: st.DataObject) -> None:
    """Whatever lanes take, and are thought to take: two never leave the same cells to each other."""
    names = data.draw(st.sampled_from([("GPU", "CPU"), ("GPU 0", "GPU 1", "CPU"), ("GPU",), ("CPU",)]))
    some = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 20.0])
    true, predicted, begins = ({name: data.draw(some) for name in names} for _ in range(3))
    if data.draw(st.booleans()):
        predicted = true
    cells = data.draw(st.sampled_from([GRID, Cover((40, 10, 10), (10, 10, 10)), Cover((25, 9, 4), (10, 4, 4))]))
    played = Played(cells, data.draw(st.integers(0, 2)), true, predicted, begins)
    played.ends()
    assert sorted(index for some in played.taken.values() for index in some) == list(range(len(cells)))


def test_a_gpu_leaves_to_the_processor_what_that_ends_sooner() -> None:
    """To begin takes a GPU 10 seconds, in which the processor is done with two cells."""
    hands = {
        "GPU": Hand(lambda box: (), 1.0, runs=True, begins=10.0),
        "CPU": Hand(lambda box: (), 5.0, runs=False, walks=True),
    }
    cells = Cells(Cover((40, 10, 10), (10, 10, 10)), 0, hands, now=lambda: 0.0)
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    first = _taken(cells, gpu)
    assert first is not None
    assert (first.indices, first.seconds) == ((3,), 11.0), "until another were done the processor is with three"
    at_work = _taken(cells, cpu)
    assert at_work is not None
    assert _taken(cells, gpu) is None, "the processor is done with the other two in 15 seconds, a GPU with one in 22"
    cells.finish(at_work)
    lease = _taken(cells, gpu)
    assert lease is not None, "the processor may take no other"
    assert lease.indices == (2,)


def test_no_run_takes_longer_than_may_be_lost() -> None:
    """With what it takes to begin, as far as known, and where cells weigh less."""
    now = [0.0]
    hands = {"GPU": Hand(lambda box: (), 100.0, runs=True, begins=80.0)}
    cells = Cells(Cover((400, 20, 10), (10, 10, 10), later=(10, 5, 10)), 0, hands, step=(10, 5, 10), now=lambda: now[0])
    gpu = _Hashed("GPU")
    cells.join(gpu)
    taken = []
    for _ in range(11):
        lease = _taken(cells, gpu)
        assert lease is not None
        taken.append(len(lease.indices))
        now[0] += lease.seconds if len(taken) < 10 else 0.0
        cells.finish(lease)
    assert taken[:10] == [8] * 10, "half of 80 and 8 times half of 100 seconds are 440, of 480"
    assert taken[10] == 4
    cells = Cells(Cover((400, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    cells.join(gpu)
    first = _taken(cells, gpu)
    assert first is not None
    assert (len(first.indices), first.seconds) == (4, 480.0)
    now[0] += 960.0
    cells.finish(first)
    second = _taken(cells, gpu)
    assert second is not None
    assert len(second.indices) == 1, "280 seconds as measured, and another would be 200 more"


def test_of_two_that_would_end_together_one_begins() -> None:
    cells = Cells(
        Cover((10, 10, 10), (10, 10, 10)),
        0,
        {name: Hand(lambda box: (), 0.3, name == "GPU", begins=0.1) for name in ("GPU", "CPU")},
        now=lambda: 0.0,
    )
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    assert _taken(cells, cpu) is None
    assert _taken(cells, gpu) is not None


def test_what_lanes_are_likely_to_end() -> None:
    """A GPU from the end, where cells weigh less and take as much less; to the processor all take the same."""
    cells = Cover((40, 9, 4), (10, 4, 4))
    hands = {
        "GPU": Hand(lambda box: (), 1.0, runs=True, begins=4.0),
        "CPU": Hand(lambda box: (), 6.0, runs=False),
    }
    shares = Cells(cells, 0, hands, step=(10, 1, 4), now=lambda: 0.0)
    assert shares._within(_Hashed("GPU"), 2.0) == 1.0, "4 cells that weigh a quarter"
    narrow = frozenset(index for index in range(len(cells)) if cells[index].steps[0].write.size[1] > 1)
    shares = Cells(cells, 0, hands, narrow, step=(10, 1, 4), now=lambda: 0.0)
    assert shares._within(_Hashed("CPU"), 12.0) == 0.5, "2 cells"


def test_to_begin_counts() -> None:
    """Of each run of a GPU, and of the processor's columns but for the one that it goes on with."""
    one_stack = Cover((400, 10, 10), (10, 10, 10))
    hands = {"GPU": Hand(lambda box: (), 1.0, runs=True, begins=10.0), "CPU": Hand(lambda box: (), 3.0, runs=False)}
    cells = Cells(one_stack, 0, hands, now=lambda: 0.0)
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    lease = _taken(cells, gpu)
    assert lease is not None
    assert len(lease.indices) == 28 // 2, "28 cells in 38 seconds, in which the processor is done with 12"

    hands = {"GPU": Hand(lambda box: (), 1.0, runs=True, begins=4.0), "CPU": Hand(lambda box: (), 30.0, runs=False)}
    cells = Cells(GRID, 0, hands, now=lambda: 0.0)
    for lane in (gpu, cpu):
        cells.join(lane)
    taken = [lease for _ in range(9) if (lease := _taken(cells, cpu)) is not None]
    assert len(taken) == 4, "120 of the 120 seconds that the GPU takes for 15 stacks of 4"

    hands = {"GPU": Hand(lambda box: (), 1.0, runs=True), "CPU": Hand(lambda box: (), 1.0, False, True, 30.0)}
    cells = Cells(one_stack, 0, hands, now=lambda: 0.0)
    for lane in (gpu, cpu):
        cells.join(lane)
    first = _taken(cells, cpu)
    assert first is not None
    cells.finish(first)
    lease = _taken(cells, gpu)
    assert lease is not None
    assert len(lease.indices) == 20 // 2, "of 39: the processor needs not begin again"


def test_who_reads_ahead_has_to_compute_what_it_took() -> None:
    """A reader asks for the next cell before the last one is computed."""
    cells = Cells(GRID, 2, {"GPU": Hand(lambda box: (), 1.0, runs=True), "CPU": Hand(lambda box: (), 20.0, runs=False)})
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    taken = [lease for _ in range(9) if (lease := _taken(cells, cpu)) is not None]
    assert len(taken) == 3, "60 of the 61 seconds that the GPU takes for the others"


def steps_within(box: Box) -> tuple[Column, ...]:
    """One column along z, of two steps before each cell of GRID."""
    return tuple(column.shifted(box.lo) for column in Cover(box.size, (10, 10, 10), 0, 640, 15))


def test_the_processor_goes_on_from_cell_to_cell() -> None:
    """With a column for each stack: its first cell has the steps before its output, all others their own."""
    hands = {
        "GPU": Hand(steps_within, 1.0, runs=True),
        "CPU": Hand(steps_within, 2.0, runs=False, walks=True, begins=3.0),
    }
    cells = Cells(GRID, 0, hands, frozenset({32}), now=lambda: 0.0)
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    taken = [lease for _ in range(8) if (lease := _taken(cells, cpu)) is not None]
    assert [lease.indices for lease in taken] == [(0,), (16,), (48,), (1,), (17,), (33,), (49,), (2,)]
    assert [lease.goes_on for lease in taken] == [False, True, False, False, True, True, True, False]
    assert [len(lease.columns[0].steps) for lease in taken] == [1 if lease.goes_on else 3 for lease in taken]
    assert [lease.seconds for lease in taken] == [2.0 if lease.goes_on else 5.0 for lease in taken]
    assert all(lease.columns[0].steps[-1].write == GRID[lease.indices[0]].steps[0].write for lease in taken)


def test_to_begin_a_column_has_to_pay() -> None:
    """The GPU is done with all 64 sooner than the processor with a first one, or a second."""
    for begins, most in ((100.0, 0), (40.0, 1), (0.0, 3)):
        hands = {
            "GPU": Hand(lambda box: (), 1.0, runs=True),
            "CPU": Hand(lambda box: (), 20.0, runs=False, begins=begins),
        }
        cells = Cells(GRID, 0, hands, now=lambda: 0.0)
        gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
        for lane in (gpu, cpu):
            cells.join(lane)
        assert len([1 for _ in range(9) if _taken(cells, cpu) is not None]) == most


def test_cells_at_an_edge_count_as_much_as_they_are() -> None:
    """Of 4, 4 and 1 steps across: what the GPU is predicted to take, and when the processor begins none more."""
    cells = Cover((40, 9, 4), (10, 4, 4))
    hands = {"GPU": Hand(lambda box: (), 1.0, runs=True), "CPU": Hand(lambda box: (), 6.0, runs=False)}
    shares = Cells(cells, 0, hands, step=(10, 1, 4), now=lambda: 0.0)
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        shares.join(lane)
    taken = _taken(shares, gpu)
    assert taken is not None
    assert taken.indices == (2, 5, 8, 11)
    assert taken.seconds == 1.0, "4 cells, a quarter as wide as others"
    first = _taken(shares, cpu)
    assert first is not None
    assert first.indices == (0,)
    assert _taken(shares, cpu) is None, "in 12 seconds the GPU does 1 and 7"


def test_runs_walk_along_the_axis() -> None:
    played = Played(GRID, 1, {"GPU": 1.0, "CPU": 1000.0})
    played.ends()
    assert not played.taken["CPU"], "the GPU is done before it is"
    stacks = [tuple(16 * z + x + 4 * y for y in range(4)) for z in range(4) for x in range(4)]
    assert played.runs == stacks[::-1]


def test_the_first_run_leaves_half_until_speeds_are_known() -> None:
    played = Played(Cover((640, 10, 10), (10, 10, 10)), 0, {"GPU": 1.0, "CPU": 1000.0})
    played.ends()
    assert [len(run) for run in played.runs] == [32, 32]


def test_the_processor_begins_at_the_front() -> None:
    played = Played(GRID, 2, {"GPU": 1.0, "CPU": 8.0})
    played.ends()
    assert played.taken["CPU"] == list(range(7))
    assert played.runs[0] == (60, 61, 62, 63)


def test_one_stack_is_taken_from_both_ends() -> None:
    played = Played(Cover((640, 10, 10), (10, 10, 10)), 0, {"GPU": 1.0, "CPU": 3.0})
    played.ends()
    assert played.taken["CPU"] == list(range(len(played.taken["CPU"])))
    assert 15 <= len(played.taken["CPU"]) <= 16


def test_a_run_is_no_longer_than_what_may_be_lost() -> None:
    played = Played(GRID, 0, {"GPU": 200.0, "CPU": 1e6})
    played.ends()
    assert [len(run) for run in played.runs[:3]] == [1, 2, 1], "half of it until speeds are known"
    assert max(len(run) for run in played.runs) == 2


def test_what_a_lost_gpu_had_is_taken_anew() -> None:
    cells = Cells(GRID, 2, {"GPU": Hand(lambda box: (), 1.0, runs=True), "CPU": Hand(lambda box: (), 5.0, runs=False)})
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
    for lane in (gpu, cpu):
        cells.join(lane)
    lost = cells.take(gpu)
    assert lost is not None
    assert lost.indices == (60, 61, 62, 63)
    assert cells.lose(gpu) == [lost]
    assert lost.void
    left: list[int] = []
    while (lease := cells.take(cpu)) is not None:
        left += lease.indices
        cells.finish(lease)
    assert left == list(range(64))


def test_who_waits_is_woken() -> None:
    """The processor begins nothing while the GPU is faster with all that is left, and takes over when it is lost."""
    cells = Cells(GRID, 2, {"GPU": Hand(lambda box: (), 1.0, runs=True), "CPU": Hand(lambda box: (), 1e9, runs=False)})
    gpu, cpu = _Hashed("GPU"), _Hashed("CPU")
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


def test_nothing_is_taken_before_it_can_be_read() -> None:
    """Of two buffers one is computed from and one is read ahead: the third cell may still go to another lane."""
    computing, go_on = threading.Event(), threading.Event()

    def hook(stage: str, patch: int) -> None:
        if stage == "compute" and patch == 0:
            computing.set()
            assert go_on.wait(10)

    def patches(box: Box) -> tuple[Column, ...]:
        return tuple(column.shifted(box.lo) for column in Cover(box.size, (1, 5, 9)))

    cells = whole = Cover(SIZE, (1, 5, 9))
    hands = {"CPU": Hand(patches, 1.0, runs=False)}
    shares, output = Cells(cells, 0, hands), Lenient(quiet)
    with Crew(1) as crew:
        lane = Lane("CPU", Session(hook, crew, WALKER, whole), crew, shares)
        words = ((lane,), Source(volume(WALKER), quiet), output)
        thread = threading.Thread(target=pipeline.run_lanes, args=words)
        thread.start()
        assert computing.wait(10)
        time.sleep(0.1)
        assert len(shares._held) == 2
        go_on.set()
        thread.join(10)
    assert len(output.finished) == len(cells)


def test_nothing_is_left_to_read() -> None:
    """A session that is told of no reads makes no buffers; the run ends all the same."""
    with Crew(1) as crew:
        session = Session(quiet, crew)
        output = Output(quiet, frozenset(range(len(COLUMNS))))
        timings = pipeline.run(session, crew, Source(volume(), quiet), output, COLUMNS)
    assert timings.voxels == 0
