"""Tiled FFT convolution (overlap-save): small overlapping tiles of the image share one set of kernel spectra.

Method   Tiles of 8 to 32 a side overlap by k - 1. For a group of T tiles:
         forward   per few planes of a tile, in L2: gather, real transforms along x, then y;
         product   per few columns of frequencies (fixed y, x), in L2: transform all T tiles along z, per frequency a
                   product [T x fin] @ [fin x fout], inverse along z;
         inverse   per few planes: inverse along y and x (only the n - k + 1 lines of the output), bias, activation,
                   scatter.
         Channels are innermost throughout: FFTW's vector loop runs over them, and they are contiguous for BLAS.
Kernels  Transformed once per run, pruned (`pruned.py`), conjugated, scaled: (columns, z, fin, fout) complex64.
Memory   Scratch is the spectra of one group, and caches of each worker; kernels: 8 bytes x half the tile x fin x fout.
Bound    The product (compute: T >= 27 or so), then FFTW's real transforms along x, which have no vector codelets.
Source   Overlap-save: Oppenheim, Schafer, Discrete-Time Signal Processing, 8.7. Per-frequency products: Mathieu,
         Henaff, LeCun 2014. Pruning: Zlateski, Lee, Seung, ZNNi (SC16), III.
Tested   tests/kernels/cpu/test_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise, product
from math import gcd, log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.kernels.contract import (
    ALIGNMENT,
    Footprint,
    Kind,
    Scratch,
    Variant,
    Work,
    as_conv,
    why_not_fp32,
    why_not_plain,
)
from znnpy.kernels.cpu.blas import product_bytes
from znnpy.kernels.cpu.epilogue import Epilogue, quiet
from znnpy.kernels.cpu.fft import Transform, like, planning
from znnpy.kernels.cpu.pruned import twiddles
from znnpy.kernels.cpu.tiles import tiles_worth
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import COMPLEX64, FLOAT32, ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

    Complex = npt.NDArray[np.complex64]

SIDES = (8, 12, 16, 20, 32)  # lengths with straight-line vector codelets in FFTW; 24 and 40 run at a third of the rate
GROUPS = (8, 24, 64)  # tiles that share one pass over the kernel spectra
PLANES_BYTES = 192 * 1024  # a worker's planes in the forward and inverse pass: they and their spectra stay in L2
COLUMNS_BYTES = 512 * 1024  # a worker's columns in the product, before and after it
COPIED_BYTES = 704 * 1024  # copied by FFTW per thread, at most: lines, and columns it buffers (60 shapes, 2026-11-21)
PREPARE_BYTES = 2**20  # a worker's half-transformed kernels
PACKING_TILES = 11  # the product of T tiles takes the time of T + 11 at full rate (2026-11-20, 80 x 80, T = 8..128)


class _Tiling(NamedTuple):
    """Positions of the tiles of one shape, and the layout of their spectra."""

    tile: Vec3
    step: Vec3  # outputs of a whole tile: tile - k + 1
    counts: Vec3  # tiles along each axis
    tiles: int  # tiles in all images
    group: int  # tiles of the largest group
    half: int  # frequencies along x
    columns: int  # frequencies (y, x)
    planes: int  # planes of a tile transformed at once, forward; divides the tile
    planes_out: int  # planes of a tile transformed at once, inverse
    block: int  # columns multiplied at once
    pitch_in: int  # complex numbers from plane to plane of a tile's spectra
    pitch_out: int
    worker_bytes: int


def _pitch(count: int) -> int:
    """Return the complex numbers from one plane to the next.

    They fill an odd number of cache lines, so that planes spread over the sets of a cache.
    """
    return 8 * (-(-count // 8) | 1)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=1)  # footprint and work of a variant are requested one after the other
def _tiling(shape: ConvShape, tile: Vec3, tiles_per_group: int) -> _Tiling:
    (tz, ty, tx), (kz, ky, kx), (nz, ny, nx) = tile, shape.k, shape.n
    fin, fout = shape.fin, shape.fout
    step = tz - kz + 1, ty - ky + 1, tx - kx + 1
    counts = -(-(nz - kz + 1) // step[0]), -(-(ny - ky + 1) // step[1]), -(-(nx - kx + 1) // step[2])
    tiles = shape.batch * counts[0] * counts[1] * counts[2]
    groups = -(-tiles // tiles_per_group)
    group = -(-tiles // groups)
    half = tx // 2 + 1
    columns = ty * half
    planes = tz
    while planes > 1 and (tz % planes or FLOAT32 * planes * ty * tx * fin > PLANES_BYTES):
        planes -= 1
    planes_out = max(1, min(step[0], PLANES_BYTES // (FLOAT32 * ty * tx * fout)))
    # A block of columns starts on a cache line: FFTW runs vector code on aligned lines only.
    unit = max(8 // gcd(8, fin), 8 // gcd(8, fout))
    column_bytes = COMPLEX64 * tz * group * (fin + fout)
    block = min(columns, max(1, COLUMNS_BYTES // (column_bytes * unit)) * unit)
    worker_bytes = _round_up(
        max(
            FLOAT32 * planes * ty * tx * fin,
            FLOAT32 * planes_out * step[1] * tx * fout,
            _round_up(COMPLEX64 * tz * group * fin * block) + COMPLEX64 * tz * group * fout * block,
        )
    )
    pitch_in, pitch_out = _pitch(columns * fin), _pitch(columns * fout)
    return _Tiling(
        tile, step, counts, tiles, group, half, columns, planes, planes_out, block, pitch_in, pitch_out, worker_bytes
    )


class _Resident(NamedTuple):
    spectra: Complex  # (columns, tz, fin, fout)
    bias: Array


@dataclass(frozen=True, slots=True)
class ConvFftTiled:
    """Tiled FFT convolution: for many maps in and out, kernels from 3 on; kernel spectra are kept between patches."""

    name: str = "cpu.conv.fft_tiled"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "many maps and kernels of 3 or more: overlapping tiles share kernel spectra kept between patches"
    source: str = "overlap-save; per-frequency products after Mathieu, Henaff, LeCun 2014; pruning after ZNNi III"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        if reason := why_not_fp32(shape) or why_not_plain(shape):
            return reason
        shape = as_conv(shape)
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see cpu.conv.direct"
        if max(shape.k) > SIDES[-1]:
            return f"a kernel of {max(shape.k)} is larger than the largest tile of {SIDES[-1]}: see cpu.conv.fft_data"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del machine
        shape = as_conv(shape)
        found: dict[Variant, None] = {}
        for tile, count in tiles_worth(shape.out, shape.k, SIDES).items():
            for group in GROUPS:
                found[_variant(tile, min(group, shape.batch * count))] = None
        return tuple(found)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        shape = as_conv(shape)
        t = _tiling(shape, variant.size("tile"), variant.count("group"))
        units = -(-t.columns // t.block), t.group * t.tile[0] // t.planes, t.group * -(-t.step[0] // t.planes_out)
        workers = min(threads, max(units))
        group_planes = COMPLEX64 * t.group * t.tile[0]
        scratch = [Scratch("spectra", group_planes * t.pitch_in)]
        if shape.fout != shape.fin:
            scratch.append(Scratch("spectra_out", group_planes * t.pitch_out))
        scratch.append(Scratch("blocks", workers * t.worker_bytes))
        arena = shape.in_bytes + shape.out_bytes + sum(s.nbytes for s in scratch)
        preparing = threads * max(PREPARE_BYTES, _half_transformed_bytes(shape.fout, shape.k, t.tile))
        running = product_bytes(shape.fin, shape.fout, COMPLEX64) + COPIED_BYTES
        return Footprint(
            resident=COMPLEX64 * t.tile[0] * t.columns * shape.fin * shape.fout
            + FLOAT32 * shape.fout
            + Epilogue.nbytes(shape.fout, shape.activation, t.step[2]),
            scratch=tuple(scratch),
            # Kernels are transformed before the arena is touched, so its memory serves as theirs.
            allowance=max(workers * running, preparing - arena),
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        t = _tiling(shape, variant.size("tile"), variant.count("group"))
        tz, ty, tx = t.tile
        frequencies = tz * t.columns
        maps = shape.fin + shape.fout
        # A real transform takes 5/2 n log n flops; along x they count twice, for want of vector codelets.
        transforms = 2.5 * prod(t.tile) * (2 * log2(tx) + log2(ty) + log2(tz)) * maps * t.tiles
        products = 8.0 * frequencies * shape.fin * shape.fout * (t.tiles + PACKING_TILES * -(-t.tiles // t.group))
        moved = FLOAT32 * (prod(t.tile) * shape.fin + prod(t.step) * shape.fout) * t.tiles
        # Spectra are written, read and written in place, and read: as much as three passes that miss the cache.
        moved += 3 * COMPLEX64 * frequencies * maps * t.tiles
        return Work("fft", transforms, 0.0), Work("product", products, 0.0), Work("copy", 0.0, float(moved))

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> _Resident:
        assert weights is not None
        tile = variant.size("tile")
        fout, fin, kz, ky, kx = weights.weight.shape
        columns = tile[1] * (tile[2] // 2 + 1)
        spectra = np.empty((columns, tile[0], fin, fout), np.complex64)
        step = max(1, PREPARE_BYTES // _half_transformed_bytes(fout, (kz, ky, kx), tile))  # input maps at a time

        def transform(lo: int, hi: int, worker: int) -> None:
            del worker
            for unit in range(lo, hi):
                pool.check()
                _transform_kernels(weights.weight, tile, unit * step, min(fin, (unit + 1) * step), spectra)

        pool.each(transform, -(-fin // step))
        return _Resident(spectra, weights.bias)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        return _Step(resident, as_conv(shape), variant, pool)


@cache
def _variant(tile: Vec3, group: int) -> Variant:
    return Variant.of(tile=tile, group=group)


def _half_transformed_bytes(fout: int, k: Vec3, tile: Vec3) -> int:
    """Return the bytes of temporaries in `_transform_kernels`, per input map."""
    kz, ky, kx = k
    return fout * (FLOAT32 * kz * ky * kx + COMPLEX64 * kz * (3 * ky + tile[1]))


def _transform_kernels(weight: Array, tile: Vec3, lo: int, hi: int, spectra: Complex) -> None:
    """Write pruned transforms of the kernels of input maps [lo, hi) to `spectra` (columns, tz, fin, fout)."""
    tz, ty, tx = tile
    fout, fin, kz, ky, kx = weight.shape
    half, pairs = tx // 2 + 1, (hi - lo) * fout
    along_z, along_y, along_x = twiddles(tz, kz), twiddles(ty, ky), twiddles(tx, kx, half)
    kernels = weight[:, lo:hi].transpose(4, 2, 3, 1, 0).reshape(kx, kz * ky * pairs)
    for fx in range(half):
        line = (along_x[fx].real @ kernels + 1j * (along_x[fx].imag @ kernels)).astype(np.complex64, copy=False)
        plane = np.matmul(along_y, line.reshape(kz, ky, pairs))  # (kz, ty, pairs)
        for fy in range(ty):
            target = spectra[fy * half + fx].reshape(tz, fin * fout)
            np.matmul(along_z, plane[:, fy], out=target[:, lo * fout : hi * fout])


class _Plans:
    """The transforms of one worker."""

    def __init__(self, shape: ConvShape, t: _Tiling, groups: Sequence[int]) -> None:
        (tz, ty, tx), half = t.tile, t.half
        my, mz = t.step[1], t.step[0]

        def planes(count: int, pitch: int, maps: int, lines: int = ty) -> npt.NDArray[Any]:
            strides = COMPLEX64 * pitch, COMPLEX64 * half * maps, COMPLEX64 * maps, COMPLEX64
            return like((count, lines, half, maps), strides, np.complex64)

        def real(count: int, lines: int, maps: int) -> npt.NDArray[Any]:
            strides = FLOAT32 * lines * tx * maps, FLOAT32 * tx * maps, FLOAT32 * maps, FLOAT32
            return like((count, lines, tx, maps), strides, np.float32, place=1)

        def columns(tiles: int, block: int, pitch: int, maps: int) -> npt.NDArray[Any]:
            strides = COMPLEX64 * tz * pitch, COMPLEX64 * pitch, COMPLEX64 * maps, COMPLEX64
            return like((tiles, tz, block, maps), strides, np.complex64)

        def factors(tiles: int, block: int, maps: int) -> npt.NDArray[Any]:
            strides = COMPLEX64 * maps, COMPLEX64 * tiles * maps, COMPLEX64 * tz * tiles * maps, COMPLEX64
            return like((tiles, tz, block, maps), strides, np.complex64, place=1)

        fin, fout = shape.fin, shape.fout
        self.forward = Transform(real(t.planes, ty, fin), planes(t.planes, t.pitch_in, fin), (1, 2))
        self.along_y, self.along_x = {}, {}
        for count in {t.planes_out, mz % t.planes_out} - {0}:
            whole = planes(count, t.pitch_out, fout)
            self.along_y[count] = Transform(whole, whole, (1,), "FFTW_BACKWARD")
            wanted = planes(count, t.pitch_out, fout, my)
            self.along_x[count] = Transform(wanted, real(count, my, fout), (2,), "FFTW_BACKWARD")
        self.into_z, self.out_of_z = {}, {}
        for tiles, block in product(set(groups), {t.block, t.columns % t.block} - {0}):
            stored, factor = columns(tiles, block, t.pitch_in, fin), factors(tiles, block, fin)
            self.into_z[tiles, block] = Transform(stored, factor, (1,))
            stored, factor = columns(tiles, block, t.pitch_out, fout), factors(tiles, block, fout)
            self.out_of_z[tiles, block] = Transform(factor, stored, (1,), "FFTW_BACKWARD")


class _Step:
    """The convolution of one shape, planned."""

    def __init__(self, resident: _Resident, shape: ConvShape, variant: Variant, pool: ThreadPool) -> None:
        self._shape, self._pool, self._kernels = shape, pool, resident.spectra
        self._tiling = t = _tiling(shape, variant.size("tile"), variant.count("group"))
        count = -(-t.tiles // t.group)
        bounds = [t.tiles * i // count for i in range(count + 1)]
        self._groups = [(lo, hi - lo) for lo, hi in pairwise(bounds)]
        self._epilogue = Epilogue(resident.bias, shape.activation, t.step[2])
        with planning():
            self._plans = [_Plans(shape, t, [size for _, size in self._groups]) for _ in range(pool.threads)]

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        t = self._tiling
        blocks = scratch["blocks"].reshape(-1, t.worker_bytes)
        before = scratch["spectra"]
        after = scratch.get("spectra_out", before)
        rows = out.reshape(*out.shape[:3], -1, copy=False)  # (S, z, y, x * f')
        for first, tiles in self._groups:
            self._forward(x, before, blocks, first, tiles)
            self._multiply(before, after, blocks, tiles)
            self._inverse(after, rows, blocks, first, tiles)

    def _origin(self, index: int) -> tuple[int, int, int, int]:
        """Return the image and the first voxel (of input and output alike) of a tile."""
        (cz, cy, cx), (sz, sy, sx) = self._tiling.counts, self._tiling.step
        index, ix = divmod(index, cx)
        index, iy = divmod(index, cy)
        s, iz = divmod(index, cz)
        return s, iz * sz, iy * sy, ix * sx

    def _spectra(self, store: Bytes, tiles: int, maps: int, pitch: int) -> tuple[Complex, Complex]:
        """Return a group's spectra as (tiles, z, y, x, maps) and as (tiles, z, columns, maps)."""
        t = self._tiling
        one, two = COMPLEX64 * t.tile[0] * pitch, COMPLEX64 * pitch
        column, voxel = COMPLEX64 * maps, COMPLEX64
        planes = np.ndarray(
            (tiles, *t.tile[:2], t.half, maps), np.complex64, store, 0, (one, two, t.half * column, column, voxel)
        )
        columns = np.ndarray((tiles, t.tile[0], t.columns, maps), np.complex64, store, 0, (one, two, column, voxel))
        return planes, columns

    def _forward(self, x: Array, store: Bytes, blocks: npt.NDArray[np.uint8], first: int, tiles: int) -> None:
        t, shape, pool = self._tiling, self._shape, self._pool
        planes, _ = self._spectra(store, tiles, shape.fin, t.pitch_in)
        per_tile = t.tile[0] // t.planes

        def piece(lo: int, hi: int, worker: int) -> None:
            transform = self._plans[worker].forward
            buffer = np.ndarray((t.planes, *t.tile[1:], shape.fin), np.float32, blocks[worker])
            for unit in range(lo, hi):
                pool.check()
                index, part = divmod(unit, per_tile)
                s, z, y, x0 = self._origin(first + index)
                inside = x[s, z + part * t.planes :, y:, x0:][: t.planes, : t.tile[1], : t.tile[2]]
                target = planes[index, part * t.planes : (part + 1) * t.planes]
                if inside.shape[0] == 0:
                    target[...] = 0
                    continue
                _gather(inside, buffer)
                transform(buffer, target)

        pool.each(piece, tiles * per_tile)

    def _multiply(self, before: Bytes, after: Bytes, blocks: npt.NDArray[np.uint8], tiles: int) -> None:
        t, shape, pool = self._tiling, self._shape, self._pool
        tz = t.tile[0]
        _, sources = self._spectra(before, tiles, shape.fin, t.pitch_in)
        _, targets = self._spectra(after, tiles, shape.fout, t.pitch_out)

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            plans = self._plans[worker]
            for unit in range(lo, hi):
                pool.check()
                start = unit * t.block
                stop = min(start + t.block, t.columns)
                stack = (stop - start, tz, tiles)
                left = np.ndarray((*stack, shape.fin), np.complex64, blocks[worker])
                right = np.ndarray((*stack, shape.fout), np.complex64, blocks[worker], _round_up(left.nbytes))
                key = tiles, stop - start
                plans.into_z[key](sources[:, :, start:stop], left.transpose(2, 1, 0, 3))
                # With one input map a product is an outer product, for which BLAS takes three times as long as numpy.
                (np.multiply if shape.fin == 1 else np.matmul)(left, self._kernels[start:stop], out=right)
                plans.out_of_z[key](right.transpose(2, 1, 0, 3), targets[:, :, start:stop])

        pool.each(piece, -(-t.columns // t.block))

    def _inverse(self, store: Bytes, out: Array, blocks: npt.NDArray[np.uint8], first: int, tiles: int) -> None:
        t, shape, pool = self._tiling, self._shape, self._pool
        planes, _ = self._spectra(store, tiles, shape.fout, t.pitch_out)
        mz, my, mx = t.step
        per_tile = -(-mz // t.planes_out)

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            plans = self._plans[worker]
            for unit in range(lo, hi):
                pool.check()
                index, part = divmod(unit, per_tile)
                start = part * t.planes_out
                count = min(t.planes_out, mz - start)
                s, z, y, x0 = self._origin(first + index)
                target = out[s, z + start :, y:, x0 * shape.fout :][:count, :my, : mx * shape.fout]
                if target.shape[0] == 0:
                    continue
                spectra = planes[index, start : start + count]
                buffer = np.ndarray((count, my, t.tile[2], shape.fout), np.float32, blocks[worker])
                plans.along_y[count](spectra, spectra)
                plans.along_x[count](spectra[:, :my], buffer)
                result = buffer.reshape(count, my, -1)[tuple(slice(size) for size in target.shape)]
                self._epilogue(result, target)

        pool.each(piece, tiles * per_tile)


def _gather(inside: Array, buffer: Array) -> None:
    """Copy a part of the input; where a tile extends beyond it, fill with zeros."""
    planes, lines, voxels = inside.shape[:3]
    buffer[:planes, :lines, :voxels] = inside
    buffer[planes:] = 0
    buffer[:planes, lines:] = 0
    buffer[:planes, :lines, voxels:] = 0
