"""The pipeline with stages of its own: everything arrives, whatever fails is raised, nothing hangs."""

from __future__ import annotations

import random
import signal
import threading
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_pipeline import (
    COLUMNS,
    FAULTS,
    NETWORK,
    PATCH,
    Output,
    Session,
    Source,
    dense,
    is_fault,
    no_thread_is_left,
    quiet,
    run,
    run_session,
    volume,
)
from znnpy.errors import Stopped, ValuesOverflowError, VolumeError
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.patches import Column, cover
from znnpy.run import nan_mask, pipeline
from znnpy.shapes import Vec3
from znnpy.volume.journal import ColumnSet


def test_every_voxel_arrives() -> None:
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

    with ThreadPool(1) as pool:
        output = Output(hook)
        finished = output.finished
        run_session(Session(hook, pool), pool, Source(volume(), quiet), output, columns)
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


def test_finished_run_computes_nothing() -> None:
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
def test_mask_covers_every_window_with_nan(fov: Vec3) -> None:
    bad = np.random.default_rng(2).random((11, 9, 10)) < 0.02
    windows = np.lib.stride_tricks.sliding_window_view(bad, fov)
    expected = windows.any(axis=(3, 4, 5))
    np.testing.assert_array_equal(nan_mask.seen(bad, fov), expected)


@pytest.mark.parametrize("shape", [(60, 50, 70), (1, 300, 700), (1, 2, 100_000)], ids=str)
def test_mask_is_computed_in_place(shape: Vec3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nan_mask, "SEEN_BYTES", 2**12)
    bad = np.zeros(shape, np.bool_)
    bad[0, -1, -1] = True
    tracemalloc.start()
    try:
        seen = nan_mask.seen(bad, (1, 2, 33))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(seen, bad)
    assert seen.sum() == 1
    assert peak <= max(2**12, shape[2]) + 2**14


@pytest.mark.parametrize("seed", range(150))
def test_failure_of_any_stage_is_raised_and_nothing_hangs(seed: int) -> None:
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

    with ThreadPool(1) as pool:
        output = Output(hook)
        began = time.perf_counter()
        with pytest.raises(type(fault)) as caught:
            run_session(Session(hook, pool), pool, Source(volume(), hook), output, COLUMNS, progress)
        assert time.perf_counter() - began < 2
    assert is_fault(caught.value, fault, named=where != "progress")
    assert no_thread_is_left()
    assert output.finished == list(range(len(output.finished)))
    for index in output.finished:
        kept = (slice(None), *COLUMNS[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[kept], dense(volume())[kept])


@pytest.mark.parametrize("seed", range(20))
def test_simultaneous_failures_raise_one_error(seed: int) -> None:
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


def test_overflow_names_its_patch() -> None:
    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("compute", 3):
            raise ValuesOverflowError("layer 2 holds inf")

    with pytest.raises(
        ValuesOverflowError,
        match=r"^output voxels \(z, y, x\) = \(0, 2, 0\) to \(3, 4, 4\), step 0 of column 3: layer 2 holds inf$",
    ):
        run(hook)


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
def test_ctrl_c_while_any_stage_is_busy_ends_the_run(stage: str) -> None:
    def hook(at: str, patch: int) -> None:
        if (at, patch) == (stage, 4):
            signal.raise_signal(signal.SIGINT) if at == "compute" else interrupt_main()
            time.sleep(0.05)

    def interrupt_main() -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)

    with ThreadPool(1) as pool:
        output = Output(hook)
        with pytest.raises(KeyboardInterrupt):
            run_session(Session(hook, pool), pool, Source(volume(), hook), output, COLUMNS)
    assert no_thread_is_left()
    for index in output.finished:
        kept = (slice(None), *COLUMNS[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[kept], dense(volume())[kept])


def test_stopped_thread_pool_stops_the_run() -> None:
    with ThreadPool(1) as pool:

        def hook(stage: str, patch: int) -> None:
            if (stage, patch) == ("read", 3):
                pool.stop()

        with pytest.raises(Stopped):
            run_session(Session(hook, pool), pool, Source(volume(), hook), Output(hook), COLUMNS)
    assert no_thread_is_left()


@pytest.mark.parametrize("where", ["read", "write"])
def test_failure_elsewhere_stops_the_computation_inside_a_patch(where: str) -> None:
    busy = threading.Event()
    with ThreadPool(1) as pool:

        def hook(stage: str, patch: int) -> None:
            if (stage, patch) == (where, 1):
                busy.wait(5)
                raise VolumeError("gone")
            until = time.perf_counter() + 5
            while stage == "compute" and patch == (0 if where == "read" else 2) and time.perf_counter() < until:
                busy.set()
                pool.check()

        began = time.perf_counter()
        with pytest.raises(VolumeError, match=r"^gone \(output voxels .*, step 0 of column 1\)$"):
            run_session(Session(hook, pool), pool, Source(volume(), hook), Output(hook), COLUMNS)
        assert time.perf_counter() - began < 2


@pytest.mark.slow
def test_columns_are_not_kept_in_a_list() -> None:
    """20,000 columns, interrupted after three: neither they nor their patches are kept."""

    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("compute", 3):
            raise KeyboardInterrupt

    with ThreadPool(1) as pool:
        many = cover((3, 2, 4 * 20_000), PATCH)
        source = Source(np.zeros((2, *NETWORK.patch_in((3, 2, 40))), np.float32), quiet)
        output = Output(quiet, ColumnSet(len(many), range(100, 10_000)))
        tracemalloc.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                run_session(Session(hook, pool), pool, source, output, many)
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

    with ThreadPool(1) as pool:
        run_session(Watching(quiet, pool), pool, Source(volume(), quiet), Output(quiet), COLUMNS)
    assert {name: len(used) for name, used in addresses.items()} == {"raw": 2, "out": 2}
