"""gpu.conv.fft against the float64 definition: on the emulator with numpy's transforms, on a device with cuFFT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, assert_close, random_input, random_weights
from tests.support.emulator import EmulatedDevice
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu import conv_fft
from znnpy.kernels.gpu.conv_fft import ConvFft, _counts, _some, good_size
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.libraries import Kind

FFT = ConvFft()
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
SHAPES = (
    ConvShape(1, 3, 5, (6, 7, 9), (3, 2, 4), "relu"),
    ConvShape(2, 5, 3, (5, 11, 4), (1, 3, 2), "tanh"),
    ConvShape(5, 2, 6, (4, 5, 6), (4, 5, 6), "sigmoid"),  # one voxel out
    ConvShape(1, 34, 33, (3, 4, 35), (2, 3, 1), "none"),  # more maps, and voxels, than a tile has
    ConvShape(1, 2, 3, (37, 5, 3), (17, 2, 2), "relu"),  # a kernel too long to be expanded
    ConvShape(1, 2, 3, (33, 7, 4), (9, 3, 2), "relu"),  # and one that is
)


def run(
    device: Any, shape: ConvShape, x: Any, weights: ConvWeights, variant: Variant, carried: int = 0
) -> tuple[Any, float]:
    """Output and its peak, from poisoned memory; the first `carried` planes come apart."""
    dtype = np.float16 if shape.precision == "fp16" else np.float32
    footprint = FFT.footprint(shape, variant, 1)
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in footprint.scratch}
    step = FFT.bind(FFT.prepare(weights, variant, device), shape, variant, device)
    out = device.put(np.full(shape.out_shape, np.nan, dtype), "out")
    peak = device.put(np.zeros(1, np.float32), "peak")
    before = device.put(np.ascontiguousarray(x[:, :carried], dtype), "before") if carried else None
    rest = device.put(np.ascontiguousarray(x[:, carried:], dtype), "x")
    step.run(rest, out, scratch, before, out_peak=device.address(peak))
    return device.get(out), float(device.get(peak)[0])


@pytest.mark.parametrize("maps", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_the_definition_for_any_number_of_maps_at_a_time(
    device: Any, shape: ConvShape, maps: int
) -> None:
    x, weights = random_input(shape), random_weights(shape)
    out, peak = run(device, shape, x, weights, Variant.of(maps=maps))
    assert_close(out, x, weights, shape)
    assert peak == np.abs(out).max()


@pytest.mark.parametrize("kind", ["relu", "shifted", "hot"])
def test_odd_inputs_are_as_accurate(device: Any, kind: str) -> None:
    shape = SHAPES[0]
    x, weights = random_input(shape, kind), random_weights(shape)
    out, _ = run(device, shape, x, weights, Variant.of(maps=3))
    assert_close(out, x, weights, shape)


def test_half_precision_is_storage_only(device: Any) -> None:
    shape = replace(SHAPES[0], precision="fp16")
    weights = random_weights(shape)
    x = random_input(shape).astype(np.float16).astype(np.float32)
    out, peak = run(device, shape, x, weights, Variant.of(maps=3))
    exact = reference.convolve(x, weights.weight, weights.bias, shape.activation)
    assert out.dtype == np.float16
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < 5e-4  # what rounding to float16 costs
    assert abs(peak - np.abs(exact).max()) < 1e-5 * np.abs(exact).max()  # before it was rounded


def test_peak_reports_a_result_beyond_float16(device: Any) -> None:
    shape = ConvShape(1, 2, 2, (4, 4, 4), (2, 2, 2), "none", precision="fp16")
    weights = random_weights(shape)
    weights.weight[...] = 1.0
    out, peak = run(device, shape, np.full(shape.in_shape, 60000.0, np.float32), weights, Variant.of(maps=2))
    assert np.isinf(out).all()
    assert 16 * 60000 - 100 < peak < 16 * 60000 + 100


@pytest.mark.parametrize("carried", [1, 3, 5])
def test_carried_planes_come_before_the_input(device: Any, carried: int) -> None:
    shape = ConvShape(2, 3, 2, (6, 5, 7), (2, 3, 3), "relu")
    x, weights = random_input(shape), random_weights(shape)
    out, _ = run(device, shape, x, weights, Variant.of(maps=2), carried)
    assert_close(out, x, weights, shape)


def test_batches_may_lie_apart(device: Any) -> None:
    shape = ConvShape(3, 2, 3, (4, 6, 5), (2, 2, 3), "relu")
    x, weights, variant = random_input(shape), random_weights(shape), Variant.of(maps=2)
    wide = np.full((3, 6, 6, 5, 2), np.nan, np.float32)
    wide[:, 2:] = x
    apart = device.put(wide, "x")[:, 2:]
    out = device.put(np.full((3, 5, *shape.out_shape[2:]), np.nan, np.float32), "out")
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in FFT.footprint(shape, variant, 1).scratch}
    FFT.bind(FFT.prepare(weights, variant, device), shape, variant, device).run(apart, out[:, 1:4], scratch)
    found = device.get(out)
    assert_close(np.ascontiguousarray(found[:, 1:4]), x, weights, shape)
    assert np.isnan(found[:, 0]).all()
    assert np.isnan(found[:, 4]).all()


def test_second_run_ignores_leftovers_of_the_first(device: Any) -> None:
    shape, variant = SHAPES[1], Variant.of(maps=4)
    weights = random_weights(shape)
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in FFT.footprint(shape, variant, 1).scratch}
    step = FFT.bind(FFT.prepare(weights, variant, device), shape, variant, device)
    out = device.put(np.full(shape.out_shape, np.nan, np.float32), "out")
    found = []
    for seed in (1, 2, 1):
        step.run(device.put(random_input(shape, seed=seed), "x"), out, scratch)
        found.append(device.get(out))
    assert (found[0] == found[2]).all()
    assert (found[0] != found[1]).any()


def test_held_bytes_equal_the_footprint(device: Any) -> None:
    shape = SHAPES[3]
    variant = FFT.variants(shape, WITH_GPU)[0]
    held = device.allocated
    resident = FFT.prepare(random_weights(shape), variant, device)
    assert device.allocated - held == shape.weight_bytes
    step = FFT.bind(resident, shape, variant, device)
    footprint = FFT.footprint(shape, variant, 1)
    assert device.allocated - held <= footprint.resident, "tables last as long as the step"
    assert footprint.allowance == 0, "the plan takes the largest of all layers, and tables of all of them last"
    assert step is not None


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [10**9, 40])
@pytest.mark.parametrize("maps", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_footprint_counts_every_cufft_plan(
    monkeypatch: pytest.MonkeyPatch, shape: ConvShape, maps: int, at_once: int
) -> None:
    """It also counts the table of sines, which a step takes beside its prepared weights."""
    monkeypatch.setattr(conv_fft, "LINES_VALUES", at_once)
    variant = Variant.of(maps=maps)
    with EmulatedDevice() as emulated:
        device: Any = emulated
        resident = FFT.prepare(random_weights(shape), variant, device)
        planned: list[str] = []
        make = device.libraries.lines

        def noted(kind: Kind, n: int, count: int) -> Any:
            planned.append(kind)
            return make(kind, n, count)

        monkeypatch.setattr(device.libraries, "lines", noted)
        held = device.allocated
        step = FFT.bind(resident, shape, variant, device)
        plans = len(planned) + planned.count("real")  # one there and one back
        table = device.allocated - held
        assert FFT.footprint(shape, variant, 1).resident == held + plans * conv_fft.TABLES_BYTES + table
        assert step is not None


def test_fewer_maps_at_a_time_take_less_memory() -> None:
    shape = ConvShape(1, 40, 40, (60, 60, 60), (5, 5, 5))
    working = [FFT.footprint(shape, variant, 1).working(shape) for variant in FFT.variants(shape, WITH_GPU)]
    assert len(working) == 3
    assert working == sorted(working, reverse=True)
    assert len(set(working)) == 3


def test_memory_is_at_most_that_of_table_ii() -> None:
    """The table gives S f (n + ñ) + f ñ, S (f + f') ñ + 2 f ñ, and S f' (n' + ñ) + f' ñ for all maps at once."""
    shape = ConvShape(2, 40, 30, (59, 61, 60), (5, 5, 5))
    footprint = FFT.footprint(shape, Variant.of(maps=40), 1)
    spectrum = 8 * good_size(59) * good_size(61) * (good_size(60, even=True) // 2 + 1)
    table = max(
        shape.in_bytes + (2 * 40 + 40) * spectrum,
        (2 * (40 + 30) + 2 * 40) * spectrum,
        shape.out_bytes + (2 * 30 + 30) * spectrum,
    )
    assert footprint.working(shape) <= table


def test_transform_sizes_have_no_factor_beyond_seven() -> None:
    assert [good_size(n) for n in (1, 7, 11, 13, 97, 127, 150, 211)] == [1, 7, 12, 14, 98, 128, 150, 216]
    assert [good_size(n, even=True) for n in (1, 7, 15, 25, 27, 81, 121)] == [2, 8, 16, 28, 28, 84, 126]


@pytest.mark.parametrize(("total", "most"), [(1, 1), (7, 7), (7, 8), (7, 3), (6, 3), (1, 5), (100, 1)])
def test_counts_of_parts_equal_those_of_all_parts(total: int, most: int) -> None:
    assert _counts(total, most) == {count for _, count in _some(total, most)}


def test_unsupported_shape_gets_a_reason() -> None:
    shape = SHAPES[0]
    assert FFT.why_not(shape, WITH_GPU) is None
    assert FFT.why_not(shape, MACHINE) == "needs a CUDA device"
    assert "one matrix product" in (FFT.why_not(replace(shape, k=(1, 1, 1)), WITH_GPU) or "")
    assert "softmax" in (FFT.why_not(replace(shape, activation="softmax"), WITH_GPU) or "")
    assert "pool" in (FFT.why_not(PoolShape(1, 2, (5, 5, 5), (2, 2, 2)), WITH_GPU) or "")


def test_work_grows_with_the_layer() -> None:
    small, large = ConvShape(1, 8, 8, (40, 40, 40), (5, 5, 5)), ConvShape(1, 16, 16, (40, 40, 40), (5, 5, 5))
    variant = Variant.of(maps=8)
    work = [FFT.work(shape, variant)[0] for shape in (small, large)]
    assert 2 < work[1].nbytes / work[0].nbytes < 4
    assert 2 < work[1].flops / work[0].flops < 4


def test_untested_lengths_are_refused() -> None:
    assert "2048 points" in (FFT.why_not(ConvShape(1, 1, 1, (2049, 3, 3), (2, 2, 2)), WITH_GPU) or "")
