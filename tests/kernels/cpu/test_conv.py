"""Every convolution primitive against the float64 definition, on every kind of shape, activation and input."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tests.support.closeness import (
    INPUTS,
    MACHINE,
    aligned,
    assert_close,
    definition,
    random_input,
    random_weights,
    run,
)
from znnpy.costs.model import Rates, seconds
from znnpy.errors import ShapeError, Stopped, ValuesOverflowError
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.cpu import conv_direct
from znnpy.kernels.table import TABLE, find, of_kind
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import AMX, AVX512_BF16
from znnpy.shapes import ACTIVATIONS, ConvShape, FilterShape, MaxoutShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Primitive
    from znnpy.layer_shapes import LayerShape
    from znnpy.shapes import Vec3

ABSENT = tuple({AMX, AVX512_BF16} - {*MACHINE.bf16})  # units that are tested on their twins
CONVS = [p for p in of_kind("conv") if p.name.startswith("cpu.") and not p.name.endswith(ABSENT)]

SHAPES = [
    ConvShape(1, 1, 1, (1, 1, 1), (1, 1, 1)),  # nothing but a multiplication
    ConvShape(2, 3, 5, (4, 5, 6), (1, 1, 1), "softmax"),
    ConvShape(1, 17, 3, (3, 40, 50), (1, 1, 1), "sigmoid"),  # several blocks of lines
    ConvShape(1, 1, 16, (20, 18, 19), (4, 4, 4), "relu"),  # a first layer
    ConvShape(1, 2, 7, (9, 30, 13), (3, 3, 3), "tanh"),
    ConvShape(2, 3, 4, (11, 7, 9), (2, 3, 4), "sigmoid"),  # no two axes alike
    ConvShape(3, 16, 16, (10, 11, 12), (3, 3, 3), "relu"),
    ConvShape(1, 20, 9, (17, 18, 35), (5, 3, 2), "softmax"),
    ConvShape(2, 8, 1, (5, 9, 9), (5, 9, 9), "none"),  # the kernel is the whole input: one voxel comes out
    ConvShape(1, 6, 3, (1, 21, 22), (1, 5, 4), "relu"),  # two-dimensional
    ConvShape(2, 1, 3, (1, 8, 9), (1, 3, 4), "relu"),  # one plane of one map, of lines that fill it unevenly
    ConvShape(4, 4, 2, (1, 4, 2), (1, 3, 2), "none"),
    ConvShape(1, 5, 5, (24, 1, 1), (9, 1, 1), "tanh"),  # one-dimensional
    ConvShape(8, 4, 6, (3, 4, 5), (3, 2, 1), "relu"),  # many small images
    ConvShape(1, 33, 31, (12, 13, 14), (3, 3, 3), "none"),  # maps that fill no cache line
    ConvShape(1, 3, 2, (33, 34, 12), (9, 9, 9), "relu"),
    ConvShape(1, 2, 3, (36, 37, 5), (33, 34, 3), "none"),  # no tile is as large
]
PAIRS = [(p, s) for p in CONVS for s in SHAPES if p.why_not(s, MACHINE) is None]


def ids(value: object) -> str | None:
    return value.name if hasattr(value, "name") else str(value)


def some_variants(primitive: Primitive, shape: ConvShape) -> Sequence[Variant]:
    """Return the first variant, the last, and a few between."""
    variants = primitive.variants(shape, MACHINE)
    return [*variants[:: max(1, len(variants) // 5)], variants[-1]]


@pytest.mark.parametrize(("primitive", "shape"), PAIRS, ids=ids)
def test_output_equals_the_definition(primitive: Primitive, shape: ConvShape) -> None:
    weights = random_weights(shape)
    for variant, kind in zip(some_variants(primitive, shape), cycle(INPUTS)):
        if kind == "hot" and shape.activation not in ("none", "relu"):
            kind = "normal"
        x = random_input(shape, kind)
        before = x.copy()
        assert_close(run(primitive, shape, x, weights, variant, threads=2).out, x, weights, shape)
        np.testing.assert_array_equal(x, before, err_msg="the input was modified")


def test_tiles_far_beyond_the_input_read_zeros() -> None:
    """Whole blocks of planes outside the input are zero, whatever the scratch held."""
    shape = ConvShape(1, 100, 2, (19, 10, 10), (3, 3, 3))
    x, weights = random_input(shape), random_weights(shape)
    ran = run(find("cpu.conv.fft_tiled"), shape, x, weights, Variant.of(tile=(16, 16, 16), group=8), threads=2)
    assert_close(ran.out, x, weights, shape)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_every_activation_and_input_equals_the_definition(primitive: Primitive, activation: str, kind: str) -> None:
    shape = ConvShape(1, 7, 5, (15, 16, 17), (3, 3, 3), activation)  # type: ignore[arg-type]
    x, weights = random_input(shape, kind), random_weights(shape)
    out = run(primitive, shape, x, weights).out
    if kind == "hot" and activation in ("tanh", "sigmoid", "softmax") and primitive.name.startswith("cpu.conv.fft"):
        # A transform spreads the rounding of the hot voxel over the quiet ones of its tile, and the activation hides
        # how large the hot answer was: no longer within that of plain float32, but bounded.
        exact = definition(x, weights, shape.activation)
        assert np.sqrt(np.mean((out - exact) ** 2)) <= 1e-2
    else:
        assert_close(out, x, weights, shape)


@st.composite
def conv_shapes(draw: st.DrawFn) -> ConvShape:
    k = tuple(draw(st.integers(1, 5)) for _ in range(3))
    n = tuple(size + draw(st.integers(0, 22)) for size in k)
    maps = st.sampled_from([1, 2, 3, 8, 11])
    return ConvShape(draw(st.integers(1, 3)), draw(maps), draw(maps), _vec3(n), _vec3(k), "relu")


def _vec3(v: tuple[int, ...]) -> Vec3:
    return v[0], v[1], v[2]


@given(conv_shapes(), st.data())
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_random_shapes_equal_the_definition(shape: ConvShape, data: st.DataObject) -> None:
    primitive = data.draw(st.sampled_from(CONVS))
    assume(primitive.why_not(shape, MACHINE) is None)
    variant = data.draw(st.sampled_from(list(primitive.variants(shape, MACHINE))))
    x, weights = random_input(shape), random_weights(shape)
    assert_close(run(primitive, shape, x, weights, variant, threads=2).out, x, weights, shape)


@pytest.mark.parametrize(("primitive", "shape"), [q for q in PAIRS if q[1].batch > 1], ids=ids)
def test_batch_may_have_any_stride(primitive: Primitive, shape: ConvShape) -> None:
    weights = random_weights(shape)
    x = spread(random_input(shape))
    out = spread(np.full(shape.out_shape, np.nan, np.float32))
    assert x.strides[0] != x[0].nbytes
    run(primitive, shape, x, weights, threads=2, out=out)
    assert_close(out, x, weights, shape)
    gaps = out.base
    assert gaps is not None
    assert np.isnan(gaps[:, out[0].size :]).all(), "wrote between the images"


def spread(images: Array) -> Array:
    """Copy the images to places 96 floats apart, with NaN between."""
    store = np.full((len(images), images[0].size + 96), np.nan, np.float32)
    store[:, : images[0].size] = images.reshape(len(images), -1)
    strides = (store.strides[0], *images.strides[1:])
    return np.ndarray(images.shape, np.float32, store, 0, strides)


@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_threads_and_repetition_change_no_byte(primitive: Primitive) -> None:
    shape = ConvShape(2, 9, 10, (21, 22, 23), (3, 4, 5), "tanh")
    x, weights = random_input(shape), random_weights(shape)
    first = run(primitive, shape, x, weights, threads=1).out.tobytes()
    assert run(primitive, shape, x, weights, threads=1).out.tobytes() == first
    for _ in range(3):
        assert run(primitive, shape, x, weights, threads=2).out.tobytes() == first


LARGE = ConvShape(1, 24, 24, (50, 52, 54), (3, 3, 3), "relu")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_footprint_equals_the_bytes_used(primitive: Primitive, threads: int) -> None:
    x, weights = random_input(LARGE), random_weights(LARGE)
    for variant in some_variants(primitive, LARGE)[-3:]:
        ran = run(primitive, LARGE, x, weights, variant, threads)
        assert ran.peak_bytes <= ran.footprint.allowance, "allocates more than it says"
        if threads == 1:  # of two workers one may find nothing left to do
            assert all(0.85 <= part <= 1 for part in ran.touched.values()), f"{variant} wrote {ran.touched}"
        alone = primitive.footprint(LARGE, variant, 1)
        assert sum(s.nbytes for s in ran.footprint.scratch) <= threads * sum(s.nbytes for s in alone.scratch)


@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_resident_bytes_equal_the_footprint(primitive: Primitive) -> None:
    shape = ConvShape(1, 40, 40, (32, 32, 32), (3, 3, 3))
    weights = random_weights(shape)
    for variant in some_variants(primitive, shape)[-2:]:
        footprint = primitive.footprint(shape, variant, 2)
        with ThreadPool(2) as pool:
            tracemalloc.start()
            try:
                resident = primitive.prepare(weights, variant, pool)
                held, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert sum(array.nbytes for array in arrays(resident)) <= footprint.resident
        assert held <= footprint.resident + 2**16
        assert peak <= footprint.resident + footprint.working(shape), "more than the layer has before its arena is used"


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_bound_step_keeps_only_the_promised_bytes(primitive: Primitive, activation: str) -> None:
    """Rows of biases are small, but megabytes for wide images with many maps."""
    shape = ConvShape(1, 2, 64, (4, 5, 900), (2, 2, 3), activation)  # type: ignore[arg-type]
    variant = primitive.variants(shape, MACHINE)[-1]
    with ThreadPool(2) as pool:
        resident = primitive.prepare(random_weights(shape), variant, pool)
        tracemalloc.start()
        try:
            step = primitive.bind(resident, shape, variant, pool)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    counted = primitive.footprint(shape, variant, 2).resident - sum(array.nbytes for array in arrays(resident))
    assert counted <= held <= counted + 2**16, step  # and pyFFTW's objects


@pytest.mark.slow
def test_small_blocks_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of all blocks would take megabytes where blocks are small."""
    monkeypatch.setattr(conv_direct, "BLOCK_BYTES", 1)
    monkeypatch.setattr(conv_direct, "MIN_VOXELS", 1)
    shape = ConvShape(1, 1, 1, (22, 23, 24), (1, 1, 2))
    x, weights = random_input(shape), random_weights(shape)
    ran = run(find("cpu.conv.direct"), shape, x, weights)
    assert_close(ran.out, x, weights, shape)
    assert ran.peak_bytes < 2**18


