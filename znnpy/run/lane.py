"""One that computes, and its reader: takes columns, reads their patches ahead, and hands on what comes out.

A few buffers for input patches and as many for output patches go round, those that the session gives; a queue holds at
most all of them. Each queue has one consumer, so one None in it wakes whoever waits there: that is how a lane is told
to stop. Steps are submitted to the session and waited for: one that computes on a GPU is given the next before that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from znnpy.errors import DeviceError, DeviceLostError, Stopped, VramError, ZnnpyError
from znnpy.network import Network
from znnpy.patches import Box, Column, Patch
from znnpy.planner.plan import Plan
from znnpy.run.shares import Lease, Queue
from znnpy.run.unseen import Mask, Unseen
from znnpy.shapes import Vec3

LOOK_SECONDS = 0.0001  # between looks at what is under way
END: Final = object()  # of a queue

Voxels = npt.NDArray[Any]
T = TypeVar("T")


class Computes(Protocol):
    """What a lane asks of a session."""

    @property
    def plan(self) -> Plan: ...

    @property
    def network(self) -> Network: ...

    @property
    def under_way(self) -> int:
        """How many steps may be submitted and not waited for when the next is; 0: each is waited for at once."""

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """For patches on their way in and on their way out; each may be made when it is asked for."""

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True) -> Any:
        """A ticket to `wait` with, in the order of submission; until then the arrays belong to the session."""

    def done(self, ticket: Any) -> bool: ...

    def wait(self, ticket: Any) -> None: ...

    def abandon(self) -> None:
        """Its device failed: nothing is asked of it any more, nor waited for."""


class Stops(Protocol):
    """What a lane asks of a crew."""

    def stop(self) -> None: ...

    def resume(self) -> None: ...

    def check(self) -> None: ...


class Reads(Protocol):
    """What a lane asks of a source; several read at a time."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, lo: Vec3, out: Voxels) -> Mask | None: ...


class Traces(Protocol):
    """What is told of what was done when."""

    def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
        """begin, end  seconds of `time.perf_counter`."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Who computes what. All lanes of a run have the same shares."""

    name: str  # of the device
    session: Computes
    crew: Stops
    shares: Queue


@dataclass(frozen=True, slots=True)
class Turn:
    """A patch on its way."""

    lease: Lease
    column: int  # of the lease
    number: int  # of the step in its column
    output: Box  # what it writes; of a column's first steps, which write nothing, what the next does that writes
    work: float  # its share of what the lease writes, in voxels

    @property
    def patch(self) -> Patch:
        return self.lease.columns[self.column].steps[self.number]

    @property
    def begins(self) -> bool:
        """The first of a column, unless it goes on with the one before."""
        return self.number == 0 and not self.lease.goes_on

    @property
    def writes(self) -> bool:
        """Not so in the first steps of a column that walks."""
        return self.patch.write.voxels > 0

    @property
    def ends(self) -> bool:
        """The last of its lease."""
        columns = self.lease.columns
        return self.column == len(columns) - 1 and self.number == len(columns[-1].steps) - 1

    @property
    def steps(self) -> int:
        """For how many it counts in the run."""
        return 1 if not self.lease.of_cells else len(self.lease.indices) if self.ends else 0

    def __str__(self) -> str:
        if not self.lease.of_cells:
            return f"step {self.number} of {self.lease}"
        return f"step {self.number} of column {self.column} in {self.lease}"


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that was computed; its output is in a buffer of its lane."""

    turn: Turn
    lane: Computing
    buffer: int
    hidden: Mask | None  # where its output is unknown


@dataclass(frozen=True, slots=True)
class _Read:
    """A patch that was read, in a buffer."""

    turn: Turn
    buffer: int
    bad: Mask | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was submitted, and its buffers."""

    turn: Turn
    ticket: Any  # of the session
    raw: int
    out: int | None
    hidden: Mask | None


