"""Whole-image FFT convolution, data parallel (ZNNi algorithm 2): all workers share each transform.

Method   1  All input maps are padded to a size FFTW likes and transformed; lines of padding are skipped (pruning).
         2  For each output map, each worker takes some lines y of frequencies and holds all z of them in its cache:
            over the input maps it computes the pruned transform of the kernel there (`pruned.py`), multiplies and adds;
            then it transforms back along z.
         3  Only the planes z of the output are transformed back along y, and only its lines along x, into the output.
         Bias and activation follow after the last output map.
Layout   Planar inside, (maps, z, y, x) complex64; channels last outside. The stride of every transform is an odd number
         of cache lines, because other values would collide in a few sets of the cache: 2.4 ns a value against 11 to 20.
Memory   Table II of the paper: input + spectra of the input maps, then spectra + one output map's + output. No kernel's
         spectrum is ever complete in memory, nor kept.
Bound    Memory: the spectra of all input maps are read once per output map.
Source   Zlateski, Lee, Seung, ZNNi (SC16), III and IV-A.2; znn/host/v1/dp_fft_conv.hpp.
Tested   tests/kernels/cpu/test_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.aligned import odd_lines
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_fp32, why_not_plain
from znnpy.kernels.cpu.blas import product_bytes
from znnpy.kernels.cpu.epilogue import Epilogue, apply_epilogue, quiet
from znnpy.kernels.cpu.fft import Transform, good_size, like, planning
from znnpy.kernels.cpu.pruned import twiddles
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import COMPLEX64, FLOAT32, ConvShape, Vec3

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

    Complex = npt.NDArray[np.complex64]

LINES_BYTES = 256 * 1024  # size of a worker's lines in step 1, which stay in L2
COLUMNS_BYTES = 64 * 1024  # a worker's columns along z, which FFTW may copy to a buffer; as fast as 256 KiB
PRODUCT_BYTES = 768 * 1024  # size of a worker's frequencies in step 2: kernel, product and sum
# Costs fitted to 1 to 80 maps in and out, k = 3 to 9, on 2 Zen 5 cores (2026-11-20).
CACHED = 4  # a copy within the cache is this many times faster than one that misses it
PLANAR = 4  # a transform here is this many times slower than one of 80 maps innermost, data movement included
THIN = 8  # a product over k values takes the time of k + 8 at full rate
SCATTERED_BYTES = 32  # traffic for a float written among other maps
COPIED_BYTES = 5 * 2**18  # copied by FFTW at most, of a thread's lines with inconvenient strides
HEAP_BYTES = 5 * 2**16  # the heap of each of several threads keeps what FFTW freed (42 shapes, 2026-11-21)


class _Sizes(NamedTuple):
    """Sizes of the spectra and of a worker's share."""

    padded: Vec3  # the transform's size
    half: int  # frequencies along x
    pitch: int  # complex numbers from line to line
    plane: int  # complex numbers from plane to plane; this and `pitch` are odd numbers of cache lines
    image: int  # complex numbers of one map's spectrum
    lines: int  # lines along x transformed at once (step 1)
    columns: int  # columns along z transformed at once (step 1); whole cache lines
    rows: int  # lines y of frequencies multiplied at once (step 2), an odd number
    worker_before: int  # bytes of a worker's scratch in step 1
    worker_product: int  # bytes of a worker's scratch in step 2
    worker_image: int  # bytes of a worker's scratch in step 3


