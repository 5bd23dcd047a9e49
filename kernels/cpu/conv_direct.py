"""Direct convolution as one matrix product per block of output: BLAS accumulates all taps.

Method   For a block of output voxels that fits the cache, the k^3 * fin inputs of each voxel are gathered as a row of a
         matrix [voxels x taps], which is multiplied by the kernels [taps x fout] straight into the output; bias and
         activation follow in place. With few input maps the runs along a row would be short, so taps become rows: [taps
         x voxels], which BLAS reads transposed. A 1x1x1 kernel multiplies the input in place.
Memory   One block of columns per thread.
Bound    Compute: sgemm at 2 k^3 fin fout flops a voxel, plus the gather (k^3 fin floats a voxel, in cache).
Source   Zlateski, Lee, Seung, ZNNi (SC16), IV-A.1 (direct); lowering: Chellapilla, Puri, Simard 2006.
Tested   tests/kernels/cpu/test_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_fp32, why_not_plain
from znnpy.kernels.cpu.blas import product_bytes
from znnpy.kernels.cpu.epilogue import Epilogue, quiet
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import FLOAT32, ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

BLOCK_BYTES = 1024 * 1024  # size of a worker's columns, which stay in L2 until BLAS has packed them
CACHED = 3  # a copy within the cache is this many times faster than one that misses it
STRIDED = 1.8  # a copy of every second, third, ... float is this many times slower
RUN_FLOATS = 10  # floats copied in the time it takes to start a run
MIN_VOXELS = 32  # fewest rows of a product: below it, reading the kernels limits the speed
SHORT_RUN = 16  # floats; below this, copying runs is slower than copying single floats along x


class _Blocks(NamedTuple):
    size: Vec3  # output voxels of a block: whole lines and planes unless these alone exceed a block
    taps: int  # k^3 * fin
    by_tap: bool  # taps are the rows of the gathered matrix
    gathered: bool  # False: the input is used in place
    counts: Vec3  # blocks along each axis of an image
    worker_bytes: int


def _blocks(shape: ConvShape) -> _Blocks:
    mz, my, mx = (n - k + 1 for n, k in zip(shape.n, shape.k, strict=True))
    taps = shape.k[0] * shape.k[1] * shape.k[2] * shape.fin
    gathered = shape.k != (1, 1, 1)
    voxel_bytes = FLOAT32 * (taps if gathered else shape.fin + shape.fout)
    voxels = max(MIN_VOXELS, BLOCK_BYTES // voxel_bytes)
    if voxels < mx:
        size = 1, 1, voxels
    elif voxels < mx * my:
        size = 1, voxels // mx, mx
    else:
        size = min(mz, voxels // (mx * my)), my, mx
    nbytes = -(-FLOAT32 * prod(size) * taps // 64) * 64 if gathered else 0
    counts = -(-mz // size[0]), -(-my // size[1]), -(-mx // size[2])
    return _Blocks(size, taps, shape.k[2] * shape.fin < SHORT_RUN, gathered, counts, nbytes)


class _Resident(NamedTuple):
    kernels: Array  # (taps, fout), taps in the order (dz, dy, dx, f)
    bias: Array


@dataclass(frozen=True, slots=True)
class ConvDirect:
    """Direct convolution through sgemm: for first layers, last layers and small kernels."""

    name: str = "cpu.conv.direct"
    kind: Kind = "conv"
    version: int = 2
    summary: str = "few maps or small kernels: one matrix product per block, very little memory"
    source: str = "ZNNi IV-A.1; lowering after Chellapilla, Puri, Simard 2006"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        return why_not_fp32(shape) or why_not_plain(shape)

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = as_conv(shape)
        b = _blocks(shape)
        workers = min(threads, shape.batch * prod(b.counts))
        columns = workers * b.worker_bytes
        sums = FLOAT32 * prod(b.size) if shape.activation == "softmax" else 0  # over the maps of a voxel
        return Footprint(
            resident=shape.weight_bytes + Epilogue.nbytes(shape.fout, shape.activation, b.size[2]),
            scratch=(Scratch("columns", columns),) if columns else (),
            allowance=workers * (product_bytes(b.taps, shape.fout, FLOAT32) + sums),
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_conv(shape)
        b = _blocks(shape)
        voxels = float(prod(shape.out_shape[:4]))
        columns = 2 * FLOAT32 * voxels * b.taps / CACHED if b.gathered else 0.0
        if b.by_tap:
            columns *= STRIDED if shape.fin > 1 else 1
        else:
            columns *= 1 + RUN_FLOATS / (shape.k[2] * shape.fin)
        return (
            Work("product", 2.0 * voxels * b.taps * shape.fout, 0.0),
            Work("copy", 0.0, columns + shape.in_bytes + shape.out_bytes),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> _Resident:
        del variant, pool
        assert weights is not None
        fout = len(weights.bias)
        return _Resident(np.ascontiguousarray(weights.weight.transpose(2, 3, 4, 1, 0).reshape(-1, fout)), weights.bias)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, as_conv(shape), pool)


class _Step:
    def __init__(self, resident: _Resident, shape: ConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._blocks = shape, pool, _blocks(shape)
        self._kernels = resident.kernels
        self._epilogue = Epilogue(resident.bias, shape.activation, self._blocks.size[2])

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        b, pool, fout = self._blocks, self._pool, self._shape.fout
        counts = b.counts
        columns = scratch["columns"].reshape(-1, b.worker_bytes) if b.gathered else None
        windows = self._windows(x)

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                pool.check()
                rest, ix = divmod(unit, counts[2])
                rest, iy = divmod(rest, counts[1])
                s, iz = divmod(rest, counts[0])
                box = tuple(slice(i * m, (i + 1) * m) for i, m in zip((iz, iy, ix), b.size, strict=True))
                target = out[s][box]
                voxels = prod(target.shape[:3])
                rows = self._rows(windows[s][box], voxels, None if columns is None else columns[worker])
                np.matmul(rows, self._kernels, out=target.reshape(voxels, fout, copy=False))
                lines = target.reshape(*target.shape[:2], -1, copy=False)
                self._epilogue(lines, lines)

        pool.each(piece, self._shape.batch * prod(counts))

    def _windows(self, x: Array) -> Array:
        """Return a view (S, mz, my, mx, kz, ky, kx, f) of the inputs of every output voxel."""
        s, z, y, voxel, f = x.strides
        shape = self._shape
        return np.lib.stride_tricks.as_strided(
            x, (shape.batch, *shape.out, *shape.k, shape.fin), (s, z, y, voxel, z, y, voxel, f), writeable=False
        )

    def _rows(self, windows: Array, voxels: int, store: Bytes | None) -> Array:
        """Return [voxels x taps]: gathered, or for a 1x1x1 kernel a view of the input."""
        taps = self._blocks.taps
        if store is None:
            return windows.reshape(voxels, taps, copy=False)
        if self._blocks.by_tap:
            by_tap = np.ndarray((*windows.shape[3:], *windows.shape[:3]), np.float32, store)
            np.copyto(by_tap, windows.transpose(3, 4, 5, 6, 0, 1, 2))
            return by_tap.reshape(taps, voxels).T
        rows = np.ndarray(windows.shape, np.float32, store)
        np.copyto(rows, windows)
        return rows.reshape(voxels, taps)
