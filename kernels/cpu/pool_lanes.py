"""Maxima over windows in compiled code, one pass over memory: max-pooling, fragments (MPF), the max-filter.

Method   A column of the image, some lines of a run of voxels narrow enough for the cache, is followed along z. For each
         line of its planes the maximum is taken over the window's planes, over its lines, and over its voxels straight
         into the output, each fragment's in place. Large outputs are written past the caches, so that memory is not
         read before it is overwritten.
Shapes   As in pool.py.
Bound    Memory: the input is read once, and the rims of columns again; the output is written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Zlateski, Lee, Seung, ZNNi (SC16), V; Giusti et al. 2013; Masci et al. 2013.
Tested   tests/kernels/cpu/test_pool.py, tests/kernels/cpu/test_native.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from znnpy.kernels.contract import (
    ALIGNMENT,
    Footprint,
    Kind,
    Scratch,
    Variant,
    Windowed,
    Work,
    as_windowed,
    why_not_filter,
    why_not_fp32_or_bf16,
    why_not_pooling,
)
from znnpy.kernels.cpu.graph_calls import is_bf16
from znnpy.kernels.cpu.native.library import LANES, STREAM_BYTES, blocks, library, why_not
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32, PoolShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

RING_BYTES = 40 * 1024  # a worker's lines, which stay in L1
COLUMN_BYTES = 512 * 1024  # input of a plane of windows of a column, which stays in L2
WHOLE_LINES, ANY_LINES = 1, 2  # lines of the cache that are written past it, as in pool.hpp
LOADS = 3.0  # operations for each float in a maximum: two maxima in both orders, and the NaN check
RUN_FLOATS = 32  # floats processed in the time it takes to start a run of maps that has no neighbour along x
CALL_BYTES = 2**14  # Python memory that calls into the library take, per worker
CALL_INPUT_BYTES = 2**28  # read by one call into the library; the stop flag is checked between calls


class _Pooling(ctypes.Structure):
    """The arguments of a call: struct Pooling in pool.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "p", "step", "into", "m")),
        *((name, ctypes.c_int64) for name in ("f", "x_image", "out_image", "lines", "run", "ready", "past", "bf16")),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
    )


class _Columns(NamedTuple):
    """The division of one shape into columns."""

    step: Vec3  # from one window to the next that is computed
    into: Vec3  # fragments along each axis
    windows: Vec3  # windows of an image, over all fragments
    lines: int  # lines of windows in a column; those of the fragments are interleaved
    run: int  # windows along x in a column; a multiple of into[2]
    columns: int  # columns in all images
    past: int  # how the output is written past the caches if it is aligned to cache lines
    ready_bytes: int  # a worker's lines, without the one that is assembled for output
    worker_bytes: int  # all of a worker's lines


