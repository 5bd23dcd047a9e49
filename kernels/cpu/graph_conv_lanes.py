"""Convolutions of graphs by the tiled FFT in compiled code, over several arrays with zeros around them.

Method   That of conv_fft_lanes.py. The first tiles begin in the padding; what a tile reads outside the arrays is zero
         and is stored nowhere. Each array has blocks of LANES channels of its own, so that none straddles two; the last
         of them may be in part empty, which costs transforms but no products. Arrays may be cut out of larger ones.
         An upsampled array, each voxel of which counts twice along an axis, is transformed at its own size. The
         spectrum of an array with zeros between its voxels is that of the array, repeated, and the sum of neighbours
         that fills the zeros is part of the kernels.
Memory   As there.
Ending   A line of results of a tile gets its addend and its function while it is in L1. Softmax needs all maps of a
         voxel, and takes one more pass over the output.
Bound    As there; the transforms of thin slabs weigh more.
Source   As there.
Tested   tests/kernels/cpu/test_graph_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from znnpy.geometry import vector
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu import conv_fft_lanes
from znnpy.kernels.cpu.activations import activate_graph, code_of, temporary_bytes
from znnpy.kernels.cpu.conv_fft_lanes import ConvFftLanes, TiledConvolution, why_not_halves
from znnpy.kernels.cpu.ending import divided, ending_of
from znnpy.kernels.cpu.graph_convs import padded_conv, slope, why_not_stride_1
from znnpy.kernels.cpu.graph_layer import given
from znnpy.kernels.cpu.native.library import blocks
from znnpy.kernels.cpu.tiled_arguments import Channels, Tiling, input_blocks
from znnpy.kernels.cpu.tiled_products import products_worth
from znnpy.kernels.cpu.tiled_variants import NOT_UPSAMPLED, Upsampled, tiled_variants
from znnpy.layers import ONE
from znnpy.shapes import ConvShape, Vec3, add

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized


def _input_blocks(shape: GraphConvShape) -> int:
    return sum(map(blocks, shape.fins))


def _part(shape: GraphConvShape) -> Upsampled:
    """Return which of the maps are upsampled: those of one input at most."""
    if not shape.upsampled:
        return NOT_UPSAMPLED
    index = _upsampled_inputs(shape)[0]
    first = sum(shape.fins[:index])
    return Upsampled(shape.factors[index], first, first + shape.fins[index])


def _upsampled_inputs(shape: GraphConvShape) -> list[int]:
    return [index for index, factor in enumerate(shape.factors) if factor != ONE]


def _skipped(shape: GraphConvShape) -> Vec3:
    """Return the outputs before the first along each axis that make tiles begin with a whole upsampled voxel."""
    axes = zip(shape.first, shape.before, _part(shape).factor, strict=True)
    z, y, x = ((first - before) % factor for first, before, factor in axes)
    return z, y, x


@lru_cache(maxsize=1)  # the variants of one shape are requested one after the other
def _tiled_conv(shape: GraphConvShape) -> ConvShape:
    """Return the convolution that tiles cover."""
    padded = padded_conv(shape)
    return replace(padded, n=add(padded.n, _skipped(shape)), precision=shape.precision)


def _softmax_after(shape: GraphConvShape) -> bool:
    """Return whether a softmax follows in a pass of its own. In bf16 it is part of the ending, which has all maps."""
    return shape.activation == "softmax" and shape.precision != "bf16"


def _why_not_upsampled(shape: GraphConvShape) -> str | None:
    """Return None if inputs are upsampled as this primitive can read them, else a reason."""
    which = _upsampled_inputs(shape)
    if len(which) > 1:
        return f"repeats the voxels of one input at most, not of {len(which)}"
    for times, k in zip(shape.factors[which[0]] if which else (), shape.k, strict=False):
        if times > 2:
            return f"repeats voxels twice, not {times} times"
        if times == 2 and (k == 1 or k % 2 == 0):
            return f"repeats voxels along an axis for an odd kernel of 3 or more there, not for one of {k}"
    return None


@dataclass(frozen=True, slots=True)
class GraphConvFftLanes:
    """Tiled FFT convolution of several padded arrays in compiled code: for kernels from 2 on and many maps."""

    name: str = "cpu.graph_conv.fft_lanes"
    kind: Kind = "graph_conv"
    version: int = 2
    summary: str = (
        "kernels of 2 or more, stride 1: the tiled FFT with channels in SIMD lanes (needs the compiled kernels)"
    )
    source: str = "overlap-save; per-frequency products after Mathieu, Henaff, LeCun 2014; pruning after ZNNi III"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_stride_1(shape, bf16=True):
            return reason
        shape = given(shape, GraphConvShape)
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see cpu.graph_conv.direct_lanes"
        if reason := why_not_halves(shape) or _why_not_upsampled(shape):
            return reason
        return ConvFftLanes().why_not(_tiled_conv(shape), machine)

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        shape = given(shape, GraphConvShape)
        products = products_worth(shape.precision, shape.fin, shape.fout, machine)
        return tiled_variants(_tiled_conv(shape), _part(shape), products)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        shape = given(shape, GraphConvShape)
        found = conv_fft_lanes.tiled_footprint(_tiled_conv(shape), variant, threads, _input_blocks(shape))
        if _softmax_after(shape):
            return replace(found, allowance=found.allowance + threads * temporary_bytes("softmax", shape.fout))
        return found

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        *others, inverse = conv_fft_lanes.tiled_work(_tiled_conv(shape), variant, _input_blocks(shape))
        return (*others, inverse._replace(nbytes=inverse.nbytes + shape.addend_bytes))

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> conv_fft_lanes.Resident:
        assert weights is not None
        return conv_fft_lanes.tiled_kernels(weights, variant, pool)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        return _Step(resident, given(shape, GraphConvShape), variant, pool)


class _Step:
    """The convolution of one shape."""

    def __init__(
        self, resident: conv_fft_lanes.Resident, shape: GraphConvShape, variant: Variant, pool: ThreadPool
    ) -> None:
        self._shape, self._pool = shape, pool
        self._tiles = TiledConvolution(resident, _tiled_conv(shape), variant, _input_blocks(shape), pool)
        t, factor, skipped = self._tiles.tiling, slope(shape), _skipped(shape)
        t.lead[:], t.held[:], t.skip[:] = add(shape.before, skipped), shape.n, skipped
        if t.low_in:
            axes = zip(t.lead, shape.first, t.factor, strict=True)
            t.low_lead[:] = vector((lead - first) // times for lead, first, times in axes)
            t.low_held[:] = shape.size_of(_upsampled_inputs(shape)[0])
        t.relu, t.slope = factor == 0, factor if factor not in (None, 1.0) else 0.0

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, t = self._shape, Tiling.from_buffer_copy(self._tiles.tiling)
        inputs, addend = divided(shape, inputs)
        if slope(shape) is None:
            t.ending = ending_of(shape, addend)
        if _softmax_after(shape):
            t.ending.function = code_of("none")
        channels, slots = list[Channels](), {False: 0, True: 0}
        for index, (x, maps) in enumerate(zip(inputs, shape.fins, strict=True)):
            upsampled = shape.upsampled and shape.factors[index] != ONE
            channels += input_blocks(x, maps, slots[upsampled], upsampled=upsampled)
            slots[upsampled] += blocks(maps)
        self._tiles.run(t, channels, out, scratch)
        if _softmax_after(shape):
            activate_graph("softmax", (), out, self._pool)
