"""Norms and global poolings hold for large means and outliers, and do not depend on threads or on places in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.cpu.test_graph_operators import primitives_for, run
from tests.support.graph_cases import weights_for
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GlobalPoolShape, NormShape
from znnpy.kernels import definition
from znnpy.kernels.cpu import graph_norm_lanes
from znnpy.network import ConvWeights

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array

LARGE = (16, 48, 64)  # several units of several blocks


def values(n: tuple[int, int, int], f: int, mean: float, std: float = 1.0) -> Array:
    rng = np.random.default_rng(7)
    return (mean + std * rng.standard_normal((*n, f))).astype(np.float32)


def with_outlier(x: Array, place: int) -> Array:
    """Put a value far from the others in each map."""
    x.reshape(-1, x.shape[3])[place] = -3e5
    return x


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mean", [100.0, -1e4, 1e6])
def test_large_means_do_not_cancel(mean: float, groups: int) -> None:
    """The values themselves are float32, so that those of the largest mean are few and far between."""
    shape = NormShape(4, LARGE, groups, affine=True)
    x = values(LARGE, 4, mean) + np.float32(mean / 10) * np.arange(4, dtype=np.float32) * (groups != 4)
    weights = weights_for(shape)
    exact = definition.norm(shape, weights, x)
    for primitive in primitives_for(shape):
        for threads in (1, 2):
            out = run(primitive, shape, weights, [x], threads)
            worst = np.abs(out - exact).max() / np.abs(exact).max()
            assert worst <= 3e-7, f"{primitive.name}: {worst}"


def test_large_image_is_as_exact_as_a_small_one() -> None:
    n = (96, 96, 96)
    shape, pooling = NormShape(1, n, 1), GlobalPoolShape(1, n)
    x = values(n, 1, 100.0)
    exact, mean = definition.norm(shape, None, x), definition.global_pool(pooling, x)
    for primitive in primitives_for(shape):
        assert np.abs(run(primitive, shape, None, [x], 2) - exact).max() <= 1e-6
    for primitive in primitives_for(pooling):
        assert np.abs(run(primitive, pooling, None, [x], 2) - mean).max() <= 1e-7 * 100


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_one_value_far_from_all_others_costs_no_digits(place: int) -> None:
    shape = NormShape(3, LARGE, 3)
    x = with_outlier(values(LARGE, 3, 100.0), place)
    exact = definition.norm(shape, None, x)
    for primitive in primitives_for(shape):
        out = run(primitive, shape, None, [x], 2)
        np.testing.assert_allclose(out, exact, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -12345.678])
def test_image_of_one_value_gives_the_offset(value: float) -> None:
    shape = NormShape(5, LARGE, 5, affine=True)
    weights = weights_for(shape)
    assert weights is not None
    for primitive in primitives_for(shape):
        out = run(primitive, shape, weights, [np.full((*LARGE, 5), value, np.float32)], 2)
        np.testing.assert_allclose(out, np.broadcast_to(weights.bias, out.shape), rtol=0, atol=1e-3 * abs(value) + 1e-6)


@pytest.mark.parametrize("f", [1, 3, 16, 50])
def test_result_does_not_depend_on_threads_or_on_the_place_in_memory(f: int) -> None:
    shapes: list[Any] = [NormShape(f, LARGE, f, affine=True, activation="leaky_relu"), GlobalPoolShape(f, LARGE)]
    x = values(LARGE, f, 3.0)
    wider = np.full((LARGE[0] + 1, LARGE[1] + 2, LARGE[2] + 3, f), np.nan, np.float32)
    cropped = wider[1:, 1:-1, 2:-1]  # as a crop that is a view
    cropped[...] = x
    for shape in shapes:
        weights = weights_for(shape)
        for primitive in primitives_for(shape):
            expected = run(primitive, shape, weights, [x], 1)
            np.testing.assert_array_equal(run(primitive, shape, weights, [x], 3), expected)
            np.testing.assert_array_equal(run(primitive, shape, weights, [cropped], 2), expected)


def test_epsilon_is_added_to_the_variance_before_the_root() -> None:
    shape = NormShape(1, (1, 1, 2), 1, epsilon=3.0)
    for primitive in primitives_for(shape):
        out = run(primitive, shape, None, [np.array([4.0, 6.0], np.float32).reshape(1, 1, 2, 1)])
        np.testing.assert_allclose(out.reshape(-1), [-0.5, 0.5], rtol=1e-7)


def test_groups_are_neighbouring_maps() -> None:
    x = np.array([1, 3, 10, 30], np.float32).reshape(1, 1, 1, 4)
    shape = NormShape(4, (1, 1, 1), 2, epsilon=0.0)
    for primitive in primitives_for(shape):
        np.testing.assert_allclose(run(primitive, shape, None, [x]).reshape(-1), [-1, 1, -1, 1], rtol=1e-6)


def test_deviations_whose_squares_overflow_are_an_error() -> None:
    shape = NormShape(2, (3, 4, 5), 2)
    x = values((3, 4, 5), 2, 0.0, 1e25)
    for primitive in primitives_for(shape):
        if primitive.name.endswith("lanes"):
            with pytest.raises(ValuesOverflowError, match="became infinite or not a number"):
                run(primitive, shape, None, [x])
        else:
            np.testing.assert_allclose(run(primitive, shape, None, [x]), definition.norm(shape, None, x), rtol=1e-5)


@pytest.mark.parametrize("how", ["max", "average"])
def test_global_pooling_passes_on_what_is_not_a_number(how: Any) -> None:
    shape = GlobalPoolShape(3, LARGE, how)
    for primitive in primitives_for(shape):
        for at in ((0, 0, 0, 0), (7, 9, 11, 2), (15, 47, 63, 1)):
            x = values(LARGE, 3, 0.0)
            x[at] = np.nan
            out = run(primitive, shape, None, [x], 2).reshape(-1)
            np.testing.assert_array_equal(np.isnan(out), np.arange(3) == at[3])


def test_calls_of_few_units_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop flag is checked between calls."""
    shape = NormShape(3, LARGE, 3)
    x = values(LARGE, 3, 1.0)
    for primitive in primitives_for(shape):
        expected = run(primitive, shape, None, [x], 2)
        with monkeypatch.context() as patch:
            patch.setattr(graph_norm_lanes, "CALL_VALUES", 1)
            np.testing.assert_array_equal(run(primitive, shape, None, [x], 2), expected)


def test_factor_too_large_for_float32_is_an_error() -> None:
    shape = NormShape(1, (1, 1, 2), 1, affine=True, activation="sigmoid")
    weights = ConvWeights(np.full(1, 3e38, np.float32), np.zeros(1, np.float32))
    for primitive in primitives_for(shape):
        with pytest.raises(ValuesOverflowError):
            run(primitive, shape, weights, [np.array([0.0, 0.1], np.float32).reshape(1, 1, 2, 1)])
