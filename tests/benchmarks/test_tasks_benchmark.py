"""The benchmark of task against data parallel convolution runs, once and tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_tasks_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks.json"
    command = [sys.executable, str(repository / "benchmarks" / "tasks.py"), "--quick", "--threads", "1", "2"]
    done = subprocess.run([*command, "--rounds", "2", "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["threads"] for row in rows] == [1, 2]
    for row in rows:
        assert len(row["data"]) == len(row["tasks"]) == 2
        assert row["ratio"] > 0
        assert {kind: count for kind, (count, _) in row["task_seconds"].items()} == {
            "sync": 4,
            "input": 1,
            "kernel": 1,
            "multiply": 1,
            "output": 1,
        }
