"""Reading TIFF: whatever tifffile writes, series and axes, places, missing strips, memory, and hostile files."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile

from tests.support.box_reads import assert_file_reads
from znnpy.errors import MissingExtraError, VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.base import MissingVoxels
from znnpy.volume.ome_xml import ome_xml, read_ome
from znnpy.volume.space import Space

SHAPE = (7, 37, 43)
COMPRESSIONS = ["lzw", "deflate", "adobe_deflate", "packbits", "zstd"]


def voxels(dtype: str, shape: tuple[int, ...] = SHAPE) -> npt.NDArray[Any]:
    return np.random.default_rng(8).integers(0, 100, shape).astype(dtype)


def written(path: Path, array: npt.NDArray[Any], **how: Any) -> npt.NDArray[Any]:
    tifffile.imwrite(path, array, **{"photometric": "minisblack", **how})
    return array


LAYOUTS: list[dict[str, Any]] = [{}, {"rowsperstrip": 5}, {"tile": (16, 32)}, {"bigtiff": True}, {"metadata": None}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">u2", ">f4", "<f2", "<f8", ">i4", "<u8", "<i8"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_plain_stacks_are_read(tmp_path: Path, dtype: str, layout: dict[str, Any], order: str) -> None:
    array = written(tmp_path / "v.tif", voxels(dtype), byteorder=order, **layout)
    assert_file_reads(tmp_path / "v.tif", array[None])


@pytest.mark.parametrize("predictor", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">u2", ">f4"])
def test_compressed_stacks_are_read(
    tmp_path: Path, dtype: str, compression: str, layout: dict[str, Any], predictor: bool
) -> None:
    if predictor and compression == "packbits":
        predictor = False
    path = tmp_path / "v.tiff"
    array = written(
        path,
        voxels(dtype),
        compression=compression,
        predictor=predictor,
        byteorder=dtype[0] if dtype != "u1" else "<",
        **layout,
    )
    assert_file_reads(path, array[None])


@pytest.mark.parametrize("compression", [None, "lzw"])
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_colours_are_channels(tmp_path: Path, planar: str, compression: str | None) -> None:
    array = voxels("u1", (4, 3, 37, 43))
    stored = np.moveaxis(array, 1, -1) if planar == "contig" else array
    written(
        tmp_path / "v.tif",
        np.ascontiguousarray(stored),
        photometric="rgb",
        planarconfig=planar,
        tile=(16, 16),
        compression=compression,
    )
    assert_file_reads(tmp_path / "v.tif", np.moveaxis(array, 1, 0))


def test_jpeg_is_read_as_the_library_does(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    written(path, voxels("u1"), compression="jpeg", tile=(32, 32))
    assert_file_reads(path, tifffile.imread(path)[None])
    written(path, voxels("u1", (4, 37, 43, 3)), photometric="rgb", compression="jpeg", tile=(32, 32))
    assert_file_reads(path, np.moveaxis(tifffile.imread(path), -1, 0))


@pytest.mark.parametrize("axes", ["TCZYX", "TZCYX", "CTZYX", "ZCTYX"])
def test_axes_of_ome_are_honoured(tmp_path: Path, axes: str) -> None:
    sizes = {"T": 2, "C": 3, "Z": 4, "Y": 37, "X": 43}
    path = tmp_path / "v.ome.tif"
    array = written(
        path,
        voxels("u2", tuple(sizes[axis] for axis in axes)),
        metadata={
            "axes": axes,
            "PhysicalSizeX": 4.0,
            "PhysicalSizeXUnit": "nm",
            "PhysicalSizeY": 8.0,
            "PhysicalSizeYUnit": "nm",
            "PhysicalSizeZ": 0.04,
        },
    )
    with pytest.raises(VolumeError, match=r"v\.ome\.tif has 2 points of time; choose one, from 0, with `time`"):
        open_volume(path)
    for time in range(2):
        expected = np.take(array.transpose([axes.index(axis) for axis in "TCZYX"]), time, 0)
        assert_file_reads(path, expected, time=time)
    with open_volume(path, time=0) as volume:
        assert volume.space == Space((0.04, 8.0, 4.0), units=("micrometer", "nanometer", "nanometer"))


def test_series_are_named_by_number_or_name(tmp_path: Path) -> None:
    path = tmp_path / "v.ome.tif"
    first, second, third = voxels("u1"), voxels("u2", (3, 20, 30)), voxels("u1", (1, 20, 30))
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(first, metadata={"axes": "ZYX", "Name": "raw"}, photometric="minisblack")
        file.write(second, metadata={"axes": "ZYX", "Name": "labels"}, photometric="minisblack")
        file.write(third, metadata={"axes": "ZYX", "Name": "thumbnail"}, photometric="minisblack")
    with pytest.raises(VolumeError, match=r"holds 2 datasets that could be the volume: 0 \(7x37x43 .*, 1 \(3x20x30"):
        open_volume(path)
    assert_file_reads(path, first[None], dataset="0")
    assert_file_reads(path, second[None], dataset="labels")
    assert_file_reads(path, third[None], dataset="thumbnail")
    assert_file_reads(path, third[None], dataset="2")
    with pytest.raises(VolumeError, match="has no dataset 'x'; it holds 0"):
        open_volume(path, "x")


def test_pages_of_another_size_are_another_series(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    array = voxels("u1")
    with tifffile.TiffWriter(path) as file:
        for plane in array:
            file.write(plane, photometric="minisblack", metadata=None)
            file.write(plane[::2, ::2], photometric="minisblack", metadata=None, subfiletype=1)
        file.write(plane[:9, :9], photometric="minisblack", metadata=None)
    assert_file_reads(path, array[None])


def test_stacks_of_imagej_are_read(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    array = voxels("u2", (2, 4, 3, 37, 43))
    tifffile.imwrite(
        path,
        array,
        imagej=True,
        resolution=(1 / 0.25, 1 / 0.5),
        metadata={"axes": "TZCYX", "spacing": 3.0, "unit": "um"},
    )
    for time in range(2):
        assert_file_reads(path, array[time].swapaxes(0, 1), time=time)
    with open_volume(path, time=0) as volume:
        assert volume.space == Space((3.0, 0.5, 0.25), units=("micrometer",) * 3)


def test_slices_without_directories_follow_the_first(tmp_path: Path) -> None:
    """ImageJ and tifffile write large stacks with one directory."""
    path = tmp_path / "v.tif"
    array = written(path, voxels("u2"), truncate=True)
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == 1
    assert_file_reads(path, array[None])
    path.write_bytes(path.read_bytes()[:-10])
    with open_volume(path) as volume, pytest.raises(VolumeError, match=r"v\.tif is damaged in the page"):
        volume.read(Box((0, 0, 0), SHAPE), np.empty((1, *SHAPE), np.uint16))


def test_shape_of_several_axes_is_channels_and_slices(tmp_path: Path) -> None:
    array = written(tmp_path / "v.tif", voxels("u2", (3, 4, 37, 43)))
    assert_file_reads(tmp_path / "v.tif", array)
    array = written(tmp_path / "v.tif", voxels("u2", (4, 3, 37, 43)), metadata={"axes": "ZCYX"})
    assert_file_reads(tmp_path / "v.tif", array.swapaxes(0, 1))
    array = written(tmp_path / "v.tif", voxels("u2", (4, 37, 43)), metadata={"axes": "QYX"})
    assert_file_reads(tmp_path / "v.tif", array[None])


def test_single_page_is_one_slice(tmp_path: Path) -> None:
    array = written(tmp_path / "v.tif", voxels("u2", (37, 43)))
    assert_file_reads(tmp_path / "v.tif", array[None, None])


def test_strips_that_are_not_stored_are_zeros_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    array = written(path, voxels("u1"), rowsperstrip=10, metadata=None)
    with tifffile.TiffFile(path, mode="r+") as file:
        offsets = list(file.pages[3].dataoffsets)
        file.pages[3].tags["StripOffsets"].overwrite([offsets[0], 0, *offsets[2:]])
    array[3, 10:20] = 0
    assert_file_reads(path, array[None])
    with open_volume(path, missing_voxels=MissingVoxels(chunks="error")) as volume:
        volume.read(Box((0, 0, 0), (3, 37, 43)), np.empty((1, 3, 37, 43), np.uint8))
        with pytest.raises(VolumeError, match=r"lacks voxels of the slice .*, or leave out missing_chunks='error'"):
            volume.read(Box((0, 0, 0), SHAPE), np.empty((1, *SHAPE), np.uint8))


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "v.tif", voxels("u1"))
    written(tmp_path / "w.tif", voxels("u1"), compression="lzw")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    open_volume(tmp_path / "v.tif").close()  # plain ones need none
    with pytest.raises(MissingExtraError, match=r"needs the packages tifffile and imagecodecs; `pip install "):
        open_volume(tmp_path / "w.tif")


CHILD = """
import re, sys
import numpy as np
from pathlib import Path
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.volume import open_volume
def peak():
    return 1024 * int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
