"""The benchmark of single layers runs, once and tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_layers_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    command = [sys.executable, str(repository / "benchmarks" / "layers.py"), "--quick", "--no-torch"]
    done = subprocess.run([*command, "--rounds", "2", "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {row["name"] for row in result["rows"]} == {"cpu.conv.direct", "cpu.conv.fft_data", "cpu.conv.fft_tiled"}
    assert all(len(row["seconds"]) == 2 and 0 < row["min_ns"] <= row["median_ns"] for row in result["rows"])
    assert result["header"]["layer_threads"] >= 1
