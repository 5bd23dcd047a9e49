"""Weighted results are added to sums: compiled and in numpy, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from znnpy.kernels.cpu.blend import add_in_numpy, add_weighted, write_mean

SIZES = ((1, 1, 1), (3, 5, 2), (7, 4, 1), (6, 9, 33), (2, 3, 105), (40, 31, 16))


@pytest.mark.parametrize("function", [add_weighted, add_in_numpy])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("flip", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_sums(function: Any, dtype: Any, size: tuple[int, int, int], flip: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    y, x, maps = size
    sums = rng.standard_normal((y + 2, x + 3, maps)).astype(np.float32)
    before = sums.copy()
    values = rng.standard_normal((y + 1, x + 1, maps)).astype(dtype)[:y, :x][:: flip[0], :: flip[1]]
    weights = rng.random((x + 2, y), np.float32).T[:, :x]
    function(sums[1 : 1 + y, 2 : 2 + x], values, weights, 0.25)
    wanted = before.astype(np.float64)
    wanted[1 : 1 + y, 2 : 2 + x] += values.astype(np.float64) * weights[..., None] * 0.25
    np.testing.assert_allclose(sums, wanted, rtol=1e-6, atol=1e-6)
    outside = np.ones((y + 2, x + 3), np.bool_)
    outside[1 : 1 + y, 2 : 2 + x] = False
    np.testing.assert_array_equal(sums[outside], before[outside])


def test_sums_in_half_precision_are_rounded_once_for_each_window() -> None:
    rng = np.random.default_rng(4)
    sums = rng.standard_normal((5, 6, 7)).astype(np.float16)
    values, weights = rng.standard_normal((5, 6, 7)).astype(np.float32), rng.random((5, 6), np.float32)
    wanted = (sums.astype(np.float32) + values * weights[..., None]).astype(np.float16)
    add_weighted(sums, values, weights)
    np.testing.assert_array_equal(sums, wanted)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_means(size: tuple[int, int, int], compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr("znnpy.kernels.cpu.blend.why_not", lambda machine: "for the test")
    rng = np.random.default_rng(5)
    y, x, maps = size
    sums = rng.standard_normal((y + 1, x + 2, maps + 1)).astype(np.float32)[1:, 2:, :maps]
    totals = rng.random((x, y), np.float32).T + np.float32(0.1)
    out = np.full((maps, x, y + 1), np.nan, np.float32).transpose(0, 2, 1)
    write_mean(sums, totals, out[:, :y])
    np.testing.assert_allclose(out[:, :y], np.moveaxis(sums / totals[..., None], 2, 0), rtol=1e-6)
    assert np.isnan(out[:, y:]).all()
