"""gpu.conv.implicit_gemm against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.closeness import INPUTS, MACHINE, random_input, random_weights, run_on
from tests.support.emulator import EmulatedDevice
from tests.support.tiers import one_in
from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.gpu.implicit_gemm import floats, tensor
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering
from znnpy.kernels.gpu.implicit_gemm.primitive import ConvImplicitGemm
from znnpy.machine import Gpu
from znnpy.shapes import Activation, ConvShape, PoolShape, Precision, Sliding, Vec3

GEMM, FLOAT = ConvImplicitGemm(), Variant.of(units="float")
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
ALLOWED = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 2e-3}  # fp16: what rounding to float16 costs
WAYS: list[tuple[str, Precision]] = [
    ("float", "fp32"),
    ("float", "fp16"),
    ("tensor", "fp32"),
    ("tensor", "tf32"),
    ("tensor", "fp16"),
    ("warpgroup", "fp32"),
    ("warpgroup", "tf32"),
    ("warpgroup", "fp16"),
]
SHAPES = [
    ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1), "none"),
    ConvShape(1, 5, 3, (6, 7, 9), (3, 2, 4), "relu"),
    ConvShape(2, 3, 17, (5, 8, 4), (1, 3, 2), "tanh"),
    ConvShape(3, 2, 6, (4, 5, 6), (4, 5, 6), "sigmoid"),  # one voxel out
    ConvShape(1, 18, 70, (3, 4, 15), (2, 1, 3), "relu"),  # more maps than a chunk, or a group of floats.cu
    ConvShape(2, 24, 40, (3, 19, 18), (2, 1, 2), "relu"),  # several tiles, pieces of 8 maps
    ConvShape(2, 2, 9, (3, 4, 14), (2, 3, 10), "relu"),  # folded: two groups of 8 voxels
    ConvShape(1, 4, 81, (2, 19, 18), (1, 2, 3), "none"),  # folded, two slices
    ConvShape(1, 8, 130, (2, 3, 14), (1, 3, 5), "none"),  # two slices of maps; rounds of taps
]


def run(
    device: Any,
    way: tuple[str, Precision],
    shape: ConvShape,
    x: Any,
    weights: ConvWeights,
    carried: int = 0,
    gap: int = 0,
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` values between images."""
    units, precision = way
    shape = replace(shape, precision=precision)
    (variant,) = (v for v in GEMM.variants(shape, replace(MACHINE, gpu=device.gpu)) if v.text("units") == units)
    return run_on(device, GEMM, shape, x, weights, variant, carried=carried, gap=gap)


def error(found: npt.NDArray[Any], exact: npt.NDArray[Any]) -> float:
    """Rms, of the rms answer."""
    assert found.shape == exact.shape
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


def rounded(x: Any, precision: Precision) -> Any:
    """Round to what float16 activations hold."""
    return x.astype(np.float16).astype(np.float32) if precision == "fp16" else x


def exact_of(shape: ConvShape, x: Any, weights: ConvWeights) -> npt.NDArray[Any]:
    return reference.convolve(x, weights.weight, weights.bias, shape.activation)


@pytest.mark.parametrize(
    ("way", "shape"),
    one_in(4, product(WAYS, SHAPES)),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_output_equals_the_definition(device: Any, way: tuple[str, Precision], shape: ConvShape) -> None:
    x, weights = rounded(random_input(shape), way[1]), random_weights(shape)
    out, peak = run(device, way, shape, x, weights)
    assert error(out, exact_of(shape, x, weights)) <= ALLOWED[way[1]]
    assert peak == pytest.approx(np.abs(out).max(), rel=1e-3 if way[1] == "fp16" else 0)


@pytest.mark.parametrize("maps", [3, 9])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "tf32"], ids="-".join)
def test_all_activations_equal_the_definition(
    device: Any, way: tuple[str, Precision], activation: Activation, maps: int
) -> None:
    """The softmax runs on float32 units alone."""
    shape = ConvShape(2, 2, maps, (3, 4, 3), (2, 2, 2), activation)
    if activation == "softmax" and way[0] != "float":
        variants = GEMM.variants(replace(shape, precision=way[1]), WITH_GPU)
        assert [variant.text("units") for variant in variants] == ["float"]
        return
    x, weights = rounded(10 * random_input(shape), way[1]), random_weights(shape)
    out, peak = run(device, way, shape, x, weights)
    assert error(out, exact_of(shape, x, weights)) <= ALLOWED[way[1]]
    assert peak == pytest.approx(np.abs(out).max(), rel=1e-3 if way[1] == "fp16" else 0)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("way", [way for way in WAYS if way[1] == "fp32"], ids="-".join)
