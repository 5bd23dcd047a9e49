"""The costs that `znnpy measure` found on one machine, as data that saves itself and checks that it applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from znnpy.costs.model import Rate, Rates, assumed_rates
from znnpy.costs.samples import samples
from znnpy.costs.size_trend import SIZES
from znnpy.json_file import SHOWN, JsonFile
from znnpy.kernels.contract import Primitive, Unit, Variant, device_of
from znnpy.machine import Machine
from znnpy.messages import excerpt
from znnpy.option_values import DeviceKind
from znnpy.shapes import PRECISIONS, LayerShape

FORMAT = 3  # version of the file
AGAIN = "measure again with `znnpy measure`"

MOST_COUNT = 2**60  # of whatever a machine has
MOST_IN_VARIANT = 2**20  # such as the size of a tile: primitives may go through all smaller ones
Speed = Annotated[float, Field(ge=1, lt=1e18, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=1e-3, lt=1e3, allow_inf_nan=False)]


def _checked_machine(machine: Machine) -> Machine:
    gpu = machine.gpu
    counts = [machine.cores, machine.ram_bytes]
    if gpu is not None:
        counts += [gpu.multiprocessors, gpu.memory_bytes, gpu.l2_bytes, gpu.driver]
        counts += [gpu.shared_block_bytes, gpu.shared_multiprocessor_bytes]
    if not 1 <= min(counts) <= max(counts) <= MOST_COUNT or (gpu is not None and not 0 < gpu.bandwidth < 1e18):
        raise ValueError("a machine has cores, memory and a bandwidth above 0")
    if machine.simd not in ("avx512", "avx2", "other"):
        raise ValueError(f"vector instructions are avx512, avx2 or other, not {machine.simd!r}")
    return machine


def _checked_variant(variant: Variant) -> Variant:
    for name, value in variant.parameters:
        numbers = (value,) if isinstance(value, int) else () if isinstance(value, str) else value
        if any(not 0 <= number <= MOST_IN_VARIANT for number in numbers):
            raise ValueError(f"{excerpt(name)} of a variant is from 0 to {MOST_IN_VARIANT:,}")
    return variant


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Measurement:
    """Seconds of one run of one layer."""

    primitive: str
    version: int
    variant: Annotated[Variant, AfterValidator(_checked_variant)]
    shape: Annotated[LayerShape, Field(discriminator="kind")]
    seconds: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]

    def runs(self, primitive: Primitive, machine: Machine) -> bool:
        """Return whether `primitive` runs such a layer in such a way.

        Its variants are no list to look in: it was timed on fewer images than the plan that chose the variant has.
        """
        if primitive.kind != self.shape.kind or primitive.why_not(self.shape, machine) is not None:
            return False
        try:
            primitive.work(self.shape, self.variant)
        except (ArithmeticError, KeyError, TypeError, ValueError):  # a variant of another primitive, or of none
            return False
        return True


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class UnitSpeed:
    """The rate of a unit, and how many runs it was fitted to."""

    flops: Speed
    nbytes: Speed
    runs: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Costs:
    """Speeds of one device of one machine.

    Units that are missing were not measured: their rates are assumed, as much faster or slower as the others were.
    """

    format: int
    znnpy_version: str
    device: DeviceKind
    threads: Annotated[int, Field(ge=1, le=2**12)]  # threads that ran the layers; unused on a GPU
    machine: Annotated[Machine, AfterValidator(_checked_machine)]
    primitives: dict[str, int]  # versions of the primitives that ran there
    units: Annotated[dict[Unit, UnitSpeed], Field(min_length=1)]
    by_size: dict[str, Annotated[tuple[Factor, ...], Field(min_length=len(SIZES), max_length=len(SIZES))]]
    stage_seconds: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]  # seconds that a stage takes to begin
    layers: tuple[Measurement, ...]  # layers of networks, as their plans run them
    touching: Speed | None = None  # bytes per second of first writes to new memory; None: not measured

    def __post_init__(self) -> None:
        if (self.device == "gpu") != (self.machine.gpu is not None):
            raise ValueError("costs of a GPU name it, and costs of a processor name none")
        if self.device == "gpu" and self.touching is not None:
            raise ValueError("costs of a GPU say nothing of memory that is first written to")

    @property
    def name(self) -> str:
        """The machine in words."""
        gpu = self.machine.gpu
        return self.machine.processor if gpu is None else f"{gpu.name} beside {self.machine.processor}"

    def rates(self, table: Sequence[Primitive]) -> Rates:
        """Return the rates for the planner, without layers that no primitive of `table` runs as measured."""
        known = {(p.name, p.version): p for p in table}
        rates = replace(
            self._units(assumed_rates(self.machine, self.threads, self.device)),
            stage_seconds=self.stage_seconds,
            fitted=frozenset(self.units),
            by_size=self.by_size,
        )
        if self.touching is not None:
            rates = replace(rates, first_touch=self.touching, first_touch_measured=True)
        for layer in self.layers:
            primitive = known.get((layer.primitive, layer.version))
            if primitive is not None and layer.runs(primitive, self.machine):
                rates = rates.with_measurement(primitive, layer.shape, layer.variant, layer.seconds)
        return rates

    def _units(self, assumed: Rates) -> Rates:
        """Return measured rates; for other units the assumed rates times the median factor of the measured ones."""
        factors = [
            max(speed.flops / assumed.of(unit).flops, speed.nbytes / assumed.of(unit).nbytes, key=_distance)
            for unit, speed in self.units.items()
            if unit in assumed.units
        ]
        factor = median(factors) if factors else 1.0
        measured = {unit: Rate(speed.flops, speed.nbytes) for unit, speed in self.units.items()}
        return assumed.scaled(factor, factor).replaced(**measured)

    def why_not(self, machine: Machine, threads: int, table: Sequence[Primitive]) -> str | None:
        """Return None if the costs apply to `machine`, its libraries, primitives and threads; else what differs."""
        here = facts(machine, self.device, threads, table)
        there = _facts(self.machine, self.device, self.threads, self.primitives)
        for name in (*there, *(name for name in here if name not in there)):
            if there.get(name) != here.get(name):
                was = excerpt(there.get(name, "not there"), SHOWN)
                return f"{excerpt(name, SHOWN)} was {was} and is {here.get(name, 'not there')} here"
        return None

    def to_json(self) -> str:
        return _adapter().dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def from_json(text: str) -> Costs:
        """Read costs that `to_json` wrote; PlanFileError if they are damaged or of another format."""
        return _document().parsed(text)

    @staticmethod
    def load(path: Path) -> Costs:
        """Read the costs in a file; PlanFileError names the file."""
        return _document().load(path)


def _distance(factor: float) -> float:
    """Return how far a factor is from 1: runs depended on arithmetic or traffic, whichever moved further."""
    return abs(log(factor))


def facts(machine: Machine, device: DeviceKind, threads: int, table: Sequence[Primitive]) -> dict[str, str]:
    """Return what determines how fast layers run, by name, with the versions of all primitives that apply."""
    return _facts(machine, device, threads, versions(machine, device, table))


def versions(machine: Machine, device: DeviceKind, table: Sequence[Primitive]) -> dict[str, int]:
    """Return the versions of a device's primitives that run any of the sample layers."""
    shapes = [shape for precision in PRECISIONS for shape in samples(device, precision)]
    return {
        p.name: p.version
        for p in table
        if device_of(p.name) == device and any(p.kind == s.kind and p.why_not(s, machine) is None for s in shapes)
    }


