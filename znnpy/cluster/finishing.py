"""Finish a job: compute what is missing or mixed of several attempts, and give the output its name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from znnpy.cluster.claims import ItemRecord, contested_items, finished_items, record_of
from znnpy.cluster.job import Job, JobRecord
from znnpy.cluster.job_files import job_files
from znnpy.cluster.preparing import PreparedJob, prepared
from znnpy.cluster.running import Limits, contested, release, run_items
from znnpy.cluster.traces import join_traces
from znnpy.errors import ResumeError
from znnpy.run.pipeline import Event
from znnpy.run.trace import Trace
from znnpy.volume.location import Location
from znnpy.volume.output_target import place_of
from znnpy.volume.raw_store import RawStore
from znnpy.volume.registry import store_for

_log = logging.getLogger(__name__)


def finish(job: Job, progress: Callable[[int, Event], None] | None = None) -> tuple[ItemRecord, ...]:
    """Complete the output of a job, and return the records of its work items.

    Items that are missing are computed here, and so are those whose voxels are of several attempts.

    progress  called with an item and an Event while it is computed

    Errors are those of `znnpy.infer`.
    """
    with ExitStack() as kept:
        asked = replace(JobRecord.load(job).options(job.files, kept), out=job.out, resume=True)
        return completed(kept.enter_context(prepared(asked)), progress)


def completed(
    made: PreparedJob,
    progress: Callable[[int, Event], None] | None = None,
    trace: Trace | None = None,
    *,
    attempt: str | None = None,
    limits: Limits | None = None,
) -> tuple[ItemRecord, ...]:
    """Complete the output of a job that is open; see `finish`.

    trace    to which the traces of items are joined
    attempt  id of the attempt at items that are computed here
    limits   of this process
    """
    assert made.grid is not None, "a finished output needs nothing"
    job, count = made.job, len(made.grid)
    try:
        while True:
            done = set(finished_items(job.files, count))
            missing = [item for item in range(count) if item not in done]
            run_items(job, missing, attempt=attempt, limits=limits, progress=progress)
            if not reopened(job, count):
                break
        records = tuple(_known(job, item) for item in range(count))
        for item in range(count):
            made.output.finish_column(item)
        if trace is not None:
            join_traces(job.files, trace)
        made.output.complete()
    finally:
        release()
    job_files(Location.of(job.out)).remove("")
    return records


def reopened(job: Job, count: int) -> list[int]:
    """Return the items whose stored voxels are not those of one attempt; they count as not finished now.

    Looked at are items that several attempts wrote. Rows of items that are neighbours share pages of the file in TIFF,
    NIfTI and MRC, which network file systems may write as a whole; so there all items are looked at.
    """
    doubtful = range(count) if issubclass(store_for(place_of(job.out)), RawStore) else contested_items(job.files, count)
    mixed = contested(job, [item for item in doubtful if _is_done(job, item)])
    if mixed:
        _log.warning("work items %s do not hold the voxels of one attempt, and are computed again", mixed)
    return mixed


def _is_done(job: Job, item: int) -> bool:
    return record_of(job.files, item) is not None


def _known(job: Job, item: int) -> ItemRecord:
    """Return the record of a finished item."""
    found = record_of(job.files, item)
    if found is None:
        raise ResumeError(f"the record of work item {item} of {job.out} was removed; run it again")
    return found
