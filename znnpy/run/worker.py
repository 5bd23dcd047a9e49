"""A worker of a run: takes columns, reads their patches ahead, computes them, and passes the results on.

The buffers for input and output patches that the session provides are used again and again; a queue holds at most all
of them. Each queue has one consumer, so one None in it wakes whoever waits there: this is how a worker is told to stop.
Steps are submitted to the session and waited for; a session on a GPU is given the next step before the wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from znnpy.errors import DeviceError, DeviceLostError, Stopped, VramError, ZnnpyError
from znnpy.network import Network
from znnpy.patches import Box, Patch
from znnpy.planner.plan import Plan
from znnpy.run.nan_mask import Mask, NanMask
from znnpy.run.step_work import StepWork
from znnpy.run.work_queue import Lease, WorkQueue
from znnpy.shapes import Vec3

LOOK_SECONDS = 0.0001  # between looks at steps in flight
END: Final = object()  # the last item of a queue

Voxels = npt.NDArray[Any]
T = TypeVar("T")


class Computes(Protocol):
    """The part of a session that a worker needs."""

    @property
    def plan(self) -> Plan: ...

    @property
    def network(self) -> Network: ...

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted and not waited for when the next is; 0: each is waited for at once."""

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return buffers for input and for output patches; each may be made when it is asked for."""

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> Any:
        """Return a ticket for `wait`, in the order of submission; until then the arrays belong to the session.

        step  `Patch.step`, where the steps of a plan differ
        """

    def done(self, ticket: Any) -> bool: ...

    def wait(self, ticket: Any) -> None: ...

    def abandon(self) -> None:
        """Ask nothing of a device that failed any more, and wait for nothing."""


class Stoppable(Protocol):
    """The part of a thread pool that a worker needs."""

    def stop(self) -> None: ...

    def resume(self) -> None: ...

    def check(self) -> None: ...


class StepSource(Protocol):
    """The part of a source that a worker needs; several threads may read at a time."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, lo: Vec3, out: Voxels) -> Mask | None: ...


class Tracer(Protocol):
    """A recorder of when something was done."""

    def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
        """begin, end  seconds of `time.perf_counter`."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A session and the queue that it takes work from. All workers of a run have the same queue."""

    name: str  # of the device, in traces and reports
    session: Computes
    pool: Stoppable
    queue: WorkQueue


@dataclass(frozen=True, slots=True)
class StepTask:
    """One step of a column in a lease, or one patch."""

    lease: Lease
    column: int  # of the lease
    number: int  # of the step in its column
    output: Box  # the output that it writes; in the first steps of a column, that of the first step that writes
    work: float  # its share of the output of the lease, in voxels

    @property
    def patch(self) -> Patch:
        return self.lease.columns[self.column].steps[self.number]

    @property
    def begins(self) -> bool:
        """Return whether nothing is kept for it: it is the first of a column, or the step before was not computed."""
        if self.number == 0:
            return not self.lease.goes_on
        return not self.lease.columns[self.column].steps[self.number - 1].computed

    @property
    def writes(self) -> bool:
        """Return whether it writes output: the first steps of a column do not."""
        return self.patch.writes

    @property
    def ends(self) -> bool:
        """Return whether it is the last step of its lease."""
        columns = self.lease.columns
        return self.column == len(columns) - 1 and self.number == len(columns[-1].steps) - 1

    @property
    def steps(self) -> int:
        """Number of steps of the run that it counts for."""
        if self.patch.repeated:
            return 0
        return 1 if not self.lease.of_cells else len(self.lease.indices) if self.ends else 0

    def __str__(self) -> str:
        if not self.lease.of_cells:
            return f"step {self.number} of {self.lease}"
        return f"step {self.number} of column {self.column} in {self.lease}"


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A computed step, with its output in a buffer of its worker; no buffer: zeros are its output."""

    task: StepTask
    worker: RunningWorker
    buffer: int | None
    hidden: Mask | None  # where its output is NaN


@dataclass(frozen=True, slots=True)
class _ReadStep:
    """A step whose input was read into a buffer; no buffer: it is not computed."""

    task: StepTask
    buffer: int | None
    bad: Mask | None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A submitted step, and its buffers; a step that is not computed waits here for those before it."""

    task: StepTask
    ticket: Any = None  # of the session
    raw: int | None = None
    out: int | None = None
    hidden: Mask | None = None


