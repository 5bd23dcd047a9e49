"""The pipeline with stages of its own: everything arrives, whatever fails is raised, nothing hangs."""

from __future__ import annotations

import random
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import OutputError, Stopped, ValuesOverflowError, VolumeError
from znnpy.kernels.crew import Crew
from znnpy.network import Conv, Network
from znnpy.patches import Box, Column, Cover, cover
from znnpy.planner.plan import patch_in
from znnpy.run import pipeline
from znnpy.shapes import Vec3
from znnpy.volume.journal import ColumnSet

SIZE: Vec3 = (7, 5, 9)
PATCH: Vec3 = (3, 2, 4)
NETWORK = Network("probe", 2, (Conv((3, 1, 2), 3),))
COLUMNS = cover(SIZE, PATCH)
WALKER = Network("walker", 2, (Conv((3, 4, 6), 3),))  # sees more than one voxel along every axis

Hook = Callable[[str, int], None]  # stage, how many patches it had before


def quiet(stage: str, patch: int) -> None:
    """No fault, no delay."""


class Session:
    """Sums the field of view over both channels, times 1, 2 and 3 for the three maps.

    In columns it keeps what it has read; planes that it has not are NaN.
    """

    def __init__(self, hook: Hook, crew: Crew, network: Network = NETWORK, columns: Sequence[Column] = COLUMNS) -> None:
        self.network = network
        self._axis = columns.axis if isinstance(columns, Cover) else 0
        patch = columns.patch if isinstance(columns, Cover) else PATCH
        walks = isinstance(columns, Cover) and columns.column > 0
        step = patch_in(network, patch, self._axis, walks=walks)
        self.plan: Any = SimpleNamespace(
            patch_in=step, patch_out=patch, axis=self._axis, walks=walks, work_ahead=lambda network: (0.25, 0.5)
        )
        self._read = np.full((2, *network.patch_in(patch)), np.nan)
        self._hook, self._crew, self._count = hook, crew, 0

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
        self._crew.check()
        self._hook("compute", self._count)
        self._count += 1
        planes, new = np.moveaxis(self._read, 1 + self._axis, 0), np.moveaxis(raw, 1 + self._axis, 0)
        planes[:] = np.nan if begins else np.concatenate((planes[len(new) :], planes[: len(new)]))
        planes[-len(new) :] = new
        if out is not None:
            assert out.dtype == np.float32
            out[:] = dense(self._read, self.network)


class Source:
    def __init__(self, voxels: npt.NDArray[Any], hook: Hook) -> None:
        self.dtype = voxels.dtype
        self._voxels, self._hook, self._count = voxels, hook, 0

    def read(self, lo: Vec3, out: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        self._hook("read", self._count)
        self._count += 1
        size = self._voxels.shape[1:]
        inside = [(max(0, at), min(n, at + m)) for at, n, m in zip(lo, size, out.shape[1:], strict=True)]
        z, y, x = (slice(first, max(first, last)) for first, last in inside)
        oz, oy, ox = (slice(a.start - at, a.stop - at) for a, at in zip((z, y, x), lo, strict=True))
        out[:] = 0
        out[:, oz, oy, ox] = self._voxels[:, z, y, x]
        bad: npt.NDArray[np.bool_] = ~np.isfinite(out).all(axis=0)
        out[~np.isfinite(out)] = 0
        return bad if bad.any() else None


class Output:
    def __init__(self, hook: Hook, done: Set[int] = frozenset()) -> None:
        self.dtype = np.dtype(np.float32)
        self.done = done
        self.written = np.full((3, *SIZE), -1, np.float32)
        self.finished: list[int] = []
        self._hook, self._count = hook, 0

    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        self._hook("write", self._count)
        self._count += 1
        where = (slice(None), *box.slices)
        assert (self.written[where] == -1).all(), "written twice"
        self.written[where] = voxels

    def finish_column(self, index: int) -> None:
        self.finished.append(index)


def dense(voxels: npt.NDArray[Any], network: Network = NETWORK) -> npt.NDArray[Any]:
    fov = network.field_of_view
    windows = np.lib.stride_tricks.sliding_window_view(voxels.astype(np.float64), fov, axis=(1, 2, 3))
    return np.stack([scale * windows.sum(axis=(0, 4, 5, 6)) for scale in (1, 2, 3)])


def volume(network: Network = NETWORK) -> npt.NDArray[np.float32]:
    return np.random.default_rng(9).integers(0, 50, (2, *network.patch_in(SIZE))).astype(np.float32)


def run(
    hook: Hook = quiet,
    voxels: npt.NDArray[Any] | None = None,
    columns: Sequence[Column] = COLUMNS,
    done: frozenset[int] = frozenset(),
    progress: Callable[[pipeline.Event], None] | None = None,
    network: Network = NETWORK,
) -> tuple[Output, pipeline.Timings]:
    with Crew(1) as crew:
        output = Output(hook, done)
        source = Source(volume(network) if voxels is None else voxels, hook)
        session = Session(hook, crew, network, columns)
        timings = pipeline.run(session, crew, source, output, columns, progress)
    return output, timings


def walking(axis: int, steps: int, patch: Vec3 = PATCH) -> Cover:
    """Columns of so many steps along an axis."""
    return Cover(SIZE, patch, axis, steps * patch[axis], WALKER.field_of_view[axis] - 1)


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name in ("znnpy-reader", "znnpy-writer")]


