"""Plan and measure in turn: the layers of the best plan are timed until all layers of the best plan were timed.

A layer that is slower than its estimate gives way to the next best one, which is timed then. With `hope` = h, layers
that were not timed count as h times their estimate; then no plan beats the last one unless a layer is faster still.

Layers are timed where the plan runs them: on the threads of the processor that compute there, on the GPU, or, if their
tensors are in host memory, on the GPU together with all transfers. For these the largest sub-layer is timed first, by
itself, because their division depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from znnpy.costs.cost_file import MOST_REASON, Measurement, Refusal
from znnpy.costs.model import Rates
from znnpy.kernels.contract import Primitive, Variant
from znnpy.layer_shapes import LayerShape, with_batch
from znnpy.measure.budget import ON_GPU, FreeBytes, LayerTask, LayerTimer, Placement, TimeBudget, lacking, layers_of
from znnpy.messages import one_line
from znnpy.option_values import DeviceKind
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan

MOST_LAYER_SECONDS = 2.0  # estimated, of one run; a longer layer runs on fewer images

LEAST_WORKING = 0.1  # least share of a layer's time in which its stages work, and do not begin

TimersOn = Callable[[Placement, float], AbstractContextManager[LayerTimer]]  # opens a timer, for a run of some seconds
Case = tuple[Primitive, LayerShape, Variant]


@dataclass(slots=True)
class Refiner:
    """The rates of the devices of a plan, and the means to learn more.

    threads     threads that a run may have; the CPU's rates are for these, and fewer are proportionally slower
    free_bytes  bytes that are free in each memory; a layer that takes more is not timed
    """

    rates: dict[DeviceKind, Rates]
    timer: TimeBudget
    clocks: TimersOn
    threads: int
    free_bytes: FreeBytes
    costs: CostModel = field(default_factory=CostModel)  # primitives; its rates are not used
    found: list[Measurement] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    # Layers of which not even one image fits, by the memory that is too small.
    too_large: dict[DeviceKind, set[Case]] = field(default_factory=dict)
    _tried: set[tuple[Placement, Case]] = field(default_factory=set)

    def plan(self, request: PlanRequest) -> RunPlan:
        """Return the best plan for a request by what is known."""
        return make_plan(request, replace(self.costs, rates=self.rates))

    def learn(self, request: PlanRequest, share: float = 1.0, first: RunPlan | None = None) -> bool:
        """Time layers of the best plans for a request; return False where the time was up before the end.

        share  of the timer's time, after which no further layer is timed
        first  the best plan by what is known now, where somebody has it

        NoPlanError where there is no plan. A layer that cannot be timed counts as it is estimated.
        """
        plan = first
        while self.timer.left(share) > 0:
            done = self.time_layers(plan or self.plan(request), share)
            if done is not None:
                return done
            plan = None
        return False

    def time_layers(self, plan: RunPlan, share: float = 1.0) -> bool | None:
        """Time those layers of a plan that are not known; return True if all are, False if there was no time for one.

        Return None where some were timed.
        """
        tasks = self._tasks(plan)
        if not tasks:
            return True
        before = len(self._tried)
        for where, there in tasks.items():
            with self.clocks(where, plan.seconds) as clock:
                for task, spent in self.timer.times(there, clock, share):
                    self._tried.add((where, task.case))
                    self._learnt(where, task, spent)
        return False if len(self._tried) == before else None

    def hope(self, hope: float) -> None:
        """Count layers that are not known as this share of their estimate; 1: as estimated."""
        self.rates = {device: replace(rates, optimism=hope) for device, rates in self.rates.items()}

    def _rates(self, where: Placement) -> Rates:
        """Return the rates of layers that run there."""
        rates = self.rates[where.device]
        slower = self.threads / where.threads if where.device == "cpu" else 1.0
        return rates if slower == 1 else rates.slowed(slower)

    def _learnt(self, where: Placement, task: LayerTask, spent: float | str | None) -> None:
        """Learn from a measurement, or from the words of a device that refused it; None: too large for the memory."""
        if spent is None:
            return
        rates, primitive = self._rates(where), task.primitive
        if isinstance(spent, str):
            self.refusals.append(Refusal(primitive.name, primitive.version, task.shape, one_line(spent)[:MOST_REASON]))
            rates = rates.with_refusal(primitive, task.shape, spent)
        else:
            stages = 0 if where == ON_GPU else len(primitive.work(task.shape, task.variant))  # its clock begins later
            seconds = max(spent - stages * rates.slowdown * rates.stage_seconds, LEAST_WORKING * spent)
            by_all = seconds / rates.slowdown  # seconds with all threads of the run
            copying = where.threads if where.in_host_ram else 0
            self.found.append(Measurement(primitive.name, primitive.version, task.variant, task.shape, by_all, copying))
            rates = rates.with_measurement(*task.case, seconds)
        self.rates[where.device] = replace(rates, slowdown=self.rates[where.device].slowdown)

    def _tasks(self, plan: RunPlan) -> dict[Placement, list[LayerTask]]:
        """Return the layers of a plan that are not known at their size, each once; long ones on fewer images."""
        known = {p.name: p for p in self.costs.table}
        divided = {p.name: p for p in self.costs.in_host_ram}
        found: dict[Placement, dict[Case, LayerTask]] = {}
        for where, choice in layers_of(plan):
            task = None
            if where.in_host_ram:
                of = divided[choice.primitive]
                at, task = ON_GPU, self._task(ON_GPU, *of.largest(choice.shape, choice.variant))
                if task is None:
                    at, task = where, self._task(where, of, choice.shape, choice.variant)
            else:
                at, task = where, self._task(where, known[choice.primitive], choice.shape, choice.variant)
            if task is not None:
                found.setdefault(at, {})[task.case] = task
        return {where: list(tasks.values()) for where, tasks in found.items()}

    def _task(self, where: Placement, primitive: Primitive, shape: LayerShape, variant: Variant) -> LayerTask | None:
        """Return a layer to time; None where it is known, was tried, or does not fit."""
        rates = self._rates(where)
        if rates.was_measured_near(primitive, shape, variant):
            return None
        spent = rates.seconds(primitive, shape, variant)
        images = max(1, min(shape.batch, int(shape.batch * MOST_LAYER_SECONDS / spent)))
        fewer = with_batch(shape, images)
        while (lacks := lacking(where, primitive, fewer, variant, self.free_bytes)) and images > 1:
            images //= 2
            fewer = with_batch(shape, images)
        if lacks is not None:
            self.too_large.setdefault(lacks[0], set()).add((primitive, shape, variant))
            return None
        if (where, (primitive, fewer, variant)) in self._tried:
            return None
        return LayerTask(primitive, fewer, variant, rates.seconds(primitive, fewer, variant))
