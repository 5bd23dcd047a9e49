"""Outputs with a file for each chunk or shard, in folders: OME-Zarr 0.4 and 0.5, N5 and Neuroglancer precomputed.

Files are gathered in memory (`chunk_assembly`) and written by tensorstore, which replaces each in one step and brings
it to disk; a killed process leaves each old or new. Needs the extra `io`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import OutputError
from znnpy.files import MOST_METADATA_BYTES, create_new, is_still, open_regular, remove, sync_folder, write_all
from znnpy.patches import Box
from znnpy.volume.chunk_layout import layouts_of
from znnpy.volume.chunk_writes import ChunkFiles
from znnpy.volume.chunked_formats import ChunkedFormat, StoredArray, stored_levels
from znnpy.volume.gathered_chunks import GatheredChunks
from znnpy.volume.n5_format import N5
from znnpy.volume.precomputed_format import Precomputed
from znnpy.volume.space_units import say_turned
from znnpy.volume.store import (
    DAMAGED,
    OutputArray,
    Storage,
    Store,
    check_filled,
    check_stored,
    damaged,
    taken_over,
)
from znnpy.volume.zarr_formats import Zarr2, Zarr3

LOCKS = ".__lock"  # tensorstore writes a file under this ending, and renames it


class ChunkedStore(Store):
    """An output in a folder, in one of the formats of the class: the first, unless a prefix names another."""

    folder, gathers = True, True
    formats: ClassVar[tuple[ChunkedFormat, ...]]

    def __init__(
        self, path: Path, arrays: Sequence[OutputArray], dtype: np.dtype[Any], storage: Storage | None = None
    ) -> None:
        storage = storage or Storage()
        self._path, self._dtype = path, dtype
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._unsynced: set[str] = set()  # folders below the root in which folders were made
        self._known: set[str] = set()  # folders of files
        self._chunks: GatheredChunks | None = None
        try:
            self._sweep(removes=not storage.shared)
            form = _form(path, self.formats)
            levels = _stored(path, form, arrays, dtype, storage.multiscale)
            opened = partial(ChunkFiles, form, store=self._place, note=self._note)
            self._chunks = GatheredChunks(
                levels, storage.budget, lambda every, within: opened(arrays=every, most_bytes=within)
            )
            if not self.is_still_there():
                raise taken_over(path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def check(cls, dtype: np.dtype[Any], storage: Storage) -> None:
        cls.wanted(storage).check(dtype, sharded=storage.sharded)

    @classmethod
    def create(
        cls,
        path: Path,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        attributes: Mapping[str, Any],
        storage: Storage | None = None,
    ) -> None:
        storage = storage or Storage()
        form = cls.wanted(storage)
        layouts = layouts_of(
            storage.plans,
            arrays,
            dtype.itemsize,
            storage.budget,
            sharded=storage.sharded,
            whole_maps=form.whole_maps,
            inside=storage.shared,
        )
        path.mkdir()  # FileExistsError for anything there, links too
        stored = form.arrays(arrays, dtype, layouts, storage.multiscale)
        folders = {path: None}
        for name, content in form.documents(stored, attributes).items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with create_new(file) as opened:
                write_all(opened, content)
                os.fsync(opened.fileno())
            folders |= dict.fromkeys(folder for folder in file.parents if path in folder.parents)
        for folder in folders:
            sync_folder(folder)
        say_turned((array.space for array in arrays), form.name)

    @classmethod
    def attributes_of(cls, path: Path, name: str = "") -> dict[str, Any]:
        found = _readable(path, cls.formats)
        try:
            return found[0].attributes(_reader(path), name) if found else {}
        except DAMAGED:
            return {}

    @classmethod
    def dataset_of(cls, path: Path, name: str) -> str | None:
        form = next(iter(_readable(path, cls.formats)), cls.formats[0])
        return form.dataset(name) or None

    @property
    def unfinished(self) -> Set[int]:
        return self._open.unfinished

    @property
    def rewritten(self) -> int:
        return self._open.rewritten

    def limit(self, budget: int) -> None:
        self._open.limit(budget)

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        check_filled(box, voxels, self._dtype)
        with self._ours():
            self._open.write(box, voxels, number)

    def read(self, box: Box, number: int = 0) -> npt.NDArray[Any]:
        with self._ours():
            return self._open.read(box, number)

    def flush(self, serials: Set[int] | None = None) -> None:
        with self._ours():
            self._open.flush(serials)

    def sync(self) -> None:
        with self._ours():
            self._open.sync()
        for folder in sorted(self._unsynced):
            there = self._path / folder
            if there.is_dir():
                sync_folder(there)
        self._unsynced.clear()

    def write_coarser(self) -> None:
        with self._ours():
            self._open.write_coarser()

    def is_still_there(self) -> bool:
        return self._folder >= 0 and is_still(self._path, self._folder)

    def close(self) -> None:
        if self._chunks is not None:
            self._chunks.close()
            self._chunks = None
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1

    @classmethod
    def wanted(cls, storage: Storage) -> ChunkedFormat:
        """Return the format that a prefix asks for, else the first one."""
        return next((form for form in cls.formats if form.prefix == storage.prefix), cls.formats[0])

    @property
    def _open(self) -> GatheredChunks:
        assert self._chunks is not None, "the store is open"
        return self._chunks

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Raise OutputError where the folder is no longer the one that was opened: the library writes by path."""
        if not self.is_still_there():
            raise taken_over(self._path)
        try:
            yield
        except OSError as error:
            if not self.is_still_there():
                raise taken_over(self._path) from error
            raise

    def _place(self, folder: str) -> dict[str, str]:
        """Return the key-value store of a folder below the root."""
        return {"driver": "file", "path": f"{self._path.absolute() / folder}/"}

    def _note(self, key: str) -> None:
        """Remember which folders are made for a file: what is in the last one is brought to disk by the library."""
        folder = key.rpartition("/")[0]
        if folder in self._known:
            return
        self._known.add(folder)
        while folder:
            folder = folder.rpartition("/")[0]
            self._unsynced.add(folder)

    def sweep(self) -> None:
        self._sweep(removes=True)

    def _sweep(self, *, removes: bool) -> None:
        """Remove incomplete files of a killed writer, if asked. ResumeError for links, which writing would follow."""
        left = [self._path]
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        raise damaged(self._path, f"{entry.name} is a symbolic link")
                    if entry.is_dir():
                        left.append(Path(entry.path))
                    elif removes and entry.name.endswith(LOCKS):
                        remove(Path(entry.path))


