"""Boxes, and covering a dense output with patches and columns: every voxel written once, whatever the sizes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from znnpy.patches import Box, Column, Cover, Patch, cover
from znnpy.shapes import Vec3, turned, turned_back

CASES = [
    ((12, 8, 10), (4, 4, 5)),  # fits
    ((13, 9, 11), (4, 4, 5)),  # one voxel over on each axis
    ((11, 7, 9), (4, 4, 5)),  # one voxel short
    ((3, 20, 1), (8, 6, 4)),  # smaller than the patch along z and x
    ((1, 1, 1), (4, 4, 4)),
    ((5, 6, 7), (5, 6, 7)),
    ((5, 6, 7), (1, 1, 1)),
    ((2, 3, 4), (100, 100, 100)),
]


def check(size: Vec3, patch: Vec3) -> None:
    written = np.zeros(size, int)
    whole = Box((0, 0, 0), size)
    columns = cover(size, patch)
    for column in columns:
        for step in column.steps:
            assert step.out.size == patch
            assert step.read == step.out.lo
            assert step.write.clipped(whole) == step.write
            assert step.write.clipped(step.out) == step.write
            assert step.write.voxels > 0
            for axis in range(3):  # a patch reaches beyond the output only where it does not fit into it
                lo, hi = step.out.lo[axis], step.out.hi[axis]
                assert lo == 0 if patch[axis] > size[axis] else 0 <= lo < hi <= size[axis]
            written[step.write.slices] += 1
    assert (written == 1).all()
    assert sum(column.voxels for column in columns) == written.size


@pytest.mark.parametrize(("size", "patch"), CASES, ids=str)
def test_cover_partitions_the_output(size: Vec3, patch: Vec3) -> None:
    check(size, patch)


@given(st.tuples(*[st.integers(1, 9)] * 3), st.tuples(*[st.integers(1, 11)] * 3))
def test_cover_partitions_any_output(size: Vec3, patch: Vec3) -> None:
    check(size, patch)


@given(st.data())
def test_later_columns_may_write_less(data: st.DataObject) -> None:
    size, patch = (data.draw(st.tuples(*[st.integers(1, most)] * 3)) for most in (9, 6))
    z, y, x = (data.draw(st.integers(1, first)) for first in patch)
    columns = Cover(size, patch, later=(z, y, x))
    written = np.zeros(size, int)
    for column in columns:
        (step,) = column.steps
        assert step.out.size == patch
        assert step.write.clipped(step.out) == step.write
        written[step.write.slices] += 1
    assert (written == 1).all()
    for axis, (first, later) in enumerate(zip(patch, (z, y, x), strict=True)):
        sizes = columns.sizes(axis)
        assert sum(sizes) == size[axis]
        assert sizes[0] == min(first, size[axis])
        assert all(each == later for each in sizes[1:-1])
        assert len(sizes) == columns.counts[axis]


def test_last_patch_moves_inwards_and_writes_the_rest() -> None:
    columns = cover((4, 4, 10), (4, 4, 4))
    assert tuple(columns) == tuple(
        Column((Patch((0, 0, lo), Box((0, 0, lo), (4, 4, lo + 4)), Box((0, 0, write), (4, 4, write_end))),))
        for lo, write, write_end in [(0, 0, 4), (4, 4, 8), (6, 8, 10)]
    )


def test_order_has_z_slowest() -> None:
    assert [column.steps[0].write.lo for column in cover((4, 4, 4), (2, 4, 2))] == [
        (0, 0, 0),
        (0, 0, 2),
        (2, 0, 0),
        (2, 0, 2),
    ]


def test_columns_are_found_by_their_index() -> None:
    columns = cover((5, 9, 7), (2, 3, 4))
    every = list(columns)
    assert len(columns) == len(every) == 3 * 3 * 2
    assert [columns[index] for index in range(len(columns))] == every
    assert [columns[index - len(columns)] for index in range(len(columns))] == every
    assert columns[4:15:3] == tuple(every[4:15:3])
    for beyond in (18, -19):
        with pytest.raises(IndexError):
            columns[beyond]


COLUMNS = [  # sizes have the axis along which columns walk first: turned to each axis in turn
    Cover((12, 8, 10), (4, 4, 5), 0, 12, 9),  # one column along it, and the patch divides everything
    Cover((13, 9, 11), (4, 4, 5), 0, 16, 9),  # the last step reaches beyond the output
    Cover((29, 9, 4), (2, 4, 5), 0, 12, 7),  # three columns along it; the last has fewer steps
    Cover((25, 3, 2), (4, 2, 2), 0, 12, 12),  # the last writes one plane; the margin is a multiple of the step
    Cover((7, 3, 3), (12, 2, 3), 0, 12, 5),  # a step thicker than the column
    Cover((7, 3, 3), (2, 2, 3), 0, 40, 31),  # a column that is planned longer than the output is
    Cover((5, 2, 3), (1, 1, 1), 0, 1, 4),  # a new column for every plane
    Cover((5, 2, 3), (1, 2, 3), 0, 5, 0),  # nothing carried, nothing ahead
]


def along(cover: Cover, axis: int) -> Cover:
    """Return the same cover with columns along another axis."""
    return replace(cover, size=turned_back(cover.size, axis), patch=turned_back(cover.patch, axis), axis=axis)


def check_columns(cover: Cover) -> None:
    axis, thick, margin = cover.axis, cover.patch[cover.axis], cover.margin
    written = np.zeros(cover.size, int)
    for column in cover:
        writing = column.steps[cover.ahead :]
        assert len(column.steps) > cover.ahead
        assert all(step.write.voxels == 0 for step in column.steps[: cover.ahead])
        assert all(step.write.voxels > 0 for step in writing)
        begin, end = writing[0].write.lo[axis], writing[-1].write.hi[axis]
        assert end - begin <= cover.column
        for step in column.steps:
            assert step.out.size == cover.patch
            assert step.write.clipped(step.out) == step.write
            assert step.read[axis] == step.out.lo[axis] + margin
            for other in {0, 1, 2} - {axis}:
                assert step.read[other] == step.out.lo[other] == column.steps[0].read[other]
                assert 0 <= step.read[other] <= max(0, cover.size[other] - cover.patch[other])
            written[step.write.slices] += 1
        for before, after in pairwise(column.steps):  # every plane is read once, in order
            assert after.read[axis] - before.read[axis] == thick
        assert writing[0].out.lo[axis] == begin
        # Every plane that outputs depend on is read, and every step reads such planes.
        assert column.steps[0].read[axis] <= begin < column.steps[0].read[axis] + thick or margin == 0
        assert column.steps[-1].read[axis] + thick >= end + margin > column.steps[-1].read[axis]
        assert column.voxels == sum(step.write.voxels for step in column.steps)
    assert (written == 1).all()
    assert sum(column.voxels for column in cover) == written.size


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("cover", COLUMNS, ids=str)
def test_columns_partition_the_output_and_read_each_plane_once(cover: Cover, axis: int) -> None:
    check_columns(along(cover, axis))


@st.composite
def covers(draw: st.DrawFn) -> Cover:
    size, patch = draw(st.tuples(*[st.integers(1, 9)] * 3)), draw(st.tuples(*[st.integers(1, 7)] * 3))
    axis, steps = draw(st.integers(0, 2)), draw(st.integers(1, 5))
    return Cover(size, patch, axis, steps * patch[axis], draw(st.integers(0, 12)))


@settings(deadline=None)  # 0.1 s for the largest, and more on a busy machine
@given(covers())
def test_columns_partition_any_output(cover: Cover) -> None:
    check_columns(cover)


@given(covers(), st.data())
def test_steps_of_a_layer_compute_exactly_the_needed_planes(cover: Cover, data: st.DataObject) -> None:
    """A layer's step gives the planes from `ahead` behind the output's on; what comes before the column is not."""
    ahead, axis = data.draw(st.integers(0, cover.margin)), cover.axis
    needed = [
        step
        for column in cover
        for step in column.steps
        if step.out.hi[axis] + ahead > column.steps[cover.ahead].write.lo[axis]
    ]
    assert cover.steps(ahead) == len(needed)
    assert cover.steps(cover.margin) == sum(len(column.steps) for column in cover)
    assert cover.steps(0) == sum(step.write.voxels > 0 for column in cover for step in column.steps)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_last_column_along_its_axis_has_fewer_steps(axis: int) -> None:
    columns = along(Cover((29, 9, 4), (2, 4, 5), 0, 12, 7), axis)
    assert columns.counts == turned_back((3, 3, 1), axis)
    assert columns.grid == turned_back((12, 4, 5), axis)
    assert columns.ahead == 4
    firsts = {turned(column.steps[4].write.lo, axis): len(column.steps) - 4 for column in columns}
    assert firsts == {(z, y, 0): 6 if z < 24 else 3 for z in (0, 12, 24) for y in (0, 4, 8)}
    assert columns[-1].steps[-1].write.size == turned_back((1, 1, 4), axis)
    assert turned(columns[-1].steps[-1].out.lo, axis) == (28, 5, 0)  # inwards across, beyond the end along


def test_patch_equals_a_column_of_one_step() -> None:
    patches = cover((5, 9, 7), (2, 3, 4))
    assert patches.ahead == 0
    assert patches.grid == patches.patch
    assert patches.steps(0) == patches.steps(3) == len(patches)


def test_huge_cover_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        columns = cover((100_000, 100_000, 100_000), (144, 144, 144))
        assert len(columns) == 695**3
        assert columns[-1].steps[0].out.hi == (100_000, 100_000, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 2**14
    finally:
        tracemalloc.stop()


def test_boxes_intersect_shift_and_count() -> None:
    box = Box((1, 2, 3), (4, 6, 8))
    assert (box.size, box.voxels) == ((3, 4, 5), 60)
    assert box.slices == (slice(1, 4), slice(2, 6), slice(3, 8))
    assert box.shifted((-1, 0, 10)) == Box((0, 2, 13), (3, 6, 18))
    assert box.clipped(Box((2, 0, 0), (9, 5, 9))) == Box((2, 2, 3), (4, 5, 8))


@pytest.mark.parametrize(
    "other", [Box((9, 9, 9), (12, 12, 12)), Box((-5, -5, -5), (0, 0, 0)), Box((1, 2, 8), (4, 6, 9))]
)
def test_clipping_to_a_disjoint_box_is_empty(other: Box) -> None:
    clipped = Box((1, 2, 3), (4, 6, 8)).clipped(other)
    assert clipped.voxels == 0
    assert min(clipped.size) == 0


def test_huge_cover_of_columns_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        columns = Cover((100_000, 1_000_000, 100_000), (144, 32, 144), 1, 32_000, 162)
        assert columns.counts == (695, 32, 695)
        assert len(columns) == 695 * 32 * 695
        assert columns.steps(0) == 695 * 695 * 31_250
        assert columns.steps(162) == 695 * 695 * (31_250 + 32 * 6)
        assert columns[len(columns) // 2].steps[0].write.voxels == 0
        assert tracemalloc.get_traced_memory()[1] < 2**20  # the steps of one
    finally:
        tracemalloc.stop()
