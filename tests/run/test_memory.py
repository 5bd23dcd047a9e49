"""Memory is a promise: what the system counts for a whole process stays below what its plan says, and below --ram."""

from __future__ import annotations

import json
import os
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


def infer(volume: Path, *words: str) -> tuple[dict, int]:
    """One process of `znnpy infer`: its report, and the most resident memory the system counted for it."""
    command = [sys.executable, "-m", "znnpy", "infer", str(volume), "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return report, usage.ru_maxrss * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is counted in KiB on Linux only")
def test_a_volume_larger_than_ram_runs_within_it(tmp_path: Path) -> None:
    (tmp_path / "thin.yaml").write_text(NETWORK)
    np.savez(tmp_path / "thin.npz", conv0_weight=np.ones((1, 1, 2, 2, 2), np.float32), conv0_bias=np.zeros(1, np.float32))
    volume = tmp_path / "volume.h5"
    with h5py.File(volume, "w") as file:  # 216 MB of zeros that take no disk
        file.create_dataset("raw", (300, 300, 300), np.float64, chunks=(60, 60, 60))
    out = tmp_path / "out.h5"
    words = ("--network", str(tmp_path / "thin.yaml"), "--ram", "200M", "--out", str(out), "--output-dtype", "uint8")
    report, peak = infer(volume, *words)
    assert peak <= report["predicted"]["peak_bytes"] <= 200 * MIB < volume_bytes(volume)
    with h5py.File(out) as file:
        prediction = file["prediction"][::37, ::41, ::43]
    exact = 1 / (1 + np.exp(8 * 0.5 / 0.3))  # sigmoid of eight normalised zeros
    assert (prediction == round(255 * exact)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is counted in KiB on Linux only")
@pytest.mark.parametrize("ram", ["300M", "1G"])
def test_the_promise_is_kept_and_no_more_than_used(tmp_path: Path, ram: str) -> None:
    """The shipped network on noise: peak <= promise, and the promise at most 1.15 times the peak."""
    volume = tmp_path / "volume.h5"
    with h5py.File(volume, "w") as file:
        file["raw"] = np.random.default_rng(4).integers(0, 256, (130, 150, 170), np.uint8)
    report, peak = infer(volume, "--ram", ram, "--out", str(tmp_path / "out.h5"))
    assert peak <= report["predicted"]["peak_bytes"] <= 1.15 * peak


def volume_bytes(path: Path) -> int:
    with h5py.File(path) as file:
        return int(file["raw"].size * file["raw"].dtype.itemsize)