class Effort:
    """What the steps of columns cost, as a plan has it: the voxels that come out, less where few layers run."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self._ahead = plan.warmup_work(network) if plan.streams else ()
        self._whole = float(prod(plan.patch_out))

    def of(self, number: int) -> float:
        """Of a step of a column, counted from its first."""
        return self._whole * (self._ahead[number] if number < len(self._ahead) else 1.0)

    def of_steps(self, lease: Lease, column: Column) -> list[float]:
        """Of a column of a lease: one that goes on has no steps before its output."""
        first = len(self._ahead) if lease.goes_on else 0
        return [self.of(first + number) for number in range(len(column.steps))]


class Computing:
    """A lane at work: `read` and `compute` run in threads of their own.

    land  is told of every step that is done: of its output, where it has one, which is the lane's until `free`.
    """

    def __init__(
        self,
        lane: Lane,
        source: Reads,
        dtype: np.dtype[Any],
        land: Callable[[Turn, Landed | None], None],
        trace: Traces | None = None,
    ) -> None:
        session = lane.session
        self.name, self.plan, self.shares, self.crew = lane.name, session.plan, lane.shares, lane.crew
        self.seconds = dict.fromkeys(("reading", "computing", "waiting"), 0.0)
        self.out: list[Voxels] = []  # buffers for outputs
        self.voxels = 0  # written
        self.lost: str | None = None  # why it ended before the run did
        self.given_up: Sequence[Lease] = ()  # what others compute in its stead
        self._session, self._source, self._land_step, self._trace = session, source, land, trace
        self._effort = Effort(session.plan, session.network)
        self._raw: list[Voxels] = []  # buffers for patches that are made
        self._raw_free: SimpleQueue[int | None] = SimpleQueue()
        self._raw_full: SimpleQueue[Any] = SimpleQueue()
        self._out_free: SimpleQueue[int | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._flights: deque[_Flight] = deque()
        self._unseen = Unseen(session.plan, session.network.field_of_view)
        reads, writes = self.shares.moves()
        self._raws, outs = session.buffers(source.dtype, dtype, reads=reads, writes=writes)
        self._outs = iter(outs)
        self.shares.join(self)

    def make(self) -> bool:
        """One more buffer for outputs, from any one thread; False where there are enough."""
        try:
            made = None if self._stopping.is_set() else next(self._outs, None)
        except (DeviceError, DeviceLostError) as error:  # for who computes on it
            self._raw_full.put(error)
            return False
        if made is None:
            return False
        self.out.append(made)
        self._out_free.put(len(self.out) - 1)
        return True

    def lose(self, error: Exception) -> None:
        """Its device failed, or gives no memory: it computes nothing any more."""
        self.lost = str(error)
        if not isinstance(error, VramError):
            self._session.abandon()
        self.stop()

    def give_up(self, leases: Sequence[Lease]) -> None:
        """Others compute these, all that it had taken: its threads end as soon as they look."""
        self.given_up = leases
        self.crew.stop()
        self.stop()

    def free(self, buffer: int) -> None:
        """What came out in it was written."""
        self._out_free.put(buffer)

    def stop(self) -> None:
        """From any thread, more than once: both threads of the lane end."""
        self._stopping.set()
        for queue in (self._raw_free, self._raw_full, self._out_free):
            queue.put(None)

    def close(self) -> None:
        """The run has ended: what was on its way, which refers to this, is let go of."""
        self.shares.close()
        self.given_up = ()
        self._flights.clear()
        drain(self._raw_full)

    def read(self) -> None:
        try:
            self._read()
        except (DeviceError, DeviceLostError) as error:  # it refused a buffer: that is for who computes on it
            self._raw_full.put(error)

    def _read(self) -> None:
        unmade = iter(self._raws)
        buffer: int | None = None
        while (lease := self.shares.take(self)) is not None:
            for turn in self._turns(lease):
                buffer = self._raw_buffer(unmade) if buffer is None else buffer
                with self._timed("reading", turn), beside(turn):
                    bad = self._source.read(turn.patch.read, self._raw[buffer])
                self._raw_full.put(_Read(turn, buffer, bad))
                del bad  # masks go where their buffers go, so that there are no more of them
                buffer = None
            buffer = self._raw_buffer(unmade)  # no lease before it can be read: later more is known of who is fast
        self._raw_full.put(END)

    def _raw_buffer(self, unmade: Iterator[Voxels]) -> int:
        """One that is free, or made now while there are fewer than there may be."""
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
            turn, out = read.turn, None
            if turn.writes:
                out = self._next(self._out_free, turn)
            with self._timed("computing", turn):
                with within(turn):
                    voxels = None if out is None else self.out[out]
                    ticket = self._session.submit(self._raw[read.buffer], voxels, begins=turn.begins)
                hidden = self._unseen.after(read.bad, writes=turn.writes)
            self._flights.append(_Flight(turn, ticket, read.buffer, out, hidden))
            del read, hidden
            while len(self._flights) > self._session.under_way:
                self._land(self._flights.popleft())
        while self._flights:
            self._land(self._flights.popleft())

    def _next(self, queue: SimpleQueue[Any], turn: Turn | None = None) -> Any:
        """What comes from `queue`; while nothing does, what is under way is let go of as soon as it is done."""
        while self._flights and queue.empty():
            if self._session.done(self._flights[0].ticket):
                self._land(self._flights.popleft())
            else:
                with self._timed("computing", self._flights[0].turn):
                    time.sleep(LOOK_SECONDS)
        with self._timed("waiting", turn):
            return self._take(queue)

    def _land(self, flight: _Flight) -> None:
        """Wait for the step that was submitted first, and let its buffers go."""
        turn = flight.turn
        with self._timed("computing", turn), within(turn):
            self._session.wait(flight.ticket)
        self._raw_free.put(flight.raw)
        if turn.ends:
            self.shares.finish(turn.lease)
        landed = None if flight.out is None else Landed(turn, self, flight.out, flight.hidden)
        del flight  # its mask too
        self._land_step(turn, landed)

    def _turns(self, lease: Lease) -> Iterator[Turn]:
        efforts = [self._effort.of_steps(lease, column) for column in lease.columns]
        share = sum(column.voxels for column in lease.columns) / sum(map(sum, efforts))
        for index, (column, effort) in enumerate(zip(lease.columns, efforts, strict=True)):
            first = next(step.write for step in column.steps if step.write.voxels)
            for number, patch in enumerate(column.steps):
                output = patch.write if patch.write.voxels else first
                yield Turn(lease, index, number, output, share * effort[number])

    def _take(self, queue: SimpleQueue[T | None]) -> T:
        item = queue.get()
        if item is None or self._stopping.is_set():
            raise Stopped
        return item

    @contextmanager
    def _timed(self, stage: str, turn: Turn | None) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[stage] += ended - began
            if self._trace is not None and stage != "computing":  # of that the session tells more
                self._trace.record(f"{self.name} {stage}", "nothing to do" if turn is None else str(turn), began, ended)


def drain(queue: SimpleQueue[Any]) -> None:
    """Nothing is in it any more, but for who still waits there."""
    while not queue.empty():
        queue.get()
    queue.put(None)


@contextmanager
def within(turn: Turn) -> Iterator[None]:
    """What fails in a step names it first, and the output voxels that it is for; what is no ZnnpyError in a note."""
    try:
        yield
    except ZnnpyError as error:
        raise error.with_context(_place(turn)) from None
    except Exception as error:
        error.add_note(_place(turn))
        raise


@contextmanager
def beside(turn: Turn) -> Iterator[None]:
    """What fails beside a step, a disk for one, names it last."""
    try:
        yield
    except ZnnpyError as error:
        raise type(error)(f"{error} ({_place(turn)})") from None
    except Exception as error:
        error.add_note(_place(turn))
        raise


def _place(turn: Turn) -> str:
    return f"output voxels (z, y, x) = {turn.output.lo} to {turn.output.hi}, {turn}"
