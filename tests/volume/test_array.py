"""Reading .npy: orders, byte orders, boxes, runs of every length, files that change meanwhile; nothing stays mapped."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import array as array_module
from znnpy.volume import open_volume
from znnpy.volume.base import MissingVoxels


def saved(path: Path, shape: tuple[int, ...], dtype: str = "<u2", order: str = "C") -> npt.NDArray[Any]:
    array = np.random.default_rng(31).integers(0, 200, shape).astype(dtype)
    np.save(path, np.asfortranarray(array) if order == "F" else array)
    return array


BOXES = [
    Box((0, 0, 0), (7, 9, 11)),  # all
    Box((2, 3, 4), (3, 4, 5)),  # one voxel
    Box((1, 0, 0), (4, 9, 11)),  # whole planes
    Box((1, 2, 0), (4, 8, 11)),  # whole rows
    Box((0, 2, 3), (7, 8, 5)),
    Box((0, 0, 3), (7, 9, 10)),  # whole planes of the other order
]


@pytest.mark.parametrize("page", [0, 4096], ids=["long rows", "short rows"])
@pytest.mark.parametrize("run", [1, 40, 300, 2**20], ids="runs of {} bytes".format)
@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(7, 9, 11), (3, 7, 9, 11)], ids=str)
def test_box_is_read(
    tmp_path: Path, shape: tuple[int, ...], order: str, box: Box, run: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_module, "RUN_BYTES", run)
    monkeypatch.setattr(array_module, "PAGE", page)
    array = saved(tmp_path / "v.npy", shape, order=order).reshape(-1, 7, 9, 11)
    with open_volume(tmp_path / "v.npy") as volume:
        out = np.full((array.shape[0], *box.size), 999, np.uint16)
        volume.read(box, out)
    np.testing.assert_array_equal(out, array[(slice(None), *box.slices)])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", ">i2", "<f2", ">f4", "<f8", ">u8"])
def test_every_number_type_is_read(tmp_path: Path, dtype: str, order: str) -> None:
    array = saved(tmp_path / "v.npy", (2, 3, 5, 4), dtype, order)
    with open_volume(tmp_path / "v.npy") as volume:
        assert (volume.shape, volume.dtype) == ((2, 3, 5, 4), np.dtype(dtype).newbyteorder("="))
        out = np.full(volume.shape, 77, volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
        np.testing.assert_array_equal(out, array)
        status = (tmp_path / "v.npy").stat()
        assert volume.stored() == (status.st_size, status.st_mtime_ns)
        assert volume.identity() == volume.identity()


def test_file_cut_short_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    saved(path, (7, 9, 11))
    with open_volume(path) as volume:
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(
            VolumeError, match=r"v\.npy ends before byte 1514; it was cut short in the meantime: copy it"
        ):
            volume.read(Box((0, 0, 0), (7, 9, 11)), np.zeros((1, 7, 9, 11), np.uint16))


def test_files_without_a_volume_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    with pytest.raises(VolumeError, match=r"there is no file .*v\.npy; check the path"):
        open_volume(path)
    path.write_bytes(b"no array")
    with pytest.raises(VolumeError, match=r"v\.npy cannot be read as \.npy: .*write it again with numpy\.save"):
        open_volume(path)
    saved(path, (7, 9, 11))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(VolumeError, match=r"v\.npy is cut short: 300 bytes of the 1514 its header promises; copy it"):
        open_volume(path)
    saved(path, (7, 9))
    with pytest.raises(VolumeError, match=r"v\.npy has 2 axes \(7, 9\), and a volume has 3"):
        open_volume(path)
    saved(path, (7, 9, 11))
    with pytest.raises(VolumeError, match="holds one array, so there is no dataset 'raw' to name"):
        open_volume(path, "raw")
    with pytest.raises(
        VolumeError,
        match=r"v\.npy is neither in chunks nor an HDF5 volume made of several files, .*: remove `fill_missing`",
    ):
        open_volume(path, missing_voxels=MissingVoxels(fill=5))
    with pytest.raises(VolumeError, match=r"v\.npy has no chunks that could be missing: leave out missing_chunks='er"):
        open_volume(path, missing_voxels=MissingVoxels(chunks="error"))


def with_header(text: bytes, version: int = 1) -> bytes:
    """Write a .npy file of this header and 64 zeros."""
    return (
        b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + bytes(64)
    )


def header(descr: str = "'|u1'", order: str = "False", shape: str = "(4, 4, 4)") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it ends after 0 of 8 bytes of its header"),
        (b"no array at all", "it does not begin as a .npy array does"),
        (b"\x93NUMPY\x01\x00\xff\x00{", "it ends after 1 of 255 bytes of its header"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "its header has 2,147,483,647 bytes, more than the 1,024"),
        (with_header(header(shape="(True, 4, 4)")), "its header is {"),
        (with_header(header(shape="(-4, 4, 4)")), "its header is {"),
        (with_header(header(shape="'444'")), "its header is {"),
        (with_header(header(shape=f"({2**63}, 4, 4)")), "its header is {"),
        (with_header(header(shape="(10000001, 4, 4)")), "has an axis of 10,000,001 voxels, and up to 10,000,000 are"),
        (with_header(header(shape="(10**7,) * 3")), "its header is {"),
        (with_header(header(shape=f"({10**7}, {10**7}, {10**7})")), f"is cut short: .* of the {10**21 + 93} its"),
        (with_header(header(order="1")), "its header is {"),
        (with_header(header(descr="'|O'")), r"holds object \(object\) voxels, and only integers"),
        (with_header(header(descr="()")), "its header is {"),
        (with_header(header(descr="('|u1',)")), "its header is {"),
        (with_header(header(descr="[('a', '<f4')]")), "its header is {"),
        (with_header(header(descr="'<q9'")), "its header names the dtype <q9"),
        (with_header(b"(" * 9000), "its header has 9,000 bytes, more than the 1,024"),
        (with_header(b"(" * 900), r"its header is \(\("),
        (with_header(b"{}"), "its header is {}"),
        (with_header(b"\xff\xfe", 3), "its header is"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_hostile_headers_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=rf"v\.npy .*{said}"):
        open_volume(path)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_of_the_format_is_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(with_header(header(), version))
    with open_volume(path) as volume:
        assert volume.shape == (1, 4, 4, 4)


def test_leading_axes_of_length_1_are_dropped(tmp_path: Path) -> None:
    array = saved(tmp_path / "v.npy", (1, 1, 2, 3, 5, 4), "u1")
    with open_volume(tmp_path / "v.npy") as volume:
        assert volume.shape == (2, 3, 5, 4)
        out = np.zeros((2, 2, 3, 4), np.uint8)
        volume.read(Box((1, 1, 0), (3, 4, 4)), out)
    np.testing.assert_array_equal(out, array[0, 0, :, 1:3, 1:4])


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "v.npy")
    with pytest.raises(VolumeError, match=r"v\.npy cannot be read: it is a pipe, a socket or a device"):
        open_volume(tmp_path / "v.npy")


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are listed on Linux only")
def test_closed_volume_leaves_nothing_mapped(tmp_path: Path) -> None:
    saved(tmp_path / "v.npy", (7, 9, 11))
    with open_volume(tmp_path / "v.npy") as volume:
        volume.read(Box((0, 0, 0), (7, 9, 11)), np.zeros((1, 7, 9, 11), np.uint16))
        assert "v.npy" not in Path("/proc/self/maps").read_text()
