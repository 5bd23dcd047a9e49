"""Measurements of layers are kept between runs as long as they hold; so are refusals of a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_primitives import GPU, WITH_GPU
from tests.support.simulated_timing import (
    LAZY,
    PLAIN,
    PRAISED,
    REFUSES,
    REST,
    STUBBORN,
    TABLE,
    Card,
    Timed,
    measured,
    own_cache,
    planned,
    rates_of,
)
from znnpy.costs.cost_file import MOST_REASON, Costs, UnitSpeed
from znnpy.costs.model import assumed_rates
from znnpy.costs.size_trend import SIZES
from znnpy.costs.store import CostStore
from znnpy.errors import DeviceError, NoPlanError, VramError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_cache(tmp_path, monkeypatch)


def test_measured_once_and_kept(folder: Path) -> None:
    first = rates_of(Card())
    card = Card()
    assert rates_of(card) == first
    assert card.runs == []
    assert len(list(folder.iterdir())) == 1
    half = Card()
    rates_of(half, precision="fp16")
    assert half.runs, "another precision is another layer"
    assert rates_of(Card()).measured.keys() > first.measured.keys()


def test_what_does_not_hold_here_is_measured_again(folder: Path) -> None:
    """Costs of another version of a primitive, or of another driver, say nothing; a sentence says so."""
    rates_of(Card())
    newer = [replace(PLAIN, version=2) if p is PLAIN else p for p in TABLE]
    card, store = Card(), CostStore(table=newer)
    rates_of(card, newer, store=store)
    assert "gpu.conv.plain" in measured(card)
    assert "the version of gpu.conv.plain was 1 and is 2 here" in store.sentences[0]
    other = Card()
    rates_of(other, newer, machine=replace(WITH_GPU, gpu=replace(GPU, driver=13010)))
    assert other.runs
    assert len(list(folder.iterdir())) == 1
    renamed = Card()
    rates_of(renamed, newer, machine=replace(WITH_GPU, gpu=replace(GPU, name="another")))
    assert renamed.runs
    assert len(list(folder.iterdir())) == 2, "one file for each kind of GPU"


@pytest.mark.parametrize("damage", ["cut", "zero", "machine", "not text"])
def test_a_damaged_file_is_written_anew(folder: Path, damage: str) -> None:
    first = rates_of(Card())
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:-20])
    elif damage == "zero":
        content["samples"][0]["seconds"] = 0.0
        path.write_text(json.dumps(content))
    elif damage == "machine":
        content["machine"]["gpu"]["name"] = "another"
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(b"\x89\xff\x00")
    card = Card()
    assert rates_of(card) == first
    assert card.runs
    silent = Card()
    assert rates_of(silent) == first
    assert silent.runs == []


def test_a_cache_that_cannot_be_written(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("no folder")
    first, second, store = Card(), Card(), CostStore(table=TABLE)
    assert rates_of(first) == rates_of(second, store=store)
    assert first.runs == second.runs != []
    assert "what was measured is not kept" in store.sentences[0]


@pytest.mark.parametrize("groups", [1, 20])
def test_once_all_was_tried_nothing_is_measured_anew(groups: int) -> None:
    """Though there were more variants than are tried, and what is learnt of a slab tells of a cube too."""
    many = Timed("gpu.conv.counted", "conv", flops=1e6, groups=tuple(range(groups)), same=True)
    table = (PRAISED, PLAIN, many, *REST)
    first, second, third = Card(), Card(), Card()
    rates = rates_of(first, table)
    assert rates_of(second, table) == rates
    assert second.runs == []
    rates_of(third, table, vram_bytes=2**31)
    assert bool(third.runs) == (groups > 1), "more may fit into more memory: it goes on"


def test_other_rates_of_units_may_make_another_method_look_the_fastest() -> None:
    """Then timing goes on, though all was timed that should be by the rates before."""
    rates_of(Card())
    rate = assumed_rates(WITH_GPU, 1, "gpu").of("gpu_gemm_float")
    empty = Costs.empty(WITH_GPU, "gpu", 1, TABLE)
    store = CostStore(table=TABLE)
    store.keep(
        replace(
            empty,
            units={"gpu_gemm_float": UnitSpeed(rate.flops, rate.nbytes, 9)},
            by_size={f"{LAZY.name} tf32": (0.01,) * len(SIZES)},
        )
    )
    again = Card()
    rates_of(again)
    assert "gpu.conv.lazy" in measured(again)
    third = Card()
    rates_of(third)
    assert third.runs == []


def test_what_no_time_was_left_for_is_measured_the_next_time() -> None:
    first, second = Card(), Card()
    rates = rates_of(first, seconds=1e-9)
    more = rates_of(second)
    assert second.runs
    assert more.measured.keys() > rates.measured.keys()


@pytest.mark.slow
def test_what_the_gpu_refuses_is_never_planned_nor_tried_again(folder: Path) -> None:
    table = (STUBBORN, *TABLE)
    assert planned(assumed_rates(WITH_GPU, 1, "gpu"), table) == {REFUSES}
    card = Card()
    rates = rates_of(card, table)
    assert measured(card).count(REFUSES) == 3, "once for each convolution, and once with a pooling, of all variants"
    assert set(rates.refused.values()) == {"cuDNN has no plan"}
    assert REFUSES not in planned(rates, table)
    assert {"gpu.conv.plain", "gpu.conv.praised"} & set(measured(card)), "the others are measured"
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text())["refusals"]
    assert {(no["primitive"], no["reason"]) for no in kept} == {(REFUSES, "cuDNN has no plan")}
    again = Card()
    assert rates_of(again, table) == rates
    assert again.runs == []
    half = Card()
    rates_of(half, table, precision="fp16")
    assert REFUSES in measured(half), "another precision is another layer"
    newer = Card()
    rates_of(newer, (replace(STUBBORN, version=2), *TABLE))
    assert REFUSES in measured(newer)


@pytest.mark.slow
def test_without_a_way_that_is_not_refused_there_is_no_plan() -> None:
    table = (STUBBORN, *REST)
    with pytest.raises(NoPlanError, match=r"no primitive runs layer 0 .*: gpu\.conv\.stubborn: cuDNN has no plan; "):
        planned(rates_of(Card(), table), table)


def test_memory_that_was_short_once_is_asked_for_again(folder: Path) -> None:
    table = (STUBBORN, *TABLE)
    card = Card(refusal=VramError("cudaMalloc of 9 bytes was refused"))
    rates = rates_of(card, table)
    assert set(rates.refused.values()) == {"cudaMalloc of 9 bytes was refused"}
    assert REFUSES not in planned(rates, table)
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["refusals"] == []
    again = Card()
    rates_of(again, table)
    assert set(measured(again)) == {REFUSES}


def test_a_gpu_that_runs_nothing_any_more_is_no_refusal_to_keep(folder: Path) -> None:
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        rates_of(Card(broken=True), (STUBBORN, *TABLE))
    assert not folder.exists()


def test_long_words_of_a_refusal_are_kept_in_part() -> None:
    card = Card(refusal=DeviceError("no " * 1000))
    rates = rates_of(card, (STUBBORN, *TABLE))
    assert rates_of(Card(), (STUBBORN, *TABLE)) == rates
    assert {len(reason) for reason in rates.refused.values()} == {MOST_REASON}
