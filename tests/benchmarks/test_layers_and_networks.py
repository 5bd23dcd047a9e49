"""`layers` and `networks` run, tiny, on the CPU and on the emulator; their tables say what they found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from benchmarks import layer_cases, layers, network_tables, networks
from benchmarks.harness.layer_runner import OnGpu, Problem, fastest, place_of, ratio, smaller
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read
from benchmarks.harness.timing import Budget
from znnpy.kernels.table import of_kind

HEADER = {"processor": "a CPU", "cores": 2, "date": "2026-01-02T00:00", "commit": "abc"}
SHAPES = [
    znnpy.ConvShape(2, 3, 4, (9, 8, 7), (3, 2, 3), "relu"),
    znnpy.ConvShape(1, 3, 4, (10, 9, 11), (2, 3, 3), "relu", (2, 2, 2)),
    znnpy.PoolShape(2, 3, (7, 9, 5), (2, 2, 2)),
    znnpy.PoolShape(2, 3, (8, 6, 4), (2, 3, 2), fragments=False),
    znnpy.FilterShape(2, 3, (7, 8, 9), (2, 1, 3)),
]


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def test_layers_run_on_the_cpu(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / f"layers-{machine_name()}.json"
    done = run(
        repository, "layers", "--quick", "--out", str(out), "--only", "cpu.conv.direct", "-g", "layers", "-g", "pools"
    )
    assert done.returncode == 0, done.stderr
    result = read(out)
    assert result.left_out == []
    (direct,) = [row for row in result.of_group("layers") if row.subject == "cpu.conv.direct"]
    assert direct.failure is None
    assert direct.facts["error"] < 1e-6
    assert min(direct.values) > 0


def test_layers_run_on_a_gpu(device: Any, tmp_path: Path) -> None:
    out = tmp_path / f"layers-{machine_name(device.gpu)}.json"
    only = ("gpu.conv.direct", "gpu.pool.fragments")
    result = layers.measure_all(OnGpu(device), Budget(5), (), only, ("fp16",), out, quick=True)
    assert read(out).rows == result.rows
    ours = [row for row in result.rows if row.subject in only]
    assert [row.failure for row in ours] == [None, None]
    assert all(row.facts["precision"] == "fp16" for row in ours)
    assert "`gpu.conv.direct`" in layers.layers_table("gpu", {"layers": [result]})
    assert "`gpu.conv.direct`" not in layers.layers_table("cpu", {"layers": [result]})


def test_a_gpu_gets_its_inputs_in_turn(device: Any) -> None:
    problem = Problem.of(SHAPES[0], OnGpu(device))
    assert len({id(problem.x()) for _ in range(20)}) == 8, "so small that the cache would hold several"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_method_is_as_exact_as_the_definition(shape: Any) -> None:
    found = []
    with place_of("cpu", 1) as place:
        problem = Problem.of(shape, place)
        for primitive in of_kind(shape.kind):
            if primitive.name.startswith("cpu.") and primitive.why_not(shape, place.machine) is None:
                _, variant = fastest(problem, primitive, primitive.variants(shape, place.machine)[:1], 0.0)
                assert problem.error_of(problem.bound(primitive, variant)) < 1e-6, primitive.name
                found.append(primitive.name)
        if found:
            assert problem.error_of(lambda: problem.out.fill(0.5)) > 0.01
            assert np.isnan(problem.error_of(lambda: None)), "it wrote nothing"
    assert found or shape.kind == "conv", "only on GPUs a convolution pools as well"


def test_a_method_that_is_wrong_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "error_of", lambda self, run: 1e-3)
    with place_of("cpu", 1) as place:
        bench = layers.Bench(Result("layers", "here", HEADER), place, Budget(1), ("cpu.conv.direct",), {"copy": 1e9})
        (row,) = [
            r for r in bench.measure(layer_cases.cases("cpu", "fp32", 1, quick=True)[0], 5.0) if r.subject[:4] == "cpu."
        ]
    assert row.failure == "void: rms error 1.0e-03"


def test_cases_ask_what_the_plan_of_benchmarks_asks() -> None:
    for device in ("cpu", "gpu"):
        found = layer_cases.cases(device, "fp32", 2)
        kernels = {case.shape.k[0] for case in found if case.group == "layers"}
        assert kernels == {2, 3, 5, 7, 9}
        assert {"layers", "first", "few-maps", "pools"} <= {case.group for case in found}
        assert len({(case.group, case.name) for case in found}) == len(found)
        for case in found:
            less = smaller(case.shape)
            assert ratio(case.shape, less) > 4 or case.group == "preparing"


def test_networks_run_on_the_cpu(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / f"networks-{machine_name()}.json"
    done = run(repository, "networks", "--quick", "--ram", "1G", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = read(out)
    ours = [row for row in result.rows if not row.subject.startswith("PyTorch")]
    assert [row.failure for row in ours if row.failure] == []
    assert {row.group for row in ours} == {"networks", "columns", "disk", "exactness"}
    (exact,) = [row for row in ours if row.group == "exactness"]
    assert 0 < exact.median < 1e-5
    table = network_tables.networks_table("cpu", {"networks": [result]})
    assert "tiny" in table
    assert f"networks-{result.machine}.json" in table
    assert "from file to file" in done.stdout


def test_a_network_that_does_not_fit_is_a_row_with_its_reason(tmp_path: Path) -> None:
    asked = networks.Asked("cpu", ("tiny",), "1M", (), ("fp32",), 1.0, 1, 1, True)
    (row,) = [r for r in networks.Bench(asked, tmp_path, Budget(1)).networks("tiny") if r.subject.startswith("znnpy")]
    assert row.failure is not None
    assert row.failure.startswith(("NoPlanError", "out of memory"))


def test_tables_say_how_many_times_as_fast_as_the_peer() -> None:
    facts = {"side": 100, "planned": 4e6}
    rows = [Row("networks", "n337", "znnpy fp32", "voxels/s", (3e6, 3e6), facts=facts),
            Row("networks", "n337", "PyTorch bf16 fragments", "voxels/s", (1e6,)),
            Row("networks", "n337", "PyTorch fp32 plain", "voxels/s", failure="out of memory")]  # fmt: skip
    result = Result("networks", "here", HEADER, rows)
    line = network_tables.networks_table("cpu", {"networks": [result]}).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["n337", "znnpy fp32", "3.00 M", "100^3", "0.75", "1.00 M (PyTorch bf16 fragments)", "3x", "97x"]
    assert network_tables.headline(result) == "n337: 3.00 M voxels/s, 3x as fast as PyTorch bf16 fragments"
