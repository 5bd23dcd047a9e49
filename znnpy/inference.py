"""The whole job as one function: a volume on disk in, its dense prediction on disk out."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from traceback import clear_frames
from typing import Any

import numpy as np

import znnpy
from znnpy.errors import NoPlanError, OutputError, VramError
from znnpy.files import regular_file
from znnpy.formats.networks import DEFAULT, read_network
from znnpy.formats.weights import sha256
from znnpy.kernels.cpu.fft import Wisdom
from znnpy.kernels.cpu.native.library import why_not
from znnpy.machine import Machine, parse_bytes, this_machine
from znnpy.network import Network
from znnpy.paranoid import Watched
from znnpy.patches import Box
from znnpy.planner.explain import human_bytes
from znnpy.planner.plan import Plan
from znnpy.report import Report
from znnpy.run import pipeline
from znnpy.run.choice import Wishes, check_wishes, check_words, choose, device_begun, plan_begun, plan_finished
from znnpy.run.devices import Site, check_device_words, check_here, gpus_of, site_for
from znnpy.run.hosted import HostedSession
from znnpy.run.modes import check_hosted, device_meant, names_of_gpu
from znnpy.run.sessions import Sessions, lanes_of, sessions_of
from znnpy.run.shelf import Shelf
from znnpy.run.trace import Trace
from znnpy.run.wisdom import wisdom_begun, wisdom_kept
from znnpy.shapes import Vec3
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.volume import open_volume
from znnpy.volume.journal import JournalHeader, default_output
from znnpy.volume.output import Mode, Output
from znnpy.volume.source import Source, parse_roi
from znnpy.volume.store import store_for
from znnpy.volume.volume import Volume


def infer(
    volume: str | Path,
    network: str | Path = DEFAULT,
    *,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    plan: str | Path | Plan | None = None,
    dataset: str | None = None,
    roi: str | None = None,
    border: str = "valid",
    output_dtype: str = "float32",
    allow_nan: bool = False,
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
    """Predict a volume, column by column or patch by patch, within the limits; the output is whole or it is not there.

    Takes the words of `znnpy infer`, --no-depth-first as depth_first=False. `gpus` are how many compute together, or
    "all"; one that fails hands back what it had begun, and the report says so. `paranoid` holds voxels of each patch
    against the definition before it is written: slow, and in memory beyond `ram`. `trace` names a file for what is done
    when, in Chrome's format; there is one of a run that ended early too. Every ZnnpyError says what happened, with the
    numbers, and what to do; what was finished before an error, Ctrl-C or a kill stays on disk and `resume=True` goes on
    from there, byte for byte, with two exceptions: a GPU refuses memory that it gave the run before, and the report
    says so; or the processor computes beside GPUs (mode "side-by-side"), and who computes what depends on how fast they
    are.
    """
    started = time.perf_counter()
    check_words(border, output_dtype, cover)
    only = (only,) if isinstance(only, str) else tuple(only)
    how = _mode(overwrite=overwrite, resume=resume)
    if allow_nan and output_dtype == "uint8":
        raise OutputError(
            "uint8 has no NaN to write where the volume holds one; choose --output-dtype float32 or float16"
        )
    shelf = Shelf(costs)
    wishes = Wishes(plan, ram, threads, patch, only, cover, depth_first, device, vram, precision, shelf.file, mode)
    meant = shelf.meant(check_device_words(device_meant(mode, device), vram, precision, names_of_gpu(only, mode)))
    count = gpus_of(gpus, meant)
    check_hosted(mode, count)
    trained = load_trained(read_network(network), weights)
    target = Path(out) if out is not None else default_output(Path(volume), trained.network.name)
    with ExitStack() as stack:
        traced = stack.enter_context(_trace(trace, overwrite, target))
        opened = stack.enter_context(open_volume(Path(volume), dataset))
        region = parse_roi(roi, opened.size) if roi else None
        source = Source(opened, roi=region, border=border, network=trained.network, allow_nan=allow_nan)
        job = _job(trained, opened, _roi_text(region, opened.size), border, output_dtype, allow_nan=allow_nan)
        shape = (trained.network.output_channels, *source.output)
        output = stack.enter_context(
            Output(target, volume=Path(volume), shape=shape, dtype=np.dtype(output_dtype), mode=how, job=job)
        )
        if output.finished:
            made = plan_finished(target, store_for(target).attributes_of(target).get("plan"))
            return _report(target, started, made, this_machine())
        watched = stack.enter_context(open_volume(Path(volume), dataset)) if paranoid else None
        run = _Run(trained, source, output, job, wishes, progress, watched, traced)
        with site_for(run.plan, run.meant(meant), vram, precision, shelf, gpus=count) as (site, chosen):
            done = run.compute(site, chosen)
    return _report(target, started, done.plan, site.machine, done, site.sentences)


@dataclass(frozen=True, slots=True)
class _Done:
    """What a run did."""

    plan: Plan
    timings: pipeline.Timings
    vram_bytes: int | None  # that the process took of the GPU
    sentences: tuple[str, ...]
    idle_seconds: Mapping[str, float]  # of the processor and the GPU that a step goes through one after the other


@dataclass(frozen=True, slots=True)
class _Run:
    """One job, its files open."""

    trained: TrainedNetwork
    source: Source
    output: Output
    job: dict[str, Any]
    wishes: Wishes
    progress: Callable[[pipeline.Event], None] | None
    watched: Volume | None  # opened once more, where patches are held against the definition
    trace: Trace | None

    @property
    def masks(self) -> bool:
        """Voxels that are not finite are allowed, and there may be some."""
        return bool(self.job["allow_nan"]) and self.source.dtype.kind == "f"

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
            return choose(self.wishes, network, self.source, self.output.dtype, masks=self.masks, site=site)
        settings = _settings(self.wishes.only, site.machine)
        made = plan_begun(begun, settings, network, site.machine, devices=site.devices)
        check_wishes(self.wishes, begun, made)
        return made

    def compute(self, site: Site, plan: Plan) -> _Done:
        """Run the plan, or a leaner one where the GPU refuses what the first was promised, now or later on."""
        sentences, before = list(site.costs.sentences), self.output.done
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
            columns = plan.parts_of(self.trained.network)
            computed = prod(plan.output) - sum(columns[index].voxels for index in before)
            done = replace(done, timings=replace(done.timings, voxels=computed))
        self.output.complete()
        return replace(done, sentences=(*sentences, *done.sentences))

    def _run(self, site: Site, plan: Plan) -> _Done:
        """Whatever of the plan's columns the output does not hold."""
        network = self.trained.network
        with self._awake(site, plan) as (sessions, wisdom):
            if self.output.header is None:
                settings, count = _settings(self.wishes.only, site.machine), len(plan.parts_of(network))
                header = JournalHeader(self.job, settings, plan.to_json(), site.machine.blas, count, wisdom=wisdom.used)
                self.output.begin(header, _attributes(network, self.source, self.job, plan))
            lanes = lanes_of(plan, sessions, network, self.output.done)
            timings = pipeline.run_lanes(lanes, self.source, self._writes(plan), self.progress, self.trace)
            lost = [f"{lane.name} was lost, and the others went on: {lane.lost}" for lane in timings.lanes if lane.lost]
            late = [
                f"{lane.name} was late at the end: a GPU computed {lane.given_up} of its cells"
                for lane in timings.lanes
                if lane.given_up
            ]
            hosted = (session for session in sessions.values() if isinstance(session, HostedSession))
            idle = {side: seconds for session in hosted for side, seconds in session.idle_seconds.items()}
            return _Done(plan, timings, site.taken_bytes(), (*lost, *late, *wisdom.sentences), idle)

    def _writes(self, plan: Plan) -> pipeline.Writes:
        if self.watched is None:
            return self.output
        return Watched(self.output, self.trained, self.watched, self.source.offset, plan.precision)

    @contextmanager
    def _awake(self, site: Site, plan: Plan) -> Iterator[tuple[Sessions, Wisdom]]:
        network, weights, begun = self.trained.network, self.trained.weights, self.output.header
        with ExitStack() as stack:
            with wisdom_begun(begun.wisdom) if begun else wisdom_kept(site.machine, plan.seconds) as wisdom:
                sessions = stack.enter_context(sessions_of(plan, site, network, weights, self.trace))
            yield sessions, wisdom

    def _leaner(self, site: Site, plan: Plan, refused: VramError) -> Plan:
        """The fastest plan within what the GPU has now; of the same patches where some of them are on disk."""
        begun, network = self.output.header, self.trained.network
        if self.wishes.plan is not None:
            raise refused
        ram = plan.limits.ram_bytes if self.wishes.ram is None else parse_bytes(self.wishes.ram)
        left = ram if begun is None else ram - plan.memory.beside  # the processor's plan stays
        wishes = replace(self.wishes, ram=left, vram=site.less_than(plan), threads=plan.limits.threads)
        if begun is not None:
            only, cover = tuple(begun.settings["only"]), "columns" if plan.walks else "patches"
            mode = "gpu" if plan.beside else plan.mode
            wishes = replace(wishes, only=only, cover=cover, patch=plan.patch_out, precision=plan.precision, mode=mode)
        try:
            leaner = choose(
                wishes,
                network,
                self.source,
                self.output.dtype,
                masks=self.masks,
                site=replace(site, precision=plan.precision),
            )
        except NoPlanError as error:
            raise VramError(f"{refused}; and {error}") from None
        if begun is not None and plan.beside is not None:
            memory = replace(leaner.memory, beside=plan.memory.beside)
            limits = replace(leaner.limits, ram_bytes=ram)
            leaner = replace(leaner, limits=limits, memory=memory, beside=plan.beside, alone=leaner.seconds)
        other = leaner.parts_of(network) != plan.parts_of(network) or leaner.axis != plan.axis
        if begun is not None and other:  # what is on disk, and columns of the processor, are of other parts
            raise refused
        return leaner


