"""Maxima over windows: max-pooling, max-pooling fragments (MPF), and the max-filter.

Method   Separable: a few lines of one plane at a time, so that everything stays in L2. The maximum is taken over the
         window's planes, then over its lines, then over its columns, straight into the output. A fragment takes every
         p-th position, so the last maximum writes each fragment's lines in place and nothing is copied.
Shapes   Fragment (oz * py + oy) * px + ox of image s is output image s * P + fragment; its voxel i is the maximum of
         the window at i * p + o; (n + 1) mod p = 0 for fragments, n mod p = 0 for plain pooling.
Bound    Memory: the input is read once (its planes up to pz times, from L2 or L3), the output written once.
Exact    A maximum does not round. NaN in, NaN out.
Source   Zlateski, Lee, Seung, ZNNi (SC16), V; Giusti et al. 2013; Masci et al. 2013.
Tested   tests/kernels/cpu/test_pool.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import (
    Footprint,
    Kind,
    Scratch,
    Variant,
    Windowed,
    Work,
    as_windowed,
    why_not_filter,
    why_not_fp32,
    why_not_fp32_or_bf16,
    why_not_maxout,
    why_not_pooling,
)
from znnpy.kernels.cpu.epilogue import quiet
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import FLOAT32, MaxoutShape, PoolShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

NUMPY_BYTES = 128 * 1024  # upper bound of what numpy's iterators allocate, per thread
LINES_BYTES = 256 * 1024  # a worker's lines between two passes, which stay in L2

# Costs of passes within the cache, in bytes that miss it (2026-11-20, 2 threads on 2 Zen 5 cores, 1 to 80 maps).
CACHED = 5  # a byte in the cache costs a fifth
RUN_BYTES = 150  # cost to start a run of maps that has no neighbour along x: 5 ns
STEP_BYTES = 15  # cost of a single map there: a step of a strided loop
CALL_BYTES = 35_000  # cost of a numpy call, while the other threads wait for the interpreter: 1.2 us
GATHERED_BYTES = 15  # cost of a maximum of two maps of a voxel, one by one


class _Lines(NamedTuple):
    """The division of one shape into pieces of work."""

    step: Vec3  # from one window to the next that is computed
    planes: int  # positions along z, per image
    lines: int  # positions along y, per plane
    block: int  # positions along y at a time; a multiple of p_y for fragments
    over_planes: int  # bytes of a worker's maxima over planes
    worker_bytes: int  # bytes of a worker's maxima over planes, and over planes and lines


def _lines(shape: Windowed) -> _Lines:
    (pz, py, _), (nz, ny, nx) = shape.p, shape.n
    plain = isinstance(shape, PoolShape) and not shape.fragments
    step: Vec3 = shape.p if plain else (1, 1, 1)
    planes, lines = (nz - pz) // step[0] + 1, (ny - py) // step[1] + 1
    unit = py if isinstance(shape, PoolShape) and shape.fragments else 1
    line_bytes = FLOAT32 * nx * shape.f
    block = min(lines, max(1, LINES_BYTES // (line_bytes * unit * step[1])) * unit)
    over_planes = (step[1] * (block - 1) + py) * line_bytes if pz > 1 else 0
    over_lines = block * line_bytes if py > 1 else 0
    over_planes = -(-over_planes // 64) * 64
    return _Lines(step, planes, lines, block, over_planes, -(-(over_planes + over_lines) // 64) * 64)


def _passes_bytes(shape: Windowed) -> float:
    """Return the cost of passes over planes, lines and columns, in bytes that miss the cache."""
    t = _lines(shape)
    (pz, py, px), fragments = shape.p, isinstance(shape, PoolShape) and shape.fragments
    line = FLOAT32 * shape.n[2] * shape.f
    planes = shape.in_shape[0] * t.planes
    blocks = -(-t.lines // t.block)
    lines_read = t.step[1] * t.lines + blocks * (py - t.step[1])  # lines of each plane; blocks overlap
    cached = 3 * planes * line * ((pz - 1) * lines_read + (py - 1) * t.lines)
    last = max(1, px - 1)  # passes over columns
    if fragments or t.step[2] > 1:
        runs = last * shape.out_bytes / (FLOAT32 * shape.f) * (RUN_BYTES if shape.f > 1 else STEP_BYTES)
    else:
        cached += 3 * last * shape.out_bytes
        runs = 0.0
    calls = planes * blocks * (pz - 1 + py - 1 + last * (py * px if fragments else 1))
    return cached / CACHED + runs + CALL_BYTES * calls


class _Maxima:
    """The common part of the three primitives, which differ in where the last maximum is written."""

    __slots__ = ()

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = as_windowed(shape)
        t = _lines(shape)
        workers = min(threads, shape.batch * t.planes * -(-t.lines // t.block))
        nbytes = workers * t.worker_bytes
        return Footprint(scratch=(Scratch("lines", nbytes),) if nbytes else (), allowance=workers * NUMPY_BYTES)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_windowed(shape)
        return (Work("pool", 0.0, shape.in_bytes + shape.out_bytes + _passes_bytes(shape)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> None:
        """Return None: there are no weights."""
        del weights, variant, pool

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(as_windowed(shape), pool)


@dataclass(frozen=True, slots=True)
class PoolMax(_Maxima):
    """Plain max-pooling: one output image per input image."""

    name: str = "cpu.pool.max"
    kind: Kind = "pool"
    version: int = 2
    summary: str = "plain max-pooling with strided output"
    source: str = "definition"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        return why_not_pooling(shape, fragments=False, other="cpu.pool.fragments") or why_not_fp32(shape)


@dataclass(frozen=True, slots=True)
class PoolFragments(_Maxima):
    """Max-pooling fragments: one output image per offset of the window, so that the output stays dense."""

    name: str = "cpu.pool.fragments"
    kind: Kind = "pool"
    version: int = 2
    summary: str = "max-pooling for dense inference: one fragment per offset of the window"
    source: str = "ZNNi V; Giusti et al. 2013; Masci et al. 2013"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        return why_not_pooling(shape, fragments=True, other="cpu.pool.max") or why_not_fp32(shape)


@dataclass(frozen=True, slots=True)
class MaxFilter(_Maxima):
    """The maximum over a window at every position."""

    name: str = "cpu.maxfilter.direct"
    kind: Kind = "maxfilter"
    version: int = 2
    summary: str = "the maximum over a window at every position"
    source: str = "definition, separable"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        return why_not_filter(shape) or why_not_fp32(shape)


class _Step:
    def __init__(self, shape: Windowed, pool: ThreadPool) -> None:
        self._shape, self._pool, self._lines = shape, pool, _lines(shape)

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, t, pool = self._shape, self._lines, self._pool
        blocks = -(-t.lines // t.block)
        store = scratch["lines"].reshape(-1, t.worker_bytes) if "lines" in scratch else None
        write = self._into_fragments if isinstance(shape, PoolShape) and shape.fragments else self._into_image

        def piece(lo: int, hi: int, worker: int) -> None:
            mine = None if store is None else store[worker]
            for unit in range(lo, hi):
                pool.check()
                rest, block = divmod(unit, blocks)
                s, z = divmod(rest, t.planes)
                y = block * t.block
                write(self._over_lines(x[s], z, y, min(t.block, t.lines - y), mine), out, s, z, y)

        pool.each(piece, shape.batch * t.planes * blocks)

    def _over_lines(self, image: Array, z: int, y: int, count: int, store: Bytes | None) -> Array:
        """Return (count, nx, f): maxima over planes and lines of the windows at z and at y, y + 1, ..."""
        t, (pz, py, _), (_, _, nx) = self._lines, self._shape.p, self._shape.n
        sz, sy = t.step[0] * z, t.step[1]
        extent = sy * (count - 1) + py
        lines = image[sz : sz + pz, sy * y : sy * y + extent]
        if pz > 1:
            over_planes = np.ndarray((extent, nx, self._shape.f), np.float32, store)
            _maximum(lines, over_planes)
        else:
            over_planes = lines[0]
        if py == 1:
            return over_planes
        over_lines = np.ndarray((count, nx, self._shape.f), np.float32, store, t.over_planes)
        _maximum([over_planes[d : d + sy * (count - 1) + 1 : sy] for d in range(py)], over_lines)
        return over_lines

    def _into_image(self, lines: Array, out: Array, s: int, z: int, y: int) -> None:
        mx, px, sx = out.shape[3], self._shape.p[2], self._lines.step[2]
        _maximum([lines[:, d : d + sx * (mx - 1) + 1 : sx] for d in range(px)], out[s, z, y : y + len(lines)])

    def _into_fragments(self, lines: Array, out: Array, s: int, z: int, y: int) -> None:
        (pz, py, px), mx = self._shape.p, out.shape[3]
        z, oz = divmod(z, pz)
        first, count = y // py, len(lines) // py
        for oy in range(py):
            for ox in range(px):
                fragment = out[((s * pz + oz) * py + oy) * px + ox, z, first : first + count]
                _maximum([lines[oy::py, ox + d : ox + d + px * (mx - 1) + 1 : px] for d in range(px)], fragment)


def _maximum(arrays: Sequence[Array] | Array, out: Array) -> None:
    """Compute the maximum over `arrays`, element by element."""
    if len(arrays) == 1:
        np.copyto(out, arrays[0])
        return
    np.maximum(arrays[0], arrays[1], out=out)
    for array in arrays[2:]:
        np.maximum(out, array, out=out)


@dataclass(frozen=True, slots=True)
class MaxoutDirect:
    """The maximum over groups of neighbouring maps."""

    name: str = "cpu.maxout.direct"
    kind: Kind = "maxout"
    version: int = 2
    summary: str = "the maximum over groups of neighbouring maps"
    source: str = "Goodfellow et al., Maxout networks, 2013"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        return why_not_maxout(shape) or why_not_fp32_or_bf16(shape)

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        workers = min(threads, shape.in_shape[0] * shape.in_shape[1])
        return Footprint(allowance=workers * NUMPY_BYTES)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        maxima = max(1, shape.of - 1) * prod(shape.out_shape) if isinstance(shape, MaxoutShape) else 0.0
        return (Work("pool", 0.0, shape.in_bytes + shape.out_bytes + GATHERED_BYTES * maxima),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> None:
        """Return None: there are no weights."""
        del weights, variant, pool

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _MaxoutStep:
        del resident, variant
        if not isinstance(shape, MaxoutShape):
            raise TypeError(f"cpu.maxout.direct computes maxouts, not {shape}")
        return _MaxoutStep(shape, pool)


class _MaxoutStep:
    def __init__(self, shape: MaxoutShape, pool: ThreadPool) -> None:
        self._shape, self._pool = shape, pool

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        del scratch
        of, pool, planes = self._shape.of, self._pool, self._shape.n[0]

        @quiet()  # the largest of bfloat16 warns of NaN
        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for unit in range(lo, hi):
                pool.check()
                s, z = divmod(unit, planes)
                _maximum([x[s, z, :, :, member::of] for member in range(of)], out[s, z])

        pool.each(piece, self._shape.batch * planes)