class RunningWorker:
    """A worker in a run: `read` and `compute` run in threads of their own.

    on_complete  is called with every step that is done, and with its output if it has one, which stays in a buffer of
                 the worker until `free`
    """

    def __init__(
        self,
        worker: Worker,
        source: StepSource,
        dtype: np.dtype[Any],
        on_complete: Callable[[StepTask, CompletedStep | None], None],
        trace: Tracer | None = None,
    ) -> None:
        session = worker.session
        self.name, self.plan, self.queue, self.pool = worker.name, session.plan, worker.queue, worker.pool
        self.seconds = dict.fromkeys(("reading", "computing", "waiting"), 0.0)
        self.out: list[Voxels] = []  # buffers for outputs
        self.voxels = 0  # written
        self.lost: str | None = None  # why it ended before the run did
        self.given_up: Sequence[Lease] = ()  # leases that other workers compute in its place
        self._session, self._source, self._on_complete, self._trace = session, source, on_complete, trace
        self._effort = StepWork(session.plan, session.network)
        self._raw: list[Voxels] = []  # input buffers that were made
        self._raw_free: SimpleQueue[int | None] = SimpleQueue()
        self._raw_full: SimpleQueue[Any] = SimpleQueue()
        self._out_free: SimpleQueue[int | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._in_flight: deque[_InFlight] = deque()
        self._unseen = None if session.plan.area else NanMask(session.plan, session.network.field_of_view)
        reads, writes = self.queue.moves()
        self._raws, outs = session.buffers(source.dtype, dtype, reads=max(1, reads), writes=writes)
        self._outs = iter(outs)
        self.queue.join(self)

    def make(self) -> bool:
        """Make one more output buffer, from one thread only; return False where there are enough."""
        try:
            made = None if self._stopping.is_set() else next(self._outs, None)
        except (DeviceError, DeviceLostError) as error:  # raised in the thread that computes
            self._raw_full.put(error)
            return False
        if made is None:
            return False
        self.out.append(made)
        self._out_free.put(len(self.out) - 1)
        return True

    def lose(self, error: Exception) -> None:
        """End this worker because its device failed or has too little memory."""
        self.lost = str(error)
        if not isinstance(error, VramError):
            self._session.abandon()
        self.stop()

    def give_up(self, leases: Sequence[Lease]) -> None:
        """End this worker because others compute all its leases; its threads end when they look."""
        self.given_up = leases
        self.pool.stop()
        self.stop()

    def free(self, buffer: int) -> None:
        """Release an output buffer whose content was written."""
        self._out_free.put(buffer)

    def stop(self) -> None:
        """End both threads of the worker. May be called from any thread, more than once."""
        self._stopping.set()
        for queue in (self._raw_free, self._raw_full, self._out_free):
            queue.put(None)

    def close(self) -> None:
        """Let go of unfinished steps, which refer to this worker, at the end of a run."""
        self.queue.close()
        self.given_up = ()
        self._in_flight.clear()
        drain(self._raw_full)

    def read(self) -> None:
        try:
            self._read()
        except (DeviceError, DeviceLostError) as error:  # no buffer: raised in the thread that computes
            self._raw_full.put(error)

    def _read(self) -> None:
        unmade = iter(self._raws)
        buffer: int | None = None
        while (lease := self.queue.take(self)) is not None:
            for task in self._tasks(lease):
                if not task.patch.computed:
                    self._raw_full.put(_ReadStep(task, None, None))
                    continue
                buffer = self._raw_buffer(unmade) if buffer is None else buffer
                with self._timed("reading", task), error_context(task, after=True):
                    bad = self._source.read(task.patch.read, front(self._raw[buffer], task.patch.size))
                self._raw_full.put(_ReadStep(task, buffer, bad))
                del bad  # a mask lives as long as its buffer is in use
                buffer = None
            # Take no lease before it can be read: later the speeds are known better.
            buffer = self._raw_buffer(unmade) if buffer is None else buffer
        self._raw_full.put(END)

    def _raw_buffer(self, unmade: Iterator[Voxels]) -> int:
        """Return a free input buffer, or make one while there are fewer than allowed."""
        made = next(unmade, None) if self._raw_free.empty() else None
        if made is not None:
            self._raw.append(made)
            self._raw_free.put(len(self._raw) - 1)
        return self._take(self._raw_free)

    def compute(self) -> None:
        while (read := self._next(self._raw_full)) is not END:
            if isinstance(read, Exception):
                try:
                    raise read
                finally:
                    del read  # it refers to this frame
            task, out = read.task, None
            if read.buffer is None:
                self._submitted(_InFlight(task))
                continue
            if task.writes:
                out = self._next(self._out_free, task)
            with self._timed("computing", task):
                with error_context(task):
                    patch = task.patch
                    voxels = None if out is None else self.out[out]
                    raw = front(self._raw[read.buffer], patch.size)
                    ticket = self._session.submit(raw, voxels, begins=task.begins, step=patch.step)
                hidden = None if self._unseen is None else self._unseen.after(read.bad, writes=task.writes)
            submitted = _InFlight(task, ticket, read.buffer, out, hidden)
            del read, hidden
            self._submitted(submitted)
            del submitted
        while self._in_flight:
            self._complete(self._in_flight.popleft())

    def _submitted(self, step: _InFlight) -> None:
        """Note a step; wait for earlier ones while more are in flight than the session allows."""
        self._in_flight.append(step)
        del step
        while len(self._in_flight) > self._session.max_in_flight:
            self._complete(self._in_flight.popleft())

    def _next(self, queue: SimpleQueue[Any], task: StepTask | None = None) -> Any:
        """Return the next item of `queue`; until there is one, complete steps in flight as soon as they are done."""
        while self._in_flight and queue.empty():
            first = self._in_flight[0]
            if first.raw is None or self._session.done(first.ticket):
                del first
                self._complete(self._in_flight.popleft())
            else:
                del first
                with self._timed("computing", self._in_flight[0].task):
                    time.sleep(LOOK_SECONDS)
        with self._timed("waiting", task):
            return self._take(queue)

    def _complete(self, step: _InFlight) -> None:
        """Wait for the step that was submitted first, and release its input buffer."""
        task = step.task
        if step.raw is not None:
            with self._timed("computing", task), error_context(task):
                self._session.wait(step.ticket)
            self._raw_free.put(step.raw)
        if task.ends:
            self.queue.finish(task.lease)
        gives = step.out is not None or step.raw is None
        completed = CompletedStep(task, self, step.out, step.hidden) if gives else None
        del step  # and its mask
        self._on_complete(task, completed)

    def _tasks(self, lease: Lease) -> Iterator[StepTask]:
        efforts = [self._effort.of_steps(column.steps, goes_on=lease.goes_on) for column in lease.columns]
        voxels = sum(column.computed_voxels for column in lease.columns)
        share = voxels / (sum(map(sum, efforts)) or 1.0)
        for index, (column, effort) in enumerate(zip(lease.columns, efforts, strict=True)):
            written = [next((one.write for one in step.pieces if one.write.voxels), None) for step in column.steps]
            first = next(box for box in written if box is not None)
            for number, box in enumerate(written):
                output = first if box is None else box
                yield StepTask(lease, index, number, output, share * effort[number])

    def _take(self, queue: SimpleQueue[T | None]) -> T:
        item = queue.get()
        if item is None or self._stopping.is_set():
            raise Stopped
        return item

    @contextmanager
    def _timed(self, stage: str, task: StepTask | None) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[stage] += ended - began
            if self._trace is not None and stage != "computing":  # the session traces that in detail
                self._trace.record(f"{self.name} {stage}", "nothing to do" if task is None else str(task), began, ended)


def values_per_voxel(plan: Plan, network: Network) -> Fraction:
    """Return the values of all outputs for a voxel of the first one."""
    if plan.area is None or not plan.area.others:
        return Fraction(network.output_channels)
    sizes = zip(network.output_maps, plan.area.regions, strict=True)
    return Fraction(sum(maps * region.voxels for maps, region in sizes), plan.area.region.voxels)


def outputs_in(buffer: Voxels, patch: Patch, maps: Sequence[int]) -> Iterator[Voxels]:
    """Yield what a step gave in a buffer, (maps, z, y, x) for each output with so many maps."""
    if patch.size is None:  # a buffer is one output, as large as the plan says
        yield buffer
        return
    first = 0
    for many, piece in zip(maps, patch.pieces, strict=True):
        count = many * piece.out.voxels
        yield buffer[first : first + count].reshape(many, *piece.out.size)
        first += count


def front(buffer: Voxels, size: Vec3 | None) -> Voxels:
    """Return the first voxels of a buffer (maps, z, y, x) as an array of `size`; None: all of it."""
    if size is None or size == buffer.shape[1:]:
        return buffer
    maps = buffer.shape[0]
    return buffer.reshape(-1)[: maps * prod(size)].reshape(maps, *size)


def drain(queue: SimpleQueue[Any]) -> None:
    """Empty a queue, and wake whoever waits there."""
    while not queue.empty():
        queue.get()
    queue.put(None)


@contextmanager
def error_context(task: StepTask, *, after: bool = False) -> Iterator[None]:
    """Add a step and its output voxels to the message of an error; one that is no ZnnpyError gets them as a note.

    after  end the message with them: the step is not the cause, but for example a disk
    """
    place = f"output voxels (z, y, x) = {task.output.lo} to {task.output.hi}, {task}"
    try:
        yield
    except ZnnpyError as error:
        raise (type(error)(f"{error} ({place})") if after else error.with_context(place)) from None
    except Exception as error:
        error.add_note(place)
        raise