def test_odd_inputs_are_as_accurate(device: Any, way: tuple[str, Precision], kind: str) -> None:
    x, weights = random_input(SHAPES[1], kind), random_weights(SHAPES[1])
    out, _ = run(device, way, SHAPES[1], x, weights)
    assert error(out, exact_of(SHAPES[1], x, weights)) <= 1e-6


@pytest.mark.parametrize("scale", [0, 1, 10])
@pytest.mark.parametrize("units", ["float", "tensor", "warpgroup"])
def test_long_sums_lose_little(device: Any, units: str, scale: int) -> None:
    """It is tried with the largest bias, which makes sums lose more, and without one."""
    shape = ConvShape(1, 125, 64, (2, 5, 20), (2, 2, 5), "none")
    assert prod(shape.k) * shape.fin == floats.MOST_TERMS
    x, weights = random_input(shape), random_weights(shape)
    weights.bias[...] *= scale
    out, _ = run(device, (units, "fp32"), shape, x, weights)
    assert error(out, exact_of(shape, x, weights)) <= 1e-6
    longer = GEMM.variants(replace(shape, fin=126), WITH_GPU)
    assert [variant.text("units") for variant in longer] == ["warpgroup", "tensor"]


@pytest.mark.slow
@pytest.mark.parametrize("fout", [3, 80])
@pytest.mark.parametrize(("fin", "k"), [(16, (4, 12, 12)), (64, (5, 5, 5)), (2, (6, 20, 24))])
@pytest.mark.parametrize("units", ["tensor", "warpgroup"])
def test_hundreds_of_terms_are_summed_in_groups(units: str, fin: int, k: Vec3, fout: int) -> None:
    """Terms of one sign would lose up to 5e-7 in one sum; the emulator's tensor cores are exact."""
    shape = ConvShape(1, fin, fout, (k[0], k[1] + 1, k[2] + 8), k, "none")
    x, weights = np.abs(random_input(shape)), random_weights(shape)
    weights.weight[...] = np.abs(weights.weight)
    with EmulatedDevice() as device:
        out, _ = run(device, (units, "fp32"), shape, x, weights)
    assert error(out, exact_of(shape, x, weights)) <= 1.1e-7


@pytest.mark.parametrize(("fin", "gap"), [(8, 0), (8, 7), (8, 8), (1, 3), (3, 0), (12, 4)])
@pytest.mark.parametrize("carried", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_carried_planes_and_strided_images_equal_the_definition(
    device: Any, way: tuple[str, Precision], carried: int, fin: int, gap: int
) -> None:
    shape = ConvShape(2, fin, 6, (4, 8, 4), (3, 3, 2), "relu")
    x, weights = rounded(random_input(shape), way[1]), random_weights(shape)
    out, _ = run(device, way, shape, x, weights, carried, gap)
    assert error(out, exact_of(shape, x, weights)) <= ALLOWED[way[1]]


@pytest.mark.parametrize("power", [-28, 0, 30])
@pytest.mark.parametrize("way", [way for way in WAYS[2:] if way[1] != "fp16"], ids="-".join)
def test_float16_holds_values_of_any_size(device: Any, way: tuple[str, Precision], power: int) -> None:
    """Scaled by powers of two: exactly as accurate."""
    shape = replace(SHAPES[1], activation="none")
    x, weights = random_input(shape) * np.float32(10.0**power), random_weights(shape)
    weights.weight[...] *= np.float32(10.0 ** (power / 10))
    weights.bias[...] = 0
    out, _ = run(device, way, shape, x, weights)
    assert error(out, exact_of(shape, x, weights)) <= ALLOWED[way[1]]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_peak_reports_a_result_not_finite(device: Any, way: tuple[str, Precision]) -> None:
    shape = SHAPES[1]
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, way, shape, x, weights)[1])
    x[0, 3, 3, 3, 1] = 6e4 if way[1] == "fp16" else 3e38
    weights.weight[...] = 10
    assert run(device, way, shape, x, weights)[1] > (65504 if way[1] == "fp16" else 3.4e38)


