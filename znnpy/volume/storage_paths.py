"""The files and folders that an object of the caller's keeps its elements in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def storage_paths(thing: object) -> tuple[Path, ...]:
    """Paths of the file or folder that holds the elements of `thing`, as far as it tells: () for memory.

    Known are paths, memory maps and views of them, datasets of h5py, and arrays of Zarr in a local store.
    """
    paths: list[Path] = []
    while thing is not None:
        paths.extend(_own_paths(thing))
        thing = getattr(thing, "base", None)  # the array that a view shows
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
        root = getattr(store, "root", None) or getattr(store, "path", None)  # of a folder, or the file of an archive
        if isinstance(root, str | os.PathLike):
            yield Path(root, inside) if Path(root).is_dir() else Path(root)
        store = getattr(store, "_store", None)  # of a store that only wraps another