def test_everything_arrives() -> None:
    output, timings = run()
    np.testing.assert_array_equal(output.written, dense(volume()))
    assert output.finished == list(range(len(COLUMNS)))
    assert timings.voxels == 7 * 5 * 9
    assert timings.columns == len(COLUMNS)
    assert set(timings.stage_seconds) == {"reading", "computing", "writing", "waiting"}
    assert 0 < sum(timings.stage_seconds[stage] for stage in ("computing", "waiting")) <= timings.seconds
    assert no_thread_is_left()


def test_columns_of_several_steps_finish_with_the_last() -> None:
    steps = [column.steps[0] for column in COLUMNS]
    columns = (Column(tuple(steps[:5])), Column(tuple(steps[5:6])), Column(tuple(steps[6:])))
    events: list[tuple[int, int]] = []

    def hook(stage: str, patch: int) -> None:
        if stage == "write":
            events.append((patch, len(finished)))

    with Crew(1) as crew:
        output = Output(hook)
        finished = output.finished
        pipeline.run(Session(hook, crew), crew, Source(volume(), quiet), output, columns)
    assert output.finished == [0, 1, 2]
    assert [done for _, done in events] == [0] * 5 + [1] + [2] * (len(steps) - 6)
    np.testing.assert_array_equal(output.written, dense(volume()))


def test_finished_columns_are_not_repeated() -> None:
    done = frozenset({0, 3, len(COLUMNS) - 1})
    events: list[pipeline.Event] = []
    output, timings = run(done=done, progress=events.append)
    kept = sum(COLUMNS[index].voxels for index in done)
    assert output.finished == [index for index in range(len(COLUMNS)) if index not in done]
    assert timings.voxels == 315 - kept
    for index, column in enumerate(COLUMNS):
        where = (slice(None), *column.steps[0].write.slices)
        expected = np.full_like(output.written, -1)[where] if index in done else dense(volume())[where]
        np.testing.assert_array_equal(output.written[where], expected)
    assert (events[0].columns_done, events[0].voxels_done, events[0].seconds < 1) == (3, kept, True)
    assert (events[-1].columns_done, events[-1].voxels_done) == (len(COLUMNS), 315)
    assert len(events) == len(COLUMNS) - 3 + 2
    assert all(a.voxels_done <= b.voxels_done and b.voxels == 315 for a, b in pairwise(events))


def test_nothing_to_do() -> None:
    output, timings = run(done=frozenset(range(len(COLUMNS))))
    assert timings.voxels == 0
    assert output.finished == []


def test_nan_spreads_over_the_field_of_view() -> None:
    voxels = volume()
    holes = voxels.copy()
    holes[0, 0, 0, 0] = np.nan
    holes[1, 4, 2, 5] = np.inf
    holes[0, 8, 4, 9] = -np.inf
    output, _ = run(voxels=holes)
    windows = np.lib.stride_tricks.sliding_window_view(np.isfinite(holes).all(axis=0), NETWORK.field_of_view)
    bad = ~windows.all(axis=(3, 4, 5))
    assert 0 < bad.sum() < bad.size
    assert np.isnan(output.written[:, bad]).all()
    clean = np.where(np.isfinite(holes), holes, 0)
    np.testing.assert_array_equal(output.written[:, ~bad], dense(clean)[:, ~bad])


