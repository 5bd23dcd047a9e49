"""Upsampling by whole factors in compiled code, nearest and linear: one pass over memory.

Method   Nearest: a run of voxels of a line is repeated along x in L1, and copied to all lines of outputs that it is
         nearest to. Linear: a run is interpolated between four lines, and then along x. Large outputs are written past
         the caches.
Memory   A run, and the voxels that it lies between, per thread.
Bound    Memory: the output is written once.
Source   Definition; positions as in PyTorch and ONNX (half_pixel).
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from znnpy.graph_shapes import UpsampleShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.graph_calls import compute_units, is_bf16, is_past, moved_bytes, pitches
from znnpy.kernels.cpu.graph_layer import WeightlessLayer, float_bytes, given, why_not_kind
from znnpy.kernels.cpu.graph_upsample import TABLE_BYTES, neighbours
from znnpy.kernels.cpu.native.library import LANES, library, why_not
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

RUN_BYTES = 16 * 1024  # outputs of a run, which stay in L1
COLUMN_BYTES = 256 * 1024  # input of some lines of outputs of a plane, which stays in L2
LINEAR_FLOPS = 10.0  # operations for a value
RUN_FLOATS = 16  # floats processed in the time it takes to start a run of maps
CALL_BYTES = 2**14  # Python memory that calls into the library take, per worker
CALL_OUTPUT_BYTES = 2**26  # written by one call into the library; the stop flag is checked between calls


class _Along(ctypes.Structure):
    """One axis: struct Along in upsample.hpp."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("low", "high", "part"))


class _Upsample(ctypes.Structure):
    """The arguments of a call: struct Upsample in upsample.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "m", "factor", "first", "pitch")),
        *((name, ctypes.c_int64) for name in ("f", "lines", "run", "past", "bf16")),
        ("along", _Along * 3),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class _Runs(NamedTuple):
    run: int  # outputs along x
    lines: int  # lines of outputs, of `linear`
    units: int
    worker_bytes: int


def _runs(shape: UpsampleShape) -> _Runs:
    (mz, my, mx), voxel = shape.m, shape.itemsize * shape.f
    if shape.how == "nearest":
        run = min(mx, max(1, RUN_BYTES // voxel))
        planes, rows = ((m - 1 + first) // s - first // s + 1 for m, first, s in _axes(shape))
        return _Runs(run, 1, planes * rows, float_bytes(run * shape.f + LANES, shape.itemsize))
    run = min(mx, max(1, RUN_BYTES // (FLOAT32 * shape.f)))
    lines = min(my, max(1, COLUMN_BYTES // (2 * shape.n[2] * voxel) * shape.factor[1]))
    read = min(shape.n[2], (run - 1) // shape.factor[2] + 3)
    return _Runs(run, lines, mz * -(-my // lines), float_bytes((run + read) * shape.f + 2 * LANES))


def _axes(shape: UpsampleShape) -> list[tuple[int, int, int]]:
    """Return output size, first voxel and factor along z and y."""
    return list(zip(shape.m, shape.first, shape.factor, strict=True))[:2]


@dataclass(frozen=True, slots=True)
class UpsampleLanes(WeightlessLayer):
    """Upsampling, nearest and linear, in one pass."""

    name: str = "cpu.upsample.lanes"
    kind: Kind = "upsample"
    version: int = 1
    summary: str = "nearest and linear upsampling at the speed of a copy (needs the compiled kernels)"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_kind(shape, UpsampleShape, "upsamplings", bf16=True) or why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, UpsampleShape)
        r = _runs(shape)
        workers = min(threads, r.units)
        return Footprint(
            scratch=(Scratch("runs", workers * r.worker_bytes),),
            allowance=workers * CALL_BYTES + TABLE_BYTES * sum(shape.m),
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, UpsampleShape)
        flops = (LINEAR_FLOPS if shape.how == "linear" else 1.0) * (1 + RUN_FLOATS / shape.f)
        return (Work("lane_stream", flops * prod(shape.out_shape), moved_bytes(shape)),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(given(shape, UpsampleShape), pool)


class _Step:
    def __init__(self, shape: UpsampleShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._runs = shape, pool, _runs(shape)
        self._axes = [neighbours(shape, axis) for axis in range(3)]
        loaded = library(this_machine().simd)
        self._compute = loaded.znnpy_upsample_nearest if shape.how == "nearest" else loaded.znnpy_upsample_linear
        self._most = max(1, CALL_OUTPUT_BYTES * self._runs.units // shape.out_bytes)

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, r, x = self._shape, self._runs, inputs[0]
        t = _Upsample(
            f=shape.f,
            lines=r.lines,
            run=r.run,
            past=is_past(shape),
            bf16=is_bf16(shape),
            x=x.ctypes.data,
            out=out.ctypes.data,
        )
        t.n[:], t.m[:], t.factor[:], t.first[:] = shape.n, shape.m, shape.factor, shape.first
        t.pitch[:] = pitches(x)
        t.along[:] = [_Along(*(table.ctypes.data for table in axis)) for axis in self._axes]
        buffers = scratch["runs"].reshape(-1, r.worker_bytes)
        compute_units(self._compute, t, r.units, self._most, out, self._pool, buffers)
