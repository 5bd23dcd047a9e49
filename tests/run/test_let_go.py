"""Everything that a run holds is freed when the run ends, without the garbage collector."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.emulator import needs_compiler
from tests.support.fake_pipeline import COLUMNS, Output, Session, no_thread_is_left, quiet, run_session, volume
from tests.support.fake_pipeline import Source as Voxels
from tests.support.odd_networks import Poisoned
from tests.support.offloaded_sessions import a_plan, emulated_device, session_for
from znnpy.errors import DeviceError, OutputError, Stopped
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.run import pipeline
from znnpy.run.work_queue import ColumnQueue
from znnpy.run.worker import Worker
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("collects_nothing")]


def failing(at: str, stage: str, patch: int) -> None:
    if stage == at and patch == 1:
        raise OutputError("a")


@pytest.mark.parametrize("at", ["nowhere", "read", "compute", "write"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_sessions_sources_and_outputs_are_freed(at: str, lanes: int) -> None:
    def go() -> list[weakref.ref[Any]]:
        hook = partial(failing, at)
        with ThreadPool(1) as pool:
            output, source = Output(hook), Voxels(volume(), hook)
            sessions = [Session(hook, pool) for _ in range(lanes)]
            shares = ColumnQueue(COLUMNS)
            with suppress(OutputError):
                pipeline.run_workers([Worker("CPU", session, pool, shares) for session in sessions], source, output)
                assert at == "nowhere"
        return refs(output, source, *sessions)

    assert [there() for there in go()] == [None] * (2 + lanes)


def refs(*things: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(thing) for thing in things]


def test_failed_writer_frees_everything() -> None:
    """The writer fails while further steps wait for it."""

    def hook(stage: str, patch: int) -> None:
        if stage == "write":
            time.sleep(0.03)
            raise OutputError("a")

    def go() -> list[weakref.ref[Any]]:
        with ThreadPool(1) as pool:
            output, source, session = Output(hook), Voxels(volume(), hook), Session(hook, pool)
            with pytest.raises(OutputError):
                run_session(session, pool, source, output, COLUMNS)
            return refs(output, source, session)

    assert [there() for there in go()] == [None] * 3


class Refuses(Session):
    """A device that refuses the first of all buffers, at once or when it is made."""

    def __init__(self, late: bool, *given: Any) -> None:
        super().__init__(*given)
        self._late = late

    def buffers(self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int) -> Any:
        def none() -> Iterator[Any]:
            raise DeviceError("a")
            yield

        if self._late:
            return none(), super().buffers(raw, out, reads=reads, writes=writes)[1]
        raise DeviceError("a")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
def test_refused_buffers_of_a_device_free_everything(late: bool, lanes: int) -> None:
    """The last of the workers is refused its buffers."""

    def go() -> list[weakref.ref[Any]]:
        with ThreadPool(1) as pool:
            output, source, shares = Output(quiet), Voxels(volume(), quiet), ColumnQueue(COLUMNS)
            sessions = [Session(quiet, pool) for _ in range(lanes - 1)]
            sessions.append(Refuses(late, quiet, pool))
            with suppress(DeviceError):
                pipeline.run_workers([Worker("CPU", session, pool, shares) for session in sessions], source, output)
                assert late
                assert lanes == 2
            return refs(output, source, *sessions)

    assert [there() for there in go()] == [None] * (2 + lanes)


@needs_compiler
@pytest.mark.parametrize("fails", [False, True])
def test_sessions_of_two_stages_are_freed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    plan, net, voxels = a_plan()

    def go() -> weakref.ref[Any]:
        def progress(event: pipeline.Event) -> None:
            if fails and event.steps_done > 1:
                raise OutputError("a")

        with emulated_device(monkeypatch) as device, session_for(plan, net, device) as session:
            source = Source(ArrayVolume(voxels), roi=None, border="valid", network=net.network, allow_nan=False)
            output = Poisoned.of((net.network.output_channels, *plan.output), np.float32)
            with suppress(OutputError):
                run_session(session, session.pool, source, output, plan.cover(net.network), progress)
                assert not fails
        return weakref.ref(session)

    assert go()() is None


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Interrupt by SIGINT, which a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("patch", [1, len(COLUMNS) - 1], ids=["within", "at the end"])
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_a_thread_hangs_frees_everything_later(presses: int, patch: int) -> None:
    """The first Ctrl-C waits for the thread, and the second does not."""
    inside, goes_on, over = threading.Event(), threading.Event(), threading.Event()

    def hook(stage: str, number: int) -> None:
        if stage == "write" and number == patch:
            inside.set()
            assert goes_on.wait(20)

    def ctrl_c() -> None:
        """Raise the signal in the calling thread; another thread of the process might take it and wake nobody."""
        caller = threading.main_thread().ident
        assert caller is not None
        signal.pthread_kill(caller, signal.SIGINT)

    def press(pool: ThreadPool) -> None:
        assert inside.wait(20)
        time.sleep(0.1)
        ctrl_c()
        with suppress(Stopped):
            while not over.wait(0.01):
                pool.check()
        if over.wait(0.1):
            return
        if presses == 2:
            ctrl_c()
        else:
            goes_on.set()

    def go() -> list[weakref.ref[Any]]:
        with ThreadPool(1) as pool:
            thread = threading.Thread(target=press, args=(pool,))
            output, source, session = Output(hook), Voxels(volume(), hook), Session(hook, pool)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                run_session(session, pool, source, output, COLUMNS)
            over.set()
            thread.join()
            assert goes_on.is_set() == no_thread_is_left() == (presses == 1)
            goes_on.set()
            for _ in range(2000):
                if no_thread_is_left():
                    break
                time.sleep(0.01)
            assert no_thread_is_left()
            return refs(output, source, session)

    assert [there() for there in go()] == [None] * 3


def test_ctrl_c_while_threads_start_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = list[threading.Thread](), threading.Thread.start

    def third_is_interrupted(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(thread)
        begin(thread)

    shares = ColumnQueue(COLUMNS)
    with ThreadPool(1) as pool:
        lanes = [Worker("CPU", Session(quiet, pool), pool, shares) for _ in range(2)]
        monkeypatch.setattr(threading.Thread, "start", third_is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run_workers(lanes, Voxels(volume(), quiet), Output(quiet))
    assert len(begun) == 2
    assert no_thread_is_left()
