"""Outputs: what is written, what is refused, what survives and what is resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import OutputError, ResumeError
from znnpy.patches import Box, cover
from znnpy.shapes import Vec3
from znnpy.volume import store as store_module
from znnpy.volume.journal import JournalHeader, read_header
from znnpy.volume.output import Mode, Output
from znnpy.volume.store import Hdf5Store, stored_bytes

SIZE: Vec3 = (11, 14, 9)
PATCH: Vec3 = (4, 7, 5)
COLUMNS = cover(SIZE, PATCH)
JOB: dict[str, Any] = {
    "network": "abc",
    "weights": "def",
    "volume": {"bytes": 100, "mtime_ns": 5, "dtype": "uint8"},
    "roi": "",
    "border": "valid",
    "output_dtype": "float32",
    "allow_nan": False,
}
HEADER = JournalHeader(job=JOB, settings={}, plan='{"plan": 1}', blas="b", columns=len(COLUMNS))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that no patch fits, several along every axis."""
    monkeypatch.setattr(store_module, "CHUNK", 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "volume.h5").write_bytes(b"the volume")
    return tmp_path / "out.h5"


def output(path: Path, mode: Mode = "new", maps: int = 1, dtype: str = "f4", **job: Any) -> Output:
    return Output(
        path,
        volume=path.with_name("volume.h5"),
        shape=(maps, *SIZE),
        dtype=np.dtype(dtype),
        mode=mode,
        job={**JOB, **job},
    )


def expected(maps: int = 1, dtype: str = "f4") -> npt.NDArray[Any]:
    return np.random.default_rng(5).integers(0, 200, (maps, *SIZE)).astype(dtype)


def write(opened: Output, columns: range, voxels: npt.NDArray[Any]) -> None:
    for index in columns:
        for step in COLUMNS[index].steps:
            opened.write(step.write, voxels[(slice(None), *step.write.slices)])
        opened.finish_column(index)


def finish(path: Path, mode: Mode = "new", maps: int = 1, dtype: str = "f4") -> None:
    with output(path, mode, maps, dtype) as opened:
        opened.begin(HEADER, {"offset": np.array([1, 2, 3]), "plan": "p" * 100_000})
        write(opened, range(len(COLUMNS)), expected(maps, dtype))
        opened.complete()


def interrupt(path: Path, columns: int, mode: Mode = "new") -> None:
    with output(path, mode) as opened:
        opened.begin(HEADER, {})
        write(opened, range(columns), expected())


def stored(path: Path) -> npt.NDArray[Any]:
    with h5py.File(path) as file:
        return np.asarray(file["prediction"])


def names(path: Path) -> set[str]:
    return {item.name for item in path.parent.iterdir()}


@pytest.mark.parametrize("dtype", ["f4", "f2", "u1"])
@pytest.mark.parametrize("maps", [1, 3])
def test_every_voxel_is_written(path: Path, maps: int, dtype: str) -> None:
    finish(path, "new", maps, dtype)
    assert names(path) == {"volume.h5", "out.h5"}
    with h5py.File(path) as file:
        dataset = file["prediction"]
        assert dataset.shape == (SIZE if maps == 1 else (3, *SIZE))
        assert dataset.chunks == ((6, 5, 5) if maps == 1 else (1, 6, 5, 5))
        assert dataset.dtype == np.dtype(dtype)
        assert dataset.compression is None
        np.testing.assert_array_equal(dataset[:].reshape(maps, *SIZE), expected(maps, dtype))
        assert dataset.attrs["offset"].tolist() == [1, 2, 3]
        assert len(dataset.attrs["plan"]) == 100_000
        assert json.loads(dataset.attrs["job"]) == JOB


@pytest.mark.parametrize("maps", [1, 3])
def test_boxes_at_random(tmp_path: Path, maps: int) -> None:
    rng = np.random.default_rng(11)
    shape = (maps, *SIZE)
    Hdf5Store.create(tmp_path / "s.h5", shape, np.dtype("f4"), {})
    opened = Hdf5Store(tmp_path / "s.h5", shape, np.dtype("f4"))
    twin = np.zeros(shape, np.float32)
    for _ in range(40):
        ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in SIZE]
        box = Box((ends[0][0], ends[1][0], ends[2][0]), (ends[0][1], ends[1][1], ends[2][1]))
        voxels = rng.standard_normal((maps, *box.size)).astype(np.float32)
        opened.write(box, voxels)
        twin[(slice(None), *box.slices)] = voxels
    opened.close()
    np.testing.assert_array_equal(stored(tmp_path / "s.h5").reshape(shape), twin)


