"""Make a network of the layers that importers collected at one size of the volume or at several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from znnpy.admissible import geometry_of
from znnpy.errors import NetworkFileError, ShapeError
from znnpy.formats.wiring import Given, network_of
from znnpy.geometry import vector
from znnpy.importing.builder import Builder
from znnpy.importing.drafts import Draft
from znnpy.importing.imported import Imported
from znnpy.importing.processing import Processing
from znnpy.importing.simplify import read_by_outputs, simplified
from znnpy.importing.tensors import AXES, LayoutError, Tensor, kinds
from znnpy.lattices import period_along
from znnpy.layers import GlobalPool, has_weights
from znnpy.messages import excerpt
from znnpy.network import ConvWeights, Network, Normalise
from znnpy.normalisation import VolumeStatistics
from znnpy.shapes import Vec3, add, text
from znnpy.wiring import INPUT, PadToPeriod

LIKELY_SIZES = (64, 96, 128, 192, 256)  # voxels along each axis: most networks take one of these
LARGEST_SIZE = 320  # that is tried
MOST_BETWEEN = 2  # sizes that are no multiple of the period at which a network is looked at
PERIODS = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # by which a second size is larger, if the double does not suit


class RefusedSizeError(NetworkFileError):
    """A framework does not run a network on a volume of a size."""


@dataclass
class Walk:
    """The layers that a graph of a framework gives for a volume of one size, and its outputs by name."""

    size: Vec3
    builder: Builder
    outputs: dict[str, Tensor]
    order: str = "nczyx"  # of the dimensions of the input
    is_alone: bool = True  # the framework gives one array, and no tuple or dictionary of it

    @property
    def planar(self) -> bool:
        """Return whether the network is over images."""
        return "z" not in self.order


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of a user, for what the file of a network does not say.

    outputs    names of outputs, or of nodes, that are the network's output; None: all outputs
    normalise  of the input; pad_to_period: values beyond the far faces of a volume whose size does not suit
    statistics of the volume that the normalisation follows from; order: of the dimensions of the framework's input
    processing layers before and behind the network, and which outputs a description means
    """

    outputs: tuple[str, ...] | None = None
    normalise: Normalise | None = None
    pad_to_period: PadToPeriod | None = None
    statistics: VolumeStatistics | None = None
    order: str | None = None
    processing: Processing | None = None


def imported(
    name: str, walk: Callable[[Vec3], Walk], size: Vec3, wishes: Wishes, source: str, *, fixed: bool = False
) -> Imported:
    """Return the network that a graph describes.

    walk   walks the graph for a volume of a size; it is called for `size`, for two that are larger by periods and
           different along each axis, and for some between, since what differs depends on the size of the volume
    fixed  the graph is for this size only

    NetworkFileError: an operator is not supported, or depends on the size of the volume.
    """
    first = walk(size)
    if wishes.order is not None and wishes.order != first.order:
        raise NetworkFileError(
            f"the network's input has its dimensions in the order {first.order}, and {wishes.order} was asked for; "
            "leave that out, or export the network for such arrays"
        )
    wanted = wishes.outputs if wishes.processing is None else wishes.processing.names(list(first.outputs))
    names = _outputs(first, wanted)
    if not fixed:
        drafts = simplified(read_by_outputs(first.builder.drafts, names), names, Counter())
        period = period_along(_network(name, first.builder.input_maps, drafts, names, Wishes()))
        for growing in ((0, 1, 2), (2, 1, 0)):
            second = _larger(walk, size, (0, *period[1:]) if first.planar else period, growing)
            _agree(first, second, names, _outputs(second, wanted))
        drafts = simplified(read_by_outputs(first.builder.drafts, names), names, Counter())
        for other in _between(walk, first, _network(name, first.builder.input_maps, drafts, names, Wishes())):
            _agree(first, other, names, _outputs(other, wanted))
    if wishes.processing is not None:
        names = wishes.processing.surround(first.builder, names)
    folded = Counter(first.builder.folded)
    drafts = simplified(read_by_outputs(first.builder.drafts, names), names, folded)
    network = _network(name, first.builder.input_maps, drafts, names, wishes)
    by_name = {draft.name: draft for draft in drafts}
    weights = tuple(
        found
        for node, layer in zip(network.names, network.layers, strict=True)
        if has_weights(layer) and (found := by_name[node].weights) is not None
    )
    words = tuple(first.outputs if wanted is None else wanted)
    only = size if fixed else None
    return Imported(network, weights, words, first.planar, only, first.order, folded, source, first.is_alone)


