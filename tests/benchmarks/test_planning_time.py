"""benchmarks/planning_time.py runs, once and tiny, and against another checkout, which is this one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_planning_time_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "planning_time.json"
    script = repository / "benchmarks" / "planning_time.py"
    words = ["--quick", "--against", str(repository), "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["results"]
    for which in ("here", "against"):
        spent = row[which]["seconds"]
        assert 0 < spent["least"] <= spent["median"] <= spent["most"]
        assert row[which]["peak_mib"] < 300
        assert row[which]["layers"] == 8
    assert row["here"]["voxels_per_second"] == row["against"]["voxels_per_second"]


def test_plans_for_a_gpu(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "planning_time.json"
    script = repository / "benchmarks" / "planning_time.py"
    words = ["--quick", "--vram", "16", "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert content["vram_gib"] == 16
    assert content["results"][0]["here"]["voxels_per_second"] > 5e6, "as only a GPU does"
