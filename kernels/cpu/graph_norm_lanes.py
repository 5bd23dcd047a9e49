"""Norms over a whole image, and means and maxima of one, in compiled code: at the speed of memory.

Method   Blocks of voxels that stay in L1 or L2. The first pass sums up a block for the mean of each map, and from the
         cache its squared deviations from that mean, in float32; blocks are joined in float64. The second pass
         subtracts the mean, multiplies, adds, and applies the function that follows. Large outputs are written past the
         caches. Results do not depend on the number of threads.
Memory   A block for each thread, and the moments of up to UNITS parts of the image.
Bound    Memory: the input is read twice, the output is written once.
Exact    A maximum does not round. NaN in, NaN out; a norm counts what is not finite as an overflow. Deviations of more
         than 1e19 overflow in their squares, which is an error too.
Source   Chan, Golub and LeVeque 1979, Updating formulae and a pairwise algorithm for computing sample variances.
Tested   tests/kernels/cpu/test_graph_norm.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import GlobalPoolShape, NormShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.activations import code_of, parameters_of
from znnpy.kernels.cpu.epilogue import quiet
from znnpy.kernels.cpu.graph_calls import compute_units, is_bf16, is_past, moved_bytes, pitches
from znnpy.kernels.cpu.graph_layer import WeightlessLayer, float_bytes, given, why_not_kind
from znnpy.kernels.cpu.graph_norm import Doubles, NormLayer, Resident, joined, resident_bytes, terms
from znnpy.kernels.cpu.native.library import library, why_not
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

Shape = NormShape | GlobalPoolShape

SPARE = 16  # floats behind each array of a buffer, as in norm.cpp
ROW_FLOATS = 128  # least floats that are summed up apart from each other
BLOCK_FLOATS, LEAST_VOXELS = 4096, 32  # about a block, and voxels that it has at least: joining it costs as much as one
LEAST_VALUES = 2**16  # that are worth the cost of giving them to a thread
UNITS = 256  # most parts of an image with moments of their own
CALL_BYTES = 2**15  # Python memory and stack of calls into the library, per worker
CALL_VALUES = 2**24  # read by one call into the library; the stop flag is checked between calls
FUNCTION_FLOPS = 30.0  # operations for a value, of functions other than relu
MOMENTS_FLOPS = 5.0  # operations for a value


class _Norm(ctypes.Structure):
    """The arguments of a call: struct Norm in norm.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "pitch")),
        *((name, ctypes.c_int64) for name in ("f", "repeat", "block", "unit", "how", "function")),
        *((name, ctypes.c_double) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("past", "bf16")),
        *((name, ctypes.c_void_p) for name in ("shift", "factor", "offset", "found", "x", "out")),
    )


