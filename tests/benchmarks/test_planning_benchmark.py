"""The benchmark of the planner runs, once and tiny; rivals, schemes, clocks and verdicts are what they say."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fakes import FAKES, MACHINE, RATES, limits
from pydantic import TypeAdapter

from znnpy.formats.networks import read_network
from znnpy.kernels.crew import Crew
from znnpy.machine import Limits, this_machine
from znnpy.network import Conv, MaxFilter, Network, Pool
from znnpy.planner.cost import assumed_rates
from znnpy.planner.memory import CONTEXT_BYTES
from znnpy.planner.plan import Choice
from znnpy.run import devices
from znnpy.shapes import multiply

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from znnpy.planner.plan import Plan
    from znnpy.shapes import Vec3

TINY = """\
name: tiny
input_channels: 1
layers:
- {type: conv, kernel: [3, 2, 3], out: 6, activation: relu}
- {type: pool, window: [2, 2, 1]}
- {type: conv, kernel: [2, 3, 3], out: 2, activation: relu}
"""
NET = Network(
    "net",
    1,
    (
        Conv((3, 2, 4), 4, "relu"),
        Pool((2, 2, 2)),
        MaxFilter((1, 2, 2)),
        Conv((3, 3, 3), 60, "relu"),
        Pool((2, 1, 2)),
        Conv((2, 3, 1), 3, "tanh"),
    ),
)
OUTPUT = (40, 36, 44)
MIB = 2**20
CHILD = """\
import json, os, sys, time
json.loads(sys.stdin.readline())
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"ready": True}), flush=True)
    with open(os.environ["ASKED"], "a") as file:
        file.write(asked["choice"]["primitive"] + "\\n")
    if asked["choice"]["primitive"] == os.environ.get("SLOW"):
        time.sleep(60)
    if asked["choice"]["primitive"] == os.environ.get("DEADLY"):
        sys.exit(3)
    print(json.dumps({"seconds": [2.0, 1.0, 3.0]}), flush=True)
"""


@pytest.fixture
def imported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the benchmarks."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def faked(imported: Callable[[str], Any]) -> Callable[..., Any]:
    """A maker of plans with made-up primitives, of the planner's pick."""

    def make(ram_bytes: int = 2**40, **wishes: Any) -> Any:
        plans = imported("planning_plans")
        ground = plans.Ground(MACHINE, limits(ram_bytes), RATES, baseline=1000, table=FAKES)
        return plans.Maker(ground, NET, ground.plan(NET, OUTPUT, **wishes))

    return make


def decided(plan: Plan) -> tuple[Any, ...]:
    return plan.patch_out, plan.patch_in, plan.axis, plan.column, plan.choices, plan.memory, plan.tensors, plan.columns


OVER = {"only": ["cpu.conv.over"], "columns": False}  # some of its layers need memory of the libraries, poolings none


