"""gpu.conv.implicit_gemm against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from closeness import INPUTS, MACHINE, assert_close, random_input, random_weights

from znnpy.kernels import reference
from znnpy.kernels.gpu.implicit_gemm.floats import FloatProduct, prepare
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering
from znnpy.kernels.gpu.implicit_gemm.primitive import ConvImplicitGemm
from znnpy.kernels.primitive import ConvWeights, Variant
from znnpy.machine import Gpu
from znnpy.shapes import Activation, ConvShape, PoolShape, Precision, Sliding, Vec3

GEMM, FLOAT = ConvImplicitGemm(), Variant.of(units="float")
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
SHAPES = [
    ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1), "none"),
    ConvShape(1, 5, 3, (6, 7, 9), (3, 2, 4), "relu"),
    ConvShape(2, 3, 17, (5, 8, 4), (1, 3, 2), "tanh"),
    ConvShape(3, 2, 6, (4, 5, 6), (4, 5, 6), "sigmoid"),  # one voxel out
    ConvShape(1, 18, 70, (3, 4, 15), (2, 1, 3), "relu"),  # more maps than a block has
    ConvShape(2, 20, 5, (3, 5, 9), (1, 1, 1), "relu"),
    ConvShape(1, 3, 40, (3, 5, 14), (2, 1, 2), "relu"),  # three groups of maps
]


def run(
    device: Any, shape: ConvShape, x: Any, weights: ConvWeights, carried: int = 0, gap: int = 0
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` values between images."""
    kind = np.dtype(np.float16 if shape.precision == "fp16" else np.float32)

    def images(values: Any, what: str) -> Any:
        step = values[0].size + gap
        host = np.full((len(values), step), np.nan, kind)
        host[:, : step - gap] = values.reshape(len(values), -1)
        strides = (step * kind.itemsize, *np.empty(values.shape[1:], kind).strides)
        return device.view(device.put(host, what), values.shape, kind, strides=strides)

    before = images(x[:, :carried], "before") if carried else None
    rest, out = images(x[:, carried:], "x"), images(np.full(shape.out_shape, np.nan), "out")
    peak = device.put(np.zeros(1, np.float32), "peak")
    held = device.allocated
    resident = GEMM.prepare(weights, FLOAT, device)
    assert device.allocated - held == GEMM.footprint(shape, FLOAT, 1).resident
    GEMM.bind(resident, shape, FLOAT, device).run(rest, out, {}, before, out_peak=device.address(peak))
    return device.get(out), float(device.get(peak)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(device: Any, shape: ConvShape) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("maps", [3, 9, 150])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_does_all_activations(device: Any, activation: Activation, maps: int) -> None:
    shape = ConvShape(2, 2, maps, (3, 4, 3), (2, 2, 2), activation)
    x, weights = 10 * random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("kind", INPUTS)
def test_is_as_accurate_for_odd_inputs(device: Any, kind: str) -> None:
    x, weights = random_input(SHAPES[1], kind), random_weights(SHAPES[1])
    out, _ = run(device, SHAPES[1], x, weights)
    assert_close(out, x, weights, SHAPES[1])


@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("carried", [0, 1, 4])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_planes_are_carried_and_images_lie_apart(device: Any, precision: Any, carried: int, gap: int) -> None:
    shape = replace(SHAPES[2], precision=precision)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, _ = run(device, shape, x, weights, carried, gap)
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < (5e-4 if precision == "fp16" else 1e-6)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4], replace(SHAPES[1], activation="softmax")], ids=str)
def test_half_precision_is_storage_only(device: Any, shape: ConvShape) -> None:
    shape = replace(shape, precision="fp16")
    weights = random_weights(shape)
    x = random_input(shape).astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights)
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert out.dtype == np.float16
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < 5e-4  # what rounding to float16 costs
    assert abs(peak - np.abs(exact).max()) < 1e-5 * np.abs(exact).max()  # before it was rounded


def test_a_result_that_is_not_finite_shows_in_the_peak(device: Any) -> None:
    shape = SHAPES[1]
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, shape, x, weights)[1])
    x[0, 3, 3, 3, 1] = 3e38
    weights.weight[...] = 10
    assert run(device, shape, x, weights)[1] == np.inf


def test_what_does_not_apply_says_why() -> None:
    pool = PoolShape(1, 1, (3, 3, 3), (2, 2, 2))
    assert GEMM.why_not(SHAPES[0], MACHINE) == "needs a CUDA device"
    assert GEMM.why_not(pool, WITH_GPU) == "computes convolutions, not pool"
    assert GEMM.why_not(replace(SHAPES[0], n=(3, 3, 3), pool=(2, 2, 2)), WITH_GPU) == (
        "does not pool into fragments what it computes: see gpu.conv.fft_tiled"
    )
    assert GEMM.why_not(SHAPES[0], WITH_GPU) is None


def test_its_work_is_the_arithmetic_of_whole_groups() -> None:
    shape = ConvShape(2, 5, 18, (4, 5, 6), (3, 2, 1), "softmax")
    (work,) = GEMM.work(shape, FLOAT)
    assert (work.unit, work.flops) == ("gpu_gemm_float", 2 * 2 * (2 * 2 * 4 * 6) * (3 * 2 * 1 * 5) * 32)
    assert work.nbytes == shape.in_bytes + shape.out_bytes


@pytest.mark.parametrize(
    ("n", "k", "sliding"),
    [
        ((5, 9, 8), (3, 2, 4), Sliding((2, 3, 1), (0, 0, 0))),
        ((4, 5, 6), (3, 3, 3), Sliding((1, 1, 1), (1, 1, 1))),
        ((1, 7, 11), (1, 5, 3), Sliding((1, 2, 4), (0, 2, 1))),
        ((2, 2, 2), (3, 4, 2), Sliding((1, 1, 1), (1, 1, 3))),  # windows of zeros alone
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_strides_and_padding(device: Any, n: Vec3, k: Vec3, sliding: Sliding, precision: Precision) -> None:
    problem = Lowering(3, 5, n, k, "relu", precision, sliding)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, *n, 3), np.float32).astype(problem.dtype)
    weights = ConvWeights(rng.standard_normal((5, 3, *k), np.float32), rng.standard_normal(5, np.float32))
    out = device.put(np.full((2, *problem.out, 5), np.nan, problem.dtype), "out")
    FloatProduct(prepare(weights, device), problem, device).run(device.put(x, "x"), out, None, 0, 0)
    pads = [(0, 0), *((pad, pad) for pad in sliding.padding), (0, 0)]
    dense = reference.convolve(np.pad(x, pads), weights.weight, weights.bias, "relu")
    exact = dense[:, :: sliding.stride[0], :: sliding.stride[1], :: sliding.stride[2]]
    found = device.get(out)
    assert found.shape == exact.shape
    assert np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)) < (1e-3 if precision == "fp16" else 1e-6)
