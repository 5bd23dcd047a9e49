"""gpu.graph_conv.warpgroup against the float64 definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.closeness import MACHINE
from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from tests.support.graph_cases import CONVS, with_parameters
from znnpy.graph_shapes import GraphConvShape, GraphShape, PointShape, Pooled
from znnpy.kernels import definition
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.gpu.graph_gemm import plan as plans
from znnpy.kernels.gpu.graph_gemm import warpgroup
from znnpy.kernels.gpu.graph_gemm.plan import plan_of
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup
from znnpy.layers import FUNCTIONS, Function

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
    halves: GraphConvShape = replace(with_parameters(shape), precision="fp16")
    return halves


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
    variant: Variant | None = None,
    primitive: Any = CONV,
) -> tuple[npt.NDArray[Any], float]:
    """Return the output and its peak, from poisoned memory; fail if the device keeps other bytes than promised."""
    assert primitive.why_not(shape, replace(MACHINE, gpu=device.gpu)) is None
    variant = variant or primitive.variants(shape, WITH_GPU)[0]
    promised, held = primitive.footprint(shape, variant, 1), device.allocated
    resident = primitive.prepare(weights, variant, device)
    assert device.allocated - held == promised.resident
    arrays = [on(device, array, gaps) for array in inputs]
    out = device.put(np.full(shape.out_shape[1:], np.nan, np.float16), "out")
    peak = device.put(np.zeros(1, np.float32), "peak")
    scratch = {s.name: device.put(np.full(s.nbytes, 0xFF, np.uint8), s.name) for s in promised.scratch}
    step = primitive.bind(resident, shape, variant, device)
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
        *(pytest.param(in_halves(shape), id=str(shape)) for shape in SHAPES),
        *(
            pytest.param(in_halves(shape), id=str(shape), marks=pytest.mark.long)
            for shape in CONVS
            if shape.groups == 1 and shape.activation != "softmax"
        ),
    ],
)
def test_output_equals_the_definition(device: Any, shape: GraphConvShape, gaps: Sequence[int] | None) -> None:
    """Inputs lie as they are, in larger arrays whose pieces can be copied at once, and in others."""
    inputs, weights = inputs_for(shape), weights_for(shape)
    for variant in CONV.variants(shape, WITH_GPU):
        out, peak = run(device, shape, inputs, weights, gaps, variant)
        assert_near(shape, out, peak, inputs, weights)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize(
    ("n", "products"),
    [pytest.param(*pair, marks=[] if pair in ((128, 2), (64, 1)) else pytest.mark.long) for pair in plans.PRODUCTS],
)
def test_every_division_equals_the_definition(
    device: Any, monkeypatch: pytest.MonkeyPatch, n: int, products: int, regions: int, parts: int
) -> None:
    """A block computes all tiles, parts and blocks of maps, one after the other."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=1))
    shape = in_halves(GraphConvShape((40,), 70, (2, 5, 9), (1, 2, 3), (0, 1, 1), (0, 0, 1), activation="relu"))
    divisions = plans._divisions(plans.columns_of(shape)[0])
    found = [plan for plan in divisions if (plan.n, plan.products) == (n, products)]
    plan = replace(found[parts % len(found)], regions=regions, parts=parts, kept=2 + regions)
    monkeypatch.setattr(warpgroup, "plan_of", lambda *_: plan)
    assert plan.items > 1
    inputs, weights = inputs_for(shape), weights_for(shape)
    out, peak = run(device, shape, inputs, weights)
    assert_near(shape, out, peak, inputs, weights)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in ("none", "prelu", "softmax")])
