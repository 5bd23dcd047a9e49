"""Convolutions of graphs by the tiled FFT in compiled code, over several arrays with zeros around them.

Method   That of conv_fft_lanes.py. The first tiles begin in the padding; what a tile reads outside the arrays is zero
         and is stored nowhere. Each array has blocks of LANES channels of its own, so that none straddles two; the last
         of them may be in part empty, which costs transforms but no products. Arrays may be cut out of larger ones.
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
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu import conv_fft_lanes
from znnpy.kernels.cpu.activations import activate_graph, code_of, temporary_bytes
from znnpy.kernels.cpu.conv_fft_lanes import ConvFftLanes, TiledConvolution, Tiling, input_blocks
from znnpy.kernels.cpu.ending import divided, ending_of
from znnpy.kernels.cpu.graph_convs import padded_conv, slope, why_not_stride_1
from znnpy.kernels.cpu.graph_layer import given
from znnpy.kernels.cpu.native.library import blocks

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized


def _input_blocks(shape: GraphConvShape) -> int:
    return sum(map(blocks, shape.fins))


@dataclass(frozen=True, slots=True)
class GraphConvFftLanes:
    """Tiled FFT convolution of several padded arrays in compiled code: for kernels from 2 on and many maps."""

    name: str = "cpu.graph_conv.fft_lanes"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = (
        "kernels of 2 or more, stride 1: the tiled FFT with channels in SIMD lanes (needs the compiled kernels)"
    )
    source: str = "overlap-save; per-frequency products after Mathieu, Henaff, LeCun 2014; pruning after ZNNi III"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_stride_1(shape):
            return reason
        shape = given(shape, GraphConvShape)
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see cpu.graph_conv.direct_lanes"
        return ConvFftLanes().why_not(padded_conv(shape), machine)

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        del machine
        return conv_fft_lanes.tiled_variants(padded_conv(given(shape, GraphConvShape)))

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        shape = given(shape, GraphConvShape)
        found = conv_fft_lanes.tiled_footprint(padded_conv(shape), variant, threads, _input_blocks(shape))
        softmax = temporary_bytes("softmax", shape.fout) if shape.activation == "softmax" else 0
        return replace(found, allowance=found.allowance + threads * softmax)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        *others, inverse = conv_fft_lanes.tiled_work(padded_conv(shape), variant, _input_blocks(shape))
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
        self._tiles = TiledConvolution(resident, padded_conv(shape), variant, _input_blocks(shape), pool)
        t, factor = self._tiles.tiling, slope(shape)
        t.lead[:], t.held[:] = shape.before, shape.n
        t.relu, t.slope = factor == 0, factor if factor not in (None, 1.0) else 0.0

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, t = self._shape, Tiling.from_buffer_copy(self._tiles.tiling)
        inputs, addend = divided(shape, inputs)
        if slope(shape) is None:
            t.ending = ending_of(shape, addend)
        if shape.activation == "softmax":
            t.ending.function = code_of("none")
        channels = [block for x, maps in zip(inputs, shape.fins, strict=True) for block in input_blocks(x, maps)]
        self._tiles.run(t, channels, out, scratch)
        if shape.activation == "softmax":
            activate_graph("softmax", (), out, self._pool)
