"""Plans and measurements in turn: layers of the best plan are timed, until the best plan holds none that was not.

A layer that turns out slower than its estimate makes way for the next best, which is timed then. With hope, that all
that was not timed may be faster than its estimate by as much, what is found at the end is beaten by nothing within it.

Layers are timed where the plan runs them: on the processor by as many threads as compute there, on the GPU, or, where
their tensors are in the memory of the host, on the GPU with all that goes up and down. Of these the largest sub-layer
is timed first, by itself: how they are divided depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from znnpy.kernels.primitive import Primitive, Variant
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.planner.cost_model import Rates
from znnpy.planner.costs import Measurement
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan
from znnpy.planner.sublayers import DividedPrimitive
from znnpy.run.timing import ON_GPU, Clock, Rooms, Task, Timer, Where, lacking, layers_of
from znnpy.shapes import LayerShape

MOST_LAYER_SECONDS = 2.0  # of one run, as estimated: what takes longer runs on fewer images

LEAST_WORKING = 0.1  # of the time of a layer, whatever its stages are assumed to take to begin

Known = Mapping[DeviceKind, Rates]  # by device, of the processor for all threads that a run may have
Making = Callable[[Known], Plan]
Clocks = Callable[[Where, float], AbstractContextManager[Clock]]  # of layers there, in a run of so many seconds
Case = tuple[Primitive, LayerShape, Variant]


@dataclass(slots=True)
class Learner:
    """What is known of the devices of a plan, and how more is found out.

    threads  that a run may have: those of the processor's rates. Fewer are as much slower
    rooms    of each memory: what takes more is not timed
    """

    rates: dict[DeviceKind, Rates]
    timer: Timer
    clocks: Clocks
    threads: int
    rooms: Rooms
    table: Sequence[Primitive] = TABLE
    in_host_ram: Sequence[DividedPrimitive] = IN_HOST_RAM
    found: list[Measurement] = field(default_factory=list)
    # Layers of plans that one image of does not fit, by the memory that is too small.
    too_large: dict[DeviceKind, set[Case]] = field(default_factory=dict)
    _tried: set[tuple[Where, Case]] = field(default_factory=set)

    def learn(self, make: Making, share: float = 1.0, first: Plan | None = None) -> bool:
        """Time layers of the plans that `make` makes with what is known; False where the time was up before the end.

        share  of the timer's time, after which no further layer is timed
        first  the plan that it makes now, where somebody has it

        NoPlanError where there is none. What cannot be timed counts as it is estimated.
        """
        plan = first
        while self.timer.left(share) > 0:
            plan = plan or make(self.rates)
            tasks = self._tasks(plan)
            if not tasks:
                return True
            before = len(self._tried)
            for where, there in tasks.items():
                with self.clocks(where, plan.seconds) as clock:
                    for task, spent in self.timer.times(there, clock, share):
                        self._tried.add((where, task.case))
                        self._learnt(where, task, spent)
            if len(self._tried) == before:
                return False
            plan = None
        return False

    def hope(self, hope: float) -> None:
        """As if layers that are not known took this share of their estimate; 1: as estimated."""
        self.rates = {device: replace(rates, optimism=hope) for device, rates in self.rates.items()}

    def _rates(self, where: Where) -> Rates:
        """Of layers that run there."""
        rates = self.rates[where.device]
        slower = self.threads / where.threads if where.device == "cpu" else 1.0
        return rates if slower == 1 else rates.slowed(slower)

    def _learnt(self, where: Where, task: Task, spent: float | str | None) -> None:
        """One measurement, or the words of a device that refused it; None: there was no memory for one so large."""
        if spent is None:
            return
        rates, primitive = self._rates(where), task.primitive
        if isinstance(spent, str):
            rates = rates.with_refusal(primitive, task.shape, spent)
        else:
            stages = 0 if where == ON_GPU else len(primitive.work(task.shape, task.variant))  # its clock begins later
            seconds = max(spent - stages * rates.slowdown * rates.stage_seconds, LEAST_WORKING * spent)
            self.found.append(Measurement(primitive.name, primitive.version, task.variant, task.shape, seconds))
            rates = rates.with_measurement(*task.case, seconds)
        self.rates[where.device] = replace(rates, slowdown=self.rates[where.device].slowdown)

    def _tasks(self, plan: Plan) -> dict[Where, list[Task]]:
        """The layers of a plan that are not known at their size, each once; long and large ones on fewer images."""
        known = {p.name: p for p in self.table}
        divided = {p.name: p for p in self.in_host_ram}
        found: dict[Where, dict[Case, Task]] = {}
        for where, choice in layers_of(plan):
            task = None
            if where.hosted:
                of = divided[choice.primitive]
                at, task = ON_GPU, self._task(ON_GPU, *of.largest(choice.shape, choice.variant))
                if task is None:
                    at, task = where, self._task(where, of, choice.shape, choice.variant)
            else:
                at, task = where, self._task(where, known[choice.primitive], choice.shape, choice.variant)
            if task is not None:
                found.setdefault(at, {})[task.case] = task
        return {where: list(tasks.values()) for where, tasks in found.items()}

    def _task(self, where: Where, primitive: Primitive, shape: LayerShape, variant: Variant) -> Task | None:
        """None where it is known, was tried, or does not fit."""
        rates = self._rates(where)
        if rates.was_measured_near(primitive, shape, variant):
            return None
        spent = rates.seconds(primitive, shape, variant)
        images = max(1, min(shape.batch, int(shape.batch * MOST_LAYER_SECONDS / spent)))
        fewer = replace(shape, batch=images)
        while (lacks := lacking(where, primitive, fewer, variant, self.rooms)) and images > 1:
            images //= 2
            fewer = replace(shape, batch=images)
        if lacks is not None:
            self.too_large.setdefault(lacks[0], set()).add((primitive, shape, variant))
            return None
        if (where, (primitive, fewer, variant)) in self._tried:
            return None
        return Task(primitive, fewer, variant, rates.seconds(primitive, fewer, variant))