def test_a_wrong_array_is_refused(path: Path) -> None:
    with output(path) as opened:
        with pytest.raises(ValueError, match="is not open for writing"):
            opened.write(COLUMNS[0].steps[0].write, expected())
        opened.begin(HEADER, {})
        with pytest.raises(ValueError, match=r"float64 \(1, 4, 7, 5\) does not fill"):
            opened.write(Box((0, 0, 0), PATCH), np.zeros((1, *PATCH)))
        with pytest.raises(ValueError, match="no column 12 of 12"):
            opened.finish_column(12)
        with pytest.raises(ValueError, match=r"12 of 12 columns of .* are not finished"):
            opened.complete()


def test_readable_while_it_is_written(path: Path) -> None:
    with output(path) as opened:
        opened.begin(HEADER, {})
        write(opened, range(3), expected())
        seen = stored(path.with_name("out.h5.partial"))
        np.testing.assert_array_equal(
            seen[COLUMNS[2].steps[0].write.slices], expected()[0][COLUMNS[2].steps[0].write.slices]
        )


def test_interrupted_then_resumed(path: Path) -> None:
    interrupt(path, 5)
    assert names(path) == {"volume.h5", "out.h5.partial", "out.h5.journal"}
    assert read_header(path) == HEADER
    with output(path, "resume") as opened:
        assert opened.header == HEADER
        assert opened.done == frozenset(range(5))
        assert not opened.finished
        with pytest.raises(ValueError, match="was begun before"):
            opened.begin(HEADER, {})
        write(opened, range(5, 8), expected())
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(8))
        write(opened, range(8, len(COLUMNS)), expected())
        opened.complete()
    assert names(path) == {"volume.h5", "out.h5"}
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_an_unfinished_column_does_not_count(path: Path) -> None:
    with output(path) as opened:
        opened.begin(HEADER, {})
        write(opened, range(2), expected())
        step = COLUMNS[2].steps[0]
        opened.write(step.write, expected()[(slice(None), *step.write.slices)])
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(2))


def test_an_exception_inside_keeps_what_was_finished(path: Path) -> None:
    def work() -> None:
        with output(path) as opened:
            opened.begin(HEADER, {})
            write(opened, range(4), expected())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(4))


def test_resume_begins_when_there_is_nothing(path: Path) -> None:
    finish(path, "resume")
    np.testing.assert_array_equal(stored(path), expected()[0])


