"""The compiled kernels: every library that was compiled computes the same, and a missing one is told in a sentence."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace

import pytest
from closeness import MACHINE, assert_close, random_input, random_weights, run

from znnpy.kernels.cpu import conv_fft_lanes
from znnpy.kernels.cpu.native import library
from znnpy.kernels.primitive import Variant
from znnpy.kernels.table import find
from znnpy.shapes import ConvShape

COMPILED = [simd for simd in ("avx512", "avx2") if library.path(simd)]
RUNS_HERE = [simd for simd in COMPILED if simd == "avx2" or MACHINE.simd == "avx512"]


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler is here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64")
def test_kernels_are_compiled_where_a_compiler_is() -> None:
    """Without them the tests below would pass by running nothing."""
    assert COMPILED == ["avx512", "avx2"]


@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_has_the_sides_that_python_offers(simd: str) -> None:
    lib = library.library(simd)
    assert [n for n in range(1, 100) if lib.znnpy_tiled_side(n)] == [1, *conv_fft_lanes.SIDES]


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("tile", [(n, n, n) for n in conv_fft_lanes.SIDES] + [(1, 8, 12), (20, 1, 1), (32, 16, 18)])
@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_computes_every_side(
    simd: str, tile: tuple[int, int, int], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that reach beyond the input, several groups, maps that fill no block and more than a panel of them."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    k = tuple(1 if side == 1 else min(3, side - 1) for side in tile)
    n = tuple(5 if side == 1 else side + 3 for side in tile)
    shape = ConvShape(2, 17, 65, n, k, "relu")  # type: ignore[arg-type]
    x, weights = random_input(shape), random_weights(shape)
    ran = run(find("cpu.conv.fft_lanes"), shape, x, weights, Variant.of(tile=tile, group=5, kept=kept), threads=2)
    assert_close(ran.out, x, weights, shape)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ConvShape(1, 16, 16, (20, 20, 20), (3, 3, 3))
    primitive = find("cpu.conv.fft_lanes")
    old = replace(MACHINE, simd="other", processor="an old processor")
    assert primitive.why_not(shape, old) == "needs a processor with AVX2 or AVX-512; an old processor has neither"
    monkeypatch.setattr(library, "path", lambda simd: None)
    reason = primitive.why_not(shape, replace(MACHINE, simd="avx2"))
    assert reason is not None
    assert reason.startswith("the kernels for avx2 were not compiled")
    assert "compiler" in reason
