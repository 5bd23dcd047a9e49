"""Reading MRC: what the library mrcfile writes, IMOD's bytes, orders of axes and bytes, and hostile headers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.box_reads import assert_file_reads
from znnpy.errors import VolumeError
from znnpy.volume import open_volume
from znnpy.volume.space import Space

SHAPE = (7, 9, 11)


def voxels(dtype: str, shape: tuple[int, ...] = SHAPE) -> npt.NDArray[Any]:
    return np.random.default_rng(5).integers(-100 if np.dtype(dtype).kind != "u" else 0, 100, shape).astype(dtype)


def written(path: Path, array: npt.NDArray[Any], *, stack: bool = False) -> npt.NDArray[Any]:
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(array)
        if stack:
            file.set_volume()
        file.voxel_size = (4.0, 8.0, 40.0)  # x, y, z
        file.header.origin = (10.0, 20.0, 30.0)
    return array


def patched(path: Path, at: int, form: str, *numbers: Any) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, *numbers)
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", ["<i1", "<i2", ">i2", "<u2", "<f2", ">f4", "<f4"])
@pytest.mark.parametrize("suffix", ["mrc", "rec", "map", "st", "ali"])
def test_modes_of_another_library_are_read(tmp_path: Path, dtype: str, suffix: str) -> None:
    path = tmp_path / f"v.{suffix}"
    array = written(path, voxels(dtype))
    assert_file_reads(path, array[None])
    with open_volume(path) as volume:
        assert volume.space == Space((40.0, 8.0, 4.0), (30.0, 20.0, 10.0), ("angstrom",) * 3)


def test_bytes_of_imod_are_unsigned_unless_its_flag_says_signed(tmp_path: Path) -> None:
    path = tmp_path / "v.mrc"
    array = written(path, voxels("i1"))
    patched(path, 152, "<2i", 1146047817, 0)
    assert_file_reads(path, array.view("u1")[None])
    patched(path, 156, "<i", 1)
    assert_file_reads(path, array[None])


@pytest.mark.parametrize("axes", [(1, 2, 3), (3, 2, 1), (2, 1, 3), (3, 1, 2)])
def test_order_of_axes_is_honoured(tmp_path: Path, axes: tuple[int, int, int]) -> None:
    path = tmp_path / "v.mrc"
    array = written(path, voxels("f4"))
    patched(path, 64, "<3i", *axes)
    patched(path, 196, "<3f", 0, 0, 0)
    patched(path, 16, "<3i", 1, 2, 3)  # first column, row and section
    patched(path, 28, "<3i3f", 2, 4, 5, 8.0, 32.0, 50.0)
    turned = array.transpose([[2, 1, 0][axes.index(axis)] for axis in (3, 2, 1)])  # sections are the first axis here
    assert_file_reads(path, turned[None])
    with open_volume(path) as volume:
        first = [1 + axes.index(axis) for axis in (3, 2, 1)]
        steps = (10.0, 8.0, 4.0)
        place = tuple(float(n) * step for n, step in zip(first, steps, strict=True))
        assert volume.space == Space(steps, (place[0], place[1], place[2]), ("angstrom",) * 3)


def test_extended_header_is_skipped_and_an_old_file_without_stamp_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v.mrc"
    array = written(path, voxels(">i2"))
    content = path.read_bytes()
    path.write_bytes(content[:1024] + b"\xff" * 160 + content[1024:])
    patched(path, 92, ">i", 160)
    patched(path, 212, "4s", bytes(4))
    patched(path, 40, ">3f", 0, 0, 0)
    assert_file_reads(path, array[None])
    with open_volume(path) as volume:
        assert volume.space is None


def test_volumes_of_a_stack_are_points_of_time(tmp_path: Path) -> None:
    path = tmp_path / "v.mrc"
    array = written(path, voxels("i2", (3, *SHAPE)))
    with pytest.raises(VolumeError, match=r"v\.mrc has 3 points of time; choose one, from 0, with `time`"):
        open_volume(path)
    for time in range(3):
        assert_file_reads(path, array[time][None], time=time)


@pytest.mark.parametrize(
    ("at", "form", "numbers", "said"),
    [
        (0, "<3i", (0, 9, 11), r"it has \(0, 9, 11\) columns, rows and sections"),
        (0, "<3i", (-7, 9, 11), r"it has \(-7, 9, 11\)"),
        (0, "<3i", (2**31 - 1, 9, 11), "has an axis of 2,147,483,647 voxels"),
        (0, "<3i", (10**7, 10**7, 10**7), f"is cut short: .* bytes of the {4 * 10**21 + 1024} its header promises"),
        (12, "<i", (3,), "holds complex"),
        (12, "<i", (4,), "holds complex"),
        (12, "<i", (101,), "its mode is 101, and only 0, 1, 2, 6 and 12 are read"),
        (64, "<3i", (1, 1, 3), r"its axes are \(1, 1, 3\)"),
        (92, "<i", (-4,), "behind -4 bytes"),
        (92, "<i", (4,), r"is cut short: 3796 bytes of the 3800"),
        (212, "4s", (b"\x07\x07\0\0",), None),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, at: int, form: str, numbers: Any, said: str | None) -> None:
    path = tmp_path / "v.mrc"
    array = written(path, voxels("f4"))
    patched(path, at, form, *numbers)
    if said is None:
        assert_file_reads(path, array[None])
        return
    with pytest.raises(VolumeError, match=said):
        open_volume(path)


@pytest.mark.parametrize("numbers", [(np.nan, 1, 1), (np.inf, 1, 1), (-1, 1, 1), (0, 1, 1)])
def test_sizes_that_are_none_give_no_place(tmp_path: Path, numbers: Any) -> None:
    path = tmp_path / "v.mrc"
    written(path, voxels("f4"))
    patched(path, 40, "<3f", *numbers)
    with open_volume(path) as volume:
        assert volume.space is None
    patched(path, 40, "<3f", 1, 1, 1)
    patched(path, 196, "<3f", np.nan, 0, 0)
    with open_volume(path) as volume:
        assert volume.space is None


@pytest.mark.parametrize("content", [b"", b"MRC", bytes(1023), b"\xff" * 1024])
def test_files_without_a_header_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v.mrc"
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=r"v\.mrc cannot be read as MRC: .*; write it again"):
        open_volume(path)