class _Blocks:
    """How an image is divided: rows of voxels, blocks of rows, units of blocks."""

    def __init__(self, shape: Shape) -> None:
        voxels, f = prod(shape.n), shape.f
        self.repeat = 1
        while self.repeat * f < ROW_FLOATS:
            self.repeat *= 2
        rows = max(LEAST_VOXELS, BLOCK_FLOATS // f) // self.repeat
        self.block = max(1, rows) * self.repeat
        self.unit = self.block * -(-voxels // (self.block * UNITS))
        self.units = -(-voxels // self.unit)
        self.worker_bytes = float_bytes(self.block * f + 3 * self.repeat * f + 4 * SPARE)
        self.calls = max(1, CALL_VALUES // (self.unit * f))
        self.numbers = f if isinstance(shape, GlobalPoolShape) and shape.how == "max" else 2 * f
        self.counts = [min(self.unit, voxels - first) for first in range(0, voxels, self.unit)]

    def footprint(self, threads: int, resident: int = 0) -> Footprint:
        """Return the memory of a layer."""
        workers, nbytes = min(threads, self.units), 8 * self.units * self.numbers
        return Footprint(
            resident=resident,
            scratch=(Scratch("rows", workers * self.worker_bytes), Scratch("moments", nbytes)),
            allowance=workers * CALL_BYTES + 3 * nbytes + 16 * 8 * self.numbers,
        )


@dataclass(frozen=True, slots=True)
class NormLanes(NormLayer):
    """Norms over a whole image, with the function that follows, in two passes."""

    name: str = "cpu.norm.lanes"
    kind: Kind = "norm"
    version: int = 1
    summary: str = "norms over a whole image at the speed of memory (needs the compiled kernels)"
    source: str = "Chan, Golub and LeVeque 1979"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_kind(shape, NormShape, "norms over a whole image", bf16=True) or why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, NormShape)
        return _Blocks(shape).footprint(threads, resident_bytes(shape))

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, NormShape)
        flops = 2.0 if shape.activation in ("none", "relu", "leaky_relu", "clip") else FUNCTION_FLOPS
        return (
            Work("lane_stream", (MOMENTS_FLOPS + flops) * prod(shape.out_shape), moved_bytes(shape) + shape.in_bytes),
        )

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _NormStep:
        del variant
        return _NormStep(resident, given(shape, NormShape), pool)


@dataclass(frozen=True, slots=True)
class GlobalPoolLanes(WeightlessLayer):
    """The mean or the maximum of each map over a whole image, in one pass."""

    name: str = "cpu.global_pool.lanes"
    kind: Kind = "global_pool"
    version: int = 1
    summary: str = "means and maxima over a whole image at the speed of memory (needs the compiled kernels)"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_kind(shape, GlobalPoolShape, "means and maxima over a whole image", bf16=True) or why_not(
            machine
        )

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        return _Blocks(given(shape, GlobalPoolShape)).footprint(threads)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, GlobalPoolShape)
        return (Work("lane_stream", MOMENTS_FLOPS * prod(shape.in_shape), shape.in_bytes),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _PoolStep:
        del resident, variant
        return _PoolStep(given(shape, GlobalPoolShape), pool)


class _Step:
    """The common part of the steps: arguments, and the first pass."""

    def __init__(self, shape: Shape, pool: ThreadPool) -> None:
        self._pool, self._blocks, self._bf16 = pool, _Blocks(shape), is_bf16(shape)
        self._n, self._f = shape.n, shape.f
        self._library = library(this_machine().simd)

    def _arguments(self, x: Array, **more: Any) -> _Norm:
        b = self._blocks
        p = _Norm(f=self._f, repeat=b.repeat, block=b.block, unit=b.unit, bf16=self._bf16, x=x.ctypes.data, **more)
        p.n[:], p.pitch[:] = self._n, pitches(x)
        return p

    def _found(self, p: _Norm, out: Array, scratch: Mapping[str, Bytes]) -> Doubles:
        """Return what the first pass finds, a row for each unit."""
        found = scratch["moments"].view(np.float64).reshape(self._blocks.units, self._blocks.numbers)
        p.found = found.ctypes.data
        self._compute(self._library.znnpy_moments, p, out, scratch)
        return found

    def _compute(self, function: Any, p: _Norm, out: Array, scratch: Mapping[str, Bytes]) -> None:
        b = self._blocks
        buffers = scratch["rows"].reshape(-1, b.worker_bytes)
        least = max(-(-LEAST_VALUES // (b.unit * self._f)), -(-b.units // self._pool.threads))
        compute_units(function, p, b.units, b.calls, out, self._pool, buffers, least)


class _NormStep(_Step):
    def __init__(self, resident: Resident | None, shape: NormShape, pool: ThreadPool) -> None:
        super().__init__(shape, pool)
        self._resident, self._shape = resident, shape

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, f = self._shape, self._f
        a, b = parameters_of(shape.activation, shape.parameters)
        function = code_of(shape.activation)
        p = self._arguments(inputs[0], function=function, a=a, b=b, past=is_past(shape), out=out.ctypes.data)
        found = self._found(p, out, scratch)
        with quiet():
            each_map = terms(shape, *joined(self._blocks.counts, found[:, :f], found[:, f:]), self._resident)
        p.shift, p.factor, p.offset = (of_map.ctypes.data for of_map in each_map)
        self._compute(self._library.znnpy_norm, p, out, scratch)


class _PoolStep(_Step):
    def __init__(self, shape: GlobalPoolShape, pool: ThreadPool) -> None:
        super().__init__(shape, pool)
        self._largest = shape.how == "max"

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        found = self._found(self._arguments(inputs[0], how=self._largest), out, scratch)
        with quiet():
            if self._largest:
                out[0, 0, 0] = found.max(axis=0)
            else:
                out[0, 0, 0] = joined(self._blocks.counts, found[:, : self._f], found[:, self._f :])[0]
