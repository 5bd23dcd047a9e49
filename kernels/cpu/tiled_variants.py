"""The variants of the tiled FFT convolution in compiled code: tiles, groups of them, and which maps are upsampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from znnpy.kernels.contract import Variant
from znnpy.kernels.cpu.native.library import blocks
from znnpy.kernels.cpu.tiled_products import Products
from znnpy.kernels.cpu.tiles import tiles_worth
from znnpy.layers import ONE
from znnpy.shapes import ConvShape, Vec3, add, subtract, valid

SIDES = (4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32)  # lengths for which tiled.cpp has straight-line code, besides 1
GROUPS = ((32, 0), (128, 0), (512, 0), (8, 1), (64, 1))  # (tiles that share one pass over the kernels, kept)
MOST_SPREAD = 5.1  # of products near the bound of a precision: more would break it where one voxel outshines all others
FEW_TILES = 16  # above this, groups of 8 would wait for kept spectra, which are read again for each group


class Upsampled(NamedTuple):
    """The part of the input whose voxels are repeated along each axis."""

    factor: Vec3 = ONE
    first: int = 0  # the first of its maps
    end: int = 0  # behind the last of them

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return blocks(self.end - self.first)

    @property
    def share(self) -> float:
        """Voxels that are not repetitions, of all of them."""
        return 1 / prod(self.factor)


NOT_UPSAMPLED = Upsampled()
IN_FLOAT32 = Products()


def tiled_variants(
    shape: ConvShape, part: Upsampled = NOT_UPSAMPLED, products: Sequence[Products] = ()
) -> Sequence[Variant]:
    """Return the tiles and groups worth trying, in float32 and with these products."""
    outputs, reach = valid(shape.unpooled, shape.pool), reach_of(shape)
    found: dict[Variant, None] = {}
    for way in (IN_FLOAT32, *products):
        tiles = (
            _calm_tiles(outputs, reach) if way.is_near_bound(shape.precision) else tiles_worth(outputs, reach, SIDES)
        )
        for tile, count in tiles.items():
            all_tiles = shape.batch * count
            for group, kept in GROUPS:
                if group > 8 or all_tiles <= FEW_TILES:
                    found[tiled_variant(tile, min(group, all_tiles), kept, part, way)] = None
    return tuple(found)


@cache
def _calm_tiles(outputs: Vec3, reach: Vec3) -> Mapping[Vec3, int]:
    """Return the tiles worth trying among those that spread errors little, and the number covering the outputs."""
    for end in range(len(SIDES), 0, -1):
        if SIDES[end - 1] < max(reach):
            break
        tiles = tiles_worth(outputs, reach, SIDES[:end])
        if calm := {tile: n for tile, n in tiles.items() if spread(tile, outputs, reach) <= MOST_SPREAD}:
            return calm
    return {}


@cache
def tiled_variant(
    tile: Vec3, group: int, kept: int, part: Upsampled = NOT_UPSAMPLED, products: Products = IN_FLOAT32
) -> Variant:
    """Return the variant with these tiles, `group` of them at a time, for an input of which a part is upsampled."""
    parameters: dict[str, int | str | Vec3] = {"tile": tile, "group": group, "kept": kept}
    if part.blocks:
        parameters |= {"upsampled": part.factor, "from_map": part.first, "to_map": part.end}
    if products.name:
        parameters |= {"products": products.name, "unit": products.unit}
    return Variant.of(**parameters)


@cache
def part_of(variant: Variant) -> Upsampled:
    """Return which part of the input a variant takes to be upsampled."""
    if not any(name == "upsampled" for name, _ in variant.parameters):
        return NOT_UPSAMPLED
    return Upsampled(variant.size("upsampled"), variant.count("from_map"), variant.count("to_map"))


def spread(tile: Vec3, outputs: Vec3, reach: Vec3) -> float:
    """Return by how much the squared error of words may grow where one voxel outshines all others.

    What is rounded of it spreads evenly over each tile that holds it, and tiles overlap.
    """
    found = 1.0
    for side, count, extent in zip(tile, outputs, reach, strict=True):
        step = side - extent + 1
        found *= min(-(-count // step), -(-side // step)) * step / side
    return found


def reach_of(shape: ConvShape) -> Vec3:
    """Return the extent of inputs that one output depends on along each axis."""
    return subtract(add(shape.k, shape.pool), (1, 1, 1))