def arrays(resident: object) -> list[Array]:
    if isinstance(resident, ConvWeights):
        return []  # the caller's, which are not copied
    assert isinstance(resident, tuple)
    return [array for part in resident for array in (part if isinstance(part, tuple) else (part,))]


def test_output_may_overwrite_the_input_after_its_last_stage() -> None:
    """Algorithm 2 frees its input once it is transformed: the footprint says so."""
    shape = ConvShape(2, 5, 6, (12, 13, 14), (3, 3, 3), "relu")
    weights, x = random_weights(shape), random_input(shape)
    primitive = find("cpu.conv.fft_data")
    variant = primitive.variants(shape, MACHINE)[0]
    footprint = primitive.footprint(shape, variant, 2)
    assert footprint.output_from > footprint.input_until
    store = aligned(max(shape.in_bytes, shape.out_bytes)).view(np.float32)
    shared_x = store[: x.size].reshape(x.shape)
    shared_x[...] = x
    out = store[: int(np.prod(shape.out_shape))].reshape(shape.out_shape)
    late = {s.name: s for s in footprint.scratch if s.first == 1}
    early = [s for s in footprint.scratch if s.last == 0]
    common = aligned(max(sum(s.nbytes for s in late.values()), sum(s.nbytes for s in early)))
    scratch = {s.name: aligned(s.nbytes) for s in footprint.scratch}
    scratch |= {s.name: common[: s.nbytes] for s in early}
    start = 0
    for s in late.values():
        scratch[s.name] = common[start : start + s.nbytes]
        start += s.nbytes
    with ThreadPool(2) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        step.run(shared_x, out, scratch)
    assert_close(out, x, weights, shape)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_overflow_is_found_before_the_activation_hides_it(primitive: Primitive, activation: str) -> None:
    shape = ConvShape(1, 4, 3, (9, 10, 11), (3, 3, 3), activation)  # type: ignore[arg-type]
    x = np.full(shape.in_shape, -1e20, np.float32)
    weights = ConvWeights(np.full((3, 4, 3, 3, 3), 1e20, np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValuesOverflowError, match=r"\d+ of \d+ values .* became infinite or not a number"):
        run(primitive, shape, x, weights, threads=2)


def test_large_finite_values_do_not_count_as_overflow() -> None:
    """Their sums overflow float32; they themselves do not."""
    shape = ConvShape(1, 1, 2, (6, 30, 30), (1, 1, 1))
    x = np.full(shape.in_shape, 3e38, np.float32)
    weights = ConvWeights(np.ones((2, 1, 1, 1, 1), np.float32), np.zeros(2, np.float32))
    assert (run(find("cpu.conv.direct"), shape, x, weights).out == np.float32(3e38)).all()


@pytest.mark.parametrize("primitive", CONVS, ids=ids)
def test_stopped_thread_pool_stops_a_step(primitive: Primitive) -> None:
    shape = ConvShape(1, 4, 4, (16, 16, 16), (3, 3, 3))
    variant = primitive.variants(shape, MACHINE)[0]
    with ThreadPool(2) as pool:
        step = primitive.bind(primitive.prepare(random_weights(shape), variant, pool), shape, variant, pool)
        pool.stop()
        scratch = {s.name: aligned(s.nbytes) for s in primitive.footprint(shape, variant, 2).scratch}
        with pytest.raises(Stopped):
            step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)


