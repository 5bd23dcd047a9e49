"""Thread pools: all runs of a process share its threads, with single-threaded BLAS and FFTW, and a stop flag per run.

Sharing  Thread pools that are open at the same time (several calls of infer or of a network, from threads of the
         caller) share the process's worker threads, which serve them in turn, chunk by chunk. There are as many worker
         threads as the largest pool asks for, so that two pools of 8 on 8 cores keep 8 threads busy, not 16. A pool of
         one thread works in the calling thread, which belongs to the caller: the number of those is the caller's
         choice.
Limit    No more than a pool's `threads` work for it at a time. Threads that read and write volumes come on top, since
         they wait for disks. FFTW is planned for one thread (`cpu/fft.py`); BLAS is limited to one while any pool is
         open.
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

CHUNKS_PER_THREAD = (
    4  # per thread: while one thread is held up by the system, the others wait for at most a quarter of its part
)
# With 16 threads it took 2.3 ms to distribute 64 chunks of any size (`host_ram_runs-nvidia-h200-2026-11-22.json`).
MIN_CHUNK_BYTES = 2**21
POLL_SECONDS = 0.1  # interval at which a waiting thread checks the stop flag

Piece = Callable[[int, int, int], None]


class _OneBlasThread:
    """Limits BLAS to one thread per call while any pool of the process is open, and then restores the old limit.

    The limit belongs to the process, so overlapping pools must not each restore the limit that they found. The limit of
    OpenMP is not changed: it belongs to a thread, and the last pool may close in another thread than the one that
    opened the first, which would then stay limited for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_pools = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._open_pools == 0:
                self._limits = threadpool_limits(limits=1, user_api="blas")
            self._open_pools += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._open_pools -= 1
            if self._open_pools == 0 and self._limits is not None:
                self._limits.restore_original_limits()


@dataclass(slots=True)
class _Job:
    """One call of `ThreadPool.each`: the chunks that have not started and the worker numbers that are free."""

    piece: Piece
    todo: deque[tuple[int, int]]
    workers: list[int]  # unused worker numbers, a heap
    left: int  # chunks that have not ended
    ended: threading.Event = field(default_factory=threading.Event)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)  # errors with the first index of the chunk


