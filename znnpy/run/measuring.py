"""The speed of this machine, measured: short runs of layers, and the rates of units that explain them.

Every primitive of a device that runs the sample layers (`planner.samples`) does so with the variant that looks the
fastest for each unit it may use, primitives taking turns, until the time is up. Kernels that no card has shown results
of are left out: nothing chooses them. For a network the layers of its best plans follow (`run.learning`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import znnpy
from znnpy.errors import NoPlanError
from znnpy.kernels.primitive import Primitive, Unit
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits, Machine
from znnpy.planner.cost import UNSEEN_UNITS, Rate, Rates, assumed_rates, method
from znnpy.planner.costs import FORMAT, Costs, Measurement, UnitSpeed, versions
from znnpy.planner.fitting import Run, fitted
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan, device_of
from znnpy.planner.samples import samples
from znnpy.run.learning import Learner
from znnpy.run.timing import Task, Timer, bytes_of
from znnpy.shapes import LayerShape, Precision

SURVEY_SHARE = 0.5  # of the time, where a network is measured too
MOST_RUN_SECONDS, MOST_LARGE_SECONDS = 0.4, 1.5  # of one run of a sample, as estimated
LARGE_BYTES = 2**28  # of what a sample reads, from which on it is a large one
COVERS = (None, True, False)  # the best plan, the best of columns, the best of patches


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
    most = MOST_LARGE_SECONDS if shape.in_bytes >= LARGE_BYTES else MOST_RUN_SECONDS
    for variant in primitive.variants(shape, machine):
        units = frozenset(work.unit for work in primitive.work(shape, variant))
        spent = rates.seconds(primitive, shape, variant)
        if units & UNSEEN_UNITS or spent > most:
            continue
        if bytes_of(primitive, shape, variant, threads) > room_bytes:
            continue
        if units not in found or spent < found[units].expected:
            found[units] = Task(primitive, shape, variant, spent)
    yield from found.values()


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: a device of a machine, by so many threads, within so much of its memory."""

    machine: Machine
    device: DeviceKind
    limits: Limits
    room_bytes: int
    table: Sequence[Primitive] = TABLE

    @property
    def assumed(self) -> Rates:
        return assumed_rates(self.machine, self.limits.threads, self.device)

    def survey(self, tasks: Sequence[Task], timer: Timer, share: float = 1.0) -> tuple[Rates, dict[Unit, int]]:
        """Rates fitted to the tasks, and the number of runs that each unit takes part in."""
        runs = [
            Run(tuple(task.primitive.work(task.shape, task.variant)), spent, method(task.primitive, task.shape))
            for task, spent in timer.times(tasks, share)
            if not isinstance(spent, str)
        ]
        counted = Counter(unit for run in runs for unit in {work.unit for work in run.work})
        if not counted:
            raise NoPlanError("no layer could be measured in this time and memory; raise --minutes or --ram")
        return fitted(self.assumed, runs, begins=self.device == "cpu"), dict(counted)

    def deepen(self, rates: Rates, make: Callable[[Rates, bool | None], Plan], timer: Timer) -> list[Measurement]:
        """Layers of the best plans that `make` makes with what is known, until the time is up or all are known."""
        learner = Learner(rates, timer, self.device, self.limits, self.room_bytes, self.table)
        for columns in COVERS:
            if columns is None:
                learner.learn(lambda known: make(known, None))
                continue
            with suppress(NoPlanError):
                learner.learn(lambda known, columns=columns: make(known, columns))  # type: ignore[misc]
        return learner.found

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
            by_size={**({} if old is None else old.by_size), **rates.by_size},
            stage_seconds=rates.stage_seconds,
            layers=(*kept, *layers),
        )


def _same(one: Measurement, other: Measurement) -> bool:
    return replace(one, seconds=1.0) == replace(other, seconds=1.0)


def rate_words(rate: Rate) -> str:
    """`400 GFLOP/s, 25 GB/s`."""
    return f"{rate.flops / 1e9:,.3g} GFLOP/s, {rate.nbytes / 1e9:,.3g} GB/s"
