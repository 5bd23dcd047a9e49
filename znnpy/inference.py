"""The whole job as one function: a volume on disk in, its dense prediction on disk out."""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from traceback import clear_frames
from typing import Any, get_args

import numpy as np

from znnpy.errors import NoPlanError, OutputError, VramError
from znnpy.files import regular_file
from znnpy.formats.networks import DEFAULT, read_network
from znnpy.job import attributes_of, job_of, roi_text, settings_of
from znnpy.kernels.cpu.fft import Wisdom
from znnpy.machine import Machine, parse_bytes, this_machine
from znnpy.messages import option
from znnpy.planner.explain import predicted
from znnpy.planner.plan import Plan
from znnpy.report import Report
from znnpy.run import pipeline
from znnpy.run.choice import (
    Wishes,
    check_wishes,
    check_words,
    choose,
    device_begun,
    limits_taken,
    plan_begun,
    plan_finished,
)
from znnpy.run.devices import Site, check_device_words, check_here, gpus_of, site_for
from znnpy.run.modes import check_hosted, device_meant, names_of_gpu
from znnpy.run.preparing import Preparing
from znnpy.run.sessions import Sessions, lanes_of, sessions_of
from znnpy.run.shelf import Shelf
from znnpy.run.trace import Trace
from znnpy.run.wisdom import wisdom_begun, wisdom_kept
from znnpy.run_log import log_phase
from znnpy.run_warnings import half_missing, slower_here
from znnpy.self_check import CheckedOutput
from znnpy.shapes import Vec3, text
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.units import human_bytes, human_seconds
from znnpy.values import Tallied, Tally, Values
from znnpy.volume.base import Absent, Chunks, MissingChunks, Volume
from znnpy.volume.journal import JournalHeader
from znnpy.volume.output import Output
from znnpy.volume.output_names import Names
from znnpy.volume.output_target import mode_of, output_for, target_of
from znnpy.volume.registry import store_for
from znnpy.volume.sample import sample_of
from znnpy.volume.sliceable import Assignable, BlockOutput, Sliceable, SliceVolume, open_given
from znnpy.volume.source import Source, parse_roi

_log = logging.getLogger(__name__)


