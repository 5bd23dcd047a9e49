"""The command line: words in, exit codes out. Everything else is a function of another room.

Exit codes: 0 done · 1 an expected error, one sentence on stderr · 2 usage · 130 Ctrl-C · 143 SIGTERM.
Loads no numpy: a resumed run first asks BLAS for the kernels it began with, and BLAS chooses them when numpy is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

import znnpy
from znnpy.doors import Door, Doors, Resumable, print_json, print_lines, print_table, quiet
from znnpy.errors import OutputError, ResumeError, ZnnpyError
from znnpy.files import Inputs, regular_file, write_asked
from znnpy.formats.networks import DEFAULT, read_network
from znnpy.machine import processor
from znnpy.plot_commands import graph, timeline
from znnpy.shapes import PRECISIONS, text
from znnpy.stopping import working
from znnpy.volume.journal import default_output, journal_path, read_header
from znnpy.words import (
    FILE,
    costs_word,
    device_word,
    devices_words,
    fill_missing_word,
    json_word,
    limits_words,
    loudness_words,
    named,
    positive,
    precision_word,
    ram_word,
    region_words,
    rigor_words,
    threads_word,
    voxels,
)

_X86 = (
    "Atom Barcelona Bobcat Bulldozer Cooperlake Core2 Dunnington Excavator Haswell Nano Nehalem Opteron Opteron_SSE3 "
    "Penryn Piledriver Prescott Sandybridge SapphireRapids SkylakeX Steamroller Zen"
)
_ARM = (
    "a64fx armv8 armv8sve armv9sme cortexa53 cortexa55 cortexa57 cortexa72 cortexa73 emag8180 falkor neoversen1 "
    "neoversen2 neoversev1 thunderx thunderx2t99 thunderx3t110 tsv110 vortex vortexm4"
)
OPENBLAS_KERNELS = frozenset(_X86.split() + _ARM.split())  # what OPENBLAS_CORETYPE may name


@click.group(cls=Doors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(znnpy.__version__, package_name="znnpy")
def main() -> None:
    """Run a trained 3D convolutional network over every position of a volume: exact, within memory, fast."""


main.add_command(graph)
main.add_command(timeline)


@main.command(cls=Door)
@click.argument("network", default=DEFAULT)
@click.option("--volume", type=FILE, help="Plan for this volume.")
@click.option("--shape", metavar="Z,Y,X", callback=voxels, help="Plan for a volume of this size, Z,Y,X.")
@region_words
@limits_words
@devices_words
@costs_word
@click.option(
    "--machine",
    type=FILE,
    metavar="FILE",
    help="Plan for the machine that `znnpy measure --export` wrote this of: it need not be here.",
)
@rigor_words
@click.option("--out", type=FILE, callback=named, help="Write the plan here, for `znnpy infer --plan`.")
@click.option("--plot", type=FILE, callback=named, help="Draw throughput against memory here, NAME.png.")
@click.option("--overwrite", is_flag=True, help="Replace the files given as --out and --plot.")
@click.option("--why", is_flag=True, help="Name every primitive for every layer, its time, and why it is not taken.")
@loudness_words
@json_word
def plan(
    network: str, out: Path | None, plot: Path | None, overwrite: bool, why: bool, as_json: bool, **words: Any
) -> None:
    """Choose columns or patches, their size and primitives for NETWORK, and say why.

    NETWORK is a file, or the name of one that ships. Without --volume or --shape, a volume of 1024^3 is assumed.
    """
    if words["volume"] is not None and words["shape"] is not None:
        raise click.UsageError("--volume and --shape both give a size: give one of them")
    for needs_volume in ("dataset", "fill_missing", "roi"):
        if words[needs_volume] is not None and words["volume"] is None:
            raise click.UsageError(f"--{needs_volume.replace('_', '-')} is a part of a volume: give --volume too")
    if overwrite and out is None and plot is None:
        raise click.UsageError("--overwrite replaces the files given as --out and --plot: give one of them too")
    runs = _check_what_runs(words)
    _check_primitives(words)
    import znnpy.planning
    from znnpy.kernels.cpu.native.library import why_not
    from znnpy.planner.explain import explain
    from znnpy.planner.throughput import Point, in_order
    from znnpy.planner.why import Considered, why_table
    from znnpy.progress import curves, measuring
    from znnpy.run.devices import machine_of

    file = read_network(network)
    read = {"volume": words["volume"], "costs": words["costs"], "machine": words["machine"], "network": file.path}
    read |= {"weights": file.weights, "source of the volume": _files_of_volume(words)}
    target = None if out is None else regular_file(out, overwrite, inputs=read)
    drawn = None if plot is None else _picture_file(plot, overwrite, read)
    notes: list[str] = []
    rows: list[Considered] = []
    found: list[Point] = []
    words["tell_why"] = rows.extend if why or as_json else None
    with working():
        with ExitStack() as stack:
            words["tell_point"] = stack.enter_context(curves(quiet()))(found) if plot is not None else None
            if runs:
                words["tell_progress"] = stack.enter_context(measuring(quiet()))
            chosen = znnpy.planning.plan(network, **words, tell=notes.append)
        if target is not None:
            write_asked(target, chosen.to_json(), overwrite=overwrite)
        if drawn is not None:
            from znnpy.plots.memory_sweep import draw

            title = f"{chosen.network_name}, {text(chosen.output)} output voxels"
            draw(drawn, title, chosen, found, overwrite=overwrite)
    if as_json:
        predicted = {"seconds": chosen.seconds, "voxels_per_second": chosen.voxels_per_second}
        promised = {"peak_bytes": chosen.memory.peak, "vram_bytes": chosen.memory.vram}
        told = {"notes": notes, "why_not": [row.as_json() for row in rows]}
        if plot is not None:
            told["curves"] = [point.as_json() for point in sorted(found, key=in_order)]
        print_json({**predicted, **promised, **told, "plan": json.loads(chosen.to_json())})
    else:
        machine = machine_of(chosen, words["machine"])
        print_table(explain(chosen, read_network(network).network, machine))
        if why:
            print_table(why_table(rows, read_network(network).network))
        if chosen.device == "cpu" and (lacking := why_not(machine)):
            notes.append(f"the fastest methods do not run here, a run takes two to three times as long: {lacking}")
        if notes:
            print_lines(notes)


def _check_what_runs(words: dict[str, Any]) -> bool:
    """Layers run before there is a plan; UsageError for words that contradict each other."""
    if words["costs"] is not None and words["machine"] is not None:
        raise click.UsageError("--machine names a file that holds the costs of that machine: leave --costs out")
    runs = words["rigor"] != "estimate" or words["paranoid"]
    if runs and words["machine"] is not None:
        raise click.UsageError("layers run on the machine that is here: leave out --rigor and --paranoid, or --machine")
    if words["time_limit"] is not None and words["rigor"] == "estimate":
        raise click.UsageError("--time-limit is for layers that are timed: give --rigor measure or exhaustive")
    return bool(runs)


def _files_of_volume(words: dict[str, Any]) -> Collection[Path]:
    """Every file that the voxels lie in; VolumeError where the volume cannot be read."""
    if words["volume"] is None:
        return ()
    from znnpy.volume.base import Absent
    from znnpy.volume.registry import open_volume

    with open_volume(words["volume"], words["dataset"], Absent(words["fill_missing"])) as volume:
        return volume.files


def _picture_file(path: Path, overwrite: bool, inputs: Inputs) -> Path:
    """Where to write a plot; OutputError when it may not be written there, MissingExtraError without matplotlib."""
    from znnpy.plots.figures import require_matplotlib

    if path.suffix.lower() != ".png":
        raise OutputError(f"{path} does not end in .png: give a --plot that does")
    require_matplotlib()
    return regular_file(path, overwrite, "plot", inputs=inputs)


@main.command(cls=Resumable)
@click.argument("volume", type=FILE)
@click.option("--network", default=DEFAULT, show_default=True, help="Network file, or the name of one that ships.")
@click.option("--weights", type=FILE, help="Weights file [default: the one that the network file names].")
@click.option("--plan", "plan_file", type=FILE, help="Plan that `znnpy plan --out` wrote [default: made now].")
@click.option("--out", type=FILE, callback=named, help="Output file [default: beside VOLUME].")
@region_words
@click.option("--allow-nan", is_flag=True, help="Go on where the volume holds NaN or inf; NaN comes out there.")
@click.option(
    "--missing-chunks",
    type=click.Choice(["fill", "error"]),
    default="fill",
    show_default=True,
    help="What chunks are that were never written: the volume's fill value, or an error.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output, and whatever an unfinished run left of it.")
@click.option("--resume", is_flag=True, help="Go on where a run stopped, with its plan.")
@limits_words
@devices_words
@costs_word
@click.option(
    "--paranoid", is_flag=True, help="Hold voxels of each patch against the definition: slow, in memory beyond --ram."
)
@click.option(
    "--trace",
    type=FILE,
    callback=named,
    help="Write what was done when here, for `znnpy timeline` and chrome://tracing.",
)
@loudness_words
@json_word
def infer(volume: Path, network: str, plan_file: Path | None, out: Path | None, as_json: bool, **words: Any) -> None:
    """Predict every position of VOLUME."""
    if words["overwrite"] and words["resume"]:
        raise click.UsageError("--overwrite starts again and --resume goes on: give one of them")
    fixed = {
        word: bool(words[word]) for word in ("ram", "threads", "patch", "only", "cover", "vram", "precision", "costs")
    }
    others = {"no-depth-first": not words["depth_first"]} | {w: words[w] != "auto" for w in ("device", "mode")}
    for word, is_given in {**fixed, **others}.items():
        if plan_file is not None and is_given:
            raise click.UsageError(f"--{word} is fixed by the plan: leave it out, or leave --plan out")
    if out is None and not volume.name:
        raise click.UsageError(f"{str(volume)!r} has no name to make the output's of: give --out")
    if words["resume"]:
        _ask_for_same_kernels(out or default_output(volume, read_network(network).network.name))
    _check_primitives(words)
    import znnpy.inference
    from znnpy.progress import show

    with working(), show(quiet()) as progress:
        report = znnpy.inference.infer(volume, network, plan=plan_file, out=out, progress=progress, **words)
    if as_json:
        print_json(report.as_json())
    else:
        print_lines(report.lines())


@main.command(cls=Door)
@click.argument("network", required=False)
@device_word
@threads_word
@ram_word
@precision_word
@click.option(
    "--minutes",
    type=float,
    callback=positive,
    default=2.0,
    show_default=True,
    help="After which no further layer is measured.",
)
@click.option("--export", type=FILE, callback=named, help="Write it here too, for `znnpy plan --machine` elsewhere.")
@click.option("--out", type=FILE, callback=named, help="Keep it here, for --costs, and not in the cache folder.")
@click.option("--overwrite", is_flag=True, help="Replace the files given as --export and --out.")
@loudness_words
@json_word
def measure(export: Path | None, out: Path | None, overwrite: bool, as_json: bool, **words: Any) -> None:
    """Measure how fast this machine is.

    Plans that are made from then on count with it. With NETWORK, a file or the name of one that ships, the layers of
    its best plans are measured too.
    """
    if overwrite and export is None and out is None:
        raise click.UsageError("--overwrite replaces the files given as --export and --out: give one of them too")
    if words["device"] == "gpu" and words["threads"] is not None:
        raise click.UsageError("--threads are for the processor, and layers on a GPU do not use them: drop them")
    asked = {"export": export, "out": out}
    file = None if words["network"] is None else read_network(words["network"])
    read = {} if file is None else {"network": file.path, "weights": file.weights}
    targets = {p: regular_file(p, overwrite, word, inputs=read) for word, p in asked.items() if p is not None}
    from znnpy.measurement import measure as measured
    from znnpy.progress import measuring

    with working():
        with measuring(quiet()) as progress:
            found = measured(**words, out=None if out is None else targets[out], overwrite=overwrite, tell=progress)
        if export is not None:
            write_asked(targets[export], found.costs.to_json(), "export", overwrite=overwrite)
    if as_json:
        print_json(found.as_json())
    else:
        if found.runs:
            print_table(found.table())
        print_lines(found.lines())


@main.command(cls=Door)
@click.argument("output", type=FILE)
@click.argument("volume", type=FILE)
@click.option("--network", help="Network file [default: the one that ships under the output's network name].")
@click.option("--weights", type=FILE, help="Weights file [default: the one that the network file names].")
@click.option("--dataset", help="Name of the array inside the volume's file [default: the one that was predicted].")
@fill_missing_word
@click.option("--samples", type=click.IntRange(min=1), default=1000, show_default=True, help="Voxels to recompute.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses the voxels.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Allow what predictions in it may err: 1e-5, 1e-2 in tf32, 5e-2 in fp16 "
    "[default: fp32, whatever the output says].",
)
@click.option(
    "--tolerance",
    type=float,
    callback=positive,
    help="Largest difference allowed, in place of a precision's; larger in proportion where values are larger than 1.",
)
@loudness_words
@json_word
def verify(output: Path, volume: Path, as_json: bool, **words: Any) -> None:
    """Check OUTPUT, predicted from VOLUME, against the definition.

    Recomputes sampled voxels by literally sliding the window, in float64, and prints the worst error.
    """
    if words["precision"] is not None and words["tolerance"] is not None:
        raise click.UsageError("--precision stands for a tolerance: give one of --precision and --tolerance")
    from znnpy.verify import verify as check

    report = check(output, volume, **words)
    if as_json:
        print_json(report.as_json())
    else:
        print_lines(report.lines())


@main.command(cls=Door)
@click.option("--folder", type=FILE, default=Path("demo"), show_default=True, help="Where to write.")
@click.option(
    "--size",
    type=click.IntRange(27, 2**15),
    default=160,
    show_default=True,
    help="Voxels along each axis of the volume.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses the volume.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier demo wrote.")
@loudness_words
@json_word
def demo(folder: Path, size: int, seed: int, overwrite: bool, as_json: bool) -> None:
    """Predict a synthetic volume and save a picture.

    Writes the volume, its true membranes, and what the network that ships makes of it.
    """
    from znnpy.demo import run
    from znnpy.progress import show

    with working(), show(quiet()) as progress:
        done = run(folder, (size, size, size), seed=seed, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(done.as_json())
    else:
        print_lines(done.lines())


@main.command(cls=Door)
@json_word
def primitives(as_json: bool) -> None:
    """List the ways to compute a layer.

    Says of each when it is the one to take and where it comes from.
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


