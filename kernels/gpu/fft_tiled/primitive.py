"""Fused tiled FFT convolution on a GPU: five kernels per group of tiles, spectra in float16 or in two of them.

forward_z      columns of the input, transformed along z: registers only; forward.cu
forward_plane  overlapping planes of tiles, transformed along y and x in shared memory
product        per frequency (tiles x maps in) x (maps in x maps out), on tensor cores: product.cu
inverse_plane  inverse transforms of planes, cropped: inverse.cu
inverse_z      inverse transforms of columns, bias, activation; inverse_z_pool: max-pooling into fragments first

half   spectra in float16, scaled by the largest input value so that none can overflow; sums in float32. Ten bits of
       mantissa, as tf32.
quick  the same, and transforms along y and x in float16 too: precision fp16.
split  spectra as two float16, the second being the remainder of the first: fp32, at three times the products.

Source   overlap-save; products per frequency after Mathieu, Henaff, LeCun 2014, tiles after Zlateski et al. 2018.
Bound    Memory: for 80 -> 80 maps, k = 3, tiles of 32^3, half: about 2,100 bytes an output voxel, with input and
         output.
Tested   tests/kernels/gpu/fft_tiled/test_primitive.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv
from znnpy.kernels.gpu.fft_tiled.spectra import WORDS, KernelSpectra, packed_bytes, transform_kernels
from znnpy.kernels.gpu.fft_tiled.streaming import KernelStream
from znnpy.kernels.gpu.fft_tiled.tiled_layer import TiledLayer, kernel_bytes, tiled_layer, tiles_for
from znnpy.kernels.gpu.fft_tiled.tiles import (
    COLUMN_THREADS,
    MAPS,
    NUMBER,
    POOL_COLUMNS,
    POOL_ROWS,
    POOL_THREADS,
    TYPES,
    Cover,
    Group,
    PlaneBlock,
    Spectra,
    Tiling,
    frequencies,
    padded,
    plane_block,
)
from znnpy.shapes import ACTIVATIONS, ConvShape, text

if TYPE_CHECKING:
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Machine
    from znnpy.network import ConvWeights
    from znnpy.shapes import Precision, Vec3

GROUPS = (64, 256, 1024, 4096)  # tiles whose spectra are in memory at the same time
STREAMED_FROM = 2**26  # bytes of kernel spectra: smaller ones are always kept on the device
_WARP = 32
_CHUNK = 160  # part of the product's depth that is in shared memory at a time


def spectra_for(shape: ConvShape) -> Spectra:
    """Return the type of spectra that satisfies the shape's precision."""
    by_precision: dict[Precision, Spectra] = {"fp32": "split", "tf32": "half", "fp16": "quick"}
    return by_precision[shape.precision]


# Warps along rows and columns of the product, matrices of 16 rows for each, stages of rows in shared memory, blocks per
# multiprocessor: the first whose shared memory fits is used. Matrices of 8 columns for each warp are at most MOST.
_PRODUCTS: dict[Spectra, tuple[tuple[int, int, int, int, int], ...]] = {
    "half": ((2, 4, 2, 2, 2),),
    "quick": ((2, 4, 2, 2, 2),),
    "split": ((2, 4, 2, 2, 1), (4, 2, 1, 1, 2)),
}
_MOST = 5


