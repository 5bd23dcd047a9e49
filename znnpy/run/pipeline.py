"""Patches on their way: a reader thread, the computation in the calling thread, a writer thread, and nothing unbounded.

A few buffers for input patches and as many for output patches go round, those that the session gives; a queue holds at
most all of them. Each queue has one consumer, so one None in it wakes whoever waits there: that is how a run is told to
stop. Steps are submitted to the session and waited for: one that computes on a GPU is given the next before that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.network import Network
from znnpy.patches import Box, Column, Patch
from znnpy.planner.plan import Plan
from znnpy.run.unseen import Mask, Unseen
from znnpy.shapes import Vec3, subtract

LOOK_SECONDS = 0.0001  # between looks at what is under way

Voxels = npt.NDArray[Any]
T = TypeVar("T")


class Computes(Protocol):
    """What the pipeline asks of a session."""

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


class Stops(Protocol):
    """What the pipeline asks of a crew."""

    def stop(self) -> None: ...

    def check(self) -> None: ...


class Reads(Protocol):
    """What the pipeline asks of a source."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, lo: Vec3, out: Voxels) -> Mask | None: ...


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
    """How far a run is. Counts include what earlier runs of the job finished; the first event comes before any work."""

    columns_done: int  # written
    columns: int
    voxels_done: int  # of the output, written
    voxels: int
    seconds: float  # since this run began
    stage_seconds: Mapping[str, float]  # of this run: reading, computing, writing, waiting
    bytes_done: int  # of the output, written: `voxels_done` of every map
    steps_done: int  # of columns; a patch is a column of one. Written, or computed where they give no output
    steps: int
    work_done: float  # share of the work of all steps, 0 to 1: few layers run in the first of a column that walks


@dataclass(frozen=True, slots=True)
class Timings:
    """What a run did. Reading and writing overlap computing; waiting is the time the computation stood still."""

    voxels: int  # of the output, written by this run
    columns: int
    seconds: float
    stage_seconds: Mapping[str, float]  # reading, computing, writing, waiting


def run(
    session: Computes,
    crew: Stops,
    source: Reads,
    output: Writes,
    columns: Sequence[Column],
    progress: Callable[[Event], None] | None = None,
) -> Timings:
    """Read, compute and write every column that `output.done` does not hold.

    progress  called in this thread before the first patch, after each computed one, and after the last is written.

    The first exception of any stage stops the others and is raised here once they have ended; so are KeyboardInterrupt
    and whatever else interrupts the calling thread. Patches computed by then are still written, so every column
    reported to the output is whole. A result that overflows names the output voxels that its patch writes.
    """
    return _Run(session, crew, source, output, columns, progress).run()


