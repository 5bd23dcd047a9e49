"""Files of chunks are written once they are whole: pieces in any order, pieces that come twice, too little memory."""

from __future__ import annotations

import errno
import os
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from znnpy.patches import Box
from znnpy.shapes import Vec3
from znnpy.volume.chunk_assembly import Assembler, Place, Voxels
from znnpy.volume.chunked_formats import Layout, StoredArray, box_region
from znnpy.volume.regions import Region

SIZE: Vec3 = (11, 14, 9)
CHUNK: Vec3 = (4, 7, 5)
PLENTY = 2**20


class Kept:
    """Files in memory. Writing takes until `finished` is asked to wait."""

    def __init__(self, array: StoredArray) -> None:
        self.voxels = np.zeros(array.shape, array.dtype)
        self.written: Counter[Place] = Counter()
        self.waiting: list[tuple[Region, Voxels, Voxels]] = []
        self.read_values = 0
        self.in_a_row = self.most_in_a_row = 0  # files that are begun before any is asked for

    def start(self, place: Place, region: Region, voxels: Voxels, buffer: Voxels) -> None:
        assert not any(region.clipped(other).elements for other, _, _ in self.waiting), "it is being written"
        self.in_a_row += 1
        self.most_in_a_row = max(self.most_in_a_row, self.in_a_row)
        self.written[place] += 1
        self.waiting.append((region, voxels, buffer))

    def finished(self, *, wait: bool) -> list[Voxels]:
        back, self.in_a_row = [], 0
        while wait and self.waiting:
            region, voxels, buffer = self.waiting.pop(0)
            self.voxels[region.slices] = voxels  # only now: a buffer that is used again too early spoils this
            back.append(buffer)
        return back

    def read(self, number: int, region: Region) -> Voxels:
        for other, _, _ in self.waiting:
            assert not region.clipped(other).elements, "what is being written is not there yet"
        self.read_values += region.elements
        return self.voxels[region.slices].copy()


def stored_array(maps: int = 2, chunk: Vec3 = CHUNK, *, whole_maps: bool = False) -> StoredArray:
    return StoredArray("", 0, (maps, *SIZE), np.dtype("f4"), Layout(chunk), whole_maps=whole_maps)


def values(maps: int = 2) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((maps, *SIZE)).astype(np.float32)


def add(assembler: Assembler, box: Box, voxels: npt.NDArray[Any]) -> None:
    assembler.add(0, box_region(box, len(voxels)), voxels[(slice(None), *box.slices)])


def slabs(thick: int) -> list[Box]:
    return [Box((z, 0, 0), (min(z + thick, SIZE[0]), *SIZE[1:])) for z in range(0, SIZE[0], thick)]


@pytest.mark.parametrize("whole_maps", [False, True])
@pytest.mark.parametrize("thick", [1, 3, 4, 11])
def test_slabs_write_each_file_once(thick: int, whole_maps: bool) -> None:
    array = stored_array(whole_maps=whole_maps)
    files = Kept(array)
    assembler = Assembler([array], files, PLENTY)
    for box in slabs(thick):
        add(assembler, box, values())
    assert not assembler.unfinished
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, values())
    assert set(files.written.values()) == {1}
    assert len(files.written) == 3 * 2 * 2 * (1 if whole_maps else 2)
    assert (files.read_values, assembler.rewritten) == (0, 0)


def test_files_of_one_slab_are_not_all_on_their_way_at_once() -> None:
    """Only `finished` can hold back: a slab that completes many files must ask it before each."""
    array = stored_array(1)
    files = Kept(array)
    assembler = Assembler([array], files, PLENTY)
    for box in slabs(1):
        add(assembler, box, values(1))
    assembler.settle()
    assert files.most_in_a_row == 1


def test_a_piece_that_comes_twice_does_not_make_a_file_whole() -> None:
    """A counter of voxels would take the first half, written twice, for all of it."""
    array = stored_array(1, SIZE)
    files = Kept(array)
    assembler = Assembler([array], files, PLENTY)
    half = Box((0, 0, 0), (11, 7, 9))
    add(assembler, half, values(1))
    add(assembler, half, values(1))
    assert len(assembler.unfinished) == 1
    assert not files.written
    add(assembler, Box((0, 5, 0), (11, 14, 9)), values(1))  # overlaps too
    assert not assembler.unfinished
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, values(1))


