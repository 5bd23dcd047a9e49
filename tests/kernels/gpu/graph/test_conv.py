"""gpu.graph_conv.direct against the float64 definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.gpu.graph.running import (
    among_nan,
    assert_near,
    in_precision,
    rounded_inputs,
    run,
    side_by_side,
)
from tests.support.graph_cases import CONVS, weights_for, with_parameters
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels import definition
from znnpy.kernels.gpu.graph.conv import GraphConvDirect

DIRECT = GraphConvDirect()
SMALL = [shape for shape in CONVS if np.prod(shape.out) * shape.fin * shape.fout * np.prod(shape.k) < 5e6]
MORE = [
    GraphConvShape((5, 4), 9, (3, 4, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="relu", addend=True),
    GraphConvShape((8, 12), 68, (3, 4, 5), (1, 2, 3), (0, 1, 1), (0, 0, 1), activation="gelu", addend=True),
    GraphConvShape(
        (4, 3), 8, (4, 6, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1), factors=((2, 2, 2), (1, 1, 1)), first=(1, 0, 1)
    ),
    GraphConvShape((1,), 6, (4, 6, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1), factors=((1, 3, 2),), first=(0, 2, 0)),
    GraphConvShape((6, 4, 2), 12, (3, 3, 4), (2, 2, 2), groups=4, activation="clip", addend=True),
    GraphConvShape((3, 9), 12, (3, 3, 4), (1, 1, 1), groups=4),  # inputs without maps of some groups
    GraphConvShape((4,), 70, (2, 3, 2), (1, 1, 1), activation="softmax"),  # more maps than a block has
    GraphConvShape((4,), 6, (2, 3, 2), (2, 1, 1), activation="softmax", groups=2),
    GraphConvShape((9,), 18, (3, 4, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), groups=9, addend=True),
    GraphConvShape((8,), 8, (3, 4, 9), (1, 3, 7), (0, 1, 3), (0, 1, 3), groups=8, activation="tanh", addend=True),
    GraphConvShape(
        (8,), 8, (3, 9, 12), (2, 3, 5), (0, 1, 3), (1, 1, 3), groups=8, dilation=(1, 2, 1), stride=(1, 2, 1)
    ),
    GraphConvShape((8,), 8, (3, 4, 9), (2, 2, 2), groups=8, activation="softmax"),
]
EACH = [with_parameters(shape) for shape in (*SMALL, *MORE)]
USUAL = {SMALL[0], SMALL[1], MORE[1], MORE[2]}


def cases() -> list[Any]:
    return [pytest.param(s, id=str(s), marks=() if s in USUAL else pytest.mark.long) for s in EACH]


def exactly(shape: Any, inputs: Any, weights: Any = None) -> Any:
    return definition.convolve(shape, weights_for(shape) if weights is None else weights, inputs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("place", [None, among_nan, side_by_side])
@pytest.mark.parametrize("shape", cases())
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    shape = in_precision(shape, precision)
    inputs = rounded_inputs(shape)
    out, peak = run(device, DIRECT, shape, inputs, place=place, offset=0 if place is side_by_side else 1)
    exact = exactly(shape, inputs)
    assert_near(out, exact, shape)
    assert abs(peak - np.abs(exact).max()) <= 1e-5 * np.abs(exact).max()
