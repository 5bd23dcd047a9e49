"""The benchmark of divisions runs, once and tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_host_ram_divisions_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "divisions.json"
    command = [sys.executable, str(repository / "benchmarks" / "host_ram_divisions.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["vram_gib"] for row in result["rows"]] == [0.05, 0.002]
    for row in result["rows"]:
        found = {name: search["seconds"] for name, search in row["searches"].items()}
        assert found["exact"] >= row["link_seconds"]
        others = [seconds for name, seconds in found.items() if name != "exact" and seconds is not None]
        assert all(found["exact"] <= seconds * (1 + 1e-12) for seconds in others)
        assert all(search["search_seconds"] > 0 for search in row["searches"].values())
    assert result["header"]["card"]
