"""Tiled FFT convolution (overlap-save) in compiled code: SIMD lanes hold 16 channels in all stages.

Method   Tiles of 4 to 32 a side, chosen per axis, overlap by k - 1. For a group of tiles:
         forward   per plane of a tile, in L1 or L2: real transforms along x, then y, straight-line code;
         multiply  per column of frequencies (fixed x, y), in L2: the kernels' spectra, unless they are kept; for each
                   chunk of tiles a transform along z, per frequency a product [tiles x fin] @ [fin x fout] in
                   registers, and the inverse along z;
         inverse   per plane: inverse along y (the n - k + 1 lines of the output), along x, bias, activation, scatter;
         pool      replaces inverse if pooling into fragments is fused: per tile and block of channels the same into L2,
                   then the maxima of the windows, each into its fragment. Such tiles overlap by k - 1 + p - 1.
Kernels  kept=0: the kernels transformed along x are resident; the rest is computed again for every group, which costs a
         few per cent of the product from 64 tiles on, and within 10 % of reading them from memory either way.
         kept=1: the whole spectra are resident, for images of few tiles.
Memory   The spectra of one group, a block of LANES channels at a time, in place from forward to inverse; caches of each
         worker; resident kernels.
Bound    The product: 89 % of the registers' peak in cache (benchmarks/results/stages-*), then memory: the spectra are
         written and read twice.
Products In float32, or on a unit for bfloat16: tiled_products.py.
Source   Overlap-save: Oppenheim, Schafer, Discrete-Time Signal Processing, 8.7. Per-frequency products: Mathieu,
         Henaff, LeCun 2014. Pruned kernel transforms: Zlateski, Lee, Seung, ZNNi (SC16), III.
Tested   tests/kernels/cpu/test_conv.py, tests/kernels/cpu/test_native.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ALIGNMENT, Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_fp32_or_bf16
from znnpy.kernels.cpu.activations import code_of
from znnpy.kernels.cpu.epilogue import activate_output, overflow
from znnpy.kernels.cpu.native.library import LANES, blocks, library, why_not
from znnpy.kernels.cpu.tiled_arguments import Channels, Tiling, input_blocks
from znnpy.kernels.cpu.tiled_products import (
    COST_UNITS,
    DIVIDE_FLOPS,
    PRODUCTS,
    function_address,
    kernel_bytes,
    left_bytes,
    products_of,
    products_worth,
    whole_groups,
    words_of,
)
from znnpy.kernels.cpu.tiled_variants import (
    NOT_UPSAMPLED,
    SIDES,
    Upsampled,
    part_of,
    reach_of,
    tiled_variants,
)
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32, ConvShape, Vec3, ceil_divide, valid

if TYPE_CHECKING:
    from znnpy.graph_shapes import GraphConvShape
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

CHUNK = 512  # points along z, over all tiles, multiplied at once: they and the kernels of a column stay in L2
BLOCK = 2 * LANES * FLOAT32  # bytes of a block of complex numbers
STREAM_BYTES = 2**23  # larger spectra are written past the caches
TOGETHER = 64  # groups whose units the workers take from shared counters, without further synchronisation
PARTS = 16  # parts of a stage that each worker takes, one after the other
STAGE_BYTES = 64  # size of Stage in tiled.hpp
CALL_BYTES = 2**14  # Python memory that calls into the library take, per worker
MAXIMA_FLOPS = 16.0  # cost of pooling per result besides moving it, in flops of a transform
CALL_FLOPS = 10e9  # per call into the library; the stop flag is checked between calls


GROUP_BYTES = ctypes.sizeof(Tiling) + 3 * STAGE_BYTES  # arguments and counters of one group in a run


def _panels(count: int) -> int:
    """Return the number of panels for `count` blocks of output channels, as panel() in vector.hpp."""
    return 2 if count == 4 else -(-count // 3)


class _Sizes(NamedTuple):
    """Positions of the tiles of one shape, and their cost, for groups of any size."""

    tile: Vec3
    span: Vec3  # results of a whole tile: tile - k + 1
    step: Vec3  # outputs of a whole tile: span - p + 1
    counts: Vec3  # tiles along each axis
    tiles: int  # tiles in all images
    columns: int  # frequencies (x, y)
    kernel_bytes: int  # kernel spectra of one column
    tile_pitch: int  # bytes from tile to tile of a column
    low_columns: int  # of the part that is upsampled
    low_tile_pitch: int
    point_blocks: int  # blocks of a worker per point of a column: its input and a panel of results
    plane_bytes: int  # per worker, forward and inverse
    pool_bytes: int  # per worker, pooling
    bias_bytes: int
    along_x_bytes: int  # kernels transformed along x alone
    forward: Work
    inverse: Work
    along_z: float  # operations, maxima included
    kernels: float  # operations for a group whose kernels are not kept
    products: float  # operations
    moved: float  # bytes of spectra moved for the products


@lru_cache(maxsize=1)  # groups of several sizes are requested one after the other
def _sizes(shape: ConvShape, tile: Vec3, fin: int, part: Upsampled) -> _Sizes:
    """Return the sizes of an input of `fin` blocks of channels, of which a part may be upsampled."""
    tz, ty, tx = tile
    span = valid(tile, shape.k)
    mz, my, mx = span
    step = valid(span, shape.pool)
    assert not any(size % factor for size, factor in zip(step, part.factor, strict=True)), "tiles begin on whole voxels"
    plain = fin - part.blocks
    transformed = plain + part.blocks * part.share  # blocks of the size of a tile
    lz, ly, lx = (size // factor for size, factor in zip(tile, part.factor, strict=True))
    counts = ceil_divide(valid(shape.unpooled, shape.pool), step)
    tiles = shape.batch * prod(counts)
    fout = blocks(shape.fout)
    half, lanes_in, lanes_out = tx // 2 + 1, LANES * transformed, LANES * fout
    columns = ty * half
    spectra = 2.0 * FLOAT32 * columns * tiles  # bytes of one plane of one channel
    forward = lanes_in * tz * (2.5 * ty * tx * log2(tx) + 5.0 * half * ty * log2(ty)) * tiles
    inverse = lanes_out * mz * (2.5 * my * tx * log2(tx) + 5.0 * half * ty * log2(ty)) * tiles
    along_z = 5.0 * columns * tz * log2(tz) * tiles * (lanes_in + lanes_out)
    maxima = lanes_out * mz * my * mx * tiles * MAXIMA_FLOPS if shape.pools else 0.0
    per_kernel = 8.0 * shape.k[0] * shape.k[1] + 5.0 * tz * log2(tz)
    pooling = my * mx + shape.pool[0] * step[1] * step[2]
    return _Sizes(
        tile=tile,
        span=span,
        step=step,
        counts=counts,
        tiles=tiles,
        columns=columns,
        kernel_bytes=tz * (shape.fin * fout + _panels(fout)) * BLOCK,
        tile_pitch=max(tz * plain, mz * fout) * BLOCK,
        low_columns=ly * (lx // 2 + 1) if part.blocks else 0,
        low_tile_pitch=lz * part.blocks * BLOCK,
        point_blocks=fin + min(fout, 3),
        plane_bytes=columns * BLOCK,
        pool_bytes=columns * BLOCK + pooling * LANES * FLOAT32 if shape.pools else 0,
        bias_bytes=FLOAT32 * lanes_out,
        along_x_bytes=_along_x_bytes(shape.fin, shape.fout, shape.k, tile),
        forward=Work("lane_fft", forward, shape.itemsize * shape.fin * prod(tile) * tiles + spectra * tz * lanes_in),
        inverse=Work("lane_fft", inverse, spectra * mz * lanes_out + 2.0 * shape.out_bytes),
        along_z=along_z + maxima,
        kernels=columns * shape.fin * lanes_out * per_kernel,
        products=8.0 * columns * tz * tiles * shape.fin * lanes_out,
        moved=spectra * (tz * lanes_in + mz * lanes_out),
    )


class _Groups(NamedTuple):
    """Groups of the tiles of one shape, and the size of their spectra."""

    sizes: _Sizes
    kept: bool  # whether the spectra of all kernels are kept
    group: int  # tiles of the largest group
    groups: int
    chunk: int  # tiles whose columns are multiplied at once
    column_pitch: int  # bytes
    low_column_pitch: int
    column_bytes: int  # per worker, multiplying
    kernel_bytes: int  # kernel spectra of one column, or their words
    words: int  # words of bfloat16 that values are divided into for the products; 0: they are float32


@lru_cache(maxsize=1)  # footprint and work of a variant are requested one after the other
def _grouped(shape: ConvShape, variant: Variant, fin: int) -> _Groups:
    s = _sizes(shape, variant.size("tile"), fin, part_of(variant))
    kept, tz = variant.count("kept") > 0, s.tile[0]
    groups = -(-s.tiles // variant.count("group"))
    group = -(-s.tiles // groups)
    chunk, words = min(max(8, CHUNK // tz), group), words_of(variant)
    kernels, held = s.kernel_bytes, chunk * s.point_blocks + 2  # blocks per point of a column
    if words:
        chunk = whole_groups(chunk)
        kernels, held = kernel_bytes(shape.fin, shape.fout, tz, words), chunk * max(fin, blocks(shape.fout)) + 1
    return _Groups(
        sizes=s,
        kept=kept,
        group=group,
        groups=groups,
        chunk=chunk,
        column_pitch=group * s.tile_pitch + BLOCK,  # an odd number of blocks: columns spread over the sets of a cache
        low_column_pitch=group * s.low_tile_pitch + BLOCK,
        column_bytes=tz * held * BLOCK + (left_bytes(shape.fin, words) if words else 0) + (0 if kept else kernels),
        kernel_bytes=kernels,
        words=words,
    )


class Resident(NamedTuple):
    """The prepared weights."""

    kernels: Array
    bias: Array  # padded to whole blocks


@dataclass(frozen=True, slots=True)
class ConvFftLanes:
    """Tiled FFT convolution in compiled code: for kernels from 2 on; with few maps other methods are faster."""

    name: str = "cpu.conv.fft_lanes"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "kernels of 2 or more: the tiled FFT with channels in SIMD lanes (needs the compiled kernels)"
    source: str = "overlap-save; per-frequency products after Mathieu, Henaff, LeCun 2014; pruning after ZNNi III"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if not isinstance(shape, ConvShape):
            return f"computes convolutions, not {shape.kind}"
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see cpu.conv.direct"
        if max(shape.k) > SIDES[-1]:
            return f"a kernel of {max(shape.k)} is larger than the largest tile of {SIDES[-1]}: see cpu.conv.fft_data"
        if shape.pools and shape.activation == "softmax":
            return "softmax needs all maps of a voxel before the maxima of the windows are taken"
        if max(reach_of(shape)) > SIDES[-1]:
            return f"kernel and window reach {max(reach_of(shape))}, beyond the largest tile of {SIDES[-1]}"
        return why_not_fp32_or_bf16(shape) or why_not_halves(shape) or why_not(machine)

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        shape = as_conv(shape)
        return tiled_variants(shape, products=products_worth(shape.precision, shape.fin, shape.fout, machine))

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        shape = as_conv(shape)
        softmax = shape.activation == "softmax" and _activated_after(shape)
        sums = 2 * FLOAT32 * shape.out[2] if softmax else 0  # over the maps of a voxel
        found = tiled_footprint(shape, variant, threads, blocks(shape.fin))
        return replace(found, reads_carried=True, allowance=found.allowance + threads * sums)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        return tiled_work(shape, variant, blocks(shape.fin))

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident:
        assert weights is not None
        return tiled_kernels(weights, variant, pool)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        return _Step(resident, as_conv(shape), variant, pool)


def why_not_halves(shape: ConvShape | GraphConvShape) -> str | None:
    """Return None if a block of channels of a line is all that an activation needs in bf16, else a reason."""
    if shape.precision == "bf16" and shape.activation == "softmax" and shape.fout > LANES:
        return f"computes a softmax of {LANES} maps at most in bf16, of one block: more would be rounded before"
    return None


def _activated_after(shape: ConvShape) -> bool:
    """Return whether an activation follows in a pass of its own; values in bfloat16 would be rounded before it."""
    return shape.activation not in ("none", "relu") and shape.precision != "bf16"


def tiled_footprint(shape: ConvShape, variant: Variant, threads: int, fin: int) -> Footprint:
    """Return the bytes for an input of `fin` blocks of channels, without those of activations other than ReLU."""
    g = _grouped(shape, variant, fin)
    s = g.sizes
    preparing = s.along_x_bytes if g.kept else 0
    return Footprint(
        resident=(s.columns * g.kernel_bytes if g.kept else s.along_x_bytes) + s.bias_bytes,
        scratch=(
            Scratch("spectra", s.columns * g.column_pitch),
            *([Scratch("low", s.low_columns * g.low_column_pitch)] if s.low_columns else ()),
            Scratch("blocks", threads * max(s.plane_bytes, s.pool_bytes, g.column_bytes)),
        ),
        allowance=ALIGNMENT + threads * CALL_BYTES + TOGETHER * GROUP_BYTES + preparing,
    )


def tiled_work(shape: ConvShape, variant: Variant, fin: int) -> Sequence[Work]:
    """Return the work for an input of `fin` blocks of channels."""
    g = _grouped(shape, variant, fin)
    s = g.sizes
    kernels = 0.0 if g.kept else g.groups * s.kernels
    read = float(g.groups * s.columns * g.kernel_bytes) if g.kept else 0.0
    product = Work("lane_product", s.products, s.moved + read)
    if g.words:
        points = float(s.columns * s.tile[0])
        divided = points * shape.fin * (s.tiles * fin / blocks(shape.fin) + (0 if g.kept else g.groups) * shape.fout)
        kernels += 2 * DIVIDE_FLOPS * g.words * divided
        flops = PRODUCTS[g.words] * 8 * points * s.tiles * LANES * blocks(shape.fin) * LANES * blocks(shape.fout)
        product = Work(COST_UNITS[products_of(variant).unit], flops, s.moved + read)
    return s.forward, Work("lane_fft", s.along_z + kernels, 0.0), product, s.inverse


def tiled_kernels(weights: ConvWeights, variant: Variant, pool: ThreadPool) -> Resident:
    """Return the kernels transformed for the tiles of a variant."""
    fout, fin, kz, ky, kx = weights.weight.shape
    tile, part = variant.size("tile"), part_of(variant)
    # An image of one tile: the kernels do not depend on the images.
    sizes = _sizes(ConvShape(1, fin, fout, tile, (kz, ky, kx)), tile, blocks(fin), NOT_UPSAMPLED)
    weight = np.ascontiguousarray(weights.weight)
    lib = library(this_machine().simd)
    words = words_of(variant)
    tiling = Tiling(fin=fin, fout=fout, low_from=part.first, low_to=part.end, words=words)
    tiling.k[:], tiling.tile[:], tiling.factor[:] = (kz, ky, kx), tile, part.factor
    along_x = aligned_bytes(_along_x_bytes(fin, fout, (kz, ky, kx), tile))

    def transform(lo: int, hi: int, worker: int) -> None:
        del worker
        for map in range(lo, hi):
            pool.check()
            lib.znnpy_tiled_kernels(
                ctypes.byref(tiling),
                _address(weight),
                _address(along_x),
                ctypes.c_int64(map),
                ctypes.c_int64(map + 1),
            )

    pool.each(transform, fin)
    bias = np.zeros(LANES * blocks(fout), np.float32)
    bias[:fout] = weights.bias
    if not variant.count("kept"):
        return Resident(along_x.view(np.float32), bias)
    column = kernel_bytes(fin, fout, tile[0], words) if words else sizes.kernel_bytes
    kept = aligned_bytes(sizes.columns * column)
    tiling.kernels = along_x.ctypes.data

    def finish(lo: int, hi: int, worker: int) -> None:
        del worker
        for column in range(lo, hi):
            pool.check()
            lib.znnpy_tiled_spectra(
                ctypes.byref(tiling), _address(kept), ctypes.c_int64(column), ctypes.c_int64(column + 1)
            )

    pool.each(finish, sizes.columns)
    return Resident(kept.view(np.float32), bias)


def _along_x_bytes(fin: int, fout: int, k: Vec3, tile: Vec3) -> int:
    """Return the bytes of the kernels transformed along x: (x, block, fin, kz, ky) blocks."""
    return (tile[2] // 2 + 1) * blocks(fout) * fin * k[0] * k[1] * BLOCK


def _address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class TiledConvolution:
    """The convolution of one shape, of an input of `fin` blocks of channels.

    tiling  the arguments of a call, to be copied for each run: steps may run at the same time.
    """

    def __init__(self, resident: Resident, shape: ConvShape, variant: Variant, fin: int, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident
        g, part = _grouped(shape, variant, fin), part_of(variant)
        self._sizes = s = g.sizes
        self._library = library(this_machine().simd)
        self._groups = [(lo, hi - lo) for lo, hi in pairwise(s.tiles * i // g.groups for i in range(g.groups + 1))]
        self.tiling = t = Tiling(
            fin=shape.fin,
            fout=shape.fout,
            in_=fin,
            chunk=g.chunk,
            low_in=part.blocks,
            low_from=part.first,
            low_to=part.end,
            column_pitch=g.column_pitch // FLOAT32,
            tile_pitch=s.tile_pitch // FLOAT32,
            low_column_pitch=g.low_column_pitch // FLOAT32,
            low_tile_pitch=s.low_tile_pitch // FLOAT32,
            relu=shape.activation == "relu",
            kept=g.kept,
            stream=s.columns * g.column_pitch > STREAM_BYTES,
            half=shape.precision == "bf16",
            kernels=resident.kernels.ctypes.data,
            words=g.words,
            multiply=function_address(products_of(variant).unit) if g.words else None,
            bias=resident.bias.ctypes.data,
        )
        t.n[:], t.k[:], t.p[:], t.tile[:], t.step[:] = shape.n, shape.k, shape.pool, s.tile, s.step
        t.counts[:], t.held[:], t.factor[:] = s.counts, shape.n, part.factor
        tz = s.tile[0]
        lanes = LANES * fin * LANES * blocks(shape.fout)
        unit_flops = (
            100.0 * s.columns * LANES * fin,  # a plane
            8.0 * tz * g.group * lanes,  # a column
            100.0 * s.columns * LANES * (s.span[0] if shape.pools else blocks(shape.fout)),  # a tile's block; a plane
        )
        units = (g.group * tz, s.columns, g.group * (blocks(shape.fout) if shape.pools else s.step[0]))
        most = [max(1, int(CALL_FLOPS // flops)) for flops in unit_flops]
        grain = [max(1, min(n // (PARTS * pool.threads), m)) for n, m in zip(units, most, strict=True)]
        self._most, self._grain = (ctypes.c_int64 * 3)(*most), (ctypes.c_int64 * 3)(*grain)

    def run(self, t: Tiling, inputs: Sequence[Channels], out: Array, scratch: Mapping[str, Bytes]) -> None:
        """Compute all tiles; `t` is a copy of `tiling` with what else a run needs."""
        s, pool, run = self._sizes, self._pool, self._library.znnpy_tiled_run
        channels = (Channels * len(inputs))(*inputs)
        t.channels, t.spectra = ctypes.addressof(channels), scratch["spectra"].ctypes.data
        t.low = scratch["low"].ctypes.data if t.low_in else None
        t.out, t.out_image = out.ctypes.data, out.strides[0] // out.itemsize
        buffers = scratch["blocks"].reshape(pool.threads, -1)
        bad = (ctypes.c_int64 * pool.threads)()
        for start in range(0, len(self._groups), TOGETHER):
            some = self._groups[start : start + TOGETHER]
            groups = (Tiling * len(some))()
            for index, (t.first, t.tiles) in enumerate(some):
                groups[index] = t
            stages = aligned_bytes(3 * len(some) * STAGE_BYTES)
            stages.fill(0)
            shared = groups, ctypes.c_int64(len(some))
            counters = _address(stages), self._grain, self._most

            def piece(lo: int, hi: int, worker: int, shared: Any = shared, counters: Any = counters) -> None:
                del lo, hi  # units are taken from the counters: no worker waits for another while any are left
                own = _address(buffers[worker]), *counters, ctypes.byref(bad, worker * ctypes.sizeof(ctypes.c_int64))
                while run(*shared, *own):
                    pool.check()

            pool.each(piece, pool.threads)
            if any(bad):
                raise overflow(sum(bad), s.tiles * prod(s.span) * self._shape.fout)


class _Step:
    """The convolution of one shape."""

    def __init__(self, resident: Resident, shape: ConvShape, variant: Variant, pool: ThreadPool) -> None:
        self._shape, self._pool = shape, pool
        self._tiles = TiledConvolution(resident, shape, variant, blocks(shape.fin), pool)
        self._tiles.tiling.ending.bf16 = shape.precision == "bf16"
        if shape.activation not in ("none", "relu") and not _activated_after(shape):
            self._tiles.tiling.ending.function = code_of(shape.activation)

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes], before: Array | None = None) -> None:
        t = Tiling.from_buffer_copy(self._tiles.tiling)
        t.x_image = x.strides[0] // x.itemsize
        if before is not None:
            t.before, t.before_image, t.carried = before.ctypes.data, before.strides[0] // x.itemsize, before.shape[1]
        self._tiles.run(t, input_blocks(x, self._shape.fin), out, scratch)
        if _activated_after(self._shape):  # tanh and sigmoid are monotonic: they may follow the maximum of a pooling
            activate_output(self._shape.activation, out, self._pool)
