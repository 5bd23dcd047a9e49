"""Runs workers that read and compute, with one writer thread and bounded buffers.

A run has a worker for each device that computes; the first computes in the calling thread. All of them write through
one thread. The first failure stops every worker, except the failure of a GPU whose columns others can compute: it gives
back what it had begun, and the run continues without it. Likewise a run continues without a processor whose last cells
a GPU computes sooner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from znnpy.errors import DeviceError, DeviceLostError, Stopped, VramError
from znnpy.patches import Box
from znnpy.run.stoppable_thread import Thread
from znnpy.run.work_queue import Lease, WorkQueue
from znnpy.run.worker import (
    END,
    CompletedStep,
    RunningWorker,
    StepSource,
    StepTask,
    Tracer,
    Voxels,
    Worker,
    drain,
    error_context,
    outputs_in,
    values_per_voxel,
)
from znnpy.shapes import subtract

REPORT_SECONDS = 0.2  # between progress events while only other threads are busy


class Writes(Protocol):
    """The part of an output that the pipeline needs."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def done(self) -> Set[int]: ...

    def write(self, box: Box, voxels: Voxels, number: int) -> None:
        """Write voxels (maps, z, y, x) of the output with this number."""

    def finish_column(self, index: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """The progress of a run. Counts include the work of earlier runs of the job; the first event comes before any work.

    columns_done   columns, or patches, that are written.
    columns        columns, or patches, in all.
    voxels_done    voxels of the output that are written, of one map; of the first output if there are several.
    voxels         voxels of it in all.
    seconds        seconds since this run began: to plan and to prepare too, where it did.
    stage_seconds  seconds of this run spent on "planning" and "preparing", where it did, and then on "reading",
                   "computing", "writing" and "waiting"; these overlap.
    bytes_done     bytes of the output that are written, all maps and outputs counted.
    steps_done     steps of columns that are written, or computed where they give no output; a patch is one step.
    steps          steps in all.
    work_done      share of the work that is done, 0 to 1; the first steps of a column are less work than the others.
    preparing      while memory is prepared, the bytes that are done and all of them; None: it is done.
    elsewhere      words for what is counted where other processes compute, so that bytes and stages are not known.
    """

    columns_done: int
    columns: int
    voxels_done: int
    voxels: int
    seconds: float
    stage_seconds: Mapping[str, float]
    bytes_done: int
    steps_done: int
    steps: int
    work_done: float
    preparing: tuple[int, int] | None = None
    elsewhere: str = ""


@dataclass(frozen=True, slots=True)
class Before:
    """The work of a run before it computed."""

    began: float  # by `time.perf_counter()`
    planning: float  # seconds in which files were opened and checked, devices measured, and the plan was made
    preparing: float  # seconds in which weights and memory were prepared


@dataclass(frozen=True, slots=True)
class WorkerTimings:
    """The times of one worker."""

    name: str
    voxels: int  # of the output
    seconds: Mapping[str, float]  # reading, computing, waiting
    lost: str | None  # why it ended before the run did
    given_up: int = 0  # cells that others computed because it was late


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of a run. Reading and writing overlap computing; waiting is the time in which nothing was computed."""

    voxels: int  # of the output, written by this run
    columns: int
    seconds: float  # since it began to compute
    stage_seconds: Mapping[str, float]  # planning and preparing, if it did; then of all workers: reading to waiting
    workers: tuple[WorkerTimings, ...]


def run_workers(
    workers: Sequence[Worker],
    source: StepSource,
    output: Writes,
    progress: Callable[[Event], None] | None = None,
    trace: Tracer | None = None,
    before: Before | None = None,
    leave_out: Callable[[Box, int], None] | None = None,
) -> Timings:
    """Read, compute and write everything in the queue of the workers.

    progress  called in this thread before the first patch, after each that it computed, and after the last is written;
              while it has nothing left to do, a few times a second.
    trace     records when each worker read and waited, and when outputs were written.
    before    the work of this run before it computed; None: there was none.
    leave_out writes zeros to a box of the output with this number; None: all steps are computed.

    The first exception of any thread stops the others and is raised here once they have ended; so are KeyboardInterrupt
    and whatever else interrupts the calling thread. Patches computed by then are still written, so every column
    reported to the output is whole. An error in a step names its output voxels. A worker that fails with a
    DeviceError or DeviceLostError while another has the same queue is lost, and nothing else stops; nor does it where
    one gives up its last cells to another (`Cells`), which then is no longer there for those of a worker that fails.
    """
    return _Run(workers, source, output, progress, trace, before, leave_out).run()


@dataclass(slots=True)
class _Tally:
    """Columns, steps, the work in them, and the voxels that they wrote."""

    columns: int = 0
    steps: int = 0
    work: float = 0.0
    voxels: int = 0


class _Run:
    def __init__(
        self,
        workers: Sequence[Worker],
        source: StepSource,
        output: Writes,
        progress: Callable[[Event], None] | None,
        trace: Tracer | None,
        before: Before | None,
        leave_out: Callable[[Box, int], None] | None,
    ) -> None:
        self._before, self._leave_out = before, leave_out
        self._given, self._workers = workers, list[RunningWorker]()
        self._source, self._output, self._progress, self._trace = source, output, progress, trace
        self._completed: SimpleQueue[Any] = SimpleQueue()
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []  # of all threads but the calling one; the first is the cause
        self._lock = threading.Lock()  # protects tallies and leases
        self._caller = threading.current_thread()
        self._all, self._early, self._now = _Tally(), _Tally(), _Tally()  # the whole run, earlier runs, this run
        self._count(workers[0].queue)
        session = workers[0].session
        self._maps = session.network.output_maps
        self._voxel_bytes = output.dtype.itemsize * values_per_voxel(session.plan, session.network)
        self._writing = 0.0  # seconds
        self._began = time.perf_counter()

    def _count(self, queue: WorkQueue) -> None:
        for index, column in enumerate(queue.columns):
            for tally in (self._all, self._early) if index in queue.done else (self._all,):
                tally.columns += 1
                tally.steps += sum(not step.repeated for step in column.steps)
                tally.work += column.computed_voxels
                tally.voxels += column.voxels

    def run(self) -> Timings:
        try:
            return self._all_done()
        finally:  # these refer to this object: buffers and sessions would wait for the garbage collector
            for worker in self._workers:
                worker.close()
            self._workers.clear()
            self._errors.clear()
            drain(self._completed)

    def _all_done(self) -> Timings:
        for worker in self._given:
            self._workers.append(RunningWorker(worker, self._source, self._output.dtype, self._complete, self._trace))
        writer = self._thread("writer", self._write)
        threads = [self._thread(f"reader-{number}", worker.read) for number, worker in enumerate(self._workers)]
        threads += [
            self._thread(f"worker-{worker.name}", partial(self._attend, worker)) for worker in self._workers[1:]
        ]
        try:
            for thread in (writer, *threads):
                thread.start()
            self._report()
            self._attend(self._workers[0])
            for thread in threads:
                self._wait_for(thread)
            self._completed.put(END)
            self._wait_for(writer)
        except BaseException as error:
            self._stop()
            for thread in (writer, *threads):
                thread.wait()
            if isinstance(error, Stopped) and self._errors:
                raise self._errors[0] from None  # Stopped only said that a thread failed
            raise
        if self._errors:
            raise self._errors[0]
        self._report()
        now = self._now
        timed = tuple(
            WorkerTimings(
                worker.name,
                worker.voxels,
                dict(worker.seconds),
                worker.lost,
                sum(len(lease.indices) for lease in worker.given_up),
            )
            for worker in self._workers
        )
        return Timings(now.voxels, now.columns, time.perf_counter() - self._began, self._stage_seconds(), timed)

    def _wait_for(self, thread: Thread) -> None:
        """Wait until a thread ends, with progress events now and then."""
        while not thread.wait(REPORT_SECONDS):
            self._report()

    def _attend(self, worker: RunningWorker) -> None:
        """Have a worker compute. If it fails, or is late, others may take over its leases."""
        try:
            worker.compute()
        except Stopped:
            if not worker.given_up or self._stopping.is_set():
                raise
            worker.pool.resume()  # for the next run
            with self._lock:
                self._forget(worker, worker.given_up)
        except (DeviceError, DeviceLostError) as error:
            if isinstance(error, VramError) and not self._alike(worker):
                raise  # the run may be planned again
            worker.lose(error)
            with self._lock:
                begun = worker.queue.lose(worker)
                if begun is None:
                    raise
                self._forget(worker, begun)

    def _forget(self, worker: RunningWorker, leases: Sequence[Lease]) -> None:
        """Stop counting leases that other workers compute again."""
        for lease in leases:
            self._now.steps -= lease.steps
            self._now.work -= lease.work
            self._now.voxels -= lease.voxels
            worker.voxels -= lease.voxels
            lease.steps, lease.work, lease.voxels = 0, 0.0, 0

    def _alike(self, worker: RunningWorker) -> bool:
        """Return whether other workers with the same plan are left."""
        return any(other.plan is worker.plan and not other.lost for other in self._workers if other is not worker)

    def _complete(self, task: StepTask, completed: CompletedStep | None) -> None:
        """Pass on a computed step."""
        if completed is not None:
            self._completed.put(completed)
        else:
            self._add(task, 0)
        if threading.current_thread() is self._caller:
            self._report()

    def _add(self, task: StepTask, voxels: int, worker: RunningWorker | None = None) -> bool:
        """Count a step and what a worker wrote of it; return False where another worker computes its column."""
        lease = task.lease
        with self._lock:
            if lease.void:
                return False
            for tally in (lease, self._now):
                tally.steps += task.steps
                tally.work += task.work
                tally.voxels += voxels
            if worker is not None:
                worker.voxels += voxels
        return True

    def _write(self) -> None:
        making = list(self._workers)
        while making and not self._stopping.is_set():  # made here because the first steps of a column need none
            making = [worker for worker in making if worker.make()]
        while (item := self._completed.get()) is not END:
            if item is None:
                raise Stopped  # everything computed before the stop was written
            self._write_one(item)
            del item  # its mask too

    def _write_one(self, completed: CompletedStep) -> None:
        worker, task, patch = completed.worker, completed.task, completed.task.patch
        if not task.lease.void:
            began = time.perf_counter()
            with error_context(task, after=True):
                self._write_pieces(completed)
            if self._add(task, patch.write.voxels, worker) and task.ends:
                for index in task.lease.indices:
                    self._output.finish_column(index)
                self._now.columns += len(task.lease.indices)
            ended = time.perf_counter()
            self._writing += ended - began
            if self._trace is not None:
                self._trace.record("writer", str(task), began, ended)
        if completed.buffer is not None:
            worker.free(completed.buffer)

    def _write_pieces(self, completed: CompletedStep) -> None:
        """Write what a step gives of every output."""
        patch = completed.task.patch
        if completed.buffer is None:
            assert self._leave_out is not None, "steps are left out of a masked output alone"
            for number, piece in enumerate(patch.pieces):
                if piece.write.voxels:
                    self._leave_out(piece.write, number)
            return
        outputs = outputs_in(completed.worker.out[completed.buffer], patch, self._maps)
        for number, (piece, voxels) in enumerate(zip(patch.pieces, outputs, strict=True)):
            if completed.hidden is not None:
                np.copyto(voxels, np.nan, where=completed.hidden)
            kept = piece.write.shifted(subtract((0, 0, 0), piece.out.lo))
            if piece.write.voxels:
                self._output.write(piece.write, voxels[(slice(None), *kept.slices)], number)

    def _thread(self, name: str, work: Callable[[], None]) -> Thread:
        return Thread(name, partial(self._guarded, work))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run the work of a thread; an error stops everything and is raised in the calling thread."""
        try:
            work()
        except Stopped:
            return
        except BaseException as error:
            self._errors.append(error)
            self._stop()

    def _stop(self) -> None:
        """Stop all threads. May be called from any thread, more than once."""
        self._stopping.set()
        for worker in self._workers:
            worker.pool.stop()
            worker.queue.stop()
            worker.stop()
        self._completed.put(None)

    def _stage_seconds(self) -> dict[str, float]:
        reading, computing, waiting = (
            sum(worker.seconds[stage] for worker in self._workers) for stage in ("reading", "computing", "waiting")
        )
        side_by_side = {"reading": reading, "computing": computing, "writing": self._writing, "waiting": waiting}
        if self._before is None:
            return side_by_side
        return {"planning": self._before.planning, "preparing": self._before.preparing, **side_by_side}

    def _report(self) -> None:
        if self._progress is None:
            return
        with self._lock:
            for worker in self._workers:  # a worker that gave up may not have ended yet
                self._forget(worker, worker.given_up)
            early, now, whole = self._early, self._now, self._all
            steps, voxels, work = early.steps + now.steps, early.voxels + now.voxels, early.work + now.work
            event = Event(
                early.columns + now.columns,
                whole.columns,
                voxels,
                whole.voxels,
                time.perf_counter() - (self._began if self._before is None else self._before.began),
                self._stage_seconds(),
                int(voxels * self._voxel_bytes),
                steps,
                whole.steps,
                work / whole.work if steps < whole.steps and whole.work else 1.0,
            )
        self._progress(event)
