"""Compute work items of a job in this process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from znnpy.cluster.claims import AttemptLostError, Claim, ItemRecord, forget, new_attempt, record_of
from znnpy.cluster.item_output import ItemOutput, SharedStore, shared_store, stored_sum
from znnpy.cluster.items import ItemGrid
from znnpy.cluster.job import Job, JobRecord
from znnpy.cluster.job_files import JobFiles
from znnpy.cluster.preparing import named_for
from znnpy.cluster.traces import traced_item
from znnpy.computation import Computed, computed
from znnpy.errors import PlanFileError, ResumeError
from znnpy.machine import peak_bytes, this_machine
from znnpy.opened_run import NamedRun, OpenedRun, named_run, opened_run
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.run.pipeline import Event
from znnpy.run.trace import Trace
from znnpy.volume.base import MissingVoxels
from znnpy.volume.mask import Mask
from znnpy.volume.output_target import place_of, prefix_of
from znnpy.volume.sliceable import open_given
from znnpy.volume.store import Storage

_log = logging.getLogger(__name__)

PLANS = "plans"
_LOCK = threading.RLock()  # a process computes one item at a time, with all of its threads


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a process that its manager sets.

    ram      bytes of the whole process, in place of those that the job names
    threads  that compute, where the job names none
    """

    ram: int | None = None
    threads: int | None = None


def run_items(
    job: Job,
    items: Sequence[int],
    *,
    attempt: str | None = None,
    worker: str = "",
    limits: Limits | None = None,
    progress: Callable[[int, Event], None] | None = None,
) -> tuple[ItemRecord, ...]:
    """Compute work items, and return their records. Items that are finished already are not computed again.

    attempt   id of the attempt; None: a new one
    worker    name of this process in the records
    progress  called with an item and an Event while it is computed

    ResumeError if this process reads another network or volume than the job's, AttemptLostError if another attempt took
    an item over; other errors are those of `znnpy.infer`.
    """
    with _LOCK:
        process = _process_of(job, limits or Limits())
        return tuple(process.record(item, attempt or new_attempt(), worker, progress) for item in items)


