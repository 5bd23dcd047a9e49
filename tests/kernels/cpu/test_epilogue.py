"""Bias and activation equal their definition, and values that are not finite are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from znnpy.errors import ValuesOverflowError
from znnpy.kernels import reference
from znnpy.kernels.cpu.epilogue import Epilogue, quiet
from znnpy.shapes import ACTIVATIONS

if TYPE_CHECKING:
    from znnpy.shapes import Activation


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_works_in_place_and_on_rows_apart(activation: Activation) -> None:
    rows = np.random.default_rng(4).standard_normal((2, 4, 15)).astype(np.float32)
    apart = np.full((2, 4, 30), np.nan, np.float32)
    finish = Epilogue(np.arange(3, dtype=np.float32), activation, 8)
    with quiet():
        finish(rows, apart[:, :, :15])
        finish(rows, rows)
    np.testing.assert_array_equal(apart[:, :, :15], rows)
    assert np.isnan(apart[:, :, 15:]).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_equals_the_definition(activation: Activation) -> None:
    rng = np.random.default_rng(5)
    bias = rng.standard_normal(3).astype(np.float32)
    source = np.concatenate([rng.standard_normal((6, 3)) * 5, [[-200, 200, 0], [90, -90, 88]]]).astype(np.float32)
    out = np.full((1, 24), np.nan, np.float32)
    with quiet():
        Epilogue(bias, activation, 8)(source.reshape(1, 24), out)
    exact = reference.activate(source.astype(np.float64) + bias, activation)
    np.testing.assert_allclose(out.reshape(8, 3), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_epilogue_counts_values_not_finite(bad: float, activation: Activation) -> None:
    source = np.zeros((2, 6), np.float32)
    source[1, 4] = bad
    with quiet(), pytest.raises(ValuesOverflowError, match="1 of 12 values of a block became infinite or not a number"):
        Epilogue(np.zeros(2, np.float32), activation, 3)(source, source)
