"""Norms over whole images on a GPU, and means and maxima of them, against the float64 definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import NORMS, weights_for, with_parameters
from tests.support.graph_on_gpu import WITH_GPU, cases, check, in_precision, rounded_inputs, run, side_by_side
from znnpy.graph_shapes import GlobalPoolShape, GraphShape, NormShape
from znnpy.kernels import definition
from znnpy.kernels.gpu.graph.norm import MOST_BLOCKS, GlobalPoolPasses, NormPasses, blocks_of, slice_of

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

TABLE: tuple[Primitive, ...] = (NormPasses(), GlobalPoolPasses())
MORE: list[GraphShape] = [
    NormShape(24, (3, 20, 41), 4, 1e-5, True, "relu"),
    NormShape(48, (5, 6, 7), 3, 1e-5, True, "elu"),  # at once: groups as large as a block's maps
    NormShape(24, (3, 5, 11), 12, activation="leaky_relu"),  # and several of them in a block
    NormShape(16, (16, 16, 16), 16, 1e-5, True, "leaky_relu"),  # as many voxels as a block holds
    NormShape(40, (17, 31, 33), 40, affine=True),  # several slices, and batches that are not full
    GlobalPoolShape(24, (3, 20, 41)),
    GlobalPoolShape(16, (3, 20, 41), "max"),
]
EACH: list[Any] = [with_parameters(s) for s in (*NORMS, *MORE)]


def primitives_for(shape: GraphShape) -> list[Primitive]:
    return [p for p in TABLE if p.why_not(shape, WITH_GPU) is None]


USUAL = [
    (EACH[5], None, "fp16"),
    (EACH[-5], None, "fp16"),
    (EACH[-6], side_by_side, "fp16"),
    (EACH[-2], None, "fp32"),
    (EACH[-1], None, "fp16"),
]
LARGE = (16, 48, 64)  # several blocks, and several parts of each thread
AT_ONCE = (8, 9, 11)


@pytest.mark.parametrize(("shape", "place", "precision"), cases(EACH, USUAL))
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    (primitive,) = primitives_for(shape)
    check(device, primitive, in_precision(shape, precision), place)


def values(f: int, mean: float, std: float = 1.0, size: Any = LARGE) -> Any:
    return (mean + std * np.random.default_rng(7).standard_normal((*size, f))).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("size", [LARGE, AT_ONCE])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mean", [100.0, -1e4, 1e6])
def test_large_means_do_not_cancel(device: Any, mean: float, groups: int, size: Any) -> None:
    """The values themselves are float32, so that those of the largest mean are few and far between."""
    shape = NormShape(4, size, groups, affine=True)
    x = values(4, mean, size=size) + np.float32(mean / 10) * np.arange(4, dtype=np.float32) * (groups != 4)
    exact = definition.norm(shape, weights_for(shape), x)
    out, _ = run(device, NormPasses(), shape, [x])
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.long
@pytest.mark.parametrize("size", [LARGE, AT_ONCE])
@pytest.mark.parametrize("place", [0, 700, -1])
def test_one_value_far_from_all_others_costs_no_digits(device: Any, place: int, size: Any) -> None:
    shape, x = NormShape(3, size, 3), values(3, 100.0, size=size)
    x.reshape(-1, 3)[place] = -3e5
    out, _ = run(device, NormPasses(), shape, [x])
    np.testing.assert_allclose(out, definition.norm(shape, None, x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("value", [0.0, pytest.param(-12345.678, marks=pytest.mark.long)])
def test_image_of_one_value_gives_the_offset(device: Any, value: float) -> None:
    shape = NormShape(5, (4, 5, 6), 5, affine=True)
    weights = weights_for(shape)
    assert weights is not None
    out, _ = run(device, NormPasses(), shape, [np.full((4, 5, 6, 5), value, np.float32)])
    np.testing.assert_allclose(out, np.broadcast_to(weights.bias, out.shape), rtol=0, atol=1e-3 * abs(value) + 1e-6)


def test_groups_are_neighbouring_maps_and_epsilon_goes_under_the_root(device: Any) -> None:
    x = np.array([1, 3, 10, 30], np.float32).reshape(1, 1, 1, 4)
    out, _ = run(device, NormPasses(), NormShape(4, (1, 1, 1), 2, epsilon=3.0), [x])
    np.testing.assert_allclose(out.reshape(-1), [-0.5, 0.5, -10 / 103**0.5, 10 / 103**0.5], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [NormShape(4, (3, 4, 5), 4), GlobalPoolShape(4, (3, 4, 5))], ids=str)
def test_what_is_not_finite_spoils_its_map_and_reaches_the_peak(device: Any, shape: Any, bad: float) -> None:
    (primitive,) = primitives_for(shape)
    (x,) = rounded_inputs(shape)
    x[2, 1, 3, 2] = bad
    out, peak = run(device, primitive, shape, [x])
    assert not np.isfinite(out[..., 2]).any()
    assert np.isfinite(out[..., [0, 1, 3]]).all()
    assert not np.isfinite(peak)


def test_maximum_passes_on_what_is_not_a_number(device: Any) -> None:
    shape = GlobalPoolShape(4, (3, 4, 5), "max")
    (x,) = rounded_inputs(shape)
    x[0, 0, 0, 0], x[2, 3, 4, 1], x[1, 1, 1, 2], x[..., 3] = np.nan, np.nan, np.inf, -np.inf
    out, _ = run(device, GlobalPoolPasses(), shape, [x])
    np.testing.assert_array_equal(out.reshape(-1), [np.nan, np.nan, np.inf, -np.inf])


def test_memory_of_moments_is_bounded() -> None:
    assert blocks_of(NormShape(3, (2, 2, 2), 3)) == 1
    assert blocks_of(NormShape(32, (512, 512, 512), 32)) == MOST_BLOCKS
    assert blocks_of(NormShape(1024, (128, 128, 128), 1024)) == 128
    assert blocks_of(NormShape(10**6, (1, 1, 1), 1)) == 1
    shape = NormShape(32, (512, 512, 512), 32)
    footprint = NormPasses().footprint(shape, NormPasses().variants(shape, WITH_GPU)[0], 1)
    assert sum(scratch.nbytes for scratch in footprint.scratch) < 2**20
    assert footprint.raises_peak
    (work,) = NormPasses().work(shape, NormPasses().variants(shape, WITH_GPU)[0])
    assert (work.unit, work.nbytes) == ("gpu_stream", 3 * shape.in_bytes)


def test_small_images_are_read_once() -> None:
    assert slice_of(NormShape(320, (8, 8, 8), 320), 8) == 8
    assert slice_of(NormShape(256, (16, 16, 16), 256), 8) == 8
    assert slice_of(NormShape(256, (16, 16, 17), 256), 8) == 0  # more voxels than threads hold
    assert slice_of(NormShape(24, (4, 4, 4), 4), 8) == 24
    assert slice_of(NormShape(256, (2, 4, 16), 1), 8) == 256
    assert slice_of(NormShape(256, (2, 4, 17), 1), 8) == 0
    assert slice_of(NormShape(264, (1, 1, 1), 1), 8) == 0  # more maps than lanes of a warp hold
    assert slice_of(NormShape(8, (4, 4, 4), 8, activation="softmax"), 8) == 0
    shape = in_precision(NormShape(320, (8, 8, 8), 320), "fp16")
    (work,) = NormPasses().work(shape, NormPasses().variants(shape, WITH_GPU)[0])
    assert (work.unit, work.nbytes) == ("gpu_stream", 2 * shape.in_bytes)


def test_unsupported_shape_gets_a_reason() -> None:
    pool = GlobalPoolShape(1, (1, 1, 1))
    assert NormPasses().why_not(EACH[0], MACHINE) == "needs a CUDA device"
    assert NormPasses().why_not(pool, WITH_GPU) == f"computes norms over a whole image, not {pool}"
    assert "computes means and maxima over a whole image" in str(GlobalPoolPasses().why_not(EACH[0], WITH_GPU))
