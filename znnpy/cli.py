"""The commands: each checks its options, calls a function of another module and prints the result.

Exit codes: 0 done · 1 an expected error, one sentence on stderr · 2 usage · 130 Ctrl-C · 143 SIGTERM.
This module loads no numpy: a resumed run must first request the BLAS kernels that it began with, and BLAS chooses its
kernels when numpy is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click

import znnpy
from znnpy.command_options import command_of, json_option
from znnpy.command_runtime import (
    Command,
    CommandGroup,
    ResumableCommand,
    SectionedCommand,
    print_json,
    print_lines,
    print_table,
    quiet,
)
from znnpy.errors import OutputError
from znnpy.files import Inputs, regular_file, write_asked
from znnpy.import_command import import_model
from znnpy.network_files import read_asked, read_network
from znnpy.option_declarations import option
from znnpy.options import DemoOptions, InferOptions, InfoOptions, MeasureOptions, PlanOptions, VerifyOptions
from znnpy.page_commands import page_file, report, view
from znnpy.plot_commands import graph, timeline
from znnpy.resumed_kernels import request_begun_kernels
from znnpy.shapes import text
from znnpy.shared_options import PlanningOptions
from znnpy.stopping import working
from znnpy.volume.location import Location, path_of

FIXED_BY_PLAN = ("ram", "threads", "patch", "only", "cover", "vram", "precision", "costs")  # options that a plan fixes


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(znnpy.__version__, package_name="znnpy")
def main() -> None:
    """Run a trained 3D convolutional network over a whole volume: exactly, fast, and within a memory limit."""


main.add_command(graph)
main.add_command(import_model)
main.add_command(timeline)
main.add_command(report)
main.add_command(view)


@dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanOptions):
    """The options of the command `plan`."""

    out: Path | None = option(None, "write the plan here, for `znnpy infer --plan`", "new path")
    plot: Path | None = option(None, "draw the predicted speed against the memory limit here, NAME.png", "new path")
    report: Path | None = option(None, "write a page with pictures of the plan here, NAME.html", "new path")
    overwrite: bool = option(False, "replace the files given as --out, --plot and --report", "flag")
    why: bool = option(False, "list every primitive for every layer, with its time and why it was not chosen", "flag")
    as_json: bool = option(False, "print one JSON document")


@command_of(main, PlanCommand, SectionedCommand)
def plan(asked: PlanCommand) -> None:
    """Make a plan for NETWORK and explain it.

    A plan says how the volume is cut, and which method computes each layer. NETWORK is a file, or the name of a network
    that ships with znnpy. Without --volume or --shape, a volume of 1024^3 is assumed.
    """
    out, plot, report = asked.out, asked.plot, asked.report
    if asked.volume is not None and asked.shape is not None:
        raise click.UsageError("--volume and --shape both give a size: give one of them")
    parts = {
        "dataset": asked.dataset,
        "scale": asked.scale,
        "time": asked.time,
        "fill-missing": asked.fill_missing,
        "roi": asked.roi,
    }
    for name, value in parts.items():
        if value is not None and asked.volume is None:
            raise click.UsageError(f"--{name} is a part of a volume: give --volume too")
    if asked.mask is not None and asked.volume is None:
        raise click.UsageError("--mask lies on a volume: give --volume too")
    if asked.overwrite and (out, plot, report) == (None, None, None):
        raise click.UsageError("--overwrite replaces the files given as --out, --plot and --report: give one of them")
    runs = _check_what_runs(asked)
    _check_primitives(asked)
    import znnpy.planning
    from znnpy.kernels.cpu.native.library import why_not
    from znnpy.progress import curves, measuring
    from znnpy.report.memory_sweep import Point, in_order
    from znnpy.report.plan_text import plan_renderable
    from znnpy.report.rejected import Considered, why_table
    from znnpy.run.target import machine_of

    file = read_asked(asked.network, asked)
    machine_file = None if asked.machine is None else Path(asked.machine)
    read: dict[str, Path | Collection[Path] | None] = {
        "volume": None if asked.volume is None else path_of(asked.volume),
        "mask": None if asked.mask is None else path_of(asked.mask),
        "costs": None if asked.costs is None else Path(asked.costs),
        "machine": machine_file,
        "network": file.path,
        "weights": file.weights,
        "source of the volume": _files_of_volume(asked),
    }
    target = None if out is None else regular_file(out, asked.overwrite, inputs=read)
    drawn = None if plot is None else _picture_file(plot, asked.overwrite, read)
    page = None if report is None else page_file(report, asked.overwrite, "report", read)
    notes: list[str] = []
    rows: list[Considered] = []
    found: list[Point] = []
    asked = replace(asked, tell=notes.append, tell_why=rows.extend if asked.why or asked.as_json else None)
    with working():
        with ExitStack() as stack:
            if plot is not None:
                asked = replace(asked, tell_point=stack.enter_context(curves(quiet()))(found))
            if runs:
                asked = replace(asked, tell_progress=stack.enter_context(measuring(quiet())))
            chosen = znnpy.planning.plan_as_asked(asked)
        if target is not None:
            write_asked(target, chosen.to_json(), overwrite=asked.overwrite)
        if drawn is not None:
            from znnpy.plots.memory_sweep import draw

            title = f"{chosen.network_name}, {text(chosen.output)} output voxels"
            draw(drawn, title, chosen, found, overwrite=asked.overwrite)
        if page is not None:
            from znnpy.pages.plan_page import plan_page

            made = plan_page(chosen, file.network, machine_of(chosen, machine_file), asked, notes)
            write_asked(page, made, "report", overwrite=asked.overwrite)
    if asked.as_json:
        predicted = {"seconds": chosen.seconds, "voxels_per_second": chosen.voxels_per_second}
        promised = {"peak_bytes": chosen.memory.peak, "vram_bytes": chosen.memory.vram}
        messages = {"notes": notes, "why_not": [row.as_json() for row in rows]}
        if plot is not None:
            messages["curves"] = [point.as_json() for point in sorted(found, key=in_order)]
        print_json({**predicted, **promised, **messages, "plan": json.loads(chosen.to_json())})
    else:
        machine = machine_of(chosen, machine_file)
        print_table(plan_renderable(chosen, file.network, machine))
        if asked.why:
            print_table(why_table(rows, file.network))
        if chosen.device == "cpu" and (lacking := why_not(machine)):
            notes.append(f"the fastest methods do not run here, so a run takes two to three times as long: {lacking}")
        if notes:
            print_lines(notes)


def _check_what_runs(asked: PlanOptions) -> bool:
    """Return whether layers run before there is a plan; UsageError for conflicting options."""
    if asked.costs is not None and asked.machine is not None:
        raise click.UsageError("--machine names a file that holds the costs of that machine: omit --costs")
    if asked.machine is not None and asked.mode not in ("auto", "cpu", "gpu"):
        raise click.UsageError(f"--machine names the costs of one device: omit --mode {asked.mode}")
    runs = asked.rigor != "estimate" or asked.paranoid
    if runs and asked.machine is not None:
        raise click.UsageError("--rigor and --paranoid run layers on this machine: omit them, or omit --machine")
    if asked.time_limit is not None and asked.rigor == "estimate":
        raise click.UsageError("--time-limit limits how long layers are timed: give --rigor measure or exhaustive")
    return runs


def _files_of_volume(asked: PlanOptions) -> Collection[Path]:
    """Return every file that holds voxels; VolumeError if the volume cannot be read."""
    if asked.volume is None:
        return ()
    from znnpy.volume.base import MissingVoxels
    from znnpy.volume.registry import open_volume

    with open_volume(
        asked.volume, asked.dataset, MissingVoxels(asked.fill_missing), scale=asked.scale, time=asked.time
    ) as volume:
        return volume.files


def _picture_file(path: Path, overwrite: bool, inputs: Inputs) -> Path:
    """Return the path of a plot; OutputError if it may not be written there, MissingExtraError without matplotlib."""
    from znnpy.plots.figures import require_matplotlib

    if path.suffix.lower() != ".png":
        raise OutputError(f"{path} does not end in .png: give a --plot that does")
    require_matplotlib()
    return regular_file(path, overwrite, "plot", inputs=inputs)


@dataclass(frozen=True, kw_only=True)
class InferCommand(InferOptions):
    """The options of the command `infer`."""

    dry_run: bool = option(
        False, "compute nothing: print the plan, the size of the output, the free disk, and the time", "flag"
    )
    as_json: bool = option(False, "print one JSON document")


@command_of(main, InferCommand, ResumableCommand)
def infer(asked: InferCommand) -> None:
    """Run a network at every voxel of VOLUME."""
    volume, out = asked.volume, asked.out
    assert isinstance(volume, str)
    assert out is None or isinstance(out, str)
    if asked.overwrite and asked.resume:
        raise click.UsageError("--overwrite starts again and --resume continues: give one of them")
    if asked.items is not None and not (asked.cluster or asked.part or asked.finish):
        raise click.UsageError("--items is of runs with --cluster or --part: omit it")
    fixed = {name: bool(getattr(asked, name)) for name in FIXED_BY_PLAN}
    others = {"no-depth-first": not asked.depth_first, "device": asked.device != "auto", "mode": asked.mode != "auto"}
    for name, is_given in {**fixed, **others}.items():
        if asked.plan is not None and is_given:
            raise click.UsageError(f"--{name} is fixed by the plan: omit it, or omit --plan")
    if asked.dry_run and (asked.cluster or asked.part or asked.finish):
        raise click.UsageError("--dry-run is of a run by this process: omit --cluster, --part and --finish")
    if out is None and not Location.of(volume).name:
        raise click.UsageError(f"cannot derive an output name from {volume!r}: give --out")
    if asked.resume:
        request_begun_kernels(asked, volume, out)
    _check_primitives(asked)
    if asked.dry_run:
        _print_dry_run(asked)
        return
    import znnpy.inference
    from znnpy.progress import show

    with working(), show(quiet()) as progress:
        report = znnpy.inference.infer_as_asked(replace(asked, progress=progress))
    if asked.as_json:
        print_json(report.as_json())
    else:
        print_lines(report.lines())


def _print_dry_run(asked: InferCommand) -> None:
    """Print what a run would do."""
    from znnpy.dry_run import dry_run
    from znnpy.report.plan_text import plan_renderable

    with working():
        found = dry_run(asked)
    if asked.as_json:
        print_json(found.as_json())
        return
    if found.plan is not None:
        print_table(plan_renderable(found.plan, found.network, None))
    print_lines(found.lines())


@dataclass(frozen=True, kw_only=True)
class MeasureCommand(MeasureOptions):
    """The options of the command `measure`."""

    export: Path | None = option(
        None,
        "write a description of this machine with its speeds here, for `znnpy plan --machine` elsewhere",
        "new path",
    )
    as_json: bool = option(False, "print one JSON document")


@command_of(main, MeasureCommand, Command)
def measure(asked: MeasureCommand) -> None:
    """Measure how fast this machine is.

    Later plans use the measured speeds. If NETWORK is given (a file, or the name of a network that ships with znnpy),
    the layers of its best plans are measured too.
    """
    if asked.overwrite and asked.export is None and asked.out is None:
        raise click.UsageError("--overwrite replaces the files given as --export and --out: give one of them too")
    if asked.device == "gpu" and asked.threads is not None:
        raise click.UsageError("--threads applies to the CPU, and layers on a GPU do not use it: omit it")
    file = None if asked.network is None else read_network(asked.network, asked.meaning)
    read = {} if file is None else {"network": file.path, "weights": file.weights}
    export, out = (
        None if path is None else regular_file(path, asked.overwrite, name, inputs=read)
        for name, path in (("export", asked.export), ("out", asked.out))
    )
    from znnpy.measurement import measure as measured
    from znnpy.progress import measuring

    with working():
        with measuring(quiet()) as progress:
            found = measured(replace(asked, out=out, tell=progress))
        if export is not None:
            write_asked(export, found.costs.to_json(), "export", overwrite=asked.overwrite)
    if asked.as_json:
        print_json(found.as_json())
    else:
        if found.runs:
            print_table(found.table())
        print_lines(found.lines())


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(VerifyOptions):
    """The options of the command `verify`."""

    as_json: bool = option(False, "print one JSON document")


@command_of(main, VerifyCommand, Command)
def verify(asked: VerifyCommand) -> None:
    """Check OUTPUT against a slow, exact computation.

    Recomputes sampled voxels from VOLUME in float64, each from its field of view alone, and prints the largest error.
    """
    if asked.precision is not None and asked.tolerance is not None:
        raise click.UsageError("--precision implies a tolerance: give one of --precision and --tolerance")
    from znnpy.verify import verify_as_asked

    report = verify_as_asked(asked)
    if asked.as_json:
        print_json(report.as_json())
    else:
        print_lines(report.lines())


@dataclass(frozen=True, kw_only=True)
class InfoCommand(InfoOptions):
    """The options of the command `info`."""

    as_json: bool = option(False, "print one JSON document")


@command_of(main, InfoCommand, Command)
def info(asked: InfoCommand) -> None:
    """Describe VOLUME on one screen.

    Prints its format, axes, size, type, chunks, compression, voxel size, resolutions and arrays, and what `infer` would
    make of it.
    """
    from znnpy.volume_info import info_as_asked

    found = info_as_asked(asked)
    if asked.as_json:
        print_json(found.as_json())
    else:
        print_lines(found.lines())


@dataclass(frozen=True, kw_only=True)
class DemoCommand(DemoOptions):
    """The options of the command `demo`."""

    as_json: bool = option(False, "print one JSON document")


@command_of(main, DemoCommand, Command)
def demo(asked: DemoCommand) -> None:
    """Predict a synthetic volume and save a picture.

    Writes the volume, its true membranes, and the prediction of the network that ships with znnpy.
    """
    from znnpy.demo import run
    from znnpy.progress import show

    size = (asked.size, asked.size, asked.size)
    with working(), show(quiet()) as progress:
        done = run(asked.folder, size, seed=asked.seed, overwrite=asked.overwrite, progress=progress)
    if asked.as_json:
        print_json(done.as_json())
    else:
        print_lines(done.lines())


@main.command(cls=Command)
@json_option
def primitives(as_json: bool) -> None:
    """List the methods that compute a layer.

    Says when each is the best choice, and where it was published.
    """
    from znnpy.kernels.table import IN_HOST_RAM, TABLE
    from znnpy.primitive_list import primitives_table, why_not_here

    every = (*TABLE, *IN_HOST_RAM)
    lacking = why_not_here(every)
    if as_json:
        keys = ("name", "kind", "version", "summary", "source")
        rows = [{key: getattr(primitive, key) for key in keys} for primitive in every]
        print_json([{**row, "why_not": lacking.get(row["name"])} for row in rows])
        return
    print_table(primitives_table(every))
    for reason in dict.fromkeys(lacking.values()):
        names = [name for name, why in lacking.items() if why == reason]
        print_lines([f"{', '.join(names)} cannot run here: {reason}"])


def _check_primitives(asked: PlanningOptions) -> None:
    """Raise UsageError for unknown primitives, and for primitives and limits of a device that is not used."""
    from znnpy.kernels.table import IN_HOST_RAM, TABLE, find
    from znnpy.run.asked import devices_asked

    for name in asked.names:
        try:
            find(name, (*TABLE, *IN_HOST_RAM))
        except KeyError as error:
            raise click.BadParameter(f"{error.args[0]} (`znnpy primitives` lists them)", param_hint="--only") from None
    try:
        devices_asked(asked)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
