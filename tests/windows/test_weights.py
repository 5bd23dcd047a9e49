"""Weights of windows equal the formulas of MONAI, nnU-Net and DeepEM, and their sums those of all windows."""

from __future__ import annotations

import tracemalloc
from itertools import product
from math import exp

import numpy as np
import pytest

from znnpy.option_values import BLENDS, WINDOW_RULES, Blend, WindowRule
from znnpy.patches import Box
from znnpy.shapes import Vec3
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows
from znnpy.windows.weights import separable_weights, total_weights, window_weights

SIZES = ((8, 8, 8), (7, 12, 9), (1, 5, 2), (16, 3, 31))


def gaussian(size: Vec3, sigma: float, centre: tuple[float, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return a Gaussian voxel by voxel, 1 at its centre."""
    weights = np.full(size, np.nan)
    for at in np.ndindex(size):
        weights[at] = exp(-sum(((i - c) / (sigma * n)) ** 2 for i, c, n in zip(at, centre, size, strict=True)) / 2)
    return weights


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sigma", [0.125, 0.05, 0.3])
def test_monai_gaussian_lies_between_voxels_and_is_at_least_a_thousandth(size: Vec3, sigma: float) -> None:
    expected = gaussian(size, sigma, tuple((n - 1) / 2 for n in size)).clip(min=1e-3)
    weights = window_weights(Windows(size, sigma=sigma))
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sigma", [0.125, 0.3])
def test_nnunet_gaussian_is_rounded_to_halves_and_zeros_take_the_least(size: Vec3, sigma: float) -> None:
    expected = (10 * gaussian(size, sigma, tuple(n // 2 for n in size))).astype(np.float16)
    expected[expected == 0] = expected[expected > 0].min()
    weights = window_weights(Windows(size, sigma=sigma, rule="nnunet"))
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, expected.astype(np.float32))


def test_nnunet_weights_of_usual_windows_reach_from_ten_to_the_least_half() -> None:
    weights = window_weights(Windows((32, 32, 32), rule="nnunet"))
    assert weights[16, 16, 16] == weights.max() == 10
    assert weights[0, 0, 0] == weights.min() == 2**-24


def test_nnunet_gaussian_ends_at_four_sigma() -> None:
    weights = window_weights(Windows((1, 1, 40), sigma=0.05, rule="nnunet"))[0, 0]
    assert weights[20 - 8] == np.float16(10 * exp(-8))
    assert set(weights[: 20 - 8]) == {weights[20 - 8]}  # zeros take the least of those within 8 voxels


@pytest.mark.parametrize("rule", WINDOW_RULES)
def test_constant_weights_are_ones(rule: WindowRule) -> None:
    np.testing.assert_array_equal(window_weights(Windows((3, 4, 5), blend="constant", rule=rule)), np.ones((3, 4, 5)))


@pytest.mark.parametrize("size", [2, 9, 16, 64, 512])
@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.75])
def test_bump_gives_the_shares_of_deepem(size: int, overlap: float) -> None:
    """The share of two windows is found as DeepEM does it, from exponents less their maximum."""
    u = (np.arange(size) + 1) / (size + 1)
    exponent = -((u * (1 - u)) ** -1.5)
    step = max(1, int(size * (1 - overlap)))
    ours = window_weights(Windows((1, 1, size), blend="bump"))[0, 0].astype(np.float64)
    first, second = exponent[step:], exponent[: size - step]
    greatest = np.maximum(first, second)
    share = np.exp(first - greatest) / (np.exp(first - greatest) + np.exp(second - greatest))
    np.testing.assert_allclose(ours[step:] / (ours[step:] + ours[: size - step]), share, atol=1e-6)


def test_bump_is_the_product_of_its_axes_above_a_floor() -> None:
    size = (6, 11, 8)
    exponent = np.zeros(size)
    for at in np.ndindex(size):
        inside = [(i + 1) / (n + 1) for i, n in zip(at, size, strict=True)]
        exponent[at] = -sum((u * (1 - u)) ** -1.5 for u in inside)
    weights = window_weights(Windows(size, blend="bump"))
    centre = (2, 5, 3)
    apart = exponent - exponent[centre]
    high = apart > -25
    assert high.sum() > 100
    np.testing.assert_allclose((weights / weights[centre])[high], np.exp(apart[high]), rtol=1e-5)


def test_bump_of_large_windows_fits_float32() -> None:
    weights = window_weights(Windows((512, 40, 300), blend="bump"))
    assert weights.min() > 1e-30
    assert weights.max() < 1e30


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("rule", WINDOW_RULES)
@pytest.mark.parametrize("sigma", [0.01, 0.125, 0.3])
def test_weights_are_positive_finite_and_cannot_be_written(blend: Blend, rule: WindowRule, sigma: float) -> None:
    weights = window_weights(Windows((13, 24, 17), blend=blend, sigma=sigma, rule=rule))
    assert weights.shape == (13, 24, 17)
    assert np.isfinite(weights).all()
    assert weights.min() > 0
    with pytest.raises(ValueError, match="read-only"):
        weights[0, 0, 0] = 0


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("rule", WINDOW_RULES)
@pytest.mark.parametrize("sigma", [0.125, 0.2, 0.25])
def test_separable_weights_multiply_to_the_weights_wherever_they_exist(
    blend: Blend, rule: WindowRule, sigma: float
) -> None:
    windows = Windows((8, 10, 12), blend=blend, sigma=sigma, rule=rule)
    profiles = separable_weights(windows)
    assert (profiles is None) == (blend == "gaussian" and (rule == "nnunet" or sigma < 0.23))
    if profiles is not None:
        assert [profile.dtype for profile in profiles] == [np.float32] * 3
        np.testing.assert_array_equal(np.einsum("i,j,k->ijk", *profiles), window_weights(windows))


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("rule", WINDOW_RULES)
@pytest.mark.parametrize("sigma", [0.125, 0.3])
@pytest.mark.parametrize("overlap", [(0.0, 0.25, 0.5), (0.75, 0.9, 0.1)])
def test_sums_of_weights_equal_those_of_all_windows_one_by_one(
    blend: Blend, rule: WindowRule, sigma: float, overlap: tuple[float, float, float]
) -> None:
    windows = Windows((6, 10, 7), overlap, blend, sigma, rule=rule)
    grid = WindowGrid((17, 21, 5), windows)
    total = np.zeros((17, 21, 7), np.float32)
    for z, y, x in product(*grid.starts):
        total[z : z + 6, y : y + 10, x : x + 7] += window_weights(windows)
    for box in (Box((0, 0, 0), (17, 21, 7)), Box((3, 7, 2), (11, 8, 7)), Box((16, 20, 0), (17, 21, 1))):
        found = total_weights(grid, box)
        assert found.dtype == np.float32
        if separable_weights(windows) is None:
            np.testing.assert_array_equal(found, total[box.slices])
        else:
            np.testing.assert_allclose(found, total[box.slices], rtol=1e-6)


@pytest.mark.parametrize("blend", BLENDS)
def test_sums_in_a_box_of_a_huge_volume_need_its_windows_only(blend: Blend) -> None:
    windows = Windows((8, 8, 8), blend=blend)
    small = total_weights(WindowGrid((64, 64, 64), windows), Box((20, 20, 20), (45, 45, 45)))
    huge = total_weights(
        WindowGrid((80_000, 40_000, 60_000), windows), Box((60_020, 20_020, 40_020), (60_045, 20_045, 40_045))
    )
    np.testing.assert_array_equal(huge, small)


@pytest.mark.parametrize("rule", WINDOW_RULES)
def test_weights_take_little_more_memory_than_they_fill(rule: WindowRule) -> None:
    """A plan counts four bytes for each voxel of a window."""
    window_weights.cache_clear()
    tracemalloc.start()
    try:
        weights = window_weights(Windows((96, 96, 96), rule=rule))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * weights.nbytes
