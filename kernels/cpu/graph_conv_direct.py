"""Direct convolutions of graphs in compiled code, over several arrays with zeros around them.

Method   That of conv_direct_lanes.py. The taps of a line of outputs are those whose inputs are in memory, listed in
         parts: all of them in one part away from the faces, else those of each array and row of the kernel. The first
         and the last voxels of a line, where the kernel reaches beyond the arrays, are computed one by one.
Ending   Some voxels at a time get their addend and their function while their sums are in L1.
Memory   The kernels, in the order they are read; a list of taps and some voxels of sums per thread.
Bound    As there. A voxel alone takes as long as a block of four, which shows in short lines.
Source   As there.
Tested   tests/kernels/cpu/test_graph_conv.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import ALIGNMENT, Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.conv_direct_lanes import (
    CALL_FLOPS,
    LEAST_SUMS,
    OFFSET,
    ConvDirectLanes,
    Direct,
    Resident,
    panels,
)
from znnpy.kernels.cpu.ending import Ending, divided, ending_of
from znnpy.kernels.cpu.epilogue import overflow
from znnpy.kernels.cpu.graph_convs import padded_conv, slope, why_not_stride_1, why_not_upsampled
from znnpy.kernels.cpu.graph_layer import GraphLayer, float_bytes, given
from znnpy.kernels.cpu.native.library import LANES, blocks, library, streams, why_not
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized, Vec3

TAPS_BYTES = 40  # size of Taps in direct.hpp
AT_ONCE = 48  # most voxels whose sums are ended together: a multiple of all numbers that are summed at once
SUMS_FLOATS = 4096  # sums that are ended together, if a voxel has no more


class _Input(ctypes.Structure):
    """One of the arrays: struct Input in direct.hpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("plane", "row", "voxel", "maps", "first")),
        ("offsets", ctypes.c_void_p),
    )


class _Padded(ctypes.Structure):
    """The arguments of a call: struct Padded in direct.hpp."""

    _fields_ = (
        ("direct", Direct),
        *((name, ctypes.c_int64 * 3) for name in ("lead", "held")),
        ("count", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        ("at_once", ctypes.c_int64),
        ("ending", Ending),
    )


def _edges(shape: GraphConvShape) -> int:
    """Return the number of outputs of a line whose kernels reach into the padding."""
    return min(shape.out[2], shape.before[2] + shape.behind[2])


def _at_once(shape: GraphConvShape) -> int:
    """Return how many voxels are ended together."""
    return max(1, min(AT_ONCE, SUMS_FLOATS // (LANES * blocks(shape.fout))))


def _sums_bytes(shape: GraphConvShape) -> int:
    """Return the bytes of the sums that a thread ends together; 0 if they are ended in registers."""
    return float_bytes(_at_once(shape) * LANES * blocks(shape.fout)) if slope(shape) is None else 0


def _lines_bytes(shape: GraphConvShape) -> int:
    """Return the bytes of sums and taps of a thread, in whole cache lines."""
    return _sums_bytes(shape) + -(-len(shape.fins) * prod(shape.k) * TAPS_BYTES // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class GraphConvDirectLanes(GraphLayer):
    """Direct convolution of several padded arrays in compiled code: for few maps and small kernels."""

    name: str = "cpu.graph_conv.direct_lanes"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "kernels of 1 and 2, or few maps, stride 1 (needs the compiled kernels)"
    source: str = "ZNNi IV-A.1; register blocking after Goto, van de Geijn 2008"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_stride_1(shape) or why_not_upsampled(shape) or why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        shape = given(shape, GraphConvShape)
        found = ConvDirectLanes().footprint(padded_conv(shape), variant, threads)
        offsets = len(shape.fins) * ALIGNMENT + 2 * OFFSET * shape.fin * prod(shape.k)
        return replace(
            found,
            scratch=(Scratch("lines", threads * _lines_bytes(shape)),),
            allowance=found.allowance + offsets,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        (whole,) = ConvDirectLanes().work(padded_conv(shape), variant)
        alone = prod(shape.out[:2]) * _edges(shape) * LEAST_SUMS * LANES * len(list(panels(blocks(shape.fout))))
        flops = whole.flops + 2.0 * alone * shape.fin * prod(shape.k)
        return (whole._replace(flops=flops, nbytes=whole.nbytes + shape.addend_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident:
        return ConvDirectLanes().prepare(weights, variant, pool)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, GraphConvShape), pool)


def _offsets(k: Vec3, pitches: Vec3, maps: int) -> npt.NDArray[np.int64]:
    """Return the floats from an output's first input to the input of each tap, (z, y, x, maps)."""
    z, y, x = (np.arange(size, dtype=np.int64) * pitch for size, pitch in zip(k, pitches, strict=True))
    return z[:, None, None, None] + y[:, None, None] + x[:, None] + np.arange(maps, dtype=np.int64)


class _Step:
    """The convolution of one shape."""

    def __init__(self, resident: Resident, shape: GraphConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        self._library = library(this_machine().simd)
        factor = slope(shape)
        self._padded = p = _Padded(count=len(shape.fins), at_once=_at_once(shape))
        d = p.direct
        d.n[:], d.k[:], d.p[:], p.lead[:], p.held[:] = shape.padded, shape.k, (1, 1, 1), shape.before, shape.n
        d.fin, d.fout, d.relu = shape.fin, shape.fout, factor == 0
        d.slope = factor if factor not in (None, 1.0) else 0.0
        d.kernels, d.bias = resident.kernels.ctypes.data, resident.bias.ctypes.data
        self._lines = shape.out[0] * shape.out[1]
        line_flops = 2.0 * shape.out[2] * LANES * blocks(shape.fout) * shape.fin * prod(shape.k)
        self._most = max(1, int(CALL_FLOPS // line_flops))

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, pool, lib = self._shape, self._pool, self._library
        inputs, addend = divided(shape, inputs)
        stores = scratch["lines"].reshape(pool.threads, -1)
        p = _Padded.from_buffer_copy(self._padded)  # a copy, since steps may run at the same time
        arrays = (_Input * len(inputs))()
        tables, first = [], 0
        for array, x, maps in zip(arrays, inputs, shape.fins, strict=True):
            plane, row, voxel = (stride // FLOAT32 for stride in x.strides[:3])
            tables.append(_offsets(shape.k, (plane, row, voxel), maps))
            array.x, array.offsets = x.ctypes.data, tables[-1].ctypes.data
            array.plane, array.row, array.voxel, array.maps, array.first = plane, row, voxel, maps, first
            first += maps
        p.inputs, p.direct.out = ctypes.addressof(arrays), out.ctypes.data
        p.direct.stream = streams(shape.fout, shape.out_bytes) and p.direct.out % ALIGNMENT == 0
        if slope(shape) is None:
            p.ending = ending_of(shape, addend)
            p.ending.past = p.direct.stream
        bad = [0] * pool.threads

        def piece(lo: int, hi: int, worker: int) -> None:
            sums = stores[worker].ctypes.data
            own = ctypes.c_void_p(sums + _sums_bytes(shape)), ctypes.c_void_p(sums)
            for line in range(lo, hi, self._most):
                pool.check()
                some = ctypes.c_int64(line), ctypes.c_int64(min(hi, line + self._most))
                bad[worker] += lib.znnpy_direct_padded(ctypes.byref(p), *own, *some)

        pool.each(piece, self._lines)
        if sum(bad):
            raise overflow(sum(bad), prod(shape.out_shape))