@dataclass(frozen=True, slots=True)
class _Product:
    """The instance of the product kernel for a layer, and its launch parameters."""

    spectra: Spectra
    columns: int
    depth: int
    block: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, spectra: Spectra, columns: int, depth: int, shared_bytes: int) -> _Product | None:
        """Return the first that fits shared memory; None if none does."""
        products = (cls(spectra, columns, depth, block) for block in _PRODUCTS[spectra])
        return next((product for product in products if product.shared_bytes <= shared_bytes), None)

    @property
    def tiles(self) -> int:
        """The matrices of 8 columns for each warp."""
        width = 8 * self.block[1]
        slices = -(-self.columns // (_MOST * width))
        return -(-self.columns // (width * slices))

    @property
    def width(self) -> int:
        """The columns of a block."""
        return 8 * self.block[1] * self.tiles

    @property
    def chunk(self) -> int:
        """The part of the depth processed at a time, a multiple of 16."""
        parts = -(-self.depth // _CHUNK)
        return -(-self.depth // (16 * parts)) * 16

    @property
    def name(self) -> str:
        types = "Split, float" if self.spectra == "split" else "Halves, half"
        rows, columns, matrices, stages, blocks = self.block
        return f"product<{types}, {rows}, {columns}, {matrices}, {self.tiles}, {stages}, {self.chunk}, {blocks}>"

    @property
    def slices(self) -> int:
        """The blocks that share the columns of a frequency."""
        return -(-self.columns // self.width)

    @property
    def threads(self) -> int:
        return 32 * self.block[0] * self.block[1]

    @property
    def shared_bytes(self) -> int:
        words = WORDS[self.spectra]
        rows = self.block[3] * 16 * self.block[0] * self.block[2] * (max(words * self.chunk, self.width) + 8)
        return 2 * (rows + words * self.width * (self.chunk + 8))


@dataclass(frozen=True, slots=True)
class ConvFftTiled:
    """Fused tiled FFT: for many maps, kernels from 2 on; kernel spectra are kept between patches."""

    name: str = "gpu.conv.fft_tiled"
    kind: Kind = "conv"
    version: int = 2
    summary: str = "many maps and kernels of 2 or more: overlapping tiles, products on tensor cores"
    source: str = "overlap-save; per-frequency products after Mathieu, Henaff, LeCun 2014"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if not isinstance(shape, ConvShape):
            return f"computes convolutions, not {shape.kind}"
        if machine.gpu is None:
            return "needs a CUDA device"
        if machine.gpu.capability < (8, 0):
            return (
                f"needs tensor cores of sm_80 or newer, not sm_{machine.gpu.capability[0]}{machine.gpu.capability[1]}"
            )
        if max(shape.pool) > 2:
            return f"fuses pooling by 1 or 2 along each axis, not by {text(shape.pool)}"
        if shape.activation == "softmax":
            return "softmax needs all maps, and a block has only some: see gpu.conv.direct"
        if shape.k == (1, 1, 1):
            return "a 1x1x1 kernel is one matrix product: see gpu.conv.direct"
        if not self._tiles(shape, machine):
            return f"a kernel of {max(shape.k)} is larger than the tiles that fit this GPU's shared memory"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        shape = as_conv(shape)
        spectra = spectra_for(shape)
        found: list[Variant] = []
        for tile in self._tiles(shape, machine):
            tiles = Tiling.of(shape, tile).tiles
            streams = packed_bytes(shape.fin, shape.fout, tile, spectra) >= STREAMED_FROM
            found.extend(
                _variant(tile, group, spectra, kernels)
                for group in dict.fromkeys(min(group, tiles) for group in GROUPS)
                for kernels in (("kept", "streamed") if streams else ("kept",))
            )
        return tuple(found)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape, (cover, spectra, scratch, _) = _of(shape, variant)
        whole = cover.count == 1  # all of the input is read before the output is written
        streamed = _streams(variant)
        packed, slabs, preparing = kernel_bytes(shape.fin, shape.fout, shape.k, cover.tile, spectra, streamed)
        footprint = Footprint(
            resident=4 * shape.fout + (0 if streamed else packed),
            host=packed if streamed else 0,
            input_until=0 if whole else 4,
            output_from=4 if whole else 0,
            stages=5,
            scratch=(*scratch, Scratch("kernels", slabs, 2, 2)) if streamed else scratch,
            reads_carried=True,
            reads_peak=True,
            raises_peak=True,
        )
        largest = max([nbytes for _, nbytes, _, _ in scratch])
        if preparing <= largest or preparing <= (working := footprint.working(shape)):
            return footprint
        return replace(footprint, allowance=preparing - working)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape, (cover, spectra, _, stages) = _of(shape, variant)
        if not _streams(variant):
            return stages
        kernels = cover.count * packed_bytes(shape.fin, shape.fout, cover.tile, spectra)
        return (*stages, Work("gpu_upload", 0.0, float(kernels)))

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Any) -> KernelSpectra:
        assert weights is not None
        return transform_kernels(weights, variant.size("tile"), _spectra(variant), device, streamed=_streams(variant))

    def bind(self, resident: KernelSpectra, shape: LayerShape, variant: Variant, device: Any) -> _Step:
        shape, (cover, spectra, _, _) = _of(shape, variant)
        stream = KernelStream(resident, device) if _streams(variant) else None
        return _Step(resident, shape, cover, spectra, device, stream)

    def _tiles(self, shape: ConvShape, machine: Machine) -> Sequence[Vec3]:
        assert machine.gpu is not None
        return tiles_for(shape, spectra_for(shape), machine.gpu.shared_block_bytes)


class _Step:
    """A DeviceStep."""

    def __init__(
        self,
        resident: KernelSpectra,
        shape: ConvShape,
        cover: Cover,
        spectra: Spectra,
        device: Any,
        stream: KernelStream | None,
    ) -> None:
        self._resident, self._shape, self._cover, self._stream = resident, shape, cover, stream
        shared = device.gpu.shared_block_bytes
        self._maps = padded(shape.fin), padded(shape.fout)
        product = _Product.of(spectra, 2 * self._maps[1], 2 * self._maps[0], shared)
        assert product is not None, f"no product of {spectra} spectra fits {shared} bytes of shared memory"
        self._product = product
        self._blocks = [_block(cover.tile[1], spectra, maps, shared) for maps in self._maps]
        self._exponent = prod(cover.tile).bit_length() - 1
        value = "half" if shape.precision == "fp16" else "float"
        stored, number, _ = TYPES[spectra]
        names = (
            f"forward_z<{cover.tile[0]}, {stored}, {value}>",
            self._blocks[0].forward(),
            self._product.name,
            self._blocks[1].inverse,
            f"{'inverse_z_pool' if shape.pools else 'inverse_z'}<{cover.tile[0]}, {number}, {value}>",
        )
        sources = [f"fft_tiled/{name}.cu" for name in ("forward", "forward", "product", "inverse", "inverse")]
        self._kernels = [device.kernels(source, [name])[name] for source, name in zip(sources, names, strict=True)]

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
            for stage in self.stages(group, x, out, scratch, before, x_peak=x_peak, out_peak=out_peak):
                stage()

    def stages(
        self,
        group: Group,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None,
        *,
        x_peak: int,
        out_peak: int,
    ) -> tuple[Callable[[], None], ...]:
        """Return the five kernels of one group as calls, for `run` and for benchmarks."""
        inverse_z = self._inverse_z_pool if self._shape.pools else self._inverse_z
        return (
            lambda: self._forward_z(group, x, before, scratch["columns"], x_peak),
            lambda: self._forward_plane(group, scratch["columns"], scratch["spectra"]),
            lambda: self._multiply(group, scratch),
            lambda: self._inverse_plane(group, scratch["products"], scratch["results"]),
            lambda: inverse_z(group, scratch["results"], out, x_peak, out_peak),
        )

    def _forward_z(self, group: Group, x: Any, before: Any | None, columns: Any, x_peak: int) -> None:
        shape, cover, maps = self._shape, self._cover, self._maps[0]
        y0, rows = cover.rows_in(group)
        carried = (0, 0) if before is None else (before.shape[1], before.strides[0] // shape.itemsize)
        self._kernels[0](
            (-(-shape.n[2] * maps // 2 // COLUMN_THREADS), rows, group.slabs),
            (COLUMN_THREADS,),
            *(x, before, columns, x_peak, group.first, cover.grid[0], cover.step[0], shape.n[0], shape.n[1], y0, rows),
            *(shape.n[2], shape.fin, maps, x.strides[0] // shape.itemsize, *carried, self._exponent),
        )

    def _forward_plane(self, group: Group, columns: Any, spectra: Any) -> None:
        rows = self._cover.rows_in(group)[1]
        self._plane(1, self._blocks[0], group, columns, spectra, rows, self._shape.n[2], self._maps[0])

    def _multiply(self, group: Group, scratch: Mapping[str, Any]) -> None:
        """Multiply all frequencies at once or, if they are streamed, one slab after the other."""
        product, tile = self._product, self._cover.tile
        slabs = (
            [(0, frequencies(tile), self._resident.packed)]
            if self._stream is None
            else self._stream.slabs(scratch["kernels"])
        )
        spectra, products = scratch["spectra"], scratch["products"]
        number = (
            NUMBER[product.spectra] * group.tiles // 2
        )  # bytes of a frequency's reals of one map: half a complex number
        for lo, hi, packed in slabs:
            self._kernels[2](
                ((hi - lo) * product.slices,),
                (product.threads,),
                *(spectra[lo * number * product.depth :], packed, products[lo * number * product.columns :]),
                *(group.tiles, product.columns, product.depth, packed[0].size, self._resident.alpha),
                shared=product.shared_bytes,
            )

    def _inverse_plane(self, group: Group, products: Any, results: Any) -> None:
        rows = self._cover.rows_out(group)[1]
        self._plane(3, self._blocks[1], group, products, results, rows, self._shape.unpooled[2], self._maps[1])

    def _plane(
        self, kernel: int, block: PlaneBlock, group: Group, source: Any, target: Any, ny: int, nx: int, maps: int
    ) -> None:
        planes = self._cover.tile[0] // 2
        self._kernels[kernel](
            (maps // block.maps * group.tiles * planes,),
            (block.threads,),
            *(source, target, group.slabs, group.rows, group.columns, *self._cover.step[1:], ny, nx, maps, planes),
            shared=block.shared_bytes,
        )

    def _inverse_z(self, group: Group, results: Any, out: Any, x_peak: int, out_peak: int) -> None:
        shape, cover, maps = self._shape, self._cover, self._maps[1]
        (nz, height, nx), (y0, rows) = shape.unpooled, cover.rows_out(group)
        self._kernels[4](
            (-(-nx * maps // 2 // COLUMN_THREADS), rows, group.slabs),
            (COLUMN_THREADS,),
            *(
                results,
                out,
                self._resident.bias,
                x_peak,
                out_peak,
                group.first,
                cover.grid[0],
                cover.step[0],
                nz,
                height,
            ),
            *(y0, rows, nx, shape.fout, maps, out.strides[0] // shape.itemsize, ACTIVATIONS.index(shape.activation)),
            *(self._resident.factor, self._exponent),
        )

    def _inverse_z_pool(self, group: Group, results: Any, out: Any, x_peak: int, out_peak: int) -> None:
        shape, cover, maps, (pz, py, px) = self._shape, self._cover, self._maps[1], self._shape.pool
        (nz, my, mx), (y0, rows) = cover.windows, cover.rows_out(group)
        warps = -(-mx // (POOL_COLUMNS - (px - 1))) * maps // MAPS
        kept_bytes = cover.step[0] * POOL_THREADS * 8
        self._kernels[4](
            (-(-warps * _WARP // POOL_THREADS), -(-(rows - (py - 1)) // POOL_ROWS), group.slabs),
            (POOL_THREADS,),
            *(results, out, self._resident.bias, x_peak, out_peak, group.first, cover.grid[0], cover.step[0]),
            *(nz, my, mx, y0, rows, shape.unpooled[2], shape.fout, maps, out.strides[0] // shape.itemsize),
            *(ACTIVATIONS.index(shape.activation), self._resident.factor, self._exponent, pz, py, px, POOL_ROWS),
            shared=kept_bytes if py > 1 else 0,
        )


def _of(shape: LayerShape, variant: Variant) -> tuple[ConvShape, TiledLayer]:
    shape = as_conv(shape)
    return shape, tiled_layer(shape, *_settings(variant))


@lru_cache(maxsize=256)  # thousands of shapes share a few
def _variant(tile: Vec3, group: int, spectra: Spectra, kernels: str) -> Variant:
    return Variant.of(tile=tile, group=group, spectra=spectra, kernels=kernels)


@lru_cache(maxsize=256)
def _settings(variant: Variant) -> tuple[Vec3, int, Spectra]:
    return variant.size("tile"), variant.count("group"), _spectra(variant)


def _spectra(variant: Variant) -> Spectra:
    word = variant.text("spectra")
    return "quick" if word == "quick" else "split" if word == "split" else "half"


def _streams(variant: Variant) -> bool:
    return variant.text("kernels") == "streamed"


def _block(side: int, spectra: Spectra, maps: int, shared_bytes: int) -> PlaneBlock:
    block = plane_block(side, spectra, maps, shared_bytes)
    assert block is not None, f"why_not lets no tiles of {side} with {spectra} spectra through on this GPU"
    return block
