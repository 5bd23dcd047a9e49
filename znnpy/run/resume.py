"""Decide whether a run that began earlier goes on here, and with what plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pydantic_core import from_json

from znnpy.errors import DeviceError, PlanFileError, ResumeError, VramError
from znnpy.machine import Machine, parse_bytes
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.option_values import DeviceKind
from znnpy.planner.plan import Choice
from znnpy.planner.run_plan import AGAIN, RunPlan
from znnpy.planner.validate import check_runs
from znnpy.run.choice import Work, given_plan, meant_precision, smaller_plan
from znnpy.run.target import DRIVER, OpenTarget
from znnpy.shapes import Vec3, text
from znnpy.shared_options import RunOptions
from znnpy.units import human_bytes, mebibytes
from znnpy.volume.journal import JournalHeader, Settings, read_header
from znnpy.volume.location import Location
from znnpy.volume.registry import is_written, store_for


def plan_begun(
    begun: JournalHeader, settings: Settings, network: Network, machine: Machine, output: Vec3, *, devices: int
) -> RunPlan:
    """Return the plan of a run that goes on, on so many devices now.

    output  voxels along z, y, x that the run writes

    ResumeError where this machine or its libraries would round differently, where the plan needs too much memory, and
    where it is for another output.
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
        plan = RunPlan.from_json(begun.plan)
        if devices > 1 and plan.main.offloaded:
            raise ResumeError(
                f"the run began with {option('mode', plan.mode)}, which runs on one GPU; leave out {option('gpus')}"
            )
        plan = plan.on_devices(devices)
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
    """Return both values; if they are dictionaries, the entries in which they differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before, now
    return (
        {key: value for key, value in before.items() if now.get(key) != value},
        {key: value for key, value in now.items() if before.get(key) != value},
    )


def device_begun(begun: JournalHeader) -> DeviceKind:
    """Return where the layers of a run go on; ResumeError where that is a GPU and there is none to use."""
    gpu = begun.settings.get("gpu")
    if gpu is None:
        return "cpu"
    try:
        DRIVER.find()
    except DeviceError as error:
        raise ResumeError(
            f"the run began on a GPU ({excerpt(json.dumps(gpu))}): {error}; resume where it began, or start again with "
            f"{option('overwrite', True)}"
        ) from None
    return "gpu"


def plan_finished(path: Path | Location, plan: object) -> RunPlan:
    """Return the plan that a finished output holds; ResumeError where it holds none that can be read."""
    try:
        return RunPlan.from_json(plan if isinstance(plan, str) else "{}")
    except PlanFileError as error:
        raise ResumeError(
            f"{path} is complete, but what it says of how it was made cannot be read: {_why(error)}; use it as it is, "
            f"or start again with {option('overwrite', True)}"
        ) from None


def statistics_kept(path: Path | Location) -> object:
    """Return the statistics of its volume that an unfinished or finished output keeps; None if it keeps none."""
    if isinstance(path, Location):
        from znnpy.volume.bucket_output import kept_job

        return kept_job(path).get("statistics")
    if not is_written(path):
        return None
    try:
        begun = read_header(path)
    except OSError:  # entering the output explains it
        return None
    if begun is not None:
        return begun.job.get("statistics")
    text = store_for(path).attributes_of(path).get("job")
    try:
        job = from_json(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return job.get("statistics") if isinstance(job, dict) else None


def _why(error: PlanFileError) -> str:
    """Return an error without the advice to make the plan again: an output keeps the plan that it began with."""
    return str(error).removesuffix(f"; {AGAIN}")


def check_options(asked: RunOptions, begun: JournalHeader, plan: RunPlan) -> None:
    """Raise ResumeError for options that ask for another plan, and for limits that the plan does not fit.

    A run that goes on keeps its plan, because rounding depends on it. Limits that the plan fits are accepted: they
    change no bytes, see `limits_taken`.
    """
    again = f"start again with {option('overwrite', True)}"
    for word, given, needed in (("ram", asked.ram, plan.memory.peak), ("vram", asked.vram, plan.memory.vram)):
        if given is not None and parse_bytes(given) < needed:
            raise ResumeError(
                f"the run began with a plan that needs {mebibytes(needed)}, and {option(word, given)} allows "
                f"{mebibytes(parse_bytes(given))}; allow as much, or {again}"
            )
    chosen = tuple(begun.settings.get("only", ()))
    for word, before, now in (
        ("threads", plan.limits.threads, asked.threads),
        ("patch", plan.patch_out, asked.patch and tuple(asked.patch)),
        ("cover", "columns" if plan.main.streams else "patches", asked.cover),
        ("device", plan.device, None if asked.device == "auto" else asked.device),
        ("mode", plan.mode, None if asked.mode == "auto" else asked.mode),
        ("precision", plan.precision, asked.precision and meant_precision(asked.precision, plan)),
        ("only", chosen, tuple(sorted(asked.names)) or None),
    ):
        if now is not None and before != now:
            kept = option(word, before) if before else f"no {option(word)}"
            raise ResumeError(f"the run began with {kept}, and now it is {option(word, now)}; leave it out, or {again}")
    if not asked.depth_first and max(plan.main.sub_batches) > 1:
        raise ResumeError(
            "the run began with layers that take their fragments in parts, and now it is "
            f"{option('depth_first', False)}; leave it out, or {again}"
        )
    if asked.costs is not None:
        raise ResumeError(f"the run began with a plan, which {option('costs')} would change; leave it out, or {again}")
    other = given_plan(asked)
    if other is not None and _what_runs(other) != _what_runs(plan):
        raise ResumeError(f"the run began with another plan than {option('plan')} gives; leave it out, or {again}")


def smaller_plan_begun(
    begun: JournalHeader, asked: RunOptions, work: Work, target: OpenTarget, plan: RunPlan, refused: VramError
) -> RunPlan:
    """Return a plan within what the GPU has now by which a run goes on that began with `plan`.

    It has the same work items, and its other workers keep their plans. VramError where there is none.
    """
    main, others = plan.main, plan.workers[1:]
    taken = sum(worker.plan.memory.peak for worker in others)
    ram = plan.limits.ram_bytes if asked.ram is None else parse_bytes(asked.ram)
    alike = replace(
        asked,
        ram=ram - taken,
        only=tuple(begun.settings["only"]),
        cover="columns" if main.streams else "patches",
        patch=main.patch_out,
        precision=main.precision,
        mode=main.mode,
    )
    smaller = smaller_plan(alike, work, target, plan, refused)
    for worker in others:
        limits = replace(smaller.limits, ram_bytes=smaller.limits.ram_bytes + taken)
        smaller = smaller.with_main(replace(smaller.main, limits=limits))
        smaller = smaller.shared_with(worker, smaller.seconds)
    if smaller.work_items(work.network) != plan.work_items(work.network) or smaller.main.axis != main.axis:
        raise refused
    return smaller


def limits_taken(asked: RunOptions, plan: RunPlan) -> list[str]:
    """Tell the caller of a resumed run that limits other than those of its plan change nothing."""
    return [
        f"the run went on with the plan that it began with, which was made for {human_bytes(before)}: "
        f"{option(word, given)} changes nothing of it"
        for word, given, before in (
            ("ram", asked.ram, plan.limits.ram_bytes),
            ("vram", asked.vram, plan.limits.vram_bytes),
        )
        if given is not None and before is not None and parse_bytes(given) != before
    ]


def _what_runs(plan: RunPlan) -> list[tuple[Vec3, int, int, list[Choice]]]:
    """Return what decides the bytes of an output; not how often layers run, which depends on the volume."""
    return [
        (one.patch_out, one.axis, one.column_planes, [replace(choice, executions=1) for choice in one.choices])
        for one in (worker.plan for worker in plan.workers)
    ]
