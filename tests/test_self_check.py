"""Layers of a plan held against the definition, one voxel at a time: the definition itself, and what is off found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.support.fake_plans import changed
from tests.support.flat_requests import make_plan
from znnpy.errors import VerifyError
from znnpy.kernels.reference import convolve, fragments, max_filter, max_pool, maxout
from znnpy.kernels.table import find
from znnpy.layer_shapes import LayerShape, with_batch
from znnpy.machine import Limits, this_machine
from znnpy.measure.budget import Progress, bytes_of
from znnpy.measure.layer_bench import HostLayer, Position, Values
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.planner.run_plan import RunPlan
from znnpy.run.target import OpenTarget
from znnpy.self_check import check_plan, positions, voxel
from znnpy.shapes import ChainShape, ConvShape, FilterShape, MaxoutShape, PoolShape
from znnpy.verify import Judged

SHAPES: tuple[ChainShape, ...] = (
    ConvShape(2, 3, 4, (4, 6, 5), (2, 3, 1), "tanh"),
    ConvShape(2, 2, 3, (6, 8, 4), (2, 1, 3), "softmax", pool=(2, 3, 1)),
    PoolShape(2, 3, (5, 8, 4), (2, 3, 1)),
    PoolShape(2, 3, (6, 9, 4), (2, 3, 1), fragments=False),
    FilterShape(2, 3, (4, 5, 6), (2, 1, 3)),
    MaxoutShape(2, 6, (2, 3, 4), 3),
)


def whole(shape: ChainShape, values: Values) -> np.ndarray[Any, Any]:
    """Return the layer on all of its input at once."""
    x = np.resize(values.block, shape.in_shape).astype(np.float64)
    match shape:
        case ConvShape():
            assert values.weights is not None
            y = convolve(x, values.weights.weight, values.weights.bias, shape.activation)
            return fragments(y, shape.pool) if shape.pools else y
        case PoolShape():
            return fragments(x, shape.p) if shape.fragments else max_pool(x, shape.p)
        case FilterShape():
            return max_filter(x, shape.p)
        case MaxoutShape():
            return maxout(x, shape.of)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_single_voxel_equals_that_of_the_layer(shape: ChainShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.measure.layer_bench.BLOCK", 97)  # values come again and again
    values = Values(shape)
    exact = whole(shape, values)
    assert exact.shape == shape.out_shape
    images, nz, ny, nx, _ = shape.out_shape
    for position in product(range(images), range(nz), range(ny), range(nx)):
        np.testing.assert_allclose(voxel(shape, values, position), exact[position], rtol=0, atol=1e-12)


def test_positions_are_distinct_and_hold_the_corners() -> None:
    found = positions((2, 3, 4, 5), 30)
    assert found[0] == (0, 0, 0, 0)
    assert found[-1] == (1, 2, 3, 4)
    assert len(found) == len(set(found)) > 15
    assert positions((1, 1, 1, 1), 64) == [(0, 0, 0, 0)]


MIXED = Network(  # one layer of every kind
    "mixed", 1, (Conv((3, 2, 2), 6, "relu"), Pool((2, 1, 2)), Maxout(2), MaxFilter((1, 2, 1)), Conv((1, 2, 2), 2))
)


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    """Return a plan of primitives that run."""
    return make_plan(MIXED, (6, 7, 8), this_machine(), Limits(2**33, 2), columns=False)


def site() -> OpenTarget:
    return OpenTarget(machine=this_machine())


def test_correct_plan_passes_layer_by_layer(plan: RunPlan) -> None:
    told: list[Progress] = []
    check_plan(plan, MIXED, site(), told.append)
    assert [progress.done for progress in told] == list(range(len(told)))
    assert told[0].doing == f"checking {plan.choices[0].primitive} on {plan.choices[0].shape}"
    assert told[-1].done == told[-1].total


@pytest.mark.parametrize("wrong", [lambda maps: maps + 1e-3, lambda maps: np.full_like(maps, np.nan)])
def test_single_wrong_voxel_is_named(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]
) -> None:
    right, broken = HostLayer.at, plan.choices[-1]

    def at(self: HostLayer, position: Position) -> Any:
        maps = right(self, position)
        last = tuple(size - 1 for size in self.values.shape.out_shape[:4])
        return wrong(maps) if self.values.shape == broken.shape and position == last else maps

    monkeypatch.setattr(HostLayer, "at", at)
    with pytest.raises(VerifyError) as caught:
        check_plan(plan, MIXED, site(), lambda progress: None)
    sentence = str(caught.value)
    assert sentence.startswith(f"{broken.where} ({MIXED.layers[broken.layers[0]]}) run by {broken.primitive} ")
    assert " of random values, and by definition it is " in sentence
    assert f"choose other primitives than {broken.primitive} with `only`" in sentence


def test_large_layers_are_checked_on_fewer_images_or_skipped_with_a_note(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LayerShape] = []
    right = HostLayer.__init__

    def init(self: HostLayer, pool: Any, primitive: Any, shape: LayerShape, variant: Any) -> None:
        seen.append(shape)
        right(self, pool, primitive, shape, variant)

    monkeypatch.setattr(HostLayer, "__init__", init)
    many = next(c for c in plan.choices if c.shape.batch > 1)
    one = bytes_of(find(many.primitive), with_batch(many.shape, 1), many.variant, 1)
    stage = replace(plan.main.stages[0], choices=(many,))
    only = changed(plan, stages=(stage,), limits=replace(plan.limits, threads=1))
    monkeypatch.setattr(OpenTarget, "free_bytes_within", lambda self, limits: one)
    check_plan(only, MIXED, site(), lambda progress: None)
    assert [shape.batch for shape in seen] == [1]
    monkeypatch.setattr(OpenTarget, "free_bytes_within", lambda self, limits: one - 1)
    with pytest.raises(VerifyError, match=r"to be checked, and .* are free: plan within less memory"):
        check_plan(only, MIXED, site(), lambda progress: None)


def test_few_samples_are_judged_by_the_scale_of_the_layer() -> None:
    """Two that happen to be small err by as much as their large neighbours may; what is no number tells nothing."""
    at, exact = np.zeros((2, 3), np.int64), np.zeros((2, 1))
    written = np.full((2, 1), 5e-4, np.float32)
    large = np.full((9, 1), 1000.0, np.float32)
    assert Judged.of(at, written, exact, 1e-5).beyond == 2
    assert Judged.of(at, written, exact, 1e-5, large).beyond == 0
    assert Judged.of(at, written, exact, 1e-5, np.full((9, 1), np.inf, np.float32)).beyond == 2
