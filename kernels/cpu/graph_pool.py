"""Max- and average pooling with any window, stride and padding, in numpy.

Method   Separable, a few lines of one plane of outputs at a time, so that everything stays in L2: the maximum or sum is
         taken over the window's planes, then over its lines, then over its voxels. Voxels of padding are left out.
         A sum is divided by the number of voxels that count, the product of one number along each axis.
Memory   The lines between two passes, per thread.
Bound    Memory: the input is read once (its planes up to window times, from L2 or L3), the output written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Definition; the padding of means as in PyTorch and ONNX.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import WindowPoolShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.graph_layer import NUMPY_BYTES, WeightlessLayer, float_bytes, given, why_not_kind
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

LINES_BYTES = 256 * 1024  # a worker's lines between two passes, which stay in L2
CACHED = 5  # a byte in the cache costs a fifth of one that misses it
RUN_BYTES = 150  # cost to start a run of maps that has no neighbour along x, in bytes that miss the cache
CALL_BYTES = 35_000  # cost of a numpy call


class _Lines(NamedTuple):
    block: int  # lines of outputs at a time
    over_planes: int  # bytes of a worker's results over planes
    over_lines: int  # bytes of these and of the results over planes and lines
    worker_bytes: int  # of these, and in bf16 of the outputs before they are rounded


def _lines(shape: WindowPoolShape) -> _Lines:
    line = shape.n[2] * shape.f
    block = min(shape.out[1], max(1, LINES_BYTES // (FLOAT32 * line * shape.stride[1])))
    read = min(shape.n[1], (block - 1) * shape.stride[1] + shape.window[1])
    over_planes = float_bytes(read * line)
    over_lines = over_planes + float_bytes(block * line)
    rounded = float_bytes(block * shape.out[2] * shape.f) if shape.precision == "bf16" else 0
    return _Lines(block, over_planes, over_lines, over_lines + rounded)


def counts(shape: WindowPoolShape, axis: int) -> Array:
    """Return the voxels along an axis that the mean of each window divides by."""
    n, window, before = shape.n[axis], shape.window[axis], shape.before[axis]
    first = np.arange(shape.out[axis]) * shape.stride[axis] - before
    low, high = 0, n
    if shape.count_padding:
        low, high = -before, n + shape.behind[axis] - shape.overhang[axis]
    return (np.minimum(first + window, high) - np.maximum(first, low)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PoolWindows(WeightlessLayer):
    """Max- and average pooling with any window, stride and padding."""

    name: str = "cpu.window_pool.windows"
    kind: Kind = "window_pool"
    version: int = 1
    summary: str = "max- and average pooling with any stride and padding"
    source: str = "definition, separable"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, WindowPoolShape, "poolings of graphs", bf16=True)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, WindowPoolShape)
        t = _lines(shape)
        workers = min(threads, shape.out[0] * -(-shape.out[1] // t.block))
        divisors = FLOAT32 * sum(shape.out)
        return Footprint(
            scratch=(Scratch("lines", workers * t.worker_bytes),), allowance=workers * NUMPY_BYTES + divisors
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, WindowPoolShape)
        (mz, my, _), (wz, wy, wx), t = shape.out, shape.window, _lines(shape)
        line = FLOAT32 * shape.n[2] * shape.f
        cached = 3 * mz * line * (wz * shape.n[1] + wy * my)
        runs = wx * shape.out_bytes * (1 + RUN_BYTES / (FLOAT32 * shape.f) if shape.stride[2] > 1 else 3 / CACHED)
        calls = mz * -(-my // t.block) * (wz + wy + wx + 1)
        return (Work("pool", 0.0, shape.in_bytes + shape.out_bytes + cached / CACHED + runs + CALL_BYTES * calls),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(given(shape, WindowPoolShape), pool)


class _Step:
    def __init__(self, shape: WindowPoolShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._lines = shape, pool, _lines(shape)
        self._join = np.maximum if shape.how == "max" else np.add
        self._start = np.float32(-np.inf if shape.how == "max" else 0)
        self._counts = [counts(shape, axis) for axis in range(3)]

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, t, pool = self._shape, self._lines, self._pool
        blocks = -(-shape.out[1] // t.block)
        stores = scratch["lines"].reshape(-1, t.worker_bytes)

        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                pool.check()
                z, block = divmod(unit, blocks)
                first = block * t.block
                self._compute(inputs[0], out[z, first : first + t.block], z, first, stores[worker])

        pool.each(piece, shape.out[0] * blocks)

    def _compute(self, x: Array, out: Array, z: int, first: int, store: Bytes) -> None:
        """Compute the lines from `first` on of the plane z of outputs."""
        shape, (nz, ny, nx) = self._shape, self._shape.n
        (wz, wy, _), (sz, sy, _), (bz, by, _) = shape.window, shape.stride, shape.before
        top = max(0, first * sy - by)
        bottom = max(top, min(ny, (first + len(out) - 1) * sy - by + wy))
        planes = range(max(0, z * sz - bz), min(nz, z * sz - bz + wz))
        over_planes = np.ndarray((bottom - top, nx, shape.f), np.float32, store)
        over_planes[...] = x[planes[0], top:bottom] if planes else self._start
        for plane in planes[1:]:
            self._join(over_planes, x[plane, top:bottom], out=over_planes)
        over_lines = np.ndarray((len(out), nx, shape.f), np.float32, store, self._lines.over_planes)
        over_lines[...] = self._start
        for target, source in self._places(1, first, len(out), top, bottom):
            self._join(over_lines[target], over_planes[source], out=over_lines[target])
        rounds = shape.precision == "bf16"
        found = np.ndarray(out.shape, np.float32, store, self._lines.over_lines) if rounds else out
        found[...] = self._start
        for target, source in self._places(2, 0, out.shape[1], 0, nx):
            self._join(found[:, target], over_lines[:, source], out=found[:, target])
        if shape.how == "average":
            along_z, along_y, along_x = self._counts
            found /= along_x[:, np.newaxis]
            found /= (along_z[z] * along_y[first : first + len(out)])[:, np.newaxis, np.newaxis]
        if rounds:
            out[...] = found

    def _places(self, axis: int, first: int, count: int, low: int, high: int) -> Iterator[tuple[slice, slice]]:
        """Yield for each voxel of the window the outputs that it is in the image for, and the inputs `low` .. there.

        first, count  outputs along the axis.
        """
        stride = self._shape.stride[axis]
        for tap in range(self._shape.window[axis]):
            at = first * stride - self._shape.before[axis] + tap  # of the first output
            skipped = max(0, -((at - low) // stride))
            end = min(count, -(-(high - at) // stride))
            if end > skipped:
                begin = at + skipped * stride - low
                yield slice(skipped, end), slice(begin, begin + (end - skipped - 1) * stride + 1, stride)