class ZarrStore(ChunkedStore):
    """OME-Zarr 0.5, or 0.4 with the prefix zarr2."""

    formats = (Zarr3(), Zarr2())

    @classmethod
    def dataset_of(cls, path: Path, name: str) -> str | None:
        try:
            node = _reader(path)(f"{name}/zarr.json".lstrip("/"))
        except DAMAGED:
            node = {}
        if node.get("node_type") == "array":  # early versions wrote arrays without a group of their own
            return name or None
        return super().dataset_of(path, name)


class N5Store(ChunkedStore):
    """N5."""

    formats = (N5(),)


class PrecomputedStore(ChunkedStore):
    """Neuroglancer precomputed."""

    formats = (Precomputed(),)


def _readable(path: Path, formats: Sequence[ChunkedFormat]) -> list[ChunkedFormat]:
    """Return the formats whose metadata are there and whole."""
    found = []
    for form in formats:
        with suppress(*DAMAGED):
            form.attributes(_reader(path))
            found.append(form)
    return found


def _form(path: Path, formats: Sequence[ChunkedFormat]) -> ChunkedFormat:
    """Return the format of an unfinished output; ResumeError if its metadata are damaged."""
    if found := _readable(path, formats):
        return found[0]
    raise damaged(path, "its metadata cannot be read")


def _stored(
    path: Path, form: ChunkedFormat, arrays: Sequence[OutputArray], dtype: np.dtype[Any], multiscale: int
) -> list[list[StoredArray]]:
    """Return what is stored, with the layouts that the metadata say.

    OutputError if it has another shape or type, ResumeError if it is not what we wrote.
    """
    read = _reader(path)
    try:
        for levels, array in zip(form.arrays(arrays, dtype), arrays, strict=True):
            check_stored(path, *form.held(read, levels[0]), array, dtype)
        return stored_levels(form, read, arrays, dtype, multiscale)
    except OutputError:
        raise
    except DAMAGED as error:
        raise damaged(path, error) from error


def _reader(path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that reads a metadata file below a folder; OSError or ValueError for what is none."""

    def read(name: str) -> dict[str, Any]:
        with open_regular(path / name) as file:
            content = file.read(MOST_METADATA_BYTES + 1)
        if len(content) > MOST_METADATA_BYTES:
            raise ValueError(f"{name} is longer than {MOST_METADATA_BYTES} bytes")
        document = from_json(content)
        if not isinstance(document, dict):
            raise ValueError(f"{name} is not metadata")
        return document

    return read
