"""The speed of this machine, measured: short runs of layers, and the rates of units that explain them.

Every primitive of a device that runs the sample layers (`planner.samples`) does so with the variant that looks the
fastest for each unit it may use, primitives taking turns, until the time is up. Kernels that no card has shown results
of are left out: nothing chooses them. For a network the layers of its best plans follow, as they are, until the best
plan holds nothing that was not measured.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import znnpy
from znnpy.errors import DeviceError, NoPlanError
from znnpy.kernels.primitive import Primitive, Unit, Variant
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits, Machine
from znnpy.planner.cost import UNSEEN_UNITS, Rate, Rates, assumed_rates
from znnpy.planner.costs import FORMAT, Costs, Measurement, UnitSpeed, versions
from znnpy.planner.fitting import Run, fitted
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan, device_of
from znnpy.planner.samples import samples
from znnpy.shapes import LayerShape, Precision

_log = logging.getLogger(__name__)

SURVEY_SHARE = 0.5  # of the time, where a network is measured too
MOST_RUN_SECONDS = 0.4  # of one run of a sample, as estimated
MOST_LAYER_SECONDS = 2.0  # of one run of a network's layer, as estimated: what takes longer runs on fewer images
RUNS_OF_A_LAYER = 4  # that one measurement takes, about
COVERS = (None, True, False)  # the best plan, the best of columns, the best of patches

Making = Callable[[Rates, bool | None], Plan]


class Clock(Protocol):
    """Who runs a layer and says how long that took: a CpuClock or a GpuClock."""

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a measurement is."""

    done: int
    total: int
    seconds_left: float  # at most
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


@dataclass(slots=True)
class Timer:
    """Times tasks within a time limit, and tells of each; what a GPU refuses to run is left out."""

    clock: Clock
    seconds: float  # that all may take
    tell: Callable[[Progress], None]
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    def left(self, share: float = 1.0) -> float:
        return share * self.seconds - (self.now() - self.begun)

    def times(self, tasks: Sequence[Task], share: float = 1.0) -> Iterator[tuple[Task, float]]:
        """Tasks and their seconds, in turn, while there is time within `share` of all of it."""
        for done, task in enumerate(tasks):
            if RUNS_OF_A_LAYER * task.expected > self.left(share):
                continue
            self.tell(Progress(done, len(tasks), self.left(), task.name))
            try:
                spent = self.clock.seconds(task.primitive, task.shape, task.variant)
            except DeviceError as error:
                _log.info("%s is not run here: %s", task.name, error)
                continue
            yield task, spent
        self.tell(Progress(len(tasks), len(tasks), self.left(), ""))


def sample_tasks(
    machine: Machine,
    device: DeviceKind,
    precisions: Sequence[Precision],
    limits: Limits,
    room_bytes: int,
    table: Sequence[Primitive] = TABLE,
) -> list[Task]:
    """What tells the speed of a device within `room_bytes` of its memory; primitives take turns."""
    rates = assumed_rates(machine, limits.threads, device)
    turns: Counter[str] = Counter()
    tasks: list[tuple[int, int, Task]] = []
    for precision in precisions:
        for shape in samples(device, precision):
            for primitive in table:
                if device_of(primitive.name) != device or primitive.kind != shape.kind:
                    continue
                if primitive.why_not(shape, machine) is not None:
                    continue
                for task in _best(primitive, shape, machine, rates, limits.threads, room_bytes):
                    tasks.append((turns[primitive.name], len(tasks), task))
                    turns[primitive.name] += 1
    return [task for _, _, task in sorted(tasks, key=lambda entry: entry[:2])]


def _best(
    primitive: Primitive, shape: LayerShape, machine: Machine, rates: Rates, threads: int, room_bytes: int
) -> Iterator[Task]:
    """With the variants that look the fastest: one for each choice of units that a variant makes, where one may run."""
    found: dict[frozenset[Unit], Task] = {}
    for variant in primitive.variants(shape, machine):
        units = frozenset(work.unit for work in primitive.work(shape, variant))
        spent = rates.seconds(primitive, shape, variant)
        if units & UNSEEN_UNITS or spent > MOST_RUN_SECONDS or _bytes(primitive, shape, variant, threads) > room_bytes:
            continue
        if units not in found or spent < found[units].expected:
            found[units] = Task(primitive, shape, variant, spent)
    yield from found.values()


