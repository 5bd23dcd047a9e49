"""gpu.graph_conv.normed against the float64 definition, and the memory and traffic that it says it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.gpu.graph_gemm.test_primitive import WITH_GPU, in_halves, inputs_for, run
from tests.kernels.gpu.graph_gemm.test_primitive import device as device  # the fixture
from tests.kernels.gpu.graph_gemm.test_primitive import weights_for as conv_weights
from tests.support.closeness import MACHINE
from znnpy.graph_shapes import GraphConvShape, Normed
from znnpy.kernels import definition
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.gpu.graph.norm import NormPasses
from znnpy.kernels.gpu.graph_gemm import normed, warpgroup
from znnpy.kernels.gpu.graph_gemm import plan as plans
from znnpy.kernels.gpu.graph_gemm.normed import GraphConvNormed
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup

NORMED, CONV, NORM = GraphConvNormed(), GraphConvWarpgroup(), NormPasses()
THREE, ONES = (3, 3, 3), (1, 1, 1)
SAME = (THREE, ONES, ONES)
ALLOWED = 4e-3  # what rounding to float16 costs, of the values and of the result


def leaky(groups: int, epsilon: float, affine: bool) -> Normed:
    return Normed(groups, epsilon, affine, "leaky_relu", (0.01,))


CASES = [
    GraphConvShape((1,), 24, (6, 9, 21), *SAME, normed=leaky(24, 1e-5, True)),  # taps along x are maps
    GraphConvShape((16,), 8, (5, 13, 18), *SAME, normed=Normed(8, 1e-5, True, "relu")),  # four lines a column
    GraphConvShape((32,), 32, (5, 11, 19), *SAME, normed=leaky(32, 1e-3, False)),  # two
    GraphConvShape(
        (16,), 72, (3, 10, 17), (1, 3, 3), (0, 1, 2), (0, 1, 0), normed=Normed(12, 1e-5, True)
    ),  # one; groups
    GraphConvShape((8, 5), 20, (4, 7, 9), *SAME, normed=Normed(1, 1e-5, True, "silu")),  # two inputs; a layer norm
    GraphConvShape((16,), 40, (9, 11, 13), *SAME, stride=(2, 2, 1), normed=leaky(40, 1e-5, True)),
    GraphConvShape((16, 8), 16, (4, 6, 8), *SAME, factors=((2, 2, 2), ONES), normed=Normed(4, 1e-5, False, "elu")),
    GraphConvShape((16,), 24, (1, 1, 2), ONES, normed=Normed(24, 1e-5, True)),
    GraphConvShape((16,), 9, THREE, THREE, normed=Normed(3, 1e-5, True)),  # one voxel
]


def weights_for(shape: GraphConvShape) -> ConvWeights:
    """Return weights of a convolution, and of its norm if this is affine."""
    assert shape.normed is not None
    conv, rng = conv_weights(shape), np.random.default_rng(8)
    factors, offsets = (rng.standard_normal(shape.fout, np.float32) for _ in range(2))
    return replace(conv, norm=ConvWeights(factors, offsets) if shape.normed.affine else None)


def assert_near(shape: GraphConvShape, out: Any, peak: float, inputs: Sequence[Any], weights: ConvWeights) -> None:
    inputs = [array.astype(np.float32) for array in inputs]
    between = definition.layer(replace(shape, normed=None), weights, inputs)
    exact = definition.layer(shape, weights, inputs)
    scale = max(1.0, float(np.abs(exact).max()))
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=ALLOWED * scale)
    assert peak == pytest.approx(max(np.abs(between).max(), np.abs(exact).max()), rel=2e-3)


@pytest.mark.parametrize("gaps", [None, pytest.param((1, 2, 3), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("shape", [pytest.param(in_halves(shape), id=str(shape)) for shape in CASES])
def test_output_equals_the_definition(device: Any, shape: GraphConvShape, gaps: Sequence[int] | None) -> None:
    inputs, weights = inputs_for(shape), weights_for(shape)
    for variant in NORMED.variants(shape, WITH_GPU):
        out, peak = run(device, shape, inputs, weights, gaps, variant, NORMED)
        assert_near(shape, out, peak, inputs, weights)


@pytest.mark.parametrize(
    ("n", "products"),
    [pytest.param(*pair, marks=[] if pair in ((128, 2), (64, 1)) else pytest.mark.long) for pair in plans.PRODUCTS],
)
def test_every_division_equals_the_definition(
    device: Any, monkeypatch: pytest.MonkeyPatch, n: int, products: int
) -> None:
    """A block computes all tiles and blocks of maps in turn; some tiles lie partly outside of the image."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=1))
    shape = in_halves(
        GraphConvShape((16,), 70, (3, 6, 21), (1, 3, 3), (0, 1, 1), (0, 1, 1), normed=Normed(70, 1e-5, True))
    )
    divisions = plans._divisions(plans.columns_of(replace(shape, normed=None))[0])
    for plan in [plan for plan in divisions if (plan.n, plan.products) == (n, products)][::7]:
        monkeypatch.setattr(warpgroup, "plan_of", lambda *_, plan=plan: plan)
        monkeypatch.setattr(normed, "plan_of", lambda *_, plan=plan: plan)
        inputs, weights = inputs_for(shape), weights_for(shape)
        out, peak = run(device, shape, inputs, weights, primitive=NORMED)
        assert_near(shape, out, peak, inputs, weights)


