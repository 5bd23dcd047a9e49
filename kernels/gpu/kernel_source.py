"""Assemble the source of kernels, with our own headers inlined, so that any change in a header changes the text.

CuPy caches compiled kernels on disk by source text, options and compiler version, but ignores included files: a changed
header would go unnoticed. CUDA's own headers stay includes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent
STANDARD = "--std=c++17"
ONE_CARD: Mapping[str, str] = {  # for instructions of a single architecture
    "implicit_gemm/warpgroup.cu": "sm_90a",
    "graph_gemm/warpgroup.cu": "sm_90a",
}
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"')
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b")


@dataclass(frozen=True, slots=True)
class KernelInstance:
    """One kernel that a primitive may launch, and its resource limits; tests compile it for all architectures."""

    source: str  # name of a file in kernels/gpu, e.g. "pool.cu"
    name: str  # a C++ name expression, e.g. "forward<16, 8, half>"
    registers: int  # most registers per thread: the number of resident threads was planned with it
    defines: tuple[tuple[str, int | str], ...] = ()
    stack_bytes: int = 0  # local memory per thread: arrays with run-time indices, spilled registers
    spilled_bytes: int = 0  # bytes stored and loaded because of spills, tolerated on one architecture


def source_text(source: str) -> str:
    """Return the text of kernels/gpu/`source` with every file it includes by `"name"`, each once.

    Names are relative to kernels/gpu or to the including file; an absolute `source` is used as it is. `#line` keeps the
    compiler's messages on the real lines. FileNotFoundError names a header that is found in neither folder.
    """
    return "\n".join(_inlined(KERNELS / source, set())) + "\n"


def compiler_options(source: str, defines: Mapping[str, int | str]) -> tuple[str, ...]:
    """Return NVRTC's options; the architecture is set only for sources of ONE_CARD."""
    architecture = [f"--gpu-architecture={ONE_CARD[source]}"] if source in ONE_CARD else []
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return (*architecture, STANDARD, "--generate-line-info", *macros)


def describe_kernels(source: str, names: Sequence[str], defines: Mapping[str, int | str]) -> str:
    """Describe kernels for messages, e.g. `pool.cu: forward<2>, backward (TILE=16)`."""
    macros = ", ".join(f"{name}={value}" for name, value in sorted(defines.items()))
    return f"{source}: {', '.join(names)}" + (f" ({macros})" if macros else "")


def _inlined(path: Path, seen: set[Path]) -> list[str]:
    seen.add(path.resolve())
    name = path.relative_to(KERNELS).as_posix() if path.is_relative_to(KERNELS) else path.name
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if _ONCE.match(line) else line)
            continue
        header = _find(include[1], path)
        if header.resolve() not in seen:
            lines += _inlined(header, seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines


def _find(name: str, including: Path) -> Path:
    for folder in (including.parent, KERNELS):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f'{including.name} includes "{name}", which is neither in its folder nor in {KERNELS}')
