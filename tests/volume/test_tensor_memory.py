"""Memory that reading chunks takes is what volumes promise: READER_BYTES, and `extra_bytes` beside these."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3

ts = pytest.importorskip("tensorstore")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only"),
]

# Reads a volume slab by slab; prints what it promises, and by how much the peak of memory rose.
READ = """
import sys
import numpy as np
from pathlib import Path
from znnpy.machine import peak_bytes
from znnpy.patches import Box
from znnpy.volume import open_volume
with open_volume(Path(sys.argv[1])) as volume:
    z, y, x = volume.size
    slab = min(z, int(sys.argv[2]))
    out = np.ones((volume.channels, slab, y, x), volume.dtype)
    before = peak_bytes()
    volume.expect(Box((0, 0, 0), volume.size))
    for first in range(0, z - slab + 1, slab):
        volume.read(Box((first, 0, 0), (first + slab, y, x)), out)
    assert not (out == 1).all()
    print(volume.extra_bytes, peak_bytes() - before)
"""
Store = Callable[[Path], Path]


def noise(size: Vec3, dtype: str) -> Any:
    return np.random.default_rng(4).integers(0, 100, size, np.uint8).astype(dtype)


def as_zarr(size: Vec3, chunk: Vec3, dtype: str, codec: str, shard: Vec3 | None = None) -> Store:
    def write(folder: Path) -> Path:
        packer: dict[str, Any] = {"name": codec}
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, packer]
        if shard:
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            settings = {"chunk_shape": chunk, "codecs": codecs, "index_codecs": index}
            codecs = [{"name": "sharding_indexed", "configuration": settings}]
        metadata = {
            "shape": size,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard or chunk}},
            "codecs": codecs,
        }
        path = folder / "v.zarr"
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
        ts.open(spec, create=True).result()[...] = noise(size, dtype)
        return path

    return write


def as_n5(folder: Path) -> Path:
    path = folder / "v.n5"
    metadata = {
        "dimensions": [256] * 3,
        "blockSize": [64] * 3,
        "dataType": "uint16",
        "compression": {"type": "gzip", "level": 1},
    }
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    ts.open(spec, create=True).result()[...] = noise((256, 256, 256), "uint16").T
    return path


def as_precomputed(folder: Path) -> Path:
    path = folder / "v.precomputed"
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"data_type": "uint64", "num_channels": 1, "type": "segmentation"},
        "scale_metadata": {
            "size": [256] * 3,
            "chunk_size": [64] * 3,
            "encoding": "compressed_segmentation",
            "compressed_segmentation_block_size": [8] * 3,
            "resolution": [1, 1, 1],
        },
    }
    ts.open(spec, create=True).result()[..., 0] = noise((256, 256, 256), "uint64").T
    return path


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(as_zarr((256, 256, 256), (64, 64, 64), "uint8", "blosc"), id="uint8"),
        pytest.param(as_zarr((256, 256, 256), (64, 64, 64), "float32", "zstd"), id="float32"),
        pytest.param(as_zarr((256, 256, 256), (32, 32, 32), "uint8", "gzip", (256, 256, 256)), id="shards"),
        pytest.param(as_zarr((256, 256, 256), (4, 8, 8), "uint8", "zstd", (128, 256, 256)), id="many in a shard"),
        pytest.param(as_zarr((64, 512, 512), (64, 512, 512), "uint8", "blosc"), id="one chunk"),
        pytest.param(as_zarr((128, 512, 512), (64, 256, 256), "uint8", "zstd"), id="chunks of 4 MiB"),
        pytest.param(as_zarr((96, 512, 1024), (96, 512, 512), "uint8", "zstd"), id="chunks of 24 MiB"),
        pytest.param(as_n5, id="N5"),
        pytest.param(as_precomputed, id="compressed segmentation"),
    ],
)
@pytest.mark.parametrize("slab", [8, pytest.param(64, marks=pytest.mark.long)])
def test_reading_takes_no_more_memory_than_promised(tmp_path: Path, store: Store, slab: int) -> None:
    path = store(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), str(slab)], check=True, capture_output=True, text=True
    )
    promised, taken = map(int, done.stdout.split())
    assert taken <= READER_BYTES + promised, f"{taken >> 20} MiB, and {(READER_BYTES + promised) >> 20} are promised"
    print(f"{taken >> 20} of {(READER_BYTES + promised) >> 20} MiB")
