"""Layers in bf16 that are no convolutions on matrix units equal their definition in float64, rounded once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.cpu import test_graph_addend as addends
from tests.kernels.cpu import test_graph_operators as operators
from tests.kernels.cpu import test_pool as pools
from tests.support import graph_cases
from tests.support.closeness import GUARD, MACHINE, aligned, random_input
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape, PadShape, PointShape, TransposeShape, UpsampleShape, WindowPoolShape
from znnpy.kernels import definition
from znnpy.kernels.cpu import (
    activations,
    graph_calls,
    graph_conv_depthwise,
    graph_conv_strided,
    graph_norm_lanes,
    graph_point_lanes,
    graph_pool_lanes,
    graph_transpose,
    graph_transpose_lanes,
    graph_upsample_lanes,
    pool_lanes,
)
from znnpy.kernels.cpu.graph_table import GRAPH_OPERATORS
from znnpy.kernels.dtypes import bfloat16
from znnpy.kernels.table import TABLE, find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import FUNCTIONS
from znnpy.network import ConvWeights
from znnpy.shapes import FilterShape, MaxoutShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive
    from znnpy.layers import Function

    Values = np.ndarray[Any, Any]

BF16 = bfloat16()
CALL_LIBRARY = (
    activations,
    graph_conv_depthwise,
    graph_conv_strided,
    graph_norm_lanes,
    graph_point_lanes,
    graph_pool_lanes,
    graph_transpose,
    graph_transpose_lanes,
    graph_upsample_lanes,
    pool_lanes,
)
LIBRARIES = [*addends.RUNS_HERE, "none"]


def in_bf16(shape: Any) -> Any:
    return replace(shape, precision="bf16")


MORE: list[Any] = [
    PointShape("concat", (40, 24), (3, 5, 41)),  # whole cache lines
    PointShape("add", (1, 3) * 5, (3, 4, 5)),  # more inputs than compiled code takes
    PointShape("add", (64, 64), (3, 5, 41), "gelu"),
    PointShape("function", (40,), (3, 4, 5), "softmax"),
    WindowPoolShape(2, (24, 3, 25), (24, 1, 24), (1, 1, 1), "average"),
    WindowPoolShape(2, (24, 25, 3), (23, 24, 1), (1, 1, 1)),  # more lines than compiled code takes
    UpsampleShape(64, (3, 4, 5), (6, 8, 10), (2, 2, 2), (0, 0, 0)),
]
SHAPES = [in_bf16(graph_cases.with_parameters(shape)) for shape in (*graph_cases.SHAPES, *MORE)]
WHOLE_LINES = [  # of the cache: every voxel fills some
    PoolShape(2, 32, (5, 8, 11), (2, 3, 4)),
    PoolShape(1, 64, (4, 6, 8), (2, 3, 2), fragments=False),
    FilterShape(2, 96, (3, 4, 5), (2, 1, 3)),
]
CHAINS: list[Any] = [in_bf16(shape) for shape in (*pools.SHAPES, *WHOLE_LINES)]
ENDED = [
    in_bf16(addends.ended(shape, addends.ENDS[number % len(addends.ENDS)]))
    for number, shape in enumerate((*addends.SHAPES[:11], *addends.SHAPES[6:10]))
]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose a library, or none: primitives that need one then refuse."""
    chosen = str(request.param)
    for module in CALL_LIBRARY:
        monkeypatch.setattr(module, "this_machine", lambda: replace(MACHINE, simd=chosen))
    if chosen == "none":
        for module in (activations, graph_transpose):
            monkeypatch.setattr(module, "compiled", lambda: False)
    return chosen


def primitives_for(shape: Any, library: str) -> list[Primitive]:
    machine = replace(MACHINE, simd="other" if library == "none" else library)
    table = GRAPH_OPERATORS if getattr(shape, "kind", "") in {p.kind for p in GRAPH_OPERATORS} else TABLE
    return [p for p in table if p.kind == shape.kind and p.why_not(shape, machine) is None]


def rounded(arrays: Any) -> list[Values]:
    return [array.astype(BF16) for array in arrays]


