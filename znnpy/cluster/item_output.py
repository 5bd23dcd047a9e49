"""The part of an output that one attempt at a work item writes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.cluster.checksum import VoxelSum
from znnpy.cluster.claims import Claim
from znnpy.errors import OutputError, ResumeError, ZnnpyError
from znnpy.messages import option
from znnpy.patches import Box, Columns
from znnpy.shapes import subtract
from znnpy.volume.journal import JournalHeader
from znnpy.volume.location import Location
from znnpy.volume.output_errors import unwritable
from znnpy.volume.output_names import Names
from znnpy.volume.registry import store_for
from znnpy.volume.store import OutputArray, Storage, check_filled

if TYPE_CHECKING:
    from collections.abc import Iterator


class SharedStore(Protocol):
    """The voxels of an output that several processes write; `Store` says what each method does."""

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int) -> None:
        """Write voxels (maps, *box.size) of an array."""

    def read(self, box: Box, number: int) -> npt.NDArray[Any]:
        """Return voxels as they are stored."""

    @property
    def rewritten(self) -> int:
        """Number of files that were written again because they had been written in part."""

    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""

    def flush(self) -> None:
        """Write chunks that wait for more voxels."""

    def sync(self) -> None:
        """Return once everything written is stored."""

    def close(self) -> None:
        """Close the files."""


def shared_store(
    out: Location, run: str, arrays: Sequence[OutputArray], dtype: np.dtype[Any], storage: Storage
) -> SharedStore:
    """Open the unfinished output of a job; ResumeError if it is not there, or is that of another run."""
    if out.is_local:
        partial, kind = Names(out.path).partial, store_for(out)
        if kind.run_of(partial) != run:
            raise ResumeError(
                f"{partial} is not of this job any more: it was finished, removed or replaced, or this machine does "
                "not see its folder"
            )
        return kind(partial, arrays, dtype, storage)
    from znnpy.volume.bucket_output import shared_chunks

    return shared_chunks(out, run, arrays, dtype, storage)


class ItemOutput:
    """An output (see `RunOutput`) whose voxels are those of one item."""

    def __init__(
        self,
        out: Location,
        store: SharedStore | None,
        boxes: Sequence[Box],
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        claim: Claim | None,
    ) -> None:
        """Remember where the item lies.

        store   that voxels are written to; None: the output is there to plan with alone
        boxes   voxels of each array that the item has
        arrays  of the whole output
        claim   on the item
        """
        self.dtype = dtype
        self.header: JournalHeader | None = None
        self.finished = False
        self.done: Set[int] = frozenset()
        self.sum = VoxelSum()
        self._out, self._store, self._boxes, self._arrays, self._claim = out, store, boxes, arrays, claim
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Do nothing: the output belongs to the job."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes: the output as a whole has them."""
        return {}

    @property
    def folder(self) -> Path | None:
        """The folder on this machine that the output is written to; None: it is in a bucket."""
        return self._out.path.parent if self._out.is_local else None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the item if its chunks are gathered in memory until they are whole; else 0."""
        if self._out.is_local and not store_for(self._out).gathers:
            return 0
        maps = [array.shape[0] for array in self._arrays]
        return sum(each * prod(box.size) for each, box in zip(maps, self._boxes, strict=True)) * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Return 0: the output is on disk, or in a bucket."""
        return 0

    @property
    def rewritten(self) -> int:
        """Number of files that were written again because they had been written in part."""
        return self._opened.rewritten

    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""
        with self._lock:
            self._opened.limit(budget)

    def begin(self, header: JournalHeader, attributes: Mapping[str, Any], plans: Sequence[Columns] = ()) -> None:
        """Begin to compute the item. The output and its attributes are there already."""
        del attributes, plans
        self.header = header

    def pause(self) -> None:
        """Prepare for a run that ended early and begins again: what it wrote is written once more."""
        self.header, self.sum = None, VoxelSum()

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Write voxels (maps, *box.size) at coordinates `box` of the item."""
        check_filled(box, voxels, self.dtype)
        with self._lock, self._explained():
            assert self._claim is not None, "only attempts write"
            self._claim.check()
            self._opened.write(box.shifted(self._boxes[number].lo), voxels, number)
            self.sum.add(box, voxels, number)

    def finish_column(self, index: int) -> None:
        """Do nothing: an item that is not finished is computed again."""

    def complete(self) -> None:
        """Return once all voxels of the item are stored."""
        with self._lock, self._explained():
            assert self._claim is not None, "only attempts write"
            self._claim.check(at_once=True)
            self._opened.flush()
            self._opened.sync()
        self.finished = True

    @property
    def _opened(self) -> SharedStore:
        assert self._store is not None, "an output to plan with is not written"
        return self._store

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the system into OutputErrors with advice."""
        try:
            yield
        except ZnnpyError:
            raise
        except OSError as error:
            if not self._out.is_local:
                raise OutputError(
                    f"{self._out} cannot be written: {error}; continue with {option('resume', True)}"
                ) from error
            needed = sum(array.nbytes(self.dtype) for array in self._arrays)
            names = Names(self._out.path)
            raise OutputError(unwritable(error, names.out, names.partial, needed, "the finished work items")) from error


def stored_sum(store: SharedStore, boxes: Sequence[Box], maps: Sequence[int]) -> int:
    """Return the checksum of the voxels of an item as they are stored; a few planes are read at a time.

    maps  of each array
    """
    found = VoxelSum()
    for number, (box, each) in enumerate(zip(boxes, maps, strict=True)):
        thick = max(1, 2**24 // max(1, each * box.size[1] * box.size[2]))
        for z in range(box.lo[0], box.hi[0], thick):
            part = Box((z, *box.lo[1:]), (min(z + thick, box.hi[0]), *box.hi[1:]))
            found.add(part.shifted(subtract((0, 0, 0), box.lo)), store.read(part, number), number)
    return found.value