@pytest.mark.parametrize("left", ["out.h5.partial", "out.h5.journal"])
def test_resume_begins_when_half_is_missing(path: Path, left: str) -> None:
    interrupt(path, 5)
    for name in {"out.h5.partial", "out.h5.journal"} - {left}:
        path.with_name(name).unlink()
    finish(path, "resume")
    assert names(path) == {"volume.h5", "out.h5"}
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_resume_of_what_is_finished(path: Path) -> None:
    finish(path)
    before = path.stat().st_mtime_ns
    path.with_name("out.h5.journal").write_text("left by a run killed at the very end")
    with output(path, "resume") as opened:
        assert opened.finished
        assert opened.header is None
        opened.complete()
    assert path.stat().st_mtime_ns == before
    assert names(path) == {"volume.h5", "out.h5"}


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"network": "xyz"}, 'network was "abc" and is "xyz" now'),
        ({"weights": "xyz"}, 'weights was "def" and is "xyz" now'),
        ({"volume": {"bytes": 100, "mtime_ns": 6, "dtype": "uint8"}}, "volume.mtime_ns was 5 and is 6 now"),
        ({"roi": "1:,:,:"}, 'roi was "" and is "1:,:,:" now'),
        ({"border": "reflect"}, 'border was "valid" and is "reflect" now'),
        ({"output_dtype": "uint8"}, 'output_dtype was "float32" and is "uint8" now'),
        ({"allow_nan": True}, "allow_nan was false and is true now"),
        ({"extra": 1}, "extra was not given and is 1 now"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_resume_of_another_job(path: Path, job: dict[str, Any], message: str) -> None:
    interrupt(path, 5)
    with pytest.raises(
        ResumeError, match=rf"the unfinished .*partial belongs to another job: {re.escape(message)}; .*"
    ):
        output(path, "resume", **job).__enter__()
    with output(path, "resume") as opened:
        write(opened, range(5, len(COLUMNS)), expected())
        opened.complete()
    with pytest.raises(ResumeError, match=rf"the finished .*out\.h5 belongs to another job: {re.escape(message)}; .*"):
        output(path, "resume", **job).__enter__()
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_resume_of_a_foreign_file(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ResumeError, match=r"out\.h5 exists and was not written by znnpy; give --overwrite"):
        output(path, "resume").__enter__()
    path.unlink()
    with h5py.File(path, "w") as file:
        file["prediction"] = np.zeros(3)
    with pytest.raises(ResumeError, match="was not written by znnpy"):
        output(path, "resume").__enter__()


def test_resume_with_another_shape(path: Path) -> None:
    interrupt(path, 5)
    with pytest.raises(
        OutputError, match=r"holds \(1, 11, 14, 9\) float32, and this run writes \(2, 11, 14, 9\) float"
    ):
        output(path, "resume", maps=2).__enter__()
    assert "out.h5.lock" not in names(path)


def test_new_refuses_what_exists(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(OutputError, match=r"the output .*out\.h5 exists; give --overwrite to replace it, or another"):
        output(path).__enter__()
    assert path.read_text() == "precious"
    path.unlink()
    interrupt(path, 5)
    message = (
        r"an unfinished run left .*out\.h5\.partial with 5 of 12 columns done; go on with --resume, or start again"
    )
    with pytest.raises(OutputError, match=message):
        output(path).__enter__()


def test_overwrite_keeps_the_old_until_the_new_is_complete(path: Path) -> None:
    path.write_text("precious")
    interrupt(path, 5, "overwrite")
    assert path.read_text() == "precious"
    interrupt(path, 3, "overwrite")
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(3))
        assert path.read_text() == "precious"
    finish(path, "overwrite")
    np.testing.assert_array_equal(stored(path), expected()[0])
    assert names(path) == {"volume.h5", "out.h5"}


def test_a_journal_never_vouches_for_another_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(path, 5)

    def killed(*what: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Hdf5Store, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        finish(path, "overwrite")
    assert names(path) == {"volume.h5"}


def test_the_volume_is_not_the_output(path: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume.h5"
    (tmp_path / "soft.h5").symlink_to(volume)
    (tmp_path / "hard.h5").hardlink_to(volume)
    (tmp_path / "out.h5.partial").symlink_to(volume)
    for name in ("volume.h5", "soft.h5", "hard.h5", "out.h5"):
        for mode in ("new", "overwrite", "resume"):
            with pytest.raises(OutputError, match=r"is the volume .*volume\.h5 itself; give another name with --out"):
                output(tmp_path / name, mode).__enter__()
    assert volume.read_bytes() == b"the volume"


@pytest.mark.parametrize("name", ["out.npy", "out", "out.tif"])
def test_only_formats_that_are_written(path: Path, name: str) -> None:
    message = rf"{name} has suffix '.*', and only \.h5, \.hdf5, \.hdf and \.zarr are written; give one"
    with pytest.raises(OutputError, match=message):
        output(path.with_name(name))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no folder .*nowhere to write out\.h5 in; create it first"):
        output(tmp_path / "nowhere" / "out.h5").__enter__()
    (tmp_path / "folder.h5").mkdir()
    with pytest.raises(OutputError, match="is a folder; give the name of a file in --out"):
        output(tmp_path / "folder.h5").__enter__()


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write everywhere; be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_without_permission(nobody: None) -> None:
    with pytest.raises(OutputError, match=r"/ may not be written to \(Permission denied\); change its permissions or"):
        output(Path("/out.h5")).__enter__()


def test_two_runs_one_output(path: Path) -> None:
    with output(path) as first:
        first.begin(HEADER, {})
        write(first, range(2), expected())
        for mode in ("new", "overwrite", "resume"):
            with pytest.raises(
                OutputError, match=r"another run is writing .*out\.h5 \(it holds .*out\.h5\.lock\); wait"
            ):
                output(path, mode).__enter__()
        write(first, range(2, len(COLUMNS)), expected())
        first.complete()
    assert names(path) == {"volume.h5", "out.h5"}
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_a_lock_left_by_a_killed_run_does_not_block(path: Path) -> None:
    path.with_name("out.h5.lock").touch()
    finish(path)
    assert names(path) == {"volume.h5", "out.h5"}


Usage = namedtuple("Usage", "total used free")


def test_not_enough_disk_is_known_before_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = (2 * 3 * 2) * (6 * 5 * 5) * 4  # chunks of 6x5x5 float32
    assert stored_bytes((1, *SIZE), np.dtype("f4")) == needed
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, needed - 1))
    message = rf"the output needs {needed} bytes \(0\.0 MiB\) and .* has {needed - 1} free \(0\.0 MiB\); make room"
    with pytest.raises(OutputError, match=message):
        output(path).__enter__()
    assert names(path) == {"volume.h5"}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, needed))
    finish(path)


