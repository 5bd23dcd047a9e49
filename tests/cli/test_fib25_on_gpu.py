"""The FIB-25 volume, whole, on a GPU: the CPU's output, verified, within the memory that was promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from znnpy.inference import infer
from znnpy.report.run_report import Report
from znnpy.shapes import Precision
from znnpy.verify import verify

pytestmark = pytest.mark.gpu

RMS = {"fp32": 3e-6, "tf32": 2e-3, "fp16": 1e-2}  # of the errors of seven layers, over that of the answers


@pytest.fixture(scope="module")
def volume(shared_data: Path) -> Path:
    return shared_data / "fib25_train.h5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fib25")


@pytest.fixture(scope="module")
def on_the_cpu(volume: Path, folder: Path) -> np.ndarray[Any, Any]:
    out = folder / "cpu.h5"
    infer(volume, out=out, device="cpu")
    return prediction(out)


def prediction(out: Path) -> np.ndarray[Any, Any]:
    with h5py.File(out) as file:
        return np.array(file["prediction"])


@pytest.mark.usefixtures("cuda_device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"cover": "patches", "vram": "2G"}, {"cover": "columns", "patch": (16, 64, 64)}],
    ids=["as planned", "patches in 2 GiB", "columns"],
)
def test_gpu_output_equals_that_of_the_cpu(
    volume: Path, folder: Path, on_the_cpu: np.ndarray[Any, Any], precision: Precision, arguments: dict[str, Any]
) -> None:
    out = folder / "gpu.h5"
    report: Report = infer(volume, out=out, device="gpu", precision=precision, overwrite=True, **arguments)
    print("", *report.lines(), sep="\n")  # shown with -s: what it ran and how fast
    found = prediction(out)
    error = found - on_the_cpu
    rms = float(np.sqrt(np.square(error, dtype=np.float64).mean() / np.square(on_the_cpu, dtype=np.float64).mean()))
    print(f"{precision}: rms error {rms:.2e} of the rms answer, worst {np.abs(error).max():.2e}")
    assert report.gpu is not None
    if precision == "fp32":
        assert np.abs(error).max() <= 1e-5
    assert rms <= RMS[precision]
    checked = verify(out, volume, samples=200, precision=precision)
    assert checked.predicted_in == precision
    assert report.vram_bytes is not None
    assert report.vram_bytes <= report.plan.memory.vram


@pytest.mark.usefixtures("cuda_device")
def test_separate_process_stays_within_ram_and_vram_promises(volume: Path, folder: Path) -> None:
    """Memory of the process and of the GPU, by the command line."""
    arguments = ["infer", volume, "--out", folder / "own.h5", "--device", "gpu", "--precision", "tf32", "--vram", "4G"]
    command = [sys.executable, "-m", "znnpy", *map(str, arguments), "--json"]
    fresh = {name: str(folder / name) for name in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR")}  # kernels are compiled, too
    done = subprocess.run(command, env={**os.environ, **fresh}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print({key: report[key] for key in ("seconds", "peak_bytes", "vram_bytes", "predicted", "primitives", "notes")})
    assert (report["device"], report["precision"]) == ("gpu", "tf32")
    assert report["peak_bytes"] <= report["predicted"]["peak_bytes"]
    assert report["vram_bytes"] <= report["predicted"]["vram_bytes"] <= 4 * 2**30
