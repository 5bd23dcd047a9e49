"""The threads of the process: one pool for all runs, BLAS and FFTW single-threaded inside it, a stop flag for each run.

One pool   Crews that are open at the same time (several calls of infer or of a network, from threads of the caller's)
           share the pool's threads and take turns, share by share. The pool has as many as the largest crew asks for,
           so that two crews of 8 on 8 cores keep 8 threads busy, not 16. A crew of one works in the thread that calls
           it: that thread is the caller's, and so is how many of them there are.
N means N  No more than a crew's `threads` work for it at a time. What reads and writes a volume waits for disks, beside
           them. FFTW is planned for one thread (`cpu/fft.py`); BLAS is told to run one while any crew is open.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from types import TracebackType
from typing import Self

from threadpoolctl import threadpool_limits

from znnpy.errors import Stopped, ThreadError

SHARES = 4  # per worker: a worker that the system holds up leaves the others at most a quarter of its part to wait for
# With 16 threads 64 shares took 2.3 ms to hand out, however small (`host_ram_runs-nvidia-h200-2026-11-22.json`).
SHARE_BYTES = 2**21
LOOK_SECONDS = 0.1  # how often who waits for a share looks at the stop flag

Piece = Callable[[int, int, int], None]


class _OneBlasThread:
    """While any crew of the process is open, BLAS runs one thread a call; after the last, what it ran before the first.

    The setting belongs to the process, so crews that overlap must not each restore what they found. OpenMP is left
    alone: its setting belongs to the thread that makes it, and the last crew may close in another than the first
    opened in, which would stay with one thread for ever.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._crews = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._turn:
            if self._crews == 0:
                self._limits = threadpool_limits(limits=1, user_api="blas")
            self._crews += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._turn:
            self._crews -= 1
            if self._crews == 0 and self._limits is not None:
                self._limits.restore_original_limits()


@dataclass(slots=True)
class _Job:
    """One `Crew.each`: shares that nobody has begun, and who may."""

    piece: Piece
    todo: deque[tuple[int, int]]
    workers: list[int]  # numbers that nobody uses now, a heap
    left: int  # shares that have not ended
    ended: threading.Event = field(default_factory=threading.Event)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)  # by first index of the share


