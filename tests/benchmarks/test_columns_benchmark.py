"""The benchmark of columns runs, once and tiny; its scaling counts what a run does; whole plans are held to memory."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.support.benchmark_networks import TINY
from znnpy.errors import NoPlanError
from znnpy.formats.weights import random_weights
from znnpy.kernels.crew import Crew
from znnpy.machine import Limits, this_machine
from znnpy.network import Conv, Network, Pool
from znnpy.planner.search import make_plan
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from znnpy.planner.plan import Plan
    from znnpy.shapes import Vec3

MIB = 2**20
NET = Network(
    "net",
    1,
    (
        Conv((3, 2, 4), 4, "relu"),
        Pool((2, 2, 2)),
        Conv((3, 3, 3), 60, "relu"),
        Pool((2, 1, 2)),
        Conv((2, 3, 1), 3, "tanh"),
    ),
)


@pytest.fixture
def benchmark(repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script of the benchmarks with these words."""

    def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(repository / "benchmarks" / script), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def in_parts(output: Vec3, patch: Vec3, columns: bool) -> Plan:
    """The plan of the least memory, of which all fragments of a wide layer would take most."""
    with pytest.raises(NoPlanError) as told:
        make_plan(NET, output, this_machine(), Limits(1, 1), baseline=0, columns=columns, patch=patch)
    assert told.value.needs is not None
    limits = Limits(told.value.needs[0], 1)
    return make_plan(NET, output, this_machine(), limits, baseline=0, columns=columns, patch=patch)


