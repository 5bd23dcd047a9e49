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
from znnpy.cluster.running import contested, release, run_items
from znnpy.cluster.traces import join_traces
from znnpy.errors import ResumeError
from znnpy.run.pipeline import Event
from znnpy.run.trace import Trace
from znnpy.volume.location import Location

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
    made: PreparedJob, progress: Callable[[int, Event], None] | None = None, trace: Trace | None = None
) -> tuple[ItemRecord, ...]:
    """Complete the output of a job that is open; see `finish`. The traces of items are joined to `trace`."""
    assert made.grid is not None, "a finished output needs nothing"
    job, count = made.job, len(made.grid)
    try:
        reopened(job, count)
        done = set(finished_items(job.files, count))
        run_items(job, [item for item in range(count) if item not in done], progress=progress)
        records = tuple(_known(job, item) for item in range(count))
    finally:
        release()
    for item in range(count):
        made.output.finish_column(item)
    if trace is not None:
        join_traces(job.files, trace)
    made.output.complete()
    job_files(Location.of(job.out)).remove("")
    return records


def reopened(job: Job, count: int) -> list[int]:
    """Return the items whose stored voxels are of several attempts; they count as not finished now."""
    mixed = contested(job, [item for item in contested_items(job.files, count) if _is_done(job, item)])
    if mixed:
        _log.warning("work items %s hold voxels of several attempts, and are computed again", mixed)
    return mixed


def _is_done(job: Job, item: int) -> bool:
    return record_of(job.files, item) is not None


def _known(job: Job, item: int) -> ItemRecord:
    """Return the record of a finished item."""
    found = record_of(job.files, item)
    if found is None:
        raise ResumeError(f"the record of work item {item} of {job.out} was removed; run it again")
    return found
