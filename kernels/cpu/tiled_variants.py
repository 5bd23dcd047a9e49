"""The variants of the tiled FFT convolution in compiled code: tiles, groups of them, and which maps are upsampled."""

from __future__ import annotations

from collections.abc import Sequence
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
    found: dict[Variant, None] = {}
    for tile, count in tiles_worth(valid(shape.unpooled, shape.pool), reach_of(shape), SIDES).items():
        tiles = shape.batch * count
        for group, kept in GROUPS:
            if group > 8 or tiles <= FEW_TILES:
                for way in (IN_FLOAT32, *products):
                    found[tiled_variant(tile, min(group, tiles), kept, part, way)] = None
    return tuple(found)


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


def reach_of(shape: ConvShape) -> Vec3:
    """Return the extent of inputs that one output depends on along each axis."""
    return subtract(add(shape.k, shape.pool), (1, 1, 1))
