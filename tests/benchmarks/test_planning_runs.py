"""benchmarks/planning.py runs, once and tiny; its runs and verdicts are what they say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from dataclasses import replace
from math import inf, prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from tests.support.benchmark_networks import NET, OUTPUT, TINY, maker_with
from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from znnpy.formats.networks import read_network
from znnpy.machine import Limits, this_machine
from znnpy.planner.cost_model import assumed_rates
from znnpy.planner.memory import CONTEXT_BYTES
from znnpy.planner.plan import Plan
from znnpy.run import devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Answering:
    """Instead of a child: answers here."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        self._answer = answer
        self.asked: list[dict[str, Any]] = []
        self.stops = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stops += 1

    def tell(self, request: dict[str, Any]) -> None:
        self.asked.append(request)

    def line(self, seconds: float, end: float) -> dict[str, Any] | None:
        assert seconds > 0
        return self._answer(self.asked[-1])


@pytest.fixture
def on_gpu(imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A point on an emulated GPU, its pick in patches."""
    plans, points = imported("planning_plans"), imported("planning_points")
    monkeypatch.setattr(devices, "find_gpu", lambda: EMULATED_GPU)
    monkeypatch.setattr(devices, "Device", EmulatedDevice)
    (tmp_path / "tiny.yaml").write_text(TINY)
    network = read_network(str(tmp_path / "tiny.yaml")).network
    machine = replace(this_machine(), gpu=EMULATED_GPU)
    ground = plans.Ground(
        machine, Limits(2**40, 1, 2**30), assumed_rates(machine, 1, "gpu"), 0, "gpu", context=CONTEXT_BYTES
    )
    pick = ground.plan(network, network.dense_size((14, 14, 14)), patch=(4, 6, 5))
    row = imported("planning_tables").Row(str(tmp_path / "tiny.yaml"), "1G", 14, inf)
    return points.Point(row, network, ground, pick, pick.output)


def test_plans_run_on_a_gpu(imported: Callable[[str], Any], on_gpu: Any, tmp_path: Path) -> None:
    """The plan that is given, not the planner's own; its peak is of the GPU, and within the promise."""
    runs, child = imported("planning_runs"), imported("planning_gpu")
    pick = on_gpu.pick
    runner = runs.Runs(tmp_path, inf)
    runner._child = Answering(child.answer)
    (found,) = runner.of(on_gpu, [("pick", pick)], 4)
    assert found["failure"] is None
    assert found["promised_bytes"] == pick.memory.vram
    assert 0 < found["peak_bytes"] <= pick.memory.vram
    assert len(found["rounds"]) == 4
    assert min(found["rounds"]) > 0
    assert tuple(found["output"]) == pick.output
    assert found["seconds"] == pytest.approx(float(np.median(found["run_seconds"])))
    assert (1 + found["error"]) * pick.seconds == pytest.approx(found["seconds"])


def test_a_long_run_on_a_gpu_is_cut_and_scaled(imported: Callable[[str], Any], on_gpu: Any, tmp_path: Path) -> None:
    runs = imported("planning_runs")
    on_gpu.row.point_seconds = 0.0
    answers = {"seconds": [1.0, 4.0, 2.0], "first_seconds": 9.0, "vram_bytes": 7, "not_written": 0}
    runner = runs.Runs(tmp_path, inf)
    runner._child = child = Answering(lambda request: answers)
    (found,) = runner.of(on_gpu, [("pick", on_gpu.pick)], 3)
    given = Plan.from_json(child.asked[0]["plan"])
    assert given.output == on_gpu.pick.patch_out
    assert child.asked[0]["times"] == 3
    scale = on_gpu.pick.seconds / given.seconds
    assert found["rounds"] == pytest.approx([scale, 4 * scale, 2 * scale])
    assert found["voxels_per_second"] == pytest.approx(prod(on_gpu.pick.output) / (2 * scale))
    for answer, failure in (
        (None, "it took too long"),
        (answers | {"not_written": 5}, "5 voxels were not written"),
        ({"failure": "VramError: none"}, "VramError: none"),
    ):
        runner._child = child = Answering(lambda request, answer=answer: answer)  # type: ignore[misc]
        (found,) = runner.of(on_gpu, [("pick", on_gpu.pick)], 3)
        assert found == {"what": "pick", "failure": failure}
        assert child.stops == (answer is None)


def test_a_part_of_a_long_run(imported: Callable[[str], Any]) -> None:
    points = imported("planning_points")
    for pick in (maker_with(imported, columns=columns, patch=(4, 12, 12)).pick for columns in (False, True)):
        assert points.part_of(pick, NET, inf) == OUTPUT
        assert points.part_of(pick, NET, 0.0) == (4, 12, 12)
        times = [[n if axis == pick.axis else 1 for axis in range(3)] for n in (2, 3)]
        sizes = [(4 * z, 12 * y, 12 * x) for z, y, x in times]
        one, two = (pick.for_output(size, NET, pick.memory).seconds for size in sizes)
        assert points.part_of(pick, NET, (one + two) / 2) == sizes[0]
        rest = [axis for axis in range(3) if axis != pick.axis]
        wide = [OUTPUT[axis] if axis != rest[1] else pick.patch_out[axis] for axis in range(3)]
        whole = pick.for_output(tuple(wide), NET, pick.memory).seconds
        assert points.part_of(pick, NET, whole) == tuple(wide), "columns along one more axis"
        long = [side if axis == pick.axis else pick.patch_out[axis] for axis, side in enumerate(OUTPUT)]
        long[pick.axis] -= 1
        part = points.part_of(pick, NET, pick.for_output(tuple(long), NET, pick.memory).seconds - 1e-9)
        assert all(part[axis] == pick.patch_out[axis] for axis in rest), "none across before the column is whole"


def test_the_band_is_of_every_other_run(imported: Callable[[str], Any]) -> None:
    band_of = imported("planning_tables").band_of
    assert band_of([1.0, 2.0, 1.1, 2.2, 1.2, 2.4]) == pytest.approx(1.0)  # 2.2 over 1.1
    assert band_of([3.0]) == 0.0


def test_the_best_patch_of_pytorch_that_fits(
    imported: Callable[[str], Any], on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is timed once; what it took says within which limits it fits. Nothing larger follows a failure."""
    runs, planning = imported("planning_runs"), imported("planning")
    said: dict[int, dict[str, Any]] = {
        2: {"seconds": [8.0], "peak_bytes": 2**28},
        4: {"seconds": [1.0, 3.0, 2.0], "peak_bytes": 2**30},
        6: {"failure": "out of memory"},
    }
    children: list[Answering] = []

    def child(script: Path, first: dict[str, Any]) -> Answering:
        assert first["ram_bytes"] == 2**31
        children.append(Answering(lambda request: said[request["patch"][0]]))
        return children[-1]

    monkeypatch.setattr(runs, "Child", child)
    options = planning.arguments(["--device", "gpu", "--peer-sides", "4", "2"])
    points = [replace(on_gpu, row=replace(on_gpu.row, limit=limit)) for limit in ("2G", "512M", "128M")]
    large, small, least = runs.peers(points, options, inf)
    assert [one["method"] for one in large] == ["plain", "dilated", "fragments"]
    assert [len(child.asked) for child in children] == [2, 2, 2]
    count = {side: prod(-(-n // side) for n in on_gpu.pick.output) for side in (2, 4)}
    assert large[0]["seconds"] == 2.0 * count[4]
    assert small[0]["seconds"] == 8.0 * count[2]
    assert large[0]["voxels_per_second"] == pytest.approx(prod(on_gpu.pick.output) / large[0]["seconds"])
    assert least[0]["failure"] == "no patch fits"
    options.peer_sides = [6, 2]
    (found,) = runs.peers([points[0]], options, inf)
    assert found[0]["patches"][-1]["failure"] == "out of memory"
    options.peer_sides = [8, 6]
    assert runs.peers([points[0]], options, inf)[0][0]["failure"] == "out of memory"


def row(tables: Any, **found: Any) -> Any:
    rival: dict[str, Any] = {"kind": "random", "what": "random 1", "seconds": 9.0, "whole": True}
    layers: dict[str, Any] = {"seconds": 10.0, "again": 10.5, "band": 0.05, "error": -0.12, "predicted": 11.0}
    run: dict[str, Any] = {"failure": None, "error": 0.02, "promised_over_peak": 1.1, "voxels_per_second": 99.0}
    finals = [run | {"what": what, "seconds": s, "rounds": [s, s]} for what, s in (("pick", 10.0), ("random 1", 9.8))]
    paper: dict[str, Any] = {"of": "paper", "scheme": "S = 1", "seconds": 10.0, "whole": True}
    findings = [paper, paper | {"of": "images", "scheme": "S = 2", "seconds": 9.6}]
    findings.append(paper | {"of": "fragments", "scheme": "max", "seconds": 9.0})
    given: dict[str, Any] = {
        "planned": {"voxels_per_second": 100.0},
        "runs": run | {"what": "pick", "seconds": 10.0, "band": 0.01},
        "layers": layers,
        "rivals": [rival],
        "finals": finals,
        "findings": findings,
    }
    given |= {"network": "n337", "limit": "1G", "side": 9} | found
    return tables.Row(**given)


def test_verdicts(imported: Callable[[str], Any], tmp_path: Path) -> None:
    """By hand: 10 s against 9 s is more than 3 % beyond a band of 5 %, against 9.5 s it is not."""
    tables = imported("planning_tables")
    rival = {"kind": "random", "what": "random 1", "seconds": 9.5, "whole": True}
    late = {"kind": "random", "what": "random 2", "seconds": None, "whole": False, "failure": None}
    rows = [
        row(tables),
        row(tables, limit="2G", rivals=[rival, late]),
        tables.Row("n537", "1G", 9, failure="nothing fits"),
    ]
    found = tables.summary(rows)
    assert found["beaten_by"] == ["n337 1G: random random 1"]
    assert found["beaten_in_runs_by"] == []
    assert found["error_of_layers"]["worst"] == pytest.approx(0.07)
    assert found["error_of_runs"]["median"] == pytest.approx(0.01)
    assert found["error_of_runs_with_the_band"]["worst"] == pytest.approx(0.02)
    assert found["promised_over_peak"]["median"] == 1.1
    assert found["broken_promises"] == 0
    assert found["without_a_plan"] == 1
    assert (found["rivals"], found["rivals_timed_whole"]) == (3, 2)
    assert found["one_image_is_best"] == {"confirmed": 2, "refuted": []}
    assert found["all_fragments_are_best"]["refuted"] == ["n337 1G: max", "n337 2G: max"]
    lines = list(tables.table(rows))
    assert "nothing fits" in lines[5]
    assert "0.900 random 1" in lines[1]
    assert "0.980 random 1" in lines[2]
    assert "1/2" in lines[3]
    tables.pictures(tmp_path / "planning.png", rows, "a machine")
    assert {path.name for path in tmp_path.iterdir()} == {"planning.png", "planning-rivals.png"}


def test_a_broken_promise_is_told(imported: Callable[[str], Any]) -> None:
    tables = imported("planning_tables")
    one = row(tables)
    one.finals[1]["promised_over_peak"] = 0.99
    assert tables.summary([one])["broken_promises"] == 1


def test_the_pick_is_beaten_beyond_the_band_of_its_runs(imported: Callable[[str], Any]) -> None:
    """10 s against 9.5 s is 5.3 %: beyond 3 % and a band of 1 %, and not beyond 3 % and a band of 3 %."""
    tables = imported("planning_tables")
    one = row(tables)
    one.finals[1]["seconds"] = 9.5
    assert tables.summary([one])["beaten_in_runs_by"] == ["n337 1G: random 1"]
    one.runs["band"] = 0.03
    assert tables.summary([one])["beaten_in_runs_by"] == []
    one.runs["band"] = 0.01
    one.finals[0]["rounds"] = [9.85, 10.15]  # 3 % apart
    assert tables.summary([one])["beaten_in_runs_by"] == []
    one.finals[0]["rounds"] = [9.98, 10.02]
    assert tables.summary([one])["beaten_in_runs_by"] == ["n337 1G: random 1"]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["plain", "dilated", "fragments"])
def test_pytorch_three_ways(imported: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Seconds are of a dense patch: of a plain one, so many times that of one subsampling."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    peers = imported("planning_peers")
    request: dict[str, Any] = {"network": str(tmp_path / "tiny.yaml"), "method": name}
    request |= {"device": "cpu", "precision": "fp32", "layout": "contiguous", "algorithms": 1, "repeat_seconds": 0.0}
    answer = peers.prepared(request)
    small, large = answer((2, 6, 5)), answer((8, 6, 5))
    assert len(small["seconds"]) == len(large["seconds"]) == 1
    assert 0 < small["peak_bytes"] <= large["peak_bytes"]


@pytest.mark.torch
def test_plain_pytorch_is_one_subsampling(imported: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    peers, dense = imported("planning_peers"), imported("dense_torch")
    network = imported("contestants").random_network(str(tmp_path / "tiny.yaml"))
    raw = np.random.default_rng(3).integers(0, 256, (1, *network.patch_in((8, 6, 5))), np.uint8)
    weights = importlib.import_module("znnpy.formats.weights").random_weights(network)
    exact = dense.DenseTorch(network, weights, "fragments", "fp32", "contiguous")(raw)[:, ::2, ::2]
    z, y, x = peers.plain_in(network, (4, 3, 5))
    out = peers.plain(network, "fp32", "contiguous", "cpu")(raw[:, :z, :y, :x])
    assert np.abs(out - exact).max() <= 1e-5 * np.abs(exact).max()


def test_the_whole_benchmark(
    imported: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but PyTorch on a tiny network; a second call takes up all of it, plans too."""
    planning, out = imported("planning"), tmp_path / "planning.json"
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["--networks", tmp_path / "tiny.yaml", "--limits", "1000M", "20M", "--side", 24, "--quick", "--no-torch"]
    words += ["--threads", 1, "--workers", 1, "--give-up", 1000, "--most", 1, "--out", out, "--rival-seconds", 60]
    planning.main(list(map(str, words)))
    found = json.loads(out.read_text())
    by_limit = {row["limit"]: row for row in found["rows"]}
    first, least = by_limit["1000M"], by_limit["20M"]
    assert "nothing fits in 20.0 MiB of RAM" in least["failure"]
    layers = first["layers"]
    assert layers["seconds"] > 0
    longer, shorter = max(layers["seconds"], layers["again"]), min(layers["seconds"], layers["again"])
    assert layers["band"] == pytest.approx(longer / shorter - 1)
    assert {rival["kind"] for rival in first["rivals"]} == {"uniform", "random", "neighbour"}
    assert any(rival.get("whole") for rival in first["rivals"])
    runs = [first["runs"], *first["finals"]]
    assert [run["what"] for run in runs[:2]] == ["pick", "pick"]
    assert [run["failure"] for run in runs] == [None] * len(runs)
    assert all(run["promised_over_peak"] >= 1 for run in runs)
    assert [len(run["rounds"]) for run in runs] == [2, *[1] * (len(runs) - 1)]
    assert first["findings"][0]["of"] == "paper"
    assert first["peers"] == []
    assert found["summary"]["points"] == 2
    assert found["header"]["processor"]
    capsys.readouterr()
    planning.main([*map(str, words), "--resume"])
    said = capsys.readouterr().out
    assert not [line for line in said.splitlines() if line.split(" ")[0] in planning.STEPS]
    assert "tiny 1000M" not in said
    again = json.loads(out.read_text())
    assert next(row for row in again["rows"] if row["limit"] == "1000M") == first
    assert len(again["commands"]) == 2
    more = [str(word) for word in words if word != "20M"]
    # What is the same plan ran already, and so did its finalists.
    steps = ["runs", "layers", "rivals", "finals"]
    planning.main([*more, "--limits", "1000M", "1100M", "--resume", "--do", *steps])
    larger = next(row for row in json.loads(out.read_text())["rows"] if row["limit"] == "1100M")
    assert larger["runs"] == first["runs"] | {"as_within": "1000M"}
    assert larger["finals"] == [run | {"as_within": "1000M"} for run in first["finals"]]
    assert [run["plan"] for run in first["finals"]].count(first["finals"][0]["plan"]) == 1
    capsys.readouterr()
    cut = again | {"rows": [dict(first, plan=first["plan"] | {"format": 0})]}
    out.write_text(json.dumps(cut))
    planning.main([*map(str, words), "--resume", "--do"])
    assert "begins anew: this is a plan file of format 0" in capsys.readouterr().out
    assert json.loads(out.read_text())["rows"][0]["layers"] == {}


def test_what_does_not_fit_into_the_time_is_left_out(
    imported: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planning, out = imported("planning"), tmp_path / "planning.json"
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["--networks", tmp_path / "tiny.yaml", "--limits", "1000M", "--side", 24, "--quick", "--no-torch"]
    planning.main([*map(str, words), "--out", str(out), "--minutes", "0.02", "--workers", "1"])
    assert "runs      tiny 1000M left out: " in capsys.readouterr().out
    assert json.loads(out.read_text())["rows"][0]["runs"] == {}


def test_what_the_machine_does_is_measured_first(
    imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in a folder of its own, and the next plans count with it; a network too where minutes are given for it."""
    planning, points = imported("planning"), imported("planning_points")
    asked: list[list[str]] = []
    folders: list[str] = []

    def run(words: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words[3:])
        folders.append(os.environ["XDG_CACHE_HOME"])
        return subprocess.CompletedProcess(words, 0, stdout='{"seconds": 1.5}', stderr="")

    monkeypatch.setattr(points.subprocess, "run", run)
    before = os.environ.get("XDG_CACHE_HOME")
    given = ["--networks", "n337", "--measure-minutes", "0.5", "--network-minutes", "1", "--threads", "2"]
    options = planning.arguments(given)
    with points.own_cache(tmp_path / "cache"):
        found = points.measured(options)
    shared = ["measure", "--device", "cpu", "--json", "--threads", "2"]
    assert asked == [[*shared, "--minutes", "0.5"], [*shared, "n337", "--minutes", "1.0"]]
    assert folders == [str(tmp_path / "cache")] * 2
    assert os.environ.get("XDG_CACHE_HOME") == before
    assert [(one["network"], one["seconds"]) for one in found] == [(None, 1.5), ("n337", 1.5)]
