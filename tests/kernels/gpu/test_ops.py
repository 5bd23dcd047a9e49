"""znnpy.ops on arrays of a device against the float64 definitions."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.emulator import EMULATED_GPU, SMALL_GPU, EmulatedDevice
from tests.support.ops_cases import CONVOLUTIONS, IMAGES, ROUNDING, WINDOWS, Convolution, Window, assert_near, values
from znnpy import ops
from znnpy.errors import ShapeError
from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.gpu import ops as on_gpu
from znnpy.kernels.gpu.implicit_gemm import warpgroup
from znnpy.kernels.gpu.ops import copy_plan
from znnpy.shapes import Activation, Precision, Sliding

POINTWISE: list[tuple[Activation, Callable[..., Any]]] = [
    ("relu", ops.relu),
    ("sigmoid", ops.sigmoid),
    ("tanh", ops.tanh),
]
TYPES = pytest.mark.parametrize("dtype", list(ROUNDING))
GAPS = pytest.mark.parametrize("gap", [0, 7], ids=["close", "apart"])


def images(device: Any, host: Any, gap: int) -> Any:
    """`host` on the device, `gap` values between images."""
    step, kind = host[0].size + gap, host.dtype
    apart = np.full((len(host), step), np.nan, kind)
    apart[:, : step - gap] = host.reshape(len(host), -1)
    strides = (step * kind.itemsize, *np.empty(host.shape[1:], kind).strides)
    return device.view(device.put(apart, "images"), host.shape, kind, strides=strides)


def poisoned(device: Any, shape: tuple[int, ...], dtype: str, gap: int = 0) -> Any:
    return images(device, np.full(shape, np.nan, dtype), gap)


@GAPS
@TYPES
@pytest.mark.parametrize("shape", [(2, 3, 5, 4, 3), (3, 4, 90), (5,), (1032, 1)])
@pytest.mark.parametrize(("activation", "op"), POINTWISE)
def test_activations_equal_the_definition(
    device: Any, activation: Activation, op: Callable[..., Any], shape: tuple[int, ...], dtype: str, gap: int
) -> None:
    host = values(shape, dtype)
    x, out = images(device, host, gap), poisoned(device, shape, dtype, gap)
    exact = reference.activate(host.astype(np.float64), activation)
    assert op(x, device=device, out=out) is out
    assert_near(device.get(out), exact, dtype)
    assert_near(device.get(op(x, device=device)), exact, dtype)
    assert op(x, device=device, out=x) is x
    assert_near(device.get(x), exact, dtype)


@pytest.mark.parametrize("shape", [(120000,), (40000, 3), (1, 120000)])
def test_thin_arrays_without_gaps_fill_the_device(
    device: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[object, ...]] = []
    launch = on_gpu._launch

    def noted(device: Any, name: str, grid: tuple[int, int], *arguments: Any, shared: int = 0) -> None:
        launched.append((name, grid))
        launch(device, name, grid, *arguments, shared=shared)

    monkeypatch.setattr(on_gpu, "_launch", noted)
    host = values(shape)
    out = ops.relu(device.put(host, "x"), device=device, out=poisoned(device, shape, "float32"))
    np.testing.assert_array_equal(device.get(out), np.maximum(host, 0))
    assert launched == [("pointwise<float, 4>", (118, 1))]  # 120,000 values, four a thread, 256 threads a block


def test_activations_of_arrays_of_any_rank_equal_the_definition(device: Any) -> None:
    host = values((300,))
    x = device.put(host, "x")
    np.testing.assert_array_equal(device.get(ops.relu(x[::3], device=device)), np.maximum(host[::3], 0))
    number = device.view(x, (), np.float32, offset=28)
    np.testing.assert_array_equal(device.get(ops.relu(number, device=device)), np.maximum(host[7], 0))


def test_activations_of_extreme_values_equal_the_definition(device: Any) -> None:
    x = device.put(np.array([np.nan, np.inf, -np.inf, -200, 200], np.float32), "x")
    np.testing.assert_array_equal(device.get(ops.relu(x, device=device)), [np.nan, np.inf, 0, 0, 200])
    np.testing.assert_array_equal(device.get(ops.sigmoid(x, device=device)), [np.nan, 1, 0, 0, 1])


@GAPS
@TYPES
@pytest.mark.parametrize("shape", [*IMAGES, (2, 1, 12, 16, 12), (1, 1, 3, 2, 70)])
@pytest.mark.parametrize("over", ["maps", "all"])
def test_softmax_equals_the_definition(
    device: Any, over: ops.Over, shape: tuple[int, ...], dtype: str, gap: int
) -> None:
    host = 20 * values(shape, dtype)  # far apart: exp of a sum of them alone would overflow
    x, wide = images(device, host, gap), host.astype(np.float64)
    exact = reference.activate(wide, "softmax") if over == "maps" else reference.softmax_of_images(wide)
    assert_near(device.get(ops.softmax(x, over, device=device, out=poisoned(device, shape, dtype, gap))), exact, dtype)
    assert ops.softmax(x, over, device=device, out=x) is x
    assert_near(device.get(x), exact, dtype)


@TYPES
@pytest.mark.parametrize("shape", [(2, 1, 91, 101, 1), (1, 3, 104, 40, 3)])  # 36 and 37 blocks an image
def test_softmax_of_images_adds_more_parts_than_a_warp_has_lanes(
    device: Any, shape: tuple[int, ...], dtype: str
) -> None:
    host = values(shape, dtype) / 10  # near each other: none may be left out
    exact = reference.softmax_of_images(host.astype(np.float64))
    out = ops.softmax(device.put(host, "x"), "all", device=device, out=poisoned(device, shape, dtype))
    assert_near(device.get(out), exact, dtype, 1e-6 if dtype == "float32" else 2e-3)  # float16 below its normal numbers


@GAPS
@TYPES
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_pooling_equals_the_definition(device: Any, case: Window, dtype: str, gap: int) -> None:
    host, sliding = values(case.shape, dtype), case.sliding
    x = images(device, host, gap)
    exact = reference.pool_sliding(host, case.window, sliding, "max")
    words: dict[str, Any] = {"stride": sliding.stride, "padding": sliding.padding, "device": device}
    out = ops.max_pool(x, case.window, out=poisoned(device, exact.shape, dtype, gap), **words)
    np.testing.assert_array_equal(device.get(out), exact)
    for counts in (False, True):
        exact = reference.pool_sliding(host, case.window, sliding, "average", counts_padding=counts)
        assert_near(device.get(ops.average_pool(x, case.window, counts_padding=counts, **words)), exact, dtype)


@pytest.mark.parametrize("layout", ["szyxf -> sfzyx", "szyxf->xfzsy", "szyxf->szyxf", "szyxf -> fxyzs"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6), (1, 2, 20, 35, 3), (1, 1, 1, 70, 65), (1, 1, 1, 1, 1)])
def test_layouts_equal_a_transposition(device: Any, layout: str, shape: tuple[int, ...]) -> None:
    host = values(shape)
    before, _, after = layout.replace(" ", "").partition("->")
    exact = np.einsum(f"{before}->{after}", host)
    x = device.put(host, "x")
    np.testing.assert_array_equal(device.get(ops.convert_layout(x, layout, device=device)), exact)
    room = poisoned(device, (*exact.shape[:3], 2 * exact.shape[3], exact.shape[4] + 1), "float16")
    out = room[:, :, :, ::2, 1:]
    assert ops.convert_layout(x, layout, device=device, out=out) is out
    whole = device.get(room)
    np.testing.assert_array_equal(whole[:, :, :, ::2, 1:], exact.astype(np.float16))
    assert np.isnan(whole[:, :, :, 1::2]).all()
    assert np.isnan(whole[..., 0]).all()
    part = x[:, :, ::2, 1:]
    if part.size:
        narrow = device.get(ops.convert_layout(part, layout, dtype=np.float16, device=device))
        np.testing.assert_array_equal(narrow, np.einsum(f"{before}->{after}", host[:, :, ::2, 1:]).astype(np.float16))


def test_layout_is_transposed_along_contiguous_axes() -> None:
    plan = copy_plan((2, 3, 10, 50, 50), (75000, 1, 7500, 150, 3), (75000, 25000, 2500, 50, 1))  # channels first
    assert (plan.n, plan.x_steps, plan.out_steps) == ((1, 1, 2, 25000, 3), (0, 0, 75000, 3, 1), (0, 0, 75000, 1, 25000))
    assert (plan.tile, plan.across) == ((256, 4), True)
    same = copy_plan((2, 3, 4, 5, 6), (360, 120, 30, 6, 1), (360, 120, 30, 6, 1))
    assert (same.n[4], same.across) == (720, False)


# method, precision, type of arrays, rms error allowed, kernel
WAYS: list[tuple[ops.Method, Precision, str, float, str]] = [
    ("direct", "fp32", "float32", 1e-6, "tiled<float"),
    ("direct", "fp32", "float16", 5e-4, "tiled<half"),
    ("implicit_gemm", "fp32", "float32", 1e-6, "gemm<float, 2"),
    ("implicit_gemm", "fp32", "float16", 5e-4, "lowered<half"),
    ("implicit_gemm", "tf32", "float32", 1e-3, "gemm<float, 1"),
    ("implicit_gemm", "fp16", "float16", 2e-3, "gemm<half, 1"),
    ("implicit_gemm", "fp32", "float32", 1e-6, "gemm_by_warpgroups<float, 2"),
    ("implicit_gemm", "tf32", "float32", 1e-3, "gemm_by_warpgroups<float, 1"),
    ("implicit_gemm", "fp16", "float16", 2e-3, "gemm_by_warpgroups<half, 1"),
]


def as_older(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the device as if its tensor cores did not read shared memory."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, capability=(8, 0)))


@pytest.fixture(params=["as it is", "older"])
def either(device: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    if request.param == "older":
        as_older(device, monkeypatch)
    return device


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("mode", ["correlation", "convolution"])
@pytest.mark.parametrize(("method", "precision", "dtype", "allowed", "kernel"), WAYS)
def test_convolutions_equal_the_definition(
    device: Any,
    method: ops.Method,
    precision: Precision,
    dtype: str,
    allowed: float,
    kernel: str,
    mode: ops.Mode,
    case: Convolution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = _compiled(device, monkeypatch)
    host, weights, sliding = values(case.shape, dtype), case.weights(), case.sliding
    if kernel.startswith("gemm<"):
        as_older(device, monkeypatch)
    elif sliding.stride != (1, 1, 1) or device.gpu.capability != warpgroup.CAPABILITY:
        kernel = kernel.replace("gemm_by_warpgroups", "gemm")
    x = images(device, host, 5)
    for activation in ("relu", "softmax"):
        words: dict[str, Any] = {"activation": activation, "mode": mode}
        exact = reference.convolve_sliding(host, weights.weight, weights.bias, sliding=sliding, **words)
        words |= {"stride": sliding.stride, "padding": sliding.padding, "method": method, "device": device}
        out = poisoned(device, exact.shape, dtype, 3)
        assert ops.convolve(x, weights, out=out, precision=precision, **words) is out
        assert_near(device.get(out), exact, dtype, allowed)
        soft_in_half = precision == "fp16" and activation == "softmax"
        assert any(name.startswith("lowered<half" if soft_in_half else kernel) for name in compiled)
        compiled.clear()


def _compiled(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that are asked for from now on."""
    names: list[str] = []
    kernels = device.kernels

    def noted(source: str, wanted: list[str], **defines: Any) -> Any:
        names.extend(wanted)
        return kernels(source, wanted, **defines)

    monkeypatch.setattr(device, "kernels", noted)
    return names


