"""Reading NRRD: what pynrrd writes, detached voxels, gzip, kinds of axes, places in space, and hostile headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nrrd
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.box_reads import assert_file_reads
from znnpy.errors import VolumeError
from znnpy.volume import open_volume
from znnpy.volume.space import Space

SHAPE = (7, 9, 11)


def voxels(dtype: str, shape: tuple[int, ...] = SHAPE) -> npt.NDArray[Any]:
    return np.random.default_rng(7).integers(0, 100, shape).astype(dtype)


def written(path: Path, array: npt.NDArray[Any], **header: Any) -> npt.NDArray[Any]:
    """Write an array whose axes are in the order that numpy has them, the slowest first."""
    nrrd.write(str(path), array, {"encoding": "raw", **header}, index_order="C")
    return array


@pytest.mark.parametrize("name", ["v.nrrd", "v.nhdr"])
@pytest.mark.parametrize("encoding", ["raw", "gzip"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">u2", "<i4", ">u4", "<i8", "<u8", ">f4", "<f8"])
def test_files_of_another_library_are_read(tmp_path: Path, dtype: str, encoding: str, name: str) -> None:
    array = written(tmp_path / name, voxels(dtype), encoding=encoding, spacings=[4.0, 8.0, 40.0], units=["nm"] * 3)
    assert_file_reads(tmp_path / name, array[None])
    with open_volume(tmp_path / name) as volume:
        assert volume.space == Space((40.0, 8.0, 4.0), units=("nanometer",) * 3)
        assert len(volume.files) == (2 if name == "v.nhdr" else 1)
        assert volume.stored()[0] == sum(path.stat().st_size for path in volume.files)


def test_kinds_of_axes(tmp_path: Path) -> None:
    path = tmp_path / "v.nrrd"
    array = written(path, voxels("u2", (*SHAPE, 3)), kinds=["vector", "domain", "domain", "domain"])
    assert_file_reads(path, np.moveaxis(array, -1, 0))
    array = written(path, voxels("u2", (2, *SHAPE)), kinds=["space", "space", "space", "time"])
    with pytest.raises(VolumeError, match="has 2 points of time"):
        open_volume(path)
    assert_file_reads(path, array[1][None], time=1)
    assert_file_reads(path, written(path, voxels("u2", (2, *SHAPE))))  # no kinds: channels are the slowest


@pytest.mark.parametrize(
    ("space", "signs"),
    [("left-posterior-superior", (-1, -1, 1)), ("RAS", (1, 1, 1)), ("left-anterior-superior", (-1, 1, 1))],
)
def test_directions_become_those_of_nifti(tmp_path: Path, space: str, signs: tuple[int, ...]) -> None:
    path = tmp_path / "v.nrrd"
    directions = np.array([[3.2, 2.4, 0], [-4.8, 6.4, 0], [0, 0, 40]])
    written(
        path,
        voxels("u1"),
        **{"space": space, "space directions": directions, "space origin": [1.0, 2.0, 3.0], "space units": ["um"] * 3},
    )
    with open_volume(path) as volume:
        assert volume.space is not None
        affine = np.column_stack((directions.T, (1, 2, 3))) * np.array(signs)[:, None]
        np.testing.assert_allclose(np.array(volume.space.affine), affine)
        np.testing.assert_allclose(volume.space.scale, (40, 8, 4))
        assert volume.space.units == ("micrometer",) * 3


def test_directions_tell_channels(tmp_path: Path) -> None:
    path = tmp_path / "v.nrrd"
    directions = np.array([[np.nan] * 3, [4, 0, 0], [0, 8, 0], [0, 0, 40]])
    array = written(
        path, voxels("u2", (*SHAPE, 3)), **{"space": "RAS", "space directions": directions, "space origin": [1, 2, 3]}
    )
    assert_file_reads(path, np.moveaxis(array, -1, 0))
    with open_volume(path) as volume:
        assert volume.space == Space((40.0, 8.0, 4.0), (3.0, 2.0, 1.0))


HEADER = {"type": "uint8", "dimension": "3", "sizes": "4 4 4", "encoding": "raw"}


def with_header(path: Path, **fields: str | None) -> None:
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in {**HEADER, **fields}.items() if value is not None]
    path.write_bytes("\n".join(["NRRD0004", "# a comment", *lines, "key:=value: 3", "", ""]).encode() + bytes(64))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sizes": "4 4"}, "it has 2 sizes, and the dimension 3"),
        ({"sizes": "4 4 -4"}, "its sizes are"),
        ({"sizes": "4 4 5"}, "is cut short"),
        ({"sizes": None}, "its sizes are ''"),
        ({"sizes": "4 4 " + "9" * 40}, "its sizes are"),
        ({"sizes": f"4 4 {10**17}"}, "has an axis of 100,000,000,000,000,000 voxels"),
        ({"sizes": "4 4 0"}, "is empty"),
        ({"type": "block"}, "its type is 'block'"),
        ({"type": "int16"}, "its endian is '', not little or big"),
        ({"encoding": "hex"}, "has the encoding 'hex', and only raw and gzip are read; write it again as raw"),
        ({"encoding": "bz2"}, "has the encoding 'bz2'"),
        ({"encoding": "gzip", "byte_skip": "-1"}, "its byteskip is -1, which is for raw voxels alone"),
        ({"line_skip": "2"}, "has lines of text before its voxels"),
        ({"byte_skip": "x"}, "its byteskip is x"),
        ({"byte_skip": "3"}, "is cut short"),
        ({"kinds": "space space time"}, "has 4 points of time"),
        (
            {"dimension": "4", "sizes": "4 4 2 2", "kinds": "space space space domain"},
            "it has more than 3 axes of space",
        ),
        ({"data_file": "/etc/passwd"}, "has its voxels in /etc/passwd, and only files of its own folder are read"),
        ({"data_file": "../x.raw"}, r"has its voxels in \.\./x\.raw"),
        ({"data_file": "LIST"}, "has its voxels in several files; write it again in one"),
        ({"data_file": "x%03d.raw 1 4 1"}, "has its voxels in several files"),
        ({"data_file": "none.raw"}, r"there is no file .*none\.raw; check the path"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, fields: dict[str, str | None], said: str) -> None:
    path = tmp_path / "v.nrrd"
    with_header(path, **fields)
    with pytest.raises(VolumeError, match=said):
        open_volume(path)


def test_bytes_are_skipped_from_either_end(tmp_path: Path) -> None:
    path = tmp_path / "v.nrrd"
    for skip in ("-1", "5"):
        with_header(path, byte_skip=skip)
        array = voxels("u1", (4, 4, 4))
        path.write_bytes(path.read_bytes()[:-64] + b"12345" + array.tobytes())
        assert_file_reads(path, array[None])


@pytest.mark.parametrize("content", [b"", b"NRRD0009\n\n", b"NRRD", b"\xff" * 3000, b"NRRD0004\n" + b"#" * 2**20])
def test_files_without_a_header_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v.nrrd"
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=r"v\.nrrd cannot be read as NRRD: .*; write it again"):
        open_volume(path)


@pytest.mark.parametrize("spacings", ["nan 1 1", "0 1 1", "-1 1 1", "1 1", "x 1 1"])
def test_spacings_that_are_none_give_no_place(tmp_path: Path, spacings: str) -> None:
    path = tmp_path / "v.nrrd"
    with_header(path, spacings=spacings)
    with open_volume(path) as volume:
        assert volume.space is None
