"""Prepare a job: create its output, divide it into work items, and write down what processes must know."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from znnpy.cluster.claims import OPEN
from znnpy.cluster.item_output import ItemOutput
from znnpy.cluster.items import NOWHERE, ItemGrid, divided, unit_of
from znnpy.cluster.job import FORMAT, NETWORK, PLAN, Job, JobRecord, kept, plan_of, stated
from znnpy.cluster.job_files import JOB, job_files
from znnpy.computation import planned
from znnpy.errors import OutputError, ResumeError, ZnnpyError
from znnpy.job import attributes_of, settings_of
from znnpy.machine import this_machine
from znnpy.messages import option
from znnpy.opened_run import NamedRun, OpenedRun, named_run, opened_run
from znnpy.options import InferOptions
from znnpy.patches import Box
from znnpy.planner.run_plan import RunPlan
from znnpy.run.resume import statistics_kept
from znnpy.run_log import log_phase
from znnpy.shapes import text
from znnpy.units import human_seconds
from znnpy.volume.bucket_output import BucketOutput
from znnpy.volume.journal import JournalHeader
from znnpy.volume.location import PREFIXES, Location
from znnpy.volume.lock import OutputLockedError
from znnpy.volume.output import Output
from znnpy.volume.output_target import place_of

_log = logging.getLogger(__name__)

ITEM_SECONDS, SHORT_SECONDS = 600.0, 60.0  # that an item takes at most on this machine; that are short enough
ITEMS_A_WORKER = 4  # at least, so that workers end at about the same time; fewer only where there are fewer chunks
UNKNOWN_WORKERS = 8  # of a job whose workers are not known
MOST_SIZES, SMALLER = 6, 1.5  # sizes of items that are planned; how many times as many items each has
JOIN_SECONDS = 600.0  # that a process waits for another one which prepares the job
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job whose output is open.

    output  that is begun or continued; `finished` where nothing is left to do
    grid    the work items; None: the output is finished
    """

    job: Job
    run: OpenedRun
    output: Output | BucketOutput
    grid: ItemGrid | None


def prepare(asked: InferOptions, workers: int = UNKNOWN_WORKERS) -> Job:
    """Create the output of a job, or continue it; return its name, for `run_items` and `finish`.

    workers  that are expected, for which items are divided

    Errors are those of `znnpy.infer`; ShapeError where items cannot be made of the output.
    """
    with prepared(asked, workers) as made:
        return made.job


@contextmanager
def prepared(asked: InferOptions, workers: int = UNKNOWN_WORKERS) -> Iterator[PreparedJob]:
    """Prepare a job as `prepare` does, and hold the lock of its output."""
    asked = absolute(asked)
    named = named_run(asked)
    if not isinstance(asked.volume, str | os.PathLike):
        raise OutputError("workers open the volume themselves: give its path or URL, and not an array")
    if asked.mask is not None and not isinstance(asked.mask, str | os.PathLike):
        raise OutputError(f"workers read the mask themselves: give a path or URL as {option('mask')}, and no array")
    networks = asked.network if isinstance(asked.network, list | tuple) else [asked.network]
    if len(networks) > 1 and not all(isinstance(one, str | os.PathLike) for one in networks):
        raise OutputError(f"workers read several networks from files: give their paths as {option('network')}")
    if asked.out is not None and not isinstance(asked.out, str | os.PathLike):
        raise OutputError(f"workers write the output themselves: give a path or URL as {option('out')}, and no array")
    out = str(named.destination if asked.out is None else asked.out)
    needs = named.trained.network.statistics is not None and asked.resume
    with opened_run(named, statistics_kept(named.destination) if needs else None) as run:
        for doubt in run.doubts:
            _log.warning("%s", doubt)
        output = run.output()
        assert isinstance(output, Output | BucketOutput)
        with output:
            if output.finished:
                _remove_files(out)  # a process that finished the job may have been killed before
                yield PreparedJob(Job(out, ""), run, output, None)
                return
            if output.header is not None:
                if output.header.item is None:
                    raise ResumeError(
                        f"the unfinished {out} was begun by one process, not in work items; continue without "
                        f"{option('cluster')} and {option('part')}, or start again with {option('overwrite', True)}"
                    )
                grid = ItemGrid.of(run, output.header.item)
                if (record := JobRecord.find(out)) is not None:
                    _check_options(record, asked, out)
            else:
                grid, plan = _divided(run, workers, is_fixed=output.gathered_bytes == 0)
                _begin(run, output, grid, plan)
                _remove_files(out)  # of an earlier job, whose output is replaced
            assert output.header is not None
            job = Job(out, output.run or "")
            record = JobRecord.find(out)
            if record is None:
                _write_record(job, run, grid, RunPlan.from_json(output.header.plan))
            elif asked.trace is not None and not record.is_traced:
                replace(record, is_traced=True).save(out)
            yield PreparedJob(job, run, output, grid)


