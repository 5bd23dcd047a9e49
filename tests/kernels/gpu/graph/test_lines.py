"""Layers of graphs that memory binds, on a GPU, against the float64 definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.gpu.graph.running import (
    WITH_GPU,
    among_nan,
    assert_near,
    in_precision,
    rounded_inputs,
    run,
    side_by_side,
)
from tests.support.graph_cases import PADS, POINTS, POOLS, UPSAMPLES, weights_for, with_parameters
from znnpy.graph_shapes import GraphShape, PointShape, UpsampleShape, WindowPoolShape
from znnpy.kernels import definition
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
USUAL = {POOLS[8], MORE[0], UPSAMPLES[1], MORE[2], MORE[3], with_parameters(POINTS[1]), PADS[0], PADS[7], PADS[12]}


def primitives_for(shape: GraphShape) -> list[Primitive]:
    return [p for p in TABLE if p.why_not(shape, WITH_GPU) is None]


def cases() -> list[Any]:
    return [pytest.param(s, id=str(s), marks=() if s in USUAL else pytest.mark.long) for s in EACH]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("place", [None, among_nan, side_by_side])
@pytest.mark.parametrize("shape", cases())
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    shape = in_precision(shape, precision)
    inputs = rounded_inputs(shape)
    exact = definition.layer(shape, weights_for(shape), inputs)
    (primitive,) = primitives_for(shape)
    out, peak = run(device, primitive, shape, inputs, place=place, offset=1 if place is among_nan else 0)
    if primitive.footprint(shape, primitive.variants(shape, WITH_GPU)[0], 1).raises_peak:
        assert_near(out, exact, shape)
        assert abs(peak - np.abs(exact).max()) <= 1e-5 * np.abs(exact).max()
    else:
        np.testing.assert_array_equal(out, exact)
