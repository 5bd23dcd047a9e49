"""Load the compiled kernels for this processor, or say why there are none.

Setup compiles the same sources once for AVX2 and once for AVX-512, if there is a compiler; the library to load is
chosen when it is first needed. Without a compiler znnpy installs and runs on FFTW and BLAS.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.machine import AMX, AVX512_BF16, may_use_amx

if TYPE_CHECKING:
    from znnpy.machine import Machine

VERSION = 9  # as in vector.hpp: raised when a function or a structure of the libraries changes
LANES = 16  # channels of a block, in every library, as in vector.hpp
UNITS = {AMX: "AMX that the system lets programs use", AVX512_BF16: "AVX512-BF16"}
STREAM_BYTES = 2**23  # larger outputs are written past the caches, if all their lines are whole


def why_not(machine: Machine) -> str | None:
    """Return None if the compiled kernels run; else what is missing, in a phrase that the planner can print."""
    if machine.simd not in ("avx512", "avx2"):
        return f"needs a processor with AVX2 or AVX-512; {machine.processor} has neither"
    if path(machine.simd) is None:
        return (
            f"the kernels for {machine.simd} were not compiled when znnpy was installed; "
            "reinstall it where there is a C++ compiler (g++ or clang++)"
        )
    return _fault(machine.simd)


def why_not_bf16(machine: Machine, unit: str | None = None) -> str | None:
    """Return None if a unit of the processor multiplies bfloat16, and its kernels run; else what is missing.

    unit  AMX or AVX512_BF16 of znnpy.machine; None: whichever there is
    """
    if unit is None:
        reasons = [why_not_bf16(machine, one) for one in machine.bf16 or (AVX512_BF16,)]
        return None if None in reasons else reasons[0]
    if unit not in machine.bf16:
        return f"needs a processor with {UNITS[unit]}, and {machine.processor} has none"
    if path(unit) is None:
        return (
            f"needs kernels for {UNITS[unit]}, which were not compiled when znnpy was installed; "
            "reinstall it where there is a C++ compiler that knows these instructions (g++ 11, clang++ 12)"
        )
    return _fault(unit)


@cache
def _fault(simd: str) -> str | None:
    """Return None if the library for `simd` loads and has this version of the sources, else a reason."""
    advice = "reinstall znnpy where there is a C++ compiler"
    try:
        loaded = loaded_unit(_existing(simd)) if simd in UNITS else library(simd)
        found = int(loaded.znnpy_version())
    except (OSError, AttributeError) as error:
        return f"the compiled kernels for {simd} are damaged ({error}); {advice}"
    return None if found == VERSION else f"the compiled kernels for {simd} are of another version; {advice}"


@cache
def path(simd: str) -> Path | None:
    """Return the path of the library for "avx2", "avx512" or a unit for bfloat16; None if it was not compiled."""
    for suffix in EXTENSION_SUFFIXES:
        found = Path(__file__).with_name(f"_{simd}{suffix}")
        if found.exists():
            return found
    return None


@cache
def library(simd: str) -> ctypes.CDLL:
    """Load the library for "avx2" or "avx512". Its functions release Python's global lock.

    Raises OSError if it is missing or does not load; call `why_not` first.
    """
    loaded = ctypes.CDLL(str(_existing(simd)))
    for stage in ("kernels", "spectra", "forward", "multiply"):
        getattr(loaded, f"znnpy_tiled_{stage}").restype = None
    for stage in ("inverse", "pool", "run"):
        getattr(loaded, f"znnpy_tiled_{stage}").restype = ctypes.c_int64
    loaded.znnpy_direct.restype = ctypes.c_int64
    loaded.znnpy_direct_pool.restype = ctypes.c_int64
    loaded.znnpy_direct_padded.restype = ctypes.c_int64
    loaded.znnpy_pool.restype = None
    for function in (
        "activate",
        "blend",
        "blended_mean",
        "window_pool",
        "upsample_nearest",
        "upsample_linear",
        "moments",
    ):
        getattr(loaded, f"znnpy_{function}").restype = None
    for function in ("point", "depthwise", "strided", "phases", "transpose", "norm"):
        getattr(loaded, f"znnpy_{function}").restype = ctypes.c_int64
    return loaded


def _existing(simd: str) -> Path:
    """Return the path of a library; OSError if it was not compiled."""
    found = path(simd)
    if found is None:
        raise OSError(f"no kernels for {simd} were compiled")
    return found


@cache
def unit_library(unit: str) -> ctypes.CDLL:
    """Load the library for a unit that multiplies bfloat16; call `why_not_bf16` first."""
    if unit == AMX and not may_use_amx():
        raise OSError("the system does not let this process use AMX")
    return loaded_unit(_existing(unit))


def loaded_unit(file: Path) -> ctypes.CDLL:
    """Load the library of a unit from a file. Its functions release Python's global lock."""
    loaded = ctypes.CDLL(str(file))
    loaded.znnpy_bf16_conv.restype = ctypes.c_int64
    for limit in ("peak", "products"):
        getattr(loaded, f"znnpy_bf16_{limit}").restype = ctypes.c_int64
    return loaded


def blocks(maps: int) -> int:
    """Return the number of blocks of LANES channels that hold `maps`."""
    return -(-maps // LANES)


def streams(maps: int, nbytes: int) -> bool:
    """Return whether an output of `maps` channels and `nbytes` is written past the caches if aligned to their lines."""
    return maps % LANES == 0 and nbytes > STREAM_BYTES
