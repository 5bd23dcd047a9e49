"""Compile the kernels of the units for bfloat16 with plain C++ in place of the units' instructions."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.emulator.compiling import digest, kept_folder, one_process
from znnpy.kernels.cpu.native import library
from znnpy.machine import AMX, AVX512_BF16, this_machine

if TYPE_CHECKING:
    import ctypes

SOURCES = ("bf16_conv.cpp", "bf16_products.cpp", "bf16_limits.cpp", "activations.cpp")
DEFINES = {AMX: "-DZNNPY_TWIN_AMX", AVX512_BF16: "-DZNNPY_TWIN_AVX512_BF16"}
VECTORS = {
    "avx512": ("-mfma", "-mavx2", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "avx2": ("-mfma", "-mavx2"),
}


def compiler() -> str | None:
    """Return a C++ compiler; None if there is none."""
    return next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)


@cache
def twin(unit: str) -> ctypes.CDLL:
    """Return the library of a unit without its instructions; it is compiled once for all processes of the tests."""
    found = compiler()
    assert found is not None, "ask `compiler` first"
    folder = Path(library.__file__).parent
    # -O2 takes twice as long to compile
    flags = ("-O1", "-std=gnu++17", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared")
    command = [found, *flags, *VECTORS[this_machine().simd], DEFINES[unit]]
    texts = [path.read_text() for path in (*(folder / name for name in SOURCES), *sorted(folder.glob("*.hpp")))]
    target = kept_folder() / f"{digest(*texts, *command)}.so"
    with one_process(target):
        if not target.exists():
            built = target.with_suffix(".building")
            subprocess.run([*command, *(str(folder / name) for name in SOURCES), "-o", str(built)], check=True)
            built.replace(target)
        target.touch()  # it is in use
    return library.loaded_unit(target)
