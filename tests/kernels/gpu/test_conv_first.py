"""gpu.conv.first against the float64 definition, on float32 units and in matrix products of tf32."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import INPUTS, MACHINE, assert_close, error_of, random_input, random_weights, run_on
from tests.support.tiers import one_in
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu import conv_first
from znnpy.kernels.gpu.conv_first import (
    AHEAD,
    AHEAD_BYTES,
    AHEAD_FLOPS,
    SHARED_BYTES,
    WIDTHS,
    ConvFirst,
    _fits,
    _most_groups,
    _plan,
    _shared_bytes,
    _wide,
    _widths,
)
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights

FIRST = ConvFirst()
FLOAT, TENSOR = "float", "tensor"
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
SHAPES = [
    ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1), "none"),
    ConvShape(1, 1, 80, (5, 11, 37), (3, 2, 4), "relu"),  # tiles that end anywhere
    ConvShape(2, 3, 17, (5, 8, 4), (1, 3, 2), "tanh"),
    ConvShape(3, 2, 6, (4, 5, 6), (4, 5, 6), "sigmoid"),  # one voxel out
    ConvShape(1, 4, 100, (4, 40, 9), (2, 1, 3), "relu"),  # more maps than a block has
    ConvShape(1, 4, 24, (7, 9, 14), (5, 7, 6), "none"),  # kernels that come in chunks
    ConvShape(1, 1, 12, (9, 11, 13), (9, 9, 11), "relu"),
]
DEEP = [  # of which a block that takes every z goes through all places of a tile
    ConvShape(2, 1, 7, (9, 7, 9), (2, 3, 2), "relu"),
    ConvShape(1, 3, 18, (7, 25, 9), (3, 2, 3), "none"),  # all lines of a tile
    ConvShape(1, 2, 8, (5, 4, 35), (1, 2, 2), "tanh"),
    ConvShape(1, 4, 24, (6, 6, 6), (4, 5, 3), "none"),  # 3 chunks, of tensor cores 4
    ConvShape(1, 1, 17, (12, 10, 7), (9, 9, 5), "relu"),  # 3 chunks, of up to 3 planes
]


def variant_of(units: str, groups: int, *, ahead: bool) -> Variant:
    words = dict([AHEAD]) if ahead else {}
    return Variant.of(groups=groups, units=units, **words)


def walk_whole_columns(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a block compute every z of its tile."""
    monkeypatch.setattr(device, "gpu", replace(device.gpu, multiprocessors=1))
    monkeypatch.setattr(conv_first, "BLOCKS", 1)


