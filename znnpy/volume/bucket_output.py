"""The output of a run in a bucket (s3://, gs://), in a format of chunks.

Chunks get their final names at once, and each is written whole. The metadata files come last: before them the chunks
are no array, so an unfinished output never looks finished. Until then they lie in the journal beside the output
(`bucket_journal`), with which a run that ended early is continued. An object cannot be renamed, so `overwrite` removes
the earlier output when the new one begins.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from znnpy.errors import OutputError, ResumeError
from znnpy.files import MOST_METADATA_BYTES
from znnpy.messages import excerpt, option
from znnpy.patches import Box, Columns
from znnpy.volume.bucket import Bucket, check_bucket, check_place
from znnpy.volume.bucket_files import BucketFiles
from znnpy.volume.bucket_journal import CHECK_SECONDS, BucketJournal
from znnpy.volume.chunk_layout import layouts_of
from znnpy.volume.chunked_formats import ChunkedFormat, StoredArray, stored_levels
from znnpy.volume.chunked_store import ChunkedStore
from znnpy.volume.column_record import ColumnRecord
from znnpy.volume.gathered_chunks import GatheredChunks
from znnpy.volume.journal import JournalHeader, header_digest
from znnpy.volume.location import Location
from znnpy.volume.n5_format import N5
from znnpy.volume.object_store import context, files_of
from znnpy.volume.output import Mode
from znnpy.volume.output_errors import check_same_job
from znnpy.volume.output_names import RUN, RUN_ATTRIBUTE, is_of_output, new_run
from znnpy.volume.precomputed_format import Precomputed
from znnpy.volume.registry import FORMATS, store_for
from znnpy.volume.space_units import say_turned
from znnpy.volume.store import DAMAGED, JOURNAL_ATTRIBUTE, OutputArray, Storage, check_filled
from znnpy.volume.zarr_formats import Zarr2, Zarr3


class BucketOutput:
    """Writes one prediction to a bucket; it is used as `Output` is."""

    def __init__(
        self,
        place: Location,
        *,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        mode: Mode,
        job: dict[str, Any],
        storage: Storage,
        reads: Sequence[Location] = (),
    ) -> None:
        """Store the arguments; parameters as for `Output`. OutputError for a format that buckets do not take.

        reads  places of what the run reads, which the output must neither replace nor contain
        """
        check_place(place, reads)
        self.place, self.dtype, self.rewritten = place, np.dtype(dtype), 0
        self.header: JournalHeader | None = None
        self.finished = False
        self.done: Set[int] = frozenset()
        self._arrays, self._mode, self._storage = arrays, mode, storage
        self._job: dict[str, Any] = json.loads(json.dumps(job))
        kind = store_for(replace(place, prefix=storage.prefix))
        if not issubclass(kind, ChunkedStore):
            written = ", ".join(suffix for one in FORMATS if one.remote and one.writer for suffix in one.suffixes)
            raise OutputError(
                f"{place} is not of a format that is written to buckets ({written}); give one of these in "
                f"{option('out')}"
            )
        kind.check(self.dtype, storage)
        self._kind, self._form = kind, kind.wanted(storage)
        self._bucket: Bucket | None = None
        self._journal: BucketJournal | None = None
        self._store: GatheredChunks | None = None
        self.run: str | None = None
        self._record = ColumnRecord(0)
        self._continues = False  # an earlier run, from the first write on
        self._failed = False  # what was passed on may not be in the bucket
        self._lock = threading.RLock()  # a writer may still be active when an interrupted run leaves

    def __enter__(self) -> Self:
        self._bucket = check_bucket(self.place)
        self._journal = BucketJournal(self.place)
        self._inspect(self._journal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            try:
                if self._store is not None and not (self._continues or self._failed or self.finished):
                    self._sync(whole=True)
                if self.run is not None and not (self.finished or self._record.kept or self._is_shared):
                    self._abandon()
            except OutputError as late:
                if error is None:
                    raise
                error.add_note(f"afterwards: {late}")  # the first error is the cause of this one
            finally:
                if self._store is not None:
                    self._store.close()
                self._store = None
            if self._record.kept and not self.finished and isinstance(error, KeyboardInterrupt):
                error.add_note(
                    f"what was finished is kept, {len(self._record.kept)} of {self._record.count} columns: the same "
                    f"call with {option('resume', True)} (and without {option('overwrite')}) continues from there"
                )

    @property
    def folder(self) -> None:
        """None: the output is not on this machine."""

    @property
    def held_bytes(self) -> int:
        """Return 0: the output is in the bucket."""
        return 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole output, whose chunks are gathered in memory until they are whole."""
        return sum(array.nbytes(self.dtype) for array in self._arrays)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the output that is there; none if there is none, or it cannot be read."""
        for form in self._kind.formats:
            try:
                return form.attributes(self._document)
            except DAMAGED:
                continue
        return {}

    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""
        with self._lock:
            self._storage = replace(self._storage, budget=budget)
            if self._store is not None:
                self._store.limit(budget)

    def begin(self, header: JournalHeader, attributes: Mapping[str, Any], plans: Sequence[Columns] = ()) -> None:
        """Begin a new run: remove an output that is replaced, and create the journal. Parameters as for `Output`."""
        bucket, journal = self._opened()
        if self.header is not None or self.finished:
            raise ValueError(f"{self.place} was started before, so it cannot start again")
        if self._mode != "overwrite" and journal.run is None and journal.exists():
            raise journal.taken()  # it was begun since this run looked
        another = self._clear(bucket, journal)
        run = self.run = new_run()
        storage = self._storage
        layouts = layouts_of(
            tuple(plans),
            self._arrays,
            self.dtype.itemsize,
            storage.budget,
            sharded=storage.sharded,
            whole_maps=self._form.whole_maps,
            inside=header.item is not None,
        )
        levels = self._form.arrays(self._arrays, self.dtype, layouts, storage.multiscale)
        named = {RUN_ATTRIBUTE: run, JOURNAL_ATTRIBUTE: header_digest(header)}
        job = json.dumps(self._job, sort_keys=True)
        documents = self._form.documents(levels, {**attributes, **named, "job": job})
        journal.create(run, header, documents, handover=another)
        say_turned((array.space for array in self._arrays), self._form.name)
        self._store = self._gathered(levels, storage.budget)
        self.header, self._record = header, ColumnRecord(header.columns)

    @property
    def _is_shared(self) -> bool:
        """Say whether other processes write the output too, and may go on with it."""
        return self.header is not None and self.header.item is not None

    def pause(self) -> None:
        """Keep what a run finished that ended early and will continue. If that is nothing, the run may begin again."""
        with self._lock:
            if self._store is None:
                return
            with self._noting():
                self._sync(whole=True)
            self.done = frozenset(self._record.kept)
            if not self.done:
                self.header = None
                self._abandon()

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Write voxels (maps, *box.size) of `self.dtype`, any strides, at coordinates `box` of an array."""
        check_filled(box, voxels, self.dtype)
        with self._lock, self._noting():
            store = self._writing()
            self._opened()[1].check(CHECK_SECONDS)
            store.write(box, voxels, number)

    def finish_column(self, index: int) -> None:
        """Note that a column is written. It counts once it is recorded, some seconds later or on leaving."""
        with self._lock, self._noting():
            if self._record.finish(index, self._writing()):
                self._sync()

    def complete(self) -> None:
        """Make the chunks an output after the last column: write the metadata files, and remove the journal."""
        if self.finished:
            return
        with self._lock, self._noting():
            bucket, journal = self._opened()
            store = self._writing()
            if lacking := self._record.missing:
                raise ValueError(f"{lacking} of {self._record.count} columns of {self.place} are not finished")
            self._sync(whole=True)
            store.flush()
            store.write_coarser()
            store.sync()
            self.rewritten = store.rewritten
            journal.check()
            files = journal.files()
            for name in self._form.in_order(files):
                bucket.write(name, files[name])
            journal.remove()
            self.finished = True

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note an error inside: a chunk may be lost, so no column is recorded any more."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _sync(self, *, whole: bool = False) -> None:
        """Record the columns whose chunks are all in the bucket."""
        _, journal = self._opened()
        journal.check(CHECK_SECONDS)
        self._record.record(self._writing(), journal.append, whole=whole)

    def _inspect(self, journal: BucketJournal) -> None:
        """Decide what to do with what is in the bucket."""
        there, found = self.attributes, None
        try:
            found = journal.read()
        except ResumeError:
            if self._mode != "overwrite":
                raise
        if journal.run is None and not RUN.fullmatch(str(there.get(RUN_ATTRIBUTE))):
            self._check_free(nothing=True)
        elif self._mode == "overwrite":
            self._check_free(nothing=False)
        elif self._mode == "new":
            self._check_new(found, there)
        elif found is not None and (found[1] or found[0].item is not None):
            self._resume(*found)
        elif there:
            self._check_finished(there)

    def _check_free(self, *, nothing: bool) -> None:
        """Raise OutputError for objects at the place that no run wrote: they would be replaced or removed.

        nothing  whether nothing may be there; else an output
        """
        bucket = self._opened()[0]
        marks = {mark for one in FORMATS for mark in one.marks} if nothing else ()
        foreign = [mark for mark in sorted(marks) if bucket.read(mark) is not None]
        foreign = foreign or [key for key in bucket.every() if nothing or not is_of_output(key.partition("/")[0])]
        if foreign:
            raise OutputError(
                f"{self.place} was not written by znnpy ({excerpt(foreign[0])} is there), and is left as it is; remove "
                f"it, or give another {option('out')}"
            )

    def _check_new(self, found: tuple[JournalHeader, Set[int]] | None, there: Mapping[str, Any]) -> None:
        """Raise OutputError if there is an unfinished run to continue, or an output to replace."""
        if found is not None and (found[1] or found[0].item is not None):
            raise OutputError(
                f"an unfinished run left {self.place} with {len(found[1])} of {found[0].columns} columns done; "
                f"continue with {option('resume', True)}, or start again with {option('overwrite', True)}"
            )
        if there:
            raise OutputError(
                f"the output {self.place} exists; give {option('overwrite', True)} to replace it, or another "
                f"{option('out')}"
            )

    def _resume(self, header: JournalHeader, done: Set[int]) -> None:
        """Continue an earlier run; ResumeError if it is of another job, or its files are damaged."""
        _, journal = self._opened()
        check_same_job(header.job, self._job, f"the unfinished {self.place}", "finish it with the old settings")
        files = journal.files()
        try:
            levels = stored_levels(self._form, _reader(files.get), self._arrays, self.dtype, self._storage.multiscale)
            digest = self._form.attributes(_reader(files.get)).get(JOURNAL_ATTRIBUTE)
        except DAMAGED as error:
            raise ResumeError(
                f"the journal {journal.place} is damaged ({excerpt(error)}), so the unfinished {self.place} cannot be "
                f"continued; start again with {option('overwrite', True)}"
            ) from error
        if digest != header_digest(header):
            raise ResumeError(
                f"the journal {journal.place} was changed after the run began, so it is not known what is finished; "
                f"start again with {option('overwrite', True)}"
            )
        self._store = self._gathered(levels, self._storage.budget)
        self._record, self.done, self.header = ColumnRecord(header.columns, done), done, header
        self.run, self._continues = journal.run, True

    def _check_finished(self, there: Mapping[str, Any]) -> None:
        """Raise ResumeError unless the existing output is the complete one of this job."""
        try:
            job = from_json(there["job"])
        except (KeyError, TypeError, ValueError):
            job = None
        if not isinstance(job, dict):
            raise ResumeError(
                f"{self.place} exists and was not written by znnpy; give another {option('out')}, or remove it"
            )
        check_same_job(job, self._job, f"the finished {self.place}", f"give another {option('out')}")
        self._opened()[1].remove(str(there.get(RUN_ATTRIBUTE)))
        self.finished = True

    def _clear(self, bucket: Bucket, journal: BucketJournal) -> bool:
        """Remove what an earlier run left, the metadata files first: without them the chunks are no output.

        Returns whether there was a journal, so that the run may still go on.
        """
        left = journal.exists()
        if left or RUN.fullmatch(str(self.attributes.get(RUN_ATTRIBUTE))):
            for form in self._kind.formats:
                for name in form.marks:
                    bucket.remove_one(name)
            self._remove(bucket, journal)
        return left

    def _remove(self, bucket: Bucket, journal: BucketJournal) -> None:
        """Remove chunks and journal, such that no record is left of a chunk that is not there."""
        journal.forget()
        bucket.remove("")
        journal.remove()

    def _abandon(self) -> None:
        """Remove what the run begun here wrote, if it is still its own."""
        bucket, journal = self._opened()
        if self._store is not None:
            self._store.close()
            self._store = None
        if self.run is not None and journal.is_ours(self.run):
            self._remove(bucket, journal)
        self.run = None

    def _document(self, name: str) -> dict[str, Any]:
        return _reader(self._opened()[0].read)(name)

    def _opened(self) -> tuple[Bucket, BucketJournal]:
        if self._bucket is None or self._journal is None:
            raise ValueError(f"{self.place} is not open: enter it")
        return self._bucket, self._journal

    def _gathered(self, levels: Sequence[Sequence[StoredArray]], budget: int) -> GatheredChunks:
        """Open the chunks for writing."""
        bucket, journal = self._opened()
        return GatheredChunks(
            levels, budget, lambda every, within: BucketFiles(self._form, every, bucket, journal, within)
        )

    def _writing(self) -> GatheredChunks:
        if self._store is None:
            raise ValueError(f"{self.place} is not open for writing: enter it, and `begin` a new run")
        if self._continues:
            self._opened()[1].take_over()
            self._continues = False
        return self._store