def _remove_files(out: str) -> None:
    """Remove the files of a job; a folder of that name without the record of a job is somebody's, and is left."""
    files = job_files(place_of(out))
    if files.read(JOB) is not None:
        files.remove("")


def join(asked: InferOptions, workers: int = UNKNOWN_WORKERS) -> Job:
    """Return the job of an output, which this process prepares unless another one did, or does.

    ResumeError if it began with other options.
    """
    asked = absolute(asked)
    named = named_run(asked)
    out, until = str(named.destination if asked.out is None else asked.out), time.monotonic() + JOIN_SECONDS
    while True:
        if (record := JobRecord.find(out)) is not None:
            _check_options(record, asked, out)
            return Job(out, record.run)
        try:
            return prepare(replace(asked, resume=True), workers)
        except OutputLockedError:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_SECONDS)


def _check_options(record: JobRecord, asked: InferOptions, out: str) -> None:
    """Raise ResumeError if a job began with other options."""
    free = ["out", "ram"]  # each process may have a limit of its own
    if record.asked.get("network") == NETWORK:
        free.append("network")  # it was given as an object, and the identity of the run tells it
    if record.asked.get("plan") == PLAN:
        free.append("plan")
        if asked.plan is not None and plan_of(asked).to_json().encode() != Job(out, record.run).files.read(PLAN):
            raise ResumeError(f"the job of {out} began with another plan than {option('plan')} gives; leave it out")
    before = {key: value for key, value in record.asked.items() if key not in free}
    now = {key: value for key, value in stated(asked).items() if key not in free}
    for key in sorted(before.keys() | now.keys()):
        if str(before.get(key)) != str(now.get(key)):  # as text, since NaN equals nothing
            raise ResumeError(
                f"the job of {out} began with {option(key, before.get(key))}, and now it is "
                f"{option(key, now.get(key))}; give the same options again"
            )
    if asked.items is not None and tuple(asked.items) != record.size:
        raise ResumeError(
            f"the job of {out} began with work items of {text(record.size)} voxels, and now they are "
            f"{option('items', asked.items)}; leave it out, or start again with {option('overwrite', True)}"
        )


def absolute(asked: InferOptions) -> InferOptions:
    """Return options whose paths do not depend on the folder that a process is in."""
    networks = asked.network if isinstance(asked.network, list | tuple) else [asked.network]
    return replace(
        asked,
        volume=_absolute(asked.volume),
        network=[_absolute(one) if not isinstance(one, str) or os.path.exists(one) else one for one in networks],
        **{name: _absolute(getattr(asked, name)) for name in ("weights", "out", "mask", "costs", "plan")},
    )


def _absolute(name: Any) -> Any:
    """Return a path that begins at the root, for the name of a file; other values as they are."""
    if isinstance(name, Path):
        return Path(os.path.abspath(name))
    if not isinstance(name, str) or not Location.of(name).is_local:
        return name
    prefix = next((f"{word}://" for word in PREFIXES if name.startswith(f"{word}://")), "")
    rest = name.removeprefix(prefix)
    return name if rest.startswith("file:") else f"{prefix}{os.path.abspath(rest)}"


