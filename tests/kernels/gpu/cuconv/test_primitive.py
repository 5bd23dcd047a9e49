"""gpu.conv.cuconv against the float64 definition: both stages and the single one, every size of block."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import INPUTS, MACHINE, assert_close, error_of, random_input, random_weights, run_on
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.cuconv import partition as partitioning
from znnpy.kernels.gpu.cuconv.partition import PARTS_BYTES, SIDES, choices, partition
from znnpy.kernels.gpu.cuconv.primitive import CuConv
from znnpy.machine import Gpu
from znnpy.shapes import Activation, ConvShape, PoolShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights

CUCONV = CuConv()
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
SHAPES = [
    ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1), "none"),
    ConvShape(2, 36, 21, (2, 5, 7), (1, 1, 1), "relu"),  # a single stage
    ConvShape(1, 5, 3, (6, 7, 9), (3, 2, 4), "relu"),
    ConvShape(2, 12, 17, (3, 8, 4), (1, 3, 2), "tanh"),
    ConvShape(3, 2, 6, (4, 5, 6), (4, 5, 6), "sigmoid"),  # one voxel out
    ConvShape(1, 70, 36, (1, 5, 6), (1, 3, 3), "none"),  # two-dimensional, several steps a tap
    ConvShape(1, 8, 70, (3, 4, 15), (2, 1, 3), "relu"),  # more maps than a block has
]


def variants(shape: ConvShape, units: str) -> list[Variant]:
    """Every side, with one tap a part, with some, with all: for one shape each side at most twice, to be quick."""
    taps = prod(shape.k)
    pairs = [(16, 1), (32, max(1, taps - 1)), (64, taps)]
    return [Variant.of(side=side, taps=count, units=units) for side, count in pairs]


def run(
    device: Any, shape: ConvShape, x: Any, weights: ConvWeights, variant: Variant, gap: int = 0
) -> tuple[Any, float]:
    return run_on(device, CUCONV, shape, x, weights, variant, gap=gap)


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_the_definition(device: Any, shape: ConvShape, turn: int) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, variants(shape, "float")[turn])
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_tensor_cores_round_as_tf32_does(device: Any, shape: ConvShape, precision: Any, turn: int) -> None:
    shape = replace(shape, precision=precision)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, peak = run(device, shape, x, weights, variants(shape, "tensor")[turn])
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= 1e-3
    assert peak == pytest.approx(np.abs(out).max(), rel=1e-3)


@pytest.mark.parametrize("kind", INPUTS)
def test_odd_inputs_are_as_accurate(device: Any, kind: str) -> None:
    shape = SHAPES[3]
    x, weights = random_input(shape, kind), random_weights(shape)
    out, _ = run(device, shape, x, weights, Variant.of(side=16, taps=2, units="float"))
    assert_close(out, x, weights, shape)


@pytest.mark.parametrize("gap", [0, 7, 8])
@pytest.mark.parametrize("maps", [5, 8])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_images_may_lie_anywhere(device: Any, precision: Any, maps: int, gap: int) -> None:
    shape = ConvShape(3, maps, 13 - maps, (3, 5, 4), (3, 2, 2), "relu", precision=precision)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    units = "float" if precision == "fp32" else "tensor"
    for taps in (5, 12):
        out, _ = run(device, shape, x, weights, Variant.of(side=16, taps=taps, units=units), gap)
        assert np.isfinite(out).all()
        assert error_of(out, x, weights, shape) <= (1e-6 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("offset", [1, 4])
def test_images_may_start_on_any_plane(device: Any, offset: int) -> None:
    """Reads are 16 bytes wide only if the address allows it."""
    shape = ConvShape(2, 4, 8, (2, 3, 3), (2, 2, 1), "relu")
    x, weights = random_input(shape), random_weights(shape)
    variant = Variant.of(side=16, taps=2, units="float")
    values = device.put(np.concatenate([np.full(offset, np.nan, np.float32), x.ravel()]), "x")
    place = device.put(np.full(offset + prod(shape.out_shape), np.nan, np.float32), "out")
    out = device.view(place, shape.out_shape, np.float32, offset=4 * offset)
    parts_of = {s.name: device.allocate(s.nbytes, s.name) for s in CUCONV.footprint(shape, variant, 1).scratch}
    step = CUCONV.bind(CUCONV.prepare(weights, variant, device), shape, variant, device)
    step.run(device.view(values, shape.in_shape, np.float32, offset=4 * offset), out, parts_of)
    assert_close(device.get(out), x, weights, shape)


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("taps", [1, 4])
def test_all_activations_equal_the_definition(device: Any, activation: Activation, taps: int) -> None:
    shape = ConvShape(2, 4, 9, (3, 4, 3), (2, 1, 2), activation)
    x, weights = 10 * random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, Variant.of(side=16, taps=taps, units="float"))
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("shape", "taps"),
    [
        (ConvShape(2, 512, 17, (3, 4, 5), (3, 3, 3), "relu"), 27),  # 13,824 products in a single stage
        (ConvShape(1, 1023, 6, (2, 3, 7), (2, 2, 5), "none"), 11),  # 20,460, in two parts
        (ConvShape(1, 26001, 3, (1, 2, 3), (1, 1, 1), "tanh"), 1),
        (ConvShape(1, 1, 8, (18, 19, 20), (17, 18, 19), "none"), 1),  # 5,814 parts of one product
    ],
    ids=str,
)
def test_long_sums_are_as_exact_as_short_ones(device: Any, shape: ConvShape, taps: int, side: int) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, Variant.of(side=side, taps=taps, units="float"))
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= 1e-6
    assert peak == np.abs(out).max()


def test_partial_sums_may_be_computed_some_voxels_at_a_time(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "PARTS_BYTES", 4 * 4 * 6 * 64)
    shape = ConvShape(2, 3, 4, (4, 9, 8), (3, 1, 2), "relu")
    variant = Variant.of(side=16, taps=1, units="float")
    c = partition(shape, 16, 1)
    assert (c.voxels, c.at_once, c.parts) == (252, 64, 6)
    assert CUCONV.footprint(shape, variant, 1).scratch[0].nbytes == 4 * 4 * 6 * 64
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, variant)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("taps", [1, 24])
def test_peak_reports_a_result_not_finite(device: Any, taps: int) -> None:
    shape, variant = SHAPES[2], Variant.of(side=16, taps=taps, units="float")
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, shape, x, weights, variant)[1])
    x[0, 3, 3, 3, 1] = 3e38
    weights.weight[...] = 10
    assert run(device, shape, x, weights, variant)[1] == np.inf


def test_equal_runs_give_equal_bits(device: Any) -> None:
    shape, variant = SHAPES[5], Variant.of(side=32, taps=2, units="float")
    x, weights = random_input(shape), random_weights(shape)
    first, second = (run(device, shape, x, weights, variant)[0] for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("units", ["float", "tensor"])
@pytest.mark.parametrize("maps", [(16, 32), (832, 128), (80, 80), (1, 2048)])
@pytest.mark.parametrize("k", [(1, 1, 1), (1, 3, 3), (1, 5, 5), (3, 3, 3), (1, 2, 4)])
@pytest.mark.parametrize("m", [(1, 7, 7), (1, 27, 27), (48, 64, 64)])
def test_partitions_stay_within_their_memory(m: Vec3, k: Vec3, maps: tuple[int, int], units: str) -> None:
    n = (m[0] + k[0] - 1, m[1] + k[1] - 1, m[2] + k[2] - 1)
    shape = ConvShape(1, *maps, n, k)
    found = choices(shape, 132, units)
    assert 1 <= len(found) <= 4
    assert {side for side, _ in found} == set(SIDES)
    for side, taps in found:
        c = partition(shape, side, taps)
        assert (c.parts - 1) * taps < prod(k) <= c.parts * taps
        assert c.parts_bytes <= PARTS_BYTES
        assert (c.parts == 1) == (c.at_once == c.voxels and c.parts_bytes == 0)
        assert c.parts == 1 or c.at_once == c.voxels or c.at_once % 64 == 0
    assert (k == (1, 1, 1)) == all(
        partition(shape, *choice).parts == 1 for choice in found
    )  # the paper's one tap is tried


def test_small_layers_take_small_blocks_and_large_ones_large() -> None:
    assert choices(ConvShape(1, 832, 256, (1, 7, 7), (1, 1, 1)), 132, "float")[0] == (16, 1)
    side, taps = choices(ConvShape(1, 384, 192, (1, 9, 9), (1, 3, 3)), 132, "float")[0]
    assert side <= 32
    assert taps < 9  # more blocks than one part would give
    assert choices(ConvShape(1, 80, 64, (66, 66, 66), (3, 3, 3)), 132, "float")[0] == (64, 27)


def test_parts_beyond_the_memory_are_not_tried() -> None:
    shape = ConvShape(1, 2, 1024, (33, 33, 33), (29, 29, 29))
    assert partition(shape, 16, 29).parts_bytes > PARTS_BYTES
    assert {taps for _, taps in choices(shape, 132, "float")} <= {29**2, 29**3}


def test_unsupported_shape_gets_a_reason() -> None:
    shape = SHAPES[0]
    assert CUCONV.why_not(shape, MACHINE) == "needs a CUDA device"
    assert CUCONV.why_not(PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), WITH_GPU) == "computes convolutions, not pool"
    assert CUCONV.why_not(replace(shape, n=(3, 3, 3), pool=(2, 2, 2)), WITH_GPU) == (
        "does not fuse pooling into fragments: see gpu.conv.fft_tiled"
    )
    assert CUCONV.why_not(replace(shape, activation="softmax"), WITH_GPU) == (
        "softmax needs all maps of a voxel in one place: see gpu.conv.direct"
    )
    assert CUCONV.why_not(replace(shape, n=(1300, 1300, 1300), k=(1300, 1300, 1300)), WITH_GPU) == (
        "takes kernels of fewer than 2147483648 taps, not 2197000000"
    )
    assert CUCONV.why_not(shape, WITH_GPU) is None


def test_work_counts_whole_blocks_and_partial_sums() -> None:
    shape = ConvShape(2, 5, 18, (4, 5, 6), (3, 2, 1), "relu")
    voxels = 2 * 2 * 4 * 6
    products, sums = CUCONV.work(shape, Variant.of(side=32, taps=4, units="float"))
    assert (products.unit, products.flops) == ("gpu_cuconv", 2 * 96 * 32 * 6 * 8)
    assert (sums.unit, sums.nbytes) == ("gpu_stream", 4 * voxels * 20 * 2 + shape.out_bytes)
    assert products.nbytes == shape.in_bytes + 4 * voxels * 20 * 2
    (single,) = CUCONV.work(shape, Variant.of(side=64, taps=6, units="tensor"))
    assert (single.flops, single.nbytes) == (2 * 128 * 64 * 6 * 8 / 4, shape.in_bytes + shape.out_bytes)
