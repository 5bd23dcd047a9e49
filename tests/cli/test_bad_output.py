"""Bad outputs: exit 1, one sentence with the numbers and what to do, and no file in the folder changes."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from itertools import count
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from place import Place

from znnpy.patches import Box
from znnpy.volume.store import Hdf5Store


def test_output_exists(place: Place) -> None:
    place.out.write_text("precious")
    assert "exists; give --overwrite to replace it, or another --out" in place.refusal(*place.words)
    assert "was not written by znnpy" in place.refusal(*place.words, "--resume")
    assert place.infer("--overwrite").exit_code == 0


def test_output_is_the_volume(place: Place) -> None:
    words = ("infer", place.volume, "--network", place.folder / "net.yaml", "--out", place.volume)
    assert "itself" in place.refusal(*words, "--overwrite")


def test_output_folder_is_missing(place: Place) -> None:
    assert "there is no folder" in place.refusal(*place.words[:-1], place.folder / "gone" / "out.h5")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_folder_is_read_only(place: Place) -> None:
    folder = place.folder / "readonly"
    folder.mkdir(mode=0o555)
    assert "may not be written to" in place.refusal(*place.words[:-1], folder / "out.h5")


def test_two_runs_writing_one_output(place: Place) -> None:
    with FileLock(place.out.with_name("out.h5.lock")):
        assert "another run is writing" in place.refusal(*place.words)


def test_too_little_room_is_known_before_the_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1234, 1234))
    sentence = place.refusal(*place.words)
    assert "1234 free" in sentence
    assert "needs 36480 bytes" in sentence  # 2 maps of 15x16x19 float32


def test_disk_full_in_mid_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.infer("--patch", "4,4,4").exit_code == 0
    expected = place.prediction()
    place.out.unlink()
    with monkeypatch.context() as patch:
        write, calls = Hdf5Store.write, count()

        def fill_up(store: Hdf5Store, box: Box, voxels: Any) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, box, voxels)

        patch.setattr(Hdf5Store, "write", fill_up)
        result = place.infer("--patch", "4,4,4")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: the disk is full: ")
    assert "needs 36480 bytes in all" in last
    assert "make room and give --resume" in last
    assert not place.out.exists()
    assert place.infer("--patch", "4,4,4", "--resume").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), expected)


def test_words_that_the_run_did_not_begin_with(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ("--patch", "4,4,4", "--cover", "columns")
    with monkeypatch.context() as patch:
        write, calls = Hdf5Store.write, count()

        def fill_up(store: Hdf5Store, box: Box, voxels: Any) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, box, voxels)

        patch.setattr(Hdf5Store, "write", fill_up)
        assert place.infer(*begun).exit_code == 1
    assert place.refusal(*place.words, "--resume", "--cover", "patches") == (
        "the run began with --cover columns, and now it is patches; leave it out, or start again with --overwrite"
    )
    assert place.infer("--resume").exit_code == 0
    resumed = place.prediction()
    assert place.infer(*begun, "--overwrite").exit_code == 0
    np.testing.assert_array_equal(resumed, place.prediction())


@pytest.mark.parametrize("field", ["network", "volume", "output_dtype", "roi"])
def test_resume_of_another_job(place: Place, field: str) -> None:
    assert place.infer().exit_code == 0
    more: tuple[object, ...] = ()
    if field == "network":
        place.write_network(normalise={"mean": 1.0, "std": 1.0})
    elif field == "volume":
        place.write_volume(np.zeros((20, 23, 25), np.uint8))
    elif field == "roi":
        more = ("--roi", "0:19,:,:")
    else:
        more = ("--output-dtype", "float16")
    sentence = place.refusal(*place.words, "--resume", *more)
    assert "belongs to another job" in sentence
    assert field in sentence


def test_resume_of_a_finished_run_does_nothing(place: Place) -> None:
    assert place.infer().exit_code == 0
    before = place.state()
    result = place.infer("--resume")
    assert result.exit_code == 0
    assert result.stdout == f"{place.out}: 15x16x19, 4,560 voxels, complete already: nothing to do\n"
    assert place.state() == before


def test_journal_that_is_a_folder(place: Place) -> None:
    place.out.with_name("out.h5.journal").mkdir()
    assert "cannot read the journal" in (said := place.refusal(*place.words, "--resume"))
    assert "out.h5.journal: Is a directory, so what was finished is not known" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_journal_that_may_not_be_read(place: Place) -> None:
    journal = place.out.with_name("out.h5.journal")
    journal.write_text("{}")
    journal.chmod(0)
    sentence = "Permission denied, so what was finished is not known"
    result = place.infer("--resume")
    assert result.exit_code == 1
    assert sentence in result.stderr
