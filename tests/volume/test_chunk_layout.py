"""Chunks follow the columns: none lies in two of them, none is written twice, and open ones fit into the budget."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from znnpy.patches import Box, Columns, Cover, cover
from znnpy.shapes import Vec3
from znnpy.volume.chunk_assembly import Assembler, Place, Voxels
from znnpy.volume.chunk_layout import chunk_along, layouts_of
from znnpy.volume.chunked_formats import Layout, StoredArray, box_region
from znnpy.volume.regions import Region
from znnpy.volume.store import OutputArray

MIB = 2**20


def layout(
    columns: Columns, size: Vec3, *, maps: int = 1, itemsize: int = 4, budget: int = 256 * MIB, sharded: bool = False
) -> Layout:
    (found,) = layouts_of([columns], [OutputArray((maps, *size))], itemsize, budget, sharded=sharded)
    return found


@pytest.mark.parametrize(
    ("size", "common", "chunk"),
    [
        (1000, 104, 52),
        (1000, 64, 64),
        (1000, 96, 48),
        (1000, 106, 53),
        (1000, 101, 101),  # a prime above 64: the whole width
        (1000, 16, 64),  # too small: a multiple
        (1000, 20, 60),
        (1000, 131, 64),  # nothing divides: merged
        (1000, 0, 63),  # one column: equal chunks
        (50, 0, 50),
        (20, 7, 20),  # small: one chunk
        (1, 0, 1),
    ],
)
def test_chunks_divide_the_width_of_columns(size: int, common: int, chunk: int) -> None:
    assert chunk_along(size, common) == chunk


def test_small_volumes_are_one_chunk() -> None:
    assert layout(cover((40, 50, 60), (40, 50, 60)), (40, 50, 60)) == Layout((40, 50, 60))


def test_chunks_are_thin_along_columns_where_memory_is_little() -> None:
    size = (1024, 1024, 1024)
    columns = Cover(size, (16, 1024, 1024), 0, 1024, 30)
    assert layout(columns, size, budget=1024 * MIB).chunk == (64, 64, 64)
    thin = layout(columns, size, budget=64 * MIB)
    assert thin.chunk[1:] == (64, 64)
    assert thin.chunk[0] * 1024 * 1024 * 4 <= 32 * MIB


def test_chunks_that_hold_several_thin_patches_fit_into_memory() -> None:
    size = (192, 512, 768)
    thin = layout(cover(size, (1, 512, 768)), size, budget=16 * MIB)
    assert thin.chunk[1:] == (64, 64)
    assert 1 < thin.chunk[0] <= 8 * MIB // (512 * 768 * 4)
    across = layout(cover(size, (4, 128, 128)), size, budget=16 * MIB)  # a layer of patches is open at a time
    assert across.chunk[0] * 512 * 768 * 4 <= 8 * MIB


def test_shards_hold_the_cross_section_of_a_column() -> None:
    size = (600, 900, 800)
    columns = Cover(size, (12, 300, 400), 0, 600, 30)
    found = layout(columns, size, itemsize=1, sharded=True)
    assert found.shard is not None
    assert found.shard[1:] == (300, 400)
    assert all(a % b == 0 for a, b in zip(found.shard, found.chunk, strict=True))


def test_several_plans_are_all_followed() -> None:
    size = (400, 400, 400)
    plans = [cover(size, (400, 100, 100)), cover(size, (400, 100, 50))]
    (found,) = layouts_of(plans, [OutputArray((1, *size))], 4, 256 * MIB)
    assert found.chunk[1:] == (50, 50)


class Counted:
    """Files that forget what is written, but not how often."""

    def __init__(self) -> None:
        self.buffers: list[Voxels] = []
        self.read_values = 0

    def start(self, place: Place, region: Region, voxels: Voxels, buffer: Voxels) -> None:
        self.buffers.append(buffer)

    def finished(self, *, wait: bool) -> list[Voxels]:
        back, self.buffers = self.buffers, []
        return back

    def read(self, number: int, region: Region) -> Voxels:
        self.read_values += region.elements
        return np.zeros(region.shape, np.uint8)


def run(columns: Columns, size: Vec3, found: Layout, budget: int) -> tuple[Assembler, Counted]:
    """Write every step of every column."""
    array = StoredArray("", 0, (1, *size), np.dtype("u1"), found)
    files = Counted()
    assembler = Assembler([array], files, budget)
    for column in columns:
        for step in column.steps:
            if step.write.voxels:
                assembler.add(0, box_region(step.write, 1), np.zeros((1, *step.write.size), np.uint8))
    assembler.flush()
    return assembler, files


COVERS = [
    Cover((200, 180, 190), (16, 90, 64), 0, 64, 20),
    Cover((200, 180, 190), (16, 90, 64), 0, 200, 20),
    Cover((180, 200, 190), (90, 8, 64), 1, 200, 20),
    Cover((180, 190, 200), (90, 64, 10), 2, 100, 20),
    Cover((200, 180, 190), (52, 104, 64)),
    Cover((40, 1000, 1200), (1, 1000, 1200), 0, 40, 2),  # steps of one plane, and little memory for so wide a column
    Cover((200, 200, 190), (96, 64, 64), later=(64, 32, 64)),
]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("columns", COVERS, ids=str)
def test_no_chunk_is_written_twice(columns: Cover, sharded: bool) -> None:
    budget = 8 * MIB
    found = layout(columns, columns.size, itemsize=1, budget=budget, sharded=sharded)
    assembler, files = run(columns, columns.size, found, budget)
    assert (assembler.rewritten, files.read_values) == (0, 0)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.integers(1, 150)] * 3),
    st.tuples(*[st.integers(1, 150)] * 3),
    st.integers(0, 2),
    st.integers(0, 6),
    st.booleans(),
)
def test_any_columns_get_a_layout(size: Vec3, patch: Vec3, axis: int, steps: int, sharded: bool) -> None:
    columns = Cover(size, patch, axis, steps * patch[axis], 5)
    found = layout(columns, size, itemsize=4, budget=MIB, sharded=sharded)
    assert all(0 < one <= most for one, most in zip(found.chunk, size, strict=True))
    assert all(one <= 128 for one in found.chunk)
    if found.shard is not None:
        assert all(a % b == 0 for a, b in zip(found.shard, found.chunk, strict=True))
        assert prod(found.shard) * 4 <= max(MIB, prod(found.chunk) * 4)
    assert Box((0, 0, 0), size).voxels > 0
