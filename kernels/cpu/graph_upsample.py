"""Upsampling by whole factors in numpy: nearest and linear.

Method   A few lines of one plane of outputs at a time, so that everything stays in L2. Nearest: lines are repeated
         along x and written to all lines of outputs that they are nearest to. Linear: interpolated between planes,
         between lines and between voxels, one axis after the other.
Memory   The lines between two passes, per thread.
Bound    Memory: the output is written once.
Source   Definition; positions as in PyTorch and ONNX (half_pixel).
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import UpsampleShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.graph_layer import NUMPY_BYTES, WeightlessLayer, float_bytes, given, why_not_kind
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized

    Indices = npt.NDArray[np.int64]

LINES_BYTES = 128 * 1024  # lines of outputs at a time
TABLE_BYTES = 40  # of an output along an axis: tables, and what they are computed from
CACHED = 5  # a byte in the cache costs a fifth of one that misses it
RUN_BYTES = 100  # cost to start a run of maps, in bytes that miss the cache
CALL_BYTES = 35_000  # cost of a numpy call


class Neighbours(NamedTuple):
    """The voxels that outputs along an axis lie between: in[low] * (1 - part) + in[high] * part."""

    low: Indices
    high: Indices
    part: Array


def neighbours(shape: UpsampleShape, axis: int) -> Neighbours:
    """Return the neighbours along an axis; for `nearest` the nearest voxel twice."""
    n, factor = shape.n[axis], shape.factor[axis]
    at = np.arange(shape.m[axis], dtype=np.int64) + shape.first[axis]
    if shape.how == "nearest":
        return Neighbours(at // factor, at // factor, np.zeros(len(at), np.float32))
    position = np.clip((at + 0.5) / factor - 0.5, 0, n - 1)
    low = np.floor(position).astype(np.int64)
    return Neighbours(low, np.minimum(low + 1, n - 1), (position - low).astype(np.float32))


def _block(shape: UpsampleShape) -> int:
    """Return the lines of outputs processed together."""
    return min(shape.m[1], max(1, LINES_BYTES // (FLOAT32 * shape.m[2] * shape.f)))


def _read(shape: UpsampleShape) -> int:
    """Return the most lines of the input that a block reads."""
    return min(shape.n[1], (_block(shape) - 1) // shape.factor[1] + 3)


def _lines_bytes(shape: UpsampleShape) -> int:
    """Return the bytes of one of three buffers for lines, between two passes of `linear`."""
    return float_bytes(max(_read(shape), _block(shape)) * shape.n[2] * shape.f)


def _worker_bytes(shape: UpsampleShape) -> int:
    """Return the bytes of a worker's lines: between passes, or repeated along x."""
    if shape.how == "nearest":
        return float_bytes(_read(shape) * shape.m[2] * shape.f)
    return 3 * _lines_bytes(shape)


@dataclass(frozen=True, slots=True)
class UpsampleRepeat(WeightlessLayer):
    """Upsampling, nearest and linear."""

    name: str = "cpu.upsample.repeat"
    kind: Kind = "upsample"
    version: int = 1
    summary: str = "nearest and linear upsampling by whole factors"
    source: str = "definition, separable"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, UpsampleShape, "upsamplings")

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, UpsampleShape)
        block = _block(shape)
        workers = min(threads, shape.m[0] * -(-shape.m[1] // block))
        # numpy keeps a copy of the taken voxels for a moment
        taken = 0 if shape.how == "nearest" else FLOAT32 * block * shape.m[2] * shape.f
        tables = TABLE_BYTES * sum(shape.m)
        return Footprint(
            scratch=(Scratch("lines", workers * _worker_bytes(shape)),),
            allowance=workers * (NUMPY_BYTES + taken) + tables,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, UpsampleShape)
        passes = 1 if shape.how == "nearest" else 7
        cached = passes * shape.out_bytes
        runs = shape.out_bytes / (FLOAT32 * shape.f) * RUN_BYTES * (1 if shape.how == "nearest" else 2)
        calls = 6 * shape.m[0] * -(-shape.m[1] // _block(shape))
        moved = shape.in_bytes + shape.out_bytes + cached / CACHED + runs + CALL_BYTES * calls
        return (Work("pool", 0.0, moved),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(given(shape, UpsampleShape), pool)


class _Step:
    def __init__(self, shape: UpsampleShape, pool: ThreadPool) -> None:
        self._shape, self._pool = shape, pool
        self._axes = [neighbours(shape, axis) for axis in range(3)]

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, pool = self._shape, self._pool
        block = _block(shape)
        blocks = -(-shape.m[1] // block)
        stores = scratch["lines"].reshape(-1, _worker_bytes(shape))
        compute = self._nearest if shape.how == "nearest" else self._linear

        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                pool.check()
                z, part = divmod(unit, blocks)
                compute(inputs[0], out[z, part * block : (part + 1) * block], z, part * block, stores[worker])

        pool.each(piece, shape.m[0] * blocks)

    def _nearest(self, x: Array, out: Array, z: int, first: int, store: Bytes) -> None:
        """Compute the lines from `first` on of the plane z of outputs."""
        along_z, along_y, along_x = self._axes
        lines = along_y.low[first : first + len(out)]
        top = int(lines[0])
        repeated = np.ndarray((int(lines[-1]) + 1 - top, *out.shape[1:]), np.float32, store)
        np.take(x[along_z.low[z], top : top + len(repeated)], along_x.low, axis=1, out=repeated, mode="clip")
        for offset in range(self._shape.factor[1]):
            target = out[offset :: self._shape.factor[1]]
            if len(target):
                begin = int(lines[offset]) - top
                target[...] = repeated[begin : begin + len(target)]

    def _linear(self, x: Array, out: Array, z: int, first: int, store: Bytes) -> None:
        """Compute the lines from `first` on of the plane z of outputs."""
        along_z, along_y, along_x = self._axes
        line, f = x.shape[2], x.shape[3]
        low, high = along_y.low[first : first + len(out)], along_y.high[first : first + len(out)]
        top, bottom = int(low[0]), int(high[-1]) + 1
        most = _lines_bytes(self._shape)
        planes, term = (np.ndarray((bottom - top, line, f), np.float32, store, i * most) for i in range(2))
        lines = np.ndarray((len(out), line, f), np.float32, store, 2 * most)
        part = along_z.part[z]
        np.multiply(x[along_z.low[z], top:bottom], 1 - part, out=planes)
        if part:
            np.multiply(x[along_z.high[z], top:bottom], part, out=term)
            planes += term
        parts = along_y.part[first : first + len(out), np.newaxis, np.newaxis]
        term = np.ndarray((len(out), line, f), np.float32, store, most)
        np.take(planes, low - top, axis=0, out=lines, mode="clip")
        np.take(planes, high - top, axis=0, out=term, mode="clip")
        lines *= 1 - parts
        term *= parts
        lines += term
        parts = along_x.part[:, np.newaxis]
        np.take(lines, along_x.low, axis=1, out=out, mode="clip")
        out *= 1 - parts
        taken = np.take(lines, along_x.high, axis=1, mode="clip")
        taken *= parts
        out += taken
