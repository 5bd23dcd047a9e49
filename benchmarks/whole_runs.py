"""Whole runs as a user starts them: `znnpy infer` by a given plan, on a random volume, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from znnpy.formats.networks import read_network
from znnpy.formats.weights import random_weights
from znnpy.planner.plan import Plan
from znnpy.shapes import Vec3, text

SEED = 20261121


@dataclass(frozen=True, slots=True)
class Whole:
    """What a run said of itself."""

    wall_seconds: float  # of the process
    seconds: float  # from opening the volume to renaming the output
    stage_seconds: dict[str, float]  # reading, computing, writing, waiting
    voxels: int
    peak_bytes: int  # VmHWM of the process
    promised_bytes: int
    failure: str | None = None

    @property
    def promised_over_peak(self) -> float:
        return self.promised_bytes / self.peak_bytes if self.peak_bytes else 0.0

    @property
    def kept(self) -> bool:
        """The promise."""
        return 0 < self.peak_bytes <= self.promised_bytes


def random_volume(folder: Path, size: Vec3, channels: int) -> Path:
    """An HDF5 file of random grey values, uint8, contiguous; (z, y, x), or (c, z, y, x). Made once for each size."""
    path = folder / f"{channels}x{text(size)}.h5"
    if not path.exists():
        rng = np.random.default_rng(SEED)
        shape = size if channels == 1 else (channels, *size)
        with h5py.File(path, "w") as file:
            made = file.create_dataset("raw", shape, np.uint8)
            for plane in np.ndindex(*shape[:-2]):
                made[plane] = rng.integers(0, 256, shape[-2:], np.uint8)
    return path


def weights_file(folder: Path, name: str) -> Path:
    """Random weights of a network in a file."""
    network = read_network(name).network
    path = folder / f"{network.name}.npz"
    if not path.exists():
        arrays = {}
        for index, weights in enumerate(random_weights(network)):
            arrays[f"conv{index}_weight"], arrays[f"conv{index}_bias"] = weights.weight, weights.bias
        np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def infer(folder: Path, name: str, volume: Path, plan: Plan, *, limit_seconds: float) -> Whole:
    """Run a plan over a volume; the output is deleted again."""
    made, plan_file, weights = folder / "prediction.h5", folder / "plan.json", weights_file(folder, name)
    plan_file.write_text(plan.to_json())
    words = [volume, "--network", name, "--weights", weights, "--plan", plan_file, "--out", made]
    command = [sys.executable, "-m", "znnpy", "infer", *map(str, words), "--overwrite", "--json"]
    begin = time.perf_counter()
    nothing: dict[str, Any] = {"seconds": 0.0, "stage_seconds": {}, "voxels": 0, "peak_bytes": 0}
    report, failure, promised = nothing, None, plan.memory.peak
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        failure = f"not done after {limit_seconds:.0f} s"
    else:
        if done.returncode == 0:
            report = json.loads(done.stdout)
            promised = report["predicted"]["peak_bytes"]
        else:
            failure = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    wall = time.perf_counter() - begin
    for left in folder.glob("prediction.h5*"):
        left.unlink()
    figures = {key: report[key] for key in nothing}
    return Whole(wall_seconds=wall, promised_bytes=promised, failure=failure, **figures)
