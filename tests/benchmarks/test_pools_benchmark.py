"""The benchmark of poolings runs, once and tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_pools_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "pools.json"
    command = [sys.executable, str(repository / "benchmarks" / "pools.py"), "--quick", "--no-torch", "--rounds", "2"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert {"copy", "cpu.pool.fragments"} <= set(row["seconds"])
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row["seconds"].values())
    assert set(row["of_copy"]) == set(row["seconds"]) - {"copy"}
    assert result["header"]["command"].startswith("python pools.py")