@pytest.mark.parametrize("fov", [(1, 1, 1), (2, 3, 4), (5, 1, 7), (9, 8, 6)], ids=str)
def test_seen(fov: Vec3) -> None:
    bad = np.random.default_rng(2).random((11, 9, 10)) < 0.02
    windows = np.lib.stride_tricks.sliding_window_view(bad, fov)
    expected = windows.any(axis=(3, 4, 5))
    np.testing.assert_array_equal(pipeline.seen(bad, fov), expected)


@pytest.mark.parametrize("shape", [(60, 50, 70), (1, 300, 700), (1, 2, 100_000)], ids=str)
def test_seen_needs_no_second_mask(shape: Vec3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SEEN_BYTES", 2**12)
    bad = np.zeros(shape, np.bool_)
    bad[0, -1, -1] = True
    tracemalloc.start()
    try:
        seen = pipeline.seen(bad, (1, 2, 33))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(seen, bad)
    assert seen.sum() == 1
    assert peak <= max(2**12, shape[2]) + 2**14


AXES = pytest.mark.parametrize("axis", [0, 1, 2], ids=["z", "y", "x"])


@AXES
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_everything_arrives_in_columns(axis: int, steps: int) -> None:
    columns, events = walking(axis, steps), list[pipeline.Event]()
    output, timings = run(columns=columns, network=WALKER, progress=events.append)
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))
    assert output.finished == list(range(len(columns)))
    assert (timings.voxels, timings.columns) == (7 * 5 * 9, len(columns))
    assert len(events) == sum(len(column.steps) for column in columns) + 2
    assert no_thread_is_left()


@AXES
def test_a_column_is_recorded_when_its_last_step_is_written(axis: int) -> None:
    columns = walking(axis, 2, (2, 2, 3))
    seen: list[int] = []
    with Crew(1) as crew:

        def hook(stage: str, patch: int) -> None:
            if stage == "write":
                seen.append(len(output.finished))

        output = Output(hook)
        session = Session(hook, crew, WALKER, columns)
        pipeline.run(session, crew, Source(volume(WALKER), quiet), output, columns)
    writes = [sum(step.write.voxels > 0 for step in column.steps) for column in columns]
    assert set(writes) == {1, 2}
    assert seen == [index for index, count in enumerate(writes) for _ in range(count)]


@AXES
def test_first_steps_write_nothing_and_take_no_buffer(axis: int) -> None:
    """With the writer standing still and both buffers taken, the next column begins all the same."""
    columns = walking(axis, 2, (2, 2, 2))
    assert columns.ahead > 0
    assert len(columns[0].steps) == columns.ahead + 2
    outs: list[bool] = []
    begun = threading.Event()

    class Watching(Session):
        def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
            outs.append(out is not None)
            super().run(raw, out, begins=begins)
            if len(outs) == 2 * columns.ahead + 2:
                begun.set()

    def hook(stage: str, patch: int) -> None:
        if stage == "write":
            assert begun.wait(5), "the computation waits for a buffer that it does not need"

    with Crew(1) as crew:
        output = Output(hook)
        pipeline.run(Watching(quiet, crew, WALKER, columns), crew, Source(volume(WALKER), quiet), output, columns)
    assert outs == [step.write.voxels > 0 for column in columns for step in column.steps]
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))


@AXES
def test_finished_columns_that_walk_are_not_repeated(axis: int) -> None:
    columns = walking(axis, 1)
    done = frozenset({0, len(columns) - 2})
    output, timings = run(columns=columns, network=WALKER, done=done)
    assert output.finished == [index for index in range(len(columns)) if index not in done]
    assert timings.voxels == 315 - sum(columns[index].voxels for index in done)
    for index, column in enumerate(columns):
        for step in column.steps:
            where = (slice(None), *step.write.slices)
            expected = np.full_like(output.written, -1) if index in done else dense(volume(WALKER), WALKER)
            np.testing.assert_array_equal(output.written[where], expected[where])