TMPFS_BYTES = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_full_in_mid_run(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, patch = (32, 64, 64), (8, 64, 64)  # half the disk, four columns
    columns = cover(size, patch)
    monkeypatch.setattr(store_module, "CHUNK", 8)
    path = small_disk / "out.h5"
    voxels = np.random.default_rng(1).standard_normal((1, *size)).astype(np.float32)

    def opened(mode: Mode) -> Output:
        return Output(path, volume=path, shape=(1, *size), dtype=np.dtype("f4"), mode=mode, job=JOB)

    def work(opened: Output, indices: range) -> None:
        for index in indices:
            box = columns[index].steps[0].write
            opened.write(box, voxels[(slice(None), *box.slices)])
            opened.finish_column(index)

    def until_full() -> None:
        with opened("new") as first:
            first.begin(JournalHeader(JOB, {}, "", "", 4), {})
            work(first, range(1))
            fill(small_disk / "hog")
            work(first, range(1, 4))

    with pytest.raises(OutputError) as caught:
        until_full()
    assert str(caught.value) == (
        f"the disk is full: {path}.partial needs 524288 bytes in all and {small_disk} has 0 free; "
        "1 of 4 columns are kept: make room and give --resume"
    )
    (small_disk / "hog").unlink()
    with opened("resume") as second:
        assert second.done == {0}
        work(second, range(1, 4))
        second.complete()
    np.testing.assert_array_equal(stored(path), voxels[0])


def fill(hog: Path) -> None:
    """Take all the room there is."""
    room = True
    with hog.open("wb", buffering=0) as file:
        while room:
            try:
                file.write(bytes(4096))
            except OSError:
                room = False


def test_a_failed_sync_is_not_recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(descriptor: int) -> None:
        monkeypatch.undo()  # a second fsync would report success although the data are lost
        raise OSError(5, "Input/output error")

    def work() -> None:
        with output(path) as opened:
            opened.begin(HEADER, {})
            write(opened, range(1), expected())
            opened._sync_due = 0.0
            monkeypatch.setattr(os, "fsync", fails_once)
            write(opened, range(1, 2), expected())

    monkeypatch.setattr(store_module, "CHUNK", 64)
    with pytest.raises(OutputError, match=r"out\.h5 cannot be written: \[Errno 5\] Input/output error; give another"):
        work()
    with output(path, "resume") as opened:
        assert opened.done == {0}


def test_small_columns_share_a_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = Hdf5Store.sync

    def counted(self: Hdf5Store) -> None:
        synced.append(1)
        real(self)

    monkeypatch.setattr(Hdf5Store, "sync", counted)
    finish(path)
    assert len(synced) <= 3  # the first column, the end, and one for a slow second


@pytest.mark.parametrize("leave", ["by an error", "by a kill"])
def test_a_run_without_a_finished_column_leaves_nothing_in_the_way(path: Path, leave: str) -> None:
    """Its advice may be to run with other settings: the files of the failed run must not refuse that."""
    opened = output(path).__enter__()
    opened.begin(HEADER, {})
    opened.write(COLUMNS[0].steps[0].write, expected()[(slice(None), *COLUMNS[0].steps[0].write.slices)])
    left = {name: (path.parent / name).read_bytes() for name in names(path)}
    opened.__exit__(None, None, None)
    assert names(path) == {"volume.h5"}
    if leave == "by a kill":
        for name, content in left.items():
            (path.parent / name).write_bytes(content)
    for mode in ("resume", "new"):
        with output(path, mode, allow_nan=True) as again:
            assert again.header is None
            again.begin(HEADER, {})


def test_a_place_that_takes_no_lock_is_not_taken_for_another_run() -> None:
    with (
        pytest.raises(OutputError, match=r"/proc takes no file out\.h5\.lock, which keeps a second run away"),
        output(Path("/proc/out.h5")),
    ):
        pass


def test_a_folder_without_a_name_is_no_output() -> None:
    with pytest.raises(OutputError, match=r"the output '\.' is a folder"):
        Output(Path("."), volume=Path("v.h5"), shape=(1, *SIZE), dtype=np.dtype("f4"), mode="new", job={})