@pytest.mark.parametrize("wishes", [{"columns": False}, {"columns": True}, {"patch": (4, 2, 8)}, OVER], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_recipe_makes_its_plan_again(faked: Callable[..., Any], wishes: dict[str, Any], share: float) -> None:
    """With less memory than the best takes, layers run in parts too."""
    free = faked(**wishes)
    maker = faked(int(free.pick.memory.peak * share), **wishes)
    again = maker.plan(maker.recipe(maker.pick))
    assert again is not None
    assert decided(again) == decided(maker.pick)
    assert again.seconds == pytest.approx(maker.pick.seconds)


def test_neighbours_differ_in_one_choice(faked: Callable[..., Any], imported: Callable[[str], Any]) -> None:
    free = faked(columns=False)
    maker = faked(int(free.pick.memory.peak * 0.8), columns=False)
    found = list(imported("planning_plans").neighbours(maker))
    recipe, *others = [maker.recipe(plan) for plan in (maker.pick, *(r.plan for r in found[:-1]))]
    assert len(set(others)) == len(others) > 10
    for rival, other in zip(found, others, strict=False):
        assert rival.plan.memory.over(maker.ground.limits) == (0, 0)
        ways = {(way.primitive.name, way.layers) for way in recipe.chosen}
        ways_of_other = {(way.primitive.name, way.layers) for way in other.chosen}
        changes = [
            recipe.patch != other.patch,
            recipe.at_once != other.at_once,
            ways != ways_of_other or (rival.what.startswith("layer") and recipe.chosen != other.chosen),
        ]
        assert sum(changes) == 1, rival.what
        assert sum(a != b for a, b in zip(recipe.patch, other.patch, strict=True)) <= 1
    assert found[-1].what == "columns"
    kinds = {rival.what.split(" ")[0] for rival in found}
    assert kinds >= {"layer", "patch", "images", "columns"}


def test_random_plans_fit_and_are_the_same_again(faked: Callable[..., Any], imported: Callable[[str], Any]) -> None:
    plans, maker = imported("planning_plans"), faked(30 * MIB)
    found = list(plans.random_plans(maker, 12, np.random.default_rng(5)))
    again = list(plans.random_plans(maker, 12, np.random.default_rng(5)))
    assert [rival.plan for rival in found] == [rival.plan for rival in again]
    assert len(found) == 12
    assert all(rival.plan.memory.peak <= 30 * MIB for rival in found)
    assert len({maker.recipe(rival.plan) for rival in found}) > 6
    for rival in found:  # each is a whole plan: nothing but the choice of primitives is checked here
        layers = [layer for choice in rival.plan.choices for layer in range(choice.layers[0], choice.layers[1] + 1)]
        assert layers == list(range(len(NET.layers)))


def test_uniform_choices(faked: Callable[..., Any], imported: Callable[[str], Any]) -> None:
    found = list(imported("planning_plans").uniform(faked()))
    assert [rival.what for rival in found] == [fake.name for fake in FAKES if fake.kind == "conv"]
    for rival in found:
        convs = {c.primitive for c in rival.plan.choices if c.shape.kind == "conv"}
        assert rival.what in convs
        assert rival.what == "cpu.conv.both" or convs == {rival.what}


def test_schemes(imported: Callable[[str], Any]) -> None:
    """All fragments are what a plan has; a plain pooling gives a part of the output, so often as its window has."""
    findings = imported("planning_findings")
    schemes = list(findings.schemes(NET))
    assert [s.images for s in schemes] == [1, 2, 4, 8, 1, 1, 1]
    period = NET.period
    out: Vec3 = (3, 4, 2)
    dense = multiply(out, period)
    assert findings.shapes_of(NET, out, schemes[0]) == NET.layer_shapes(dense)
    for scheme in schemes:
        shapes = findings.shapes_of(NET, out, scheme)
        for first, second in pairwise(shapes):
            assert first.out_shape == second.in_shape
        voxels = prod(shapes[-1].out_shape[:4]) * findings.repeats(NET, scheme)
        assert voxels == scheme.images * prod(dense)


def test_the_best_of_the_papers_scheme_is_the_planners(
    faked: Callable[..., Any], imported: Callable[[str], Any]
) -> None:
    """Patches, no parts: what the planner finds where it may do nothing else. More images cost nothing with fakes."""
    findings, maker = imported("planning_findings"), faked(40 * MIB, columns=False, depth_first=False)
    one, two, *_ = (findings.best(maker.ground, NET, maker.pick, scheme) for scheme in findings.schemes(NET))
    assert one.seconds == pytest.approx(maker.pick.seconds, rel=0.02)
    assert one.plan.memory.over(maker.ground.limits) == (0, 0)
    assert two.seconds >= 0.95 * one.seconds
    plain = findings.best(maker.ground, NET, maker.pick, findings.Scheme(1, (False, False)))
    assert plain.seconds > one.seconds
    assert all(choice.shape.kind != "pool" or not choice.shape.fragments for choice in plain.plan.choices)


def test_theory(imported: Callable[[str], Any]) -> None:
    """One voxel at a time, every subsampling for itself, is where the speedup is counted from."""
    findings = imported("planning_findings")
    points = findings.theory(2)
    for images in findings.BATCHES:
        speedups = [point["speedup"] for point in points if point["images"] == images]
        assert speedups == sorted(speedups)
        assert speedups[-1] > 50
    (least,) = [point for point in points if point["images"] == 1 and point["side"] == 1]
    assert least["speedup"] > 1
    assert findings.theory_verdict(points, 1000.0)["speedup"] == max(point["speedup"] for point in points)


@pytest.fixture
def watch(
    faked: Callable[..., Any], imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A stopwatch whose child measures nothing, and the pick it is for."""
    clock = imported("planning_clock")
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(clock, "CHILD", child)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    (tmp_path / "asked").touch()

    def make(seconds: float = 60.0, resume: bool = False, **facts: Any) -> tuple[Any, Plan, Callable[[], list[str]]]:
        pick = faked(columns=False).pick
        kept = clock.Kept(tmp_path / "layers.json", {"machine": "fake"} | facts, resume=resume)
        stopwatch = clock.Stopwatch(kept, "net", pick, repeat_seconds=0.0, end=time.monotonic() + seconds)
        return stopwatch, pick, lambda: (tmp_path / "asked").read_text().split()

    return make


def test_distinct_layers_are_timed_once(watch: Callable[..., Any]) -> None:
    stopwatch, pick, asked = watch()
    with stopwatch:
        one = stopwatch.total(pick)
        assert one.whole
        assert one.seconds == 2.0 * sum(choice.runs for choice in pick.choices)  # the median
        assert len(asked()) == len(pick.choices)
        assert stopwatch.total(pick) == one
        assert len(asked()) == len(pick.choices)
        stopwatch.stop()
        assert stopwatch.total(pick, reading=1) == one
        assert len(asked()) == 2 * len(pick.choices)
    again, _, _ = watch(resume=True)
    with again:
        assert again.total(pick, reading=1) == one
    assert len(asked()) == 2 * len(pick.choices)
    with pytest.raises(SystemExit, match="machine 'fake', and this is 'other'"):
        watch(resume=True, machine="other")


def test_what_is_plainly_slower_is_given_up(watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is asked, and the least that it takes is told; it is asked again when more would matter."""
    stopwatch, pick, asked = watch()
    slow = max(pick.choices, key=lambda choice: choice.runs * choice.seconds)
    with stopwatch:
        total = stopwatch.total(pick, below=0.5)
        assert not total.whole
        assert total.seconds >= 2.0
        assert asked() == [slow.primitive]
    monkeypatch.setenv("SLOW", slow.primitive)
    stopwatch, pick, asked = watch()
    begin = time.monotonic()
    with stopwatch:
        total = stopwatch.total(pick, below=0.4 * slow.runs)
        assert total == type(total)(seconds=pytest.approx(0.4 * slow.runs), whole=False)
        assert time.monotonic() - begin < 20
        assert stopwatch.total(pick, below=0.3 * slow.runs).seconds == total.seconds
        assert len(asked()) == 2


def test_what_kills_its_process_and_when_time_is_up(
    watch: Callable[..., Any], imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopwatch, pick, _ = watch()
    monkeypatch.setenv("DEADLY", pick.choices[0].primitive)
    with stopwatch:
        total = stopwatch.total(pick)
        assert not total.whole
        assert total.failure == "the process ended with 3"
    stopwatch, pick, _ = watch(seconds=0.0)
    with stopwatch, pytest.raises(imported("planning_clock").NoTimeLeft):
        stopwatch.total(pick)


@pytest.mark.parametrize("columns", [False, True])
def test_every_layer_of_a_plan_is_timed(imported: Callable[[str], Any], columns: bool) -> None:
    """With what it carries, on the processor."""
    plans, child = imported("planning_plans"), imported("planning_layer")
    machine = this_machine()
    ground = plans.Ground(machine, Limits(2**30, 1), assumed_rates(machine, 1), baseline=0)
    maker = plans.Maker(ground, NET, ground.plan(NET, OUTPUT, columns=columns, patch=(8, 8, 12)))
    rivals = [maker.pick, *(r.plan for r in plans.random_plans(maker, 3, np.random.default_rng(2)))]
    with Crew(1) as crew:
        room = child.HostRoom(maker.pick, "n337", crew)
        for plan in rivals:
            for choice, planes in zip(plan.choices, plans.carried(plan), strict=True):
                request = {"choice": json.loads(TypeAdapter(Choice).dump_json(choice)), "carried": planes}
                (spent,) = child.layer(request | {"most": 0.0, "repeat_seconds": 0.0}, room)
                assert 0 < spent < 60
    assert any(plans.carried(maker.pick)) == columns


def test_every_layer_of_a_plan_on_a_gpu_is_timed(imported: Callable[[str], Any]) -> None:
    plans, child, emulated = imported("planning_plans"), imported("planning_layer"), imported("emulated")
    machine = replace(this_machine(), gpu=emulated.EMULATED_GPU)
    ground = plans.Ground(
        machine, Limits(2**40, 1, 2**30), assumed_rates(machine, 1, "gpu"), 0, "gpu", "tf32", context=0
    )
    pick = ground.plan(NET, (8, 4, 8), columns=True, patch=(4, 4, 4))
    with emulated.EmulatedDevice() as device:
        room = child.DeviceRoom(pick, "n337", device)
        for choice, planes in zip(pick.choices, plans.carried(pick), strict=True):
            request = {"choice": json.loads(TypeAdapter(Choice).dump_json(choice)), "carried": planes}
            (spent,) = child.layer(request | {"most": 0.0, "repeat_seconds": 0.0}, room)
            assert spent > 0


def test_a_given_plan_runs_on_a_gpu(
    imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that is given, not the planner's own; its peak is of the GPU, and within the promise."""
    emulated, runs, child = imported("emulated"), imported("planning_runs"), imported("contestants_gpu")
    monkeypatch.setattr(devices, "find_gpu", lambda: emulated.EMULATED_GPU)
    monkeypatch.setattr(devices, "Device", emulated.EmulatedDevice)
    (tmp_path / "tiny.yaml").write_text(TINY)
    network = read_network(str(tmp_path / "tiny.yaml")).network
    machine = replace(this_machine(), gpu=emulated.EMULATED_GPU)
    plans, tables = imported("planning_plans"), imported("planning_tables")
    ground = plans.Ground(
        machine, Limits(2**40, 1, 2**30), assumed_rates(machine, 1, "gpu"), 0, "gpu", context=CONTEXT_BYTES
    )
    pick = ground.plan(network, network.dense_size((14, 14, 14)), patch=(4, 6, 5))
    asked = []

    def lines_of(request: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
        asked.append(seconds)
        return list(child.JOBS[request["job"]](request)), None

    monkeypatch.setattr(runs, "lines_of", lines_of)
    point = runs.Point(tables.Row(str(tmp_path / "tiny.yaml"), "1G", 14), network, ground, pick)
    found = runs.run(tmp_path, point, pick, 1.0, 9.0)
    assert asked == [9.0]
    assert found["failure"] is None
    assert found["promised_bytes"] == pick.memory.vram
    assert 0 < found["peak_bytes"] <= pick.memory.vram
    assert found["seconds"] > 0
    together = runs.together("pick", pick, [found, found | {"seconds": 3 * found["seconds"]}])
    assert together["seconds"] == pytest.approx(2 * found["seconds"])
    assert together["voxels_per_second"] == pytest.approx(prod(pick.output) / together["seconds"])
    assert (1 + together["error"]) * pick.seconds == pytest.approx(together["seconds"])


def test_a_part_of_a_long_run(faked: Callable[..., Any], imported: Callable[[str], Any]) -> None:
    runs = imported("planning_runs")
    for pick in (faked(columns=columns, patch=(4, 12, 12)).pick for columns in (False, True)):
        assert runs.part_of(pick, NET, inf) == OUTPUT
        assert runs.part_of(pick, NET, 0.0) == (4, 12, 12)
        times = [[n if axis == pick.axis else 1 for axis in range(3)] for n in (2, 3)]
        sizes = [(4 * z, 12 * y, 12 * x) for z, y, x in times]
        one, two = (pick.covering(size, NET, pick.memory).seconds for size in sizes)
        assert runs.part_of(pick, NET, (one + two) / 2) == sizes[0]


def row(tables: Any, **found: Any) -> Any:
    rival: dict[str, Any] = {"kind": "random", "what": "random 1", "seconds": 9.0, "whole": True}
    layers: dict[str, Any] = {"seconds": 10.0, "again": 10.5, "band": 0.05, "error": -0.12, "predicted": 11.0}
    run: dict[str, Any] = {"failure": None, "error": 0.02, "promised_over_peak": 1.1, "voxels_per_second": 99.0}
    runs = [run | {"what": "pick", "seconds": 10.0}, run | {"what": "random 1", "seconds": 9.8}]
    paper: dict[str, Any] = {"of": "paper", "scheme": "S = 1", "seconds": 10.0, "whole": True}
    findings = [paper, paper | {"of": "images", "scheme": "S = 2", "seconds": 9.6}]
    findings.append(paper | {"of": "fragments", "scheme": "max", "seconds": 9.0})
    given: dict[str, Any] = {
        "planned": {"voxels_per_second": 100.0},
        "layers": layers,
        "rivals": [rival],
        "findings": findings,
    }
    given |= {"network": "n337", "limit": "1G", "side": 9, "whole": {"runs": runs, "band": 0.01}} | found
    return tables.Row(**given)


def test_verdicts(imported: Callable[[str], Any], tmp_path: Path) -> None:
    """By hand: 10 s against 9 s is more than 3 % beyond a band of 5 %, against 9.5 s it is not."""
    tables = imported("planning_tables")
    rival = {"kind": "random", "what": "random 1", "seconds": 9.5, "whole": True}
    rows = [row(tables), row(tables, limit="2G", rivals=[rival]), tables.Row("n537", "1G", 9, failure="nothing fits")]
    found = tables.summary(rows)
    assert found["beaten_by"] == ["n337 1G: random random 1"]
    assert found["beaten_in_runs_by"] == []
    assert found["error_of_layers"]["worst"] == pytest.approx(0.07)
    assert found["error_of_runs"]["median"] == pytest.approx(0.01)
    assert found["promised_over_peak"]["median"] == 1.1
    assert found["broken_promises"] == 0
    assert found["without_a_plan"] == 1
    assert found["one_image_is_best"] == {"confirmed": 2, "refuted": []}
    assert found["all_fragments_are_best"]["refuted"] == ["n337 1G: max", "n337 2G: max"]
    lines = list(tables.table(rows))
    assert "nothing fits" in lines[3]
    assert "0.900 random 1" in lines[1]
    tables.pictures(tmp_path / "planning.png", rows, "a machine")
    assert {path.name for path in tmp_path.iterdir()} == {"planning.png", "planning-rivals.png"}


def test_a_broken_promise_is_told(imported: Callable[[str], Any]) -> None:
    tables = imported("planning_tables")
    one = row(tables)
    one.whole["runs"][1]["promised_over_peak"] = 0.99
    assert tables.summary([one])["broken_promises"] == 1


@pytest.mark.parametrize("name", ["plain", "dilated", "fragments"])
def test_pytorch_three_ways(imported: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Seconds are of a dense patch: of a plain one, so many times that of one subsampling."""
    if find_spec("torch") is None:
        pytest.skip("the comparison needs PyTorch; pip install 'znnpy[bench]'")
    (tmp_path / "tiny.yaml").write_text(TINY)
    peers = imported("planning_peers")
    request: dict[str, Any] = {"network": str(tmp_path / "tiny.yaml"), "method": name, "patch": [8, 6, 5]}
    request |= {"device": "cpu", "precision": "fp32", "layout": "contiguous", "algorithms": 1, "repeat_seconds": 0.0}
    found = peers.answer(request)
    assert found["patch_out"] == (8, 6, 5)
    assert len(found["seconds"]) == 1


def test_plain_pytorch_is_one_subsampling(imported: Callable[[str], Any], tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("the comparison needs PyTorch; pip install 'znnpy[bench]'")
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
    """Everything but PyTorch on a tiny network; a second call takes up all of it."""
    planning, out = imported("planning"), tmp_path / "planning.json"
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["--networks", tmp_path / "tiny.yaml", "--limits", "400M", "20M", "--side", 24, "--quick", "--no-torch"]
    words += ["--threads", 1, "--give-up", 1000, "--most", 1, "--out", out]
    planning.main(list(map(str, words)))
    found = json.loads(out.read_text())
    first, least = found["rows"]
    assert "nothing fits in 20,971,520 bytes" in least["failure"]
    layers = first["layers"]
    assert layers["seconds"] > 0
    longer, shorter = max(layers["seconds"], layers["again"]), min(layers["seconds"], layers["again"])
    assert layers["band"] == pytest.approx(longer / shorter - 1)
    assert {rival["kind"] for rival in first["rivals"]} == {"uniform", "random", "neighbour"}
    assert any(rival.get("whole") for rival in first["rivals"])
    runs = first["whole"]["runs"]
    assert runs[0]["what"] == "pick"
    assert [run["failure"] for run in runs] == [None] * len(runs)
    assert all(run["promised_over_peak"] >= 1 for run in runs)
    assert len(runs[0]["rounds"]) == 2
    assert first["findings"][0]["of"] == "paper"
    assert first["peers"] == []
    assert found["summary"]["points"] == 2
    assert found["header"]["processor"]
    capsys.readouterr()
    planning.main([*map(str, words), "--resume"])
    said = capsys.readouterr().out
    assert "layers    " not in said.split("network ")[0]
    assert json.loads(out.read_text())["rows"][0]["rivals"] == first["rivals"]
