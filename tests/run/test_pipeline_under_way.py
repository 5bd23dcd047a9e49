"""The pipeline with a session that is given the next step before the last one is done, as one on a GPU is."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_pipeline import (
    COLUMNS,
    FAULTS,
    NETWORK,
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
    walking,
)
from znnpy.errors import ValuesOverflowError
from znnpy.kernels.thread_pool import ThreadPool

Voxels = npt.NDArray[Any]


class UnderWay(Session):
    """Computes when it is waited for; the two steps that it may have are looked at."""

    max_in_flight = 1
    slow: Callable[[], bool] = staticmethod(lambda: False)  # a step is not done yet

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.events: list[str] = []
        self._given: list[tuple[Voxels, Voxels]] = []  # raw patches under way, and what they held

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> Any:
        self._hook("submit", self.events.count("submit"))
        self.events.append("submit")
        self._given.append((raw, raw.copy()))
        assert len(self._given) <= 2
        assert all(raw is not other for other, _ in self._given[:-1])
        return super().submit(raw, out, begins=begins)

    def done(self, ticket: Any) -> bool:
        return not self.slow()

    def wait(self, ticket: Any) -> None:
        self.events.append("wait")
        raw, held = self._given.pop(0)
        np.testing.assert_array_equal(raw, held)  # nobody read the next patch into it
        super().wait(ticket)


def went(hook: Hook = quiet, columns: Any = COLUMNS, voxels: Any = None) -> tuple[Output, UnderWay]:
    network = NETWORK if columns is COLUMNS else WALKER
    with ThreadPool(1) as pool:
        output, session = Output(hook), UnderWay(hook, pool, network, columns)
        run_session(session, pool, Source(volume(network) if voxels is None else voxels, hook), output, columns)
    return output, session


@pytest.mark.parametrize("columns", [COLUMNS, walking(0, 2), walking(2, 50)], ids=["patches", "along z", "along x"])
@pytest.mark.parametrize("slow", ["", "read", "submit", "compute", "write"])
def test_every_voxel_arrives(columns: Any, slow: str) -> None:
    def hook(stage: str, patch: int) -> None:
        if stage == slow:
            time.sleep(0.001)

    output, session = went(hook, columns)
    network = NETWORK if columns is COLUMNS else WALKER
    np.testing.assert_array_equal(output.written, dense(volume(network), network))
    assert output.finished == list(range(len(columns)))
    assert no_thread_is_left()
    assert session.events.count("submit") == session.events.count("wait")


def test_next_step_is_submitted_before_the_last_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds as long as there is a next step."""
    monkeypatch.setattr(UnderWay, "slow", staticmethod(lambda: True))
    output, session = went()
    assert session.events == ["submit", *["submit", "wait"] * (len(COLUMNS) - 1), "wait"]
    np.testing.assert_array_equal(output.written, dense(volume()))


def test_finished_steps_are_written_while_reading_stalls() -> None:
    """The reader stands still until the first patch is on disk."""
    written = threading.Event()

    def hook(stage: str, patch: int) -> None:
        if stage == "write":
            written.set()
        if (stage, patch) == ("read", 1):
            assert written.wait(5), "the first patch waits for the second"

    output, _ = went(hook)
    np.testing.assert_array_equal(output.written, dense(volume()))


@pytest.mark.parametrize("columns", [COLUMNS, walking(1, 2)], ids=["patches", "columns"])
def test_nan_is_written_to_its_own_step(columns: Any) -> None:
    network = NETWORK if columns is COLUMNS else WALKER
    holes = volume(network)
    holes[0, 0, 0, 0], holes[1, 4, 2, 5], holes[0, -1, -1, -1] = np.nan, np.inf, -np.inf
    output, _ = went(columns=columns, voxels=holes)
    windows = np.lib.stride_tricks.sliding_window_view(np.isfinite(holes).all(axis=0), network.field_of_view)
    bad = ~windows.all(axis=(3, 4, 5))
    np.testing.assert_array_equal(np.isnan(output.written), np.broadcast_to(bad, output.written.shape))
    clean = np.where(np.isfinite(holes), holes, 0)
    np.testing.assert_array_equal(output.written[:, ~bad], dense(clean, network)[:, ~bad])


