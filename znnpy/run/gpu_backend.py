"""The backend of a GPU: one arena, and three streams, so that transfers go on during the computation.

A step is uploaded into a slot on the device, loaded from it, computed, stored into another slot, and downloaded. There
are two slots of each kind: while one step is computed, the next patch is uploaded and the last one downloaded. Events
between the streams keep the order. The host waits only for the end of a step, and notices Ctrl-C meanwhile.

Peaks  Every activation has a float32 on the device that holds the largest |value| in the column so far. Primitives that
       need it get its address, and overflow is found when the peaks are downloaded with the output of the step.
       Poolings pass the peak of their input on. Each step in flight has peaks of its own, which begin as those of the
       step before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import DeviceError, OutputError, ValuesOverflowError
from znnpy.kernels.gpu.device import Device, find_gpu
from znnpy.kernels.gpu.load_store import LoadStore
from znnpy.messages import option
from znnpy.network import Network, Pool
from znnpy.planner.memory import PINNED, STAGED
from znnpy.planner.plan import Choice, Plan, Tensor
from znnpy.run.arena import Arena
from znnpy.run.backend import UNTRACED, Voxels, dtype_of, input_overflow, layer_of, output_overflow
from znnpy.run.gpu_trace import GpuTrace
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Footprint
    from znnpy.run.trace import Spans

LOOK_SECONDS = 0.0001  # between looks at an event; a wait inside CUDA would not notice Ctrl-C
QUEUED_SECONDS = 0.2  # most predicted seconds of queued layers: after Ctrl-C they end before memory is freed
FLOAT16_END = 65520.0  # this and larger values round to infinity in float16


@dataclass(frozen=True, slots=True)
class _Ticket:
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


@dataclass(frozen=True, slots=True)
class _Layer:
    """How one choice reads and raises peaks."""

    seconds: float  # predicted
    x_peak: int | None  # byte offset of the peak that it reads
    out_peak: int | None  # offset of the peak that it raises
    looked_at: int | None  # offset of the peak that is raised after it


class Checks(Protocol):
    """The part of a thread pool that a backend needs."""

    def check(self) -> None: ...


class GpuBackend:
    """Runs the last stage of a plan on a GPU, see `Backend`. It opens a device unless it is given one.

    One thread may begin and end steps while another waits.

    VramError where the device has less memory than the plan says.
    """

    max_in_flight = 1

    def __init__(
        self,
        plan: Plan,
        network: Network,
        pool: Checks,
        device: Device | None = None,
        trace: Spans | None = None,
        lane: str = "GPU",
    ) -> None:
        self._plan, self._network, self._pool, self._device = plan, network, pool, device
        self._trace, self._lane = trace, lane
        self._lock = threading.Lock()  # protects what steps use of the device
        self._windows = [layer.window for layer in network.turned(plan.axis).layers if isinstance(layer, Pool)]
        own = enumerate(plan.stages[-1].choices, plan.offloaded)
        self._convolutions = [index for index, choice in own if choice.shape.kind == "conv"]
        self._release()

    def _release(self) -> None:
        """Let go of every array, which gives its memory back."""
        self.executor: Any = None
        self._arena = Arena((), _no_view)
        self._moves: LoadStore | None = None
        self._types: tuple[np.dtype[Any], np.dtype[Any]] | None = None  # of raw patches and of the output
        self._layers: list[_Layer] = []
        self._raw_slots: list[Any] = []  # free slots
        self._handed: deque[tuple[Any, Any]] = deque()  # slots for handed-over parts, and events of their last use
        self._out_slots: list[Any] = []
        self._words: deque[tuple[Any, npt.NDArray[np.float32]]] = deque()  # free peaks, on the device and on the host
        self._last_words: Any = None  # peaks of the step before, on the device
        self._lent: deque[_Lent] = deque()  # to the steps that were not waited for
        self._step: _Ticket | None = None  # the step that was begun and not ended
        self._queued: deque[tuple[Any, float]] = deque()  # layers: event of the end, predicted seconds
        self._queued_seconds = 0.0
        self._traced: GpuTrace | None = None
        self._open = ExitStack()

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

    def executor_for(self, choice: Choice) -> Any:
        del choice
        return self.executor

    def abandon(self) -> None:
        """Give up a device. If it still answers, it gives its memory back."""
        try:
            self.executor.synchronize()
        except DeviceError:
            self.executor.abandon()

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> None:
        device, plan, network = self.executor, self._plan, self._network
        block = device.allocate(nbytes, "the arena")
        if self._trace is not None:
            self._traced = GpuTrace(self._trace, device)

        def view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
            return device.view(block, shape, dtype, offset=offset)

        self._arena = Arena(tensors, view)
        word = 0  # index of the peak of a choice's input
        for choice, footprint in zip(plan.stages[-1].choices, footprints, strict=True):
            x_peak = FLOAT32 * word if footprint.reads_peak else None
            word += choice.shape.kind == "conv"
            peak = FLOAT32 * word if choice.shape.kind == "conv" else None
            raised = (peak, None) if footprint.raises_peak else (None, peak)
            self._layers.append(_Layer(choice.seconds, x_peak, *raised))
        cover = plan.cover(network)
        reads, writes = min(STAGED, cover.steps(cover.margin)), min(STAGED, cover.steps(0))
        raw_bytes = network.input_channels * prod(plan.patch_in) * plan.itemsize_in
        out_bytes = network.output_channels * prod(plan.patch_out) * plan.itemsize_out
        if plan.offloaded:
            part = plan.handover_bytes // plan.sub_batches[plan.offloaded]
            slots = [device.allocate(part, "what is handed over") for _ in range(STAGED)]
            self._handed.extend((slot, device.event()) for slot in slots)
        else:
            self._raw_slots = [device.allocate(raw_bytes, "patches on their way in") for _ in range(reads)]
        self._out_slots = [device.allocate(out_bytes, "patches on their way out") for _ in range(writes)]
        count = len(self._convolutions) + 2  # one for the input, the last for the output
        for _ in range(STAGED):
            words = device.view(device.allocate(FLOAT32 * count, "peaks"), (count,), np.float32)
            self._words.append((words, device.pinned((count,), np.float32)))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return self._arena.tensor(name, shape, dtype)

    def scratch(self, step: int) -> dict[str, Any]:
        return self._arena.scratch(step)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        nbytes = np.dtype(dtype).itemsize * prod(shape)
        return self.executor.view(self.executor.allocate(nbytes, "carried planes"), shape, dtype)

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        plan, network, pinned = self._plan, self._network, self.executor.pinned
        self._compile(raw.newbyteorder("="), out)
        raw_shape, out_shape = (network.input_channels, *plan.patch_in), (network.output_channels, *plan.patch_out)
        raws = (pinned(raw_shape, raw.newbyteorder("=")) for _ in range(min(PINNED, reads)))
        return raws, (pinned(out_shape, out) for _ in range(min(PINNED, writes)))

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
        self._step = _Ticket(raw, out, landing, device.event())
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

    def fetch(self, handed: npt.NDArray[np.float32], x: Any) -> None:
        """Queue the upload of what another stage hands over into `x`, both (S, new, y, x, f).

        handed  page-locked, in C order; it is read until the step is done
        x       in C order within an image
        """
        device = self.executor
        slot, read = self._handed.popleft()
        staged = device.view(slot, handed.shape, handed.dtype)
        device.uploads.wait_event(read)
        with self._span("upload", device.uploads, "upload"):
            device.copy_async(staged, handed, device.uploads)
        device.stream.wait_event(self._mark(device.uploads))
        with self.span("load"):
            device.copy_async(x, staged, device.stream)
            self._moving.peak(x, self._lent[-1].address)
        with device.calling("cudaEventRecord"):
            device.stream.record(read)
        self._handed.append((slot, read))

    def end_step(self) -> _Ticket:
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

    def done(self, ticket: _Ticket) -> bool:
        with self.executor.calling("a step of the run"):
            return bool(ticket.done.done)

    def wait(self, ticket: _Ticket) -> None:
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
        self._check(ticket, *peaks)
        if ticket.out is not None and ticket.landing is not None and ticket.landing is not ticket.out:
            ticket.out[...] = ticket.landing

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        return self._span("compute", self.executor.stream, name, **facts)

    def _span(self, track: str, stream: Any, name: str, **facts: int) -> AbstractContextManager[None]:
        if self._traced is None:
            return UNTRACED
        return self._traced.span(f"{self._lane} {track}", stream, name, **facts)

    def clear_carry(self, kept: Any) -> None:
        self._moving.clear(kept)

    def save_carry(self, kept: Any, x: Any, *, join: bool) -> None:
        self._moving.keep(kept, x, join=join)

    def load(self, raw: Any, x: Any) -> None:
        self._moving.load(raw, x, self._lent[-1].address)

    def store(self, fragments: Any, first: int, out: Any) -> None:
        self._moving.store(first, fragments, out, self._lent[-1].address + FLOAT32 * (len(self._convolutions) + 1))

    def run(self, index: int, step: Any, x: Any, out: Any, scratch: Mapping[str, Any], before: Any | None) -> None:
        while self._queued_seconds > QUEUED_SECONDS:
            event, seconds = self._queued.popleft()
            self._await(event, self._pool)
            self._queued_seconds -= seconds
        layer, words = self._layers[index - self._plan.offloaded], self._lent[-1].address
        x_peak, out_peak = (0 if at is None else words + at for at in (layer.x_peak, layer.out_peak))
        step.run(x, out, scratch, before, x_peak=x_peak, out_peak=out_peak)
        if layer.looked_at is not None:
            self._moving.peak(out, words + layer.looked_at)
        self._queued.append((self._mark(self.executor.stream), layer.seconds))
        self._queued_seconds += layer.seconds

    @property
    def _moving(self) -> LoadStore:
        if self._moves is None:
            raise RuntimeError("nothing is moved before the first step begins")
        return self._moves

    def _compile(self, raw: np.dtype[Any], out: np.dtype[Any] | None) -> None:
        """Compile transfer kernels for these dtypes; the first steps of a column do not know the output's."""
        known = self._types
        wanted = (raw, out or (known[1] if known else np.dtype(np.float32)))
        if wanted != known:
            values = dtype_of(self._plan.choices[-1].shape)
            self._moves = LoadStore(
                self.executor,
                raw=wanted[0],
                values=values,
                out=wanted[1],
                windows=self._windows,
                normalise=self._network.normalise,
            )
            self._types = wanted

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

    def _check(self, ticket: _Ticket, entering: float, *peaks: float) -> None:
        """Raise ValuesOverflowError if a peak of the column so far exceeds the dtype of its values."""
        plan, network = self._plan, self._network
        kept = dtype_of(plan.choices[-1].shape)
        end = FLOAT16_END if kept == np.float16 else np.inf
        *layers, leaving = peaks
        if not entering < end:
            if ticket.raw is None:
                raise _layer_overflow(entering, kept).with_context(layer_of(plan, network, plan.offloaded - 1))
            raise input_overflow(ticket.raw, kept)
        for index, peak in zip(self._convolutions, layers, strict=True):
            if not peak < end:
                raise _layer_overflow(peak, kept).with_context(layer_of(plan, network, index))
        if ticket.out is not None and ticket.out.dtype == np.float16 and not leaving < FLOAT16_END:
            raise output_overflow(leaving, ticket.out.dtype)


def _layer_overflow(peak: float, kept: np.dtype[Any]) -> ValuesOverflowError:
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


def _no_view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
    raise RuntimeError(f"no arena holds {shape} {dtype} at {offset}")