def test_unsupported_shape_gets_a_reason() -> None:
    one = ConvShape(1, 2, 3, (4, 4, 4), (1, 1, 1))
    huge = ConvShape(1, 2, 3, (40, 40, 40), (3, 33, 3))
    maxout = MaxoutShape(1, 4, (3, 3, 3), 2)
    tiled, data, direct = find("cpu.conv.fft_tiled"), find("cpu.conv.fft_data"), find("cpu.conv.direct")
    assert "see cpu.conv.direct" in (tiled.why_not(one, MACHINE) or "")
    assert "see cpu.conv.direct" in (data.why_not(one, MACHINE) or "")
    assert "kernel of 33 is larger than the largest tile of 32" in (tiled.why_not(huge, MACHINE) or "")
    assert data.why_not(huge, MACHINE) is None
    for primitive in CONVS:
        assert primitive.why_not(maxout, MACHINE) == "computes convolutions, not maxout"
    assert direct.why_not(one, MACHINE) is None


def axis() -> st.SearchStrategy[tuple[int, int]]:
    """Size of a kernel or window, and how much larger the input is."""
    return st.tuples(st.integers(1, 33), st.integers(0, 60))


@given(st.tuples(axis(), axis(), axis()), st.integers(1, 9), st.sampled_from([1, 3, 80]), st.sampled_from([1, 3, 80]))
@example(((20, 10), (3, 2), (3, 2)), 1, 2, 3)  # no two sides of tiles within twice each other
@settings(max_examples=200, derandomize=True, deadline=None)
def test_applicable_primitive_has_a_variant(
    sizes: tuple[tuple[int, int], ...], batch: int, fin: int, fout: int
) -> None:
    k, n = _vec3(tuple(k for k, _ in sizes)), _vec3(tuple(k + more for k, more in sizes))
    whole = _vec3(tuple(k * (more + 2) - 1 for k, more in sizes))
    shapes: list[LayerShape] = [
        ConvShape(batch, fin, fout, n, k),
        PoolShape(batch, fin, whole, k),
        PoolShape(batch, fin, _vec3(tuple(k * (more + 1) for k, more in sizes)), k, fragments=False),
        FilterShape(batch, fin, n, k),
        MaxoutShape(batch, fin * fout, n, fout),
    ]
    for shape in shapes:
        applied = [p for p in TABLE if p.why_not(shape, MACHINE) is None]
        assert applied
        for primitive in applied:
            assert primitive.variants(shape, MACHINE), f"{primitive.name} offers nothing for {shape}"


