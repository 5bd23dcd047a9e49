"""Reading NIfTI: what nibabel writes, compressed files and their cost, scales, orientations, and hostile headers."""

from __future__ import annotations

import gzip
import logging
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.box_reads import assert_file_reads
from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume, unpacked
from znnpy.volume.space import Space

SHAPE = (7, 9, 11)  # z, y, x
PLACED = np.array([[4.0, 0, 0, 10], [0, 8, 0, 20], [0, 0, 40, 30], [0, 0, 0, 1]])
KINDS = {1: nibabel.Nifti1Image, 2: nibabel.Nifti2Image}


def voxels(dtype: str, shape: tuple[int, ...] = SHAPE) -> npt.NDArray[Any]:
    return np.random.default_rng(6).integers(0, 100, shape).astype(dtype)


def written(
    path: Path, array: npt.NDArray[Any], affine: Any = PLACED, version: int = 1, order: str = "<", **fields: Any
) -> npt.NDArray[Any]:
    """Write an array whose axes are in the order that numpy has them, the slowest first."""
    header = KINDS[version].header_class(endianness=order)
    header.set_data_dtype(array.dtype)
    header.set_data_shape(array.shape[::-1])
    image = KINDS[version](array.T, affine, header)
    image.header.set_xyzt_units("micron")
    for name, value in fields.items():
        image.header[name] = value
    nibabel.save(image, path)
    return array


def patched(path: Path, at: int, form: str, *numbers: Any) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, *numbers)
    path.write_bytes(content)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_files_of_another_library_are_read(tmp_path: Path, dtype: str, version: int, order: str) -> None:
    path = tmp_path / "v.nii"
    array = written(path, voxels(dtype), version=version, order=order)
    assert_file_reads(path, array[None])
    with open_volume(path) as volume:
        assert volume.space == Space((40.0, 8.0, 4.0), (30.0, 20.0, 10.0), ("micrometer",) * 3)


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
def test_time_and_channels_are_told_apart(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / name
    array = written(path, voxels("i2", (3, *SHAPE)))
    with pytest.raises(VolumeError, match="has 3 points of time; choose one, from 0, with `time`"):
        open_volume(path)
    for time in range(3):
        assert_file_reads(path, array[time][None], time=time)
    written(path, array, intent_code=1007)
    assert_file_reads(path, array)
    written(path, array[:, None])  # the fifth axis
    assert_file_reads(path, array)


def test_colours_are_channels(tmp_path: Path) -> None:
    path = tmp_path / "v.nii"
    array = voxels("u1", (*SHAPE, 3))
    colours = np.ascontiguousarray(array).view([("R", "u1"), ("G", "u1"), ("B", "u1")])[..., 0]
    written(path, colours)
    assert_file_reads(path, np.moveaxis(array, -1, 0))


@pytest.mark.parametrize("dtype", ["i2", "f4", "f8"])
def test_scaled_numbers_are_voxels(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "v.nii"
    array = written(path, voxels(dtype))
    patched(path, 112, "<2f", 0.25, -3.0)
    expected = (array * 0.25 - 3.0).astype("f8" if dtype == "f8" else "f4")
    assert_file_reads(path, expected[None])
    np.testing.assert_array_equal(nibabel.load(path).get_fdata().T, expected)
    for slope, intercept in ((0, 5), (np.nan, 5), (1, 0), (np.inf, 1)):
        patched(path, 112, "<2f", slope, intercept)
        assert_file_reads(path, array[None])


TURNS = [
    np.array([[-4.0, 0, 0, 10], [0, -8, 0, 20], [0, 0, 40, 30], [0, 0, 0, 1]]),
    np.array([[0.0, 0, 40, 10], [4, 0, 0, 20], [0, -8, 0, 30], [0, 0, 0, 1]]),
    np.array([[3.2, -4.8, 0, 10], [2.4, 6.4, 0, 20], [0, 0, 40, 30], [0, 0, 0, 1]]),
]


@pytest.mark.parametrize("affine", TURNS, ids=["mirrored", "exchanged", "turned"])
def test_turned_axes_are_carried(tmp_path: Path, affine: npt.NDArray[np.float64]) -> None:
    path = tmp_path / "v.nii"
    written(path, voxels("u1"), affine)
    with open_volume(path) as volume:
        space = volume.space
    assert space is not None
    np.testing.assert_allclose(np.array(space.affine), affine[:3], rtol=1e-6)
    np.testing.assert_allclose(space.scale, (40, 8, 4), rtol=1e-6)
    assert space.translation == (30.0, 20.0, 10.0)
    moved = space.behind((1, 2, 3), (2, 2, 1))
    np.testing.assert_allclose(np.array(moved.affine)[:, 3], (affine @ (3, 2, 1, 1))[:3], rtol=1e-6)
    np.testing.assert_allclose(np.array(moved.affine)[:, :3], affine[:3, :3] * (1, 2, 2), rtol=1e-6)
    np.testing.assert_allclose(moved.scale, (80, 16, 4), rtol=1e-6)


def test_place_is_that_of_the_qform_where_there_is_no_sform(tmp_path: Path) -> None:
    path = tmp_path / "v.nii"
    written(path, voxels("u1"), TURNS[2], sform_code=0, qform_code=1)
    with open_volume(path) as volume:
        assert volume.space is not None
        np.testing.assert_allclose(np.array(volume.space.affine), TURNS[2][:3], rtol=1e-5)
    patched(path, 252, "<h", 0)
    with open_volume(path) as volume:
        assert volume.space == Space((40.0, 8.0, 4.0), (0.0, 0.0, 0.0), ("micrometer",) * 3)
    patched(path, 80, "<3f", np.nan, 0, -1)
    with open_volume(path) as volume:
        assert volume.space is None


def test_compressed_file_is_unpacked_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "room").mkdir()
    monkeypatch.setattr(unpacked, "FOLDER", lambda: str(tmp_path / "room"))
    monkeypatch.setattr(unpacked, "PIECE", 100)
    path = tmp_path / "v.nii.gz"
    array = written(path, voxels("f4"))
    with open_volume(path):
        assert not caplog.records  # the header alone costs nothing
    with caplog.at_level(logging.WARNING):
        assert_file_reads(path, array[None])
    (record,) = caplog.records
    assert f"{path} is compressed as a whole, so it is unpacked first, for each run anew: 2.71 KiB in" in record.message
    assert list((tmp_path / "room").iterdir()) == []


def test_compressed_file_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v.nii.gz"
    written(path, voxels("f4"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2000}))
    with (
        open_volume(path) as volume,
        pytest.raises(VolumeError, match=r"takes 2.71 KiB, and .* has 1.95 KiB free: set TMPDIR"),
    ):
        volume.read(Box((0, 0, 0), SHAPE), np.empty((1, *SHAPE), np.float32))


