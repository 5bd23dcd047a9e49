"""The compiled kernels of the processor that is here, or the reason why there are none.

setup compiles the same sources once for AVX2 and once for AVX-512, where there is a compiler; which library is loaded
is decided when it is first needed. Without a compiler znnpy installs and runs on FFTW and BLAS.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from znnpy.machine import Machine

VERSION = 3  # vector.hpp: raised when a function or a structure of the libraries changes
LANES = 16  # channels of a block, in every library: vector.hpp
STREAM_BYTES = 2**23  # outputs larger than that are written past the caches, where all their lines are whole


def why_not(machine: Machine) -> str | None:
    """None where the compiled kernels run; else what is missing, in words the planner can print."""
    if machine.simd not in ("avx512", "avx2"):
        return f"needs a processor with AVX2 or AVX-512; {machine.processor} has neither"
    if path(machine.simd) is None:
        return (
            f"the kernels for {machine.simd} were not compiled when znnpy was installed; "
            "install it again where a C++ compiler is (g++ or clang++)"
        )
    return _fault(machine.simd)


@cache
def _fault(simd: str) -> str | None:
    """None when the library for `simd` loads and is of this version of the sources."""
    again = "install znnpy again where a C++ compiler is"
    try:
        found = int(library(simd).znnpy_version())
    except (OSError, AttributeError) as error:
        return f"the compiled kernels for {simd} are damaged ({error}); {again}"
    return None if found == VERSION else f"the compiled kernels for {simd} are of another version; {again}"


@cache
def path(simd: str) -> Path | None:
    """The library for "avx2" or "avx512"; None when it was not compiled."""
    for suffix in EXTENSION_SUFFIXES:
        found = Path(__file__).with_name(f"_{simd}{suffix}")
        if found.exists():
            return found
    return None


@cache
def library(simd: str) -> ctypes.CDLL:
    """The library for "avx2" or "avx512", loaded. Its functions release the interpreter lock.

    Raises OSError when it is missing or does not load; ask `why_not` first.
    """
    found = path(simd)
    if found is None:
        raise OSError(f"no kernels for {simd} were compiled")
    loaded = ctypes.CDLL(str(found))
    for stage in ("kernels", "spectra", "forward", "multiply"):
        getattr(loaded, f"znnpy_tiled_{stage}").restype = None
    for stage in ("inverse", "pool", "run"):
        getattr(loaded, f"znnpy_tiled_{stage}").restype = ctypes.c_int64
    loaded.znnpy_direct.restype = ctypes.c_int64
    loaded.znnpy_direct_pool.restype = ctypes.c_int64
    loaded.znnpy_pool.restype = None
    return loaded


def blocks(maps: int) -> int:
    """Blocks of LANES channels that hold `maps`."""
    return -(-maps // LANES)


def streams(maps: int, nbytes: int) -> bool:
    """An output of `maps` channels and `nbytes` is written past the caches, if it begins with a cache line."""
    return maps % LANES == 0 and nbytes > STREAM_BYTES
