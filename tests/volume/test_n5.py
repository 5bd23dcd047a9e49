"""N5 volumes, which tensorstore writes here: every compression, smaller blocks at the end, scales, places, damage."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.base import Chunks, MissingVoxels, Volume

ts = pytest.importorskip("tensorstore")

SHAPE = (8, 6, 5)
VOXELS = np.random.default_rng(2).integers(1, 60_000, SHAPE).astype(np.uint16)
GZIP = {"type": "gzip"}
BLOSC = {"type": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}
COMPRESSIONS: list[dict[str, Any]] = [
    {"type": "raw"},
    GZIP,
    {"type": "gzip", "useZlib": True},
    {"type": "bzip2"},
    {"type": "xz"},
    {"type": "zstd"},
    BLOSC,
]
BOMB = 2**27  # bytes that a bomb unpacks to


def made(
    path: Path,
    name: str = "",
    voxels: npt.NDArray[Any] = VOXELS,
    compression: dict[str, Any] = GZIP,
    **attributes: Any,
) -> Path:
    """Write an array in blocks of (z, y, x) = (3, 4, 2) voxels, or of one in further axes."""
    metadata = {
        "dimensions": list(voxels.shape[::-1]),
        "blockSize": [2, 4, 3, 1, 1][: voxels.ndim],
        "dataType": voxels.dtype.name,
        "compression": compression,
    }
    folder = path / name
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{folder}/"}, "metadata": metadata}
    ts.open(spec, create=True).result()[...] = voxels.T
    change(folder, **attributes)
    for group in folder.parents:
        if path in (group, *group.parents) and group != folder:
            (group / "attributes.json").touch()
            (group / "attributes.json").write_text((group / "attributes.json").read_text() or "{}")
    return path


def change(folder: Path, **attributes: Any) -> Path:
    file = folder / "attributes.json"
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **attributes}))
    return folder


def whole(volume: Volume) -> npt.NDArray[Any]:
    out = np.full(volume.shape, 77, volume.dtype)
    volume.expect(Box((0, 0, 0), volume.size))
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint64", "float32", "float64"])
def test_boxes_of_every_compression_are_equal(tmp_path: Path, compression: dict[str, Any], dtype: str) -> None:
    voxels = VOXELS.astype(dtype)
    with open_volume(made(tmp_path / "v.n5", voxels=voxels, compression=compression)) as volume:
        assert (volume.size, volume.dtype, volume.chunk_size) == (SHAPE, np.dtype(dtype), (3, 4, 2))
        np.testing.assert_array_equal(whole(volume)[0], voxels)
        assert volume.chunks == Chunks(0, 18)
        rng = np.random.default_rng(3)
        for _ in range(20):
            lo = rng.integers(0, SHAPE)
            hi = rng.integers(lo, SHAPE) + 1
            box = Box((int(lo[0]), int(lo[1]), int(lo[2])), (int(hi[0]), int(hi[1]), int(hi[2])))
            out = np.full((1, *box.size), 77, dtype)
            volume.read(box, out)
            np.testing.assert_array_equal(out[0], voxels[box.slices])
        assert volume.files == (tmp_path / "v.n5", tmp_path / "v.n5")
        assert volume.identity() == volume.identity()


def test_channels_and_points_of_time_follow_the_axes_of_space(tmp_path: Path) -> None:
    voxels = np.stack([np.stack([VOXELS, VOXELS + 1]), np.stack([VOXELS + 2, VOXELS + 3])])
    with open_volume(made(tmp_path / "channels.n5", voxels=voxels[0])) as volume:
        np.testing.assert_array_equal(whole(volume), voxels[0])
    path = made(tmp_path / "times.n5", voxels=voxels)
    with open_volume(path, time=1) as volume:
        np.testing.assert_array_equal(whole(volume), voxels[1])
    with pytest.raises(VolumeError, match="2 points of time; choose one, from 0, with `time`"):
        open_volume(path)
    change(path, axes=["x", "y", "z", "t", "rgb"])
    with pytest.raises(VolumeError, match="has an axis 'rgb' of length 2, and only z, y, x, c"):
        open_volume(path, time=0)


def test_axes_of_the_metadata_are_followed(tmp_path: Path) -> None:
    path = change(made(tmp_path / "v.n5"), axes=["z", "y", "x"], resolution=[1, 2, 3], units=["nm", "um", "mm"])
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], VOXELS.T)
        assert volume.space is not None
        assert (volume.space.scale, volume.space.units) == ((1, 2, 3), ("nm", "um", "mm"))


def test_resolutions_of_an_image_are_chosen(tmp_path: Path) -> None:
    path = tmp_path / "v.n5"
    for number in range(3):
        made(path, f"image/s{number}", VOXELS[:: 2**number])
    with open_volume(path) as volume:
        assert (volume.dataset, volume.size) == ("image/s0", SHAPE)
    for where, dataset in ((path, "image"), (path, None)):
        with open_volume(where, dataset, scale=2) as volume:
            np.testing.assert_array_equal(whole(volume)[0], VOXELS[::4])
    with open_volume(f"{path}::image/s1") as volume:
        assert volume.size == (4, 6, 5)
    with pytest.raises(VolumeError, match="holds 3 resolutions, from 0 to 2, and no 3; give another `scale`"):
        open_volume(path, scale=3)
    made(path, "mask")
    with pytest.raises(VolumeError, match=r"holds 4 datasets that could be the volume: image/s0 \(5x6x8 uint16\)"):
        open_volume(path)
    with pytest.raises(VolumeError, match="holds one resolution: leave out scale=1"):
        open_volume(path, "mask", scale=1)
    with pytest.raises(VolumeError, match="no dataset 'other'; it holds "):
        open_volume(path, "other")


@pytest.mark.parametrize(
    ("own", "group", "scale", "translation", "units"),
    [
        ({"resolution": [4, 5, 40], "units": "nm"}, {}, (40, 5, 4), (0, 0, 0), ("nm",) * 3),
        ({"resolution": [4, 5, 40], "units": ["nm", "um", "mm"]}, {}, (40, 5, 4), (0, 0, 0), ("mm", "um", "nm")),
        ({"resolution": [4, 5, 40], "offset": [8, 0, 80]}, {}, (40, 5, 4), (80, 0, 8), (None,) * 3),
        ({"resolution": [4, 5, 40], "translate": [8, 0, 80]}, {}, (40, 5, 4), (80, 0, 8), (None,) * 3),
        ({"pixelResolution": [4, 5, 40]}, {}, (40, 5, 4), (0, 0, 0), (None,) * 3),
        (
            {"pixelResolution": {"dimensions": [4, 5, 40], "unit": "nm"}, "downsamplingFactors": [2, 2, 1]},
            {},
            (40, 10, 8),
            (0, 2.5, 2),
            ("nm",) * 3,
        ),
        (
            {},
            {
                "pixelResolution": {"dimensions": [4, 5, 40], "unit": "nm"},
                "downsamplingFactors": [[1, 1, 1], [4, 2, 1]],
            },
            (40, 10, 16),
            (0, 2.5, 6),
            ("nm",) * 3,
        ),
        (
            {
                "transform": {
                    "axes": ["z", "y", "x"],
                    "scale": [40, 5, 4],
                    "translate": [80, 0, 8],
                    "units": ["nm"] * 3,
                }
            },
            {},
            (40, 5, 4),
            (80, 0, 8),
            ("nm",) * 3,
        ),
    ],
)
def test_place_of_voxels_is_read(
    tmp_path: Path, own: dict[str, Any], group: dict[str, Any], scale: Any, translation: Any, units: Any
) -> None:
    path = made(tmp_path / "v.n5", "s1", **own)
    change(path, **group)
    with open_volume(path, "s1") as volume:
        assert volume.space is not None
        assert (volume.space.scale, volume.space.translation, volume.space.units) == (scale, translation, units)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"resolution": [4, 5]},
        {"resolution": [4, 5, 0]},
        {"resolution": [4, 5, "6"]},
        {"resolution": {"x": 1}},
        {"pixelResolution": {"dimensions": None}},
        {"transform": {"axes": ["q"], "scale": [1]}},
    ],
    ids=range(7),
)
def test_damaged_place_is_ignored(tmp_path: Path, own: dict[str, Any]) -> None:
    with open_volume(made(tmp_path / "v.n5", **own)) as volume:
        assert volume.space is None


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"dimensions": [5, 6, "8"]}, r"dimensions is \[5, 6, '8'\], and must be whole numbers from 0 to"),
        ({"blockSize": [2, 4]}, r"blockSize is \[2, 4\] of an array of 3 axes"),
        ({"blockSize": [2, 0, 4]}, r"blockSize is \[2, 0, 4\], and must be whole numbers from 1"),
        ({"dataType": "text"}, r"holds object \(object\) voxels|holds object"),
        ({"compression": None}, "compression is None"),
        ({"compression": {"type": "lz4"}}, "is compressed with lz4, and only raw, gzip, bzip2, xz, blosc, zstd are"),
        ({"compression": {"type": "gzip", "level": "9"}}, "cannot be opened: "),
        ({"dimensions": [2**40, 6, 8]}, "has an axis of 1,099,511,627,776 voxels"),
    ],
    ids=range(8),
)
def test_damaged_metadata_is_refused(tmp_path: Path, attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(VolumeError, match=said):
        open_volume(change(made(tmp_path / "v.n5"), **attributes))


@pytest.mark.parametrize("compression", [GZIP, BLOSC], ids=["gzip", "blosc"])
def test_missing_and_damaged_blocks(tmp_path: Path, compression: dict[str, Any]) -> None:
    path = made(tmp_path / "v.n5", compression=compression)
    expected = VOXELS.copy()
    expected[3:6, 4:6, 2:4] = 0
    (path / "1/1/1").unlink()
    with open_volume(path) as volume:
        np.testing.assert_array_equal(whole(volume)[0], expected)
        assert volume.chunks == Chunks(1, 18)
    with pytest.raises(VolumeError, match=r"1/1/1 is missing; write it, or leave out missing_chunks='error'"):
        whole(open_volume(path, missing_voxels=MissingVoxels(chunks="error")))
    content = (path / "0/0/0").read_bytes()
    (path / "0/0/0").write_bytes(content[: len(content) - 9])
    with pytest.raises(VolumeError, match=r"chunk \(0, 0, 0\) in .*v\.n5/0/0/0 is damaged: .*, or give `fill_missing`"):
        whole(open_volume(path))
    expected[3:6, 4:6, 2:4] = expected[:3, :4, :2] = 33
    with open_volume(path, missing_voxels=MissingVoxels(fill=33)) as volume:
        np.testing.assert_array_equal(whole(volume)[0], expected)
        assert volume.chunks == Chunks(1, 18, damaged=1)
    with pytest.raises(VolumeError, match=r"holds uint16 voxels, which cannot hold 0\.5; give another `fill_missing`"):
        open_volume(path, missing_voxels=MissingVoxels(fill=0.5))
    (path / "0/0/0").unlink()
    os.mkfifo(path / "0/0/0")
    with pytest.raises(VolumeError, match=r"0/0/0 cannot be read: it is a pipe, a socket or a device"):
        whole(open_volume(path))


# Reads the volumes that are named, first a good one; prints errors and how far the peak of memory rose, in MiB.
READ = """
import sys
import numpy as np
from pathlib import Path
from znnpy.errors import VolumeError
from znnpy.machine import peak_bytes
from znnpy.patches import Box
from znnpy.volume import open_volume
for number, path in enumerate(sys.argv[1:]):
    if number == 1:
        before = peak_bytes()
    volume = open_volume(Path(path))
    try:
        volume.read(Box((0, 0, 0), volume.size), np.zeros(volume.shape, volume.dtype))
        print("read")
    except VolumeError as error:
        print(error)
