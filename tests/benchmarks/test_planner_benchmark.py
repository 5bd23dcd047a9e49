"""`python -m benchmarks planner`: tiny runs fit the schema, rivals and parts are what they say, figures are right."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from benchmarks import planner_runs
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read
from benchmarks.io_runs import Discard
from benchmarks.planner import promise_rows, rivals
from benchmarks.planner_runs import part_of
from benchmarks.planner_tables import (
    TABLES,
    beaten_by,
    error_of,
    first_table,
    headline,
    kept,
    memory_table,
    regret_table,
    speed_table,
    time_table,
)

PICK: dict[str, Any] = {
    "primitives": ["a.conv.x", "a.pool.p", "a.conv.y"],
    "column": 40,
    "patch_out": [8, 16, 4],
    "seconds": 10.0,
}
NAMES = ["a.conv.x", "a.conv.y", "a.conv.z", "a.pool.p"]


def bench(repository: Path, out: Path, *words: str) -> Result:
    """Run the program in a process of its own and read what it wrote."""
    command = [sys.executable, "-m", "benchmarks", "planner", "--quick", "--out", str(out), *words]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read(out)


def result_of(*rows: Row) -> Result:
    """Make a result of a machine that does not exist."""
    return Result("planner", "m", {"processor": "p", "cores": 2, "date": "2026-01-01", "commit": "c"}, list(rows))


def test_first_plans_run_and_keep_their_promise(repository: Path, tmp_path: Path) -> None:
    result = bench(repository, tmp_path / f"planner-{machine_name()}.json", "--do", "first")
    rows = result.of_group("first")
    assert [row.subject for row in rows] == ["assumed", "calibrated", "measured"]
    for row in rows:
        assert (row.unit, len(row.values)) == ("predicted/measured", 1)
        assert row.values[0] == pytest.approx(row.facts["predicted"] / row.facts["voxels_per_second"][0])
        assert row.facts["primitives"]
    promises = result.of_group("memory")
    assert len(promises) == 3
    for promise in promises:
        assert kept(promise)
        assert promise.values[0] == promise.facts["promised_bytes"] / promise.facts["peak_bytes"]


def test_planning_times_of_two_trees_take_turns(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / f"planner-{machine_name()}.json"
    rows = bench(repository, out, "--do", "time", "--against", str(repository)).of_group("time")
    assert [row.subject for row in rows] == ["here", "against"]
    assert rows[0].facts["primitives"] == rows[1].facts["primitives"], "the trees are one"
    for row in rows:
        assert len(row.values) == 2, "the first plan fills the cache and does not count"
        assert all(value > 0 for value in row.values)


def test_rivals_come_from_every_kind_in_turn_and_end_in_random_ones() -> None:
    some = list(islice(rivals(PICK, NAMES, 4, np.random.default_rng(1)), 24))
    assert [kind for kind, _, _ in some[:4]] == ["neighbour", "uniform", "without", "random"]
    assert {kind for kind, _, _ in some[-5:]} == {"random"}
    arguments: dict[str, Any] = {name: words for _, name, words in some}
    assert arguments["as patches"] == {"cover": "patches"}, "the pick has columns"
    assert arguments["not a.conv.x"] == {"only": ["a.conv.y", "a.conv.z", "a.pool.p"]}
    assert "not a.conv.z" not in arguments, "the pick does not use it"
    assert arguments["only a.conv.z"] == {"only": ["a.conv.z"]}
    assert arguments["steps of 8x20x4"] == {"patch": [8, 20, 4]}
    assert "steps of 8x16x0" not in arguments
    patches = [words["patch"] for kind, _, words in some if kind == "random"]
    for patch in patches:
        for size, of_pick in zip(patch, PICK["patch_out"], strict=True):
            assert size % 4 == 0
            assert of_pick / 2 - 2 <= size <= 2 * of_pick + 2


@pytest.mark.parametrize(
    ("seconds", "part"),  # of 200 s for 200,000 voxels: 1 ms each
    [
        (1000.0, (100, 40, 50)),  # all of it
        (50.0, (100, 40, 10)),  # 40,000 voxels: whole columns, first those along y
        (6.0, (30, 20, 10)),  # 6,000 voxels: three steps along the axis
        (0.1, (10, 20, 10)),  # one step at the least
    ],
)
def test_the_part_of_a_run_grows_along_the_axis_first(seconds: float, part: tuple[int, ...]) -> None:
    made = {"output": [100, 40, 50], "patch_out": [10, 20, 10], "axis": 0, "seconds": 200.0}
    assert part_of(made, seconds) == part


def test_promises_are_divided_by_peaks_of_ram_and_of_vram() -> None:
    runs = [
        {"peak_bytes": None, "ram_promised": 5, "vram_peak_bytes": peak, "vram_promised": 120} for peak in (100, 150)
    ]
    (row,) = promise_rows("case", "plan", runs, {})
    assert (row.case, row.values) == ("case, VRAM", (1.2, 0.8))
    assert row.facts["peak_bytes"] == 150
    assert not kept(row), "a promise that one run broke is broken"


def test_errors_and_verdicts() -> None:
    assert error_of(Row("predict", "c", "s", "u", (1.25,))) == pytest.approx(0.25)
    assert error_of(Row("predict", "c", "s", "u", (0.8,))) == pytest.approx(0.25)
    rows = [
        Row("regret", "c", "surely", "u", (1.10, 1.01, 1.05), facts={"kind": "random"}),
        Row("regret", "c", "not in every round", "u", (1.20, 0.99, 1.10), facts={"kind": "random"}),
        Row("regret", "c", "by too little", "u", (1.02, 1.01), facts={"kind": "random"}),
        Row("regret", "c", "not run", "u", failure="slow", facts={"kind": "uniform"}),
    ]
    assert [row.subject for row in beaten_by(rows)] == ["surely"]
    assert "| c | random | 3 | 3 | 1.10 | not in every round | 1 |" in regret_table(result_of(*rows))
    assert "| c | uniform | 1 | 0 | - | - | 0 |" in regret_table(result_of(*rows))


def test_tables_and_headline_say_what_was_found() -> None:
    speeds = {"voxels_per_second": [2e6, 4e6]}
    first = {"predicted": 4.5e6, "planning_wall_seconds": 7.0}
    result = result_of(
        Row("first", "n 5^3 within 1G", "assumed", "u", (9.0,), facts=speeds | first),
        Row("first", "n 5^3 within 1G", "calibrated", "u", (1.5,), facts=speeds | first),
        Row("predict", "n 5^3 within 1G", "measured", "u", (0.5,), facts=speeds),
        Row("memory", "a, RAM", "plan", "u", (1.1, 1.2)),
        Row("memory", "b, RAM", "plan", "u", (0.9, 1.2)),
        Row("time", "n 5^3 within 1G", "here", "s", (1.0, 2.0, 3.0)),
        Row("time", "n 5^3 within 1G", "against", "s", (4.0, 4.0, 5.0)),
    )
    assert "| n 5^3 within 1G | calibrated | 4.50 M | 3.00 M | 1.50 | 7.00 |" in first_table(result)
    assert "| n 5^3 within 1G | `--no-calibrate` | 4.50 M | 3.00 M | 9.00 | 7.00 |" in first_table(result)
    assert "| n 5^3 within 1G | - | - | 0.5 | 3.00 M |" in speed_table(result)
    assert "| RAM | 2 | 1 | 0.9 | 1.00 | 1.10 |" in memory_table(result)
    assert "| n 5^3 within 1G | 2.00 | 1.00 to 3.00 | 0.5 |" in time_table(result)
    assert headline(result) == (
        "first plans off by 50 %, measured costs off by 100 %, 1 of 2 promises of memory broken"
    )
    for table in TABLES.values():
        assert "python -m benchmarks planner" in table({}), "without a result the command is named"


def test_runs_on_a_gpu_go_from_memory_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        """A device with 700 bytes free at first and 400 from then on."""

        def __init__(self, gpu: str) -> None:
            assert gpu == "the first one"
            self.free = [700]

        def __enter__(self) -> Gpu:
            return self

        def __exit__(self, *cause: object) -> None:
            pass

        def free_bytes(self) -> int:
            return self.free.pop() if self.free else 400

    class Report:
        def as_json(self) -> dict[str, Any]:
            time.sleep(0.1)  # somebody looks at the memory meanwhile
            stages = {"planning": 9.0, "preparing": 1.0, "computing": 2.0, "waiting": 3.0, "reading": 2.5}
            return {"stage_seconds": stages, "seconds": 20.0, "peak_bytes": 1,
                    "predicted": {"seconds": 5.0, "peak_bytes": 2, "vram_bytes": 620}}  # fmt: skip

    def infer(volume: Any, network: str, *, plan: str, out: Discard, device: str) -> Report:
        assert (volume.shape, out.shape, device, plan) == ((6, 7, 8), (2, 3, 4, 5), "gpu", "plan.json")
        return Report()

    monkeypatch.setattr(znnpy, "infer", infer)
    monkeypatch.setattr(znnpy, "Device", Gpu)
    monkeypatch.setattr(znnpy, "find_gpu", lambda: "the first one")
    monkeypatch.setattr(planner_runs, "free_vram", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")  # the run sets it
    request = {"device": "gpu", "volume": [6, 7, 8], "out": [2, 3, 4, 5], "part": [3, 4, 5], "times": 2}
    found = list(planner_runs.run({**request, "cache": "nowhere", "network": "n", "plan": "plan.json"}))
    assert [one["seconds"] for one in found] == [6.0, 6.0], "neither planning nor what overlaps with computing"
    assert found[1]["vram_peak_bytes"] == 600
    assert found[1]["peak_bytes"] is None, "of the host nothing is promised here"
    (row,) = promise_rows("case", "plan", found[1:], {})
    assert (row.case, row.values) == ("case, VRAM", (620 / 600,))
