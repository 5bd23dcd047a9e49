"""The benchmark of parallel efficiency runs, once and tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def test_threads_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "threads.json"
    command = [sys.executable, str(repository / "benchmarks" / "threads.py"), "--quick", "--rounds", "2"]
    some = ["--threads", "1", "2", "--only", "cpu.conv.fft_data", "cpu.conv.fft_tiled", "--out", str(out)]
    done = subprocess.run([*command, *some], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    names = ["products", "copy", "cpu.conv.fft_data", "cpu.conv.fft_tiled"]
    assert sorted((row["name"], row["threads"]) for row in rows) == sorted((n, t) for n in names for t in (1, 2))
    assert all(len(row["found"]) == 2 and min(row["found"]) > 0 for row in rows)
    for name in names:
        one, two = (row for row in rows if row["name"] == name)
        faster = median(two["found"]) / median(one["found"])
        assert one["efficiency"] == 1
        assert two["efficiency"] == pytest.approx((faster if name in ("products", "copy") else 1 / faster) / 2)
    assert out.with_suffix(".png").stat().st_size > 1000


def test_unknown_primitives_are_told(repository: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "threads.py"), "--quick", "--only", "cpu.conv.ftt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no primitive cpu.conv.ftt; there are cpu.conv.direct" in done.stderr
