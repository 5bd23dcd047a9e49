"""Compute an opened run: choose its plan, run the work items that its output lacks, and complete the output."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from znnpy.errors import OutputError, ResumeError, VramError
from znnpy.files import regular_file
from znnpy.job import attributes_of, columns_of, settings_of
from znnpy.kernels.cpu.fft import Wisdom
from znnpy.machine import limits_of, this_machine
from znnpy.measure.fftw_wisdom import wisdom_begun, wisdom_kept
from znnpy.measure.storage_plans import suited_plan
from znnpy.measure.transfers import Transfers, transfers_of, worth_measuring
from znnpy.messages import option
from znnpy.opened_run import NamedRun, OpenedRun
from znnpy.option_values import Device
from znnpy.options import InferOptions
from znnpy.patches import Box
from znnpy.planner.memory import gathering_budget
from znnpy.planner.run_plan import RunPlan
from znnpy.report.plan_text import predicted
from znnpy.run import pipeline
from znnpy.run.choice import Work, choose, forgetful, given_plan, smaller_plan
from znnpy.run.masked import MaskedOutput
from znnpy.run.preparing import Preparing
from znnpy.run.resume import check_options, device_begun, limits_taken, plan_begun, smaller_plan_begun
from znnpy.run.target import OpenTarget, Targets, check_here
from znnpy.run.trace import Spans, Trace
from znnpy.run.workers import Sessions, sessions_of, workers_of
from znnpy.run_log import log_phase
from znnpy.self_check import CheckedOutput
from znnpy.shapes import Vec3
from znnpy.trained import TrainedNetwork
from znnpy.units import human_bytes
from znnpy.values import Tallied, Tally, Values
from znnpy.volume.base import Volume
from znnpy.volume.chunk_layers import layer_bytes
from znnpy.volume.journal import JournalHeader
from znnpy.volume.location import Location
from znnpy.volume.output_names import Names
from znnpy.volume.run_output import RunOutput
from znnpy.volume.sliceable import SliceVolume
from znnpy.volume.source import Source

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """The results of a run."""

    plan: RunPlan
    timings: pipeline.Timings
    vram_bytes: int | None  # that the process took of the GPU
    sentences: tuple[str, ...]
    idle_seconds: Mapping[str, float]  # of the CPU and the GPU that a step goes through one after the other
    values: Values | None  # that this run wrote


@dataclass(frozen=True, slots=True)
class Computed:
    """A run that is computed.

    done       its results
    target     the devices that it ran on
    transfers  how fast its volume and its output were, where that was measured
    above      sentences on limits that are above what the machine has
    """

    done: Done
    target: OpenTarget
    transfers: Transfers | None
    above: tuple[str, ...]


def trace_of(named: NamedRun) -> Trace | None:
    """Return the trace of a run, which is not open yet, or None; OutputError if its file may not be written."""
    asked, output = named.asked, named.destination
    if asked.trace is None:
        return None
    path = Path(asked.trace)
    inputs = {role: read for role, read in named.inputs.items() if role != "trace"}
    target = regular_file(path, asked.overwrite, "trace", inputs=inputs)
    if not isinstance(output, Location):
        names = Names(output)
        if target in {Path(os.path.realpath(name)) for name in (output, names.partial, names.journal, names.lock)}:
            raise OutputError(f"{path} is the output or a file that it needs; give another {option('trace')}")
    trace = Trace(target)
    trace.check()
    return trace


def traced(named: NamedRun) -> AbstractContextManager[Trace | None]:
    """Return a context in which the trace of a run is open, if one is asked for; OutputError as from `trace_of`."""
    return trace_of(named) or nullcontext()


def planned(run: OpenedRun, output: RunOutput) -> RunPlan:
    """Return the plan by which a run would be computed here; errors are those of `znnpy.plan`."""
    with _with_plan(Computation(run, output, None, None, 0.0)) as (_, plan):
        return plan


def foreseen(run: OpenedRun, output: RunOutput) -> tuple[RunPlan, Transfers | None]:
    """Return the plan that a run into an output would take, and what is measured of its reading and writing, if it is.

    Errors are those of the run before it begins.
    """
    computation = Computation(run, output, None, None, 0.0)
    with _with_plan(computation) as (target, plan):
        return computation.suited(target, plan)


@contextmanager
def _with_plan(computation: Computation) -> Iterator[tuple[OpenTarget, RunPlan]]:
    """Open the first target that has a plan for a computation."""
    named = computation.run.named
    devices = replace(named.devices, device=computation.meant(named.devices.device))
    with Targets(devices, named.costs) as targets:
        for target in targets:
            with targets.attempt():
                plan = computation.plan(target)
                break
        yield target, plan


def computed(
    run: OpenedRun, output: RunOutput, trace: Spans | None, started: float, *, in_order: bool = False
) -> Computed:
    """Compute a run into an output that was entered.

    started   time at which the run began, by `time.perf_counter()`
    in_order  patches are written in their order, so that one device computes
    """
    asked, opened = run.asked, run.volume
    with ExitStack() as stack:
        watched = None
        if asked.paranoid:  # an object of the caller's is read by one thread at a time, so it is opened once
            watched = opened if isinstance(opened, SliceVolume) else stack.enter_context(run.reopened())
        computation = Computation(run, output, watched, trace, started, in_order)
        with _with_plan(computation) as (target, made):
            opened.expect(run.source.needed)
            chosen, transfers = computation.suited(target, made)
            above = target.above_memory(chosen.limits)
            for sentence in above:
                _log.warning("%s", sentence)
            log_phase("planned", predicted(chosen) if transfers is None else f"{predicted(chosen)}; {transfers}")
            return Computed(computation.compute(target, chosen), target, transfers, above)


@dataclass(frozen=True, slots=True)
class Computation:
    """The computation of an opened run into an output."""

    run: OpenedRun
    output: RunOutput
    watched: Volume | None  # opened once more, where patches are held against the definition
    trace: Spans | None
    started: float  # by `time.perf_counter()`
    in_order: bool = False  # patches are written in their order
    tally: Tally = field(default_factory=Tally)  # of what is written

    @property
    def asked(self) -> InferOptions:
        """The options of the run."""
        return self.run.asked

    @property
    def trained(self) -> TrainedNetwork:
        """The network and its weights."""
        return self.run.trained

    @property
    def source(self) -> Source:
        """The input patches."""
        return self.run.source

    @property
    def masks(self) -> bool:
        """Return whether voxels that are not finite are allowed and can occur."""
        return bool(self.run.job["allow_nan"]) and self.source.dtype.kind == "f"

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
            held_bytes=self.output.held_bytes,
            gathered_bytes=self.output.gathered_bytes,
            wanted=self.run.wanted,
            in_order=self.in_order,
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
        if begun.item is not None:
            raise ResumeError(
                f"{self.run.named.destination} is computed in work items; go on with {option('cluster')}, "
                f"{option('part')} or {option('finish', True)} as it began, or start again with "
                f"{option('overwrite', True)}"
            )
        settings = settings_of(self.asked.names, target.machine)
        made = plan_begun(begun, settings, network, target.machine, self.source.output, devices=target.devices)
        check_options(self.asked, begun, made)
        self._keep_chunks(made, target)
        return made

    def suited(self, target: OpenTarget, plan: RunPlan) -> tuple[RunPlan, Transfers | None]:
        """Return a plan with wider columns where reading takes longer than computing, unless the plan is fixed.

        How fast the volume is read and the output is written is measured where the run is long, and returned too.
        """
        asked, network = self.asked, self.trained.network
        if not (asked.calibrate and worth_measuring(plan, network, self.source)):
            return plan, None
        transfers = transfers_of(plan, network, self.source, self.output.folder)
        if not self.plans or asked.patch is not None or asked.cover == "patches" or self.run.wanted is not None:
            return plan, transfers

        def planned(patch: Vec3) -> RunPlan:
            return choose(replace(asked, patch=patch), self.work, target)

        return suited_plan(plan, transfers, network, self.source, planned)

    def _keep_chunks(self, plan: RunPlan, target: OpenTarget) -> None:
        """Keep chunks for the next step in what a plan that was made before leaves of its memory limit."""
        memory, limit = plan.memory, plan.limits.ram_bytes
        spare = limit - memory.peak + max(0, memory.baseline - self.work.baseline(target, limit))
        self.source.keep_chunks(min(self.kept_bytes, max(0, spare)))

    def compute(self, target: OpenTarget, plan: RunPlan) -> Done:
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

    def _run(self, target: OpenTarget, plan: RunPlan) -> Done:
        """Run those work items of the plan that the output does not hold yet."""
        network = self.trained.network
        log_phase("preparing", f"{human_bytes(plan.main.memory.last.prepared)}")
        preparing = Preparing(plan, network, self.started, self.output.done, self.asked.progress, self.run.wanted)
        with self._awake(target, plan, preparing) as (sessions, wisdom):
            before = preparing.done()
            self.output.limit(gathering_budget(plan.limits.ram_bytes))
            if self.output.header is None:
                settings, count = settings_of(self.asked.names, target.machine), len(plan.work_items(network))
                header = JournalHeader(
                    self.run.job, settings, plan.to_json(), target.machine.blas, count, wisdom=wisdom.used
                )
                self.output.begin(
                    header, attributes_of(network, self.source, self.run.job, plan), columns_of(plan, network)
                )
            workers = workers_of(plan, sessions, network, self.output.done, self.run.wanted)
            log_phase("running", f"{len(self.output.done)} of {len(plan.work_items(network))} work items done before")
            output, leave_out = self._writes(plan)
            timings = pipeline.run_workers(
                workers, self.source, output, self.asked.progress, self.trace, before, leave_out
            )
            gone = [worker for worker in timings.workers if worker.lost]
            lost = [f"{worker.name} was lost, and the others went on: {worker.lost}" for worker in gone]
            late = [
                f"{worker.name} was late at the end: a GPU computed {worker.given_up} of its cells"
                for worker in timings.workers
                if worker.given_up
            ]
            idle = {device: spent for session in sessions.values() for device, spent in session.idle_seconds.items()}
            return Done(plan, timings, target.taken_bytes(), (*lost, *late, *wisdom.sentences), idle, self.tally.values)

    def _writes(self, plan: RunPlan) -> tuple[pipeline.Writes, Callable[[Box, int], None] | None]:
        """Return what takes computed voxels, and what writes zeros outside a mask."""
        output: pipeline.Writes = Tallied(self.output, self.tally)
        leave_out = None
        if self.run.wanted is not None:
            masked = MaskedOutput(output, self.run.wanted, self.trained.network.output_maps)
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
