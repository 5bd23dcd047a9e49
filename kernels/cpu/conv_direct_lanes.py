"""Direct convolution in compiled code: sums in registers, output channels in SIMD lanes; also for first layers.

Method   A block of neighbouring outputs of a line times a panel of one to three blocks of LANES channels is summed in
         registers over all taps, given as a list of offsets: per tap the panel's kernels are loaded, and the input of
         each voxel is broadcast to a vector. Bias and ReLU follow in registers; large outputs are written past the
         caches (streaming stores), so that memory is not read before it is overwritten.
         If pooling into fragments is fused, a worker takes some lines and columns of windows and follows them along z:
         it computes lines of outputs and their maxima over x and y. From plane p_z on it also computes the maxima over
         z, and writes each into its fragment.
Memory   The kernels, in the order they are read. Scratch only for pooling: those lines and planes, in L2.
Bound    Compute: 500 to 540 GFLOP/s, the limit of the registers, from 100 taps (k^3 * fin) on; with fewer, memory: 44
         GB/s written at k = 2, 1 -> 80 maps (2 Zen 5 cores, AVX-512, 2026-11-21). 1.4 to 2.5 times as fast as the BLAS
         products in conv_direct.py for k = 2 and 3, 16 to 80 maps; with k = 3 and many maps the FFT is faster.
Source   Zlateski, Lee, Seung, ZNNi (SC16), IV-A.1 (direct); register blocking as in Goto, van de Geijn 2008.
Tested   tests/kernels/cpu/test_conv.py, tests/kernels/cpu/test_conv_pool.py, tests/kernels/cpu/test_native.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ALIGNMENT, Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_fp32
from znnpy.kernels.cpu.epilogue import activate_output, overflow
from znnpy.kernels.cpu.native.library import LANES, STREAM_BYTES, blocks, library, streams, why_not
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32, ConvShape

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

FEW = 4  # most input maps of a first layer
MOST_BLOCKS = 3  # blocks of channels in a panel, as in direct.cpp
SUMS = 24  # registers that hold sums
LEAST_SUMS = 8  # fewest sums at a time: below it, each product waits for the one before
ENDING_TAPS = 8  # taps that take as long as starting and ending a block of outputs
THROUGH_CACHES = 3  # time to write a large output through the caches, relative to streaming stores
RUN = 48  # most windows of a row that are computed together
ROWS = 16  # most rows of windows
PLANES_BYTES = 384 * 1024  # size of a worker's maxima, which stay in L2
MAXIMA_FLOPS = 40.0  # cost of pooling per value, besides moving it
OFFSET = 8  # bytes of a tap's offset
CALL_BYTES = 2**14  # Python memory that calls into the library take, per worker
CALL_FLOPS = 10e9  # per call into the library; the stop flag is checked between calls


class Direct(ctypes.Structure):
    """The arguments of a call: struct Direct in direct.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("n", "k", "p")),
        *((name, ctypes.c_int64) for name in ("rows", "run")),
        *((name, ctypes.c_int64) for name in ("fin", "fout", "x_image", "out_image", "relu", "stream")),
        *((name, ctypes.c_void_p) for name in ("x", "out", "kernels", "bias", "offsets")),
        ("slope", ctypes.c_double),
    )


class Resident(NamedTuple):
    """The prepared weights."""

    kernels: Array  # panel by panel (z, y, x, fin, block, lane)
    bias: Array  # padded to whole blocks


def panels(count: int) -> Iterator[tuple[int, int]]:
    """Yield the panels of `count` blocks of channels: (first block, blocks); as panel() in vector.hpp."""
    first = 0
    while first < count:
        left = count - first
        width = 2 if left == 4 else min(left, MOST_BLOCKS)
        yield first, width
        first += width


