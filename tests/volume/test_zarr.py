"""Zarr in and out: the same promises as HDF5."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.stored_outputs import stored
from znnpy.errors import OutputError, ResumeError, VolumeError
from znnpy.extras import install
from znnpy.patches import Box, cover
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume import open_volume
from znnpy.volume import store as store_module
from znnpy.volume.base import Volume
from znnpy.volume.journal import JournalHeader
from znnpy.volume.object_store import threads
from znnpy.volume.output import Mode, Output
from znnpy.volume.store import OutputArray
from znnpy.volume.tensor_volume import KEPT_BYTES, KEPT_STEPS

zarr = pytest.importorskip("zarr")

SIZE: Vec3 = (11, 14, 9)
COLUMNS = cover(SIZE, (4, 7, 5))
JOB = {"network": "abc"}
HEADER = JournalHeader(JOB, {}, "{}", "", len(COLUMNS))


def whole(volume: Volume) -> npt.NDArray[Any]:
    out = np.full(volume.shape, 77, volume.dtype)
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


def made(path: Path, voxels: npt.NDArray[Any], zarr_format: int = 3) -> Path:
    array = zarr.create_array(
        path, shape=voxels.shape, chunks=(4,) * voxels.ndim, dtype=voxels.dtype, zarr_format=zarr_format
    )
    array[...] = voxels
    return path


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", ["u1", ">u2", "<i4", "<f2", ">f4", "<f8"])
@pytest.mark.parametrize("shape", [(5, 7, 9), (2, 5, 7, 9)], ids=str)
def test_array_is_read(tmp_path: Path, dtype: str, shape: tuple[int, ...], zarr_format: int) -> None:
    voxels = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    with open_volume(made(tmp_path / "volume.zarr", voxels, zarr_format)) as volume:
        assert volume.dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(whole(volume), voxels.reshape(volume.shape))
        out = np.zeros((volume.channels, 2, 3, 1), volume.dtype)
        volume.read(Box((1, 4, 8), (3, 7, 9)), out)
        np.testing.assert_array_equal(out, voxels.reshape(volume.shape)[:, 1:3, 4:7, 8:9])
        assert volume.identity() == volume.identity()


def test_array_in_a_group_is_found(tmp_path: Path) -> None:
    path = tmp_path / "volume.zarr"
    group = zarr.open_group(path, mode="w")
    group.create_array("mask", shape=(4, 5, 6), dtype="bool")
    group.create_group("deep").create_array("raw", shape=(4, 5, 6), dtype="u1")
    with open_volume(path) as volume:
        assert volume.dataset == "deep/raw"
    group.create_array("other", shape=(3, 4, 5, 6), dtype="i2")
    with pytest.raises(VolumeError, match=r"2 datasets that could be the volume: .*other \(3x4x5x6 int16\)"):
        open_volume(path)
    with pytest.raises(VolumeError, match=r"no dataset 'raw'; it holds "):
        open_volume(path, "raw")
    with pytest.raises(VolumeError, match="mask holds bool voxels"):
        open_volume(path, "mask")
    with open_volume(path, "other") as volume:
        assert volume.channels == 3


def test_identity_of_an_array_differs_from_that_of_its_group(tmp_path: Path) -> None:
    """An output may be a new array beside the one that is read, and a run that writes it goes on."""
    group = zarr.open_group(tmp_path / "volume.zarr", mode="w")
    group.create_array("deep/raw", data=np.full((4, 5, 6), 3, "u1"))

    def stored() -> tuple[int, int]:
        with open_volume(tmp_path / "volume.zarr", "deep/raw") as volume:
            return volume.stored()

    before = stored()
    group.create_array("deep/other", data=np.full((4, 5, 6), 3, "u1"))
    assert stored() == before
    group["deep/raw"][0] = 4
    assert stored() != before


def test_unfit_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"there is no folder .*none\.zarr; check the path"):
        open_volume(tmp_path / "none.zarr")
    empty = tmp_path / "empty.zarr"
    empty.mkdir()
    with pytest.raises(VolumeError, match=r"empty\.zarr is not Zarr: it holds no zarr\.json"):
        open_volume(empty)
    path = made(tmp_path / "volume.zarr", np.ones((4, 4, 4), "u1"))
    with pytest.raises(VolumeError, match="is one Zarr array, so there is no dataset 'raw'"):
        open_volume(path, "raw")
    with open_volume(path) as volume:
        (path / "c/0/0/0").write_bytes(b"rubbish")
        with pytest.raises(VolumeError, match=r"chunk \(0, 0, 0\) in .*/c/0/0/0 is damaged: .*; copy the volume again"):
            whole(volume)
    (path / "zarr.json").write_text("{")
    with pytest.raises(VolumeError, match=r"zarr\.json cannot be read as JSON: .*; copy it again"):
        open_volume(path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store_module, "CHUNK", 6)
    return tmp_path / "out.zarr"


def output(path: Path, mode: Mode = "new", maps: int = 1, **job: Any) -> Output:
    arrays = [OutputArray((maps, *SIZE))]
    inputs = {"volume": path.with_name("v")}
    return Output(path, inputs=inputs, arrays=arrays, dtype=np.dtype("f4"), mode=mode, job={**JOB, **job})


def expected(maps: int) -> npt.NDArray[Any]:
    return np.random.default_rng(5).standard_normal((maps, *SIZE)).astype(np.float32)


def write(opened: Output, columns: range, maps: int) -> None:
    for index in columns:
        for step in COLUMNS[index].steps:
            opened.write(step.write, expected(maps)[(slice(None), *step.write.slices)])
        opened.finish_column(index)


def names(path: Path) -> set[str]:
    return {item.name for item in path.parent.iterdir()}


@pytest.mark.parametrize("maps", [1, 3])
def test_interrupted_output_resumes_byte_for_byte(path: Path, maps: int) -> None:
    with output(path, "new", maps) as opened:
        opened.begin(HEADER, {"offset": np.array([1, 2, 3]), "plan": "{}"})
        write(opened, range(5), maps)
    assert names(path) == {"out.zarr.partial", "out.zarr.journal"}
    debris = path.with_name("out.zarr.partial") / "0" / "c" / "0.__lock"
    debris.write_bytes(b"half a chunk")
    with pytest.raises(OutputError, match=r"an unfinished run left .*out\.zarr\.partial with 5 of 12 columns done"):
        output(path, "new", maps).__enter__()
    with output(path, "resume", maps) as opened:
        assert opened.done == frozenset(range(5))
        write(opened, range(5, 12), maps)
        opened.complete()
    assert names(path) == {"out.zarr"}
    assert not list(path.rglob("*.__lock"))
    group: Any = zarr.open_group(path, mode="r")
    array = group["0"]
    np.testing.assert_array_equal(np.asarray(array[:]).reshape(maps, *SIZE), expected(maps))
    assert array.chunks == ((6, 5, 5) if maps == 1 else (1, 6, 5, 5))
    assert group.attrs["offset"] == [1, 2, 3]
    assert array.metadata.dimension_names == (("z", "y", "x") if maps == 1 else ("c", "z", "y", "x"))
    with output(path, "resume", maps) as opened:
        assert opened.finished
    with pytest.raises(ResumeError, match=re.escape('network was "abc" and is "xyz" now')):
        output(path, "resume", maps, network="xyz").__enter__()


def test_overwritten_folder_is_replaced_at_the_end(path: Path) -> None:
    made(path, np.ones((4, 4, 4), "u1"))
    (path / "precious").write_text("old")
    with pytest.raises(OutputError, match=r"the output .*out\.zarr exists; give overwrite=True"):
        output(path).__enter__()
    with pytest.raises(ResumeError, match="was not written by znnpy"):
        output(path, "resume").__enter__()
    with output(path, "overwrite") as opened:
        opened.begin(HEADER, {})
        write(opened, range(12), 1)
        assert (path / "precious").read_text() == "old"
        opened.complete()
    assert names(path) == {"out.zarr"}
    np.testing.assert_array_equal(stored(path), expected(1)[0])


def test_resume_with_another_shape_is_refused(path: Path) -> None:
    with output(path) as opened:
        opened.begin(HEADER, {})
        write(opened, range(1), 1)
    with pytest.raises(
        OutputError, match=r"holds \(1, 11, 14, 9\) float32, and this run writes \(2, 11, 14, 9\) float"
    ):
        output(path, "resume", 2).__enter__()


@pytest.mark.slow
def test_missing_package_is_named(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
sys.modules["zarr"] = sys.modules["tensorstore"] = None  # as if they were not installed
from znnpy.errors import MissingExtraError
from znnpy.volume import open_volume
from znnpy.volume.registry import store_for
for door in (lambda: open_volume(Path("a.zarr")), lambda: store_for(Path("a.zarr"))):
    try:
        door()
    except MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    need = "need the package tensorstore, which is not installed; "
    assert done.stdout == (
        f"Zarr, N5 and precomputed volumes, and volumes in buckets, {need}`{install('io')}`\n"
        f"writing .zarr, .n5 and precomputed outputs {need.replace('need', 'needs')}`{install('io')}`\n"
    )


def test_memory_counts_only_existing_chunks(tmp_path: Path) -> None:
    chunk = (64, 512, 512)
    zarr.create_array(tmp_path / "one.zarr", shape=chunk, chunks=chunk, dtype="u1")
    with open_volume(tmp_path / "one.zarr") as volume:
        kept = KEPT_STEPS * 2**24 + KEPT_BYTES
        assert volume.extra_bytes == 3 * 2**24 + kept + threads() * 2**21 + 2**22 + 1 - READER_BYTES
