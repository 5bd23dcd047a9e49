"""Windows over volumes: each voxel is finished once, after its last window, and sums hold what later ones add to."""

from __future__ import annotations

import numpy as np
import pytest

from znnpy.patches import Box
from znnpy.shapes import Vec3, turned
from znnpy.window_cover import WindowCover, WindowStep
from znnpy.window_lines import Line
from znnpy.windows.settings import Windows

VOLUMES: tuple[Vec3, ...] = ((23, 20, 25), (8, 8, 8), (5, 30, 9), (41, 3, 17))


@pytest.mark.parametrize(("lo", "hi"), [(0, 20), (3, 20), (0, 11), (5, 6), (9, 19)])
@pytest.mark.parametrize(
    ("starts", "size"), [((0, 4, 8, 12), 8), ((0, 3, 12), 9), ((0, 1, 2, 3, 10), 10), ((0, 10), 10)]
)
def test_a_line_finishes_each_voxel_after_its_last_window(starts: tuple[int, ...], size: int, lo: int, hi: int) -> None:
    line = Line.over(starts, size, lo, hi)
    for at in range(lo, hi):
        windows = [index for index in range(len(line)) if line.starts[index] <= at < line.starts[index] + size]
        finished = [index for index in range(len(line)) if line.done(index).lo <= at < line.done(index).hi]
        assert finished == [windows[-1]]
        assert [i for i in range(len(line)) if line.covered(i).lo <= at < line.covered(i).hi] == windows
        kept = [i for i in range(len(line)) if line.kept(i).lo <= at < line.kept(i).hi]
        assert kept == [i for i in range(len(line)) if windows[0] <= i < windows[-1]]
    assert line.done(line.first).size
    assert not any(line.done(index).size for index in range(line.first))
    for index in range(line.first, len(line)):
        needed = {i for i in range(index) if line.covered(i).hi > line.done(index).lo}
        assert needed == set(line.before(index))


def cover(volume: Vec3, region: Box | None = None, axis: int = 0, parts: int = 1, overlap: float = 0.5) -> WindowCover:
    windows = Windows((8, 6, 8), (overlap, overlap, overlap))
    whole = WindowCover(windows, volume, region or Box((0, 0, 0), volume), axis)
    return WindowCover(windows, volume, region or Box((0, 0, 0), volume), axis, min(parts, whole.most_parts))


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("volume", VOLUMES)
def test_writes_partition_the_region(volume: Vec3, axis: int, parts: int, overlap: float) -> None:
    for region in (None, Box((2, 1, 3), (5, 3, 9))):
        windows = cover(volume, region, axis, parts, overlap)
        written = np.zeros(windows.region.size, np.int32)
        for column in windows:
            assert column.steps[-1].writes
            for step in column.steps:
                written[step.write.slices] += 1
                assert step.size is not None
                assert min(step.size) > 0
                assert max(a - b for a, b in zip(step.write.size, windows.most_done, strict=True)) <= 0
        assert (written == 1).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("volume", VOLUMES)
def test_a_row_begun_anew_computes_every_window_that_it_needs(volume: Vec3, axis: int) -> None:
    """All windows that cover a voxel of this or a later row come before the one that finishes it."""
    windows = cover(volume, axis=axis, parts=2)
    for index in range(len(windows)):
        seen = set[Vec3]()
        columns = [windows.begun_at(index), *windows[index + 1 :]]
        for number, column in enumerate(columns):
            if number and not windows.goes_on(index + number):
                break  # another part
            for step in column.steps:
                assert isinstance(step.step, WindowStep)
                seen.add(step.step.place)
                if not step.writes:
                    continue
                done = windows.done_padded(step.step)
                first = turned(done.lo, axis)
                lines = windows.lines[step.step.part]
                around = [
                    [i for i in range(len(line)) if line.covered(i).lo <= at < line.covered(i).hi]
                    for line, at in zip(lines, first, strict=True)
                ]
                needed = {(a, b, c) for a in around[0] for b in around[1] for c in around[2]}
                assert needed <= seen
    assert [step.step for step in windows.begun_at(0).steps] == [step.step for step in windows[0].steps]


def test_steps_that_are_repeated_write_nothing() -> None:
    windows = cover((40, 16, 16))
    again = windows.begun_at(3).steps
    assert any(step.repeated for step in again)
    assert all(step.repeated != step.writes for step in again)


def test_sums_of_half_overlapping_windows_hold_half_a_window_of_planes() -> None:
    windows = WindowCover(Windows((8, 8, 8)), (64, 32, 24), Box((0, 0, 0), (64, 32, 24)), 0)
    assert windows.sums(3) == ((4, 32, 24, 3), (8, 8, 24, 3))
    assert windows.sums_bytes(3, 2) == 2 * 4 * 32 * 24 * 3 + 4 * 8 * 8 * 24 * 3