def test_tiles_hold_the_kernel_and_are_no_larger_than_needed() -> None:
    shape = ConvShape(1, 8, 8, (11, 42, 1), (3, 9, 1))
    tiles = {v.size("tile") for v in find("cpu.conv.fft_tiled").variants(shape, MACHINE)}
    assert {t[0] for t in tiles} == {12}  # one of 12 holds all; two of 8 cover 16
    assert {t[1] for t in tiles} == {20}  # three cover 60; nine of 12 cover 108, five of 16 80, two of 32 64
    assert {t[2] for t in tiles} == {1}


def test_impossible_shape_is_refused_when_created() -> None:
    with pytest.raises(ShapeError, match="2 < 3"):
        ConvShape(1, 1, 1, (2, 3, 3), (3, 3, 3))


@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        (ConvShape(1, 1, 16, (120, 120, 120), (7, 7, 7), "relu"), (102, 126, 91)),
        (ConvShape(1, 1, 80, (70, 160, 170), (9, 9, 9), "relu"), (514, 693, 399)),
        (ConvShape(1, 1, 48, (96, 150, 150), (5, 5, 5), "relu"), (92, 504, 225)),
        (ConvShape(1, 16, 16, (80, 80, 80), (5, 5, 5), "relu"), (187, 151, 38)),
        (ConvShape(1, 80, 80, (40, 40, 40), (3, 3, 3), "relu"), (58, 428, 26.5)),
        (ConvShape(1, 2, 16, (80, 80, 80), (5, 5, 5), "relu"), (38.9, None, 28.8)),
        (ConvShape(1, 3, 32, (80, 80, 80), (3, 3, 3), "relu"), (20.8, None, None)),
    ],
    ids=ids,
)
def test_work_fits_measured_times(shape: ConvShape, milliseconds: Sequence[float | None]) -> None:
    """The times are the shortest of a few runs of 2 threads on 2 Zen 5 cores, 2026-11-20."""
    names = "cpu.conv.direct", "cpu.conv.fft_data", "cpu.conv.fft_tiled"
    for primitive, measured in zip(map(find, names), milliseconds, strict=True):
        if measured is None:
            continue
        expected = 1000 * min(seconds(primitive.work(shape, v), Rates()) for v in primitive.variants(shape, MACHINE))
        assert 0.7 < measured / expected < 1.4, f"{primitive.name}: {measured} measured, {expected:.0f} expected"


