"""Files are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from znnpy import files
from znnpy.errors import OutputError
from znnpy.files import (
    cache_folder,
    create_new,
    give_name,
    is_still,
    is_zarr_array,
    open_regular,
    regular_file,
    remove,
    reopen,
    replace_file,
    write_all,
    write_asked,
)


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    """Its folder is made if necessary, and it gets the permissions of any other file."""
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
def test_failed_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"old")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", full) if step == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    with pytest.raises(OutputError, match=rf"^cannot write the plan {path}: No space left on device; give another `o"):
        write_asked(path, "new", "out", "the plan ", overwrite=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "name"
    write_asked(path, "ours", overwrite=False)
    assert path.read_text() == "ours"
    path.write_text("a user's")
    message = rf"^cannot write the plan {path}: another file took this name in the meantime; .* `out`, or overwrite="
    with pytest.raises(OutputError, match=message):
        write_asked(path, "ours", "out", "the plan ", overwrite=False)
    assert path.read_text() == "a user's"
    assert list(tmp_path.iterdir()) == [path]
    write_asked(path, "ours", overwrite=True)
    assert path.read_text() == "ours"


def test_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_concurrent_writers_never_mix(tmp_path: Path) -> None:
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


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe without a writer and a device are refused at once; a link to a file is followed."""
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"content")
    link.symlink_to(file)
    os.mkfifo(pipe)
    with open_regular(link) as opened:
        assert opened.read() == b"content"
    for other in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(other)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_new_file_takes_no_existing_name(tmp_path: Path) -> None:
    other, at = tmp_path / "other", tmp_path / "name"
    other.write_bytes(b"precious")
    for target in (other, tmp_path / "nothing"):
        at.symlink_to(target)
        with pytest.raises(FileExistsError):
            create_new(at)
        at.unlink()
    assert not (tmp_path / "nothing").exists()
    with create_new(at) as file:
        write_all(file, b"new")
        assert is_still(at, file.fileno())
        at.rename(tmp_path / "moved")
        assert not is_still(at, file.fileno())
        at.symlink_to(tmp_path / "moved")
        assert not is_still(at, file.fileno())
    assert other.read_bytes() == b"precious"


def test_only_a_regular_file_with_one_name_is_reopened(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    with reopen(file) as opened:
        assert opened.read() == b"content"
    (tmp_path / "soft").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("soft", "it is a symbolic link"),
        ("pipe", "not a regular file"),
        ("folder", "Is a directory"),
        ("missing", "No such file"),
    ):
        with pytest.raises(OSError, match=said):
            reopen(tmp_path / name)
    (tmp_path / "hard").hardlink_to(file)
    with pytest.raises(OSError, match=r"it has 2 names \(hard links\)"):
        reopen(file)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_rename_never_replaces_an_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, links: bool
) -> None:
    """File systems without hard links keep the same promise."""
    draft, path = tmp_path / "draft", tmp_path / "name"
    if kind == "file":
        draft.write_bytes(b"new")
    else:
        draft.mkdir()
    if not links:

        def refused(*given: object, **more: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refused)
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        give_name(draft, path)
    assert path.read_bytes() == b"precious"
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        give_name(draft, path)
    path.unlink()
    give_name(draft, path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir() == (kind == "folder")


def test_output_file_is_neither_an_input_nor_a_dangling_link(tmp_path: Path) -> None:
    read, hard, soft = tmp_path / "read", tmp_path / "hard", tmp_path / "soft"
    read.write_bytes(b"precious")
    hard.hardlink_to(read)
    soft.symlink_to(read)
    for path in (read, hard, soft):
        with pytest.raises(OutputError, match=r"is the volume .*read itself; give another name as `out`$"):
            regular_file(path, overwrite=True, inputs={"plan": None, "volume": read})
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    with pytest.raises(
        OutputError, match=r"exists already, as a link to .*nothing, which does not exist; give another"
    ):
        regular_file(dangling, overwrite=False)
    assert regular_file(dangling, overwrite=True) == tmp_path / "nothing"


def test_removing_a_link_leaves_its_target(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(folder)
    remove(tmp_path / "link")
    remove(tmp_path / "link")
    assert (folder / "file").read_bytes() == b"precious"
    remove(folder)
    assert not list(tmp_path.iterdir())


def test_zarr_arrays_are_distinguished_from_groups(tmp_path: Path) -> None:
    """The metadata of a group may repeat that of its arrays."""
    group, array, old = tmp_path / "group", tmp_path / "array", tmp_path / "old"
    for folder, name, content in (
        (group, "zarr.json", '{"node_type": "group", "consolidated": {"raw": {"node_type": "array"}}}'),
        (array, "zarr.json", '{"node_type": "array"}'),
        (old, ".zarray", "{}"),
        (tmp_path / "damaged", "zarr.json", "[" * 100_000),
    ):
        folder.mkdir()
        (folder / name).write_text(content)
    found = {folder.name for folder in tmp_path.iterdir() if is_zarr_array(folder)}
    assert found == {"array", "old"}


def test_the_cache_folder_is_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "znnpy"
    assert not cache_folder().exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep caches elsewhere")
@pytest.mark.parametrize("value", ["", "relative/is/ignored"])
def test_the_cache_folder_is_in_the_home_folder(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "znnpy"


def test_the_cache_folder_is_a_temporary_one_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "user_cache_path", lambda name, **_: Path("~/.cache") / name)
    assert cache_folder() == Path(tempfile.gettempdir()) / "znnpy"
