"""A session of a plan with hosted choices: a front on the host, a back on the GPU, and what goes from one to the other.

Front  The hosted choices, with tensors in the host's arena, on the processor, or, where tensors live with the host, on
       the GPU in sub-layers. They run in the thread that submits.
Back   All other choices, on the GPU, on a part of what is handed over at a time.
Queue  Where the plan overlaps, a feeder thread queues the back of a step while the next step's front runs: of the two
       buffers for what is handed over one is filled while the other goes up. As no more than one step may be submitted
       and not waited for, nothing else is in between. Where it does not overlap the submitting thread queues the back.
       Who waits looks whether the device is done, so the feeder, which the device may hold up, tells it nothing. What
       fails there stops the front that runs meanwhile, and is told by the wait for its step.

Source  ZNNi VII-B (one after the other) and VII-C (a producer and a consumer, with a queue of one).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import Stopped, ValuesOverflowError, VramError
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights, Network
from znnpy.planner.memory import PINNED
from znnpy.planner.plan import Choice, Plan, handovers
from znnpy.run.gpu import GpuWorkshop
from znnpy.run.host import HostWorkshop
from znnpy.run.session import Session
from znnpy.run.threads import Thread
from znnpy.run.walk import Walk
from znnpy.run.workshop import Voxels, layer_of
from znnpy.shapes import turn

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Trace

LOOK_SECONDS = 0.05  # between looks at the stop flag
ALL: tuple[Primitive, ...] = (*TABLE, *IN_HOST_RAM)


def session_of(
    plan: Plan,
    network: Network,
    weights: Sequence[ConvWeights],
    crew: ThreadPool,
    *,
    device: Device | None = None,
    trace: Trace | None = None,
    lane: str | None = None,
    prepared: Callable[[int], None] | None = None,
) -> Session | HostedSession:
    """The session that runs a plan, hosted choices or not; words as for `Session`."""
    if plan.hosted:
        return HostedSession(plan, network, weights, crew, device=device, trace=trace, lane=lane)
    return Session(plan, network, weights, crew, device=device, trace=trace, lane=lane, prepared=prepared)


class _Front(HostWorkshop):
    """Where hosted choices run: the host, and, for those that a GPU computes, scratch that the back's workshop has."""

    def __init__(self, plan: Plan, network: Network, crew: ThreadPool, back: GpuWorkshop, trace: Trace | None) -> None:
        super().__init__(plan, network, crew, trace)
        self._back = back

    def hands_for(self, choice: Choice) -> Any:
        return self._back.hands if choice.device == "gpu" else self.hands

    def scratch(self, step: int) -> dict[str, Any]:
        return self._back.scratch(step) if self._on_gpu(step) else super().scratch(step)

    def run(self, index: int, step: Any, x: Any, out: Any, scratch: Mapping[str, Any], before: Any | None) -> None:
        if not self._on_gpu(index):
            super().run(index, step, x, out, scratch, before)
            return
        assert before is None, "carried planes are put in front of the new ones"
        try:
            step.run(x, out, scratch, self.hands)
        except ValuesOverflowError as error:
            raise error.with_context(layer_of(self._plan, self._network, index)) from None

    def _on_gpu(self, index: int) -> bool:
        return self._plan.choices[index].device == "gpu"


class _Stops:
    """A crew's stop flag, or that of a session that ends before what it began.

    failed  the back of a step: its crew computes no further front, and steps before are waited for all the same
    """

    def __init__(self, crew: ThreadPool) -> None:
        self._crew = crew
        self._ending = threading.Event()
        self.failed = False

    def end(self) -> None:
        self._ending.set()

    def fail(self) -> None:
        self.failed = True
        self._crew.stop()

    def check(self) -> None:
        if self._ending.is_set():
            raise Stopped
        if not self.failed:
            self._crew.check()


