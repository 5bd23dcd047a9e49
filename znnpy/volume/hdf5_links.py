"""Find datasets of HDF5 files by name: links are followed one by one, and only regular files are opened.

HDF5 itself opens any file that an external link names, and would wait for a pipe. A name is any sequence of bytes.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import h5py

from znnpy.errors import VolumeError
from znnpy.messages import excerpt

INDEX_BYTES = 4 * 2**20  # the index of chunks, and other metadata, that HDF5 keeps of a file
OTHER_DEGREE = "file close degree doesn't match"  # HDF5's message if a file is open in another way
MOST_LINKS = 32  # soft or external links in a row; more are a cycle
# Errors that h5py raises for a damaged file, or one that is not as its caller assumes.
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)


class MissingTargetError(Exception):
    """An external link leads to a missing file or dataset. The text is a sentence without its end."""


def shown(name: bytes) -> str:
    r"""Return an HDF5 name as text, with bytes that are not UTF-8 as escapes such as `\xe9`."""
    return name.decode("utf-8", "backslashreplace")


def open_file(path: Path, degree: int = h5py.h5f.CLOSE_WEAK) -> h5py.h5f.FileID:
    """Open the HDF5 file at `path` for reading, with a limit on its index. HDF5_ERRORS where that is not possible.

    degree  whether its datasets stay open when the file is closed. Within a process HDF5 opens a file with one degree
            only, and sources of virtual datasets always with CLOSE_WEAK, where they stay open.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(degree)
    index = access.get_mdc_config()
    index.set_initial_size, index.initial_size = True, INDEX_BYTES // 4
    index.min_size, index.max_size = INDEX_BYTES // 4, INDEX_BYTES // 2
    index.max_increment = index.max_decrement = INDEX_BYTES // 4
    access.set_mdc_config(index)
    return h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access)


def open_shared(path: Path) -> h5py.h5f.FileID:
    """Open the file as `open_file` does, even if this process already has it open with CLOSE_STRONG."""
    try:
        return open_file(path)
    except OSError as error:
        if OTHER_DEGREE not in str(error):
            raise
        return open_file(path, h5py.h5f.CLOSE_STRONG)


def dataset_named(
    file: h5py.h5f.FileID, name: bytes, path: Path, files: set[Path] | None = None
) -> h5py.h5d.DatasetID | None:
    """Open the dataset `name` of the file; None where there is none. No voxel and no shape is read.

    path   of the file
    files  gains the files that external links lead through

    VolumeError: links form a cycle, or lead to something that is not a regular file. MissingTargetError: the target of
    an external link is missing.
    """
    found = _object_named(file, name, path, set() if files is None else files, 0)
    return found if isinstance(found, h5py.h5d.DatasetID) else None


def _object_named(
    file: h5py.h5f.FileID, name: bytes, path: Path, files: set[Path], links: int
) -> h5py.h5i.ObjectID | None:
    """Open the group or dataset `name`, which `links` links of other files led to; None where there is none."""
    at: h5py.h5i.ObjectID = h5py.h5g.open(file, b"/")
    parts = deque(_parts(name))
    while parts:
        if not isinstance(at, h5py.h5g.GroupID):
            return None
        part = parts.popleft()
        if not at.links.exists(part):
            return None
        kind = at.links.get_info(part).type
        if kind in (h5py.h5l.TYPE_SOFT, h5py.h5l.TYPE_EXTERNAL):
            links += 1
        if links > MOST_LINKS:
            raise VolumeError(
                f"{path}: the links of {excerpt(shown(name))} form a cycle; name a dataset that is not a link"
            )
        if kind == h5py.h5l.TYPE_SOFT:
            target = at.links.get_val(part)
            parts.extendleft(reversed(_parts(target)))
            if target.startswith(b"/"):
                at = h5py.h5g.open(at, b"/")  # root of the file that the group lies in
            continue
        if kind == h5py.h5l.TYPE_EXTERNAL:
            target, inside = at.links.get_val(part)
            found = regular_source(os.fsdecode(target), Path(h5py.h5f.get_name(at).decode()), "HDF5_EXT_PREFIX")
            link = f"the external link {excerpt(shown(part))} of {excerpt(path.name)}"
            if found is None:
                raise MissingTargetError(f"{link} leads to the file {excerpt(os.fsdecode(target))}, which is missing")
            files.add(found)
            with closing(open_shared(found)) as other:
                if _object_named(other, inside, found, files, links) is None:
                    raise MissingTargetError(
                        f"{link} leads to {excerpt(shown(inside))} of {excerpt(found.name)}, which is missing"
                    )
        at = h5py.h5o.open(at, part)
    return at


def _parts(name: bytes) -> list[bytes]:
    return [part for part in name.split(b"/") if part not in (b"", b".")]


def all_datasets(file: h5py.h5f.FileID) -> list[tuple[bytes, h5py.h5d.DatasetID]]:
    """List name and dataset of every dataset in the file, sorted by name. Soft and external links are not followed.

    HDF5's own function to visit all objects reads every index of chunks, and crashes where one is damaged.
    """
    found: list[tuple[bytes, h5py.h5d.DatasetID]] = []
    waiting: list[tuple[bytes, h5py.h5g.GroupID]] = [(b"", h5py.h5g.open(file, b"/"))]
    seen = {h5py.h5o.get_info(waiting[0][1]).addr}
    while waiting:
        above, group = waiting.pop()
        parts: list[bytes] = []
        group.links.iterate(parts.append)
        for part in parts:
            link = group.links.get_info(part)
            if link.type != h5py.h5l.TYPE_HARD or link.u in seen:
                continue
            seen.add(link.u)  # address of the link's target
            item = h5py.h5o.open(group, part)
            if isinstance(item, h5py.h5g.GroupID):
                waiting.append((above + part + b"/", item))
            elif isinstance(item, h5py.h5d.DatasetID):
                found.append((above + part, item))
    return sorted(found, key=lambda one: one[0])


def regular_source(name: str, origin: Path, prefix: str, *, in_folder: bool = True) -> Path | None:
    """Return the file that HDF5 would open for `name` as stored in the file `origin`; None where there is none.

    prefix  name of the environment variable that lists folders to search first
    in_folder  search the folder of `origin` too, before the current one

    VolumeError if one of the places holds something that is not a regular file.
    """
    for path in _places(name, origin, prefix, in_folder):
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):  # missing, or a name that no file can have
            continue
        if stat.S_ISREG(mode):
            return path
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise VolumeError(
            f"{origin} refers to {excerpt(path)}, which is {kind}, not a regular file; put the intended file there"
        )
    return None


def _places(name: str, origin: Path, prefix: str, in_folder: bool) -> Iterator[Path]:
    """Yield the places where HDF5 searches for a file, in its order."""
    if in_folder and os.path.isabs(name):
        yield Path(name)
        name = os.path.basename(name)
    for folder in filter(None, os.environ.get(prefix, "").split(os.pathsep)):
        yield Path(folder.replace("${ORIGIN}", str(origin.parent))) / name
    if in_folder:
        yield origin.parent / name
        yield Path(os.path.realpath(origin)).parent / name
    yield Path(name)
