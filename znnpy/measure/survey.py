"""Measure the speed of this machine: run layers for a short time, and fit the rates of units to these runs.

Every primitive of a device runs the sample layers (`znnpy.costs.samples`) that it can. It does so with the variant that
looks the fastest for each unit that it may use, and with one that looks slower, so that rates tell variants apart. What
looks the fastest of all comes first, until the time is up; what looks much slower than that does only short runs.
Kernels that were never run on any card are left out, since no plan takes them. For a network the layers of its best
plans follow (`znnpy.measure.refine`), within all memory and within parts of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from znnpy.costs.cost_file import Costs, Measurement, UnitSpeed
from znnpy.costs.fit import Run, fitted
from znnpy.costs.model import UNPROVEN_UNITS, Rate, Rates, assumed_rates, method
from znnpy.costs.samples import samples
from znnpy.errors import DeviceError, NoPlanError
from znnpy.kernels.contract import Primitive, Unit, device_of
from znnpy.kernels.table import TABLE
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits, Machine
from znnpy.measure.budget import LayerTask, LayerTimer, TimeBudget, bytes_of
from znnpy.measure.layer_timer import touching_rate
from znnpy.measure.refine import Refiner
from znnpy.messages import option
from znnpy.option_values import Cover, DeviceKind
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.shapes import Precision
from znnpy.units import human_bytes, human_seconds

SURVEY_SHARE = 0.5  # of the time, if a network is given and the machine was not measured before
MOST_RUN_SECONDS, MOST_LARGE_SECONDS = 0.4, 1.5  # estimated, of one run of a sample
MOST_TOUCHED, LEAST_TOUCHED = 2**29, 2**25  # bytes of new memory that are written to, to measure how fast that is
LARGE_BYTES = 2**28  # a sample that reads at least so much is a large one
FAR, SHORT_SECONDS = 4.0, 0.01  # a run that looks so many times slower than the best is left out, unless it is short
OTHERWISE = 1.5  # the second variant of a primitive looks at most so many times slower than the best
# Plans of a network: their cover (None: the better one), and the part of the memory that they are made for.
PLANS: tuple[tuple[Cover | None, int], ...] = ((None, 1), ("columns", 1), ("patches", 1), (None, 4), (None, 16))


def sample_tasks(
    machine: Machine,
    device: DeviceKind,
    precisions: Sequence[Precision],
    limits: Limits,
    free_bytes: int,
    table: Sequence[Primitive] = TABLE,
) -> list[LayerTask]:
    """Return what is timed to know the speed of a device, within `free_bytes` of its memory.

    One sample of every primitive comes first. Then comes what looks the fastest for every sample, then what looks
    second, and so on: plans take the first of these the most, and the last is left out if there is no time.
    """
    rates = assumed_rates(machine, limits.threads, device)
    met = set[str]()
    tasks: list[tuple[int, int, LayerTask]] = []
    for precision in precisions:
        for shape in samples(device, precision):
            of_shape = [
                task
                for primitive in table
                if device_of(primitive.name) == device
                and primitive.kind == shape.kind
                and primitive.why_not(shape, machine) is None
                for task in _variants(primitive, shape, machine, rates, limits.threads, free_bytes)
            ]
            of_shape.sort(key=lambda task: task.expected)
            for rank, task in enumerate(of_shape, start=1):
                if task.expected <= max(FAR * of_shape[0].expected, SHORT_SECONDS):
                    tasks.append((0 if task.primitive.name not in met else rank, len(tasks), task))
                    met.add(task.primitive.name)
    return [task for _, _, task in sorted(tasks, key=lambda entry: entry[:2])]


def units_of(tasks: Sequence[LayerTask]) -> set[Unit]:
    """Return all units that tasks work with."""
    return {work.unit for task in tasks for work in task.primitive.work(task.shape, task.variant)}


def counted_units(runs: Sequence[Run]) -> dict[Unit, int]:
    """Return the number of runs that each unit takes part in."""
    return dict(Counter(unit for run in runs for unit in {work.unit for work in run.work}))


def _variants(
    primitive: Primitive, shape: LayerShape, machine: Machine, rates: Rates, threads: int, free_bytes: int
) -> Iterator[LayerTask]:
    """Yield, for each set of units that variants use, the one that looks the fastest and the slowest one near it."""
    found: dict[frozenset[Unit], list[LayerTask]] = {}
    most = MOST_LARGE_SECONDS if shape.in_bytes >= LARGE_BYTES else MOST_RUN_SECONDS
    for variant in primitive.variants(shape, machine):
        units = frozenset(work.unit for work in primitive.work(shape, variant))
        spent = rates.seconds(primitive, shape, variant)
        if units & UNPROVEN_UNITS or spent > most:
            continue
        if bytes_of(primitive, shape, variant, threads) > free_bytes:
            continue
        found.setdefault(units, []).append(LayerTask(primitive, shape, variant, spent))
    for alike in found.values():
        alike.sort(key=lambda task: task.expected)
        near = [task for task in alike if task.expected <= OTHERWISE * alike[0].expected]
        yield alike[0]
        if len(near) > 1:
            yield near[-1]


@dataclass(frozen=True, slots=True)
class Survey:
    """The measurement of one device of a machine, with a number of threads and within so much of its memory."""

    machine: Machine
    device: DeviceKind
    limits: Limits
    free_bytes: int
    table: tuple[Primitive, ...] = TABLE

    @property
    def assumed(self) -> Rates:
        return assumed_rates(self.machine, self.limits.threads, self.device)

    def survey(
        self, tasks: Sequence[LayerTask], clock: LayerTimer, timer: TimeBudget, share: float = 1.0
    ) -> tuple[Rates, dict[Unit, int]]:
        """Return rates fitted to the tasks, and the number of runs that each unit takes part in."""
        runs, refused = self.timed(tasks, clock, timer, share)
        counted = counted_units(runs)
        if refused and not counted:
            raise DeviceError(f"none of {len(refused)} layers could be measured; the first is {refused[0]}")
        if not counted:
            raise NoPlanError(
                f"no layer could be measured within {human_seconds(share * timer.seconds)} and "
                f"{human_bytes(max(0, self.free_bytes))} of memory for it; raise {option('minutes')} or {option('ram')}"
            )
        return fitted(self.assumed, runs, begins=self.device == "cpu"), counted

    def timed(
        self, tasks: Sequence[LayerTask], clock: LayerTimer, timer: TimeBudget, share: float = 1.0
    ) -> tuple[list[Run], list[str]]:
        """Return the runs of tasks, and why others were refused."""
        runs, refused = list[Run](), list[str]()
        for task, spent in timer.times(tasks, clock, share):
            if isinstance(spent, float):
                work = tuple(task.primitive.work(task.shape, task.variant))
                runs.append(Run(work, spent, method(task.primitive, task.shape)))
            elif spent is not None:
                refused.append(f"{task.name}: {spent}")
        return runs, refused

    def deepen(self, rates: Rates, request: PlanRequest, clock: LayerTimer, timer: TimeBudget) -> list[Measurement]:
        """Measure layers of the best plans for a request, within its memory and parts of it.

        It ends when the time is up or all layers are known. NoPlanError if nothing fits within all the memory.
        """
        device, free = self.device, {self.device: self.free_bytes}
        costs = CostModel(table=self.table)
        refiner = Refiner({device: rates}, timer, lambda *_: nullcontext(clock), self.limits.threads, free, costs)
        begun = 1 - timer.left() / timer.seconds
        for number, (cover, part) in enumerate(PLANS):
            until = begun + (1 - begun) * (number + 1) / len(PLANS)
            wanted = replace(request.constraints, cover=cover)
            within = replace(request, constraints=wanted, limits=request.limits.part(part))
            with suppress(NoPlanError) if number else nullcontext():
                refiner.learn(within, until)
        return refiner.found

    def touched(self, old: Costs | None, *, again: bool) -> float | None:
        """Return the bytes per second of first writes to memory; None on a GPU, and if too little memory is free.

        again  measure even if `old` knows
        """
        if self.device == "gpu":
            return None
        known, nbytes = None if old is None else old.first_touch, min(MOST_TOUCHED, self.free_bytes // 2)
        if nbytes < LEAST_TOUCHED or (known is not None and not again):
            return known
        return touching_rate(self.limits.threads, nbytes)

    def costs(self, rates: Rates, runs: Mapping[Unit, int], layers: Sequence[Measurement]) -> Costs:
        """Return what was measured: rates of the units that took part in `runs`, and layers of a network."""
        empty = Costs.empty(self.machine, self.device, self.limits.threads, self.table)
        first_touch = rates.first_touch if rates.first_touch_measured else None
        if not runs:
            return replace(empty, first_touch=first_touch, layers=tuple(layers))
        return replace(
            empty,
            units={unit: UnitSpeed(rates.of(unit).flops, rates.of(unit).nbytes, count) for unit, count in runs.items()},
            by_size=dict(rates.by_size),
            stage_seconds=rates.stage_seconds,
            first_touch=first_touch,
            layers=tuple(layers),
        )


def rate_words(rate: Rate) -> str:
    """Return a rate as text, such as `400 GFLOP/s, 25 GB/s`."""
    return f"{rate.flops / 1e9:,.3g} GFLOP/s, {rate.nbytes / 1e9:,.3g} GB/s"