print((peak_bytes() - before) >> 20)
"""


@pytest.mark.slow
def test_blocks_unpacking_to_too_much_take_no_memory(tmp_path: Path) -> None:
    numcodecs = pytest.importorskip("numcodecs")
    zeros = bytes(BOMB)
    header = struct.pack(">HHIII", 0, 3, 2, 4, 3)
    bombs = {
        "gzip": gzip.compress(zeros, 1),
        "bzip2": bz2.compress(zeros),
        "xz": lzma.compress(zeros, preset=0),
        "zstd": numcodecs.Zstd().encode(zeros),
        "blosc": numcodecs.Blosc().encode(zeros),
    }
    paths = [made(tmp_path / "good.n5")]
    for name, bomb in bombs.items():
        paths.append(made(tmp_path / f"{name}.n5", compression=BLOSC if name == "blosc" else {"type": name}))
        (paths[-1] / "0/0/0").write_bytes(header + bomb)
    paths.append(made(tmp_path / "large.n5"))  # whose header states a large block
    (paths[-1] / "0/0/0").write_bytes(struct.pack(">HHIII", 0, 3, 1024, 1024, 64) + bombs["gzip"])
    paths.append(made(tmp_path / "long.n5", compression=BLOSC))  # in the mode with a number of elements
    (paths[-1] / "0/0/0").write_bytes(struct.pack(">HHIIII", 1, 3, 2, 4, 3, 24) + bombs["blosc"])
    done = subprocess.run([sys.executable, "-c", READ, *paths], check=True, capture_output=True, text=True)
    first, *messages, memory = done.stdout.splitlines()
    assert first == "read"
    for message in messages:
        assert re.search(r"chunk \(0, 0, 0\) in .* is damaged: ", message), message
    assert len(messages) == 7
    assert int(memory) < 32