def _check_primitives(words: dict[str, Any]) -> None:
    """A name that is no primitive's is a usage error, and so are names and limits of a device that is not wanted."""
    from znnpy.kernels.table import IN_HOST_RAM, TABLE, find
    from znnpy.run.devices import check_device_words, gpus_of
    from znnpy.run.modes import device_meant, names_of_gpu

    for name in words["only"]:
        try:
            find(name, (*TABLE, *IN_HOST_RAM))
        except KeyError as error:
            raise click.BadParameter(f"{error.args[0]} (`znnpy primitives` lists them)", param_hint="--only") from None
    try:
        meant = device_meant(words["mode"], words["device"])
        check_device_words(meant, words["vram"], words["precision"], names_of_gpu(words["only"], words["mode"]))
        gpus_of(words.get("gpus"), meant)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _ask_for_same_kernels(out: Path) -> None:
    """Make BLAS run the kernels that the run to be resumed began with: they decide the last bits of its output.

    On another processor nothing is asked for, as kernels it cannot run would kill the process: the run refuses instead.
    """
    try:
        header = read_header(out)
    except ZnnpyError:  # some of them are OSErrors too
        raise
    except OSError as error:
        raise ResumeError(
            f"cannot read the journal {journal_path(out)}: {error.strerror}, so what was finished is not known; "
            "make it a readable file or move it away, or give another --out"
        ) from error
    if header is None or header.settings.get("processor") != processor():
        return
    library, _, kernels = header.blas.partition(" ")
    if library == "openblas" and kernels in OPENBLAS_KERNELS:
        os.environ["OPENBLAS_CORETYPE"] = kernels
