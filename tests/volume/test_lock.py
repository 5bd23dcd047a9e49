"""The lock of an output: one holder, also where its file was removed, or the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from znnpy.errors import OutputError
from znnpy.volume.lock import OutputLock


def lock(folder: Path) -> OutputLock:
    return OutputLock(folder / "out.h5.lock", folder / "out.h5")


def test_lock_has_one_holder(tmp_path: Path) -> None:
    first, second = lock(tmp_path), lock(tmp_path)
    first.hold()
    first.hold()
    with pytest.raises(
        OutputError, match=r"another run is writing .*out\.h5 \(it holds .*out\.h5\.lock\); wait for it"
    ):
        second.hold()
    first.release()
    first.release()
    assert not list(tmp_path.iterdir())
    second.hold()
    second.release()


def test_removed_lock_is_taken_again_or_belongs_to_the_next(tmp_path: Path) -> None:
    first, second = lock(tmp_path), lock(tmp_path)
    first.hold()
    (tmp_path / "out.h5.lock").unlink()
    first.hold()
    assert (tmp_path / "out.h5.lock").exists()
    (tmp_path / "out.h5.lock").unlink()
    second.hold()
    with pytest.raises(OutputError, match="another run is writing"):
        first.hold()
    first.release()
    assert (tmp_path / "out.h5.lock").exists()  # it is the second one's
    second.release()


@pytest.mark.parametrize("left", [False, True])
def test_lock_works_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool) -> None:
    """The file itself is the lock on such file systems; a user has to remove one that a killed run left."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    if left:
        (tmp_path / "out.h5.lock").touch()
        with pytest.raises(
            OutputError, match=r"no locks to tell which; remove .*out\.h5\.lock if no run is active, or give"
        ):
            lock(tmp_path).hold()
        assert (tmp_path / "out.h5.lock").exists()
        return
    first = lock(tmp_path)
    first.hold()
    with pytest.raises(OutputError, match="another run is writing"):
        lock(tmp_path).hold()
    first.release()
    assert not list(tmp_path.iterdir())