SLIDES: list[tuple[Vec3, Vec3, Sliding]] = [
    ((5, 9, 8), (3, 2, 4), Sliding((2, 3, 1), (0, 0, 0))),
    ((4, 5, 6), (3, 3, 3), Sliding((1, 1, 1), (1, 1, 1))),
    ((1, 7, 11), (1, 5, 3), Sliding((1, 2, 4), (0, 2, 1))),
    ((2, 2, 2), (3, 4, 2), Sliding((1, 1, 1), (1, 1, 3))),  # windows of zeros alone
    ((1, 40, 37), (1, 3, 2), Sliding((1, 2, 1), (0, 1, 0))),  # several tiles
]


@pytest.mark.parametrize(("n", "k", "sliding"), SLIDES)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_strides_and_padding_equal_the_definition(
    device: Any, way: tuple[str, Precision], n: Vec3, k: Vec3, sliding: Sliding
) -> None:
    units, precision = way
    problem = Lowering(3, 5, n, k, "relu", precision, sliding)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, *n, 3), np.float32).astype(problem.dtype)
    weights = ConvWeights(rng.standard_normal((5, 3, *k), np.float32), rng.standard_normal(5, np.float32))
    out = device.put(np.full((2, *problem.out, 5), np.nan, problem.dtype), "out")
    product: floats.FloatProduct | tensor.TensorProduct
    if units == "float":
        product = floats.FloatProduct(floats.prepare(weights, device), problem, device)
    else:
        product = tensor.TensorProduct(tensor.prepare(weights, precision, device), problem, 2, device)
    peak = device.put(np.abs(x).max(keepdims=True).astype(np.float32), "peak")
    product.run(device.put(x, "x"), out, None, device.address(peak), 0)
    pads = [(0, 0), *((pad, pad) for pad in sliding.padding), (0, 0)]
    dense = reference.convolve(np.pad(x, pads), weights.weight, weights.bias, "relu")
    exact = dense[:, :: sliding.stride[0], :: sliding.stride[1], :: sliding.stride[2]]
    assert error(device.get(out), exact) <= ALLOWED[precision]


@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_tiling_fits_every_gpu(precision: Precision, k: int, shared: int) -> None:
    """It also covers whole outputs with few voxels too many."""
    problem = Lowering(80, 80, (100 + k - 1,) * 3, (k, k, k), "relu", precision)
    plan = tensor.plan_of(problem, 1, shared)
    assert plan is not None
    assert prod(plan.tile) <= plan.block.voxels == 256
    assert plan.block.maps == 80
    computed = tensor.tiles_of(problem, 1, plan.tile) * plan.block.voxels
    assert 1 <= computed / 100**3 <= (1.35 if shared > 2**17 or k < 9 else 3)
    assert 1 <= plan.group <= k * k


@pytest.mark.parametrize(
    ("fin", "k", "depth", "taps", "products"),
    [
        (1, (2, 2, 2), 16, (2, 1, 1), 2),  # two lines of 8 voxels
        (1, (5, 5, 5), 16, (5, 3, 1), 15),
        (2, (3, 3, 3), 16, (3, 3, 1), 9),  # two maps of 8 voxels
        (3, (1, 3, 9), 48, (1, 3, 1), 9),  # two groups of 8 voxels
        (4, (3, 3, 2), 4, (3, 3, 2), 18),  # as many as there would be folded
        (5, (3, 3, 3), 5, (3, 3, 3), 27),
        (1, (3, 1, 1), 1, (3, 1, 1), 3),
    ],
)
def test_few_maps_are_folded(fin: int, k: Vec3, depth: int, taps: Vec3, products: int) -> None:
    matrix = tensor.matrix_of(fin, k)
    assert matrix.products == products
    assert (matrix.depth, matrix.k) == (depth, taps)