@dataclass(slots=True, eq=False)
class _Job:
    """The back of one step."""

    handed: npt.NDArray[np.float32] | None  # None: in the first steps of a column nothing is
    out: Voxels | None
    begins: bool
    ticket: Any = None  # of the workshop
    error: BaseException | None = None
    marks: tuple[Any, Any] | None = None  # events of the device, when it began and ended
    queued: threading.Event = field(default_factory=threading.Event)  # to the end, or failed

    def forget(self) -> None:
        """No circle: what its error's frames refer to, memory of the device, goes with the error; so do its arrays."""
        self.handed = self.out = None
        if self.error is not None:
            self.error = Stopped()


class HostedSession:
    """Runs the steps of a plan with hosted choices, as `Session` does others; a context manager.

    table  of primitives, those that live with the host among them
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        crew: ThreadPool,
        table: tuple[Primitive, ...] = ALL,
        *,
        device: Device | None = None,
        trace: Trace | None = None,
        lane: str | None = None,
    ) -> None:
        self.plan, self.network, self.crew = plan, network, crew
        self.under_way = 1 if plan.overlaps else 0  # steps that may be submitted and not waited for when the next is
        self._stops = _Stops(crew)
        self._shop = GpuWorkshop(plan, network, self._stops, device, trace, lane or "GPU")
        self._host = _Front(plan, network, crew, self._shop, trace)
        self._front = Walk(plan, network, weights, self._host, table, range(plan.hosted))
        self._back = Walk(plan, network, weights, self._shop, table, range(plan.hosted, len(plan.choices)))
        self._open = ExitStack()
        self._forget()

    def _forget(self) -> None:
        """Let go of all arrays, and of what was under way."""
        self._front.forget()
        self._back.forget()
        self._handed: list[npt.NDArray[np.float32]] = []  # buffers, used in turn
        self._steps = 0  # submitted
        self._submitted: deque[_Job] = deque()  # and not waited for
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._feeder: Thread | None = None
        self._began: float | None = None  # the first step
        self._busy = [0.0, 0.0]  # seconds of the front and of the back
        self._ended = 0.0  # the last step that was waited for

    @property
    def written(self) -> list[int]:
        """Voxels of one map that each choice has written, all images."""
        return [front + back for front, back in zip(self._front.written, self._back.written, strict=True)]

    @property
    def idle_seconds(self) -> dict[str, float]:
        """How long each side stood still from the first step's begin to the last one's end; of plans that overlap."""
        if self._began is None:
            return {}
        whole = max(0.0, self._ended - self._began)
        return {name: max(0.0, whole - busy) for name, busy in self.busy_seconds.items()}

    @property
    def busy_seconds(self) -> dict[str, float]:
        """How long each side computed in all steps; of plans that overlap."""
        return dict(zip(("CPU", "GPU"), self._busy, strict=True)) if self.plan.overlaps else {}

    def __enter__(self) -> Self:
        plan = self.plan
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(self._shop)
            stack.enter_context(self._host)
            try:
                self._back.bind(plan.memory.arena, plan.tensors)
                self._front.bind(plan.memory.host_arena, plan.host_tensors)
                shape = plan.choices[plan.hosted - 1].shape.out_shape
                for _ in range(handovers(overlaps=plan.overlaps)):
                    self._handed.append(self._shop.hands.pinned(shape, np.float32))
            except VramError as error:
                clear_frames(error.__traceback__)  # who plans again with less needs what they refer to
                raise
            stack.callback(self._stop_feeding)
            if plan.overlaps:
                feeder = Thread("feeder", self._feed_all)
                feeder.start()
                self._feeder = feeder
            self._open = stack.pop_all()
        return self

    def __exit__(self, *cause: Any) -> None:
        self._open.__exit__(*cause)

    def _stop_feeding(self) -> None:
        """What the feeder has begun ends at its next look at the stop flag."""
        self._stops.end()
        if self._feeder is not None:
            self._jobs.put(None)
            self._feeder.wait()
            self._feeder = None
        for job in self._submitted:
            job.forget()

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """As those of `Session`: of outputs pinned, since they come from the GPU."""
        native = raw.newbyteorder("=")
        size = (self.network.input_channels, *self.plan.patch_in)
        _, outs = self._shop.buffers(np.dtype(np.float32), out, reads=0, writes=writes)
        return (np.empty(size, native) for _ in range(min(PINNED, reads))), outs

    def run(self, raw: Voxels, out: Voxels | None, *, begins: bool = True) -> None:
        """Compute one step of a column, or one patch: `submit` it and `wait`."""
        self.wait(self.submit(raw, out, begins=begins))

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True) -> _Job:
        """As that of `Session`: the front is done then. What fails in the back is told by the wait for it."""
        if (count := len(self._submitted)) > self.under_way:
            raise RuntimeError(f"{count} steps are under way: wait for the first before another is submitted")
        self._stops.check()
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        handed = self._handed[self._steps % len(self._handed)]
        self._steps += 1
        try:
            gives = self._run_front(raw, handed, begins=begins)
        except Stopped as stopped:
            if not self._stops.failed:
                raise
            job = _Job(None, None, begins, error=stopped)  # a step before failed, and is waited for before this one
            job.queued.set()
            self._submitted.append(job)
            return job
        self._busy[0] += time.perf_counter() - began
        job = _Job(handed if gives else None, out, begins)
        self._submitted.append(job)
        if self._feeder is None:
            self._run_back(job)
            job.queued.set()
        else:
            self._jobs.put(job)
        return job

    def _run_front(self, raw: Voxels, handed: npt.NDArray[np.float32], *, begins: bool) -> bool:
        """Whether anything was handed over."""
        front, host = self._front, self._host
        host.take(raw, None, begins=begins)
        if begins:
            front.begin()
        with host.span("load"):
            host.load(raw.transpose(self._axes), front.input[0])
        gives = front.gives
        front.advance(0, handed)
        front.end()
        return gives

    @property
    def _axes(self) -> tuple[int, ...]:
        return (0, *(1 + axis for axis in turn(self.plan.axis)))

    def done(self, ticket: _Job) -> bool:
        """`wait` would return at once."""
        return ticket.queued.is_set() and (ticket.error is not None or self._shop.done(ticket.ticket))

    def wait(self, ticket: _Job) -> None:
        """Until the output of a step is there."""
        while not ticket.queued.wait(LOOK_SECONDS):
            self._stops.check()
        self._submitted.remove(ticket)
        if ticket.error is not None:
            try:
                raise ticket.error
            finally:
                ticket.forget()
        self._shop.wait(ticket.ticket)
        self._ended = time.perf_counter()
        assert ticket.marks is not None, "it was queued"
        self._busy[1] += self._shop.hands.seconds_between(*ticket.marks)

    def abandon(self) -> None:
        """The device failed: nothing is asked of it any more, and leaving waits for nothing."""
        self._stop_feeding()
        self._shop.abandon()

    def _feed_all(self) -> None:
        """The feeder's work."""
        while (job := self._jobs.get()) is not None:
            self._feed(job)

    def _feed(self, job: _Job) -> None:
        """Queue the back of a step; what fails is told by the wait for it."""
        try:
            if self._stops.failed:
                raise Stopped  # the step that failed is waited for before this one
            self._run_back(job)
        except BaseException as error:  # whatever it is, `wait` raises it
            job.error = error
            self._stops.fail()
        finally:
            job.queued.set()

    def _run_back(self, job: _Job) -> None:
        back, shop = self._back, self._shop
        device = shop.hands
        _, target = shop.take(None, job.out, begins=job.begins)
        marks = device.event(timing=True), device.event(timing=True)
        with device.calling("cudaEventRecord"):
            device.stream.record(marks[0])
        if job.begins:
            back.begin()
        if job.handed is not None:
            out = None if target is None else target.transpose(self._axes)
            for first in range(0, len(job.handed), len(back.input)):
                shop.fetch(job.handed[first : first + len(back.input)], back.input)
                back.advance(first, out)
        back.end()
        with device.calling("cudaEventRecord"):
            device.stream.record(marks[1])
        job.ticket, job.marks = shop.give(), marks
