"""Threads of the process: N means N, runs that overlap share one pool, and nobody waits for another's work to stop."""

from __future__ import annotations

import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import psutil
import pytest

from tests.support.cli import Place
from znnpy.errors import Stopped
from znnpy.formats.weights import random_weights
from znnpy.inference import infer
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Conv, Network
from znnpy.trained import TrainedNetwork

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from znnpy.run.pipeline import Event

TICK = 0.01  # seconds: the system counts a thread's time in these


def pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("znnpy-pool")]


class Busy:
    """Counts pieces that run at the same time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.now = self.most = 0

    def __enter__(self) -> None:
        with self._turn:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self.now -= 1


def burning(run: Callable[[Callable[[Event], None]], object]) -> int:
    """Threads that computed while `run` ran, from its first to its last event."""
    seen: list[dict[int, float]] = []

    def look(event: Event) -> None:
        del event
        seen.append({t.id: t.user_time + t.system_time for t in psutil.Process().threads()})

    run(look)
    spent = [last - seen[0].get(thread, 0.0) for thread, last in seen[-2].items()]  # at the last the pool may be gone
    assert max(spent) > 5 * TICK, "too short to tell"
    return sum(seconds > 0.3 * max(spent) for seconds in spent)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_run_uses_as_many_threads_as_requested(tmp_path: Path, threads: int) -> None:
    """The system counts them; reading and writing beside them takes next to no time."""
    layers = Conv((3, 3, 3), 32, "tanh"), Conv((3, 3, 3), 32, "tanh"), Conv((1, 1, 1), 2, "tanh")
    place = Place.furnish(tmp_path, Network("wide", 1, layers, None))
    volume = place.write_volume(np.random.default_rng(3).integers(0, 256, (74, 104, 104), np.uint8))
    words: dict[str, Any] = {"patch": (10, 100, 100), "threads": threads, "only": "cpu.conv.direct"}

    def run(look: Callable[[Event], None]) -> None:
        infer(volume, tmp_path / "net.yaml", out=place.out, progress=look, **words)

    assert burning(run) == threads


def test_concurrent_runs_share_one_pool(place: Place) -> None:
    most = []

    def look(event: Event) -> None:
        del event
        most.append(len(pool_threads()))

    def go(number: int) -> bytes:
        out = place.folder / f"{number}.h5"
        infer(place.volume, place.folder / "net.yaml", out=out, patch=(4, 4, 4), threads=2, progress=look)
        with h5py.File(out) as file:
            return np.asarray(file["prediction"]).tobytes()

    with ThreadPoolExecutor(3) as users:
        results = list(users.map(go, range(3)))
    assert results == [results[0]] * 3
    assert max(most) == 2
    assert not pool_threads()


@pytest.mark.slow
def test_network_called_from_many_threads_gives_equal_results(tiny_network: Callable[..., Network]) -> None:
    """Eight callers, two threads: results are those of one caller, and nobody is left behind."""
    network = tiny_network()
    trained = TrainedNetwork(network, tuple(random_weights(network, seed=3)))
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((12, 13, 14)).astype(np.float32) for _ in range(8)]
    alone = [trained(array, threads=2) for array in arrays]
    with ThreadPoolExecutor(8) as users:
        together = list(users.map(lambda array: trained(array, threads=2), arrays))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not pool_threads()


def test_overlapping_pools_keep_no_more_threads_busy_than_the_largest() -> None:
    busy, seen = Busy(), [np.zeros(40, int) for _ in range(6)]

    def work(number: int) -> None:
        def piece(lo: int, hi: int, worker: int) -> None:
            assert 0 <= worker < threads
            with busy:
                seen[number][lo:hi] += 1
                time.sleep(0.002)

        threads = 2 + number % 2
        with ThreadPool(threads) as pool:
            pool.each(piece, 40)
            pool.each(piece, 40)

    with ThreadPoolExecutor(6) as users:
        list(users.map(work, range(6)))
    assert all((counts == 2).all() for counts in seen)
    assert busy.most <= 3


def test_small_pool_beside_a_large_one_keeps_to_its_number() -> None:
    busy = Busy()

    def piece(lo: int, hi: int, worker: int) -> None:
        del lo, hi, worker
        with busy:
            time.sleep(0.01)

    with ThreadPool(5), ThreadPool(2) as small:
        assert len(pool_threads()) == 5
        small.each(piece, 30)
    assert busy.most == 2


def test_overlapping_pools_take_turns() -> None:
    """Work that was there before does not have to end first: shares of one and of the other alternate."""
    order: list[str] = []
    begun = threading.Event()

    def work(name: str) -> None:
        def piece(lo: int, hi: int, worker: int) -> None:
            del lo, hi, worker
            order.append(name)
            begun.set()
            time.sleep(0.02)

        with ThreadPool(2) as pool:
            pool.each(piece, 8)

    first = threading.Thread(target=work, args=["early"])
    first.start()
    begun.wait()
    work("late")
    first.join()
    assert order.index("late") <= 4
    assert order[-1] == "late"


def test_pool_waiting_for_another_is_stopped_at_once() -> None:
    hold = threading.Event()

    def held(lo: int, hi: int, worker: int) -> None:
        del lo, hi, worker
        hold.wait(10)

    def never(lo: int, hi: int, worker: int) -> None:
        raise AssertionError((lo, hi, worker))

    with ThreadPool(2) as first, ThreadPool(2) as second, ThreadPoolExecutor(1) as user:
        waiting = user.submit(first.each, held, 2)
        time.sleep(0.05)
        threading.Timer(0.05, second.stop).start()
        start = time.perf_counter()
        with pytest.raises(Stopped):
            second.each(never, 50)
        assert time.perf_counter() - start < 0.5
        hold.set()
        waiting.result()


def test_error_of_the_first_share_is_raised() -> None:
    def piece(lo: int, hi: int, worker: int) -> None:
        del hi, worker
        time.sleep(0.03 if lo == 0 else 0)
        raise ValueError(f"share from {lo}")

    with ThreadPool(2) as pool:
        for _ in range(3):
            with pytest.raises(ValueError, match="share from 0"):
                pool.each(piece, 20)
        pool.each(lambda lo, hi, worker: None, 20)


@pytest.mark.usefixtures("collects_nothing")
@pytest.mark.parametrize("fails", ["a share", "stopped"])
def test_failed_work_releases_its_arrays_at_once(fails: str) -> None:
    """They are most of a machine's memory and must not wait for the garbage collector."""
    arrays: list[weakref.ref[Any]] = []

    def call(pool: ThreadPool) -> None:
        array = np.zeros(1000)
        arrays.append(weakref.ref(array))

        def piece(lo: int, hi: int, worker: int) -> None:
            del hi, worker
            if fails == "stopped":
                pool.stop()
                time.sleep(0.01 if lo == 0 else 0.0)
                pool.check()
            raise ValueError(f"share from {lo} of {len(array)}")

        pool.each(piece, 20)

    with ThreadPool(2) as pool:
        for _ in range(3):
            with pytest.raises(ValueError if fails == "a share" else Stopped):
                call(pool)
            pool.resume()
        assert [array() for array in arrays] == [None] * 3


