"""Which plan a run takes: the one it was given, the one it began with, or the fastest."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.errors import DeviceError, NoPlanError, PlanFileError, ResumeError
from znnpy.kernels.gpu.device import find_gpu
from znnpy.machine import Limits, Machine, parse_bytes
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.planner.beside import moving_whole
from znnpy.planner.memory import (
    MARGIN_BYTES,
    DeviceKind,
    baseline_bytes,
    context_bytes,
    mebibytes,
    staging_bytes,
    transfer_bytes,
)
from znnpy.planner.plan import AGAIN, Choice, Plan
from znnpy.planner.search import make_plan
from znnpy.planner.validate import check_runs
from znnpy.run.devices import Site
from znnpy.run.modes import Task, names_on, processor_plans
from znnpy.shapes import Vec3, text
from znnpy.units import human_bytes
from znnpy.volume.journal import JournalHeader, Settings
from znnpy.volume.source import Source

COVERS = ("columns", "patches")
OUTPUT_DTYPES = ("float32", "float16", "uint8")
BORDERS = ("valid", "reflect")


@dataclass(frozen=True, slots=True)
class Wishes:
    """The caller's words on how to run; None or empty where there were none."""

    plan: str | Path | Plan | None
    ram: int | str | None
    threads: int | None
    patch: Vec3 | None
    only: tuple[str, ...]
    cover: str | None = None  # one of COVERS
    depth_first: bool = True  # fragments may go through several layers in parts
    device: str = "auto"  # one of DEVICES
    vram: int | str | None = None
    precision: str | None = None  # one of PRECISIONS; None: fp32, or that of the plan
    costs: Path | None = None  # instead of those that are stored of this machine
    mode: str = "auto"  # one of MODES

    def given_plan(self) -> Plan | None:
        return self.plan if isinstance(self.plan, Plan) or self.plan is None else Plan.load(Path(self.plan))


def columns_only(cover: str | None) -> bool | None:
    """What `make_plan` takes as `columns`: None where the caller has no word on it. ValueError when it is none."""
    if cover is not None and cover not in COVERS:
        raise ValueError(f"there is no cover {cover!r}; choose one of {', '.join(COVERS)}")
    return None if cover is None else cover == "columns"


def check_words(border: str, output_dtype: str, cover: str | None) -> None:
    """ValueError for words that there are not."""
    for what, word, words in (("border", border, BORDERS), ("output dtype", output_dtype, OUTPUT_DTYPES)):
        if word not in words:
            raise ValueError(f"there is no {what} {word!r}; choose one of {', '.join(words)}")
    columns_only(cover)


def choose(
    wishes: Wishes,
    network: Network,
    source: Source,
    output_dtype: np.dtype[Any],
    *,
    masks: bool,
    site: Site,
    result_bytes: int = 0,
) -> Plan:
    """The plan that was given, once it is known to run here; else the fastest one.

    masks         voxels that are not finite are allowed, so each patch comes with a mask of them.
    result_bytes  of the process's memory that an output in memory takes.
    """
    given = wishes.given_plan()
    if given is not None:
        return _known_to_run(
            given, wishes, network, source, output_dtype, masks=masks, site=site, result_bytes=result_bytes
        )
    unpacking = source.volume.extra_bytes
    limits = site.limits(wishes.ram, wishes.threads, wishes.vram)
    baseline = baseline_bytes() + site.later_bytes + unpacking + result_bytes
    rates = site.rates(network, limits)
    alike: dict[str, Any] = {
        "itemsize_in": source.dtype.itemsize,
        "itemsize_out": output_dtype.itemsize,
        "columns": columns_only(wishes.cover),
        "depth_first": wishes.depth_first,
        "masks": masks,
    }

    def make(output: Vec3, limits: Limits, **more: Any) -> Plan:
        words: dict[str, Any] = {
            "patch": wishes.patch,
            "only": names_on(site.device, wishes.only, wishes.mode),
            "baseline": baseline,
            "rates": rates,
        }
        return make_plan(network, output, site.machine, limits, **{**words, **alike, **site.words(), **more})

    beside = processor_plans(site, network, wishes.only, **alike)
    task = Task(
        wishes.mode,
        site,
        network,
        source.output,
        limits,
        baseline,
        wishes.only,
        masks,
        make=make,
        processor=beside,
    )
    try:
        return task.best()[0]
    except NoPlanError as error:
        if not unpacking:
            raise
        raise NoPlanError(
            f"{error}; the process takes {human_bytes(unpacking)} to unpack the volume's large chunks, and would take "
            "nothing for chunks of about 1 MiB"
        ) from None


