"""Patches on their way: lanes that read and compute, a writer thread, and nothing unbounded.

A run has a lane for each device, or part of one, that computes; the first computes in the calling thread. All write
through one thread. The first failure stops every lane, but that of a GPU where others are left for its columns: then it
hands back what it had begun, and the run goes on without it. So it does without a processor whose last cells a GPU
computes sooner.
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
from znnpy.patches import Box, Column
from znnpy.run.stoppable_thread import Thread
from znnpy.run.work_queue import ColumnQueue, Lease, WorkQueue
from znnpy.run.worker import (
    END,
    CompletedStep,
    Computes,
    Reads,
    RunningWorker,
    StepTask,
    Stops,
    Traces,
    Voxels,
    Worker,
    beside,
    drain,
)
from znnpy.shapes import subtract

REPORT_SECONDS = 0.2  # between reports while only other threads are at work


class Writes(Protocol):
    """What the pipeline asks of an output."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def done(self) -> Set[int]: ...

    def write(self, box: Box, voxels: Voxels) -> None: ...

    def finish_column(self, index: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """The progress of a run. Counts include the work of earlier runs of the job; the first event comes before any work.

    columns_done   columns, or patches, that are written.
    columns        columns, or patches, in all.
    voxels_done    voxels of the output that are written, of one map.
    voxels         voxels of the output in all, of one map.
    seconds        seconds since this run began: to plan and to prepare too, where it did.
    stage_seconds  seconds of this run spent on "planning" and "preparing", where it did, and then on "reading",
                   "computing", "writing" and "waiting"; these overlap.
    bytes_done     bytes of the output that are written, all maps counted.
    steps_done     steps of columns that are written, or computed where they give no output; a patch is one step.
    steps          steps in all.
    work_done      share of the work that is done, 0 to 1; the first steps of a column are less work than the others.
    preparing      while memory is prepared, the bytes that are done and all of them; None: it is done.
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


@dataclass(frozen=True, slots=True)
class Before:
    """The work of a run before it computed."""

    began: float  # by `time.perf_counter()`
    planning: float  # seconds in which files were opened and checked, devices measured, and the plan was made
    preparing: float  # seconds in which weights and memory were prepared


@dataclass(frozen=True, slots=True)
class WorkerTimings:
    """What one lane did. While it neither computes nor waits it hands on what came out."""

    name: str
    voxels: int  # of the output
    seconds: Mapping[str, float]  # reading, computing, waiting
    lost: str | None  # why it ended before the run did
    given_up: int = 0  # cells that it was late with, and others computed


@dataclass(frozen=True, slots=True)
class Timings:
    """What a run did. Reading and writing overlap computing; waiting is the time the computation stood still."""

    voxels: int  # of the output, written by this run
    columns: int
    seconds: float  # since it began to compute
    stage_seconds: Mapping[str, float]  # planning and preparing, if it did; then those of all lanes: reading to waiting
    lanes: tuple[WorkerTimings, ...]


def run(
    session: Computes,
    crew: Stops,
    source: Reads,
    output: Writes,
    columns: Sequence[Column],
    progress: Callable[[Event], None] | None = None,
    trace: Traces | None = None,
) -> Timings:
    """Read, compute and write every column that `output.done` does not hold; `run_workers` with one lane."""
    lane = Worker(session.plan.device.upper(), session, crew, ColumnQueue(columns, done=output.done))
    return run_workers((lane,), source, output, progress, trace)


def run_workers(
    lanes: Sequence[Worker],
    source: Reads,
    output: Writes,
    progress: Callable[[Event], None] | None = None,
    trace: Traces | None = None,
    before: Before | None = None,
) -> Timings:
    """Read, compute and write what the shares of all lanes hold.

    progress  called in this thread before the first patch, after each that it computed, and after the last is written;
              while it has nothing left to do, a few times a second.
    trace     is told when each lane read and waited, and when outputs were written.
    before    what this run did until now; None: nothing.

    The first exception of any thread stops the others and is raised here once they have ended; so are KeyboardInterrupt
    and whatever else interrupts the calling thread. Patches computed by then are still written, so every column
    reported to the output is whole. What a step says names the output voxels that it writes. A lane that fails with a
    DeviceError or DeviceLostError while another has the same shares is lost, and nothing else stops; nor does it where
    one gives up its last cells to another (`Cells`), which then is no longer there for those of a lane that fails.
    """
    return _Run(lanes, source, output, progress, trace, before).run()


@dataclass(slots=True)
class _Tally:
    """Steps, the work in them, and what they wrote."""

    columns: int = 0
    steps: int = 0
    work: float = 0.0
    voxels: int = 0


class _Run:
    def __init__(
        self,
        lanes: Sequence[Worker],
        source: Reads,
        output: Writes,
        progress: Callable[[Event], None] | None,
        trace: Traces | None,
        before: Before | None,
    ) -> None:
        self._before = before
        self._given, self._lanes = lanes, list[RunningWorker]()
        self._source, self._output, self._progress, self._trace = source, output, progress, trace
        self._landed: SimpleQueue[Any] = SimpleQueue()
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []  # of other threads than the calling one; the first is the cause
        self._turn = threading.Lock()  # of tallies and leases
        self._caller = threading.current_thread()
        self._all, self._early, self._now = _Tally(), _Tally(), _Tally()  # all, of earlier runs, and of this one
        self._count(lanes[0].shares)
        self._voxel_bytes = lanes[0].session.network.output_channels * output.dtype.itemsize
        self._writing = 0.0  # seconds
        self._began = time.perf_counter()

    def _count(self, shares: WorkQueue) -> None:
        for index, column in enumerate(shares.columns):
            for tally in (self._all, self._early) if index in shares.done else (self._all,):
                tally.columns += 1
                tally.steps += len(column.steps)
                tally.work += column.voxels
                tally.voxels += column.voxels

    def run(self) -> Timings:
        try:
            return self._all_done()
        finally:  # all of these refer to this: else buffers, sessions and outputs wait for the garbage collector
            for lane in self._lanes:
                lane.close()
            self._lanes.clear()
            self._errors.clear()
            drain(self._landed)

    def _all_done(self) -> Timings:
        for lane in self._given:
            self._lanes.append(RunningWorker(lane, self._source, self._output.dtype, self._land, self._trace))
        writer = self._thread("writer", self._write)
        threads = [self._thread(f"reader-{number}", lane.read) for number, lane in enumerate(self._lanes)]
        threads += [self._thread(f"lane-{lane.name}", partial(self._attend, lane)) for lane in self._lanes[1:]]
        try:
            for thread in (writer, *threads):
                thread.start()
            self._report()
            self._attend(self._lanes[0])
            for thread in threads:
                self._wait_for(thread)
            self._landed.put(END)
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
            WorkerTimings(lane.name, lane.voxels, dict(lane.seconds), lane.lost, _cells_of(lane.given_up))
            for lane in self._lanes
        )
        return Timings(now.voxels, now.columns, time.perf_counter() - self._began, self._stage_seconds(), timed)

    def _wait_for(self, thread: Thread) -> None:
        """Until it ends, with a report now and then."""
        while not thread.wait(REPORT_SECONDS):
            self._report()

    def _attend(self, lane: RunningWorker) -> None:
        """Have a lane compute; it may be lost where others have its shares, or give up to them."""
        try:
            lane.compute()
        except Stopped:
            if not lane.given_up or self._stopping.is_set():
                raise
            lane.crew.resume()  # for the next run
            with self._turn:
                self._forget(lane, lane.given_up)
        except (DeviceError, DeviceLostError) as error:
            if isinstance(error, VramError) and not self._alike(lane):
                raise  # it may be planned anew
            lane.lose(error)
            with self._turn:
                begun = lane.shares.lose(lane)
                if begun is None:
                    raise
                self._forget(lane, begun)

    def _forget(self, lane: RunningWorker, leases: Sequence[Lease]) -> None:
        """Others compute these anew: they no longer count."""
        for lease in leases:
            self._now.steps -= lease.steps
            self._now.work -= lease.work
            self._now.voxels -= lease.voxels
            lane.voxels -= lease.voxels
            lease.steps, lease.work, lease.voxels = 0, 0.0, 0

    def _alike(self, lane: RunningWorker) -> bool:
        """Others with the same plan are left."""
        return any(other.plan is lane.plan and not other.lost for other in self._lanes if other is not lane)

    def _land(self, turn: StepTask, landed: CompletedStep | None) -> None:
        """A step was computed."""
        if landed is not None:
            self._landed.put(landed)
        else:
            self._add(turn, 0)
        if threading.current_thread() is self._caller:
            self._report()

    def _add(self, turn: StepTask, voxels: int, lane: RunningWorker | None = None) -> bool:
        """Count a step, and what a lane wrote of it; False where its column goes to another lane."""
        lease = turn.lease
        with self._turn:
            if lease.void:
                return False
            for tally in (lease, self._now):
                tally.steps += turn.steps
                tally.work += turn.work
                tally.voxels += voxels
            if lane is not None:
                lane.voxels += voxels
        return True

    def _write(self) -> None:
        making = list(self._lanes)
        while making and not self._stopping.is_set():  # the first steps of a column need none yet
            making = [lane for lane in making if lane.make()]
        while (item := self._landed.get()) is not END:
            if item is None:
                raise Stopped  # what was computed before the stop came first, and is written
            self._write_one(item)
            del item  # its mask too

    def _write_one(self, landed: CompletedStep) -> None:
        lane, turn, patch = landed.lane, landed.turn, landed.turn.patch
        if not turn.lease.void:
            began = time.perf_counter()
            voxels = lane.out[landed.buffer]
            if landed.hidden is not None:
                np.copyto(voxels, np.nan, where=landed.hidden)
            kept = patch.write.shifted(subtract((0, 0, 0), patch.out.lo))
            with beside(turn):
                self._output.write(patch.write, voxels[(slice(None), *kept.slices)])
            if self._add(turn, patch.write.voxels, lane) and turn.ends:
                for index in turn.lease.indices:
                    self._output.finish_column(index)
                self._now.columns += len(turn.lease.indices)
            ended = time.perf_counter()
            self._writing += ended - began
            if self._trace is not None:
                self._trace.record("writer", str(turn), began, ended)
        lane.free(landed.buffer)

    def _thread(self, name: str, work: Callable[[], None]) -> Thread:
        return Thread(name, partial(self._guarded, work))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a thread's work; what it raises is handed to the calling thread, and stops everything."""
        try:
            work()
        except Stopped:
            return
        except BaseException as error:
            self._errors.append(error)
            self._stop()

    def _stop(self) -> None:
        """From any thread, more than once."""
        self._stopping.set()
        for lane in self._lanes:
            lane.crew.stop()
            lane.shares.stop()
            lane.stop()
        self._landed.put(None)

    def _stage_seconds(self) -> dict[str, float]:
        reading, computing, waiting = (
            sum(lane.seconds[stage] for lane in self._lanes) for stage in ("reading", "computing", "waiting")
        )
        side_by_side = {"reading": reading, "computing": computing, "writing": self._writing, "waiting": waiting}
        if self._before is None:
            return side_by_side
        return {"planning": self._before.planning, "preparing": self._before.preparing, **side_by_side}

    def _report(self) -> None:
        if self._progress is None:
            return
        with self._turn:
            for lane in self._lanes:  # one that gave up may not have ended yet
                self._forget(lane, lane.given_up)
            early, now, whole = self._early, self._now, self._all
            steps, voxels, work = early.steps + now.steps, early.voxels + now.voxels, early.work + now.work
            event = Event(
                early.columns + now.columns,
                whole.columns,
                voxels,
                whole.voxels,
                time.perf_counter() - (self._began if self._before is None else self._before.began),
                self._stage_seconds(),
                voxels * self._voxel_bytes,
                steps,
                whole.steps,
                work / whole.work if steps < whole.steps else 1.0,
            )
        self._progress(event)


def _cells_of(leases: Sequence[Lease]) -> int:
    return sum(len(lease.indices) for lease in leases)
