"""The threads of one run: one pool, BLAS and FFTW single-threaded inside it, a stop flag looked at between pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Self

from threadpoolctl import threadpool_limits

from znnpy.errors import Stopped


class Crew:
    """`threads` workers for every step of a run. A context manager: inside it BLAS runs one thread per call.

    The division of work depends on `threads` and on the counts alone, so results repeat byte by byte.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a crew needs at least one thread, not {threads}")
        self.threads = threads
        self._stop = threading.Event()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(threadpool_limits(limits=1))
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
        """Call `piece(lo, hi, worker)` for shares of `range(count)`, one per worker, and wait for all of them.

        The first exception of any share is raised, after every share has ended.
        """
        self.check()
        ranges = shares(count, self.threads)
        if len(ranges) == 1:
            piece(*ranges[0], 0)
            return
        futures = [self._pool.submit(piece, lo, hi, worker) for worker, (lo, hi) in enumerate(ranges)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error


def shares(count: int, parts: int) -> Sequence[tuple[int, int]]:
    """`range(count)` in at most `parts` near-equal, non-empty pieces (lo, hi)."""
    parts = max(1, min(parts, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))
