"""Whole-image FFT convolution on cuFFT (ZNNi algorithm 3), with the pruned transforms of III-C.

Method   0  For some maps at a time, of one image or of several: padded lines along x are transformed; after a
         transposition, padded lines along y; after another, lines along z. Lines of padding are never transformed:
         there are n_z n_y, then n_z h, then h g_y lines.
         1  For some kernels at a time, the same with k_z k_y, k_z h, h g_y lines; the last are computed from their k_z
            values by a kernel of ours, which reads next to nothing, whereas cuFFT would read and write the padded
            lines. Another kernel multiplies them with the spectra of all images and sums.
         2  For some maps at a time, the inverse: all lines along z, along y those of output planes, along x those of
            output lines; scale, bias and activation are applied as values are written.
Layout   Spectra are planar, [x][y][z]: the axis transformed next is always innermost. Channels last outside.
Memory   Table II of the paper: input + spectra; spectra in and out + kernels; spectra out + output; in addition, for
         the maps in progress, the values before the last transposition: a part `n_z / g_z` of a spectrum. cuFFT's
         tables exist from `bind` on, for all layers at once: they count as kept between patches.
Bound    Memory: spectra of kernels are written once and read once.
Source   Zlateski, Lee, Seung, ZNNi (SC16), III-C and IV-B.2, algorithm 3.
Tested   tests/kernels/gpu/test_conv_fft.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_on_gpu
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ACTIVATIONS, COMPLEX64, ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

TILE = 32  # side of the tiles that blocks transpose, as in conv_fft.cu
BLOCK = (TILE, 8, 1)
THREADS = 256  # threads of blocks of kernels without tiles
EXPANDED = 16  # nonzero values of a line up to which Horner's rule beats a padded transform
TOGETHER = 4  # most kernels, and images, that one thread multiplies at once
FULL_VALUES = 2**25  # complex numbers whose transform fills a GPU
LINES_VALUES = 2**26  # complex numbers per call of cuFFT: far below 2^31
LONGEST = 2048  # points, up to which cuFFT's scratch is known (libraries.py)
WORK_ALIGNMENT = 256  # bytes
WORK_BYTES = 1024 + WORK_ALIGNMENT  # scratch of cuFFT for lines along x, besides their own memory
TABLES_BYTES = 2**20  # tables of one plan of cuFFT


class _Sizes(NamedTuple):
    """Sizes of spectra and of the work in progress."""

    padded: Vec3  # the transform's size
    half: int  # frequencies along x
    image: int  # complex numbers of one map's spectrum
    maps_in: int  # maps transformed at once, of any images
    kernels: int  # kernels transformed at once
    maps_out: int  # maps transformed back at once


def _sizes(shape: ConvShape, variant: Variant) -> _Sizes:
    gz, gy, gx = good_size(shape.n[0]), good_size(shape.n[1]), good_size(shape.n[2], even=True)
    half, most = gx // 2 + 1, variant.count("maps")
    kernels = most // shape.fin * shape.fin or most  # kernels of whole output maps, if of more than one
    return _Sizes(
        (gz, gy, gx),
        half,
        gz * gy * half,
        min(most, shape.batch * shape.fin),
        min(kernels, shape.fin * shape.fout),
        min(most, shape.batch * shape.fout),
    )


@lru_cache(maxsize=2 * LONGEST)
def good_size(n: int, *, even: bool = False) -> int:
    """Return the smallest size >= n that cuFFT transforms fast: 2^a 3^b 5^c 7^d (III-D). Real lines need even sizes."""
    while not (_is_smooth(n) and (n % 2 == 0 or not even)):
        n += 1
    return n


def _is_smooth(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1


@dataclass(frozen=True, slots=True)
class ConvFft:
    """The paper's whole-image FFT convolution; no kernel spectrum is kept."""

    name: str = "gpu.conv.fft"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "large kernels on many small images, if the spectra of all kernels do not fit the GPU: none is kept"
    source: str = "ZNNi IV-B.2 (algorithm 3) with the pruned transforms of III-C, on cuFFT"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_on_gpu(shape, machine):
            return reason
        shape = as_conv(shape)
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see gpu.conv.direct"
        if max(shape.n) > LONGEST:
            return f"transforms of more than {LONGEST} points are not used: cuFFT may need unplanned memory for them"
        if shape.activation == "softmax":
            return "softmax needs all maps of a voxel at once, but they are computed in groups: see gpu.conv.direct"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return numbers of maps, or kernels, to transform at once: fewer take less memory."""
        del machine
        shape = as_conv(shape)
        pairs = shape.fin * shape.fout
        image = _sizes(shape, Variant.of(maps=1)).image
        most = (max(TOGETHER * shape.fin, FULL_VALUES // image), shape.fin, 8)
        largest = max(pairs, shape.batch * max(shape.fin, shape.fout))
        return tuple(Variant.of(maps=maps) for maps in dict.fromkeys(min(maps, largest) for maps in most))

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = as_conv(shape)
        t = _sizes(shape, variant)
        rows = COMPLEX64 * t.half * t.padded[1]  # one plane before its last transposition
        plans = sum(2 if axis == "x" else 1 for axis, _ in _batches(shape, t))
        return Footprint(
            resident=shape.weight_bytes + TABLES_BYTES * plans + COMPLEX64 * t.padded[0],  # last: a table of sines
            input_until=0,
            output_from=2,
            stages=3,
            scratch=(
                Scratch("spectra", COMPLEX64 * shape.batch * shape.fin * t.image, 0, 1),
                Scratch("lines_in", t.maps_in * shape.n[0] * rows + WORK_BYTES, 0, 0),
                Scratch("kernels", COMPLEX64 * t.kernels * t.image, 1, 1),
                Scratch("lines_kernels", t.kernels * shape.k[0] * rows + WORK_BYTES, 1, 1),
                Scratch("sums", COMPLEX64 * shape.batch * shape.fout * t.image, 1, 2),
                Scratch("lines_out", t.maps_out * shape.out[0] * rows + WORK_BYTES, 2, 2),
            ),
            reads_carried=True,
            raises_peak=True,
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        t = _sizes(shape, variant)
        chunks = -(-shape.fin * shape.fout // max(t.kernels, shape.fin))
        forward, kernels, back = (_passes(t, size) for size in (shape.n, shape.k, shape.out))
        kernels -= 2.0 * t.image if shape.k[0] <= EXPANDED else 0.0
        pairs = shape.fin * shape.fout
        flops = 5.0 * t.image * log2(prod(t.padded)) * (shape.batch * (shape.fin + shape.fout) + pairs)
        nbytes = (
            shape.in_bytes
            + shape.out_bytes
            + COMPLEX64 * (shape.batch * (shape.fin * forward + shape.fout * back) + pairs * kernels)
            # The product reads each kernel once, and all images once per group of kernels.
            + COMPLEX64 * t.image * (pairs + shape.batch * (shape.fin * chunks + shape.fout))
        )
        return (Work("gpu_cufft", flops + 8.0 * t.image * pairs * shape.batch, nbytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> _Resident:
        del variant
        assert weights is not None
        return _Resident(
            device.put(np.ascontiguousarray(weights.weight, np.float32), "weights"),
            device.put(np.ascontiguousarray(weights.bias, np.float32), "biases"),
        )

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> FftStep:
        return FftStep(resident, as_conv(shape), variant, device)


def _passes(t: _Sizes, size: Vec3) -> float:
    """Return the complex numbers read and written to transform one map with `size` nonzero, or output, voxels.

    A transform reads and writes its lines; a transposition reads what exists and writes the padded size.
    """
    rows, planes = size[0] * size[1] * t.half, size[0] * t.half * t.padded[1]
    return 3.0 * rows + rows + 3.0 * planes + planes + 3.0 * t.image


def _batches(shape: ConvShape, t: _Sizes) -> set[tuple[str, int]]:
    """Return axis and number of lines of every cuFFT call that a step needs a plan for; along x it needs two plans."""
    found: set[tuple[str, int]] = set()
    for total, most, (nz, ny, _), turned in (
        (shape.batch * shape.fin, t.maps_in, shape.n, True),
        (shape.fin * shape.fout, t.kernels, shape.k, shape.k[0] > EXPANDED),
        (shape.batch * shape.fout, t.maps_out, shape.out, True),
    ):
        for maps in _counts(total, most):
            axes = [("x", t.half, nz * ny), ("y", t.padded[1], nz * t.half)]
            axes += [("z", t.padded[0], t.half * t.padded[1])] if turned else []
            found |= {(axis, count) for axis, pitch, lines in axes for count in _counts(maps * lines, _most(pitch))}
    return found


def _calls(lines: int, pitch: int) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of `lines` lines of `pitch` complex numbers for each call of cuFFT."""
    return _some(lines, _most(pitch))