@pytest.mark.parametrize(("precision", "allowed", "power"), [("fp32", 1e-6, 18), ("tf32", 1e-3, 26)])
def test_values_far_below_the_largest_are_as_exact(
    either: Any, precision: Precision, allowed: float, power: int
) -> None:
    case = Convolution((1, 3, 8, 20, 16), 8, (2, 3, 3), Sliding())
    host, weights = values(case.shape), case.weights()
    host = np.copysign(np.clip(np.abs(host), 1, 2), host)
    host[0, 0, 0, 0, 0] = 2.0**power
    weights.bias[...] = 0
    exact = reference.convolve_sliding(host, weights.weight, weights.bias, "none")
    out = ops.convolve(either.put(host, "x"), weights, method="implicit_gemm", precision=precision, device=either)
    assert_near(either.get(out)[:, :, 1:, 1:], exact[:, :, 1:, 1:], "float32", allowed)  # windows without it


@pytest.mark.parametrize("size", [1e-30, 1e25])
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-6), ("tf32", 1e-3)])
def test_values_of_any_size_are_split(either: Any, precision: Precision, allowed: float, size: float) -> None:
    case = CONVOLUTIONS[0]
    host, weights = values(case.shape) * np.float32(size), case.weights()
    weights.bias[...] = 0
    exact = reference.convolve_sliding(host, weights.weight, weights.bias, "none")
    x = images(either, host, 5)
    out = ops.convolve(x, weights, method="implicit_gemm", precision=precision, device=either)
    assert_near(either.get(out) / np.float32(size), exact / size, "float32", allowed)


