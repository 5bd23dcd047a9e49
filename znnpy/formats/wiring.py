"""Make a network of named layers that say what they read, in any order, and check that they fit each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from znnpy.errors import NetworkFileError
from znnpy.formats.files import suggestion
from znnpy.lattices import check_meets
from znnpy.layers import (
    JOINS,
    Add,
    AveragePool,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    Maxout,
    Multiply,
    Pool,
    Upsample,
    maps_after,
)
from znnpy.messages import excerpt
from znnpy.network import INPUT, MOST_LAYERS, Network, Node, Normalise, PadToPeriod, Wiring
from znnpy.shapes import text

if TYPE_CHECKING:
    import networkx


class Given(NamedTuple):
    """A layer as a file has it: without a name, and without what it reads, where those are the usual ones."""

    layer: Layer
    name: str | None = None
    reads: tuple[str, ...] | None = None


def network_of(
    name: str,
    input_channels: int,
    given: Sequence[Given],
    normalise: Normalise | None = None,
    output: Sequence[str] | None = None,
    pad_to_period: PadToPeriod | None = None,
) -> Network:
    """Return the network of these layers.

    given   layers in any order; one without a name is called by its type and index, and one that does not say what it
            reads reads the one before it, or the input
    output  names of the nodes that are the network's output; None: the last one

    NetworkFileError names the nodes that do not fit each other; ShapeError those for which no size of a volume will do.
    """
    if len(given) > MOST_LAYERS:
        raise NetworkFileError(
            f"a network has at most {MOST_LAYERS:,} layers, and this one has {len(given):,}; split it"
        )
    nodes = _named(given)
    outputs = _outputs(nodes, output)
    nodes = _ordered(nodes)
    _check_all_read(nodes, outputs)
    _check_maps(nodes, input_channels)
    tensors = {INPUT: 0, **{node.name: index + 1 for index, node in enumerate(nodes)}}
    wiring = Wiring(
        tuple(node.name for node in nodes),
        tuple(tuple(tensors[read] for read in node.inputs) for node in nodes),
        tuple(tensors[one] for one in outputs),
        pad_to_period or "reflect",
    )
    network = Network(name, input_channels, tuple(node.layer for node in nodes), normalise, wiring)
    check_meets(network)
    return network


def _named(given: Sequence[Given]) -> list[Node]:
    """Return nodes with all names and inputs, in the order of the file, each of which exists once."""
    names = [one.name or f"{one.layer.type}{index}" for index, one in enumerate(given)]
    for name, count in Counter(names).items():
        places = [str(index) for index, own in enumerate(names) if own == name]
        if name == INPUT:
            raise NetworkFileError(
                f"layer {places[0]} is called {INPUT}, which is the name of the network's input; give it another name"
            )
        if count > 1:
            raise NetworkFileError(
                f"the layers {_listed(places)} are all called {_short(name)}; give each another name"
                if count > 2
                else f"the layers {places[0]} and {places[1]} are both called {_short(name)}; give one another name"
            )
    nodes = []
    for index, (name, one) in enumerate(zip(names, given, strict=True)):
        reads = one.reads or (names[index - 1] if index else INPUT,)
        for read in reads:
            if read not in names and read != INPUT:
                raise NetworkFileError(
                    f"node {_short(name)} ({one.layer}) reads {_short(read)}, which is not a node; "
                    f"{suggestion(read, [*names, INPUT])}"
                )
        like = _like(one.layer)
        if like is not None and like not in names and like != INPUT:
            raise NetworkFileError(
                f"node {_short(name)} ({one.layer}) gets the size of {_short(like)}, which is not a node; "
                f"{suggestion(like, [*names, INPUT])}"
            )
        _check_inputs(name, one.layer, reads)
        nodes.append(Node(name, one.layer, reads))
    return nodes


def _check_inputs(name: str, layer: Layer, reads: tuple[str, ...]) -> None:
    """Raise NetworkFileError if a join reads one node, or another layer several."""
    joins = isinstance(layer, JOINS)
    if joins and len(reads) < 2:
        raise NetworkFileError(
            f"node {_short(name)} ({layer}) reads {_short(reads[0])} alone, but joins two nodes or more; "
            f"name them, for example from: [{_short(reads[0])}, conv1]"
        )
    if not joins and len(reads) > 1:
        raise NetworkFileError(
            f"node {_short(name)} ({layer}) reads {len(reads)} nodes, {_listed(reads)}, but takes one; "
            "join them before it with concat, add or multiply"
        )


def _outputs(nodes: Sequence[Node], output: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the outputs; NetworkFileError if one does not exist, or is named twice."""
    if output is None:
        return (nodes[-1].name,)
    names = [node.name for node in nodes]
    for one in output:
        if one not in names:
            what = "the network's input" if one == INPUT else "not a node"
            raise NetworkFileError(f"output names {_short(one)}, which is {what}; {suggestion(one, names)}")
    for one, count in Counter(output).items():
        if count > 1:
            raise NetworkFileError(f"output names {_short(one)} {count} times; name it once")
    return tuple(output)


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes so that each comes after those it reads, and otherwise as they were; NetworkFileError: a cycle."""
    import networkx

    graph = _graph(nodes)
    if not networkx.is_directed_acyclic_graph(graph):
        around = [earlier for earlier, _ in networkx.find_cycle(graph)]
        raise NetworkFileError(
            f"the nodes {excerpt(' -> '.join((*around, around[0])))} form a cycle, in which each waits for the one "
            f"before it; change what {_short(around[0])} reads"
        )
    places = {node.name: index for index, node in enumerate(nodes)}
    order = networkx.lexicographical_topological_sort(graph, key=places.__getitem__)
    return [nodes[places[name]] for name in order]


def _graph(nodes: Sequence[Node]) -> networkx.DiGraph:
    """Return the graph in which an edge leads to a node from each that it reads, or gets its size from."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(node.name for node in nodes)
    for node in nodes:
        like = _like(node.layer)
        before = (*node.inputs, like) if like is not None else node.inputs
        graph.add_edges_from((one, node.name) for one in before if one != INPUT)
    return graph


