"""Layers that are to be timed, where they run, and who does it within how much time."""

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
from znnpy.option_values import DeviceKind
from znnpy.planner.plan import Choice
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import LayerShape

_log = logging.getLogger(__name__)

RUNS_OF_A_LAYER = 4  # that one measurement takes, about


@dataclass(frozen=True, slots=True)
class Placement:
    """On what a layer runs.

    threads  of the processor, that compute; of a layer on a GPU, that copy what lies in the memory of the host, or 0
    """

    device: DeviceKind
    threads: int = 0

    @property
    def hosted(self) -> bool:
        """A GPU computes, and input and output are in the memory of the host."""
        return self.device == "gpu" and self.threads > 0


ON_GPU = Placement("gpu")


def layers_of(run: RunPlan) -> Iterator[tuple[Placement, Choice]]:
    """Yield every choice of every worker, and where it runs."""
    for plan in (worker.plan for worker in run.workers):
        for index, choice in enumerate(plan.choices):
            on_host = choice.device == "cpu" or index < plan.offloaded
            yield Placement(choice.device, plan.compute_threads if on_host else 0), choice


class LayerTimer(Protocol):
    """Who runs a layer and says how long that took: one of those in `clocks`."""

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a measurement is."""

    done: int
    total: int
    seconds_left: float  # at most; infinite where nobody said
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

    seconds: float  # that all may take
    tell: Callable[[Progress], None]
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    def left(self, share: float = 1.0) -> float:
        return share * self.seconds - (self.now() - self.begun)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is none of that time."""
        since = self.now()
        try:
            yield
        finally:
            self.begun += self.now() - since

    def times(
        self, tasks: Sequence[LayerTask], clock: LayerTimer, share: float = 1.0
    ) -> Iterator[tuple[LayerTask, float | str | None]]:
        """Tasks and their seconds by a clock, or why they do not run, in turn, while there is time within `share`.

        None: there is no memory for one of this size. DeviceLostError where the device runs nothing any more.
        """
        factors = [1.0]  # times that tasks took what was expected of them
        for done, task in enumerate(tasks):
            if RUNS_OF_A_LAYER * max(1.0, median(factors)) * task.expected > self.left(share):
                continue
            self.tell(Progress(done, len(tasks), self.left(), task.name))
            try:
                spent = clock.seconds(*task.case)
            except (VramError, MemoryError) as error:
                _log.info("%s has no room here: %s", task.name, error)
                yield task, None
            except DeviceError as error:
                _log.info("%s is not run here: %s", task.name, error)
                yield task, str(error)
            else:
                factors.append(spent / task.expected)
                yield task, spent
        self.tell(Progress(len(tasks), len(tasks), self.left(), ""))


def bytes_of(primitive: Primitive, shape: LayerShape, variant: Variant, threads: int) -> int:
    """Of one layer that is timed: all its buffers at once, and its weights."""
    footprint = primitive.footprint(shape, variant, threads)
    scratch = sum(s.nbytes for s in footprint.scratch)
    return shape.in_bytes + shape.out_bytes + scratch + footprint.resident + footprint.host + footprint.allowance


FreeBytes = Mapping[DeviceKind, int]  # bytes of the process's memory, and of a GPU's


def lacking(
    where: Placement, primitive: Primitive, shape: LayerShape, variant: Variant, rooms: FreeBytes
) -> tuple[DeviceKind, int] | None:
    """Of which memory a layer that runs by itself needs more than there is, and how many bytes; None: it fits."""
    needed: dict[DeviceKind, int] = {where.device: bytes_of(primitive, shape, variant, max(1, where.threads))}
    if where.hosted:
        outside = shape.in_bytes + shape.out_bytes + primitive.footprint(shape, variant, where.threads).host
        needed = {"cpu": outside, "gpu": needed["gpu"] - outside}
    return next(((device, nbytes) for device, nbytes in needed.items() if nbytes > rooms[device]), None)
