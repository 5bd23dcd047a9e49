"""A pool of threads covers each range once, raises the first error, and stops when it is told to."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.kernels.thread_pool import ThreadPool, chunks, min_chunk


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_cover_the_range_once(threads: int) -> None:
    seen = np.zeros(103, int)
    busy = [threading.Lock() for _ in range(threads)]

    def piece(lo: int, hi: int, worker: int) -> None:
        assert busy[worker].acquire(blocking=False), "two calls of one worker overlap"
        seen[lo:hi] += 1
        time.sleep(0.001)
        busy[worker].release()

    with ThreadPool(threads) as pool:
        pool.each(piece, 103)
    assert (seen == 1).all()


def test_first_error_is_raised_after_every_worker_has_ended() -> None:
    ended = []

    def piece(lo: int, hi: int, worker: int) -> None:
        del hi, worker
        if lo == 0:
            raise ValuesOverflowError("too large")
        time.sleep(0.05)
        ended.append(lo)

    with ThreadPool(2) as pool:
        with pytest.raises(ValuesOverflowError, match="too large"):
            pool.each(piece, 2)
        assert ended == [1]


def test_stopped_thread_pool_takes_no_more_work() -> None:
    calls = []

    def piece(lo: int, hi: int, worker: int) -> None:
        del hi, worker
        calls.append(lo)
        pool.stop()
        pool.stop()

    with ThreadPool(2) as pool:
        with pytest.raises(Stopped):
            pool.each(piece, 100)
        assert 1 <= len(calls) <= 2
        with pytest.raises(Stopped):
            pool.each(piece, 1)


def test_interrupt_of_the_caller_stops_the_workers() -> None:
    def piece(lo: int, hi: int, worker: int) -> None:
        del lo, hi, worker
        for _ in range(1000):
            pool.check()
            time.sleep(0.01)

    with ThreadPool(2) as pool:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            pool.each(piece, 2)
        timer.join()
    assert time.perf_counter() - start < 2


def test_thread_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        ThreadPool(0)


@pytest.mark.parametrize(
    ("nbytes", "calls"), [(0, 1), (2**21, 1), (2**22 - 1, 1), (2**22, 2), (7 * 2**21, 6), (2**30, 8)]
)
def test_few_bytes_are_not_shared_among_threads(nbytes: int, calls: int) -> None:
    """A share has at least 2 MiB, and a thread at most four shares."""
    seen = np.zeros(1000, np.int64)
    found = []

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        found.append(hi - lo)
        seen[lo:hi] += 1

    with ThreadPool(2) as pool:
        pool.each(piece, 1000, least=min_chunk(nbytes, 1000))
    assert (seen == 1).all()
    assert len(found) == calls


def test_shares_are_near_equal() -> None:
    assert chunks(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert chunks(2, 5) == [(0, 1), (1, 2)]


def test_blas_runs_one_thread_inside_a_thread_pool() -> None:
    from threadpoolctl import threadpool_info

    with ThreadPool(2):
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
