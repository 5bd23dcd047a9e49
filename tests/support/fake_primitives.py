"""Primitives with made-up costs: arithmetic on shapes only, nothing that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from znnpy.costs.model import Rate, Rates
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Step, Unit, Variant, Work, why_not_plain, why_not_two
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Gpu, Limits, Machine
from znnpy.network import ConvWeights
from znnpy.shapes import ConvShape

MACHINE = Machine("fake", "avx512", 2, 2**40, "openblas SkylakeX", (("numpy", "2"),))
GPU = Gpu("made up", (9, 0), 100, 2**40, 2**25, 2**17, 2**18, 4e12, 13000, (("cupy", "14"),))
WITH_GPU = replace(MACHINE, gpu=GPU)
RATES = Rates(stage_seconds=0.0)
CARRYING = RATES.replaced(copy=Rate(flops=50e9, nbytes=2.5e12))  # beside fakes: columns often pay


@dataclass(frozen=True, slots=True)
class Fake:
    """Costs proportional to the output, residents to the weights, and as many variants as `scale` has entries."""

    name: str
    kind: Kind
    flops: float = 1.0  # per output value
    resident: int = 0  # bytes per weight
    host: int = 0  # likewise
    scratch: tuple[float, ...] = ()  # share of the output's bytes, per buffer
    stages: int = 1
    input_until: int = 0
    output_from: int = 0
    reads_carried: bool = False
    allowance: int = 0
    scale: tuple[int, ...] = (1,)  # variant i: seconds / scale, residents and scratch * scale
    refuse: str | None = None
    pools: bool = False  # convolutions that pool too: into fragments, or in graphs as a second output
    version: int = 1
    unit: Unit = "product"
    summary: str = "made up"
    source: str = "nowhere"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if self.pools:
            return self.refuse
        return self.refuse or (why_not_plain(shape) if isinstance(shape, ConvShape) else why_not_two(shape))

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        return tuple(Variant.of(scale=scale) for scale in self.scale)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        weights = shape.fin * shape.fout * prod(shape.k) if isinstance(shape, ConvShape | GraphConvShape) else 0
        scale = variant.count("scale")
        return Footprint(
            resident=self.resident * weights * scale,
            host=self.host * weights * scale,
            input_until=self.input_until,
            output_from=self.output_from,
            stages=self.stages,
            scratch=tuple(
                Scratch(f"s{i}", int(share * shape.out_bytes * scale), i % self.stages, i % self.stages)
                for i, share in enumerate(self.scratch)
            ),
            reads_carried=self.reads_carried,
            allowance=self.allowance * scale,
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        values = prod(shape.out_shape)
        return (Work(self.unit, self.flops * values / variant.count("scale"), 0.0),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Any:
        raise NotImplementedError("a fake does not run")

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> Step:
        raise NotImplementedError("a fake does not run")


SLOW = Fake("cpu.conv.slow", "conv", flops=100.0)
FAST = Fake("cpu.conv.fast", "conv", flops=10.0, resident=512, scratch=(0.5, 0.25), stages=2, scale=(1, 2, 4))
OVER = Fake("cpu.conv.over", "conv", flops=40.0, scratch=(0.9,), stages=3, output_from=2, allowance=4096)
POOL = Fake("cpu.pool.fragments", "pool", unit="pool")
BOTH = Fake("cpu.conv.both", "conv", flops=60.0, scratch=(0.3,), pools=True)
FILTER = Fake("cpu.maxfilter.direct", "maxfilter", unit="pool")
MAXOUT = Fake("cpu.maxout.direct", "maxout", unit="pool")

GRAPH_SLOW = Fake("cpu.graph_conv.slow", "graph_conv", flops=100.0)
GRAPH_FAST = Fake("cpu.graph_conv.fast", "graph_conv", flops=10.0, resident=512, scratch=(0.5, 0.25), stages=2)
GRAPH_OVER = Fake("cpu.graph_conv.over", "graph_conv", flops=40.0, scratch=(0.9,), allowance=4096, scale=(1, 2))
GRAPH_BOTH = Fake("cpu.graph_conv.both", "graph_conv", flops=10.5, resident=256, scratch=(0.1,), pools=True)
GRAPH_FAKES: tuple[Fake, ...] = (
    GRAPH_SLOW, GRAPH_FAST, GRAPH_OVER, GRAPH_BOTH,
    Fake("cpu.window_pool.made_up", "window_pool", unit="pool"),
    Fake("cpu.upsample.made_up", "upsample", unit="pool"),
    Fake("cpu.upsample.quick", "upsample", unit="pool", flops=0.5, scratch=(1.0,)),
    Fake("cpu.point.made_up", "point", unit="pool"),
    Fake("cpu.pad.made_up", "pad", unit="pool"),
)  # fmt: skip

FAKES: tuple[Fake, ...] = (SLOW, FAST, OVER, BOTH, POOL, FILTER, MAXOUT)


def on_gpu(*fakes: Fake) -> tuple[Fake, ...]:
    """Return the same primitives on a GPU, with the same rates."""
    return tuple(replace(fake, name=fake.name.replace("cpu.", "gpu.", 1)) for fake in fakes)


def limits(ram_bytes: int, threads: int = 2) -> Limits:
    return Limits(ram_bytes, threads)
