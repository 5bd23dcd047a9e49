"""The threads of one run: one pool, BLAS and FFTW single-threaded inside it, a stop flag looked at between pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Self

from threadpoolctl import threadpool_limits

from znnpy.errors import Stopped

SHARES = 4  # per worker: a worker that the system holds up leaves the others at most a quarter of its part to wait for


class _OneBlasThread:
    """While any crew of the process is open, BLAS runs one thread a call; after the last, what it ran before the first.

    The setting belongs to the process, so crews that overlap must not each restore what they found.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._crews = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._turn:
            if self._crews == 0:
                self._limits = threadpool_limits(limits=1)
            self._crews += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._turn:
            self._crews -= 1
            if self._crews == 0 and self._limits is not None:
                self._limits.restore_original_limits()


_ONE_BLAS_THREAD = _OneBlasThread()


class Crew:
    """`threads` workers for every step of a run. A context manager: inside it BLAS runs one thread per call.

    The division of work depends on `threads` and on the counts alone, so results repeat byte by byte; which worker
    takes which share is left to chance.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a crew needs at least one thread, not {threads}")
        self.threads = threads
        self._stop = threading.Event()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(_ONE_BLAS_THREAD)
        self._pool = self._open.enter_context(ThreadPoolExecutor(self.threads, thread_name_prefix="znnpy-crew"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def stop(self) -> None:
        """Ask every piece of work that has not begun to give up; from any thread, more than once."""
        self._stop.set()

    def check(self) -> None:
        """Raise Stopped once `stop` was called."""
        if self._stop.is_set():
            raise Stopped

    def each(self, piece: Callable[[int, int, int], None], count: int) -> None:
        """Call `piece(lo, hi, worker)` for shares of `range(count)` and wait for all of them.

        Calls with the same `worker`, 0 <= worker < threads, never overlap in time: what a worker has is its own.
        The first exception of any share is raised, after every worker has ended; so is an interrupt of the caller.
        """
        self.check()
        if self.threads == 1 or count <= 1:
            piece(0, count, 0)
            return
        todo = iter(shares(count, SHARES * self.threads))  # taking the next is atomic

        def work(worker: int) -> None:
            for lo, hi in todo:
                self.check()
                piece(lo, hi, worker)

        futures = [self._pool.submit(work, worker) for worker in range(self.threads)]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: the arrays that the workers write to must outlive them
            self.stop()
            wait(futures)
            raise
        for future in futures:
            future.result()


def shares(count: int, parts: int) -> Sequence[tuple[int, int]]:
    """`range(count)` in at most `parts` near-equal, non-empty pieces (lo, hi)."""
    parts = max(1, min(parts, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))
