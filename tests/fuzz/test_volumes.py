"""Damaged volumes from fixed seeds: each ends in a value or a sentence. A part always runs, the rest is `long`."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.damage import damaged_bytes, damaged_json, ended
from znnpy.patches import Box
from znnpy.volume import open_volume
from znnpy.volume.registry import store_for
from znnpy.volume.space import Space
from znnpy.volume.store import OutputArray

pytestmark = pytest.mark.slow

MOST_GROWTH = 200 * 2**20  # bytes of the process, over all cases of a test
# HDF5 2.0.0 writes beyond its own memory for a few damaged virtual datasets: 1 or 2 of the first 1,000 files here.
# The process is ended by a signal then, or stands still until it is.
MOST_CRASHES = 0.002
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGALRM)
BOX = Box((0, 0, 0), (8, 6, 10))

numbers = pytest.mark.parametrize(
    "numbers", [pytest.param(range(60), id="60"), pytest.param(range(60, 1000), id="940", marks=pytest.mark.long)]
)


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_GROWTH


@numbers
def test_damaged_hdf5_files_give_voxels_or_a_sentence(tmp_path: Path, numbers: range) -> None:
    """Read files in child processes: if HDF5 crashes one, the next goes on behind that file."""
    repository = Path(__file__).parents[2]
    first, crashes = numbers.start, 0
    while first < numbers.stop:
        command = [sys.executable, "-m", "tests.support.damaged_hdf5", str(tmp_path), str(first), str(numbers.stop)]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300)
        last = int(done.stdout.split()[-1])
        assert done.returncode in (0, *CRASHES), (last, done.returncode, done.stderr)
        crashes += done.returncode != 0
        first = last + 1
    assert crashes <= MOST_CRASHES * len(numbers)


def documents(zarr: Any, folder: Path) -> list[Path]:
    """Metadata of Zarr volumes of both formats, each beside its chunks."""
    voxels = np.arange(480, dtype=np.uint16).reshape(8, 6, 10)
    found = []
    formats: list[dict[str, Any]] = [
        {"zarr_format": 2},
        {"zarr_format": 2, "order": "F", "dtype": ">u2"},
        {"zarr_format": 3},
        {"zarr_format": 3, "shards": (8, 6, 10)},
    ]
    for number, settings in enumerate(formats):
        path = folder / f"{number}.zarr"
        array = zarr.create_array(path, shape=voxels.shape, chunks=(4, 3, 5), **{"dtype": "u2", **settings})
        array[...] = voxels
        found.append(path / ("zarr.json" if settings["zarr_format"] == 3 else ".zarray"))
    for version in (2, 3):
        group = zarr.open_group(folder / f"group{version}.zarr", mode="w", zarr_format=version)
        group.create_array("0", shape=voxels.shape, chunks=(4, 3, 5), dtype="u2")[...] = voxels
        steps = [{"type": "scale", "scale": [4.0, 1.0, 1.0]}]
        axes = [{"name": name, "unit": "nanometer"} for name in "zyx"]
        image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
        group.attrs["multiscales"] = [image]
        found.append(folder / f"group{version}.zarr" / ("zarr.json" if version == 3 else ".zattrs"))
    return found


def read_whole(path: Path) -> None:
    """Read a few voxels of the volume."""
    with open_volume(path) as volume:
        box = BOX.clipped(Box((0, 0, 0), volume.size))
        if volume.channels <= 64 and volume.extra_bytes < 2**27:
            volume.expect(box)
            volume.read(box, np.zeros((volume.channels, *box.size), volume.dtype))


@numbers
def test_damaged_zarr_metadata_gives_voxels_or_a_sentence(tmp_path: Path, numbers: range) -> None:
    whole = [(path, path.read_text()) for path in documents(pytest.importorskip("zarr"), tmp_path)]
    refused = 0
    for number in numbers:
        rng = random.Random(number)
        path, text = rng.choice(whole)
        if rng.randrange(4):
            path.write_text(damaged_json(json.loads(text), rng))
        else:
            path.write_bytes(damaged_bytes(text.encode(), rng))
        refused += not ended(lambda path=path: read_whole(path.parent), str(path.parent))  # type: ignore[misc]
        path.write_text(text)
    assert refused > len(numbers) // 10


def chunked(folder: Path) -> list[Path]:
    """Metadata of N5 and precomputed volumes, each beside its chunks."""
    ts = pytest.importorskip("tensorstore")
    voxels = np.arange(480, dtype=np.uint16).reshape(8, 6, 10)
    found = []
    blosc = {"type": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}
    for compression in ({"type": "gzip"}, blosc):
        path = folder / f"{compression['type']}.n5"
        metadata = {
            "dimensions": [10, 6, 8],
            "blockSize": [5, 3, 4],
            "dataType": "uint16",
            "compression": compression,
            "resolution": [4, 4, 40],
        }
        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
        ts.open(spec, create=True).result()[...] = voxels.T
        found.append(path / "attributes.json")
    sharding = {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": 1,
        "hash": "identity",
        "minishard_bits": 1,
        "shard_bits": 1,
    }
    for name, settings in (("files", {}), ("shards", {"sharding": sharding})):
        path = folder / f"{name}.precomputed"
        scale = {"size": [10, 6, 8], "chunk_size": [5, 3, 4], "encoding": "raw", "resolution": [4, 4, 40], **settings}
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "multiscale_metadata": {"data_type": "uint16", "num_channels": 1, "type": "image"},
            "scale_metadata": scale,
        }
        ts.open(spec, create=True).result()[..., 0] = voxels.T
        found.append(path / "info")
    return found


@numbers
def test_damaged_metadata_of_other_chunks_gives_voxels_or_a_sentence(tmp_path: Path, numbers: range) -> None:
    whole = [(path, path.read_text()) for path in chunked(tmp_path)]
    refused = 0
    for number in numbers:
        rng = random.Random(number)
        path, text = rng.choice(whole)
        if rng.randrange(4):
            path.write_text(damaged_json(json.loads(text), rng))
        else:
            path.write_bytes(damaged_bytes(text.encode(), rng))
        refused += not ended(lambda path=path: read_whole(path.parent), str(path.parent))  # type: ignore[misc]
        path.write_text(text)
    assert refused > len(numbers) // 10


@numbers
def test_damaged_chunks_give_voxels_or_a_sentence(tmp_path: Path, numbers: range) -> None:
    folders = [path.parent for path in (*documents(pytest.importorskip("zarr"), tmp_path), *chunked(tmp_path))]
    marks = ("zarr.json", ".zarray", ".zgroup", ".zattrs", "attributes.json", "info")
    files = sorted(
        (file, folder) for folder in folders for file in folder.rglob("*") if file.is_file() and file.name not in marks
    )
    refused = 0
    for number in numbers:
        rng = random.Random(number)
        file, folder = rng.choice(files)
        content = file.read_bytes()
        file.write_bytes(damaged_bytes(content, rng))
        refused += not ended(lambda folder=folder: read_whole(folder), str(folder))  # type: ignore[misc]
        file.write_bytes(content)
    assert refused > len(numbers) // 10


@numbers
def test_damaged_npy_files_give_voxels_or_a_sentence(tmp_path: Path, numbers: range) -> None:
    path = tmp_path / "v.npy"
    np.save(path, np.arange(480, dtype=np.uint16).reshape(8, 6, 10))
    content = path.read_bytes()
    refused = 0
    for number in numbers:
        rng = random.Random(number)
        path.write_bytes(damaged_bytes(content[:128], rng) + content[128:])
        refused += not ended(lambda: read_whole(path), str(path))
    assert refused > len(numbers) // 10


def files_of_formats(folder: Path) -> list[Path]:
    """Small volumes in every format of one file, plain and compressed, and one slice of a folder."""
    import nibabel
    import nrrd
    import tifffile

    voxels = np.arange(480, dtype=np.uint16).reshape(8, 6, 10)
    grey: dict[str, Any] = {"photometric": "minisblack"}
    tifffile.imwrite(folder / "plain.tif", voxels, **grey)
    tifffile.imwrite(folder / "big.tif", voxels, bigtiff=True, byteorder=">", tile=(16, 16), metadata=None, **grey)
    tifffile.imwrite(folder / "lzw.tif", voxels, compression="lzw", predictor=True, **grey)
    tifffile.imwrite(folder / "zstd.tif", voxels, compression="zstd", rowsperstrip=2, metadata=None, **grey)
    tifffile.imwrite(folder / "jpeg.tif", voxels.astype("u1"), compression="jpeg", metadata=None, **grey)
    tifffile.imwrite(folder / "ome.ome.tif", voxels, metadata={"axes": "ZYX", "PhysicalSizeX": 4.0}, **grey)
    tifffile.imwrite(folder / "imagej.tif", voxels, imagej=True, metadata={"axes": "ZYX", "spacing": 3.0, "unit": "um"})
    (folder / "slices").mkdir()
    for number, plane in enumerate(voxels):
        tifffile.imwrite(folder / "slices" / f"{number}.tif", plane, **grey)
    for version, kind in ((1, nibabel.Nifti1Image), (2, nibabel.Nifti2Image)):
        nibabel.save(kind(voxels.T.astype("i2"), np.diag([4, 8, 40, 1])), folder / f"{version}.nii")
    nibabel.save(nibabel.Nifti1Image(voxels.T.astype("f4"), np.eye(4)), folder / "packed.nii.gz")
    nrrd.write(str(folder / "plain.nrrd"), voxels, {"encoding": "raw", "space directions": np.eye(3)}, index_order="C")
    nrrd.write(str(folder / "packed.nrrd"), voxels, {"spacings": [1, 2, 3]}, index_order="C")
    for suffix in ("tif", "nii", "mrc"):
        path = folder / f"written.{suffix}"
        arrays, dtype = [OutputArray((1, 8, 6, 10), space=Space((40.0, 8.0, 4.0)))], np.dtype("f4")
        store_for(path).create(path, arrays, dtype, {"job": "{}"})
        store = store_for(path)(path, arrays, dtype)
        store.write(BOX, voxels[None].astype("f4"))
        store.close()
    return sorted(path for path in folder.rglob("*") if path.is_file())


@numbers
def test_damaged_files_of_other_formats_give_voxels_or_a_sentence(
    tmp_path: Path, numbers: range, caplog: pytest.LogCaptureFixture
) -> None:
    """Headers are damaged more often than voxels; outputs are read as outputs too."""
    whole = [(path, path.read_bytes()) for path in files_of_formats(tmp_path)]
    refused = 0
    for number in range(3 * numbers.start, 3 * numbers.stop):
        rng = random.Random(number)
        path, content = rng.choice(whole)
        front = rng.choice((40, 400, len(content)))
        path.write_bytes(damaged_bytes(content[:front], rng) + content[front:])
        volume = path.parent if path.parent.name == "slices" else path
        refused += not ended(lambda volume=volume: read_whole(volume), str(volume))  # type: ignore[misc]
        if path.name.startswith("written"):
            store_for(path).attributes_of(path)
            array = OutputArray((1, 8, 6, 10), space=Space((40.0, 8.0, 4.0)))
            ended(lambda path=path, array=array: store_for(path)(path, [array], np.dtype("f4")).close(), str(path))  # type: ignore[misc]
        path.write_bytes(content)
        caplog.clear()
    assert refused > len(numbers) // 10
