"""`infer` reads anything that can be sliced, and writes to anything that takes assignment to slices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import znnpy
from tests.support.cli import Place
from znnpy.errors import OutputError, VolumeError
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.volume.sliceable import PIECE_BYTES, STEPS, SliceVolume, open_given


class Lazy:
    """Like an array of dask: slices that are arrays only once they are asked for, and chunks of several sizes."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.chunks: tuple[tuple[int, ...], ...] = tuple((5, n - 5) for n in array.shape)
        self.threads: set[int] = set()
        self.reading = threading.Semaphore()
        self.asked: list[tuple[slice, ...]] = []

    def __getitem__(self, where: tuple[slice, ...]) -> Lazy:
        assert self.reading.acquire(blocking=False), "two threads read at a time"
        self.threads.add(threading.get_ident())
        self.asked.append(where)
        found = Lazy(self._array[where])
        self.reading.release()
        return found

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(self._array, dtype)


@pytest.fixture
def voxels(place: Place) -> np.ndarray[Any, Any]:
    with h5py.File(place.volume) as file:
        array: np.ndarray[Any, Any] = file["raw"][:]
    return array


@pytest.fixture
def expected(place: Place) -> np.ndarray[Any, Any]:
    arguments: dict[str, Any] = {"threads": 1, "patch": (4, 4, 4)}
    znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out, **arguments)
    return place.prediction()


def infer(place: Place, volume: Any, out: Any, **arguments: Any) -> znnpy.Report:
    return znnpy.infer(volume, place.folder / "net.yaml", out=out, threads=1, patch=(4, 4, 4), **arguments)


def test_array_is_predicted_into_an_array(
    place: Place, voxels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]
) -> None:
    out = np.full(expected.shape, np.nan, np.float32)
    before = set(place.folder.iterdir())
    report = infer(place, voxels, out)
    np.testing.assert_array_equal(out, expected)
    assert report.lines()[0].startswith("the ndarray: ")
    assert set(place.folder.iterdir()) == before, "nothing is written beside"


def test_datasets_of_h5py_are_read_and_written(place: Place, expected: np.ndarray[Any, Any]) -> None:
    with h5py.File(place.volume) as file, h5py.File(place.folder / "mine.h5", "w") as mine:
        out = mine.create_dataset("mine", expected.shape, np.float32, chunks=(1, 5, 6, 7))
        infer(place, file["raw"], out)
        np.testing.assert_array_equal(out[:], expected)


@pytest.mark.slow
def test_arrays_of_zarr_are_read_and_written(
    place: Place, voxels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]
) -> None:
    volume = zarr.create_array(place.folder / "in.zarr", shape=voxels.shape, dtype=voxels.dtype, chunks=(8, 8, 8))
    volume[:] = voxels
    out = zarr.create_array(place.folder / "mine.zarr", shape=expected.shape, dtype=np.float32, chunks=(1, 8, 8, 8))
    infer(place, volume, out)
    np.testing.assert_array_equal(out[:], expected)


@pytest.mark.slow
def test_array_like_objects_are_converted(
    place: Place, voxels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]
) -> None:
    lazy, out = Lazy(voxels[np.newaxis]), np.empty(expected.shape, np.float32)
    infer(place, lazy, out, paranoid=True)
    np.testing.assert_array_equal(out, expected)
    assert all(len(where) == 4 for where in lazy.asked)


def test_finished_blocks_are_written_one_by_one(
    place: Place, voxels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]
) -> None:
    class Blocks:
        shape, dtype = expected.shape, np.float32

        def __init__(self) -> None:
            self.found = np.full(self.shape, np.nan, self.dtype)
            self.count = 0

        def __setitem__(self, where: tuple[slice, ...], block: np.ndarray[Any, Any]) -> None:
            assert np.isnan(self.found[where]).all(), "each voxel comes once"
            self.found[where] = block
            self.count += 1

    blocks = Blocks()
    infer(place, voxels, blocks, cover="patches")
    np.testing.assert_array_equal(blocks.found, expected)
    assert blocks.count == 80


def test_other_arguments_work_with_arrays(place: Place, voxels: np.ndarray[Any, Any]) -> None:
    arguments: dict[str, Any] = {"roi": "2:20,0:20,1:25", "border": "reflect", "output_dtype": "uint8"}
    infer(place, place.volume, place.out, **arguments)
    out = np.zeros(place.prediction().shape, np.uint8)
    infer(place, voxels, out, **arguments)
    np.testing.assert_array_equal(out, place.prediction())


def test_array_is_predicted_into_a_file_and_resumed(place: Place, voxels: np.ndarray[Any, Any]) -> None:
    infer(place, voxels, place.out)
    assert not infer(place, voxels, place.out, resume=True).computed
    with pytest.raises(znnpy.ResumeError):
        infer(place, 255 - voxels, place.out, resume=True)


