"""The commands that draw plots: `znnpy graph` and `znnpy timeline`. This module imports no numpy."""

from __future__ import annotations

from math import inf, isfinite
from pathlib import Path

import click

from znnpy.command_options import FILE, MOST_VOXELS, NEW_FILE, VOXELS, json_option
from znnpy.command_runtime import Command, print_json, print_lines, print_table
from znnpy.errors import OutputError
from znnpy.files import regular_file, write_asked
from znnpy.option_values import MEANINGS, Meaning
from znnpy.stopping import working


@click.command(cls=Command)
@click.argument("network", type=FILE, required=False)
@click.option("--out", type=NEW_FILE, help="Draw the graph to this file, NAME.svg, NAME.png or NAME.pdf.")
@click.option(
    "--size", type=VOXELS, metavar="Z,Y,X", help="List the voxels of every node for a volume of this size too."
)
@click.option(
    "--meaning",
    type=click.Choice(MEANINGS),
    help="List the network with this meaning of an output voxel, sliding or whole [default: that of the network].",
)
@click.option("--overwrite", is_flag=True, help="Replace the file given as --out.")
@click.option(
    "--tasks",
    is_flag=True,
    help="Draw how the primitive cpu.conv.fft_tasks divides a layer, to NAME.svg, or NAME.dot for Graphviz.",
)
@click.option(
    "--maps",
    nargs=2,
    type=click.IntRange(1, MOST_VOXELS),
    metavar="IN OUT",
    help="With --tasks: input and output maps of the layer [default: 4 5].",
)
@click.option("--batch", type=click.IntRange(1, MOST_VOXELS), help="With --tasks: number of images [default: 4].")
@json_option
def graph(
    network: Path | None,
    out: Path | None,
    size: tuple[int, int, int] | None,
    meaning: Meaning | None,
    overwrite: bool,
    tasks: bool,
    maps: tuple[int, int] | None,
    batch: int | None,
    as_json: bool,
) -> None:
    """List or draw the layers of a network.

    NETWORK is a network file, or the name of a network that ships. Each node is listed with its layer, the nodes that
    it reads, its maps, its lattice (the size of its voxels in voxels of the input), its parameters and its reach (the
    input voxels that one of its voxels depends on).
    """
    if overwrite and out is None:
        raise click.UsageError("--overwrite replaces the file given as --out: give --out too")
    if tasks:
        if network is not None or size is not None or meaning is not None or as_json:
            raise click.UsageError(
                "--tasks draws no network: omit NETWORK, --size, --meaning and --json, or omit --tasks"
            )
        if out is None:
            raise click.UsageError("--tasks draws to a file: give --out")
        _draw_tasks(maps or (4, 5), batch or 4, out, overwrite)
        return
    if network is None:
        raise click.UsageError("no network is given: give NETWORK, or --tasks to draw how a method divides a layer")
    if maps is not None or batch is not None:
        raise click.UsageError("--maps and --batch belong to --tasks: give it too, or omit them")
    if as_json and out is not None:
        raise click.UsageError("--json prints and --out draws: give one of them")
    _show_network(network, out, size, meaning, overwrite, as_json)


def _show_network(
    where: Path,
    out: Path | None,
    size: tuple[int, int, int] | None,
    meaning: Meaning | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Print the nodes of a network, or draw them."""
    from znnpy.network_files import read_network
    from znnpy.plots import network_graph
    from znnpy.plots.figures import require_matplotlib
    from znnpy.report.network_table import graph_json, graph_table, lines_of, rows_of

    if out is not None:
        network_graph.form_of(out)
        require_matplotlib()
    file = read_network(where, meaning)
    target = None
    if out is not None:
        target = regular_file(out, overwrite, inputs={"network": file.path, "weights": file.weights})
    rows = rows_of(file.network, size)
    if target is not None:
        with working():
            network_graph.draw(target, file.network, rows, overwrite=overwrite)
    elif as_json:
        print_json(graph_json(file.network, rows))
    else:
        print_table(graph_table(rows))
        print_lines(lines_of(file.network))


def _draw_tasks(maps: tuple[int, int], batch: int, out: Path, overwrite: bool) -> None:
    """Draw the tasks of the primitive cpu.conv.fft_tasks and their dependencies."""
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
