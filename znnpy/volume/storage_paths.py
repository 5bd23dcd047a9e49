"""Find the files and folders in which an object of the caller keeps its elements."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def storage_paths(thing: object) -> tuple[Path, ...]:
    """Return the paths of the file or folder that holds the elements of `thing`, if known; () for memory.

    Known objects are paths, memory maps and views of them, h5py datasets, and Zarr arrays in a local store.
    """
    paths: list[Path] = []
    while thing is not None:
        paths.extend(_own_paths(thing))
        thing = getattr(thing, "base", None)  # the array behind a view
    return tuple(paths)


def _own_paths(thing: object) -> Iterator[Path]:
    if isinstance(thing, str | os.PathLike):
        yield Path(thing)
        return
    for holder in (thing, getattr(thing, "file", None)):
        name = getattr(holder, "filename", None)
        if isinstance(name, str | os.PathLike):
            yield Path(name)
    store, inside = getattr(thing, "store", None), getattr(thing, "path", None)
    while store is not None and isinstance(inside, str):
        root = getattr(store, "root", None) or getattr(store, "path", None)  # a folder, or the file of an archive
        if isinstance(root, str | os.PathLike):
            yield Path(root, inside) if Path(root).is_dir() else Path(root)
        store = getattr(store, "_store", None)  # the store behind a wrapper
