"""Threads that the system refuses to start, at every point where one is started: one sentence, and nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.core.sync

from tests.support.cli import Place
from znnpy.errors import ThreadError
from znnpy.kernels.thread_pool import ThreadPool

pytestmark = pytest.mark.slow

MOST = 40  # threads that a small run may start


class Refusing:
    """Stands for the call that starts a thread: all from the `first` on are refused, as at `ulimit -u`."""

    def __init__(self, start: Callable[..., Any], first: int) -> None:
        self.start, self.first, self.asked = start, first, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.asked += 1
        if self.asked >= self.first:
            raise RuntimeError("can't start new thread")
        return self.start(*arguments, **options)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Refusing]:
    """Let no thread start in this process from the n-th on."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start = getattr(threading, name)

    def refuse(first: int) -> Refusing:
        refusing = Refusing(start, first)
        monkeypatch.setattr(threading, name, refusing)
        return refusing

    return refuse


def zarr_loop() -> Any:
    """Start the event loop in which zarr reads and writes, with its thread."""
    (loop,) = zarr.core.sync.loop
    assert loop is not None
    return loop


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("znnpy")]


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
@pytest.mark.parametrize(("cover", "volume"), [("patches", ".h5"), ("columns", ".h5"), ("patches", ".zarr")])
def test_refused_thread_ends_a_command_with_one_sentence(
    place: Place, refusing: Callable[[int], Refusing], suffix: str, cover: str, volume: str
) -> None:
    out, source = place.folder / f"out{suffix}", place.volume.with_suffix(volume)
    # zarr starts its thread here: where that is refused, its next call in the same process hangs.
    zarr.create_array(place.folder / "volume.zarr", data=np.zeros((20, 23, 25), np.uint8), chunks=(8, 8, 8))
    command = ["infer", source, *place.arguments[2:-1], out, "--cover", cover, "--patch", "4,8,8", "--threads", "3"]
    command.append("--resume")
    refusals = 0
    for first in range(1, MOST):
        zarr_loop().set_default_executor(ThreadPoolExecutor(4))  # in place of one whose threads wait for work
        start = refusing(first)
        result = place.run(*command)
        assert own_threads() == []
        if start.asked < first:
            break
        if result.exit_code:  # else the thread was one that the run can do without
            refusals += 1
            assert result.exit_code == 1
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
            assert "the system refuses to start another thread" in line
            assert "--threads" in line
    assert start.asked < first, f"a small run starts {MOST} threads"
    assert refusals >= 5  # the pool's three, a reader, a writer
    assert result.exit_code == 0
    assert sorted(path.name for path in place.folder.iterdir()) == [
        *("net.npz", "net.yaml", out.name, "volume.h5", "volume.zarr")
    ]


def test_refused_thread_raises_a_znnpy_error_in_the_library(refusing: Callable[[int], Refusing]) -> None:
    refusing(2)
    with pytest.raises(ThreadError, match="give a smaller `threads`"), ThreadPool(3):
        raise AssertionError("a pool of three began with one thread")
    assert own_threads() == []


def test_library_without_address_space_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **named: object) -> None:
        raise ImportError("libhdf5.so: failed to map segment from shared object")

    monkeypatch.setattr("znnpy.inference.infer_as_asked", load)
    sentence = place.refusal(*place.arguments)
    assert "a library cannot be loaded (libhdf5.so: failed to map segment from shared object)" in sentence
    assert "`ulimit -v`" in sentence


@pytest.mark.parametrize("error", [RuntimeError("another"), ImportError("another")])
def test_other_errors_are_reported_as_bugs(place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr("znnpy.inference.infer_as_asked", fail)
    with pytest.raises(type(error), match="another"):
        place.run(*place.arguments)