def infer(
    volume: str | Path | Sliceable,
    network: str | Path = DEFAULT,
    *,
    weights: str | Path | None = None,
    out: str | Path | Assignable | None = None,
    plan: str | Path | Plan | None = None,
    dataset: str | None = None,
    roi: str | None = None,
    border: str = "valid",
    output_dtype: str = "float32",
    allow_nan: bool = False,
    fill_missing: float | None = None,
    missing_chunks: MissingChunks = "fill",
    overwrite: bool = False,
    resume: bool = False,
    ram: int | str | None = None,
    threads: int | None = None,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    cover: str | None = None,
    depth_first: bool = True,
    device: str = "auto",
    vram: int | str | None = None,
    precision: str | None = None,
    costs: str | Path | None = None,
    gpus: int | str | None = None,
    mode: str = "auto",
    paranoid: bool = False,
    trace: str | Path | None = None,
    progress: Callable[[pipeline.Event], None] | None = None,
) -> Report:
    """Predict every position of a volume within limits of memory; the output is complete, or it is not there.

    volume        path of the volume: HDF5, .zarr or .npy, (z, y, x) or (c, z, y, x), integers or floating point; or
                  anything of such a shape and dtype that can be sliced: an array of numpy, Zarr or dask, a dataset of
                  h5py. It is read box by box, by one thread at a time. A memory map takes memory beyond `ram`: give
                  the path of its file.
    network       network file (.yaml, .znni), or the name of a network that ships.
    weights       weights file, .npz or .safetensors; None: the one that the network file names.
    out           path of the output, (maps, z, y, x), of one map (z, y, x); None: beside the volume, named after both.
                  Or anything of such a shape and of `output_dtype` that takes assignment to slices: finished blocks are
                  assigned by one thread, in any order. It has no journal: an error leaves it half
                  written, and nothing goes on there.
    plan          a Plan, or a file that `znnpy plan --out` wrote; None: the fastest plan is made now.
    dataset       name of the array inside the file; None: the only 3D or 4D one.
    roi           "z0:z1,y0:y1,x0:x1", the part of the volume to take, in voxels; None: all of it.
    border        "valid": the output is field of view - 1 voxels smaller; "reflect": as large, mirrored at the faces.
    output_dtype  "float32", "float16", or "uint8": 255 times the value, clipped to 0..1 and rounded.
    allow_nan     write NaN wherever the field of view holds NaN or infinity, instead of raising VolumeError.
    fill_missing  value of voxels whose file is missing, of HDF5 volumes made of several; None: VolumeError.
    missing_chunks  "fill": chunks that were never written are the fill value of the volume; "error": VolumeError.
                    Of a Zarr volume in shards only whole shards that are missing count.
    overwrite     replace an output that exists, and what an unfinished run left of it.
    resume        go on where a run of the same job stopped; its bytes are those of an uninterrupted run.
    ram           limit for the whole process, in bytes or as "16G"; None: 3/4 of the machine's memory.
    threads       threads that compute; None: as many as the cores that the process may use.
    patch         output voxels (z, y, x) of one patch, or of one step of a column; None: the fastest.
    only          name of a primitive, or several, for the layers that they fit; empty: any.
    cover         "columns": each step keeps what the next needs; "patches": each is computed for itself; None: either.
    depth_first   True: layers behind a pooling may take its fragments in parts, which needs less memory.
    device        "cpu", "gpu", or "auto": a GPU where one works, else the CPU.
    vram          limit for the memory of each GPU, in bytes or as "12G"; None: 90 % of what is free.
    precision     on a GPU "fp32", "tf32" or "fp16"; None: fp32. The CPU always computes in fp32.
    costs         file of speeds that `znnpy measure --out` wrote here; None: those that are stored of this machine.
    gpus          number of equal GPUs that compute together, or "all"; None: 1.
    mode          "cpu", "gpu", "gpu-host", "cpu-to-gpu" or "side-by-side", as `znnpy infer --help` explains; "auto".
    paranoid      check voxels of each patch against the definition before writing it: slow, and not counted in `ram`.
    trace         path of a file that records what was done when, in Chrome's format, also of a run that fails.
    progress      called with an Event in the calling thread: before the first patch, after each one, and while the
                  last ones are written; what it raises stops the run.

    Returns a Report with times, speeds and memory beside what the plan predicted.

    Errors are ZnnpyErrors that name the numbers and what to do, and ValueError for a value that an argument cannot
    have. What was finished before an error, Ctrl-C or a kill stays on disk for `resume=True`. Its bytes may differ only
    if a GPU refuses memory that it gave the run before (the report says so), or in mode "side-by-side".
    """
    started, earlier = time.perf_counter(), peak_bytes()
    check_words(border, output_dtype, cover)
    if missing_chunks not in get_args(MissingChunks):
        raise ValueError(f"missing_chunks is 'fill' or 'error', not {missing_chunks!r}")
    only = (only,) if isinstance(only, str) else tuple(only)
    how = mode_of(overwrite=overwrite, resume=resume)
    if allow_nan and output_dtype == "uint8":
        raise OutputError(
            f"uint8 has no NaN to write where the volume holds one; choose {option('output_dtype', 'float32')} or "
            f"{option('output_dtype', 'float16')}"
        )
    shelf = Shelf(costs)
    wishes = Wishes(plan, ram, threads, patch, only, cover, depth_first, device, vram, precision, shelf.file, mode)
    meant = shelf.meant(check_device_words(device_meant(mode, device), vram, precision, names_of_gpu(only, mode)))
    count = gpus_of(gpus, meant)
    check_hosted(mode, count)
    named = read_network(network)
    trained = load_trained(named, weights, ram)
    inputs: dict[str, Path | Collection[Path] | None] = {
        "volume": Path(volume) if isinstance(volume, str | os.PathLike) else None,
        "network": named.path,
        "weights": named.weights if weights is None else Path(weights),
        "plan": Path(plan) if isinstance(plan, str | Path) else None,
        "costs": shelf.file,
        "trace": None if trace is None else Path(trace),
    }
    target = target_of(volume, out, trained.network.name)
    with ExitStack() as stack:
        traced = stack.enter_context(_trace(trace, overwrite, target))
        absent = Absent(fill_missing, missing_chunks)
        opened = stack.enter_context(open_given(volume, dataset, absent))
        inputs["source of the volume"] = opened.files
        log_phase("opened", f"{opened}: {text(opened.size)} voxels of {opened.dtype}, network {trained.network.name}")
        region = parse_roi(roi, opened.size) if roi else None
        source = Source(opened, roi=region, border=border, network=trained.network, allow_nan=allow_nan)
        sample = sample_of(opened)
        doubts = sample.doubts(trained.network)
        for doubt in doubts:
            _log.warning("%s", doubt)
        job = job_of(
            trained,
            opened,
            sample,
            roi_text(region, opened.size),
            border,
            output_dtype,
            allow_nan=allow_nan,
            fill_missing=fill_missing,
        )
        shape = (trained.network.output_channels, *source.output)
        output = output_for(
            out, target, volume, inputs=inputs, shape=shape, dtype=np.dtype(output_dtype), mode=how, job=job
        )
        stack.enter_context(output)
        if output.finished:
            made = plan_finished(target, store_for(target).attributes_of(target).get("plan"))
            return _report(target, started, made, this_machine(), doubts=doubts)
        watched = None
        if paranoid:  # an object of the caller's is read by one thread at a time, so it is opened once
            once = isinstance(opened, SliceVolume)
            watched = opened if once else stack.enter_context(open_given(volume, dataset, absent))
        run = _Run(trained, source, output, job, wishes, progress, watched, traced, started)
        with site_for(run.plan, run.meant(meant), vram, precision, shelf, gpus=count) as (site, chosen):
            opened.expect(source.needed)
            for above in site.above_memory(chosen.limits):
                _log.warning("%s", above)
                doubts = (*doubts, above)
            log_phase("planned", predicted(chosen))
            done = run.compute(site, chosen)
    doubts = (*doubts, *half_missing(opened.chunks))
    report = _report(target, started, done.plan, site.machine, done, site.sentences, doubts, opened.chunks)
    report = replace(report, earlier_peak_bytes=earlier)
    for sentence in report.above_limit:
        _log.warning("%s", sentence)
    log_phase("finished", f"{target}: {report.computed:,} voxels in {human_seconds(report.seconds)}")
    return report


