"""The benchmark of networks in windows: it runs, tiny, with the peers that are here; its tables say what it found."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import znnpy
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read
from benchmarks.harness.window_nets import NETS, grey_noise, torch_module, window_file, windows_of, within
from benchmarks.window_children import kind_of, why_not
from benchmarks.window_tables import PROGRAM
from znnpy.patches import Box
from znnpy.window_cover import WindowCover
from znnpy.windows.settings import Windows

HEADER = {"processor": "a CPU", "cores": 2, "date": "2026-01-02T00:00", "commit": "abc"}


def test_all_groups_are_measured(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / f"windows-{machine_name()}.json"
    command = [sys.executable, "-m", "benchmarks", "windows", "--quick", "--rounds", "2", "--precision", "fp32"]
    done = subprocess.run(
        [*command, "--threads", "1", "--out", str(out)], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = read(out)
    assert not [row for row in result.rows if row.failure and why_not(row.subject.split()[-1]) is None]
    (ours,) = [row for row in result.of_group("peers") if row.subject == "znnpy fp32"]
    assert len(ours.values) == 2
    assert {"conv", "norm", "transpose", "blend"} <= {row.subject for row in result.of_group("operations")}
    (labels,) = result.of_group("memory")
    assert labels.facts["nnunet_logits_bytes"] == 2 * 3 * 24 * 24 * 32
    if why_not("PyTorch") is None:
        assert all(row.median < 1e-5 for row in result.of_group("exactness"))
    for name, table in PROGRAM.tables.items():
        assert "tiny_unet" in table({"windows": [result]}), name


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.window_children.find_spec", lambda name: None if name == "monai" else name)
    assert why_not("PyTorch") == "MONAI cannot be imported"
    monkeypatch.setattr("benchmarks.window_children.find_spec", lambda name: None)
    assert why_not("OpenVINO") == "PyTorch and MONAI and OpenVINO cannot be imported"


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_the_module_is_the_network_of_the_file(tmp_path: Path) -> None:
    import torch

    net = NETS["tiny_unet"]
    raw = grey_noise(net.window)
    ours = np.zeros((net.classes, *net.window), np.float32)
    znnpy.infer(raw, window_file(tmp_path, net), window=net.window, out=ours, calibrate=False)
    with torch.inference_mode():
        theirs = torch_module(net)(torch.from_numpy(raw)[None, None])[0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("size", "most"), [((192, 256, 256), 18), ((192, 256, 256), 5), ((100, 300, 40), 2), ((1, 1, 1), 1)]
)
def test_volumes_are_shortened_to_so_many_windows(size: tuple[int, int, int], most: int) -> None:
    window = (128, 128, 128)
    shorter = within(size, window, most)
    assert windows_of(shorter, window) <= most
    assert all(0 < n <= whole for n, whole in zip(shorter, size, strict=True))
    assert (shorter == size) == (windows_of(size, window) <= most)


@pytest.mark.parametrize("size", [(192, 256, 256), (130, 128, 20), (400, 512, 512)])
def test_windows_are_counted_as_they_are_computed(size: tuple[int, int, int]) -> None:
    windows = Windows((128, 128, 128))
    whole = Box((0, 0, 0), size)
    assert WindowCover(windows, size, whole, 0).computed == windows_of(size, windows.size)


def test_spans_have_the_kind_of_their_primitive() -> None:
    assert [kind_of(name) for name in ("a b cpu.graph_conv.fft_lanes", "n cpu.norm.lanes", "blend")] == [
        "conv", "norm", "blend",
    ]  # fmt: skip


def test_tables_tell_ratios_differences_and_failures() -> None:
    case, facts = "net 1x2x3, 2 threads", {"windows": 4, "peak_bytes": 2**30}
    rows = [
        Row("peers", case, "znnpy fp32", "voxels/s", (4e6, 4e6),
            facts={**facts, "seconds": [1.0, 1.0], "stage_seconds": {"planning": 0.25, "preparing": 0.25}}),
        Row("peers", case, "MONAI, PyTorch fp32", "voxels/s", (2e6, 2e6), facts={**facts, "seconds": [2.0, 2.0]}),
        Row("peers", case, "MONAI, OpenVINO", "voxels/s", failure="OpenVINO cannot be imported"),
        Row("exactness", case, "znnpy fp32", "relative to the largest", (1.5e-6,)),
        Row("operations", f"{case}, fp32", "conv", "s", (3.0,), facts={"operations": 22.0}),
        Row("operations", f"{case}, fp32", "norm", "s", (1.0,), facts={"operations": 22.0}),
        Row("operations", f"{case}, bf16", "znnpy bf16", "s", failure="DeviceError"),
        Row("memory", case, "znnpy fp32", "s", (90.0,),
            facts={"nnunet_logits_bytes": 22e9, "promised_bytes": 2**33, "peak_bytes": 2**32}),
        Row("memory", case, "znnpy bf16", "s", failure="killed", facts={"nnunet_logits_bytes": 22e9}),
    ]  # fmt: skip
    result = Result("windows", "here", HEADER, rows)
    peers, operations, memory = (make({"windows": [result]}) for make in PROGRAM.tables.values())
    assert f"| {case} | znnpy fp32 | 4.00 M | 1.00 | 0.5 | 4 | 1,024 MiB | - | 1.5e-06 |" in peers
    assert f"| {case} | MONAI, PyTorch fp32 | 2.00 M | 2.00 | - | 4 | 1,024 MiB | **2x** | - |" in peers
    assert "OpenVINO cannot be imported" in peers
    assert f"| {case}, fp32 | conv | 22 | 3.00 | 75% |" in operations
    assert "DeviceError" in operations
    assert f"| {case} | znnpy fp32 | 90.0 | 0.50 of 8,192 MiB | 22 GB |" in memory
    assert "killed" in memory
    assert PROGRAM.headline(result) == f"{case}: 4.00 M voxels/s, 2x as fast as MONAI, PyTorch fp32"
    assert PROGRAM.headline(Result("windows", "here", HEADER)) == "-"