small = open_volume(Path(sys.argv[1]))
volume = open_volume(Path(sys.argv[2]))
out = np.ones((1, 2, 64, 64), volume.dtype)
small.read(Box((0, 0, 0), (2, 64, 64)), out)
before = peak()
for at in (0, 2000):
    volume.read(Box((0, at, at), (2, at + 64, at + 64)), out)
print(peak() - before, volume.extra_bytes + READER_BYTES)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "predictor", "dtype"), [("lzw", True, ">u2"), ("deflate", False, "<u2"), ("zstd", True, "<u2")]
)
def test_memory_of_unpacking_is_as_promised(tmp_path: Path, compression: str, predictor: bool, dtype: str) -> None:
    """One strip has all 18 MiB of a page."""
    rng = np.random.default_rng(1)
    how = {"compression": compression, "predictor": predictor, "byteorder": dtype[0], "metadata": None}
    written(tmp_path / "s.tif", rng.integers(0, 999, (2, 64, 64)).astype(dtype), rowsperstrip=64, **how)
    written(tmp_path / "v.tif", rng.integers(0, 65535, (2, 3072, 3072)).astype(dtype), rowsperstrip=3072, **how)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "s.tif"), str(tmp_path / "v.tif")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    grown, promised = map(int, done.stdout.split())
    assert 2**24 < grown <= promised


