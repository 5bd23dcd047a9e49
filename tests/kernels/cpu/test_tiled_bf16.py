"""The tiled FFT convolution of values in bfloat16 rounds once, when it writes: its arithmetic is that of fp32."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.cpu.test_graph_conv import cut_out, inputs_for, side_by_side, weights_for
from tests.support.closeness import GUARD, MACHINE, aligned, definition, fragments, random_input, random_weights, run
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels import definition as graph_definition
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.cpu import conv_fft_lanes, tiled_variants
from znnpy.kernels.cpu.native import library
from znnpy.kernels.cpu.tiled_products import words_of
from znnpy.kernels.dtypes import bfloat16
from znnpy.kernels.table import find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.shapes import ACTIVATIONS, ConvShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from znnpy.shapes import Activation

CHAIN, GRAPH = find("cpu.conv.fft_lanes"), find("cpu.graph_conv.fft_lanes")
RUNS_HERE = [simd for simd in ("avx512", "avx2") if library.path(simd) and (simd == "avx2" or MACHINE.simd == "avx512")]
pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="the kernels were not compiled")
BF16 = bfloat16()
ONE, TWICE = (1, 1, 1), (2, 2, 2)

CHAIN_SHAPES = [
    ConvShape(2, 17, 65, (13, 9, 22), (3, 2, 4), "relu", precision="bf16"),
    ConvShape(1, 3, 16, (7, 8, 9), (2, 2, 2), "none", precision="bf16"),
    ConvShape(3, 4, 5, (5, 6, 3), (5, 6, 3), "none", precision="bf16"),  # one voxel comes out
    ConvShape(2, 5, 33, (11, 13, 10), (3, 3, 2), "none", (2, 3, 2), "bf16"),
    ConvShape(1, 16, 16, (8, 9, 10), (2, 3, 4), "relu", (2, 1, 2), "bf16"),
    ConvShape(1, 16, 7, (8, 9, 10), (2, 3, 4), "tanh", (2, 1, 2), "bf16"),
]
GRAPH_SHAPES = [
    GraphConvShape((17, 3), 35, (6, 11, 13), (3, 1, 3), (1, 0, 2), (0, 0, 1), activation="relu"),
    GraphConvShape((5,), 9, (6, 7, 8), (2, 3, 4), (0, 1, 0), (1, 0, 1), activation="leaky_relu", parameters=(0.2,)),
    GraphConvShape((2, 2), 3, (1, 1, 1), (3, 2, 3), (2, 0, 1), (0, 1, 1)),  # one voxel, most of it padding
    GraphConvShape((20,), 33, (5, 8, 9), (3, 3, 3), ONE, ONE, activation="silu", addend=True),
    GraphConvShape((4,), 16, (5, 8, 9), (3, 3, 3), ONE, ONE, addend=True),
    GraphConvShape((4,), 13, (5, 8, 9), (3, 3, 3), ONE, ONE, activation="softmax"),
    GraphConvShape((3, 17), 20, (7, 8, 9), (3, 3, 3), activation="relu", factors=(ONE, TWICE), first=ONE),
    GraphConvShape(
        (8, 16), 32, (6, 10, 8), (3, 3, 3), (1, 0, 1), (1, 0, 1), activation="elu", addend=True, factors=(TWICE, ONE),
        first=(0, 1, 0),
    ),
]  # fmt: skip


def rounded(values: Any) -> Any:
    return np.asarray(values).astype(BF16)


def assert_rounded_once(out: Any, exact: Any) -> None:
    """Each value is within half a unit in the last place and what float32 leaves, of the rms answer."""
    assert out.dtype == BF16
    values = out.astype(np.float64)
    assert np.isfinite(values).all(), f"{(~np.isfinite(values)).sum()} of {values.size} values not finite"
    limit = 2.0**-8 * np.abs(exact) + 2e-6 * np.sqrt(np.mean(np.square(exact))) + 1e-6
    excess = np.abs(values - exact) - limit
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess.max() <= 0, f"{values[worst]} is not {exact[worst]} rounded, at {worst}"


def exact_chain(x: Any, weights: ConvWeights, shape: ConvShape) -> Any:
    found = definition(x.astype(np.float64), weights, shape.activation)
    return fragments(found, shape.pool) if shape.pools else found


def some(variants: Sequence[Variant]) -> list[Variant]:
    """Return a few variants that multiply in float32."""
    plain = [variant for variant in variants if not words_of(variant)]
    return [*plain[:: max(1, len(plain) // 4)], plain[-1]]


@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("shape", CHAIN_SHAPES, ids=str)
def test_chain_rounds_once(shape: ConvShape, simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    weights = random_weights(shape)
    for variant, kind in zip(some(CHAIN.variants(shape, MACHINE)), cycle(("normal", "relu"))):
        x, out = rounded(random_input(shape, kind)), rounded(np.full(shape.out_shape, np.nan))
        run(CHAIN, shape, x, weights, variant, 2, out)
        assert_rounded_once(out, exact_chain(x, weights, shape))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_of_a_chain_is_computed_before_rounding(activation: Activation) -> None:
    shape = ConvShape(2, 9, 16, (9, 10, 11), (3, 3, 3), activation, precision="bf16")
    x, weights, out = rounded(random_input(shape)), random_weights(shape), rounded(np.full(shape.out_shape, np.nan))
    run(CHAIN, shape, x, weights, threads=2, out=out)
    assert_rounded_once(out, exact_chain(x, weights, shape))


def test_images_of_a_chain_may_lie_apart_and_its_first_planes_elsewhere() -> None:
    shape = CHAIN_SHAPES[0]
    x, weights, carried = rounded(random_input(shape)), random_weights(shape), 4
    store = rounded(np.full((2, x[0].size + 37), np.nan))
    spread = np.ndarray(x.shape, BF16, store, 0, (store.strides[0], *x.strides[1:]))
    spread[...] = x
    before, rest = x[:, :carried].copy(), spread[:, carried:]
    out = rounded(np.full(shape.out_shape, np.nan))
    variant = CHAIN.variants(shape, MACHINE)[0]
    scratch = {s.name: aligned(s.nbytes) for s in CHAIN.footprint(shape, variant, 1).scratch}
    with ThreadPool(1) as pool:
        step = CHAIN.bind(CHAIN.prepare(weights, variant, pool), shape, variant, pool)
        step.run(rest, out, scratch, before)
    assert_rounded_once(out, exact_chain(x, weights, shape))


@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("shape", GRAPH_SHAPES, ids=str)
def test_graph_rounds_once(shape: GraphConvShape, simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are arrays of their own, views of larger ones, or maps of one array."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    shape = replace(shape, precision="bf16")
    weights, inputs = weights_for(shape), [rounded(x) for x in inputs_for(shape)]
    if shape.addend:
        inputs.append(rounded(np.random.default_rng(4).standard_normal(shape.out_shape[1:])))
    exact = graph_definition.convolve(shape, weights, inputs)
    places: list[Callable[[Sequence[Any]], list[Any]]] = [
        list,
        halves_cut_out,
        halves_cut_out if shape.upsampled else side_by_side,
    ]
    for variant, place in zip(some(GRAPH.variants(shape, MACHINE)), cycle(places)):
        assert_rounded_once(run_graph(shape, weights, place(inputs), variant), exact)


def halves_cut_out(arrays: Sequence[Any]) -> list[Any]:
    """Copy arrays into larger ones full of NaN, as `cut_out` does."""
    views = cut_out([x.astype(np.float32) for x in arrays])
    return [rounded(view.base)[1 : 1 + x.shape[0], 2 : 2 + x.shape[1], 1 : 1 + x.shape[2], 3 : 3 + x.shape[3]]
            for view, x in zip(views, arrays, strict=True)]  # fmt: skip


def run_graph(shape: GraphConvShape, weights: ConvWeights, inputs: Sequence[Any], variant: Variant) -> Any:
    footprint = GRAPH.footprint(shape, variant, 2)
    stores = {s.name: aligned(s.nbytes + 2 * GUARD) for s in footprint.scratch}
    out = rounded(np.full(shape.out_shape[1:], np.nan))
    with ThreadPool(2) as pool:
        step = GRAPH.bind(GRAPH.prepare(weights, variant, pool), shape, variant, pool)
        step.run(inputs, out, {name: store[GUARD:-GUARD] for name, store in stores.items()})
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[-GUARD:] == 0xFF).all(), f"wrote beyond {name}"
    return out


@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("side", tiled_variants.SIDES)
def test_every_library_reads_and_writes_every_tile_size(simd: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    shape = GraphConvShape(
        (17, 1), 19, (side - 2, 5, side + 1), (3, 2, 3), (1, 0, 2), (2, 1, 0), activation="relu", precision="bf16"
    )
    weights, inputs = weights_for(shape), [rounded(x) for x in inputs_for(shape)]
    variant = Variant.of(tile=(side, 4, side), group=3, kept=0)
    exact = graph_definition.convolve(shape, weights, inputs)
    assert_rounded_once(run_graph(shape, weights, halves_cut_out(inputs), variant), exact)


def test_softmax_of_more_maps_than_a_block_is_refused() -> None:
    shape = ConvShape(1, 4, 17, (9, 9, 9), (3, 3, 3), "softmax", precision="bf16")
    graph = GraphConvShape((4,), 17, (9, 9, 9), (3, 3, 3), activation="softmax", precision="bf16")
    for reason in (CHAIN.why_not(shape, MACHINE), GRAPH.why_not(graph, MACHINE)):
        assert "16 maps" in (reason or "")
    assert CHAIN.why_not(replace(shape, precision="fp32"), MACHINE) is None
    assert CHAIN.why_not(replace(shape, fout=16), MACHINE) is None


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_values_not_finite_are_found(activation: Activation) -> None:
    shape = ConvShape(1, 4, 3, (9, 10, 11), (3, 3, 3), activation, precision="bf16")
    x, weights = rounded(random_input(shape)), random_weights(shape)
    x[0, 4, 5, 6, 1] = -np.inf
    with pytest.raises(ValuesOverflowError, match=r"\d+ of \d+ values"):
        run(CHAIN, shape, x, weights, threads=2, out=rounded(np.zeros(shape.out_shape)))


def test_spectra_are_as_large_as_in_fp32() -> None:
    shape = CHAIN_SHAPES[0]
    variant = CHAIN.variants(shape, MACHINE)[0]
    whole = replace(shape, precision="fp32")
    assert CHAIN.footprint(shape, variant, 2) == CHAIN.footprint(whole, variant, 2)
    half, full = (sum(w.nbytes for w in CHAIN.work(s, variant)) for s in (shape, whole))
    assert half < full
