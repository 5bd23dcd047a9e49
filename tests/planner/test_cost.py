"""Seconds from work and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import MACHINE

from znnpy.kernels.primitive import Unit, Work
from znnpy.planner.cost import Rate, Rates, assumed_rates, seconds

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
