"""Direct convolution of many input maps on a GPU by stride-fixed blocks.

Method   A block sums a tile of voxels x some output maps in registers, on float32 units in every precision. It goes
         through the taps one row of the kernel and 32 or 64 bytes of a voxel's maps at a time ("segment"): a multiple
         of the 32 bytes of a memory sector, and few, so that many output maps fit as well. While one step is summed,
         the next is copied to the other half of shared memory (cp.async). The numbers of voxels, maps and taps per step
         come from the paper's procedure where the kernel has these sizes; other choices come from an estimate of
         cycles. In fp32, sums of more than MOST_TERMS products are cut into parts, which are added up in the output,
         because rounding grows with a sum's length. division.py, conv_block.cu.
Memory   None besides kernels, in float32 in every precision.
Bound    Arithmetic: 2 k^3 f f' flops a voxel on float32 units, of whole tiles.
Source   Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 3.2.
Tested   tests/kernels/gpu/block/test_primitive.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import Footprint, Kind, Variant, Work, as_conv, why_not_on_gpu
from znnpy.kernels.gpu.block.division import card_of, divide_multiple
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ACTIVATIONS, FLOAT32, Activation, ConvShape, Precision, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Gpu, Machine

SOURCE = "block/conv_block.cu"
WARP, THREADS, QUAD, PLACE_BYTES = 32, 128, 4, 16  # as in conv_block.cu
COPY_ISSUES, KERNEL_ISSUES = 20, 4  # approximate instructions per copy of inputs and of kernels
SEGMENTS = (32, 64)  # bytes of a voxel's maps, as in the paper
VOXELS, MAPS = (128, 64, 32), (16, 32, 48, 64, 80)  # sizes of blocks that the kernel is instantiated for
COMMON = 16  # voxels along x of the tile for which shared memory is divided
NARROWEST = 4  # narrowest tile along x: lanes of a warp read so many neighbours together
MOST_TERMS = 2500  # longest fp32 sum, in sequence, for an error of 1e-6 of the rms answer: they leave 8.8e-7
PART_TERMS = 1500  # length of the parts of a longer sum: errors of the parts add up and leave 7e-7
MOST_BLOCKS = 2**31 - 1  # blocks of a grid along x
RESIDENT = 3  # blocks per multiprocessor that its registers are divided for
RESERVED = 2 << 10  # bytes of a block's shared memory: CUDA's own and the kernel's fixed arrays; rounded up
MOST_SHARED = 98 << 10  # bytes per block that every GPU has, minus the fixed arrays
REGISTERS = 168


class _Division(NamedTuple):
    """The division of a layer, as given by a Variant."""

    channels: int  # input maps of a segment
    span: int  # taps along x in a step
    voxels: int  # voxels of a block
    maps: int  # maps of a block

    @classmethod
    def of(cls, variant: Variant) -> _Division:
        return cls(*(variant.count(name) for name in cls._fields))

    @property
    def variant(self) -> Variant:
        return Variant.of(**self._asdict())

    def blocks(self, fout: int) -> int:
        """Return the blocks of maps."""
        return -(-fout // self.maps)

    def staged(self, wide: int) -> int:
        """Return the input voxels of a step."""
        return self.voxels // wide * (wide + self.span - 1)

    def image_bytes(self, wide: int, itemsize: int) -> int:
        """Return the bytes of the input voxels of a step."""
        segment = self.channels * itemsize
        pitch = segment if segment % 64 else segment + 16  # against bank conflicts, as in conv_block.cu
        return self.staged(wide) * pitch

    def shared_bytes(self, wide: int, itemsize: int) -> int:
        """Return the bytes of a block: places of voxels, and two sets of voxels and kernels."""
        kernels = FLOAT32 * self.span * self.channels * self.maps
        return self.staged(wide) * PLACE_BYTES + 2 * (self.image_bytes(wide, itemsize) + kernels)


class _Tile(NamedTuple):
    """Sizes of a tile in voxels along x, y and z."""

    wide: int
    lines: int
    planes: int

    def count(self, out: Vec3) -> int:
        """Return the tiles that cover an image."""
        return -(-out[0] // self.planes) * -(-out[1] // self.lines) * -(-out[2] // self.wide)


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]


@cache
def _narrowest(division: _Division, itemsize: int) -> int:
    """Return the least voxels along x of tiles that fit shared memory: the wider a tile, the smaller its input.

    ValueError if none fits.
    """
    fitting = (wide for wide in _powers(division.voxels) if division.shared_bytes(wide, itemsize) <= MOST_SHARED)
    if (narrowest := next(fitting, None)) is None:
        raise ValueError(f"no tile of {division.voxels} voxels fits shared memory")
    return max(NARROWEST, narrowest)


@cache
def _tiles(voxels: int, narrowest: int) -> tuple[_Tile, ...]:
    """Return the tiles of `voxels` voxels, widest first: those have the smallest input."""
    found = []
    for wide, lines in product(_powers(voxels), _powers(voxels)):
        if wide >= narrowest and wide * lines <= voxels:
            found.append(_Tile(wide, lines, voxels // (wide * lines)))
    return tuple(sorted(found, key=lambda tile: (-tile.wide, tile.planes)))


def _tile(out: Vec3, division: _Division, itemsize: int) -> _Tile:
    """Return the tile that covers the least outside of the image."""
    return _best_tile(out, division.voxels, _narrowest(division, itemsize))


@lru_cache(maxsize=1024)  # the many divisions of a layer share few values of it
def _best_tile(out: Vec3, voxels: int, narrowest: int) -> _Tile:
    return min(_tiles(voxels, narrowest), key=lambda tile: tile.count(out))


def _blocks(shape: ConvShape, division: _Division) -> int:
    out = shape.out
    return shape.batch * _tile(out, division, shape.itemsize).count(out) * division.blocks(shape.fout)


def _shared_limit(gpu: Gpu) -> int:
    """Return the bytes of shared memory of a block, if RESIDENT blocks share a multiprocessor."""
    return min(gpu.shared_multiprocessor_bytes // RESIDENT - RESERVED, MOST_SHARED)


def _with_span(shape: ConvShape, division: _Division, gpu: Gpu) -> _Division:
    """Return the division with the most taps along x, at least 1, in equal pieces of a row, that fit most shapes."""
    return division._replace(span=_span(shape.k[2], division, shape.itemsize, _shared_limit(gpu)))


@cache
def _span(kx: int, division: _Division, itemsize: int, limit: int) -> int:
    for pieces in range(1, kx + 1):
        span = -(-kx // pieces)
        if division._replace(span=span).shared_bytes(COMMON, itemsize) <= limit:
            return span
    return 1


@lru_cache(maxsize=2)  # why_not and variants of a shape are requested one after the other
def _divisions(shape: ConvShape, gpu: Gpu) -> tuple[_Division, ...]:
    """Return the paper's division, if the kernel has it, and for each segment the one estimated fastest."""
    segments = [n for n in SEGMENTS if n == min(SEGMENTS) or n // 2 < shape.fin * shape.itemsize]
    estimated = sorted(_estimate(shape, gpu, segment) for segment in segments)
    found = [_by_the_paper(shape, gpu, segments), *(division for _, division in estimated)]
    return tuple(dict.fromkeys(division for division in found if division is not None))


def _by_the_paper(shape: ConvShape, gpu: Gpu, segments: Sequence[int]) -> _Division | None:
    """Return the most pixels (W'_x) and fewest bytes (S) for which some number of filters (M') is in bounds (3.2).

    This departs from the paper in three points. A segment consists of maps, and a step takes several taps along x of
    it, as these share voxels. A block must hide the latency alone, within its share of the shared memory. Within the
    bounds the paper measured the best number of filters; here it is the largest one among those with the fewest sums
    outside of the layer. There must be a block for each multiprocessor, else pixels become fewer: the paper's GPU has
    28. None if the kernel has no such size.
    """
    fewest = card_of(gpu).multiprocessors
    found = _within_bounds(shape.fin, shape.fout, shape.k, shape.precision, gpu, tuple(segments))
    return next((division for division in found if _blocks(shape, division) >= fewest), None)


@lru_cache(maxsize=256)  # the same for images of all sizes
def _within_bounds(
    fin: int, fout: int, k: Vec3, precision: Precision, gpu: Gpu, segments: tuple[int, ...]
) -> tuple[_Division, ...]:
    """Return the best number of filters within the paper's bounds for each number of pixels and each segment."""
    card, shape, kept = card_of(gpu), ConvShape(1, fin, fout, k, k, precision=precision), []
    for voxels, segment in product(VOXELS, segments):
        channels, found = segment // shape.itemsize, []
        for maps in MAPS:
            division = _with_span(shape, _Division(channels, 1, voxels, maps), gpu)
            free = replace(card, shared_bytes=_shared_limit(gpu) - division.staged(COMMON) * PLACE_BYTES)
            taps = division.span * min(channels, _quads(shape.fin))
            bounds = divide_multiple(free, taps, voxels, division.image_bytes(COMMON, shape.itemsize))
            if bounds.fewest <= min(maps, shape.fout) and maps <= bounds.most:
                found.append(division)
        best = min(
            found, key=lambda division: (division.blocks(shape.fout) * division.maps, -division.maps), default=None
        )
        if best is not None:
            kept.append(best)
    return tuple(kept)


def _estimate(shape: ConvShape, gpu: Gpu, segment: int) -> tuple[float, _Division]:
    """Return the fastest of all sizes that the kernel has: the estimated cycles of a multiprocessor, and the division.

    Several blocks share a multiprocessor. A step of theirs takes the time of its products, or the memory latency of the
    next step's data if the products are fewer.
    """
    card, found = card_of(gpu), []
    for division, steps, step in _sizes(shape.fin, shape.k, shape.precision, gpu, segment):
        rounds, rest = divmod(-(-_blocks(shape, division) // card.multiprocessors), RESIDENT)
        cycles = rounds * max(RESIDENT * step, card.latency) + (max(rest * step, card.latency) if rest else 0.0)
        found.append((steps * cycles, division))
    return min(found)


@lru_cache(maxsize=256)  # the same for images of all sizes
def _sizes(fin: int, k: Vec3, precision: Precision, gpu: Gpu, segment: int) -> tuple[tuple[_Division, int, float], ...]:
    """Return all sizes that the kernel has, each with the steps of a block and the cycles of one step."""
    shape, found = ConvShape(1, fin, 1, k, k, precision=precision), []
    for voxels, maps in product(VOXELS, MAPS):
        division = _with_span(shape, _Division(segment // shape.itemsize, 1, voxels, maps), gpu)
        found.append((division, _steps(shape, division), _step_cycles(shape, division, card_of(gpu).products)))
    return tuple(found)


def _step_cycles(shape: ConvShape, division: _Division, products: int) -> float:
    """Return the cycles of one block's step alone: instructions issued, or reads of shared memory if they take longer.

    products  per cycle.
    """
    mine, my_maps, width = division.voxels // 16, division.maps // 8, 2 if division.maps % 32 else 4
    taps = division.span * min(division.channels, _quads(shape.fin))
    reads = mine / QUAD + my_maps / width  # per tap and thread
    passes = 2 * mine / QUAD + my_maps / 2  # reads of shared memory, per warp: 64 bytes of different addresses each
    copies = (division.voxels + division.span - 1) * division.channels * shape.itemsize / _copy_bytes(shape)
    kernels = FLOAT32 * taps * division.maps / 16
    issued = THREADS * taps * (mine * my_maps + reads) + COPY_ISSUES * copies + KERNEL_ISSUES * kernels
    return max(issued / products, THREADS // WARP * taps * passes)


def _copy_bytes(shape: ConvShape) -> int:
    """Return the most bytes at a time in which maps of voxels can be copied."""
    return next(nbytes for nbytes in (16, 8, 4, 2) if shape.fin * shape.itemsize % nbytes == 0)


def _steps(shape: ConvShape, division: _Division) -> int:
    """Return the steps of a block."""
    return shape.k[0] * shape.k[1] * -(-shape.k[2] // division.span) * -(-shape.fin // division.channels)


def _together(shape: ConvShape, division: _Division) -> int:
    """Return the steps in a part of a sum; 0: the sum is not cut."""
    if shape.precision != "fp32" or shape.fin * prod(shape.k) <= MOST_TERMS:
        return 0
    return PART_TERMS // (division.span * division.channels)  # steps of more terms do not fit shared memory


def _kernel(
    itemsize: int, division: _Division, nbytes: int, activation: Activation, *, vectors: bool, long: bool = False
) -> str:
    value = "half" if itemsize == 2 else "float"
    sizes = f"{division.channels}, {division.voxels}, {division.maps}, {nbytes}"
    return f"block<{value}, {sizes}, {ACTIVATIONS.index(activation)}, {str(vectors).lower()}, {str(long).lower()}>"


def instances() -> list[KernelInstance]:
    """Return the widest, the commonest and the narrowest kernels."""
    kinds = ((4, 8), (4, 16), (2, 16), (2, 32))
    names = [_kernel(item, _Division(f, 1, 128, 80), 16, "relu", vectors=True) for item, f in kinds]
    names += [_kernel(item, _Division(f, 1, 128, 64), 16, "relu", vectors=True) for item, f in kinds]
    names += [_kernel(item, _Division(16, 1, 128, 80), item, "tanh", vectors=False) for item in (4, 2)]
    names += [_kernel(item, _Division(16, 1, 32, 16), item, "sigmoid", vectors=False) for item in (4, 2)]
    names += [_kernel(4, _Division(8, 1, 128, maps), 16, "relu", vectors=True, long=True) for maps in (64, 80)]
    names += [_kernel(4, _Division(16, 1, 128, 80), 4, "tanh", vectors=False, long=True)]
    return [KernelInstance(SOURCE, name, REGISTERS) for name in names]


class _Resident(NamedTuple):
    kernels: Any  # float32, arranged for the variant as described in conv_block.cu
    bias: Any  # (padded f',) float32


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """Direct convolution by stride-fixed blocks."""

    name: str = "gpu.conv.block"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "many input maps, on float32 units: 32 or 64 bytes of maps at a time, prefetching the next"
    source: str = "Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU, 3.2"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_on_gpu(shape, machine, softmax=False):
            return reason
        shape = as_conv(shape)
        blocks = max(_blocks(shape, _Division.of(variant)) for variant in self.variants(shape, machine))
        if blocks > MOST_BLOCKS:
            return f"takes up to {MOST_BLOCKS} blocks of voxels and maps, not {blocks}"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        shape = as_conv(shape)
        assert machine.gpu is not None
        return tuple(division.variant for division in _divisions(shape, machine.gpu))

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape, division = as_conv(shape), _Division.of(variant)
        padded = division.blocks(shape.fout) * division.maps
        resident = FLOAT32 * padded * (prod(shape.k) * _quads(shape.fin) + 1)
        return Footprint(resident=resident, reads_carried=True, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape, division = as_conv(shape), _Division.of(variant)
        sums = _blocks(shape, division) * division.voxels * division.maps
        products = sums * prod(shape.k) * _quads(shape.fin)
        together = _together(shape, division)
        writes = -(-_steps(shape, division) // together) if together else 1
        return (Work("gpu_block", 2.0 * products, shape.in_bytes + (2 * writes - 1) * shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> _Resident:
        assert weights is not None
        division, (fout, fin, kz, ky, kx) = _Division.of(variant), weights.weight.shape
        blocks = division.blocks(fout)
        more, rest = blocks * division.maps - fout, _quads(fin) - fin
        taps = weights.weight.transpose(2, 3, 4, 1, 0).reshape(kz * ky, kx, fin, fout)
        padded = np.pad(taps, ((0, 0), (0, 0), (0, rest), (0, more)))
        cut = padded.reshape(kz * ky, kx, fin + rest, blocks, division.maps).transpose(3, 0, 1, 2, 4)
        steps = [
            cut[:, :, x : x + division.span, f : f + division.channels].reshape(blocks, kz * ky, -1)
            for x in range(0, kx, division.span)
            for f in range(0, fin, division.channels)
        ]
        return _Resident(
            device.put(np.concatenate(steps, axis=2), "kernels of gpu.conv.block"),
            device.put(np.pad(weights.bias, (0, more)), "biases of gpu.conv.block"),
        )

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        return _Step(resident, as_conv(shape), _Division.of(variant), device)


def _quads(fin: int) -> int:
    """Return the input maps in whole QUADs."""
    return -(-fin // QUAD) * QUAD


class _Step:
    def __init__(self, resident: _Resident, shape: ConvShape, division: _Division, device: Device) -> None:
        self._resident, self._shape, self._division, self._device = resident, shape, division, device
        self._tile = _tile(shape.out, division, shape.itemsize)
        self._nbytes = _copy_bytes(shape)  # alignment of the images that it needs
        self._together = _together(shape, division)
        sizes, long = ((self._nbytes, shape.fout % 4 == 0), (shape.itemsize, False)), self._together > 0
        names = [
            _kernel(shape.itemsize, division, n, shape.activation, vectors=vectors, long=long) for n, vectors in sizes
        ]
        compiled = device.kernels(SOURCE, list(dict.fromkeys(names)))
        self._kernel, self._unaligned = (compiled[name] for name in names)

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
        del scratch, x_peak
        shape, division, tile, itemsize, d = self._shape, self._division, self._tile, self._shape.itemsize, self._device
        old = x if before is None else before
        (mz, my, mx), (kz, ky, kx) = shape.out, shape.k
        begins = (d.address(old), old.strides[0], d.address(x), x.strides[0])
        ends = (d.address(out), out.strides[0])
        aligned = all(n % self._nbytes == 0 for n in begins) and all(n % (4 * itemsize) == 0 for n in ends)
        kernel = self._kernel if aligned else self._unaligned
        kernel(
            (division.blocks(shape.fout) * tile.count(shape.out) * len(x),),
            (THREADS,),
            *(old, old.strides[0] // itemsize, x, x.strides[0] // itemsize, out, out.strides[0] // itemsize),
            *self._resident,
            *(shape.n[0] - x.shape[1], *shape.n[1:], shape.fin, mz, my, mx, shape.fout, kz, ky, kx),
            *(division.span, tile.wide, tile.lines, self._together),
            np.uint64(out_peak),
            shared=division.shared_bytes(tile.wide, itemsize),
        )
