"""A convolution whose input and output are in host memory, computed in sub-layers on a GPU.

Method   Any primitive of the GPU computes the sub-layers; division.py defines them, search.py finds the fastest,
         step.py runs them with uploads, computing and downloads in parallel.
Memory   On the device: two parts of the input, two of the output, kernels, and the memory of the inner primitive. On
         the host: two pinned buffers each way.
Bound    The link between host and device, or the inner primitive, whichever takes longer.
Source   ZNNi VII-A.
Tested   tests/kernels/gpu/host_ram/test_primitive.py, tests/kernels/gpu/host_ram/test_division.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import (
    ConvWeights,
    Footprint,
    Kind,
    Primitive,
    Unit,
    Variant,
    Work,
    as_conv,
    why_not_on_gpu,
)
from znnpy.kernels.gpu.host_ram.division import Divided, Division, Inner, Order, Parts, Sublayer
from znnpy.kernels.gpu.host_ram.search import TOGETHER, Found, Space, divide
from znnpy.kernels.gpu.host_ram.step import SOURCE, HostRamStep, Resident
from znnpy.kernels.gpu.host_ram.timeline import SUMMED, Speeds
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Machine

Seconds = Callable[[Primitive, ConvShape, Variant], float]  # the planner's estimate

PREFIX = "inner_"  # prefix of the parameters of the inner primitive's variant
# Without rates of a GPU, the link and the launches decide: bytes per second, seconds per sub-layer.
LINK = Speeds(upload=25e9, download=25e9, memory=1e12)
LAUNCHES = 1e-3
WITHIN = 0.01  # relative tolerance of the time: much less than the error of predictions
USABLE_SHARE = 0.9  # usable part of a GPU's memory: contexts and libraries take some
PADDED = 2  # a whole layer may take this many times the time of its groups of maps, because of padding
SLABS = 4  # one image in so many parts is tried for variants of the inner primitive


class Choice(NamedTuple):
    """A variant and its prediction."""

    variant: Variant
    found: Found


@dataclass(frozen=True, slots=True)
class ConvHostRam:
    """Convolution of tensors that do not fit the GPU."""

    inner: tuple[Primitive, ...]
    name: str = "gpu.conv.host_ram"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "tensors that do not fit a GPU: they stay in host memory, sub-layers are uploaded; mode gpu-host"
    source: str = "ZNNi VII-A"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_on_gpu(shape, machine):
            return reason
        if not any(self._choices(as_conv(shape), machine)):
            return f"none of {', '.join(inner.name for inner in self.inner)} computes its sub-layers"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return the best division for each inner primitive and variant, if only the link and the launches cost time.

        `fastest` finds the best overall if the times of sub-layers are known. Variants that do not fit the GPU are
        omitted.
        """
        shape = as_conv(shape)
        assert machine.gpu is not None
        vram_bytes = int(USABLE_SHARE * machine.gpu.memory_bytes)
        found = []
        for inner, variant in dict.fromkeys(self._choices(shape, machine)):
            of = _sublayers(inner, variant, machine, lambda *_: LAUNCHES)
            best = divide(shape, vram_bytes, LINK, of, within=WITHIN)
            if best is not None:
                found.append(_variant(best.division, inner, variant))
        return tuple(found)

    def fastest(
        self,
        shape: ConvShape,
        machine: Machine,
        vram_bytes: int,
        speeds: Speeds,
        seconds: Seconds,
        *,
        within: float = WITHIN,
        few: bool = False,
    ) -> Choice | None:
        """Return the inner primitive, variant and division that take the least time in `vram_bytes` of the device.

        seconds  time of one run of an inner primitive on the device.
        within   relative tolerance: the division for each inner primitive and variant may be this much slower than the
                 best.
        few      True: try only parts that are an axis, its half, its quarter, ..: the planner asks for many shapes.

        None if nothing fits.
        """
        ways = []
        for inner, variant in dict.fromkeys(self._choices(shape, machine)):
            of = _sublayers(inner, variant, machine, seconds)
            whole = of(shape)
            ways.append((0.0 if whole is None else whole.seconds, inner, variant, of))
        best: Choice | None = None
        space = _few(shape) if few else None
        for whole_seconds, inner, variant, of in sorted(ways, key=lambda way: way[0]):
            below = inf if best is None else best.found.seconds
            if whole_seconds >= PADDED * below:
                break
            found = divide(shape, vram_bytes, speeds, of, below=below, within=within, space=space)
            if found is not None:
                best = Choice(_variant(found.division, inner, variant), found)
        return best

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        """Return `Divided.footprint`: no stage holds input or output, which are not tensors of the device."""
        inner, own = self._inner(variant)
        divided = _divided(as_conv(shape), variant)
        return divided.around([inner.footprint(sub, own, threads) for sub, _ in divided.shapes()])

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        """Return the work of all sub-layers and of the link in sequence; `timeline.seconds` knows how they overlap."""
        inner, own = self._inner(variant)
        shape = as_conv(shape)
        divided = _divided(shape, variant)
        found: dict[tuple[int, Unit], Work] = {}
        for sub, count in divided.shapes():
            for place, work in enumerate(inner.work(sub, own)):
                known = found.get((place, work.unit), Work(work.unit, 0.0, 0.0))
                found[place, work.unit] = Work(
                    work.unit, known.flops + count * work.flops, known.nbytes + count * work.nbytes
                )
        added = (divided.maps_in.count - 1) * prod(shape.out_shape)
        return (
            Work("gpu_link", 0.0, float(divided.uploaded_bytes)),
            *found.values(),
            *((Work("gpu_stream", float(added), float(SUMMED * added)),) if divided.sums else ()),
            Work("gpu_link", 0.0, float(shape.out_bytes)),  # the other way, at the same speed
        )

    def largest(self, shape: LayerShape, variant: Variant) -> tuple[Primitive, ConvShape, Variant]:
        """Return the inner primitive of a variant, the largest sub-layer and the inner variant."""
        inner, own = self._inner(variant)
        return inner, _divided(as_conv(shape), variant).largest, own

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        assert weights is not None
        inner, own = self._inner(variant)
        fout, fin = weights.weight.shape[:2]
        into, out_of = Parts(fin, variant.count("maps_in")), Parts(fout, variant.count("maps_out"))
        sums = into.count > 1
        kernels = {}
        for group_in in range(into.count):
            for group_out in range(out_of.count):
                rows, columns = slice(*out_of.of(group_out)), slice(*into.of(group_in))
                bias = np.zeros_like(weights.bias[rows]) if sums else weights.bias[rows]
                part = ConvWeights(np.ascontiguousarray(weights.weight[rows, columns]), bias)
                kernels[group_in, group_out] = inner.prepare(part, own, device)
        return Resident(kernels, device.put(weights.bias, "biases of gpu.conv.host_ram") if sums else None)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> HostRamStep:
        inner, own = self._inner(variant)
        return HostRamStep(
            resident,
            _divided(as_conv(shape), variant),
            lambda kernels, sub: inner.bind(kernels, sub, own, device),
            lambda sub: inner.footprint(sub, own, 1),
            device,
        )

    def _inner(self, variant: Variant) -> tuple[Primitive, Variant]:
        """Return the inner primitive that a variant names, and its own variant. KeyError if there is none."""
        name = variant.text("inner")
        own = {key.removeprefix(PREFIX): value for key, value in variant.parameters if key.startswith(PREFIX)}
        for inner in self.inner:
            if inner.name == name:
                return inner, Variant.of(**own)
        raise KeyError(name)

    def _choices(self, shape: ConvShape, machine: Machine) -> Iterator[tuple[Primitive, Variant]]:
        """Yield inner primitives and variants that apply to the whole layer, one image, a slab or a part of a slab."""
        slab = -(-shape.out[0] // SLABS) + shape.k[0] - 1
        one = replace(shape, batch=1)
        slim = replace(one, n=(slab, *shape.n[1:]))
        some = (
            shape
            if shape.activation == "softmax"
            else replace(slim, fin=-(-shape.fin // SLABS), fout=-(-shape.fout // SLABS), activation="none")
        )
        for inner in self.inner:
            for probe in (shape, one, slim, some):
                if inner.why_not(probe, machine) is None:
                    for variant in inner.variants(probe, machine):
                        yield inner, variant


def instances() -> list[KernelInstance]:
    """Return all kernels that may be compiled, except those of load_store.cu."""
    return [KernelInstance(SOURCE, f"add_part<{value}>", 40) for value in ("float", "half")]


def _few(shape: ConvShape) -> Space:
    """Return a space of repeated halves of every axis, with no fewer maps than primitives take at a time."""
    planes, soft = shape.out[0], shape.activation == "softmax"
    images = [(count, planes) for count in _halves(shape.batch)]
    return Space(
        [*images, *((1, count) for count in _halves(planes) if count < planes)],
        [shape.fin] if soft else _halves(shape.fin, TOGETHER),
        [shape.fout] if soft else _halves(shape.fout, TOGETHER),
    )


def _halves(length: int, least: int = 1) -> list[int]:
    parts = (-(-length // 2**times) for times in range(length.bit_length()))
    return sorted({part for part in parts if part >= least} | {length})


def _sublayers(inner: Primitive, variant: Variant, machine: Machine, seconds: Seconds) -> Inner:
    """Return sub-layers for shapes where `inner` has variants with the same texts; sizes and counts may differ."""
    texts = _texts(variant)

    def of(shape: ConvShape) -> Sublayer | None:
        if inner.why_not(shape, machine) is not None:
            return None
        if texts and all(_texts(other) != texts for other in inner.variants(shape, machine)):
            return None
        return Sublayer(seconds(inner, shape, variant), inner.footprint(shape, variant, 1))

    return of


def _texts(variant: Variant) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in variant.parameters if isinstance(value, str))


def _variant(division: Division, inner: Primitive, variant: Variant) -> Variant:
    own = {PREFIX + name: value for name, value in variant.parameters}
    return Variant.of(
        images=division.images,
        planes=division.planes,
        maps_in=division.maps_in,
        maps_out=division.maps_out,
        order=division.order,
        inner=inner.name,
        **own,
    )


def _divided(shape: ConvShape, variant: Variant) -> Divided:
    """Divide a layer; if it has fewer images or planes than the variant, take all of them."""
    order: Order = "inputs" if variant.text("order") == "inputs" else "outputs"
    images = min(variant.count("images"), shape.batch)
    planes = min(variant.count("planes"), shape.out[0])
    planes = shape.out[0] if images > 1 else planes
    return Divided(shape, Division(images, planes, variant.count("maps_in"), variant.count("maps_out"), order))
