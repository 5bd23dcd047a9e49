"""gpu.graph_conv.warpgroup against the float64 definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.cpu.test_graph_operators import CONVS, with_parameters
from tests.support.closeness import MACHINE
from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels import definition
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup

CONV = GraphConvWarpgroup()
WITH_GPU = replace(MACHINE, gpu=EMULATED_GPU)
ALLOWED = 2e-3  # what rounding to float16 costs
SMALL = (2, 9, 10)
SHAPES = [
    GraphConvShape((1,), 5, (3, 4, 5), (1, 1, 1)),
    GraphConvShape((16,), 40, SMALL, (1, 2, 1), activation="relu"),  # groups of two taps
    GraphConvShape((32,), 24, (2, 17, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="relu"),  # two lines a column
    GraphConvShape((8, 24), 16, (2, 19, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="clip"),  # four
    GraphConvShape((16,), 72, (2, 5, 18), (1, 3, 3), (0, 2, 1), (0, 0, 1), addend=True, activation="leaky_relu"),
    GraphConvShape((16, 9), 20, (2, 5, 9), (1, 3, 3), (0, 1, 1), (0, 1, 1), addend=True, activation="silu"),
    GraphConvShape(
        (16, 5), 8, (4, 6, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), factors=((2, 2, 2), (1, 1, 1)), first=(1, 0, 1)
    ),
    GraphConvShape((3, 8, 1, 20), 9, SMALL, (1, 2, 2), (0, 1, 0), (0, 0, 1), factors=((1, 4, 2), *[(1, 1, 1)] * 3)),
    GraphConvShape((16,), 64, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), stride=(2, 2, 2)),
    GraphConvShape((16,), 32, (5, 12, 17), (3, 3, 3), (1, 1, 1), (1, 1, 1), stride=(1, 2, 2), activation="relu"),
    GraphConvShape((8,), 3, (4, 9, 12), (2, 2, 3), (0, 1, 2), (1, 1, 0), stride=(2, 1, 3), dilation=(1, 3, 2)),
    GraphConvShape((96,), 72, (3, 4, 5), (1, 2, 2), activation="tanh"),  # parts of the sum
    GraphConvShape((64, 40), 66, (3, 4, 5), (3, 1, 1), (1, 0, 0), (1, 0, 0), addend=True, activation="elu"),
]
USUAL = [*SHAPES, *(shape for shape in CONVS if shape.groups == 1 and shape.activation != "softmax")]
LONG = {"2100", "40x41x39", "20x31x39"}  # words of shapes that the emulator takes long for


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a device, all of whose memory is given back."""
    if request.param == "emulated":
        with EmulatedDevice() as emulated:
            yield emulated
        return
    from znnpy.kernels.gpu.device import Device, find_gpu

    with Device(find_gpu()) as real:
        yield real


def in_halves(shape: GraphConvShape) -> GraphConvShape:
    return replace(with_parameters(shape), precision="fp16")


def weights_for(shape: GraphConvShape) -> ConvWeights:
    rng = np.random.default_rng(5)
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weight = scale * rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32)
    return ConvWeights(weight.astype(np.float16).astype(np.float32), rng.standard_normal(shape.fout, np.float32))


def inputs_for(shape: GraphConvShape) -> list[npt.NDArray[np.float16]]:
    rng = np.random.default_rng(3)
    sizes = [(*shape.size_of(index), maps) for index, maps in enumerate(shape.fins)]
    sizes += [shape.out_shape[1:]] if shape.addend else []
    return [rng.standard_normal(size, np.float32).astype(np.float16) for size in sizes]


def on(device: Any, array: npt.NDArray[Any], gaps: Sequence[int] | None) -> Any:
    """Return the array on the device; with gaps, as a part of a larger one, with NaN around it."""
    if gaps is None:
        return device.put(array, "an array")
    z, y, x, f = array.shape
    larger = np.full((z + 1, y + gaps[0], x + gaps[1], f + gaps[2]), np.nan, array.dtype)
    larger[1:, gaps[0] :, : array.shape[2], : array.shape[3]] = array
    kept = device.put(larger, "an array with gaps")
    strides = larger.strides
    offset = strides[0] + gaps[0] * strides[1]
    return device.view(kept.reshape(-1).view(np.uint8), array.shape, array.dtype, offset=offset, strides=strides)


def run(
    device: Any,
    shape: GraphConvShape,
    inputs: Sequence[npt.NDArray[Any]],
    weights: ConvWeights,
    gaps: Sequence[int] | None = None,
) -> tuple[npt.NDArray[Any], float]:
    """Return the output and its peak, from poisoned memory; fail if the device keeps other bytes than promised."""
    assert CONV.why_not(shape, replace(MACHINE, gpu=device.gpu)) is None
    (variant,) = CONV.variants(shape, WITH_GPU)
    promised, held = CONV.footprint(shape, variant, 1), device.allocated
    resident = CONV.prepare(weights, variant, device)
    assert device.allocated - held == promised.resident
    arrays = [on(device, array, gaps) for array in inputs]
    out = device.put(np.full(shape.out_shape[1:], np.nan, np.float16), "out")
    peak = device.put(np.zeros(1, np.float32), "peak")
    scratch = {s.name: device.put(np.full(s.nbytes, 0xFF, np.uint8), s.name) for s in promised.scratch}
    step = CONV.bind(resident, shape, variant, device)
    step.run(arrays, out, scratch, out_peak=device.address(peak))
    return device.get(out), float(device.get(peak)[0])


def assert_near(shape: GraphConvShape, out: Any, peak: float, inputs: Sequence[Any], weights: ConvWeights) -> None:
    exact = definition.layer(shape, weights, [array.astype(np.float32) for array in inputs])
    scale = max(1.0, float(np.abs(exact).max()))
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=ALLOWED * scale)
    assert peak == pytest.approx(np.abs(exact).max(), rel=1e-3)


@pytest.mark.parametrize("gaps", [None, (2, 3, 8), (1, 2, 3)], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=[pytest.mark.long] if any(word in str(shape) for word in LONG) else [], id=str(shape))
        for shape in map(in_halves, USUAL)
    ],
)
def test_output_equals_the_definition(device: Any, shape: GraphConvShape, gaps: Sequence[int] | None) -> None:
    """Inputs lie as they are, in larger arrays whose pieces can be copied at once, and in others."""
    inputs, weights = inputs_for(shape), weights_for(shape)
    out, peak = run(device, shape, inputs, weights, gaps)
    assert_near(shape, out, peak, inputs, weights)