def _larger(walk: Callable[[Vec3], Walk], size: Vec3, period: Vec3, growing: Vec3) -> Walk:
    """Return the walk of a volume that is larger by periods: about twice as large, or as the framework takes it.

    Twice, since what depends on a part of the size, such as n // 8, does not differ one period later; by an odd number
    of periods, since halves may differ; and by another number along each axis, since axes may be mistaken for another,
    of which `growing` says how much more it is along each.
    """
    double = 2 * max(n // (2 * p) if p else 0 for n, p in zip(size, period, strict=True)) + 1
    refused: NetworkFileError | None = None
    for times in dict.fromkeys((double, *PERIODS)):
        try:
            return walk(add(size, vector((times + 2 * more) * n for more, n in zip(growing, period, strict=True))))
        except NetworkFileError as error:
            refused = refused or error
    assert refused is not None, "at least one size was tried"
    raise refused


def _outputs(walk: Walk, wanted: Sequence[str] | None) -> list[str]:
    """Return the nodes that are outputs, with maps over the volume; NetworkFileError if there is none of that name."""
    found: list[str] = []
    builder = walk.builder
    nodes = {draft.name: draft for draft in builder.drafts}
    names = list(walk.outputs) if wanted is None else wanted
    for one in names:
        if one in walk.outputs:
            builder.at(f"{one}", "output")
            found.append(_canonical(builder, walk.outputs[one]).node)
        elif one in nodes:
            found.append(one)
        else:
            known = ", ".join(map(excerpt, walk.outputs))
            raise NetworkFileError(f"there is no output or node {excerpt(one, 60)}; the outputs are {known}")
    if INPUT in found:
        raise NetworkFileError("an output of the network is its input; leave it out")
    if len(set(found)) < len(found):
        raise NetworkFileError(f"the outputs {', '.join(map(excerpt, names))} are not all different; name each once")
    return found


def _canonical(builder: Builder, tensor: Tensor) -> Tensor:
    """Return an output as maps over the volume. NetworkFileError: it is one answer for a whole volume."""
    try:
        return builder.canonical(_maps_first(tensor))
    except LayoutError as error:
        pooled = [draft.name for draft in builder.drafts if isinstance(draft.layer, GlobalPool)]
        if not pooled:
            raise
        raise builder.error(
            f"has the shape {tensor.shape}: after node {excerpt(pooled[-1], 60)} (global_pool) the network gives one "
            "answer for a whole volume, and only those with one for each voxel can be computed"
        ) from error


def _maps_first(tensor: Tensor) -> Tensor:
    """Return an array with the maps in dimension 1, where it has them in the last."""
    last = len(tensor.dims) - 1
    if last > 2 and kinds(tensor.dims[last]) in ([], ["c"]) and set(kinds(tensor.dims[1])) & set(AXES):
        return tensor.transposed([0, last, *range(1, last)])
    return tensor


def _network(name: str, maps: int, drafts: Sequence[Draft], outputs: Sequence[str], wishes: Wishes) -> Network:
    if not drafts:
        raise NetworkFileError("the network has no layers")
    given = [Given(draft.layer, draft.name, draft.reads) for draft in drafts]
    normalise = wishes.normalise
    if normalise is not None and len(normalise.mean) == len(normalise.std) == 1:
        normalise = Normalise(normalise.mean * maps, normalise.std * maps)
    network = network_of(name, maps, given, normalise, outputs, wishes.pad_to_period)
    return replace(network, statistics=wishes.statistics)


def _between(walk: Callable[[Vec3], Walk], first: Walk, network: Network) -> Iterator[Walk]:
    """Yield walks at sizes that are no multiple of the period, if the network and its framework take such.

    Paddings that are worked out from the size, as TensorFlow's, differ there.
    """
    tried = 0
    for more in range(1, max(period_along(network))):
        size = add(first.size, (0 if first.planar else more, more, more))
        try:
            geometry_of(network, size)
            found = walk(size)
        except (ShapeError, RefusedSizeError):
            continue
        except NetworkFileError as error:
            raise NetworkFileError(
                f"{error}, in a volume of {text(size)} voxels, which the network takes as well as one of "
                f"{text(first.size)}: the network depends on the size of the volume"
            ) from error
        yield found
        tried += 1
        if tried == MOST_BETWEEN:
            return


def _agree(first: Walk, second: Walk, outputs: Sequence[str], others: Sequence[str]) -> None:
    """Keep of the options of each layer those that it has at both sizes; NetworkFileError if there is none.

    outputs, others  nodes that are outputs at the first size and at the second
    """
    by_name = {draft.name: draft for draft in second.builder.drafts}
    differing = {}
    for one in first.builder.drafts:
        other = by_name.get(one.name)
        both = () if other is None else tuple(option for option in one.options if option in other.options)
        if not both:
            differing[one.name] = "not there" if other is None else str(other.layer)
        elif other is not None and not _same_weights(one.weights, other.weights):
            differing[one.name] = f"{other.layer} with other weights"
        elif other is not None and one.reads != other.reads:
            differing[one.name] = f"{other.layer} of {_words(other.reads)} in place of {_words(one.reads)}"
        one.options = both or one.options
    for one in read_by_outputs(first.builder.drafts, outputs):
        if one.name in differing:
            raise NetworkFileError(
                f"node {excerpt(one.name, 60)} is {one.layer} in a volume of {text(first.size)} voxels and "
                f"{differing[one.name]} in one of {text(second.size)}: the network depends on the size of the volume, "
                "so that it cannot be computed in pieces; write it so that sizes follow from strides and factors alone"
            )
    names = {draft.name for draft in first.builder.drafts}
    for other in read_by_outputs(second.builder.drafts, others):
        if other.name not in names:
            raise NetworkFileError(
                f"node {excerpt(other.name, 60)} ({other.layer}) is in a volume of {text(second.size)} voxels and not "
                f"in one of {text(first.size)}: the network depends on the size of the volume"
            )
    if list(outputs) != list(others):
        raise NetworkFileError(
            f"the outputs are {_words(outputs)} in a volume of {text(first.size)} voxels and {_words(others)} in one "
            f"of {text(second.size)}: the network depends on the size of the volume; write it so that it does not"
        )


def _words(names: Sequence[str]) -> str:
    return " and ".join(excerpt(name, 60) for name in names)


def _same_weights(one: ConvWeights | None, other: ConvWeights | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one.weight, other.weight) and np.array_equal(one.bias, other.bias)
