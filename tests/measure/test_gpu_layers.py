"""Layers measured before a plan is made: what looks the fastest is run, until it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_primitives import WITH_GPU
from tests.support.simulated_timing import (
    FACTORS,
    LAZY,
    LINK,
    PLAIN,
    PRAISED,
    REST,
    TABLE,
    Card,
    Timed,
    measured,
    own,
    own_cache,
    rates_of,
)
from znnpy.costs import store
from znnpy.costs.model import GPU_STAGE_SECONDS, Rate, Rates, assumed_rates
from znnpy.kernels.contract import Unit, Variant, Work
from znnpy.layer_shapes import LayerShape
from znnpy.measure import gpu_layers
from znnpy.measure.layer_timer import LONG_SECONDS
from znnpy.shapes import ConvShape


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_cache(tmp_path, monkeypatch)


def test_what_looks_fastest_is_measured_until_it_is_the_fastest() -> None:
    """PRAISED is assumed three times as fast as PLAIN, and is six times as slow as that; nobody would take LAZY."""
    card = Card()
    rates = rates_of(card)
    names = measured(card)
    assert names.count("gpu.conv.praised") == 3, "two convolutions, and one that pools"
    assert names.count("gpu.conv.plain") == 2
    assert names.count("gpu.conv.lazy") == 0
    assert {name for name in names if "conv" not in name} == {p.name for p in REST}
    variant = PLAIN.variants(card.runs[0][1], WITH_GPU)[0]
    for n in (9, 40):
        shape = ConvShape(3, 1, 6, (n, n, n), (3, 2, 2), "relu", precision="tf32")
        for primitive in (PRAISED, PLAIN):
            assert rates.was_measured(primitive, shape, variant)
            assert rates.seconds(primitive, shape, variant) == pytest.approx(
                GPU_STAGE_SECONDS + FACTORS[primitive.name] * own(primitive, shape, variant), rel=0.1
            )
        assert not rates.was_measured(LAZY, shape, variant)


def test_the_link_is_timed_by_itself_and_once_for_a_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that stream their weights do not change it, and it is timed alone if everything else was kept."""
    rates = rates_of(Card())
    assert rates.of("gpu_link").nbytes == pytest.approx(LINK)
    assert "gpu_link" in rates.fitted
    with monkeypatch.context() as patched:
        patched.setattr(gpu_layers, "_link_speed", lambda *_: pytest.fail("timed anew"))
        assert rates_of(Card()) == rates
        patched.setattr(gpu_layers, "_link_speed", lambda *_: 2e9)
        patched.setattr("platform.node", lambda: "another host")
        assert rates_of(Card()).of("gpu_link").nbytes == 2e9
    (path,) = folder.glob("costs-gpu-*.json")
    kept = json.loads(path.read_text())
    assert len(kept.pop("links")) == 2
    path.write_text(json.dumps(kept))
    card = Card()
    assert rates_of(card) == rates
    assert not card.runs, "all but the link was there"


