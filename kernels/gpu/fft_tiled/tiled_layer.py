"""Divide a layer into tiles: candidate tiles, bytes between the kernels, the work of each. Arithmetic only.

The planner requests tens of thousands of variants, so values common to several of them are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import log2, prod
from typing import NamedTuple

from znnpy.kernels.contract import Scratch, Unit, Work
from znnpy.kernels.gpu.fft_tiled.spectra import packed_bytes, preparing_bytes, slab_frequencies
from znnpy.kernels.gpu.fft_tiled.tiles import (
    NUMBER,
    POOL_COLUMNS,
    POOL_ROWS,
    SIDES,
    SIDES_Z,
    Cover,
    Spectra,
    Tiling,
    frequencies,
    padded,
    plane_block,
)
from znnpy.shapes import ConvShape, Vec3

EXCESS = 1.3  # tiles may cover this many times the smallest total volume: larger ones are slower
_FFT: dict[int, Unit] = {16: "gpu_fft16", 24: "gpu_fft24", 32: "gpu_fft32"}  # unit by the side of a plane


@lru_cache(maxsize=2)  # why_not and variants of a shape are requested one after the other
def tiles_for(shape: ConvShape, spectra: Spectra, shared_bytes: int) -> Sequence[Vec3]:
    """Return the tiles that hold the kernel, fit a block, and cover little more than the best does."""
    covered: dict[Vec3, int] = {}
    least = shape.k[0] + shape.pool[0] - 1, *shape.k[1:]  # a window along z lies within one tile
    fitting = [
        side
        for side in SIDES
        if side >= max(least[1:])
        and all(plane_block(side, spectra, padded(maps), shared_bytes) for maps in (shape.fin, shape.fout))
    ]
    for z, side in product(SIDES_Z, fitting):
        if z >= least[0]:
            tile = z, side, side
            covered[tile] = Tiling.of(shape, tile).tiles * frequencies(tile)
    fewest = min(covered.values(), default=0)
    return tuple(tile for tile, numbers in covered.items() if numbers <= EXCESS * fewest)


@lru_cache(maxsize=256)  # the same for images of all sizes
def kernel_bytes(fin: int, fout: int, k: Vec3, tile: Vec3, spectra: Spectra, streamed: bool) -> tuple[int, int, int]:
    """Return the bytes of kernel spectra, of the slabs that stream them, and of preparing them without an arena."""
    packed, count = packed_bytes(fin, fout, tile, spectra), frequencies(tile)
    slabs = 2 * packed // count * slab_frequencies(count)
    return packed, slabs, preparing_bytes(fin, k, tile, spectra, streamed=streamed)


class TiledLayer(NamedTuple):
    """A layer divided into tiles; its kernels may be kept or streamed."""

    cover: Cover
    spectra: Spectra
    scratch: tuple[Scratch, ...]  # buffers between the kernels of a group
    stages: tuple[Work, ...]


@lru_cache(maxsize=4)  # the planner requests both, one after the other
def tiled_layer(shape: ConvShape, tile: Vec3, group: int, spectra: Spectra) -> TiledLayer:
    """Divide `shape` into tiles, in groups of about `group`."""
    cover = Cover(shape, tile, group)
    columns, planes, products, results = cover.most_bytes(spectra)
    scratch = (
        Scratch("columns", columns, 0, 1),
        Scratch("spectra", planes, 1, 2),
        Scratch("products", products, 2, 3),
        Scratch("results", results, 3, 4),
    )
    forward, (unit, flops, moved), inverse = _stages(shape, tile, spectra)
    kernels = cover.count * packed_bytes(shape.fin, shape.fout, tile, spectra)
    return TiledLayer(cover, spectra, scratch, (*forward, Work(unit, flops, float(moved + kernels)), *inverse))


@lru_cache(maxsize=16)  # the planner requests all groups of a tile one after the other
def _stages(
    shape: ConvShape, tile: Vec3, spectra: Spectra
) -> tuple[tuple[Work, Work], tuple[Unit, float, int], tuple[Work, Work]]:
    """Return forward transforms, the product with its bytes except kernels, and inverse transforms, for all groups."""
    tiling = Tiling.of(shape, tile)
    fin, fout = padded(shape.fin), padded(shape.fout)
    kept = frequencies(tile) * tiling.tiles * NUMBER[spectra]  # bytes of one map's spectra
    slabs = shape.batch * tiling.grid[0] * tile[0] // 2 * NUMBER[spectra]
    columns = slabs * prod(shape.n[1:]), slabs * prod(shape.unpooled[1:])  # bytes of one map's columns
    # A complex transform of n points takes 5 n log2 n flops, and two maps share one.
    along_z = 2.5 * shape.batch * tiling.grid[0] * tile[0] * log2(tile[0])
    # Windows along x and y overlap between warps and between blocks.
    again = prod(
        1 + (side - 1) / taken for side, taken in zip(shape.pool[1:], (POOL_ROWS, POOL_COLUMNS - 1), strict=True)
    )
    planes = 2.5 * prod(tile) * log2(tile[1] * tile[2]) * tiling.tiles
    unit = _FFT[tile[1]]
    product_unit: Unit = "gpu_split_product" if spectra == "split" else "gpu_half_product"
    times = 3 if spectra == "split" else 1
    return (
        (
            Work("gpu_fft16", along_z * prod(shape.n[1:]) * fin, float(shape.in_bytes + columns[0] * fin)),
            Work(unit, planes * fin, float((columns[0] + kept) * fin)),
        ),
        (product_unit, 8.0 * times * frequencies(tile) * tiling.tiles * fin * fout, kept * (fin + fout)),
        (
            Work(unit, planes * fout, float((columns[1] + kept) * fout)),
            Work(
                "gpu_fft16",
                again * along_z * prod(shape.unpooled[1:]) * fout,
                float(shape.out_bytes + columns[1] * fout),
            ),
        ),
    )
