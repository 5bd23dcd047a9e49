"""Fused tiled FFT convolution on a GPU: three kernels a group of tiles, spectra in float16 or in two of them.

forward   overlapping tiles of the input, transformed in shared memory: forward.cu
product   per frequency (tiles x maps in) x (maps in x maps out), on tensor cores: product.cu
inverse   transformed back, cropped, bias, activation: inverse.cu

half   spectra in float16, scaled by the largest value of the input so that none can overflow; sums in float32. Ten bits
       of mantissa, as tf32: precisions tf32 and fp16.
split  spectra as two float16, the second what the first leaves out: fp32, at three times the products.

Source   overlap-save; products per frequency after Mathieu, Henaff, LeCun 2014, tiles after Zlateski et al. 2018.
Bound    Memory: of 80 -> 80 maps, k = 3, half: input, output and four times 304 bytes an output voxel.
Tested   tests/gpu/test_conv_fft_tiled.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import TYPE_CHECKING, Any

from znnpy.kernels.gpu.fft_tiled.spectra import KernelSpectra, preparing_bytes, resident_bytes, transform_kernels
from znnpy.kernels.gpu.fft_tiled.tiles import TILES, Block, Cover, Spectra, block_for, frequencies, padded
from znnpy.kernels.primitive import Footprint, Kind, Scratch, Unit, Variant, Work, as_conv
from znnpy.shapes import ACTIVATIONS

if TYPE_CHECKING:
    from znnpy.machine import Machine
    from znnpy.network import ConvWeights
    from znnpy.shapes import ConvShape, LayerShape, Vec3

GROUPS = (256, 1024, 4096, 16384)  # tiles whose spectra there are at a time
EXCESS = 1.3  # times the least volume that tiles cover together: those that cover more are slower
_FFT: dict[int, Unit] = {16: "gpu_fft16", 24: "gpu_fft24", 32: "gpu_fft32"}  # by the longest side
_CHUNK = 160  # of the product's depth that is in shared memory at a time
_NEEDS_DEVICE = "needs a CUDA device"


def spectra_for(shape: ConvShape) -> Spectra:
    """What keeps to the shape's precision."""
    return "split" if shape.precision == "fp32" else "half"


