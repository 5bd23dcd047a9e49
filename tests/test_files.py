"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from znnpy.errors import OutputError
from znnpy.files import replace_file, write_asked


def test_a_file_is_replaced(tmp_path: Path) -> None:
    """In a folder that is made for it, with the rights of any other file."""
    path = tmp_path / "new" / "name"
    replace_file(path, b"one")
    replace_file(path, b"another")
    assert path.read_bytes() == b"another"
    beside = tmp_path / "new" / "beside"
    beside.write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(beside.stat().st_mode)
    beside.unlink()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"old")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", full) if step == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    with pytest.raises(OutputError, match=rf"^cannot write the plan {path}: No space left on device; give another --o"):
        write_asked(path, "new", "--out", "the plan ")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, move = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 3
        done.append("sync")
        sync(descriptor)

    def moved(self: Path, target: Path) -> Path:
        done.append("name")
        return move(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", moved)
    replace_file(tmp_path / "name", b"new")
    assert done == ["sync", "name"]


def test_several_at_once_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "name"
    contents = [bytes([65 + index]) * 200_000 for index in range(4)]
    read: list[bytes] = []

    def write(content: bytes) -> None:
        for _ in range(5):
            replace_file(path, content)
            read.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 20
    assert set(read) <= set(contents)
    assert list(tmp_path.iterdir()) == [path]
