"""Functions of values, in numpy and compiled, are as exact as float32 allows."""

from __future__ import annotations

import numpy as np
import pytest

from znnpy.kernels import definition
from znnpy.kernels.cpu import activations
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import FUNCTIONS, Function

OF_VALUES = [function for function in FUNCTIONS if function not in ("prelu", "softmax")]
PARAMETERS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.3,), "elu": (0.7,), "clip": (-1.5, 2.5)}
SIZES = np.geomspace(1e-12, 80, 30_001)
VALUES = np.concatenate([np.linspace(-12, 12, 50_001), SIZES, -SIZES, [-700.0, 700.0, -0.0]]).astype(np.float32)


@pytest.fixture(params=["numpy", "compiled"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(activations, "compiled", lambda: False)
    elif not activations.compiled():
        pytest.skip("the compiled kernels do not run here")


def applied(function: Function, parameters: tuple[float, ...], values: np.ndarray) -> np.ndarray:
    out = values.copy()
    activations.activate_rows(function, parameters, out)
    return out


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("function", OF_VALUES)
def test_function_of_each_value_is_exact(function: Function) -> None:
    """Functions that multiply x lose digits where the other factor is nearly zero, as in PyTorch."""
    parameters = PARAMETERS.get(function, ())
    values = VALUES[:, np.newaxis]
    expected = definition.activate(function, parameters, values.astype(np.float64))
    error = np.abs(applied(function, parameters, values) - expected)
    scale = np.abs(values) if function in ("gelu", "gelu_tanh", "silu", "hardswish") else np.abs(expected)
    assert (error <= 4e-7 * scale + 1e-36).all(), f"at {values[(error - 4e-7 * scale).argmax()]}"


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("function", OF_VALUES)
def test_function_has_its_usual_parameters(function: Function) -> None:
    values = np.linspace(-3, 3, 37, dtype=np.float32)[:, np.newaxis]
    expected = definition.activate(function, (), values.astype(np.float64))
    np.testing.assert_allclose(applied(function, (), values), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("maps", [1, 2, 3, 8, 15, 16, 17, 31, 40, 9000])
def test_softmax_is_over_maps(maps: int) -> None:
    values = np.random.default_rng(2).standard_normal((33, maps), np.float32) * np.float32(20)
    values[5] += np.float32(300)  # exp of it would be infinite
    out = applied("softmax", (), values)
    np.testing.assert_allclose(out, definition.activate("softmax", (), values.astype(np.float64)), rtol=4e-5, atol=1e-7)
    np.testing.assert_allclose(out.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("function", [function for function in OF_VALUES if function != "none"])
def test_what_is_not_a_number_stays(function: Function) -> None:
    values = np.full((19, 1), np.nan, np.float32)
    values[::2] = 1
    assert (np.isnan(applied(function, PARAMETERS.get(function, ()), values)) == np.isnan(values)).all()


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("function", ["gelu", "softmax"])
def test_threads_divide_an_image(function: Function) -> None:
    image = np.random.default_rng(2).standard_normal((9, 40, 50, 7), np.float32)
    expected = definition.activate(function, (), image.astype(np.float64))
    with ThreadPool(2) as pool:
        activations.activate_graph(function, (), image, pool)
    np.testing.assert_allclose(image, expected, rtol=2e-6, atol=1e-6)
