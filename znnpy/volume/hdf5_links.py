"""Datasets of HDF5 files by name: links are followed one by one, and no file is opened that is not a regular one.

HDF5 opens the files that external links name by itself, and would wait for a pipe. A name is any sequence of bytes.
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
OTHER_DEGREE = "file close degree doesn't match"  # what HDF5 says where a file is open in another way
MOST_LINKS = 32  # soft or external ones behind each other; more lead in a circle
# Errors that h5py raises where a file is damaged, or is not as its caller takes it to be.
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)


class MissingTargetError(Exception):
    """An external link leads to a file or a dataset that is missing: a sentence without its end."""


def shown(name: bytes) -> str:
    """A name of HDF5 as text; bytes that are not UTF-8 as escapes such as `\\xe9`."""
    return name.decode("utf-8", "backslashreplace")


def open_file(path: Path, degree: int = h5py.h5f.CLOSE_WEAK) -> h5py.h5f.FileID:
    """The HDF5 file at `path`, open for reading, with a bound on its index. HDF5_ERRORS where that is not possible.

    degree  what becomes of its datasets when the file is closed. HDF5 opens one file of a process in one way only, and
            sources of virtual datasets always so that their datasets stay open (CLOSE_WEAK).
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
    """The dataset `name` of the file, opened; None where there is none. No voxel and no shape is read.

    path   of the file
    files  gains those that external links lead through

    VolumeError: links that lead in a circle, or to something that is not a regular file. MissingTargetError: an
    external link leads to nothing.
    """
    found = _object_named(file, name, path, set() if files is None else files, 0)
    return found if isinstance(found, h5py.h5d.DatasetID) else None


def _object_named(
    file: h5py.h5f.FileID, name: bytes, path: Path, files: set[Path], links: int
) -> h5py.h5i.ObjectID | None:
    """The group or dataset `name`, behind so many links of other files; None where there is none."""
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
                f"{path}: the links of {excerpt(shown(name))} lead in a circle; name a dataset that is not a link"
            )
        if kind == h5py.h5l.TYPE_SOFT:
            target = at.links.get_val(part)
            parts.extendleft(reversed(_parts(target)))
            if target.startswith(b"/"):
                at = h5py.h5g.open(at, b"/")  # of the file that the group lies in
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
    """Name and dataset of every one in the file, by name; groups are searched, soft and external links left out.

    HDF5's own way to visit all objects looks into every index of chunks, and crashes where one is damaged.
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
            seen.add(link.u)  # address of what it leads to
            item = h5py.h5o.open(group, part)
            if isinstance(item, h5py.h5g.GroupID):
                waiting.append((above + part + b"/", item))
            elif isinstance(item, h5py.h5d.DatasetID):
                found.append((above + part, item))
    return sorted(found, key=lambda one: one[0])


def regular_source(name: str, origin: Path, prefix: str, *, beside: bool = True) -> Path | None:
    """The file that HDF5 would open for `name`, which the file `origin` holds; None where there is none.

    prefix  name of the environment variable that holds folders to look into first
    beside  look into the folder of `origin` too, before the current one

    VolumeError where one of the places holds something that is not a regular file.
    """
    for path in _places(name, origin, prefix, beside):
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):  # not there; or a name that no file can have
            continue
        if stat.S_ISREG(mode):
            return path
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise VolumeError(
            f"{origin} refers to {excerpt(path)}, which is {kind}, not a regular file; put the file there that is meant"
        )
    return None


def _places(name: str, origin: Path, prefix: str, beside: bool) -> Iterator[Path]:
    """Yield the places in which HDF5 looks for a file, in its order."""
    if beside and os.path.isabs(name):
        yield Path(name)
        name = os.path.basename(name)
    for folder in filter(None, os.environ.get(prefix, "").split(os.pathsep)):
        yield Path(folder.replace("${ORIGIN}", str(origin.parent))) / name
    if beside:
        yield origin.parent / name
        yield Path(os.path.realpath(origin)).parent / name
    yield Path(name)