def _known_to_run(
    plan: Plan,
    wishes: Wishes,
    network: Network,
    source: Source,
    output_dtype: np.dtype[Any],
    *,
    masks: bool,
    site: Site,
    result_bytes: int,
) -> Plan:
    """`plan`, charged with what this process, volume and output take where that is more; PlanFileError if too much."""
    words = (
        ("threads", wishes.threads is not None),
        ("patch", wishes.patch is not None),
        ("only", bool(wishes.only)),
        ("cover", wishes.cover is not None),
        ("depth_first", not wishes.depth_first),
        ("device", wishes.device not in ("auto", plan.device)),
        ("mode", wishes.mode not in ("auto", plan.mode)),
        ("precision", plan.device == "gpu" and wishes.precision not in (None, plan.precision)),
        ("costs", wishes.costs is not None),
    )
    if given := [option(word, False if word == "depth_first" else None) for word, is_given in words if is_given]:
        raise PlanFileError(
            "a plan fixes device, precision, threads, primitives, and patches or columns already; "
            f"leave out {' and '.join(given)}, or leave out {option('plan')}"
        )
    if site.devices > 1 and plan.offloaded:
        raise PlanFileError(
            f"the plan is of {option('mode', plan.mode)}, which runs on one GPU: leave out {option('gpus')}"
        )
    check_runs(plan, network, site.machine)  # before its layers and columns are counted for this output
    held = baseline_bytes() + site.later_bytes + source.volume.extra_bytes + result_bytes
    cover = replace(plan, output=source.output).cover(network)
    itemsizes = source.dtype.itemsize, output_dtype.itemsize
    reading, writing, staging = transfer_bytes(
        network, cover, plan.patch_in, itemsizes, masks=masks, device=plan.device
    )
    if plan.offloaded:  # no patch goes to the GPU, but what is handed over
        out_bytes = network.output_channels * prod(plan.patch_out) * itemsizes[1]
        staging = staging_bytes(
            plan.handover_bytes // plan.sub_batches[plan.offloaded], out_bytes, writes=cover.steps(0)
        )
    context = context_bytes(site.context_bytes) if plan.device == "gpu" else 0
    memory = replace(
        plan.memory,
        baseline=held if held > plan.memory.baseline + MARGIN_BYTES else plan.memory.baseline,
        reading=max(reading, plan.memory.reading),
        writing=max(writing, plan.memory.writing),
        staging=max(staging, plan.memory.staging),
        context=max(context, plan.memory.context),
        devices=site.devices,
    )
    here = plan.for_output(source.output, network, memory)
    here = replace(here, itemsize_in=itemsizes[0], itemsize_out=itemsizes[1])
    if plan.cpu_plan is not None:
        moved = replace(plan.cpu_plan, itemsize_in=itemsizes[0], itemsize_out=itemsizes[1])
        beside = moving_whole(moved, network, masks=masks)
        here = moving_whole(here, network, masks=masks)
        here = replace(here, cpu_plan=beside, memory=replace(here.memory, cpu_plan=beside.memory.peak))
    ram_bytes = plan.limits.ram_bytes if wishes.ram is None else parse_bytes(wishes.ram)
    vram_bytes = plan.limits.vram_bytes if wishes.vram is None else parse_bytes(wishes.vram)
    check_runs(here, network, site.machine, ram_bytes=ram_bytes, vram_bytes=vram_bytes)
    site.check_free(here)
    return here


def plan_begun(
    begun: JournalHeader, settings: Settings, network: Network, machine: Machine, output: Vec3, *, devices: int
) -> Plan:
    """The plan of a run that goes on, on so many devices now.

    output  voxels along z, y, x that the run writes.

    ResumeError where this machine or its libraries would round differently, where that is too much memory, and where
    the plan is of another output.
    """
    for name in ("processor", "versions", "gpu"):
        before, now = _differing(begun.settings.get(name), settings.get(name))
        if before != now:
            raise ResumeError(
                f"the run began with {name} {excerpt(json.dumps(before))}, and here they are {json.dumps(now)}, which "
                f"may round differently; resume where it began, or start again with {option('overwrite', True)}"
            )
    if begun.blas != machine.blas:
        raise ResumeError(
            f"the run began with BLAS kernels {excerpt(begun.blas)}, and this process runs {machine.blas}, which round "
            "differently; resume in the environment it began in (OPENBLAS_CORETYPE chooses OpenBLAS's kernels before "
            f"numpy is loaded), or start again with {option('overwrite', True)}"
        )
    try:
        plan = Plan.from_json(begun.plan)
        if devices > 1 and plan.offloaded:
            raise ResumeError(
                f"the run began with {option('mode', plan.mode)}, which runs on one GPU; leave out {option('gpus')}"
            )
        plan = replace(plan, memory=replace(plan.memory, devices=devices), single_device_seconds=None)
        check_runs(plan, network, machine, ram_bytes=plan.limits.ram_bytes)
    except PlanFileError as error:
        raise ResumeError(
            f"the plan that the run began with: {_why(error)}; start again with {option('overwrite', True)}"
        ) from None
    if plan.output != output:
        raise ResumeError(
            f"the run began with a plan for {text(plan.output)} voxels, and its output has {text(output)}; start again "
            f"with {option('overwrite', True)}"
        )
    if (columns := len(plan.work_items(network))) != begun.columns:
        raise ResumeError(
            f"the journal of the run counts {begun.columns} columns, and its plan has {columns}; start again with "
            f"{option('overwrite', True)}"
        )
    return plan


