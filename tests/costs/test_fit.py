"""Rates fitted to runs: what made them up is found again, and what no run depends on stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from znnpy.costs.fit import Run, fitted, units_of
from znnpy.costs.model import CPU_RATES, Rates, seconds
from znnpy.costs.size_trend import SIZES, interpolation_weights
from znnpy.kernels.contract import Work

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
    """Return the work of layers that mix three units: some are bound by arithmetic, others by memory."""
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
    assert found.of("product").flops == pytest.approx(TRUE.of("product").flops, rel=0.1)
    assert found.of("fft").flops == pytest.approx(TRUE.of("fft").flops, rel=0.12)
    assert found.of("copy").nbytes == pytest.approx(TRUE.of("copy").nbytes, rel=0.15)
    assert found.fitted == {"product", "fft", "copy"}
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


def sized(small: float, large: float, name: str, seed: int = 20261121) -> list[Run]:
    """Return runs of 1 µs to 1 s of a primitive: short ones take `small` times what is predicted, long ones `large`."""
    rng = np.random.default_rng(seed)
    runs = []
    for size in np.exp(rng.uniform(np.log(1e-6), 0.0, 60)):
        index, share = interpolation_weights(float(size))
        along = (index + share) / (len(SIZES) - 1)
        factor = small ** (1 - along) * large**along
        runs.append(Run((Work("product", CPU_RATES["product"].flops * float(size), 0.0),), factor * float(size), name))
    return runs


def test_sizes_of_a_primitive_have_factors_of_their_own() -> None:
    runs = [*sized(3.0, 1.0, "one"), *sized(0.5, 1.0, "other", seed=7)]
    found = fitted(Rates(stage_seconds=0.0), runs)
    for name, small in (("one", 3.0), ("other", 0.5)):
        for run in sized(small, 1.0, name, seed=11):
            (work,) = run.work
            index, share = interpolation_weights(work.flops / found.of("product").flops)
            below, above = found.by_size[name][index : index + 2]
            predicted = work.flops / found.of("product").flops * below ** (1 - share) * above**share
            assert predicted == pytest.approx(run.seconds, rel=0.1)


def test_a_size_that_nothing_was_measured_at_is_as_the_next() -> None:
    runs = [run for run in sized(2.0, 2.0, "one") if run.seconds > 1e-3]
    found = fitted(Rates(stage_seconds=0.0), [*runs, *sized(1.0, 1.0, "other")]).by_size["one"]
    assert found[0] == pytest.approx(found[3], rel=0.15)
    assert found[0] > 1.25


def test_larger_layers_never_take_less_time() -> None:
    """Sizes grow by 5 and factors fall by less, whatever the runs said."""
    found = fitted(Rates(stage_seconds=0.0), [*sized(60.0, 1 / 60, "one"), *sized(1.0, 1.0, "other")]).by_size["one"]
    assert found[0] > 3 * found[-1]
    for (small, below), (large, above) in pairwise(zip(SIZES, found, strict=True)):
        assert large * above > small * below


@pytest.mark.parametrize("begins", [True, False])
def test_what_stages_take_to_begin_is_fitted_where_runs_count_it(begins: bool) -> None:
    rng = np.random.default_rng(20261121)
    runs = [
        Run(stages, (2e-5 * len(stages) if begins else 0.0) + sum(w.flops for w in stages) / CPU_RATES["product"].flops)
        for size in np.exp(rng.uniform(np.log(1e5), np.log(1e10), 40))
        for stages in [(Work("product", float(size), 0.0),) * int(rng.integers(1, 5))]
    ]
    found = fitted(Rates(stage_seconds=1e-4), runs, begins=begins)
    assert found.stage_seconds == pytest.approx(2e-5 if begins else 1e-4, rel=0.1)
    assert found.of("product").flops == pytest.approx(CPU_RATES["product"].flops, rel=0.05)


def test_rates_are_of_runs_that_are_long_enough() -> None:
    """Short ones take ten times as long as their work: that is their start, and no rate."""
    bare = replace(TRUE, stage_seconds=0.0)
    large = [(Work("copy", 0.0, nbytes),) for nbytes in (3e7, 1e8, 3e8)]
    small = [(Work("copy", 0.0, nbytes),) for nbytes in np.geomspace(1e4, 1e5, 12)]
    runs = [Run(work, seconds(work, bare), "m") for work in large]
    runs += [Run(work, 10 * seconds(work, bare), "m") for work in small]
    found = fitted(Rates(), runs, begins=False)
    assert found.of("copy").nbytes == pytest.approx(TRUE.of("copy").nbytes, rel=0.2)
    assert found.by_size["m"][0] > 2 * found.by_size["m"][-1]


def test_beyond_its_longest_run_a_primitive_goes_on_as_there() -> None:
    """Runs end between two sizes, and the last are quicker: that slope is not carried on to where nothing ran."""
    runs = sized(1.0, 1.0, "other")
    for size, factor in ((5e-4, 1.0), (2.5e-3, 1.0), (0.012, 1.0), (0.013, 1.0), (0.02, 0.8), (0.021, 0.8)):
        runs.append(Run((Work("product", CPU_RATES["product"].flops * size, 0.0),), factor * size, "one"))
    found = fitted(Rates(stage_seconds=0.0), runs).by_size["one"]
    assert found[-1] == pytest.approx(found[-2])
    assert 0.75 < found[-1] < 1.0
