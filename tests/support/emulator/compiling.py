"""Kernels of CUDA C++ compiled as C++ for this processor, once for all processes and runs of the tests."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from znnpy.kernels.gpu.kernel_source import describe_kernels, source_text

HEADER = Path(__file__).parent / "emulator.hpp"
FLAGS = ("-std=gnu++17", "-O2", "-march=native", "-ffp-contract=off", "-fno-exceptions", "-fno-strict-aliasing",
         "-fvisibility=hidden", "-fPIC", "-shared", "-w")  # fmt: skip
ONE_LAUNCH = threading.RLock()  # one launch at a time in a process: the emulator's state is global


class Launch(ctypes.Structure):
    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_ulonglong))


def compiler() -> str | None:
    """Return the C++ compiler of this machine."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


needs_compiler = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")


@functools.cache
def compiled(source: str, names: tuple[str, ...], defines: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    """kernels/gpu/`source` as a library for this processor; AssertionError with the compiler's words."""
    text = _text(source, names)
    command = [compiler() or "g++", *FLAGS, *(f"-D{name}={value}" for name, value in defines)]
    headers = [path.read_text() for path in sorted(HEADER.parent.glob("*.hpp"))]
    library = kept_folder() / f"{digest(text, *headers, *command)}.so"
    with one_process(library):
        if not library.exists():
            written = library.with_suffix(".cpp")
            written.write_text(text)
            built = library.with_suffix(".building")
            done = _ran([*command, "-include", str(_header()), "-o", str(built), str(written)])
            words = describe_kernels(source, names, dict(defines))
            assert done.returncode == 0, f"{words} as C++: {' '.join(command)}\n{done.stderr[:4000]}"
            built.replace(library)
        library.touch()  # it is in use
    return _loaded(library)


@functools.cache
def _header() -> Path:
    """Return the emulator's header, precompiled once for all kernels, or as text if the compiler cannot."""
    texts = {path.name: path.read_text() for path in sorted(HEADER.parent.glob("*.hpp"))}
    command = [compiler() or "g++", *FLAGS]
    header = kept_folder() / digest(*texts.values(), *command) / HEADER.name
    kept = header.with_name(f"{header.name}.gch")
    header.parent.mkdir(exist_ok=True)
    os.utime(header.parent)  # it is in use
    with one_process(header):
        if not (tried := header.with_suffix(".tried")).exists():
            for name, text in texts.items():
                (header.parent / name).write_text(text)
            built = header.with_suffix(".building")
            if _ran([*command, "-x", "c++-header", "-o", str(built), str(header)]).returncode == 0:
                built.replace(kept)
            tried.touch()
    return header


def digest(*texts: str) -> str:
    """Return a name for what the compiler makes of these texts on this processor."""
    return hashlib.sha256("\0".join((_target(), *texts)).encode()).hexdigest()[:24]


@functools.cache
def _target() -> str:
    """Return the macros that the compiler predefines: they name its version and the processor's instructions."""
    return _ran([compiler() or "g++", *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]).stdout


@contextmanager
def one_process(made: Path) -> Iterator[None]:
    """Let one process make the file, while others wait and find `made`."""
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ran(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _text(source: str, names: Sequence[str]) -> str:
    """Return the source, with two functions that reach the named kernels by number."""
    launches = "".join(
        f"        case {number}: return emulator::launch({name}, launch, arguments);\n"
        for number, name in enumerate(names)
    )
    parameters = "".join(
        f"        case {number}: return emulator::parameters({name});\n" for number, name in enumerate(names)
    )
    return f"""{source_text(source)}
#line 1 "launches"
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void* znnpy_make_block_memory() {{ return emulator::make_block_memory(); }}
EXPORTED void znnpy_use_block_memory(void* memory) {{
    emulator::block_memory = static_cast<emulator::BlockMemory*>(memory);
}}
EXPORTED const char* znnpy_launch(int number, const emulator::Launch* launch, void** arguments) {{
    switch (number) {{
{launches}    }}
    return "no such kernel";
}}
EXPORTED const char* znnpy_parameters(int number) {{
    switch (number) {{
{parameters}    }}
    return "";
}}
"""


_block_memory: list[int] = []  # the memory that all blocks of this process use


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.znnpy_make_block_memory.restype = ctypes.c_void_p
    library.znnpy_use_block_memory.argtypes = (ctypes.c_void_p,)
    library.znnpy_launch.restype = ctypes.c_char_p
    library.znnpy_parameters.restype = ctypes.c_char_p
    with ONE_LAUNCH:
        if not _block_memory:
            _block_memory.append(library.znnpy_make_block_memory())
        library.znnpy_use_block_memory(_block_memory[0])
    return library


@functools.cache
def kept_folder() -> Path:
    """Return the folder of compiled kernels: ZNNPY_COMPILED_KERNELS, which conftest.py sets, or one of this process."""
    kept = os.environ.get("ZNNPY_COMPILED_KERNELS")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept)
    folder = tempfile.mkdtemp(prefix="znnpy-emulator-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
