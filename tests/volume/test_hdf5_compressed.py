"""Chunks of HDF5 datasets that unpack to far more than a chunk has: one sentence with both sizes, and little memory."""

from __future__ import annotations

import bz2
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume

hdf5plugin = pytest.importorskip("hdf5plugin")

BOMB = 2**27  # bytes that a bomb unpacks to
MEMORY = 32  # MiB that reading them may take beside what a good chunk takes
CHUNK = 64**3
GOOD = (np.arange(CHUNK).reshape(64, 64, 64) >> 8).astype(np.uint8)
PLUGINS = {
    "blosc": hdf5plugin.Blosc,
    "lz4": hdf5plugin.LZ4,
    "zstd": hdf5plugin.Zstd,
    "bitshuffle": hdf5plugin.Bitshuffle,
    "blosc2": hdf5plugin.Blosc2,
    "bz2": hdf5plugin.BZip2,
}
CODECS = ["gzip", "gzip checksum", "lzf", *PLUGINS]

# Reads the volumes named on the command line; prints errors and how far the peak of memory rose after the first, MiB.
READ = """
import resource, sys
import numpy as np
from pathlib import Path
from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
out = np.zeros((1, 64, 64, 64), np.uint8)
for number, path in enumerate(sys.argv[1:]):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        open_volume(Path(path)).read(Box((0, 0, 0), (64, 64, 64)), out)
    except VolumeError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def arguments(codec: str) -> dict[str, Any]:
    """Arguments of h5py that pack a dataset so."""
    name, _, checksum = codec.partition(" ")
    how: dict[str, Any] = dict(PLUGINS[name]()) if name in PLUGINS else {"compression": name, "shuffle": True}
    return how | {"fletcher32": bool(checksum)}


def bomb(codec: str, folder: Path) -> bytes:
    if codec.startswith("gzip"):
        return zlib.compress(bytes(BOMB), 1) + bytes(4 if " " in codec else 0)
    if codec == "bz2":
        return bz2.compress(bytes(BOMB))
    if codec == "lzf":  # a zero, and long repetitions of it
        return b"\x00\x00" + b"\xe0\xff\x00" * 300_000
    with h5py.File(folder / "large.h5", "w") as file:
        large = file.create_dataset("x", (BOMB,), "u1", chunks=(BOMB,), **arguments(codec))
        large[:] = 0
        return large.id.read_direct_chunk((0,))[1]  # type: ignore[no-any-return]


def made(path: Path, codec: str, content: bytes | None = None) -> Path:
    """64x64x64 bytes in one chunk; `content`: as they are stored."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("main", (64, 64, 64), "u1", chunks=(64, 64, 64), **arguments(codec))
        if content is None:
            dataset[...] = GOOD
        else:
            dataset.id.write_direct_chunk((0, 0, 0), content)
    return path


@pytest.mark.slow
def test_chunks_unpacking_to_too_much_are_refused(tmp_path: Path) -> None:
    bad = [made(tmp_path / f"{codec}.h5", codec, bomb(codec, tmp_path)) for codec in CODECS]
    done = subprocess.run(
        [sys.executable, "-c", READ, made(tmp_path / "good.h5", "gzip"), *bad],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    *messages, memory = done.stdout.splitlines()
    for path, codec, message in zip(bad, CODECS, messages, strict=True):
        assert message.startswith(f"{path}: main: chunk (0, 0, 0) unpacks to "), message
        size = f"{BOMB:,}" if codec in set(PLUGINS) - {"bz2"} else "at least 1,048,"
        assert f"unpacks to {size}" in message
        assert f", and a chunk of the dataset has {CHUNK:,}; it is damaged: copy the file again" in message
    assert int(memory) < MEMORY


@pytest.mark.parametrize("codec", CODECS)
def test_valid_chunks_are_read(tmp_path: Path, codec: str) -> None:
    with open_volume(made(tmp_path / "v.h5", codec)) as volume:
        out = np.zeros(volume.shape, volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
    np.testing.assert_array_equal(out[0], GOOD)


@pytest.mark.slow
def test_unknown_size_of_a_zstandard_frame_is_limited(tmp_path: Path) -> None:
    block = struct.pack("<I", 1 << 1 | 2**17 << 3)[:3] + b"\x07"
    last = struct.pack("<I", 1 | 1 << 1 | 2**17 << 3)[:3] + b"\x07"
    frame = b"\x28\xb5\x2f\xfd\x00\x70" + block * (BOMB // 2**17) + last
    done = subprocess.run(
        [sys.executable, "-c", READ, made(tmp_path / "good.h5", "gzip"), made(tmp_path / "bad.h5", "zstd", frame)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    message, memory = done.stdout.splitlines()
    assert "cannot be read at (z, y, x) = (0, 0, 0)" in message
    assert int(memory) < MEMORY


def test_oversized_stored_chunk_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "v.h5", "gzip", bytes(2**22))
    with open_volume(path) as volume, pytest.raises(VolumeError, match=r"chunk \(0, 0, 0\) takes more than 1,048,576"):
        volume.read(Box((0, 0, 0), volume.size), np.zeros(volume.shape, volume.dtype))


def test_chunks_compressed_twice_are_refused(tmp_path: Path) -> None:
    made_with = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made_with.set_chunk((64, 64, 64))
    made_with.set_deflate(1)
    made_with.set_shuffle()
    with h5py.File(tmp_path / "v.h5", "w") as file:
        space = h5py.h5s.create_simple((64, 64, 64))
        h5py.h5d.create(file.id, b"main", h5py.h5t.NATIVE_UINT8, space, made_with)
    with pytest.raises(VolumeError, match="is packed by HDF5 filter 1 and then by 2, and chunks that are packed once"):
        open_volume(tmp_path / "v.h5")