def _differing(before: object, now: object) -> tuple[object, object]:
    """Both, or of two dictionaries the entries in which they differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before, now
    return (
        {key: value for key, value in before.items() if now.get(key) != value},
        {key: value for key, value in now.items() if before.get(key) != value},
    )


def device_begun(begun: JournalHeader) -> DeviceKind:
    """Where the layers of a run go on; ResumeError where that is a GPU and there is none to use."""
    gpu = begun.settings.get("gpu")
    if gpu is None:
        return "cpu"
    try:
        find_gpu()
    except DeviceError as error:
        raise ResumeError(
            f"the run began on a GPU ({excerpt(json.dumps(gpu))}): {error}; resume where it began, or start again with "
            f"{option('overwrite', True)}"
        ) from None
    return "gpu"


def plan_finished(path: Path, plan: object) -> Plan:
    """The plan that a finished output holds; ResumeError where it holds none, or none that can be read."""
    try:
        return Plan.from_json(plan if isinstance(plan, str) else "{}")
    except PlanFileError as error:
        raise ResumeError(
            f"{path} is complete, but what it says of how it was made cannot be read: {_why(error)}; use it as it is, "
            f"or start again with {option('overwrite', True)}"
        ) from None


def _why(error: PlanFileError) -> str:
    """Without the advice to make the plan again: an output keeps the plan that it was begun with."""
    return str(error).removesuffix(f"; {AGAIN}")


def check_wishes(wishes: Wishes, begun: JournalHeader, plan: Plan) -> None:
    """A run that goes on keeps its plan, because rounding depends on it.

    ResumeError for words that ask for another plan, and for limits that it does not fit in. Limits that it fits in are
    taken: they change no bytes, see `limits_taken`.
    """
    again = f"start again with {option('overwrite', True)}"
    for word, given, needed in (("ram", wishes.ram, plan.memory.peak), ("vram", wishes.vram, plan.memory.vram)):
        if given is not None and parse_bytes(given) < needed:
            raise ResumeError(
                f"the run began with a plan that needs {mebibytes(needed)}, and {option(word, given)} allows "
                f"{mebibytes(parse_bytes(given))}; allow as much, or {again}"
            )
    chosen = tuple(begun.settings.get("only", ()))
    for word, before, now in (
        ("threads", plan.limits.threads, wishes.threads),
        ("patch", plan.patch_out, wishes.patch and tuple(wishes.patch)),
        ("cover", "columns" if plan.streams else "patches", wishes.cover),
        ("device", plan.device, None if wishes.device == "auto" else wishes.device),
        ("mode", plan.mode, None if wishes.mode == "auto" else wishes.mode),
        ("precision", plan.precision, wishes.precision if plan.device == "gpu" else None),
        ("only", chosen, tuple(sorted(wishes.only)) or None),
    ):
        if now is not None and before != now:
            kept = option(word, before) if before else f"no {option(word)}"
            raise ResumeError(f"the run began with {kept}, and now it is {option(word, now)}; leave it out, or {again}")
    if not wishes.depth_first and max(plan.sub_batches) > 1:
        raise ResumeError(
            "the run began with layers that take their fragments in parts, and now it is "
            f"{option('depth_first', False)}; leave it out, or {again}"
        )
    if wishes.costs is not None:
        raise ResumeError(f"the run began with a plan, which {option('costs')} would change; leave it out, or {again}")
    given_plan = wishes.given_plan()
    if given_plan is not None and _what_runs(given_plan) != _what_runs(plan):
        raise ResumeError(f"the run began with another plan than {option('plan')} gives; leave it out, or {again}")


def limits_taken(wishes: Wishes, plan: Plan) -> list[str]:
    """Tell the caller of a resumed run that limits other than those of its plan change nothing."""
    return [
        f"the run went on with the plan that it began with, which was made for {human_bytes(before)}: "
        f"{option(word, given)} changes nothing of it"
        for word, given, before in (
            ("ram", wishes.ram, plan.limits.ram_bytes),
            ("vram", wishes.vram, plan.limits.vram_bytes),
        )
        if given is not None and before is not None and parse_bytes(given) != before
    ]


def _what_runs(plan: Plan) -> list[tuple[Vec3, int, int, list[Choice]]]:
    """What decides the bytes of an output; not how often layers run, which depends on the volume."""
    return [
        (one.patch_out, one.axis, one.column_planes, [replace(choice, executions=1) for choice in one.choices])
        for one in (plan, plan.cpu_plan)
        if one is not None
    ]
