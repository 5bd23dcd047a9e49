"""gpu.conv.first against the float64 definition, on float32 units and in matrix products of tf32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from closeness import INPUTS, MACHINE, assert_close, error_of, random_input, random_weights, run_on

from znnpy.kernels import reference
from znnpy.kernels.gpu.conv_first import SHARED_BYTES, WIDTHS, ConvFirst, _most_groups, _plan, _shared_bytes
from znnpy.kernels.primitive import Variant
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.primitive import ConvWeights

FIRST = ConvFirst()
FLOAT, TENSOR = "float", "tensor"
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
SHAPES = [
    ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1), "none"),
    ConvShape(1, 1, 80, (5, 11, 37), (3, 2, 4), "relu"),  # tiles that end anywhere
    ConvShape(2, 3, 17, (5, 8, 4), (1, 3, 2), "tanh"),
    ConvShape(3, 2, 6, (4, 5, 6), (4, 5, 6), "sigmoid"),  # one voxel out
    ConvShape(1, 4, 100, (4, 40, 9), (2, 1, 3), "relu"),  # more maps than a block has
    ConvShape(1, 4, 24, (7, 9, 14), (5, 7, 6), "none"),  # kernels that come in chunks
    ConvShape(1, 1, 12, (9, 11, 13), (9, 9, 11), "relu"),
]


def run(
    device: Any,
    shape: ConvShape,
    x: Any,
    weights: ConvWeights,
    units: str,
    carried: int = 0,
    gap: int = 0,
    groups: int | None = None,
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` values between images.

    groups  None: the most.
    """
    variant = Variant.of(groups=groups or _most_groups(shape.fout), units=units)
    return run_on(device, FIRST, shape, x, weights, variant, carried=carried, gap=gap)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(device: Any, shape: ConvShape) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, FLOAT)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensor_cores_round_as_tf32_does(device: Any, shape: ConvShape) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, TENSOR)
    assert error_of(out, x, weights, shape) <= 1e-3
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("kx", [1, 2, 3, 5, 6, 7, 8, 9, 10])
def test_does_kernels_of_any_width(device: Any, kx: int) -> None:
    shape = ConvShape(1, 1, 5, (3, 5, 20), (2, 3, kx), "none")
    x, weights = random_input(shape), random_weights(shape)
    assert_close(run(device, shape, x, weights, FLOAT)[0], x, weights, shape)
    assert error_of(run(device, shape, x, weights, TENSOR)[0], x, weights, shape) <= 1e-3


@pytest.mark.parametrize("kind", INPUTS)
def test_is_as_accurate_for_odd_inputs(device: Any, kind: str) -> None:
    x, weights = random_input(SHAPES[1], kind), random_weights(SHAPES[1])
    assert_close(run(device, SHAPES[1], x, weights, FLOAT)[0], x, weights, SHAPES[1])
    assert error_of(run(device, SHAPES[1], x, weights, TENSOR)[0], x, weights, SHAPES[1]) <= 1e-3


@pytest.mark.parametrize("gap", [0, 7, 8])
@pytest.mark.parametrize("carried", [0, 1, 4])
@pytest.mark.parametrize("maps", [5, 8])
@pytest.mark.parametrize(("precision", "units"), [("fp32", FLOAT), ("tf32", TENSOR), ("fp16", TENSOR)])
def test_planes_are_carried_and_images_lie_apart(
    device: Any, precision: Any, units: str, maps: int, carried: int, gap: int
) -> None:
    shape = ConvShape(3, 2, maps, (6, 5, 4), (3, 2, 2), "relu", precision=precision)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, _ = run(device, shape, x, weights, units, carried, gap)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
def test_a_block_walks_along_z_where_there_are_many(device: Any, monkeypatch: pytest.MonkeyPatch, units: str) -> None:
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=1))
    shape = ConvShape(9, 2, 7, (6, 3, 3), (2, 2, 3), "relu")
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, units)
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[5]], ids=str)
def test_half_precision_is_storage_and_tf32(device: Any, shape: ConvShape) -> None:
    shape = replace(shape, precision="fp16")
    weights = random_weights(shape)
    x = random_input(shape).astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights, TENSOR)
    assert out.dtype == np.float16
    assert error_of(out, x, weights, shape) < 1e-3
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert abs(peak - np.abs(exact).max()) < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
def test_a_result_that_is_not_finite_shows_in_the_peak(device: Any, units: str) -> None:
    shape = SHAPES[2]
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, replace(shape, activation="relu"), x, weights, units)[1])
    x[0, 3, 3, 3, 1] = 3e38
    weights.weight[...] = 10
    assert run(device, replace(shape, activation="none"), x, weights, units)[1] == np.inf


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
@pytest.mark.parametrize("fin", [1, 2, 3, 4])
def test_two_blocks_fit_any_card(fin: int, units: str) -> None:
    for k in [(1, 1, 1), (3, 3, 3), (5, 5, 5), (2, 9, 9), (11, 11, 11), (1, 40, 3)]:
        for fout in (1, 17, 80, 81, 200):
            plan = _plan(fin, fout, k, units, _most_groups(fout))
            assert fout <= plan.padded < fout + 16 * plan.blocks
            assert plan.chunks * plan.rows >= k[0] * k[1] > (plan.chunks - 1) * plan.rows
            assert max(_shared_bytes(plan, fin, k, wide) for wide in WIDTHS) <= SHARED_BYTES


