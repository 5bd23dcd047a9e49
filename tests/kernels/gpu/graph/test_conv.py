"""gpu.graph_conv.direct against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import CONVS, weights_for, with_parameters
from tests.support.graph_on_gpu import WITH_GPU, among_nan, cases, check, in_precision, rounded_inputs, run
from znnpy.graph_shapes import GraphConvShape, PadShape, Pooled
from znnpy.kernels import definition
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.graph.conv import FEWEST_BLOCKS, GraphConvDirect, is_depthwise, is_flat
from znnpy.kernels.gpu.graph.products import TILES
from znnpy.network import ConvWeights

DIRECT = GraphConvDirect()
SMALL = [shape for shape in CONVS if np.prod(shape.out) * shape.fin * shape.fout * np.prod(shape.k) < 5e6]
BOTH_SIDES = ((1, 1, 1), (1, 1, 1))
MORE = [
    GraphConvShape((5, 4), 9, (3, 4, 5), (3, 3, 3), *BOTH_SIDES, activation="relu", addend=True),
    GraphConvShape((8, 12), 68, (3, 4, 5), (1, 2, 3), (0, 1, 1), (0, 0, 1), activation="gelu", addend=True),
    GraphConvShape((4, 3), 8, (4, 6, 5), (3, 3, 3), *BOTH_SIDES, factors=((2, 2, 2), (1, 1, 1)), first=(1, 0, 1)),
    GraphConvShape((1,), 6, (4, 6, 5), (3, 3, 3), *BOTH_SIDES, factors=((1, 3, 2),), first=(0, 2, 0)),
    GraphConvShape((6, 4, 2), 12, (3, 3, 4), (2, 2, 2), groups=4, activation="clip", addend=True),
    GraphConvShape((3, 9), 12, (3, 3, 4), (1, 1, 1), groups=4),  # inputs without maps of some groups
    GraphConvShape((4,), 70, (2, 3, 2), (1, 1, 1), activation="softmax"),  # more maps than a block has
    GraphConvShape((4,), 6, (2, 3, 2), (2, 1, 1), activation="softmax", groups=2),
    GraphConvShape((9,), 18, (3, 4, 9), (3, 3, 3), *BOTH_SIDES, groups=9, addend=True),
    GraphConvShape((8,), 8, (3, 4, 9), (1, 3, 7), (0, 1, 3), (0, 1, 3), groups=8, activation="tanh", addend=True),
    GraphConvShape((8,), 8, (3, 9, 9), (2, 3, 5), (0, 1, 3), (1, 1, 3), (1, 2, 1), (1, 2, 1), groups=8),
    GraphConvShape((8,), 8, (3, 4, 9), (2, 2, 2), groups=8, activation="softmax"),
]
EACH: list[Any] = [with_parameters(shape) for shape in (*SMALL, *MORE)]
USUAL = [(EACH[0], None, "fp32"), (MORE[2], None, "fp16"), (MORE[9], None, "fp16")]


@pytest.mark.parametrize(("shape", "place", "precision"), cases(EACH, USUAL))
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    check(device, DIRECT, in_precision(shape, precision), place)


@pytest.mark.parametrize("tile", [pytest.param(t, marks=() if t == "small" else pytest.mark.long) for t in TILES])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
def test_every_tile_takes_every_shape(device: Any, precision: Any, tile: str) -> None:
    for shape in (MORE[1], MORE[4]):
        check(device, DIRECT, in_precision(shape, precision), among_nan, Variant.of(tile=tile))


def test_long_sums_lose_no_digits(device: Any) -> None:
    """All products are positive, so that the sum grows and grows."""
    shape = GraphConvShape((900,), 1, (1, 3, 3), (1, 3, 3))
    (x,) = rounded_inputs(shape)
    weight = np.full((1, shape.fin, *shape.k), 0.7, np.float32)
    weights, x = ConvWeights(weight, np.zeros(1, np.float32)), np.abs(x)
    out, _ = run(device, DIRECT, shape, [x], weights=weights)
    np.testing.assert_allclose(out, definition.convolve(shape, weights, [x]), rtol=3e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [MORE[2], pytest.param(MORE[8], marks=pytest.mark.long)], ids=str)
def test_what_is_not_finite_is_passed_on_and_reaches_the_peak(device: Any, shape: Any, bad: float) -> None:
    shape = replace(shape, precision="fp16")
    inputs = rounded_inputs(shape)
    inputs[0][-1, -1, -1, -1] = bad
    with np.errstate(invalid="ignore"):
        exact = definition.layer(shape, weights_for(shape), inputs)
    out, peak = run(device, DIRECT, shape, inputs)
    assert 0 < np.isfinite(exact).sum() < exact.size
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(exact))
    assert not np.isfinite(peak)


def test_shapes_above_reach_every_kernel() -> None:
    assert {is_flat(shape) for shape in EACH} == {False, True}
    assert sum(is_depthwise(shape) for shape in EACH) == 5
    names = {variant.text("tile") for shape in EACH for variant in DIRECT.variants(shape, WITH_GPU)}
    assert names == {*TILES, "maps"}


def test_unsupported_shape_gets_a_reason() -> None:
    pad = PadShape(1, (1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1), "zeros")
    pooled = replace(EACH[0], pooled=Pooled((1, 1, 1), (0, 0, 0), (3, 5, 4)))
    many = GraphConvShape((1,) * 17, 1, (1, 1, 1), (1, 1, 1))
    assert DIRECT.why_not(EACH[0], MACHINE) == "needs a CUDA device"
    assert DIRECT.why_not(pad, WITH_GPU) == f"computes convolutions of graphs, not {pad}"
    assert DIRECT.why_not(pooled, WITH_GPU) == "takes no maxima of its output: a pooling of its own does"
    assert DIRECT.why_not(in_precision(EACH[0], "bf16"), WITH_GPU) == "computes in fp32, tf32 and fp16, not in bf16"
    assert DIRECT.why_not(many, WITH_GPU) == "takes up to 16 inputs, not 17"
    assert DIRECT.why_not(EACH[0], WITH_GPU) is None


def test_work_counts_whole_tiles() -> None:
    shape = GraphConvShape((5, 9), 20, (4, 5, 6), (3, 2, 1))  # 48 voxels; maps in eights: 8 and 16
    (work,) = DIRECT.work(shape, Variant.of(tile="32"))
    assert (work.unit, work.nbytes) == ("gpu_direct", shape.in_bytes + shape.out_bytes)
    assert work.flops == 2 * FEWEST_BLOCKS * 128 * 32 * 6 * 24 * TILES["32"].slower  # one block takes as long as many
    (soft,) = DIRECT.work(replace(shape, activation="softmax"), Variant.of(tile="16"))
    assert soft.flops == 2 * 2 * FEWEST_BLOCKS * 256 * 16 * 6 * 24 * TILES["16"].slower  # two rounds
    large = replace(shape, n=(64, 65, 66))
    (work,) = DIRECT.work(large, Variant.of(tile="32"))
    assert work.flops == 2 * -(-62 * 64 * 66 // 128) * 128 * 32 * 6 * 24 * TILES["32"].slower
    (depthwise,) = DIRECT.work(MORE[9], Variant.of(tile="maps"))
    assert depthwise.unit == "gpu_stream"


def test_large_layers_take_no_small_tiles() -> None:
    shape = GraphConvShape((64,), 64, (128, 128, 128), (3, 3, 3))
    assert [str(variant) for variant in DIRECT.variants(shape, WITH_GPU)] == ["tile=64", "tile=32"]
    assert [str(variant) for variant in DIRECT.variants(replace(shape, fout=12), WITH_GPU)] == ["tile=16"]
    assert len(DIRECT.variants(replace(shape, n=(8, 8, 8)), WITH_GPU)) == 3
