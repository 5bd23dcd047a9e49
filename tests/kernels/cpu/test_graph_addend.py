"""Convolutions of graphs that add another array and apply any function equal their definition in float64."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support.closeness import GUARD, MACHINE, aligned
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels import definition
from znnpy.kernels.cpu import activations, conv_fft_lanes, graph_calls, graph_conv_direct
from znnpy.kernels.cpu.graph_conv_table import GRAPH_CONVOLUTIONS
from znnpy.kernels.cpu.graph_table import GRAPH_OPERATORS
from znnpy.kernels.cpu.native import library
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import FUNCTIONS
from znnpy.network import ConvWeights

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Primitive, Variant
    from znnpy.layers import Function
    from znnpy.shapes import Vec3

FFT, DIRECT = GRAPH_CONVOLUTIONS[:2]
EVERY = (*GRAPH_CONVOLUTIONS, *(p for p in GRAPH_OPERATORS if p.kind == "graph_conv"))
COMPILED = [simd for simd in ("avx512", "avx2") if library.path(simd)]
RUNS_HERE = [simd for simd in COMPILED if simd == "avx2" or MACHINE.simd == "avx512"]
ENDS: list[Function] = [function for function in FUNCTIONS if function != "prelu"]
PARAMETERS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.3,), "elu": (0.7,), "clip": (-0.5, 0.8)}
ONE: Vec3 = (1, 1, 1)
CUBE: Vec3 = (3, 3, 3)

SHAPES = [
    GraphConvShape((3,), 5, (4, 7, 9), CUBE, ONE, ONE),
    GraphConvShape((7, 2), 16, (5, 6, 37), CUBE, ONE, (1, 0, 1)),
    GraphConvShape((20,), 19, (3, 11, 13), (1, 3, 3), (0, 1, 1), (0, 1, 1)),  # a part of a block
    GraphConvShape((9,), 48, (3, 5, 60), (2, 1, 1), (1, 0, 0)),
    GraphConvShape((5, 12), 66, (2, 3, 101), ONE),  # the sums of a line are divided
    GraphConvShape((3,), 1, (2, 5, 9), CUBE, ONE, ONE),
    GraphConvShape((4,), 6, (9, 8, 11), CUBE, ONE, ONE, stride=(1, 2, 2)),
    GraphConvShape((6,), 8, (9, 8, 11), CUBE, (2, 2, 2), (2, 2, 2), dilation=(2, 2, 2)),
    GraphConvShape((6,), 12, (4, 5, 6), CUBE, ONE, ONE, groups=3),
    GraphConvShape((19,), 19, (4, 5, 9), CUBE, ONE, ONE, groups=19),
    GraphConvShape((200,), 6, (4, 5, 6), CUBE, ONE, ONE),  # several products by BLAS
    GraphConvShape((3, 17), 19, (9, 30, 33), CUBE, (0, 1, 0), factors=(ONE, (2, 2, 2)), first=(1, 0, 1)),
]
PLAIN = [shape for shape in SHAPES if shape.plain]


def ended(shape: GraphConvShape, function: Function, *, addend: bool = True) -> GraphConvShape:
    return replace(shape, activation=function, parameters=PARAMETERS.get(function, ()), addend=addend)


def ids(value: object) -> str:
    return value.name if hasattr(value, "name") else str(value)


EACH = [
    (p, ended(shape, ENDS[number % len(ENDS)]))
    for number, (shape, p) in enumerate((s, p) for s in SHAPES for p in EVERY)
    if p.why_not(shape, MACHINE) is None
]


def weights_for(shape: GraphConvShape) -> ConvWeights:
    rng = np.random.default_rng(5)
    fin = shape.fin // shape.groups
    weight = rng.standard_normal((shape.fout, fin, *shape.k), np.float32) / np.float32(np.sqrt(fin * prod(shape.k)))
    return ConvWeights(weight, rng.standard_normal(shape.fout, np.float32))


def inputs_for(shape: GraphConvShape) -> list[Array]:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((*shape.size_of(i), maps), np.float32) for i, maps in enumerate(shape.fins)]
    return [*arrays, rng.standard_normal(shape.out_shape[1:], np.float32)] if shape.addend else arrays


def cut_out(array: Array) -> Array:
    """Copy an array into a larger one full of NaN: with planes, rows and voxels around it, and maps beside it."""
    z, y, x, f = array.shape
    view = np.full((z + 2, y + 3, x + 4, f + 5), np.nan, np.float32)[1 : 1 + z, 2 : 2 + y, 1 : 1 + x, 3 : 3 + f]
    view[...] = array
    return view


def run(
    primitive: Primitive,
    shape: GraphConvShape,
    inputs: list[Array],
    variant: Variant | None = None,
    weights: ConvWeights | None = None,
) -> Array:
    """Run with NaN in output and scratch beforehand; fail when a byte around a scratch buffer changes."""
    variant = variant or primitive.variants(shape, MACHINE)[0]
    stores = {s.name: aligned(s.nbytes + 2 * GUARD) for s in primitive.footprint(shape, variant, 2).scratch}
    scratch = {name: store[GUARD : len(store) - GUARD] for name, store in stores.items()}
    out = aligned(shape.out_bytes).view(np.float32).reshape(shape.out_shape[1:])
    out[...] = np.nan
    before = [x.copy() for x in inputs]
    with ThreadPool(2) as pool:
        step = primitive.bind(primitive.prepare(weights or weights_for(shape), variant, pool), shape, variant, pool)
        step.run(inputs, out, scratch)
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[len(store) - GUARD :] == 0xFF).all(), f"wrote beyond {name}"
    for x, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, copy, err_msg="an input was modified")
    return out


def assert_exact(primitive: Primitive, shape: GraphConvShape, variant: Variant | None = None) -> None:
    """Run with inputs that are views, and compare with the definition."""
    inputs = inputs_for(shape)
    expected = definition.layer(shape, weights_for(shape), inputs)
    out = run(primitive, shape, [cut_out(x) for x in inputs], variant)
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(out, expected, rtol=3e-6, atol=3e-6 * scale)


@pytest.mark.parametrize(("primitive", "shape"), EACH, ids=ids)
def test_every_primitive_adds_an_array(primitive: Primitive, shape: GraphConvShape) -> None:
    assert_exact(primitive, shape)


@pytest.mark.parametrize("addend", [True, False])
@pytest.mark.parametrize("function", ENDS)
@pytest.mark.parametrize("primitive", [FFT, DIRECT], ids=ids)
@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_ends_with_every_function(
    simd: str, primitive: Primitive, function: Function, addend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (conv_fft_lanes, graph_conv_direct):
        monkeypatch.setattr(module, "this_machine", lambda: replace(MACHINE, simd=simd))
    for shape in PLAIN[:6]:
        if primitive.why_not(shape, MACHINE) is None:
            assert_exact(primitive, ended(shape, function, addend=addend))


@pytest.mark.parametrize("function", ["none", "elu", "softmax"])
@pytest.mark.parametrize("primitive", [FFT, DIRECT], ids=ids)
def test_large_outputs_are_written_past_the_caches(primitive: Primitive, function: Function) -> None:
    shape = ended(GraphConvShape((2,), 80, (20, 34, 48), (2, 2, 2), (0, 1, 0), (1, 0, 1)), function)
    assert library.streams(shape.fout, shape.out_bytes)
    assert_exact(primitive, shape)


@pytest.mark.parametrize("shape", SHAPES[6:10], ids=str)
def test_any_line_is_written_past_the_caches(shape: GraphConvShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_calls, "STREAM_BYTES", 0)
    for primitive in EVERY:
        if primitive.why_not(shape, MACHINE) is None:
            assert_exact(primitive, ended(shape, "silu"))


@st.composite
def shapes(draw: st.DrawFn) -> GraphConvShape:
    def sizes(least: int, most: int) -> Vec3:
        return draw(st.integers(least, most)), draw(st.integers(least, most)), draw(st.integers(least, most))

    k, n, before, behind = sizes(1, 4), sizes(1, 20), sizes(0, 3), sizes(0, 3)
    assume(all(size + a + b >= extent for size, a, b, extent in zip(n, before, behind, k, strict=True)))
    fins = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=2)))
    shape = GraphConvShape(fins, draw(st.integers(1, 40)), n, k, before, behind)
    return ended(shape, draw(st.sampled_from(ENDS)), addend=draw(st.sampled_from([True, True, False])))


@given(shapes(), st.data())
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_random_shapes_equal_the_definition(shape: GraphConvShape, data: st.DataObject) -> None:
    primitive = data.draw(st.sampled_from([FFT, FFT, DIRECT, DIRECT, *EVERY[2:]]))
    assume(primitive.why_not(shape, MACHINE) is None)
    assert_exact(primitive, shape, data.draw(st.sampled_from(list(primitive.variants(shape, MACHINE)))))


@pytest.mark.parametrize("function", ["none", "relu", "sigmoid", "clip"])
@pytest.mark.parametrize(
    ("primitive", "shape"), [(p, s) for s in SHAPES[:10] for p in EVERY if p.why_not(s, MACHINE) is None], ids=ids
)
def test_overflow_of_the_sum_is_counted(primitive: Primitive, shape: GraphConvShape, function: Function) -> None:
    """The convolution itself is finite, and the activation would hide the overflow."""
    shape = ended(shape, function)
    zero = ConvWeights(np.zeros_like(weights_for(shape).weight), np.full(shape.fout, 2e38, np.float32))
    *inputs, addend = inputs_for(shape)
    for value, bad in ((1e38, 0), (2e38, 1), (np.inf, 1), (np.nan, 1)):
        addend[-1, -1, -1, -1] = value
        if bad:
            with pytest.raises(ValuesOverflowError, match=r"\b1 of \d+ values .* became infinite or not a number"):
                run(primitive, shape, [*inputs, cut_out(addend)], weights=zero)
        else:
            run(primitive, shape, [*inputs, cut_out(addend)], weights=zero)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_and_blas_suffice(shape: GraphConvShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "compiled", lambda: False)
    machine = replace(MACHINE, simd="other")
    found = [p for p in EVERY if p.why_not(ended(shape, "elu"), machine) is None]
    assert found
    for primitive in found:
        assert_exact(primitive, ended(shape, "elu"))


@pytest.mark.parametrize(("primitive", "shape"), EACH, ids=ids)
def test_an_addend_is_seen_in_names_bytes_and_work(primitive: Primitive, shape: GraphConvShape) -> None:
    without: Any = replace(shape, addend=False)
    assert "addend" in str(shape)
    assert "addend" not in str(without)
    assert shape.in_bytes - without.in_bytes == shape.out_bytes
    variant = primitive.variants(shape, MACHINE)[0]
    moved = [sum(work.nbytes for work in primitive.work(one, variant)) for one in (shape, without)]
    assert moved[0] >= moved[1] + shape.out_bytes