def _mode(*, overwrite: bool, resume: bool) -> Mode:
    if overwrite and resume:
        raise ValueError("overwrite starts again and resume goes on: ask for one of them")
    return "overwrite" if overwrite else "resume" if resume else "new"


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
    target = regular_file(Path(path), overwrite, "--trace")
    if target == Path(os.path.realpath(output)):
        raise OutputError(f"{path} is the output; give another --trace")
    return Trace(target)


def _job(
    trained: TrainedNetwork, volume: Volume, roi: str, border: str, output_dtype: str, *, allow_nan: bool
) -> dict[str, Any]:
    """What identifies a run: a resumed one must be of the same."""
    return {
        "network": trained.network.sha256,
        "weights": sha256(trained.weights),
        "volume": volume.identity(),
        "roi": roi,
        "border": border,
        "output_dtype": output_dtype,
        "allow_nan": allow_nan,
    }


def _settings(only: Sequence[str], machine: Machine) -> dict[str, Any]:
    """What else decides the bytes of a run beside its plan."""
    gpu = machine.gpu
    return {
        "only": sorted(only),
        "processor": machine.processor,  # numpy and FFTW choose their instructions by it
        "versions": {"znnpy": znnpy.__version__, **dict(machine.versions)},
        "gpu": None if gpu is None else {"name": gpu.name, "driver": gpu.driver, **dict(gpu.versions)},
    }