def test_a_file_that_grows_too_large_leaves_out_what_is_oldest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is settled after that; the link is kept."""
    monkeypatch.setattr(store, "MOST_BYTES", 4000)
    rates_of(Card())
    (path,) = folder.glob("costs-gpu-*.json")
    kept = json.loads(path.read_text())
    assert kept["samples"]
    assert kept["settled"] == {}
    assert len(kept["links"]) == 1
    card = Card()
    rates_of(card)
    assert 0 < len(measured(card)) < 8


def test_a_link_that_was_timed_in_little_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gpu_layers, "_link_speed", lambda *_: 1.0)
        assert rates_of(Card(), vram_bytes=2**20).of("gpu_link").nbytes == 1.0
    assert rates_of(Card()).of("gpu_link").nbytes == pytest.approx(LINK)


def test_rates_of_units_are_fitted_to_the_layers() -> None:
    """The fitted rates also predict layers that carry planes, and a layer of another network."""
    rates = rates_of(Card(), (PLAIN, *REST))
    assumed = assumed_rates(WITH_GPU, 1, "gpu")
    other = ConvShape(1, 7, 9, (30, 30, 30), (5, 5, 5), "none", precision="tf32")
    (variant,) = PLAIN.variants(other, WITH_GPU)
    assert not rates.was_measured(PLAIN, other, variant)
    assert rates.seconds(PLAIN, other, variant) == pytest.approx(1.5 * assumed.seconds(PLAIN, other, variant), rel=0.1)
    assert rates.of("gpu_gemm_float").flops < 0.9 * assumed.of("gpu_gemm_float").flops


def test_a_kernel_turned_to_another_axis_is_the_same_layer() -> None:
    rates = rates_of(Card())
    turned = ConvShape(3, 1, 6, (9, 9, 9), (2, 3, 2), "relu", precision="tf32")
    assert rates.was_measured(PLAIN, turned, Variant.of(tile=(1, 1, 1), group=1))
    for other in (
        replace(turned, precision="fp32"),
        replace(turned, fout=7),
        replace(turned, k=(3, 3, 2)),
        replace(turned, activation="none"),
    ):
        assert not rates.was_measured(PLAIN, other, Variant.of(tile=(1, 1, 1), group=1))


def test_no_longer_than_it_may() -> None:
    few, none = Card(), Card()
    rates_of(few, seconds=1e-9)
    assert len(set(measured(few))) == 1, "the first one tells that there is no time left"
    rates = rates_of(none, vram_bytes=10)
    assert none.runs == []
    assert set(rates.measured) == {calibration_case(few)}


def calibration_case(card: Card) -> Any:
    from znnpy.costs.model import layer_key

    name, shape, variant = card.runs[0]
    return layer_key(next(p for p in TABLE if p.name == name), shape, variant)


def test_long_layers_on_small_volumes() -> None:
    slow = replace(PLAIN, flops=1e12)
    card = Card()
    rates_of(card, (slow, *REST), seconds=1e9)
    sides = {max(shape.out) for name, shape, _ in card.runs if name == slow.name}
    assert sides == {4}
    others = {max(shape.in_shape[1:4]) for name, shape, _ in card.runs if name == "gpu.maxout.all"}
    assert others == {10}


def test_memory_of_the_process_is_not_locked_before_a_plan_promises_it() -> None:
    card = Card()
    rates_of(card, (replace(PRAISED, host=1), PLAIN, *REST))
    assert PLAIN.name in measured(card)
    assert PRAISED.name not in measured(card)


def test_variants_that_differ_in_how_much_they_do_at_a_time() -> None:
    """One of them tells of the others; where their work is the same, each is measured."""
    tiles = ((1, 1, 1), (1, 2, 1), (5, 5, 5))
    counted = Timed("gpu.conv.counted", "conv", flops=1e6, tiles=tiles, groups=(1, 8, 64))
    card = Card()
    rates = rates_of(card, (counted, *REST))
    one = [variant for name, shape, variant in card.runs if name == counted.name and shape.in_shape[4] == 1]
    assert {str(v) for v in one} == {"group=1 tile=1x1x1", "group=1 tile=1x2x1"}, "the first takes 2.5 times as long"
    shape = ConvShape(1, 1, 6, (99, 9, 9), (3, 2, 2), "relu", precision="tf32")
    for variant in counted.variants(shape, WITH_GPU):
        expected = GPU_STAGE_SECONDS + 2.5 * own(counted, shape, variant)
        assert rates.seconds(counted, shape, variant) == pytest.approx(expected, rel=1e-3)
    blind = Timed("gpu.conv.counted", "conv", version=2, flops=1e6, groups=(1, 8, 64), same=True)
    card = Card()
    rates_of(card, (blind, *REST))
    one = [variant for name, shape, variant in card.runs if name == blind.name and shape.in_shape[4] == 1]
    assert {v.count("group") for v in one} == {1, 8, 64}


def test_slabs_are_measured_where_another_tile_suits_them() -> None:
    """Thin steps of columns want flat tiles: what is measured on cubes alone would not tell of those."""

    @dataclass(frozen=True, slots=True)
    class Tiled(Timed):
        def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
            covered = prod(-(-n // tile) * tile for n, tile in zip(shape.out, variant.size("tile"), strict=True))
            return (Work("gpu_gemm_float", 1e6 * covered, 0.0),)

    tiled = Tiled("gpu.conv.tiled", "conv", tiles=((5, 5, 5), (2, 10, 10)))
    card = Card()
    rates = rates_of(card, (tiled, *REST))
    seen = {(shape.out, str(variant)) for name, shape, variant in card.runs if name == tiled.name}
    assert seen == {((10, 10, 10), "group=1 tile=5x5x5"), ((2, 20, 20), "group=1 tile=2x10x10")}
    shape = ConvShape(1, 1, 6, (9, 9, 9), (3, 2, 2), "relu", precision="tf32")
    assert all(rates.was_measured(tiled, shape, variant) for variant in tiled.variants(shape, WITH_GPU))


def test_every_kind_of_units_that_looks_nearly_as_fast_is_measured() -> None:
    """Rates of units are off by factors of their own: what looks second best may be the best by far."""

    @dataclass(frozen=True, slots=True)
    class Kinds(Timed):
        def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
            unit: Unit = ("gpu_fft16", "gpu_fft24", "gpu_fft32")[variant.count("group")]
            slower = (1.0, 1.3, 9.0)[variant.count("group")] * prod(variant.size("tile"))
            rate = assumed_rates(WITH_GPU, 1, "gpu").of(unit).flops
            return (Work(unit, 1e-6 * slower * rate * prod(shape.out_shape), 0.0),)

    kinds = Kinds("gpu.conv.plain", "conv", tiles=((1, 1, 1), (1, 1, 2)), groups=(0, 1, 2))
    card = Card()
    rates = rates_of(card, (kinds, *REST))
    cubes = [str(variant) for name, shape, variant in card.runs if name == kinds.name and shape.in_shape[4] == 1]
    assert set(cubes) == {"group=0 tile=1x1x1", "group=1 tile=1x1x1"}, "the best of each kind, none that is far behind"
    before = len(card.runs)
    assert rates_of(card, (kinds, *REST)) == rates
    assert len(card.runs) == before


def test_large_volumes_and_small_ones_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layers, "VOLUMES", ((1, (10, 8), LONG_SECONDS), (8, (4, 2), LONG_SECONDS)))
    card = Card()
    rates = rates_of(card, (PLAIN, *REST), seconds=1e9)
    cubes = {shape.out for name, shape, _ in card.runs if name == PLAIN.name and shape.in_shape[4] == 1}
    assert {(10, 10, 10), (4, 4, 4)} <= cubes
    before = len(card.runs)
    assert rates_of(card, (PLAIN, *REST), seconds=1e9) == rates, "both are kept"
    assert len(card.runs) == before


def test_likeness_of_what_was_not_measured() -> None:
    """A measurement of the layer itself counts before others, equal parameters before unequal ones."""
    shape = ConvShape(1, 4, 4, (20, 20, 20), (3, 3, 3), precision="tf32")
    many = Timed("gpu.conv.many", "conv", flops=1e6, tiles=((1, 1, 1), (2, 2, 2)), groups=(1, 8))
    rates = Rates({"gpu_gemm_float": Rate(1e12, 1e12)}, stage_seconds=0.0)
    small, large = (Variant.of(tile=(n, n, n), group=1) for n in (1, 2))

    def factor(of: Rates, shape: ConvShape, variant: Variant) -> float:
        return of.seconds(many, shape, variant) / rates.seconds(many, shape, variant)

    taught = rates.with_measurement(many, shape, small, 3 * rates.seconds(many, shape, small))
    taught = taught.with_measurement(many, shape, large, 12 * rates.seconds(many, shape, large))
    assert factor(taught, shape, small) == pytest.approx(3)
    assert factor(taught, shape, Variant.of(tile=(1, 1, 1), group=8)) == pytest.approx(3, rel=0.05)
    both = factor(taught, shape, Variant.of(tile=(3, 3, 3), group=1))
    assert 6 < both < 12, "of both with group=1, and the larger the slower"
    assert factor(taught, shape, Variant.of(tile=(1, 2, 1), group=8)) < 5, "like the first along two axes"
    assert factor(taught, shape, Variant.of(tile=(2, 2, 1), group=1)) > 9, "like the second along two"
    wide = replace(shape, fin=8)
    assert factor(taught, wide, large) == pytest.approx(12)
    assert factor(taught, replace(wide, precision="fp16"), large) == 1
    taught = taught.with_measurement(many, wide, large, 50 * rates.seconds(many, wide, large))
    assert factor(taught, wide, small) == pytest.approx(50), (
        "the layer itself, however it was run, before another layer"
    )
