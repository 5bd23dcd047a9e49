"""The pipeline with columns that walk: first steps write nothing, NaN spreads across steps, whole ones are recorded."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_pipeline import (
    FAULTS,
    WALKER,
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
    walking,
)
from znnpy.errors import ValuesOverflowError
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.run import pipeline
from znnpy.shapes import Vec3

AXES = pytest.mark.parametrize("axis", [0, 1, 2], ids=["z", "y", "x"])


@AXES
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_every_voxel_arrives_in_columns(axis: int, steps: int) -> None:
    columns, events = walking(axis, steps), list[pipeline.Event]()
    output, timings = run(columns=columns, network=WALKER, progress=events.append)
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))
    assert output.finished == list(range(len(columns)))
    assert (timings.voxels, timings.columns) == (7 * 5 * 9, len(columns))
    assert len(events) == sum(len(column.steps) for column in columns) + 2
    assert no_thread_is_left()


@AXES
def test_column_is_recorded_after_its_last_step(axis: int) -> None:
    columns = walking(axis, 2, (3, 2, 2))
    seen: list[int] = []
    with ThreadPool(1) as pool:

        def hook(stage: str, patch: int) -> None:
            if stage == "write":
                seen.append(len(output.finished))

        output = Output(hook)
        session = Session(hook, pool, WALKER, columns)
        run_session(session, pool, Source(volume(WALKER), quiet), output, columns)
    writes = [sum(step.write.voxels > 0 for step in column.steps) for column in columns]
    assert set(writes) == {1, 2}
    assert seen == [index for index, count in enumerate(writes) for _ in range(count)]


@AXES
def test_first_steps_write_nothing_and_take_no_buffer(axis: int) -> None:
    """The next column begins though the writer stands still and both buffers are taken."""
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

    with ThreadPool(1) as pool:
        output = Output(hook)
        run_session(Watching(quiet, pool, WALKER, columns), pool, Source(volume(WALKER), quiet), output, columns)
    assert outs == [step.write.voxels > 0 for column in columns for step in column.steps]
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))


@AXES
def test_finished_columns_of_several_steps_are_not_repeated(axis: int) -> None:
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
    """It spreads across steps and columns, from planes read before there is output, and no further."""
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


@pytest.mark.parametrize("seed", range(60))
def test_failure_within_a_column_leaves_whole_columns(seed: int) -> None:
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

    with ThreadPool(1) as pool:
        output = Output(hook)
        session, source = Session(hook, pool, WALKER, columns), Source(volume(WALKER), hook)
        with pytest.raises(type(fault)) as caught:
            run_session(session, pool, source, output, columns)
    assert is_fault(caught.value, fault)
    assert no_thread_is_left()
    assert output.finished == list(range(len(output.finished))) != list(range(len(columns)))
    for index in output.finished:
        for step in columns[index].steps:
            kept = (slice(None), *step.write.slices)
            np.testing.assert_array_equal(output.written[kept], dense(volume(WALKER), WALKER)[kept])


@pytest.mark.parametrize("step", [0, 1, 3], ids=["before output", "with output", "before the next column's"])
def test_overflow_in_a_column_names_the_planes_of_its_step(step: int) -> None:
    """Before there is output, it names the planes of the first step with output."""
    columns = walking(0, 2)
    assert [len(column.steps) for column in columns[:2]] == [3, 3]
    box = columns[step // 3].steps[columns.ahead].write
    assert columns.ahead == 1

    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("compute", step):
            raise ValuesOverflowError("layer 2 holds inf")

    with pytest.raises(ValuesOverflowError) as caught:
        run(hook, columns=columns, network=WALKER)
    assert str(caught.value) == (
        f"output voxels (z, y, x) = {box.lo} to {box.hi}, step {step % 3} of column {step // 3}: layer 2 holds inf"
    )