def _bytes(primitive: Primitive, shape: LayerShape, variant: Variant, threads: int) -> int:
    """Of one layer that is timed: all its buffers at once, and its weights."""
    footprint = primitive.footprint(shape, variant, threads)
    scratch = sum(s.nbytes for s in footprint.scratch)
    return shape.in_bytes + shape.out_bytes + scratch + footprint.resident + footprint.host + footprint.allowance


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: a device of a machine, by so many threads."""

    machine: Machine
    device: DeviceKind
    limits: Limits
    table: Sequence[Primitive] = TABLE

    @property
    def assumed(self) -> Rates:
        return assumed_rates(self.machine, self.limits.threads, self.device)

    def survey(self, tasks: Sequence[Task], timer: Timer, share: float = 1.0) -> tuple[Rates, dict[Unit, int]]:
        """Rates fitted to the tasks, and the number of runs that each unit takes part in."""
        runs = [Run(tuple(t.primitive.work(t.shape, t.variant)), spent) for t, spent in timer.times(tasks, share)]
        counted = Counter(unit for run in runs for unit in {work.unit for work in run.work})
        if not counted:
            raise NoPlanError("no layer could be measured in this time and memory; raise --minutes or --ram")
        begun_apart = 0.0 if self.device == "gpu" else self.assumed.stage_seconds  # a GPU's clock begins when it does
        rates = fitted(replace(self.assumed, stage_seconds=begun_apart), runs)
        return replace(rates, stage_seconds=self.assumed.stage_seconds), dict(counted)

    def deepen(self, rates: Rates, make: Making, timer: Timer) -> list[Measurement]:
        """Layers of the best plans that `make` makes with what is known, until the time is up or all are known."""
        known = {p.name: p for p in self.table}
        found: list[Measurement] = []
        tried: set[tuple[Primitive, LayerShape, Variant]] = set()
        for columns in COVERS:
            while timer.left() > 0:
                try:
                    plan = make(rates, columns)
                except NoPlanError:
                    if columns is None:
                        raise
                    break
                tasks = [
                    task
                    for task in _layers(plan, known, rates)
                    if not rates.knows(*_case(task)) and _case(task) not in tried
                ]
                tried.update(map(_case, tasks))
                before = len(found)
                for task, spent in timer.times(tasks):
                    layer = self._measurement(task, spent)
                    found.append(layer)
                    rates = rates.learnt(*_case(task), layer.seconds)
                if len(found) == before:
                    break
        return found

    def _measurement(self, task: Task, spent: float) -> Measurement:
        """Without what stages take to begin, which the rates count apart."""
        begun = 0.0 if self.device == "gpu" else self.assumed.stage_seconds
        stages = len(task.primitive.work(task.shape, task.variant))
        seconds = max(spent - stages * begun, 0.5 * spent)
        return Measurement(task.primitive.name, task.primitive.version, task.variant, task.shape, seconds)

    def costs(self, rates: Rates, runs: Mapping[Unit, int], layers: Sequence[Measurement], old: Costs | None) -> Costs:
        """All that is known: what was measured now, and of an earlier measurement what was not measured again."""
        units = {unit: UnitSpeed(rates.of(unit).flops, rates.of(unit).nbytes, count) for unit, count in runs.items()}
        kept = (
            () if old is None else tuple(layer for layer in old.layers if not any(_same(layer, new) for new in layers))
        )
        return Costs(
            format=FORMAT,
            znnpy_version=znnpy.__version__,
            device=self.device,
            threads=self.limits.threads if self.device == "cpu" else 1,
            machine=self.machine,
            primitives=versions(self.machine, self.device, self.table),
            units={**({} if old is None else old.units), **units},
            layers=(*kept, *layers),
        )


def _layers(plan: Plan, known: Mapping[str, Primitive], rates: Rates) -> Iterator[Task]:
    """The layers of a plan, each once; long ones on fewer images."""
    seen = set()
    for choice in plan.choices:
        primitive, shape = known[choice.primitive], choice.shape
        spent = rates.seconds(primitive, shape, choice.variant)
        images = max(1, min(shape.batch, int(shape.batch * MOST_LAYER_SECONDS / spent)))
        shape = replace(shape, batch=images)
        task = Task(primitive, shape, choice.variant, rates.seconds(primitive, shape, choice.variant))
        if (key := (primitive.name, shape, choice.variant)) not in seen:
            seen.add(key)
            yield task


def _case(task: Task) -> tuple[Primitive, LayerShape, Variant]:
    return task.primitive, task.shape, task.variant


def _same(one: Measurement, other: Measurement) -> bool:
    return replace(one, seconds=1.0) == replace(other, seconds=1.0)


def rate_words(rate: Rate) -> str:
    """`400 GFLOP/s, 25 GB/s`."""
    return f"{rate.flops / 1e9:,.3g} GFLOP/s, {rate.nbytes / 1e9:,.3g} GB/s"