@dataclass(frozen=True, slots=True)
class _Product:
    """Which instance of the product kernel takes a layer, and how it is launched."""

    spectra: Spectra
    columns: int
    depth: int

    @property
    def slices(self) -> int:
        """Blocks that share the columns of a frequency."""
        return -(-self.columns // (160 if self.spectra == "half" else 80))

    @property
    def tiles(self) -> int:
        """Of 8 columns, for each warp."""
        warps = 4 if self.spectra == "half" else 2
        return -(-self.columns // (8 * warps * self.slices))

    @property
    def name(self) -> str:
        if self.spectra == "half":
            return f"product<Halves, half, 2, 4, 2, {self.tiles}, 2>"
        return f"product<Split, float, 4, 2, 1, {self.tiles}, 1>"

    @property
    def chunk(self) -> int:
        """A part of the depth, a multiple of 16."""
        parts = -(-self.depth // _CHUNK)
        return -(-self.depth // (16 * parts)) * 16

    @property
    def grid_columns(self) -> int:
        """Blocks a frequency: slices of as many columns as an instance takes."""
        width = 8 * self.tiles * (4 if self.spectra == "half" else 2)
        return -(-self.columns // width)

    @property
    def shared_bytes(self) -> int:
        words, warps, stages = (1, 4, 2) if self.spectra == "half" else (2, 2, 1)
        rows = stages * 64 * (words * self.chunk + 8) + words * 8 * warps * self.tiles * (self.chunk + 8)
        return 2 * rows


@dataclass(frozen=True, slots=True)
class ConvFftTiled:
    """Fused tiled FFT: many maps, kernels from 2 on; kernel spectra are kept between patches."""

    name: str = "gpu.conv.fft_tiled"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "many maps and kernels of 2 or more: overlapping tiles, products on tensor cores"
    source: str = "overlap-save; per-frequency products after Mathieu, Henaff, LeCun 2014"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return _NEEDS_DEVICE
        if machine.gpu.capability < (8, 0):
            return (
                f"needs tensor cores of sm_80 or newer, not sm_{machine.gpu.capability[0]}{machine.gpu.capability[1]}"
            )
        shape = as_conv(shape)
        if shape.pools:
            return "does not pool what it computes"
        if shape.activation == "softmax":
            return "a softmax runs over all maps, and a block has a few: see gpu.conv.direct"
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see gpu.conv.direct"
        if not self._tiles(shape, machine):
            return f"a kernel of {max(shape.k)} is larger than the tiles that this GPU's shared memory holds"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        shape = as_conv(shape)
        spectra = spectra_for(shape)
        found: dict[Variant, None] = {}
        for tile in self._tiles(shape, machine):
            tiles = Cover(shape, tile, 1).tiles
            for group in GROUPS:
                found[Variant.of(tile=tile, group=min(group, tiles), spectra=spectra)] = None
        return tuple(found)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape, cover, spectra = _of(shape, variant)
        whole = cover.largest_group == cover.tiles  # the input is read before the output is written
        tile = variant.size("tile")
        return Footprint(
            resident=resident_bytes(shape.fin, shape.fout, tile, spectra),
            input_until=0,
            output_from=2 if whole else 0,
            stages=3 if whole else 1,
            scratch=(
                Scratch("spectra", cover.spectrum_bytes(shape.fin, spectra), 0, 1 if whole else 0),
                Scratch("products", cover.spectrum_bytes(shape.fout, spectra), 1 if whole else 0, 2 if whole else 0),
            ),
            reads_carried=True,
            reads_peak=True,
            raises_peak=True,
            allowance=preparing_bytes(shape.fin, shape.k, tile),
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape, cover, spectra = _of(shape, variant)
        tile = variant.size("tile")
        number = 4 if spectra == "half" else 8
        kept = frequencies(tile) * cover.tiles * number  # bytes of one map's spectra
        # A complex transform of n points is 5 n log2 n flops, and two maps share one.
        flops = 2.5 * prod(tile) * log2(prod(tile)) * cover.tiles
        unit = _FFT[max(16, *tile)]
        fin, fout = padded(shape.fin), padded(shape.fout)
        outputs = shape.itemsize * prod(shape.out_shape[:4]) * shape.fout
        inputs = shape.itemsize * min(cover.tiles * prod(tile), 2 * prod(shape.in_shape[:4])) * shape.fin
        times = 1 if spectra == "half" else 3
        return (
            Work(unit, flops * fin, float(kept * fin + inputs)),
            Work(
                "gpu_half_product" if spectra == "half" else "gpu_split_product",
                8.0 * times * frequencies(tile) * cover.tiles * fin * fout,
                float(kept * (fin + fout) + len(cover.groups) * resident_bytes(shape.fin, shape.fout, tile, spectra)),
            ),
            Work(unit, flops * fout, float(kept * fout + outputs)),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Any) -> KernelSpectra:
        assert weights is not None
        tile, spectra = variant.size("tile"), _spectra(variant)
        block = _block(tile, "split", device.gpu.shared_block_bytes)  # tiles of float32 are as wide
        return transform_kernels(weights, tile, spectra, block, device)

    def bind(self, resident: KernelSpectra, shape: LayerShape, variant: Variant, device: Any) -> _Step:
        shape, cover, spectra = _of(shape, variant)
        return _Step(resident, shape, cover, spectra, device)

    def _tiles(self, shape: ConvShape, machine: Machine) -> Sequence[Vec3]:
        """Tiles that hold the kernel, fit a block, and do not cover much more than the best do."""
        assert machine.gpu is not None
        shared, spectra = machine.gpu.shared_block_bytes, spectra_for(shape)
        covered = {}
        for tile in TILES:
            here = block_for(tile, spectra, shared) and block_for(tile, "split", shared)
            if here and all(side >= k for side, k in zip(tile, shape.k, strict=True)):
                covered[tile] = Cover(shape, tile, 1).tiles * prod(tile)
        least = min(covered.values(), default=0)
        return tuple(tile for tile, voxels in covered.items() if voxels <= 2 * EXCESS * least)


class _Step:
    """A DeviceStep."""

    def __init__(self, resident: KernelSpectra, shape: ConvShape, cover: Cover, spectra: Spectra, device: Any) -> None:
        self._resident, self._shape, self._cover = resident, shape, cover
        self._device = device
        self._block = _block(cover.tile, spectra, device.gpu.shared_block_bytes)
        self._maps = padded(shape.fin), padded(shape.fout)
        self._product = _Product(spectra, 2 * self._maps[1], 2 * self._maps[0])
        value = "half" if shape.precision == "fp16" else "float"
        names = [self._block.instance(kernel, value) for kernel in ("forward", "inverse")]
        self._forward = device.kernels("fft_tiled/forward.cu", names[:1])[names[0]]
        self._inverse = device.kernels("fft_tiled/inverse.cu", names[1:])[names[1]]
        self._multiply = device.kernels("fft_tiled/product.cu", [self._product.name])[self._product.name]
        self.stages = (self._transform, self._products, self._back)

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
        for group in self._cover.groups:
            self._transform(group, x, before, scratch, x_peak)
            self._products(group, scratch)
            self._back(group, out, scratch, x_peak, out_peak)

    def _transform(
        self, group: tuple[int, int], x: Any, before: Any | None, scratch: Mapping[str, Any], x_peak: int
    ) -> None:
        shape, maps = self._shape, self._maps[0]
        carried = 0 if before is None else before.shape[1]
        self._forward(
            (group[1] * maps // self._block.maps,),
            (self._block.threads,),
            *(x, before, scratch["spectra"], x_peak),
            *(*group, *self._cover.grid, *self._cover.step, *shape.n, shape.fin, x.strides[0] // shape.itemsize),
            *(carried, 0 if before is None else before.strides[0] // shape.itemsize, maps),
            shared=self._block.shared_bytes,
        )

    def _products(self, group: tuple[int, int], scratch: Mapping[str, Any]) -> None:
        product, resident = self._product, self._resident
        count = frequencies(self._cover.tile)
        self._multiply(
            (count * product.grid_columns,),
            (256,),
            *(scratch["spectra"], resident.packed, scratch["products"]),
            *(group[1], product.columns, product.depth, count * product.columns * product.depth, product.chunk),
            resident.alpha,
            shared=product.shared_bytes,
        )

    def _back(self, group: tuple[int, int], out: Any, scratch: Mapping[str, Any], x_peak: int, out_peak: int) -> None:
        shape, maps = self._shape, self._maps[1]
        self._inverse(
            (group[1] * maps // self._block.maps,),
            (self._block.threads,),
            *(scratch["products"], out, self._resident.bias, x_peak, out_peak),
            *(*group, *self._cover.grid, *self._cover.step, *shape.out, shape.fout, out.strides[0] // shape.itemsize),
            *(maps, ACTIVATIONS.index(shape.activation), self._resident.factor),
            shared=self._block.shared_bytes,
        )


def _of(shape: LayerShape, variant: Variant) -> tuple[ConvShape, Cover, Spectra]:
    shape = as_conv(shape)
    return shape, Cover(shape, variant.size("tile"), variant.count("group")), _spectra(variant)


def _spectra(variant: Variant) -> Spectra:
    return "half" if variant.word("spectra") == "half" else "split"


def _block(tile: Vec3, spectra: Spectra, shared_bytes: int) -> Block:
    block = block_for(tile, spectra, shared_bytes)
    assert block is not None, f"why_not lets no {tile} tile of {spectra} spectra through on this GPU"
    return block