def test_a_column_that_is_computed_again_rewrites_only_its_files() -> None:
    array = stored_array(1)
    files = Kept(array)
    assembler = Assembler([array], files, PLENTY)
    add(assembler, Box((0, 0, 0), SIZE), values(1))
    add(assembler, Box((0, 0, 0), CHUNK), values(1))
    assembler.settle()
    assert assembler.rewritten == 1
    np.testing.assert_array_equal(files.voxels, values(1))


def test_what_is_flushed_keeps_what_is_stored() -> None:
    array = stored_array(1)
    files = Kept(array)
    files.voxels[...] = 7
    assembler = Assembler([array], files, PLENTY)
    part = Box((1, 2, 3), (6, 9, 8))
    add(assembler, part, values(1))
    (first, *others) = sorted(assembler.unfinished)
    assembler.flush(frozenset({first}))
    assert sorted(assembler.unfinished) == others
    assembler.flush()
    assembler.settle()
    due = np.full_like(files.voxels, 7)
    due[(slice(None), *part.slices)] = values(1)[(slice(None), *part.slices)]
    np.testing.assert_array_equal(files.voxels, due)
    assert assembler.rewritten == 0
    add(assembler, Box((0, 0, 0), SIZE), values(1))
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, values(1))
    assert assembler.rewritten == len(others) + 1


def test_a_file_is_merged_with_what_is_on_its_way() -> None:
    """The library does not promise that a read sees a write that has not ended."""
    array = stored_array(1, SIZE)
    files = Kept(array)
    assembler = Assembler([array], files, PLENTY)
    for box in slabs(4):
        add(assembler, box, values(1))
        assembler.flush()
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, values(1))


def test_a_file_that_is_begun_again_has_another_number() -> None:
    """A column waits for the chunks that were open when it ended, and not for what comes to them later."""
    array = stored_array(1, SIZE)
    assembler = Assembler([array], Kept(array), PLENTY)
    add(assembler, slabs(1)[0], values(1))
    before = assembler.unfinished
    assembler.flush()
    add(assembler, slabs(1)[1], values(1))
    assert len(assembler.unfinished) == 1
    assert before.isdisjoint(assembler.unfinished)


@pytest.mark.parametrize("files_held", [1, 3, 5])
def test_memory_stays_within_the_budget(files_held: int) -> None:
    array = stored_array()
    files, budget = Kept(array), files_held * array.file_bytes
    assembler = Assembler([array], files, budget)
    for box in slabs(1):
        add(assembler, box, values())
        assert assembler.held <= budget
    assembler.flush()
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, values())
    assert assembler.rewritten > 0
    assert files.read_values > 0


def test_a_file_larger_than_the_budget_is_still_written() -> None:
    array = stored_array(1, SIZE)
    files = Kept(array)
    assembler = Assembler([array], files, 16)
    for box in slabs(2):
        add(assembler, box, values(1))
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, values(1))
    assert set(files.written.values()) == {1}


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    lo = [draw(st.integers(0, size - 1)) for size in SIZE]
    hi = [draw(st.integers(at + 1, size)) for at, size in zip(lo, SIZE, strict=True)]
    return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes(), max_size=12), st.integers(1, 30), st.booleans())
def test_any_boxes_leave_what_a_plain_array_has(parts: list[Box], held: int, whole_maps: bool) -> None:
    array = stored_array(whole_maps=whole_maps)
    files, plain = Kept(array), np.zeros((2, *SIZE), np.float32)
    assembler = Assembler([array], files, held * array.file_bytes)
    for number, box in enumerate(parts):
        voxels = values() + number
        add(assembler, box, voxels)
        plain[(slice(None), *box.slices)] = voxels[(slice(None), *box.slices)]
    assembler.flush()
    assembler.settle()
    np.testing.assert_array_equal(files.voxels, plain)


def test_after_a_failure_nothing_is_taken_for_written() -> None:
    array = stored_array(maps=1)

    class Full(Kept):
        def start(self, place: Place, region: Region, voxels: Voxels, buffer: Voxels) -> None:
            if len(self.written) == 5:
                self.written[place] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().start(place, region, voxels, buffer)

    assembler = Assembler([array], Full(array), PLENTY)
    add(assembler, slabs(4)[0], values(1))
    with pytest.raises(OSError, match="No space left") as first:
        add(assembler, slabs(4)[1], values(1))
    for again in (assembler.flush, assembler.settle, lambda: add(assembler, slabs(4)[0], values(1))):
        with pytest.raises(OSError, match="No space left") as later:
            again()
        assert later.value is first.value
