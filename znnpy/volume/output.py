"""The output of a run, which is begun, resumed and completed. It appears under its name only when it is complete.

`out.h5.partial` grows beside `out.h5` (or `out.zarr`) and takes its name when complete. `out.h5.journal` holds what a
resumed run needs and the columns that are on disk; `out.h5.lock` excludes a second run and is removed afterwards. The
journal and the output contain the random id of the run, by which its files are recognised.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import OutputError, ResumeError, ZnnpyError
from znnpy.files import Inputs, give_name, remove, sync_folder
from znnpy.messages import option
from znnpy.patches import Box, Columns
from znnpy.units import human_bytes
from znnpy.volume.column_record import ColumnRecord
from znnpy.volume.journal import ColumnSet, Journal, JournalHeader, header_digest
from znnpy.volume.location import Location
from znnpy.volume.lock import OutputLock
from znnpy.volume.output_errors import check_same_job, unwritable
from znnpy.volume.output_names import RUN_ATTRIBUTE, Names, check_place, check_replaced, new_run
from znnpy.volume.registry import store_for
from znnpy.volume.store import JOURNAL_ATTRIBUTE, OutputArray, Storage, Store, taken_over

Mode = Literal["new", "overwrite", "resume"]


class Output:
    """Writes one prediction. It is a context manager: entering it checks everything and takes the lock.

        with Output(path, inputs=..., arrays=..., dtype=..., mode=..., job=...) as output:
            if output.header is None:
                output.begin(header, attributes)
            output.write(box, voxels, 0); output.finish_column(0); ...
            output.complete()

    Leaving early keeps what was finished, for `mode="resume"`. Methods may be called from several threads.
    """

    def __init__(
        self,
        path: Path,
        *,
        inputs: Inputs,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        mode: Mode,
        job: dict[str, Any],
        storage: Storage | None = None,
    ) -> None:
        """Store the arguments without touching the disk. OutputError for what is not written.

        inputs  files and folders that the output must not replace, by their role, for example "volume".
        arrays  one, or one for each of several outputs.
        mode    new: refuse an existing output; overwrite: replace it once the new one is complete; resume: continue an
                unfinished run of the same job, or begin.
        job     identifies the job, JSON types; it is compared on resume and stored as attribute `job`.
        storage how it is stored, where the format leaves a choice.
        """
        if not path.name:
            raise OutputError(f"the output {str(path)!r} is a folder; give the name of a file in {option('out')}")
        self.path = path
        self._arrays = arrays
        self.dtype = np.dtype(dtype)
        self.header: JournalHeader | None = None  # header of the run that is resumed or was begun
        self.finished = False  # the output is complete: there is nothing to do
        self.done: Set[int] = frozenset()  # columns finished by earlier runs
        self._inputs = inputs
        self._mode = mode
        self._job: dict[str, Any] = json.loads(json.dumps(job))
        self._names = Names(path)
        self._partial = self._names.partial
        self._journal = Journal(self._names.journal)
        self._held = OutputLock(self._names.lock, path)
        self._storage = storage or Storage()
        self._kind = store_for(Location(str(path), prefix=self._storage.prefix))
        self._kind.check(self.dtype, self._storage)
        self._kind.check_arrays(arrays)
        self.rewritten = 0  # files of chunks that were written again because they had been written in part
        self._store: Store | None = None
        self.run: str | None = None  # id of the run that is begun or resumed here
        self._replaces = mode == "overwrite"  # whether the complete output may replace an existing one
        self._record = ColumnRecord(0)
        self._may_sync = True
        self._lock = threading.RLock()  # a writer may still be active when an interrupted run leaves
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with self._open, self._explained():
            check_place(self.path, self._inputs, folder=self._kind.folder)
            self._open.callback(self._held.release)
            self._held.hold()
            self._open.callback(self._journal.close)
            self._inspect()
            self._check_space()
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._open, self._lock:
            try:
                if self._store is not None and self._may_sync:
                    self._sync(whole=True)
            except OutputError as late:
                if error is None:
                    raise
                if str(late) != str(error):  # files of chunks that failed once go on to fail
                    error.add_note(f"afterwards: {late}")  # the first error is the cause of this one
            finally:
                if self.run is not None and not (self.finished or self._record.kept or self._is_shared):
                    self._abandon()  # nothing to continue: leave no files that block another run
                self._store = None
            kept = len(self._record.kept)
            if kept and not self.finished and isinstance(error, KeyboardInterrupt):
                error.add_note(
                    f"what was finished is kept, {kept} of {self._record.count} columns: the same call with "
                    f"{option('resume', True)} (and without {option('overwrite')}) continues from there"
                )

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the output that is there; none if there is none, or it cannot be read."""
        return self._kind.attributes_of(self.path)

    @property
    def folder(self) -> Path:
        """The folder on this machine that the output is written to."""
        return self.path.parent

    @property
    def held_bytes(self) -> int:
        """Return 0: the output is on disk."""
        return 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole output if its chunks are gathered in memory until they are whole; else 0."""
        return self._needed_bytes if self._kind.gathers else 0

    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""
        with self._lock:
            self._storage = replace(self._storage, budget=budget)
            if self._store is not None:
                self._store.limit(budget)

    def begin(self, header: JournalHeader, attributes: Mapping[str, Any], plans: Sequence[Columns] = ()) -> None:
        """Begin a new run: create the journal, then the file at its full size. Only if `self.header` is None.

        attributes  of all arrays: name -> text, number or array; `job` is added.
        plans       columns that are computed, to which the chunks are fitted.
        """
        if self.header is not None or self.finished:
            raise ValueError(f"{self.path} was started before, so it cannot start again")
        with self._explained():
            self._clear()
            run = self.run = new_run()
            self._journal.create(run, header, replaces=self._replaces)
            named = {RUN_ATTRIBUTE: run, JOURNAL_ATTRIBUTE: header_digest(header)}
            job = json.dumps(self._job, sort_keys=True)
            draft = self._names.draft(run)
            self._storage = replace(self._storage, plans=tuple(plans), shared=header.item is not None)
            self._kind.create(draft, self._arrays, self.dtype, {**attributes, **named, "job": job}, self._storage)
            give_name(draft, self._partial)
            sync_folder(self.path.parent)
            self._open_store()
        self.header = header
        self._record = ColumnRecord(header.columns)

    @property
    def _is_shared(self) -> bool:
        """Say whether other processes write the output too, and may go on with it."""
        return self.header is not None and self.header.item is not None

    def pause(self) -> None:
        """Keep what a run finished that ended early and will continue. If that is nothing, the run may begin again."""
        with self._lock:
            if self._store is None:
                return
            self._sync(whole=True)
            self.done = ColumnSet(self._record.count, self._record.kept)
            if not self.done:
                self.header = None
                with self._explained():
                    self._abandon()

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Write voxels (maps, *box.size) of `self.dtype`, any strides, at coordinates `box` of an array."""
        with self._lock, self._explained():
            self._opened().write(box, voxels, number)

    def finish_column(self, index: int) -> None:
        """Note that a column is written. It counts once it is synced, about a second later or on leaving."""
        with self._lock:
            if self._record.finish(index, self._opened()):
                self._sync()

    def complete(self) -> None:
        """Give the output its name after the last column. Does nothing if it was complete before."""
        if self.finished:
            return
        store = self._opened()
        if self._record.missing:
            raise ValueError(f"{self._record.missing} of {self._record.count} columns of {self.path} are not finished")
        self._sync(whole=True)
        with self._explained():
            store.flush()
            store.sweep()
            store.write_coarser()
            store.sync()
            self.rewritten = store.rewritten
            self._held.hold()  # the lock may have been removed, and another run may be active
            self._check_ours()
            store.close()
            self._store = None
            self._publish()
            self._journal.remove()
        self.finished = True

    def _publish(self) -> None:
        """Give the complete output its name. Replace an existing output if that was requested; else OutputError."""
        run = self._journal.run
        assert run is not None  # a run was begun or resumed
        there = os.path.lexists(self.path)
        if there:
            if not self._replaces:
                raise self._appeared()
            self._check_replaced()
        old = self._names.old(run)
        if there and self._kind.folder:  # a folder cannot be replaced in one step
            self.path.rename(old)
            there = False
        try:
            if there:
                self._partial.replace(self.path)
            else:
                give_name(self._partial, self.path)
        except FileExistsError:
            raise self._appeared() from None
        sync_folder(self.path.parent)
        if os.path.lexists(old):
            self._names.discard(old, run)

    def _check_replaced(self) -> None:
        """Raise OutputError if replacing the output would remove more than one output."""
        check_replaced(self.path, self._kind.run_of(self.path))

    def _appeared(self) -> OutputError:
        return OutputError(
            f"{self.path} exists, but the run that wrote {self._partial} was not allowed to replace it; move it away "
            f"and continue with {option('resume', True)}"
        )

    def _clear(self) -> None:
        """Remove the files of an earlier run: the journal last, since it holds the names of the others."""
        if (run := self._kind.run_of(self._partial)) is not None:
            self._names.discard(self._partial, self._journal.run or run)
        self._journal.remove()

    def _abandon(self) -> None:
        """Remove those files of the run begun here that are still its own."""
        if self.run is None or self._journal.run != self.run or not self._journal.is_still_there():
            return
        if self._store is not None:
            self._store.close()
            self._store = None
        remove(self._names.draft(self.run))
        if self._kind.run_of(self._partial) == self.run:
            self._names.discard(self._partial, self.run)
        self._journal.remove()
        self.run = None

    def _check_ours(self) -> None:
        """Raise OutputError if the partial output or the journal is no longer the one that this run opened."""
        if not (self._opened().is_still_there() and self._journal.is_still_there()):
            raise taken_over(self._partial)

    def _sync(self, *, whole: bool = False) -> None:
        """Bring the data to disk, then their record: in this order a recorded column is always complete.

        whole  write the chunks that finished columns wait for, though others will add to them
        """

        def write(columns: Collection[int]) -> None:
            self._check_ours()
            self._journal.append(columns)

        self._may_sync = False  # a sync that failed once may lie about success the next time
        with self._explained():
            self._record.record(self._opened(), write, whole=whole)
        self._may_sync = True

    def _open_store(self) -> None:
        self._store = self._kind(self._partial, self._arrays, self.dtype, self._storage)
        self._open.callback(self._store.close)

    def _opened(self) -> Store:
        if self._store is None:
            raise ValueError(f"{self.path} is not open for writing: enter it, and `begin` a new run")
        return self._store

    def _inspect(self) -> None:
        """Clean up after a killed run, then decide what to do with the files on disk."""
        recorded = self._journal.open()
        run = self._journal.run
        if run is not None:
            published = self._kind.run_of(self.path) == run
            self._names.recover(run, published=published)
            if published and not os.path.lexists(self._partial):
                self._journal.remove()
        unfinished = os.path.lexists(self._partial)
        made_by = self._kind.run_of(self._partial) if unfinished else None
        going_on = self._mode == "resume" and recorded and unfinished
        if unfinished and made_by is None and not going_on:
            raise OutputError(
                f"{self._partial} is not the unfinished output of a run, or is damaged, and is left as it is; move it "
                f"away or remove it, or give another {option('out')}"
            )
        if self._mode == "overwrite":
            if os.path.lexists(self.path):
                self._check_replaced()
            return
        found = self._journal.read() if unfinished and recorded else None
        if going_on and found is None:
            raise self._journal.damaged(2, "the header is not complete")
        if self._mode == "new":
            self._check_new(unfinished, found)
        elif found is not None and (found[1] or made_by is None or found[0].item is not None):
            self._resume(*found, made_by)
        elif os.path.lexists(self.path):
            self._check_finished()

    def _check_new(self, unfinished: bool, found: tuple[JournalHeader, Set[int]] | None) -> None:
        """Raise OutputError if there is an unfinished run to continue, or an output to replace."""
        if unfinished and (found is None or found[1] or found[0].item is not None):
            progress = f" with {len(found[1])} of {found[0].columns} columns done" if found else ""
            raise OutputError(
                f"an unfinished run left {self._partial}{progress}; "
                f"continue with {option('resume', True)}, or start again with {option('overwrite', True)}"
            )
        if os.path.lexists(self.path):
            link = "" if self.path.exists() else " as a link to a missing file"
            raise OutputError(
                f"the output {self.path} exists{link}; give {option('overwrite', True)} to replace it, or another "
                f"{option('out')}"
            )

    def _resume(self, header: JournalHeader, done: Set[int], made_by: str | None) -> None:
        """Open the unfinished output of an earlier run; ResumeError if it is damaged, or of another run or job."""
        check_same_job(header.job, self._job, f"the unfinished {self._partial}", "finish it with the old settings")
        self._replaces = self._journal.replaces
        if os.path.lexists(self.path):
            if not self._replaces:
                raise self._appeared()
            self._check_replaced()
        self._storage = replace(self._storage, shared=header.item is not None)
        self._open_store()
        if made_by != self._journal.run:
            raise ResumeError(
                f"{self._journal.path} is the journal of run {self._journal.run}, and {self._partial} was made by run "
                f"{made_by}; put back the files of one run, or start again with {option('overwrite', True)}"
            )
        if self._kind.attributes_of(self._partial).get(JOURNAL_ATTRIBUTE) != header_digest(header):
            raise ResumeError(
                f"the journal {self._journal.path} was changed after the run began, so it is not known what is "
                f"finished; start again with {option('overwrite', True)}"
            )
        self.done = done
        self.header = header
        self.run = self._journal.run
        self._record = ColumnRecord(header.columns, done)

    def _check_finished(self) -> None:
        """Raise ResumeError unless the existing output is the complete one of this job."""
        text = self._kind.attributes_of(self.path).get("job")
        try:
            job = from_json(text) if isinstance(text, str) else None
        except ValueError:
            job = None
        if not isinstance(job, dict):
            raise ResumeError(
                f"{self.path} exists and was not written by znnpy; give {option('overwrite', True)} to replace it, or "
                f"another {option('out')}"
            )
        check_same_job(job, self._job, f"the finished {self.path}", f"give another {option('out')}")
        self._clear()
        self.finished = True

    @property
    def _needed_bytes(self) -> int:
        """The bytes of all chunks."""
        return sum(array.nbytes(self.dtype) for array in self._arrays)

    def _check_space(self) -> None:
        if self.finished:
            return
        needed = self._needed_bytes
        with self._explained():
            free = shutil.disk_usage(self.path.parent).free
            free += _taken(self._partial)  # its space is already taken, or will be free
        if free < needed:
            raise OutputError(
                f"the output needs {human_bytes(needed)}, which is {human_bytes(needed - free)} more than the "
                f"{human_bytes(free)} that are free in {self.path.parent}; make room, choose a smaller "
                f"{option('output_dtype')} or {option('roi')}, or another {option('out')}"
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the system into OutputErrors with advice."""
        try:
            yield
        except ZnnpyError:
            raise
        except OSError as error:
            kept = f"{len(self._record.kept)} of {self._record.count} columns"
            raise OutputError(unwritable(error, self.path, self._partial, self._needed_bytes, kept)) from error


def _taken(path: Path) -> int:
    """Return the bytes on disk of a file or a whole folder; 0 where there is none, or the system does not report it."""
    files = path.rglob("*") if path.is_dir() else [path] if path.exists() else []
    return sum(getattr(file.stat(), "st_blocks", 0) * 512 for file in files)
