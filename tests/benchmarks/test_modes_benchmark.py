"""benchmarks/modes.py runs, once and tiny, on an emulated GPU."""

from __future__ import annotations

import json
import mmap
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.benchmark_networks import TINY
from tests.support.emulator import EMULATED_GPU, EmulatedDevice, compiler
from znnpy.kernels.gpu import device
from znnpy.kernels.gpu.moves import Moves
from znnpy.machine import Limits, this_machine
from znnpy.network import Conv, Network
from znnpy.planner.cost_model import assumed_rates
from znnpy.planner.search import make_plan
from znnpy.run import devices, gpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODES = ["gpu", "cpu", "gpu-host", "cpu-to-gpu", "side-by-side"]


@pytest.fixture
def words(imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a call, where a GPU is about as slow as the processor."""
    for room in (devices, device):
        monkeypatch.setattr(room, "find_gpu", lambda: EMULATED_GPU)
    monkeypatch.setattr(devices, "Device", EmulatedDevice)
    slow = assumed_rates
    monkeypatch.setattr(
        devices, "measured_rates", lambda of, machine, *_, **words: slow(machine, 1, "gpu").scaled(1e-4, 1e-4)
    )
    monkeypatch.setattr(imported("modes"), "apart", lambda work, asked, alone: work(asked))
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["--networks", str(tmp_path / "tiny.yaml"), "--quick", "--side", "26", "--vram", "900M", "--threads", "1"]
    return [*words, "--out", str(tmp_path / "modes.json")]


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_every_mode(
    imported: Callable[[str], Any], tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    modes, out = imported("modes"), tmp_path / "modes.json"
    modes.main(words)
    found = json.loads(out.read_text())
    rows = {row["mode"]: row for row in found["rows"]}
    assert list(rows) == MODES
    for mode, row in rows.items():
        assert row["failure"] is None, row["failure"]
        assert row["plan"]["network_name"] == "tiny"
        assert row["not_written"] == 0
        assert row["apart"] < 2e-5
        assert row["voxels_per_second"] > 0
        assert row["promised_ram_bytes"] > 0
        assert set(row["given_up"]) <= {"CPU"}
        assert set(row["lanes"]) == ({"GPU", "CPU"} if mode == "side-by-side" else {"CPU" if mode == "cpu" else "GPU"})
        assert set(row["busy"]) == ({"GPU", "CPU"} if mode == "cpu-to-gpu" else set())
        assert all(0 < share <= 1 for share in row["busy"].values())
    assert rows["cpu"]["vram"] == ""
    assert rows["gpu-host"]["plan"]["hosted"] > 0
    assert len(found["gains"]) == 3
    assert "of what the processor adds at most" in found["gains"][2]
    assert "measured" in capsys.readouterr().out
    modes.main([*words, "--resume"])
    assert json.loads(out.read_text())["rows"] == found["rows"]
    assert "measured" not in capsys.readouterr().out


@pytest.mark.parametrize("all_timed", [True, False])
def test_planning_ends_where_all_layers_were_timed(
    imported: Callable[[str], Any],
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    all_timed: bool,
) -> None:
    modes = imported("modes")

    def timed(asked: Any) -> Any:
        return {
            name: {on: rates.slowed(2 - all_timed) for on, rates in known.items()} for name, known in asked[1].items()
        }

    monkeypatch.setattr(modes, "timed", timed)
    modes.main([*words, "--modes", "gpu"])
    (row,) = json.loads((tmp_path / "modes.json").read_text())["rows"]
    assert len(row["planned_before"]) == (0 if all_timed else 1)
    assert row["all_timed"] == all_timed


def test_what_a_process_takes_beside_what_it_has(imported: Callable[[str], Any]) -> None:
    """The pages are mapped here: an array's memory may come from what the process has already."""
    with mmap.mmap(-1, 2**26) as had, imported("modes_runs").Taken(pause=0.001) as taken:
        with mmap.mmap(-1, 2**25) as more:
            for _ in range(2**9):
                more.write(bytes(2**16))
            time.sleep(0.1)
        time.sleep(0.1)
        assert len(had) == 2**26
    assert taken.most_bytes == pytest.approx(2**25, rel=0.1)


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_no_turn_begins_in_the_second_half_of_the_time(
    imported: Callable[[str], Any], tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned until then is there, when a process ends within a turn too."""
    modes, out, now = imported("modes"), tmp_path / "modes.json", [0.0]
    monkeypatch.setattr(modes.time, "monotonic", lambda: now[0])
    planned, runs = modes.planned, modes.run_all

    def slowly(asked: Any) -> Any:
        now[0] += 40.0
        return planned(asked)

    def ended(in_what: str) -> Any:
        raise InterruptedError(in_what)

    monkeypatch.setattr(modes, "planned", slowly)
    monkeypatch.setattr(modes, "timed", lambda _: ended("a turn"))
    monkeypatch.setattr(modes, "run_all", lambda *_: ended("the runs"))
    for minutes, in_what in (("1.5", "a turn"), ("1", "the runs")):
        now[0] = 0.0
        out.unlink(missing_ok=True)
        with pytest.raises(InterruptedError, match=in_what):
            modes.main([*words, "--modes", "gpu", "--minutes", minutes])
        (row,) = json.loads(out.read_text())["rows"]
        assert row["planned_before"] == []
        assert not row["all_timed"]
    monkeypatch.setattr(modes, "run_all", runs)
    modes.main([*words, "--modes", "gpu", "--resume"])
    (run,) = json.loads(out.read_text())["rows"]
    assert run["plan"] == row["plan"]
    assert run["voxels_per_second"] > 0


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_what_moves_voxels_is_compiled_before_the_clock_starts(
    imported: Callable[[str], Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no first run is left out."""
    modes, runs, seen = imported("modes"), imported("modes_runs"), []
    real = runs.pipeline.run_lanes

    class Compiled(Moves):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            seen.append("compiled")

    def run_lanes(lanes: Any, *rest: Any) -> Any:
        seen.extend("begins" for lane in lanes if lane.name == "GPU")  # not the processor's, which makes the corner
        return real(lanes, *rest)

    monkeypatch.setattr(gpu, "Moves", Compiled)
    monkeypatch.setattr(runs.pipeline, "run_lanes", run_lanes)
    monkeypatch.setattr(runs, "WARM_SECONDS", 0.0)
    modes.main([*words, "--modes", "gpu", "gpu-host", "cpu-to-gpu", "side-by-side"])
    assert seen == ["compiled", "begins"] * 4


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_outputs_are_held_against_the_definition_where_asked(
    imported: Callable[[str], Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run goes on only with what it was begun with."""
    modes, asked = imported("modes"), []

    def far(what: tuple[str, int]) -> Any:
        asked.append(what)
        return np.full((2, 2, 2, 2), 1e3)

    def apart(work: Callable[[Any], Any], what: Any, *, alone: bool) -> Any:
        assert alone or work is not far, "PyTorch would keep memory of the GPU"
        return work(what)

    monkeypatch.setattr(modes, "defined", far)
    monkeypatch.setattr(modes, "apart", apart)
    words = [*words, "--modes", "gpu"]
    monkeypatch.setattr(modes, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--definition needs PyTorch"):
        modes.main([*words, "--definition"])
    monkeypatch.setattr(modes, "find_spec", lambda name: name)
    modes.main([*words, "--definition"])
    found = json.loads((tmp_path / "modes.json").read_text())
    assert asked == [(str(tmp_path / "tiny.yaml"), 26)]
    assert found["apart_from"] == "definition"
    assert found["rows"][0]["apart"] == pytest.approx(1, abs=0.1)  # of the definition, not of the output
    with pytest.raises(SystemExit, match="held against the definition: give another --out"):
        modes.main([*words, "--resume"])


def test_parts_have_steps_that_overlap(imported: Callable[[str], Any]) -> None:
    """Where the output has so many: one step of both sides, one after the other, says nothing of that."""
    runs, network = imported("modes_runs"), Network("two", 1, (Conv((3, 3, 3), 2, "none"), Conv((3, 3, 3), 1, "none")))
    machine, limits = replace(this_machine(), gpu=EMULATED_GPU), Limits(2**40, 2, 2**33)
    for output, steps in (((6, 8, 9), 4), ((1, 8, 9), 4), ((1, 2, 9), 3)):
        gpu, both = (
            make_plan(
                network, output, machine, limits, device="gpu", mode=mode, patch=(1, 4, 3), columns=False, baseline=0
            )
            for mode in (None, "cpu-to-gpu")
        )
        assert runs.to_run(gpu, network, 0.0).cover(network).steps(0) < steps
        assert runs.to_run(both, network, 0.0).cover(network).steps(0) == steps


def test_gains_are_of_the_gpu_alone(imported: Callable[[str], Any]) -> None:
    speeds = {("cpu", ""): 20.0, ("gpu", "1G"): 100.0, ("side-by-side", "1G"): 117.0, ("gpu-host", "1G"): 50.0}
    rows: list[dict[str, Any]] = [
        {"network": "n", "mode": mode, "vram": vram, "voxels_per_second": speed}
        for (mode, vram), speed in speeds.items()
    ]
    failed = {"network": "n", "mode": "cpu-to-gpu", "vram": "1G"}
    both, host = imported("modes").gains([*rows, failed])
    assert both.endswith("1.170 times the GPU alone, 0.850 of what the processor adds at most, 16.7% of all")
    assert host.endswith("0.500 times the GPU alone")


def test_what_does_not_fit_is_said(
    imported: Callable[[str], Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported("modes").main([*words, "--vram", "20M", "--modes", "gpu", "gpu-host"])
    failures = [row["failure"] for row in json.loads((tmp_path / "modes.json").read_text())["rows"]]
    assert all("nothing fits in" in failure and "20.0 MiB of VRAM" in failure for failure in failures)
    assert "fits" in capsys.readouterr().out