def run(
    device: Any,
    shape: ConvShape,
    x: Any,
    weights: ConvWeights,
    units: str,
    carried: int = 0,
    gap: int = 0,
    groups: int | None = None,
    *,
    ahead: bool = False,
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes apart, `gap` values between images.

    groups  None: the most.
    """
    variant = variant_of(units, groups or _most_groups(shape.fout), ahead=ahead)
    return run_on(device, FIRST, shape, x, weights, variant, carried=carried, gap=gap)


@pytest.mark.parametrize(("shape", "ahead"), one_in(3, product(SHAPES, [False, True])), ids=str)
def test_output_equals_the_definition(device: Any, shape: ConvShape, ahead: bool) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, FLOAT, ahead=ahead)
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize(
    ("shape", "ahead"),
    one_in(3, ((shape, ahead) for shape in SHAPES for ahead in (False, True) if not (ahead and shape == SHAPES[5]))),
    ids=str,
)
def test_tensor_cores_round_as_tf32_does(device: Any, shape: ConvShape, ahead: bool) -> None:
    """The prefetched values of SHAPES[5] are more than registers hold."""
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, TENSOR, ahead=ahead)
    assert error_of(out, x, weights, shape) <= 1e-3
    assert peak == np.abs(out).max()


@pytest.mark.parametrize(
    ("kx", "ahead"), one_in(4, [*product([1, 2, 3, 5, 6, 7, 8, 9, 10], [False]), *product([1, 3, 6, 10], [True])])
)
def test_kernels_of_any_width_equal_the_definition(
    device: Any, monkeypatch: pytest.MonkeyPatch, kx: int, ahead: bool
) -> None:
    walk_whole_columns(device, monkeypatch)
    shape = ConvShape(1, 1, 5, (4, 5, 20), (2, 3, kx), "none")
    x, weights = random_input(shape), random_weights(shape)
    assert_close(run(device, shape, x, weights, FLOAT, ahead=ahead)[0], x, weights, shape)
    assert error_of(run(device, shape, x, weights, TENSOR, ahead=ahead)[0], x, weights, shape) <= 1e-3


@pytest.mark.parametrize("kind", INPUTS)
def test_odd_inputs_are_as_accurate(device: Any, kind: str) -> None:
    x, weights = random_input(SHAPES[1], kind), random_weights(SHAPES[1])
    assert_close(run(device, SHAPES[1], x, weights, FLOAT)[0], x, weights, SHAPES[1])
    assert error_of(run(device, SHAPES[1], x, weights, TENSOR)[0], x, weights, SHAPES[1]) <= 1e-3


@pytest.mark.parametrize("gap", [0, 7, 8])
@pytest.mark.parametrize("carried", [0, 1, 4])
@pytest.mark.parametrize("maps", [5, 8])
@pytest.mark.parametrize(("precision", "units"), [("fp32", FLOAT), ("tf32", TENSOR), ("fp16", TENSOR)])
def test_carried_planes_and_strided_images_equal_the_definition(
    device: Any, precision: Any, units: str, maps: int, carried: int, gap: int
) -> None:
    shape = ConvShape(3, 2, maps, (6, 5, 4), (3, 2, 2), "relu", precision=precision)
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, _ = run(device, shape, x, weights, units, carried, gap)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
@pytest.mark.parametrize(("shape", "ahead"), one_in(2, [(DEEP[0], False), *product(DEEP, [True])]), ids=str)
def test_block_computes_several_planes_along_z(
    device: Any, monkeypatch: pytest.MonkeyPatch, shape: ConvShape, units: str, ahead: bool
) -> None:
    walk_whole_columns(device, monkeypatch)
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, units, ahead=ahead)
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize(("precision", "units"), [("fp32", FLOAT), ("tf32", TENSOR), ("fp16", TENSOR)])
def test_prefetched_values_equal_plainly_staged_ones(
    device: Any, monkeypatch: pytest.MonkeyPatch, precision: Any, units: str
) -> None:
    """They are equal to the bit: rounded to tf32, not truncated."""
    walk_whole_columns(device, monkeypatch)
    shape = replace(DEEP[1], precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    plain, ahead = (run(device, shape, x, weights, units, ahead=ahead) for ahead in (False, True))
    np.testing.assert_array_equal(plain[0], ahead[0])
    assert plain[1] == ahead[1]


@pytest.mark.parametrize("carried", [0, 1, 4, 6])
@pytest.mark.parametrize("shape", [DEEP[0], DEEP[3]], ids=str)
@pytest.mark.parametrize(("precision", "units"), [("fp32", FLOAT), ("tf32", TENSOR), ("fp16", TENSOR)])
def test_prefetched_planes_may_be_carried(
    device: Any, monkeypatch: pytest.MonkeyPatch, precision: Any, units: str, shape: ConvShape, carried: int
) -> None:
    walk_whole_columns(device, monkeypatch)
    shape = replace(shape, precision=precision, n=(9, *shape.n[1:]))
    x, weights = random_input(shape).astype(np.float16).astype(np.float32), random_weights(shape)
    out, _ = run(device, shape, x, weights, units, carried, 7, ahead=True)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)


@pytest.mark.parametrize(
    ("shape", "ahead"),
    [(SHAPES[1], False), (SHAPES[1], True), (SHAPES[2], False), (SHAPES[2], True), (SHAPES[5], False), (DEEP[4], True)],
    ids=str,
)
def test_half_precision_stores_float16_and_computes_in_tf32(device: Any, shape: ConvShape, ahead: bool) -> None:
    shape = replace(shape, precision="fp16")
    weights = random_weights(shape)
    x = random_input(shape).astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights, TENSOR, ahead=ahead)
    assert out.dtype == np.float16
    assert error_of(out, x, weights, shape) < 1e-3
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert abs(peak - np.abs(exact).max()) < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("units", [FLOAT, TENSOR])
def test_peak_reports_a_result_not_finite(
    device: Any, monkeypatch: pytest.MonkeyPatch, units: str, ahead: bool
) -> None:
    walk_whole_columns(device, monkeypatch)
    shape = SHAPES[2]
    weights, x = random_weights(shape), random_input(shape)
    x[0, 3, 3, 3, 1] = np.nan
    assert np.isnan(run(device, replace(shape, activation="relu"), x, weights, units, ahead=ahead)[1])
    x[0, 3, 3, 3, 1] = 3e38
    weights.weight[...] = 10
    assert run(device, replace(shape, activation="none"), x, weights, units, ahead=ahead)[1] == np.inf


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
@pytest.mark.parametrize("fin", [1, 2, 3, 4])
def test_two_blocks_fit_any_card(fin: int, units: str) -> None:
    for k in [(1, 1, 1), (3, 3, 3), (5, 5, 5), (2, 9, 9), (11, 11, 11), (1, 40, 3)]:
        for fout in (1, 17, 80, 81, 200):
            plan = _plan(fin, fout, k, units, _most_groups(fout))
            assert fout <= plan.padded < fout + 16 * plan.blocks
            assert plan.chunks * plan.rows >= k[0] * k[1] > (plan.chunks - 1) * plan.rows
            assert max(_shared_bytes(plan, fin, k, wide) for wide in WIDTHS) <= SHARED_BYTES
            ahead = _plan(fin, fout, k, units, _most_groups(fout), ahead=True)
            assert ahead.chunks * ahead.rows >= k[0] * k[1] > (ahead.chunks - 1) * ahead.rows
            assert ahead.padded == plan.padded
            assert ahead.rows <= plan.rows
            assert _fits(ahead, fin, k) or ahead.rows == 1
            assert all(_shared_bytes(ahead, fin, k, wide) <= SHARED_BYTES for wide in _widths(ahead, fin, k))


def test_prefetching_needs_its_shared_memory() -> None:
    """One chunk stays, and one plane more has room; of several, two have. 1 -> 80 maps."""

    def room(k: int, units: str) -> tuple[int, int, int, int, list[int]]:
        plan = _plan(1, 80, (k, k, k), units, 5, ahead=True)
        return plan.chunks, plan.buffers, plan.planes, plan.slots, _widths(plan, 1, (k, k, k))

    assert room(3, FLOAT) == room(3, TENSOR) == (1, 1, 3, 4, [32, 16, 8])
    assert room(5, FLOAT) == (1, 1, 5, 6, [32, 16, 8])
    assert room(5, TENSOR) == (1, 1, 5, 6, [16, 8])  # taps in whole eights are 128 bytes too many for the widest
    assert room(8, FLOAT) == room(8, TENSOR) == (8, 2, 1, 2, [32, 16, 8])
    plan = _plan(1, 80, (5, 5, 5), TENSOR, 5, ahead=True)
    kernels, planes = 128 * 80, 6 * (12 + 5 - 1) * (16 + 5 - 1)
    assert _shared_bytes(plan, 1, (5, 5, 5), 16) == 4 * (32 + 80 + kernels + planes) + 2 * 128
    shape = ConvShape(1, 1, 80, (9, 9, 36), (5, 5, 5))
    assert (_wide(shape), _wide(shape, plan)) == (32, 16)


def test_prefetching_needs_its_registers() -> None:
    """8 values of 192 threads: of 4 maps and lines of 9 taps, one plane is too much for tensor cores."""
    plan = _plan(4, 80, (2, 9, 9), TENSOR, 5, ahead=True)
    assert max((192 // wide + 8) * (wide + 8) * 4 for wide in WIDTHS) > 8 * 192
    assert not _fits(plan, 4, (2, 9, 9))
    assert _fits(_plan(4, 80, (2, 9, 9), FLOAT, 5, ahead=True), 4, (2, 9, 9))


def test_prefetching_is_an_additional_variant() -> None:
    shape = ConvShape(1, 1, 80, (200, 200, 200), (3, 3, 3), "relu")
    plain, ahead = FIRST.variants(shape, WITH_GPU)
    assert (str(plain), str(ahead)) == ("groups=5 units=float", "groups=5 staging=ahead units=float")
    (first,), (second,) = FIRST.work(shape, plain), FIRST.work(shape, ahead)
    values = second.flops - AHEAD_FLOPS * first.flops  # of out, those of tiles that reach beyond it too
    assert 16 * 80 * 198**3 <= values < 1.1 * 16 * 80 * 198**3
    assert second.nbytes == pytest.approx(AHEAD_BYTES * (shape.in_bytes + shape.out_bytes))
    image = replace(shape, n=(1, 2000, 2000), k=(1, 3, 3))  # nothing comes next
    assert [str(variant) for variant in FIRST.variants(image, WITH_GPU)] == ["groups=5 units=float"]
    many_taps = replace(image, k=(1, 40, 9))  # chunks do
    assert len(FIRST.variants(many_taps, WITH_GPU)) == 2
    no_room = replace(shape, fin=4, k=(2, 9, 9), precision="tf32")
    assert [str(variant) for variant in FIRST.variants(no_room, WITH_GPU)] == ["groups=5 units=tensor"]


def test_unsupported_shape_gets_a_reason() -> None:
    shape = SHAPES[1]
    assert FIRST.why_not(shape, WITH_GPU) is None
    assert FIRST.why_not(shape, MACHINE) == "needs a CUDA device"
    assert FIRST.why_not(PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), WITH_GPU) == "computes convolutions, not pool"
    for changed, reason in (
        ({"fin": 5}, "takes up to 4 input maps, not 5"),
        ({"k": (1, 1, 12)}, "takes kernels up to 11 along x, not 12"),
        ({"batch": 70000}, "takes up to 65535 images, not 70000"),
        ({"activation": "softmax"}, "softmax needs all maps of a voxel in one place: see gpu.conv.direct"),
        (
            {"fin": 4, "n": (1, 200, 40), "k": (1, 200, 11)},
            "one row of its taps needs 158944 bytes of shared memory, and a block has 131072",
        ),
        ({"pool": (1, 1, 2), "k": (1, 1, 1)}, "does not fuse pooling into fragments: see gpu.conv.fft_tiled"),
    ):
        assert FIRST.why_not(replace(shape, **changed), WITH_GPU) == reason


@pytest.mark.parametrize(("precision", "units"), [("fp32", FLOAT), ("tf32", TENSOR), ("fp16", TENSOR)])
def test_precision_fixes_the_computing_units(precision: Any, units: str) -> None:
    shape = replace(SHAPES[1], precision=precision)
    assert {variant.text("units") for variant in FIRST.variants(shape, WITH_GPU)} == {units}


def test_blocks_compute_fewer_maps_for_small_images() -> None:
    """28 x 28 and 512 filters have 35 blocks of 80 maps; a multiprocessor of 132 should have 4 filters of the 512."""

    def groups(n: tuple[int, int, int], fout: int, k: tuple[int, int, int], batch: int = 1) -> list[int]:
        variants = FIRST.variants(ConvShape(batch, 1, fout, n, k), WITH_GPU)
        return [variant.count("groups") for variant in variants if AHEAD not in variant.parameters]

    assert groups((1, 28, 28), 512, (1, 3, 3)) == [1, 5]
    assert groups((1, 9, 300), 512, (1, 3, 3)) == [1, 5]
    assert groups((1, 9, 300), 512, (1, 3, 3), batch=2) == [5]  # 280 blocks: two for each of 132, and more
    assert groups((1, 1024, 1024), 32, (1, 3, 3)) == [2]
    assert groups((1, 32, 32), 32, (1, 5, 5)) == [2]  # as many lines as filters, which leave less over
    assert groups((48, 512, 512), 80, (3, 3, 3)) == [5]
    assert groups((10, 12, 12), 80, (3, 3, 3)) == [1, 5]


@pytest.mark.parametrize("units", [FLOAT, TENSOR])
@pytest.mark.parametrize("groups", [1, 2])
def test_any_number_of_groups_equals_the_definition(device: Any, groups: int, units: str) -> None:
    shape = ConvShape(2, 1, 52, (2, 7, 9), (2, 3, 3), "relu")
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, units, groups=groups)
    assert error_of(out, x, weights, shape) <= (1e-6 if units == FLOAT else 1e-3)
    assert peak == np.abs(out).max()


def test_work_counts_the_arithmetic_of_whole_tiles() -> None:
    shape = ConvShape(2, 2, 18, (4, 9, 34), (3, 2, 1), "relu")
    (plain,), (tensor,) = (FIRST.work(shape, Variant.of(groups=2, units=units)) for units in (FLOAT, TENSOR))
    tiles = 2 * 2 * 3 * 1  # 16 wide, 12 high
    assert (plain.unit, plain.flops) == ("gpu_first", 2 * tiles * 192 * (3 * 2 * 1 * 2) * 32)
    assert tensor.flops == plain.flops / 4
    assert plain.nbytes == tensor.nbytes == shape.in_bytes + shape.out_bytes
    (narrow,) = FIRST.work(replace(shape, fout=33), Variant.of(groups=1, units=FLOAT))
    assert narrow.flops == plain.flops / 32 * 48
