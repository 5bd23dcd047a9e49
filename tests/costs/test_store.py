"""The store of measured costs: what one call keeps the next one finds, and no file is ever damaged."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.costs.test_cost_file import LAYER, TABLE, costs
from tests.support.fake_primitives import FAST, MACHINE, WITH_GPU
from znnpy.costs import store as module
from znnpy.costs.cost_file import Costs, Refusal, UnitSpeed
from znnpy.costs.store import NO_CALIBRATION, CostStore, read_stored, stored_path
from znnpy.errors import PlanFileError
from znnpy.layer_shapes import with_batch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "znnpy"


def kept(threads: int = 2) -> Costs:
    found = read_stored(MACHINE, "cpu", threads, TABLE)
    assert found is not None
    return found


def test_what_one_store_keeps_the_next_one_finds(folder: Path) -> None:
    assert CostStore(table=TABLE).of(MACHINE, "cpu", 2) is None
    CostStore(table=TABLE).keep(costs())
    assert CostStore(table=TABLE).of(MACHINE, "cpu", 2) == costs()
    assert CostStore(table=TABLE).of(MACHINE, "cpu", 1) is None, "threads have files of their own"
    assert CostStore(table=TABLE).of(WITH_GPU, "gpu", 2) is None
    assert [path.name for path in folder.iterdir()] == [stored_path(MACHINE, "cpu", 2).name], "no drafts"


def test_measurements_of_two_stores_are_merged() -> None:
    """Each store replaces what it measured again, and nothing else."""
    other = replace(LAYER, shape=with_batch(LAYER.shape, 7))
    refusal = Refusal(FAST.name, FAST.version, LAYER.shape, "no")
    empty = Costs.empty(MACHINE, "cpu", 2, TABLE)
    one, two = CostStore(table=TABLE), CostStore(table=TABLE)
    one.keep(costs())
    two.keep(replace(empty, layers=(other,), refusals=(refusal,)))
    one.keep(replace(empty, layers=(replace(LAYER, seconds=9.0),)))
    found = kept()
    assert found.units == costs().units
    assert (found.by_size, found.stage_seconds) == (costs().by_size, costs().stage_seconds)
    assert found.layers == (other, replace(LAYER, seconds=9.0))
    assert found.refusals == (refusal,)
    assert set(found.rates(TABLE).refused.values()) == {"no"}
    two.keep(replace(empty, units={"copy": UnitSpeed(1e9, 1e9, 1)}, stage_seconds=1e-5))
    assert set(kept().units) == {"product", "copy"}
    assert (kept().by_size, kept().stage_seconds) == ({}, 1e-5), "factors belong to the rates that they came with"


def test_a_file_is_whole_while_others_write_it() -> None:
    empty = Costs.empty(MACHINE, "cpu", 2, TABLE)
    CostStore(table=TABLE).keep(costs())

    def write(first: int) -> None:
        for batch in range(first, first + 20):
            CostStore(table=TABLE).keep(replace(empty, layers=(replace(LAYER, shape=with_batch(LAYER.shape, batch)),)))

    writers = [threading.Thread(target=write, args=(100 * number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert kept().units == costs().units
    for writer in writers:
        writer.join()
    assert len(kept().layers) > 1


def test_a_file_that_grows_too_large_leaves_out_the_oldest_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 6000)
    empty = Costs.empty(MACHINE, "cpu", 2, TABLE)
    for batch in range(1, 20):
        CostStore(table=TABLE).keep(replace(empty, layers=(replace(LAYER, shape=with_batch(LAYER.shape, batch)),)))
    batches = [layer.shape.batch for layer in kept().layers]
    assert batches == list(range(batches[0], 20))
    assert 1 < len(batches) < 19
    assert stored_path(MACHINE, "cpu", 2).stat().st_size <= 6000


def test_files_of_an_older_format_are_not_used_and_a_sentence_says_so() -> None:
    CostStore(table=TABLE).keep(costs())
    path = stored_path(MACHINE, "cpu", 2)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
    store = CostStore(table=TABLE)
    assert store.of(MACHINE, "cpu", 2) is None
    assert store.of(MACHINE, "cpu", 2) is None
    (sentence,) = store.sentences
    assert "this is a cost file of format 3" in sentence
    store.keep(costs())
    assert kept() == costs(), "it is written anew"


def test_a_folder_that_cannot_be_written_is_a_sentence(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    store = CostStore(table=TABLE)
    store.keep(costs())
    (sentence,) = store.sentences
    assert sentence.startswith("what was measured is not kept, and will be measured again: ")


def test_a_named_file_is_used_in_place_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(costs(stage_seconds=1e-4).to_json())
    CostStore(table=TABLE).keep(costs())
    store = CostStore(path, TABLE)
    assert store.of(MACHINE, "cpu", 2) == costs(stage_seconds=1e-4)
    assert store.stored(MACHINE, "cpu", 2) == costs()
    with pytest.raises(PlanFileError, match="the number of threads was 2 and is 3 here"):
        store.of(MACHINE, "cpu", 3)


def test_layers_that_other_threads_copied_for_are_left_out() -> None:
    in_host_ram = replace(LAYER, threads=4)
    found = costs(layers=(in_host_ram,))
    assert found.rates(TABLE, 4).measured
    assert not found.rates(TABLE, 2).measured


def test_calibration_is_off_where_the_environment_or_a_machine_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "there.json"
    path.write_text(costs().to_json())
    assert not CostStore(calibrate=True).calibrate, "tests measure nothing"
    monkeypatch.delenv(NO_CALIBRATION)
    assert CostStore(calibrate=True).calibrate
    assert not CostStore(calibrate=False).calibrate
    assert not CostStore(machine=path, calibrate=True).calibrate