@dataclass(frozen=True, slots=True)
class _Done:
    """What a run did."""

    plan: Plan
    timings: pipeline.Timings
    vram_bytes: int | None  # that the process took of the GPU
    sentences: tuple[str, ...]
    idle_seconds: Mapping[str, float]  # of the processor and the GPU that a step goes through one after the other
    values: Values | None  # that this run wrote


@dataclass(frozen=True, slots=True)
class _Run:
    """One job, its files open."""

    trained: TrainedNetwork
    source: Source
    output: Output | BlockOutput
    job: dict[str, Any]
    wishes: Wishes
    progress: Callable[[pipeline.Event], None] | None
    watched: Volume | None  # opened once more, where patches are held against the definition
    trace: Trace | None
    started: float  # by `time.perf_counter()`
    tally: Tally = field(default_factory=Tally)  # of what is written

    @property
    def masks(self) -> bool:
        """Voxels that are not finite are allowed, and there may be some."""
        return bool(self.job["allow_nan"]) and self.source.dtype.kind == "f"

    @property
    def held_bytes(self) -> int:
        """Memory that the output takes itself."""
        return self.output.held_bytes if isinstance(self.output, BlockOutput) else 0

    def meant(self, asked: str) -> str:
        """The device of the plan that there is, or the one that is asked for; ResumeError where a GPU is gone."""
        begun, given = self.output.header, self.wishes.given_plan()
        if begun is not None:
            return device_begun(begun)
        if given is None:
            return asked
        check_here(given)
        return given.device

    def plan(self, site: Site) -> Plan:
        """The plan that the run began with, the one that was given, or the fastest."""
        begun, network = self.output.header, self.trained.network
        if begun is None:
            return choose(
                self.wishes,
                network,
                self.source,
                self.output.dtype,
                masks=self.masks,
                site=site,
                result_bytes=self.held_bytes,
            )
        settings = settings_of(self.wishes.only, site.machine)
        made = plan_begun(begun, settings, network, site.machine, self.source.output, devices=site.devices)
        check_wishes(self.wishes, begun, made)
        return made

    def compute(self, site: Site, plan: Plan) -> _Done:
        """Run the plan, or a leaner one where the GPU refuses what the first was promised, now or later on."""
        sentences, before = list(site.costs.sentences), self.output.done
        if before:
            sentences += limits_taken(self.wishes, plan)
        refused = None
        try:
            done = self._run(site, plan)
        except VramError as error:
            refused = _forgetful(error)
        if refused is not None:
            self.output.pause()
            begun = self.output.header is not None
            plan = self._leaner(site, plan, refused)
            rounding = "; what was finished before may be rounded differently" if begun else ""
            within = human_bytes(plan.limits.vram_bytes or 0)
            sentences.append(f"planned anew within {within} of VRAM: {refused}{rounding}")
            done = self._run(site, plan)
            columns = plan.work_items(self.trained.network)
            computed = prod(plan.output) - sum(columns[index].voxels for index in before)
            done = replace(done, timings=replace(done.timings, voxels=computed))
        self.output.complete()
        return replace(done, sentences=(*sentences, *done.sentences))

    def _run(self, site: Site, plan: Plan) -> _Done:
        """Whatever of the plan's columns the output does not hold."""
        network = self.trained.network
        log_phase("preparing", f"{human_bytes(plan.prepared_bytes)}")
        preparing = Preparing(plan, network, self.started, self.output.done, self.progress)
        with self._awake(site, plan, preparing) as (sessions, wisdom):
            before = preparing.done()
            if self.output.header is None:
                settings, count = settings_of(self.wishes.only, site.machine), len(plan.work_items(network))
                header = JournalHeader(self.job, settings, plan.to_json(), site.machine.blas, count, wisdom=wisdom.used)
                self.output.begin(header, attributes_of(network, self.source, self.job, plan))
            lanes = lanes_of(plan, sessions, network, self.output.done)
            log_phase("running", f"{len(self.output.done)} of {plan.columns} columns done before")
            timings = pipeline.run_lanes(lanes, self.source, self._writes(plan), self.progress, self.trace, before)
            lost = [f"{lane.name} was lost, and the others went on: {lane.lost}" for lane in timings.lanes if lane.lost]
            late = [
                f"{lane.name} was late at the end: a GPU computed {lane.given_up} of its cells"
                for lane in timings.lanes
                if lane.given_up
            ]
            idle = {device: spent for session in sessions.values() for device, spent in session.idle_seconds.items()}
            return _Done(plan, timings, site.taken_bytes(), (*lost, *late, *wisdom.sentences), idle, self.tally.values)

    def _writes(self, plan: Plan) -> pipeline.Writes:
        output = Tallied(self.output, self.tally)
        if self.watched is None:
            return output
        return CheckedOutput(output, self.trained, self.watched, self.source.offset, plan.precision)

    @contextmanager
    def _awake(self, site: Site, plan: Plan, preparing: Preparing) -> Iterator[tuple[Sessions, Wisdom]]:
        network, weights, begun = self.trained.network, self.trained.weights, self.output.header
        with ExitStack() as stack:
            with wisdom_begun(begun.wisdom) if begun else wisdom_kept(site.machine, plan.seconds) as wisdom:
                sessions = stack.enter_context(sessions_of(plan, site, network, weights, self.trace, preparing.told))
            yield sessions, wisdom

    def _leaner(self, site: Site, plan: Plan, refused: VramError) -> Plan:
        """The fastest plan within what the GPU has now; of the same patches where some of them are on disk."""
        begun, network = self.output.header, self.trained.network
        if self.wishes.plan is not None:
            raise refused
        ram = plan.limits.ram_bytes if self.wishes.ram is None else parse_bytes(self.wishes.ram)
        left = ram if begun is None else ram - plan.memory.cpu_plan  # the processor's plan stays
        wishes = replace(self.wishes, ram=left, vram=site.less_than(plan), threads=plan.limits.threads)
        if begun is not None:
            only, cover = tuple(begun.settings["only"]), "columns" if plan.streams else "patches"
            mode = "gpu" if plan.cpu_plan else plan.mode
            wishes = replace(wishes, only=only, cover=cover, patch=plan.patch_out, precision=plan.precision, mode=mode)
        try:
            leaner = choose(
                wishes,
                network,
                self.source,
                self.output.dtype,
                masks=self.masks,
                site=replace(site, precision=plan.precision),
                result_bytes=self.held_bytes,
            )
        except NoPlanError as error:
            raise VramError(f"{refused}; and {error}") from None
        if begun is not None and plan.cpu_plan is not None:
            memory = replace(leaner.memory, cpu_plan=plan.memory.cpu_plan)
            limits = replace(leaner.limits, ram_bytes=ram)
            leaner = replace(
                leaner, limits=limits, memory=memory, cpu_plan=plan.cpu_plan, single_device_seconds=leaner.seconds
            )
        other = leaner.work_items(network) != plan.work_items(network) or leaner.axis != plan.axis
        if begun is not None and other:  # what is on disk, and columns of the processor, are of other parts
            raise refused
        return leaner


