"""Zarr folders that are damaged or hostile: one sentence, and nothing is waited for; missing chunks are counted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.base import Chunks, MissingVoxels, Volume

zarr = pytest.importorskip("zarr")
codecs = pytest.importorskip("zarr.codecs")

Change = Callable[[dict[str, Any]], object]


def whole(volume: Volume) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = np.full(volume.shape, 77, volume.dtype)
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


def made(path: Path, dtype: str = "u2", zarr_format: int = 3, **arguments: Any) -> Path:
    array = zarr.create_array(
        path, shape=(8, 6, 5), chunks=(4, 3, 5), dtype=dtype, zarr_format=zarr_format, **arguments
    )
    array[...] = np.arange(1, 241).reshape(8, 6, 5)
    return path


def changed(path: Path, change: Change) -> Path:
    """Return the metadata of an array, changed."""
    file = path / "zarr.json" if (path / "zarr.json").exists() else path / ".zarray"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(VolumeError, match=message):
        open_volume(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "shape",
            ["8", "6", "5"],
            r"shape is \['8', '6', '5'\], and must be whole numbers from 0 to 9,223,372,036,854,775,807",
        ),
        ("shape", [8.0, 6, 5], r"shape is \[8\.0, 6, 5\], and must be"),
        ("shape", [True, 6, 5], r"shape is \[True, 6, 5\], and must be"),
        ("shape", [-8, 6, 5], r"shape is \[-8, 6, 5\], and must be"),
        ("shape", [2**63, 6, 5], rf"shape is \[{2**63}, 6, 5\], and must be"),
        ("shape", [2**62, 6, 5], rf"has an axis of {2**62:,} voxels, and up to 10,000,000 are read"),
        ("shape", None, "shape is None"),
        ("chunks", [0, 3, 5], r"is \[0, 3, 5\], and must be whole numbers from 1 to 9,223,372,036,854,775,807"),
        ("chunks", [4, 3], r"is \[4, 3\] of an array of 3 axes"),
        ("chunks", [4.5, 3, 5], r"is \[4\.5, 3, 5\], and must be whole numbers"),
        ("fill_value", "NaN", 'fill_value is "NaN", which is not a uint16'),
        ("fill_value", 65536, "fill_value is 65536, which is not a uint16"),
        ("fill_value", [0], r"fill_value is \[0\], which is not a uint16"),
        ("zarr_format", 4, "zarr_format is 4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_invalid_metadata_is_refused(tmp_path: Path, zarr_format: int, key: str, value: Any, said: str) -> None:
    def change(document: dict[str, Any]) -> None:
        if key == "chunks" and zarr_format == 3:
            document["chunk_grid"]["configuration"]["chunk_shape"] = value
        else:
            document[key] = value

    refused(changed(made(tmp_path / "v.zarr", zarr_format=zarr_format), change), rf"v\.zarr.* {said}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(fill_value=None), "fill_value is null, which is not a uint16"),
        (lambda d: d.update(data_type=[{"name": "a"}]), "holds compound"),
        (lambda d: d.update(data_type="struct"), "holds object"),
        (lambda d: d.update(codecs=None), "codecs is None"),
        (lambda d: d.update(codecs=[]), r"codecs is \[\]"),
        (lambda d: d.update(codecs=[{"name": "nonsense"}]), "is stored with the codec nonsense, and only bytes, "),
        (lambda d: d.update(codecs=[{"name": "sharding_indexed"}]), "configuration is None"),
        (lambda d: d.update(node_type="leaf"), "node_type is leaf"),
        (lambda d: d.update(attributes=7), "zarr_format is 3"),
        (lambda d: d.update(chunk_grid={"name": "odd"}), "only regular grids are read"),
    ],
    ids=range(10),
)
def test_invalid_metadata_of_format_3_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    refused(changed(made(tmp_path / "v.zarr"), change), said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(dtype=[["a", "<u2"]]), "holds compound"),
        (lambda d: d.update(dtype="<q9"), "dtype is <q9"),
        (lambda d: d.update(dtype="|O"), "holds object"),
        (lambda d: d.update(compressor="zstd"), "compressor is zstd"),
        (lambda d: d.update(compressor={"id": "nonsense"}), "is compressed with nonsense, and only blosc, bz2, "),
        (lambda d: d.update(filters=[{"id": 7}]), "is stored with filters, which are not read"),
        (lambda d: d.update(order="Q"), "order is Q, and must be C or F"),
    ],
    ids=range(7),
)
def test_invalid_metadata_of_format_2_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    refused(changed(made(tmp_path / "v.zarr", zarr_format=2), change), said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "cannot be read as JSON: "),
        (b"[]", "holds no JSON object"),
        (b"\xff\xfe\x00", "cannot be read as JSON: "),
        (b"", "cannot be read as JSON: "),
    ],
    ids=["nested", "list", "bytes", "empty"],
)
def test_metadata_without_an_object_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = made(tmp_path / "v.zarr")
    (path / "zarr.json").write_bytes(content)
    refused(path, rf"zarr\.json {said}")


def test_metadata_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr")
    os.truncate(path / "zarr.json", 2**30)
    refused(path, r"zarr\.json has more than 4,194,304 bytes, which metadata never need; copy it again")


@pytest.mark.parametrize("name", ["zarr.json", "c/0/0/0"])
def test_pipes_are_refused_without_waiting(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "v.zarr")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(VolumeError, match=rf"{name} cannot be read: it is a pipe, a socket or a device"):
        whole(open_volume(path))


def test_folder_or_huge_file_as_chunk_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr")
    os.truncate(path / "c/0/0/0", 2**24)
    with pytest.raises(VolumeError, match=r"c/0/0/0 is damaged: the file holds 16,777,216 bytes where at most 1,048,"):
        whole(open_volume(path))
    (path / "c/0/0/0").unlink()
    (path / "c/0/0/0").mkdir()
    with pytest.raises(VolumeError, match=r"c/0/0/0 cannot be read: Is a directory; copy the folder again"):
        whole(open_volume(path))


def test_cyclic_links_are_refused(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "v.zarr", mode="w")
    group.create_group("a")
    (tmp_path / "v.zarr/a/b").symlink_to(tmp_path / "v.zarr")
    refused(tmp_path / "v.zarr", "holds no 3D or 4D dataset of numbers and no other dataset")


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_missing_chunks_in_the_box_are_counted_once(tmp_path: Path, zarr_format: int, sharded: bool) -> None:
    if sharded and zarr_format == 2:
        return
    arguments: dict[str, Any] = {"shards": (8, 3, 5)} if sharded else {}
    path = made(tmp_path / "v.zarr", zarr_format=zarr_format, fill_value=9, **arguments)
    expected = np.arange(1, 241).reshape(8, 6, 5)
    name = {2: "0.1.0", 3: "c/0/1/0"}[zarr_format]
    (path / name).unlink()
    expected[: 8 if sharded else 4, 3:] = 9
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], expected)
        assert volume.chunks == Chunks(0, 0)
        volume.expect(Box((0, 0, 0), (4, 6, 5)))
        for _ in range(2):
            np.testing.assert_array_equal(whole(volume)[0], expected)
            assert volume.chunks == Chunks(1, 2)
    with open_volume(path, None, MissingVoxels(chunks="error")) as volume:
        volume.expect(Box((0, 0, 0), (8, 3, 5)))
        volume.read(Box((0, 0, 0), (8, 3, 5)), np.zeros((1, 8, 3, 5), np.uint16))
        with pytest.raises(VolumeError, match=rf"{name} is missing; write it, or leave out missing_chunks='error'"):
            volume.expect(Box((0, 0, 0), (8, 4, 5)))  # before anything is read
        with pytest.raises(VolumeError, match=rf"{name} is missing; write it, or leave out missing_chunks='error'"):
            whole(volume)
    (path / name).write_bytes((path / name.replace("1", "0")).read_bytes())
    with open_volume(path, None, MissingVoxels(chunks="error")) as volume:
        volume.expect(Box((0, 0, 0), (8, 6, 5)))
        (path / name).unlink()
        with pytest.raises(VolumeError, match=rf"{name} is missing; write it, or leave out missing_chunks='error'"):
            whole(volume)


@pytest.mark.parametrize("index_location", ["start", "end"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("checked", [True, False])
def test_missing_chunks_within_shards_are_counted(
    tmp_path: Path, index_location: str, endian: str, checked: bool
) -> None:
    """2x2x1 chunks of 4x3x5 voxels in a shard; of the second shard one chunk is empty, and the third is not there."""
    index_codecs = [codecs.BytesCodec(endian=endian), *([codecs.Crc32cCodec()] if checked else [])]
    chunks = codecs.ShardingCodec(chunk_shape=(4, 3, 5), index_codecs=index_codecs, index_location=index_location)
    array = zarr.create_array(
        tmp_path / "v.zarr", shape=(24, 5, 5), chunks=(8, 6, 5), serializer=chunks, compressors=None, dtype="u2"
    )
    voxels = np.arange(1, 601, dtype=np.uint16).reshape(24, 5, 5)
    voxels[12:16, :3] = 0
    voxels[16:] = 0
    array[...] = voxels
    assert not (tmp_path / "v.zarr/c/2/0/0").exists()
    with open_volume(tmp_path / "v.zarr") as volume:
        for box, missing, looked in (
            (Box((0, 0, 0), (24, 5, 5)), 5, 12),
            (Box((0, 0, 0), (15, 5, 5)), 1, 8),
            (Box((9, 3, 0), (24, 5, 5)), 2, 4),
            (Box((12, 1, 1), (13, 2, 2)), 1, 1),
        ):
            volume.expect(box)
            for _ in range(2):
                found = np.ones((1, *box.size), np.uint16)
                volume.read(box, found)
                np.testing.assert_array_equal(found[0], voxels[box.slices])
            assert volume.chunks == Chunks(missing, looked)
    with open_volume(tmp_path / "v.zarr", None, MissingVoxels(chunks="error")) as volume:
        box = Box((0, 0, 0), (16, 5, 5))
        volume.expect(box)
        message = r"c/1/0/0 holds no chunk that begins at \(12, 0, 0\); write it, or leave out missing_chunks='error'"
        for _ in range(2):
            with pytest.raises(VolumeError, match=message):
                volume.read(box, np.ones((1, 16, 5, 5), np.uint16))
        volume.read(Box((0, 0, 0), (8, 5, 5)), np.ones((1, 8, 5, 5), np.uint16))


def test_damaged_index_of_a_shard_counts_no_missing_chunk(tmp_path: Path) -> None:
    """The numbers of the first chunk say that it is not there, and the checksum says that they are wrong."""
    path = made(tmp_path / "v.zarr", shards=(8, 6, 5))
    shard = path / "c/0/0/0"
    content = bytearray(shard.read_bytes())
    content[-4 - 4 * 16 : -4 - 3 * 16] = b"\xff" * 16
    shard.write_bytes(content)
    with open_volume(path, None, MissingVoxels(chunks="error")) as volume:
        volume.expect(Box((0, 0, 0), (8, 6, 5)))
        with pytest.raises(VolumeError, match=r"chunk \(0, 0, 0\) in .* is damaged: .*Digest mismatch"):
            whole(volume)


def test_nested_shards_are_read_without_counting_missing_chunks(tmp_path: Path) -> None:
    """Shards in shards are read, their missing chunks count as being there, and they are refused if none may miss."""
    inner = codecs.ShardingCodec(chunk_shape=(2, 3, 5))
    outer = codecs.ShardingCodec(chunk_shape=(4, 3, 5), codecs=[inner])
    array = zarr.create_array(
        tmp_path / "v.zarr", shape=(8, 6, 5), chunks=(8, 6, 5), serializer=outer, compressors=None, dtype="u2"
    )
    array[:2] = np.ones((2, 6, 5))
    with open_volume(tmp_path / "v.zarr") as volume:
        volume.expect(Box((0, 0, 0), (8, 6, 5)))
        assert whole(volume).sum() == 60
        assert volume.chunks.missing == 0
    message = r"chunks that are missing within its shards are not found here; leave out missing_chunks='error'"
    volume = open_volume(tmp_path / "v.zarr", None, MissingVoxels(chunks="error"))
    with pytest.raises(VolumeError, match=message):
        volume.expect(Box((0, 0, 0), (8, 6, 5)))


def test_null_fill_value_means_no_fill_value(tmp_path: Path) -> None:
    path = changed(made(tmp_path / "v.zarr", zarr_format=2), lambda d: d.update(fill_value=None))
    np.testing.assert_array_equal(whole(open_volume(path))[0], np.arange(1, 241).reshape(8, 6, 5))
    (path / "1.0.0").unlink()
    with pytest.raises(VolumeError, match=r"1\.0\.0 is missing, and the fill value of the array is null; write the"):
        whole(open_volume(path))


def image(path: Path, axes: list[Any], steps: list[Any], **more: Any) -> Path:
    """Write an OME-Zarr image of format 0.4 in two sizes, (t, c, z, y, x)."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, size in (("0", (1, 1, 8, 6, 5)), ("1", (1, 1, 4, 3, 3))):
        array = group.create_array(
            name, shape=size, chunks=(1, 1, 4, 3, 5), dtype="u1", chunk_key_encoding={"name": "v2", "separator": "/"}
        )
        array[...] = np.arange(np.prod(size)).reshape(size)
    datasets = [{"path": "0", "coordinateTransformations": steps}, {"path": "1"}]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets, **more}]
    return path


