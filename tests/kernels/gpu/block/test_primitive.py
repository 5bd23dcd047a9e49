"""gpu.conv.block against the float64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import (
    INPUTS,
    MACHINE,
    assert_close,
    error_of,
    images_on,
    random_input,
    random_weights,
    run_on,
)
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu.block.division import card_of
from znnpy.kernels.gpu.block.primitive import (
    MAPS,
    MOST_SHARED,
    MOST_TERMS,
    RESIDENT,
    SEGMENTS,
    VOXELS,
    ConvBlock,
    _by_the_paper,
    _Division,
    _tile,
)
from znnpy.machine import Gpu
from znnpy.shapes import FLOAT32, ConvShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights

BLOCK = ConvBlock()
H200 = Gpu("H200", (9, 0), 132, 141 << 30, 50 << 20, 227 << 10, 228 << 10, 4.8e12, 13000, ())
RTX = Gpu("RTX 3090", (8, 6), 82, 24 << 30, 6 << 20, 99 << 10, 100 << 10, 936e9, 13000, ())
WITH_GPU = replace(MACHINE, gpu=H200)
NARROW = Variant.of(channels=8, span=1, voxels=32, maps=16)  # a row of taps comes in as many pieces as it has
WIDE = Variant.of(channels=8, span=2, voxels=128, maps=64)
ODD = Variant.of(channels=16, span=3, voxels=64, maps=80)
SHAPES = [
    (ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1), "none"), NARROW),
    (ConvShape(2, 9, 17, (5, 4, 6), (3, 2, 4), "relu"), NARROW),  # two segments, two blocks of maps
    (ConvShape(1, 20, 65, (3, 7, 21), (2, 2, 3), "relu"), WIDE),  # a last piece of one tap
    (ConvShape(3, 10, 6, (4, 5, 6), (4, 5, 6), "none"), WIDE),  # one voxel out
    (ConvShape(2, 21, 82, (4, 6, 5), (1, 3, 2), "relu"), ODD),
    (ConvShape(1, 16, 80, (1, 9, 37), (1, 1, 1), "none"), ODD),  # no halo
]


def run(
    device: Any, shape: ConvShape, x: Any, weights: ConvWeights, variant: Variant, carried: int = 0, gap: int = 0
) -> tuple[Any, float]:
    return run_on(device, BLOCK, shape, x, weights, variant, carried=carried, gap=gap)


@pytest.mark.parametrize(("shape", "variant"), SHAPES, ids=str)
def test_output_equals_the_definition(device: Any, shape: ConvShape, variant: Variant) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, variant)
    assert_close(out, x, weights, shape)
    assert error_of(out, x, weights, shape) <= 1e-6
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("scale", [0, 1, 10])
@pytest.mark.parametrize("fin", [MOST_TERMS, MOST_TERMS + 1])
def test_long_sums_are_split_to_stay_exact(device: Any, fin: int, scale: int) -> None:
    """They run without a bias, and with one that is larger than the rest of a sum."""
    shape = ConvShape(1, fin, 64, (1, 4, 16), (1, 1, 1), "none")
    x, weights = random_input(shape), random_weights(shape)
    weights.bias[...] *= scale
    out, _ = run(device, shape, x, weights, NARROW)
    assert error_of(out, x, weights, shape) <= 1e-6


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        (ConvShape(2, 512, 17, (3, 4, 5), (3, 3, 3), "relu"), WIDE),  # 13,824 products: ten parts
        (ConvShape(1, 509, 8, (2, 4, 6), (2, 3, 5), "none"), NARROW),  # 15,270, a row of taps in five pieces
        (ConvShape(1, 3001, 5, (1, 1, 3), (1, 1, 1), "tanh"), NARROW),  # three parts, the last of a few maps
    ],
    ids=str,
)
def test_long_sums_are_as_exact_as_short_ones(device: Any, shape: ConvShape, variant: Variant, gap: int) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, variant, carried=1 if shape.k[0] > 1 else 0, gap=gap)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= 1e-6
    assert peak == np.abs(out).max()


def test_peak_ignores_partial_sums(device: Any) -> None:
    """The first part of a sum is larger than all of it; float32 holds these exactly."""
    shape = ConvShape(1, 4000, 16, (1, 1, 2), (1, 1, 1), "relu")
    x, weights = np.ones(shape.in_shape, np.float32), random_weights(shape)
    weights.weight[:, :2000], weights.weight[:, 2000:], weights.bias[...] = 1, -0.5, 0
    out, peak = run(device, shape, x, weights, NARROW)
    assert (out == 1000).all()
    assert peak == 1000


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "sigmoid"])
def test_activations_equal_the_definition(device: Any, activation: Any) -> None:
    shape = ConvShape(2, 5, 3, (3, 4, 3), (2, 2, 2), activation)
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, NARROW)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("kind", INPUTS)
def test_odd_inputs_are_as_accurate(device: Any, kind: str) -> None:
    shape, variant = SHAPES[1]
    x, weights = random_input(shape, kind), random_weights(shape)
    assert_close(run(device, shape, x, weights, variant)[0], x, weights, shape)


@pytest.mark.parametrize("gap", [0, 7, 8])
@pytest.mark.parametrize("carried", [0, 1, 4])
@pytest.mark.parametrize(("fin", "fout"), [(3, 5), (8, 8)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_carried_planes_and_strided_images_equal_the_definition(
    device: Any, precision: Any, fin: int, fout: int, carried: int, gap: int
) -> None:
    shape = ConvShape(3, fin, fout, (6, 5, 4), (3, 2, 2), "relu", precision=precision)
    variant = NARROW if precision == "fp32" else Variant.of(channels=16, span=1, voxels=32, maps=16)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, _ = run(device, shape, x, weights, variant, carried, gap)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= (1e-6 if precision == "fp32" else 5e-4)


@pytest.mark.parametrize("fin", [3, 6, 12, 40])
def test_half_precision_is_storage_only(device: Any, fin: int) -> None:
    """The maps of a voxel take 6, 12, 24 and 80 bytes, so that copies are 2, 4, 8 and 16 bytes wide."""
    shape = ConvShape(2, fin, 18, (3, 4, 6), (1, 2, 3), "relu", precision="fp16")
    variant = Variant.of(channels=32, span=2, voxels=32, maps=16)
    weights = random_weights(shape)
    x = random_input(shape).astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights, variant)
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert out.dtype == np.float16
    assert error_of(out, x, weights, shape) <= 5e-4  # what rounding to float16 costs
    assert abs(peak - np.abs(exact).max()) < 1e-5 * np.abs(exact).max()  # before it was rounded


@pytest.mark.parametrize("fin", [4, 6, 7])
def test_copies_are_as_wide_as_maps_allow(device: Any, fin: int) -> None:
    """The maps of a voxel take 16, 24 and 28 bytes; the input ends at the end of its memory."""
    shape = ConvShape(1, fin, 4, (2, 3, 5), (2, 1, 2), "relu")
    x, weights = random_input(shape), random_weights(shape)
    assert_close(run(device, shape, x, weights, NARROW)[0], x, weights, shape)


@pytest.mark.parametrize(
    ("into", "gap", "wide"), [("x", 0, True), ("x", 4, True), ("x", 2, False), ("out", 4, True), ("out", 2, False)]
)
def test_wide_copies_run_only_for_aligned_images(device: Any, into: str, gap: int, wide: bool) -> None:
    """One kernel copies inputs and stores outputs, so that both must be aligned."""
    shape = ConvShape(2, 4, 8, (2, 3, 5), (2, 1, 2))
    step: Any = BLOCK.bind(BLOCK.prepare(random_weights(shape), NARROW, device), shape, NARROW, device)
    taken = []
    step._kernel = lambda *_, **__: taken.append(True)
    step._unaligned = lambda *_, **__: taken.append(False)

    def images(what: str, values: tuple[int, ...]) -> Any:
        return images_on(device, np.zeros(values, np.float32), what, gap=gap if what == into else 0)

    step.run(images("x", shape.in_shape), images("out", shape.out_shape), {})
    assert taken == [wide]


def test_peak_reports_a_result_not_finite(device: Any) -> None:
    shape, variant = replace(SHAPES[1][0], activation="relu"), SHAPES[1][1]
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, shape, x, weights, variant)[1])
    x[0, 3, 3, 3, 1] = 3e38
    weights.weight[...] = 10
    assert run(device, shape, x, weights, variant)[1] == np.inf


@pytest.mark.parametrize("gpu", [H200, RTX], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kx", [1, 2, 3, 5, 11, 70])
@pytest.mark.parametrize(("fin", "fout"), [(1, 1), (7, 80), (512, 512)])
def test_every_division_fits_every_card(gpu: Gpu, precision: Any, kx: int, fin: int, fout: int) -> None:
    """It is checked for its own patch, for a larger one, and for single voxels."""
    shape = ConvShape(1, fin, fout, (3, 17, kx + 12), (3, 2, kx), precision=precision)
    variants = BLOCK.variants(shape, replace(MACHINE, gpu=gpu))
    assert 1 <= len(variants) <= len(SEGMENTS) + 1
    for variant in variants:
        division = _Division.of(variant)
        assert 1 <= division.span <= kx
        assert division.channels * shape.itemsize in SEGMENTS
        assert (division.voxels, division.maps) in {(voxels, maps) for voxels in VOXELS for maps in MAPS}
        for out in ((1, 1, 1), (3, 17, 12), (200, 200, 200), (90, 4, 1)):
            tile = _tile(out, division, shape.itemsize)
            assert tile.wide * tile.lines * tile.planes == division.voxels
            assert division.shared_bytes(tile.wide, shape.itemsize) <= MOST_SHARED
            assert tile.count(out) * division.voxels >= np.prod(out)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("maps", [64, 128, 256, 512])
def test_large_layers_are_divided_as_in_the_paper(maps: int, k: int) -> None:
    """A block has 128 pixels and 64 filters, and reads 32 bytes of each."""
    shape = ConvShape(1, maps, maps, (1, 223 + k, 223 + k), (1, k, k))
    division = _Division.of(BLOCK.variants(shape, WITH_GPU)[0])
    assert (division.voxels, division.maps, division.channels * FLOAT32) == (128, 64, 32)


@pytest.mark.parametrize("gpu", [H200, RTX], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("n", [7, 28, 56, 112, 512])
@pytest.mark.parametrize("fout", [17, 64, 80, 512])
def test_the_papers_division_keeps_its_promises(gpu: Gpu, precision: Any, k: int, n: int, fout: int) -> None:
    shape = ConvShape(1, 64, fout, (1, n + k - 1, n + k - 1), (1, k, k), precision=precision)
    division = _by_the_paper(shape, gpu, SEGMENTS)
    if division is None:
        assert n < 512 or fout < 64  # there was no block for each multiprocessor, or too few products
        return
    assert BLOCK.variants(shape, replace(MACHINE, gpu=gpu))[0] == division.variant
    card = card_of(gpu)
    products = division.span * division.channels * division.voxels * min(division.maps, fout)
    assert products >= card.hiding_products
    assert division.shared_bytes(16, shape.itemsize) * RESIDENT <= gpu.shared_multiprocessor_bytes
    assert division.blocks(fout) * _tile(shape.out, division, shape.itemsize).count(shape.out) >= card.multiprocessors


def test_layers_outside_the_papers_bounds_get_an_estimate() -> None:
    """8 filters of one tap are too few products of any number of pixels; a small image has too few blocks."""
    for shape in (ConvShape(1, 64, 8, (1, 512, 512), (1, 1, 1)), ConvShape(1, 512, 512, (1, 9, 9), (1, 3, 3))):
        assert _by_the_paper(shape, H200, SEGMENTS) is None
        assert len(BLOCK.variants(shape, WITH_GPU)) == len(SEGMENTS)


def test_blocks_are_smaller_for_small_layers() -> None:
    """Large layers take the paper's 128 voxels, and as many maps as leave least over; small ones fill the card."""

    def chosen(fout: int, n: int) -> tuple[int, int]:
        shape = ConvShape(1, 64, fout, (1, n + 2, n + 2), (1, 3, 3))
        division = _Division.of(BLOCK.variants(shape, WITH_GPU)[0])
        return division.voxels, division.maps

    assert chosen(80, 1024) == (128, 80)
    assert chosen(64, 1024) == (128, 64)
    assert chosen(17, 1024)[1] == 32
    voxels, maps = chosen(512, 7)
    assert voxels * maps < 128 * 64


