"""Zarr arrays that zarr-python writes: every codec, order and name of axes, resolutions, damage; one box after another.

What the formats share is tested here for Zarr; tests of N5 and precomputed are beside it.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume, tensor_volume
from znnpy.volume.base import Chunks, MissingVoxels, Volume

zarr = pytest.importorskip("zarr")
codecs = pytest.importorskip("zarr.codecs")
numcodecs = pytest.importorskip("numcodecs")

SHAPE = (17, 22, 31)
CHUNK = (4, 8, 8)


def noise(dtype: str = "u2", shape: tuple[int, ...] = SHAPE) -> npt.NDArray[Any]:
    return np.random.default_rng(8).integers(1, 100, shape).astype(dtype)


def made(path: Path, voxels: npt.NDArray[Any] | None = None, **settings: Any) -> Path:
    voxels = noise() if voxels is None else voxels
    chunks = (1,) * (voxels.ndim - 3) + CHUNK
    array = zarr.create_array(path, **{"shape": voxels.shape, "chunks": chunks, "dtype": voxels.dtype, **settings})
    array[...] = voxels
    return path


def whole(volume: Volume) -> npt.NDArray[Any]:
    out = np.full(volume.shape, 77, volume.dtype)
    volume.expect(Box((0, 0, 0), volume.size))
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


def random_boxes(volume: Volume, expected: npt.NDArray[Any]) -> None:
    """Read boxes into parts of a larger array, whose other voxels must stay."""
    rng = np.random.default_rng(3)
    for _ in range(15):
        lo = rng.integers(0, volume.size)
        hi = rng.integers(lo, volume.size) + 1
        box = Box((int(lo[0]), int(lo[1]), int(lo[2])), (int(hi[0]), int(hi[1]), int(hi[2])))
        place = np.full((volume.channels, *(2 * n + 3 for n in box.size)), 77, volume.dtype)
        out = place[:, 1:-1:2, 2:-1:2, 1:-1:2][:, : box.size[0], : box.size[1], : box.size[2]]
        volume.read(box, out)
        np.testing.assert_array_equal(out, expected[(slice(None), *box.slices)])
        out[...] = 77
        assert (place == 77).all()


SETTINGS_2: list[dict[str, Any]] = [
    {"compressors": None},
    {"compressors": numcodecs.Zlib()},
    {"compressors": numcodecs.GZip()},
    {"compressors": numcodecs.BZ2()},
    {"compressors": numcodecs.Zstd()},
    *({"compressors": numcodecs.Blosc(cname=name)} for name in ("lz4", "lz4hc", "blosclz", "zstd", "zlib")),
    {"compressors": numcodecs.Blosc(shuffle=2), "order": "F"},
    {"order": "F", "chunk_key_encoding": {"name": "v2", "separator": "/"}},
]
SETTINGS_3: list[dict[str, Any]] = [
    {"compressors": None},
    {"compressors": codecs.GzipCodec()},
    {"compressors": codecs.ZstdCodec(checksum=True)},
    {"compressors": codecs.BloscCodec()},
    {"compressors": [codecs.BloscCodec(), codecs.Crc32cCodec()]},
    {"filters": codecs.TransposeCodec(order=(2, 0, 1))},
    {"chunk_key_encoding": {"name": "default", "separator": "."}},
    {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    {"shards": (8, 16, 16)},
    {"shards": (8, 16, 32), "compressors": codecs.BloscCodec()},
    {"shards": (8, 16, 16), "filters": codecs.TransposeCodec(order=(1, 2, 0)), "compressors": codecs.GzipCodec()},
]
EVERY = [*((2, settings) for settings in SETTINGS_2), *((3, settings) for settings in SETTINGS_3)]


@pytest.mark.parametrize(("version", "settings"), EVERY, ids=range(len(EVERY)))
@pytest.mark.parametrize("dtype", ["u1", ">u2", "<f4", ">f8", "<u8"])
def test_boxes_of_every_codec_are_equal(tmp_path: Path, version: int, settings: dict[str, Any], dtype: str) -> None:
    voxels = noise(dtype)
    with open_volume(made(tmp_path / "v.zarr", voxels, zarr_format=version, **settings)) as volume:
        np.testing.assert_array_equal(whole(volume)[0], voxels)
        assert volume.chunks == Chunks(0, 5 * 3 * 4)
        random_boxes(volume, voxels[None].astype(volume.dtype))
        assert volume.chunk_size == CHUNK


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u4", "f2"])
@pytest.mark.parametrize("version", [2, 3])
def test_other_types_are_equal(tmp_path: Path, version: int, dtype: str) -> None:
    voxels = noise(dtype)
    with open_volume(made(tmp_path / "v.zarr", voxels, zarr_format=version)) as volume:
        assert volume.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(whole(volume)[0], voxels)


@pytest.mark.parametrize(
    ("dtype", "fill"), [("f4", np.nan), ("f4", np.inf), ("f4", 1.5), ("f2", -1.5), ("i2", -7), ("u8", 2**64 - 1)]
)
@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_hold_the_fill_value(tmp_path: Path, version: int, dtype: str, fill: float) -> None:
    voxels = noise(dtype)
    path = made(tmp_path / "v.zarr", voxels, zarr_format=version, fill_value=fill)
    (path / ("1.2.3" if version == 2 else "c/1/2/3")).unlink()
    voxels[4:8, 16:, 24:] = fill
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], voxels)
        assert volume.chunks == Chunks(1, 60)
    with open_volume(path, missing_voxels=MissingVoxels(fill=3)) as volume:  # for damaged chunks alone
        np.testing.assert_array_equal(whole(volume)[0], voxels)


def test_given_value_stands_for_chunks_without_fill_value(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr", zarr_format=2)
    metadata = json.loads((path / ".zarray").read_text())
    (path / ".zarray").write_text(json.dumps({**metadata, "fill_value": None}))
    (path / "0.0.0").unlink()
    with pytest.raises(VolumeError, match="the fill value of the array is null; write the chunk or the value, or give"):
        whole(open_volume(path))
    expected = noise()
    expected[:4, :8, :8] = 12
    with open_volume(path, missing_voxels=MissingVoxels(fill=12)) as volume:
        np.testing.assert_array_equal(whole(volume)[0], expected)
        assert volume.chunks == Chunks(1, 60)


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("x", "y", "z"), (31, 22, 17)),
        (("c", "z", "y", "x"), (2, *SHAPE)),
        (("z", "y", "x", "channel"), (*SHAPE, 3)),
        (("time", "c", "z", "y", "x"), (2, 3, *SHAPE)),
        ((None, "z", "y", "x"), (1, *SHAPE)),
    ],
    ids=str,
)
@pytest.mark.parametrize("written", ["dimension_names", "xarray", "ome 0.4", "ome 0.5", "ome 0.6"])
def test_axes_are_found_by_name(
    tmp_path: Path, names: tuple[str | None, ...], shape: tuple[int, ...], written: str
) -> None:
    voxels, path = noise("u1", shape), tmp_path / "v.zarr"
    version = 2 if written in ("xarray", "ome 0.4") else 3
    group = zarr.open_group(path, mode="w", zarr_format=version)
    settings = {"dimension_names": names} if written == "dimension_names" else {}
    array = group.create_array("0", shape=shape, chunks=(5,) * len(shape), dtype="u1", **settings)
    array[...] = voxels
    if written == "xarray":
        array.attrs["_ARRAY_DIMENSIONS"] = [name or "dim_0" for name in names]
    if written.startswith("ome"):
        kinds = {"c": "channel", "channel": "channel", "time": "time"}
        axes = [{"name": name or "odd", "type": kinds.get(name or "", "space")} for name in names]
        step = {"type": "scale", "scale": [2] * len(names)}
        image: dict[str, Any] = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": [step]}]}
        if written == "ome 0.6":
            step = {"type": "sequence", "input": "0", "output": "world", "transformations": [step]}
            image = {
                "coordinateSystems": [{"name": "world", "axes": axes}],
                "datasets": [{"path": "0", "coordinateTransformations": [step]}],
            }
        if version == 2:
            group.attrs["multiscales"] = [image]
        else:
            group.attrs["ome"] = {"version": written[-3:], "multiscales": [image]}
    time = 1 if "time" in names else None
    expected = voxels
    if time is not None:
        expected = voxels[1]
    order = [name for name in names if name not in (None, "time")]
    expected = expected.reshape([n for n, name in zip(shape, names, strict=True) if name not in (None, "time")])
    wanted = [name for name in ("c", "channel", "z", "y", "x") if name in order]
    expected = expected.transpose([order.index(name) for name in wanted])
    with open_volume(path, time=time) as volume:
        found = whole(volume)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)
        random_boxes(volume, found)
        if written.startswith("ome"):
            assert volume.space is not None
            assert volume.space.scale == (2, 2, 2)
    if time is not None:
        with pytest.raises(VolumeError, match="2 points of time; choose one, from 0, with `time`"):
            open_volume(path)
        with pytest.raises(VolumeError, match="2 points of time, from 0 to 1, and no 2"):
            open_volume(path, time=2)


def test_unknown_axes_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr", noise("u1", (3, *SHAPE)), dimension_names=("phase", "z", "y", "x"))
    with pytest.raises(VolumeError, match="has an axis 'phase' of length 3, and only z, y, x, c"):
        open_volume(path)
    path = made(tmp_path / "w.zarr", noise("u1"), dimension_names=("dim_0", "dim_1", "dim_2"))
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], noise("u1"))


def test_resolution_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "v.zarr"
    group = zarr.open_group(path, mode="w")
    image = group.create_group("deep/image")
    for name, step in (("s0", 1), ("s1", 2)):
        image.create_array(name, data=noise()[::step, ::step, ::step], chunks=CHUNK)
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    image.attrs["ome"] = {
        "version": "0.5",
        "multiscales": [{"axes": axes, "datasets": [{"path": "s0"}, {"path": "s1"}]}],
    }
    with open_volume(path, scale=1) as volume:
        assert (volume.dataset, volume.size) == ("deep/image/s1", (9, 11, 16))
    with open_volume(path, "deep/image", scale=1) as volume:
        np.testing.assert_array_equal(whole(volume)[0], noise()[::2, ::2, ::2])
    with open_volume(f"{path}::deep/image") as volume:
        assert volume.dataset == "deep/image/s0"
    with pytest.raises(VolumeError, match="holds 2 resolutions, from 0 to 1, and no 7; give another `scale`"):
        open_volume(path, scale=7)
    with pytest.raises(VolumeError, match="holds one resolution: leave out scale=1"):
        open_volume(path, "deep/image/s0", scale=1)


@pytest.mark.parametrize("sharded", [False, True], ids=["files", "shards"])
def test_damaged_chunks_are_named_or_filled(tmp_path: Path, sharded: bool, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"shards": (8, 16, 16)} if sharded else {}
    path = made(tmp_path / "v.zarr", compressors=codecs.BloscCodec(), **settings)
    file = path / "c/0/0/0"
    content = bytearray(file.read_bytes())
    content[40:60] = bytes(20)
    file.write_bytes(content)
    with pytest.raises(VolumeError, match=r"chunk \(0, 0, 0\) in .*/c/0/0/0 is damaged: .*; copy the volume again, or"):
        whole(open_volume(path))
    expected = noise()
    expected[:4, :8, :8] = 5
    with caplog.at_level(logging.WARNING), open_volume(path, missing_voxels=MissingVoxels(fill=5)) as volume:
        for _ in range(2):
            volume.read(Box((0, 0, 0), volume.size), np.zeros(volume.shape, volume.dtype))
        np.testing.assert_array_equal(whole(volume)[0], expected)
        assert volume.chunks == Chunks(0, 60, damaged=1)
    assert "chunk (0, 0, 0)" in caplog.text
    assert "and was read as 5" in caplog.text


def test_entries_of_a_shard_are_checked(tmp_path: Path) -> None:
    """The index has no checksum, so that its numbers may say anything."""
    index_codecs = [codecs.BytesCodec(endian="little")]
    serializer = codecs.ShardingCodec(chunk_shape=CHUNK, codecs=[codecs.BytesCodec()], index_codecs=index_codecs)
    path = made(tmp_path / "v.zarr", chunks=(8, 16, 16), serializer=serializer, compressors=None)
    file = path / "c/0/0/0"
    content = file.read_bytes()
    for begin, length, said in (
        (2**40, 512, "it ends at byte 1,099,511,628,288 of a shard that has"),
        (2**64 - 1, 512, "it ends at byte"),
        (0, 2**30, "it ends at byte 1,073,741,824 of a shard"),
        (0, 100, ""),
    ):
        file.write_bytes(content[: -8 * 16] + struct.pack("<2Q", begin, length) + content[-7 * 16 :])
        with pytest.raises(VolumeError, match=rf"chunk \(0, 0, 0\) in .*/c/0/0/0 is damaged: {said}"):
            whole(open_volume(path))
    file.write_bytes(content[:50])
    with pytest.raises(VolumeError, match="is damaged: the file holds 50 bytes, and the index of a shard has 128"):
        whole(open_volume(path))


def test_links_to_files_are_followed_and_others_are_not_opened(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr")
    (path / "c/0/0/0").rename(tmp_path / "elsewhere")
    (path / "c/0/0/0").symlink_to(tmp_path / "elsewhere")
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], noise())
    (path / "c/0/0/0").unlink()
    (path / "c/0/0/0").symlink_to("/dev/zero")
    with pytest.raises(VolumeError, match=r"c/0/0/0 cannot be read: it is a pipe, a socket or a device"):
        whole(open_volume(path))


def test_many_pieces_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_volume, "PIECE_BYTES", 2 * 4 * 8 * 8 * 3)
    path = made(tmp_path / "v.zarr", fill_value=4)
    expected = noise()
    for z, y, x in ((0, 0, 0), (2, 1, 3), (4, 2, 3)):
        os.unlink(path / f"c/{z}/{y}/{x}")
        expected[4 * z : 4 * z + 4, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8] = 4
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], expected)
        random_boxes(volume, expected[None])
        assert volume.chunks == Chunks(3, 60)


def test_packed_blosc_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr", compressors=[codecs.BloscCodec(), codecs.GzipCodec()])
    with pytest.raises(VolumeError, match="is packed by blosc and gzip, and only once is read with blosc; write it"):
        open_volume(path)


@pytest.mark.parametrize("name", ["a b.zarr", "a#b?.zarr", "a%20b|c.zarr", "日本.zarr"])
def test_names_of_folders_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    with open_volume(made(tmp_path / "v.zarr").rename(tmp_path / name)) as volume:
        np.testing.assert_array_equal(whole(volume)[0], noise())


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.zarr"))
    with pytest.raises(VolumeError, match="has a name that is not UTF-8, which is not read; rename it"):
        open_volume(path)
