"""gpu.graph_conv.phases against the float64 definition, and the memory and arithmetic that it says it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.gpu.graph_gemm.test_primitive import (
    WITH_GPU,
    assert_near,
    in_halves,
    inputs_for,
    run,
    weights_for,
)
from tests.kernels.gpu.graph_gemm.test_primitive import device as device  # the fixture
from tests.support.closeness import MACHINE
from tests.support.emulator import EMULATED_GPU
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.gpu.graph_gemm.phases import GraphConvPhases, phases_of
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup

PHASES, WHOLE = GraphConvPhases(), GraphConvWarpgroup()
THREE, ONES, TWICE = (3, 3, 3), (1, 1, 1), (2, 2, 2)
SAME = (THREE, ONES, ONES)
CASES = [
    GraphConvShape((16, 8), 32, (4, 6, 8), *SAME, factors=(TWICE, ONES), activation="relu"),
    GraphConvShape((8, 16), 16, (4, 6, 18), *SAME, factors=(ONES, TWICE), activation="silu"),  # the second is
    GraphConvShape((32,), 24, (6, 4, 10), *SAME, factors=(TWICE,), activation="relu"),  # there is no other
    GraphConvShape((16, 8), 16, (5, 7, 9), THREE, factors=(TWICE, ONES), first=(1, 0, 1)),  # within a volume
    GraphConvShape((16, 8), 16, (5, 7, 9), THREE, factors=(TWICE, ONES), first=(0, 1, 0), activation="elu"),
    GraphConvShape((16, 8, 4), 9, (4, 5, 8), THREE, (1, 0, 0), (1, 0, 1), factors=(ONES, TWICE, ONES), first=(0, 1, 0)),
    GraphConvShape((16, 8), 16, (5, 6, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1), factors=((1, 2, 2), ONES)),
    GraphConvShape((16, 8), 16, (5, 6, 9), (1, 3, 5), (0, 1, 2), (0, 1, 2), factors=((1, 2, 1), ONES), addend=True),
    GraphConvShape((24,), 40, (4, 4, 4), *SAME, factors=(TWICE,), addend=True, activation="leaky_relu"),
    GraphConvShape((16, 8), 8, (3, 3, 3), THREE, factors=(TWICE, ONES)),  # one voxel: one phase alone
    GraphConvShape((16, 8), 8, (3, 3, 4), THREE, factors=(TWICE, ONES), first=ONES),
    GraphConvShape((96, 64), 72, (4, 4, 4), *SAME, factors=(TWICE, ONES), activation="tanh"),  # parts of the sums
    GraphConvShape((2, 1), 5, (4, 6, 4), *SAME, factors=(TWICE, ONES)),
]


@pytest.mark.parametrize("gaps", [None, (1, 2, 3), pytest.param((2, 3, 8), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("shape", [pytest.param(in_halves(shape), id=str(shape)) for shape in CASES])
def test_output_equals_the_definition(device: Any, shape: GraphConvShape, gaps: Sequence[int] | None) -> None:
    inputs, weights = inputs_for(shape), weights_for(shape)
    for variant in PHASES.variants(shape, WITH_GPU):
        out, peak = run(device, shape, inputs, weights, gaps, variant, PHASES)
        assert_near(shape, out, peak, inputs, weights)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("which", [0, 1])
def test_values_that_are_not_finite_show_in_the_peak(device: Any, which: int, value: float) -> None:
    shape = in_halves(CASES[0])
    inputs = inputs_for(shape)
    inputs[which][1, 1, 1, 3] = value
    _, peak = run(device, shape, inputs, weights_for(shape), primitive=PHASES)
    assert not np.isfinite(peak)


def test_less_arithmetic_is_predicted_for_large_images() -> None:
    shape = in_halves(GraphConvShape((64, 32), 32, (128,) * 3, *SAME, factors=(TWICE, ONES)))
    (ours,), (whole,) = (one.work(shape, one.variants(shape, WITH_GPU)[0]) for one in (PHASES, WHOLE))
    assert len(phases_of(shape)) == 8
    assert ours.flops < 0.8 * whole.flops
    assert set(PHASES.variants(shape, WITH_GPU)) == set(PHASES.variants(shape.of_size((6, 7, 8)), WITH_GPU))


UP = in_halves(CASES[0])
REFUSED = [
    (replace(UP, factors=()), "computes convolutions of upsampled inputs: see gpu.graph_conv.warpgroup"),
    (replace(UP, precision="fp32"), "computes in fp16, not in fp32"),
    (replace(UP, factors=(TWICE, (1, 1, 2))), "one input may be upsampled, not 2"),
    (replace(UP, factors=((1, 4, 1), ONES)), "repeats voxels twice along an axis, not 4 times"),
    (replace(UP, k=(5, 3, 3), before=(2, 1, 1), behind=(2, 1, 1)), "takes 3 taps along an axis of which voxels are"),
    (replace(UP, stride=(1, 2, 1)), "takes strides and dilations of 1"),
    (replace(UP, first=(0, 1, 0)), "a volume that is upsampled begins and ends with whole voxels"),
    (replace(UP, n=(4, 6, 7)), "a volume that is upsampled begins and ends with whole voxels"),
]


@pytest.mark.parametrize(("shape", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_it_does_not_compute_is_refused(shape: GraphConvShape, reason: str) -> None:
    assert str(PHASES.why_not(shape, WITH_GPU)).startswith(reason)
    assert PHASES.why_not(UP, WITH_GPU) is None
    other = replace(MACHINE, gpu=replace(EMULATED_GPU, capability=(8, 0)))
    assert "compute capability 9.0" in str(PHASES.why_not(UP, other))
