"""The arithmetic of sizes and bytes, and its errors with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from znnpy.errors import ShapeError
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import (
    ConvShape,
    FilterShape,
    MaxoutShape,
    PoolShape,
    Sliding,
    ceil_divide,
    fused,
    text,
    turn,
    turned,
    turned_back,
    valid,
)


def test_sizes_and_bytes_equal_those_by_hand() -> None:
    conv = ConvShape(2, 3, 5, (7, 8, 9), (1, 2, 4), "relu")
    assert (conv.in_shape, conv.out_shape) == ((2, 7, 8, 9, 3), (2, 7, 7, 6, 5))
    assert conv.out == (7, 7, 6)
    assert (conv.in_bytes, conv.out_bytes) == (4 * 2 * 504 * 3, 4 * 2 * 294 * 5)
    assert conv.weight_bytes == 4 * (5 * 3 * 8 + 5)
    fragments = PoolShape(2, 3, (7, 8, 9), (2, 3, 1))
    assert fragments.out_shape == (12, 3, 2, 9, 3)
    assert PoolShape(2, 3, (8, 9, 9), (2, 3, 1), fragments=False).out_shape == (2, 4, 3, 9, 3)
    assert FilterShape(2, 3, (7, 8, 9), (2, 3, 1)).out_shape == (2, 6, 6, 9, 3)
    assert MaxoutShape(2, 6, (7, 8, 9), 3).out_shape == (2, 7, 8, 9, 2)


def test_one_voxel_of_output_is_allowed() -> None:
    assert ConvShape(1, 1, 1, (3, 4, 5), (3, 4, 5)).out == (1, 1, 1)
    assert PoolShape(1, 1, (3, 5, 1), (2, 3, 1)).out_shape == (6, 1, 1, 1, 1)


def test_shapes_print_their_sizes() -> None:
    assert str(ConvShape(2, 3, 5, (7, 8, 9), (1, 2, 4), "relu")) == "conv 2x3->5 @7x8x9 k1x2x4 relu"
    assert str(PoolShape(2, 3, (7, 8, 9), (2, 3, 1))) == "pool fragments 2x3 @7x8x9 p2x3x1"
    assert str(PoolShape(2, 3, (8, 9, 9), (2, 3, 1), fragments=False)) == "pool max 2x3 @8x9x9 p2x3x1"
    assert str(FilterShape(2, 3, (7, 8, 9), (2, 3, 1))) == "maxfilter 2x3 @7x8x9 p2x3x1"
    assert str(MaxoutShape(2, 6, (7, 8, 9), 3)) == "maxout 2x6 @7x8x9 of 3"
    assert text((4, 5, 6)) == "4x5x6"


def test_equal_shapes_are_one_problem() -> None:
    assert len({ConvShape(1, 2, 3, (4, 5, 6), (1, 2, 3)), ConvShape(1, 2, 3, (4, 5, 6), (1, 2, 3), "none")}) == 1
    same_numbers = {FilterShape(1, 2, (4, 5, 6), (1, 1, 1)), PoolShape(1, 2, (4, 5, 6), (1, 1, 1))}
    assert len(same_numbers) == 2


def test_vector_arithmetic_works_axis_by_axis() -> None:
    assert ceil_divide((4, 5, 6), (4, 4, 4)) == (1, 2, 2)
    assert valid((4, 5, 6), (4, 1, 3)) == (1, 5, 4)


def test_axes_are_rotated() -> None:
    assert [turn(axis) for axis in range(3)] == [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
    assert [turned((7, 8, 9), axis) for axis in range(3)] == [(7, 8, 9), (8, 7, 9), (9, 7, 8)]
    assert [turned_back((7, 8, 9), axis) for axis in range(3)] == [(7, 8, 9), (8, 7, 9), (8, 9, 7)]
    for axis in range(3):
        array = np.zeros((7, 8, 9))
        assert array.transpose(turn(axis)).shape == turned((7, 8, 9), axis)
        assert turned_back(turned((7, 8, 9), axis), axis) == (7, 8, 9)


def test_fused_shape_has_the_sizes_of_both_layers() -> None:
    conv, pool = ConvShape(2, 3, 5, (9, 10, 8), (2, 4, 1), "relu"), PoolShape(2, 5, (8, 7, 8), (3, 2, 3))
    both = fused(conv, pool)
    assert both == ConvShape(2, 3, 5, (9, 10, 8), (2, 4, 1), "relu", (3, 2, 3))
    assert both.in_shape == conv.in_shape
    assert both.out_shape == pool.out_shape == (36, 2, 3, 2, 5)
    apart: list[tuple[LayerShape, LayerShape]] = [
        (conv, replace(pool, fragments=False, n=(9, 6, 9))),
        (conv, replace(pool, p=(1, 1, 1))),
        (both, pool),
        (pool, pool),
        (conv, conv),
        (conv, FilterShape(2, 5, (8, 7, 8), (3, 2, 3))),
    ]
    for first, second in apart:
        assert fused(first, second) is None


def test_fused_shape_reads_the_planes_the_pooling_would_carry() -> None:
    """A pooling carries window - 1 planes of a column; a fused convolution makes them again."""
    conv, pool = ConvShape(1, 3, 5, (4 + 1, 10, 8), (2, 4, 1)), PoolShape(1, 5, (4 + 1, 7, 8), (2, 2, 3))
    both = fused(conv, pool)
    assert both is not None
    assert both.n == (4 + 1 + 1, 10, 8)
    assert both.out_shape == pool.out_shape


ERRORS: list[tuple[Callable[[], LayerShape], str]] = [
    (
        lambda: ConvShape(1, 2, 3, (4, 5, 6), (4, 5, 9)),
        "input is smaller than the kernel along x: 6 < 9 (conv 1x2->3 @4x5x6 k4x5x9 none); "
        "grow the patch by at least 3 voxels along x",
    ),
    (
        lambda: FilterShape(1, 2, (4, 5, 6), (5, 1, 1)),
        "input is smaller than the window along z: 4 < 5 (maxfilter 1x2 @4x5x6 p5x1x1); "
        "grow the patch by at least 1 voxels along z",
    ),
    (
        lambda: PoolShape(1, 2, (5, 7, 6), (2, 2, 2)),
        "pooling window 2 does not fit input 6 along x (pool fragments 1x2 @5x7x6 p2x2x2): "
        "(n + 1) mod p must be 0 for fragments; the nearest sizes are 5 and 7",
    ),
    (
        lambda: PoolShape(1, 2, (6, 7, 6), (2, 3, 2), fragments=False),
        "pooling window 3 does not fit input 7 along y (pool max 1x2 @6x7x6 p2x3x2): "
        "n mod p must be 0; the nearest sizes are 6 and 9",
    ),
    (
        lambda: MaxoutShape(1, 5, (4, 5, 6), 2),
        "maxout of 2 does not divide 5 maps (maxout 1x5 @4x5x6 of 2)",
    ),
    (
        lambda: ConvShape(0, 2, 3, (4, 5, 6), (1, 1, 1)),
        "batch must be at least 1, not 0 (conv 0x2->3 @4x5x6 k1x1x1 none)",
    ),
    (
        lambda: ConvShape(1, 2, 3, (4, 5, 6), (1, 0, 1)),
        "kernel must be at least 1, not 0 (conv 1x2->3 @4x5x6 k1x0x1 none)",
    ),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=[message[:30] for _, message in ERRORS])
def test_impossible_shapes_are_refused(make: Callable[[], LayerShape], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        make()
    assert str(caught.value) == message


def test_sliding_windows_have_the_expected_output() -> None:
    """AlexNet's first layer, a valid convolution, and steps that leave voxels over."""
    assert Sliding((1, 4, 4), (0, 2, 2)).positions((1, 224, 224), (1, 11, 11)) == (1, 55, 55)
    assert Sliding().positions((7, 8, 9), (2, 3, 9)) == (6, 6, 1)
    assert Sliding((2, 3, 1)).positions((6, 7, 4), (3, 2, 2)) == (2, 2, 3)


@pytest.mark.parametrize(
    ("slide", "message"),
    [
        (lambda: Sliding((1, 0, 1)), "a stride must be at least 1 along every axis, not 1x0x1"),
        (lambda: Sliding(padding=(0, 0, -1)), "padding must be at least 0 along every axis, not 0x0x-1"),
        (
            lambda: Sliding(padding=(0, 1, 0)).positions((4, 2, 4), (2, 5, 2)),
            "a window of 2x5x2 is larger than the image of 4x2x4 with 0x1x0 zeros around it",
        ),
    ],
)
def test_impossible_windows_are_refused(slide: Callable[[], object], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        slide()
    assert str(caught.value) == message
