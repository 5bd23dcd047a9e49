"""Primitives of graphs' layers equal their definitions in float64, on odd sizes and strided inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from tests.support.closeness import GUARD, MACHINE, aligned
from tests.support.graph_cases import (
    CONVS,
    NORMS,
    PADS,
    POINTS,
    POOLS,
    SHAPES,
    TRANSPOSES,
    UPSAMPLES,
    exact,
    ids,
    inputs_for,
    weights_for,
    with_parameters,
)
from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.graph_shapes import (
    GraphConvShape,
    GraphShape,
    NormShape,
    PadShape,
    PointShape,
    TransposeShape,
    WindowPoolShape,
)
from znnpy.kernels.cpu import activations, graph_calls, graph_transpose
from znnpy.kernels.cpu.graph_table import GRAPH_OPERATORS
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import ConvWeights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from znnpy.kernels.contract import Array, Primitive

NEED_LIBRARY = ("lanes", "depthwise", "strided")  # ends of the names of primitives that need compiled code


def primitives_for(shape: GraphShape) -> list[Primitive]:
    return [p for p in GRAPH_OPERATORS if p.kind == shape.kind and p.why_not(shape, MACHINE) is None]


EACH = [(p, with_parameters(s)) for s in SHAPES for p in primitives_for(s)]


def run(
    primitive: Primitive, shape: Any, weights: ConvWeights | None, inputs: Sequence[Array], threads: int = 1
) -> Array:
    """Run with NaN in output and scratch beforehand; fail when a byte around a scratch buffer changes."""
    variant = primitive.variants(shape, MACHINE)[0]
    footprint = primitive.footprint(shape, variant, threads)
    stores = {s.name: aligned(s.nbytes + 2 * GUARD) for s in footprint.scratch}
    scratch = {name: store[GUARD : len(store) - GUARD] for name, store in stores.items()}
    out = np.full(shape.out_shape[1:], np.nan, np.float32)
    with ThreadPool(threads) as pool:
        step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
        step.run(inputs, out, scratch)
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[len(store) - GUARD :] == 0xFF).all(), f"wrote beyond {name}"
    return out


def assert_near(out: Array, expected: np.ndarray, shape: GraphShape) -> None:
    if isinstance(shape, PadShape) or getattr(shape, "how", "") in ("max", "nearest", "concat"):
        wanted = expected.astype(np.float32)
        if getattr(shape, "activation", "none") in ("none", "relu"):
            np.testing.assert_array_equal(out, wanted)
            return
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6 * scale)


@pytest.mark.parametrize(("threads", "strided"), [(1, False), (2, True)])
@pytest.mark.parametrize(("primitive", "shape"), EACH, ids=ids)
def test_output_equals_the_definition(primitive: Primitive, shape: GraphShape, threads: int, strided: bool) -> None:
    weights, inputs = weights_for(shape), inputs_for(shape, strided=strided)
    before = [part.copy() for part in inputs]
    out = run(primitive, shape, weights, inputs, threads)
    assert_near(out, exact(shape), shape)
    for part, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(part, copy, err_msg="an input was modified")


@pytest.mark.parametrize(
    ("primitive", "shape"), [(p, s) for p, s in EACH if p.name.endswith((*NEED_LIBRARY, "phases"))], ids=ids
)
def test_output_that_is_written_past_the_caches_is_the_same(
    primitive: Primitive, shape: GraphShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, inputs = weights_for(shape), inputs_for(shape)
    expected = run(primitive, shape, weights, inputs)
    monkeypatch.setattr(graph_calls, "STREAM_BYTES", 0)
    np.testing.assert_array_equal(run(primitive, shape, weights, inputs, 2), expected)


@pytest.mark.parametrize(
    ("primitive", "shape"), [(p, s) for p, s in EACH if not p.name.endswith(NEED_LIBRARY)], ids=ids
)
def test_numpy_and_blas_suffice(primitive: Primitive, shape: GraphShape, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activations, graph_transpose):
        monkeypatch.setattr(module, "compiled", lambda: False)
    weights, inputs = weights_for(shape), inputs_for(shape)
    assert_near(run(primitive, shape, weights, inputs, 2), exact(shape), shape)


@pytest.mark.parametrize("how", ["max", "average"])
def test_pooling_passes_on_what_is_not_a_number(how: Literal["max", "average"]) -> None:
    shape = WindowPoolShape(3, (4, 6, 8), (2, 2, 2), (2, 2, 2), how)
    for primitive in primitives_for(shape):
        for at in ((0, 0, 0, 0), (1, 3, 5, 2)):
            (x,) = inputs_for(shape)
            x[at] = np.nan
            out = run(primitive, shape, None, [x])
            expected = np.zeros(out.shape, bool)
            expected[at[0] // 2, at[1] // 2, at[2] // 2, at[3]] = True
            np.testing.assert_array_equal(np.isnan(out), expected)


OVERFLOWS: list[Any] = [
    GraphConvShape((2,), 3, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="sigmoid", stride=(1, 2, 1)),
    GraphConvShape((16,), 16, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="clip", groups=16),
    TransposeShape(2, 3, (4, 5, 6), (8, 10, 12), (2, 2, 2), (0, 0, 0), (2, 2, 2), activation="relu"),
    PointShape("scale", (3,), (4, 5, 6), "tanh"),
    PointShape("multiply", (3, 3), (4, 5, 6), "clip"),
    PointShape("add", (20, 20), (4, 5, 6), "relu"),
    NormShape(20, (4, 5, 6), 5, activation="sigmoid"),
]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("shape", OVERFLOWS, ids=str)
def test_result_that_is_not_finite_is_an_error(shape: Any, bad: float) -> None:
    """The activation would hide it."""
    for primitive in primitives_for(shape):
        inputs = inputs_for(shape)
        inputs[0][-1, -1, -1, -1] = bad
        with pytest.raises(ValuesOverflowError, match="values of a block became infinite or not a number"):
            run(primitive, shape, weights_for(shape), inputs)


@pytest.mark.parametrize(
    "shape",
    [CONVS[3], CONVS[10], TRANSPOSES[0], POOLS[0], UPSAMPLES[0], UPSAMPLES[7], POINTS[0], PADS[0], NORMS[0], NORMS[-1]],
    ids=str,
)
def test_stop_is_noticed(shape: Any) -> None:
    for primitive in primitives_for(shape):
        weights, variant = weights_for(shape), primitive.variants(shape, MACHINE)[0]
        scratch = {s.name: aligned(s.nbytes) for s in primitive.footprint(shape, variant, 1).scratch}
        with ThreadPool(1) as pool:
            step = primitive.bind(primitive.prepare(weights, variant, pool), shape, variant, pool)
            pool.stop()
            with pytest.raises(Stopped):
                step.run(inputs_for(shape), np.empty(shape.out_shape[1:], np.float32), scratch)


@pytest.mark.parametrize(("primitive", "shape"), EACH, ids=ids)
def test_costs_and_memory_are_positive_and_other_kinds_are_refused(primitive: Primitive, shape: Any) -> None:
    variant = primitive.variants(shape, MACHINE)[0]
    for work in primitive.work(shape, variant):
        assert work.flops >= 0
        assert work.nbytes >= 0
    assert sum(work.flops + work.nbytes for work in primitive.work(shape, variant)) > 0
    one, two = (primitive.footprint(shape, variant, threads) for threads in (1, 2))
    assert [s.name for s in one.scratch] == [s.name for s in two.scratch]
    assert all(0 < a.nbytes <= b.nbytes for a, b in zip(one.scratch, two.scratch, strict=True))
    other: Any = PADS[0] if shape.kind != "pad" else POOLS[0]
    assert "computes" in str(primitive.why_not(other, MACHINE))
