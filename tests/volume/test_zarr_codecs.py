"""Chunks of Zarr arrays that unpack to far more than a chunk has: one sentence with both sizes, and little memory."""

from __future__ import annotations

import bz2
import gzip
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume

zarr = pytest.importorskip("zarr")
google_crc32c = pytest.importorskip("google_crc32c")  # which zarr brings

BOMB = 2**27  # bytes that a bomb unpacks to
MEMORY = 32  # MiB that reading them may take beside what good chunks take
CHUNK = 32**3

# Reads the volumes that are named, first the good half; prints errors and how far the peak of memory rose, in MiB.
READ = """
import resource, sys
import numpy as np
from pathlib import Path
from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import open_volume
volumes = [open_volume(Path(path)) for path in sys.argv[1:]]
out = np.zeros((1, 32, 32, 32), np.uint8)
for number, volume in enumerate(volumes):
    if number == len(volumes) // 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        volume.read(Box((0, 0, 0), (32, 32, 32)), out)
    except VolumeError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def zeros(pack: Callable[[bytes], bytes], finish: Callable[[], bytes]) -> bytes:
    """BOMB bytes of zeros, packed piece by piece."""
    return b"".join(pack(bytes(2**20)) for _ in range(BOMB >> 20)) + finish()


def zipped(wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return zeros(packer.compress, packer.flush)


def zstd_frame(size: int) -> bytes:
    """Zstandard of a repeated byte, whose header does not say how many."""
    blocks = []
    while size:
        part = min(size, 2**17)
        size -= part
        blocks.append(struct.pack("<I", (size == 0) | 1 << 1 | part << 3)[:3] + b"\x07")
    return b"\x28\xb5\x2f\xfd\x00\x70" + b"".join(blocks)


def bomb(codec: str) -> bytes:
    if codec in ("gzip", "zlib"):
        return zipped(31 if codec == "gzip" else 15)
    if codec == "bz2":
        bzip = bz2.BZ2Compressor()
        return zeros(bzip.compress, bzip.flush)
    if codec == "zstd":
        return zarr.registry.get_numcodec({"id": "zstd"}).encode(bytes(BOMB))  # type: ignore[no-any-return]
    if codec == "zstd that does not say":
        return zstd_frame(BOMB)
    if codec == "zstd of two frames":
        return zarr.registry.get_numcodec({"id": "zstd"}).encode(bytes(CHUNK)) + zstd_frame(BOMB)  # type: ignore[no-any-return]
    return zarr.registry.get_numcodec({"id": codec}).encode(bytes(BOMB))  # type: ignore[no-any-return]


def made(path: Path, codec: str, zarr_format: int) -> Path:
    """32x32x32 bytes in one chunk, or in one shard of eight."""
    name = codec.split()[0]
    arguments: dict[str, Any]
    if zarr_format == 2:
        arguments = {"chunks": (32, 32, 32), "compressors": zarr.registry.get_numcodec({"id": name})}
    else:
        known = name in ("gzip", "zstd", "blosc")
        packer: Any = {"name": name if known else f"numcodecs.{name}", "configuration": {}}
        if name == "blosc":
            packer = zarr.codecs.BloscCodec()
        arguments = {"chunks": (32, 32, 32), "compressors": [packer]}
    array = zarr.create_array(path, shape=(32, 32, 32), dtype="u1", zarr_format=zarr_format, **arguments)
    array[...] = np.arange(CHUNK, dtype=np.uint32).reshape(32, 32, 32) >> 8
    return path


def read_in_child(good: list[Path], bad: list[Path]) -> tuple[int, list[str]]:
    """Return by how many MiB reading the bad arrays raised the peak of memory, and the error of each."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, *good, *bad],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *messages, memory = done.stdout.splitlines()
    return int(memory), messages


CODECS = {
    2: ["gzip", "zlib", "bz2", "zstd", "zstd that does not say", "zstd of two frames", "blosc"],
    3: ["gzip", "zstd", "zstd that does not say", "blosc"],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of zarr: codecs that are not in the specification
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_chunks_unpacking_to_too_much_are_refused(tmp_path: Path, zarr_format: int) -> None:
    codecs = CODECS[zarr_format]
    good, bad = ([made(tmp_path / f"{name} {codec}.zarr", codec, zarr_format) for codec in codecs] for name in "ab")
    for path, codec in zip(bad, codecs, strict=True):
        (path / ("0.0.0" if zarr_format == 2 else "c/0/0/0")).write_bytes(bomb(codec))
    memory, messages = read_in_child(good, bad)
    for path, codec, message in zip(bad, codecs, messages, strict=True):
        assert message.startswith(f"{path}: chunk (0, 0, 0) in {path}/")
        said = f"it unpacks to {BOMB:,} bytes, and a chunk of the array has {CHUNK:,}"
        assert f" is damaged: {said if codec == 'blosc' else ''}" in message
    assert memory < MEMORY


@pytest.mark.slow
def test_chunk_within_a_shard_is_limited_too(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.zarr", tmp_path / "bad.zarr"
    for path in (good, bad):
        array = zarr.create_array(
            path,
            shape=(32, 32, 32),
            shards=(32, 32, 32),
            chunks=(16, 32, 32),
            dtype="u1",
            compressors=zarr.codecs.GzipCodec(),
        )
        array[...] = np.arange(CHUNK, dtype=np.uint32).reshape(32, 32, 32) >> 8
    file, packed = bad / "c/0/0/0", gzip.compress(bytes(CHUNK // 2))
    full = zipped(31)
    index = struct.pack("<4Q", 0, len(packed), len(packed), len(full))
    file.write_bytes(packed + full + index + struct.pack("<I", google_crc32c.value(index)))
    memory, (message,) = read_in_child([good], [bad])
    assert message.startswith(f"{bad}: chunk (1, 0, 0) in {file} is damaged: ")
    assert memory < MEMORY


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("zarr_format", "codec"), [(version, codec) for version in (2, 3) for codec in CODECS[version] if " " not in codec]
)
def test_valid_chunks_are_read(tmp_path: Path, codec: str, zarr_format: int) -> None:
    with open_volume(made(tmp_path / "v.zarr", codec, zarr_format)) as volume:
        out = np.zeros(volume.shape, volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
    np.testing.assert_array_equal(out[0], (np.arange(CHUNK).reshape(32, 32, 32) >> 8).astype(np.uint8))


def test_zstandard_frame_of_unknown_size_is_read(tmp_path: Path) -> None:
    path = made(tmp_path / "v.zarr", "zstd", 3)
    (path / "c/0/0/0").write_bytes(zstd_frame(CHUNK))
    with open_volume(path) as volume:
        out = np.zeros(volume.shape, volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
    assert (out == 7).all()


@pytest.mark.parametrize("codec", ["gzip", "zlib", "bz2", "zstd", "blosc"])
def test_cut_chunk_is_reported_in_one_sentence(tmp_path: Path, codec: str) -> None:
    path = made(tmp_path / "v.zarr", codec, 2)
    content = (path / "0.0.0").read_bytes()
    (path / "0.0.0").write_bytes(content[: len(content) // 2])
    with open_volume(path) as volume, pytest.raises(VolumeError, match=r"0\.0\.0 is damaged: "):
        volume.read(Box((0, 0, 0), volume.size), np.zeros(volume.shape, volume.dtype))
