"""Columns with a mask: every voxel is written once, and parts begin early enough; its memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.patches import Box, Column, Cover
from znnpy.run.masked import MaskedColumns
from znnpy.volume import mask as masks
from znnpy.volume.array import ArrayVolume
from znnpy.volume.mask import Mask, WantedOutput, WantedOutputs, _wanted_output

SIZE = (60, 12, 10)
COVER = Cover(SIZE, (3, 6, 5), axis=0, column=60, margin=7)  # 3 steps ahead


def wanted(mask: npt.NDArray[Any]) -> WantedOutputs:
    """Return where a mask of the output's size wants it."""
    read = Mask.of(ArrayVolume(mask))
    places = [np.arange(n, dtype=np.float64) for n in mask.shape]
    return WantedOutputs(read, (_wanted_output(read, places),), "")


def lead(column: Column | None, step: int) -> tuple[int, int]:
    """Begin 5 steps early, of which 3 give no output."""
    del column
    return (0, 0) if step <= 5 else (step - 5, 3)


@dataclass
class Written:
    """How often each voxel is written, and which are computed."""

    times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(SIZE, np.int64))
    computed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(SIZE, np.bool_))

    def add(self, columns: Sequence[Column]) -> None:
        for column in columns:
            since = None  # computed steps since the last one that was not
            for step in column.steps:
                self.times[step.write.slices] += 1
                if not step.computed:
                    assert step.writes, "steps that neither compute nor write are none"
                    since = None
                    continue
                since = 0 if since is None else since + 1
                self.computed[step.write.slices] = True
                if step.writes:
                    assert since >= COVER.ahead, "what is kept from step to step is complete"


@pytest.mark.parametrize("seed", range(20))
def test_every_voxel_is_written_once_and_wanted_ones_are_computed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = np.zeros(SIZE, np.uint8)
    for _ in range(seed % 5):
        z, y, x = (int(rng.integers(0, n)) for n in SIZE)
        mask[z : z + 1 + seed % 7, y : y + 3, x : x + 3] = 1
    columns, written = MaskedColumns(COVER, wanted(mask), lead), Written()
    written.add(list(columns))
    assert (written.times == 1).all()
    assert written.computed[mask != 0].all()
    assert columns.skipped == (~written.computed).sum()
    assert len(columns) == len(COVER)
    assert [column.voxels for column in columns] == [column.voxels for column in COVER]


def test_short_gap_is_computed_and_a_long_one_is_left_out() -> None:
    mask = np.zeros(SIZE, np.uint8)
    mask[[0, 15, 55]] = 1  # in steps 0, 5 and 18 with output; a block of the mask touches step 17 too
    columns = MaskedColumns(COVER, wanted(mask), lead)
    computed = [step.computed for step in columns[0].steps]
    ahead = COVER.ahead
    assert computed[: ahead + 6] == [True] * (ahead + 6)  # 4 steps between are fewer than the 5 of a new part
    rest = columns[0].steps[ahead + 6 :]
    assert [step.computed for step in rest if step.writes] == [False] * 9 + [True] * 4 + [False]
    assert sum(step.computed and not step.writes for step in rest) == 3


def test_column_of_everything_is_the_column_itself() -> None:
    columns = MaskedColumns(COVER, wanted(np.ones(SIZE, np.uint8)), lead)
    assert list(columns) == list(COVER)
    assert columns.skipped == 0


COVERS = [
    COVER,
    Cover(SIZE, (7, 5, 4)),
    Cover(SIZE, (3, 6, 5), axis=0, column=24, margin=7),
    Cover(SIZE, (9, 3, 10), axis=1, column=6, margin=4),
    Cover(SIZE, (70, 5, 3), axis=2, column=6, margin=2),
]


