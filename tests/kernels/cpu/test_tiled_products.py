"""Products of spectra in words of bfloat16 hold the bound of their precision, on every unit and on its twin in C++."""

from __future__ import annotations

import ctypes
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.kernels.cpu.test_graph_conv import cut_out, inputs_for, rms, weights_for
from tests.kernels.cpu.test_graph_conv import run as run_graph
from tests.kernels.cpu.test_tiled_bf16 import exact_chain, rounded
from tests.support.bf16_twins import compiler, twin
from tests.support.closeness import (
    INPUTS,
    MACHINE,
    assert_close,
    definition,
    error_of,
    fragments,
    random_input,
    random_weights,
    run,
)
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels import definition as graph_definition
from znnpy.kernels.cpu import conv_fft_lanes, tiled_products
from znnpy.kernels.cpu.native.library import unit_library, why_not_bf16
from znnpy.kernels.cpu.tiled_products import COST_UNITS, PRODUCTS, WORDS, Products, products_of
from znnpy.kernels.cpu.tiled_variants import MOST_SPREAD, SIDES, Upsampled, spread, tiled_variant, tiled_variants
from znnpy.kernels.table import find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import AMX, AVX512_BF16
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array
    from znnpy.shapes import Precision, Vec3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MACHINE.simd != "avx512", reason="no processor without AVX-512 has such a unit"),
    pytest.mark.skipif(not compiler(), reason="no C++ compiler is here"),
]
CHAIN, GRAPH = find("cpu.conv.fft_lanes"), find("cpu.graph_conv.fft_lanes")
TWINS = {f"twin of {unit}": partial(twin, unit) for unit in (AMX, AVX512_BF16)}
UNITS = (*TWINS, *(unit for unit in MACHINE.bf16 if why_not_bf16(MACHINE, unit) is None))
ONE, TWICE = (1, 1, 1), (2, 2, 2)
X6, X3, X1 = (Products(name, AMX) for name in ("bf16x6", "bf16x3", "bf16"))
X3_LIMIT, BF16_LIMIT = 1e-5, 5e-3  # rms errors, of the rms answer

CHAIN_CASES: list[tuple[ConvShape, Vec3, int]] = [  # shape, tile, tiles of a group
    (ConvShape(2, 37, 50, (11, 9, 13), (3, 2, 4), "relu"), (6, 8, 10), 100),  # maps that fill no block
    (ConvShape(3, 32, 16, (5, 6, 9), (5, 6, 3), "none"), (6, 6, 8), 5),  # one voxel along two axes, one block comes out
    (ConvShape(1, 1, 3, (9, 20, 7), (2, 3, 3), "none"), (4, 6, 6), 17),  # a map
    (ConvShape(1, 50, 80, (9, 14, 18), (3, 3, 3), "none"), (8, 10, 12), 20),
    (ConvShape(1, 16, 96, (19, 19, 19), (2, 2, 2), "relu"), (4, 4, 4), 500),  # whole blocks of maps, many groups
]
GRAPH_CASES: list[tuple[GraphConvShape, Vec3, int]] = [
    (GraphConvShape((17, 3, 32), 35, (6, 11, 13), (3, 1, 3), (1, 0, 2), (0, 0, 1), activation="relu"), (6, 1, 8), 30),
    (GraphConvShape((33,), 40, (5, 8, 9), (3, 3, 3), ONE, ONE, activation="silu", addend=True), (6, 6, 8), 7),
    (GraphConvShape((2, 2), 3, (1, 1, 1), (3, 2, 3), (2, 0, 1), (0, 1, 1)), (4, 4, 4), 1),  # most of it padding
    (GraphConvShape((3, 34), 20, (7, 8, 9), (3, 3, 3), factors=(ONE, TWICE), first=ONE), (8, 8, 10), 9),
    (GraphConvShape((21, 16), 48, (6, 10, 8), (3, 3, 3), (1, 0, 1), (1, 0, 1), factors=((1, 2, 2), ONE),
                    first=(0, 1, 0)), (6, 8, 8), 16),
]  # fmt: skip


