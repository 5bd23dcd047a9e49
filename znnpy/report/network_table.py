"""List the nodes of a network: what each reads, its maps, its lattice, its parameters, and how far it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from znnpy.admissible import admissible, lattices_of, refuse_non_local
from znnpy.errors import ShapeError
from znnpy.lattices import context_of, multiply_adds, period_along, reaches_of
from znnpy.layers import OF_WHOLE_IMAGES, parameter_count
from znnpy.network import Network
from znnpy.report.wide_table import SENTENCE, WideOrNarrow, columns_for, indented
from znnpy.shapes import Vec3, add, text
from znnpy.wiring import INPUT


class Row(NamedTuple):
    """A node, or the input, which reads nothing."""

    name: str
    layer: str
    reads: tuple[str, ...]
    maps: int
    lattice: tuple[str, str, str]  # size of a voxel along each axis, in voxels of the input
    parameters: int
    reach: Vec3  # input voxels that one voxel depends on, at most
    size: Vec3 | None  # for a volume of a given size


def rows_of(network: Network, volume: Vec3 | None = None) -> list[Row]:
    """Return the input and all nodes, in the order in which they are computed.

    ShapeError if the network admits neither the volume nor one that is padded to its period.
    """
    lattices, reaches = lattices_of(network), reaches_of(network)
    sizes = [None] * len(lattices) if volume is None else _sizes(network, volume)
    rows = []
    for tensor, (lattice, reach, maps) in enumerate(zip(lattices, reaches, network.maps, strict=True)):
        node = network.nodes[tensor - 1] if tensor else None
        z, y, x = map(str, lattice)
        rows.append(
            Row(
                node.name if node else INPUT,
                str(node.layer) if node else "",
                node.inputs if node else (),
                maps,
                (z, y, x),
                parameter_count(node.layer, network.maps[network.sources[tensor - 1][0]]) if node else 0,
                reach,
                sizes[tensor],
            )
        )
    return rows


def _sizes(network: Network, volume: Vec3) -> Sequence[Vec3]:
    """Return the voxels of every tensor for a volume; where a network slides over it, those of the dense tensors."""
    if network.meaning == "sliding":
        dense = network.dense_size(volume)
        return [add(dense, margin) for margin in network.margins]
    geometry = admissible(network, volume)
    return [geometry.size(tensor) for tensor in range(len(network.maps))]


def lines_of(network: Network) -> list[str]:
    """Return what holds for the network as a whole."""
    outputs = ", ".join((INPUT, *network.names)[tensor] for tensor in network.outputs)
    lines = [
        f"network     {network.name}: {len(network.layers)} nodes, {network.parameters:,} parameters",
        *_normalisation(network),
        f"output      {outputs}",
        f"period      {text(period_along(network))} voxels",
        f"work        {2 * multiply_adds(network) / 1000:,.1f} kFLOP for each voxel of the input, by definition",
    ]
    if network.meaning == "sliding":
        return [
            *lines,
            "meaning     sliding: each output voxel is what the network gives on the field of view around it",
        ]
    try:
        refuse_non_local(network)
    except ShapeError as error:
        return [*lines, f"meaning     none: {error}"]
    if network.meaning == "windows":
        return [
            *lines,
            f"meaning     windows: the mean of what the network gives in windows that overlap{_why(network)}",
        ]
    before, behind = context_of(network)
    lines.append(f"context     {text(before)} voxels before and {text(behind)} behind one period of output (z, y, x)")
    lines.append("meaning     whole: the output is what the network gives on the whole volume")
    if network.pad_to_period == "refuse":
        return [*lines, "padding     refuse: a volume whose size does not suit the period is refused"]
    return [*lines, f"padding     {network.pad_to_period}, beyond the far faces, for a volume whose size does not suit"]


def _why(network: Network) -> str:
    """Say why a network is computed in windows, if it must be."""
    for node in network.nodes:
        if isinstance(node.layer, OF_WHOLE_IMAGES):
            return f", as every voxel of node {node.name} ({node.layer}) depends on the whole image"
    return ""


def _normalisation(network: Network) -> list[str]:
    """Say how grey values are normalised where that follows from the volume."""
    if network.statistics is None:
        return []
    return [f"normalise   by the whole volume: {network.statistics}"]


def graph_table(rows: list[Row]) -> RenderableType:
    """Lay out the nodes as a table, or on a narrow terminal as a paragraph for each."""
    sized = rows[0].size is not None
    columns = ("maps", "lattice", *(["size"] if sized else []), "parameters", "reach")
    wide = Table(box=SIMPLE_HEAD, show_edge=False)
    wide.add_column("node", no_wrap=True)
    wide.add_column("layer")
    wide.add_column("reads")
    for column in columns:
        wide.add_column(column, justify="right", no_wrap=True)
    paragraphs: list[RenderableType] = []
    for row in rows:
        size = [text(row.size)] if row.size is not None else []
        cells = [f"{row.maps:,}", "x".join(row.lattice), *size, f"{row.parameters:,}", text(row.reach)]
        reads = ", ".join(row.reads)
        wide.add_row(row.name, row.layer, reads, *cells)
        facts = ", ".join(f"{column} {cell}" for column, cell in zip(columns, cells, strict=True))
        paragraphs += indented((f"{row.name}  {row.layer}", f"reads {reads}" if reads else "", facts))
    unwrapped = [[row.name for row in rows], *([column + 2 * " "] for column in columns)]
    return WideOrNarrow(wide, Group(*paragraphs), columns_for(*unwrapped, sentences=2) - SENTENCE)


def graph_json(network: Network, rows: list[Row]) -> dict[str, Any]:
    """Return the network and its nodes as plain values."""
    return {
        "name": network.name,
        "sha256": network.sha256,
        "meaning": network.meaning,
        "period": period_along(network),
        "pad_to_period": network.pad_to_period,
        "output": [(INPUT, *network.names)[tensor] for tensor in network.outputs],
        "parameters": network.parameters,
        "nodes": [row._asdict() for row in rows],
    }
