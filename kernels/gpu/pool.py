"""Maxima over windows on a GPU: max-pooling, max-pooling fragments, the max-filter, maxout.

Method   A thread advances along z and keeps the maxima over y and x of the last planes, so that no value is read twice
         from memory; each maximum is written straight to its place in its fragment. pool.cu.
Shapes   As for the CPU: fragment (oz * py + oy) * px + ox of image s is output image s * P + fragment.
Bound    Memory: the input is read once, the output written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Zlateski, Lee, Seung, ZNNi (SC16), V; Giusti et al. 2013; Masci et al. 2013.
Tested   tests/kernels/gpu/test_pool.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from znnpy.kernels.contract import (
    Footprint,
    Kind,
    Variant,
    Windowed,
    Work,
    as_windowed,
    why_not_filter,
    why_not_maxout,
    why_not_pooling,
)
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import MaxoutShape, PoolShape, Vec3, valid

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

SOURCE = "pool.cu"
THREADS = 512  # threads of a block of `slide`
LINE = 128  # most neighbouring vectors of a line in a block
WIDEST = 5  # windows up to this width along every axis get a kernel of their own
WAVES = 16  # blocks per multiprocessor that there should be, dividing z if necessary
OVERLAPS = 8  # windows in a piece of z, at least: it reads p_z - 1 planes more
GROUP_THREADS = 256
MOST_IMAGES = 65535  # blocks of a grid along z; kernels loop over the rest
REGISTERS = 64


def elements(itemsize: int, width: int) -> str:
    """Return the C++ template arguments of a vector of `width` neighbouring maps."""
    if itemsize == 4:
        return f"float, {width}"
    return f"half2, {width // 2}" if width % 2 == 0 else "half, 1"


def instances() -> list[KernelInstance]:
    """Return kernels for all vectors, for the commonest window and for any."""
    vectors = [elements(4, width) for width in (1, 2, 4)] + [elements(2, width) for width in (1, 2, 4, 8)]
    slides = [f"slide<{e}, {window}>" for e in vectors for window in ("2, 2, 2", "0, 0, 0")]
    names = [*slides, "groups<float>", "groups<half>"]
    return [KernelInstance(SOURCE, name, REGISTERS) for name in names]


class _OnGpu:
    """The common part of primitives without weights."""

    __slots__ = ()

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        return (Work("gpu_stream", 0.0, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> None:
        """Return None: there are no weights."""
        del weights, variant, device


class _Maxima(_OnGpu):
    """The common part of the three primitives, which differ in the starts of windows and the places of their maxima."""

    __slots__ = ()

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del shape, variant, threads
        return Footprint(reads_carried=True)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        del resident, variant
        return _Step(as_windowed(shape), device)


@dataclass(frozen=True, slots=True)
class PoolMax(_Maxima):
    """Plain max-pooling: one output image per input image."""

    name: str = "gpu.pool.max"
    kind: Kind = "pool"
    version: int = 1
    summary: str = "plain max-pooling with strided output"
    source: str = "definition"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        return why_not_pooling(shape, fragments=False, other="gpu.pool.fragments")


@dataclass(frozen=True, slots=True)
class PoolFragments(_Maxima):
    """Max-pooling fragments: one output image per offset of the window, so that the output stays dense."""

    name: str = "gpu.pool.fragments"
    kind: Kind = "pool"
    version: int = 1
    summary: str = "max-pooling for dense inference: the fragments of all offsets in one pass"
    source: str = "ZNNi V; Giusti et al. 2013; Masci et al. 2013"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        return why_not_pooling(shape, fragments=True, other="gpu.pool.max")


@dataclass(frozen=True, slots=True)
class MaxFilter(_Maxima):
    """The maximum over a window at every position."""

    name: str = "gpu.maxfilter.direct"
    kind: Kind = "maxfilter"
    version: int = 1
    summary: str = "the maximum over a window at every position"
    source: str = "definition"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        return why_not_filter(shape)


class _Step:
    def __init__(self, shape: Windowed, device: Device) -> None:
        self._shape, self._device = shape, device
        plain = isinstance(shape, PoolShape) and not shape.fragments
        fragments = isinstance(shape, PoolShape) and shape.fragments
        self._step: Vec3 = shape.p if plain else (1, 1, 1)
        self._split: Vec3 = shape.p if fragments else (1, 1, 1)
        self._positions: Vec3 = shape.out if plain else valid(shape.n, shape.p)
        known = shape.p if not plain and max(shape.p) <= WIDEST else (0, 0, 0)
        widths = [w for w in (4, 2, 1) if shape.f % w == 0]
        if shape.itemsize == 2:
            widths = [w for w in (8, 4, 2, 1) if shape.f % w == 0]
        names = {w: f"slide<{elements(shape.itemsize, w)}, {', '.join(map(str, known))}>" for w in widths}
        kernels = device.kernels(SOURCE, list(names.values()))
        self._kernels = {width: kernels[name] for width, name in names.items()}  # widest first

    def run(
        self,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        del scratch, x_peak, out_peak  # a pooling passes on the peak of its input
        shape, (mz, my, mx) = self._shape, self._positions
        old = x if before is None else before
        width = self._width(x, out, old)
        vector, maps = width * shape.itemsize, shape.f // width
        run = mx * maps
        pieces = -(-run // LINE)
        along = -(-run // (32 * pieces)) * 32  # equal pieces of a line, in whole warps
        lines = THREADS // along
        grid_x, images = -(-run // along) * -(-my // lines), min(len(x), MOST_IMAGES)
        cuts = max(1, WAVES * self._device.gpu.multiprocessors // (grid_x * images))
        chunk = max(-(-mz // cuts), OVERLAPS * shape.p[0])
        self._kernels[width](
            (grid_x, -(-mz // chunk), images),
            (along, lines),
            *(old, old.strides[0] // vector, x, x.strides[0] // vector, out, out.strides[0] // vector),
            *(len(x), shape.n[0] - x.shape[1], shape.n[1], shape.n[2], maps),
            *(*self._positions, *shape.p, *self._step, *self._split, chunk),
        )

    def _width(self, *arrays: Any) -> int:
        """Return the maps of the widest vector to which all images of `arrays` are aligned."""
        begins = [number for a in arrays for number in (self._device.address(a), a.strides[0])]
        return next(w for w in self._kernels if all(n % (w * self._shape.itemsize) == 0 for n in begins))


@dataclass(frozen=True, slots=True)
class MaxoutDirect(_OnGpu):
    """The maximum over groups of neighbouring maps."""

    name: str = "gpu.maxout.direct"
    kind: Kind = "maxout"
    version: int = 1
    summary: str = "the maximum over groups of neighbouring maps"
    source: str = "Goodfellow et al., Maxout networks, 2013"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        return why_not_maxout(shape)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del shape, variant, threads
        return Footprint()

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _MaxoutStep:
        del resident, variant
        if not isinstance(shape, MaxoutShape):
            raise TypeError(f"gpu.maxout.direct computes maxouts, not {shape}")
        return _MaxoutStep(shape, device)


class _MaxoutStep:
    def __init__(self, shape: MaxoutShape, device: Device) -> None:
        name = "groups<half>" if shape.itemsize == 2 else "groups<float>"
        self._shape = shape
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(
        self,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        del scratch, x_peak, out_peak
        assert before is None, "maxout joins no planes"
        itemsize, count = self._shape.itemsize, self._shape.out_bytes // (self._shape.itemsize * len(out))
        self._kernel(
            (-(-count // GROUP_THREADS), min(len(out), MOST_IMAGES)),
            (GROUP_THREADS,),
            *(x, x.strides[0] // itemsize, out, out.strides[0] // itemsize, len(out), count, self._shape.of),
        )
