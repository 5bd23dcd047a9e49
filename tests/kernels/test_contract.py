"""A variant returns its settings by their type, and a footprint counts the fullest stage."""

from __future__ import annotations

import pytest

from znnpy.kernels.contract import Footprint, Scratch, Variant
from znnpy.shapes import ConvShape


def test_variant_returns_its_settings_by_type() -> None:
    variant = Variant.of(tile=(8, 16, 32), group=27)
    assert str(variant) == "group=27 tile=8x16x32"
    assert (variant.size("tile"), variant.count("group")) == ((8, 16, 32), 27)
    with pytest.raises(TypeError, match="tile is"):
        variant.count("tile")
    with pytest.raises(TypeError, match="group is 27, not a size"):
        variant.size("group")


def test_working_bytes_equal_those_of_the_fullest_stage() -> None:
    shape = ConvShape(1, 1, 1, (4, 4, 4), (1, 1, 1))  # 256 bytes in, 256 out
    footprint = Footprint(
        input_until=0,
        output_from=1,
        stages=2,
        scratch=(Scratch("a", 1000, 0, 1), Scratch("b", 500, 1, 1)),
        allowance=7,
    )
    assert footprint.working(shape) == 256 + 1500 + 7