@AXES
@pytest.mark.parametrize("seed", range(12))
def test_nan_spreads_over_the_field_of_view_in_columns(axis: int, seed: int) -> None:
    """Across the borders of steps and of columns, from planes that are read before there is output, and no further."""
    rng = np.random.default_rng(seed)
    patch: Vec3 = tuple(rng.integers(1, 5, 3).tolist())
    holes = volume(WALKER)
    holes[rng.random(holes.shape) < rng.choice([0.0005, 0.003])] = rng.choice([np.nan, np.inf, -np.inf])
    holes[0, 0, -1, 0] = np.nan  # in the first planes of a column along any axis, or the last
    output, _ = run(voxels=holes, columns=walking(axis, int(rng.integers(1, 4)), patch), network=WALKER)
    windows = np.lib.stride_tricks.sliding_window_view(np.isfinite(holes).all(axis=0), WALKER.field_of_view)
    bad = ~windows.all(axis=(3, 4, 5))
    assert 0 < bad.sum() < bad.size
    np.testing.assert_array_equal(np.isnan(output.written), np.broadcast_to(bad, output.written.shape))
    clean = np.where(np.isfinite(holes), holes, 0)
    np.testing.assert_array_equal(output.written[:, ~bad], dense(clean, WALKER)[:, ~bad])


FAULTS: list[BaseException] = [VolumeError("a"), OutputError("b"), MemoryError("c"), RuntimeError("d"), SystemExit(3)]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_fails_is_raised_and_nothing_hangs(seed: int) -> None:
    rng = random.Random(seed)
    where = rng.choice(["read", "compute", "write", "progress"])
    when = rng.randrange(len(COLUMNS))
    slow = {stage: rng.choice([0.0, 0.0, 0.0005, 0.002]) for stage in ("read", "compute", "write", "progress")}
    fault = rng.choice(FAULTS)
    seen = {"progress": 0}

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * slow[stage])
        if (stage, patch) == (where, when):
            raise fault

    def progress(event: pipeline.Event) -> None:
        seen["progress"] += 1
        hook("progress", seen["progress"] - 1)

    with Crew(1) as crew:
        output = Output(hook)
        began = time.perf_counter()
        with pytest.raises(type(fault)) as caught:
            pipeline.run(Session(hook, crew), crew, Source(volume(), hook), output, COLUMNS, progress)
        assert time.perf_counter() - began < 2
    assert caught.value is fault
    assert no_thread_is_left()
    assert output.finished == list(range(len(output.finished)))
    for index in output.finished:
        kept = (slice(None), *COLUMNS[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[kept], dense(volume())[kept])


@pytest.mark.parametrize("seed", range(60))
def test_whatever_fails_within_a_column_leaves_whole_columns(seed: int) -> None:
    rng = random.Random(seed)
    columns = walking(seed % 3, rng.choice([1, 2, 50]))
    steps = [step for column in columns for step in column.steps]
    where = rng.choice(["read", "compute", "write"])
    when = rng.randrange(sum(where != "write" or step.write.voxels > 0 for step in steps))
    slow = {stage: rng.choice([0.0, 0.0, 0.0005, 0.002]) for stage in ("read", "compute", "write")}
    fault = rng.choice([*FAULTS, KeyboardInterrupt()])

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * slow[stage])
        if (stage, patch) == (where, when):
            raise fault

    with Crew(1) as crew:
        output = Output(hook)
        session, source = Session(hook, crew, WALKER, columns), Source(volume(WALKER), hook)
        with pytest.raises(type(fault)) as caught:
            pipeline.run(session, crew, source, output, columns)
    assert caught.value is fault
    assert no_thread_is_left()
    assert output.finished == list(range(len(output.finished))) != list(range(len(columns)))
    for index in output.finished:
        for step in columns[index].steps:
            kept = (slice(None), *step.write.slices)
            np.testing.assert_array_equal(output.written[kept], dense(volume(WALKER), WALKER)[kept])


@pytest.mark.parametrize("seed", range(20))
def test_two_stages_fail_at_once(seed: int) -> None:
    rng = random.Random(seed)
    faults = {stage: RuntimeError(stage) for stage in rng.sample(["read", "compute", "write"], 2)}

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * 0.001)
        if patch >= 2 and stage in faults:
            raise faults[stage]

    with pytest.raises(RuntimeError) as caught:
        run(hook)
    assert caught.value in faults.values()
    assert no_thread_is_left()


