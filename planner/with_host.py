"""Convolutions whose tensors live with the host, which a GPU computes in sub-layers, as options of a plan.

How they are divided is for the primitive to find; that takes long, so each shape is asked for once, and none whose way
over the link alone takes longer than something else does. One that was measured takes what it took then, with all
that goes up and down; any other what the primitive makes of its sub-layers and of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.table import Speeds
from znnpy.machine import Machine
from znnpy.planner.candidates import kept_bytes
from znnpy.planner.cost import Rates
from znnpy.planner.layout import aligned
from znnpy.planner.options import JOINING, KEEPING, Place
from znnpy.planner.trade import Option, Way
from znnpy.shapes import ConvShape, LayerShape, Precision

WITHIN = 0.05  # of the time, by which a division may be slower than the best
# What the host needs for a sub-layer beside copies: to launch it (0.2 to 0.7 ms on an H200's host,
# `host_ram_runs-nvidia-h200-2026-11-22.json`), to look whether it is done, and to hand out copies.
SUBLAYER_SECONDS = 1e-3
COPIED = 2.0  # bytes that the host moves for each that goes over the link: to page-locked memory or from it

Seconds = Callable[[Primitive, ConvShape, Variant], float]


class Divided(Primitive, Protocol):
    """What is asked of a primitive for tensors of the host, beside what is asked of all."""

    def fastest(
        self,
        shape: ConvShape,
        machine: Machine,
        vram_bytes: int,
        speeds: Speeds,
        seconds: Seconds,
        *,
        within: float,
        few: bool,
    ) -> Any:
        """`variant` and `found`, of which `seconds`, in so many bytes of the GPU; None where nothing fits."""

    def largest(self, shape: LayerShape, variant: Variant) -> tuple[Primitive, ConvShape, Variant]:
        """Of the sub-layers of a variant, and what computes it."""


@dataclass
class WithHost:
    """What a GPU may compute of hosted layers.

    vram_bytes  of the GPU that one such layer may take
    host        rates of the processor, which copies; gpu: of sub-layers and of the link
    """

    table: Sequence[Divided]
    machine: Machine
    threads: int
    vram_bytes: int
    host: Rates
    gpu: Rates
    precision: Precision
    asked: bool = False  # by name: where one of the table applies to a layer nothing else is considered
    _known: dict[tuple[str, ConvShape], tuple[Variant, float] | None] = field(default_factory=dict)

    @property
    def speeds(self) -> Speeds:
        """As if the link waited for each copy of the host, whose threads make those up and those down in turn."""
        link = 1 / (1 / self.gpu.of("gpu_link").nbytes + COPIED / self.host.of("copy").nbytes)
        return Speeds(upload=link, download=link, memory=self.gpu.carrying)

    def least(self, shape: LayerShape) -> float:
        """Seconds of one run that the link takes; inf for what is no convolution."""
        if shape.kind != "conv" or not self.table:
            return inf
        return max(shape.in_bytes / self.speeds.upload, shape.out_bytes / self.speeds.download)

    def options(self, shape: LayerShape, place: Place, below: float = inf) -> Iterator[Option]:
        """Of one layer at a place, its steps the first of the place's; none whose link takes `below` seconds in all."""
        steps = place.steps[0]
        if shape.kind != "conv" or self.least(shape) * steps * place.parts >= below:
            return
        shape = replace(shape, precision=self.precision)
        carried = place.parts * kept_bytes(shape) if place.walks else 0
        for primitive in self.table:
            found = self._fastest(primitive, shape)
            if found is None:
                continue
            variant, once = found
            footprint = primitive.footprint(shape, variant, self.threads)
            spent = once + (KEEPING + JOINING) * carried / self.host.carrying / place.parts
            yield Option(
                ways=(Way(shape, primitive, variant, footprint, spent, place.parts, steps * place.parts),),
                seconds=spent * steps * place.parts,
                resident=footprint.host + carried,
                live=place.under + aligned(place.x) + aligned(place.out) + place.joined,
                allowance=0,
            )

    def _fastest(self, primitive: Divided, shape: ConvShape) -> tuple[Variant, float] | None:
        key = primitive.name, shape
        if key not in self._known:
            chosen = None
            if (primitive.why_not(shape, self.machine) or self.gpu.why_not(primitive, shape)) is None:
                chosen = primitive.fastest(
                    shape, self.machine, self.vram_bytes, self.speeds, self._seconds, within=WITHIN, few=True
                )
            self._known[key] = None if chosen is None else (chosen.variant, self._whole(primitive, shape, chosen))
        return self._known[key]

    def _whole(self, primitive: Divided, shape: ConvShape, chosen: Any) -> float:
        """Seconds of one run: as measured of this very division, be it at another size; else as predicted."""
        known = self.gpu.knows(primitive, shape, chosen.variant)
        spent: float = self.gpu.seconds(primitive, shape, chosen.variant) if known else chosen.found.seconds
        return spent

    def _seconds(self, primitive: Primitive, shape: ConvShape, variant: Variant) -> float:
        """Of a sub-layer, with what the host does for it; inf where the GPU refused it when it was measured."""
        if self.gpu.why_not(primitive, shape) is not None:
            return inf
        return self.gpu.seconds(primitive, shape, variant) + SUBLAYER_SECONDS
