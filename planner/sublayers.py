"""Offloaded convolutions that a GPU computes in sub-layers, as options of a plan.

Their tensors lie in the memory of the host. The primitive finds how to divide such a convolution. That takes long, so
each shape is asked for once, and a shape whose transfers alone take longer than another option is not asked for. A
division that was measured takes the measured time, with all transfers; any other takes what the primitive predicts from
its sub-layers and the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from znnpy.costs.model import Rates
from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.table import DividedPrimitive, Speeds
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine
from znnpy.planner.layer_options import CARRY_TRAFFIC, JOIN_TRAFFIC, LayerContext
from znnpy.planner.layout import aligned
from znnpy.planner.pareto import LayerOption, LayerRun
from znnpy.planner.tilings import carry_bytes
from znnpy.shapes import ConvShape, Precision

TOLERANCE = 0.05  # of the time, by which a division may be slower than the best
# Seconds of the host for one sub-layer: to launch it (0.2 to 0.7 ms, `host_ram_runs-nvidia-h200-2026-11-22.json`), to
# look whether it is done, and to hand out copies.
SUBLAYER_SECONDS = 1e-3
HOST_TRAFFIC = 2.0  # bytes that the host moves for each that goes over the link: to page-locked memory or from it


@dataclass
class Sublayers:
    """The offloaded layers that a GPU may compute.

    vram_bytes  bytes of the GPU that one such layer may take
    host        rates of the CPU, which copies
    gpu         rates of the sub-layers and of the link
    """

    table: Sequence[DividedPrimitive]
    machine: Machine
    threads: int
    vram_bytes: int
    host: Rates
    gpu: Rates
    precision: Precision
    asked: bool = False  # by name: where a primitive of the table applies to a layer nothing else is considered
    _known: dict[tuple[str, ConvShape], tuple[Variant, float] | None] = field(default_factory=dict)

    @property
    def speeds(self) -> Speeds:
        """Speeds as if the link waited for each copy of the host, whose threads copy up and down in turn."""
        link = 1 / (1 / self.gpu.of("gpu_link").nbytes + HOST_TRAFFIC / self.host.of("copy").nbytes)
        return Speeds(upload=link, download=link, memory=self.gpu.copy_bandwidth)

    def link_seconds(self, shape: LayerShape) -> float:
        """Return the seconds of one run that the link takes; inf for what is no convolution."""
        if shape.kind != "conv" or not self.table:
            return inf
        return max(shape.in_bytes / self.speeds.upload, shape.out_bytes / self.speeds.download)

    def options(self, shape: LayerShape, place: LayerContext, below: float = inf) -> Iterator[LayerOption]:
        """Yield the options of one layer at a place, unless the link alone takes `below` seconds in all."""
        steps = place.steps[0]
        if shape.kind != "conv" or self.link_seconds(shape) * steps * place.sub_batches >= below:
            return
        shape = replace(shape, precision=self.precision)
        carried = place.sub_batches * carry_bytes(shape) if place.streams else 0
        for primitive in self.table:
            found = self._fastest(primitive, shape)
            if found is None:
                continue
            variant, once = found
            footprint = primitive.footprint(shape, variant, self.threads)
            spent = once + (CARRY_TRAFFIC + JOIN_TRAFFIC) * carried / self.host.copy_bandwidth / place.sub_batches
            yield LayerOption(
                layer_runs=(
                    LayerRun(shape, primitive, variant, footprint, spent, place.sub_batches, steps * place.sub_batches),
                ),
                seconds=spent * steps * place.sub_batches,
                resident=footprint.host + carried,
                arena_bytes=place.live_elsewhere
                + aligned(place.input_bytes)
                + aligned(place.output_bytes)
                + place.join_bytes,
                allowance=0,
            )

    def _fastest(self, primitive: DividedPrimitive, shape: ConvShape) -> tuple[Variant, float] | None:
        key = primitive.name, shape
        if key not in self._known:
            chosen = None
            if (primitive.why_not(shape, self.machine) or self.gpu.why_not(primitive, shape)) is None:
                chosen = primitive.fastest(
                    shape, self.machine, self.vram_bytes, self.speeds, self._seconds, within=TOLERANCE, few=True
                )
            self._known[key] = None
            if chosen is not None:  # measured, if this division was measured at any size; else predicted
                known = self.gpu.was_measured(primitive, shape, chosen.variant)
                spent = self.gpu.seconds(primitive, shape, chosen.variant) if known else chosen.found.seconds
                self._known[key] = chosen.variant, spent
        return self._known[key]

    def _seconds(self, primitive: Primitive, shape: ConvShape, variant: Variant) -> float:
        """Return the seconds of a sub-layer with the host's work for it; inf where the GPU refused it when measured."""
        if self.gpu.why_not(primitive, shape) is not None:
            return inf
        return self.gpu.seconds(primitive, shape, variant) + SUBLAYER_SECONDS
