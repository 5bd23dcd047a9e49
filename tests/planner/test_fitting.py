"""Rates fitted to runs: what made them up is found again, and what no run depends on stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from znnpy.kernels.primitive import Work
from znnpy.planner.cost import CPU_RATES, Rates, seconds
from znnpy.planner.fitting import Run, fitted, units_of

TRUE = (
    Rates()
    .scaled(1.0, 1.0)
    .replaced(
        product=CPU_RATES["product"].times(0.4, 1.0),
        fft=CPU_RATES["fft"].times(2.5, 1.0),
        copy=CPU_RATES["copy"].times(1.0, 0.6),
    )
)


def works() -> list[tuple[Work, ...]]:
    """Of layers that mix three units, in sizes of which some are bound by arithmetic and some by memory."""
    rng = np.random.default_rng(20261121)
    return [
        (
            Work("fft", float(rng.uniform(1e9, 1e11)), 0.0),
            Work("product", float(rng.uniform(1e9, 1e12)), 0.0),
            Work("copy", 0.0, float(rng.uniform(1e8, 1e10))),
        )
        for _ in range(40)
    ]


def test_the_rates_that_runs_were_made_with_are_found() -> None:
    runs = [Run(work, seconds(work, TRUE)) for work in works()]
    found = fitted(Rates(), runs)
    assert found.of("product").flops == pytest.approx(TRUE.of("product").flops, rel=0.05)
    assert found.of("fft").flops == pytest.approx(TRUE.of("fft").flops, rel=0.05)
    assert found.of("copy").nbytes == pytest.approx(TRUE.of("copy").nbytes, rel=0.05)
    assert found.fitted
    assert units_of(runs) == ("fft", "product", "copy")


def test_what_no_run_depends_on_stays_as_it_was_assumed() -> None:
    found = fitted(Rates(), [Run(work, seconds(work, TRUE)) for work in works()])
    assert found.of("pool") == CPU_RATES["pool"]
    assert found.of("product").nbytes == pytest.approx(CPU_RATES["product"].nbytes)
    assert fitted(Rates(), []) == Rates(), "nothing was measured, and nothing says so"


def test_a_disturbed_run_moves_the_rates_little() -> None:
    runs = [Run(work, seconds(work, TRUE)) for work in works()]
    runs[7] = replace(runs[7], seconds=30 * runs[7].seconds)
    found = fitted(Rates(), runs)
    assert found.of("product").flops == pytest.approx(TRUE.of("product").flops, rel=0.1)
    assert found.of("fft").flops == pytest.approx(TRUE.of("fft").flops, rel=0.1)
