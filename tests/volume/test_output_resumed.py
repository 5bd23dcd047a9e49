"""Outputs that were begun before: what survives, what is resumed, and what is refused then."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.messages import assert_holds
from tests.support.small_outputs import (
    COLUMNS,
    HEADER,
    JOB,
    expected,
    finish,
    furnished,
    interrupt,
    names,
    output,
    stored,
    write,
)
from znnpy.errors import OutputError, ResumeError
from znnpy.patches import cover
from znnpy.volume import store as store_module
from znnpy.volume.chunk_writes import ChunkFiles
from znnpy.volume.hdf5_store import Hdf5Store
from znnpy.volume.journal import Journal, JournalHeader, read_header
from znnpy.volume.output import Mode, Output
from znnpy.volume.store import OutputArray


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that no patch fits, several along every axis."""
    monkeypatch.setattr(store_module, "CHUNK", 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return furnished(tmp_path)


def test_interrupted_run_resumes_byte_for_byte(path: Path) -> None:
    interrupt(path, 5)
    assert names(path) == {"volume.h5", "out.h5.partial", "out.h5.journal"}
    assert read_header(path) == HEADER
    with output(path, "resume") as opened:
        assert opened.header == HEADER
        assert opened.done == frozenset(range(5))
        assert not opened.finished
        with pytest.raises(ValueError, match="was started before"):
            opened.begin(HEADER, {})
        write(opened, range(5, 8), expected())
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(8))
        write(opened, range(8, len(COLUMNS)), expected())
        opened.complete()
    assert names(path) == {"volume.h5", "out.h5"}
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_unfinished_column_does_not_count(path: Path) -> None:
    with output(path) as opened:
        opened.begin(HEADER, {})
        write(opened, range(2), expected())
        step = COLUMNS[2].steps[0]
        opened.write(step.write, expected()[(slice(None), *step.write.slices)])
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(2))


def test_exception_keeps_finished_columns(path: Path) -> None:
    def work() -> None:
        with output(path) as opened:
            opened.begin(HEADER, {})
            write(opened, range(4), expected())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    with output(path, "resume") as opened:
        assert opened.done == frozenset(range(4))


def test_resume_without_files_begins_a_run(path: Path) -> None:
    finish(path, "resume")
    np.testing.assert_array_equal(stored(path), expected()[0])


@pytest.mark.parametrize("left", ["out.h5.partial", "out.h5.journal"])
def test_resume_with_half_of_the_files_begins_a_run(path: Path, left: str) -> None:
    interrupt(path, 5)
    for name in {"out.h5.partial", "out.h5.journal"} - {left}:
        path.with_name(name).unlink()
    finish(path, "resume")
    assert names(path) == {"volume.h5", "out.h5"}
    np.testing.assert_array_equal(stored(path), expected()[0])


def test_resume_of_a_finished_output_does_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:  # at the very end
        killed.setattr(Journal, "remove", Journal.close)
        finish(path)
    assert names(path) == {"volume.h5", "out.h5", "out.h5.journal"}
    before = path.stat().st_mtime_ns
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
def test_resume_of_another_job_is_refused(path: Path, job: dict[str, Any], message: str) -> None:
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


def test_resume_of_a_foreign_file_is_refused(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ResumeError, match=r"out\.h5 exists and was not written by znnpy; give overwrite=True"):
        output(path, "resume").__enter__()
    path.unlink()
    with h5py.File(path, "w") as file:
        file["prediction"] = np.zeros(3)
    with pytest.raises(ResumeError, match="was not written by znnpy"):
        output(path, "resume").__enter__()


def test_resume_with_another_shape_is_refused(path: Path) -> None:
    interrupt(path, 5)
    with pytest.raises(
        OutputError, match=r"holds \(1, 11, 14, 9\) float32, and this run writes \(2, 11, 14, 9\) float"
    ):
        output(path, "resume", maps=2).__enter__()
    assert "out.h5.lock" not in names(path)


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


def test_journal_never_vouches_for_another_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(path, 5)

    def killed(*what: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Hdf5Store, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        finish(path, "overwrite")
    assert names(path) == {"volume.h5"}


TMPFS_BYTES = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_during_a_run_leaves_a_run_to_resume(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, patch = (32, 64, 64), (8, 64, 64)  # half the disk, four columns
    columns = cover(size, patch)
    monkeypatch.setattr(store_module, "CHUNK", 8)
    path = small_disk / "out.h5"
    voxels = np.random.default_rng(1).standard_normal((1, *size)).astype(np.float32)

    def opened(mode: Mode) -> Output:
        return Output(path, inputs={}, arrays=(OutputArray((1, *size)),), dtype=np.dtype("f4"), mode=mode, job=JOB)

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
    needs = f"{path}.partial needs 512 KiB"
    assert_holds(caught.value, "the disk is full", needs, f"{small_disk} has 0 B free", "1 of 4 columns", "resume=True")
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


def test_column_with_a_failed_sync_is_not_recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(descriptor: int) -> None:
        monkeypatch.undo()  # a second fsync would report success although the data are lost
        raise OSError(5, "Input/output error")

    def work() -> None:
        with output(path) as opened:
            opened.begin(HEADER, {})
            write(opened, range(1), expected())
            opened._record._due = 0.0
            monkeypatch.setattr(os, "fsync", fails_once)
            write(opened, range(1, 2), expected())

    monkeypatch.setattr(store_module, "CHUNK", 64)
    with pytest.raises(OutputError, match=r"out\.h5 cannot be written: \[Errno 5\] Input/output error; give another"):
        work()
    with output(path, "resume") as opened:
        assert opened.done == {0}


@pytest.mark.parametrize("leave", ["by an error", "by a kill"])
def test_run_without_a_finished_column_leaves_no_obstacle(path: Path, leave: str) -> None:
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


def write_slowly(path: Path) -> None:
    """Write all columns, so that the files of one are written while the next ones come."""
    with output(path) as opened:
        opened.begin(HEADER, {}, [COLUMNS])
        for column in range(len(COLUMNS)):
            write(opened, range(column, column + 1), expected())
            time.sleep(0.05)


def test_columns_of_a_file_that_could_not_be_written_are_not_on_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path.with_name("out.zarr")
    written = 0

    def wait(self: ChunkFiles, future: Any, begin: object) -> None:
        nonlocal written
        future.result()
        written += 1
        if written == 3:  # the error of a full disk comes while other columns are written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(ChunkFiles, "_wait_for", wait)
        with pytest.raises(OutputError, match="the disk is full") as caught:
            write_slowly(path)
    assert not hasattr(caught.value, "__notes__")  # the same error, which came again on leaving
    with output(path, "resume") as opened:
        assert opened.done <= {0, 1}  # each has a file of its own here