class _SharedThreads:
    """Worker threads that take chunks from all jobs in turn."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._requests: list[int] = []  # number of threads that each open pool asks for
        self._threads: list[threading.Thread] = []
        self._jobs: deque[_Job] = deque()  # jobs with chunks left to start

    def join(self, threads: int) -> None:
        """Keep at least `threads` threads until `leave`. If the system refuses one, undo this and raise ThreadError."""
        with self._lock:
            self._requests.append(threads)
            try:
                while len(self._threads) < threads:
                    name = f"znnpy-pool-{len(self._threads)}"
                    # A daemon thread: a pool that was never closed must not keep the process alive.
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    thread.start()  # the thread blocks on the lock until it is in the list
                    self._threads.append(thread)
                return
            except RuntimeError as error:
                if str(error) != ThreadError.REFUSED:
                    raise
        self.leave(threads)
        raise ThreadError.refused()

    def leave(self, threads: int) -> None:
        """End the threads that no other pool asks for."""
        with self._lock:
            self._requests.remove(threads)
            wanted = max(self._requests, default=0)
            leaving = self._threads[wanted:]
            del self._threads[wanted:]
            self._lock.notify_all()
        if wanted == 0:  # otherwise they may be at work for another pool, and end after their chunk
            for thread in leaving:
                thread.join()

    def begin(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            self._lock.notify(min(len(job.workers), len(job.todo)))

    def drop(self, job: _Job) -> None:
        """Cancel the chunks of `job` that have not started."""
        with self._lock:
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
            except BaseException as error:  # `ThreadPool.each` raises it in the waiting thread
                job.errors.append((lo, error))
            with self._lock:
                heappush(job.workers, worker)
                job.left -= 1
                if job.left == 0:
                    job.ended.set()
            del job, taken  # objects that a job refers to, such as arrays, must not stay alive until the next job

    def _take(self) -> tuple[_Job, int, tuple[int, int]] | None:
        """Return the next chunk and a worker number for it; None when this thread is no longer wanted."""
        with self._lock:
            while True:
                if threading.current_thread() not in self._threads:
                    self._lock.notify()  # pass the wake-up on to another thread
                    return None
                for job in self._jobs:
                    if job.workers:
                        self._jobs.remove(job)
                        chunk, worker = job.todo.popleft(), heappop(job.workers)
                        if job.todo:
                            self._jobs.append(job)  # the job goes to the back of the queue: pools take turns
                        return job, worker, chunk
                self._lock.wait()


_one_blas_thread = _OneBlasThread()
_shared_threads = _SharedThreads()


def _after_fork() -> None:
    """Replace the state in a child of fork, which has no threads of its parent, and locks in an arbitrary state."""
    global _one_blas_thread, _shared_threads
    _one_blas_thread, _shared_threads = _OneBlasThread(), _SharedThreads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class ThreadPool:
    """The `threads` workers for every step of a run. A context manager: inside it BLAS runs one thread per call.

    The division of work depends only on `threads` and the arguments of `each`, so results repeat byte for byte; which
    worker runs which chunk is left to chance.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a thread pool needs at least one thread, not {threads}")
        self.threads = threads
        self._stop = threading.Event()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(_one_blas_thread)
        if self.threads > 1:
            _shared_threads.join(self.threads)
            self._open.callback(_shared_threads.leave, self.threads)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def stop(self) -> None:
        """Ask all work that has not started to give up. May be called from any thread, more than once."""
        self._stop.set()

    def resume(self) -> None:
        """Accept work again, once everything that was stopped has ended."""
        self._stop.clear()

    def check(self) -> None:
        """Raise Stopped after a call of `stop`, until `resume`."""
        if self._stop.is_set():
            raise Stopped

    def each(self, piece: Piece, count: int, *, least: int = 1) -> None:
        """Call `piece(lo, hi, worker)` for chunks of `range(count)` and wait for all of them.

        least  smallest chunk that is worth the cost of starting it (`min_chunk`).

        Calls with the same `worker`, 0 <= worker < threads and < count, never overlap in time, so data per worker needs
        no lock. If chunks raise, the exception of the one with the lowest index is raised after all chunks have ended;
        so is an interrupt of the caller. A chunk must not wait for another that may not have started: fewer than
        `threads` may run at a time.
        """
        self.check()
        parts = min(CHUNKS_PER_THREAD * self.threads, count // least)
        if self.threads == 1 or parts <= 1:
            piece(0, count, 0)
            return
        todo = deque(chunks(count, parts))

        def work(lo: int, hi: int, worker: int) -> None:
            self.check()
            piece(lo, hi, worker)

        job = _Job(work, todo, list(range(self.threads)), len(todo))
        shared = _shared_threads
        shared.begin(job)
        try:
            self._wait(shared, job)
        except BaseException:  # Ctrl-C: the arrays that the workers write to must outlive them
            self.stop()
            self._wait(shared, job)
            raise
        if job.errors:
            error = min(job.errors, key=lambda found: found[0])[1]
            job.errors.clear()  # errors refer to this frame; without this, arrays would wait for the garbage collector
            try:
                raise error
            finally:
                del error

    def _wait(self, shared: _SharedThreads, job: _Job) -> None:
        """Wait until every chunk has ended, or after `stop` those that had started."""
        while not job.ended.wait(POLL_SECONDS):
            if self._stop.is_set():
                shared.drop(job)


def min_chunk(nbytes: int, count: int) -> int:
    """Return the least number of items for one chunk, if `count` items of `nbytes` in total are only copied."""
    return max(1, -(-MIN_CHUNK_BYTES * count // max(1, nbytes)))


def chunks(count: int, parts: int) -> Sequence[tuple[int, int]]:
    """Split `range(count)` into at most `parts` near-equal, non-empty ranges (lo, hi)."""
    parts = max(1, min(parts, count))
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))
