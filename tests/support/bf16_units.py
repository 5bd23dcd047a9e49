"""Units that multiply bfloat16: those of this machine, and twins in plain C++ of all that there are."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.closeness import MACHINE
from tests.support.emulator.compiling import compiler
from znnpy.kernels.cpu.native.library import unit_library as native_unit
from znnpy.kernels.cpu.native.library import why_not_bf16
from znnpy.machine import AMX, AVX512_BF16

TWINS = {f"twin of {unit}": f"ZNNPY_TWIN_{unit.upper()}" for unit in (AMX, AVX512_BF16)}
UNITS = (*TWINS, *(unit for unit in MACHINE.bf16 if why_not_bf16(MACHINE, unit) is None))
VECTORS = {
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "avx2": ("-mavx2", "-mfma"),
}


@cache
def unit_library(unit: str, source: str, simd: str = MACHINE.simd) -> ctypes.CDLL:
    """Return a file of kernels/cpu/native, compiled as the twin of a unit, or the library of a real one."""
    if unit not in TWINS:
        return native_unit(unit)
    native = Path(__file__).parents[2] / "kernels" / "cpu" / "native"
    flags = ("-std=gnu++17", "-O2", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared", "-Wno-psabi", *VECTORS[simd])
    with TemporaryDirectory() as folder:
        target = Path(folder) / "twin.so"
        command = [compiler() or "g++", *flags, f"-D{TWINS[unit]}", str(native / source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(target))


def address(library: ctypes.CDLL, name: str) -> int:
    """Return the address of a function."""
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found
