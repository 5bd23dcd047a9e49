"""Sessions of graphs allocate no more than their plans promise, and what they keep does not grow with the run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.graph_runs import assert_equal, planned, ran, reference, searched, whole_region
from tests.support.seeded_graphs import Case, weights_of
from znnpy import column_planes
from znnpy.column_planes import ColumnPlanes
from znnpy.errors import NoPlanError
from znnpy.formats.wiring import Given, network_of
from znnpy.graph_columns import KEPT_RESULTS, GraphCover, TurnedGraph
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import Add, Conv, Crop, Maxout, Scale
from znnpy.patches import Box
from znnpy.planner.graph_extents import AxisPlanes
from znnpy.planner.graph_plan import waste
from znnpy.planner.graph_search import GraphSearch
from znnpy.planner.request import Constraints
from znnpy.run import graph_session
from znnpy.run.graph_session import GraphSession
from znnpy.run.voxels import BLOCK_BYTES, store_voxels
from znnpy.shapes import Vec3

OBJECTS = 2**18  # bytes of Python's own objects

ONES = ((1, 1, 1), (1, 1, 1))


def made(entries: list[Given], size: Vec3) -> Case:
    network = network_of("made", 1, entries)
    volume = np.random.default_rng(1).standard_normal((1, *size)).astype(np.float32)
    return Case(0, network, weights_of(network, 0), volume)


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Trace allocations; the function returns the most bytes at a time so far."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_storing_voxels_takes_a_few_rows_besides(dtype: type) -> None:
    image = np.random.default_rng(2).uniform(-0.5, 1.5, (3, 700, 500, 4)).astype(np.float32)
    out: Any = np.zeros((4, 3, 700, 500), dtype)
    with ThreadPool(1) as pool, traced() as peak:
        store_voxels(image, out, pool)
        taken = peak()
    assert taken < 2 * BLOCK_BYTES
    values = image.transpose(3, 0, 1, 2)
    expected = np.rint(255 * np.clip(values, 0, 1)) if dtype is np.uint8 else values
    np.testing.assert_array_equal(out, expected.astype(dtype))


@pytest.mark.parametrize("axis", range(3))
def test_weights_with_scales_merged_into_them_are_made_for_one_layer_at_a_time(axis: int) -> None:
    maps, count = 64, 8
    entries = [Given(Conv((1, 1, 1), maps), "first")]
    for number in range(count):
        entries += [Given(Conv((3, 3, 3), maps, padding=ONES), f"conv{number}"), Given(Scale("relu"), f"norm{number}")]
    one = made(entries, (4, 4, 4))
    plan = planned(one.network, one.size, whole_region(one), (4, 4, 4), axis=axis)
    with ThreadPool(1) as pool, traced() as peak:
        with GraphSession(plan, one.network, one.weights, pool):
            pass
        taken = peak()
    assert taken <= plan.memory.last.total + OBJECTS


def test_the_copy_of_a_part_for_a_maxout_lies_in_the_arena() -> None:
    entries = [
        Given(Conv((1, 1, 1), 8), "first"),
        Given(Crop((1, 1, 1), (1, 1, 1)), "inner", ("first",)),
        Given(Maxout(2), "largest"),
        Given(Conv((3, 3, 3), 4), "valid", ("first",)),
        Given(Add(), "sum", ("largest", "valid")),
    ]
    one = made(entries, (40, 42, 44))
    plan = planned(one.network, one.size, whole_region(one), (38, 40, 42))
    assert_equal(ran(plan, one).out, reference(one), one)
    raw, out = one.volume, np.empty((4, 38, 40, 42), np.float32)
    (column,) = plan.work_items(one.network)
    (step,) = column.steps
    with ThreadPool(1) as pool, GraphSession(plan, one.network, one.weights, pool) as session:
        session.run(raw, out, step=step.step)
        with traced() as peak:
            session.run(raw, out, step=step.step)
            taken = peak()
    assert taken <= plan.memory.last.allowance + OBJECTS < 4 * 8 * 38 * 40 * 42


def test_a_maxout_of_a_whole_tensor_needs_no_copy() -> None:
    one = made([Given(Conv((3, 3, 3), 8, padding=ONES), "first"), Given(Maxout(2), "largest")], (9, 8, 7))
    plan = planned(one.network, one.size, whole_region(one), (3, 4, 7), column=9)
    assert all("copied" not in tensor.name for tensor in plan.stages[0].tensors)
    assert_equal(ran(plan, one).out, reference(one), one)


def test_steps_of_few_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_session, "KEPT_STEPS", 2)
    one = made([Given(Conv((3, 3, 3), 2, padding=ONES), f"conv{number}") for number in range(3)], (9, 8, 7))
    plan = planned(one.network, one.size, whole_region(one), (2, 3, 3), column=10)
    assert_equal(ran(plan, one).out, reference(one), one)
    with ThreadPool(1) as pool, GraphSession(plan, one.network, one.weights, pool) as session:
        for column in plan.work_items(one.network):
            for index, step in enumerate(column.steps):
                assert step.size is not None
                raw = np.zeros((1, *step.size), np.float32)
                out = np.empty((2, *step.out.size), np.float32)
                session.run(raw, out if step.write.voxels else None, begins=index == 0, step=step.step)
        assert [len(bound.steps) for bound in session._bound] == [2, 2, 2]


def test_what_a_cover_keeps_does_not_grow_with_its_columns() -> None:
    one = made([Given(Conv((3, 3, 3), 2, padding=ONES), "conv")], (40, 40, 40))
    graph = TurnedGraph.of(one.network, one.size, 0)
    cover = GraphCover(graph, (1, 1, 1), 2, Box((0, 0, 0), (40, 40, 40)))
    assert sum(1 for column in cover if column.steps) == len(cover)
    assert len(graph._latest) == KEPT_RESULTS


@pytest.mark.parametrize("numbers", [1, 10_000])
def test_planes_that_are_worked_out_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    one = made([Given(Conv((3, 3, 3), 2, padding=ONES), f"conv{number}") for number in range(3)], (200, 4, 4))
    cover = GraphCover(TurnedGraph.of(one.network, one.size, 0), (1, 4, 4), 150, Box((0, 0, 0), one.size))
    monkeypatch.setattr(column_planes, "BLOCK_NUMBERS", numbers)
    monkeypatch.setattr(column_planes, "FEWEST_STEPS", 7)
    columns = [ColumnPlanes(cover.graph.steps(begin, end, 1)) for begin, end in cover.ranges(0)]
    planes, steps = AxisPlanes.of(cover), [column.step(number) for column in columns for number in range(column.steps)]
    monkeypatch.undo()
    whole = [ColumnPlanes(cover.graph.steps(begin, end, 1)) for begin, end in cover.ranges(0)]
    assert steps == [column.step(number) for column in whole for number in range(column.steps)]
    for name, found in vars(AxisPlanes.of(cover)).items():
        np.testing.assert_array_equal(getattr(planes, name), found, err_msg=name)
    for tensor in range(len(planes.held)):
        assert planes.held[tensor] == max(step.held[tensor].size for step in steps)
        assert planes.totals[tensor] == sum(step.new[tensor].size for step in steps)


@pytest.mark.slow
def test_voxels_beyond_whole_numbers_of_64_bits_are_planned() -> None:
    one = made([Given(Conv((3, 3, 3), 2, padding=ONES), "conv")], (4, 4, 4))
    size = (2**21, 2**21, 2**22)
    search = searched(one.network, size, Box((0, 0, 0), size))
    found = search.run()
    assert found
    for solution in found:
        assert 2**22 < solution.memory.peak <= search.request.limits.ram_bytes
        assert 1 <= waste(solution.tiling) < 2
    wanted = replace(search.request, constraints=Constraints(patch=(1, 64, 64)))
    with pytest.raises(NoPlanError, match=r"1x64x64 are 2,097,152 along an axis, more than .* larger"):
        GraphSearch(wanted, search.options, search.area).run()