def cut_out(array: Values) -> Values:
    """Copy an image into a larger one full of NaN, with every second voxel of a line left out."""
    z, y, x, f = array.shape
    view = np.full((z + 1, y + 2, 2 * x + 3, f + 1), np.nan, array.dtype)[1:, 1 : 1 + y, 1 : 1 + 2 * x : 2, 1:]
    view[...] = array
    return view


def run(
    primitive: Primitive, shape: Any, weights: ConvWeights | None, inputs: Any, *, gap: int = 0, threads: int = 2
) -> Values:
    """Run with NaN in output and scratch; fail when a byte around them or an input changes.

    gap  images of a chain's output that lie between two of its own
    """
    variant = primitive.variants(shape, MACHINE)[0]
    stores = {s.name: aligned(s.nbytes + 2 * GUARD) for s in primitive.footprint(shape, variant, threads).scratch}
    stores["out"] = aligned(shape.out_bytes * (1 + gap) + 2 * GUARD)
    scratch = {name: store[GUARD : len(store) - GUARD] for name, store in stores.items()}
    batch, *size = shape.out_shape
    images = scratch.pop("out").view(BF16).reshape(batch, 1 + gap, *size)
    out = images[:, 0] if isinstance(shape, (PoolShape, FilterShape, MaxoutShape)) else images[0, 0]
    before = [part.copy() for part in inputs]
    with ThreadPool(threads) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        step.run(inputs if out.ndim == 4 else inputs[0], out, scratch)
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[len(store) - GUARD :] == 0xFF).all(), f"wrote beyond {name}"
    assert np.isnan(images[:, 1:].astype(np.float32)).all(), "wrote between images"
    for part, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(part.view(np.uint16), copy.view(np.uint16), err_msg="an input was modified")
    return np.asarray(out)


def assert_rounded_once(out: Values, expected: Values, *, exact: bool = False) -> None:
    """Compare with sums in float32 near the definition, each rounded to the nearest value, ties to even."""
    scale = max(1.0, float(np.abs(expected).max()))
    error = 0.0 if exact else 3e-6 * (scale + np.abs(expected))
    low, high = ((expected + sign * error).astype(np.float32).astype(BF16) for sign in (-1, 1))
    assert out.dtype == BF16
    found = out.astype(np.float32)
    bad = ~((found >= low.astype(np.float32)) & (found <= high.astype(np.float32)))
    assert not bad.any(), f"{bad.sum()} of {bad.size}, first {found[bad][0]} not {expected[bad][0]}"


def is_exact(shape: Any) -> bool:
    copies = isinstance(shape, PadShape) or getattr(shape, "how", "") in ("max", "nearest", "concat")
    return copies and getattr(shape, "activation", "none") in ("none", "relu")


