"""Memory that reading takes, whatever the chunks: compressed, tiny, thin, of the whole volume, in shards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.infer_process import infer, thin
from znnpy.errors import NoPlanError, VolumeError
from znnpy.inference import infer as infer_here
from znnpy.shapes import Vec3
from znnpy.volume import open_volume

pytestmark = pytest.mark.slow

MIB = 2**20

Store = Callable[[Path], Path]


def as_hdf5(size: Vec3, chunk: Vec3, **filters: str | int) -> Store:
    """Noise in HDF5 chunks."""

    def write(folder: Path) -> Path:
        path = folder / "volume.h5"
        with h5py.File(path, "w") as file:
            noise = np.random.default_rng(4).integers(0, 100, size, np.uint8)
            file.create_dataset("raw", data=noise, chunks=chunk, **filters)
        return path

    return write


def as_zarr(size: Vec3, chunk: Vec3, shard: Vec3 | None) -> Store:
    """Noise in Zarr chunks, of a shard where there is one."""

    def write(folder: Path) -> Path:
        zarr = pytest.importorskip("zarr")
        path = folder / "volume.zarr"
        array = zarr.create_array(path, shape=size, chunks=chunk, shards=shard, dtype="u1")
        array[...] = np.random.default_rng(4).integers(0, 100, size, np.uint8)
        return path

    return write


PACKED: dict[str, str | int] = {"compression": "gzip", "compression_opts": 1, "shuffle": True}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
@pytest.mark.parametrize(
    ("store", "ram"),
    [
        pytest.param(as_hdf5((100, 100, 100), (2, 2, 2)), 400, id="2x2x2"),
        pytest.param(as_hdf5((200, 150, 150), (200, 1, 1)), 200, id="200x1x1"),
        pytest.param(as_hdf5((160, 160, 160), (4, 4, 4)), 400, id="4x4x4", marks=pytest.mark.long),
        pytest.param(as_hdf5((200, 200, 200), (64, 64, 64), **PACKED), 180, id="gzip", marks=pytest.mark.long),
        pytest.param(as_hdf5((200, 250, 250), (1, 250, 250), **PACKED), 180, id="gzip planes", marks=pytest.mark.long),
        pytest.param(as_hdf5((250, 250, 250), (250, 250, 250), **PACKED), 270, id="one chunk", marks=pytest.mark.long),
        pytest.param(as_zarr((512, 512, 256), (32, 32, 32), (256, 256, 256)), 600, id="shards", marks=pytest.mark.long),
        pytest.param(as_zarr((256, 256, 256), (128, 256, 256), None), 290, id="large chunks", marks=pytest.mark.long),
    ],
)
def test_reading_keeps_the_promise(tmp_path: Path, store: Store, ram: int) -> None:
    words = ("--network", str(thin(tmp_path)), "--ram", f"{ram}M", "--output-dtype", "uint8")
    promise, peak = infer(store(tmp_path), *words, "--out", str(tmp_path / "out.h5"))
    assert peak <= promise <= ram * MIB


def test_chunk_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "volume.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", (1000, 1000, 1000), "u1", chunks=(1000, 1000, 1000), compression="gzip")
    with open_volume(path) as volume:
        takes = volume.extra_bytes
    with pytest.raises(VolumeError, match=r"takes [23]\.\d\d GiB of memory to unpack its large chunks"):
        infer_here(path, thin(tmp_path), out=tmp_path / "out.h5", ram=takes - 1)
    message = r"the process takes [23]\.\d\d GiB to unpack the volume's large chunks, and would take nothing"
    with pytest.raises(NoPlanError, match=message):
        infer_here(path, thin(tmp_path), out=tmp_path / "out.h5", ram=takes + 2**20)
