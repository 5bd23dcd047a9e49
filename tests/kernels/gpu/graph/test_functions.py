"""The functions of graphs on a GPU against their definitions in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from znnpy.kernels import definition
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.layers import FUNCTIONS, Function

SOURCE = str(Path(__file__).parent / "functions.cu")
NAMES = ("one_by_one", "four_at_once", "softmax")
PARAMETERS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.2,), "elu": (1.3,), "clip": (-0.5, 0.7)}
OF_THE_VALUE = ("gelu", "gelu_tanh", "silu", "hardswish")  # their errors are shares of |x|
SIMPLE = [function for function in FUNCTIONS if function not in ("prelu", "softmax")]
VALUES = np.concatenate([np.linspace(-20, 20, 4001), 10.0 ** np.arange(-12, 4), -(10.0 ** np.arange(-12, 2))])


def applied(device: Any, kernel: str, values: Any, numbers: tuple[int, float, float]) -> Any:
    out = device.put(np.full(values.shape, np.nan, np.float32), "out")
    threads = -(-len(values) // 256)
    device.kernels(SOURCE, NAMES)[kernel]((threads,), (256,), device.put(values, "in"), out, len(values), *numbers)
    return device.get(out)


@pytest.mark.parametrize("given", [False, True], ids=["usual parameters", "parameters"])
@pytest.mark.parametrize("kernel", ["one_by_one", "four_at_once"])
@pytest.mark.parametrize("function", SIMPLE)
def test_functions_equal_their_definitions(device: Any, function: Function, kernel: str, given: bool) -> None:
    x = VALUES.astype(np.float32)[: len(VALUES) // 4 * 4]
    parameters = PARAMETERS.get(function, ()) if given else ()
    exact = definition.activate(function, parameters, x.astype(np.float64))
    out = applied(device, kernel, x, numbers_of(function, parameters))
    size = np.abs(x) if function in OF_THE_VALUE else np.abs(exact)
    assert (np.abs(out - exact) <= 5e-7 * size + 1e-30).all()


@pytest.mark.parametrize("kernel", ["one_by_one", "four_at_once"])
@pytest.mark.parametrize("function", SIMPLE)
def test_nan_stays_and_infinity_is_as_defined(device: Any, function: Function, kernel: str) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0], np.float32)
    with np.errstate(invalid="ignore"):
        exact = definition.activate(function, (), x.astype(np.float64))
    out = applied(device, kernel, x, numbers_of(function, ()))
    assert np.isnan(out[0]), "a NaN went by unseen"
    known = np.isfinite(exact) | (function not in OF_THE_VALUE)  # these are -inf * 0 there, or NaN
    np.testing.assert_allclose(out[known], exact[known], rtol=5e-7)


@pytest.mark.parametrize("kernel", ["one_by_one", "four_at_once"])
def test_prelu_takes_its_slope_as_a_parameter(device: Any, kernel: str) -> None:
    x = np.array([-2, -0.5, 0, 3], np.float32)
    np.testing.assert_array_equal(
        applied(device, kernel, x, (FUNCTIONS.index("prelu"), 0.25, 0.0)), np.array([-0.5, -0.125, 0, 3], np.float32)
    )


@pytest.mark.parametrize("maps", [1, 4, 7, 70])
def test_softmax_is_joined_from_parts(device: Any, maps: int) -> None:
    x = np.random.default_rng(3).normal(0, 10, maps).astype(np.float32)
    out = device.put(np.full(maps, np.nan, np.float32), "out")
    device.kernels(SOURCE, NAMES)["softmax"]((1,), (1,), device.put(x, "x"), out, maps)
    exact = definition.activate("softmax", (), x.astype(np.float64))
    np.testing.assert_allclose(device.get(out), exact, rtol=3e-6, atol=1e-30)


def test_numbers_are_the_order_of_the_functions() -> None:
    assert [numbers_of(function, ())[0] for function in FUNCTIONS] == list(range(15))
    assert numbers_of("leaky_relu", ()) == (2, 0.01, 0.0)
    assert numbers_of("clip", (-1, 2)) == (13, -1.0, 2.0)
