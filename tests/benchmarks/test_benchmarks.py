"""The benchmarks run, once and tiny: single layers, whole networks, a volume; what fails in a child is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from znnpy.kernels.table import of_kind
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape

TINY = """\
name: tiny
input_channels: 2
layers:
- {type: conv, kernel: [1, 3, 2], out: 6, activation: relu}
- {type: pool, window: [2, 2, 1]}
- {type: conv, kernel: [3, 2, 3], out: 6, activation: tanh}
- {type: maxout, of: 2}
- {type: pool, window: [1, 3, 2]}
- {type: maxfilter, window: [2, 1, 3]}
- {type: conv, kernel: [1, 1, 2], out: 2, activation: sigmoid}
"""  # every kind of layer, no two axes alike; patches are multiples of 2x6x2

Benchmark = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def benchmark(repository: Path) -> Benchmark:
    """Runs a script of the benchmarks with these words."""

    def run(script: str, *words: str | Path, request: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(repository / "benchmarks" / script), *map(str, words)]
        said = None if request is None else json.dumps(request)
        return subprocess.run(command, input=said, capture_output=True, text=True, check=False)

    return run


def result(done: subprocess.CompletedProcess[str], out: Path) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def is_picture(path: Path) -> bool:
    with Image.open(path) as image:
        grey = np.asarray(image.convert("L"))
    return bool(grey.min() < 60 and grey.max() == 255)


def test_layers(benchmark: Benchmark, tmp_path: Path) -> None:
    out = tmp_path / "layers.json"
    found = result(benchmark("layers.py", "--quick", "--no-torch", "--rounds", 2, "--threads", 1, 2, "--out", out), out)
    shape = ConvShape(2, 4, 5, (12, 13, 14), (3, 2, 3), "relu")
    applicable = {p.name for p in of_kind("conv") if p.why_not(shape, this_machine()) is None}
    for threads in (1, 2):
        rows = [row for row in found["rows"] if row["threads"] == threads]
        assert {row["name"] for row in rows} == applicable
        assert all(len(row["seconds"]) == 2 and 0 < row["min_ns"] <= row["median_ns"] for row in rows)
        assert all(row["error"] < 1e-5 and not row["is_smaller"] for row in rows)
    assert {"processor", "blas", "commit", "command", "libraries"} <= found["header"].keys()
    assert is_picture(out.with_suffix(".png"))


@pytest.mark.torch
def test_layers_beside_pytorch(benchmark: Benchmark, tmp_path: Path) -> None:
    """What takes too long runs on a smaller volume, and says so."""
    out = tmp_path / "layers.json"
    words = ("--quick", "--rounds", 2, "--only", "cpu.conv.direct", "--slow-seconds", 1e-9, "--out", out)
    found = result(benchmark("layers.py", *words), out)
    assert len([row for row in found["rows"] if row["name"].startswith("torch")]) == 4
    assert all(row["is_smaller"] and row["measured"] == "10x9x10" for row in found["rows"])
    (summary,) = found["summary"]
    assert summary["fastest"] == "cpu.conv.direct"
    for precision in ("fp32", "bf16"):
        peers = [r["median_ns"] for r in found["rows"] if r["name"].startswith(f"torch conv3d {precision}")]
        assert summary[f"torch_{precision}"]["ns_per_voxel"] == min(peers)
        times = summary[f"times_torch_{precision}"]
        assert times["median"] == pytest.approx(min(peers) / summary["ns_per_voxel"])
        assert times["least"] <= times["most"]


@pytest.mark.torch
def test_all_ways_of_pytorch(repository: Path, tmp_path: Path) -> None:
    """Fragments and dilated, both precisions and formats, against the float64 definition, on every kind of layer."""
    network = tmp_path / "tiny.yaml"
    network.write_text(TINY)
    ask = """
import sys; sys.path.insert(0, sys.argv[1])
from itertools import product
import numpy as np
from contestants import random_network
from dense_torch import LAYOUTS, ON_THE_CPU, DenseTorch
from znnpy.formats.weights import random_weights
from znnpy.kernels.reference import dense_by_fragments
network = random_network(sys.argv[2])
weights = random_weights(network)
raw = np.random.default_rng(5).integers(0, 256, (2, *network.patch_in((4, 6, 8))), np.uint8)
exact = dense_by_fragments(network, weights, (np.moveaxis(raw, 0, -1)[None] - 127.5) / 73.9)
exact = np.moveaxis(exact[0], -1, 0)
for way in product(("fragments", "dilated"), ON_THE_CPU, LAYOUTS):
    out = DenseTorch(network, weights, *way)(raw)
    assert out.shape == exact.shape == (2, 4, 6, 8) and out.dtype == np.float32
    print(way[1], np.abs(out - exact).max() / exact.std())
