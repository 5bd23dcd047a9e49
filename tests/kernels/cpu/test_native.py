"""The compiled kernels: every library that was compiled computes the same, and a missing one is told in a sentence."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.closeness import MACHINE, aligned, assert_close, random_input, random_weights, run
from znnpy.costs.model import Rates, seconds
from znnpy.errors import ValuesOverflowError
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.cpu import conv_direct_lanes, conv_fft_lanes, pool_lanes, tiled_variants
from znnpy.kernels.cpu.native import library
from znnpy.kernels.table import find
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ConvShape, FilterShape, PoolShape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from znnpy.kernels.contract import Array
    from znnpy.shapes import Vec3

COMPILED = [simd for simd in ("avx512", "avx2") if library.path(simd)]
RUNS_HERE = [simd for simd in COMPILED if simd == "avx2" or MACHINE.simd == "avx512"]


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler is here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernels are for x86-64")
def test_kernels_are_compiled_if_a_compiler_exists() -> None:
    """Without them the tests below would pass by running nothing."""
    assert COMPILED == ["avx512", "avx2"]


@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_has_the_tile_sizes_that_python_offers(simd: str) -> None:
    lib = library.library(simd)
    assert [n for n in range(1, 100) if lib.znnpy_tiled_side(n)] == [1, *tiled_variants.SIDES]


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("simd", RUNS_HERE)  # of one tile one after the other: the definition is worked out once
@pytest.mark.parametrize(
    "tile",
    [
        pytest.param(tile, marks=[pytest.mark.long] * (min(tile) > 20))
        for tile in [*((n, n, n) for n in tiled_variants.SIDES), (1, 8, 12), (20, 1, 1), (32, 16, 18)]
    ],
)
def test_every_library_computes_every_tile_size(
    simd: str, tile: tuple[int, int, int], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles reach beyond the input; some maps fill no block, others more than a panel."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    k = tuple(1 if side == 1 else min(taps, side - 1) for side, taps in zip(tile, (2, 3, 1), strict=True))
    n = tuple(5 if side == 1 else side + 3 for side in tile)
    images = 2 if max(tile) < 20 else 1  # of large tiles 8 of one image are two groups too
    shape = ConvShape(images, 17, 65, n, k, "relu")  # type: ignore[arg-type]
    x, weights = random_input(shape), random_weights(shape)
    ran = run(find("cpu.conv.fft_lanes"), shape, x, weights, Variant.of(tile=tile, group=5, kept=kept), threads=2)
    assert_close(ran.out, x, weights, shape)


@pytest.mark.parametrize("fout", [1, 16, 30, 48, 64, 65, 100])  # every panel, the last block whole or not
@pytest.mark.parametrize("fin", [1, 3, 18])
@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_computes_every_block_of_a_direct_convolution(
    simd: str, fin: int, fout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are one block of voxels of every size, or several blocks."""
    monkeypatch.setattr(conv_direct_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    primitive = find("cpu.conv.first" if fin <= conv_direct_lanes.FEW else "cpu.conv.direct_lanes")
    for outputs in (*range(1, 14), 23, 25):
        shape = ConvShape(2, fin, fout, (4, 3, outputs + 2), (2, 1, 3), "relu")
        x, weights = random_input(shape), random_weights(shape)
        assert_close(run(primitive, shape, x, weights, threads=2).out, x, weights, shape)


@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_writes_past_the_caches(simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are equal, whether the output begins at a cache line or inside one."""
    monkeypatch.setattr(conv_direct_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    shape = ConvShape(1, 2, 80, (30, 34, 39), (2, 3, 2), "relu")
    assert library.streams(shape.fout, shape.out_bytes)
    x, weights = random_input(shape), random_weights(shape)
    outs = [aligned(shape.out_bytes + at)[at:].view(np.float32).reshape(shape.out_shape) for at in (0, 4)]
    for out in outs:
        run(find("cpu.conv.first"), shape, x, weights, threads=2, out=out)
    assert_close(outs[0], x, weights, shape)
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("maps", [1, 7, 16, 21, 32, 77])
@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_takes_maxima(simd: str, maps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are several columns along y and x, and NaN, written past the caches or not."""
    monkeypatch.setattr(pool_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    monkeypatch.setattr(pool_lanes, "RING_BYTES", 64 * maps * 4)
    monkeypatch.setattr(pool_lanes, "COLUMN_BYTES", 256 * maps * 4)
    monkeypatch.setattr(pool_lanes, "STREAM_BYTES", 1000)
    cases: list[tuple[str, PoolShape | FilterShape, Callable[[Array, Vec3], npt.NDArray[np.float64]]]] = [
        ("cpu.pool.fragments_lanes", PoolShape(2, maps, (7, 29, 41), (2, 5, 3)), reference.fragments),
        ("cpu.pool.max_lanes", PoolShape(2, maps, (6, 30, 45), (2, 5, 3), fragments=False), reference.max_pool),
        ("cpu.maxfilter.lanes", FilterShape(2, maps, (5, 23, 31), (3, 2, 4)), reference.max_filter),
    ]
    for name, shape, definition in cases:
        x = random_input(shape)
        x[np.random.default_rng(3).random(x.shape) < 0.003] = np.nan
        out = aligned(shape.out_bytes).view(np.float32).reshape(shape.out_shape)
        run(find(name), shape, x, threads=2, out=out)
        np.testing.assert_array_equal(out, definition(x, shape.p))


@pytest.mark.parametrize("simd", RUNS_HERE)
def test_values_not_finite_are_counted_once(simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU changes nothing; maps beyond the last, whose kernels are zero, do not count."""
    monkeypatch.setattr(conv_direct_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    shape = ConvShape(1, 2, 19, (4, 5, 40), (1, 2, 3), "relu")
    x, weights = random_input(shape), random_weights(shape)
    x[0, 2, 3, 20, 1] = -np.inf
    x[0, 1, 0, 0, 0] = np.nan
    with pytest.raises(ValuesOverflowError, match=f"^{(2 * 3 + 1) * 19} of {19 * 4 * 4 * 38} values"):
        run(find("cpu.conv.first"), shape, x, weights, threads=2)


MEASURED: list[tuple[str, LayerShape, float]] = [
    ("cpu.conv.first", ConvShape(1, 1, 80, (100, 100, 100), (2, 2, 2), "relu"), 5.67),
    ("cpu.conv.first", ConvShape(1, 1, 80, (100, 100, 100), (3, 3, 3), "relu"), 10.45),
    ("cpu.conv.first", ConvShape(1, 1, 80, (100, 100, 100), (5, 5, 5), "relu"), 34.6),
    ("cpu.conv.first", ConvShape(1, 1, 80, (100, 100, 100), (7, 7, 7), "relu"), 87.0),
    ("cpu.conv.first", ConvShape(1, 3, 64, (80, 80, 80), (3, 3, 3), "relu"), 10.05),
    ("cpu.conv.first", ConvShape(1, 1, 24, (100, 100, 100), (3, 3, 3), "relu"), 6.43),
    ("cpu.conv.direct_lanes", ConvShape(64, 80, 3, (12, 12, 12), (1, 1, 1), "relu"), 0.94),
    ("cpu.conv.direct_lanes", ConvShape(4, 80, 80, (32, 32, 32), (1, 1, 1), "relu"), 3.61),
    ("cpu.conv.direct_lanes", ConvShape(64, 16, 16, (12, 12, 12), (2, 2, 2), "relu"), 0.93),
    ("cpu.conv.direct_lanes", ConvShape(64, 80, 80, (6, 6, 6), (3, 3, 3), "relu"), 2.9),
    ("cpu.conv.direct_lanes", ConvShape(8, 48, 48, (20, 20, 20), (2, 2, 2), "relu"), 4.64),
    ("cpu.conv.direct_lanes", ConvShape(1, 80, 80, (60, 60, 60), (2, 2, 2), "relu"), 44.3),
    ("cpu.pool.fragments_lanes", PoolShape(1, 80, (99, 99, 99), (2, 2, 2)), 15.1),
    ("cpu.pool.fragments_lanes", PoolShape(64, 80, (23, 23, 23), (2, 2, 2)), 11.5),
    ("cpu.pool.fragments_lanes", PoolShape(1, 24, (143, 143, 143), (2, 2, 2)), 20.0),
    ("cpu.pool.fragments_lanes", PoolShape(1, 5, (199, 199, 199), (2, 2, 2)), 21.1),
    ("cpu.pool.fragments_lanes", PoolShape(1, 80, (99, 99, 99), (5, 5, 5)), 50.9),
    ("cpu.pool.max_lanes", PoolShape(1, 80, (100, 100, 100), (2, 2, 2), fragments=False), 9.4),
    ("cpu.maxfilter.lanes", FilterShape(1, 80, (99, 99, 99), (5, 5, 5)), 37.3),
]


@pytest.mark.parametrize(("name", "shape", "milliseconds"), MEASURED, ids=str)
def test_work_fits_measured_times(name: str, shape: LayerShape, milliseconds: float) -> None:
    """The times are the shortest or middle ones of a few runs of 2 threads on 2 Zen 5 cores, 2026-11-21."""
    (variant,) = find(name).variants(shape, MACHINE)
    expected = 1000 * seconds(find(name).work(shape, variant), Rates())
    assert 0.7 < milliseconds / expected < 1.4, f"{milliseconds} measured, {expected:.1f} expected"


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ConvShape(1, 16, 16, (20, 20, 20), (3, 3, 3))
    primitive = find("cpu.conv.fft_lanes")
    old = replace(MACHINE, simd="other", processor="an old processor")
    assert primitive.why_not(shape, old) == "needs a processor with AVX2 or AVX-512; an old processor has neither"
    monkeypatch.setattr(library, "path", lambda simd: None)
    reason = primitive.why_not(shape, replace(MACHINE, simd="avx2"))
    assert reason is not None
    assert reason.startswith("the kernels for avx2 were not compiled")
    assert "compiler" in reason


@pytest.mark.parametrize("pool", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("calls", [1, 10**6])
def test_workers_share_the_units_of_all_groups(pool: Vec3, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more workers than cores and units, and groups of unequal size."""
    shape = ConvShape(6, 21, 19, (13, 14, 14), (3, 2, 4), "relu", pool)
    x, weights, variant = random_input(shape), random_weights(shape), Variant.of(tile=(6, 8, 10), group=5, kept=0)
    primitive = find("cpu.conv.fft_lanes")
    expected = run(primitive, shape, x, weights, variant, threads=1).out
    if calls > 1:  # a call does one unit
        monkeypatch.setattr(conv_fft_lanes, "CALL_FLOPS", 1.0)
    for threads in (1, 2, 7):
        np.testing.assert_array_equal(run(primitive, shape, x, weights, variant, threads=threads).out, expected)


def test_damaged_library_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF, and no more")
    monkeypatch.setattr(library, "path", lambda simd: broken)
    library.library.cache_clear()
    library._fault.cache_clear()
    try:
        reason = library.why_not(replace(MACHINE, simd="avx2"))
    finally:
        library.library.cache_clear()
        library._fault.cache_clear()
    assert reason is not None
    assert reason.startswith("the compiled kernels for avx2 are damaged")


def test_library_of_another_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation in place keeps the libraries it compiled when the sources move on."""
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    library._fault.cache_clear()
    try:
        for simd in RUNS_HERE:
            assert "of another version" in (library.why_not(replace(MACHINE, simd=simd)) or "")
    finally:
        library._fault.cache_clear()