class _Process:
    """The parts of a job that a process keeps between items: network, weights, grid, the open output, and plans."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self._kept = ExitStack()
        self._job, self._files, self._record = job, job.files, JobRecord.load(job)
        self._place = place_of(job.out)
        self._mask: Mask | None = None
        try:
            self._named = _named(self._files, self._record, limits, self._kept)
            if self._named.asked.mask is not None:
                opened = self._kept.enter_context(open_given(self._named.asked.mask, None, MissingVoxels()))
                self._mask = Mask.of(opened)
            with opened_run(self._named, self._record.statistics, self._mask) as run:
                self._check(run)
                self._grid = ItemGrid.of(run, self._record.size)
                self._arrays, self._dtype = run.arrays, run.dtype
                self._run = run
        except BaseException:
            self._kept.close()
            raise
        if len(self._grid) != self._record.count:
            raise ResumeError(
                f"the job has {self._record.count} work items, and its volume would have {len(self._grid)} here; check "
                "that all machines read the same volume"
            )
        self._store: SharedStore | None = None
        self._plans: dict[str, RunPlan] = {}

    def close(self) -> None:
        """Close the output."""
        self._reopen()
        self._kept.close()

    def record(self, item: int, attempt: str, worker: str, progress: Callable[[int, Event], None] | None) -> ItemRecord:
        """Return the record of an item, which is computed if there is none."""
        if not 0 <= item < self._record.count:
            raise ValueError(f"there is no work item {item} of {self._record.count}")
        if (found := record_of(self._files, item)) is not None:
            return found
        began = time.perf_counter()
        claim = Claim(self._files, item, attempt)
        claim.take()
        boxes = self.boxes(item)
        told = None if progress is None else lambda event: progress(item, event)
        try:
            with opened_run(self._named_item(item, told), self._record.statistics, self._mask) as run:
                output = ItemOutput(self._place, self._opened(), boxes, self._arrays, self._dtype, claim)
                with traced_item(self._files, item, worker) if self._record.is_traced else nullcontext() as trace:
                    self._compute(run, output, trace, began)
            made = ItemRecord(
                item, attempt, worker, output.sum.value, boxes[0].voxels, time.perf_counter() - began, peak_bytes()
            )
            claim.finish(made)
        except AttemptLostError:
            self._reopen()
            found = record_of(self._files, item)
            if found is None:
                raise
            return found
        except BaseException:
            self._reopen()  # chunks of the item that wait in memory must not be written with those of another
            raise
        return made

    def boxes(self, item: int) -> list[Any]:
        """Return the voxels of each array that an item has."""
        return [piece.write for piece in self._grid[item].steps[0].pieces]

    def is_whole(self, item: int) -> bool:
        """Return whether what is stored of a finished item is what its attempt wrote."""
        record = record_of(self._files, item)
        maps = [array.shape[0] for array in self._arrays]
        return record is not None and stored_sum(self._opened(), self.boxes(item), maps) == record.checksum

    def _compute(self, run: OpenedRun, output: ItemOutput, trace: Trace | None, began: float) -> Computed:
        """Compute an item by the plan of this kind of machine, which is made by the first process that needs it."""
        if run.asked.plan is not None or run.source.area is not None:  # plans of areas are for one region
            return computed(run, output, trace, began)
        key = self._plan_key(run)
        content = None if key in self._plans else self._files.read(f"{PLANS}/{key}")
        if key in self._plans or content is not None:
            try:
                plan = self._plans.get(key) or RunPlan.from_json((content or b"").decode(errors="replace"))
                given = replace(run, named=replace(run.named, asked=_with_plan(run.asked, plan)))
                made = computed(given, output, trace, began)
                self._plans[key] = plan
                return made
            except PlanFileError as error:
                _log.warning("the plan that another worker made does not run here, so one is made: %s", error)
        made = computed(run, output, trace, began)
        self._plans[key] = made.done.plan
        self._files.create(f"{PLANS}/{key}", made.done.plan.to_json().encode())
        return made

    def _plan_key(self, run: OpenedRun) -> str:
        """Return the name of a plan: machines, limits and works of one name have plans in common."""
        asked = run.asked
        said = (this_machine().fingerprint, asked.ram, asked.threads, asked.vram, asked.device, run.source.output)
        return sha256(repr(said).encode()).hexdigest()[:32]

    def _named_item(self, item: int, progress: Callable[[Event], None] | None) -> NamedRun:
        named = named_for(self._run, self._grid.region_of(item))
        return replace(named, asked=replace(named.asked, progress=progress))

    def _opened(self) -> SharedStore:
        if self._store is None:
            asked = self._named.asked
            storage = Storage(prefix_of(self._job.out), asked.sharded, asked.multiscale, shared=True)
            self._store = shared_store(self._place, self._job.run, self._arrays, self._dtype, storage)
        return self._store

    def _reopen(self) -> None:
        """Forget what an attempt that failed has gathered."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _check(self, run: OpenedRun) -> None:
        """Raise ResumeError if this process reads other inputs than the job names."""
        here, theirs = json.loads(json.dumps(run.job)), self._record.identity
        for key in sorted(here.keys() | theirs.keys()):
            if here.get(key) != theirs.get(key):
                raise ResumeError(
                    f"this process reads another {key} than the job of {self._job.out} began with; check that all "
                    "machines see the same files"
                )


def contested(job: Job, items: Sequence[int]) -> list[int]:
    """Return those of some finished items whose stored voxels are not those of one attempt; they are not finished now.

    items  that several attempts may have written
    """
    if not items:
        return []
    with _LOCK:
        process = _process_of(job, Limits())
        mixed = [item for item in items if not process.is_whole(item)]
    for item in mixed:
        forget(job.files, item)
    return mixed


_kept: list[tuple[Job, Limits, _Process]] = []  # of the job that this process works on, one at most


def _process_of(job: Job, limits: Limits) -> _Process:
    """Return what this process keeps of a job; what it kept of another one is dropped."""
    if not _kept or _kept[0][:2] != (job, limits):
        release()
        _kept.append((job, limits, _Process(job, limits)))
    return _kept[0][2]


def release() -> None:
    """Drop what this process keeps of a job."""
    with _LOCK:
        while _kept:
            _kept.pop()[2].close()


def _named(files: JobFiles, record: JobRecord, limits: Limits, kept: ExitStack) -> NamedRun:
    """Return what the options of a job name here."""
    asked = record.options(files, kept)
    if limits.ram is not None:
        asked = replace(asked, ram=limits.ram)
    if asked.threads is None and asked.plan is None:
        asked = replace(asked, threads=limits.threads)
    return named_run(asked)


def _with_plan(asked: InferOptions, plan: RunPlan) -> InferOptions:
    """Return options that give a plan, without those that a plan fixes."""
    return replace(
        asked,
        plan=plan,
        calibrate=False,  # the process that made it has measured what it needed
        threads=None,
        patch=None,
        only=(),
        cover=None,
        depth_first=True,
        device="auto",
        mode="auto",
        precision=None,
        costs=None,
    )
