"""The checksum of a work item is that of its voxels, however they are divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.cluster import checksum
from znnpy.cluster.checksum import VoxelSum
from znnpy.patches import Box

SIZE = (5, 7, 9)


def voxels(dtype: str, maps: int = 2) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = (100 * np.random.default_rng(1).standard_normal((maps, *SIZE))).astype(dtype)
    return found


def total(array: npt.NDArray[Any], boxes: list[Box], number: int = 0) -> int:
    found = VoxelSum()
    for box in boxes:
        found.add(box, array[(slice(None), *box.slices)], number)
    return found.value


WHOLE = [Box((0, 0, 0), SIZE)]
PARTS = [
    Box((0, 0, 4), (5, 3, 9)),
    Box((0, 0, 0), (2, 3, 4)),
    Box((0, 3, 0), (5, 7, 9)),
    Box((2, 0, 0), (5, 3, 4)),
    Box((5, 0, 0), (5, 7, 9)),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "uint16", "float64"])
def test_any_division_into_boxes_adds_up_to_the_same(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    array = voxels(dtype)
    expected = total(array, WHOLE)
    assert total(array, PARTS) == total(np.asfortranarray(array), PARTS[::-1]) == expected
    monkeypatch.setattr(checksum, "BLOCK", 10)
    assert total(array, WHOLE) == expected


def test_a_changed_or_moved_voxel_changes_it() -> None:
    array = voxels("float32")
    known = {total(array, WHOLE), total(array, WHOLE, number=1)}
    for change in ((0, 0, 0, 0), (1, 4, 6, 8), (0, 3, 2, 1)):
        other = array.copy()
        other[change] = np.nextafter(other[change], np.float32(np.inf))
        known.add(total(other, WHOLE))
    for axis in range(4):
        known.add(total(np.flip(array, axis), WHOLE))
    assert len(known) == 9


def test_a_missing_box_changes_it() -> None:
    assert total(voxels("uint8"), PARTS[:3]) != total(voxels("uint8"), WHOLE)