def test_overflow_names_the_patch() -> None:
    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("compute", 3):
            raise ValuesOverflowError("layer 2 holds inf")

    with pytest.raises(
        ValuesOverflowError, match=r"^output voxels \(z, y, x\) = \(0, 2, 0\) to \(3, 4, 4\): layer 2 holds inf$"
    ):
        run(hook)


@pytest.mark.parametrize(("step", "lo", "hi"), [(0, (0, 0, 0), (3, 2, 4)), (1, (0, 0, 0), (3, 2, 4)), (3, *2 * [()])])
def test_overflow_in_a_column_names_what_its_step_writes(step: int, lo: Vec3, hi: Vec3) -> None:
    """Before there is output, what the first step with output does."""
    columns = walking(0, 2)
    assert columns.ahead == 1
    if step == 3:  # the first of the next column
        lo, hi = columns[1].steps[1].write.lo, columns[1].steps[1].write.hi
        assert (lo, hi) == ((0, 0, 4), (3, 2, 8))

    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("compute", step):
            raise ValuesOverflowError("layer 2 holds inf")

    with pytest.raises(ValuesOverflowError) as caught:
        run(hook, columns=columns, network=WALKER)
    assert str(caught.value) == f"output voxels (z, y, x) = {lo} to {hi}: layer 2 holds inf"


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
def test_ctrl_c_while_any_stage_is_busy(stage: str) -> None:
    def hook(at: str, patch: int) -> None:
        if (at, patch) == (stage, 4):
            signal.raise_signal(signal.SIGINT) if at == "compute" else interrupt_main()
            time.sleep(0.05)

    def interrupt_main() -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)

    with Crew(1) as crew:
        output = Output(hook)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(Session(hook, crew), crew, Source(volume(), hook), output, COLUMNS)
    assert no_thread_is_left()
    for index in output.finished:
        kept = (slice(None), *COLUMNS[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[kept], dense(volume())[kept])


def test_a_stopped_crew_stops_the_run() -> None:
    with Crew(1) as crew:

        def hook(stage: str, patch: int) -> None:
            if (stage, patch) == ("read", 3):
                crew.stop()

        with pytest.raises(Stopped):
            pipeline.run(Session(hook, crew), crew, Source(volume(), hook), Output(hook), COLUMNS)
    assert no_thread_is_left()


@pytest.mark.parametrize("where", ["read", "write"])
def test_a_fault_elsewhere_stops_the_computation_inside_a_patch(where: str) -> None:
    busy = threading.Event()
    with Crew(1) as crew:

        def hook(stage: str, patch: int) -> None:
            if (stage, patch) == (where, 1):
                busy.wait(5)
                raise VolumeError("gone")
            until = time.perf_counter() + 5
            while stage == "compute" and patch == (0 if where == "read" else 2) and time.perf_counter() < until:
                busy.set()
                crew.check()

        began = time.perf_counter()
        with pytest.raises(VolumeError, match=r"^gone$"):
            pipeline.run(Session(hook, crew), crew, Source(volume(), hook), Output(hook), COLUMNS)
        assert time.perf_counter() - began < 2


def test_no_list_of_columns_is_made() -> None:
    """20,000 columns, interrupted after three: neither they nor their patches are kept."""

    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("compute", 3):
            raise KeyboardInterrupt

    with Crew(1) as crew:
        many = cover((3, 2, 4 * 20_000), PATCH)
        source = Source(np.zeros((2, *NETWORK.patch_in((3, 2, 40))), np.float32), quiet)
        output = Output(quiet, ColumnSet(len(many), range(100, 10_000)))
        tracemalloc.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(Session(hook, crew), crew, source, output, many)
            assert tracemalloc.get_traced_memory()[1] < 2**18
        finally:
            tracemalloc.stop()


def test_buffers_are_few_and_reused() -> None:
    addresses: dict[str, set[int]] = {"raw": set(), "out": set()}

    class Watching(Session):
        def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
            assert out is not None
            addresses["raw"].add(raw.ctypes.data)
            addresses["out"].add(out.ctypes.data)
            super().run(raw, out, begins=begins)

    with Crew(1) as crew:
        pipeline.run(Watching(quiet, crew), crew, Source(volume(), quiet), Output(quiet), COLUMNS)
    assert {name: len(used) for name, used in addresses.items()} == {"raw": 2, "out": 2}
