"""TIFF, NIfTI and MRC outputs: other libraries read them, resumed ones are whole, and what does not fit is refused."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import mrcfile
import nibabel
import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from tests.support.box_reads import assert_file_reads, random_boxes
from tests.support.stored_outputs import stored
from znnpy.errors import OutputError, ResumeError
from znnpy.patches import Box
from znnpy.volume import nifti_store, open_volume, raw_store, tiff_store
from znnpy.volume.output import Output
from znnpy.volume.registry import store_for
from znnpy.volume.space import Space
from znnpy.volume.store import OutputArray, Storage

SIZE = (5, 43, 37)
SPACE = Space((40.0, 8.0, 4.0), (100.0, -16.0, 12.0), ("nanometer",) * 3)
NAMES = ["out.ome.tif", "out.tiff", "out.nii", "out.mrc", "out.rec"]
HELD = [
    (name, maps, dtype)
    for name in NAMES
    for maps in (1, 3)
    for dtype in ("float32", "float16", "uint8")
    if (".nii" not in name or dtype != "float16")
    and ("ti" in name or ".nii" in name or (maps == 1 and dtype != "uint8"))
]
WHOLE = Box((0, 0, 0), SIZE)


def voxels(maps: int, dtype: str, seed: int = 1) -> npt.NDArray[Any]:
    return (np.random.default_rng(seed).random((maps, *SIZE)) * 255).astype(dtype)


def made(
    path: Path, maps: int = 1, dtype: str = "float32", space: Space | None = SPACE, **attributes: Any
) -> npt.NDArray[Any]:
    """Write an output in random boxes that overlap, by two stores, as a resumed run does."""
    arrays, kind = [OutputArray((maps, *SIZE), attributes=attributes, space=space)], np.dtype(dtype)
    expected = voxels(maps, dtype)
    store_for(path).check(kind, Storage())
    store_for(path).check_arrays(arrays)
    store_for(path).create(path, arrays, kind, {"job": "{}", "znnpy_run": "0123456789abcdef"})
    size = path.stat().st_size
    for boxes in (random_boxes(SIZE)[1:], [Box((0, 0, 0), (5, 20, 37)), Box((0, 20, 0), SIZE)]):
        store = store_for(path)(path, arrays, kind)
        for box in boxes:
            store.write(box, expected[(slice(None), *box.slices)])
        store.sync()
        assert store.is_still_there()
        store.close()
    assert path.stat().st_size == size
    return expected


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiff_store, "TILE", 32)


@pytest.mark.parametrize("run_bytes", [64, 2**20])
@pytest.mark.parametrize(("name", "maps", "dtype"), HELD)
@pytest.mark.usefixtures("small_tiles")
def test_other_libraries_read_what_is_written(
    tmp_path: Path, name: str, maps: int, dtype: str, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_store, "RUN_BYTES", run_bytes)
    path = tmp_path / name
    expected = made(path, maps, dtype)
    found = stored(path)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected if maps > 1 else expected[0])
    assert_file_reads(path, expected)


@pytest.mark.parametrize("name", NAMES)
def test_place_and_attributes_are_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    made(path, voxel_offset=np.array([1, 2, 3]))
    kept = store_for(path).attributes_of(path)
    assert kept["voxel_offset"] == [1, 2, 3]
    assert kept["resolution"] == [40, 8, 4]
    assert store_for(path).run_of(path) == "0123456789abcdef"
    with open_volume(path) as volume:
        assert volume.space is not None
        factor = {"nanometer": 1, "micrometer": 1e-3, "angstrom": 10}[volume.space.units[0] or ""]
        np.testing.assert_allclose(volume.space.scale, np.array(SPACE.scale) * factor, rtol=1e-6)
        np.testing.assert_allclose(volume.space.translation, np.array(SPACE.translation) * factor, rtol=1e-6)


def test_libraries_know_the_place(tmp_path: Path) -> None:
    made(tmp_path / "v.nii", 3)
    image = nibabel.load(tmp_path / "v.nii")
    np.testing.assert_allclose(
        image.affine, np.array([[4, 0, 0, 12], [0, 8, 0, -16], [0, 0, 40, 100], [0, 0, 0, 1e3]]) / 1e3
    )
    assert image.header.get_xyzt_units()[0] == "micron"
    assert image.header.get_intent()[0] == "vector"
    assert image.shape == (37, 43, 5, 1, 3)
    (extension,) = image.header.extensions
    assert extension.get_code() == 6
    made(tmp_path / "v.mrc")
    with mrcfile.open(tmp_path / "v.mrc") as file:
        assert file.voxel_size.tolist() == (40.0, 80.0, 400.0)
        assert file.header.origin.tolist() == (120.0, -160.0, 1000.0)
        assert file.is_volume()
    made(tmp_path / "v.tif", 3)
    with tifffile.TiffFile(tmp_path / "v.tif") as file:
        (series,) = file.series
        assert (file.is_ome, file.is_bigtiff, series.kind, series.axes, series.shape) == (
            True,
            True,
            "ome",
            "CZYX",
            (3, *SIZE),
        )
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        assert (pixels["PhysicalSizeZ"], pixels["PhysicalSizeZUnit"]) == (40.0, "nm")
        assert (pixels["Plane"]["PositionY"], pixels["Plane"]["PositionYUnit"]) == (-16.0, "nm")
        assert file.pages[0].is_tiled


def test_mrc_is_valid_but_for_its_own_extended_header(tmp_path: Path) -> None:
    made(tmp_path / "v.mrc")
    said = io.StringIO()
    mrcfile.validate(tmp_path / "v.mrc", print_file=said)
    _, *complaints = said.getvalue().splitlines()
    assert complaints == ["Extended header type is undefined or unrecognised: exttyp = 'ZNNP'"]


def test_large_axes_need_the_second_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nifti_store, "MOST_SHORT", 40)
    path = tmp_path / "v.nii"
    expected = made(path)
    image = nibabel.load(path)
    assert isinstance(image, nibabel.Nifti2Image)
    np.testing.assert_array_equal(np.asarray(image.dataobj).T, expected[0])
    assert_file_reads(path, expected)


TURNED = Space.turned(np.array([[3.2, -4.8, 0, 10], [2.4, 6.4, 0, 20], [0, 0, 40, 30]]), "millimeter")


def test_orientation_is_kept_by_nifti_and_said_to_be_lost_by_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert TURNED is not None
    made(tmp_path / "v.nii", space=TURNED)
    assert not caplog.records
    np.testing.assert_allclose(nibabel.load(tmp_path / "v.nii").affine[:3], np.array(TURNED.affine))
    for name in ("v.tif", "v.mrc"):
        caplog.clear()
        made(tmp_path / name, space=TURNED)
        (record,) = caplog.records
        assert "the axes of the volume are turned or mirrored in the specimen, which" in record.message


@pytest.mark.parametrize("name", ["v.tif", "v.nii", "v.mrc"])
def test_unknown_unit_is_said_to_be_lost(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path / name, space=Space((2.0, 1.0, 1.0), units=("parsec",) * 3))
    (record,) = caplog.records
    assert "cannot hold the unit of the voxel size (parsec), so it is left out" in record.message
    caplog.clear()
    for space in (None, Space((2.0, 1.0, 1.0))):
        (tmp_path / name).unlink()
        made(tmp_path / name, space=space)
    assert not caplog.records


@pytest.mark.parametrize("name", NAMES)
def test_damaged_output_is_not_resumed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    made(path)
    arrays, dtype = [OutputArray((1, *SIZE), space=SPACE)], np.dtype("f4")
    content = path.read_bytes()
    with pytest.raises(OutputError, match=r"holds \(1, 5, 43, 37\) float32, and this run writes \(1, 5, 43, 38\)"):
        store_for(path)(path, [OutputArray((1, 5, 43, 38), space=SPACE)], dtype)
    with pytest.raises(OutputError, match=r"holds .* float32, and this run writes .* uint8"):
        store_for(path)(path, arrays, np.dtype("u1"))
    path.write_bytes(content[:-1])
    with pytest.raises(ResumeError, match=r"is damaged \(it has [\d,]+ bytes of [\d,]+\)"):
        store_for(path)(path, arrays, dtype)
    for at in (4, 40, 100, 300):
        changed = bytearray(content)
        changed[at] ^= 255
        path.write_bytes(changed)
        with pytest.raises(ResumeError, match="is damaged"):
            store_for(path)(path, arrays, dtype)
    path.write_bytes(content)
    os.link(path, tmp_path / "another")
    with pytest.raises(OSError, match=r"has 2 names \(hard links\)"):
        store_for(path)(path, arrays, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_output_has_no_attributes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kind = store_for(path)
    assert kind.attributes_of(path) == {}
    for content in (b"", b"II", os.urandom(3000)):
        path.write_bytes(content)
        assert kind.attributes_of(path) == {}
    with pytest.raises(FileExistsError):
        kind.create(path, [OutputArray((1, *SIZE))], np.dtype("f4"), {})
    path.unlink()
    os.mkfifo(path)
    assert kind.attributes_of(path) == {}
    assert kind.run_of(path) is None


def output(path: Path, arrays: list[OutputArray], dtype: str = "float32") -> Output:
    return Output(path, inputs={}, arrays=arrays, dtype=np.dtype(dtype), mode="new", job={})


@pytest.mark.parametrize(
    ("name", "maps", "dtype", "said"),
    [
        (
            "v.nii",
            (1,),
            "float16",
            r"\.nii outputs hold float32 and uint8, and not float16; give output_dtype='float32', or",
        ),
        (
            "v.mrc",
            (1,),
            "uint8",
            r"\.mrc outputs hold float32 and float16, and not uint8; give output_dtype='float32', or",
        ),
        (
            "v.mrc",
            (3,),
            "float32",
            r"the output has 3 maps, and an MRC output holds one; give \.h5, \.zarr or \.tif",
        ),
        (
            "v.tif",
            (1, 2),
            "float32",
            r"the network has 2 outputs, and a \.tif output holds one; give \.h5 or \.zarr",
        ),
        (
            "v.nii.gz",
            (1,),
            "float32",
            r"v\.nii\.gz would be compressed as a whole, .*; give v\.nii in `out`",
        ),
        ("v.tif.zst", (1,), "float32", r"could not be resumed; give v\.tif in `out`"),
        ("v.st", (1,), "float32", r"has suffix '\.st', and only"),
        ("v.hdr", (1,), "float32", r"has suffix '\.hdr', and only"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_the_run(
    tmp_path: Path, name: str, maps: tuple[int, ...], dtype: str, said: str
) -> None:
    with pytest.raises(OutputError, match=said):
        output(tmp_path / name, [OutputArray((n, *SIZE)) for n in maps], dtype)


def test_short_writes_are_continued_and_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: pwrite(file, content[:50], at))
    expected = made(tmp_path / "v.nii")
    np.testing.assert_array_equal(stored(tmp_path / "v.nii"), expected[0])

    def full(file: int, content: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = store_for(tmp_path / "v.nii")(tmp_path / "v.nii", [OutputArray((1, *SIZE), space=SPACE)], np.dtype("f4"))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(WHOLE, expected)
    store.close()