def _columns(shape: Windowed) -> _Columns:
    p, n, one = shape.p, shape.n, (1, 1, 1)
    into, step = one, one
    if isinstance(shape, PoolShape):
        into, step = (p, one) if shape.fragments else (one, p)
    windows = (n[0] - p[0]) // step[0] + 1, (n[1] - p[1]) // step[1] + 1, (n[2] - p[2]) // step[2] + 1
    voxel = shape.itemsize * shape.f
    fitting = (RING_BYTES // ((p[1] + 1) * voxel) - p[2]) // step[2] + 1
    run = min(windows[2], max(1, fitting // into[2]) * into[2])
    line_bytes = ((run - 1) * step[2] + p[2]) * voxel
    lines = min(windows[1], max(1, (COLUMN_BYTES // (p[0] * line_bytes) - p[1]) // step[1] + 1))
    columns = shape.batch * -(-windows[1] // lines) * -(-windows[2] // run)
    past = 0 if shape.out_bytes <= STREAM_BYTES else ANY_LINES if voxel % ALIGNMENT else WHOLE_LINES
    ready_bytes = line_bytes * (p[1] + 1 if p[1] > 1 else 1 if p[0] > 1 else 0)
    worker_bytes = ready_bytes + (-(-run // into[2]) * voxel if past == ANY_LINES else 0)
    worker_bytes = -(-worker_bytes // ALIGNMENT) * ALIGNMENT
    return _Columns(step, into, windows, lines, run, columns, past, ready_bytes, worker_bytes)


class _Maxima:
    """The common part of the three primitives, which differ in where the maxima are written."""

    __slots__ = ()

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        t = _columns(as_windowed(shape))
        workers = min(threads, t.columns)
        nbytes = workers * t.worker_bytes
        return Footprint(scratch=(Scratch("lines", nbytes),) if nbytes else (), allowance=workers * CALL_BYTES)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_windowed(shape)
        t, p = _columns(shape), shape.p
        rims = (1 + (p[1] - t.step[1]) / (t.step[1] * t.lines)) * (1 + (p[2] - t.step[2]) / (t.step[2] * t.run))
        moved = rims * shape.in_bytes + shape.out_bytes * (1 if t.past else 2)
        lines = shape.batch * t.windows[0] * t.windows[1] * shape.f
        over_lines = rims * lines * shape.n[2] * (t.step[1] * p[0] + p[1])
        loads = over_lines + p[2] * prod(shape.out_shape) * _scatter_slowdown(shape, t)
        return (Work("lane_stream", LOADS * FLOAT32 * loads, moved),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> None:
        """Return None: there are no weights."""
        del weights, variant, pool

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(as_windowed(shape), pool)


def _scatter_slowdown(shape: Windowed, columns: _Columns) -> float:
    """Return the slowdown of the last maximum where neighbouring windows do not go to neighbouring voxels."""
    if columns.into[2] * columns.step[2] == 1:
        return 1.0
    return (LANES * blocks(shape.f) + RUN_FLOATS) / shape.f


@dataclass(frozen=True, slots=True)
class PoolMaxLanes(_Maxima):
    """Plain max-pooling: one output image per input image."""

    name: str = "cpu.pool.max_lanes"
    kind: Kind = "pool"
    version: int = 1
    summary: str = "plain max-pooling (needs the compiled kernels)"
    source: str = "definition"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        reason = why_not_pooling(shape, fragments=False, other="cpu.pool.fragments_lanes")
        return reason or why_not_fp32_or_bf16(shape) or why_not(machine)


@dataclass(frozen=True, slots=True)
class PoolFragmentsLanes(_Maxima):
    """Max-pooling fragments: one output image per offset of the window, so that the output stays dense."""

    name: str = "cpu.pool.fragments_lanes"
    kind: Kind = "pool"
    version: int = 1
    summary: str = "max-pooling for dense inference, at the speed of a copy (needs the compiled kernels)"
    source: str = "ZNNi V; Giusti et al. 2013; Masci et al. 2013"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        reason = why_not_pooling(shape, fragments=True, other="cpu.pool.max_lanes")
        return reason or why_not_fp32_or_bf16(shape) or why_not(machine)


@dataclass(frozen=True, slots=True)
class MaxFilterLanes(_Maxima):
    """The maximum over a window at every position."""

    name: str = "cpu.maxfilter.lanes"
    kind: Kind = "maxfilter"
    version: int = 1
    summary: str = "the maximum over a window at every position (needs the compiled kernels)"
    source: str = "definition, separable"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        return why_not_filter(shape) or why_not_fp32_or_bf16(shape) or why_not(machine)


class _Step:
    def __init__(self, shape: Windowed, pool: ThreadPool) -> None:
        self._shape, self._pool, self._columns = shape, pool, _columns(shape)
        self._library = library(this_machine().simd)
        column_bytes = shape.in_bytes / self._columns.columns
        self._most = max(1, int(CALL_INPUT_BYTES // (column_bytes * prod(shape.p))))

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, t, pool, lib = self._shape, self._columns, self._pool, self._library
        pooling = _Pooling(
            f=shape.f, lines=t.lines, run=t.run, bf16=is_bf16(shape), x=x.ctypes.data, out=out.ctypes.data
        )
        pooling.n[:], pooling.p[:], pooling.step[:] = shape.n, shape.p, t.step
        pooling.into[:], pooling.m[:] = t.into, t.windows
        pooling.x_image, pooling.out_image = x.strides[0] // x.itemsize, out.strides[0] // x.itemsize
        pooling.ready, pooling.past = t.ready_bytes // x.itemsize, t.past
        if t.past == WHOLE_LINES and (pooling.out | out.strides[0]) % ALIGNMENT:
            pooling.past = 0
        buffers = scratch["lines"].reshape(-1, t.worker_bytes) if "lines" in scratch else None

        def piece(lo: int, hi: int, worker: int) -> None:
            buffer = ctypes.c_void_p(None if buffers is None else buffers[worker].ctypes.data)
            for first in range(lo, hi, self._most):
                pool.check()
                last = ctypes.c_int64(min(hi, first + self._most))
                lib.znnpy_pool(ctypes.byref(pooling), buffer, ctypes.c_int64(first), last)

        pool.each(piece, t.columns)
