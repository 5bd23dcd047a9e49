"""Direct convolution of a graph with stride, dilation, padding and several inputs in compiled code.

Method   A block of neighbouring outputs of a line times a panel of LANES channels is summed in registers over all taps
         that lie in the image: per tap the panel's kernels are loaded, and the input of each output is broadcast to a
         vector. Several inputs are read where they are. The function that follows is applied to a line in the cache;
         large outputs are written past the caches.
Memory   The kernels, in the order they are read; one line of outputs per thread.
Bound    Compute: the limit of the registers; many maps (a panel that exceeds L2) wait for L3.
Source   Zlateski, Lee, Seung, ZNNi (SC16), IV-A.1 (direct); register blocking as in Goto, van de Geijn 2008.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu.ending import Ending, divided, ending_of
from znnpy.kernels.cpu.graph_calls import moved_bytes, pitches
from znnpy.kernels.cpu.graph_convs import why_not_upsampled
from znnpy.kernels.cpu.graph_layer import GraphLayer, given, why_not_kind
from znnpy.kernels.cpu.graph_panels import (
    ENDING_TAPS,
    MOST_TAPS,
    Panels,
    compute_lines,
    lane_count,
    panels_footprint,
    panels_of,
)
from znnpy.kernels.cpu.native.library import library, why_not
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

MOST_INPUTS = 8  # as in strided.hpp
RIM = 3.0  # time of an output whose taps reach into padding along x, relative to one of a block


class _Part(ctypes.Structure):
    """One input: struct Part in strided.hpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("f", ctypes.c_int64),
        ("pitch", ctypes.c_int64 * 3),
    )


class _Strided(ctypes.Structure):
    """The arguments of a call: struct Strided in strided.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "m", "k", "stride", "dilation", "before")),
        *((name, ctypes.c_int64) for name in ("fin", "fout", "parts")),
        ("ending", Ending),
        *((name, ctypes.c_void_p) for name in ("kernels", "bias", "out")),
        ("from_", _Part * MOST_INPUTS),
    )


@dataclass(frozen=True, slots=True)
class GraphConvStrided(GraphLayer):
    """Direct convolution with stride, dilation and padding."""

    name: str = "cpu.graph_conv.strided"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "any stride, dilation and padding, without groups (needs the compiled kernels)"
    source: str = "ZNNi IV-A.1; register blocking after Goto, van de Geijn 2008"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_kind(shape, GraphConvShape, "convolutions of graphs", bf16=True) or why_not_upsampled(
            shape
        ):
            return reason
        shape = given(shape, GraphConvShape)
        if shape.groups > 1:
            return "computes no groups: see cpu.graph_conv.taps"
        if len(shape.fins) > MOST_INPUTS:
            return f"takes up to {MOST_INPUTS} inputs, not {len(shape.fins)}: see cpu.graph_conv.taps"
        if prod(shape.k) * len(shape.fins) > MOST_TAPS:
            return f"takes kernels of up to {MOST_TAPS} taps over all inputs: see cpu.graph_conv.taps"
        return why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        return panels_footprint(given(shape, GraphConvShape), threads)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, GraphConvShape)
        mz, my, mx = shape.out
        taps = shape.fin * prod(shape.k) + ENDING_TAPS
        rim = sum(-(-pad // s) for pad, s in ((shape.before[2], shape.stride[2]), (shape.behind[2], shape.stride[2])))
        outputs = mx + (RIM - 1) * min(mx, rim)
        return (Work("lane_stream", 2.0 * mz * my * outputs * lane_count(shape) * taps, moved_bytes(shape)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Panels:
        del variant, pool
        return panels_of(weights, (2, 3, 4, 1, 0))

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, GraphConvShape), pool)


class _Step:
    def __init__(self, resident: Panels, shape: GraphConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        self._compute = library(this_machine().simd).znnpy_strided

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape = self._shape
        inputs, addend = divided(shape, inputs)
        s = _Strided(
            fin=shape.fin,
            fout=shape.fout,
            parts=len(inputs),
            ending=ending_of(shape, addend),
            kernels=self._resident.kernels.ctypes.data,
            bias=self._resident.bias.ctypes.data,
            out=out.ctypes.data,
        )
        s.n[:], s.m[:], s.k[:], s.stride[:], s.dilation[:] = shape.n, shape.out, shape.k, shape.stride, shape.dilation
        s.before[:] = shape.before
        for i, part in enumerate(inputs):
            s.from_[i] = _Part(part.ctypes.data, part.shape[3], (ctypes.c_int64 * 3)(*pitches(part)))
        compute_lines(self._compute, s, shape, prod(shape.k), out, scratch, self._pool)