def test_unfit_arrays_are_refused(place: Place, voxels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    other = place.folder / "other.h5"
    fitting = np.zeros(expected.shape, np.float32)
    for out in (fitting[:, 1:], fitting.astype(np.float64)):
        with pytest.raises(OutputError, match=r"the prediction has \(maps, z, y, x\) = .* float32; give one that fits"):
            infer(place, voxels, out)
    fitting.flags.writeable = False
    with pytest.raises(OutputError, match="read-only"):
        infer(place, voxels, fitting)
    one_plane = np.lib.stride_tricks.as_strided(
        np.zeros(expected.shape, np.float32), expected.shape, (4 * expected[0].size, 0, 4 * expected.shape[3], 4)
    )
    with pytest.raises(OutputError, match=r"the output array has elements that share memory .*; give numpy\.empty"):
        infer(place, voxels, one_plane)
    both = np.zeros(2 * expected.size + voxels.size, np.float32)
    with pytest.raises(OutputError, match="shares memory"):
        infer(place, both[: voxels.size].reshape(voxels.shape), both[: expected.size].reshape(expected.shape))
    for word in ("overwrite", "resume"):
        with pytest.raises(ValueError, match=f"{word}=True is for an output with a path"):
            infer(place, voxels, np.empty(expected.shape, np.float32), **{word: True})
    with pytest.raises(ValueError, match="so the output needs a path or an array: give `out`"):
        infer(place, voxels, None)
    with pytest.raises(VolumeError, match="leave out `dataset`"):
        infer(place, voxels, other, dataset="raw")
    with pytest.raises(
        VolumeError,
        match=r"the volume is neither in chunks nor an HDF5 volume made of several files, .*: remove `fill_missing`",
    ):
        infer(place, voxels, other, fill_missing=5)
    with pytest.raises(
        VolumeError, match="the volume has no chunks that could be missing: leave out missing_chunks='e"
    ):
        infer(place, voxels, other, missing_chunks="error")
    with pytest.raises(TypeError, match="a volume is a path, or something to slice with shape and dtype, not int"):
        infer(place, 5, other)
    with pytest.raises(ValueError, match=r"^roi is text of the form 'z0:z1,y0:y1,x0:x1', not \(1, 2, 3\)$"):
        infer(place, voxels, other, roi=(1, 2, 3))
    with pytest.raises(TypeError, match="takes assignment to slices, not int"):
        infer(place, voxels, 5)
    assert not other.exists()


def test_file_of_a_dataset_is_not_replaced(place: Place) -> None:
    before = place.volume.read_bytes()
    with h5py.File(place.volume) as file, pytest.raises(OutputError, match="volume"):
        infer(place, file["raw"], place.volume, overwrite=True)
    assert place.volume.read_bytes() == before


def test_wrong_slices_are_an_error(place: Place, voxels: np.ndarray[Any, Any]) -> None:
    class Short(Lazy):
        def __getitem__(self, where: tuple[slice, ...]) -> Lazy:
            return super().__getitem__((slice(0, 1), *where[1:]))

    with pytest.raises(VolumeError, match="give an object whose slices have the size and type that it states"):
        infer(place, Short(voxels), place.out)


def test_arrays_are_read_along_chunks_with_counted_memory() -> None:
    lazy = Lazy(np.arange(64 * 200 * 1024, dtype=np.float32).reshape(64, 200, 1024))
    lazy.chunks = ((16,) * 4, (100, 100), (512, 512))
    volume = SliceVolume(lazy)
    out = np.empty((1, 60, 190, 1000), np.float32)
    volume.read(Box((3, 4, 5), (63, 194, 1005)), out)
    np.testing.assert_array_equal(out[0], lazy._array[3:63, 4:194, 5:1005])
    for where in lazy.asked:
        sizes = [along.stop - along.start for along in where]
        assert 4 * np.prod(sizes) <= PIECE_BYTES
    assert volume.extra_bytes == max(0, STEPS * PIECE_BYTES - READER_BYTES)
    lazy.chunks = ((64,), (200,), (1024,))
    assert SliceVolume(lazy).extra_bytes == STEPS * 4 * 64 * 200 * 1024 - READER_BYTES


@pytest.mark.slow
def test_prediction_of_one_map_has_three_axes_if_the_output_has(place: Place) -> None:
    file = place.write_network("max.yaml", weights=None, layers=[{"type": "maxfilter", "window": [2, 2, 2]}])
    with h5py.File(place.volume) as opened:
        voxels: np.ndarray[Any, Any] = opened["raw"][:]
    four, three = np.zeros((1, 19, 22, 24), np.float32), np.zeros((19, 22, 24), np.float32)
    for out in (four, three):
        znnpy.infer(voxels, file, out=out, threads=1)
    assert four.any()
    np.testing.assert_array_equal(three, four[0])
    with pytest.raises(OutputError, match=r"the prediction has \(maps, z, y, x\) = \(1, 19, 22, 24\)"):
        znnpy.infer(voxels, file, out=three[1:], threads=1)


def test_paths_are_opened_as_files(place: Place) -> None:
    with open_given(str(place.volume)) as volume:
        assert volume.path == Path(place.volume)