def test_damaged_compressed_files_are_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "v.nii.gz", np.empty((1, *SHAPE), np.float32)
    written(path, voxels("f4"))
    content = path.read_bytes()
    path.write_bytes(content[:-300])
    with open_volume(path) as volume, pytest.raises(VolumeError, match=r"cannot be unpacked: .*; copy it again"):
        volume.read(Box((0, 0, 0), SHAPE), out)
    path.write_bytes(gzip.compress(gzip.decompress(content)[:-10]))
    with open_volume(path) as volume, pytest.raises(VolumeError, match="ends 10 bytes before the voxels do"):
        volume.read(Box((0, 0, 0), SHAPE), out)
    plain = bytearray(gzip.decompress(content))
    struct.pack_into("<4h", plain, 40, 3, 32767, 32767, 32767)
    path.write_bytes(gzip.compress(plain))
    with pytest.raises(VolumeError, match=r"is cut short: its [\d,]+ bytes cannot hold the 140,724,603,847,004"):
        open_volume(path)
    path.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises(VolumeError, match="cannot be read as NIfTI: it cannot be unpacked"):
        open_volume(path)


def test_pairs_of_files_are_refused(tmp_path: Path) -> None:
    image = nibabel.Nifti1Pair(voxels("u1").T, PLACED)
    nibabel.save(image, tmp_path / "v.hdr")
    with pytest.raises(VolumeError, match=r"v\.hdr is half of a pair of files .*; save it as \.nii"):
        open_volume(tmp_path / "v.hdr")
    with pytest.raises(VolumeError, match=r"v\.img cannot be read as NIfTI"):
        open_volume(tmp_path / "v.img")


@pytest.mark.parametrize(
    ("at", "form", "numbers", "said"),
    [
        (40, "<h", (0,), "it has 0 axes"),
        (40, "<h", (8,), "it has 8 axes"),
        (42, "<h", (-5,), "its sizes are"),
        (42, "<h", (0,), "is empty"),
        (42, "<3h", (32767, 32767, 32767), "is cut short: 3124 bytes of the"),
        (40, "<7h", (6, 11, 9, 7, 1, 1, 2), "has an axis '6' of length 2"),
        (70, "<h", (32,), "holds complex"),
        (70, "<h", (1,), "its data type has the number 1"),
        (70, "<h", (-1,), "its data type has the number -1"),
        (108, "<f", (np.nan,), "its voxels begin at byte nan"),
        (108, "<f", (-4,), "its voxels begin at byte -4"),
        (108, "<f", (1e30,), r"its voxels begin at byte 1e\+30"),
        (108, "<f", (356,), "is cut short: 3124 bytes of the 3128"),
        (344, "4s", (b"n+9\0",), "is half of a pair"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, at: int, form: str, numbers: Any, said: str) -> None:
    path = tmp_path / "v.nii"
    written(path, voxels("f4"))
    patched(path, at, form, *numbers)
    with pytest.raises(VolumeError, match=said):
        open_volume(path)
