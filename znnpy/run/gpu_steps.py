"""Steps on a GPU: their uploads and downloads beside the computation, their peaks, and the waits for them.

A step is uploaded into a slot on the device, loaded from it, computed, stored into another slot, and downloaded. There
are two slots of each kind: while one step is computed, the next patch is uploaded and the last one downloaded. Events
between the streams keep the order. The host waits only for the end of a step, and notices Ctrl-C meanwhile.

Peaks  Each step in flight has some float32 on the device, in which the largest |values| of its tensors are gathered.
       They are downloaded with the output of the step, and overflow is found then.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import DeviceError, OutputError, ValuesOverflowError
from znnpy.kernels.gpu.device import Device, find_gpu
from znnpy.kernels.gpu.load_store import LoadStore
from znnpy.messages import option
from znnpy.network import Normalise
from znnpy.planner.memory import STAGED
from znnpy.run.backend import UNTRACED, Voxels
from znnpy.run.gpu_trace import GpuTrace
from znnpy.shapes import FLOAT32, Vec3

if TYPE_CHECKING:
    from znnpy.run.trace import Spans

LOOK_SECONDS = 0.0001  # between looks at an event; a wait inside CUDA would not notice Ctrl-C
QUEUED_SECONDS = 0.2  # most predicted seconds of queued layers: after Ctrl-C they end before memory is freed
FLOAT16_END = 65520.0  # this and larger values round to infinity in float16


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step in flight, and the arrays of the host that it reads and writes."""

    raw: Voxels | None  # None: its input is handed over by another stage
    out: Voxels | None  # as it was given
    landing: Voxels | None  # `out`, or an array in C order in its place
    done: Any  # event: everything is downloaded


@dataclass(frozen=True, slots=True)
class _Lent:
    """The memory of a step on the device until its wait. Tickets, which may outlive the session, do not refer to it."""

    raw: Any | None  # slot
    out: Any | None
    words: Any  # peaks
    address: int  # of the first of them
    peaks: npt.NDArray[np.float32]  # on the host, pinned


class Checks(Protocol):
    """The part of a thread pool that a backend needs."""

    def check(self) -> None: ...


