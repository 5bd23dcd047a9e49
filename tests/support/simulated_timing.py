"""A GPU whose time goes as the layers that it runs say, and primitives that take a multiple of what is assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_plans import MIXED as NETWORK
from tests.support.fake_primitives import WITH_GPU, Fake
from tests.support.flat_requests import make_plan
from znnpy.costs.model import GPU_STAGE_SECONDS, Rates, assumed_rates
from znnpy.costs.store import CostStore
from znnpy.errors import DeviceError
from znnpy.kernels.contract import Footprint, Primitive, Scratch, Variant, Work
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits
from znnpy.measure import gpu_layers
from znnpy.measure.gpu_layers import measured_rates
from znnpy.measure.layer_timer import LONG_SECONDS
from znnpy.measure.refine import Refiner
from znnpy.option_values import DeviceKind
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import ConvShape

REFUSES = "gpu.conv.stubborn"
LINK = 7e9  # bytes per second
FACTORS = {"gpu.conv.praised": 9.0, "gpu.conv.plain": 1.5, "gpu.conv.counted": 2.5}  # times the estimate


@dataclass
class Card:
    """A device whose time goes as the layers that it runs say."""

    seconds: float = 0.0
    runs: list[tuple[str, LayerShape, Variant]] = field(default_factory=list)
    held: int = 0
    stream: object = None
    refusal: DeviceError = field(default_factory=lambda: DeviceError("cuDNN has no plan"))  # of REFUSES
    broken: bool = False  # by what it refused

    def allocate(self, nbytes: int, what: str) -> Any:
        assert what
        self.held += nbytes
        return np.empty(nbytes, np.uint8)

    def view(self, data: Any, shape: Sequence[int], dtype: Any) -> Any:
        return np.ndarray(shape, dtype, data)

    def put(self, host: Any, what: str) -> Any:
        assert what
        return host.copy()

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def pinned(self, shape: Sequence[int], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def copy_async(self, target: Any, source: Any, stream: object) -> None:
        target[...] = source
        self.seconds += source.nbytes / LINK

    def synchronize(self, stream: object = None) -> None:
        assert stream is None
        if self.broken:
            raise DeviceError("cudaDeviceSynchronize was refused: cudaErrorIllegalAddress")

    def elapsed(self, work: Callable[[], object], repeats: int = 1) -> list[float]:
        found = []
        for number in range(repeats):
            self.seconds = 0.0
            work()
            found.append(self.seconds * (1.3 if number == 0 else 1.0))
        return found


@dataclass(frozen=True, slots=True)
class Timed(Fake):
    """Takes FACTORS times what it is assumed to take."""

    tiles: tuple[tuple[int, int, int], ...] = ((1, 1, 1),)
    groups: tuple[int, ...] = (1,)
    same: bool = False  # whatever the group
    host: int = 0  # bytes that it locks in the process

    def variants(self, shape: LayerShape, machine: Any) -> Sequence[Variant]:
        return tuple(Variant.of(tile=tile, group=group) for tile in self.tiles for group in self.groups)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        return Footprint(
            scratch=(Scratch("room", int(self.scratch[0] * shape.out_bytes) if self.scratch else 64),),
            reads_peak=True,
            raises_peak=self.kind == "conv",
            host=self.host,
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        slower = prod(variant.size("tile")) * (1 if self.same else 1 + 0.01 * variant.count("group"))
        return (Work("gpu_gemm_float", self.flops * slower * prod(shape.out_shape), 0.0),)

    def prepare(self, weights: Any, variant: Variant, pool: Any) -> Any:
        assert (weights is None) == (self.kind != "conv")
        return weights

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: Any) -> Any:
        return _Step(self, resident, shape, variant, pool)


@dataclass(frozen=True, slots=True)
class _Step:
    primitive: Timed
    weights: Any
    shape: LayerShape
    variant: Variant
    card: Card

    def run(self, x: Any, out: Any, scratch: Mapping[str, Any], before: Any = None, **peaks: int) -> None:
        if self.primitive.name == REFUSES:
            self.card.runs.append((self.primitive.name, self.shape, self.variant))
            raise self.card.refusal
        assert x.shape == self.shape.in_shape
        assert out.shape == self.shape.out_shape
        assert x.dtype == out.dtype == (np.float16 if self.shape.precision == "fp16" else np.float32)
        assert 0.5 < x.astype(np.float32).std() < 1.5
        assert len(np.unique(x)) > 0.2 * min(x.size, 1000), "numbers that differ"
        assert scratch["room"].nbytes
        assert peaks["x_peak"]
        assert bool(peaks["out_peak"]) == (self.primitive.kind == "conv")
        if isinstance(self.shape, ConvShape):
            assert self.weights.weight.shape == (self.shape.fout, self.shape.fin, *self.shape.k)
        self.card.seconds += FACTORS.get(self.primitive.name, 1.0) * own(self.primitive, self.shape, self.variant)
        self.card.runs.append((self.primitive.name, self.shape, self.variant))


def own(primitive: Timed, shape: LayerShape, variant: Variant) -> float:
    """Seconds as assumed, without what it takes to start its one stage."""
    return assumed_rates(WITH_GPU, 1, "gpu").seconds(primitive, shape, variant) - GPU_STAGE_SECONDS


PRAISED = Timed("gpu.conv.praised", "conv", flops=1e6, pools=True)
PLAIN = Timed("gpu.conv.plain", "conv", flops=3e6)
LAZY = Timed("gpu.conv.lazy", "conv", flops=9e6)
REST = tuple(Timed(f"gpu.{kind}.all", kind) for kind in ("pool", "maxfilter", "maxout"))
ON_CPU = Fake("cpu.conv.slow", "conv")
TABLE: tuple[Primitive, ...] = (ON_CPU, PRAISED, PLAIN, LAZY, *REST)


def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep measurements in a separate cache, and let volumes be measured in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_layers, "VOLUMES", ((1, (10, 8, 6, 4), LONG_SECONDS),))
    return tmp_path / "cache" / "znnpy"


def rates_of(card: Card, table: Sequence[Primitive] = TABLE, **arguments: Any) -> Rates:
    settings: dict[str, Any] = {"vram_bytes": 2**30, "threads": 2, "store": CostStore(table=table), **arguments}
    precision = settings.pop("precision", "tf32")
    return measured_rates(card, settings.pop("machine", WITH_GPU), NETWORK, precision, **settings)  # type: ignore[arg-type]


def measured(card: Card) -> list[str]:
    """Names of what ran, once each time it was measured."""
    names = [(name, str(shape)) for name, shape, _ in card.runs]
    return [name for i, (name, shape) in enumerate(names) if i == 0 or names[i - 1] != (name, shape)]


STUBBORN = Timed(REFUSES, "conv", flops=1e3, groups=(1, 2, 3), pools=True)
FULL = Limits(ram_bytes=2**34, threads=2, vram_bytes=2**34)


def planned(rates: Rates, table: Sequence[Primitive]) -> set[str]:
    """Names of what a plan with these rates takes for convolutions."""
    plan = make_plan(
        NETWORK, (20, 21, 22), WITH_GPU, FULL, table=tuple(table), rates=rates, baseline=0, device="gpu",
        precision="tf32",
    )  # fmt: skip
    return {choice.primitive for choice in plan.choices if isinstance(choice.shape, ConvShape)}


def time_all(refiner: Refiner, plan: RunPlan) -> dict[DeviceKind, Rates]:
    """Time every layer of one plan that is not known, and return the rates of the devices then."""
    while (done := refiner.time_layers(plan)) is None:
        pass
    assert done, "there was time for all"
    return refiner.rates
