"""Write, replace and remove files, and check where a requested file may be written.

A file is created exclusively (O_EXCL), or reopened only if it is a regular file with one name; symbolic links are never
followed to write. The libraries for HDF5 and Zarr open drafts by path: they create exclusively, and the file that they
opened is compared by device and inode.

Loads no numpy, as the command line does not.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from platformdirs import user_cache_path
from pydantic_core import from_json

from znnpy.errors import OutputError
from znnpy.messages import option

MOST_METADATA_BYTES = 2**22  # longest part of a metadata file that is read

Inputs = Mapping[str, Path | Collection[Path] | None]  # files and folders that are read, by their role


def cache_folder() -> Path:
    """Return the folder `znnpy` in the system's place for caches, which may not exist yet.

    Without a home folder, as in some containers, it is in the folder for temporary files.
    """
    folder = user_cache_path("znnpy", appauthor=False)
    return folder if folder.is_absolute() else Path(tempfile.gettempdir()) / "znnpy"


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file at `path` for unbuffered reading. Anything else is an OSError; it never waits.

    A pipe would block until another process writes to it, and a device may do anything: both are OSError with errno
    EINVAL and a text that says so; a folder is IsADirectoryError. Symbolic links are followed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file", str(path))
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Read the first `most` bytes of the regular file at `path`, or all of it. OSError as from `open_regular`."""
    content = bytearray()
    with open_regular(path) as file:
        while len(content) < most and (part := file.read(most - len(content))):
            content += part
    return bytes(content)


def create_new(path: Path) -> FileIO:
    """Create an empty file, open for unbuffered reading and writing. FileExistsError if the name is taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "r+b")


def reopen(path: Path) -> FileIO:
    """Open a file that an earlier run created for unbuffered reading and writing; its content stays.

    OSError if it is a symbolic link, not a regular file, or has another name (a hard link) that would change with it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file", str(path))
        if found.st_nlink != 1:
            raise OSError(errno.EMLINK, f"it has {found.st_nlink} names (hard links)", str(path))
        return FileIO(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


def is_still(path: Path, descriptor: int) -> bool:
    """Return whether `path` itself, not the target of a link, is the open file or folder, by device and inode."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def give_name(draft: Path, path: Path) -> None:
    """Rename a file or folder to a name that is free. FileExistsError if it is taken.

    A file has both names for a moment. For folders, and on file systems without hard links, a file or an empty folder
    that takes the name between the check and the renaming is replaced.
    """
    if not draft.is_dir():
        try:
            os.link(draft, path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
        else:
            draft.unlink()
            return
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    draft.rename(path)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Bring the content of a file to disk. OSError if that fails, and for a symbolic link."""
    _sync(path, os.O_NOFOLLOW)


def sync_folder(folder: Path) -> None:
    """Bring to disk which names were created, renamed or removed in a folder."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_name(path: Path) -> Path:
    """Return an unused name in the folder of `path`, with 64 random bits in it."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def create_draft(path: Path) -> tuple[Path, FileIO]:
    """Create a file with an unused name in the folder of `path`; return its path, and the file open for writing."""
    draft = draft_name(path)
    return draft, create_new(draft)


def replace_file(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a file in one step: readers see the old content or all of the new. An OSError leaves no file behind.

    Missing folders are created. The content is on disk before it takes its name.

    overwrite  False: FileExistsError if the name is taken
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, file = create_draft(path)
    try:
        with file:
            write_all(file, content)
            os.fsync(file.fileno())
        if overwrite:
            draft.replace(path)
        else:
            give_name(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_all(file: FileIO, content: bytes) -> None:
    """Write all of `content` at the file's position, in several calls if needed. OSError if that fails."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def write_asked(path: Path, content: str | bytes, argument: str = "out", what: str = "", *, overwrite: bool) -> None:
    """Replace the file that a user gave as `argument`; OutputError if that is not possible.

    what       text in front of the name, for example "the costs ".
    overwrite  False: OutputError if the name was taken since `regular_file` found it free
    """
    try:
        replace_file(path, content.encode() if isinstance(content, str) else content, overwrite=overwrite)
    except OSError as error:
        if isinstance(error, FileExistsError) and not overwrite and os.path.lexists(path):
            raise OutputError(
                f"cannot write {what}{path}: another file took this name in the meantime; give another "
                f"{option(argument)}, or {option('overwrite', True)} to replace it"
            ) from error
        raise OutputError(f"cannot write {what}{path}: {error.strerror}; give another {option(argument)}") from error


def regular_file(path: Path, overwrite: bool, argument: str = "out", *, inputs: Inputs | None = None) -> Path:
    """Return the path to write for `path`, which the user gave as `argument`, with all links resolved.

    inputs  files that are read, by their role, for example "plan"; None stands for one that is not given.

    OutputError if it may not be replaced, or is one of the inputs.
    """
    target = Path(os.path.realpath(path))
    refuse_inputs(path, inputs or {}, argument)
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise OutputError(f"{target.parent} is not a folder; give another {option(argument)}") from None
        if path.is_symlink() and not overwrite:
            raise OutputError(
                f"{path} exists already, as a link to {target}, which does not exist; give another {option(argument)}, "
                f"or {option('overwrite', True)} to create that"
            ) from None
        return target
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another {option(argument)}") from error
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "special file"
        raise OutputError(f"{path} is a {kind}; give another {option(argument)}")
    if not overwrite:
        raise OutputError(
            f"{path} exists already; give another {option(argument)}, or {option('overwrite', True)} to replace it"
        )
    return target


def refuse_inputs(path: Path, inputs: Inputs, argument: str = "out") -> None:
    """Raise OutputError if writing `path` would replace an input, or something inside or around one.

    Files are compared by device and inode, so symbolic and hard links are recognised. A new file or folder is allowed
    in the folder of an input (a new array in a Zarr group, for example), but not inside a Zarr array.
    """
    mine = Path(os.path.realpath(path))
    advice = f"give another name as {option(argument)}"
    every = ((what, (paths,) if isinstance(paths, Path) else paths or ()) for what, paths in inputs.items())
    for what, given in ((what, given) for what, paths in every for given in paths):
        theirs = Path(os.path.realpath(given))
        if mine == theirs or _same(path, given):
            raise OutputError(f"the output {path} is the {what} {given} itself; {advice}")
        if any(_same(mine, folder) for folder in theirs.parents):
            raise OutputError(f"the output {path} would replace the folder that holds the {what} {given}; {advice}")
        inside = [folder for folder in mine.parents if folder == theirs or theirs in folder.parents]
        if theirs.is_dir() and any(is_zarr_array(folder) for folder in inside):
            raise OutputError(f"the output {path} would lie inside an array of the {what} {given}; {advice}")


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist, or may not be inspected, and then not be written either
        return False


def is_zarr_array(folder: Path) -> bool:
    """Return whether the folder holds the chunks of an array, by the metadata of Zarr 2 or 3."""
    return (folder / ".zarray").exists() or zarr_metadata(folder).get("node_type") == "array"


def zarr_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a group or array of Zarr 3 in a folder; nothing if there are none, or they are damaged."""
    try:
        with open_regular(folder / "zarr.json") as file:
            metadata = from_json(file.read(MOST_METADATA_BYTES))
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
