"""What was measured of layers is kept between runs, as long as it holds; so is what a GPU refused."""

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
from znnpy.costs.cost_file import FORMAT as COSTS_FORMAT
from znnpy.costs.cost_file import Costs, UnitSpeed
from znnpy.costs.model import GPU_STAGE_SECONDS, assumed_rates
from znnpy.costs.size_trend import SIZES
from znnpy.errors import DeviceError, NoPlanError, VramError
from znnpy.measure import gpu_layers


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
    rates_of(Card())
    newer = [replace(PLAIN, version=2) if p is PLAIN else p for p in TABLE]
    card = Card()
    rates_of(card, newer)
    assert set(measured(card)) == {"gpu.conv.plain"}
    other = Card()
    rates_of(other, machine=replace(WITH_GPU, gpu=replace(GPU, driver=13010)))
    assert other.runs
    assert len(list(folder.iterdir())) == 2
    again = Card()
    rates_of(again)
    assert set(measured(again)) == {"gpu.conv.plain"}, "the file holds what the newer version needed"


@pytest.mark.parametrize("damage", ["cut", "zero", "facts", "not text"])
def test_a_damaged_file_is_written_anew(folder: Path, damage: str) -> None:
    first = rates_of(Card())
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:-20])
    elif damage == "zero":
        content["measurements"][0]["seconds"] = 0.0
        path.write_text(json.dumps(content))
    elif damage == "facts":
        content["facts"]["gpu"] = "another"
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
    folder.write_text("no folder")
    first, second = Card(), Card()
    assert rates_of(first) == rates_of(second)
    assert first.runs == second.runs != []


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


def test_what_is_known_beside_the_file_may_make_another_look_the_fastest() -> None:
    """Then it goes on, though all was measured that should be by what was known before."""
    rates_of(Card())
    rate = assumed_rates(WITH_GPU, 1, "gpu").of("gpu_gemm_float")
    stored = Costs(
        format=COSTS_FORMAT,
        znnpy_version="0",
        device="gpu",
        threads=1,
        machine=WITH_GPU,
        primitives={},
        units={"gpu_gemm_float": UnitSpeed(rate.flops, rate.nbytes, 9)},
        by_size={f"{LAZY.name} tf32": (0.01,) * len(SIZES)},
        stage_seconds=GPU_STAGE_SECONDS,
        layers=(),
    )
    again = Card()
    rates_of(again, stored=stored)
    assert "gpu.conv.lazy" in measured(again)
    third = Card()
    rates_of(third, stored=Costs.from_json(stored.to_json()))
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
    assert set(measured(newer)) == {REFUSES}


@pytest.mark.slow
def test_without_a_way_that_is_not_refused_there_is_no_plan() -> None:
    table = (STUBBORN, *REST)
    with pytest.raises(NoPlanError, match=r"no primitive runs layer 0 .*: gpu\.conv\.stubborn: cuDNN has no plan; "):
        planned(rates_of(Card(), table), table)


def test_memory_that_was_short_once_is_asked_for_again(folder: Path) -> None:
    table = (STUBBORN, *TABLE)
    card = Card(words=VramError("cudaMalloc of 9 bytes was refused"))
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
    card = Card(words=DeviceError("no " * 1000))
    rates = rates_of(card, (STUBBORN, *TABLE))
    assert rates_of(Card(), (STUBBORN, *TABLE)) == rates
    assert {len(reason) for reason in rates.refused.values()} == {gpu_layers.MOST_WORDS}
