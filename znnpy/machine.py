"""Describe the machine that a plan is for: the cores, memory and libraries that this process may use."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.metadata
import json
import operator
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from numbers import Integral
from pathlib import Path, PurePosixPath

from znnpy.errors import DeviceError
from znnpy.files import open_regular
from znnpy.messages import option
from znnpy.units import human_bytes

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
_FEWEST = 2.0**20  # bytes: a smaller number without a unit lacks the unit by mistake
_LARGEST = 2.0**60  # bytes: longer numbers are mistakes
_DEFAULT_SHARE = 0.75  # share of the machine's memory; the rest is for the file cache and other programs
AMX, AVX512_BF16 = "amx", "avx512_bf16"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: asm/unistd_64.h, asm/prctl.h
_DEFAULT_VRAM_SHARE = 0.9  # share of the card's free memory; the rest is for the programs that draw the screen


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device, as it describes itself."""

    name: str
    capability: tuple[int, int]  # (9, 0): sm_90
    multiprocessors: int
    memory_bytes: int  # all memory of the card, used or not
    l2_bytes: int
    shared_block_bytes: int  # shared memory that one block may have
    shared_multiprocessor_bytes: int
    bandwidth: float  # bytes per second, from clock and width of its memory
    driver: int  # version of CUDA that the driver supports: 13000 is 13.0
    versions: tuple[tuple[str, str], ...]  # versions of CuPy, CUDA's libraries, and cuDNN's frontend if it is installed


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a machine that determine which primitives apply and how fast they are."""

    processor: str
    simd: str  # widest vector instructions: avx512 | avx2 | other
    cores: int  # cores that this process may run on (affinity, cgroup quota)
    ram_bytes: int  # memory that this process may use (cgroup limit, physical memory)
    blas: str  # kernels that BLAS runs, e.g. "openblas SkylakeX"
    versions: tuple[tuple[str, str], ...]  # versions of the libraries that determine speed and rounding
    gpu: Gpu | None = None  # the GPU that this run may use; None: it was not asked for, or there is none
    bf16: tuple[str, ...] = ()  # what multiplies matrices of bfloat16, the fastest first: amx | avx512_bf16

    @property
    def fingerprint(self) -> str:
        """Digest of all fields but what the machine lacks. Plans and measured costs belong to one fingerprint."""
        said = {name: value for name, value in asdict(self).items() if name not in ("gpu", "bf16") or value}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def blas_warning(self) -> str | None:
        """Warning if BLAS runs kernels for an older processor than this one; else None."""
        slow = self.simd == "avx512" and any(name in self.blas for name in ("Haswell", "Zen", "Sandybridge", "Nehalem"))
        if not slow:
            return None
        cause = "OPENBLAS_CORETYPE is set" if "OPENBLAS_CORETYPE" in os.environ else "the library chose them"
        return f"BLAS runs {self.blas} kernels on an AVX-512 processor ({cause}): products run at about half speed"


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory and threads that a run may use."""

    ram_bytes: int  # limit of the whole process
    threads: int
    vram_bytes: int | None = None  # limit of the GPU, including all that this process takes there; None: no GPU is used

    def part(self, number: int) -> Limits:
        """Return limits with one `number`-th of the memory of the device that runs the layers."""
        if self.vram_bytes is None:
            return replace(self, ram_bytes=self.ram_bytes // number)
        return replace(self, vram_bytes=self.vram_bytes // number)

    def without_feed_threads(self, gpus: int) -> Limits:
        """Return limits without the cores of the threads that feed GPUs, one for each GPU."""
        return replace(self, threads=max(1, self.threads - gpus))


@cache
def this_machine() -> Machine:
    """Describe the machine this process runs on. Imports numpy, to ask BLAS which kernels it runs."""
    return Machine(
        processor=processor(),
        simd=_simd(),
        cores=_cores(),
        ram_bytes=_ram_bytes(),
        blas=blas_kernels(),
        versions=tuple((name, importlib.metadata.version(name)) for name in ("numpy", "pyfftw")),
        bf16=_bf16(),
    )


def parse_bytes(size: int | str) -> int:
    """Return the bytes of `2G`, `600M`, `1.5T` (powers of 1024) or a plain number; ValueError for other text.

    TypeError for a value that is neither text nor a whole number: 2e9 is a float.
    """
    if not isinstance(size, str):
        try:
            return operator.index(size)
        except TypeError:
            raise TypeError(
                f"a size is a whole number of bytes or text such as '600M' or '2G', and {size!r} is "
                f"a {type(size).__name__}"
            ) from None
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"{size!r} is not a size: give a number with K, M, G or T, such as 600M or 2G")
    size_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if match[1] == size.strip() and 0 < size_bytes < _FEWEST:
        raise ValueError(f"{size!r} has no unit and means bytes, too few for a run: write {match[1]}M or {match[1]}G")
    if size_bytes > _LARGEST:
        raise ValueError(f"{size[:20]!r}.. is beyond any memory: give a size such as 600M or 2G")
    return int(size_bytes)


def limits_of(
    machine: Machine,
    ram: int | str | None = None,
    threads: int | None = None,
    vram: int | str | None = None,
    *,
    free_bytes: int | None = None,
    beyond: bool = False,
) -> Limits:
    """Return the limits asked for; by default three quarters of the memory and all cores of this process.

    free_bytes  of the GPU's memory, including what this process already holds of it: `vram` may not exceed it, and is
                nine tenths of it by default. None if no GPU is used; then there is no limit on its memory.
    beyond      whether `vram` may exceed the free memory, since nothing runs now

    DeviceError if other programs hold so much of the GPU's memory that `vram` is not free.
    """
    ram_bytes = int(_DEFAULT_SHARE * machine.ram_bytes) if ram is None else parse_bytes(ram)
    count = machine.cores if threads is None else threads
    if ram_bytes < 1:
        raise ValueError(f"a RAM limit must be positive, not {ram_bytes} bytes")
    if not isinstance(count, Integral):
        raise ValueError(f"threads is a whole number, not {count!r}")
    if count < 1:
        raise ValueError(f"a run needs at least one thread, not {count}")
    return Limits(ram_bytes, count, None if free_bytes is None else _vram_bytes(machine, vram, free_bytes, beyond))


def _vram_bytes(machine: Machine, vram: int | str | None, free_bytes: int, beyond: bool) -> int:
    if machine.gpu is None:
        raise ValueError("free memory of a GPU is given for a machine without one")
    if vram is None:
        return int(_DEFAULT_VRAM_SHARE * free_bytes)
    vram_bytes = parse_bytes(vram)
    if vram_bytes < 1:
        raise ValueError(f"a VRAM limit must be positive, not {vram_bytes} bytes")
    if vram_bytes > free_bytes and not beyond:
        raise DeviceError(
            f"{option('vram')} allows {human_bytes(vram_bytes)}, and of the {human_bytes(machine.gpu.memory_bytes)} of "
            f"the {machine.gpu.name} only {human_bytes(free_bytes)} are free (other programs and the driver hold the "
            f"rest); end those programs, or give at most {option('vram', f'{free_bytes // 2**20}M')}"
        )
    return vram_bytes


def blas_kernels() -> str:
    """Return the name of the BLAS that numpy runs, and of its kernels, e.g. `openblas SkylakeX`."""
    import numpy as np  # noqa: F401 - loads BLAS into the process
    from threadpoolctl import threadpool_info

    for info in threadpool_info():
        if info["user_api"] == "blas":
            return f"{info['internal_api']} {info.get('architecture', 'unknown')}"
    return "unknown"


def process_bytes() -> int:
    """Return the resident memory of this process: interpreter, libraries and data of the caller."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Most resident memory this process ever had.

    Linux's VmHWM where there is one: its getrusage also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    counted = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
    if counted:
        return 1024 * int(counted[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def give_back_memory() -> None:
    """Give memory that is not used any more back to the system, as far as the C library can."""
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)


def _cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(int, cgroup_cpus())]))


def _ram_bytes() -> int:
    import psutil

    return min([int(psutil.virtual_memory().total), *cgroup_bytes()])


def cgroup_bytes(own: Path = OWN_CGROUPS, root: Path = CGROUPS) -> Iterator[int]:
    """Yield every limit on the memory of this process: of its control groups and those around them.

    own   file that lists the groups of this process, as /proc/self/cgroup; it need not exist.
    root  folder where the groups are mounted.
    """
    for folder in _groups("memory", own, root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # names of cgroup v2, v1
            if limit := _count(_text(folder / name)):
                yield limit


def cgroup_cpus(own: Path = OWN_CGROUPS, root: Path = CGROUPS) -> Iterator[float]:
    """Yield every quota on the processors of this process, in processors; parameters as for `cgroup_bytes`."""
    for folder in _groups("cpu", own, root):
        quotas = (
            _text(folder / "cpu.max").split(),
            [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")],
        )
        for quota in quotas:
            counts = [_count(number) for number in quota]
            if len(counts) == 2 and counts[0] and counts[1]:
                yield counts[0] / counts[1]


def _groups(controller: str, own: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of the groups of this process and of all groups around them, up to the mount point.

    In a container a group may lie outside of the mount; then the mount itself is the group of the container. The same
    holds if `own` lists no group.
    """
    lines = [line.split(":", 2) for line in _text(own).splitlines() if "\0" not in line]
    listed = [line[1:] for line in lines if len(line) == 3 and line[2].startswith("/")]
    for controllers, path in listed or [["", "/"]]:
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        inside = [] if ".." in group.parts else [group, *group.parents]
        for mount in (root / controller, root / controllers) if controllers else (root, root / "unified"):
            for folder in dict.fromkeys([*inside, PurePosixPath("/")]):
                yield mount / folder.relative_to("/")


def _text(path: Path) -> str:
    """Return the content of a system file; empty if it does not exist or cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace").strip()
    except OSError:  # an unknown limit counts as none
        return ""


def _count(text: str) -> int | None:
    """Return the positive number that a system file holds; None for `max`, -1, 0 and anything else without a limit."""
    return int(text) or None if re.fullmatch("[0-9]{1,19}", text) else None


def _cpu_info(field: str) -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""


def processor() -> str:
    """Return the name of the processor, as the system gives it."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _simd() -> str:
    flags = set(_cpu_info("flags").split())
    avx2 = {"avx2", "fma"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    return "avx512" if avx512 <= flags else "avx2" if avx2 <= flags else "other"


def _bf16() -> tuple[str, ...]:
    """Return the units that multiply matrices of bfloat16 here, the fastest first."""
    flags = set(_cpu_info("flags").split())
    if _simd() != "avx512" or "avx512_bf16" not in flags:
        return ()
    return (AMX, AVX512_BF16) if {"amx_tile", "amx_bf16"} <= flags and may_use_amx() else (AVX512_BF16,)


def may_use_amx() -> bool:
    """Ask the system for the registers of AMX, for all threads of this process, and return whether it gives them."""
    library = ctypes.CDLL(None, use_errno=True)
    return bool(library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
