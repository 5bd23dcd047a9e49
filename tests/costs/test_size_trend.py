"""Factors by size: between measurements, and beyond them as the layer's other variants go on."""

from __future__ import annotations

import pytest

from znnpy.costs.size_trend import SIZES, Trend, interpolated

SMALL, LARGE = 1e-4, 1.25e-2


def test_between_sizes_factors_are_interpolated_by_logarithms() -> None:
    factors = (1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 8.0)
    assert interpolated(factors, SIZES[1]) == pytest.approx(1)
    assert interpolated(factors, (SIZES[1] * SIZES[2]) ** 0.5) == pytest.approx(2)
    assert interpolated(factors, SIZES[0] / 100) == pytest.approx(1)
    assert interpolated(factors, SIZES[-1] * 100) == pytest.approx(8)


def test_what_was_measured_stays_and_lies_between() -> None:
    known = ((SMALL, 0.5), (LARGE, 2.0))
    trend = Trend([known, ((SMALL, 7.0),)])
    assert trend.at(known, SMALL) == pytest.approx(0.5)
    assert trend.at(known, LARGE) == pytest.approx(2)
    assert trend.at(known, (SMALL * LARGE) ** 0.5) == pytest.approx(1)


def test_a_variant_known_on_a_small_volume_goes_on_as_the_others_of_its_layer() -> None:
    """Small volumes take half of what is expected and large ones twice: so does a variant that ran on a small one."""
    small = ((SMALL, 0.6),)
    trend = Trend([small, ((SMALL, 0.5), (LARGE, 2.0)), ((SMALL, 0.4), (LARGE, 1.6))])
    assert trend.at(small, LARGE) == pytest.approx(0.6 * 4.0, rel=0.2)
    assert trend.at(small, 100 * LARGE) == pytest.approx(trend.at(small, LARGE), rel=0.1)


def test_a_difference_between_variants_is_no_trend() -> None:
    slow, fast = ((LARGE, 4.0),), ((1.1 * LARGE, 1.0),)
    trend = Trend([slow, fast])
    assert trend.at(slow, 1.1 * LARGE) == pytest.approx(4, rel=0.05)
    assert trend.at(slow, SMALL) == pytest.approx(4, rel=0.1)


def test_one_measurement_holds_at_all_sizes() -> None:
    trend = Trend([((SMALL, 3.0),)])
    for size in (*SIZES, 1e-9, 1e3):
        assert trend.at(((SMALL, 3.0),), size) == pytest.approx(3)
