"""Costs measured on one device of one machine, as data that saves itself and checks where it applies."""

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

import znnpy
from znnpy.costs.fit import Run, fitted
from znnpy.costs.model import Rate, Rates, assumed_rates, method
from znnpy.costs.samples import samples
from znnpy.costs.size_trend import SIZES
from znnpy.json_file import SHOWN, JsonFile
from znnpy.kernels.contract import Primitive, Unit, Variant, device_of
from znnpy.layer_shapes import LayerShape
from znnpy.machine import AMX, AVX512_BF16, Machine
from znnpy.messages import excerpt
from znnpy.option_values import DeviceKind
from znnpy.shapes import PRECISIONS

FORMAT = 4  # version of the file
AGAIN = "measure again with `znnpy measure`"

MOST_COUNT = 2**60  # of whatever a machine has
MOST_REASON = 500  # characters of a refusal that are kept
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
    if not set(machine.bf16) <= {AMX, AVX512_BF16}:
        raise ValueError(f"bfloat16 is multiplied by {AMX} or {AVX512_BF16}, not by {excerpt(machine.bf16)}")
    return machine


def _checked_variant(variant: Variant) -> Variant:
    for name, value in variant.parameters:
        numbers = (value,) if isinstance(value, int) else () if isinstance(value, str) else value
        if any(not 0 <= number <= MOST_IN_VARIANT for number in numbers):
            raise ValueError(f"{excerpt(name)} of a variant is from 0 to {MOST_IN_VARIANT:,}")
    return variant


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Measurement:
    """The seconds that one layer took.

    threads  threads of the processor that copied for a GPU whose layer had its tensors in host memory; 0: none did
    """

    primitive: str
    version: int
    variant: Annotated[Variant, AfterValidator(_checked_variant)]
    shape: Annotated[LayerShape, Field(discriminator="kind")]
    seconds: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
    threads: Annotated[int, Field(ge=0, le=2**12)] = 0

    def runs(self, primitive: Primitive, machine: Machine) -> bool:
        """Return whether `primitive` can run this layer with this variant.

        The variants that the primitive proposes are no measure: the layer may have been timed on fewer images than the
        plan that chose its variant has.
        """
        if primitive.kind != self.shape.kind or primitive.why_not(self.shape, machine) is not None:
            return False
        try:
            primitive.work(self.shape, self.variant)
        except (ArithmeticError, KeyError, TypeError, ValueError):  # a variant of another primitive, or of none
            return False
        return True

    def same_layer(self, other: Measurement) -> bool:
        """Return whether the other measurement timed the same layer in the same way."""
        return replace(self, seconds=1.0) == replace(other, seconds=1.0)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Refusal:
    """The reason that a device gave when it refused to run a layer."""

    primitive: str
    version: int
    shape: Annotated[LayerShape, Field(discriminator="kind")]
    reason: Annotated[str, Field(min_length=1, max_length=MOST_REASON)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class UnitSpeed:
    """The rate of a unit, and how many runs it was fitted to."""

    flops: Speed
    nbytes: Speed
    runs: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Costs:
    """All that was measured of one device of one machine.

    threads        threads that ran the layers; 1 for a GPU
    primitives     versions of the primitives that run there
    units          rates of units; a unit that is missing is assumed, as much faster or slower as the others were
    by_size        factors of primitives at SIZES
    stage_seconds  seconds that a stage takes to begin; None: not measured
    first_touch    bytes per second at which new memory is first written to; None: not measured
    calibrated     the units come from a calibration of a few seconds, not from `znnpy measure`
    layers         layers of networks, as plans run them
    samples        layers of networks on volumes of several sizes, to which a GPU's rates are fitted once more
    refusals       layers that the device refused to run
    settled        digests of networks all of whose samples were timed, and the bytes of GPU memory that allowed
    links          bytes per second from host memory to the GPU, by the name of the host
    """

    format: int
    znnpy_version: str
    device: DeviceKind
    threads: Annotated[int, Field(ge=1, le=2**12)]
    machine: Annotated[Machine, AfterValidator(_checked_machine)]
    primitives: dict[str, int]
    units: dict[Unit, UnitSpeed] = Field(default_factory=dict)
    by_size: dict[str, Annotated[tuple[Factor, ...], Field(min_length=len(SIZES), max_length=len(SIZES))]] = Field(
        default_factory=dict
    )
    stage_seconds: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    first_touch: Speed | None = None
    calibrated: bool = False
    layers: tuple[Measurement, ...] = ()
    samples: tuple[Measurement, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settled: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    links: dict[str, Speed] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.device == "gpu") != (self.machine.gpu is not None):
            raise ValueError("costs of a GPU name it, and costs of a processor name none")
        if self.device == "gpu" and self.first_touch is not None:
            raise ValueError("costs of a GPU say nothing of memory that is first written to")
        if self.device == "cpu" and (self.samples or self.settled or self.links):
            raise ValueError("samples of networks and links are those of a GPU")

    @staticmethod
    def empty(machine: Machine, device: DeviceKind, threads: int, table: Sequence[Primitive]) -> Costs:
        """Return the costs of a device of which nothing was measured; `machine` may have a GPU beside a processor."""
        of = replace(machine, gpu=None) if device == "cpu" else machine
        used = threads if device == "cpu" else 1
        return Costs(FORMAT, znnpy.__version__, device, used, of, versions(of, device, table))

    @property
    def name(self) -> str:
        """The machine in words."""
        gpu = self.machine.gpu
        return self.machine.processor if gpu is None else f"{gpu.name} beside {self.machine.processor}"

    def with_newer(self, newer: Costs) -> Costs:
        """Return these costs with what was measured later, on the same device; it replaces what it measured again.

        Units keep their rates where they were not measured again. Factors of primitives belong to the rates that were
        fitted together with them, so those of the newer rates replace all others.
        """
        fitted = newer if newer.units else self
        return replace(
            newer,
            units={**self.units, **newer.units},
            by_size=fitted.by_size,
            stage_seconds=fitted.stage_seconds,
            calibrated=fitted.calibrated,
            first_touch=newer.first_touch or self.first_touch,
            layers=_joined(self.layers, newer.layers),
            samples=_joined(self.samples, newer.samples),
            refusals=tuple(dict.fromkeys((*self.refusals, *newer.refusals))),
            settled={**self.settled, **newer.settled},
            links={**self.links, **newer.links},
        )

    def shortened(self) -> Costs:
        """Return these costs without the oldest eighth of all layers; no network counts as settled then."""
        layers, samples, refusals = self.layers, self.samples, self.refusals
        return replace(
            self,
            layers=layers[-(-len(layers) // 8) :],
            samples=samples[-(-len(samples) // 8) :],
            refusals=refusals[-(-len(refusals) // 8) :],
            settled={},
        )

    def unit_rates(self, table: Sequence[Primitive]) -> Rates:
        """Return the rates of units, and which layers the device refuses, without single layers that were measured."""
        rates = self._units(assumed_rates(self.machine, self.threads, self.device))
        rates = replace(rates, fitted=frozenset(self.units), by_size=self.by_size)
        if self.stage_seconds is not None:
            rates = replace(rates, stage_seconds=self.stage_seconds)
        if self.first_touch is not None:
            rates = replace(rates, first_touch=self.first_touch, first_touch_measured=True)
        known = {(p.name, p.version): p for p in table}
        for refusal in self.refusals:
            primitive = known.get((refusal.primitive, refusal.version))
            if primitive is not None and primitive.kind == refusal.shape.kind:
                rates = rates.with_refusal(primitive, refusal.shape, refusal.reason)
        return rates

    def rates(self, table: Sequence[Primitive], threads: int = 0) -> Rates:
        """Return all rates for the planner, without layers that no primitive of `table` runs as measured.

        threads  threads that copy for a GPU: layers that others copied for are left out
        """
        known = {(p.name, p.version): p for p in table}
        samples, layers = (
            [
                (primitive, of)
                for of in measurements
                if (primitive := known.get((of.primitive, of.version))) is not None
                and of.threads in (0, threads)
                and of.runs(primitive, self.machine)
            ]
            for measurements in (self.samples, self.layers)
        )
        rates = self.unit_rates(table)
        runs = [
            Run(tuple(p.work(of.shape, of.variant)), of.seconds, method(p, of.shape))
            for p, of in samples
        ]  # fmt: skip
        rates = fitted(rates, runs, begins=False)
        for primitive, of in (*layers, *samples):
            if not rates.was_measured_near(primitive, of.shape, of.variant):
                rates = rates.with_measurement(primitive, of.shape, of.variant, of.seconds)
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


def _joined(older: tuple[Measurement, ...], newer: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    """Return all measurements, without older ones of layers that were timed again."""
    return (*(old for old in older if not any(old.same_layer(new) for new in newer)), *newer)


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
    if machine.bf16:
        yield "what multiplies bfloat16", " and ".join(machine.bf16)
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
