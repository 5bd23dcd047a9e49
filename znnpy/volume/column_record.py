"""Keep account of the columns of an output: which are finished, which are on record, and which wait for chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Set
from typing import Protocol

from znnpy.volume.journal import ColumnSet

SYNC_SECONDS = 1.0  # time between two syncs, so that small columns share one
PATIENCE_SECONDS = 60.0  # after which chunks are written as they are, so that finished columns can be recorded


class Gathering(Protocol):
    """The part of a store that columns wait for."""

    @property
    def unfinished(self) -> Set[int]:
        """The numbers of chunks that wait in memory for more voxels."""

    def flush(self, serials: Set[int] | None = None) -> None:
        """Write chunks that wait for more voxels."""

    def sync(self) -> None:
        """Return once everything written is stored."""


class ColumnRecord:
    """The columns of one run."""

    def __init__(self, count: int, done: Collection[int] = ()) -> None:
        self.count = count
        self.kept = ColumnSet(count, done)  # recorded columns, of this run and earlier ones
        self._pending: dict[int, Set[int]] = {}  # finished, not yet recorded, and the chunks that they may wait for
        self._oldest = self._due = 0.0  # time at which the first of them was finished, and at which to record next

    @property
    def missing(self) -> int:
        """Number of columns that are not finished."""
        return self.count - len(self.kept) - len(self._pending.keys() - self.kept)

    def finish(self, index: int, store: Gathering) -> bool:
        """Note that a column is written; return whether it is time to `record`."""
        if not 0 <= index < self.count:
            raise ValueError(f"there is no column {index} of {self.count}")
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending[index] = store.unfinished
        return time.monotonic() >= self._due

    def record(self, store: Gathering, write: Callable[[Collection[int]], None], *, whole: bool = False) -> None:
        """Store what is written, then record the columns none of whose chunks is still in memory.

        write  records columns; it is called once the store has them
        whole  write the chunks that finished columns wait for, though others will add to them
        """
        if not self._pending:
            return
        if whole or time.monotonic() > self._oldest + PATIENCE_SECONDS:
            store.flush(frozenset().union(*self._pending.values()))
        unfinished = store.unfinished
        ready = [column for column, waits in self._pending.items() if unfinished.isdisjoint(waits)]
        if ready:
            store.sync()
            write(ready)
            self.kept.update(ready)
            for column in ready:
                del self._pending[column]
            self._oldest = time.monotonic()
        self._due = time.monotonic() + SYNC_SECONDS
