"""The words and figures that the plan of a graph is printed with, kept in the plan: it does not hold the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from znnpy.graph_operations import Read
from znnpy.layers import ONE, Activate, Add, Conv, Layer
from znnpy.lowering import Lowered
from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.planner.layout import Count, Positive
from znnpy.shapes import text, turn, turned_back
from znnpy.wiring import INPUT, PadToPeriod

if TYPE_CHECKING:
    from znnpy.planner.graph_tilings import GraphTiling

LONGEST = 60  # characters of a name
Words = Annotated[str, Field(max_length=2000)]


@dataclass(frozen=True, slots=True)
class DescribedNode:
    """A tensor in memory: the input, or what an operation gives.

    name    name of the node, with the layers that were merged into it
    layer   what it computes, and the name of the node that it adds
    reads   names of the nodes that it takes
    level   size of its voxel, in voxels of the input
    planes  planes that it keeps for later steps
    nbytes  bytes beside the arena that hold them
    """

    name: Words
    layer: Words
    reads: tuple[Words, ...]
    level: Words
    planes: Count
    nbytes: Count


@dataclass(frozen=True, slots=True)
class DescribedGraph:
    """A graph over a volume, divided into columns or patches.

    padded         size of the volume as it is computed
    pad_to_period  what it was padded with
    level          size of an output voxel, in voxels of the input
    period         voxels of the first output of which steps are multiples
    steps          most steps of a column
    silent         most of them that come before the first output
    nodes          the input, and then one for each operation, whether or not it is merged with another
    """

    padded: tuple[Positive, Positive, Positive]
    pad_to_period: PadToPeriod
    level: Words
    period: tuple[Positive, Positive, Positive]
    steps: Positive
    silent: Count
    nodes: tuple[DescribedNode, ...]


def described(tiling: GraphTiling) -> DescribedGraph:
    """Return the description of a graph with this size of patches or columns."""
    graph, cover = tiling.graph, tiling.cover
    geometry, axis = graph.geometry, graph.axis
    columns = (graph.steps(*one, cover.patch[0] if cover.column else 0) for one in cover.ranges(0))
    steps, silent = (max(each) for each in zip(*((one.count, one.silent) for one in columns), strict=True))
    names, own_names = [INPUT, *node_names(graph.lowered)], [INPUT, *_own_names(graph.lowered)]
    layers = _turned_back(graph.lowered.network, axis).layers
    nodes = [_node(tiling, 0, INPUT, INPUT, ())]
    for operation in graph.operations:
        name, layer = names[operation.layer + 1], layers[operation.layer]
        reads, more = tuple(_words(read, own_names[read.tensor], axis) for read in operation.reads), ""
        if operation.added is not None and operation.addend is not None:
            name = " + ".join((name, *_kinds(graph.lowered, graph.lowered.origins[operation.added])))
            own_names[operation.tensor] = own_names[operation.layer + 1]
            layer, more = _with_function(layer, layers[operation.added]), f" + {own_names[operation.addend.tensor]}"
        nodes.append(_node(tiling, operation.tensor, name, f"{layer}{more}", reads))
    return DescribedGraph(
        padded=turned_back(geometry.volume, axis),
        pad_to_period=graph.network.pad_to_period,
        level=_level(tiling, graph.output),
        period=turned_back(graph.voxels, axis),
        steps=steps,
        silent=silent,
        nodes=tuple(nodes),
    )


def node_names(lowered: Lowered) -> tuple[str, ...]:
    """Return the name of every layer of a lowered network, followed by the kinds of those that were merged into it."""
    return tuple(
        " + ".join((own_name, *_kinds(lowered, origins[1:])))
        for own_name, origins in zip(_own_names(lowered), lowered.origins, strict=True)
    )


def _kinds(lowered: Lowered, origins: Sequence[int]) -> list[str]:
    """Return the kinds of layers of the original network; a function has its own name."""
    layers = [lowered.original.layers[one] for one in origins]
    return [one.function if isinstance(one, Activate) else one.type for one in layers]


def _with_function(layer: Layer, end: Layer) -> Layer:
    """Return a convolution with the function of the sum that it becomes part of."""
    assert isinstance(layer, Conv), layer
    assert isinstance(end, Add), end
    return replace(layer, activation=end.activation, parameters=end.parameters)


def _own_names(lowered: Lowered) -> list[str]:
    """Return the name of every layer of a lowered network without those that were merged into it."""
    names = zip(lowered.network.names, lowered.origins, strict=True)
    return [excerpt(lowered.original.names[origins[0]] if origins else name, LONGEST) for name, origins in names]


def _words(read: Read, name: str, axis: int) -> str:
    """Return what an operation reads, in words."""
    return name if read.factor == ONE else f"{name} upsampled {text(turned_back(read.factor, axis))}"


def _node(tiling: GraphTiling, tensor: int, name: str, layer: str, reads: Sequence[str]) -> DescribedNode:
    level, nbytes = _level(tiling, tensor), tiling.beside(tensor) * tiling.plane_bytes(tensor)
    return DescribedNode(name, layer, tuple(reads), level, tiling.kept(tensor), nbytes)


def _turned_back(network: Network, axis: int) -> Network:
    """Return a network with its sizes in the order (z, y, x) again: turning it as often as it has axes changes none."""
    for _ in range(axis):
        network = network.turned(axis)
    return network


def _level(tiling: GraphTiling, tensor: int) -> str:
    """Write the size of a tensor's voxel: one number if it is the same along every axis."""
    steps = tiling.graph.geometry.step(tensor)
    z, y, x = (steps[turn(tiling.graph.axis).index(axis)] for axis in range(3))
    return str(z) if z == y == x else f"{z}x{y}x{x}"
