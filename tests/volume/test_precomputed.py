"""Precomputed volumes, which tensorstore and CloudVolume write here: every encoding, shards, scales, damage."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.volume.test_n5 import READ
from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.base import Chunks, MissingVoxels, Volume

ts = pytest.importorskip("tensorstore")

SHAPE = (21, 35, 40)
OFFSET = [100, -7, 3]
SHARDING = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "preshift_bits": 1,
    "hash": "identity",
    "minishard_bits": 1,
    "shard_bits": 1,
    "minishard_index_encoding": "gzip",
    "data_encoding": "gzip",
}
BLOCK = {"compressed_segmentation_block_size": [8, 8, 8]}


def noise(dtype: str, channels: int = 1) -> npt.NDArray[Any]:
    return np.random.default_rng(6).integers(1, 200, (channels, *SHAPE)).astype(dtype)


def made(path: Path, voxels: npt.NDArray[Any], encoding: str = "raw", **settings: Any) -> Path:
    """Write (c, z, y, x) voxels in chunks of 8x16x16."""
    scale = {
        "size": list(voxels.shape[:0:-1]),
        "chunk_size": [16, 16, 8],
        "encoding": encoding,
        "resolution": [4, 5, 40],
        "voxel_offset": OFFSET,
        **(BLOCK if encoding == "compressed_segmentation" else {}),
        **settings,
    }
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"data_type": voxels.dtype.name, "num_channels": len(voxels), "type": "image"},
        "scale_metadata": scale,
    }
    ts.open(spec, create=True, open=True).result()[...] = voxels.T
    return path


def changed(path: Path, **values: Any) -> Path:
    """Return the volume after its metadata, or those of its first scale, were changed."""
    document = json.loads((path / "info").read_text())
    for key, value in values.items():
        (document if key in document else document["scales"][0])[key] = value
    (path / "info").write_text(json.dumps(document))
    return path


def whole(volume: Volume) -> npt.NDArray[Any]:
    out = np.full(volume.shape, 77, volume.dtype)
    volume.expect(Box((0, 0, 0), volume.size))
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


def decoded(path: Path) -> npt.NDArray[Any]:
    """Read everything with tensorstore itself."""
    spec = {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{path}/"}}
    found: npt.NDArray[Any] = ts.open(spec, open=True).result().read().result().T
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["files", "shards"])
@pytest.mark.parametrize(
    ("encoding", "dtype", "channels"),
    [
        ("raw", "uint8", 1),
        ("raw", "uint16", 2),
        ("raw", "int32", 1),
        ("raw", "float32", 3),
        ("raw", "uint64", 1),
        ("png", "uint8", 1),
        ("png", "uint16", 1),
        ("jpeg", "uint8", 1),
        ("jpeg", "uint8", 3),
        ("compressed_segmentation", "uint32", 1),
        ("compressed_segmentation", "uint64", 1),
    ],
)
def test_boxes_of_every_encoding_are_equal(
    tmp_path: Path, encoding: str, dtype: str, channels: int, sharded: bool
) -> None:
    voxels = noise(dtype, channels)
    path = made(tmp_path / "v.precomputed", voxels, encoding, **({"sharding": SHARDING} if sharded else {}))
    expected = decoded(path)
    if encoding != "jpeg":
        np.testing.assert_array_equal(expected, voxels)
    with open_volume(path) as volume:
        assert (volume.shape, volume.dtype, volume.chunk_size) == (voxels.shape, np.dtype(dtype), (8, 16, 16))
        np.testing.assert_array_equal(whole(volume), expected)
        assert volume.chunks == Chunks(0, 27)
        rng = np.random.default_rng(3)
        for _ in range(10):
            lo = rng.integers(0, SHAPE)
            hi = rng.integers(lo, SHAPE) + 1
            box = Box((int(lo[0]), int(lo[1]), int(lo[2])), (int(hi[0]), int(hi[1]), int(hi[2])))
            out = np.full((channels, *box.size), 77, dtype)
            volume.read(box, out)
            np.testing.assert_array_equal(out, expected[(slice(None), *box.slices)])
        assert volume.space is not None
        assert (volume.space.scale, volume.space.translation) == ((40, 5, 4), (120, -35, 400))
        assert volume.space.units == ("nanometer",) * 3
        assert volume.identity() == volume.identity()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("encoding", "dtype"), [("raw", "uint8"), ("compressed_segmentation", "uint64")])
def test_volumes_of_cloud_volume_are_equal(tmp_path: Path, encoding: str, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cloud_volume = importlib.import_module("cloudvolume")
        except ImportError:
            pytest.skip("cloud-volume is not installed")
    voxels = noise(dtype)
    place = f"file://{tmp_path}/v.precomputed"
    info = cloud_volume.CloudVolume.create_new_info(
        num_channels=1,
        layer_type="segmentation" if dtype == "uint64" else "image",
        data_type=dtype,
        encoding=encoding,
        resolution=[4, 5, 40],
        voxel_offset=OFFSET,
        chunk_size=[16, 16, 8],
        volume_size=SHAPE[::-1],
    )
    written = cloud_volume.CloudVolume(place, info=info, compress=False, progress=False, bounded=False)
    written.commit_info()
    written[:, :, :] = voxels.T
    with open_volume(place) as volume:
        np.testing.assert_array_equal(whole(volume), voxels)
    packed = cloud_volume.CloudVolume(place, info=info, compress="gzip", progress=False)
    for file in (tmp_path / "v.precomputed").glob("4_5_40/*"):
        file.unlink()
    packed[:, :, :] = voxels.T
    with open_volume(place) as volume, pytest.raises(VolumeError, match=r"\.gz is compressed as a whole file, which"):
        whole(volume)


def test_resolutions_are_chosen(tmp_path: Path) -> None:
    path = tmp_path / "v.precomputed"
    made(path, noise("uint8"))
    made(path, noise("uint8")[:, ::2], resolution=[4, 5, 80], voxel_offset=[0, 0, 0])
    with open_volume(f"precomputed://file://{path}", scale=1) as volume:
        np.testing.assert_array_equal(whole(volume), noise("uint8")[:, ::2])
        assert volume.space is not None
        assert volume.space.scale == (80, 5, 4)
    with pytest.raises(VolumeError, match="holds 2 resolutions, from 0 to 1, and no 5; give another `scale`"):
        open_volume(path, scale=5)
    with pytest.raises(VolumeError, match="holds one image, so there is no dataset 'raw' to name: choose a resolution"):
        open_volume(path, "raw")
    with pytest.raises(VolumeError, match="has no points of time: leave out `time`"):
        open_volume(path, time=1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data_type": "complex64"}, "data_type is complex64, and must be one of uint8"),
        ({"num_channels": 0}, "num_channels is 0, and must be from 1 to 10,000"),
        ({"scales": []}, r"scales is \[\], and must be 1 to 100 objects"),
        ({"scales": [7]}, r"scales is \[7\], and must be"),
        ({"size": [40, 35]}, r"size is \[40, 35\] of an array of 3 axes"),
        ({"size": [40, 35, 2**40]}, "has an axis of 1,099,511,627,776 voxels"),
        ({"chunk_sizes": []}, r"chunk_sizes is \[\] of an array of 3 axes"),
        ({"chunk_sizes": [[0, 1, 1]]}, r"chunk_sizes is \[0, 1, 1\], and must be whole numbers from 1"),
        ({"voxel_offset": [0.5, 0, 0]}, r"voxel_offset is \[0\.5, 0, 0\], and must be 3 whole numbers"),
        ({"key": "../other"}, r"key is \.\./other, and must be the name of a folder below"),
        ({"key": "/etc"}, "key is /etc, and must be the name"),
        ({"encoding": "fpzip"}, "is encoded as fpzip, and only raw, jpeg, png, compressed_segmentation are read"),
        ({"sharding": {"@type": "x"}}, "sharding is x, and must be neuroglancer_uint64_sharded_v1"),
        ({"sharding": {**SHARDING, "minishard_bits": 61}}, "minishard_bits is 61, and must be from 0 to 60"),
        ({"sharding": {**SHARDING, "hash": "md5"}}, "the hash of sharding is md5"),
        ({"sharding": {**SHARDING, "data_encoding": "zip"}}, "data_encoding is zip, and must be raw or gzip"),
    ],
    ids=range(16),
)
def test_damaged_metadata_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(VolumeError, match=said):
        open_volume(changed(made(tmp_path / "v.precomputed", noise("uint8")), **values))


def test_folders_without_metadata_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.precomputed"
    with pytest.raises(VolumeError, match=r"there is no folder .*v\.precomputed; check the path"):
        open_volume(path)
    path.mkdir()
    with pytest.raises(VolumeError, match="is not precomputed: it holds no file info; check the path"):
        open_volume(path)
    (path / "info").write_text("[]")
    with pytest.raises(VolumeError, match="info holds no JSON object; copy it again"):
        open_volume(path)
    (path / "info").unlink()
    os.mkfifo(path / "info")
    with pytest.raises(VolumeError, match="info cannot be read: it is a pipe, a socket or a device"):
        open_volume(path)


def test_missing_and_damaged_chunks(tmp_path: Path) -> None:
    path = made(tmp_path / "v.precomputed", noise("uint8"))
    name = "4_5_40/116-132_9-25_11-19"
    expected = noise("uint8")
    expected[:, 8:16, 16:32, 16:32] = 0
    (path / name).unlink()
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume), expected)
        assert volume.chunks == Chunks(1, 27)
    with pytest.raises(VolumeError, match=rf"{name} is missing; write it, or leave out missing_chunks='error'"):
        whole(open_volume(path, missing_voxels=MissingVoxels(chunks="error")))
    (path / name).write_bytes(b"short")
    with pytest.raises(VolumeError, match=rf"chunk \(1, 1, 1, 0\) in .*{name} is damaged: "):
        whole(open_volume(path))
    expected[:, 8:16, 16:32, 16:32] = 9
    with open_volume(path, missing_voxels=MissingVoxels(fill=9)) as volume:
        np.testing.assert_array_equal(whole(volume), expected)
        assert volume.chunks == Chunks(0, 27, damaged=1)


def test_chunks_missing_in_shards_are_counted(tmp_path: Path) -> None:
    voxels = noise("uint8")
    voxels[:, 8:] = 0
    path = made(tmp_path / "v.precomputed", voxels, sharding=SHARDING)
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume), voxels)
        assert volume.chunks == Chunks(18, 27)
    with pytest.raises(VolumeError, match=r"v\.precomputed holds no chunk that begins at \(0, 0, 8, 0\); write it, or"):
        whole(open_volume(path, missing_voxels=MissingVoxels(chunks="error")))


@pytest.mark.slow
def test_images_of_another_size_take_no_memory(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    paths = [made(tmp_path / "good.precomputed", noise("uint8"))]
    for encoding in ("jpeg", "png"):
        paths.append(made(tmp_path / f"{encoding}.precomputed", noise("uint8"), encoding))
        image.new("L", (8_000, 8_000)).save(paths[-1] / "large", encoding)
        (paths[-1] / "large").replace(paths[-1] / "4_5_40/100-116_-7-9_3-11")
    done = subprocess.run([sys.executable, "-c", READ, *paths], check=True, capture_output=True, text=True)
    first, *messages, memory = done.stdout.splitlines()
    assert first == "read"
    for message in messages:
        assert "is damaged: Image dimensions (8000, 8000, 1) are not compatible with expected chunk shape" in message
    assert int(memory) < 32