def test_threads_end_with_the_pools_that_requested_them() -> None:
    before = threading.active_count()
    with ThreadPool(2):
        with ThreadPool(4):
            assert len(pool_threads()) == 4
        deadline = time.perf_counter() + 2
        while len(pool_threads()) > 2 and time.perf_counter() < deadline:
            time.sleep(0.001)
        assert len(pool_threads()) == 2
    assert threading.active_count() == before
    with ThreadPool(1):
        assert not pool_threads(), "one thread is the caller's"


@pytest.mark.torch
def test_openmp_setting_of_the_callers_threads_is_left_alone() -> None:
    """A pool that opens first in one thread and closes last in another would restore it in the wrong one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    first, last = ThreadPool(1), ThreadPool(1)
    first.__enter__()
    try:
        with ThreadPoolExecutor(1) as other:
            other.submit(last.__enter__).result()
            first.__exit__(None, None, None)
            other.submit(last.__exit__, None, None, None).result()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def child(pipe: Connection) -> None:
    seen = np.zeros(20, int)

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        seen[lo:hi] += 1

    with ThreadPool(2) as pool:
        pool.each(piece, 20)
    pipe.send(seen.tolist())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_has_its_own_pool() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system does not fork")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with ThreadPool(2):  # its threads are not in the child
        process = context.Process(target=child, args=[there])
        process.start()
        assert here.poll(10), "the child waits for threads it does not have"
        assert here.recv() == [1] * 20
        process.join()
