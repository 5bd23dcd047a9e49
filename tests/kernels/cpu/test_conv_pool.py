"""Convolutions that max-pool into fragments before they write: equal to the two layers one after the other."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.closeness import (
    INPUTS,
    MACHINE,
    aligned,
    definition,
    fragments,
    random_input,
    random_weights,
    run,
    twin,
)
from znnpy.errors import ShapeError, Stopped, ValuesOverflowError
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.cpu import conv_direct_lanes, conv_fft_lanes
from znnpy.kernels.cpu.native import library
from znnpy.kernels.table import find, of_kind
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.shapes import ConvShape, FilterShape, PoolShape, fused

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array
    from znnpy.shapes import Activation, Vec3

LANES = find("cpu.conv.fft_lanes")
RUNS_HERE = [simd for simd in ("avx512", "avx2") if library.path(simd) and (simd == "avx2" or MACHINE.simd == "avx512")]
pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="the kernels were not compiled")


def pooled(batch: int, maps: tuple[int, int], out: Vec3, k: Vec3, p: Vec3, activation: Activation) -> ConvShape:
    """Return the convolution whose fragments are of size `out`."""
    n = tuple((m + 1) * w - 1 + s - 1 if w > 1 else m + s - 1 for m, w, s in zip(out, p, k, strict=True))
    shape = ConvShape(batch, *maps, (n[0], n[1], n[2]), k, activation, p)
    assert shape.out == out
    return shape


SHAPES = [
    pooled(1, (3, 16), (4, 5, 6), (2, 2, 2), (2, 2, 2), "relu"),
    pooled(2, (17, 35), (7, 9, 20), (3, 2, 4), (1, 2, 2), "none"),
    pooled(2, (5, 65), (5, 9, 12), (3, 5, 3), (3, 1, 2), "tanh"),
    pooled(1, (5, 80), (1, 1, 1), (3, 1, 1), (3, 2, 1), "sigmoid"),
    pooled(1, (1, 1), (3, 40, 2), (1, 5, 1), (1, 1, 4), "relu"),
    pooled(8, (4, 6), (3, 4, 5), (3, 2, 1), (2, 1, 1), "relu"),
    pooled(1, (16, 33), (4, 4, 4), (5, 5, 5), (2, 2, 2), "none"),
]


def assert_equals_two_layers(out: Array, x: Array, weights: ConvWeights, shape: ConvShape) -> None:
    """Within the rounding of the convolution: a maximum does not round."""
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} of {out.size} voxels not finite"
    alone = replace(shape, pool=(1, 1, 1))
    answer = fragments(definition(x, weights, shape.activation), shape.pool)
    rounding = _rms(fragments(twin(x, weights, alone), shape.pool) - answer)
    sums = definition(x, weights, "none")  # what rounds, though ReLU may leave little
    error = _rms(out - answer)
    assert error <= max(3 * rounding, 1e-6 * _rms(sums)), f"rms error {error:.2e}"


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_layer_equals_two_layers(shape: ConvShape, simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and sizes are odd; there are several images, and maps that fill no block."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    variants = LANES.variants(shape, MACHINE)
    weights = random_weights(shape)
    for variant, kind in zip([*variants[:: max(1, len(variants) // 6)], variants[-1]], cycle(INPUTS[:3])):
        x = random_input(shape, kind)
        assert_equals_two_layers(run(LANES, shape, x, weights, variant, threads=2).out, x, weights, shape)


DIRECT = [
    *SHAPES,
    pooled(2, (1, 80), (5, 20, 31), (4, 4, 4), (2, 2, 2), "relu"),  # several units along y and x
    pooled(2, (2, 48), (3, 7, 55), (2, 3, 1), (1, 1, 3), "tanh"),
    pooled(1, (1, 300), (2, 9, 4), (2, 2, 2), (2, 2, 2), "relu"),
]


@pytest.mark.slow
@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("shape", DIRECT, ids=str)
def test_direct_convolution_pools_like_two_layers(shape: ConvShape, simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some units end before the image does, and planes are kept for the next window."""
    monkeypatch.setattr(conv_direct_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    primitive = find("cpu.conv.first" if shape.fin <= 4 else "cpu.conv.direct_lanes")
    (variant,) = primitive.variants(shape, MACHINE)
    weights = random_weights(shape)
    for threads, kind in ((1, INPUTS[0]), (2, INPUTS[1]), (2, INPUTS[2])):
        x = random_input(shape, kind)
        assert_equals_two_layers(run(primitive, shape, x, weights, variant, threads=threads).out, x, weights, shape)


def test_direct_convolution_refuses_to_pool_a_softmax() -> None:
    for fin, name in ((1, "cpu.conv.first"), (16, "cpu.conv.direct_lanes")):
        refusal = find(name).why_not(pooled(1, (fin, 8), (2, 2, 2), (2, 2, 2), (2, 2, 2), "softmax"), MACHINE)
        assert refusal is not None
        assert "softmax" in refusal


@pytest.mark.parametrize("tile", [(4, 4, 4), (6, 14, 8), (32, 4, 10), (24, 28, 32)], ids=str)
@pytest.mark.parametrize("group", [1, 5, 100])
def test_every_tile_writes_exactly_its_own_windows(tile: Vec3, group: int) -> None:
    """The first window of a tile falls on any fragment: steps are odd and even, groups end anywhere."""
    shape = pooled(2, (3, 20), (9, 7, 8), (2, 2, 2), (2, 3, 2), "none")
    x, weights = random_input(shape), random_weights(shape)
    variant = Variant.of(tile=tile, group=group, kept=group % 2)
    assert_equals_two_layers(run(LANES, shape, x, weights, variant, threads=2).out, x, weights, shape)


@pytest.mark.slow
def test_images_may_lie_apart() -> None:
    shape = SHAPES[1]
    x, weights = random_input(shape), random_weights(shape)
    images, *size = shape.out_shape
    store = np.full((images, int(np.prod(size)) + 96), np.nan, np.float32)
    out = np.ndarray(shape.out_shape, np.float32, store, 0, (store.strides[0], *np.empty(size, np.float32).strides))
    run(LANES, shape, x, weights, threads=2, out=out)
    assert_equals_two_layers(out, x, weights, shape)
    assert np.isnan(store[:, -96:]).all(), "wrote between the images"


def test_threads_and_repetition_change_no_byte() -> None:
    shape = SHAPES[2]
    x, weights = random_input(shape), random_weights(shape)
    first = run(LANES, shape, x, weights, threads=1).out.tobytes()
    for threads in (1, 2, 3):
        assert run(LANES, shape, x, weights, threads=threads).out.tobytes() == first


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_footprint_equals_the_bytes_used(threads: int) -> None:
    shape = pooled(1, (24, 24), (24, 25, 26), (3, 3, 3), (2, 2, 2), "relu")
    x, weights = random_input(shape), random_weights(shape)
    variants = LANES.variants(shape, MACHINE)
    for variant in (variants[0], variants[len(variants) // 2], variants[-1]):
        ran = run(LANES, shape, x, weights, variant, threads)
        assert ran.peak_bytes <= ran.footprint.allowance, "allocates more than it says"
        if threads == 1:
            assert all(0.85 <= part <= 1 for part in ran.touched.values()), f"{variant} wrote {ran.touched}"
    # One worker's planes count, and where they are the largest they are filled: many columns, few maps.
    flat = pooled(1, (1, 16), (40, 15, 15), (1, 2, 2), (4, 2, 2), "none")
    variant = Variant.of(tile=(32, 32, 32), group=1, kept=1)
    ran = run(LANES, flat, random_input(flat), random_weights(flat), variant, threads=1)
    assert 0.85 <= ran.touched["blocks"] <= 1


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("value", [1e20, -1e20, np.nan])
def test_overflow_is_found_before_maximum_and_activation_hide_it(activation: Activation, value: float) -> None:
    shape = pooled(1, (4, 3), (4, 4, 4), (3, 3, 3), (2, 2, 2), activation)
    x = np.full(shape.in_shape, np.float32(value))
    weights = ConvWeights(np.full((3, 4, 3, 3, 3), 1e20, np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValuesOverflowError, match=r"\d+ of \d+ values .* became infinite or not a number"):
        run(LANES, shape, x, weights, threads=2)


def test_only_tested_primitives_claim_to_pool() -> None:
    """Every primitive that applies to such a shape is one that was tested above."""
    for shape in SHAPES:
        direct = "cpu.conv.first" if shape.fin <= 4 else "cpu.conv.direct_lanes"
        units = [f"cpu.conv.{unit}" for unit in MACHINE.bf16]  # tested in test_bf16_conv.py
        assert [p.name for p in of_kind("conv") if p.why_not(shape, MACHINE) is None] == [LANES.name, direct, *units]
        pooling = LANES.name, "cpu.conv.first", "cpu.conv.direct_lanes", "cpu.conv.amx", "cpu.conv.avx512_bf16"
        others = [p for p in of_kind("conv") if p.name.startswith("cpu.") and p.name not in pooling]
        assert all("pool" in (p.why_not(shape, MACHINE) or "") for p in others)
    soft = replace(SHAPES[0], activation="softmax")
    assert "softmax needs all maps" in (LANES.why_not(soft, MACHINE) or "")
    wide = pooled(1, (1, 1), (1, 1, 1), (20, 1, 1), (14, 1, 1), "none")
    assert LANES.why_not(wide, MACHINE) == "kernel and window reach 33, beyond the largest tile of 32"


def test_fused_shape_has_the_sizes_of_both_layers() -> None:
    conv, pool = ConvShape(2, 3, 4, (10, 9, 8), (2, 2, 4), "relu"), PoolShape(2, 4, (9, 8, 5), (2, 3, 3))
    both = fused(conv, pool)
    assert both is not None
    assert both.in_shape == conv.in_shape
    assert both.out_shape == pool.out_shape
    assert both.unpooled == conv.out
    assert str(both) == "conv 2x3->4 @10x9x8 k2x2x4 relu p2x3x3"
    assert fused(both, pool) is None
    assert fused(conv, PoolShape(2, 4, (9, 8, 5), (1, 1, 1))) is None
    assert fused(conv, PoolShape(2, 4, (9, 8, 5), (3, 2, 5), fragments=False)) is None
    assert fused(pool, conv) is None
    assert fused(conv, FilterShape(2, 4, (9, 8, 5), (2, 2, 2))) is None
    with pytest.raises(
        ShapeError, match=r"pooling window .* does not fit input .* along y .*nearest sizes are 7 and 9"
    ):
        replace(conv, pool=(2, 2, 1))


@pytest.mark.parametrize("fin", [1, 16])
def test_direct_sums_that_overflow_are_counted_before_they_are_pooled(fin: int) -> None:
    shape = pooled(1, (fin, 3), (4, 4, 4), (3, 3, 3), (2, 2, 2), "relu")
    x, weights = random_input(shape), random_weights(shape)
    weights.bias[2] = -np.inf  # a maximum with 0 would hide it
    with pytest.raises(ValuesOverflowError, match=r"\d+ of \d+ values .* became infinite or not a number"):
        run(find("cpu.conv.first" if fin <= 4 else "cpu.conv.direct_lanes"), shape, x, weights, threads=2)


def test_stopped_thread_pool_stops_a_step() -> None:
    shape = SHAPES[0]
    variant = LANES.variants(shape, MACHINE)[0]
    with ThreadPool(2) as pool:
        step = LANES.bind(LANES.prepare(random_weights(shape), variant, pool), shape, variant, pool)
        pool.stop()
        scratch = {s.name: aligned(s.nbytes) for s in LANES.footprint(shape, variant, 2).scratch}
        with pytest.raises(Stopped):
            step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)