def test_kernels_too_large_for_shared_memory_are_refused() -> None:
    with EmulatedDevice(SMALL_GPU) as emulated:
        device: Any = emulated
        case = Convolution((2, 1, 25, 52, 5), 2, (1, 23, 50), Sliding())
        host, weights = values(case.shape), case.weights()
        x, gemm = device.put(host, "x"), partial(ops.convolve, method="implicit_gemm", device=device)
        told = r"kernels of 1x23x50 are too large for implicit_gemm: no tile .* 101,376 bytes .*; use method='direct'"
        for precision in ("fp32", "tf32"):
            with pytest.raises(ShapeError, match=told):
                gemm(x, weights, precision=precision)
        half = device.put(host.astype(np.float16), "x")
        exact = reference.convolve_sliding(host.astype(np.float16), weights.weight, weights.bias, "none")
        assert_near(device.get(gemm(half, weights)), exact, "float16")


def test_unsupported_precision_is_refused(device: Any) -> None:
    host, weights = values((1, 2, 3, 4, 2)), CONVOLUTIONS[1].weights()
    x = device.put(host, "x")
    gemm: dict[str, Any] = {"method": "implicit_gemm", "padding": (0, 1, 1)}
    with pytest.raises(ShapeError, match=r"fp16 multiplies float16 arrays, not float32: use ops.convert_layout with"):
        ops.convolve(x, weights, precision="fp16", device=device, **gemm)
    half = ops.convert_layout(x, "szyxf -> szyxf", dtype=np.float16, device=device)
    with pytest.raises(ShapeError, match="tf32 multiplies float32 arrays, not float16"):
        ops.convolve(half, weights, precision="tf32", device=device, **gemm)
    with pytest.raises(
        ValueError, match="tf32 is for method='implicit_gemm' on a device; everything else computes in fp32"
    ):
        ops.convolve(x, weights, method="direct", precision="tf32", device=device)
    with pytest.raises(ValueError, match="fp16 is for method='implicit_gemm' on a device"):
        ops.convolve(host, weights, precision="fp16", **gemm)
    with pytest.raises(ValueError, match="precision is 'bf16'; it may be fp32, tf32, fp16"):
        ops.convolve(x, weights, precision="bf16", device=device, **gemm)


