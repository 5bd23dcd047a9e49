"""Direct transposed convolution in compiled code: sums in registers, output channels in SIMD lanes.

Method   Outputs of a line whose (j + first) mod stride is equal read neighbouring inputs. A block of them times a panel
         of LANES channels is summed in registers over the taps that reach them, as in graph_conv_strided.py. The
         function that follows is applied to a line in the cache; large outputs are written past the caches.
Memory   The kernels, in the order they are read; one line of outputs per thread.
Bound    Compute: the limit of the registers; many maps (a panel that exceeds L2) wait for L3.
Source   Dumoulin, Visin 2016; register blocking as in Goto, van de Geijn 2008.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import TransposeShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu.ending import Ending, ending_of
from znnpy.kernels.cpu.graph_calls import moved_bytes, pitches
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


class _Transpose(ctypes.Structure):
    """The arguments of a call: struct Transpose in transpose.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "m", "k", "stride", "dilation", "first", "pitch")),
        *((name, ctypes.c_int64) for name in ("fin", "fout")),
        ("ending", Ending),
        *((name, ctypes.c_void_p) for name in ("x", "kernels", "bias", "out")),
    )


@dataclass(frozen=True, slots=True)
class TransposeLanes(GraphLayer):
    """Direct transposed convolution."""

    name: str = "cpu.conv_transpose.lanes"
    kind: Kind = "conv_transpose"
    version: int = 1
    summary: str = "any kernel, stride and dilation, without groups (needs the compiled kernels)"
    source: str = "Dumoulin, Visin 2016; register blocking after Goto, van de Geijn 2008"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_kind(shape, TransposeShape, "transposed convolutions", bf16=True):
            return reason
        shape = given(shape, TransposeShape)
        if shape.groups > 1:
            return "computes no groups: see cpu.conv_transpose.phases"
        if prod(shape.k) > MOST_TAPS:
            return f"takes kernels of up to {MOST_TAPS} taps, not {prod(shape.k)}: see cpu.conv_transpose.phases"
        return why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        return panels_footprint(given(shape, TransposeShape), threads)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, TransposeShape)
        taps = shape.fin * prod(k / s for k, s in zip(shape.k, shape.stride, strict=True)) + ENDING_TAPS
        return (Work("lane_stream", 2.0 * prod(shape.m) * lane_count(shape) * taps, moved_bytes(shape)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Panels:
        del variant, pool
        return panels_of(weights, (2, 3, 4, 0, 1))

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, TransposeShape), pool)


class _Step:
    def __init__(self, resident: Panels, shape: TransposeShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        self._compute = library(this_machine().simd).znnpy_transpose

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, x = self._shape, inputs[0]
        t = _Transpose(
            fin=shape.fin,
            fout=shape.fout,
            ending=ending_of(shape),
            x=x.ctypes.data,
            kernels=self._resident.kernels.ctypes.data,
            bias=self._resident.bias.ctypes.data,
            out=out.ctypes.data,
        )
        t.n[:], t.m[:], t.k[:], t.stride[:], t.dilation[:] = shape.n, shape.m, shape.k, shape.stride, shape.dilation
        t.first[:], t.pitch[:] = shape.first, pitches(x)
        taps = prod(-(-k // s) for k, s in zip(shape.k, shape.stride, strict=True))  # that reach an output, at most
        compute_lines(self._compute, t, shape, taps, out, scratch, self._pool)
