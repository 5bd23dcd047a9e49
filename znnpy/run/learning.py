"""Plans and measurements in turn: layers of the best plan are timed, until the best plan holds none that was not.

A layer that turns out slower than its estimate makes way for the next best, which is timed then. With hope, that all
that was not timed may be faster than its estimate by as much, what is found at the end is beaten by nothing within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from znnpy.kernels.primitive import Primitive, Variant
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits
from znnpy.planner.cost import Rates
from znnpy.planner.costs import Measurement
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan
from znnpy.run.timing import Task, Timer, bytes_of
from znnpy.shapes import LayerShape

MOST_LAYER_SECONDS = 2.0  # of one run, as estimated: what takes longer runs on fewer images

LEAST_WORKING = 0.1  # of the time of a layer, whatever its stages are assumed to take to begin

Making = Callable[[Rates], Plan]
Case = tuple[Primitive, LayerShape, Variant]


@dataclass(slots=True)
class Learner:
    """What is known of a device, and how more is found out."""

    rates: Rates
    timer: Timer
    device: DeviceKind
    limits: Limits
    room_bytes: int  # of the device's memory: what takes more is not timed
    table: Sequence[Primitive] = TABLE
    found: list[Measurement] = field(default_factory=list)
    too_large: set[Case] = field(default_factory=set)  # layers of plans that one image of does not fit the room
    _tried: set[Case] = field(default_factory=set)

    def learn(self, make: Making, share: float = 1.0) -> bool:
        """Time layers of the plans that `make` makes with what is known; False where the time was up before the end.

        share  of the timer's time, after which no further layer is timed

        NoPlanError where there is none. What cannot be timed counts as it is estimated.
        """
        known = {p.name: p for p in self.table}
        while self.timer.left(share) > 0:
            tasks = [task for task in self._tasks(make(self.rates), known) if task.case not in self._tried]
            if not tasks:
                return True
            before = len(self._tried)
            for task, spent in self.timer.times(tasks, share):
                self._tried.add(task.case)
                self._learnt(task, spent)
            if len(self._tried) == before:
                return False
        return False

    def _learnt(self, task: Task, spent: float | str | None) -> None:
        """One measurement, or the words of a device that refused it; None: there was no memory for one so large."""
        if spent is None:
            return
        if isinstance(spent, str):
            self.rates = self.rates.refusing(task.primitive, task.shape, spent)
            return
        begun = 0.0 if self.device == "gpu" else self.rates.stage_seconds  # a GPU's clock begins when it does
        stages = len(task.primitive.work(task.shape, task.variant))
        seconds = max(spent - stages * begun, LEAST_WORKING * spent)
        primitive = task.primitive
        self.found.append(Measurement(primitive.name, primitive.version, task.variant, task.shape, seconds))
        self.rates = self.rates.learnt(*task.case, seconds)

    def _tasks(self, plan: Plan, known: dict[str, Primitive]) -> Iterator[Task]:
        """The layers of a plan that are not known at their size, each once; long and large ones on fewer images."""
        for choice in {(c.primitive, c.shape, c.variant): c for c in plan.choices}.values():
            primitive, shape, variant = known[choice.primitive], choice.shape, choice.variant
            if self.rates.knows_size(primitive, shape, variant):
                continue
            spent = self.rates.seconds(primitive, shape, variant)
            images = max(1, min(shape.batch, int(shape.batch * MOST_LAYER_SECONDS / spent)))
            while (fewer := replace(shape, batch=images)) and images > 1 and not self._fits(primitive, fewer, variant):
                images //= 2
            if self._fits(primitive, fewer, variant):
                yield Task(primitive, fewer, variant, self.rates.seconds(primitive, fewer, variant))
            else:
                self.too_large.add((primitive, shape, variant))

    def _fits(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> bool:
        return bytes_of(primitive, shape, variant, self.limits.threads) <= self.room_bytes