def test_images_of_few_voxels_share_a_tile() -> None:
    problem = Lowering(64, 64, (1, 7, 7), (1, 3, 3), "none", "fp16", Sliding(padding=(0, 1, 1)))
    plan = tensor.plan_of(problem, 128, 227 * 1024)
    assert plan is not None
    assert plan.tile == (4, 8, 8)


def test_unsupported_shape_gets_a_reason() -> None:
    pool = PoolShape(1, 1, (3, 3, 3), (2, 2, 2))
    assert GEMM.why_not(SHAPES[0], MACHINE) == "needs a CUDA device"
    assert GEMM.why_not(pool, WITH_GPU) == "computes convolutions, not pool"
    assert GEMM.why_not(replace(SHAPES[0], n=(3, 3, 3), pool=(2, 2, 2)), WITH_GPU) == (
        "does not fuse pooling into fragments: see gpu.conv.fft_tiled"
    )
    assert GEMM.why_not(SHAPES[0], WITH_GPU) is None
    long = ConvShape(1, 80, 9, (9, 9, 9), (4, 4, 4), "softmax")
    assert GEMM.why_not(long, WITH_GPU) == (
        "adds 5,120 products in sequence, which costs more than 1e-6 in fp32: see gpu.conv.direct"
    )
    assert GEMM.why_not(replace(long, precision="tf32"), WITH_GPU) is None
    old = replace(MACHINE, gpu=replace(GPU, capability=(7, 5)))
    assert GEMM.variants(SHAPES[0], old) == (FLOAT,)


def test_work_counts_the_arithmetic_of_whole_groups() -> None:
    shape = ConvShape(2, 5, 18, (4, 5, 6), (3, 2, 1), "softmax")
    (work,) = GEMM.work(shape, FLOAT)
    assert (work.unit, work.flops) == ("gpu_gemm_float", 2 * 2 * (2 * 2 * 4 * 6) * (3 * 2 * 1 * 5) * 32)
    assert work.nbytes == shape.in_bytes + shape.out_bytes


@pytest.mark.parametrize(("precision", "unit", "times"), [("fp32", "gpu_gemm_split", 3), ("tf32", "gpu_gemm_half", 1)])
def test_work_on_tensor_cores_counts_whole_blocks(precision: Precision, unit: str, times: int) -> None:
    shape = ConvShape(1, 18, 70, (6, 33, 34), (2, 2, 3), "relu", precision=precision)
    (work,) = GEMM.work(shape, Variant.of(units="tensor", precision=precision))
    plan = tensor.plan_of(Lowering.of(shape), 1, 227 * 1024)
    assert plan is not None
    voxels = tensor.tiles_of(Lowering.of(shape), 1, plan.tile) * 256
    assert (work.unit, work.flops) == (unit, 2.0 * times * voxels * (2 * 2 * 3 * 32) * 80)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("way", WAYS[2:], ids="-".join)
def test_block_computes_several_tiles(
    device: Any, monkeypatch: pytest.MonkeyPatch, way: tuple[str, Precision], blocks: int
) -> None:
    """There are several planes, images, stages and rounds; the last tiles reach beyond the output."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=blocks))
    monkeypatch.setattr(tensor.Block, "resident", 1)
    monkeypatch.setattr(tensor, "MOST_GROUP", 2)
    monkeypatch.setattr(tensor, "plan_of", tensor.plan_of.__wrapped__)
    shape = ConvShape(2, 19, 20, (5, 20, 21), (2, 3, 2), "none")
    x, weights = rounded(random_input(shape), way[1]), random_weights(shape)
    out, peak = run(device, way, shape, x, weights)
    assert error(out, exact_of(shape, x, weights)) <= ALLOWED[way[1]]
    assert peak == pytest.approx(np.abs(out).max(), rel=1e-3 if way[1] == "fp16" else 0)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_repeated_runs_give_equal_bits(device: Any, way: tuple[str, Precision]) -> None:
    """A second run gives the output of the first."""
    x, weights = rounded(random_input(SHAPES[5]), way[1]), random_weights(SHAPES[5])
    first, second = (run(device, way, SHAPES[5], x, weights)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
