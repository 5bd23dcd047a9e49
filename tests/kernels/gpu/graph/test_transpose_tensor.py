"""gpu.conv_transpose.tensor against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import CONVS, TRANSPOSES, weights_for, with_parameters
from tests.support.graph_on_gpu import GPU, WITH_GPU, among_nan, in_precision, rounded_inputs, run, side_by_side
from znnpy.graph_shapes import TransposeShape
from znnpy.kernels import definition
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.gpu.graph.transpose_tensor import TILES, TransposeTensor

TENSOR = TransposeTensor()
TWO = (2, 2, 2)
MORE = [
    TransposeShape(8, 24, (2, 3, 4), (4, 5, 7), TWO, (0, 1, 0), TWO, activation="elu"),
    TransposeShape(40, 16, (3, 4, 5), (6, 8, 10), TWO, (0, 0, 0), TWO, activation="leaky_relu"),
    TransposeShape(33, 13, (3, 4, 5), (4, 9, 22), (1, 3, 4), (-1, 2, 1), (1, 3, 4), activation="sigmoid"),
    TransposeShape(264, 8, (3, 5, 9), (6, 10, 18), TWO, (0, 0, 0), TWO),  # kernels come with the input
    TransposeShape(64, 32, (8, 9, 10), (16, 18, 20), TWO, (0, 0, 0), TWO, activation="relu"),
    TransposeShape(8, 8, (16, 33, 70), (32, 66, 140), TWO, (0, 0, 0), TWO),  # several tiles for a block
]
ALL: list[Any] = [in_precision(with_parameters(shape), "fp16") for shape in (*TRANSPOSES, *MORE)]
EACH = [shape for shape in ALL if TENSOR.why_not(shape, WITH_GPU) is None]
USUAL = {(MORE[0].fin, None), (MORE[2].fin, among_nan), (MORE[3].fin, side_by_side)}


def halves_for(shape: TransposeShape) -> ConvWeights:
    """Return weights that float16 holds."""
    weights = weights_for(shape)
    assert weights is not None
    return ConvWeights(weights.weight.astype(np.float16).astype(np.float32), weights.bias)


def check(device: Any, shape: TransposeShape, place: Any, variant: Variant | None = None) -> None:
    """Compare output and peak with the definition; values are rounded to float16 once."""
    inputs, weights = rounded_inputs(shape), halves_for(shape)
    exact = definition.layer(shape, weights, inputs)
    offset = 1 if place is among_nan else 0
    out, peak = run(device, TENSOR, shape, inputs, variant, weights, place, offset)
    largest = np.abs(exact).max()
    np.testing.assert_allclose(out, exact, rtol=6e-4, atol=1e-5 * largest)
    assert abs(peak - largest) <= 1e-5 * largest


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        pytest.param(shape, place, id=f"{shape} {place.__name__ if place else 'in order'}",
                     marks=() if (shape.fin, place) in USUAL and shape.n != (16, 33, 70) else pytest.mark.long)
        for shape in EACH for place in (None, among_nan, side_by_side)
    ],
)  # fmt: skip
def test_output_equals_the_definition(device: Any, shape: Any, place: Any) -> None:
    check(device, shape, place)


@pytest.mark.long
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_takes_every_shape(device: Any, tile: str) -> None:
    for shape in EACH[-len(MORE) :]:
        check(device, shape, None, Variant.of(tile=tile))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spoils_the_results_of_its_voxel(device: Any, bad: float) -> None:
    shape = EACH[-len(MORE)]
    (x,) = rounded_inputs(shape)
    x[1, 1, 2, 3] = bad
    out, peak = run(device, TENSOR, shape, [x], weights=halves_for(shape))
    spoiled = ~np.isfinite(out)
    assert not np.isfinite(peak)
    assert spoiled[2:4, 1:3, 4:6].any()
    spoiled[2:4, 1:3, 4:6] = False
    assert not spoiled.any()


def test_kernels_beyond_float16_show_in_the_result(device: Any) -> None:
    shape = replace(EACH[-len(MORE)], activation="none", parameters=())
    weights = halves_for(shape)
    weights.weight[:] = 1e6
    out, peak = run(device, TENSOR, shape, rounded_inputs(shape), weights=weights)
    assert not np.isfinite(out).any()
    assert not np.isfinite(peak)


def test_shape_decides_the_tile_and_the_costs() -> None:
    shape = in_precision(TransposeShape(64, 32, (64,) * 3, (128,) * 3, TWO, (0, 0, 0), TWO), "fp16")
    assert [str(v) for v in TENSOR.variants(shape, WITH_GPU)] == ["tile=128", "tile=256"]
    (work,) = TENSOR.work(shape, Variant.of(tile="128"))
    assert (work.unit, work.flops) == ("gpu_scatter_half", 2 * 64**3 * 256 * 64)
    assert work.nbytes == 2 * (64**3 * 64 + 128**3 * 32)
    footprint = TENSOR.footprint(shape, Variant.of(tile="128"), 1)
    assert (footprint.resident, footprint.raises_peak) == (2 * 256 * 64 + 4 * 32, True)
    few = replace(shape, fin=8, fout=4)
    assert [str(v) for v in TENSOR.variants(few, WITH_GPU)] == ["tile=64", "tile=32"]
    small = replace(shape, fin=320, fout=320, n=(4,) * 3, m=(8,) * 3)
    assert [str(v) for v in TENSOR.variants(small, WITH_GPU)] == ["tile=32"]


def test_unsupported_shape_gets_a_reason() -> None:
    shape = EACH[0]
    assert TENSOR.why_not(shape, MACHINE) == "needs a CUDA device"
    assert TENSOR.why_not(CONVS[0], WITH_GPU) == f"computes transposed convolutions, not {CONVS[0]}"
    old = replace(WITH_GPU, gpu=replace(GPU, capability=(7, 5)))
    assert TENSOR.why_not(shape, old) == "needs compute capability 8.0, not 7.5"
    assert TENSOR.why_not(replace(shape, precision="fp32"), WITH_GPU) == "computes in fp16, not in fp32"
    assert "kernel as large as the stride" in str(TENSOR.why_not(replace(shape, k=(3, 3, 3)), WITH_GPU))
    assert "one group of maps, not 2" in str(TENSOR.why_not(replace(shape, groups=2), WITH_GPU))
    assert "applies no softmax" in str(TENSOR.why_not(replace(shape, activation="softmax"), WITH_GPU))
    assert "voxels of the input at once" in str(TENSOR.why_not(replace(shape, n=(2000,) * 3, m=(4000,) * 3), WITH_GPU))