class GpuSteps(ABC):
    """The common part of sessions on a GPU. It opens a device unless it is given one.

    One thread may begin and end steps while another waits.

    VramError where the device has less memory than the plan says.
    """

    max_in_flight = 1

    def __init__(
        self,
        pool: Checks,
        device: Device | None,
        trace: Spans | None,
        lane: str,
        *,
        values: np.dtype[Any],
        normalise: Normalise | None,
        windows: Sequence[Vec3] = (),
    ) -> None:
        self._pool, self._device, self._trace, self._lane = pool, device, trace, lane
        self._kept: np.dtype[Any] = values
        self._moved: dict[str, Any] = {"windows": windows, "normalise": normalise}
        self._lock = threading.Lock()  # protects what steps use of the device
        self._release()

    def _release(self) -> None:
        """Let go of every array, which gives its memory back."""
        self.executor: Any = None
        self._moves: LoadStore | None = None
        self._types: tuple[np.dtype[Any], np.dtype[Any]] | None = None  # of raw patches and of the output
        self._raw_slots: list[Any] = []  # free slots
        self._out_slots: list[Any] = []
        self._words: deque[tuple[Any, npt.NDArray[np.float32]]] = deque()  # free peaks, on the device and on the host
        self._last_words: Any = None  # peaks of the step before, on the device
        self._lent: deque[_Lent] = deque()  # to the steps that were not waited for
        self._step: Ticket | None = None  # the step that was begun and not ended
        self._queued: deque[tuple[Any, float]] = deque()  # layers: event of the end, predicted seconds
        self._queued_seconds = 0.0
        self._traced: GpuTrace | None = None
        self._open = ExitStack()

    @property
    def _moving(self) -> LoadStore:
        if self._moves is None:
            raise RuntimeError("nothing is moved before the first step begins")
        return self._moves

    def _compile(self, raw: np.dtype[Any], out: np.dtype[Any] | None) -> None:
        """Compile what moves data of these dtypes; the first steps of a column do not know the output's."""
        known = self._types
        wanted = (raw, out or (known[1] if known else np.dtype(np.float32)))
        if wanted != known:
            self._moves = LoadStore(self.executor, raw=wanted[0], values=self._kept, out=wanted[1], **self._moved)
            self._types = wanted

    @abstractmethod
    def _check(self, ticket: Ticket, peaks: Sequence[float]) -> None:
        """Raise ValuesOverflowError if a peak of the step exceeds the dtype of its values."""

    def __enter__(self) -> Self:
        self.executor = self._device or self._open.enter_context(Device(find_gpu()))
        return self

    def __exit__(self, *cause: Any) -> None:
        if self.executor.abandoned:
            with self._open:
                self._release()
            return
        try:
            for stream in (self.executor.uploads, self.executor.stream, self.executor.downloads):
                self._await(self._mark(stream))
            if self._traced is not None:
                self._traced.end_all()
        except (DeviceError, OutputError):
            if cause[0] is None:
                raise  # else it is most likely the error that is raised already
        finally:
            with self._open:
                self._release()

    def abandon(self) -> None:
        """Give up a device. If it still answers, it gives its memory back."""
        try:
            self.executor.synchronize()
        except DeviceError:
            self.executor.abandon()

    def _allocate_slots(self, raw_bytes: int, out_bytes: int, *, reads: int, writes: int, peaks: int) -> None:
        """Allocate what steps in flight use.

        reads, writes  patches on their way in, and on their way out, that there are at a time
        peaks          float32 of each step
        """
        device = self.executor
        self._raw_slots = [device.allocate(raw_bytes, "patches on their way in") for _ in range(reads)]
        self._out_slots = [device.allocate(out_bytes, "patches on their way out") for _ in range(writes)]
        for _ in range(STAGED):
            words = device.view(device.allocate(FLOAT32 * peaks, "peaks"), (peaks,), np.float32)
            self._words.append((words, device.pinned((peaks,), np.float32)))
        if self._trace is not None:
            self._traced = GpuTrace(self._trace, device)

    def begin_step(self, raw: Voxels | None, out: Voxels | None, *, begins: bool) -> tuple[Any, Any | None]:
        """Begin a step; `raw` None: its input is handed over part by part (`fetch`)."""
        self._pool.check()
        device = self.executor
        if raw is not None:
            raw = np.ascontiguousarray(raw, raw.dtype.newbyteorder("="))
        self._compile(np.dtype(np.float32) if raw is None else raw.dtype, None if out is None else out.dtype)
        landing = out if out is None or out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        with self._lock:
            before, lent = self._lend(raw, out)
        words = lent.words
        self._step = Ticket(raw, out, landing, device.event())
        if self._traced is not None:
            self._traced.begin()
        staged = None
        if raw is not None:
            staged = device.view(lent.raw, raw.shape, raw.dtype)
            with self._span("upload", device.uploads, "upload"):
                device.copy_async(staged, raw, device.uploads)
            device.stream.wait_event(self._mark(device.uploads))
        if begins:
            device.clear(words)
        else:
            device.copy_async(words, before, device.stream)
        return staged, None if out is None else device.view(lent.out, out.shape, out.dtype)

    def _lend(self, raw: Voxels | None, out: Voxels | None) -> tuple[Any, _Lent]:
        """Return the peaks of the step before, and what one more step uses on the device."""
        if len(self._lent) > self.max_in_flight:
            raise RuntimeError(f"{len(self._lent)} steps are under way: wait for the first before another is submitted")
        raw_slot = None if raw is None else self._slot(self._raw_slots, raw.nbytes, "patches on their way in")
        out_slot = None if out is None else self._slot(self._out_slots, out.nbytes, "patches on their way out")
        before = self._lent[-1].words if self._lent else self._last_words
        words, peaks = self._words.popleft()
        lent = _Lent(raw_slot, out_slot, words, self.executor.address(words), peaks)
        self._lent.append(lent)
        return before, lent

    def end_step(self) -> Ticket:
        device, lent = self.executor, self._lent[-1]
        assert self._step is not None
        step, self._step = self._step, None
        device.downloads.wait_event(self._mark(device.stream))
        with self._span("download", device.downloads, "download"):
            device.copy_async(lent.peaks, lent.words, device.downloads)
            if step.landing is not None:
                landed = device.view(lent.out, step.landing.shape, step.landing.dtype)
                device.copy_async(step.landing, landed, device.downloads)
        device.downloads.record(step.done)
        return step

    def done(self, ticket: Ticket) -> bool:
        with self.executor.calling("a step of the run"):
            return bool(ticket.done.done)

    def wait(self, ticket: Ticket) -> None:
        self._await(ticket.done, self._pool)
        if self._traced is not None:
            self._traced.end()
        with self._lock:
            lent = self._lent.popleft()
            peaks = lent.peaks.tolist()
            if lent.raw is not None:
                self._raw_slots.append(lent.raw)
            if lent.out is not None:
                self._out_slots.append(lent.out)
            self._words.append((lent.words, lent.peaks))
            self._last_words = lent.words
        self._check(ticket, peaks)
        if ticket.out is not None and ticket.landing is not None and ticket.landing is not ticket.out:
            ticket.out[...] = ticket.landing

    def _wait_for_room(self) -> None:
        """Wait until few enough seconds of layers are queued."""
        while self._queued_seconds > QUEUED_SECONDS:
            event, seconds = self._queued.popleft()
            self._await(event, self._pool)
            self._queued_seconds -= seconds

    def _note_queued(self, seconds: float) -> None:
        """Note that a layer was queued which is predicted to take so many seconds."""
        self._queued.append((self._mark(self.executor.stream), seconds))
        self._queued_seconds += seconds

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        return self._span("compute", self.executor.stream, name, **facts)

    def _span(self, track: str, stream: Any, name: str, **facts: int) -> AbstractContextManager[None]:
        if self._traced is None:
            return UNTRACED
        return self._traced.span(f"{self._lane} {track}", stream, name, **facts)

    def _slot(self, free: list[Any], nbytes: int, what: str) -> Any:
        """Return a free slot of so many bytes; allocate one where the plan counted with smaller voxels."""
        slot = free.pop(0) if free else None
        return slot if slot is not None and slot.nbytes >= nbytes else self.executor.allocate(nbytes, what)

    def _mark(self, stream: Any) -> Any:
        """Record an event at the end of what is queued on a stream."""
        event = self.executor.event()
        with self.executor.calling("cudaEventRecord"):
            stream.record(event)
        return event

    def _await(self, event: Any, pool: Checks | None = None) -> None:
        """Wait until an event has happened, or the thread pool is stopped."""
        with self.executor.calling("a step of the run"):
            while not event.done:
                if pool is not None:
                    pool.check()
                time.sleep(LOOK_SECONDS)


def layer_overflow(peak: float, kept: np.dtype[Any]) -> ValuesOverflowError:
    """Return the error for a layer whose results exceed the dtype in which they are kept."""
    if kept == np.float16 and np.isfinite(peak):
        return ValuesOverflowError(
            f"its largest result is {peak:.6g}, beyond float16's largest number {np.finfo(kept).max:.6g}; "
            f"choose {option('precision', 'tf32')}"
        )
    wider = f"choose {option('precision', 'tf32')}, or " if kept == np.float16 else ""
    return ValuesOverflowError(
        f"a result became {'not a number' if np.isnan(peak) else 'infinite'} in {kept}; "
        f"{wider}check the weights and that the input is normalised as in training"
    )
