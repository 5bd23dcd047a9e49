"""Layers that are to be timed, and who does it within how much time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from znnpy.errors import DeviceError, VramError
from znnpy.kernels.primitive import Primitive, Variant
from znnpy.shapes import LayerShape

_log = logging.getLogger(__name__)

RUNS_OF_A_LAYER = 4  # that one measurement takes, about


class Clock(Protocol):
    """Who runs a layer and says how long that took: a CpuClock or a GpuClock."""

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a measurement is."""

    done: int
    total: int
    seconds_left: float  # at most; infinite where nobody said
    doing: str


@dataclass(frozen=True, slots=True)
class Task:
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
class Timer:
    """Times tasks within a time limit, and tells of each."""

    clock: Clock
    seconds: float  # that all may take
    tell: Callable[[Progress], None]
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    def left(self, share: float = 1.0) -> float:
        return share * self.seconds - (self.now() - self.begun)

    def times(self, tasks: Sequence[Task], share: float = 1.0) -> Iterator[tuple[Task, float | str | None]]:
        """Tasks and their seconds, or why they do not run, in turn, while there is time within `share` of all.

        None: there is no memory for one of this size. DeviceLostError where the device runs nothing any more.
        """
        for done, task in enumerate(tasks):
            if RUNS_OF_A_LAYER * task.expected > self.left(share):
                continue
            self.tell(Progress(done, len(tasks), self.left(), task.name))
            try:
                spent = self.clock.seconds(*task.case)
            except (VramError, MemoryError) as error:
                _log.info("%s has no room here: %s", task.name, error)
                yield task, None
            except DeviceError as error:
                _log.info("%s is not run here: %s", task.name, error)
                yield task, str(error)
            else:
                yield task, spent
        self.tell(Progress(len(tasks), len(tasks), self.left(), ""))


def bytes_of(primitive: Primitive, shape: LayerShape, variant: Variant, threads: int) -> int:
    """Of one layer that is timed: all its buffers at once, and its weights."""
    footprint = primitive.footprint(shape, variant, threads)
    scratch = sum(s.nbytes for s in footprint.scratch)
    return shape.in_bytes + shape.out_bytes + scratch + footprint.resident + footprint.host + footprint.allowance