@dataclass(frozen=True, slots=True)
class _Turn:
    """A patch on its way."""

    column: int  # its index
    patch: Patch
    output: Box  # what it writes; of a column's first steps, which write nothing, what the next does that writes
    work: float  # that of a step in which every layer runs is 1
    begins: bool  # the first of its column
    ends: bool  # the last

    @property
    def writes(self) -> bool:
        """Not so in the first steps of a column that walks."""
        return self.patch.write.voxels > 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was submitted, and its buffers."""

    turn: _Turn
    ticket: Any  # of the session
    raw: int
    out: int | None
    hidden: Mask | None


@dataclass(slots=True)
class _Tally:
    """Steps, and the work in them."""

    steps: int = 0
    work: float = 0.0

    def add(self, work: float, steps: int = 1) -> None:
        self.steps += steps
        self.work += work


class _Run:
    def __init__(
        self,
        session: Computes,
        crew: Stops,
        source: Reads,
        output: Writes,
        columns: Sequence[Column],
        progress: Callable[[Event], None] | None,
    ) -> None:
        plan, network = session.plan, session.network
        self._session, self._crew, self._source, self._output = session, crew, source, output
        self._columns, self._done = columns, output.done
        self._progress = progress
        self._raw_free: SimpleQueue[int | None] = SimpleQueue()
        self._raw_full: SimpleQueue[tuple[int, Mask | None] | None] = SimpleQueue()
        self._out_free: SimpleQueue[int | None] = SimpleQueue()
        self._out_full: SimpleQueue[tuple[int, Mask | None] | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []  # of the two threads; the first is the cause
        self._seconds = dict.fromkeys(("reading", "computing", "writing", "waiting"), 0.0)
        self._began = time.perf_counter()
        self._ahead = plan.work_ahead(network) if plan.walks else ()
        self._before = 0  # voxels, by earlier runs
        self._voxels = 0
        self._all, self._early = _Tally(), _Tally()  # steps of all columns, and of earlier runs
        writes = 0  # steps of this run that give output
        for index, column in enumerate(columns):
            steps, work = len(column.steps), sum(self._work(number) for number in range(len(column.steps)))
            self._voxels += column.voxels
            self._all.add(work, steps)
            if index in output.done:
                self._before += column.voxels
                self._early.add(work, steps)
            else:
                writes += sum(step.write.voxels > 0 for step in column.steps)
        reads = self._all.steps - self._early.steps
        self._raws, self._outs = session.buffers(source.dtype, output.dtype, reads=reads, writes=writes)
        self._raw: list[Voxels] = []  # of them those that are made
        self._out: list[Voxels] = []
        self._flights: deque[_Flight] = deque()
        self._voxel_bytes = network.output_channels * output.dtype.itemsize
        self._unseen = Unseen(plan, network.field_of_view)
        self._written = 0  # voxels, by this run
        self._finished = 0  # columns, by this run
        self._computed, self._kept = _Tally(), _Tally()  # steps of this run without output, and with one: written

    def run(self) -> Timings:
        # Daemons: a second Ctrl-C gets out even if a thread hangs in a read that never returns.
        threads = [
            threading.Thread(target=self._guarded, args=(stage,), name=f"znnpy-{name}", daemon=True)
            for name, stage in (("reader", self._read), ("writer", self._write))
        ]
        for thread in threads:
            thread.start()
        try:
            self._compute()
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._stop()
            for thread in threads:
                thread.join()
            if isinstance(error, Stopped) and self._errors:
                raise self._errors[0] from None  # Stopped only said that a thread failed
            raise
        if self._errors:
            raise self._errors[0]
        self._report()
        return Timings(self._written, self._finished, time.perf_counter() - self._began, dict(self._seconds))

    def _compute(self) -> None:
        self._report()
        for turn in self._patches():
            self._land_before(self._raw_full)
            with self._timed("waiting"):
                raw, bad = self._take(self._raw_full)
            out = None
            if turn.writes:
                self._land_before(self._out_free)
                with self._timed("waiting"):
                    out = self._take(self._out_free)
            with self._timed("computing"):
                with _where(turn):
                    voxels = None if out is None else self._out[out]
                    ticket = self._session.submit(self._raw[raw], voxels, begins=turn.begins)
                hidden = self._unseen.after(bad, writes=turn.writes)
            self._flights.append(_Flight(turn, ticket, raw, out, hidden))
            del bad, hidden  # masks go where their buffers go, so that there are no more of them
            while len(self._flights) > self._session.under_way:
                self._land(self._flights.popleft())
        while self._flights:
            self._land(self._flights.popleft())

    def _land_before(self, queue: SimpleQueue[Any]) -> None:
        """While nothing comes from `queue`, let go of what is under way as soon as it is done."""
        while self._flights and queue.empty():
            if self._session.done(self._flights[0].ticket):
                self._land(self._flights.popleft())
            else:
                with self._timed("computing"):
                    time.sleep(LOOK_SECONDS)

    def _land(self, flight: _Flight) -> None:
        """Wait for the step that was submitted first, and let its buffers go."""
        with self._timed("computing"), _where(flight.turn):
            self._session.wait(flight.ticket)
        self._raw_free.put(flight.raw)
        if flight.out is not None:
            self._out_full.put((flight.out, flight.hidden))
        else:
            self._computed.add(flight.turn.work)
        del flight  # its mask too
        self._report()

    def _read(self) -> None:
        unmade = iter(self._raws)
        for turn in self._patches():
            made = next(unmade, None) if self._raw_free.empty() else None
            if made is not None:
                self._raw.append(made)
                self._raw_free.put(len(self._raw) - 1)
            buffer = self._take(self._raw_free)
            with self._timed("reading"):
                bad = self._source.read(turn.patch.read, self._raw[buffer])
            self._raw_full.put((buffer, bad))

    def _write(self) -> None:
        for number, made in enumerate(self._outs):  # the first steps of a column need none yet
            self._out.append(made)
            self._out_free.put(number)
            if self._stopping.is_set():
                break
        for turn in self._patches():
            if not turn.writes:
                continue
            item = self._out_full.get()
            if item is None:
                raise Stopped  # what was computed before the stop came first, and is written
            buffer, bad = item
            voxels, patch = self._out[buffer], turn.patch
            with self._timed("writing"):
                if bad is not None:
                    np.copyto(voxels, np.nan, where=bad)
                kept = patch.write.shifted(subtract((0, 0, 0), patch.out.lo))
                self._output.write(patch.write, voxels[(slice(None), *kept.slices)])
                self._written += patch.write.voxels
                self._kept.add(turn.work)
                if turn.ends:
                    self._output.finish_column(turn.column)
                    self._finished += 1
            del item, bad
            self._out_free.put(buffer)

    def _patches(self) -> Iterator[_Turn]:
        """What there is to do, in the order of all three stages."""
        for index in range(len(self._columns)):
            if index not in self._done:
                steps = self._columns[index].steps
                first = next(step.write for step in steps if step.write.voxels)
                for number, patch in enumerate(steps):
                    output, ends = patch.write if patch.write.voxels else first, number == len(steps) - 1
                    yield _Turn(index, patch, output, self._work(number), number == 0, ends)

    def _work(self, number: int) -> float:
        """Of a step of a column."""
        return self._ahead[number] if number < len(self._ahead) else 1.0

    def _guarded(self, stage: Callable[[], None]) -> None:
        """Run a thread's stage; what it raises is handed to the calling thread, and stops everything."""
        try:
            stage()
        except Stopped:
            return
        except BaseException as error:
            self._errors.append(error)
            self._stop()

    def _stop(self) -> None:
        """From any thread, more than once."""
        self._stopping.set()
        self._crew.stop()
        for queue in (self._raw_free, self._raw_full, self._out_free, self._out_full):
            queue.put(None)

    def _take(self, queue: SimpleQueue[T | None]) -> T:
        item = queue.get()
        if item is None or self._stopping.is_set():
            raise Stopped
        return item

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - began

    def _report(self) -> None:
        if self._progress is None:
            return
        tallies = (self._early, self._computed, self._kept)
        steps = sum(tally.steps for tally in tallies)
        self._progress(
            Event(
                len(self._done) + self._finished,
                len(self._columns),
                self._before + self._written,
                self._voxels,
                time.perf_counter() - self._began,
                dict(self._seconds),
                (self._before + self._written) * self._voxel_bytes,
                steps,
                self._all.steps,
                sum(tally.work for tally in tallies) / self._all.work if steps < self._all.steps else 1.0,
            )
        )


@contextmanager
def _where(turn: _Turn) -> Iterator[None]:
    """A result that overflows names the output voxels of its step."""
    try:
        yield
    except ValuesOverflowError as error:
        lo, hi = turn.output.lo, turn.output.hi
        raise error.with_context(f"output voxels (z, y, x) = {lo} to {hi}") from None