def shared_chunks(
    place: Location, run: str, arrays: Sequence[OutputArray], dtype: np.dtype[Any], storage: Storage
) -> GatheredChunks:
    """Open the chunks of an unfinished output that other processes write too; ResumeError if it is not of this run."""
    bucket, journal = check_bucket(place), BucketJournal(place)
    kind = store_for(place)
    assert issubclass(kind, ChunkedStore), "outputs in buckets have chunks"
    form = kind.wanted(storage)
    if journal.read() is None or journal.run != run:
        raise ResumeError(f"{journal.place} is not of this job any more: it was finished, removed or replaced")
    files = journal.files()
    try:
        levels = stored_levels(form, _reader(files.get), arrays, dtype, storage.multiscale)
    except DAMAGED as error:
        raise ResumeError(
            f"the journal {journal.place} is damaged ({excerpt(error)}); start again with {option('overwrite', True)}"
        ) from error
    return GatheredChunks(
        levels, storage.budget, lambda every, within: BucketFiles(form, every, bucket, journal, within)
    )


def run_in_bucket(place: Location) -> str | None:
    """Return the id of the run that writes an unfinished output; None if there is none."""
    check_bucket(place)
    journal = BucketJournal(place)
    journal.read()
    return journal.run


def kept_job(place: Location) -> dict[str, Any]:
    """Return the job of the unfinished or finished output at a place; an empty one if there is none."""
    check_bucket(place)
    found = BucketJournal(place).read()
    if found is not None:
        return found[0].job
    try:
        job = from_json(remote_attributes(place)["job"])
    except (KeyError, TypeError, ValueError):
        return {}
    return job if isinstance(job, dict) else {}


