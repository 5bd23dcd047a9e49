"""Reading folders of TIFF slices: their order, gaps in their numbers, and slices that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from tests.support.box_reads import assert_file_reads
from znnpy.errors import VolumeError
from znnpy.volume import open_volume
from znnpy.volume.slices import natural_key

SHAPE = (12, 19, 23)


def written(folder: Path, name: str = "slice{}.tif", count: int = 12, **how: Any) -> npt.NDArray[np.uint16]:
    folder.mkdir(exist_ok=True)
    array = np.random.default_rng(9).integers(0, 60000, (count, 19, 23)).astype(np.uint16)
    for number, plane in enumerate(array):
        tifffile.imwrite(folder / name.format(number), plane, **how)
    return array


@pytest.mark.parametrize("how", [{}, {"compression": "lzw"}, {"tile": (16, 16)}, {"bigtiff": True}], ids=str)
@pytest.mark.parametrize("name", ["slice{}.tif", "{:04}.TIFF", "a1_z{}_c0.ome.tif"])
def test_slices_are_read_in_natural_order(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    array = written(tmp_path / "stack", name, **how)
    (tmp_path / "stack" / "notes.txt").write_text("not a slice")
    assert_file_reads(tmp_path / "stack", array[None])


def test_slices_packed_in_several_ways_are_one_volume(tmp_path: Path) -> None:
    array = written(tmp_path, byteorder="<")
    tifffile.imwrite(tmp_path / "slice3.tif", array[3], compression="zstd")
    tifffile.imwrite(tmp_path / "slice4.tif", array[4], byteorder=">")
    assert_file_reads(tmp_path, array[None])


def test_colours_are_channels(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 255, (5, 19, 23, 3)).astype(np.uint8)
    for number, plane in enumerate(array):
        tifffile.imwrite(tmp_path / f"{number}.tif", plane, photometric="rgb")
    assert_file_reads(tmp_path, np.moveaxis(array, -1, 0))


def test_numbers_in_names_are_compared_by_value() -> None:
    names = ["s10.tif", "s2.tif", "s1.tif", "s02.tif", "t.tif", "s.tif"]
    assert sorted(names, key=natural_key) == ["s1.tif", "s02.tif", "s2.tif", "s10.tif", "s.tif", "t.tif"]


def test_gaps_in_the_numbers_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "slice7.tif").unlink()
    with pytest.raises(VolumeError, match=r"lacks slice 7, which should follow slice6\.tif; copy the folder again"):
        open_volume(tmp_path)
    for number in (1, 3, 5, 9, 11):
        (tmp_path / f"slice{number}.tif").unlink()
    open_volume(tmp_path).close()  # 0, 2, 4 and so on


@pytest.mark.parametrize(
    ("plane", "said"),
    [
        (
            np.zeros((19, 24), np.uint16),
            r"slice3\.tif has 19 x 24 pixels of uint16, and the first one has 19 x 23 pixels",
        ),
        (np.zeros((19, 23), np.int16), r"slice3\.tif has 19 x 23 pixels of int16"),
        (np.zeros((2, 19, 23), np.uint16), r"slice3\.tif has 2 pages, and a slice has one; name a stack by itself"),
    ],
)
def test_slices_that_differ_are_refused(tmp_path: Path, plane: npt.NDArray[Any], said: str) -> None:
    written(tmp_path)
    tifffile.imwrite(tmp_path / "slice3.tif", plane, photometric="minisblack")
    with pytest.raises(VolumeError, match=said):
        open_volume(tmp_path)


def test_damaged_and_mixed_folders_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "slice3.tif").write_bytes(b"II*")
    with pytest.raises(VolumeError, match=r"slice3\.tif cannot be read as TIFF"):
        open_volume(tmp_path)
    (tmp_path / "slice3.tif").rename(tmp_path / "slice3.tiff")
    with pytest.raises(VolumeError, match=r"of one suffix, and has 11 of \.tif, 1 of \.tiff"):
        open_volume(tmp_path)
    written(tmp_path / "more")
    with pytest.raises(VolumeError, match="there is no dataset 'raw' to name"):
        open_volume(tmp_path / "more", "raw")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VolumeError, match="empty"):
        open_volume(tmp_path / "empty")
