"""The machine a plan is for: cores, memory, libraries. What a process may use, not what the hardware has."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_DEFAULT_SHARE = 0.75  # of the machine's memory: the rest stays for the file cache and everybody else


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
        processor=processor(),
        simd=_simd(),
        cores=_cores(),
        ram_bytes=_ram_bytes(),
        blas=blas_kernels(),
        versions=tuple((name, importlib.metadata.version(name)) for name in ("numpy", "pyfftw")),
    )


def parse_bytes(size: int | str) -> int:
    """Bytes from `2G`, `600M`, `1.5T` (powers of 1024) or a plain number; ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"{size!r} is no size: give a number with K, M, G or T, such as 600M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def limits_of(machine: Machine, ram: int | str | None = None, threads: int | None = None) -> Limits:
    """Limits as asked for; by default three quarters of the memory and every core this process may use."""
    ram_bytes = int(_DEFAULT_SHARE * machine.ram_bytes) if ram is None else parse_bytes(ram)
    count = machine.cores if threads is None else threads
    if ram_bytes < 1:
        raise ValueError(f"a RAM limit must be positive, not {ram_bytes} bytes")
    if count < 1:
        raise ValueError(f"a run needs at least one thread, not {count}")
    return Limits(ram_bytes, count)


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


def processor() -> str:
    """Name of the processor, as the system gives it."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _simd() -> str:
    flags = _cpu_info("flags").split()
    return "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "other"