def test_statistics_are_those_of_a_norm_of_its_own(device: Any) -> None:
    """Values far from 0 are rounded to few digits, and both passes find the moments of what is left of them."""
    shape = in_halves(GraphConvShape((16,), 24, (5, 9, 17), *SAME, normed=Normed(24, 1e-5, False)))
    inputs, weights = inputs_for(shape), replace(weights_for(shape), bias=np.linspace(-900, 900, 24, dtype=np.float32))
    alone, norm = replace(shape, normed=None), shape.norm_shape
    assert norm is not None
    between, _ = run(device, alone, inputs, weights, primitive=CONV)
    exact = definition.norm(norm, None, between.astype(np.float32))
    out, _ = run(device, shape, inputs, weights, primitive=NORMED)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 12.34])
def test_image_of_one_value_gives_the_offset(device: Any, value: float) -> None:
    shape = in_halves(GraphConvShape((16,), 8, (3, 5, 9), ONES, normed=Normed(8, 1e-5, True)))
    weights = weights_for(shape)
    assert weights.norm is not None
    constant = replace(weights, weight=np.zeros_like(weights.weight), bias=np.full(8, value, np.float32))
    out, _ = run(device, shape, inputs_for(shape), constant, primitive=NORMED)
    np.testing.assert_array_equal(out, np.broadcast_to(weights.norm.bias.astype(np.float16), out.shape))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_are_not_finite_show_in_the_peak(device: Any, value: float) -> None:
    shape = in_halves(CASES[1])
    inputs = inputs_for(shape)
    inputs[0][1, 1, 1, 3] = value
    _, peak = run(device, shape, inputs, weights_for(shape), primitive=NORMED)
    assert not np.isfinite(peak)


def test_values_that_overflow_before_the_norm_show_in_the_peak(device: Any) -> None:
    shape = in_halves(GraphConvShape((8,), 3, (2, 3, 4), ONES, normed=Normed(3, 1e-5, False)))
    weights = ConvWeights(np.zeros((3, 8, 1, 1, 1), np.float32), np.array([1, -1e6, 2], np.float32))
    _, peak = run(device, shape, inputs_for(shape), weights, primitive=NORMED)
    assert not peak < 65504


def test_less_memory_is_moved_than_by_two_layers() -> None:
    shape = in_halves(GraphConvShape((32,), 32, (128, 128, 128), *SAME, normed=Normed(32, 1e-5, True)))
    norm, variant = shape.norm_shape, NORMED.variants(shape, WITH_GPU)[0]
    assert norm is not None
    ours = sum(work.nbytes for work in NORMED.work(shape, variant))
    (conv,), (alone,) = (
        CONV.work(replace(shape, normed=None), variant),
        NORM.work(norm, NORM.variants(norm, WITH_GPU)[0]),
    )
    assert conv.nbytes + alone.nbytes - ours == shape.out_bytes
    footprint = NORMED.footprint(shape, variant, 1)
    assert sum(scratch.nbytes for scratch in footprint.scratch) < 0.05 * shape.out_bytes


BASE = in_halves(CASES[0])
REFUSED = [
    (replace(BASE, normed=None), "computes convolutions with a norm behind them: see gpu.graph_conv.warpgroup"),
    (replace(BASE, precision="fp32"), "computes in fp16, not in fp32"),
    (replace(BASE, addend=True), "normalises what the convolution gives, without an addend or a function between"),
    (
        replace(BASE, activation="relu"),
        "normalises what the convolution gives, without an addend or a function between",
    ),
    (replace(BASE, normed=Normed(24, 1e-5, True, "softmax")), "applies no softmax, which needs more than one value"),
    (replace(BASE, fins=(96,), n=(4, 4, 4)), "has so few voxels that its sums are computed in parts"),
]


@pytest.mark.parametrize(("shape", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_it_does_not_compute_is_refused(shape: GraphConvShape, reason: str) -> None:
    assert str(NORMED.why_not(shape, WITH_GPU)).startswith(reason)


def test_others_refuse_a_norm() -> None:
    assert NORMED.why_not(BASE, MACHINE) == "needs a CUDA device"
    assert CONV.why_not(BASE, WITH_GPU) == "does not normalise its output: see gpu.graph_conv.normed"
