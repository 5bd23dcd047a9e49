"""Describe the machine for the header of a result, and measure its limits."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import znnpy
from benchmarks.harness.timing import DeviceClock, TorchClock
from znnpy.machine import this_machine

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("numpy", "pyfftw", "h5py", "zarr", "torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "znnpy")
READINGS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "power.draw",
    "temperature.gpu",
)
COPIED_BYTES = 2**30
MATRIX = 8192  # rows and columns
ROUNDS = 5  # measurements of every limit; the median counts


def machine_name(gpu: Any = None, gpus: int = 1) -> str:
    """Return the machine's name in file names: "amd-epyc-2cores", "nvidia-h100-80gb-hbm3", "nvidia-h200-x2"."""
    if gpu is not None:
        return _slug(gpu.name) + (f"-x{gpus}" if gpus > 1 else "")
    machine = this_machine()
    return f"{_slug(' '.join(machine.processor.split()[:3]))}-{machine.cores}cores"


def multiplies_bf16() -> bool:
    """Return whether this processor has instructions for bfloat16; unknown outside Linux, and then False."""
    info = Path("/proc/cpuinfo")
    return info.exists() and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(info.read_text().split())


def header(gpu: Any = None) -> dict[str, Any]:
    """Return processor, memory, BLAS kernels, versions, commit, command and time, and the description of the GPU.

    `load` is the average number of processes that ran in the last minute: others, since this one has just begun.
    """
    machine = this_machine()
    about: dict[str, Any] = {
        "processor": machine.processor,
        "simd": machine.simd,
        "cores": machine.cores,
        "ram_gib": round(machine.ram_bytes / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "blas": machine.blas,
        "python": sys.version.split()[0],
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "commit": _commit(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("ZNNPY_")},
        "command": " ".join(["python -m benchmarks", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if gpu is not None:
        about |= {"gpu": asdict(gpu) | {"versions": dict(gpu.versions)}, "readings": readings()}
    return about


def readings() -> dict[str, str] | None:
    """Return the present clocks, power and temperature of the GPU; None if no driver answers."""
    command = ["nvidia-smi", f"--query-gpu={','.join(READINGS)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(READINGS, (word.strip() for word in output.splitlines()[0].split(",")), strict=True))


def torch_sees_a_gpu() -> bool:
    """Return whether PyTorch is installed and finds a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def copy_rate(device: Any, nbytes: int = COPIED_BYTES) -> float:
    """Measure the bytes per second of a copy in the memory of a `znnpy.Device`; bytes read and bytes written count."""
    source, target = (device.allocate(nbytes, f"the {what} of a copy") for what in ("source", "target"))
    clock = DeviceClock(device)

    def copy() -> None:
        device.copy_async(target, source, device.stream)

    clock.seconds(copy)
    return 2 * nbytes / median(clock.seconds(copy, 4) for _ in range(ROUNDS))


def product_rates(size: int = MATRIX) -> dict[str, float]:
    """Measure the operations per second of PyTorch's products of random matrices on the GPU, by precision."""
    import torch

    rates = {}
    clock = TorchClock()
    for precision, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("fp16", torch.float16)):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))

        def multiply(a: Any = a, b: Any = b) -> Any:
            return a @ b

        clock.seconds(multiply)
        rates[precision] = 2 * size**3 / median(clock.seconds(multiply, 4) for _ in range(ROUNDS))
    torch.cuda.empty_cache()
    return rates


def find_gpu(wanted: str) -> Any:
    """Return the GPU for `--device gpu`, and None for `--device cpu`; DeviceError says why there is none."""
    return znnpy.find_gpu() if wanted == "gpu" else None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        output = ""
    return output or "unknown"