def _most(pitch: int) -> int:
    """Return the lines of `pitch` complex numbers that one call of cuFFT takes."""
    return max(1, LINES_VALUES // pitch)


class _Resident(NamedTuple):
    weight: Any  # (f', f, k) float32
    bias: Any  # (f',) float32


class _Batches:
    """Transforms of any number of lines, a bounded number at a time; `counts`: the numbers that will occur."""

    def __init__(self, device: Device, kind: Any, n: int, pitch: int, counts: set[int]) -> None:
        self._device, self._pitch = device, pitch
        self._plans = {count: device.libraries.lines(kind, n, count) for count in sorted(counts)}

    def forward(self, store: Any, offset: int, lines: int, work: Any) -> None:
        """Transform `lines` lines at `offset` complex numbers in `store`; `work` is free scratch."""
        for start, count in _calls(lines, self._pitch):
            self._plans[count].forward(self._view(store, offset, start, count), work)

    def backward(self, store: Any, offset: int, lines: int, work: Any) -> None:
        for start, count in _calls(lines, self._pitch):
            self._plans[count].backward(self._view(store, offset, start, count), work)

    def _view(self, store: Any, offset: int, start: int, count: int) -> Any:
        first = COMPLEX64 * (offset + start * self._pitch)
        return self._device.view(store, (count, self._pitch), np.complex64, offset=first)


class FftStep:
    """A layer of one shape on one device."""

    def __init__(self, resident: _Resident, shape: ConvShape, variant: Variant, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._sizes = t = _sizes(shape, variant)
        self._type = "half" if shape.precision == "fp16" else "float"
        chunks = _counts(shape.fin * shape.fout, t.kernels)
        outputs = {each for chunk in chunks for _, each, _ in _groups(chunk // shape.fin or 1)}
        images = {each for _, each, _ in _groups(shape.batch)}
        self._kernels = device.kernels(
            "conv_fft.cu",
            [
                *(f"gather<{self._type}>", f"scatter<{self._type}>", "pad", "transpose", "expand"),
                *(f"multiply<{g}, {s}>" for g in sorted(outputs) for s in sorted(images)),
            ],
        )
        gz, gy, gx = t.padded
        twiddles = np.exp(-2j * np.pi / gz * np.arange(gz)).astype(np.complex64)
        self._twiddles = device.put(twiddles.view(np.float32), "a table of sines")
        counts: dict[str, set[int]] = {axis: set() for axis in "zyx"}
        for axis, count in _batches(shape, t):
            counts[axis].add(count)
        self._along_z = _Batches(device, "complex", gz, gz, counts["z"])
        self._along_y = _Batches(device, "complex", gy, gy, counts["y"])
        self._along_x = _Batches(device, "real", gx, t.half, counts["x"])
        self._expands = shape.k[0] <= EXPANDED

    def run(
        self,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        del x_peak  # the footprint does not request it
        shape, t = self._shape, self._sizes
        for first, maps in _some(shape.batch * shape.fin, t.maps_in):
            self.transform_maps(x, before, first, maps, scratch)
        for first, kernels in _some(shape.fin * shape.fout, t.kernels):
            self.transform_kernels(first, kernels, scratch)
            self._multiply(first, kernels, scratch)
        for first, maps in _some(shape.batch * shape.fout, t.maps_out):
            self._invert(out, first, maps, out_peak, scratch)

    def transform_maps(self, x: Any, before: Any | None, first: int, maps: int, scratch: Mapping[str, Any]) -> None:
        """Compute the spectra of `maps` maps from `first` on, counted over all (S, f), in their places."""
        shape, t = self._shape, self._sizes
        nz, ny, nx = shape.n
        at, pitch = first * t.image, 2 * t.half
        carried, before_step = (0, 0) if before is None else (before.shape[1], before.strides[0] // before.itemsize)
        self._kernels[f"gather<{self._type}>"](
            (-(-pitch // TILE) * -(-maps // TILE) * ny * nz,),
            BLOCK,
            *(before, x, self._from(scratch["spectra"], at), carried, before_step, x.strides[0] // x.itemsize),
            *(shape.fin, first, maps, nz, ny, nx, pitch),
        )
        self._forward(scratch["spectra"], at, scratch["lines_in"], maps, nz, ny, expand=False)

    def transform_kernels(self, first: int, kernels: int, scratch: Mapping[str, Any]) -> None:
        """Compute the spectra of `kernels` kernels from `first` on, counted over all (f', f)."""
        shape, t = self._shape, self._sizes
        kz, ky, kx = shape.k
        lines, pitch = kernels * kz * ky, 2 * t.half
        weights = self._resident.weight.reshape(shape.fout * shape.fin, kz, ky, kx)[first:]
        self._kernels["pad"]((-(-lines * pitch // THREADS),), (THREADS,), weights, scratch["kernels"], lines, kx, pitch)
        self._forward(scratch["kernels"], 0, scratch["lines_kernels"], kernels, kz, ky, expand=self._expands)

    def _forward(self, store: Any, at: int, lines: Any, maps: int, nz: int, ny: int, *, expand: bool) -> None:
        """Transform padded lines along x at `at` complex numbers in `store` into spectra in the same place."""
        t = self._sizes
        gz, gy, _ = t.padded
        self._along_x.forward(store, at, maps * nz * ny, self._work(lines))
        self._transpose(self._from(store, at), lines, maps * nz, (ny, t.half), (t.half, gy))
        self._along_y.forward(lines, 0, maps * nz * t.half, lines[:0])
        if expand:
            columns = t.half * gy
            self._kernels["expand"](
                (maps * -(-columns // TILE),),
                BLOCK,
                *(lines, self._from(store, at), self._twiddles, nz, columns, gz),
                shared=COMPLEX64 * nz * TILE,
            )
            return
        self._transpose(lines, self._from(store, at), maps, (nz, t.half * gy), (t.half * gy, gz))
        self._along_z.forward(store, at, maps * t.half * gy, lines[:0])

    def _multiply(self, first: int, kernels: int, scratch: Mapping[str, Any]) -> None:
        """Multiply by `kernels` kernels from `first` on and add to the sums of their output maps."""
        shape = self._shape
        output, i = divmod(first, shape.fin)
        done = 0
        while done < kernels:  # whole output maps all at once, or the available part of one
            count, outputs = min(shape.fin - i, kernels - done), max(1, (kernels - done) // shape.fin)
            for g, outputs_each, output_groups in _groups(outputs):
                for s, images_each, image_groups in _groups(shape.batch):
                    self._multiply_group(
                        (outputs_each, images_each, output_groups, image_groups),
                        (s, output + g, i, done + g * shape.fin, count),
                        scratch,
                    )
            done += outputs * count  # several outputs have all their maps here
            output, i = output + outputs, 0

    def _multiply_group(
        self, groups: tuple[int, int, int, int], first: tuple[int, int, int, int, int], scratch: Mapping[str, Any]
    ) -> None:
        """Multiply by the kernels of some output maps, for some images.

        groups  output maps and images per thread, and groups of either.
        first   image, output map, input map and kernel to start with, and the number of input maps.
        """
        shape, t = self._shape, self._sizes
        outputs, images, output_groups, image_groups = groups
        s, output, i, kernel, count = first
        self._kernels[f"multiply<{outputs}, {images}>"](
            (-(-t.image // THREADS) * output_groups * image_groups,),
            (THREADS,),
            self._from(scratch["spectra"], (s * shape.fin + i) * t.image),
            self._from(scratch["kernels"], kernel * t.image),
            self._from(scratch["sums"], (s * shape.fout + output) * t.image),
            *(t.image, count, shape.fin * t.image, shape.fin * t.image, shape.fout * t.image, int(i > 0)),
            *(output_groups, image_groups),
        )

    def _invert(self, out: Any, first: int, maps: int, peak: int, scratch: Mapping[str, Any]) -> None:
        """Transform the sums of `maps` maps from `first` on, counted over all (S, f'), back to their places."""
        shape, t = self._shape, self._sizes
        gz, gy, gx = t.padded
        mz, my, mx = shape.out
        store, lines, at = scratch["sums"], scratch["lines_out"], first * t.image
        self._along_z.backward(store, at, maps * t.half * gy, lines[:0])
        self._transpose(self._from(store, at), lines, maps, (t.half * gy, gz), (mz, t.half * gy))
        self._along_y.backward(lines, 0, maps * mz * t.half, lines[:0])
        self._transpose(lines, self._from(store, at), maps * mz, (t.half, gy), (my, t.half))
        self._along_x.backward(store, at, maps * mz * my, self._work(lines))
        self._kernels[f"scatter<{self._type}>"](
            (-(-mx // TILE) * -(-maps // TILE) * my * mz,),
            BLOCK,
            self._from(store, at),
            out,
            self._resident.bias,
            np.uint64(peak),
            1.0 / (gz * gy * gx),
            ACTIVATIONS.index(shape.activation),
            out.strides[0] // out.itemsize,
            *(shape.fout, first, maps, mz, my, mx, 2 * t.half),
        )

    def _transpose(
        self, source: Any, target: Any, batch: int, rows_columns: tuple[int, int], to: tuple[int, int]
    ) -> None:
        """Transpose `batch` matrices, cropped to the first `to[0]` columns, lines padded with zeros to `to[1]`."""
        blocks = batch * -(-to[0] // TILE) * -(-to[1] // TILE)
        self._kernels["transpose"]((blocks,), BLOCK, source, target, *rows_columns, *to)

    def _work(self, lines: Any) -> Any:
        """Return cuFFT's scratch for lines along x: free before their first transposition and after their last."""
        return lines[-self._device.address(lines) % WORK_ALIGNMENT :]

    def _from(self, store: Any, at: int) -> Any:
        """Return `store` from complex number `at` on."""
        return store[COMPLEX64 * at :]


def _some(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the count of each group of at most `most` of `total` things."""
    for first in range(0, total, most):
        yield first, min(most, total - first)


def _counts(total: int, most: int) -> set[int]:
    """Return the counts that `_some` yields."""
    return {count for count in (min(most, total), total % most) if count}


def _groups(total: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first, the size and the number of groups: groups of TOGETHER of `total` things, then the rest."""
    groups, rest = divmod(total, TOGETHER)
    if groups:
        yield 0, TOGETHER, groups
    if rest:
        yield groups * TOGETHER, rest, 1
