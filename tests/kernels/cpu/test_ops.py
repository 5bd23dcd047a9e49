"""znnpy.ops on numpy's arrays against the float64 definitions, and what it refuses."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.ops_cases import CONVOLUTIONS, IMAGES, ROUNDING, WINDOWS, Convolution, Window, assert_near, values
from znnpy import ops
from znnpy.errors import ShapeError
from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.cpu import ops as on_cpu
from znnpy.shapes import Activation, Sliding

POINTWISE: list[tuple[Activation, Callable[..., Any]]] = [
    ("relu", ops.relu),
    ("sigmoid", ops.sigmoid),
    ("tanh", ops.tanh),
]
TYPES = pytest.mark.parametrize("dtype", list(ROUNDING))
SMALL = pytest.mark.parametrize("block", [1 << 18, 7], ids=["one piece", "many pieces"])


@pytest.fixture(autouse=True)
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "block" in request.fixturenames:
        monkeypatch.setattr(on_cpu, "BLOCK", request.getfixturevalue("block"))


@SMALL
@TYPES
@pytest.mark.parametrize(("activation", "op"), POINTWISE)
def test_activations_equal_the_definition(
    activation: Activation, op: Callable[..., Any], dtype: str, block: int
) -> None:
    del block
    x = values((3, 5, 7), dtype)
    exact = reference.activate(x.astype(np.float64), activation)
    assert_near(op(x), exact, dtype)
    assert_near(op(x.T[::-1]), exact.T[::-1], dtype)
    out = np.full((5, 3, 7), np.nan, dtype).transpose(1, 0, 2)
    assert op(x, out=out) is out
    assert_near(out, exact, dtype)
    assert op(x, out=x) is x
    assert_near(x, exact, dtype)


def test_activations_of_extreme_values_equal_the_definition() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -200, 200], np.float32)
    np.testing.assert_array_equal(ops.relu(x), [np.nan, np.inf, 0, 0, 200])
    np.testing.assert_array_equal(ops.sigmoid(x), [np.nan, 1, 0, 0, 1])
    np.testing.assert_array_equal(ops.tanh(x), [np.nan, 1, -1, -1, 1])


@SMALL
@TYPES
@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("over", ["maps", "all"])
def test_softmax_equals_the_definition(over: ops.Over, shape: tuple[int, ...], dtype: str, block: int) -> None:
    del block
    x = 20 * values(shape, dtype)  # far apart: exp of a sum of them alone would overflow
    wide = x.astype(np.float64)
    exact = reference.activate(wide, "softmax") if over == "maps" else reference.softmax_of_images(wide)
    assert_near(ops.softmax(x, over), exact, dtype)
    assert ops.softmax(x, over, out=x) is x
    assert_near(x, exact, dtype)


@SMALL
@TYPES
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_pooling_equals_the_definition(case: Window, dtype: str, block: int) -> None:
    del block
    x, sliding = values(case.shape, dtype), case.sliding
    where: dict[str, Any] = {"stride": sliding.stride, "padding": sliding.padding}
    exact = reference.pool_sliding(x, case.window, sliding, "max")
    np.testing.assert_array_equal(ops.max_pool(x, case.window, **where), exact)
    for counts in (False, True):
        exact = reference.pool_sliding(x, case.window, sliding, "average", counts_padding=counts)
        assert_near(ops.average_pool(x, case.window, counts_padding=counts, **where), exact, dtype)


def test_windows_do_not_overlap_by_default() -> None:
    x = values((1, 4, 5, 6, 2))
    np.testing.assert_array_equal(ops.max_pool(x, (2, 2, 3)), reference.max_pool(x, (2, 2, 3)))
    x[0, 1, 1, 1, 0] = np.nan
    assert np.isnan(ops.max_pool(x, (2, 2, 3))[0, 0, 0, 0, 0])


@pytest.mark.parametrize("layout", ["szyxf -> sfzyx", "szyxf->xfzsy", "szyxf->szyxf"])
def test_layouts_equal_a_transposition(layout: str) -> None:
    x = values((2, 3, 4, 5, 6))
    before, _, after = layout.replace(" ", "").partition("->")
    out = ops.convert_layout(x, layout)
    np.testing.assert_array_equal(out, np.einsum(f"{before}->{after}", x))
    assert out.flags.c_contiguous
    narrow = ops.convert_layout(x[:, ::2, :, ::-1], layout, dtype=np.float16)
    np.testing.assert_array_equal(narrow, np.einsum(f"{before}->{after}", x[:, ::2, :, ::-1]).astype(np.float16))
    strided = np.zeros((*out.shape[:4], 2 * out.shape[4]), np.float16)[..., ::2]
    assert ops.convert_layout(x, layout, out=strided) is strided
    np.testing.assert_array_equal(strided, out.astype(np.float16))


@SMALL
@TYPES
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("mode", ["correlation", "convolution"])
@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_convolutions_equal_the_definition(
    method: ops.Method, mode: ops.Mode, case: Convolution, dtype: str, block: int
) -> None:
    del block
    x, weights, sliding = values(case.shape, dtype), case.weights(), case.sliding
    for activation in ("none", "relu", "softmax"):
        words: dict[str, Any] = {"activation": activation, "mode": mode}
        exact = reference.convolve_sliding(x, weights.weight, weights.bias, sliding=sliding, **words)
        out = np.full(exact.shape, np.nan, dtype)
        words |= {"stride": sliding.stride, "padding": sliding.padding, "method": method, "out": out}
        assert ops.convolve(x, weights, **words) is out
        assert_near(out, exact, dtype)


def test_definition_flips_kernels_as_in_the_paper() -> None:
    """O[p] = sum over r of F[r] * D0[p u + R - r - 1 - pad] is equation (3) of the paper, along one axis."""
    image, kernel = np.arange(1.0, 7.0), np.array([1.0, 10.0, 100.0])
    u, pad, R = 2, 1, 3
    padded = dict(enumerate(image))
    paper = [sum(kernel[r] * padded.get(p * u + R - r - 1 - pad, 0.0) for r in range(R)) for p in range(3)]
    out = reference.convolve_sliding(
        image.reshape(1, 1, 1, 6, 1), kernel.reshape(1, 1, 1, 1, 3), np.zeros(1), "none",
        Sliding((1, 1, 2), (0, 0, 1)), "convolution",
    )  # fmt: skip
    np.testing.assert_array_equal(out.reshape(-1), paper)


def test_definition_pools_as_computed_by_hand() -> None:
    image = np.array([4.0, -2.0, 8.0]).reshape(1, 1, 1, 3, 1)
    window, sliding = (1, 1, 3), Sliding((1, 1, 2), (0, 0, 1))
    by_hand: list[tuple[Any, dict[str, Any], list[float]]] = [
        ("max", {}, [4, 8]),
        ("average", {}, [1, 3]),
        ("average", {"counts_padding": True}, [2 / 3, 2]),
    ]
    for how, words, exact in by_hand:
        np.testing.assert_allclose(reference.pool_sliding(image, window, sliding, how, **words).reshape(-1), exact)


@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_memory_does_not_grow_with_images(method: ops.Method) -> None:
    case = Convolution((2, 24, 64, 64, 4), 4, (3, 3, 3), Sliding((1, 1, 1), (1, 1, 1)))
    x, out, weights = values(case.shape), np.empty(case.shape, np.float32), case.weights()
    tracemalloc.start()
    try:
        ops.convolve(x, weights, padding=(1, 1, 1), method=method, out=out)
        ops.max_pool(x, (3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1), out=out)
        ops.softmax(x, "all", out=out)
        ops.sigmoid(x, out=out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 4 * on_cpu.BLOCK


def test_unfit_arguments_are_refused() -> None:
    x, weights = values((1, 2, 3, 4, 2)), CONVOLUTIONS[1].weights()
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: ops.relu(x.astype(np.float64)), r"arrays are float32 or float16, not float64"),
        (lambda: ops.relu(x, out=x[0]), r"the result is \(1, 2, 3, 4, 2\) float32, and out is \(2, 3, 4, 2\) float32"),
        (lambda: ops.softmax(x[0]), r"x has 4 axes, \(2, 3, 4, 2\); it must be \(S, z, y, x, f\)"),
        (lambda: ops.max_pool(x, (1, 2, 0)), "a window must be at least 1 along every axis, not 1x2x0"),
        (lambda: ops.max_pool(x, (1, 2, 2), padding=(0, 2, 0)), "padding 0x2x0 gives windows of 1x2x2 without"),
        (lambda: ops.max_pool(x, (3, 1, 1)), "a window of 3x1x1 is larger than the image of 2x3x4"),
        (lambda: ops.convert_layout(x, "szyxf -> szyx"), "is not a layout"),
        (lambda: ops.convert_layout(x, "zyx -> xyz"), r"names 3 axes of 5, \(1, 2, 3, 4, 2\)"),
        (lambda: ops.convert_layout(x, "szyxf -> sfzyx", dtype=int), "converted to float32 or float16, not int64"),
        (lambda: ops.convolve(x[..., :1], weights), r"1 maps of x take kernels \(f', 1, kz, ky, kx\)"),
        (
            lambda: ops.convolve(x, ConvWeights(weights.weight.astype(np.float64), weights.bias)),
            "kernels and biases are float32, not float64 and float32",
        ),
        (lambda: ops.convolve(x, ConvWeights(weights.weight[:0], weights.bias[:0])), "are empty"),
    ]
    for call, words in refused:
        with pytest.raises(ShapeError, match=words):
            call()
    with pytest.raises(TypeError, match="list is not a numpy array: name the device that holds it, device="):
        ops.relu([1.0])
    with pytest.raises(ValueError, match="mode is 'same'; it may be correlation, convolution"):
        ops.convolve(x, weights, mode="same")  # type: ignore[arg-type]


def test_results_over_their_input_are_refused() -> None:
    whole = values((2, 3, 4, 5, 4))
    kept, x, weights = whole.copy(), whole[..., :2], CONVOLUTIONS[1].weights()
    near = np.lib.stride_tricks.as_strided(whole[..., 1:], (2, 3, 4, 5, 2), whole.strides)
    same: dict[str, Any] = {"padding": (0, 1, 1), "out": near}
    two = ConvWeights(weights.weight[:2], weights.bias[:2])
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: ops.average_pool(x, (1, 3, 3), stride=(1, 1, 1), **same), "out shares memory with x, which is read"),
        (lambda: ops.convolve(x, two, **same), "out shares memory with x, which is read"),
        (lambda: ops.convert_layout(x, "szyxf -> szyxf", out=x), "out shares memory with x, which is read"),
        (lambda: ops.relu(x, out=near), "out shares some memory with x and is not x; give x itself"),
        (lambda: ops.softmax(x[:, ::-1], out=x), "out shares some memory with x and is not x"),
    ]
    for call, words in refused:
        with pytest.raises(ShapeError, match=words):
            call()
    np.testing.assert_array_equal(whole, kept)
    beside = whole[..., 2:]  # between the values of x, and none of them
    assert ops.convolve(x, two, padding=(0, 1, 1), out=beside) is beside
    assert (ops.sigmoid(x[:1], out=x[:1]) > 0).all()  # another view of the same is x itself


def test_no_images_give_an_empty_result() -> None:
    x = np.empty((0, 2, 3, 4, 2), np.float32)
    assert ops.relu(x).shape == ops.softmax(x, "all").shape == x.shape
    assert ops.max_pool(x, (1, 3, 2)).shape == (0, 2, 1, 2, 2)
    assert ops.convert_layout(x, "szyxf -> sfzyx").shape == (0, 2, 2, 3, 4)
    assert ops.convolve(x, CONVOLUTIONS[1].weights(), padding=(0, 1, 1)).shape == (0, 2, 3, 4, 6)
    assert ops.relu(np.empty((2, 0), np.float32)).shape == (2, 0)


@pytest.mark.parametrize("axis", range(1, 5))
def test_empty_images_are_refused(axis: int) -> None:
    shape = [2, 2, 3, 4, 2]
    shape[axis] = 0
    x, weights = np.empty(shape, np.float32), ConvWeights(np.ones((1, 2, 2, 2, 2), np.float32), np.ones(1, np.float32))
    refused: list[Callable[[], object]] = [
        lambda: ops.softmax(x),
        lambda: ops.softmax(x, "all"),
        lambda: ops.average_pool(x, (2, 2, 2), padding=(1, 1, 1)),
        lambda: ops.convolve(x, weights, padding=(1, 1, 1)),
    ]
    for call in refused:
        with pytest.raises(ShapeError, match=r"x is \(2, .*\): its images are empty; S may be 0, but"):
            call()
