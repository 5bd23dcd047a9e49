"""The whole job as one function: a volume on disk in, its dense prediction on disk out. And its plan alone."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import znnpy
from znnpy.errors import OutputError, ShapeError
from znnpy.formats.networks import DEFAULT, read_network
from znnpy.formats.weights import sha256
from znnpy.kernels.cpu.native.library import why_not
from znnpy.kernels.crew import Crew
from znnpy.machine import Machine, limits_of, this_machine
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.report import Report
from znnpy.run import pipeline
from znnpy.run.choice import Wishes, check_wishes, choose, columns_only, plan_begun, plan_finished
from znnpy.run.session import Session
from znnpy.run.wisdom import wisdom_begun, wisdom_kept
from znnpy.shapes import FLOAT32, Vec3
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.volume import open_volume
from znnpy.volume.journal import JournalHeader, default_output
from znnpy.volume.output import Mode, Output
from znnpy.volume.source import Source, parse_roi
from znnpy.volume.store import store_for
from znnpy.volume.volume import Volume

OUTPUT_DTYPES = ("float32", "float16", "uint8")
BORDERS = ("valid", "reflect")
DEFAULT_SHAPE: Vec3 = (1024, 1024, 1024)  # what `plan` assumes when it is told no volume


def plan(
    network: str | Path = DEFAULT,
    *,
    volume: str | Path | None = None,
    dataset: str | None = None,
    shape: Vec3 | None = None,
    roi: str | None = None,
    border: str = "valid",
    output_dtype: str = "float32",
    ram: int | str | None = None,
    threads: int | None = None,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    cover: str | None = None,
    depth_first: bool = True,
) -> Plan:
    """The fastest plan for a network, a volume (or a shape in voxels, (z, y, x)) and limits. Needs no weights.

    Takes the words of `znnpy plan`: cover "columns" or "patches", depth_first False for its --no-depth-first.
    NoPlanError names the nearest miss when nothing fits.
    """
    _check_words(border, output_dtype, cover)
    if shape is not None and len(shape) != 3:
        raise ShapeError(f"a shape has three sizes (z, y, x), not {shape}")
    if volume is not None and shape is not None:
        raise ValueError("a volume and a shape both give a size: give one of them")
    file = read_network(network)
    machine = this_machine()
    limits = limits_of(machine, ram, threads)
    if volume is not None:
        with open_volume(Path(volume), dataset) as opened:
            region = parse_roi(roi, opened.size) if roi else None
            output = Source(opened, roi=region, border=border, network=file.network, allow_nan=False).output
            itemsize_in, extra_bytes = opened.dtype.itemsize, opened.extra_bytes
    else:
        size = shape or DEFAULT_SHAPE
        if roi:
            size = parse_roi(roi, size).size
        output = size if border == "reflect" else file.network.dense_size(size)
        itemsize_in, extra_bytes = 1, 0
    return make_plan(
        file.network,
        output,
        machine,
        limits,
        itemsize_in=itemsize_in,
        itemsize_out=np.dtype(output_dtype).itemsize,
        patch=patch,
        only=only,
        columns=columns_only(cover),
        depth_first=depth_first,
        baseline=baseline_bytes() + extra_bytes + FLOAT32 * file.network.parameters,  # a run holds the weights too
    )


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
    progress: Callable[[pipeline.Event], None] | None = None,
) -> Report:
    """Predict a volume, column by column or patch by patch, within the limits; the output is whole or it is not there.

    Takes the words of `znnpy infer`, --no-depth-first as depth_first=False. Every ZnnpyError says what happened, with
    the numbers, and what to do; what was finished before an error, Ctrl-C or a kill stays on disk and `resume=True`
    goes on from there, byte for byte.
    """
    started = time.perf_counter()
    _check_words(border, output_dtype, cover)
    only = (only,) if isinstance(only, str) else tuple(only)
    if overwrite and resume:
        raise ValueError("overwrite starts again and resume goes on: ask for one of them")
    if allow_nan and output_dtype == "uint8":
        raise OutputError(
            "uint8 has no NaN to write where the volume holds one; choose --output-dtype float32 or float16"
        )
    trained = load_trained(read_network(network), weights)
    target = Path(out) if out is not None else default_output(Path(volume), trained.network.name)
    machine = this_machine()
    with ExitStack() as stack:
        opened = stack.enter_context(open_volume(Path(volume), dataset))
        region = parse_roi(roi, opened.size) if roi else None
        source = Source(opened, roi=region, border=border, network=trained.network, allow_nan=allow_nan)
        job = _job(trained, opened, _roi_text(region, opened.size), border, output_dtype, allow_nan=allow_nan)
        mode: Mode = "overwrite" if overwrite else "resume" if resume else "new"
        shape = (trained.network.output_channels, *source.output)
        output = stack.enter_context(
            Output(target, volume=Path(volume), shape=shape, dtype=np.dtype(output_dtype), mode=mode, job=job)
        )
        if output.finished:
            made = plan_finished(target, store_for(target).attributes_of(target).get("plan"))
            return _report(target, started, made, machine)
        settings = _settings(only, machine)
        begun = output.header
        wishes = Wishes(plan, ram, threads, patch, only, cover, depth_first)
        if begun is None:
            masks = allow_nan and source.dtype.kind == "f"
            chosen = choose(wishes, trained.network, source, np.dtype(output_dtype), masks=masks, machine=machine)
        else:
            chosen = plan_begun(begun, settings, trained.network, machine)
            check_wishes(wishes, begun, chosen)
        columns = chosen.cover(trained.network)
        crew = stack.enter_context(Crew(chosen.limits.threads))
        with wisdom_begun(begun.wisdom) if begun else wisdom_kept(machine, chosen.seconds) as wisdom:
            session = stack.enter_context(Session(chosen, trained.network, trained.weights, crew))
        if begun is None:
            header = JournalHeader(job, settings, chosen.to_json(), machine.blas, len(columns), wisdom=wisdom.used)
            output.begin(header, _attributes(trained.network, source, job, chosen))
        timings = pipeline.run(session, crew, source, output, columns, progress)
        output.complete()
    return _report(target, started, chosen, machine, timings, wisdom.sentences)


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
    return {
        "only": sorted(only),
        "processor": machine.processor,  # numpy and FFTW choose their instructions by it
        "versions": {"znnpy": znnpy.__version__, **dict(machine.versions)},
    }


def _check_words(border: str, output_dtype: str, cover: str | None) -> None:
    for what, word, words in (("border", border, BORDERS), ("output dtype", output_dtype, OUTPUT_DTYPES)):
        if word not in words:
            raise ValueError(f"there is no {what} {word!r}; choose one of {', '.join(words)}")
    columns_only(cover)  # ValueError when it is no word


def _report(
    target: Path,
    started: float,
    plan: Plan,
    machine: Machine,
    timings: pipeline.Timings | None = None,
    sentences: Sequence[str] = (),
) -> Report:
    """`timings` is None where nothing was left to do; `sentences` are what else there is to warn of."""
    return Report(
        output=target,
        voxels=prod(plan.output),
        computed=timings.voxels if timings else 0,
        seconds=time.perf_counter() - started,
        stage_seconds=timings.stage_seconds if timings else {},
        peak_bytes=peak_bytes(),
        plan=plan,
        blas=machine.blas,
        warnings=(*_lacking(machine), *sentences),
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
