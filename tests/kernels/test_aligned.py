"""Input and output of a step start on any float, images at any distance: what a column carries lies before the rest."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, aligned, assert_close, random_input, random_weights, run
from znnpy.kernels import aligned as memory
from znnpy.kernels.aligned import PAGE, aligned_bytes, touch
from znnpy.kernels.contract import ALIGNMENT
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.shapes import FLOAT32, ConvShape, FilterShape, MaxoutShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Primitive
    from znnpy.layer_shapes import LayerShape

SHAPES: list[LayerShape] = [
    ConvShape(2, 1, 3, (9, 10, 11), (2, 3, 2), "relu"),
    ConvShape(1, 3, 1, (6, 7, 20), (3, 2, 4), "tanh"),
    ConvShape(3, 17, 16, (5, 9, 12), (2, 2, 3), "relu"),  # whole cache lines out
    ConvShape(1, 2, 16, (40, 70, 80), (2, 2, 2), "relu"),  # so many that they are written past the caches
    ConvShape(1, 9, 32, (12, 80, 82), (1, 2, 2), "none"),
    ConvShape(2, 16, 32, (10, 13, 14), (2, 3, 2), "relu", (2, 2, 2)),
    ConvShape(1, 1, 16, (40, 62, 62), (2, 2, 2), "relu", (2, 2, 2)),
    PoolShape(2, 1, (5, 7, 9), (2, 2, 2)),
    PoolShape(2, 3, (5, 8, 9), (3, 1, 5)),
    PoolShape(1, 16, (63, 61, 59), (2, 2, 2)),  # past the caches
    PoolShape(2, 3, (4, 6, 10), (2, 3, 5), fragments=False),
    PoolShape(1, 32, (40, 90, 120), (2, 3, 1), fragments=False),
    FilterShape(2, 3, (6, 7, 8), (2, 3, 4)),
    FilterShape(1, 16, (40, 70, 80), (2, 3, 4)),
    MaxoutShape(2, 12, (3, 4, 5), 3),
]


def named(value: Primitive | LayerShape) -> str:
    return getattr(value, "name", str(value))


PAIRS = [(p, s) for p in TABLE for s in SHAPES if p.kind == s.kind and p.why_not(s, MACHINE) is None]
FIRST = {primitive: (primitive, shape) for primitive, shape in reversed(PAIRS)}  # the first shape of each
SOME = [pytest.param(*pair, marks=[] if pair in FIRST.values() else pytest.mark.long) for pair in PAIRS]


def behind(shape: tuple[int, ...], floats: int) -> tuple[Array, Array]:
    """Make an array so many floats behind a cache line, with NaN between its images."""
    image = prod(shape[1:])
    store = aligned_bytes(FLOAT32 * shape[0] * (image + floats)).view(np.float32).reshape(shape[0], -1)
    store[...] = np.nan
    return store[:, floats:].reshape(shape, copy=False), store[:, :floats]


def test_touching_memory_answers_an_interrupt_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part is never begun; without an interrupt every page is written to, and keeps its values."""
    monkeypatch.setattr(memory, "TOUCHED", 4 * PAGE)
    block = aligned_bytes(11 * PAGE + 5)
    block[...] = 7
    pages = list[int]()

    class Counting(ThreadPool):
        stops = False

        def each(self, piece: Any, count: int, *, least: int = 1) -> None:
            super().each(piece, count, least=least)
            pages.append(count)
            if self.stops:
                raise KeyboardInterrupt

    with Counting(2) as pool:
        touch(block, pool)
        assert pages == [4, 4, 4]
        assert (block == 7).all()
        pool.stops = True
        with pytest.raises(KeyboardInterrupt):
            touch(block, pool)
    assert pages == [4, 4, 4, 4]


@pytest.mark.parametrize("floats", [1, 8])
@pytest.mark.parametrize(("primitive", "shape"), SOME, ids=named)
def test_arrays_may_start_on_any_float(primitive: Primitive, shape: LayerShape, floats: int) -> None:
    weights = random_weights(shape) if isinstance(shape, ConvShape) else None
    given = random_input(shape, "relu")
    (x, _), (out, gaps) = behind(shape.in_shape, floats), behind(shape.out_shape, floats)
    assert x.ctypes.data % ALIGNMENT == out.ctypes.data % ALIGNMENT == FLOAT32 * floats
    x[...] = given
    variant = primitive.variants(shape, MACHINE)[0]
    run(primitive, shape, x, weights, variant, threads=2, out=out)
    exact = run(primitive, shape, given, weights, variant, threads=2).out
    np.testing.assert_array_equal(x, given, err_msg="the input was modified")
    assert np.isnan(gaps).all(), "wrote between the images"
    if isinstance(shape, ConvShape) and not shape.pools:
        assert weights is not None
        assert_close(out, x, weights, shape)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6 * float(np.abs(exact).max()))


CARRYING = [(p, s) for p, s in PAIRS if p.footprint(s, p.variants(s, MACHINE)[0], 1).reads_carried]


@pytest.mark.parametrize("floats", [0, 1, 16])
@pytest.mark.parametrize(("primitive", "shape"), CARRYING, ids=named)
def test_planes_kept_elsewhere_change_no_byte(primitive: Primitive, shape: LayerShape, floats: int) -> None:
    """Any number of the first planes may be kept, on any float."""
    weights = random_weights(shape) if isinstance(shape, ConvShape) else None
    given = random_input(shape)
    variants = primitive.variants(shape, MACHINE)
    for variant, carried in zip((variants[0], variants[-1]), (1, shape.in_shape[1] - 1), strict=True):
        joined = run(primitive, shape, given, weights, variant, threads=2).out
        batch, planes, *plane = shape.in_shape
        before, _ = behind((batch, carried, *plane), floats)
        x, _ = behind((batch, planes - carried, *plane), 2 * floats)
        before[...], x[...] = given[:, :carried], given[:, carried:]
        scratch = {s.name: aligned(s.nbytes) for s in primitive.footprint(shape, variant, 2).scratch}
        out = np.full(shape.out_shape, np.nan, np.float32)
        with ThreadPool(2) as pool:
            step: Any = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
            step.run(x, out, scratch, before)
        np.testing.assert_array_equal(out, joined)
        np.testing.assert_array_equal(before, given[:, :carried], err_msg="the kept planes were modified")
        np.testing.assert_array_equal(x, given[:, carried:], err_msg="the input was modified")
