"""gpu.conv_transpose.direct against the float64 definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.gpu.graph.running import WITH_GPU, among_nan, assert_near, in_precision, rounded_inputs, run
from tests.support.graph_cases import TRANSPOSES, weights_for, with_parameters
from znnpy.graph_shapes import TransposeShape
from znnpy.kernels import definition
from znnpy.kernels.gpu.graph.transpose import TransposeDirect

DIRECT = TransposeDirect()
MORE = [
    TransposeShape(9, 70, (2, 1, 3), (4, 2, 5), (2, 2, 2), (0, 0, 1), (2, 2, 2), activation="softmax"),
    TransposeShape(4, 8, (2, 3, 3), (5, 8, 7), (5, 4, 3), (1, -1, 0), (2, 3, 4), (3, 2, 1), groups=2),
    TransposeShape(8, 24, (2, 3, 4), (4, 5, 7), (2, 2, 2), (0, 1, 0), (2, 2, 2), activation="elu"),
]
EACH = [with_parameters(shape) for shape in (*TRANSPOSES, *MORE)]
USUAL = {EACH[1], EACH[3]}


def cases() -> list[Any]:
    return [pytest.param(s, id=str(s), marks=() if s in USUAL else pytest.mark.long) for s in EACH]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("place", [None, among_nan])
@pytest.mark.parametrize("shape", cases())
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    shape = in_precision(shape, precision)
    inputs, weights = rounded_inputs(shape), weights_for(shape)
    assert weights is not None
    exact = definition.transpose(shape, weights, inputs[0])
    for variant in DIRECT.variants(shape, WITH_GPU):
        out, peak = run(device, DIRECT, shape, inputs, variant, place=place, offset=0 if place is None else 1)
        assert_near(out, exact, shape)
        assert abs(peak - np.abs(exact).max()) <= 1e-5 * np.abs(exact).max()
