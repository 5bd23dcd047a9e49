"""Seconds from work and rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, get_args

import pytest

from tests.support.brute_force import EDGE_BYTES
from tests.support.fake_primitives import CARRYING, FAST, GPU, MACHINE, SLOW, limits
from tests.support.flat_requests import make_plan
from znnpy.costs.model import CPU_RATES, GPU_RATES, Rate, Rates, assumed_rates, seconds, unhidden_io_seconds
from znnpy.costs.size_trend import SIZES
from znnpy.kernels.contract import Unit, Variant, Work
from znnpy.network import Conv, Network
from znnpy.shapes import ConvShape

ROUND = Rates(
    {"product": Rate(100.0, 10.0), "fft": Rate(50.0, 10.0), "copy": Rate(1.0, 20.0), "pool": Rate(2.0, 5.0)},
    stage_seconds=0.0,
)


def test_a_stage_takes_the_longer_of_arithmetic_and_traffic() -> None:
    assert seconds([Work("product", flops=300.0, nbytes=20.0)], ROUND) == 3.0
    assert seconds([Work("product", flops=300.0, nbytes=40.0)], ROUND) == 4.0


def test_stages_add_and_each_costs_its_start() -> None:
    work = [Work("fft", 100.0, 0.0), Work("copy", 0.0, 30.0), Work("pool", 0.0, 10.0)]
    assert seconds(work, ROUND) == 2.0 + 1.5 + 2.0
    assert seconds(work, replace(ROUND, stage_seconds=0.25)) == 2.0 + 1.5 + 2.0 + 0.75


@pytest.mark.parametrize("unit", ["product", "fft", "copy", "pool"])
def test_arithmetic_grows_with_threads_traffic_less(unit: Unit) -> None:
    machine = replace(MACHINE, cores=64)
    two, eight = assumed_rates(machine, 2).of(unit), assumed_rates(machine, 8).of(unit)
    assert two == Rates().of(unit)
    assert eight.flops == 4 * two.flops
    assert eight.nbytes == pytest.approx(4**0.8 * two.nbytes)


def test_threads_beyond_the_cores_bring_nothing() -> None:
    assert assumed_rates(MACHINE, 16) == assumed_rates(MACHINE, 2)


def test_narrow_registers_and_slow_blas_kernels_halve_arithmetic() -> None:
    full = assumed_rates(MACHINE, 2).of("product")
    assert (
        assumed_rates(replace(MACHINE, simd="avx2", blas="openblas Haswell"), 2).of("product").flops == full.flops / 2
    )
    assert assumed_rates(replace(MACHINE, simd="other"), 2).of("product").flops == full.flops / 8
    assert assumed_rates(replace(MACHINE, blas="openblas Haswell"), 2).of("product") == Rate(
        full.flops / 2, full.nbytes
    )


def test_rates_of_a_gpu_scale_with_what_it_says_of_itself() -> None:
    h200 = replace(GPU, capability=(9, 0), multiprocessors=132, bandwidth=4.8e12)

    def rates(**words: Any) -> Rates:
        return assumed_rates(replace(MACHINE, gpu=replace(h200, **words)), 8, "gpu")

    full = rates()
    assert full.units == GPU_RATES
    assert set(GPU_RATES) | set(CPU_RATES) == set(get_args(Unit)), "every unit has a rate on one device"
    for unit in GPU_RATES:
        assert rates(bandwidth=2.4e12).of(unit) == Rate(full.of(unit).flops, full.of(unit).nbytes / 2)
        assert rates(multiprocessors=33).of(unit) == Rate(full.of(unit).flops / 4, full.of(unit).nbytes)
    older, newer = rates(capability=(8, 6)), rates(capability=(12, 0))
    assert older.of("gpu_half_product").flops < 0.2 * full.of("gpu_half_product").flops
    assert older.of("gpu_direct").flops > 0.5 * full.of("gpu_direct").flops
    assert newer == rates(capability=(12, 1)) == rates(capability=(13, 0)), "as the newest that is known"
    assert rates(capability=(7, 5)) == rates(capability=(8, 0)), "as the oldest"
    assert full.copy_bandwidth == full.of("gpu_stream").nbytes


def test_the_edges_of_a_gpu_run_count() -> None:
    assert unhidden_io_seconds("gpu", 10**9) == 10**9 / EDGE_BYTES
    assert unhidden_io_seconds("cpu", 10**9) == 0


def test_a_measurement_corrects_every_size_of_a_layer() -> None:
    """Stages cost what they cost to start, on top of what was measured."""
    rates = Rates(ROUND.units, stage_seconds=0.5)
    shape, variant = ConvShape(1, 2, 3, (9, 9, 9), (2, 2, 2)), Variant.of(scale=1)
    plain = rates.seconds(SLOW, shape, variant)
    assert not rates.was_measured(SLOW, shape, variant)
    taught = rates.with_measurement(SLOW, shape, variant, 2 * plain)
    assert taught.was_measured(SLOW, shape, variant)
    assert taught.seconds(SLOW, shape, variant) == pytest.approx(0.5 + 2 * plain)
    large = replace(shape, batch=7, n=(30, 9, 20))
    assert taught.seconds(SLOW, large, variant) == pytest.approx(
        0.5 + 2 * plain * prod(large.out_shape) / prod(shape.out_shape)
    )
    assert taught.seconds(FAST, large, variant) == rates.seconds(FAST, large, variant)
    other = Variant.of(scale=2)
    before = taught.seconds(SLOW, shape, other)
    assert taught.with_measurement(SLOW, shape, other, 5 * before).seconds(SLOW, shape, other) == pytest.approx(
        0.5 + 5 * before
    )


def sized(seconds: float) -> ConvShape:
    """Return a layer for which SLOW takes so many seconds by ROUND: 100 times its output values over 100 a second."""
    return ConvShape(round(seconds), 1, 1, (2, 2, 2), (2, 2, 2))


def test_factors_between_sizes_are_interpolated_and_stay_beyond_them() -> None:
    tenfold = Rates(
        {"product": Rate(1e12, 1.0)}, stage_seconds=0.25, by_size={f"{SLOW.name} fp32": (4.0, *(1.0,) * 5, 3.0)}
    )
    variant = Variant.of(scale=1)

    def factor(seconds: float) -> float:
        shape = ConvShape(round(seconds * 1e10), 1, 1, (2, 2, 2), (2, 2, 2))
        assert tenfold.seconds(FAST, shape, variant) == pytest.approx(0.25 + seconds / 10), "its sizes are not known"
        half = replace(shape, precision="fp16")
        assert tenfold.seconds(SLOW, half, variant) == pytest.approx(0.25 + seconds), "nor are those in fp16"
        return (tenfold.seconds(SLOW, shape, variant) - 0.25) / seconds

    assert [factor(size) for size in SIZES] == pytest.approx([4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
    assert factor(SIZES[0] * 5**0.5) == pytest.approx(2.0)
    assert factor(1e-7) == pytest.approx(4.0)
    assert factor(10.0) == pytest.approx(3.0)


def test_fewer_threads_take_longer_for_everything() -> None:
    shape, variant = sized(8.0), Variant.of(scale=1)
    plain = Rates({"product": Rate(100.0, 1e9), "copy": Rate(1e9, 300.0)}, stage_seconds=0.25)
    by_size = replace(plain, by_size={f"{SLOW.name} fp32": (3.0,) * len(SIZES)})
    learnt = by_size.with_measurement(SLOW, sized(20.0), variant, 7.0)
    for rates in (plain, by_size, learnt, replace(learnt, optimism=0.5)):
        fewer = rates.slowed(1.25).slowed(1.2)
        assert fewer.seconds(SLOW, shape, variant) == pytest.approx(1.5 * rates.seconds(SLOW, shape, variant))
        assert fewer.copy_bandwidth == pytest.approx(200.0)
        taught = fewer.with_measurement(SLOW, shape, variant, 6.0).seconds(SLOW, shape, variant)
        assert taught == pytest.approx(1.5 * 0.25 + 6.0), "what was measured was measured with fewer"


def test_between_two_sizes_of_a_layer_count_the_speeds_of_both() -> None:
    variant = Variant.of(scale=1)
    rates = ROUND.with_measurement(SLOW, sized(4), variant, 8.0).with_measurement(SLOW, sized(100), variant, 100.0)
    for size, factor in ((2, 2.0), (4, 2.0), (20, 2**0.5), (100, 1.0), (300, 1.0)):
        assert rates.seconds(SLOW, sized(size), variant) == pytest.approx(factor * size)
    again = rates.with_measurement(SLOW, sized(4), variant, 4.0)
    assert again.seconds(SLOW, sized(20), variant) == pytest.approx(20.0), "the last measurement counts"


def test_what_was_measured_at_another_size_is_not_known_at_this_one() -> None:
    """But for layers of a second and more, which are alike."""
    variant = Variant.of(scale=1)
    fast = replace(ROUND, units={"product": Rate(1e4, 1.0)})
    rates = fast.with_measurement(SLOW, sized(10), variant, 8.0)
    assert rates.was_measured_near(SLOW, sized(14), variant)
    assert not rates.was_measured_near(SLOW, sized(16), variant)
    assert not rates.was_measured_near(FAST, sized(100), variant)
    assert rates.was_measured(SLOW, sized(16), variant)
    long = ROUND.with_measurement(SLOW, sized(2), variant, 8.0)
    assert long.was_measured_near(SLOW, sized(1000), variant)


def test_with_hope_what_is_not_known_may_take_less() -> None:
    variant = Variant.of(scale=1)
    rates = replace(ROUND, units={"product": Rate(1e4, 1.0)}, optimism=0.5, stage_seconds=1.0)
    assert rates.seconds(SLOW, sized(100), variant) == pytest.approx(1.0 + 0.5)
    known = rates.with_measurement(SLOW, sized(100), variant, 3.0)
    assert known.seconds(SLOW, sized(100), variant) == pytest.approx(1.0 + 3.0)
    assert known.seconds(SLOW, sized(10), variant) == pytest.approx(1.0 + 0.5**0.25 * 0.3)
    assert known.seconds(FAST, sized(100), variant) == rates.seconds(FAST, sized(100), variant)


def test_plans_say_what_was_measured(tiny_network: Callable[..., Network]) -> None:
    network = tiny_network(Conv((2, 2, 2), 3), Conv((2, 2, 2), 3), Conv((3, 3, 3), 2))
    shape, variant = ConvShape(1, 3, 3, (9, 9, 9), (2, 2, 2)), Variant.of(scale=1)
    words: dict[str, Any] = {"table": (SLOW,), "baseline": 0}
    first, some, every = CARRYING, CARRYING.with_measurement(SLOW, shape, variant, 1.0), CARRYING
    for fin, fout, k in ((1, 3, 2), (3, 3, 2), (3, 2, 3)):
        every = every.with_measurement(SLOW, ConvShape(1, fin, fout, (9, 9, 9), (k, k, k)), variant, 1.0)
    plans = [
        make_plan(network, (6, 5, 4), MACHINE, limits(2**30), rates=rates, **words) for rates in (first, some, every)
    ]
    assert [[c.measured for c in plan.choices] for plan in plans] == [[False] * 3, [False, True, False], [True] * 3]
    once = plans[1].choices[1]
    assert once.seconds == pytest.approx(prod(once.shape.out_shape) / prod(shape.out_shape))