def test_every_function_equals_the_definition(device: Any, function: Function) -> None:
    shape = in_halves(GraphConvShape((8,), 16, (2, 3, 9), (1, 1, 1), activation=function))
    inputs, weights = inputs_for(shape), weights_for(shape)
    out, peak = run(device, shape, inputs, weights)
    assert_near(shape, out, peak, inputs, weights)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_are_not_finite_show_in_the_peak(device: Any, value: float) -> None:
    shape = in_halves(GraphConvShape((8,), 16, (2, 3, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="relu"))
    inputs = inputs_for(shape)
    inputs[0][1, 1, 4, 3] = value
    _, peak = run(device, shape, inputs, weights_for(shape))
    assert not np.isfinite(peak)


def test_largest_result_is_that_before_rounding(device: Any) -> None:
    shape = in_halves(GraphConvShape((8,), 3, (2, 3, 4), (1, 1, 1)))
    weights = ConvWeights(np.zeros((3, 8, 1, 1, 1), np.float32), np.array([1, -1e6, 2], np.float32))
    out, peak = run(device, shape, inputs_for(shape), weights)
    assert peak == 1e6
    assert np.isneginf(out[..., 1]).all()


@pytest.mark.parametrize("shape", [in_halves(SHAPES[2]), in_halves(SHAPES[11])], ids=str)
def test_repeated_runs_give_equal_bits(device: Any, shape: GraphConvShape) -> None:
    """The second of these shapes adds up parts of its sums."""
    inputs, weights = inputs_for(shape), weights_for(shape)
    first, second = (run(device, shape, inputs, weights)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


REFUSED: list[tuple[GraphShape, dict[str, Any], str]] = [
    (PointShape("add", (3, 3), (3, 4, 5)), {}, "computes convolutions of graphs, not point"),
    (SHAPES[0], {"capability": (8, 9)}, "needs compute capability 9.0, that of an H100 or H200, not 8.9"),
    (SHAPES[0], {"shared_block_bytes": 99 << 10}, "needs 232,448 bytes of shared memory for a block, not 101,376"),
    (replace(SHAPES[0], precision="tf32"), {}, "computes in fp16, not in tf32"),
    (replace(SHAPES[1], groups=2), {}, "computes one group of maps, not 2"),
    (replace(SHAPES[0], activation="softmax"), {}, "applies no softmax"),
    (GraphConvShape((1,) * 5, 2, (3, 3, 3), (1, 1, 1)), {}, "reads up to 4 inputs, not 5"),
    (GraphConvShape((1,), 2, (3, 3, 3), (1, 1, 1), factors=((1, 1, 3),)), {}, "repeats voxels of upsampled inputs"),
    (replace(SHAPES[0], pooled=Pooled((1, 2, 2), (0, 0, 0), (3, 2, 2))), {}, "takes no maxima of its output"),
    (GraphConvShape((8,), 2, (99, 99, 99), (30, 30, 30)), {}, "the input of a tile does not fit the 232,448 bytes"),
]


@pytest.mark.parametrize(("shape", "about", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_it_does_not_compute_is_refused(shape: GraphShape, about: dict[str, Any], reason: str) -> None:
    if isinstance(shape, GraphConvShape) and "fp16, not" not in reason:
        shape = replace(shape, precision="fp16")
    gpu = replace(EMULATED_GPU, **about)
    assert str(CONV.why_not(shape, replace(MACHINE, gpu=gpu))).startswith(reason)


def test_a_machine_without_a_gpu_is_refused() -> None:
    assert CONV.why_not(in_halves(SHAPES[0]), replace(MACHINE, gpu=None)) == "needs a CUDA device"


@pytest.mark.parametrize("side", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("maps", [1, 32, 64, 256, 320, 512])
def test_divisions_keep_their_promises(maps: int, side: int) -> None:
    """Shared memory has room, weights do not depend on the size, and work is counted."""
    shape = GraphConvShape((maps,), maps, (side,) * 3, (3, 3, 3), (1, 1, 1), (1, 1, 1), precision="fp16")
    variants = CONV.variants(shape, WITH_GPU)
    assert set(variants) == set(CONV.variants(shape.of_size((5, 6, 7)), WITH_GPU))
    costs = [CONV.work(shape, variant)[0].flops for variant in variants]
    assert costs == sorted(costs)
    for variant in variants:
        plan = plan_of(shape, variant.count("steps"))
        assert plan is not None
        assert plan.shared_bytes <= plans.SHARED
        assert 1 <= plan.parts <= plan.columns.chunks
        (work,) = CONV.work(shape, variant)
        assert work.flops >= 2 * prod(shape.out_shape) * maps * 27 * 0.6
        assert work.nbytes > shape.in_bytes + shape.out_bytes
