"""The machine a plan is for: cores, memory, libraries. What a process may use, not what the hardware has."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What fixes which primitives apply and how fast they are."""

    processor: str
    simd: str  # widest vector instructions: avx512 | avx2 | other
    cores: int  # this process may run on (affinity, cgroup quota)
    ram_bytes: int  # this process may use (cgroup limit, physical memory)
    blas: str  # kernels BLAS runs, e.g. "openblas SkylakeX"
    versions: tuple[tuple[str, str], ...]  # libraries that decide speed and rounding

    @property
    def fingerprint(self) -> str:
        """Digest of all fields: plans and measured costs belong to one fingerprint."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def blas_warning(self) -> str | None:
        """A sentence when BLAS runs kernels below what the processor has."""
        slow = self.simd == "avx512" and any(name in self.blas for name in ("Haswell", "Zen", "Sandybridge", "Nehalem"))
        if not slow:
            return None
        cause = "OPENBLAS_CORETYPE is set" if "OPENBLAS_CORETYPE" in os.environ else "the library chose them"
        return f"BLAS runs {self.blas} kernels on an AVX-512 processor ({cause}): products run at about half speed"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use."""

    ram_bytes: int  # of the whole process
    threads: int


@cache
def this_machine() -> Machine:
    """The machine this process runs on. Imports numpy, to ask BLAS which kernels it runs."""
    return Machine(
        processor=_processor(),
        simd=_simd(),
        cores=_cores(),
        ram_bytes=_ram_bytes(),
        blas=blas_kernels(),
        versions=tuple((name, importlib.metadata.version(name)) for name in ("numpy", "pyfftw")),
    )


def blas_kernels() -> str:
    """Name of the BLAS that numpy runs and of its kernels, e.g. `openblas SkylakeX`."""
    import numpy as np  # noqa: F401 - loads BLAS into the process
    from threadpoolctl import threadpool_info

    for info in threadpool_info():
        if info["user_api"] == "blas":
            return f"{info['internal_api']} {info.get('architecture', 'unknown')}"
    return "unknown"


def process_bytes() -> int:
    """Resident memory of this process now: interpreter, libraries and what the caller holds."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max")
    if quota and not quota.startswith("max"):
        share, period = map(int, quota.split())
        allowed = min(allowed, max(1, share // period))
    return allowed


def _ram_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _cgroup(name)
        if limit and limit.isdigit():
            total = min(total, int(limit))
    return total


def _cgroup(name: str) -> str | None:
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.is_file() else None


def _cpu_info(field: str) -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith(field):
                return line.partition(":")[2].strip()
    return ""


def _processor() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _simd() -> str:
    flags = _cpu_info("flags").split()
    return "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "other"
