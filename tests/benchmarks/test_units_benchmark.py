"""The benchmark of the units for bfloat16: it runs where there is one, and says so where there is none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from benchmarks import units
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read
from benchmarks.unit_tables import PROGRAM
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from pathlib import Path


def test_a_processor_without_a_unit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "this_machine", lambda: replace(this_machine(), bf16=()))
    result = CliRunner().invoke(units.command, ["--quick"])
    assert result.exit_code == 2
    assert "this processor has no unit for bfloat16" in result.output


@pytest.mark.skipif(not this_machine().bf16, reason="this processor has no unit for bfloat16")
def test_layers_and_errors_are_measured(repository: Path, tmp_path: Path) -> None:
    """The program runs in a process of its own, which it keeps on some cores."""
    unit = this_machine().bf16[0]
    path = tmp_path / f"units-{machine_name()}-{unit.replace('_', '-')}.json"
    command = [sys.executable, "-m", "benchmarks", "units", "--quick", "--no-peers", "--threads", "1"]
    done = subprocess.run([*command, "--out", str(path)], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = read(path)
    assert {row.group for row in found.rows} == {"limits", "errors", "layers"}
    assert not [row for row in found.rows if row.failure]
    errors = {row.subject.split()[-1]: row.median for row in found.of_group("errors")}
    assert errors["bf16"] < 5e-3
    assert errors["bf16x2"] < 1e-5
    assert errors["fp32"] < 1e-6


def test_tables_tell_the_ratio_to_pytorch() -> None:
    case, facts = "conv 64->64 @8x8x8 k3x3x3 none", {"share_of_peak": 0.5, "share_of_products": 0.75, "gflops": 1.0}
    rows = [
        Row("layers", case, "peak of amx", "GFLOP/s", (100.0,)),
        Row("layers", case, "products of amx in L1", "GFLOP/s", (80.0,)),
        Row("layers", case, "amx bf16", "ns/voxel", (2.0,), facts=facts),
        Row("layers", case, "cpu.graph_conv.fft_lanes", "ns/voxel", (9.0,), facts=facts),
        Row("layers", case, "PyTorch bf16", "ns/voxel", (5.0,), facts=facts),
    ]
    about = {"unit": "amx", "threads": 2, "processor": "one", "cores": 2, "date": "2026-01-01", "commit": "abc"}
    result = Result("units", "one-amx", about, rows)
    table = PROGRAM.tables["units-layers"]({"units": [result]})
    assert "| conv 64->64 @8x8x8 k3x3x3 | 2.00 | 0.50, 0.75 | - | - | 9.00 | 5.00 | - | 2.5x |" in table
    assert PROGRAM.headline(result) == f"{case}: 2.5x PyTorch bf16"
