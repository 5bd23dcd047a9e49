"""Hands the results of a first stage, on the host, over to a second stage on a GPU.

First stage   Its tensors lie in the host's arena. The thread that submits a step runs it, on the CPU, or, for
              layers that a GPU computes in sub-layers, there.
Second stage  It runs on the GPU, on a part of what is handed over at a time.
Overlap       Where the plan overlaps, a feeder thread queues the second stage of a step while the first stage of the
              next step runs: of the two buffers for what is handed over, one is filled while the other is uploaded. No
              more than one step may be submitted and not waited for, so nothing else lies in between. Without overlap
              the submitting thread queues the second stage. A thread that waits asks the device whether it is done,
              because the device may hold the feeder up. A failure in the second stage stops a first stage that runs
              meanwhile, and the wait for its step raises it.

Source  ZNNi VII-B (one after the other) and VII-C (a producer and a consumer, with a queue of one).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import Stopped
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.planner.plan import Plan
from znnpy.planner.stages import handover_buffers
from znnpy.run.backend import Voxels
from znnpy.run.cpu_backend import CpuBackend
from znnpy.run.stage_runner import StageRunner
from znnpy.run.stoppable_thread import Thread

if TYPE_CHECKING:
    from znnpy.run.gpu_backend import GpuBackend

LOOK_SECONDS = 0.05  # between looks at the stop flag


class StopFlag:
    """The stop flag of a thread pool, or of a session that ends before what it began.

    failed  the second stage of a step failed: its pool runs no further first stage, but steps before are waited for
    """

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._ending = threading.Event()
        self.failed = False

    def end(self) -> None:
        self._ending.set()

    def fail(self) -> None:
        self.failed = True
        self._pool.stop()

    def check(self) -> None:
        if self._ending.is_set():
            raise Stopped
        if not self.failed:
            self._pool.check()


@dataclass(slots=True, eq=False)
class HandedStep:
    """The second stage of one step."""

    handed: npt.NDArray[np.float32] | None  # None: in the first steps of a column nothing is handed over
    out: Voxels | None
    begins: bool
    ticket: Any = None  # of the backend
    error: BaseException | None = None
    marks: tuple[Any, Any] | None = None  # events of the device, at its begin and its end
    queued: threading.Event = field(default_factory=threading.Event)  # all of it is queued, or it failed

    def forget(self) -> None:
        """Let go of arrays, and of the error, whose frames refer to memory of the device."""
        self.handed = self.out = None
        if self.error is not None:
            self.error = Stopped()


class Handover:
    """Runs the steps of a plan of two stages; `open` it when both stages are bound, and `close` it before they go."""

    def __init__(
        self, plan: Plan, stops: StopFlag, host: CpuBackend, gpu: GpuBackend, front: StageRunner, back: StageRunner
    ) -> None:
        self._overlap, self._shape = plan.overlap, plan.stages[0].choices[-1].shape.out_shape
        self._stops, self._host, self._gpu, self._front, self._back = stops, host, gpu, front, back
        self.max_in_flight = 1 if plan.overlap else 0  # steps that may be submitted and not waited for when the next is
        self._forget()

    def _forget(self) -> None:
        """Let go of all arrays and steps."""
        self._buffers: list[npt.NDArray[np.float32]] = []  # used in turn
        self._steps = 0  # submitted
        self._submitted: deque[HandedStep] = deque()  # and not waited for
        self._queue: SimpleQueue[HandedStep | None] = SimpleQueue()
        self._feeder: Thread | None = None
        self._began: float | None = None  # the first step
        self._busy = [0.0, 0.0]  # seconds of the first and of the second stage
        self._ended = 0.0  # the last step that was waited for

    @property
    def idle_seconds(self) -> dict[str, float]:
        """Seconds in which each stage did not compute, from the first step to the last; empty without overlap."""
        if self._began is None or not self._overlap:
            return {}
        whole = max(0.0, self._ended - self._began)
        return {name: max(0.0, whole - busy) for name, busy in zip(("CPU", "GPU"), self._busy, strict=True)}

    def open(self) -> None:
        """Take the buffers, and start the feeder."""
        for _ in range(handover_buffers(overlap=self._overlap)):
            self._buffers.append(self._gpu.executor.pinned(self._shape, np.float32))
        if self._overlap:
            feeder = Thread("feeder", self._feed_all)
            feeder.start()
            self._feeder = feeder

    def stop(self) -> None:
        """End the feeder: what it has begun ends at its next look at the stop flag."""
        self._stops.end()
        if self._feeder is not None:
            self._queue.put(None)
            self._feeder.wait()
            self._feeder = None
        for step in self._submitted:
            step.forget()

    def close(self) -> None:
        """Let go of everything."""
        self.stop()
        self._forget()

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool) -> HandedStep:
        """Run the first stage of a step and queue the second, whose failure is raised by `wait`."""
        if (count := len(self._submitted)) > self.max_in_flight:
            raise RuntimeError(f"{count} steps are under way: wait for the first before another is submitted")
        self._stops.check()
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        handed = self._buffers[self._steps % len(self._buffers)]
        self._steps += 1
        try:
            gives = self._run_front(raw, handed, begins=begins)
        except Stopped as stopped:
            if not self._stops.failed:
                raise
            step = HandedStep(None, None, begins, error=stopped)  # an earlier step failed, and is waited for first
            step.queued.set()
            self._submitted.append(step)
            return step
        self._busy[0] += time.perf_counter() - began
        step = HandedStep(handed if gives else None, out, begins)
        self._submitted.append(step)
        if self._feeder is None:
            self._run_back(step)
            step.queued.set()
        else:
            self._queue.put(step)
        return step

    def done(self, step: HandedStep) -> bool:
        """Return whether `wait` would return at once."""
        return step.queued.is_set() and (step.error is not None or self._gpu.done(step.ticket))

    def wait(self, step: HandedStep) -> None:
        """Wait until the output of a step is there."""
        while not step.queued.wait(LOOK_SECONDS):
            self._stops.check()
        self._submitted.remove(step)
        if step.error is not None:
            try:
                raise step.error
            finally:
                step.forget()
        self._gpu.wait(step.ticket)
        self._ended = time.perf_counter()
        assert step.marks is not None, "it was queued"
        self._busy[1] += self._gpu.executor.seconds_between(*step.marks)

    def _run_front(self, raw: Voxels, handed: npt.NDArray[np.float32], *, begins: bool) -> bool:
        """Run the first stage; return whether anything was handed over."""
        source, _ = self._host.begin_step(raw, None, begins=begins)
        return self._front.step(source, handed, begins=begins)

    def _run_back(self, step: HandedStep) -> None:
        """Queue the second stage."""
        back, gpu = self._back, self._gpu
        device = gpu.executor
        _, target = gpu.begin_step(None, step.out, begins=step.begins)
        marks = device.event(timing=True), device.event(timing=True)
        with device.calling("cudaEventRecord"):
            device.stream.record(marks[0])
        if step.begins:
            back.begin()
        if step.handed is not None:
            out = None if target is None else target.transpose(back.axes)
            for first in range(0, len(step.handed), len(back.input)):
                gpu.fetch(step.handed[first : first + len(back.input)], back.input)
                back.advance(first, out)
        back.end()
        with device.calling("cudaEventRecord"):
            device.stream.record(marks[1])
        step.ticket, step.marks = gpu.end_step(), marks

    def _feed_all(self) -> None:
        """Queue second stages, in the feeder thread."""
        while (step := self._queue.get()) is not None:
            self._feed(step)

    def _feed(self, step: HandedStep) -> None:
        """Queue the second stage of a step; the wait for the step raises what fails."""
        try:
            if self._stops.failed:
                raise Stopped  # the step that failed is waited for before this one
            self._run_back(step)
        except BaseException as error:  # whatever it is, `wait` raises it
            step.error = error
            self._stops.fail()
        finally:
            step.queued.set()
