"""benchmarks/writing.py runs, once and tiny, and against another checkout, which is this one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_writing_runs(repository: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "disk", tmp_path / "writing.json"
    folder.mkdir()
    script = repository / "benchmarks" / "writing.py"
    words = ["--quick", "--folder", str(folder), "--against", str(repository), "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(out.read_text())
    assert said["rounds"] == 2
    assert said["machine"]["cores"] >= 1
    assert [row["dtype"] for row in said["results"]] == ["float32", "uint8"]
    for row in said["results"]:
        assert row["boxes"] == 3 * 3 * 3
        for speed in (row["here"]["gb_per_second"], row["against"]["gb_per_second"], row["times_as_fast"]):
            assert 0 < speed["least"] <= speed["median"] <= speed["most"]
    assert not list(folder.iterdir())
