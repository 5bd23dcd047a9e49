"""CUDA's compiler from its wheel: what it says of a kernel for a card that is not there. Needs no driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from znnpy.kernels.gpu.kernel_source import compiler_options, source_text

WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
_OPTIONS = ("--ptxas-options=-v", "-ftz=true")  # the second: CuPy passes it
_USED = re.compile(
    r"Compiling entry function '(\w+)' for .*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers(?:[^\n]*? (\d+) bytes smem)?",
    re.DOTALL,
)
# Said as information.
_SERIALIZED = re.compile(r".*(?:wgmma\.mma_async instructions are serialized|warpgroup\.wait is injected).*")


@dataclass(frozen=True, slots=True)
class Used:
    """The bytes that a thread of a kernel takes, as the assembler reports them."""

    registers: int
    stack: int
    spilled: int
    fixed_shared: int  # of a block


def compile_for(
    architecture: int, source: str, names: Sequence[str], defines: Mapping[str, int | str]
) -> dict[str, Used]:
    """Compile `names` of kernels/gpu/`source` for sm_`architecture`; AssertionError with the compiler's words.

    Products of a warpgroup that wait one by one are an error: right, and at a half or a quarter of the speed.
    """
    told, lowered = _compiled(architecture, source, names, defines)
    slow = _SERIALIZED.findall(told)
    assert not slow, f"{source} for sm_{architecture}:\n" + "\n".join(slow)
    found = {
        entry: Used(int(registers), int(stack), int(stores) + int(loads), int(shared or 0))
        for entry, stack, stores, loads, registers, shared in _USED.findall(told)
    }
    return {name: found[entry] for name, entry in lowered.items()}


def _compiled(
    architecture: int, source: str, names: Sequence[str], defines: Mapping[str, int | str]
) -> tuple[str, dict[str, str]]:
    """Return what the compiler says, and its names of the kernels: kept between runs in ZNNPY_COMPILED_KERNELS."""
    options = [f"--gpu-architecture=sm_{architecture}", *compiler_options(source, defines), *_OPTIONS]
    text = source_text(source)
    key = "\0".join((*map(version, WHEELS), text, *options, *names))
    kept = Path(os.environ["ZNNPY_COMPILED_KERNELS"]) / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if kept.exists():
        kept.touch()  # it is in use
        told, lowered = json.loads(kept.read_text())
        return told, lowered
    nvrtc = _library()
    program = ctypes.c_void_p()
    file = Path(source).name.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file, 0, None, None) == 0
    for name in names:
        assert nvrtc.nvrtcAddNameExpression(program, name.encode()) == 0
    options += [f"-I{folder}" for folder in _headers()]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    told = log.value.decode()
    assert code == 0, f"{source} for sm_{architecture}:\n{told[:4000]}"
    lowered = {name: _lowered(nvrtc, program, name) for name in names}
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps((told, lowered)))
    written.replace(kept)
    return told, lowered


def _lowered(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> str:
    lowered = ctypes.c_char_p()
    assert nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)) == 0
    assert lowered.value is not None
    return lowered.value.decode()


@functools.cache
def _root() -> Path:
    """Return the folder of CUDA's wheels; AssertionError says what to install."""
    spec = find_spec("nvidia")
    for folder in [] if spec is None else list(spec.submodule_search_locations or ()):
        root = Path(folder) / "cu13"
        if (root / "lib" / "libnvrtc.so.13").is_file():
            return root
    raise AssertionError("CUDA's compiler is not installed: pip install -e '.[test]'")


@functools.cache
def _library() -> ctypes.CDLL:
    folder = _root() / "lib"
    for builtins in folder.glob("libnvrtc-builtins.so.*"):  # it finds them only once they are loaded
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.13"))


def _headers() -> tuple[Path, ...]:
    include = _root() / "include"
    return include, include / "cccl"