class _DirectLanes:
    """The common part of the two primitives, which differ in the layers that they accept."""

    __slots__ = ()

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = as_conv(shape)
        taps, lanes = shape.fin * prod(shape.k), LANES * blocks(shape.fout)
        sums = 2 * FLOAT32 * shape.out[2] if shape.activation == "softmax" else 0  # over the maps of a voxel
        windows = _windows(shape)
        workers = min(threads, windows.units)
        return Footprint(
            resident=FLOAT32 * lanes * (taps + 1) + OFFSET * taps,
            scratch=(Scratch("windows", workers * windows.worker_bytes),) if shape.pools else (),
            allowance=ALIGNMENT + workers * (CALL_BYTES + sums),
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_conv(shape)
        windows = _windows(shape)
        mx = windows.line  # outputs
        sums = 0  # registers of a line, summed over its blocks, including registers idle because of latency
        for _, width in panels(blocks(shape.fout)):
            parts = -(-mx // _voxels(width))
            sums += parts * max(LEAST_SUMS, -(-mx // parts) * width)
        taps = shape.fin * prod(shape.k) + ENDING_TAPS
        lines = windows.lines
        through = THROUGH_CACHES if shape.out_bytes > STREAM_BYTES else 2
        moved = shape.in_bytes + shape.out_bytes * (1 if streams(shape.fout, shape.out_bytes) else through)
        maxima = MAXIMA_FLOPS * lines * mx * LANES * blocks(shape.fout) if shape.pools else 0.0
        return (Work("lane_stream", 2.0 * lines * sums * LANES * taps + maxima, moved),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident:
        del variant, pool
        assert weights is not None
        fout, fin, *k = weights.weight.shape
        taps, count = fin * prod(k), blocks(fout)
        kernels = aligned_bytes(FLOAT32 * taps * count * LANES).view(np.float32)
        kernels[...] = 0
        bias = np.zeros(LANES * count, np.float32)
        bias[:fout] = weights.bias
        for first, width in panels(count):
            panel = kernels[first * LANES * taps : (first + width) * LANES * taps].reshape(*k, fin, width * LANES)
            maps = weights.weight[first * LANES : (first + width) * LANES]
            panel[..., : len(maps)] = maps.transpose(2, 3, 4, 1, 0)
        return Resident(kernels, bias)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, as_conv(shape), pool)


@dataclass(frozen=True, slots=True)
class ConvFirst(_DirectLanes):
    """Direct convolution for first layers: one to four input maps, any number of output maps."""

    name: str = "cpu.conv.first"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "one to four input maps, kernels up to about 5 (needs the compiled kernels)"
    source: str = "ZNNi IV-A.1; register blocking after Goto, van de Geijn 2008"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := _why_neither(shape):
            return reason
        shape = as_conv(shape)
        if shape.fin > FEW:
            return f"takes up to {FEW} input maps, not {shape.fin}: see cpu.conv.direct_lanes"
        return why_not(machine)


@dataclass(frozen=True, slots=True)
class ConvDirectLanes(_DirectLanes):
    """Direct convolution of more than four maps: for small kernels and small images."""

    name: str = "cpu.conv.direct_lanes"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "kernels of 1 and 2, or few maps (needs the compiled kernels)"
    source: str = "ZNNi IV-A.1; register blocking after Goto, van de Geijn 2008"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := _why_neither(shape):
            return reason
        shape = as_conv(shape)
        if shape.fin <= FEW:
            return f"is for more than {FEW} input maps, not {shape.fin}: see cpu.conv.first"
        return why_not(machine)


def _why_neither(shape: LayerShape) -> str | None:
    if not isinstance(shape, ConvShape):
        return f"computes convolutions, not {shape.kind}"
    if shape.pools and shape.activation == "softmax":
        return "softmax needs all maps of a voxel before the maxima of the windows are taken"
    return why_not_fp32(shape)


class _Windows(NamedTuple):
    """The work unit of a worker: one line of outputs, or with pooling some rows and columns of windows."""

    units: int
    rows: int  # rows of windows
    run: int  # windows of a row
    line: int  # outputs computed in a row
    lines: int  # lines computed in total
    worker_bytes: int  # scratch of a worker


def _windows(shape: ConvShape) -> _Windows:
    if not shape.pools:
        lines = prod(shape.out_shape[:3])
        return _Windows(lines, 1, shape.out[2], shape.out[2], lines, 0)
    (pz, py, px), (mz, my, mx) = shape.pool, shape.unpooled
    voxel = FLOAT32 * LANES * blocks(shape.fout)
    along_y, along_x = my - py + 1, mx - px + 1
    run = min(along_x, RUN)
    rows = max(1, min(along_y, ROWS, PLANES_BYTES // (pz * run * voxel)))
    run, rows = -(-along_x // -(-along_x // run)), -(-along_y // -(-along_y // rows))  # parts of nearly equal size
    units = shape.batch * -(-along_y // rows) * -(-along_x // run)
    buffer = (py * (run + px - 1) + pz * rows * run) * voxel
    return _Windows(units, rows, run, run + px - 1, units * mz * (rows + py - 1), buffer)


def _voxels(width: int) -> int:
    """Return the most outputs summed at once with a panel of `width` blocks, as voxels_with() in direct.cpp."""
    return SUMS // max(2, width)


def _offsets(shape: ConvShape) -> npt.NDArray[np.int64]:
    """Return the floats from an output's first input to the input of each tap, (z, y, x, fin)."""
    (_, ny, nx), fin = shape.n, shape.fin
    taps = product(*map(range, (*shape.k, fin)))
    return np.fromiter((((z * ny + y) * nx + x) * fin + f for z, y, x, f in taps), np.int64)


class _Step:
    """The convolution of one shape."""

    def __init__(self, resident: Resident, shape: ConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        self._offsets = _offsets(shape)
        self._library = library(this_machine().simd)
        self._direct = d = Direct(
            fin=shape.fin,
            fout=shape.fout,
            relu=shape.activation == "relu",
            kernels=resident.kernels.ctypes.data,
            bias=resident.bias.ctypes.data,
            offsets=self._offsets.ctypes.data,
        )
        self._windows = w = _windows(shape)
        d.n[:], d.k[:], d.p[:], d.rows, d.run = shape.n, shape.k, shape.pool, w.rows, w.run
        unit_flops = 2.0 * w.lines // w.units * w.line * LANES * blocks(shape.fout) * len(self._offsets)
        self._most = max(1, int(CALL_FLOPS // unit_flops))

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, pool, lib, w = self._shape, self._pool, self._library, self._windows
        buffers = scratch["windows"].reshape(-1, w.worker_bytes) if shape.pools else None
        d = Direct.from_buffer_copy(self._direct)  # a copy, since steps may run at the same time
        d.x, d.out = x.ctypes.data, out.ctypes.data
        d.x_image, d.out_image = x.strides[0] // FLOAT32, out.strides[0] // FLOAT32
        d.stream = streams(shape.fout, shape.out_bytes) and (d.out | out.strides[0]) % ALIGNMENT == 0
        bad = [0] * pool.threads

        def piece(lo: int, hi: int, worker: int) -> None:
            for first in range(lo, hi, self._most):
                pool.check()
                some = ctypes.c_int64(first), ctypes.c_int64(min(hi, first + self._most))
                if buffers is None:
                    bad[worker] += lib.znnpy_direct(ctypes.byref(d), *some)
                else:
                    buffer = ctypes.c_void_p(buffers[worker].ctypes.data)
                    bad[worker] += lib.znnpy_direct_pool(ctypes.byref(d), buffer, *some)

        pool.each(piece, w.units)
        if sum(bad):
            raise overflow(sum(bad), w.lines * w.line * shape.fout)
        # tanh and sigmoid are monotonic, so they may follow the maximum of a pooling.
        activate_output(shape.activation, out, pool)
