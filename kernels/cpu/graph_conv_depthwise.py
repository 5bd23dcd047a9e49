"""Convolution of each map by itself (depthwise) in compiled code: maps in SIMD lanes, one pass over memory.

Method   Some neighbouring outputs of a line are summed in registers over all taps that lie in the image, for one or two
         vectors of maps at a time. Some lines are followed along z, so that their inputs stay in L2. The function that
         follows is applied to a line in the cache; large outputs are written past the caches.
Memory   The kernels; one line of outputs per thread.
Bound    Loads: one for each product.
Source   Howard et al., MobileNets, 2017.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.ending import Ending, divided, ending_of
from znnpy.kernels.cpu.graph_calls import compute_units, moved_bytes, pitches
from znnpy.kernels.cpu.graph_convs import why_not_upsampled
from znnpy.kernels.cpu.graph_layer import GraphLayer, Kernels, float_bytes, given, kernels_of, why_not_kind
from znnpy.kernels.cpu.native.library import library, why_not
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

MOST_LINES = 512  # lines of a kernel, as in depthwise.cpp
COLUMN_BYTES = 256 * 1024  # input of some lines of outputs of a plane, which stays in L2
LOADS = 2.5  # operations in the time of a product, which waits for a load
CALL_BYTES = 2**15  # Python memory and stack of calls into the library, per worker
CALL_FLOPS = 2e9  # per call into the library; the stop flag is checked between calls


class _Depthwise(ctypes.Structure):
    """The arguments of a call: struct Depthwise in depthwise.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "m", "k", "stride", "dilation", "before", "pitch")),
        *((name, ctypes.c_int64) for name in ("f", "lines")),
        ("ending", Ending),
        *((name, ctypes.c_void_p) for name in ("x", "kernels", "bias", "out")),
    )


def _lines(shape: GraphConvShape) -> int:
    """Return the lines of outputs computed together."""
    line = shape.itemsize * shape.n[2] * shape.fin
    reach = shape.dilation[1] * (shape.k[1] - 1) + 1
    fitting = (COLUMN_BYTES // (shape.k[0] * line) - reach) // shape.stride[1] + 1
    return min(shape.out[1], max(1, fitting))


@dataclass(frozen=True, slots=True)
class GraphConvDepthwise(GraphLayer):
    """Convolution of each map by itself."""

    name: str = "cpu.graph_conv.depthwise"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "as many groups as maps, any stride, dilation and padding (needs the compiled kernels)"
    source: str = "Howard et al. 2017"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_kind(shape, GraphConvShape, "convolutions of graphs", bf16=True) or why_not_upsampled(
            shape
        ):
            return reason
        shape = given(shape, GraphConvShape)
        if shape.groups != shape.fin or shape.fout != shape.fin or len(shape.fins) > 1:
            return "computes one map from each map of a single input: see cpu.graph_conv.taps"
        if shape.k[0] * shape.k[1] > MOST_LINES:
            return f"takes kernels of up to {MOST_LINES} lines: see cpu.graph_conv.taps"
        return why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, GraphConvShape)
        workers = min(threads, shape.out[0] * -(-shape.out[1] // _lines(shape)))
        return Footprint(
            resident=shape.weight_bytes,
            scratch=(Scratch("lines", workers * float_bytes(shape.out[2] * shape.fout)),),
            allowance=workers * CALL_BYTES,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, GraphConvShape)
        products = float(prod(shape.out_shape) * prod(shape.k))
        return (Work("lane_stream", 2 * LOADS * products, moved_bytes(shape)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Kernels:
        del variant, pool
        return kernels_of(weights, (2, 3, 4, 1, 0))

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, GraphConvShape), pool)


class _Step:
    def __init__(self, resident: Kernels, shape: GraphConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        self._compute = library(this_machine().simd).znnpy_depthwise
        unit_flops = 2.0 * _lines(shape) * shape.out[2] * shape.fout * prod(shape.k)
        self._most = max(1, int(CALL_FLOPS // unit_flops))

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape = self._shape
        (x,), addend = divided(shape, inputs)
        lines = _lines(shape)
        d = _Depthwise(
            f=shape.fin,
            lines=lines,
            ending=ending_of(shape, addend),
            x=x.ctypes.data,
            kernels=self._resident.kernels.ctypes.data,
            bias=self._resident.bias.ctypes.data,
            out=out.ctypes.data,
        )
        d.n[:], d.m[:], d.k[:], d.stride[:], d.dilation[:] = shape.n, shape.out, shape.k, shape.stride, shape.dilation
        d.before[:], d.pitch[:] = shape.before, pitches(x)
        buffers = scratch["lines"].reshape(-1, float_bytes(shape.out[2] * shape.fout))
        units = shape.out[0] * -(-shape.out[1] // lines)
        compute_units(self._compute, d, units, self._most, out, self._pool, buffers)
