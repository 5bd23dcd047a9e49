"""benchmarks/pruned.py runs, once and tiny, on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from znnpy.kernels.gpu.device import Device


@pytest.mark.gpu
def test_transforms_on_a_gpu_are_compared(cuda_device: Device, repository: Path, tmp_path: Path) -> None:
    assert cuda_device.gpu.name
    out = tmp_path / "pruned.json"
    words = ["--device", "gpu", "--quick", "--rounds", "2", "--out", str(out)]
    command = [sys.executable, str(repository / "benchmarks" / "pruned.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["what"] for row in result["rows"]] == ["kernel", "image"]
    assert [list(row["ratios"]) for row in result["rows"]] == [["plain", "lines", "pruned"], ["plain", "lines"]]
    assert all(len(seconds) == 2 for row in result["rows"] for seconds in row["seconds"].values())
    assert "gpu" in result["header"]
