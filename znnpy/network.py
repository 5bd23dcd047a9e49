"""Describe a network as a graph of layers, most often a chain.

What a chain that slides over a volume needs follows here: its field of view, its fragment period, and the shapes of its
layers for a patch. What other graphs need is in `znnpy/geometry.py` and `znnpy/admissible.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from znnpy.errors import ShapeError
from znnpy.layer_checks import why_wrong
from znnpy.layers import (
    OF_WHOLE_IMAGES,
    Add,
    GlobalPool,
    Multiply,
    Upsample,
    has_weights,
    maps_after,
    parameter_count,
)
from znnpy.layers import Conv as Conv
from znnpy.layers import Layer as Layer
from znnpy.layers import MaxFilter as MaxFilter
from znnpy.layers import Maxout as Maxout
from znnpy.layers import Pool as Pool
from znnpy.messages import excerpt, option
from znnpy.network_result import MAPS, NetworkResult
from znnpy.normalisation import Normalise as Normalise
from znnpy.normalisation import VolumeStatistics
from znnpy.option_values import Meaning
from znnpy.shapes import (
    ChainShape,
    Precision,
    Vec3,
    add,
    ceil_divide,
    multiply,
    subtract,
    text,
    turned,
    valid,
)
from znnpy.sliding_layers import extent, layer_shape, slides
from znnpy.wiring import INPUT, Node, Wiring
from znnpy.wiring import PadToPeriod as PadToPeriod

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from znnpy.windows.settings import Windows

MOST_LAYERS = 500  # layers of one network, since planning takes longer with more


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """The weights of one layer, in C order and read only; convolutions are cross-correlations.

    A transposed convolution has its kernels as PyTorch has them, a scale has a factor per map and a prelu one slope, or
    one per map, and no bias.
    """

    weight: npt.NDArray[np.float32]  # (f', f / groups, kz, ky, kx); transposed (f, f' / groups, kz, ky, kx); (f,)
    bias: npt.NDArray[np.float32]  # (f',)
    norm: ConvWeights | None = None  # those of the norm of a convolution that is computed with it

    def __repr__(self) -> str:
        return f"<ConvWeights {self.weight.shape}>"


@dataclass(frozen=True)
class Network:
    """A graph of layers in an order in which each comes after those it reads; without wiring, a chain.

    Sizes are (z, y, x). `asked_meaning` is one that was asked for, instead of the usual one of such a graph.
    `statistics` are those of the volume that `normalise` follows from; it is None until there is a volume. `windows`
    are those in which the network is computed, if it is to be, and `result` what is written of the maps that it gives.
    `members` are the sets of weights of an ensemble, whose results are averaged; only windows have several.
    """

    name: str
    input_channels: int
    layers: tuple[Layer, ...]
    normalise: Normalise | None = None
    wiring: Wiring | None = None
    asked_meaning: Meaning | None = None
    statistics: VolumeStatistics | None = None
    windows: Windows | None = None
    result: NetworkResult = MAPS
    members: int = 1

    def __post_init__(self) -> None:
        if self.input_channels < 1:
            raise ShapeError(f"a network needs at least 1 input channel, not {self.input_channels}")
        if not self.layers:
            raise ShapeError("a network needs at least one layer")
        if len(self.layers) > MOST_LAYERS:
            raise ShapeError(
                f"a network has at most {MOST_LAYERS:,} layers, and this one has {len(self.layers):,}; split it"
            )
        if self.wiring is not None:
            self.wiring.check(self.layers)
        maps, names = [self.input_channels], (INPUT, *self.names)
        for index, (layer, sources) in enumerate(zip(self.layers, self.sources, strict=True)):
            here = tuple(maps[source] for source in sources)
            wrong = why_wrong(layer, [names[source] for source in sources], here)
            if wrong is not None:
                what = f"layer {index}" if self.wiring is None else f"node {excerpt(self.names[index], 60)}"
                raise ShapeError(f"{what} ({layer}) {wrong}")
            maps.append(maps_after(layer, here))
        if self.asked_meaning == "sliding" and self.why_not_sliding is not None:
            raise ShapeError(
                f"{excerpt(self.name, 60)} does not slide over a volume, since {self.why_not_sliding}; leave out "
                f"{option('meaning', 'sliding')}, so that it is computed whole"
            )

    def __repr__(self) -> str:
        """Return one line; `layers` lists the layers."""
        maps = f"{self.input_channels} -> {self.output_channels} maps"
        seen = {
            "sliding": f", field of view {text(self.field_of_view)}",
            "whole": ", computed whole",
            "windows": ", computed in windows",
        }[self.meaning]
        return (
            f"<Network {excerpt(self.name, 60)}: {len(self.layers)} layers, {maps}, {self.parameters:,} parameters"
            f"{seen}>"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        if self.wiring is not None:
            return self.wiring.names
        return tuple(f"{layer.type}{index}" for index, layer in enumerate(self.layers))

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Tensors that each layer reads: 0 is the input, i + 1 the output of layer i."""
        return tuple((i,) for i in range(len(self.layers))) if self.wiring is None else self.wiring.sources

    @property
    def outputs(self) -> tuple[int, ...]:
        """Tensors that are the network's output."""
        return (len(self.layers),) if self.wiring is None else self.wiring.outputs

    @property
    def pad_to_period(self) -> PadToPeriod:
        """Values that lie beyond the far faces of a volume whose size does not divide."""
        return "reflect" if self.wiring is None else self.wiring.pad_to_period

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The layers with their names and the names of what they read."""
        names = (INPUT, *self.names)
        return tuple(
            Node(name, layer, tuple(names[source] for source in sources))
            for name, layer, sources in zip(self.names, self.layers, self.sources, strict=True)
        )

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Layers that read each tensor, in order."""
        found: list[list[int]] = [[] for _ in range(len(self.layers) + 1)]
        for layer, sources in enumerate(self.sources):
            for source in dict.fromkeys(sources):
                found[source].append(layer)
        return tuple(map(tuple, found))

    @cached_property
    def pooled(self) -> frozenset[int]:
        """Tensors of one voxel for a whole image: what global poolings give, and what follows from such alone."""
        found = set[int]()
        for index, (layer, sources) in enumerate(zip(self.layers, self.sources, strict=True)):
            alone = all(source in found for source in sources) and not isinstance(layer, Upsample)
            if alone or isinstance(layer, GlobalPool):
                found.add(index + 1)
        return frozenset(found)

    @cached_property
    def images(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each layer reads, but those of which one voxel counts for all voxels of the others."""
        return tuple(
            tuple(one for one in sources if one not in self.pooled or not isinstance(layer, Add | Multiply)) or sources
            for layer, sources in zip(self.layers, self.sources, strict=True)
        )

    @cached_property
    def meaning(self) -> Meaning:
        """Meaning of an output voxel: `sliding`, the network on its field of view; `whole`, on the volume.

        `windows`, the mean of what the network gives in windows of a fixed size.
        """
        if self.asked_meaning is not None:
            return self.asked_meaning
        if self.windows is not None or not self.is_local:
            return "windows"
        return "sliding" if self.why_not_sliding is None else "whole"

    @property
    def is_local(self) -> bool:
        """Return whether no layer makes each voxel depend on the whole image."""
        return not any(isinstance(layer, OF_WHOLE_IMAGES) for layer in self.layers)

    @cached_property
    def why_not_sliding(self) -> str | None:
        """The node for which the network cannot slide over a volume, and what it does; None if it can."""
        for index, node in enumerate(self.nodes):
            here = f"node {excerpt(node.name, 60)} ({node.layer})"
            if self.sources[index] != (index,):
                return f"{here} reads {excerpt(', '.join(node.inputs))}, and not the layer before it alone"
            if not slides(node.layer):
                return (
                    f"{here} is none of the layers that slide: unpadded convolutions with stride 1, max-poolings by "
                    "their window, max-filters and maxouts"
                )
        for tensor in self.outputs:
            if tensor != len(self.layers):
                return f"node {excerpt((INPUT, *self.names)[tensor], 60)} is an output, and not the last layer"
        return None

    @cached_property
    def maps(self) -> tuple[int, ...]:
        """Feature maps of every tensor: of the input, and after each layer."""
        maps = [self.input_channels]
        for layer, sources in zip(self.layers, self.sources, strict=True):
            maps.append(maps_after(layer, tuple(maps[source] for source in sources)))
        return tuple(maps)

    @property
    def output_maps(self) -> tuple[int, ...]:
        """Maps of each output, as they are written."""
        return tuple(self.result.maps_of(self.maps[tensor]) for tensor in self.outputs)

    @property
    def blended_maps(self) -> int:
        """Maps of the output that are blended: those of each member, if they are blended apart."""
        return self.maps[self.outputs[0]] * (self.members if self.result.apart else 1)

    @property
    def output_channels(self) -> int:
        """Maps of all outputs together."""
        return sum(self.output_maps)

    @cached_property
    def field_of_view(self) -> Vec3:
        """Input voxels that one output voxel depends on."""
        fov: Vec3 = (1, 1, 1)
        for layer in reversed(self.layers):
            match layer:
                case Conv(kernel=k) | MaxFilter(window=k):
                    fov = subtract(add(fov, k), (1, 1, 1))
                case Pool(window=p):
                    fov = multiply(fov, p)
        return fov

    @cached_property
    def period(self) -> Vec3:
        """Product of all pooling windows: dense patches are a multiple of it along each axis."""
        period: Vec3 = (1, 1, 1)
        for layer in self.layers:
            if isinstance(layer, Pool):
                period = multiply(period, layer.window)
        return period

    @cached_property
    def margins(self) -> tuple[Vec3, ...]:
        """Voxels by which the input and the output of every layer are larger than the dense output.

        The first margin is field of view - 1, the last is 0.
        """
        margins: list[Vec3] = [(0, 0, 0)]
        period = self.period
        for layer in reversed(self.layers):
            size = extent(layer)
            if isinstance(layer, Pool):
                period = ceil_divide(period, size)
            margins.append(add(margins[-1], multiply(period, subtract(size, (1, 1, 1)))))
        return tuple(reversed(margins))

    def turned(self, axis: int) -> Network:
        """Return the network for volumes with `axis` first: kernels and windows are reordered by `shapes.turned`."""
        return replace(self, layers=tuple(_turned(layer, axis) for layer in self.layers))

    @property
    def weighted(self) -> tuple[int, ...]:
        """Indices of the layers with weights, in the order of their weights; in a chain, the convolutions."""
        return tuple(i for i, layer in enumerate(self.layers) if has_weights(layer))

    @property
    def parameters(self) -> int:
        """Number of trainable values: kernels and biases."""
        return sum(
            parameter_count(layer, self.maps[sources[0]])
            for layer, sources in zip(self.layers, self.sources, strict=True)
        )

    @cached_property
    def sha256(self) -> str:
        """Digest of layers, maps and normalisation. Networks with equal digests and weights compute the same."""
        given = {"mean": self.normalise.mean, "std": self.normalise.std} if self.normalise else None
        what: dict[str, Any] = {
            "input_channels": self.input_channels,
            "layers": [_described(layer) for layer in self.layers],
            "normalise": given if self.statistics is None else self.statistics.described,
        }
        if self.meaning != "sliding":
            what |= {"sources": self.sources, "outputs": self.outputs, "pad_to_period": self.pad_to_period}
        if self.windows is not None and self.meaning == "windows":
            what["windows"] = self.windows.described
        if self.members > 1:
            what["members"] = self.members
        if self.result != MAPS:
            what["result"] = self.result.described
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def patch_in(self, out: Vec3) -> Vec3:
        """Return the size of the input patch for the dense output patch `out`."""
        return subtract(add(out, self.field_of_view), (1, 1, 1))

    def dense_size(self, volume: Vec3) -> Vec3:
        """Return the dense output size of a volume, volume - field of view + 1; ShapeError if that is not positive."""
        for axis, n, fov in zip("zyx", volume, self.field_of_view, strict=True):
            if n < fov:
                raise ShapeError(
                    f"the volume is smaller than the field of view along {axis}: {text(volume)} against "
                    f"{text(self.field_of_view)}; give at least {fov - n} more voxels there, "
                    f"or use {option('border', 'reflect')}"
                )
        return valid(volume, self.field_of_view)

    def round_up(self, out: Vec3) -> Vec3:
        """Return the smallest valid patch that holds `out`: each axis a multiple of the fragment period."""
        return multiply(ceil_divide(out, self.period), self.period)

    def layer_shapes(
        self, out: Vec3, *, batches: Sequence[int] | None = None, streams: bool = False, precision: Precision = "fp32"
    ) -> tuple[ChainShape, ...]:
        """Return the shape of every layer for a patch of `out` dense output voxels, with poolings as fragments.

        batches    images that each layer takes at a time, a part of those that the layer before it makes; default: all.
        streams    whether `out` is one step along z: then the input of a layer is the new planes, preceded by the
                   last kernel - 1 (or window - 1) planes of the previous step.
        precision  precision of every layer.

        ShapeError if `out` is not a multiple of the fragment period, or batches do not divide.
        """
        if any(o < 1 or o % p for o, p in zip(out, self.period, strict=True)):
            raise ShapeError(
                f"an output patch must be a multiple of the pooling period {text(self.period)}, not {text(out)}; "
                f"the next larger one is {text(self.round_up((max(1, out[0]), max(1, out[1]), max(1, out[2]))))}"
            )
        shapes: list[ChainShape] = []
        z, y, x = self.patch_in(out)
        n, images = (out[0] if streams else z, y, x), 1
        for index, (maps, layer) in enumerate(zip(self.maps, self.layers, strict=False)):
            if streams:
                n = (n[0] + extent(layer)[0] - 1, *n[1:])
            batch = images if batches is None else batches[index]
            if batch < 1 or images % batch:
                raise ShapeError(f"layer {index} ({layer}) gets {images} images, which are not a multiple of {batch}")
            shape = layer_shape(layer, batch, maps, n, precision)
            shapes.append(shape)
            n, images = shape.out, shape.out_shape[0]
        return tuple(shapes)


SIZES = ("kernel", "window", "stride", "dilation", "output_padding", "factor", "before", "behind")  # fields of layers
_ALWAYS = ("kernel", "out", "activation", "window", "of", "type")  # fields that the digest of a chain always had


def _described(layer: Layer) -> dict[str, Any]:
    """Return the fields of a layer, except those of graphs alone that have their usual values."""
    return {
        field.name: value
        for field in fields(layer)
        if (value := getattr(layer, field.name)) != field.default or field.default is MISSING or field.name in _ALWAYS
    }


def _turned(layer: Layer, axis: int) -> Layer:
    """Return a layer with every size turned."""
    if isinstance(layer, Maxout) or axis == 0:
        return layer
    changed: dict[str, Any] = {}
    for one in fields(layer):
        value = getattr(layer, one.name)
        if one.name == "padding":
            changed[one.name] = tuple(turned(side, axis) for side in value)
        elif one.name in SIZES and value is not None:
            changed[one.name] = turned(value, axis)
    return replace(layer, **changed)