def _divided(run: OpenedRun, workers: int, *, is_fixed: bool) -> tuple[ItemGrid, RunPlan]:
    """Return the work items of a new job, of the size that is asked for, or that lets the job end soonest.

    Returns the plan of an item too. Small items compute more of their borders twice; of large ones, the last keep some
    workers busy while others have none.
    """
    if run.asked.items is not None:
        grid = ItemGrid.of(run, run.asked.items)
        grid.check(is_fixed=is_fixed)
        return grid, _plan_of_item(run, grid, len(grid) // 2)
    found: dict[tuple[bool, float], tuple[ItemGrid, RunPlan]] = {}  # by whether an item takes too long, and the end
    least, size, unit = ITEMS_A_WORKER * workers, NOWHERE, unit_of(run, is_fixed=is_fixed)
    for _ in range(MOST_SIZES):
        before, size = size, divided(run.source.output, unit, least)
        if size == before:
            break
        grid = ItemGrid.of(run, size)
        try:
            grid.check(is_fixed=is_fixed)
            plan = _plan_of_item(run, grid, len(grid) // 2)
        except ZnnpyError:
            if not found:
                raise
            break  # a larger size is possible
        seconds = _unmasked(plan)
        too_long = seconds > ITEM_SECONDS
        end = seconds if too_long else seconds * (ceil(len(grid) / workers) + 0.5)
        is_best = not found or (too_long, end) < min(found)
        found[too_long, end] = grid, plan
        if not too_long and (seconds <= SHORT_SECONDS or not is_best):
            break
        least = ceil(len(grid) * max(SMALLER, seconds / ITEM_SECONDS))
    grid, plan = found[min(found)]
    log_phase("planned", f"{len(grid)} work items of {text(grid.size)} voxels, {human_seconds(plan.seconds)} each here")
    return grid, plan


def _unmasked(plan: RunPlan) -> float:
    """Return the seconds of a plan without a mask, of which an item may have any share."""
    return replace(plan, inside=1.0).seconds


def _plan_of_item(run: OpenedRun, grid: ItemGrid, index: int) -> RunPlan:
    """Return the plan of this machine for an item."""
    mask = None if run.wanted is None else run.wanted.mask
    with opened_run(named_for(run, grid.region_of(index)), run.job.get("statistics"), mask) as one:
        column = grid[index].steps[0]
        boxes = [piece.write for piece in column.pieces]
        place = place_of(str(run.named.destination))
        return planned(one, ItemOutput(place, None, boxes, run.arrays, run.dtype, None))


def named_for(run: OpenedRun, region: Box) -> NamedRun:
    """Return what a run names, for one region of its volume."""
    roi = ",".join(f"{lo}:{hi}" for lo, hi in zip(region.lo, region.hi, strict=True))
    return replace(run.named, asked=replace(run.asked, roi=roi), inputs=dict(run.named.inputs))


def _begin(run: OpenedRun, output: Output | BucketOutput, grid: ItemGrid, plan: RunPlan) -> None:
    """Create the output of a new job."""
    machine = this_machine()
    settings = settings_of(run.asked.names, machine)
    settings["item"] = list(grid.size)
    header = JournalHeader(run.job, settings, plan.to_json(), machine.blas, len(grid))
    output.begin(header, attributes_of(run.trained.network, run.source, run.job, plan), [grid])


def _write_record(job: Job, run: OpenedRun, grid: ItemGrid, plan: RunPlan) -> None:
    """Write what processes must know of a job; `plan` is that of an item."""
    files = job.files
    asked = stated(kept(run.asked, run.named.trained, files))
    files.write(OPEN, b"")
    record = JobRecord(
        FORMAT,
        job.run,
        asked,
        run.source.output,
        grid.size,
        len(grid),
        _lost(run, grid, plan),
        plan.to_json(),
        json.loads(json.dumps(run.job)),
        run.job.get("statistics"),
        run.asked.trace is not None,
    )
    record.save(job.out)


def _lost(run: OpenedRun, grid: ItemGrid, plan: RunPlan) -> float | None:
    """Return the share of the work that one plan of this machine for the whole output would save; None: it has none.

    plan  of an item
    """
    try:
        whole = _plan_of_item(run, ItemGrid.of(run, run.source.output), 0)
    except ZnnpyError as error:  # only the report tells it
        _log.info("no plan for the whole output: %s", error)
        return None
    of_items = _unmasked(plan) * prod(run.source.output) / grid.box(len(grid) // 2).voxels
    return max(0.0, 1 - _unmasked(whole) / of_items)
