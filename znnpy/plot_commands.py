"""The commands that draw plots: `znnpy graph` and `znnpy timeline`. This module imports no numpy."""

from __future__ import annotations

from math import inf, isfinite
from pathlib import Path

import click

from znnpy.command_options import FILE, MOST_VOXELS, NEW_FILE, json_option
from znnpy.command_runtime import Command, print_json, print_lines
from znnpy.errors import OutputError
from znnpy.files import regular_file, write_asked
from znnpy.stopping import working


@click.command(cls=Command)
@click.option(
    "--maps",
    nargs=2,
    type=click.IntRange(1, MOST_VOXELS),
    metavar="IN OUT",
    default=(4, 5),
    show_default=True,
    help="Input and output maps of the layer.",
)
@click.option("--batch", type=click.IntRange(1, MOST_VOXELS), default=4, show_default=True, help="Number of images.")
@click.option(
    "--out",
    type=NEW_FILE,
    required=True,
    help="Write the plot to this file, NAME.svg, or NAME.dot for Graphviz.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file given as --out.")
def graph(maps: tuple[int, int], batch: int, out: Path, overwrite: bool) -> None:
    """Draw how one CPU method divides a layer (for developers).

    The graph shows the tasks of the primitive cpu.conv.fft_tasks and their dependencies.
    """
    from znnpy.plots.task_graph import FORMATS, task_graph

    if out.suffix.lower() not in FORMATS:
        raise OutputError(f"{out} ends in none of {' and '.join(FORMATS)}: give an --out that does")
    target = regular_file(out, overwrite)
    drawn = task_graph(maps, batch, out.suffix.lower())
    with working():
        write_asked(target, drawn, overwrite=overwrite)


@click.command(cls=Command)
@click.argument("trace", type=FILE)
@click.option("--out", type=NEW_FILE, help="Draw the timeline to this file, NAME.png.")
@click.option("--overwrite", is_flag=True, help="Replace the file given as --out.")
@click.option("--from", "begin", type=float, metavar="S", help="First second to show [default: the first of the run].")
@click.option("--to", "end", type=float, metavar="S", help="Last second to show [default: the last of the run].")
@json_option
def timeline(
    trace: Path, out: Path | None, overwrite: bool, begin: float | None, end: float | None, as_json: bool
) -> None:
    """Say how busy each part of a run was, and draw its timeline.

    TRACE is a file that `znnpy infer --trace` wrote. The plot has a row for each device and each thread.
    """
    if overwrite and out is None:
        raise click.UsageError("--overwrite replaces the file given as --out: give --out too")
    if not all(isfinite(second) for second in (begin, end) if second is not None):
        raise click.UsageError("--from and --to must be finite numbers of seconds")
    if not (-inf if begin is None else begin) < (inf if end is None else end):
        raise click.UsageError(f"--from {begin} is not before --to {end}")
    if out is not None and out.suffix.lower() != ".png":
        raise OutputError(f"{out} does not end in .png: give an --out that does")
    from znnpy.plots import timeline as plot
    from znnpy.plots.figures import require_matplotlib
    from znnpy.timeline import read_timeline

    if out is not None:
        require_matplotlib()
    target = None if out is None else regular_file(out, overwrite, inputs={"trace": trace})
    found = read_timeline(trace, begin, end)
    if target is not None:
        with working():
            plot.draw(target, trace.name, found, overwrite=overwrite)
    if as_json:
        print_json(found.as_json())
    else:
        print_lines(found.lines())
