"""Describe layers that are to be timed and where they run, and time them within a limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from znnpy.errors import DeviceError, VramError
from znnpy.kernels.contract import Primitive, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.option_values import DeviceKind
from znnpy.planner.plan import Choice
from znnpy.planner.run_plan import RunPlan

_log = logging.getLogger(__name__)

RUNS_OF_A_LAYER = 4  # in one measurement, about


@dataclass(frozen=True, slots=True)
class Placement:
    """The device on which a layer runs.

    threads  threads of the processor that compute, or that copy between the memory of the host and a GPU; 0: none do
    """

    device: DeviceKind
    threads: int = 0

    @property
    def in_host_ram(self) -> bool:
        """Return whether a GPU computes while input and output are in the memory of the host."""
        return self.device == "gpu" and self.threads > 0


ON_GPU = Placement("gpu")


def layers_of(run: RunPlan) -> Iterator[tuple[Placement, Choice]]:
    """Yield every choice of every worker with its placement."""
    for plan in (worker.plan for worker in run.workers):
        for index, choice in enumerate(plan.choices):
            on_host = choice.device == "cpu" or index < plan.offloaded
            yield Placement(choice.device, plan.compute_threads if on_host else 0), choice


class LayerTimer(Protocol):
    """Runs a layer and says how long that took; `znnpy.measure.layer_timer` has one for each placement."""

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a measurement."""

    done: int
    total: int
    seconds_left: float  # at most; infinite if there is no limit
    doing: str


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A layer to be timed."""

    primitive: Primitive
    shape: LayerShape
    variant: Variant
    expected: float  # seconds of one run

    @property
    def name(self) -> str:
        return f"{self.primitive.name} on {self.shape}"

    @property
    def case(self) -> tuple[Primitive, LayerShape, Variant]:
        return self.primitive, self.shape, self.variant


@dataclass(slots=True)
class TimeBudget:
    """Times tasks within a time limit, and tells of each."""

    seconds: float  # all tasks together may take so long
    tell: Callable[[Progress], None]
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    def left(self, share: float = 1.0) -> float:
        return share * self.seconds - (self.now() - self.begun)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the time while the block runs."""
        since = self.now()
        try:
            yield
        finally:
            self.begun += self.now() - since

    def times(
        self, tasks: Sequence[LayerTask], clock: LayerTimer, share: float = 1.0
    ) -> Iterator[tuple[LayerTask, float | str | None]]:
        """Yield tasks in turn with their seconds by a clock, or with the reason why they do not run.

        A task is left out if it is expected to end after `share` of the time. None in place of seconds: there is no
        memory for a layer of this size. DeviceLostError if the device runs nothing any more.
        """
        factors = [1.0]  # times that tasks took what was expected of them
        for done, task in enumerate(tasks):
            if RUNS_OF_A_LAYER * max(1.0, median(factors)) * task.expected > self.left(share):
                continue
            self.tell(Progress(done, len(tasks), self.left(), task.name))
            try:
                spent = clock.seconds(*task.case)
            except (VramError, MemoryError) as error:
                _log.info("%s does not fit the memory here: %s", task.name, error)
                yield task, None
            except DeviceError as error:
                _log.info("%s is not run here: %s", task.name, error)
                yield task, str(error)
            else:
                factors.append(spent / task.expected)
                yield task, spent
        self.tell(Progress(len(tasks), len(tasks), self.left(), ""))


def bytes_of(primitive: Primitive, shape: LayerShape, variant: Variant, threads: int) -> int:
    """Return the bytes of one layer that is timed: all its buffers at once, and its weights."""
    footprint = primitive.footprint(shape, variant, threads)
    scratch = sum(s.nbytes for s in footprint.scratch)
    return shape.in_bytes + shape.out_bytes + scratch + footprint.resident + footprint.host + footprint.allowance


FreeBytes = Mapping[DeviceKind, int]  # free bytes of the process's memory, and of a GPU's


def lacking(
    where: Placement, primitive: Primitive, shape: LayerShape, variant: Variant, free_bytes: FreeBytes
) -> tuple[DeviceKind, int] | None:
    """Return the memory of which a layer that runs by itself needs too much, and the bytes; None: it fits."""
    needed: dict[DeviceKind, int] = {where.device: bytes_of(primitive, shape, variant, max(1, where.threads))}
    if where.in_host_ram:
        outside = shape.in_bytes + shape.out_bytes + primitive.footprint(shape, variant, where.threads).host
        needed = {"cpu": outside, "gpu": needed["gpu"] - outside}
    return next(((device, nbytes) for device, nbytes in needed.items() if nbytes > free_bytes[device]), None)