def test_work_counts_the_arithmetic_of_whole_blocks() -> None:
    shape = ConvShape(2, 5, 18, (4, 9, 34), (3, 2, 1), "relu")
    (work,) = BLOCK.work(shape, NARROW)
    tiles = 2 * 18  # of 4 x 8 x 1 in an image of 34 x 8 x 2
    assert (work.unit, work.flops) == ("gpu_block", 2.0 * tiles * 32 * (3 * 2 * 1 * 8) * 32)
    assert work.nbytes == shape.in_bytes + shape.out_bytes
    long = ConvShape(1, 2000, 16, (1, 2, 5), (1, 2, 2))  # 1,000 steps of 8 products, 187 of them together
    assert BLOCK.work(long, NARROW)[0].nbytes == long.in_bytes + 11 * long.out_bytes
    assert BLOCK.work(replace(long, precision="tf32"), NARROW)[0].nbytes == long.in_bytes + long.out_bytes


def test_unsupported_shape_gets_a_reason() -> None:
    shape = SHAPES[1][0]
    assert BLOCK.why_not(shape, WITH_GPU) is None
    assert BLOCK.why_not(shape, MACHINE) == "needs a CUDA device"
    assert BLOCK.why_not(ConvShape(1, 512, 512, (1, 7, 7), (1, 5, 5)), WITH_GPU) is None
    assert BLOCK.why_not(PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), WITH_GPU) == "computes convolutions, not pool"
    for changed, reason in (
        ({"activation": "softmax"}, "softmax needs all maps of a voxel in one place: see gpu.conv.direct"),
        ({"pool": (1, 1, 2), "k": (1, 1, 2)}, "does not fuse pooling into fragments: see gpu.conv.fft_tiled"),
        (
            {"n": (3, 2**20, 2**20), "k": (1, 1, 1)},
            "takes up to 2147483647 blocks of voxels and maps, not 51539607552",
        ),
    ):
        assert BLOCK.why_not(replace(shape, **changed), WITH_GPU) == reason