def damaged(path: Path, tag: str, value: Any, page: int = 0) -> None:
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages[page].tags[tag].overwrite(value)


@pytest.mark.parametrize(
    ("tag", "value", "said"),
    [
        ("ImageWidth", 0, "has 37 rows of 0 pixels"),
        ("ImageWidth", 2**32 - 1, "has an axis of 4,294,967,295 voxels"),
        ("ImageLength", 10**7, "strips or tiles of|cut short|has an axis of"),
        ("SamplesPerPixel", 0, "of 0 samples"),
        ("BitsPerSample", 12, "it has 12 bits a sample of format 2; store 8, 16 or 32 bits"),
        ("SampleFormat", 5, "holds complex"),
        ("SampleFormat", 6, "holds complex"),
        ("SampleFormat", 9, "of format 9"),
        ("Compression", 34712, "has the compression 34712, and only LZW, deflate, PackBits, zstd, JPEG are read"),
    ],
)
def test_hostile_fields_are_refused(tmp_path: Path, tag: str, value: int, said: str) -> None:
    path = tmp_path / "v.tif"
    written(path, voxels("i1"), metadata=None, rowsperstrip=10)
    for page in range(SHAPE[0]):
        damaged(path, tag, value, page)
    with pytest.raises(VolumeError, match=said):
        open_volume(path)


@pytest.mark.parametrize(
    ("compression", "tag", "value"),
    [
        (None, "StripOffsets", 2**32 - 5),
        (None, "StripByteCounts", 3),
        ("lzw", "StripOffsets", 2**32 - 5),
        ("lzw", "StripByteCounts", 2**31),
        ("lzw", "StripByteCounts", 3),
    ],
)
def test_strips_outside_of_the_file_are_refused(tmp_path: Path, tag: str, value: int, compression: str | None) -> None:
    path = tmp_path / "v.tif"
    written(path, voxels("u1"), metadata=None, compression=compression)
    damaged(path, tag, value, 2)
    with (
        open_volume(path) as volume,
        pytest.raises(VolumeError, match=r"v\.tif is damaged in the page"),
    ):
        volume.read(Box((0, 0, 0), SHAPE), np.empty((1, *SHAPE), np.uint8))


def test_pages_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    head = struct.pack("<2sHI", b"II", 42, 8)
    entry = struct.pack("<2HII", 256, 3, 1, 5) + struct.pack("<2HII", 257, 3, 1, 5)
    entry += struct.pack("<2HII", 273, 4, 1, 8) + struct.pack("<2HII", 279, 4, 1, 5)
    path.write_bytes(head + struct.pack("<H", 4) + entry + struct.pack("<I", 8))
    with pytest.raises(VolumeError, match="its pages are a circle"):
        open_volume(path)