class _Pool:
    """Threads that take the shares of all jobs in turn."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._crews: list[int] = []  # threads that each open crew asks for
        self._threads: list[threading.Thread] = []
        self._jobs: deque[_Job] = deque()  # that have shares left to begin

    def join(self, threads: int) -> None:
        """Have at least `threads` threads until `leave`. ThreadError when the system refuses one: then it has left."""
        with self._turn:
            self._crews.append(threads)
            try:
                while len(self._threads) < threads:
                    name = f"znnpy-crew-{len(self._threads)}"
                    # A daemon: a crew that was never closed must not keep a process from ending.
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    thread.start()  # it waits for its turn, and then is in the list
                    self._threads.append(thread)
                return
            except RuntimeError as error:
                if str(error) != ThreadError.REFUSED:
                    raise
        self.leave(threads)
        raise ThreadError.refused()

    def leave(self, threads: int) -> None:
        """Let go of those that no other crew asks for."""
        with self._turn:
            self._crews.remove(threads)
            wanted = max(self._crews, default=0)
            leaving = self._threads[wanted:]
            del self._threads[wanted:]
            self._turn.notify_all()
        if wanted == 0:  # else they may be at work for another crew, and end after their share
            for thread in leaving:
                thread.join()

    def begin(self, job: _Job) -> None:
        with self._turn:
            self._jobs.append(job)
            self._turn.notify(min(len(job.workers), len(job.todo)))

    def drop(self, job: _Job) -> None:
        """Shares of `job` that have not begun never will: they are stopped."""
        with self._turn:
            if not job.todo:
                return
            self._jobs.remove(job)
            job.errors.append((job.todo[0][0], Stopped()))
            job.left -= len(job.todo)
            job.todo.clear()
            if job.left == 0:
                job.ended.set()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            job, worker, (lo, hi) = taken
            try:
                job.piece(lo, hi, worker)
            except BaseException as error:  # whatever it is, `Crew.each` raises it in the thread that waits
                job.errors.append((lo, error))
            with self._turn:
                heappush(job.workers, worker)
                job.left -= 1
                if job.left == 0:
                    job.ended.set()
            del job, taken  # what a job refers to, arrays and all, must not wait here for the next

    def _take(self) -> tuple[_Job, int, tuple[int, int]] | None:
        """The next share, and a worker for it; None when this thread is no longer wanted."""
        with self._turn:
            while True:
                if threading.current_thread() not in self._threads:
                    self._turn.notify()  # somebody else may take what this one was woken for
                    return None
                for job in self._jobs:
                    if job.workers:
                        self._jobs.remove(job)
                        share, worker = job.todo.popleft(), heappop(job.workers)
                        if job.todo:
                            self._jobs.append(job)  # behind the others: crews take turns
                        return job, worker, share
                self._turn.wait()


_one_blas_thread = _OneBlasThread()
_pool = _Pool()


def _after_fork() -> None:
    """A child of fork has none of its parent's threads, and locks as they happened to be."""
    global _one_blas_thread, _pool
    _one_blas_thread, _pool = _OneBlasThread(), _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Crew:
    """`threads` workers for every step of a run. A context manager: inside it BLAS runs one thread per call.

    The division of work depends on `threads` and on what `each` is given, so results repeat byte by byte; which worker
    takes which share is left to chance.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a crew needs at least one thread, not {threads}")
        self.threads = threads
        self._stop = threading.Event()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(_one_blas_thread)
        if self.threads > 1:
            _pool.join(self.threads)
            self._open.callback(_pool.leave, self.threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def stop(self) -> None:
        """Ask every piece of work that has not begun to give up; from any thread, more than once."""
        self._stop.set()

    def resume(self) -> None:
        """Work on, once all that was stopped has ended."""
        self._stop.clear()

    def check(self) -> None:
        """Raise Stopped once `stop` was called, until `resume`."""
        if self._stop.is_set():
            raise Stopped

    def each(self, piece: Piece, count: int, *, least: int = 1) -> None:
        """Call `piece(lo, hi, worker)` for shares of `range(count)` and wait for all of them.

        least  of `count` in a share: fewer take less time than handing them out (`least_share`).

        Calls with the same `worker`, 0 <= worker < threads and < count, never overlap in time: what a worker has is its
        own.
        The exception of the first share that has one is raised, after every share has ended; so is an interrupt of the
        caller. A share must not wait for one that may not have begun: fewer than `threads` may run at a time.
        """
        self.check()
        parts = min(SHARES * self.threads, count // least)
        if self.threads == 1 or parts <= 1:
            piece(0, count, 0)
            return
        todo = deque(shares(count, parts))

        def work(lo: int, hi: int, worker: int) -> None:
            self.check()
            piece(lo, hi, worker)

        job = _Job(work, todo, list(range(self.threads)), len(todo))
        pool = _pool
        pool.begin(job)
        try:
            self._wait(pool, job)
        except BaseException:  # Ctrl-C: the arrays that the workers write to must outlive them
            self.stop()
            self._wait(pool, job)
            raise
        if job.errors:
            error = min(job.errors, key=lambda found: found[0])[1]
            job.errors.clear()  # errors refer to this frame: else arrays would wait for the garbage collector
            try:
                raise error
            finally:
                del error

    def _wait(self, pool: _Pool, job: _Job) -> None:
        """Until every share has ended, or those that had begun when the crew was stopped."""
        while not job.ended.wait(LOOK_SECONDS):
            if self._stop.is_set():
                pool.drop(job)


def least_share(nbytes: int, count: int) -> int:
    """How many of `count` things, of so many bytes together, a share has at least where they are but copied."""
    return max(1, -(-SHARE_BYTES * count // max(1, nbytes)))


def shares(count: int, parts: int) -> Sequence[tuple[int, int]]:
    """`range(count)` in at most `parts` near-equal, non-empty pieces (lo, hi)."""
    parts = max(1, min(parts, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))