@pytest.mark.parametrize("cover", COVERS)
@pytest.mark.parametrize("inside", [Box((0, 0, 0), SIZE), Box((11, 2, 0), (37, 9, 10)), Box((5, 5, 5), (5, 5, 5))])
@pytest.mark.parametrize("blocks", [2**21, 40])
def test_steps_of_a_cover_are_looked_up_together_as_each_is_alone(
    monkeypatch: pytest.MonkeyPatch, cover: Cover, inside: Box, blocks: int
) -> None:
    monkeypatch.setattr(masks, "MOST_BLOCKS", blocks)
    mask = (np.random.default_rng(5).random(inside.size) < 0.004).astype(np.uint8)
    read = Mask.of(ArrayVolume(mask if mask.size else np.zeros((1, 1, 1), np.uint8)))
    places = [np.where((at >= lo) & (at < hi), at - lo, -1.0) for at, lo, hi in (
        (np.arange(n), lo, hi) for n, lo, hi in zip(SIZE, inside.lo, inside.hi, strict=True)
    )]  # fmt: skip
    there = WantedOutputs(read, (_wanted_output(read, places),), "")

    def begins(column: Column | None, step: int) -> tuple[int, int]:
        del column
        return (0, 0) if step <= cover.ahead + 1 else (step - cover.ahead - 1, cover.ahead)

    columns = MaskedColumns(cover, there, begins)
    grid = columns.grid
    assert grid is not None
    for number, place in enumerate(np.ndindex(*cover.counts)):
        touched = [i for i, step in enumerate(cover[number].steps) if there.touches([step.write])]
        assert grid.wanted_steps((place[0], place[1], place[2])) == touched
    assert columns.skipped == sum(step.write.voxels for column in columns for step in column.steps if not step.computed)
    work = grid.work(partial(columns.parts, None), float)
    assert work == sum(step.computed for column in columns for step in column.steps)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
@pytest.mark.parametrize("blocks", [2**21, 40, 1])
def test_blocks_know_what_they_hold(monkeypatch: pytest.MonkeyPatch, dtype: Any, blocks: int) -> None:
    monkeypatch.setattr(masks, "MOST_BLOCKS", blocks)
    monkeypatch.setattr(masks, "PIECE_BYTES", 700)
    rng = np.random.default_rng(3)
    voxels = (rng.random(SIZE) < 0.02).astype(dtype)
    voxels[6:23, :11] = 1
    mask = Mask.of(ArrayVolume(voxels))
    assert mask.voxels == np.count_nonzero(voxels)
    assert mask.states.size <= blocks
    one = wanted(voxels).outputs[0]
    for _ in range(200):
        lo = [int(rng.integers(0, n)) for n in SIZE]
        hi = [int(rng.integers(a + 1, n + 1)) for a, n in zip(lo, SIZE, strict=True)]
        box = Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))
        part = voxels[box.slices] != 0
        assert mask.touches(box) or not part.any()
        assert {masks.NONE: not part.any(), masks.SOME: True, masks.ALL: part.all()}[mask.state(box)]
        some = np.ones((2, *box.size), np.float32)
        one.clear(box, some)
        np.testing.assert_array_equal(some, np.stack([part, part]))


def test_little_of_a_mask_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "PIECE_BYTES", 2000)
    rng = np.random.default_rng(3)
    voxels = rng.integers(0, 2, (120, 24, 20)).astype(np.uint8)
    largest = 0

    class Watched(ArrayVolume):
        def read(self, box: Box, out: npt.NDArray[Any]) -> None:
            nonlocal largest
            largest = max(largest, out.nbytes)
            super().read(box, out)

    read = Mask.of(Watched(voxels))
    places = [np.floor((np.arange(n) + 0.5) * 2) for n in SIZE]
    one: WantedOutput = _wanted_output(read, places)
    some = np.ones((1, *SIZE), np.float32)
    one.clear(Box((0, 0, 0), SIZE), some)
    np.testing.assert_array_equal(some[0], voxels[1::2, 1::2, 1::2])
    assert largest <= 2000


def test_identity_follows_the_content() -> None:
    voxels = np.zeros(SIZE, np.uint8)
    voxels[30, 6, 5] = 1
    before = Mask.of(ArrayVolume(voxels)).digest
    assert Mask.of(ArrayVolume(voxels.astype(np.float32) * 7)).digest == before
    voxels[40, 6, 5] = 1
    assert Mask.of(ArrayVolume(voxels)).digest != before
