"""The whole job as one function: a volume on disk in, its dense prediction on disk out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.costs.store import CostStore
from znnpy.errors import OutputError, VramError
from znnpy.files import regular_file
from znnpy.job import arrays_of, attributes_of, columns_of, job_of, roi_text, settings_of, stored_as
from znnpy.kernels.cpu.fft import Wisdom
from znnpy.machine import Machine, limits_of, peak_bytes, this_machine
from znnpy.measure.fftw_wisdom import wisdom_begun, wisdom_kept
from znnpy.measure.storage_plans import suited_plan
from znnpy.measure.transfers import Transfers, transfers_of, worth_measuring
from znnpy.messages import option
from znnpy.network_files import read_asked
from znnpy.nnunet.names import model_of
from znnpy.option_declarations import function_of
from znnpy.option_values import Device
from znnpy.options import InferOptions
from znnpy.patches import Box
from znnpy.planner.memory import gathering_budget
from znnpy.planner.run_plan import RunPlan
from znnpy.report.plan_text import predicted
from znnpy.report.run_report import Report
from znnpy.run import pipeline
from znnpy.run.asked import devices_asked, devices_for
from znnpy.run.choice import Work, choose, forgetful, given_plan, smaller_plan
from znnpy.run.masked import MaskedColumns, MaskedOutput, work_items
from znnpy.run.masked_windows import MaskedWindows
from znnpy.run.preparing import Preparing
from znnpy.run.resume import (
    check_options,
    device_begun,
    limits_taken,
    plan_begun,
    plan_finished,
    smaller_plan_begun,
    statistics_kept,
)
from znnpy.run.target import OpenTarget, Targets, check_here
from znnpy.run.trace import Trace
from znnpy.run.workers import Sessions, sessions_of, workers_of
from znnpy.run_log import log_phase
from znnpy.run_warnings import half_missing, slower_here
from znnpy.self_check import CheckedOutput
from znnpy.shapes import Vec3, text
from znnpy.shared_options import RunOptions
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.units import human_bytes, human_seconds
from znnpy.values import Tallied, Tally, Values
from znnpy.volume.base import Chunks, MissingVoxels, Volume
from znnpy.volume.chunk_layers import check_unpacking, layer_bytes
from znnpy.volume.journal import JournalHeader
from znnpy.volume.location import Location, path_of
from znnpy.volume.mask import WantedOutputs
from znnpy.volume.output import Output
from znnpy.volume.output_names import Names
from znnpy.volume.output_target import mode_of, output_for, prefix_of, target_of
from znnpy.volume.roi import has_unit, parse_roi
from znnpy.volume.sample import sample_of
from znnpy.volume.sliceable import BlockOutput, SliceVolume, open_given
from znnpy.volume.source import Source
from znnpy.volume.statistics import with_statistics

if TYPE_CHECKING:
    from znnpy.volume.bucket_output import BucketOutput

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
    if (model := model_of(asked.network)) is not None:
        from znnpy.nnunet_inference import infer_case

        return infer_case(asked, model, infer_as_asked)
    started, earlier = time.perf_counter(), peak_bytes()
    volume, out, roi = asked.volume, asked.out, asked.roi
    how = mode_of(overwrite=asked.overwrite, resume=asked.resume)
    if asked.allow_nan and asked.output_dtype == "uint8":
        raise OutputError(
            f"uint8 has no NaN to write where the volume holds one; choose {option('output_dtype', 'float32')} or "
            f"{option('output_dtype', 'float16')}"
        )
    store = CostStore(asked.costs, calibrate=asked.calibrate)
    devices_asked(asked)  # conflicting options are refused before the network is read
    named = read_asked(asked.network, asked)
    devices = devices_for(named.network, asked)
    devices = replace(devices, device=store.meant(devices.device))
    trained = load_trained(named, asked.weights, asked.ram)
    inputs: dict[str, Path | Collection[Path] | None] = {
        "volume": path_of(volume),
        "network": named.paths,
        "weights": [one.weights for one in (named.members or (named,)) if one.weights is not None]
        if asked.weights is None
        else Path(asked.weights),
        "plan": Path(asked.plan) if isinstance(asked.plan, str | Path) else None,
        "costs": store.file,
        "trace": None if asked.trace is None else Path(asked.trace),
    }
    destination = target_of(volume, out, trained.network.name)
    with ExitStack() as stack:
        traced = stack.enter_context(_trace(asked.trace, asked.overwrite, destination))
        absent = MissingVoxels(asked.fill_missing, asked.missing_chunks)
        opened = stack.enter_context(_asked_volume(asked, absent))
        inputs["source of the volume"] = opened.files
        log_phase("opened", f"{opened}: {text(opened.size)} voxels of {opened.dtype}, network {trained.network.name}")
        region = parse_roi(roi, opened.size, opened.space, opened) if roi else None
        if trained.network.statistics is not None:
            kept = statistics_kept(destination) if asked.resume else None
            trained = replace(trained, network=with_statistics(trained.network, opened, kept))
        source = Source(opened, roi=region, border=asked.border, network=trained.network, allow_nan=asked.allow_nan)
        check_unpacking(opened, limits_of(this_machine(), asked.ram).ram_bytes)
        sample = sample_of(opened)
        wanted = None
        if asked.mask is not None:
            mask = stack.enter_context(open_given(asked.mask, None, MissingVoxels()))
            inputs["mask"] = mask.files
            wanted = WantedOutputs.of(mask, source)
        doubts = (*sample.doubts(trained.network), *(() if wanted is None else wanted.doubts()))
        for doubt in doubts:
            _log.warning("%s", doubt)
        job = job_of(
            trained,
            opened,
            sample,
            roi_text(region, opened.size),
            asked.border,
            asked.output_dtype,
            allow_nan=asked.allow_nan,
            fill_missing=asked.fill_missing,
            stored=stored_as(prefix_of(out), sharded=asked.sharded, multiscale=asked.multiscale),
            mask=None if wanted is None else wanted.mask,
            time=asked.time,
            scale=asked.scale,
        )
        arrays, dtype = arrays_of(trained.network, source), np.dtype(job["output_dtype"])
        if out is not None and not isinstance(out, str | os.PathLike):
            source.check_one_size(trained.network, f"give a path as {option('out')}")
        output = output_for(
            out,
            destination,
            volume,
            inputs=inputs,
            arrays=arrays,
            dtype=dtype,
            mode=how,
            job=job,
            sharded=asked.sharded,
            multiscale=asked.multiscale,
            mask=asked.mask,
        )
        stack.enter_context(output)
        if output.finished:
            made = plan_finished(destination, output.attributes.get("plan"))
            return _report(destination, started, made, this_machine(), doubts=doubts)
        watched = None
        if asked.paranoid:  # an object of the caller's is read by one thread at a time, so it is opened once
            once = isinstance(opened, SliceVolume)
            watched = opened if once else stack.enter_context(_asked_volume(asked, absent))
        run = _Run(trained, source, output, job, asked, asked.progress, watched, traced, started, wanted)
        with Targets(replace(devices, device=run.meant(devices.device)), store) as targets:
            for target in targets:
                with targets.attempt():
                    chosen = run.plan(target)
                    break
            opened.expect(source.needed)
            transfers = None
            if asked.calibrate and worth_measuring(chosen, trained.network, source):
                folder = destination.parent if isinstance(destination, Path) and isinstance(output, Output) else None
                transfers = transfers_of(chosen, trained.network, source, folder)
                chosen, transfers = run.suited(target, chosen, transfers)
            for above in target.above_memory(chosen.limits):
                _log.warning("%s", above)
                doubts = (*doubts, above)
            log_phase("planned", predicted(chosen) if transfers is None else f"{predicted(chosen)}; {transfers}")
            done = run.compute(target, chosen)
    doubts = (*doubts, *half_missing(opened.chunks))
    report = _report(destination, started, done.plan, target.machine, done, target.sentences, doubts, opened.chunks)
    if wanted is not None:
        items = work_items(done.plan, trained.network, wanted)
        assert isinstance(items, MaskedColumns | MaskedWindows)
        report = replace(report, mask=f"{wanted.mask.volume}, laid on the volume {wanted.how}", skipped=items.skipped)
    if region is not None and has_unit(roi or ""):
        report = replace(report, region=f"{roi_text(region, opened.size) or 'the whole volume'} in voxels, from {roi}")
    report = replace(report, earlier_peak_bytes=earlier, transfers=transfers, rewritten=output.rewritten)
    for sentence in report.above_limit:
        _log.warning("%s", sentence)
    log_phase("finished", f"{destination}: {report.computed:,} voxels in {human_seconds(report.seconds)}")
    return report


@dataclass(frozen=True, slots=True)
class _Done:
    """The results of a run."""

    plan: RunPlan
    timings: pipeline.Timings
    vram_bytes: int | None  # that the process took of the GPU
    sentences: tuple[str, ...]
    idle_seconds: Mapping[str, float]  # of the CPU and the GPU that a step goes through one after the other
    values: Values | None  # that this run wrote


@dataclass(frozen=True, slots=True)
class _Run:
    """One job with its files open."""

    trained: TrainedNetwork
    source: Source
    output: Output | BucketOutput | BlockOutput
    job: dict[str, Any]
    asked: RunOptions
    progress: Callable[[pipeline.Event], None] | None
    watched: Volume | None  # opened once more, where patches are held against the definition
    trace: Trace | None
    started: float  # by `time.perf_counter()`
    wanted: WantedOutputs | None  # where outputs are wanted; None: everywhere
    tally: Tally = field(default_factory=Tally)  # of what is written

    @property
    def masks(self) -> bool:
        """Return whether voxels that are not finite are allowed and can occur."""
        return bool(self.job["allow_nan"]) and self.source.dtype.kind == "f"

    @property
    def work(self) -> Work:
        """Return the work of the job: a network, the size of its output, and what values take."""
        source = self.source
        return Work(
            network=self.trained.network,
            output=source.output,
            itemsize_in=source.dtype.itemsize,
            itemsize_out=self.output.dtype.itemsize,
            area=source.area,
            masks=self.masks,
            unpacking_bytes=source.volume.extra_bytes + (self.kept_bytes if self.plans else 0),
            held_bytes=self.output.held_bytes if isinstance(self.output, BlockOutput) else 0,
            gathered_bytes=self.output.gathered_bytes,
            wanted=self.wanted,
        )

    @property
    def plans(self) -> bool:
        """Return whether the run searches for its plan: none is given, and it resumes none."""
        return self.asked.plan is None and self.output.header is None

    @property
    def kept_bytes(self) -> int:
        """Bytes of chunks that the run may keep for the next step."""
        return layer_bytes(self.source.volume, limits_of(this_machine(), self.asked.ram).ram_bytes)

    def meant(self, device: Device) -> Device:
        """Return the device of the plan that there is, or `device`; ResumeError where a GPU is gone."""
        begun, given = self.output.header, given_plan(self.asked)
        if begun is not None:
            return device_begun(begun)
        if given is None:
            return device
        check_here(given)
        return given.device

    def plan(self, target: OpenTarget) -> RunPlan:
        """Return the plan that the run began with, the one that was given, or the fastest."""
        begun, network = self.output.header, self.trained.network
        if self.plans:
            self.source.keep_chunks(self.kept_bytes)
            return choose(self.asked, self.work, target)
        if begun is None:
            made = choose(self.asked, self.work, target)
            self._keep_chunks(made, target)
            return made
        settings = settings_of(self.asked.names, target.machine)
        made = plan_begun(begun, settings, network, target.machine, self.source.output, devices=target.devices)
        check_options(self.asked, begun, made)
        self._keep_chunks(made, target)
        return made

    def suited(self, target: OpenTarget, plan: RunPlan, transfers: Transfers) -> tuple[RunPlan, Transfers]:
        """Return a plan with wider columns where reading takes longer than computing, unless the plan is fixed."""
        asked = self.asked
        if not self.plans or asked.patch is not None or asked.cover == "patches" or self.wanted is not None:
            return plan, transfers

        def planned(patch: Vec3) -> RunPlan:
            return choose(replace(asked, patch=patch), self.work, target)

        return suited_plan(plan, transfers, self.trained.network, self.source, planned)

    def _keep_chunks(self, plan: RunPlan, target: OpenTarget) -> None:
        """Keep chunks for the next step in what a plan that was made before leaves of its memory limit."""
        memory, limit = plan.memory, plan.limits.ram_bytes
        spare = limit - memory.peak + max(0, memory.baseline - self.work.baseline(target, limit))
        self.source.keep_chunks(min(self.kept_bytes, max(0, spare)))

    def compute(self, target: OpenTarget, plan: RunPlan) -> _Done:
        """Run the plan; if the GPU refuses memory that it was promised, plan anew within less and run that plan."""
        sentences, before = list(target.costs.sentences), self.output.done
        if before:
            sentences += limits_taken(self.asked, plan)
        refused = None
        try:
            done = self._run(target, plan)
        except VramError as error:
            refused = forgetful(error)
        if refused is not None:
            self.output.pause()
            begun = self.output.header is not None
            if self.output.header is None:
                plan = smaller_plan(self.asked, self.work, target, plan, refused)
            else:
                plan = smaller_plan_begun(self.output.header, self.asked, self.work, target, plan, refused)
            rounding = "; what was finished before may be rounded differently" if begun else ""
            within = human_bytes(plan.limits.vram_bytes or 0)
            sentences.append(f"planned anew within {within} of VRAM: {refused}{rounding}")
            done = self._run(target, plan)
            columns = plan.work_items(self.trained.network)
            computed = prod(plan.output) - sum(columns[index].voxels for index in before)
            done = replace(done, timings=replace(done.timings, voxels=computed))
        self.output.complete()
        return replace(done, sentences=(*sentences, *done.sentences))

    def _run(self, target: OpenTarget, plan: RunPlan) -> _Done:
        """Run those work items of the plan that the output does not hold yet."""
        network = self.trained.network
        log_phase("preparing", f"{human_bytes(plan.main.memory.last.prepared)}")
        preparing = Preparing(plan, network, self.started, self.output.done, self.progress, self.wanted)
        with self._awake(target, plan, preparing) as (sessions, wisdom):
            before = preparing.done()
            self.output.limit(gathering_budget(plan.limits.ram_bytes))
            if self.output.header is None:
                settings, count = settings_of(self.asked.names, target.machine), len(plan.work_items(network))
                header = JournalHeader(
                    self.job, settings, plan.to_json(), target.machine.blas, count, wisdom=wisdom.used
                )
                self.output.begin(
                    header, attributes_of(network, self.source, self.job, plan), columns_of(plan, network)
                )
            workers = workers_of(plan, sessions, network, self.output.done, self.wanted)
            log_phase("running", f"{len(self.output.done)} of {len(plan.work_items(network))} work items done before")
            output, leave_out = self._writes(plan)
            timings = pipeline.run_workers(workers, self.source, output, self.progress, self.trace, before, leave_out)
            gone = [worker for worker in timings.workers if worker.lost]
            lost = [f"{worker.name} was lost, and the others went on: {worker.lost}" for worker in gone]
            late = [
                f"{worker.name} was late at the end: a GPU computed {worker.given_up} of its cells"
                for worker in timings.workers
                if worker.given_up
            ]
            idle = {device: spent for session in sessions.values() for device, spent in session.idle_seconds.items()}
            return _Done(
                plan, timings, target.taken_bytes(), (*lost, *late, *wisdom.sentences), idle, self.tally.values
            )

    def _writes(self, plan: RunPlan) -> tuple[pipeline.Writes, Callable[[Box, int], None] | None]:
        """Return what takes computed voxels, and what writes zeros outside a mask."""
        output: pipeline.Writes = Tallied(self.output, self.tally)
        leave_out = None
        if self.wanted is not None:
            masked = MaskedOutput(output, self.wanted, self.trained.network.output_maps)
            output, leave_out = masked, masked.leave_out
        if self.watched is not None:
            area = self.source.area
            output = CheckedOutput(output, self.trained, self.watched, self.source.offset, area, plan.precision)
        return output, leave_out

    @contextmanager
    def _awake(self, target: OpenTarget, plan: RunPlan, preparing: Preparing) -> Iterator[tuple[Sessions, Wisdom]]:
        network, weights, begun = self.trained.network, self.trained.weights, self.output.header
        with ExitStack() as stack:
            with wisdom_begun(begun.wisdom) if begun else wisdom_kept(target.machine, plan.seconds) as wisdom:
                sessions = stack.enter_context(sessions_of(plan, target, network, weights, self.trace, preparing.told))
            yield sessions, wisdom


def _asked_volume(asked: InferOptions, absent: MissingVoxels) -> Volume:
    """Open the volume that the options name."""
    return open_given(asked.volume, asked.dataset, absent, scale=asked.scale, time=asked.time)


def _trace(path: str | Path | None, overwrite: bool, output: Path | Location) -> AbstractContextManager[Trace | None]:
    """Open the trace of the run, or no trace without a path; raise OutputError if the path may not be written."""
    if path is None:
        return nullcontext()
    target = regular_file(Path(path), overwrite, "trace")
    if isinstance(output, Location):
        return Trace(target)
    names = Names(output)
    if target in {Path(os.path.realpath(name)) for name in (output, names.partial, names.journal, names.lock)}:
        raise OutputError(f"{path} is the output or a file that it needs; give another {option('trace')}")
    return Trace(target)


def _report(
    target: Path | Location,
    started: float,
    plan: RunPlan,
    machine: Machine,
    done: _Done | None = None,
    notes: tuple[str, ...] = (),
    doubts: tuple[str, ...] = (),
    chunks: Chunks | None = None,
) -> Report:
    """`done` is None where nothing was left to do; `notes` say why the device is not another, `doubts` what is odd."""
    timings = done.timings if done else None
    lacking = slower_here(machine) if any(worker.plan.device == "cpu" for worker in plan.workers) else ()
    return Report(
        output=target,
        voxels=prod(plan.output),
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
