"""The whole job as one function: a volume on disk in, its dense prediction on disk out."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from znnpy.computation import Done, computed, traced
from znnpy.job import roi_text
from znnpy.machine import Machine, peak_bytes, this_machine
from znnpy.nnunet.names import model_of
from znnpy.opened_run import OpenedRun, named_run, opened_run
from znnpy.option_declarations import function_of
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.recording import check_files, recorder_of
from znnpy.report.run_report import Report
from znnpy.run.masked import MaskedColumns, work_items
from znnpy.run.masked_windows import MaskedWindows
from znnpy.run.resume import (
    plan_finished,
    statistics_kept,
)
from znnpy.run.trace import Spans
from znnpy.run_log import log_phase
from znnpy.run_warnings import half_missing, slower_here
from znnpy.units import human_seconds
from znnpy.volume.base import Chunks
from znnpy.volume.roi import has_unit

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)


@function_of(InferOptions)
def infer(asked: InferOptions) -> Report:
    """Run a network at every voxel of a volume, within limits of memory; the output is complete, or it is not there.

    OPTIONS

    Returns a Report with times, speeds and memory beside what the plan predicted.

    Errors are ZnnpyErrors that name the numbers and what to do, and ValueError for a value that an argument cannot
    have. What was finished before an error, Ctrl-C or a kill stays on disk for `resume=True`. Its bytes may differ only
    if a GPU refuses memory that it gave the run before (the report says so), or in mode "side-by-side".
    """
    return infer_as_asked(asked)


def infer_as_asked(asked: InferOptions) -> Report:
    """Return the report that `infer` returns for these options."""
    by_cluster = asked.cluster is not None or asked.client is not None
    if not (by_cluster or asked.finish or asked.part is not None) or model_of(asked.network) is not None:
        if asked.items is not None:
            raise ValueError("items are of runs with cluster, client or part: leave them out")
        return _infer_here(asked)
    from znnpy.cluster.inference import infer_on_cluster, infer_part

    report = infer_on_cluster(asked) if by_cluster else infer_part(asked)
    return _infer_here(_alone(asked)) if report is None else report  # a complete output is described as any other


def _alone(asked: InferOptions) -> InferOptions:
    """Return the options of a run by this process alone, which finds its output complete."""
    return replace(asked, cluster=None, client=None, part=None, finish=False, items=None, resume=True)


def _infer_here(asked: InferOptions) -> Report:
    """Compute an output in this process."""
    if (model := model_of(asked.network)) is not None:
        from znnpy.nnunet_inference import infer_case

        return infer_case(asked, model, _infer_here)
    started, earlier = time.perf_counter(), peak_bytes()
    named = named_run(asked)
    destination = named.destination
    recorder = recorder_of(named)
    if recorder is not None:
        named = replace(named, asked=replace(asked, progress=recorder.progress(asked.progress)))
    with ExitStack() as stack:
        spans: Spans | None = stack.enter_context(traced(named))
        if recorder is not None:
            stack.enter_context(recorder.watching_memory())
            spans = recorder.tracing(spans)
        needs = named.trained.network.statistics is not None and asked.resume
        run = stack.enter_context(opened_run(named, statistics_kept(destination) if needs else None))
        check_files(named)  # once more: the volume and the mask have named their files
        for doubt in run.doubts:
            _log.warning("%s", doubt)
        output = stack.enter_context(run.output())
        if output.finished:
            made = plan_finished(destination, output.attributes.get("plan"))
            report = _report(run, started, made, this_machine(), doubts=run.doubts)
            if recorder is not None:
                recorder.write(report, this_machine(), run.trained.network, run.job)
            return report
        result = computed(run, output, spans, started)
    done, chunks = result.done, run.volume.chunks
    doubts = (*run.doubts, *result.above, *half_missing(chunks))
    report = _report(run, started, done.plan, result.target.machine, done, result.target.sentences, doubts, chunks)
    if (wanted := run.wanted) is not None:
        items = work_items(done.plan, run.trained.network, wanted)
        assert isinstance(items, MaskedColumns | MaskedWindows)
        report = replace(report, mask=f"{wanted.mask.volume}, laid on the volume {wanted.how}", skipped=items.skipped)
    if run.region is not None and has_unit(asked.roi or ""):
        inside = roi_text(run.region, run.volume.size) or "the whole volume"
        report = replace(report, region=f"{inside} in voxels, from {asked.roi}")
    report = replace(report, earlier_peak_bytes=earlier, transfers=result.transfers, rewritten=output.rewritten)
    if recorder is not None:
        recorder.write(report, result.target.machine, run.trained.network, run.job)
    for sentence in report.above_limit:
        _log.warning("%s", sentence)
    log_phase("finished", f"{destination}: {report.computed:,} voxels in {human_seconds(report.seconds)}")
    return report


def _report(
    run: OpenedRun,
    started: float,
    plan: RunPlan,
    machine: Machine,
    done: Done | None = None,
    notes: tuple[str, ...] = (),
    doubts: tuple[str, ...] = (),
    chunks: Chunks | None = None,
) -> Report:
    """`done` is None where nothing was left to do; `notes` say why the device is not another, `doubts` what is odd."""
    timings = done.timings if done else None
    lacking = slower_here(machine) if any(worker.plan.device == "cpu" for worker in plan.workers) else ()
    return Report(
        output=run.named.destination,
        voxels=prod(run.source.output),
        computed=timings.voxels if timings else 0,
        seconds=time.perf_counter() - started,
        stage_seconds=timings.stage_seconds if timings else {},
        peak_bytes=peak_bytes(),
        plan=plan,
        blas=machine.blas,
        gpu=machine.gpu.name if machine.gpu else None,
        vram_bytes=done.vram_bytes if done else None,
        notes=notes,
        workers=timings.workers if timings else (),
        idle_seconds=done.idle_seconds if done else {},
        values=done.values if done else None,
        chunks=chunks,
        warnings=(*doubts, *lacking, *(done.sentences if done else ())),
    )