def test_what_does_not_apply_says_why() -> None:
    shape = SHAPES[1]
    assert FIRST.why_not(shape, WITH_GPU) is None
    assert FIRST.why_not(shape, MACHINE) == "needs a CUDA device"
    assert FIRST.why_not(PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), WITH_GPU) == "computes convolutions, not pool"
    for changed, reason in (
        ({"fin": 5}, "takes up to 4 input maps, not 5"),
        ({"k": (1, 1, 12)}, "takes kernels up to 11 along x, not 12"),
        ({"batch": 70000}, "takes up to 65535 images, not 70000"),
        ({"activation": "softmax"}, "softmax needs all maps of a voxel in one place: see gpu.conv.direct"),
        (
            {"fin": 4, "n": (1, 200, 40), "k": (1, 200, 11)},
            "one row of its taps wants 158944 bytes of shared memory, and a block has 131072",
        ),
        ({"pool": (1, 1, 2), "k": (1, 1, 1)}, "does not pool into fragments what it computes: see gpu.conv.fft_tiled"),
    ):
        assert FIRST.why_not(replace(shape, **changed), WITH_GPU) == reason


@pytest.mark.parametrize(("precision", "units"), [("fp32", FLOAT), ("tf32", TENSOR), ("fp16", TENSOR)])
def test_the_precision_says_which_units_compute(precision: Any, units: str) -> None:
    shape = replace(SHAPES[1], precision=precision)
    assert {variant.word("units") for variant in FIRST.variants(shape, WITH_GPU)} == {units}


def test_blocks_sum_fewer_maps_where_images_are_small() -> None:
    """28 x 28 and 512 filters have 35 blocks of 80 maps; a multiprocessor of 132 should have 4 filters of the 512."""

    def groups(n: tuple[int, int, int], fout: int, k: tuple[int, int, int], batch: int = 1) -> list[int]:
        variants = FIRST.variants(ConvShape(batch, 1, fout, n, k), WITH_GPU)
        return [variant.count("groups") for variant in variants]

    assert groups((1, 28, 28), 512, (1, 3, 3)) == [1, 5]
    assert groups((1, 9, 300), 512, (1, 3, 3)) == [1, 5]
    assert groups((1, 9, 300), 512, (1, 3, 3), batch=2) == [5]  # 280 blocks: two for each of 132, and more
    assert groups((1, 1024, 1024), 32, (1, 3, 3)) == [2]
    assert groups((1, 32, 32), 32, (1, 5, 5)) == [2]  # as many lines as filters, which leave less over
    assert groups((48, 512, 512), 80, (3, 3, 3)) == [5]
    assert groups((10, 12, 12), 80, (3, 3, 3)) == [1, 5]


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
@pytest.mark.parametrize("groups", [1, 2])
def test_does_any_number_of_groups(device: Any, groups: int, units: str) -> None:
    shape = ConvShape(2, 1, 52, (2, 7, 9), (2, 3, 3), "relu")
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, units, groups=groups)
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)
    assert peak == np.abs(out).max()


def test_its_work_is_the_arithmetic_of_whole_tiles() -> None:
    shape = ConvShape(2, 2, 18, (4, 9, 34), (3, 2, 1), "relu")
    (plain,), (tensor,) = (FIRST.work(shape, Variant.of(groups=2, units=units)) for units in (FLOAT, TENSOR))
    tiles = 2 * 2 * 3 * 1  # 16 wide, 12 high
    assert (plain.unit, plain.flops) == ("gpu_first", 2 * tiles * 192 * (3 * 2 * 1 * 2) * 32)
    assert tensor.flops == plain.flops / 4
    assert plain.nbytes == tensor.nbytes == shape.in_bytes + shape.out_bytes
    (narrow,) = FIRST.work(replace(shape, fout=33), Variant.of(groups=1, units=FLOAT))
    assert narrow.flops == plain.flops / 32 * 48