PIXELS = '<Pixels DimensionOrder="XYZCT" SizeX="43" SizeY="37" SizeZ="7" SizeC="1" SizeT="1">'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<!DOCTYPE a [<!ENTITY b "c">]><OME >&b;</OME>', "has a document type, and such are not read"),
        ("<OME ><Image>", "its OME-XML is damaged"),
        ("<OME ></OME>", "its OME-XML names no pages of this file"),
        (f"<OME ><Image>{PIXELS}</Pixels></Image></OME>", "names no pages of this file"),
        (f"<OME ><Image>{PIXELS.replace('XYZCT', 'XZYCT')}<TiffData/></Pixels></Image></OME>", "has the order xzyct"),
        (f"<OME ><Image>{PIXELS.replace('43', '44')}<TiffData/></Pixels></Image></OME>", "page 0 has 37 x 43 pixels"),
        (f"<OME ><Image>{PIXELS.replace('43', '-4')}<TiffData/></Pixels></Image></OME>", "has the number '-4'"),
        (f"<OME ><Image>{PIXELS.replace('43', '0')}<TiffData/></Pixels></Image></OME>", "has the sizes"),
        (
            f"<OME ><Image>{PIXELS.replace(chr(34) + '7', chr(34) + '999999999')}<TiffData/></Pixels></Image></OME>",
            "has 999,999,999 planes, and up to 1,000,000 are read",
        ),
        (f'<OME ><Image>{PIXELS}<TiffData FirstZ="7"/></Pixels></Image></OME>', r"has a plane \(0, 0, 7\) of"),
        (
            f'<OME ><Image>{PIXELS}<Channel SamplesPerPixel="3"/><TiffData/></Pixels></Image></OME>',
            "has 1 channels, of which 3 lie in each page",
        ),
        (
            f'<OME UUID="a"><Image>{PIXELS}<TiffData><UUID FileName="b.tif">b</UUID></TiffData></Pixels></Image></OME>',
            "its planes lie in several files",
        ),
    ],
)
def test_hostile_ome_xml_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "v.tif"
    written(path, voxels("u1"), description=text, metadata=None)
    with pytest.raises(VolumeError, match=said):
        open_volume(path)


def test_renamed_ome_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    text = f'<OME ><Image>{PIXELS}<TiffData><UUID FileName="old.tif">urn:1</UUID></TiffData></Pixels></Image></OME>'
    array = written(path, voxels("u1"), description=text, metadata=None)
    assert_file_reads(path, array[None])


def test_bits_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "v.tif", voxels("u1") > 50, bitspersample=1, photometric="minisblack")
    with pytest.raises(VolumeError, match=r"holds bool voxels, .*; store it as uint8"):
        open_volume(tmp_path / "v.tif")


def test_planes_that_ome_xml_does_not_name_are_zeros(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    text = f'<OME ><Image>{PIXELS}<TiffData IFD="2" FirstZ="1" PlaneCount="2"/></Pixels></Image></OME>'
    array = written(path, voxels("u1"), description=text, metadata=None)
    expected = np.zeros_like(array)
    expected[1:3] = array[2:4]
    assert_file_reads(path, expected[None])


def test_ome_xml_that_is_written_is_read() -> None:
    space = Space((40.0, 8.0, 4.0), (1.0, -2.0, 3.0), ("nanometer",) * 3)
    (image,), own = read_ome(ome_xml('a <name> & "more"', (3, 4, 5, 6), "uint8", space))
    assert (image.name, image.space, own) == ('a <name> & "more"', space, None)
    assert image.sizes == {"x": 6, "y": 5, "z": 4, "c": 3, "t": 1}


def test_jpeg_of_a_huge_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    written(path, voxels("u1"), compression="jpeg", metadata=None)
    content = bytearray(path.read_bytes())
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = b"\xff\xf0\xff\xf0"
    path.write_bytes(content)
    with open_volume(path) as volume, pytest.raises(VolumeError, match=r"has a JPEG of 65,520 x 65,520 pixels"):
        volume.read(Box((0, 0, 0), SHAPE), np.empty((1, *SHAPE), np.uint8))


@pytest.mark.parametrize(
    "content", [b"", b"II", b"II*\0\0\0\0\0", b"II*\0\xff\xff\0\0", b"MM\0+\0\x08\0\0", b"\x89HDF\r\n\x1a\n"]
)
def test_files_without_pages_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v.tif"
    path.write_bytes(content)
    with pytest.raises(VolumeError, match=r"v\.tif cannot be read as TIFF: .*; write it again"):
        open_volume(path)
