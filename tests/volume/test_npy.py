"""Reading .npy: orders, byte orders, boxes, runs of every length, files that change meanwhile; nothing stays mapped."""

from __future__ import annotations

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
def test_reads_a_box(
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
def test_every_number_type(tmp_path: Path, dtype: str, order: str) -> None:
    array = saved(tmp_path / "v.npy", (2, 3, 5, 4), dtype, order)
    with open_volume(tmp_path / "v.npy") as volume:
        assert (volume.shape, volume.dtype) == ((2, 3, 5, 4), np.dtype(dtype).newbyteorder("="))
        out = np.full(volume.shape, 77, volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
        np.testing.assert_array_equal(out, array)
        status = (tmp_path / "v.npy").stat()
        assert volume.stored() == (status.st_size, status.st_mtime_ns)
        assert volume.identity() == volume.identity()


def test_a_file_cut_short_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    saved(path, (7, 9, 11))
    with open_volume(path) as volume:
        with path.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(VolumeError, match=r"v\.npy ends before byte 1514; it was cut short meanwhile: copy it"):
            volume.read(Box((0, 0, 0), (7, 9, 11)), np.zeros((1, 7, 9, 11), np.uint16))


def test_files_that_are_no_volume(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    with pytest.raises(VolumeError, match=r"there is no file .*v\.npy; check the path"):
        open_volume(path)
    path.write_bytes(b"no array")
    with pytest.raises(VolumeError, match=r"v\.npy cannot be read as \.npy: .*write it again with numpy\.save"):
        open_volume(path)
    saved(path, (7, 9, 11))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(VolumeError, match=r"v\.npy cannot be read as \.npy"):
        open_volume(path)
    saved(path, (7, 9))
    with pytest.raises(VolumeError, match=r"v\.npy has 2 axes \(7, 9\), and a volume has 3"):
        open_volume(path)
    saved(path, (7, 9, 11))
    with pytest.raises(VolumeError, match="holds one array, so there is no dataset 'raw' to name"):
        open_volume(path, "raw")


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are listed on Linux only")
def test_nothing_stays_mapped(tmp_path: Path) -> None:
    saved(tmp_path / "v.npy", (7, 9, 11))
    with open_volume(tmp_path / "v.npy") as volume:
        volume.read(Box((0, 0, 0), (7, 9, 11)), np.zeros((1, 7, 9, 11), np.uint16))
        assert "v.npy" not in Path("/proc/self/maps").read_text()
