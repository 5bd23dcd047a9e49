"""Max- and average pooling with any window, stride and padding in compiled code: one pass over memory.

Method   For a run of outputs of a line, the lines of their windows are joined into one line in L1, and its voxels into
         the outputs. Voxels of padding are left out. Large outputs are written past the caches. Some lines of outputs
         are followed along z, so that windows that overlap find their input in L2.
Memory   One line and its outputs, per thread.
Bound    Memory: the input is read once, the output is written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Definition; the padding of means as in PyTorch and ONNX.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from znnpy.graph_shapes import WindowPoolShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.graph_calls import compute_units, is_bf16, is_past, moved_bytes, pitches
from znnpy.kernels.cpu.graph_layer import WeightlessLayer, float_bytes, given, why_not_kind
from znnpy.kernels.cpu.graph_pool import counts
from znnpy.kernels.cpu.native.library import LANES, library, why_not
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

MOST_LINES = 512  # lines of a window, as in window_pool.cpp
LINE_BYTES = 16 * 1024  # a worker's line, which stays in L1
COLUMN_BYTES = 256 * 1024  # input of some lines of outputs of a plane, which stays in L2
RUN_FLOATS = 16  # floats processed in the time it takes to start a run of maps
CALL_BYTES = 2**15  # Python memory and stack of calls into the library, per worker
CALL_INPUT_BYTES = 2**28  # read by one call into the library; the stop flag is checked between calls


class _WindowPool(ctypes.Structure):
    """The arguments of a call: struct WindowPool in window_pool.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "m", "window", "stride", "before", "pitch")),
        *((name, ctypes.c_int64) for name in ("f", "lines", "run", "average", "past", "bf16")),
        ("counts", ctypes.c_void_p * 3),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class _Runs(NamedTuple):
    run: int  # outputs along x
    lines: int  # lines of outputs
    units: int
    worker_bytes: int


def _runs(shape: WindowPoolShape) -> _Runs:
    mz, my, mx = shape.out
    run = min(mx, max(1, (LINE_BYTES // (FLOAT32 * shape.f) - shape.window[2]) // shape.stride[2] + 1))
    line = shape.itemsize * shape.n[2] * shape.f
    lines = min(my, max(1, (COLUMN_BYTES // (shape.window[0] * line) - shape.window[1]) // shape.stride[1] + 1))
    read = (run - 1) * shape.stride[2] + shape.window[2]
    worker = float_bytes(shape.f * (read + run) + 2 * LANES)
    return _Runs(run, lines, mz * -(-my // lines), worker)


@dataclass(frozen=True, slots=True)
class PoolLanes(WeightlessLayer):
    """Max- and average pooling with any window, stride and padding, in one pass."""

    name: str = "cpu.window_pool.lanes"
    kind: Kind = "window_pool"
    version: int = 1
    summary: str = "max- and average pooling at the speed of a copy (needs the compiled kernels)"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_kind(shape, WindowPoolShape, "poolings of graphs", bf16=True):
            return reason
        z, y, _ = given(shape, WindowPoolShape).window
        if z * y > MOST_LINES:
            return f"takes windows of up to {MOST_LINES} lines, not {z * y}: see cpu.window_pool.windows"
        return why_not(machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, WindowPoolShape)
        r = _runs(shape)
        workers = min(threads, r.units)
        divisors = FLOAT32 * sum(shape.out)
        return Footprint(
            scratch=(Scratch("lines", workers * r.worker_bytes),), allowance=workers * CALL_BYTES + divisors
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, WindowPoolShape)
        (mz, my, _), (wz, wy, wx) = shape.out, shape.window
        read = mz * my * shape.n[2] * shape.f * wz * wy
        runs = wx * prod(shape.out_shape) * (1 if shape.stride[2] == 1 else 1 + RUN_FLOATS / shape.f)
        return (Work("lane_stream", 3.0 * (read + runs), moved_bytes(shape)),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(given(shape, WindowPoolShape), pool)


class _Step:
    def __init__(self, shape: WindowPoolShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._runs = shape, pool, _runs(shape)
        self._compute = library(this_machine().simd).znnpy_window_pool
        self._counts = [counts(shape, axis) for axis in range(3)]
        self._most = max(1, int(CALL_INPUT_BYTES // (shape.in_bytes / self._runs.units * prod(shape.window))))

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, r, x = self._shape, self._runs, inputs[0]
        t = _WindowPool(
            f=shape.f,
            lines=r.lines,
            run=r.run,
            average=shape.how == "average",
            past=is_past(shape),
            bf16=is_bf16(shape),
            x=x.ctypes.data,
            out=out.ctypes.data,
        )
        t.n[:], t.m[:], t.window[:], t.stride[:] = shape.n, shape.out, shape.window, shape.stride
        t.before[:], t.pitch[:] = shape.before, pitches(x)
        t.counts[:] = [of_axis.ctypes.data for of_axis in self._counts]
        buffers = scratch["lines"].reshape(-1, r.worker_bytes)
        compute_units(self._compute, t, r.units, self._most, out, self._pool, buffers)
