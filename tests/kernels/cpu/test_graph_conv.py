"""Convolutions of graphs with stride 1 equal their definition in float64, on several padded and strided inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support.closeness import GUARD, INPUTS, MACHINE, aligned, twin
from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape, PadShape
from znnpy.kernels import definition
from znnpy.kernels.contract import Variant
from znnpy.kernels.cpu import conv_fft_lanes, graph_conv_direct, tiled_variants
from znnpy.kernels.cpu.graph_conv_table import GRAPH_CONVOLUTIONS
from znnpy.kernels.cpu.native import library
from znnpy.kernels.cpu.native.library import LANES
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Footprint, Primitive
    from znnpy.layers import Function
    from znnpy.shapes import Vec3

FFT, DIRECT = GRAPH_CONVOLUTIONS[:2]
COMPILED = [simd for simd in ("avx512", "avx2") if library.path(simd)]
RUNS_HERE = [simd for simd in COMPILED if simd == "avx2" or MACHINE.simd == "avx512"]

ZERO, ONE, TWICE = (0, 0, 0), (1, 1, 1), (2, 2, 2)

UPSAMPLED: list[tuple[Function, tuple[int, ...], tuple[Vec3, ...], Vec3, Vec3, Vec3, Vec3, Vec3]] = [
    ("relu", (8, 16), (ONE, TWICE), ZERO, (6, 34, 30), (3, 3, 3), ONE, ONE),  # faces on all sides
    ("none", (33,), (TWICE,), ONE, (7, 8, 9), (3, 3, 3), ZERO, ZERO),  # none, and halves at the ends
    ("leaky_relu", (3, 17, 2), (ONE, TWICE, ONE), (1, 0, 1), (5, 16, 35), (3, 5, 3), (0, 2, 0), ZERO),
    ("relu", (2, 5), ((1, 2, 2), ONE), (0, 1, 1), (4, 9, 41), (2, 3, 3), (1, 0, 0), (0, 1, 1)),
    ("none", (4, 4), ((2, 1, 1), (2, 1, 1)), (1, 0, 0), (3, 1, 2), (3, 1, 2), ZERO, (2, 0, 1)),
    ("elu", (1,), ((1, 1, 2),), ZERO, (1, 1, 2), (1, 1, 3), (0, 0, 1), (0, 0, 1)),
]

SHAPES = [
    GraphConvShape((1,), 1, (1, 1, 1), (1, 1, 1)),
    GraphConvShape((3,), 5, (4, 7, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="relu"),
    GraphConvShape((1,), 32, (5, 20, 31), (3, 3, 3), (0, 1, 1), (0, 1, 1), activation="leaky_relu"),  # a first layer
    GraphConvShape((7, 1), 9, (6, 11, 13), (1, 3, 3), (0, 1, 1), (0, 1, 1), activation="leaky_relu"),
    GraphConvShape((3, 17, 2), 18, (5, 6, 7), (3, 1, 2), (1, 0, 0), (0, 0, 1)),
    GraphConvShape((32, 16), 16, (4, 18, 40), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="relu"),  # whole blocks
    GraphConvShape((5,), 4, (3, 3, 3), (3, 3, 3)),  # one voxel comes out
    GraphConvShape((2, 2), 3, (1, 1, 1), (3, 2, 3), (2, 0, 1), (0, 1, 1)),  # one voxel, most of it padding
    GraphConvShape((4,), 6, (6, 7, 8), (3, 3, 3), (2, 0, 0), (0, 0, 0)),  # padding on one side
    GraphConvShape((4,), 6, (6, 7, 8), (3, 3, 3), (0, 2, 0), (0, 0, 1), activation="relu"),
    GraphConvShape((4,), 6, (6, 7, 8), (3, 3, 3), (0, 0, 0), (0, 0, 2)),
    GraphConvShape((3,), 2, (2, 3, 2), (3, 3, 3), (9, 10, 11), (13, 12, 14)),  # tiles of nothing but padding
    GraphConvShape((1, 1), 1, (2, 3, 2), (5, 1, 4), (4, 0, 3), (4, 3, 3)),
    GraphConvShape((24,), 3, (5, 9, 40), (1, 1, 1), activation="softmax"),  # a last layer
    GraphConvShape((20, 44), 33, (3, 9, 11), (1, 1, 1), activation="leaky_relu"),
    GraphConvShape((2, 3), 5, (3, 4, 5), (1, 1, 1), (1, 0, 2), (0, 2, 1), activation="relu"),  # padding alone
    GraphConvShape((150, 150), 10, (2, 3, 9), (1, 1, 1)),  # more taps than are summed at a time
    GraphConvShape((40, 3), 17, (3, 5, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="elu"),
    GraphConvShape((70,), 65, (3, 17, 20), (2, 2, 2), (0, 1, 0), (1, 0, 1), activation="silu"),
    GraphConvShape((6,), 8, (1, 30, 31), (1, 5, 5), (0, 2, 2), (0, 2, 2), activation="sigmoid"),  # two-dimensional
    GraphConvShape((1,), 20, (40, 1, 1), (9, 1, 1), (4, 0, 0), (4, 0, 0), activation="tanh"),
    *(
        GraphConvShape(fins, 20, n, k, before, behind, activation=function, factors=factors, first=first)
        for function, fins, factors, first, n, k, before, behind in UPSAMPLED
    ),
]
PAIRS = [(p, s) for p in GRAPH_CONVOLUTIONS for s in SHAPES if p.why_not(s, MACHINE) is None]


def ids(value: object) -> str | None:
    return value.name if hasattr(value, "name") else str(value)


def some_variants(primitive: Primitive, shape: GraphConvShape) -> Sequence[Variant]:
    """Return the first variant, the last, and a few between."""
    variants = primitive.variants(shape, MACHINE)
    return [*variants[:: max(1, len(variants) // 5)], variants[-1]]


def weights_for(shape: GraphConvShape) -> ConvWeights:
    rng = np.random.default_rng(5)
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weight = rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale
    return ConvWeights(weight, rng.standard_normal(shape.fout, np.float32))


def inputs_for(shape: GraphConvShape, kind: str = "normal") -> list[Array]:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((*shape.size_of(i), maps), np.float32) for i, maps in enumerate(shape.fins)]
    for x in arrays:
        if kind == "relu":
            np.maximum(x, np.float32(0), out=x)
        elif kind == "shifted":
            x += np.float32(10)
    if kind == "hot":
        arrays[0][tuple(n // 2 for n in arrays[0].shape)] = 1e6
    return arrays


def cut_out(arrays: Sequence[Array]) -> list[Array]:
    """Copy arrays into larger ones full of NaN: with planes, rows and voxels around them, and maps beside them."""
    views = []
    for number, array in enumerate(arrays):
        z, y, x, f = array.shape
        larger = np.full((z + 2, y + 3, x + 4, f + 3 * number + 5), np.nan, np.float32)
        views.append(larger[1 : 1 + z, 2 : 2 + y, 1 : 1 + x, 3 : 3 + f])
        views[-1][...] = array
    return views


def side_by_side(arrays: Sequence[Array]) -> list[Array]:
    """Copy arrays into one that holds the maps of all, if their sizes are equal."""
    if len({x.shape[:3] for x in arrays}) > 1:
        return cut_out(arrays)
    whole = np.concatenate(arrays, axis=-1)
    ends = np.cumsum([x.shape[-1] for x in arrays])
    return [whole[..., end - x.shape[-1] : end] for end, x in zip(ends, arrays, strict=True)]


def run(
    primitive: Primitive,
    shape: GraphConvShape,
    weights: ConvWeights,
    inputs: Sequence[Array],
    variant: Variant | None = None,
    threads: int = 1,
) -> Array:
    """Run with NaN in output and scratch beforehand; fail when a byte around a scratch buffer or an input changes."""
    variant = variant or primitive.variants(shape, MACHINE)[0]
    footprint = primitive.footprint(shape, variant, threads)
    stores = {s.name: aligned(s.nbytes + 2 * GUARD) for s in footprint.scratch}
    scratch = {name: store[GUARD : len(store) - GUARD] for name, store in stores.items()}
    out = np.full(shape.out_shape[1:], np.nan, np.float32)
    before = [x.copy() for x in inputs]
    with ThreadPool(threads) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        step.run(inputs, out, scratch)
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[len(store) - GUARD :] == 0xFF).all(), f"wrote beyond {name}"
    for x, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, copy, err_msg="an input was modified")
    return out


def assert_close(out: Array, shape: GraphConvShape, weights: ConvWeights, inputs: Sequence[Array]) -> None:
    """Fail where the rms error is more than 3 times that of plain float32, and 1e-6 of the rms answer."""
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} of {out.size} values not finite"
    exact = definition.convolve(shape, weights, inputs)
    sides = [*zip(shape.before, shape.behind, strict=True), (0, 0)]
    x = np.ascontiguousarray(np.pad(np.concatenate(definition.repeated(shape, inputs), axis=-1), sides))
    plain = twin(x[np.newaxis], weights, ConvShape(1, shape.fin, shape.fout, shape.padded, shape.k))[0]
    yardstick = definition.activate(shape.activation, shape.parameters, plain.astype(np.float64))
    limit = max(3 * rms(yardstick - exact), 1e-6 * rms(exact))
    worst = np.unravel_index(np.abs(out - exact).argmax(), out.shape)
    assert rms(out - exact) <= limit, f"rms error {rms(out - exact):.2e} > {limit:.2e}; worst (z, y, x, f) = {worst}"


def rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("primitive", "shape"), PAIRS, ids=ids)
def test_output_equals_the_definition(primitive: Primitive, shape: GraphConvShape, threads: int) -> None:
    weights = weights_for(shape)
    for variant, kind in zip(some_variants(primitive, shape), cycle(INPUTS)):
        if kind == "hot" and shape.activation not in ("none", "relu", "leaky_relu"):
            kind = "normal"  # the activation hides how large the answer was
        inputs = inputs_for(shape, kind)
        assert_close(run(primitive, shape, weights, inputs, variant, threads), shape, weights, inputs)


@pytest.mark.parametrize(("primitive", "shape"), PAIRS, ids=ids)
def test_inputs_may_be_views_of_larger_arrays(primitive: Primitive, shape: GraphConvShape) -> None:
    weights, inputs = weights_for(shape), inputs_for(shape)
    for views in (cut_out(inputs), side_by_side(inputs), [x[:, ::-1].copy()[:, ::-1] for x in inputs]):
        assert_close(run(primitive, shape, weights, views, threads=2), shape, weights, inputs)


def _sizes(draw: st.DrawFn, least: int, most: int) -> Vec3:
    return draw(st.integers(least, most)), draw(st.integers(least, most)), draw(st.integers(least, most))


@st.composite
def shapes(draw: st.DrawFn) -> GraphConvShape:
    k, n = _sizes(draw, 1, 4), _sizes(draw, 1, 20)
    before, behind = _sizes(draw, 0, 4), _sizes(draw, 0, 4)
    assume(all(size + a + b >= extent for size, a, b, extent in zip(n, before, behind, k, strict=True)))
    maps = st.sampled_from([1, 2, 3, 8, 17])
    fins = tuple(draw(st.lists(maps, min_size=1, max_size=3)))
    functions: list[Function] = ["none", "relu", "leaky_relu"]
    function = draw(st.sampled_from(functions))
    parameters = (0.3,) if function == "leaky_relu" else ()
    return GraphConvShape(fins, draw(maps), n, k, before, behind, activation=function, parameters=parameters)


@given(shapes(), st.data())
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_random_shapes_equal_the_definition(shape: GraphConvShape, data: st.DataObject) -> None:
    primitive = data.draw(st.sampled_from([FFT, FFT, DIRECT, DIRECT, *GRAPH_CONVOLUTIONS[2:]]))
    assume(primitive.why_not(shape, MACHINE) is None)
    variant = data.draw(st.sampled_from(list(primitive.variants(shape, MACHINE))))
    weights, inputs = weights_for(shape), inputs_for(shape)
    places: list[Callable[[Sequence[Array]], list[Array]]] = [list, cut_out, side_by_side]
    views = data.draw(st.sampled_from(places))(inputs)
    assert_close(run(primitive, shape, weights, views, variant, threads=2), shape, weights, inputs)


@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("side", tiled_variants.SIDES)
def test_every_library_pads_every_tile_size(simd: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile begins in the padding, and the last reaches beyond it; some maps fill no block."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    shape = GraphConvShape(
        (17, 1), 3, (side - 2, 5, side + 1), (3, 2, 3), (1, 0, 2), (2, 1, 0), activation="leaky_relu"
    )
    weights, inputs = weights_for(shape), cut_out(inputs_for(shape))
    variant = Variant.of(tile=(side, 4, side), group=3, kept=0)
    assert_close(run(FFT, shape, weights, inputs, variant, threads=2), shape, weights, inputs)


@pytest.mark.parametrize("simd", RUNS_HERE)
@pytest.mark.parametrize("side", tiled_variants.SIDES)
@pytest.mark.parametrize("kept", [0, 1])
def test_every_library_repeats_voxels_in_every_tile_size(
    simd: str, side: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles begin with whole voxels, so that some compute an output too many at their beginning."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    for factor in ((2, 1, 2), (1, 2, 1), TWICE):
        shape = GraphConvShape(
            (17, 1), 3, (side, 2 * side - 3, side + 1), (3, 3, 3), (0, 0, 1), (0, 1, 0), factors=(ONE, factor),
            first=(factor[0] - 1, factor[1] - 1, 0),
        )  # fmt: skip
        weights, inputs = weights_for(shape), cut_out(inputs_for(shape))
        part = tiled_variants.Upsampled(factor, 17, 18)
        variant = tiled_variants.tiled_variant((side, side, side), 3, kept, part)
        assert_close(run(FFT, shape, weights, inputs, variant, threads=2), shape, weights, inputs)


@pytest.mark.parametrize("fout", [1, 8, 9, 16, 30, 48, 64])
@pytest.mark.parametrize("simd", RUNS_HERE)
def test_every_library_computes_lines_of_every_length(simd: str, fout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_conv_direct, "this_machine", lambda: replace(MACHINE, simd=simd))
    for length in (*range(1, 15), 25):
        for fins in ((3,), (2, 5)):
            shape = GraphConvShape(fins, fout, (2, 2, length), (2, 1, 3), (0, 0, 1), (1, 0, 1), activation="leaky_relu")
            weights, inputs = weights_for(shape), inputs_for(shape)
            assert_close(run(DIRECT, shape, weights, inputs), shape, weights, inputs)


@pytest.mark.parametrize("function", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("primitive", [FFT, DIRECT], ids=ids)
def test_large_outputs_are_written_past_the_caches(primitive: Primitive, function: Function) -> None:
    shape = GraphConvShape((2,), 80, (20, 34, 48), (2, 2, 2), (0, 1, 0), (1, 0, 1), activation=function)
    assert library.streams(shape.fout, shape.out_bytes)
    weights, inputs = weights_for(shape), inputs_for(shape)
    variant = primitive.variants(shape, MACHINE)[0]
    assert_close(run_into_lines(primitive, shape, weights, inputs, variant), shape, weights, inputs)


def run_into_lines(
    primitive: Primitive, shape: GraphConvShape, weights: ConvWeights, inputs: Sequence[Array], variant: Variant
) -> Array:
    """Run with an output that begins at a cache line."""
    out = aligned(shape.out_bytes).view(np.float32).reshape(shape.out_shape[1:])
    with ThreadPool(2) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        step.run(inputs, out, scratch_of(primitive.footprint(shape, variant, 2)))
    return out


def scratch_of(footprint: Footprint) -> dict[str, Any]:
    return {s.name: aligned(s.nbytes) for s in footprint.scratch}


@pytest.mark.parametrize("primitive", GRAPH_CONVOLUTIONS, ids=ids)
def test_threads_and_repetition_change_no_byte(primitive: Primitive) -> None:
    shape = GraphConvShape((9, 4), 10, (7, 22, 23), (3, 2, 3), (1, 0, 1), (1, 1, 1), activation="leaky_relu")
    weights, inputs = weights_for(shape), inputs_for(shape)
    first = run(primitive, shape, weights, inputs).tobytes()
    for threads in (1, 2, 2):
        assert run(primitive, shape, weights, inputs, threads=threads).tobytes() == first


@pytest.mark.parametrize("function", ["none", "relu", "leaky_relu", "sigmoid", "clip"])
@pytest.mark.parametrize("primitive", GRAPH_CONVOLUTIONS, ids=ids)
def test_overflow_is_found_before_the_activation_hides_it(primitive: Primitive, function: Function) -> None:
    shape = GraphConvShape((4, 2), 3, (5, 10, 11), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation=function)
    inputs = [np.full_like(x, -1e20) for x in inputs_for(shape)]
    weights = ConvWeights(np.full((3, 6, 3, 3, 3), 1e20, np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValuesOverflowError, match=r"\d+ of \d+ values .* became infinite or not a number"):
        run(primitive, shape, weights, inputs, threads=2)


@pytest.mark.parametrize("primitive", GRAPH_CONVOLUTIONS, ids=ids)
def test_stopped_thread_pool_stops_a_step(primitive: Primitive) -> None:
    shape = GraphConvShape((4, 3), 4, (8, 16, 16), (3, 3, 3), (1, 1, 1), (1, 1, 1))
    variant = primitive.variants(shape, MACHINE)[0]
    with ThreadPool(2) as pool:
        step = primitive.bind(primitive.prepare(weights_for(shape), variant, pool), shape, variant, pool)
        scratch = scratch_of(primitive.footprint(shape, variant, 2))
        pool.stop()
        with pytest.raises(Stopped):
            step.run(inputs_for(shape), np.empty(shape.out_shape[1:], np.float32), scratch)


def refused() -> Iterator[tuple[GraphConvShape | PadShape, str]]:
    plain = GraphConvShape((4,), 4, (8, 8, 8), (3, 3, 3))
    for changed in ({"stride": (1, 2, 1)}, {"dilation": (2, 1, 1)}, {"groups": 2}):
        yield replace(plain, **changed), "stride 1, dilation 1 and one group"
    yield replace(plain, precision="fp16"), "not in fp16"
    yield PadShape(1, (4, 4, 4), (4, 4, 4), (0, 0, 0), (0, 0, 0), (4, 4, 4), "zeros"), "computes convolutions of graphs"


@pytest.mark.parametrize("primitive", GRAPH_CONVOLUTIONS, ids=ids)
def test_unsupported_shape_gets_a_reason(primitive: Primitive) -> None:
    for shape, reason in refused():
        assert reason in (primitive.why_not(shape, MACHINE) or "")


def test_one_compiled_primitive_accepts_every_plain_convolution() -> None:
    for shape in SHAPES:
        if sum(factor != ONE for factor in shape.factors) < 2:
            assert (FFT if shape.upsampled else DIRECT).why_not(shape, MACHINE) is None
    one, huge = replace(SHAPES[1], k=(1, 1, 1)), replace(SHAPES[1], n=(40, 40, 40), k=(33, 1, 1))
    assert "see cpu.graph_conv.direct_lanes" in (FFT.why_not(one, MACHINE) or "")
    assert "larger than the largest tile" in (FFT.why_not(huge, MACHINE) or "")


@pytest.mark.parametrize("simd", RUNS_HERE)
def test_kernels_of_an_upsampled_input_hold_no_subnormal_number(simd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors compute slowly with such numbers; rounded sines of half a turn would leave some."""
    monkeypatch.setattr(conv_fft_lanes, "this_machine", lambda: replace(MACHINE, simd=simd))
    small = 1e-4 * np.random.default_rng(1).standard_normal((2, 3, 3, 3, 3), np.float32)
    weights = ConvWeights(small, np.zeros(2, np.float32))
    variant = tiled_variants.tiled_variant((6, 10, 12), 64, 1, tiled_variants.Upsampled((2, 2, 2), 1, 3))
    with ThreadPool(1) as pool:
        kernels = conv_fft_lanes.tiled_kernels(weights, variant, pool).kernels
    sizes = np.abs(kernels.reshape(-1, 3 + 1, 2 * LANES)[:, :3])  # of each frequency: the input maps, then a gap
    assert 1e-7 < sizes.max() < 1.0
    assert not ((sizes > 0) & (sizes < np.finfo(np.float32).tiny)).any()


