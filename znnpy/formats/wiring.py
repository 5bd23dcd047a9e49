"""Make a network of named layers that say what they read, in any order, and check that they fit each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from znnpy.errors import NetworkFileError
from znnpy.formats.files import suggestion
from znnpy.lattices import check_meets
from znnpy.layers import (
    Crop,
    Layer,
    Upsample,
)
from znnpy.messages import excerpt
from znnpy.network import MOST_LAYERS, Network, Normalise
from znnpy.wiring import INPUT, Node, PadToPeriod, Wiring

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

    NetworkFileError: names do not fit each other; ShapeError: layers do not, or no size of a volume will do.
    """
    if len(given) > MOST_LAYERS:
        raise NetworkFileError(
            f"a network has at most {MOST_LAYERS:,} layers, and this one has {len(given):,}; split it"
        )
    nodes = _named(given)
    outputs = _outputs(nodes, output)
    nodes = _ordered(nodes)
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
        nodes.append(Node(name, one.layer, reads))
    return nodes


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
            f"before it; change what {_short(around[0])} reads or takes its size from"
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


def _like(layer: Layer) -> str | None:
    """Return the node whose size a layer goes to."""
    return layer.like if isinstance(layer, Upsample | Crop) else None


def _short(name: str) -> str:
    return excerpt(name, 60)


def _listed(names: Sequence[str]) -> str:
    return excerpt(", ".join(map(_short, names)))