def _check_all_read(nodes: Sequence[Node], outputs: Sequence[str]) -> None:
    """Raise NetworkFileError if a node is neither read nor an output."""
    read = {one for node in nodes for one in node.inputs}
    unread = [node.name for node in nodes if node.name not in read and node.name not in outputs]
    if len(unread) == 1:
        raise NetworkFileError(
            f"no node reads {_short(unread[0])}, and it is no output; remove it, or add it to output"
        )
    if unread:
        raise NetworkFileError(
            f"no node reads {_listed(unread)}, and they are no outputs; remove them, or add them to output"
        )


def _check_maps(nodes: Sequence[Node], input_channels: int) -> None:
    """Raise NetworkFileError if a layer cannot take the maps that it gets, or has settings that contradict others."""
    maps = {INPUT: input_channels}
    for node in nodes:
        layer, here = node.layer, tuple(maps[read] for read in node.inputs)
        wrong = _wrong_maps(layer, node.inputs, here) or _wrong_settings(layer)
        if wrong is not None:
            raise NetworkFileError(f"node {_short(node.name)} ({layer}) {wrong}")
        maps[node.name] = maps_after(layer, here)


def _wrong_maps(layer: Layer, names: Sequence[str], maps: tuple[int, ...]) -> str | None:
    """Say why a layer cannot take these maps of the nodes that it reads, and what to do; None if it can."""
    match layer:
        case Conv() | ConvTranspose() if maps[0] % layer.groups or layer.out % layer.groups:
            count, which = (maps[0], "maps it gets") if maps[0] % layer.groups else (layer.out, "maps it gives")
            return (
                f"has {layer.groups} groups, which do not divide the {count} {which}; change groups, or the number "
                "of maps"
            )
        case Maxout() if maps[0] % layer.of:
            return f"does not divide the {maps[0]} maps it gets; change of, or the number of maps"
        case Add() | Multiply():
            most = max(maps)
            for name, own in zip(names, maps, strict=True):
                if own not in (1, most):
                    largest = names[maps.index(most)]
                    return (
                        f"joins {_short(largest)} of {most} maps with {_short(name)} of {own}; give both the same "
                        "number of maps, or one of them a single map"
                    )
    return None


def _wrong_settings(layer: Layer) -> str | None:
    """Say which settings of a layer contradict each other, and what to do; None if none do."""
    match layer:
        case Pool() | AveragePool():
            for side in layer.padding:
                if any(2 * p > w for p, w in zip(side, layer.window, strict=True)):
                    return (
                        f"pads {text(side)} voxels, which is more than half of its window {text(layer.window)}; "
                        "write a smaller padding, or pad in a layer before it"
                    )
        case ConvTranspose():
            limit = tuple(max(s, d) for s, d in zip(layer.stride, layer.dilation, strict=True))
            if any(o >= most for o, most in zip(layer.output_padding, limit, strict=True)):
                return (
                    f"has the output_padding {text(layer.output_padding)}, which must be smaller than its stride "
                    f"{text(layer.stride)} or its dilation {text(layer.dilation)}; write a smaller one"
                )
    return None


def _like(layer: Layer) -> str | None:
    """Return the node whose size a layer goes to."""
    return layer.like if isinstance(layer, Upsample | Crop) else None


def _short(name: str) -> str:
    return excerpt(name, 60)


def _listed(names: Sequence[str]) -> str:
    return excerpt(", ".join(map(_short, names)))
