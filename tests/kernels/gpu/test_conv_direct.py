"""gpu.conv.direct against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest

from tests.support.closeness import INPUTS, MACHINE, assert_close, random_input, random_weights, run_on
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.conv_direct import ConvDirect, DirectStep, prepare, tile_of
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering
from znnpy.machine import Gpu
from znnpy.shapes import Activation, ConvShape, PoolShape, Sliding

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights

DIRECT = ConvDirect()
PLAIN, SHARED = Variant.of(kernel="plain"), Variant.of(kernel="shared")
BOTH = pytest.mark.parametrize("variant", [PLAIN, SHARED], ids=str)
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
    ConvShape(2, 1, 1, (1, 35, 41), (1, 5, 3), "none"),  # a 2D image of several tiles
    ConvShape(1, 2, 8, (9, 3, 10), (2, 2, 3), "relu"),  # tiles along z; four maps at once
    ConvShape(1, 90, 5, (4, 9, 9), (4, 4, 4), "none"),  # maps of the input in several parts
    ConvShape(1, 2, 3, (5, 11, 22), (3, 9, 20), "none"),  # planes of taps in several parts
]
SLIDINGS = [
    Sliding((2, 1, 3), (1, 0, 2)),
    Sliding((1, 1, 1), (2, 3, 1)),
    Sliding((1, 3, 2), (0, 0, 0)),
    Sliding((5, 4, 3), (3, 4, 5)),  # windows wholly within the padding
]


def run(
    device: Any,
    shape: ConvShape,
    x: Any,
    weights: ConvWeights,
    variant: Variant = SHARED,
    *,
    carried: int = 0,
    gap: int = 0,
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` values between images."""
    return run_on(device, DIRECT, shape, x, weights, variant, carried=carried, gap=gap)


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_the_definition(device: Any, shape: ConvShape, variant: Variant) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, variant)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@BOTH
@pytest.mark.parametrize("maps", [1, 3, 9, 70, 150])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_all_activations_equal_the_definition(device: Any, activation: Activation, maps: int, variant: Variant) -> None:
    shape = ConvShape(2, 2, maps, (3, 4, 3), (2, 2, 2), activation)
    x, weights = 10 * random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, variant)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@BOTH
@pytest.mark.parametrize("kind", INPUTS)
def test_odd_inputs_are_as_accurate(device: Any, kind: str, variant: Variant) -> None:
    x, weights = random_input(SHAPES[1], kind), random_weights(SHAPES[1])
    out, _ = run(device, SHAPES[1], x, weights, variant)
    assert_close(out, x, weights, SHAPES[1])


@BOTH
@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("carried", [0, 1, 4])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_carried_planes_and_strided_images_equal_the_definition(
    device: Any, precision: Any, carried: int, gap: int, variant: Variant
) -> None:
    shape = replace(SHAPES[2], precision=precision)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, _ = run(device, shape, x, weights, variant, carried=carried, gap=gap)
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < (5e-4 if precision == "fp16" else 1e-6)


@BOTH
@pytest.mark.parametrize(
    "shape", [SHAPES[1], SHAPES[4], SHAPES[7], SHAPES[8], replace(SHAPES[1], activation="softmax")], ids=str
)
def test_half_precision_is_storage_only(device: Any, shape: ConvShape, variant: Variant) -> None:
    shape = replace(shape, precision="fp16")
    weights = random_weights(shape)
    x = random_input(shape).astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights, variant)
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert out.dtype == np.float16
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < 5e-4  # what rounding to float16 costs
    assert abs(peak - np.abs(exact).max()) < 1e-5 * np.abs(exact).max()  # before it was rounded


@BOTH
@pytest.mark.parametrize("sliding", SLIDINGS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], replace(SHAPES[2], activation="softmax"), SHAPES[9]], ids=str)
def test_windows_step_over_zeros_around_the_image(
    device: Any, shape: ConvShape, sliding: Sliding, variant: Variant
) -> None:
    x, weights = random_input(shape), random_weights(shape)
    problem = Lowering(shape.fin, shape.fout, shape.n, shape.k, shape.activation, "fp32", sliding)
    out = device.put(np.full((shape.batch, *problem.out, shape.fout), np.nan, np.float32), "out")
    step = DirectStep(prepare(weights, device), problem, device, variant.text("kernel"))
    step.run(device.put(x, "x"), out, {})
    exact = reference.convolve_sliding(x, weights.weight, weights.bias, shape.activation, sliding)
    assert exact.shape == out.shape
    assert np.sqrt(np.mean((device.get(out) - exact) ** 2) / np.mean(exact**2)) < 1e-6


@BOTH
def test_peak_reports_a_result_not_finite(device: Any, variant: Variant) -> None:
    shape = SHAPES[1]
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, shape, x, weights, variant)[1])
    x[0, 3, 3, 3, 1] = 3e38
    weights.weight[...] = 10
    assert run(device, shape, x, weights, variant)[1] == np.inf


def test_unsupported_shape_gets_a_reason() -> None:
    pool = PoolShape(1, 1, (3, 3, 3), (2, 2, 2))
    assert DIRECT.why_not(SHAPES[0], MACHINE) == "needs a CUDA device"
    assert DIRECT.why_not(pool, WITH_GPU) == "computes convolutions, not pool"
    assert DIRECT.why_not(replace(SHAPES[0], n=(3, 3, 3), pool=(2, 2, 2)), WITH_GPU) == (
        "does not fuse pooling into fragments: see gpu.conv.fft_tiled"
    )
    assert DIRECT.why_not(SHAPES[0], WITH_GPU) is None


def test_work_counts_the_arithmetic_of_whole_tiles_and_groups() -> None:
    shape = ConvShape(2, 5, 18, (4, 5, 6), (3, 2, 1), "softmax")
    taps = 3 * 2 * 1 * 5
    (shared,), (plain,) = DIRECT.work(shape, SHARED), DIRECT.work(shape, PLAIN)
    assert (shared.unit, shared.nbytes) == ("gpu_direct", shape.in_bytes + shape.out_bytes)
    assert shared.flops == 2 * (2 * 3 * 16 * 8) * taps * 32  # two maps' groups at once: one round
    assert plain.flops == 4 * 2 * 2 * (2 * 2 * 4 * 6) * taps * 32  # one after the other: two rounds; four times slower


def test_shapes_above_reach_every_kind_of_tile() -> None:
    tiles = {shape: tile_of(Lowering.of(shape)) for shape in SHAPES[7:]}
    along_y, along_z, maps, planes = tiles.values()
    assert along_y is not None
    assert along_y.blocks((1, 31, 39)) > 1
    assert along_z is not None
    assert along_z.size[0] > 1
    assert maps is not None
    assert (maps.planes, maps.chunk, maps.split_sums) == (4, 5, True)
    assert planes is not None
    assert (planes.planes, planes.chunk, planes.split_sums) == (1, 2, True)


def test_kernel_too_large_for_shared_memory_is_read_from_memory() -> None:
    shape = ConvShape(1, 1, 1, (1, 40, 2000), (1, 30, 1990))
    assert DIRECT.variants(shape, WITH_GPU) == (PLAIN,)
    assert DIRECT.variants(SHAPES[1], WITH_GPU) == (SHARED, PLAIN)
