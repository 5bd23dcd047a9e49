"""A network as a plot: a box for each node, in the order of computing from left to right, coarser ones further down."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.admissible import lattices_of
from znnpy.errors import OutputError
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.plots.figures import new_figure, save_figure
from znnpy.report.network_table import Row, lines_of
from znnpy.shapes import text

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
COLUMN, LINE = 1.9, 1.5  # inches: from box to box, and from level to level
LONGEST = 22  # characters of a line in a box
Places = dict[str, tuple[float, float]]

COLOURS = {
    "input": "#eeeeee", "conv": "#9ecae1", "conv_transpose": "#6baed6", "pool": "#fdbb84", "average_pool": "#fdbb84",
    "upsample": "#a1d99b", "concat": "#dadaeb", "add": "#dadaeb", "multiply": "#dadaeb",
}  # fmt: skip
OTHER = "#f7f7f7"


def form_of(out: Path) -> str:
    """Return the format that the end of a name says; OutputError if none does."""
    form = out.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        ends = ", ".join(f".{known}" for known in FORMATS)
        raise OutputError(f"{out} ends in none of {ends}: give {option('out')} a name that does")
    return form


def draw(path: Path, network: Network, rows: Sequence[Row], *, overwrite: bool) -> None:
    """Write the plot in the format that the name says, whole or not at all."""
    save_figure(path, network_figure(network, rows), overwrite=overwrite, form=form_of(path))


def network_figure(network: Network, rows: Sequence[Row]) -> Figure:
    """Return a figure with a box for each node and an arrow for each tensor that a node reads."""
    graph = _graph(network, rows)
    at = {name: (float(place["order"]), float(place["level"])) for name, place in graph.nodes.items()}
    levels = sorted({level for _, level in at.values()})
    spread = LINE * (levels[-1] - levels[0] + 1)
    width = COLUMN * len(rows) + 0.5
    figure = new_figure(f"{excerpt(network.name, 60)}", spread + 1.6, max(width, 6.0))
    axes = figure.subplots()
    axes.axis("off")
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(levels[0] - 0.6, levels[-1] + 0.9)
    for earlier, later in graph.edges:
        _arrow(axes, at, earlier, later)
    for row, kind in zip(rows, ("input", *(layer.type for layer in network.layers)), strict=True):
        _box(axes, row, at[row.name], COLOURS.get(kind, OTHER), row.name in _outputs(network))
    axes.set_title("\n".join(lines_of(network)[2:]), loc="left", fontsize=9, family="monospace", parse_math=False)
    return figure


def _graph(network: Network, rows: Sequence[Row]) -> networkx.DiGraph:
    """Return the nodes with their order and their level, and the edges between them."""
    import networkx

    graph = networkx.DiGraph()
    for order, (row, lattice) in enumerate(zip(rows, lattices_of(network), strict=True)):
        volume = lattice[0] * lattice[1] * lattice[2]  # voxels of the input in one of this node
        graph.add_node(row.name, order=order, level=-log2(volume) / 3)
    graph.add_edges_from((read, row.name) for row in rows for read in row.reads)
    return graph


def _outputs(network: Network) -> set[str]:
    return {("input", *network.names)[tensor] for tensor in network.outputs}


def _box(axes: Axes, row: Row, place: tuple[float, float], colour: str, is_output: bool) -> None:
    """Draw a node: its name, its layer, and its maps, lattice and parameters."""
    lines = [row.name, *_wrapped(row.layer), f"{row.maps:,} maps, step {'x'.join(row.lattice)}"]
    lines += [text(row.size)] if row.size is not None else []
    lines += [f"{row.parameters:,} parameters"] if row.parameters else []
    axes.annotate(
        "\n".join(excerpt(line, LONGEST + 6) for line in lines),
        place,
        ha="center",
        va="center",
        fontsize=6.5,
        parse_math=False,
        bbox={"boxstyle": "round", "facecolor": colour, "edgecolor": "black", "linewidth": 2 if is_output else 0.6},
    )


def _wrapped(words: str) -> list[str]:
    """Return words in lines that fit into a box."""
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > LONGEST:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return [line for line in lines if line]


def _arrow(axes: Axes, at: Places, earlier: str, later: str) -> None:
    """Draw an edge: straight to the next node, else in a bow above the nodes of its level that lie between."""
    (x0, y0), (x1, y1) = at[earlier], at[later]
    between = any(x0 < x < x1 and y == y0 == y1 for x, y in at.values())
    axes.annotate(
        "",
        (x1, y1),
        (x0, y0),
        arrowprops={
            "arrowstyle": "-|>",
            "color": "#777777",
            "shrinkA": 43,
            "shrinkB": 43,
            "connectionstyle": "arc3,rad=-0.25" if between else "arc3",
        },
    )
