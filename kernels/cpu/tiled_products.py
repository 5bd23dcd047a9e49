"""The products of spectra on a unit that multiplies bfloat16: which there are, when they may win, what they need.

Method   A complex product is a real one of twice the rows and twice the maps. Its factors are divided into words of
         bfloat16, each of which is what the words before it leave; sums are float32. Of three words the six largest
         products are summed, which is as exact as float32; of two words three, with an rms error of 5e-6; one word is
         as exact as the values of precision bf16.
Source   Henry, Tang, Heinecke, Leveraging the bfloat16 artificial intelligence datatype for higher-precision
         computations, 2019.
Tested   tests/kernels/cpu/test_tiled_products.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from znnpy.kernels.cpu.native.library import LANES, blocks, unit_library, why_not_bf16
from znnpy.machine import AMX, AVX512_BF16

if TYPE_CHECKING:
    from znnpy.kernels.contract import Unit, Variant
    from znnpy.machine import Machine
    from znnpy.shapes import Precision

WORDS = {"bf16x6": 3, "bf16x3": 2, "bf16": 1}  # words of a value, by the name of the products
COST_UNITS: dict[str, Unit] = {AMX: "lane_amx_product", AVX512_BF16: "lane_bf16_product"}
PRODUCTS = {3: 6, 2: 3, 1: 1}  # by words
GROUP = 16  # tiles that are multiplied at once, as in bf16_products.hpp
STEP = 32  # products of a step
BFLOAT16 = 2  # bytes
MANY = 16  # least maps: of fewer the transforms take so long that the products hardly count
DIVIDE_FLOPS = 10.0  # cost of dividing a value, per word, in flops of a transform


class Products(NamedTuple):
    """How spectra are multiplied; without a name in float32."""

    name: str = ""
    unit: str = ""  # of znnpy.machine

    def is_near_bound(self, precision: Precision) -> bool:
        """Return whether the error is not far below the bound of the precision."""
        return self.name == "bf16" or (self.name == "bf16x3" and precision == "bf16x2")


def products_worth(precision: Precision, fin: int, fout: int, machine: Machine) -> Sequence[Products]:
    """Return the products that are exact enough and may be faster than float32 on this machine.

    AVX512-BF16 multiplies twice as much as float32 in a cycle: six products take longer there, and three no less.
    """
    if min(fin, fout) < MANY:
        return ()
    exact = {"fp32": ("bf16x6",), "bf16x2": ("bf16x6", "bf16x3"), "bf16": ("bf16", "bf16x3")}.get(precision, ())
    if why_not_bf16(machine, AMX) is None:
        return [Products(name, AMX) for name in exact]
    if "bf16" in exact and why_not_bf16(machine, AVX512_BF16) is None:
        return [Products("bf16", AVX512_BF16)]
    return ()


@cache
def products_of(variant: Variant) -> Products:
    """Return how a variant multiplies spectra."""
    if not any(name == "products" for name, _ in variant.parameters):
        return Products()
    return Products(variant.text("products"), variant.text("unit"))


def words_of(variant: Variant) -> int:
    """Return the words that a variant divides values into; 0 if it multiplies in float32."""
    name = products_of(variant).name
    return WORDS[name] if name else 0


def function_address(unit: str) -> int:
    """Return the address of the products on a unit."""
    found = ctypes.cast(unit_library(unit).znnpy_spectral_products, ctypes.c_void_p).value
    assert found is not None
    return found


def whole_groups(tiles: int) -> int:
    """Return `tiles`, rounded up to whole groups."""
    return -(-tiles // GROUP) * GROUP


def kernel_bytes(fin: int, fout: int, frequencies: int, words: int) -> int:
    """Return the bytes of the words of kernels of some frequencies."""
    return frequencies * blocks(fin) * blocks(fout) * words * STEP * LANES * BFLOAT16


def left_bytes(fin: int, words: int) -> int:
    """Return the bytes of the words of the inputs of one frequency, for a group of tiles."""
    return words * 2 * GROUP * STEP * (blocks(fin) + 1) * BFLOAT16
