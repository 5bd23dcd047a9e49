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

from tests.support.cli import Place
from znnpy.patches import Box
from znnpy.volume.hdf5_store import Hdf5Store
from znnpy.volume.lock import OutputLock

pytestmark = pytest.mark.slow


def test_existing_output_is_refused(place: Place) -> None:
    place.out.write_text("precious")
    for arguments in ((), ("--resume",)):
        assert "--overwrite" in place.refusal(*place.arguments, *arguments)
    assert place.infer("--overwrite").exit_code == 0


def test_volume_as_output_is_refused(place: Place) -> None:
    arguments = ("infer", place.volume, "--network", place.folder / "net.yaml", "--out", place.volume)
    assert "--out" in place.refusal(*arguments, "--overwrite")


def test_missing_output_folder_is_refused(place: Place) -> None:
    assert str(place.folder / "gone") in place.refusal(*place.arguments[:-1], place.folder / "gone" / "out.h5")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_output_folder_is_refused(place: Place) -> None:
    folder = place.folder / "readonly"
    folder.mkdir(mode=0o555)
    assert str(folder) in place.refusal(*place.arguments[:-1], folder / "out.h5")


def test_second_run_with_the_same_output_is_refused(place: Place) -> None:
    lock = OutputLock(place.out.with_name("out.h5.lock"), place.out)
    lock.hold()
    assert "another run is writing" in place.refusal(*place.arguments)
    lock.release()


def test_too_little_disk_space_is_refused_before_the_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1234, 1234))
    sentence = place.refusal(*place.arguments)
    assert "1.21 KiB" in sentence
    assert "35.6 KiB" in sentence  # 2 maps of 15x16x19 float32


def test_full_disk_during_a_run_leaves_a_run_to_resume(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.infer("--patch", "4,4,4").exit_code == 0
    expected = place.prediction()
    place.out.unlink()
    with monkeypatch.context() as patch:
        write, calls = Hdf5Store.write, count()

        def fill_up(store: Hdf5Store, box: Box, voxels: Any, number: int = 0) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, box, voxels)

        patch.setattr(Hdf5Store, "write", fill_up)
        result = place.infer("--patch", "4,4,4")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: the disk is full")
    assert "35.6 KiB" in last
    assert "--resume" in last
    assert not place.out.exists()
    assert place.infer("--patch", "4,4,4", "--resume").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), expected)


def test_resume_with_changed_options_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ("--patch", "4,4,4", "--cover", "columns")
    with monkeypatch.context() as patch:
        write, calls = Hdf5Store.write, count()

        def fill_up(store: Hdf5Store, box: Box, voxels: Any, number: int = 0) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, box, voxels)

        patch.setattr(Hdf5Store, "write", fill_up)
        assert place.infer(*begun).exit_code == 1
    sentence = place.refusal(*place.arguments, "--resume", "--cover", "patches")
    for part in ("--cover columns", "--cover patches", "--overwrite"):
        assert part in sentence
    assert place.infer("--resume").exit_code == 0
    resumed = place.prediction()
    assert place.infer(*begun, "--overwrite").exit_code == 0
    np.testing.assert_array_equal(resumed, place.prediction())


@pytest.mark.parametrize("field", ["network", "volume", "output_dtype", "roi"])
def test_resume_of_another_job_is_refused(place: Place, field: str) -> None:
    assert place.infer().exit_code == 0
    more: tuple[object, ...] = ()
    if field == "network":
        place.write_network(normalise={"mean": 121.0, "std": 40.0})
    elif field == "volume":
        place.write_volume(np.zeros((20, 23, 25), np.uint8))
    elif field == "roi":
        more = ("--roi", "0:19,:,:")
    else:
        more = ("--output-dtype", "float16")
    sentence = place.refusal(*place.arguments, "--resume", *more)
    assert field in sentence


def test_resume_of_a_finished_run_does_nothing(place: Place) -> None:
    assert place.infer().exit_code == 0
    before = place.state()
    result = place.infer("--resume")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{place.out}: 15x16x19, 4,560 voxels, ")
    assert result.stdout.count("\n") == 1
    assert place.state() == before


def test_folder_in_place_of_the_journal_is_refused(place: Place) -> None:
    place.out.with_name("out.h5.journal").mkdir()
    assert "out.h5.journal: Is a directory" in place.refusal(*place.arguments, "--resume")