@pytest.mark.parametrize(("primitive", "shape"), PAIRS, ids=ids)
def test_work_is_positive(primitive: Primitive, shape: GraphConvShape) -> None:
    for variant in primitive.variants(shape, MACHINE):
        work = primitive.work(shape, variant)
        assert sum(w.flops for w in work) > 0
        assert all(w.flops >= 0 and w.nbytes >= 0 for w in work)


def test_names_differ_and_say_what_they_are() -> None:
    names = [p.name for p in GRAPH_CONVOLUTIONS]
    assert len(set(names)) == len(names)
    assert "cpu.graph_conv.fft_tiled_gathered" in names
    assert all(p.kind == "graph_conv" for p in GRAPH_CONVOLUTIONS)


def test_one_contiguous_input_without_padding_is_not_copied() -> None:
    shape = GraphConvShape((4,), 5, (6, 7, 8), (3, 3, 3))
    weights, inputs = weights_for(shape), inputs_for(shape)
    gathered = {p.name: p for p in GRAPH_CONVOLUTIONS}["cpu.graph_conv.direct_gathered"]
    variant = gathered.variants(shape, MACHINE)[0]
    scratch = scratch_of(gathered.footprint(shape, variant, 1))
    out = np.empty(shape.out_shape[1:], np.float32)
    with ThreadPool(1) as pool:
        step = gathered.bind(gathered.prepare(weights, variant, pool), shape, variant, pool)
        step.run(inputs, out, scratch)
    assert (scratch["gathered"] == 0xFF).all()
    assert_close(out, shape, weights, inputs)
