"""`znnpy.infer` by many processes: workers of dask, or the parts of a job array."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from znnpy.cluster.claims import AttemptLostError, ItemRecord, finished_items, new_attempt
from znnpy.cluster.finishing import completed, reopened
from znnpy.cluster.job import Job, JobRecord
from znnpy.cluster.preparing import UNKNOWN_WORKERS, join, prepared
from znnpy.cluster.report import ClusterReport, WorkerReport
from znnpy.cluster.running import Limits, release, run_items
from znnpy.computation import traced
from znnpy.machine import limits_of, parse_bytes, peak_bytes, this_machine
from znnpy.options import InferOptions, part_of
from znnpy.planner.run_plan import RunPlan
from znnpy.run.pipeline import Event
from znnpy.run_log import log_phase
from znnpy.units import human_seconds
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from distributed import Client

    from znnpy.cluster.dask_workers import Coordinator

_log = logging.getLogger(__name__)

HERE = "this process"


def infer_on_cluster(asked: InferOptions) -> ClusterReport | None:
    """Let the workers of a cluster compute an output, and complete it; None if it was complete before."""
    began = time.perf_counter()
    with ExitStack() as stack:
        client, ram = stack.enter_context(_client(asked))
        from znnpy.cluster.dask_workers import Coordinator

        made = stack.enter_context(prepared(asked, len(client.nthreads()) or UNKNOWN_WORKERS))
        if made.grid is None:
            return None
        trace = stack.enter_context(traced(made.run.named))
        record = JobRecord.load(made.job)
        before = finished_items(made.job.files, record.count)
        told = _Told(asked.progress, record, len(before), began)
        coordinator = Coordinator(client, made.job, record.count, before, ram, told.cluster)
        coordinator.run()
        while mixed := reopened(made.job, record.count):
            coordinator.compute_again(mixed)
        completed(made, trace=trace)
        coordinator.release()
        known = {
            name: WorkerReport(one.items, one.voxels, one.seconds, one.peak, one.lost)
            for name, one in coordinator.figures.items()
        }
        return _report(made.job, record, began, len(before), known, coordinator.failures, complete=True)


def infer_part(asked: InferOptions) -> ClusterReport | None:
    """Compute one part of the work items of an output, or complete it; None if it was complete before."""
    began, attempt = time.perf_counter(), new_attempt()
    limits = Limits(None if asked.ram is None else parse_bytes(asked.ram))
    if asked.finish:
        with prepared(replace(asked, resume=True)) as made:
            if made.grid is None:
                return None
            record = JobRecord.load(made.job)
            before = len(finished_items(made.job.files, record.count))
            told = _Told(asked.progress, record, before, began)
            with traced(made.run.named) as trace:
                records = completed(made, told.item, trace, attempt=attempt, limits=limits)
            here = [one for one in records if one.attempt == attempt]
            return _report(made.job, record, began, before, {HERE: _of_records(here)}, complete=True)
    number, parts = part_of(asked.part or "")
    job = join(asked, parts)
    if not job.run:
        return None
    record = JobRecord.load(job)
    mine = range(record.count * (number - 1) // parts, record.count * number // parts)
    done = set(finished_items(job.files, record.count)) & set(mine)
    name = f"part {number} of {parts}"
    told = _Told(asked.progress, record, len(done), began, len(mine))
    found: list[ItemRecord] = []
    try:
        for item in mine:
            try:
                found += run_items(job, [item], attempt=attempt, worker=name, limits=limits, progress=told.item)
            except AttemptLostError as lost:
                _log.warning("%s", lost)  # whoever took the item computes it
    finally:
        release()
    here = [one for one in found if one.attempt == attempt]
    log_phase("finished", f"{name}: {len(here)} work items in {human_seconds(time.perf_counter() - began)}")
    return _report(job, record, began, len(done), {name: _of_records(here)}, complete=False)


@contextmanager
def _client(asked: InferOptions) -> Iterator[tuple[Client, int | None]]:
    """Yield the client that options name, and the bytes that each worker may take; None: its own limit decides.

    Several processes on this machine share what one process would take.
    """
    ram = None if asked.ram is None else parse_bytes(asked.ram)
    if asked.client is not None:
        yield asked.client, ram
        return
    from znnpy.cluster.dask_workers import client_of

    cluster = asked.cluster or ""
    with client_of(cluster) as client:
        if cluster.startswith("local:") and ram is None:
            ram = limits_of(this_machine()).ram_bytes // max(1, len(client.nthreads()))
        yield client, ram


class _Told:
    """Tells a caller how far a job is."""

    def __init__(
        self,
        progress: Callable[[Event], None] | None,
        record: JobRecord,
        before: int,
        began: float,
        count: int | None = None,
    ) -> None:
        """Remember what is known at the beginning.

        before  number of items that earlier runs finished, of the `count` that this one has
        """
        self._progress, self._before, self._began = progress, before, began
        self._count = record.count if count is None else count
        self._voxels = prod(record.output) * self._count // record.count
        self._finished, self._item = before, -1

    def item(self, item: int, event: Event) -> None:
        """Tell of an event in an item that this process computes."""
        if item != self._item:
            self._finished += self._item >= 0
            self._item = item
        self._tell(self._finished + event.work_done)

    def cluster(self, coordinator: Coordinator) -> None:
        """Tell how far a cluster is."""
        self._tell(float(coordinator.finished), f"work items on {len(coordinator.workers)} workers")

    def _tell(self, finished: float, counted: str = "work items") -> None:
        if self._progress is None:
            return
        share = finished / self._count if self._count else 1.0
        self._progress(
            Event(
                columns_done=int(finished),
                columns=self._count,
                voxels_done=int(share * self._voxels),
                voxels=self._voxels,
                seconds=time.perf_counter() - self._began,
                stage_seconds={},
                bytes_done=0,
                steps_done=int(finished),
                steps=self._count,
                work_done=min(1.0, share),
                elsewhere=counted,
            )
        )


def _of_records(records: Sequence[ItemRecord]) -> WorkerReport:
    """Return what one process did."""
    return WorkerReport(
        len(records),
        sum(record.voxels for record in records),
        sum(record.seconds for record in records),
        max((record.peak for record in records), default=peak_bytes()),
    )


def _report(
    job: Job,
    record: JobRecord,
    began: float,
    before: int,
    processes: Mapping[str, WorkerReport],
    failures: int = 0,
    *,
    complete: bool,
) -> ClusterReport:
    place = Location.of(job.out)
    return ClusterReport(
        output=place.path if place.is_local else place,
        voxels=prod(record.output),
        computed=sum(one.voxels for one in processes.values()),
        seconds=time.perf_counter() - began,
        stage_seconds={},
        peak_bytes=max((one.peak_bytes for one in processes.values()), default=peak_bytes()),
        plan=RunPlan.from_json(record.plan),
        blas=this_machine().blas,
        warnings=(),
        item=record.size,
        items=record.count,
        done_before=before,
        processes=processes,
        failures=failures,
        lost=record.lost,
        is_complete=complete,
    )
