"""The output of a run: begun, resumed, completed; whole or not there.

`out.h5.partial` grows beside `out.h5` (or `out.zarr`) and takes its name when complete. `out.h5.journal` holds what a
resumed run needs and the columns that are on disk; `out.h5.lock` keeps a second run away and is gone afterwards.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from znnpy.errors import OutputError, ResumeError, ZnnpyError
from znnpy.patches import Box
from znnpy.volume.journal import ColumnSet, Journal, JournalHeader, journal_path, sync_folder
from znnpy.volume.store import Store, store_for, stored_bytes

Mode = Literal["new", "overwrite", "resume"]

SYNC_SECONDS = 1.0  # between two syncs: small columns share one
MIB = 2**20


class Output:
    """Writes one prediction. A context manager: entering checks everything and takes the lock.

        with Output(path, volume=..., shape=..., dtype=..., mode=..., job=...) as output:
            if output.header is None:
                output.begin(header, attributes)
            output.write(box, voxels); output.finish_column(0); ...
            output.complete()

    Leaving early keeps what was finished, for `mode="resume"`. Threads take turns.
    """

    def __init__(
        self,
        path: Path,
        *,
        volume: Path,
        shape: tuple[int, int, int, int],
        dtype: np.dtype[Any],
        mode: Mode,
        job: dict[str, Any],
    ) -> None:
        """Remembers; touches nothing. OutputError for a suffix that is not written.

        volume  the input, which the output must not be.
        shape   (maps, z, y, x).
        mode    new: refuse what exists; overwrite: replace it once the new one is complete; resume: go on with an
                unfinished run of the same job, or begin.
        job     what identifies the job, JSON types; compared on resume and kept as attribute `job`.
        """
        if not path.name:
            raise OutputError(f"the output {str(path)!r} is a folder; give the name of a file in --out")
        self.path = path
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.header: JournalHeader | None = None  # of the run that is resumed, or was begun
        self.finished = False  # a resumed job's output is complete: nothing to do
        self.done: Set[int] = frozenset()  # columns finished by earlier runs
        self._volume = volume
        self._mode = mode
        self._job: dict[str, Any] = json.loads(json.dumps(job))
        self._partial = path.with_name(path.name + ".partial")
        self._old = path.with_name(path.name + ".old")  # a Zarr folder on its way out
        self._journal = Journal(journal_path(path))
        self._kind = store_for(path)
        self._store: Store | None = None
        self._columns = 0
        self._kept = ColumnSet(0)  # columns on record, of this run and earlier ones
        self._pending: set[int] = set()  # finished, not yet synced
        self._sync_due = 0.0
        self._may_sync = True
        self._turn = threading.RLock()  # a writer may still be at it when an interrupted run leaves
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with self._open:
            self._check_place()
            self._lock()
            with self._explained():
                self._look()
            self._check_room()
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._open, self._turn:
            if self._store is None:
                return
            try:
                if self._may_sync:
                    self._sync()
            except OutputError as late:
                if error is None:
                    raise
                error.add_note(f"afterwards: {late}")  # the first error is the cause; this one is its shadow
            finally:
                self._store = None
            if not self._kept:  # nothing to go on from: leave no run behind that blocks another
                self._journal.remove()
                _remove(self._partial)

    def begin(self, header: JournalHeader, attributes: Mapping[str, Any]) -> None:
        """Begin a new run: the file at its full size, then its journal. Only where `self.header` is None.

        attributes  of the prediction: name -> text, number or array; `job` is added.
        """
        if self.header is not None or self.finished:
            raise ValueError(f"{self.path} was begun before, so it cannot begin")
        with self._explained():
            self._journal.remove()  # first, lest it vouch for a file that is gone
            _remove(self._partial)
            self._kind.create(
                self._partial, self.shape, self.dtype, {**attributes, "job": json.dumps(self._job, sort_keys=True)}
            )
            self._open_store()
            self._journal.create(header)
        self.header = header
        self._columns = header.columns
        self._kept = ColumnSet(header.columns)

    def pause(self) -> None:
        """A run ended early, and will go on: what it finished is done. Where that is nothing it may begin anew."""
        with self._turn:
            if self._store is None:
                return
            self._sync()
            self.done = ColumnSet(self._columns, self._kept)
            if not self.done:
                self.header = None
                self._store.close()
                self._store = None
                with self._explained():
                    self._journal.remove()
                    _remove(self._partial)

    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        """Write voxels (maps, *box.size) of `self.dtype`, any strides, at dense-output coordinates `box`."""
        with self._turn, self._explained():
            self._opened().write(box, voxels)

    def finish_column(self, index: int) -> None:
        """All of this column was written. It counts once it is synced: at most about a second later, or on leaving."""
        if not 0 <= index < self._columns:
            raise ValueError(f"there is no column {index} of {self._columns}")
        with self._turn:
            self._opened()
            self._pending.add(index)
            if time.monotonic() >= self._sync_due:
                self._sync()

    def complete(self) -> None:
        """Every column is finished: give the output its name. Does nothing where it was complete before."""
        if self.finished:
            return
        store = self._opened()
        missing = self._columns - len(self._kept) - len(self._pending - self._kept)
        if missing:
            raise ValueError(f"{missing} of {self._columns} columns of {self.path} are not finished")
        self._sync()
        store.close()
        self._store = None
        with self._explained():
            if self.path.is_dir():  # a folder cannot be replaced in one step: it stays until the new one has its name
                _remove(self._old)
                self.path.rename(self._old)
            self._partial.replace(self.path)
            sync_folder(self.path.parent)
            self._journal.remove()
            _remove(self._old)
        self.finished = True

    def _sync(self) -> None:
        """Data to disk, then the record of it: in this order a column on record is always whole."""
        if not self._pending:
            return
        self._may_sync = False  # a sync that failed once may lie about success the next time
        with self._explained():
            self._opened().sync()
            self._journal.append(self._pending)
        self._may_sync = True
        self._kept.update(self._pending)
        self._pending.clear()
        self._sync_due = time.monotonic() + SYNC_SECONDS

    def _open_store(self) -> None:
        self._store = self._kind(self._partial, self.shape, self.dtype)
        self._open.callback(self._store.close)

    def _opened(self) -> Store:
        if self._store is None:
            raise ValueError(f"{self.path} is not open for writing: enter it, and `begin` a new run")
        return self._store

    def _check_place(self) -> None:
        with self._explained():
            folder = self.path.parent
            if not folder.is_dir():
                raise OutputError(f"there is no folder {folder} to write {self.path.name} in; create it first")
            if self.path.is_dir() and self.path.suffix != ".zarr":
                raise OutputError(f"the output {self.path} is a folder; give the name of a file in --out")
            for name in (self.path, self._partial):
                if name.exists() and self._volume.exists() and name.samefile(self._volume):
                    raise OutputError(
                        f"the output {name} is the volume {self._volume} itself; give another name with --out"
                    )

    def _lock(self) -> None:
        lock = FileLock(self.path.with_name(self.path.name + ".lock"), timeout=0)
        try:
            with self._explained():
                lock.acquire()
        except Timeout:
            if not Path(lock.lock_file).exists():  # the library waits, whatever the system refused
                raise OutputError(
                    f"{self.path.parent} takes no file {Path(lock.lock_file).name}, which keeps a second run away; "
                    "give another --out"
                ) from None
            raise OutputError(
                f"another run is writing {self.path} (it holds {lock.lock_file}); wait for it, or give another --out"
            ) from None

        def release() -> None:
            Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: nobody else can have taken this file
            lock.release()

        self._open.callback(release)

    def _look(self) -> None:
        """Decide what there is to do with what is on disk."""
        if self._mode == "overwrite":
            return
        header: JournalHeader | None = None
        done: Set[int] = frozenset()
        if self._journal.path.exists() and self._partial.exists():
            header, done = self._journal.read()
        if self._mode == "new":
            if done or (self._partial.exists() and header is None):
                progress = f" with {len(done)} of {header.columns} columns done" if header else ""
                raise OutputError(
                    f"an unfinished run left {self._partial}{progress}; "
                    "go on with --resume, or start again with --overwrite"
                )
            if self.path.exists():
                raise OutputError(f"the output {self.path} exists; give --overwrite to replace it, or another --out")
            return
        if header is not None and done:
            self.done = done
            self._check_same(header.job, f"the unfinished {self._partial}", "finish it with the old settings")
            self._open_store()
            self.header = header
            self._columns = header.columns
            self._kept = ColumnSet(header.columns, self.done)
        elif self.path.exists():
            job = self._kind.attributes_of(self.path).get("job")
            if not isinstance(job, str):
                raise ResumeError(
                    f"{self.path} exists and was not written by znnpy; give --overwrite to replace it, or another --out"
                )
            self._check_same(json.loads(job), f"the finished {self.path}", "give another --out")
            self._journal.remove()  # of a run killed between its last two steps
            self.finished = True

    def _check_same(self, theirs: Mapping[str, Any], what: str, else_do: str) -> None:
        before, now = dict(_flat(theirs)), dict(_flat(self._job))
        for field in sorted(before.keys() | now.keys()):
            old, new = before.get(field), now.get(field)
            if old != new:
                raise ResumeError(
                    f"{what} belongs to another job: {field} was {_shown(old)} and is {_shown(new)} now; "
                    f"{else_do}, or start again with --overwrite"
                )

    def _check_room(self) -> None:
        if self.finished:
            return
        needed = stored_bytes(self.shape, self.dtype)
        with self._explained():
            free = shutil.disk_usage(self.path.parent).free
            free += _taken(self._partial)  # its room is taken already, or will be free
        if free < needed:
            raise OutputError(
                f"the output needs {needed} bytes ({needed / MIB:.1f} MiB) and {self.path.parent} has {free} free "
                f"({free / MIB:.1f} MiB); make room, choose a smaller --output-dtype or --roi, or another --out"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the system refuses into sentences."""
        try:
            yield
        except (ZnnpyError, Timeout):
            raise
        except OSError as error:
            raise OutputError(self._sentence(error)) from error

    def _sentence(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(self.path.parent).free
            needed = stored_bytes(self.shape, self.dtype)
            cause = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}.get(
                error.errno, "the file may not grow that large"
            )
            return (
                f"{cause}: {self._partial} needs {needed} bytes in all and {self.path.parent} has {free} free; "
                f"{len(self._kept)} of {self._columns} columns are kept: make room and give --resume"
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return (
                f"{self.path.parent} may not be written to ({os.strerror(error.errno)}); "
                "change its permissions or give another --out"
            )
        return f"{self.path} cannot be written: {error}; give another --out"


def _remove(path: Path) -> None:
    """Take away a file or a whole folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _taken(path: Path) -> int:
    """Bytes on disk of a file or a whole folder; 0 where there is none, or where the system does not say."""
    files = path.rglob("*") if path.is_dir() else [path] if path.exists() else []
    return sum(getattr(file.stat(), "st_blocks", 0) * 512 for file in files)


def _flat(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as `volume.dtype` -> value."""
    for key, value in job.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
