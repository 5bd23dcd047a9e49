"""Convolutions of graphs by primitives for convolutions without padding, of a copy of all inputs side by side.

Method   Each input is copied to its maps of one image, with zeros around it, and voxels of upsampled inputs repeated; a
         thread copies some maps of a voxel, and the largest value is found on the way. pad.cu. Then the primitive
         gpu.conv.implicit_gemm or gpu.conv.fft_tiled computes the layer; a kernel of ours adds an addend and applies
         functions that these do not know. finish.cu
Memory   The copy, and what the other primitive needs.
Bound    That of the other primitive; the copy is bound by memory.
Exact    In fp16 the sums that our kernel finishes are rounded to float16 before that.
Source   That of the other primitive.
Tested   tests/kernels/gpu/graph/test_copied.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from znnpy.geometry import vector
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Primitive, Scratch, Variant, Work
from znnpy.kernels.gpu.fft_tiled.primitive import ConvFftTiled
from znnpy.kernels.gpu.graph import pad
from znnpy.kernels.gpu.graph.finish import Finish, is_done
from znnpy.kernels.gpu.graph.inputs import one_input, triple
from znnpy.kernels.gpu.graph.layer import given, why_not_here
from znnpy.kernels.gpu.graph.lines import Widths, grid_of
from znnpy.kernels.gpu.implicit_gemm.primitive import ConvImplicitGemm
from znnpy.layers import ONE, PAD_MODES, ZERO
from znnpy.shapes import FLOAT32, Activation, ConvShape, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

COPIED, PEAK = "copied", "peak"  # scratch: the copy, and its largest value
ZEROS = PAD_MODES.index("zeros")


@dataclass(frozen=True, slots=True)
class GraphConvCopied:
    """Convolutions of graphs without strides, dilations and groups, by another primitive.

    by  computes the convolution of the copy
    """

    name: str
    by: Primitive
    summary: str
    kind: Kind = "graph_conv"
    version: int = 1

    @property
    def source(self) -> str:
        return self.by.source

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_here(shape, machine, GraphConvShape, "convolutions of graphs"):
            return reason
        shape = given(shape, GraphConvShape)
        if not shape.plain:
            return "takes no strides, dilations and groups: see gpu.graph_conv.direct"
        if shape.activation in ("softmax", "prelu"):
            return f"applies no {shape.activation}: see gpu.graph_conv.direct"
        if reason := self.by.why_not(conv_of(shape), machine):
            return reason
        return None if self.variants(shape, machine) else f"{self.by.name} has variants that stream kernels only"

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        """Return those of the other primitive that keep no kernels in the memory of the host."""
        conv = conv_of(given(shape, GraphConvShape))
        found = self.by.variants(conv, machine)
        return tuple(variant for variant in found if not self.by.footprint(conv, variant, 1).host)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        shape = given(shape, GraphConvShape)
        conv = conv_of(shape)
        other = self.by.footprint(conv, variant, threads)
        copied = Scratch(COPIED, conv.in_bytes, last=other.input_until)
        peak = (Scratch(PEAK, FLOAT32, last=other.stages - 1),) if other.reads_peak else ()
        return replace(
            other,
            input_until=other.stages - 1,
            output_from=0,
            scratch=(*other.scratch, copied, *peak),
            reads_carried=False,
            reads_peak=False,
            raises_peak=True,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        conv = conv_of(shape)
        moved = shape.in_bytes - shape.addend_bytes + conv.in_bytes
        if not is_done(shape, conv.activation):
            moved += 2 * shape.out_bytes + shape.addend_bytes
        return (*self.by.work(conv, variant), Work("gpu_stream", 0.0, float(moved)))

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Any:
        """Return the weights of the other primitive."""
        return self.by.prepare(weights, variant, device)

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step:
        return _Step(self.by, resident, given(shape, GraphConvShape), variant, device)


def conv_of(shape: GraphConvShape) -> ConvShape:
    """Return the convolution of the copy, which applies the function if it knows it and nothing comes between."""
    known = shape.activation in get_args(Activation) and not shape.addend
    activation: Any = shape.activation if known else "none"
    return ConvShape(1, shape.fin, shape.fout, shape.padded, shape.k, activation, precision=shape.precision)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, by: Primitive, resident: Any, shape: GraphConvShape, variant: Variant, device: Device) -> None:
        self._shape, self._device, self._conv = shape, device, conv_of(shape)
        self._by = by.bind(resident, self._conv, variant, device)
        self._reads_peak = by.footprint(self._conv, variant, 1).reads_peak
        self._finish = Finish(shape, device)
        self._dtype = np.float16 if shape.itemsize == 2 else np.float32
        self._firsts = [0, *accumulate(shape.fins)]
        self._copies = [Widths(device, pad.SOURCE, "pad", shape, [maps]) for maps in shape.fins]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        shape, device = self._shape, self._device
        copied = device.view(scratch[COPIED], (*shape.padded, shape.fin), self._dtype)
        peaks = {"out_peak": out_peak if is_done(shape, self._conv.activation) else 0}
        if self._reads_peak:
            peak = device.view(scratch[PEAK], (1,), np.float32)
            device.clear(peak)
            peaks["x_peak"] = device.address(peak)
        for index, (x, first) in enumerate(zip(inputs[: len(shape.fins)], self._firsts, strict=False)):
            self._copy(index, x, copied[..., first : first + shape.fins[index]], peaks.get("x_peak", 0))
        self._by.run(copied[None], out[None], scratch, **peaks)
        if not is_done(shape, self._conv.activation):
            self._finish.run(out, None, inputs[len(shape.fins) :], self._conv.activation, out_peak)

    def _copy(self, index: int, x: Any, to: Any, peak: int) -> None:
        """Copy an input to its maps of the copy."""
        shape, device = self._shape, self._device
        factor = shape.factors[index] if shape.factors else ONE
        shift = vector(first if times > 1 else 0 for first, times in zip(shape.first, factor, strict=True))
        width, kernel = self._copies[index].widest(x, to)
        begin = vector(-before for before in shape.before)
        kernel(
            *grid_of(device, shape.padded[2] * x.shape[3] // width, shape.padded),
            one_input(device, x, factor=factor),
            *(triple(size) for size in (begin, ZERO, shape.n, shape.padded, shift)),
            *(ZEROS, to, shape.fin, np.uint64(peak)),
        )


COPIED_CONVOLUTIONS: tuple[GraphConvCopied, ...] = (
    GraphConvCopied(
        "gpu.graph_conv.implicit_gemm",
        ConvImplicitGemm(),
        "by gpu.conv.implicit_gemm, of a padded copy of all inputs: tensor cores of every card from Ampere on",
    ),
    GraphConvCopied(
        "gpu.graph_conv.fft_tiled",
        ConvFftTiled(),
        "by gpu.conv.fft_tiled, of a padded copy of all inputs: large kernels and many maps",
    ),
)
