"""Poolings, fragments, max-filters and maxouts: a maximum does not round, so they equal the definition exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.closeness import MACHINE, aligned, fragments, random_input, run
from znnpy.errors import ShapeError, Stopped
from znnpy.kernels import reference
from znnpy.kernels.table import TABLE, find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Primitive
    from znnpy.layer_shapes import LayerShape
    from znnpy.shapes import Vec3

SHAPES: list[LayerShape] = [
    PoolShape(1, 1, (1, 1, 1), (1, 1, 1)),
    PoolShape(2, 5, (7, 9, 11), (2, 2, 2)),
    PoolShape(1, 3, (5, 14, 5), (3, 5, 2)),  # no two axes alike
    PoolShape(3, 4, (4, 7, 5), (1, 2, 3)),
    PoolShape(2, 1, (5, 6, 4), (2, 1, 1)),
    PoolShape(1, 80, (9, 101, 41), (2, 2, 2)),  # several blocks of lines
    PoolShape(1, 700, (5, 19, 101), (2, 4, 2)),  # a block holds one window
    PoolShape(1, 2, (3, 3, 3), (2, 2, 2)),  # one voxel a fragment
    PoolShape(2, 5, (8, 9, 10), (2, 3, 5), fragments=False),
    PoolShape(1, 90, (6, 100, 42), (3, 2, 1), fragments=False),
    PoolShape(1, 3, (4, 5, 6), (4, 5, 6), fragments=False),  # one voxel
    PoolShape(1, 3, (4, 5, 6), (1, 1, 2), fragments=False),
    FilterShape(2, 3, (6, 7, 8), (2, 3, 4)),
    FilterShape(1, 60, (5, 90, 70), (2, 2, 1)),
    FilterShape(1, 1, (4, 5, 6), (4, 5, 6)),
    FilterShape(3, 2, (1, 9, 4), (1, 1, 1)),
    MaxoutShape(2, 12, (3, 4, 5), 3),
    MaxoutShape(1, 4, (2, 1, 3), 4),
    MaxoutShape(1, 3, (2, 1, 3), 1),
]


# Single maps, blocks of 16 that are written past the caches, and columns that end anywhere.
LARGE: list[LayerShape] = [
    PoolShape(1, 16, (63, 61, 59), (2, 2, 2)),
    PoolShape(2, 48, (29, 44, 53), (3, 5, 2)),
    PoolShape(1, 32, (40, 90, 120), (2, 3, 1), fragments=False),
    PoolShape(1, 20, (63, 61, 59), (2, 2, 2)),  # maps that fill no line
    FilterShape(1, 16, (40, 70, 80), (2, 3, 4)),
    FilterShape(1, 33, (20, 60, 70), (3, 1, 2)),
]


def primitives_for(shape: LayerShape) -> list[Primitive]:
    return [p for p in TABLE if p.kind == shape.kind and p.why_not(shape, MACHINE) is None]


EACH = [(p, s) for s in SHAPES for p in primitives_for(s)]
BY_NUMPY = ("cpu.pool.max", "cpu.pool.fragments", "cpu.maxfilter.direct", "cpu.maxout.direct")


def primitive_for(shape: LayerShape) -> Primitive:
    """Return the primitive that always works."""
    (found,) = [p for p in primitives_for(shape) if p.name in BY_NUMPY]
    return found


def ids(value: object) -> str:
    return value.name if hasattr(value, "name") else str(value)


def exact(shape: LayerShape, x: Array) -> np.ndarray:
    match shape:
        case PoolShape(p=p, fragments=True):
            return fragments(x, p)
        case PoolShape(p=p):
            return reference.max_pool(x, p)
        case FilterShape(p=p):
            return reference.max_filter(x, p)
        case MaxoutShape(of=of):
            return reference.maxout(x, of)
    raise AssertionError(shape)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("primitive", "shape"), EACH, ids=ids)
def test_output_equals_the_definition(primitive: Primitive, shape: LayerShape, threads: int) -> None:
    x = random_input(shape)
    before = x.copy()
    ran = run(primitive, shape, x, threads=threads)
    np.testing.assert_array_equal(ran.out, exact(shape, x))
    np.testing.assert_array_equal(x, before, err_msg="the input was modified")
    assert ran.peak_bytes <= ran.footprint.allowance, "allocates more than it says"
    for scratch in ran.footprint.scratch:
        if threads == 1 and scratch.nbytes > 512:  # less is mostly rounded up to cache lines
            assert 0.85 <= ran.touched[scratch.name] <= 1


@given(
    st.tuples(*[st.integers(1, 5)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 16]),
    st.integers(1, 2),
)
@settings(max_examples=50, derandomize=True, deadline=None)
def test_fragments_equal_the_definition_on_random_shapes(p: Vec3, m: Vec3, batch: int, f: int, threads: int) -> None:
    n = (p[0] * m[0] + p[0] - 1, p[1] * m[1] + p[1] - 1, p[2] * m[2] + p[2] - 1)
    shape = PoolShape(batch, f, n, p)
    x = random_input(shape)
    expected = exact(shape, x)
    for primitive in primitives_for(shape):
        np.testing.assert_array_equal(run(primitive, shape, x, threads=threads).out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_images_equal_the_definition(shape: LayerShape) -> None:
    x = random_input(shape)
    expected = exact(shape, x)
    for primitive in primitives_for(shape):
        out = aligned(shape.out_bytes).view(np.float32).reshape(shape.out_shape)
        run(primitive, shape, x, threads=2, out=out)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(run(primitive, shape, x, threads=2, out=misaligned(shape)).out, out)


def misaligned(shape: LayerShape) -> Array:
    """Room for an output that begins in the middle of a cache line."""
    return aligned(shape.out_bytes + 4)[4:].view(np.float32).reshape(shape.out_shape)


@pytest.mark.parametrize(("primitive", "shape"), [(p, s) for p, s in EACH if s.in_shape[0] > 1], ids=ids)
def test_batch_may_have_any_stride(primitive: Primitive, shape: LayerShape) -> None:
    gap = 2
    x_store = np.full((shape.in_shape[0] * gap, *shape.in_shape[1:]), np.nan, np.float32)
    x_store[::gap] = random_input(shape)
    out_store = np.full((shape.out_shape[0] * gap, *shape.out_shape[1:]), np.nan, np.float32)
    x, out = x_store[::gap], out_store[::gap]
    run(primitive, shape, x, threads=2, out=out)
    np.testing.assert_array_equal(out, exact(shape, x))
    assert np.isnan(out_store[1::gap]).all(), "wrote between the images"


@pytest.mark.parametrize("shape", SHAPES[5:7], ids=str)
def test_scratch_holds_a_few_lines(shape: LayerShape) -> None:
    footprint = primitive_for(shape).footprint(shape, primitive_for(shape).variants(shape, MACHINE)[0], 2)
    assert 0 < sum(s.nbytes for s in footprint.scratch) < shape.in_bytes / 4
    assert footprint.resident == 0


@pytest.mark.parametrize(("primitive", "shape"), EACH, ids=ids)
def test_work_counts_moved_bytes(primitive: Primitive, shape: LayerShape) -> None:
    (work,) = primitive.work(shape, primitive.variants(shape, MACHINE)[0])
    assert work.unit == ("pool" if primitive.name in BY_NUMPY else "lane_stream")
    assert work.nbytes >= shape.in_bytes + shape.out_bytes


def test_larger_windows_are_more_work_for_the_same_output() -> None:
    fragments = [PoolShape(1, 16, (p * 20 - 1,) * 3, (p, p, p)) for p in (2, 3, 5)]
    filters = [FilterShape(1, 16, (96 + p,) * 3, (p, p, p)) for p in (1, 2, 3, 5)]
    maxouts = [MaxoutShape(1, 16 * of, (30, 30, 30), of) for of in (2, 3, 4)]
    for shapes in (fragments, filters, maxouts):
        a_voxel = []
        for shape in shapes:
            (work,) = primitive_for(shape).work(shape, primitive_for(shape).variants(shape, MACHINE)[0])
            a_voxel.append(work.nbytes / shape.out_bytes)
        assert sorted(a_voxel) == a_voxel
        assert a_voxel[-1] > 1.5 * a_voxel[0]


@pytest.mark.parametrize("maps", [1, 3, 16, 40])
def test_nan_in_a_window_gives_nan(maps: int) -> None:
    """The position of NaN in its window and the values beside it make no difference."""
    shapes: list[LayerShape] = [
        PoolShape(1, maps, (5, 8, 5), (2, 3, 2)),
        PoolShape(1, maps, (4, 6, 8), (2, 3, 2), fragments=False),
        FilterShape(1, maps, (5, 6, 7), (2, 3, 4)),
    ]
    for shape in shapes:
        x = random_input(shape)
        places = np.random.default_rng(5).random(x.shape) < 0.02
        x[places] = np.nan
        x[0, 0, 0, 0, 0] = x[-1, -1, -1, -1, -1] = np.nan
        expected = exact(shape, x)
        assert 0 < np.isnan(expected).sum() < expected.size
        for primitive in primitives_for(shape):
            np.testing.assert_array_equal(run(primitive, shape, x).out, expected)


@pytest.mark.parametrize("shape", [SHAPES[5], SHAPES[9], SHAPES[13]], ids=str)
def test_threads_and_repetition_change_no_byte(shape: LayerShape) -> None:
    x = random_input(shape)
    for primitive in primitives_for(shape):
        first = run(primitive, shape, x, threads=1).out.tobytes()
        assert all(run(primitive, shape, x, threads=threads).out.tobytes() == first for threads in (1, 2, 2))


@pytest.mark.parametrize("shape", [SHAPES[5], SHAPES[9], SHAPES[13]], ids=str)
def test_stopped_thread_pool_stops_a_step(shape: LayerShape) -> None:
    for primitive in primitives_for(shape):
        (variant,) = primitive.variants(shape, MACHINE)
        with ThreadPool(2) as pool:
            step = primitive.bind(primitive.prepare(None, variant, pool), shape, variant, pool)
            pool.stop()
            scratch = {s.name: aligned(s.nbytes) for s in primitive.footprint(shape, variant, 2).scratch}
            with pytest.raises(Stopped):
                step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)


def test_unsupported_shape_gets_a_reason() -> None:
    fragments, plain = PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), PoolShape(1, 1, (4, 4, 4), (2, 2, 2), fragments=False)
    conv = ConvShape(1, 1, 1, (3, 3, 3), (2, 2, 2))
    assert "see cpu.pool.fragments" in (find("cpu.pool.max").why_not(fragments, MACHINE) or "")
    assert "see cpu.pool.max" in (find("cpu.pool.fragments").why_not(plain, MACHINE) or "")
    assert "see cpu.pool.fragments_lanes" in (find("cpu.pool.max_lanes").why_not(fragments, MACHINE) or "")
    assert "see cpu.pool.max_lanes" in (find("cpu.pool.fragments_lanes").why_not(plain, MACHINE) or "")
    for name, what in [
        ("cpu.pool.max_lanes", "poolings"),
        ("cpu.pool.fragments_lanes", "poolings"),
        ("cpu.maxfilter.lanes", "max-filters"),
        ("cpu.pool.max", "poolings"),
        ("cpu.pool.fragments", "poolings"),
        ("cpu.maxfilter.direct", "max-filters"),
        ("cpu.maxout.direct", "maxouts"),
    ]:
        assert find(name).why_not(conv, MACHINE) == f"computes {what}, not conv"


def test_sizes_that_do_not_fit_name_their_neighbours() -> None:
    with pytest.raises(ShapeError, match="nearest sizes are 5 and 8"):
        PoolShape(1, 1, (7, 5, 5), (3, 3, 3))