"""
    command = [sys.executable, "-c", ask, str(repository / "benchmarks"), str(network)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ways = [line.split() for line in done.stdout.splitlines()]
    assert len(ways) == 8
    assert all(float(error) < (1e-5 if precision == "fp32" else 0.2) for precision, error in ways)


@pytest.mark.torch
def test_networks(benchmark: Benchmark, tmp_path: Path) -> None:
    out, network = tmp_path / "networks.json", tmp_path / "tiny.yaml"
    network.write_text(TINY)
    words = ("--networks", network, "--patch", 4, 6, 8, "--steps", 2, "--ram", "2G", "--out", out)
    some = ("--sides", 6, "--layouts", "contiguous", "--precisions", "fp32", "--repeat-seconds", 0)
    found = result(benchmark("networks.py", *words, *some), out)
    ours, *peers = found["rows"]
    assert ours["name"] == "znnpy"
    assert len(ours["seconds"]) == 2
    details = ours["details"]
    assert details["column"] > 0
    assert len(details["ahead_seconds"]) >= 1
    step_seconds = ours["seconds"][1] + sum(details["ahead_seconds"]) / details["steps_of_a_column"]
    assert ours["voxels_per_second"] == pytest.approx(4 * 6 * 8 / step_seconds)
    assert {peer["name"] for peer in peers} == {f"PyTorch fp32 {way} contiguous" for way in ("fragments", "dilated")}
    for peer in peers:
        assert peer["failure"] is None
        assert peer["difference"] < 1e-5
        assert peer["peak_mib"] > 0
    fastest = max(peer["voxels_per_second"] for peer in peers)
    assert found["summary"][0]["times_torch_best"] == pytest.approx(ours["voxels_per_second"] / fastest)
    assert is_picture(out.with_suffix(".png"))


@pytest.mark.torch
def test_networks_without_time_or_memory(benchmark: Benchmark, tmp_path: Path) -> None:
    """What could not run is recorded with its reason."""
    out, network = tmp_path / "networks.json", tmp_path / "tiny.yaml"
    network.write_text(TINY)
    words = ("--networks", network, "--patch", 4, 6, 8, "--steps", 1, "--out", out)
    found = result(benchmark("networks.py", *words, "--sides", 6, "--ram", "2G", "--minutes", 1e-9), out)
    assert {row["failure"] for row in found["rows"][1:]} == {"not run: no time left"}
    done = benchmark("networks.py", *words, "--ram", "20M", "--no-torch")
    assert done.returncode == 1
    assert "znnpy did not run, so there is nothing to compare with" in done.stderr


@pytest.mark.torch
def test_a_child_keeps_within_memory(repository: Path, tmp_path: Path) -> None:
    network = tmp_path / "tiny.yaml"
    network.write_text(TINY)
    ask = (
        "import sys; sys.path.insert(0, sys.argv[1]); from networks import CHILD; from apart import run_apart\n"
        "way = {'method': 'dilated', 'precision': 'fp32', 'layout': 'contiguous', 'patch': [600, 600, 600]}\n"
        "job = {'job': 'torch_patch', 'network': sys.argv[2], 'threads': 1, 'repeat_seconds': 0, 'corner': ''}\n"
        "print(run_apart(CHILD, way | job, ram_bytes=2**30, seconds=60).failure)\n"
        "print(run_apart(CHILD, way | job, ram_bytes=2**30, seconds=0.01).failure)\n"
    )
    command = [sys.executable, "-c", ask, str(repository / "benchmarks"), str(network)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["out of memory within 1.0 GiB", "not done after 0 s"]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume.h5"
    with h5py.File(path, "w") as file:
        file["raw"] = np.random.default_rng(3).integers(0, 256, (36, 35, 37), np.uint8)
    return path


@pytest.mark.torch
def test_volume(benchmark: Benchmark, volume: Path) -> None:
    """znnpy and PyTorch predict a volume that is no multiple of the patch."""
    out = volume.with_suffix(".json")
    words = (volume, "--ram", "600M", "--samples", 5, "--rounds", 2, "--sides", 8, "--out", out)
    some = ("--layouts", "channels_last_3d", "--precisions", "fp32")
    found = result(benchmark("volume.py", *words, *some), out)
    assert [peer["failure"] for peer in found["peers"]] == [None, None]
    assert all(peer["largest_difference"] < 1e-5 for peer in found["peers"])
    assert sorted(len(peer["seconds"]) for peer in found["peers"]) == [1, 2]  # the best runs again
    assert len(found["runs"][0]["seconds"]) == 2
    assert found["summary"]["times_torch_fp32"] > 0
    assert found["verify"]["samples"] == 5


def test_volume_is_missing(benchmark: Benchmark, tmp_path: Path) -> None:
    done = benchmark("volume.py", tmp_path / "none.h5")
    assert done.returncode == 0
    assert done.stdout.startswith("nothing measured: there is no volume")