def test_advice_about_a_foreign_journal_works(place: Place) -> None:
    journal = place.out.with_name("out.h5.journal")
    journal.write_text("notes\n")
    for option in ("--resume", "--overwrite"):
        said = place.refusal(*place.arguments, option)
        assert str(journal) in said
        assert "move it away" in said
    journal.rename(place.folder / "notes")
    assert place.infer("--resume").exit_code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_unreadable_journal_is_refused(place: Place) -> None:
    journal = place.out.with_name("out.h5.journal")
    journal.write_text("{}")
    journal.chmod(0)
    result = place.infer("--resume")
    assert result.exit_code == 1
    assert "Permission denied" in result.stderr


@pytest.mark.parametrize("name", ["out.h5.old", "out.h5.journal.new", "out.h5.draft"])
def test_users_files_beside_the_output_survive(place: Place, name: str) -> None:
    """Files survive, and so does a folder under a name that earlier versions removed."""
    beside = place.folder / name
    beside.write_text("precious")
    for arguments in ((), ("--overwrite",), ("--resume",)):
        assert place.infer(*arguments).exit_code == 0
        assert beside.read_text() == "precious"
    beside.unlink()
    beside.mkdir()
    (beside / "thesis.tex").write_text("precious")
    assert place.infer("--overwrite").exit_code == 0
    assert (beside / "thesis.tex").read_text() == "precious"


def test_folder_holding_the_volume_is_not_replaced(place: Place) -> None:
    zarr = pytest.importorskip("zarr")
    folder = place.folder / "data.zarr"
    zarr.open_group(folder, mode="w").create_array("raw.zarr", data=np.full((20, 23, 25), 7, "u1"))
    arguments = ("infer", folder / "raw.zarr", "--network", place.folder / "net.yaml", "--out", folder, "--overwrite")
    assert str(folder) in place.refusal(*arguments)
    assert (zarr.open_group(folder, mode="r")["raw.zarr"][:] == 7).all()


@pytest.mark.parametrize("ending", ["journal", "journal.new", "partial", "lock"])
@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_link_to_the_volume_is_not_written_through(place: Place, ending: str, link: str) -> None:
    before = place.state()["volume.h5"]
    at = place.folder / f"out.h5.{ending}"
    if link == "hard":
        at.hardlink_to(place.volume)
    else:
        at.symlink_to(place.volume)
    for arguments in (("--overwrite",), ("--resume",)):
        result = place.infer(*arguments)
        assert result.exit_code == (0 if ending == "journal.new" else 1)
        assert "Traceback" not in result.stderr
        assert os.path.lexists(at)
        assert place.state()["volume.h5"] == before


@pytest.mark.parametrize("name", ["x.zarr", "x.h5"])
def test_irreplaceable_output_is_refused_before_the_run(place: Place, name: str) -> None:
    if name == "x.zarr":
        pytest.importorskip("zarr")
        (place.folder / name).write_text("a file")
    else:
        (place.folder / name).mkdir()
    arguments = ("infer", place.volume, "--network", place.folder / "net.yaml", "--out", place.folder / name)
    assert name in place.refusal(*arguments, "--overwrite")


def test_dangling_link_is_not_replaced(place: Place) -> None:
    place.out.symlink_to("nothing")
    assert "--overwrite" in place.refusal(*place.arguments)
    assert place.out.is_symlink()


@pytest.mark.parametrize("what", ["volume.h5", "net.yaml", "net.npz"])
def test_inputs_of_a_run_are_not_replaced(place: Place, what: str) -> None:
    plan = ("plan", place.folder / "net.yaml", "--volume", place.volume, "--overwrite", "--out")
    (place.folder / "same.h5").hardlink_to(place.folder / what)
    arguments = ("infer", place.volume, "--network", place.folder / "net.yaml", "--overwrite", "--out")
    assert "--out" in place.refusal(*arguments, place.folder / "same.h5")
    if what != "net.npz":  # plans read no weights
        assert "--out" in place.refusal(*plan, place.folder / what)


def test_journal_of_another_run_beside_the_output_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trusted this journal would skip columns that are not on disk, and end with wrong voxels."""
    small, journal = ("--patch", "4,4,4"), place.out.with_name("out.h5.journal")
    kept = place.folder / "kept"

    def stop_after(boxes: int) -> None:
        with monkeypatch.context() as patch:
            write, calls = Hdf5Store.write, count()

            def fill_up(store: Hdf5Store, box: Box, voxels: Any, number: int = 0) -> None:
                if next(calls) == boxes:
                    raise OSError(errno.ENOSPC, "No space left on device")
                write(store, box, voxels)

            patch.setattr(Hdf5Store, "write", fill_up)
            assert place.infer(*small, "--overwrite").exit_code == 1

    stop_after(12)
    journal.rename(kept)
    place.out.with_name("out.h5.partial").unlink()
    stop_after(3)
    kept.replace(journal)
    assert "journal" in place.refusal(*place.arguments, *small, "--resume")