@cache
def exact(shape: Any) -> Values:
    return definition.layer(shape, graph_cases.weights_for(shape), rounded(graph_cases.inputs_for(shape)))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_of_graphs_equal_the_definition(shape: Any, strided: bool, library: str) -> None:
    inputs = rounded(graph_cases.inputs_for(shape))
    for primitive in primitives_for(shape, library):
        out = run(primitive, shape, graph_cases.weights_for(shape), [cut_out(x) for x in inputs] if strided else inputs)
        assert_rounded_once(out, exact(shape), exact=is_exact(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_layer_of_a_graph_is_computed(shape: Any) -> None:
    assert primitives_for(shape, MACHINE.simd)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_that_is_written_past_the_caches_is_the_same(
    shape: Any, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, inputs = graph_cases.weights_for(shape), rounded(graph_cases.inputs_for(shape))
    for primitive in primitives_for(shape, library):
        expected = run(primitive, shape, weights, inputs)
        with monkeypatch.context() as patched:
            patched.setattr(graph_calls, "STREAM_BYTES", 0)
            np.testing.assert_array_equal(run(primitive, shape, weights, inputs), expected)


@pytest.mark.parametrize("shape", ENDED, ids=str)
def test_convolutions_add_an_array_and_apply_a_function(shape: GraphConvShape, library: str) -> None:
    weights, inputs = addends.weights_for(shape), rounded(addends.inputs_for(shape))
    expected = definition.layer(shape, weights, inputs)
    for primitive in primitives_for(shape, library):
        assert_rounded_once(run(primitive, shape, weights, [cut_out(x) for x in inputs]), expected)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("shape", [s for s in CHAINS if prod(s.in_shape) < 2e6], ids=str)
def test_maxima_of_chains_are_exact(shape: Any, past: bool, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if past:
        monkeypatch.setattr(pool_lanes, "STREAM_BYTES", 0)
    store = np.full((2 * shape.in_shape[0], *shape.in_shape[1:]), np.nan, BF16)
    store[::2] = random_input(shape)
    x = store[::2]
    expected = pools.exact(shape, x.astype(np.float32))
    for primitive in primitives_for(shape, library):
        np.testing.assert_array_equal(run(primitive, shape, None, [x], gap=1), expected)
        np.testing.assert_array_equal(run(primitive, shape, None, [x], threads=1), expected)


@pytest.mark.parametrize("maps", [1, 3, 16, 40])
def test_maxima_and_means_pass_on_what_is_not_a_number(maps: int, library: str) -> None:
    rng = np.random.default_rng(5)
    windows: list[Any] = [WindowPoolShape(maps, (4, 6, 8), (2, 2, 2), (2, 2, 2), how) for how in ("max", "average")]
    chains: list[Any] = [
        PoolShape(1, maps, (5, 8, 5), (2, 3, 2)),
        PoolShape(1, maps, (4, 6, 8), (2, 3, 2), fragments=False),
        FilterShape(1, maps, (5, 6, 7), (2, 3, 4)),
        MaxoutShape(1, 2 * maps, (3, 4, 5), 2),
    ]
    for shape in (*windows, *chains):
        x = random_input(shape).astype(BF16)
        x[rng.random(x.shape) < 0.02] = np.nan
        x.view(np.uint16)[rng.random(x.shape) < 0.01] = 0xFFC0  # negative
        x[0, 0, 0, 0, 0] = x[-1, -1, -1, -1, -1] = np.nan
        values = x.astype(np.float32)
        expected = definition.pool(shape, values[0]) if shape in windows else pools.exact(shape, values)
        assert 0 < np.isnan(expected).sum() < expected.size
        for primitive in primitives_for(in_bf16(shape), library):
            out = run(primitive, in_bf16(shape), None, [x[0]] if shape in windows else [x])
            np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), np.isnan(expected))


def test_ties_are_rounded_to_even(library: str) -> None:
    """An offset of half the distance between two values beside 1 is a tie."""
    x = np.array([1, 1 + 2**-7, 1 + 2**-6, -1, -1 - 2**-7], np.float32).astype(BF16)
    for offset, expected in (
        (2**-8, [1, 1 + 2**-6, 1 + 2**-6, -1 + 2**-8, -1]),
        (2**-8 + 2**-16, [1 + 2**-7, 1 + 2**-6, 1 + 3 * 2**-7, -1 + 2**-8, -1]),
        (2**-8 - 2**-16, [1, 1 + 2**-7, 1 + 2**-6, -1 + 2**-8, -1 - 2**-7]),
    ):
        wanted = (x.astype(np.float64) + offset).astype(np.float32).astype(BF16)
        np.testing.assert_array_equal(wanted, np.array(expected, np.float32).astype(BF16))
        for maps in (1, 16, 37):
            shape = in_bf16(PointShape("scale", (maps,), (1, 1, 5)))
            weights = ConvWeights(np.ones(maps, np.float32), np.full(maps, offset, np.float32))
            image = np.repeat(x, maps).reshape(1, 1, 5, maps)
            for primitive in primitives_for(shape, library):
                out = run(primitive, shape, weights, [image])
                np.testing.assert_array_equal(out, np.repeat(wanted, maps).reshape(1, 1, 5, maps))


@pytest.mark.parametrize("shape", [*operators.OVERFLOWS, in_bf16(graph_cases.CONVS[7])], ids=str)
def test_result_that_is_not_finite_is_an_error(shape: Any, library: str) -> None:
    shape = in_bf16(shape)
    inputs = rounded(graph_cases.inputs_for(shape))
    for bad in (np.inf, np.nan):
        inputs[0][-1, -1, -1, -1] = bad
        for primitive in primitives_for(shape, library):
            with pytest.raises(ValuesOverflowError, match="values of a block became infinite or not a number"):
                run(primitive, shape, graph_cases.weights_for(shape), inputs)


@pytest.mark.parametrize("shape", [addends.SHAPES[6], addends.SHAPES[8], addends.SHAPES[9]], ids=str)
def test_sum_that_is_not_finite_is_an_error(shape: GraphConvShape, library: str) -> None:
    shape = in_bf16(addends.ended(shape, "relu"))
    zero = ConvWeights(np.zeros_like(addends.weights_for(shape).weight), np.full(shape.fout, 2e38, np.float32))
    *inputs, addend = rounded(addends.inputs_for(shape))
    addend[-1, -1, -1, -1] = 2e38
    for primitive in primitives_for(shape, library):
        with pytest.raises(ValuesOverflowError, match=r"\b1 of \d+ values .* became infinite or not a number"):
            run(primitive, shape, zero, [*inputs, cut_out(addend)])


@pytest.mark.parametrize("function", [function for function in FUNCTIONS if function != "prelu"])
def test_functions_of_whole_images_are_rounded_once(function: Function, library: str) -> None:
    del library
    parameters = graph_cases.PARAMETERS.get(function, ())
    for maps in (1, 3, 16, 17, 40, 9000 if function == "softmax" else 41):
        image = (4 * np.random.default_rng(2).standard_normal((2, 3, 5, maps), np.float32)).astype(BF16)
        expected = definition.activate(function, parameters, image.astype(np.float64))
        with ThreadPool(2) as pool:
            activations.activate_graph(function, parameters, image, pool)
        assert_rounded_once(image, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_work_and_memory_count_the_bytes_of_bfloat16(shape: Any) -> None:
    single = replace(shape, precision="fp32")
    for primitive in primitives_for(shape, MACHINE.simd):
        if not primitive.name.endswith(("lanes", "depthwise", "strided")):
            continue
        variant = primitive.variants(shape, MACHINE)[0]
        (half,), (full,) = primitive.work(shape, variant), primitive.work(single, variant)
        assert half.nbytes == full.nbytes / 2
        assert half.flops == full.flops
        scratch = [sum(s.nbytes for s in primitive.footprint(s, variant, 2).scratch) for s in (shape, single)]
        assert scratch[0] <= scratch[1]


@pytest.mark.parametrize("shape", [s for s in CHAINS if s.kind != "maxout" and prod(s.out_shape) < 2e6], ids=str)
def test_work_of_chains_counts_the_bytes_of_bfloat16(shape: Any) -> None:
    (primitive,) = primitives_for(shape, MACHINE.simd)
    variant = primitive.variants(shape, MACHINE)[0]
    (half,), (full,) = primitive.work(shape, variant), primitive.work(replace(shape, precision="fp32"), variant)
    assert 0.3 < half.nbytes / full.nbytes <= 0.51


def test_primitives_for_fp32_alone_refuse() -> None:
    shapes: list[Any] = [
        UpsampleShape(2, (3, 3, 3), (6, 6, 6), (2, 2, 2), (0, 0, 0)),
        PoolShape(1, 2, (3, 3, 3), (2, 2, 2)),
        PoolShape(1, 2, (4, 4, 4), (2, 2, 2), fragments=False),
        FilterShape(1, 2, (4, 4, 4), (2, 2, 2)),
    ]
    names = ("cpu.upsample.repeat", "cpu.pool.fragments", "cpu.pool.max", "cpu.maxfilter.direct")
    for name, shape in zip(names, shapes, strict=True):
        assert find(name).why_not(shape, MACHINE) is None
        assert find(name).why_not(replace(shape, precision="bf16x2"), MACHINE) is None
        assert find(name).why_not(in_bf16(shape), MACHINE) == "computes in fp32, not in bf16"


@pytest.mark.parametrize(
    "shape", [*SHAPES[:: len(SHAPES) // 9], TransposeShape(3, 4, (3, 4, 5), (6, 8, 10), (2, 2, 2), (0, 0, 0))], ids=str
)
def test_other_precisions_are_refused(shape: Any) -> None:
    for precision in ("fp16", "tf32"):
        other = replace(shape, precision=precision)
        for primitive in GRAPH_OPERATORS:
            if primitive.kind == shape.kind:
                assert f"not in {precision}" in str(primitive.why_not(other, MACHINE))
