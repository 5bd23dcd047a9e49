"""What every result file says of the machine and the command, and the one trap every benchmark must step around."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARIES = ("numpy", "pyfftw", "h5py", "torch", "znnpy")


def without_forced_blas_kernels() -> None:
    """Start this script again without OPENBLAS_CORETYPE: forced kernels can halve the products of every contestant.

    The variable is read when numpy is loaded, so the process has to begin without it.
    """
    forced = [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ]
    if forced:
        environment = {name: value for name, value in os.environ.items() if name not in forced}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def taken_device(given: Sequence[str] | None = None) -> tuple[str, list[str]]:
    """`cpu` or `gpu`, as `--device` says, and the other words."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    known, words = parser.parse_known_args(given)
    return str(known.device), words


def machine_header() -> dict[str, Any]:
    """Processor, cores, memory, BLAS kernels, library versions, commit, command and time of this measurement."""
    from znnpy.machine import this_machine

    machine = this_machine()
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return {
        "processor": machine.processor,
        "simd": machine.simd,
        "cores": machine.cores,
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "ram_gib": round(machine.ram_bytes / 2**30, 1),
        "blas": machine.blas,
        "python": sys.version.split()[0],
        "libraries": {name: _version(name) for name in LIBRARIES},
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
