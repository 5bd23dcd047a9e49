"""Layers of graphs that memory binds, on a GPU, against the float64 definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.graph_cases import PADS, POINTS, POOLS, UPSAMPLES, weights_for, with_parameters
from tests.support.graph_on_gpu import WITH_GPU, cases, check, in_precision, rounded_inputs, run
from znnpy.graph_shapes import GraphShape, PadShape, PointShape, UpsampleShape, WindowPoolShape
from znnpy.kernels import definition
from znnpy.kernels.gpu.graph.inputs import width_of
from znnpy.kernels.gpu.graph.lines import grid_of
from znnpy.kernels.gpu.graph.pad import PadCopy
from znnpy.kernels.gpu.graph.point import PointLines
from znnpy.kernels.gpu.graph.pool import WindowPoolDirect
from znnpy.kernels.gpu.graph.upsample import UpsampleRepeat

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

TABLE: tuple[Primitive, ...] = (WindowPoolDirect(), UpsampleRepeat(), PointLines(), PadCopy())
MORE: list[GraphShape] = [
    WindowPoolShape(8, (4, 5, 6), (2, 2, 2), (2, 2, 2), "average"),
    WindowPoolShape(4, (4, 5, 6), (2, 2, 2), (1, 2, 2), "max", (0, 0, 1), (0, 1, 0)),
    UpsampleShape(8, (3, 1, 5), (5, 2, 8), (2, 3, 2), (1, 1, 1), "linear"),
    PointShape("add", (40, 1), (2, 3, 4), "softmax"),
    PointShape("concat", (8, 16), (2, 3, 4), "softmax"),
    PointShape("multiply", (8, 8), (2, 3, 4), "tanh", single=(0,)),
    PointShape("function", (300,), (2, 3, 2), "softmax"),
    PointShape("scale", (12,), (2, 3, 4), "softmax"),
    PointShape("function", (8,), (3, 4, 5), "prelu"),
]
EACH: list[Any] = [with_parameters(s) for s in (*POOLS, *UPSAMPLES, *POINTS, *PADS, *MORE)]
USUAL = [
    (POOLS[8], None, "fp16"),
    (MORE[0], None, "fp32"),
    (UPSAMPLES[1], None, "fp32"),
    (MORE[2], None, "fp16"),
    (MORE[3], None, "fp32"),
    (EACH[len(POOLS) + len(UPSAMPLES) + 1], None, "fp16"),
    (PADS[7], None, "fp32"),
]


def primitives_for(shape: GraphShape) -> list[Primitive]:
    return [p for p in TABLE if p.why_not(shape, WITH_GPU) is None]


@pytest.mark.parametrize(("shape", "place", "precision"), cases(EACH, USUAL))
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    (primitive,) = primitives_for(shape)
    check(device, primitive, in_precision(shape, precision), place)


NOT_HIDDEN: list[Any] = [
    WindowPoolShape(4, (4, 4, 4), (2, 2, 2), (2, 2, 2)),
    WindowPoolShape(4, (4, 4, 4), (3, 2, 2), (1, 2, 2), "average"),
    UpsampleShape(4, (3, 3, 3), (6, 6, 6), (2, 2, 2), (0, 0, 0), "linear"),
    PointShape("multiply", (4, 4), (3, 3, 3), "relu"),
    PointShape("scale", (4,), (3, 3, 3), "leaky_relu"),
    PointShape("function", (4,), (3, 3, 3), "softmax"),
    PadShape(4, (3, 3, 3), (5, 5, 5), (-1, -1, -1), (0, 0, 0), (3, 3, 3), "reflect"),
]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "fp16"])
@pytest.mark.parametrize(
    "shape", [NOT_HIDDEN[0], *(pytest.param(s, marks=pytest.mark.long) for s in NOT_HIDDEN[1:])], ids=str
)
def test_nan_and_infinity_are_passed_on_and_reach_the_peak(device: Any, shape: Any, precision: Any) -> None:
    shape = in_precision(shape, precision)
    (primitive,) = primitives_for(shape)
    inputs = rounded_inputs(shape)
    inputs[0][1, 1, 1, 2], inputs[0][0, 0, 0, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        exact = definition.layer(shape, weights_for(shape), inputs)
    out, peak = run(device, primitive, shape, inputs)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(exact))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(exact))
    if primitive.footprint(shape, primitive.variants(shape, WITH_GPU)[0], 1).raises_peak:
        assert np.isnan(peak)


@pytest.mark.parametrize("shape", EACH, ids=str)
def test_work_counts_input_and_output_once(shape: Any) -> None:
    (primitive,) = primitives_for(shape)
    (variant,) = primitive.variants(shape, WITH_GPU)
    footprint = primitive.footprint(shape, variant, 1)
    assert footprint.working(shape) == shape.in_bytes + shape.out_bytes
    copies = getattr(shape, "how", "") in ("max", "nearest") or shape.kind == "pad"
    copies |= getattr(shape, "how", "") == "concat" and shape.activation == "none"
    assert footprint.raises_peak == (not copies)
    (work,) = primitive.work(shape, variant)
    assert (work.unit, work.flops, work.nbytes) == ("gpu_stream", 0.0, shape.in_bytes + shape.out_bytes)


def test_unsupported_shape_gets_a_reason() -> None:
    assert {p.why_not(POOLS[0], MACHINE) for p in TABLE} == {"needs a CUDA device"}
    told = [str(p.why_not(PADS[0] if p.kind != "pad" else POOLS[0], WITH_GPU)) for p in TABLE]
    assert [words.split(",")[0] for words in told] == [
        "computes poolings over windows",
        "computes upsampling",
        "computes layers voxel by voxel",
        "computes padding",
    ]
    many = PointShape("add", (2,) * 17, (1, 1, 1))
    assert PointLines().why_not(many, WITH_GPU) == "takes up to 16 inputs, not 17"


def test_vectors_are_as_wide_as_addresses_allow(device: Any) -> None:
    array = device.put(np.zeros((2, 2, 2, 24), np.float16), "x")
    assert width_of(device, [24], array, most=8) == 8
    assert width_of(device, [24, 20], array, most=8) == 4
    assert width_of(device, [6], device.view(array, (2, 2, 2, 6), np.float16, strides=array.strides), most=8) == 2
    shifted = device.view(array, (1, 2, 2, 24), np.float16, offset=4)
    assert width_of(device, [24], shifted, most=8) == 2
    odd = device.view(array, (1, 2, 2, 24), np.uint8, offset=1).view(np.uint8)
    with pytest.raises(ValueError, match="which is no multiple of its 2 bytes"):
        width_of(device, [24], device.view(array, (1, 1, 1, 24), np.float16, offset=1), most=8)
    assert width_of(device, [24], odd, most=8) == 1


def test_large_images_loop_over_planes(device: Any) -> None:
    grid, block = grid_of(device, 32, (1024, 1024, 16))
    assert block == (32, 8)
    assert grid[:2] == (1, 128)
    assert 1 <= grid[2] < 1024
    assert grid_of(device, 5, (3, 4, 5)) == ((1, 1, 3), (8, 32))