@pytest.mark.parametrize("stage", ["submit", "compute"])
def test_overflow_names_its_own_patch(stage: str) -> None:
    """The patch submitted behind it is not named."""

    def hook(at: str, patch: int) -> None:
        if (at, patch) == (stage, 3):
            raise ValuesOverflowError("layer 2 holds inf")

    said = r"^output voxels \(z, y, x\) = \(0, 2, 0\) to \(3, 4, 4\), step 0 of column 3: layer 2 holds inf$"
    with pytest.raises(ValuesOverflowError, match=said):
        went(hook)


@pytest.mark.parametrize("seed", range(80))
def test_failure_is_raised_and_leaves_whole_columns(seed: int) -> None:
    rng = random.Random(seed)
    columns: Any = walking(seed % 3, rng.choice([1, 2, 50])) if seed % 2 else COLUMNS
    steps = [step for column in columns for step in column.steps]
    where = rng.choice(["read", "submit", "compute", "write"])
    when = rng.randrange(sum(where != "write" or step.write.voxels > 0 for step in steps))
    slow = {stage: rng.choice([0.0, 0.0, 0.0005, 0.002]) for stage in ("read", "submit", "compute", "write")}
    fault = rng.choice([*FAULTS, KeyboardInterrupt()])

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * slow[stage])
        if (stage, patch) == (where, when):
            raise fault

    network = WALKER if seed % 2 else NETWORK
    with ThreadPool(1) as pool:
        output = Output(hook)
        session, source = UnderWay(hook, pool, network, columns), Source(volume(network), hook)
        began = time.perf_counter()
        with pytest.raises(type(fault)) as caught:
            run_session(session, pool, source, output, columns)
        assert time.perf_counter() - began < 2
    assert is_fault(caught.value, fault)
    assert no_thread_is_left()
    assert output.finished == list(range(len(output.finished))) != list(range(len(columns)))
    for index in output.finished:
        for step in columns[index].steps:
            kept = (slice(None), *step.write.slices)
            np.testing.assert_array_equal(output.written[kept], dense(volume(network), network)[kept])


def test_ctrl_c_while_a_step_is_under_way_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session waits in short intervals, between which it may be interrupted."""

    def hook(stage: str, patch: int) -> None:
        if (stage, patch) == ("read", 4):  # in the reader: the calling thread looks whether a step is done
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
            time.sleep(0.1)

    monkeypatch.setattr(UnderWay, "slow", staticmethod(lambda: True))
    with pytest.raises(KeyboardInterrupt):
        went(hook)
    assert no_thread_is_left()


def test_three_buffers_of_each_kind_exist() -> None:
    used: dict[str, set[int]] = {"raw": set(), "out": set()}

    class Watching(UnderWay):
        def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> Any:
            assert out is not None
            used["raw"].add(raw.ctypes.data)
            used["out"].add(out.ctypes.data)
            return super().submit(raw, out, begins=begins)

    with ThreadPool(1) as pool:
        run_session(Watching(quiet, pool), pool, Source(volume(), quiet), Output(quiet), COLUMNS)
    assert {name: len(buffers) for name, buffers in used.items()} == {"raw": 3, "out": 3}


def test_buffers_are_made_while_others_are_in_use() -> None:
    """Output buffers are made while the first step of a column runs, which gives no output."""
    submitted = threading.Event()

    class Slow(UnderWay):
        def buffers(self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int) -> Any:
            def late(buffers: Any, first: int) -> Any:
                for number, buffer in enumerate(buffers):
                    assert number < first or submitted.wait(5), "nothing is computed before the last buffer is there"
                    yield buffer

            raws, outs = super().buffers(raw, out, reads=reads, writes=writes)
            return late(raws, 1), late(outs, 0)

        def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> Any:
            submitted.set()
            return super().submit(raw, out, begins=begins)

    columns = walking(0, 2)
    with ThreadPool(1) as pool:
        output = Output(quiet)
        run_session(Slow(quiet, pool, WALKER, columns), pool, Source(volume(WALKER), quiet), output, columns)
    np.testing.assert_array_equal(output.written, dense(volume(WALKER), WALKER))