AXES = [{"name": name, "type": "space", "unit": "nanometer"} for name in "tczyx"]


def test_finest_scale_of_an_image_is_chosen(tmp_path: Path) -> None:
    steps = [{"type": "scale", "scale": [1, 1, 40, 4, 4]}, {"type": "translation", "translation": [0, 0, 80, 0, 2]}]
    path = image(
        tmp_path / "v.zarr", AXES, steps, coordinateTransformations=[{"type": "scale", "scale": [1, 1, 2, 1, 1]}]
    )
    with open_volume(path) as volume:
        assert (volume.dataset, volume.shape) == ("0", (1, 8, 6, 5))
        np.testing.assert_array_equal(whole(volume)[0], np.arange(240).reshape(8, 6, 5))
        assert volume.space is not None
        assert (volume.space.scale, volume.space.translation) == ((80, 4, 4), (160, 0, 2))
        assert (volume.space.units, volume.space.axes) == (("nanometer",) * 3, ("t", "c", "z", "y", "x"))
    with open_volume(path, "1") as volume:
        assert volume.size == (4, 3, 3)
        assert volume.space is not None
        assert volume.space.scale == (2, 1, 1)  # of the whole image


@pytest.mark.parametrize(
    ("axes", "steps"),
    [
        (AXES[:4], []),
        ([*AXES[:4], {"name": "y", "type": "space"}], []),
        (AXES, [{"type": "scale", "scale": [1, 1, 40, 4]}]),
        (AXES, [{"type": "scale", "scale": [1, 1, 40, 4, "4"]}]),
        (AXES, [{"type": "scale", "scale": [1, 1, 40, 4, 0]}]),
        (AXES, [{"type": "rotate"}]),
        (AXES, [{"type": ["scale"]}]),
        ("tczyx", []),
    ],
    ids=range(8),
)
def test_unreadable_scale_is_ignored(tmp_path: Path, axes: Any, steps: Any) -> None:
    with open_volume(image(tmp_path / "v.zarr", axes, steps)) as volume:
        assert volume.space is None
        assert volume.dataset == "0"


def test_too_many_arrays_and_groups_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from znnpy.volume import zarr_nodes

    monkeypatch.setattr(zarr_nodes, "MOST_NODES", 5)
    group = zarr.open_group(tmp_path / "v.zarr", mode="w")
    for number in range(5):
        group.create_group(f"g{number}")
    refused(tmp_path / "v.zarr", re.escape("v.zarr holds more than 5 arrays and groups; name a folder inside it"))
