"""gpu.graph_conv.few_maps against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.closeness import MACHINE
from tests.support.emulator import EMULATED_GPU
from tests.support.graph_cases import with_parameters
from tests.support.graph_on_gpu import cases, check, in_precision
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.gpu.graph.few_maps import GraphConvFewMaps

FEW_MAPS = GraphConvFewMaps()
EACH: list[Any] = [
    with_parameters(shape)
    for shape in (
        GraphConvShape((32,), 1, (3, 4, 5), (1, 1, 1), activation="sigmoid"),
        GraphConvShape((5,), 3, (3, 4, 35), (1, 1, 1)),
        GraphConvShape((8, 3, 16), 8, (2, 11, 9), (1, 1, 1), activation="leaky_relu", addend=True),
        GraphConvShape((20,), 6, (1, 1, 1), (1, 1, 1), activation="softmax"),
        GraphConvShape((2, 2), 2, (9, 1, 70), (1, 1, 1), activation="elu", addend=True),
        GraphConvShape((1,), 7, (40, 2, 3), (1, 1, 1), activation="clip"),
    )
]
USUAL = [(EACH[0], None, "fp16"), (EACH[2], None, "fp32"), (EACH[3], None, "fp16")]


@pytest.mark.parametrize(("shape", "place", "precision"), cases(EACH, USUAL))
def test_output_equals_the_definition(device: Any, shape: Any, place: Any, precision: Any) -> None:
    check(device, FEW_MAPS, in_precision(shape, precision), place)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (GraphConvShape((4,), 9, (3, 3, 3), (1, 1, 1)), "computes up to 8 maps of up to 1024, not 9 of 4"),
        (GraphConvShape((2000,), 1, (3, 3, 3), (1, 1, 1)), "not 1 of 2000"),
        (GraphConvShape((4,), 1, (3, 3, 3), (1, 1, 2)), "1x1x1 without stride"),
        (GraphConvShape((4,), 1, (3, 3, 3), (1, 1, 1), (1, 0, 0)), "padding"),
        (GraphConvShape((4,), 1, (3, 3, 3), (1, 1, 1), stride=(1, 1, 2)), "stride"),
    ],
)
def test_other_layers_are_refused(shape: GraphConvShape, words: str) -> None:
    reason = FEW_MAPS.why_not(shape, replace(MACHINE, gpu=EMULATED_GPU))
    assert reason is not None
    assert words in reason
