"""Boxes, and covering a dense output with patches: every voxel written once, whatever the sizes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from znnpy.patches import Box, Column, Patch, cover
from znnpy.shapes import Vec3

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


def test_the_last_patch_moves_inwards_and_writes_what_is_left() -> None:
    columns = cover((4, 4, 10), (4, 4, 4))
    assert tuple(columns) == tuple(
        Column((Patch(Box((0, 0, lo), (4, 4, lo + 4)), Box((0, 0, write), (4, 4, write_end))),))
        for lo, write, write_end in [(0, 0, 4), (4, 4, 8), (6, 8, 10)]
    )


def test_order_has_z_slowest() -> None:
    assert [column.steps[0].write.lo for column in cover((4, 4, 4), (2, 4, 2))] == [
        (0, 0, 0),
        (0, 0, 2),
        (2, 0, 0),
        (2, 0, 2),
    ]


def test_columns_by_their_index() -> None:
    columns = cover((5, 9, 7), (2, 3, 4))
    every = list(columns)
    assert len(columns) == len(every) == 3 * 3 * 2
    assert [columns[index] for index in range(len(columns))] == every
    assert [columns[index - len(columns)] for index in range(len(columns))] == every
    assert columns[4:15:3] == tuple(every[4:15:3])
    for beyond in (18, -19):
        with pytest.raises(IndexError):
            columns[beyond]


def test_a_huge_cover_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        columns = cover((100_000, 100_000, 100_000), (144, 144, 144))
        assert len(columns) == 695**3
        assert columns[-1].steps[0].out.hi == (100_000, 100_000, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 2**14
    finally:
        tracemalloc.stop()


def test_boxes() -> None:
    box = Box((1, 2, 3), (4, 6, 8))
    assert (box.size, box.voxels) == ((3, 4, 5), 60)
    assert box.slices == (slice(1, 4), slice(2, 6), slice(3, 8))
    assert box.shifted((-1, 0, 10)) == Box((0, 2, 13), (3, 6, 18))
    assert box.clipped(Box((2, 0, 0), (9, 5, 9))) == Box((2, 2, 3), (4, 5, 8))


@pytest.mark.parametrize(
    "other", [Box((9, 9, 9), (12, 12, 12)), Box((-5, -5, -5), (0, 0, 0)), Box((1, 2, 8), (4, 6, 9))]
)
def test_clipping_to_what_does_not_meet_is_empty_not_negative(other: Box) -> None:
    clipped = Box((1, 2, 3), (4, 6, 8)).clipped(other)
    assert clipped.voxels == 0
    assert min(clipped.size) == 0
