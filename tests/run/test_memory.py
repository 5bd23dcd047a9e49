"""Memory is a promise: what the system counts for a whole process stays below what its plan says, and below --ram."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

MIB = 2**20

NETWORK = """
name: thin
input_channels: 1
normalise: {mean: 0.5, std: 0.3}
weights: thin.npz
layers:
- {type: conv, kernel: 2, out: 1, activation: sigmoid}
"""


def infer(volume: Path, *words: str) -> tuple[int, int]:
    """One process of `znnpy infer`: what its plan promises, and the most memory the system counted for it; bytes."""
    command = [sys.executable, "-m", "znnpy", "infer", str(volume), "--json", *words]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return report["predicted"]["peak_bytes"], report["peak_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_a_volume_larger_than_ram_runs_within_it(tmp_path: Path) -> None:
    (tmp_path / "thin.yaml").write_text(NETWORK)
    weight, bias = np.ones((1, 1, 2, 2, 2), np.float32), np.zeros(1, np.float32)
    np.savez(tmp_path / "thin.npz", conv0_weight=weight, conv0_bias=bias)
    volume = tmp_path / "volume.h5"
    with h5py.File(volume, "w") as file:  # 216 MB of zeros that take no disk
        file.create_dataset("raw", (300, 300, 300), np.float64, chunks=(60, 60, 60))
    out = tmp_path / "out.h5"
    words = ("--network", str(tmp_path / "thin.yaml"), "--ram", "200M", "--out", str(out), "--output-dtype", "uint8")
    promise, peak = infer(volume, *words)
    assert peak <= promise <= 200 * MIB < volume_bytes(volume)
    with h5py.File(out) as file:
        prediction = file["prediction"][::37, ::41, ::43]
    exact = 1 / (1 + np.exp(8 * 0.5 / 0.3))  # sigmoid of eight normalised zeros
    assert (prediction == round(255 * exact)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
@pytest.mark.parametrize("ram", ["300M", "1G"])
def test_the_promise_is_kept_and_no_more_than_used(tmp_path: Path, ram: str) -> None:
    """The shipped network on noise: peak <= promise, and the promise at most 1.15 times the peak."""
    volume = tmp_path / "volume.h5"
    with h5py.File(volume, "w") as file:
        file["raw"] = np.random.default_rng(4).integers(0, 256, (130, 150, 170), np.uint8)
    promise, peak = infer(volume, "--ram", ram, "--out", str(tmp_path / "out.h5"))
    assert peak <= promise <= 1.15 * peak


def volume_bytes(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file["raw"].size * file["raw"].dtype.itemsize)
