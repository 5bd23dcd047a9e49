"""Layers that take their inputs voxel by voxel in compiled code: one pass over memory.

Method   Some voxels of a line at a time are joined in a buffer in L1, where the function that follows is applied. Large
         outputs are written past the caches, so that memory is not read before it is overwritten.
Memory   None.
Bound    Memory: the inputs are read once, the output is written once.
Source   Definition.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import PointShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu.activations import code_of, parameters_of
from znnpy.kernels.cpu.graph_calls import compute_units, is_bf16, is_past, moved_bytes, pitches
from znnpy.kernels.cpu.graph_layer import given, why_not_kind
from znnpy.kernels.cpu.graph_point import PointLayer, Resident, resident_bytes
from znnpy.kernels.cpu.native.library import library, why_not
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

MOST_INPUTS, MOST_MAPS = 8, 8192  # as in point.hpp and point.cpp
WAYS = ("add", "multiply", "concat", "scale", "function")  # as in point.hpp
CALL_BYTES = 160 * 1024  # stack and Python memory of a call into the library, per worker
CALL_LINES_BYTES = 2**26  # output of one call into the library; the stop flag is checked between calls
FUNCTION_FLOPS = 30.0  # operations for a value, of functions other than relu


class _Input(ctypes.Structure):
    """One input: struct PointInput in point.hpp."""

    _fields_ = (("x", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("f", "z", "y", "voxel")))


class _Point(ctypes.Structure):
    """The arguments of a call: struct Point in point.hpp."""

    _fields_ = (
        ("n", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("f", "how", "inputs", "function")),
        *((name, ctypes.c_double) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("slopes", "past", "bf16")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "out")),
        ("from_", _Input * MOST_INPUTS),
    )


@dataclass(frozen=True, slots=True)
class PointLanes(PointLayer):
    """Sums, products, concatenations, scales, and functions of each value, in one pass."""

    name: str = "cpu.point.lanes"
    kind: Kind = "point"
    version: int = 1
    summary: str = "sums, products, concatenations, scales and functions in one pass (needs the compiled kernels)"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_kind(shape, PointShape, "layers voxel by voxel", bf16=True):
            return reason
        shape = given(shape, PointShape)
        if len(shape.fins) > MOST_INPUTS:
            return f"takes up to {MOST_INPUTS} inputs, not {len(shape.fins)}: see cpu.point.lines"
        if shape.f > MOST_MAPS:
            return f"takes up to {MOST_MAPS} maps, not {shape.f}: see cpu.point.lines"
        return why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, PointShape)
        return Footprint(
            resident=resident_bytes(shape),
            allowance=min(threads, shape.n[0] * shape.n[1]) * CALL_BYTES,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, PointShape)
        flops = 1.0 if shape.activation in ("none", "relu", "leaky_relu", "prelu", "clip") else FUNCTION_FLOPS
        return (Work("lane_stream", flops * prod(shape.out_shape), moved_bytes(shape)),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, PointShape), pool)


class _Step:
    def __init__(self, resident: Resident | None, shape: PointShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        self._compute = library(this_machine().simd).znnpy_point
        self._most = max(1, CALL_LINES_BYTES // (shape.itemsize * shape.n[2] * shape.f))

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        del scratch
        shape = self._shape
        a, b = parameters_of(shape.activation, shape.parameters)
        p = _Point(
            f=shape.f,
            how=WAYS.index(shape.how),
            inputs=len(inputs),
            function=code_of(shape.activation),
            a=a,
            b=b,
            past=is_past(shape),
            bf16=is_bf16(shape),
            out=out.ctypes.data,
        )
        p.n[:] = shape.n
        if self._resident is not None:
            p.weight, p.bias = self._resident.weight.ctypes.data, self._resident.bias.ctypes.data
            p.slopes = self._resident.weight.size
        for i, part in enumerate(inputs):
            steps = (0, 0, 0) if i in shape.single else pitches(part)  # one voxel is read again and again
            p.from_[i] = _Input(part.ctypes.data, part.shape[3], *steps)
        compute_units(self._compute, p, shape.n[0] * shape.n[1], self._most, out, self._pool)