def use(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the products be those of a unit, or of its twin."""
    lib = TWINS[unit]() if unit in TWINS else unit_library(unit)
    at = ctypes.cast(lib.znnpy_spectral_products, ctypes.c_void_p).value
    monkeypatch.setattr(conv_fft_lanes, "function_address", lambda unit: at)


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the products be those of a unit, or of its twin."""
    use(request.param, monkeypatch)
    return str(request.param)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize(("shape", "tile", "group"), CHAIN_CASES, ids=str)
@pytest.mark.usefixtures("unit")
def test_six_products_are_as_exact_as_float32(shape: ConvShape, tile: Vec3, group: int, kept: int) -> None:
    weights = random_weights(shape)
    for kind in INPUTS:
        x = random_input(shape, kind)
        variant = tiled_variant(tile, group, kept, products=X6)
        assert_close(run(CHAIN, shape, x, weights, variant, threads=2).out, x, weights, shape)


@pytest.mark.parametrize(("shape", "tile", "group"), CHAIN_CASES, ids=str)
@pytest.mark.usefixtures("unit")
def test_three_products_hold_the_bound_of_bf16x2(shape: ConvShape, tile: Vec3, group: int) -> None:
    """They do not hold that of fp32: if they did, they were to be offered for it."""
    weights = random_weights(shape)
    for kind in INPUTS:
        x = random_input(shape, kind)
        variant = tiled_variant(tile, group, 0, products=X3)
        out = run(CHAIN, replace(shape, precision="bf16x2"), x, weights, variant, threads=2).out
        assert 1e-6 < error_of(out, x, weights, shape) < X3_LIMIT


@pytest.mark.parametrize(("shape", "tile", "group"), CHAIN_CASES, ids=str)
@pytest.mark.usefixtures("unit")
def test_products_of_one_word_hold_the_bound_of_bf16(shape: ConvShape, tile: Vec3, group: int) -> None:
    shape, weights = replace(shape, precision="bf16"), random_weights(shape)
    for kind in INPUTS:
        x, out = rounded(random_input(shape, kind)), rounded(np.full(shape.out_shape, np.nan))
        run(CHAIN, shape, x, weights, tiled_variant(tile, group, 0, products=X1), 2, out)
        exact = exact_chain(x, weights, shape)
        assert rms(out.astype(np.float64) - exact) < BF16_LIMIT * rms(exact)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize(("shape", "tile", "group"), GRAPH_CASES, ids=str)
@pytest.mark.usefixtures("unit")
def test_six_products_of_several_inputs_are_as_exact_as_float32(
    shape: GraphConvShape, tile: Vec3, group: int, kept: int
) -> None:
    """Inputs are padded, upsampled, or views of larger arrays."""
    upsampled = [i for i, factor in enumerate(shape.factors) if factor != ONE]
    part = Upsampled()
    if upsampled:
        first = sum(shape.fins[: upsampled[0]])
        part = Upsampled(shape.factors[upsampled[0]], first, first + shape.fins[upsampled[0]])
    variant = tiled_variant(tile, group, kept, part, X6)
    weights, inputs = weights_for(shape), inputs_for(shape)
    if shape.addend:
        inputs.append(np.random.default_rng(4).standard_normal(shape.out_shape[1:], np.float32))
    out = run_graph(GRAPH, shape, weights, cut_out(inputs), variant, 2)
    exact = graph_definition.convolve(shape, weights, inputs)
    assert rms(out - exact) < 1e-6 * rms(exact)


@pytest.mark.parametrize(("products", "limit"), [(X6, 1e-6), (X3, X3_LIMIT), (X1, BF16_LIMIT)], ids=str)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_a_voxel_that_outshines_all_others_breaks_no_bound_where_tiles_overlap(
    k: int, products: Products, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in eight tiles, and what is rounded of it spreads over all their outputs."""
    use(UNITS[-1], monkeypatch)
    precision: Precision = "bf16" if products == X1 else "bf16x2"
    calm = [n for n in SIDES if k <= n <= 16 and spread((n,) * 3, (99,) * 3, (k,) * 3) <= MOST_SPREAD]
    sides = calm if products.is_near_bound(precision) else [16]
    side, step = sides[-1], sides[-1] - k + 1
    n = 2 * step + k - 1
    shape = ConvShape(1, 16, 16, (n, n, n), (k, k, k), precision=precision)
    for seed in (1, 2):
        x, weights = random_input(shape, seed=seed), random_weights(shape, seed)
        x[0, step, step, step, 5] = 1e6
        variant = tiled_variant((side, side, side), 8, 0, products=products)
        if products == X1:
            x, out = rounded(x), rounded(np.full(shape.out_shape, np.nan))
            run(CHAIN, shape, x, weights, variant, 2, out)
        else:
            out = run(CHAIN, shape, x, weights, variant, 2).out
        exact = definition(x.astype(np.float64), weights, "none")
        assert rms(out.astype(np.float64) - exact) < limit * rms(exact)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_products_near_the_bound_are_offered_for_tiles_that_overlap_much(k: int) -> None:
    """Large tiles of a small kernel overlap little: most of each is outputs."""
    n = 100 + k - 1
    for precision, near in (("bf16x2", X3), ("bf16", X1)):
        shape = ConvShape(1, 80, 80, (n, n, n), (k, k, k), precision=precision)  # type: ignore[arg-type]
        found: dict[str, set[Vec3]] = {}
        for variant in tiled_variants(shape, products=[X6, near]):
            found.setdefault(products_of(variant).name, set()).add(variant.size("tile"))
        assert found["bf16x6"] == found[""]
        assert all(spread(tile, shape.out, shape.k) <= MOST_SPREAD for tile in found[near.name])
        assert any(spread(tile, shape.out, shape.k) > MOST_SPREAD for tile in found[""]) == (k < 5)


@pytest.mark.usefixtures("unit")
def test_pooling_follows_the_products() -> None:
    shape = ConvShape(2, 20, 33, (11, 13, 10), (3, 3, 2), "relu", (2, 3, 2))
    x, weights = random_input(shape), random_weights(shape)
    out = run(CHAIN, shape, x, weights, tiled_variant((8, 10, 8), 16, 0, products=X6), 2).out
    exact = fragments(definition(x, weights, "relu"), shape.pool)
    assert rms(out - exact) < 1e-6 * rms(exact)


def test_units_and_threads_differ_by_rounding_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, tile, group = CHAIN_CASES[0]
    x, weights = random_input(shape), random_weights(shape)
    variant = tiled_variant(tile, group, 0, products=X6)
    found: list[Array] = []
    for name in UNITS:
        use(name, monkeypatch)
        ran = [run(CHAIN, shape, x, weights, variant, threads).out for threads in (1, 2, 3)]
        assert all(out.tobytes() == ran[0].tobytes() for out in ran)
        found.append(ran[0])
    assert all(rms(out - found[0]) < 5e-7 * rms(found[0]) for out in found)


@pytest.mark.usefixtures("unit")
def test_values_not_finite_are_found() -> None:
    shape, tile, group = CHAIN_CASES[0]
    x, weights = random_input(shape), random_weights(shape)
    x[0, 4, 5, 6, 1] = np.inf
    for name in WORDS:
        with pytest.raises(ValuesOverflowError, match=r"\d+ of \d+ values"):
            run(CHAIN, shape, x, weights, tiled_variant(tile, group, 0, products=Products(name, AMX)), threads=2)


@pytest.mark.parametrize("products", WORDS)
@pytest.mark.parametrize("kept", [0, 1])
def test_prepared_words_take_the_promised_bytes(products: str, kept: int) -> None:
    shape = ConvShape(1, 40, 50, (20, 20, 20), (3, 3, 3))
    variant, weights = tiled_variant((12, 10, 10), 8, kept, products=Products(products, AMX)), random_weights(shape)
    promised = CHAIN.footprint(shape, variant, 2)
    with ThreadPool(2) as pool:
        tracemalloc.start()
        try:
            resident = CHAIN.prepare(weights, variant, pool)
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert sum(array.nbytes for array in resident) == promised.resident
    assert held <= promised.resident + 2**16
    assert peak <= promised.resident + promised.working(shape)


@pytest.mark.parametrize("products", WORDS)
@pytest.mark.usefixtures("unit")
def test_scratch_is_used_but_for_rows_between_groups(products: str) -> None:
    shape = ConvShape(1, 48, 64, (20, 22, 24), (3, 3, 3))
    x, weights = random_input(shape), random_weights(shape)
    ran = run(CHAIN, shape, x, weights, tiled_variant((8, 10, 12), 32, 0, products=Products(products, AMX)))
    assert all(0.85 <= part <= 1 for part in ran.touched.values()), ran.touched


def test_products_are_offered_where_they_are_exact_and_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = tiled_products.products_worth
    monkeypatch.setattr(tiled_products, "why_not_bf16", lambda machine, unit: None if unit in machine.bf16 else "no")
    none, avx, both = (replace(MACHINE, bf16=units) for units in ((), (AVX512_BF16,), (AMX, AVX512_BF16)))
    precisions: tuple[Precision, ...] = ("fp32", "bf16x2", "bf16", "fp16")
    assert [list(worth(precision, 80, 80, both)) for precision in precisions] == [[X6], [X6, X3], [X1, X3], []]
    only = Products("bf16", AVX512_BF16)
    assert [list(worth(precision, 80, 80, avx)) for precision in precisions] == [[], [], [only], []]
    for precision in precisions:
        assert not worth(precision, 80, 80, none)
        assert not worth(precision, 80, tiled_products.MANY - 1, both)
    shape = ConvShape(1, 80, 80, (40, 40, 40), (3, 3, 3), precision="bf16x2")
    graph = GraphConvShape((40, 40), 80, (40, 40, 40), (3, 3, 3), precision="bf16x2")
    for primitive, asked in ((CHAIN, shape), (GRAPH, graph)):
        offered = {tiled_products.words_of(variant) for variant in primitive.variants(asked, both)}
        assert offered == {0, 2, 3}
        assert {tiled_products.words_of(variant) for variant in primitive.variants(asked, none)} == {0}


def test_work_counts_all_products_on_the_unit() -> None:
    shape = ConvShape(1, 80, 80, (46, 46, 46), (3, 3, 3))
    plain = CHAIN.work(shape, tiled_variant((16, 16, 16), 64, 1))
    assert [work.unit for work in plain] == ["lane_fft", "lane_fft", "lane_product", "lane_fft"]
    for unit, cost_unit in COST_UNITS.items():
        for name, words in WORDS.items():
            work = CHAIN.work(shape, tiled_variant((16, 16, 16), 64, 1, products=Products(name, unit)))
            assert [w.unit for w in work] == ["lane_fft", "lane_fft", cost_unit, "lane_fft"]
            assert work[2].flops == PRODUCTS[words] * plain[2].flops
            assert work[1].flops > plain[1].flops