MULTIPROCESSORS = 3
LOOPED = [
    (7, 2, 3, 5, 4),
    (2, 3, 20, 30, 8),
    (2, 1, 37, 29, 3),
]  # images for three rounds; values for five; one a thread


@pytest.fixture
def small(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the device as if three blocks filled it, so that loops take several rounds."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=MULTIPROCESSORS))
    monkeypatch.setattr(on_gpu, "WAVES", 1)
    monkeypatch.setattr(on_gpu, "PARTS", 2)
    return device


@GAPS
@TYPES
@pytest.mark.parametrize("shape", LOOPED)
def test_loops_compute_the_elements_beyond_a_full_device(
    small: Any, shape: tuple[int, ...], dtype: str, gap: int
) -> None:
    host = values(shape, dtype)
    x, wide = images(small, host, gap), host.astype(np.float64)
    window, sliding = (1, 3, 2), Sliding((1, 2, 1), (0, 1, 1))
    words: dict[str, Any] = {"stride": sliding.stride, "padding": sliding.padding}
    cases: list[tuple[Callable[..., Any], Any]] = [
        (ops.tanh, np.tanh(wide)),
        (ops.softmax, reference.activate(wide, "softmax")),
        (partial(ops.softmax, over="all"), reference.softmax_of_images(wide)),
        (partial(ops.max_pool, window=window, **words), reference.pool_sliding(host, window, sliding, "max")),
        (partial(ops.average_pool, window=window, **words), reference.pool_sliding(host, window, sliding, "average")),
    ]
    for op, exact in cases:
        out = op(x, device=small, out=poisoned(small, exact.shape, dtype, gap))
        assert_near(small.get(out), exact, dtype)
    for layout in ("szyxf -> sfzyx", "szyxf -> szyxf"):
        exact = np.einsum(layout.replace(" ", ""), host)
        out = ops.convert_layout(x, layout, device=small, out=poisoned(small, exact.shape, dtype, gap))
        np.testing.assert_array_equal(small.get(out), exact)


@pytest.mark.parametrize("shape", LOOPED)
def test_largest_value_is_found_at_any_position(small: Any, shape: tuple[int, ...]) -> None:
    """It is moved over positions that lie a prime apart; x is scaled by it for tensor cores."""
    host, peak = values(shape), small.put(np.zeros(1, np.float32), "peak")
    for place in (*range(0, host.size, 1009), host.size - 1):
        host.reshape(-1)[place] = -100 - place
        on_gpu._find_peak(small, images(small, host, 4), peak)
        assert small.get(peak)[0] == 100 + place


@pytest.mark.parametrize("method", ["direct", "implicit_gemm", "softmax"])
@TYPES
def test_temporary_memory_is_freed_when_the_work_is_done(either: Any, method: Any, dtype: str) -> None:
    x, weights = either.put(values(CONVOLUTIONS[0].shape, dtype), "x"), CONVOLUTIONS[0].weights()
    gc.collect()
    held = either.allocated
    if method == "softmax":
        out = ops.softmax(x, "all", device=either)
    else:
        out = ops.convolve(x, weights, method=method, padding=(1, 1, 1), device=either)
    assert either.stream.done
    assert either.allocated == held + out.nbytes


@pytest.mark.slow
def test_operations_without_temporary_memory_do_not_wait() -> None:
    with EmulatedDevice(EMULATED_GPU) as emulated:
        device: Any = emulated
        x = device.put(values((2, 3, 4, 5, 6)), "x")
        calls: list[Callable[[], object]] = [
            lambda: ops.tanh(x, device=device),
            lambda: ops.softmax(x, device=device),
            lambda: ops.average_pool(x, (1, 2, 3), device=device),
            lambda: ops.convert_layout(x, "szyxf -> sfzyx", device=device),
        ]
        for call in calls:
            result = call()
            assert not emulated.stream.done
            assert np.isfinite(device.get(result)).all()
            assert emulated.stream.done


def test_arrays_of_the_host_are_refused(device: Any) -> None:
    host = values((2, 3, 4, 5, 6))
    x = device.put(host, "x")
    assert device.holds(x)
    assert device.holds(x[1:, 2, ::2])
    assert not device.holds(host)
    words = (
        rf"^ndarray is not an array of {re.escape(device.gpu.name)}: copy it there with device.put, or omit device=$"
    )
    refused: list[Callable[[], object]] = [
        lambda: ops.relu(host, device=device),
        lambda: ops.softmax(host, device=device),
        lambda: ops.max_pool(x, (1, 2, 2), device=device, out=np.empty((2, 3, 2, 2, 6), np.float32)),
        lambda: ops.convert_layout(x, "szyxf -> sfzyx", device=device, out=host.transpose(0, 4, 1, 2, 3)),
    ]
    for call in refused:
        with pytest.raises(TypeError, match=words):
            call()
    with pytest.raises(TypeError, match=r"list is not an array of "):
        ops.relu([1.0], device=device)


def test_results_over_their_input_are_refused(device: Any) -> None:
    host = values((2, 6, 4, 5, 2))
    whole, weights = device.put(host, "x"), CONVOLUTIONS[1].weights()
    x, near, beside = whole[:, :3], whole[:, 2:5], whole[:, 3:]
    two = ConvWeights(weights.weight[:2], weights.bias[:2])
    same: dict[str, Any] = {"padding": (0, 1, 1), "device": device}
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: ops.max_pool(x, (1, 3, 3), stride=(1, 1, 1), out=x, **same),
            "out shares memory with x, which is read",
        ),
        (lambda: ops.convolve(x, two, out=near, **same), "out shares memory with x, which is read"),
        (lambda: ops.convert_layout(x, "szyxf -> szyxf", device=device, out=x), "out shares memory with x, which"),
        (lambda: ops.tanh(x, device=device, out=near), "out shares some memory with x and is not x; give x itself"),
    ]
    for call, words in refused:
        with pytest.raises(ShapeError, match=words):
            call()
    np.testing.assert_array_equal(device.get(whole), host)
    assert ops.relu(x, device=device, out=beside) is beside  # between the images of x, and none of them
    np.testing.assert_array_equal(device.get(beside), np.maximum(host[:, :3], 0))


def test_unfit_arguments_are_refused() -> None:
    with EmulatedDevice(EMULATED_GPU) as emulated:
        device: Any = emulated
        x = device.put(values((2, 3, 4, 5, 6)), "x")
        turned = x.transpose(0, 4, 1, 2, 3)
        with pytest.raises(
            ShapeError, match=r"x, \(2, 6, 3, 4, 5\) with strides .*, is not in C order within an image"
        ):
            ops.softmax(turned, device=device)
        with pytest.raises(ShapeError, match=r"out, .* is not in C order within an image; use ops.convert_layout"):
            ops.relu(x, device=device, out=x[..., ::-1])
        assert ops.softmax(x[:0], device=device).shape == (0, 3, 4, 5, 6)