def remote_attributes(place: Location, name: str = "") -> dict[str, Any]:
    """Return the attributes of an output, or of one of its arrays, in a bucket or on a web server; see `written`."""
    found = _written_as(place, name)
    return {} if found is None else found[1]


def remote_dataset(place: Location, name: str) -> str | None:
    """Return the name by which the voxels of an array are read."""
    found = _written_as(place, "")
    return name or None if found is None else found[0].dataset(name) or None


def _written_as(place: Location, name: str) -> tuple[ChunkedFormat, dict[str, Any]] | None:
    """Return the format of an output, and its attributes; None if it has none of ours."""
    files = files_of(place, context())

    def read(key: str) -> bytes | None:
        return files.read(key, MOST_METADATA_BYTES)

    for form in (Zarr3(), Zarr2(), N5(), Precomputed()):
        try:
            return form, form.attributes(_reader(read), name)
        except DAMAGED:
            continue
    return None


def _reader(read: Callable[[str], bytes | None]) -> Callable[[str], dict[str, Any]]:
    """Return a function that reads a metadata file as a JSON object; OSError or ValueError for what is none."""

    def document(name: str) -> dict[str, Any]:
        content = read(name)
        if content is None:
            raise FileNotFoundError(name)
        found = from_json(content)
        if not isinstance(found, dict):
            raise ValueError(f"{name} is not metadata")
        return found

    return document