def test_columns_benchmark(benchmark: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Everything is planned and one volume measured; a second call plans nothing again and loses nothing."""
    out, network = tmp_path / "columns.json", tmp_path / "tiny.yaml"
    network.write_text(TINY)
    sizes = ["--volumes", "20x18x17", "9x30x12", "--measured", "20x18x17", "--check-output", "4x4x4"]
    words = ["--networks", network, *sizes, "--repeat-seconds", 0, "--plans", tmp_path / "plans", "--out", out]
    words += ["--ways", "depth_first", "columns"]
    done = benchmark("columns.py", *words, "--ram", "20M", "500M", "--measure", "layers", "--rounds", 2, "--workers", 1)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert done.stdout.count("planned tiny") == len(found["rows"]) == 2 * 2 * 2
    for row in found["rows"]:
        if row["ram"] == "20M":
            assert "nothing fits in 20.0 MiB of RAM" in row["failure"]
            continue
        planned, layers = row["planned"], row["layers"]
        assert planned["waste"] >= 0.99
        assert planned["arithmetic_waste"] >= 1
        assert (planned["column"] > 0) == (row["way"] == "columns")
        if row["volume"] != [20, 18, 17]:
            assert layers == {}
            continue
        assert [len(seconds) for seconds in layers["rounds"]] == [1, 1]
        assert layers["seconds"] == pytest.approx(median([layers["rounds"][0][0], layers["rounds"][1][0]]))
        assert layers["voxels_per_second"] == pytest.approx(prod(planned["output"]) / layers["seconds"])
        assert len(layers["layer_seconds"]) == len(planned["runs"])
    (first,) = (s for s in found["summary"] if s["ram"] == "500M" and s["volume"] == [20, 18, 17])
    speeds = {row["way"]: row["layers"].get("voxels_per_second") for row in found["rows"] if row["layers"]}
    assert first["layers_times_depth_first"] == pytest.approx(speeds["columns"] / speeds["depth_first"])

    done = benchmark("columns.py", *words, "--ram", "500M", "--measure", "check", "whole", "--rounds", 1, "--add")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("planned tiny") == 2  # of the checks
    again = json.loads(out.read_text())
    assert [earlier["command"] for earlier in again["earlier"]] == [found["header"]["command"]]
    assert [check["way"] for check in again["checks"]] == ["depth_first", "columns"]
    for check in again["checks"]:
        assert check["run_over_layers"] == pytest.approx(check["run_seconds"][0] / check["layers"]["seconds"])
    for old, row in zip(found["rows"], again["rows"], strict=True):
        assert row["layers"] == old["layers"]
        assert bool(row["whole"]) == (row["ram"] == "500M" and row["volume"] == [20, 18, 17])
        if row["whole"]:
            assert row["whole"]["failure"] is None
            assert row["whole"]["voxels"] == prod(row["planned"]["output"])
    with Image.open(out.with_suffix(".png")) as image:
        assert np.asarray(image.convert("L")).min() < 60


@pytest.mark.parametrize("columns", [False, True])
def test_scaling_counts_what_a_run_does(imported: Callable[[str], Any], columns: bool) -> None:
    """Seconds of the output are those of every load, layer and store that a run over it makes."""
    layer_by_layer = imported("layer_by_layer")
    plan = in_parts((60, 44, 103), (32, 44, 56), columns)
    assert max(plan.sub_batches) > 1
    cover = plan.cover(NET)
    assert len(cover) > 1
    counts = [0.0] * (len(plan.choices) + 2)

    class Counting(layer_by_layer.Descent):  # type: ignore[misc,name-defined]
        def _compute(self, index: int, *given: Any) -> None:
            counts[1 + index] += 1

    def counting(which: int) -> Callable[..., None]:
        def count(*given: Any) -> None:
            counts[which] += 1

        return count

    raw, out = np.zeros((1, *plan.patch_in), np.uint8), np.zeros((3, *plan.patch_out), np.float32)
    with Crew(1) as crew, Counting(plan, NET, random_weights(NET), crew) as session:
        session._shop.load, session._shop.store = counting(0), counting(-1)
        for column in cover:
            for step in column.steps:
                session.run(raw, out if step.write.voxels else None, begins=step is column.steps[0])
    for what, count in enumerate(counts):
        load, *layers, store = (float(i == what) for i in range(len(counts)))
        assert layer_by_layer.Seconds(load, tuple(layers), store).of_output(plan, NET) == count


def test_a_descent_is_a_step(imported: Callable[[str], Any]) -> None:
    """Where every layer takes all images at once, a descent gives what a patch gives, bit by bit; also a second one."""
    layer_by_layer = imported("layer_by_layer")
    wish: dict[str, Any] = {"columns": False, "depth_first": False, "patch": (8, 6, 8)}
    plan = make_plan(NET, (8, 12, 16), this_machine(), Limits(2**30, 2), baseline=0, **wish)
    raw = np.random.default_rng(5).integers(0, 256, (1, *plan.patch_in), np.uint8)
    found, wanted = (np.full((3, *plan.patch_out), np.nan, np.float32) for _ in range(2))
    with Crew(2) as crew, layer_by_layer.Descent(plan, NET, random_weights(NET), crew) as session:
        session.touch()
        for _ in range(2):
            seconds = session.once(raw, found)
        session.run(raw, wanted)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, wanted)
    assert len(seconds.layers) == len(plan.choices)
    assert min(seconds.load, *seconds.layers, seconds.store) > 0


def test_arithmetic_waste_of_one_patch(imported: Callable[[str], Any]) -> None:
    """Multiply-adds over those without borders, from the definition: one patch that is the output, and four of them."""
    waste = imported("contestants").arithmetic_waste
    output = (8, 12, 16)
    maps, spent, needed = NET.maps, 0, 0
    for index, shape in enumerate(NET.layer_shapes(output)):
        if isinstance(shape, ConvShape):
            each = maps[index] * prod(shape.k)
            spent += each * prod(shape.out_shape)
            needed += each * maps[index + 1] * prod(output)
    given: dict[str, Any] = {"baseline": 0, "columns": False, "patch": output}
    one = make_plan(NET, output, this_machine(), Limits(2**30, 1), **given)
    assert waste(one) == pytest.approx(spent / needed)
    four = make_plan(NET, (9, 24, 16), this_machine(), Limits(2**30, 1), **given)
    assert waste(four) == pytest.approx(4 * spent / needed * prod(output) / (9 * 24 * 16))


def test_round_ticks(imported: Callable[[str], Any]) -> None:
    curves = imported("curves")
    assert curves.ticks(1000.0) == [0, 200, 400, 600, 800, 1000]
    assert curves.ticks(0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_whole_plans_are_held_to_memory(
    benchmark: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = tmp_path / "memory.json"
    done = benchmark("memory.py", "--plans", 1, "--networks", "n337", "--most-seconds", 5, "--seed", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["limit"] >= row["promised"] >= 256 * MIB
    assert row["measured"] <= row["promised"]
    assert row["ratio"] == pytest.approx(row["promised"] / row["measured"])
    assert row["kept"] == (row["measured"] <= min(row["promised"], row["limit"]) and row["ratio"] <= 1.15)