def _report(
    target: Path,
    started: float,
    plan: Plan,
    machine: Machine,
    done: _Done | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """`done` is None where nothing was left to do; `notes` say why the device is not another."""
    timings = done.timings if done else None
    lacking = _lacking(machine) if plan.device == "cpu" or plan.beside is not None else ()
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
        warnings=(*lacking, *(done.sentences if done else ())),
    )


def _attributes(network: Network, source: Source, job: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """What the output says of itself: where it lies in the volume, and what made it."""
    return {
        "offset": np.array(source.offset, np.int64),
        "field_of_view": np.array(network.field_of_view, np.int64),
        "network": network.name,
        "network_sha256": network.sha256,
        "weights_sha256": job["weights"],
        "volume": json.dumps(job["volume"]),
        "roi": job["roi"],
        "border": job["border"],
        "plan": plan.to_json(),
        "precision": plan.precision,
        "znnpy_version": znnpy.__version__,
    }


def _lacking(machine: Machine) -> tuple[str, ...]:
    """What makes runs slower here than they could be, in sentences."""
    uncompiled = why_not(machine)
    compiled = f"the fastest methods do not run here: {uncompiled}" if uncompiled else None
    return tuple(sentence for sentence in (machine.blas_warning, compiled) if sentence)


def _roi_text(region: Box | None, size: Vec3) -> str:
    """`z0:z1,y0:y1,x0:x1`, however it was typed; empty for the whole volume."""
    if region is None or region == Box((0, 0, 0), size):
        return ""
    return ",".join(f"{lo}:{hi}" for lo, hi in zip(region.lo, region.hi, strict=True))


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