def _sizes(shape: ConvShape) -> _Sizes:
    padded: Vec3 = good_size(shape.n[0]), good_size(shape.n[1]), good_size(shape.n[2])
    half = padded[2] // 2 + 1
    pitch = odd_lines(half)
    plane = odd_lines(padded[1] * pitch)
    line = FLOAT32 * padded[2] * shape.fin
    lines = min(shape.n[1], max(1, LINES_BYTES // line))
    columns = min(padded[1] * pitch, max(1, COLUMNS_BYTES // (COMPLEX64 * padded[0] * 8)) * 8)
    row = COMPLEX64 * padded[0] * pitch
    rows = (min(padded[1], max(1, PRODUCT_BYTES // (row * (shape.batch + 2)))) - 1) | 1
    kz, ky, _ = shape.k
    held = pitch * (shape.fin * kz * ky + kz * rows + (shape.batch + 2) * padded[0] * rows)
    real = FLOAT32 * (shape.n[1] - ky + 1) * padded[2]
    return _Sizes(
        padded,
        half,
        pitch,
        plane,
        padded[0] * plane,
        lines,
        columns,
        rows,
        -(-lines * line // 64) * 64,
        -(-COMPLEX64 * held // 64) * 64,
        -(-real // 64) * 64,
    )


@dataclass(frozen=True, slots=True)
class ConvFftData:
    """Whole-image FFT convolution: for many small images, or if kernel spectra do not fit."""

    name: str = "cpu.conv.fft_data"
    kind: Kind = "conv"
    version: int = 3
    summary: str = "large kernels if the spectra of all kernels do not fit in memory: none is kept"
    source: str = "ZNNi IV-A.2 (algorithm 2) with the pruned transforms of III"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        if reason := why_not_fp32(shape) or why_not_plain(shape):
            return reason
        shape = as_conv(shape)
        return "a 1x1x1 kernel is one matrix product: see cpu.conv.direct" if shape.k == (1, 1, 1) else None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = as_conv(shape)
        t = _sizes(shape)
        wanted = shape.out[0] * t.padded[1] * t.pitch
        before = min(threads, max(shape.batch * shape.n[0] * -(-shape.n[1] // t.lines), shape.batch * shape.fin))
        products = min(threads, -(-t.padded[1] // t.rows))
        images = min(threads, shape.batch * shape.out[0])
        kz, ky, kx = shape.k
        packed = max(
            product_bytes(kx, t.pitch, COMPLEX64),
            product_bytes(ky, t.pitch, COMPLEX64),
            product_bytes(kz, t.pitch * t.rows, COMPLEX64),
        )
        copied = min(
            COPIED_BYTES, 2**19 + 4 * COMPLEX64 * max(t.padded[0] * t.columns, t.padded[1] * t.pitch) + t.worker_before
        )
        kernels = COMPLEX64 * shape.fin * kz * ky * kx  # kernels of one output map, as complex numbers
        return Footprint(  # the weights belong to the caller: no copy is kept
            resident=Epilogue.nbytes(shape.fout, shape.activation, shape.out[2])
            + COMPLEX64 * (t.padded[0] * kz + t.padded[1] * ky + t.pitch * kx),  # twiddles
            input_until=0,
            output_from=1,
            stages=2,
            scratch=(
                Scratch("spectra", COMPLEX64 * shape.batch * shape.fin * t.image, 0, 1),
                Scratch("lines", before * t.worker_before, 0, 0),
                Scratch("sum", COMPLEX64 * shape.batch * wanted, 1, 1),
                Scratch("blocks", max(products * t.worker_product, images * t.worker_image), 1, 1),
            ),
            allowance=max(before, products, images) * (copied + (HEAP_BYTES if threads > 1 else 0))
            + products * (packed + kernels),
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_conv(shape)
        t = _sizes(shape)
        images = shape.batch * (shape.fin + shape.fout)
        pairs = shape.fin * shape.fout
        kz, ky, _ = shape.k
        pruned = t.image * (kz + THIN) + t.plane * kz * (ky + THIN)
        # Each multiply-add has two operands and a result in the cache, and runs at half a copy's speed.
        summed = 12.0 * COMPLEX64 * t.image * pairs * shape.batch / CACHED
        # One map at a time is written between the others: a cache line is read and written for one value.
        scattered = min(SCATTERED_BYTES, 2 * FLOAT32 * shape.fout) * prod(shape.out_shape)
        return (
            Work("fft", PLANAR * 2.5 * prod(t.padded) * log2(prod(t.padded)) * images, 0.0),
            Work("product", 8.0 * pruned * pairs, 0.0),
            Work("copy", 0.0, summed + scattered + shape.in_bytes + 2.0 * shape.out_bytes),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> ConvWeights:
        del variant, pool
        assert weights is not None
        return weights

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, as_conv(shape), pool)


class _Plans:
    """The transforms of one worker."""

    def __init__(self, shape: ConvShape, t: _Sizes) -> None:
        gz, gy, gx = t.padded
        my = shape.out[1]
        line, plane_bytes, voxel = COMPLEX64 * t.pitch, COMPLEX64 * t.plane, COMPLEX64
        image = COMPLEX64 * t.image
        self.along_x = {}
        for lines in {t.lines, shape.n[1] % t.lines} - {0}:
            real = like(
                (lines, gx, shape.fin), (FLOAT32 * gx * shape.fin, FLOAT32 * shape.fin, FLOAT32), np.float32, place=1
            )
            self.along_x[lines] = Transform(
                real, like((lines, t.half, shape.fin), (line, voxel, image), np.complex64), (1,)
            )
        plane = like((gy, t.pitch), (line, voxel), np.complex64)
        self.along_y = Transform(plane, plane, (0,))
        self.along_y_back = Transform(plane, plane, (0,), "FFTW_BACKWARD")
        self.along_z = {}
        for columns in {t.columns, gy * t.pitch % t.columns} - {0}:
            column = like((gz, columns), (plane_bytes, voxel), np.complex64)
            self.along_z[columns] = Transform(column, column, (0,))
        self.along_z_back = {}
        for rows in {t.rows, gy % t.rows} - {0}:
            held = like((gz, rows * t.pitch), (rows * line, voxel), np.complex64)
            self.along_z_back[rows] = Transform(held, held, (0,), "FFTW_BACKWARD")
        self.along_x_back = Transform(
            like((my, t.half), (line, voxel), np.complex64),
            like((my, gx), (FLOAT32 * gx, FLOAT32), np.float32, place=1),
            (1,),
            "FFTW_BACKWARD",
        )


class _Step:
    def __init__(self, weights: ConvWeights, shape: ConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._weights = shape, pool, weights
        self._sizes = t = _sizes(shape)
        with planning():
            self._plans = [_Plans(shape, t) for _ in range(pool.threads)]
        gz, gy, gx = t.padded
        self._along_z, self._along_y = twiddles(gz, shape.k[0]), twiddles(gy, shape.k[1])
        self._along_x = np.zeros((shape.k[2], t.pitch), np.complex64)
        self._along_x[:, : t.half] = twiddles(gx, shape.k[2], t.half).T
        self._epilogue = Epilogue(weights.bias, shape.activation, shape.out[2])

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, t, pool = self._shape, self._sizes, self._pool
        gz, gy, _ = t.padded
        planes = scratch["spectra"].view(np.complex64).reshape(shape.batch, shape.fin, gz, t.plane)
        # `reshape` would give axes of size 1 other strides than the transforms were planned for.
        strides = *planes.strides[:3], COMPLEX64 * t.pitch, COMPLEX64
        spectra = np.ndarray((shape.batch, shape.fin, gz, gy, t.pitch), np.complex64, scratch["spectra"], 0, strides)
        total = scratch["sum"].view(np.complex64).reshape(shape.batch, shape.out[0], gy, t.pitch)
        self._transform_lines(x, spectra, scratch["lines"].reshape(-1, t.worker_before))
        self._transform_maps(planes)
        products, images = (_rows(scratch["blocks"], nbytes) for nbytes in (t.worker_product, t.worker_image))
        for j in range(shape.fout):
            self._accumulate(spectra, j, total, products)
            self._invert(total, j, out, images)
        apply_epilogue(self._epilogue, out, pool)

    def _transform_lines(self, x: Array, spectra: Complex, blocks: npt.NDArray[np.uint8]) -> None:
        """Transform along x, from channels last to planar."""
        shape, t, pool = self._shape, self._sizes, self._pool
        (nz, ny, nx), gx = shape.n, t.padded[2]
        parts = -(-ny // t.lines)

        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                pool.check()
                rest, part = divmod(unit, parts)
                s, z = divmod(rest, nz)
                start = part * t.lines
                count = min(t.lines, ny - start)
                buffer = np.ndarray((count, gx, shape.fin), np.float32, blocks[worker])
                buffer[:, :nx] = x[s, z, start : start + count]
                buffer[:, nx:] = 0
                target = spectra[s, :, z, start : start + count]
                self._plans[worker].along_x[count](buffer, target[..., : t.half].transpose(1, 2, 0))
                target[..., t.half :] = 0

        pool.each(piece, shape.batch * nz * parts)

    def _transform_maps(self, planes: Complex) -> None:
        """Transform along y where a plane (S, f, z) is not zero, then along z."""
        shape, t, pool = self._shape, self._sizes, self._pool
        (nz, ny, _), (gz, gy, _) = shape.n, t.padded
        images = planes.reshape(-1, gz, t.plane)[..., : gy * t.pitch]

        def piece(lo: int, hi: int, worker: int) -> None:
            plans = self._plans[worker]
            for image in images[lo:hi]:
                for plane in image[:nz].reshape(nz, gy, t.pitch, copy=False):
                    pool.check()
                    plane[ny:] = 0
                    plans.along_y(plane, plane)
                image[nz:] = 0
                for start in range(0, gy * t.pitch, t.columns):
                    pool.check()
                    columns = image[:, start : start + t.columns]
                    plans.along_z[columns.shape[1]](columns, columns)

        pool.each(piece, len(images))

    def _accumulate(self, spectra: Complex, j: int, total: Complex, blocks: npt.NDArray[np.uint8]) -> None:
        """Set total[s] to the inverse transform along z of the sum over maps of spectra[s, i] * kernel[j, i]."""
        shape, t, pool = self._shape, self._sizes, self._pool
        gz, gy, _ = t.padded
        (kz, ky, _), mz = shape.k, shape.out[0]
        kernels = self._weights.weight[j]

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                start = unit * t.rows
                rows = min(t.rows, gy - start)
                store = blocks[worker].view(np.complex64)
                kernel_x, store = _take(store, (shape.fin, kz, ky, t.pitch))
                kernel_y, store = _take(store, (kz, rows, t.pitch))
                kernel, store = _take(store, (gz, rows, t.pitch))
                term, store = _take(store, (gz, rows, t.pitch))
                sums, _ = _take(store, (shape.batch, gz, rows, t.pitch))
                np.matmul(kernels, self._along_x, out=kernel_x)
                for i in range(shape.fin):
                    pool.check()
                    np.matmul(self._along_y[start : start + rows], kernel_x[i], out=kernel_y)
                    np.matmul(self._along_z, kernel_y.reshape(kz, -1), out=kernel.reshape(gz, -1))
                    for s in range(shape.batch):
                        product = sums[s] if i == 0 else term
                        np.multiply(spectra[s, i, :, start : start + rows], kernel, out=product)
                        if i:
                            np.add(sums[s], term, out=sums[s])
                for s in range(shape.batch):
                    columns = sums[s].reshape(gz, -1)
                    self._plans[worker].along_z_back[rows](columns, columns)
                    total[s, :, start : start + rows] = sums[s, :mz]

        pool.each(piece, -(-gy // t.rows))

    def _invert(self, total: Complex, j: int, out: Array, blocks: npt.NDArray[np.uint8]) -> None:
        """Transform back along y and x, restricted to the planes and lines of the output."""
        shape, t, pool = self._shape, self._sizes, self._pool
        mz, my, mx = shape.out

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            plans = self._plans[worker]
            image = np.ndarray((my, t.padded[2]), np.float32, blocks[worker])
            for unit in range(lo, hi):
                pool.check()
                s, z = divmod(unit, mz)
                plane = total[s, z]
                plans.along_y_back(plane, plane)
                plans.along_x_back(plane[:my, : t.half], image)
                out[s, z, :, :, j] = image[:, :mx]

        pool.each(piece, shape.batch * mz)


def _rows(store: Bytes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Split `store` into rows of `nbytes`, one for each worker that finds work."""
    count = len(store) // nbytes
    return store[: count * nbytes].reshape(count, nbytes)


def _take(store: Complex, shape: tuple[int, ...]) -> tuple[Complex, Complex]:
    """Take an array of `shape` from the front of `store`; return it and the rest."""
    size = prod(shape)
    return store[:size].reshape(shape), store[size:]