def _facts(machine: Machine, device: DeviceKind, threads: int, primitives: Mapping[str, int]) -> dict[str, str]:
    return {
        **dict(_of_cpu(machine, threads) if device == "cpu" else _of_gpu(machine)),
        **{f"the version of {name}": str(version) for name, version in sorted(primitives.items())},
    }


def _of_cpu(machine: Machine, threads: int) -> Iterator[tuple[str, str]]:
    yield "the processor", machine.processor
    yield "the width of vectors", machine.simd
    yield "the number of cores", str(machine.cores)
    yield "the number of threads", str(threads)
    yield "BLAS", machine.blas
    yield from machine.versions


def _of_gpu(machine: Machine) -> Iterator[tuple[str, str]]:
    gpu = machine.gpu
    if gpu is None:
        return
    yield "the GPU", gpu.name
    yield "the capability of the GPU", ".".join(map(str, gpu.capability))
    yield "the number of multiprocessors", str(gpu.multiprocessors)
    yield "the memory of the GPU", f"{gpu.memory_bytes:,} bytes"
    yield "the driver of the GPU", str(gpu.driver)
    yield from gpu.versions


@cache
def _adapter() -> TypeAdapter[Costs]:
    return TypeAdapter(Costs)


@cache
def _document() -> JsonFile[Costs]:
    return JsonFile("cost file", "the costs are", FORMAT, AGAIN, "znnpy measure --out", _adapter)
