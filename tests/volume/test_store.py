"""Chunks of an HDF5 output: which bytes a box touches, how many threads write them, what a failure leaves behind."""

from __future__ import annotations

import errno
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import OutputError, ResumeError
from znnpy.option_values import OUTPUT_DTYPES
from znnpy.patches import Box
from znnpy.planner.memory import WRITER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume import hdf5_store
from znnpy.volume import store as store_module
from znnpy.volume.hdf5_store import THREADS, Hdf5Store
from znnpy.volume.store import CHUNK, OutputArray

SIZE: Vec3 = (11, 14, 9)  # three chunks of 6x5x5 along y, two along z and x; the last along each is not all used
WHOLE = Box((0, 0, 0), SIZE)
PLANE = 5 * 5 * 4  # bytes of a chunk's plane


class Calls:
    """Bytes that the store reads and writes, and where; at most `most` at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 10**9) -> None:
        self.read: list[tuple[int, int]] = []
        self.written: list[tuple[int, int]] = []
        preadv, pwrite = os.preadv, os.pwrite

        def reads(file: int, rooms: list[memoryview], at: int) -> int:
            self.read.append((at, rooms[0].nbytes))
            return preadv(file, [rooms[0][:most]], at)

        def writes(file: int, voxels: memoryview, at: int) -> int:
            self.written.append((at, voxels.nbytes))
            return pwrite(file, voxels[:most], at)

        monkeypatch.setattr(os, "preadv", reads)
        monkeypatch.setattr(os, "pwrite", writes)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store_module, "CHUNK", 6)
    monkeypatch.setattr(hdf5_store, "THREAD_BYTES", 300)
    return tmp_path / "out.h5"


@pytest.fixture
def store(path: Path) -> Iterator[Hdf5Store]:
    """Open a store of three maps, full of `before()`."""
    made = opened(path, new=True)
    made.write(WHOLE, before())
    yield made
    made.close()


def opened(path: Path, maps: int = 3, *, new: bool = False) -> Hdf5Store:
    arrays, dtype = [OutputArray((maps, *SIZE))], np.dtype("f4")
    if new:
        Hdf5Store.create(path, arrays, dtype, {})
    return Hdf5Store(path, arrays, dtype)


def random(seed: int, size: Vec3 = SIZE) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((3, *size)).astype(np.float32)


def before() -> npt.NDArray[np.float32]:
    return random(1)


def stored(path: Path) -> npt.NDArray[Any]:
    with h5py.File(path) as file:
        return np.asarray(file["prediction"])


@pytest.mark.parametrize(
    ("box", "planes", "reads"),
    [
        (Box((2, 0, 0), (5, 14, 9)), 3, False),  # planes only
        (Box((7, 0, 0), (8, 14, 9)), 1, False),  # one, of the last chunks
        (Box((2, 5, 5), (5, 10, 9)), 3, False),  # planes of a chunk that are all used, though not all there is
        (Box((0, 3, 0), (6, 4, 9)), 6, True),  # part in y
        (Box((1, 0, 6), (3, 14, 7)), 2, True),  # part in x
        (Box((4, 6, 1), (6, 8, 4)), 2, True),  # inside one chunk
        (Box((5, 5, 0), (6, 10, 5)), 1, False),  # one plane of one chunk
    ],
    ids=str,
)
def test_only_planes_touched_by_a_box_are_written(
    store: Hdf5Store, path: Path, monkeypatch: pytest.MonkeyPatch, box: Box, planes: int, reads: bool
) -> None:
    calls = Calls(monkeypatch)
    voxels = random(2, box.size)
    store.write(box, voxels)
    assert {nbytes for _, nbytes in calls.written} == {planes * PLANE}
    assert sorted(calls.read) == (sorted(calls.written) if reads else [])
    expected = before()
    expected[(slice(None), *box.slices)] = voxels
    np.testing.assert_array_equal(stored(path), expected)


def test_only_partly_covered_chunks_are_read(store: Hdf5Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    store.write(Box((4, 0, 0), (9, 12, 9)), random(2, (5, 12, 9)))  # of three chunks along y the last is cut
    assert len(calls.written) == 3 * 2 * 3 * 2
    assert len(calls.read) == 3 * 2 * 1 * 2


@pytest.mark.parametrize("maps", [1, 3])
def test_output_written_in_two_runs_is_complete(path: Path, maps: int) -> None:
    rng = np.random.default_rng(20261120)
    expected = np.zeros((maps, *SIZE), np.float32)
    for run in range(2):
        store = opened(path, maps, new=run == 0)
        for _ in range(30):
            ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in SIZE]
            box = Box((ends[0][0], ends[1][0], ends[2][0]), (ends[0][1], ends[1][1], ends[2][1]))
            whole = rng.standard_normal((maps, *SIZE)).astype(np.float32)
            expected[(slice(None), *box.slices)] = whole[(slice(None), *box.slices)]
            store.write(box, whole[(slice(None), *box.slices)])
        store.close()
    np.testing.assert_array_equal(stored(path).reshape(expected.shape), expected)


def test_empty_box_writes_nothing(store: Hdf5Store, path: Path) -> None:
    for hi in ((4, 6, 6), (6, 4, 6), (6, 6, 4)):
        box = Box((4, 4, 4), hi)
        store.write(box, np.zeros((3, *box.size), np.float32))
    np.testing.assert_array_equal(stored(path), before())


def test_short_reads_and_writes_are_continued(store: Hdf5Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, most=7)
    box = Box((1, 2, 3), (11, 14, 8))
    voxels = random(2, box.size)
    store.write(box, voxels)
    assert len(calls.written) > 3 * 12 * PLANE / 7
    expected = before()
    expected[(slice(None), *box.slices)] = voxels
    np.testing.assert_array_equal(stored(path), expected)


def test_cut_file_is_refused(store: Hdf5Store, path: Path) -> None:
    at = int(store._addresses[0][0, 0, 0, 0])
    os.truncate(path, at + 2 * PLANE + 9)
    with pytest.raises(OSError, match=rf"^{path} ends at byte {at + 2 * PLANE + 9}: another program cut it short$"):
        store.write(Box((1, 0, 0), (4, 1, 1)), random(2, (3, 1, 1)))


def test_threads_write_concurrently(store: Hdf5Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(THREADS)
    writes = 0
    pwrite = os.pwrite

    def waits(file: int, voxels: memoryview, at: int) -> int:
        nonlocal writes
        writes += 1
        if writes <= THREADS:
            together.wait(30)
        return pwrite(file, voxels, at)

    monkeypatch.setattr(os, "pwrite", waits)
    store.write(WHOLE, random(2))
    assert writes == 3 * 12
    np.testing.assert_array_equal(stored(path), random(2))


@pytest.mark.parametrize(("size", "threads"), [((4, 5, 5), 1), ((5, 5, 5), 2), (SIZE, 2)], ids=str)
def test_small_boxes_use_few_threads(path: Path, monkeypatch: pytest.MonkeyPatch, size: Vec3, threads: int) -> None:
    monkeypatch.setattr(hdf5_store, "THREAD_BYTES", 3 * 4 * PLANE)
    names: set[str] = set()
    pwrite = os.pwrite

    def slow(file: int, voxels: memoryview, at: int) -> int:
        names.add(threading.current_thread().name)
        time.sleep(0.05)
        return pwrite(file, voxels, at)

    monkeypatch.setattr(os, "pwrite", slow)
    store = opened(path, new=True)
    store.write(Box((0, 0, 0), size), random(2, size))
    store.close()
    assert len(names) == threads


def slow_writes(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[str]:
    """Let writes take a while, or fail as on a full disk; record what began and what ended."""
    pwrite = os.pwrite
    seen: list[str] = []

    def slow(file: int, voxels: memoryview, at: int) -> int:
        seen.append("began")
        if fails(at):
            seen.append("ended")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.05)
        seen.append("ended")
        return pwrite(file, voxels, at)

    monkeypatch.setattr(os, "pwrite", slow)
    return seen


@pytest.mark.parametrize("failing", [(0, 0, 0, 0), (2, 0, 0, 0), (1, 0, 1, 0)])
def test_failure_in_one_chunk_is_raised(
    store: Hdf5Store, path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, int, int, int]
) -> None:
    full = int(store._addresses[0][failing])
    with monkeypatch.context() as patch:
        seen = slow_writes(patch, lambda at: at == full)
        with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$") as caught:
            store.write(WHOLE, random(2))
        at_once = seen.copy()
        time.sleep(0.2)
    assert caught.value.errno == errno.ENOSPC
    assert seen == at_once  # nobody writes on
    assert seen.count("began") == seen.count("ended") < 3 * 12
    store.write(WHOLE, random(3))  # and it may be tried again
    np.testing.assert_array_equal(stored(path), random(3))


def test_interrupt_leaves_no_thread_writing(store: Hdf5Store, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = slow_writes(monkeypatch, lambda at: False)
    pwrite = os.pwrite
    own: list[int] = []

    def interrupted(file: int, voxels: memoryview, at: int) -> int:
        if threading.current_thread() is threading.main_thread():
            own.append(at)
            if len(own) == 2:
                raise KeyboardInterrupt
        return pwrite(file, voxels, at)

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write(WHOLE, before())
    at_once = seen.copy()
    time.sleep(0.2)
    assert seen == at_once
    assert seen.count("began") == seen.count("ended") < 3 * 12


def test_interrupt_waits_for_the_other_writer(store: Hdf5Store, monkeypatch: pytest.MonkeyPatch) -> None:
    join, pwrite = threading.Thread.join, os.pwrite
    joined, alive = [], []

    def slow(file: int, voxels: memoryview, at: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return pwrite(file, voxels, at)

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread)
        if len(joined) == 1:
            raise KeyboardInterrupt
        join(thread, timeout)
        alive.append(thread.is_alive())

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.write(WHOLE, before())
    assert alive == [False]


def test_refused_thread_is_reported(store: Hdf5Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        store.write(WHOLE, random(2))
    np.testing.assert_array_equal(stored(path), random(2))


def test_closed_store_leaves_no_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    seen: set[threading.Thread] = set()

    def looks(file: int, voxels: memoryview, at: int) -> int:
        seen.add(threading.current_thread())
        time.sleep(0.01)
        return pwrite(file, voxels, at)

    monkeypatch.setattr(os, "pwrite", looks)
    store = opened(path, new=True)
    store.write(WHOLE, before())
    others = seen - {threading.current_thread()}
    assert len(others) == THREADS - 1
    assert all(thread.daemon for thread in others), "a write that hangs would keep the process"
    assert not any(thread.is_alive() for thread in others)
    store.close()
    store.close()


def test_memory_of_writing_is_reserved(tmp_path: Path) -> None:
    largest = max(np.dtype(dtype).itemsize for dtype in OUTPUT_DTYPES)
    shape = (3, 3 * CHUNK, CHUNK, CHUNK)  # chunks of full size
    Hdf5Store.create(tmp_path / "out.h5", [OutputArray(shape)], np.dtype("f4"), {})
    voxels = np.ones(shape, np.float32)
    assert voxels.itemsize == largest
    tracemalloc.start()
    try:
        store = Hdf5Store(tmp_path / "out.h5", [OutputArray(shape)], voxels.dtype)
        store.write(Box((0, 0, 0), (3 * CHUNK - 1, CHUNK, CHUNK - 1)), voxels[:, :-1, :, :-1])
        _, peak = tracemalloc.get_traced_memory()
        store.close()
    finally:
        tracemalloc.stop()
    assert THREADS * CHUNK**3 * largest <= peak <= WRITER_BYTES


# --- several arrays ---

ARRAYS = [OutputArray((2, 7, 9, 8), "outputs/a"), OutputArray((1, 3, 20, 4), "outputs/b", {"offset": np.arange(3)})]


def of_several(path: Path) -> Hdf5Store:
    Hdf5Store.create(path, ARRAYS, np.dtype("f4"), {"job": "shared"})
    return Hdf5Store(path, ARRAYS, np.dtype("f4"))


def test_arrays_of_different_sizes_are_written_each(path: Path) -> None:
    store = of_several(path)
    voxels = [random(3, array.size)[: array.shape[0]] for array in ARRAYS]
    for number, (array, values) in enumerate(zip(ARRAYS, voxels, strict=True)):
        store.write(Box((0, 0, 0), array.size), values, number)
    store.sync()
    store.close()
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["outputs/a"], voxels[0])
        np.testing.assert_array_equal(file["outputs/b"], voxels[1][0])
    assert Hdf5Store.attributes_of(path) == {"job": "shared"}
    assert Hdf5Store.attributes_of(path, "outputs/b")["offset"].tolist() == [0, 1, 2]
    assert Hdf5Store.attributes_of(path, "outputs/c") == {}


def test_arrays_that_are_not_those_of_the_run_are_refused(path: Path) -> None:
    of_several(path).close()
    longer = OutputArray((1, 3, 20, 5), "outputs/b")
    with pytest.raises(OutputError, match=r"outputs/b holds \(1, 3, 20, 4\) float32, and this run writes"):
        Hdf5Store(path, [ARRAYS[0], longer], np.dtype("f4"))
    with pytest.raises(ResumeError, match="it holds no dataset outputs/c of its own"):
        Hdf5Store(path, [OutputArray((1, 3, 20, 5), "outputs/c")], np.dtype("f4"))


def test_arrays_behind_a_link_are_refused(path: Path) -> None:
    """Writing would follow the link to another file."""
    other = path.with_name("other.h5")
    of_several(other).close()
    for name in ("outputs", "outputs/a"):
        path.unlink(missing_ok=True)
        of_several(path).close()
        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = h5py.ExternalLink("other.h5", name)
        with pytest.raises(ResumeError, match="it holds no dataset outputs/a of its own"):
            Hdf5Store(path, ARRAYS, np.dtype("f4"))
        assert Hdf5Store.attributes_of(path, "outputs/a") == {}