def _forgetful(error: VramError) -> VramError:
    """The same, referring to nothing that the calls held which it came through: the memory is wanted."""
    cause: BaseException | None = error
    while cause is not None:
        clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return error


def _trace(path: str | Path | None, overwrite: bool, output: Path) -> AbstractContextManager[Trace | None]:
    """Where to tell what was done when, if anywhere; OutputError for a path that may not be written."""
    if path is None:
        return nullcontext()
    target = regular_file(Path(path), overwrite, "trace")
    names = Names(output)
    if target in {Path(os.path.realpath(name)) for name in (output, names.partial, names.journal, names.lock)}:
        raise OutputError(f"{path} is the output or a file that it needs; give another {option('trace')}")
    return Trace(target)


def _report(
    target: Path,
    started: float,
    plan: Plan,
    machine: Machine,
    done: _Done | None = None,
    notes: tuple[str, ...] = (),
    doubts: tuple[str, ...] = (),
    chunks: Chunks | None = None,
) -> Report:
    """`done` is None where nothing was left to do; `notes` say why the device is not another, `doubts` what is odd."""
    timings = done.timings if done else None
    lacking = slower_here(machine) if plan.device == "cpu" or plan.cpu_plan is not None else ()
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
        lanes=timings.lanes if timings else (),
        idle_seconds=done.idle_seconds if done else {},
        values=done.values if done else None,
        chunks=chunks,
        warnings=(*doubts, *lacking, *(done.sentences if done else ())),
    )


def peak_bytes() -> int:
    """Most resident memory this process ever had.

    Linux's VmHWM where there is one: its getrusage also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    counted = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
    if counted:
        return 1024 * int(counted[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