@pytest.mark.parametrize(
    ("shape", "tile", "group", "kept", "milliseconds"),
    [
        (ConvShape(1, 80, 80, (100, 100, 100), (3, 3, 3), "relu"), (16, 16, 16), 512, 0, 142),
        (ConvShape(1, 80, 80, (100, 100, 100), (3, 3, 3), "relu"), (16, 16, 16), 8, 1, 232),
        (ConvShape(64, 80, 80, (40, 40, 24), (3, 3, 3), "relu"), (12, 12, 24), 128, 0, 307),
        (ConvShape(1, 80, 80, (100, 100, 100), (5, 5, 5), "relu"), (28, 28, 28), 128, 0, 157),
        (ConvShape(1, 80, 80, (100, 100, 100), (9, 9, 9), "relu"), (32, 32, 32), 128, 0, 237),
        (ConvShape(8, 80, 80, (60, 60, 60), (9, 9, 9), "relu"), (28, 28, 28), 128, 0, 474),
        (ConvShape(1, 1, 80, (150, 150, 150), (8, 8, 8), "relu"), (32, 32, 32), 128, 0, 161),
        (ConvShape(64, 80, 3, (50, 50, 50), (7, 7, 7), "relu"), (28, 28, 28), 512, 0, 561),
        (ConvShape(1, 16, 16, (120, 120, 120), (3, 3, 3), "relu"), (32, 32, 32), 128, 0, 28),
        (ConvShape(1, 32, 64, (120, 120, 120), (5, 5, 5), "relu"), (32, 32, 32), 128, 0, 172),
    ],
    ids=ids,
)
def test_work_of_the_compiled_tiles_fits_measured_times(
    shape: ConvShape, tile: Vec3, group: int, kept: int, milliseconds: float
) -> None:
    """The times are medians of three runs of 2 threads on 2 Zen 5 cores, 2026-11-21."""
    variant = Variant.of(tile=tile, group=group, kept=kept)
    expected = 1000 * seconds(find("cpu.conv.fft_lanes").work(shape, variant), Rates())
    assert 0.7 < milliseconds / expected < 1.4, f"{milliseconds} measured, {expected:.0f} expected"


@pytest.mark.parametrize(("primitive", "shape"), PAIRS, ids=ids)
def test_work_is_positive(primitive: Primitive, shape: ConvShape) -> None:
    for variant in primitive.variants(shape, MACHINE):
        work = primitive.work(shape, variant)
        assert sum(w.flops for w in work) > 0
        assert all(w.flops >= 0 and w.nbytes >= 0 for w in work)
