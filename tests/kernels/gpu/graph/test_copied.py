"""gpu.graph_conv.implicit_gemm and gpu.graph_conv.fft_tiled against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import CONVS, weights_for, with_parameters
from tests.support.graph_on_gpu import WITH_GPU, among_nan, in_precision, rounded_inputs, run, side_by_side
from znnpy.graph_shapes import GraphConvShape, Normed, PadShape
from znnpy.kernels import definition
from znnpy.kernels.gpu.graph.copied import COPIED_CONVOLUTIONS, GraphConvCopied
from znnpy.shapes import FLOAT32, GPU_PRECISIONS, Precision

PRODUCT, TILED = COPIED_CONVOLUTIONS
BOTH_SIDES = ((1, 1, 1), (1, 1, 1))
CLOSE: dict[Precision, float] = {"fp32": 1e-5, "tf32": 3e-3, "fp16": 5e-3}  # of the largest value
EACH: list[GraphConvShape] = [
    GraphConvShape((3,), 4, (5, 7, 6), (3, 3, 3)),
    GraphConvShape((3, 2), 4, (5, 7, 6), (3, 2, 1), (1, 0, 0), (1, 1, 0), activation="relu"),
    GraphConvShape((1,), 1, (3, 3, 3), (3, 3, 3)),  # one voxel
    GraphConvShape((5, 4), 9, (3, 4, 5), (3, 3, 3), *BOTH_SIDES, activation="relu", addend=True),
    GraphConvShape((8, 12), 20, (3, 4, 5), (1, 2, 3), (0, 1, 1), (0, 0, 1), activation="gelu", addend=True),
    GraphConvShape((4, 3), 8, (4, 6, 5), (3, 3, 3), *BOTH_SIDES, factors=((2, 2, 2), (1, 1, 1)), first=(1, 0, 1)),
    GraphConvShape((1,), 6, (4, 6, 5), (3, 3, 3), *BOTH_SIDES, factors=((1, 3, 2),), first=(0, 2, 0)),
    GraphConvShape((16,), 16, (6, 7, 9), (3, 3, 3), *BOTH_SIDES, activation="leaky_relu"),
    GraphConvShape((3,), 2, (2, 3, 2), (3, 3, 3), (3, 2, 4), (3, 1, 3)),  # more padding than voxels
    GraphConvShape((40,), 24, (4, 5, 6), (2, 3, 2), (1, 1, 0), (0, 1, 1), activation="tanh"),
]
CASES = [
    pytest.param(
        primitive,
        replace(with_parameters(shape), precision=precision),
        place,
        id=f"{primitive.name} {shape} {precision} {getattr(place, '__name__', 'in order')}",
        marks=() if (number + len(precision) + (primitive is TILED)) % 5 == 0 else pytest.mark.long,
    )
    for primitive in COPIED_CONVOLUTIONS
    for number, shape in enumerate(EACH)
    for precision, place in zip(GPU_PRECISIONS, (among_nan, None, side_by_side), strict=True)
]


def assert_near(out: Any, peak: float, shape: GraphConvShape, exact: Any) -> None:
    largest = float(np.abs(exact).max())
    np.testing.assert_allclose(out, exact, rtol=0, atol=CLOSE[shape.precision] * largest)
    assert peak == pytest.approx(largest, rel=CLOSE[shape.precision])


@pytest.mark.parametrize(("primitive", "shape", "place"), CASES)
def test_output_equals_the_definition(
    device: Any, primitive: GraphConvCopied, shape: GraphConvShape, place: Any
) -> None:
    inputs = rounded_inputs(shape)
    exact = definition.layer(shape, weights_for(shape), inputs)
    for variant in {
        one.text("units") if primitive is PRODUCT else 0: one for one in primitive.variants(shape, WITH_GPU)
    }.values():
        out, peak = run(device, primitive, shape, inputs, variant, place=place)
        assert_near(out, peak, shape, exact)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ["relu", "elu"])
def test_what_is_not_finite_reaches_the_peak(device: Any, activation: Any, bad: float) -> None:
    shape = replace(with_parameters(replace(EACH[3], activation=activation, addend=False)), precision="fp16")
    inputs = rounded_inputs(shape)
    inputs[0][-1, -1, -1, -1] = bad
    _, peak = run(device, PRODUCT, shape, inputs)
    assert not np.isfinite(peak)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_values_are_scaled_by_the_largest_of_the_inputs(device: Any, scale: float) -> None:
    """Products are of float16, whose range the values of float32 exceed."""
    shape = in_precision(replace(EACH[1], fins=(3, 2)), "fp32")
    inputs = [x * np.float32(scale) for x in rounded_inputs(shape)]
    weights = weights_for(shape)
    assert weights is not None
    weights = replace(weights, bias=np.zeros_like(weights.bias))
    exact = definition.layer(shape, weights, inputs)
    for primitive in COPIED_CONVOLUTIONS:
        out, peak = run(device, primitive, shape, inputs, weights=weights)
        assert_near(out, peak, shape, exact)


def test_memory_is_that_of_the_copy_and_of_the_other_primitive() -> None:
    shape = in_precision(EACH[5], "fp32")
    for primitive in COPIED_CONVOLUTIONS:
        variant = primitive.variants(shape, WITH_GPU)[0]
        footprint = primitive.footprint(shape, variant, 1)
        names = {one.name: one for one in footprint.scratch}
        assert names["copied"].nbytes == FLOAT32 * 7 * 6 * 8 * 7
        assert names["peak"].last == footprint.stages - 1
        assert footprint.raises_peak
        *_, copy = primitive.work(shape, variant)
        assert (copy.unit, copy.nbytes) == ("gpu_stream", shape.in_bytes + names["copied"].nbytes)


BASE = EACH[0]
REFUSED = [
    (PadShape(1, (1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1), "zeros"), "computes convolutions of graphs"),
    (replace(BASE, stride=(1, 2, 1)), "takes no strides, dilations and groups: see gpu.graph_conv.direct"),
    (replace(BASE, activation="softmax"), "applies no softmax: see gpu.graph_conv.direct"),
    (replace(BASE, normed=Normed(4, 1e-5, False)), "does not normalise its output"),
    (in_precision(BASE, "bf16"), "computes in fp32, tf32 and fp16, not in bf16"),
]


@pytest.mark.parametrize(("shape", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_they_do_not_compute_is_refused(shape: Any, reason: str) -> None:
    for primitive in COPIED_CONVOLUTIONS:
        assert str(primitive.why_not(shape, WITH_GPU)).startswith(reason)


def test_other_primitives_say_why_not() -> None:
    one = GraphConvShape((4,), 8, (3, 4, 5), (1, 1, 1))
    assert PRODUCT.why_not(one, WITH_GPU) is None
    assert TILED.why_not(one, WITH_GPU) == "a 1x1x1 kernel is one matrix product: see gpu.conv.direct"
    assert PRODUCT.why_not(one, MACHINE) == "needs a CUDA device"
    assert all(shape.plain or PRODUCT.why_not(shape, WITH_GPU) is not None for shape in CONVS)
