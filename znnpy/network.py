"""Describe a network as a chain of layers, with its field of view, fragment period, and layer shapes for a patch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal

from znnpy.errors import ShapeError
from znnpy.messages import excerpt, option
from znnpy.shapes import (
    Activation,
    ConvShape,
    FilterShape,
    LayerShape,
    MaxoutShape,
    PoolShape,
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

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


MOST_LAYERS = 500  # layers of one network, since planning takes longer with more


@dataclass(frozen=True, slots=True)
class Conv:
    """A valid convolution with bias and activation."""

    kernel: Vec3
    out: int  # maps
    activation: Activation = "none"
    type: Literal["conv"] = "conv"

    def __str__(self) -> str:
        return f"conv {text(self.kernel)} -> {self.out} {self.activation}"


@dataclass(frozen=True, slots=True)
class Pool:
    """A max-pooling, which dense inference runs as fragments (MPF)."""

    window: Vec3
    type: Literal["pool"] = "pool"

    def __str__(self) -> str:
        return f"pool {text(self.window)}"


@dataclass(frozen=True, slots=True)
class MaxFilter:
    """The maximum over a window at every position (stride 1)."""

    window: Vec3
    type: Literal["maxfilter"] = "maxfilter"

    def __str__(self) -> str:
        return f"maxfilter {text(self.window)}"


@dataclass(frozen=True, slots=True)
class Maxout:
    """The maximum over groups of `of` neighbouring maps."""

    of: int
    type: Literal["maxout"] = "maxout"

    def __str__(self) -> str:
        return f"maxout of {self.of}"


Layer = Conv | Pool | MaxFilter | Maxout


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """The weights of one convolution for cross-correlation, in C order and read only."""

    weight: npt.NDArray[np.float32]  # (f', f, kz, ky, kx)
    bias: npt.NDArray[np.float32]  # (f',)

    def __repr__(self) -> str:
        return f"<ConvWeights {self.weight.shape}>"


@dataclass(frozen=True, slots=True)
class Normalise:
    """Normalisation of the input, x = (grey - mean) / std, with one value per input channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Network:
    """A chain of layers, and what follows from it without weights. Sizes are (z, y, x)."""

    name: str
    input_channels: int
    layers: tuple[Layer, ...]
    normalise: Normalise | None = None

    def __post_init__(self) -> None:
        if self.input_channels < 1:
            raise ShapeError(f"a network needs at least 1 input channel, not {self.input_channels}")
        if not self.layers:
            raise ShapeError("a network needs at least one layer")
        if len(self.layers) > MOST_LAYERS:
            raise ShapeError(
                f"a network has at most {MOST_LAYERS:,} layers, and this one has {len(self.layers):,}; split it"
            )
        maps = self.input_channels
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Maxout) and maps % layer.of:
                raise ShapeError(
                    f"layer {index} ({layer}) does not divide the {maps} maps it gets; "
                    "change the group, or the maps that come before it"
                )
            maps = _maps_after(layer, maps)

    def __repr__(self) -> str:
        """Return one line; `layers` lists the layers."""
        maps = f"{self.input_channels} -> {self.output_channels} maps"
        return (
            f"<Network {excerpt(self.name, 60)}: {len(self.layers)} layers, {maps}, {self.parameters:,} parameters, "
            f"field of view {text(self.field_of_view)}>"
        )

    @cached_property
    def maps(self) -> tuple[int, ...]:
        """Feature maps before the first layer and after each: one more entry than there are layers."""
        maps = [self.input_channels]
        for layer in self.layers:
            maps.append(_maps_after(layer, maps[-1]))
        return tuple(maps)

    @property
    def output_channels(self) -> int:
        return self.maps[-1]

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
    def convolutions(self) -> tuple[int, ...]:
        """Indices of the convolutional layers, in the order of their weights."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, Conv))

    @property
    def parameters(self) -> int:
        """Number of trainable values: kernels and biases."""
        pairs = ((self.maps[i], self.layers[i]) for i in self.convolutions)
        return sum(f * c.out * prod(c.kernel) + c.out for f, c in pairs if isinstance(c, Conv))

    @cached_property
    def sha256(self) -> str:
        """Digest of layers, maps and normalisation. Networks with equal digests and weights compute the same."""
        what = {
            "input_channels": self.input_channels,
            "layers": [asdict(layer) for layer in self.layers],
            "normalise": asdict(self.normalise) if self.normalise else None,
        }
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
    ) -> tuple[LayerShape, ...]:
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
        shapes: list[LayerShape] = []
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


def extent(layer: Layer) -> Vec3:
    """Return how many inputs one output of a layer depends on along each axis; for a pooling, its window."""
    match layer:
        case Conv(kernel=size) | Pool(window=size) | MaxFilter(window=size):
            return size
        case Maxout():
            return 1, 1, 1


def _turned(layer: Layer, axis: int) -> Layer:
    match layer:
        case Conv():
            return replace(layer, kernel=turned(layer.kernel, axis))
        case Pool() | MaxFilter():
            return replace(layer, window=turned(layer.window, axis))
        case Maxout():
            return layer


def layer_shape(layer: Layer, batch: int, maps: int, n: Vec3, precision: Precision = "fp32") -> LayerShape:
    """Return the shape of one layer for `batch` images of `maps` maps and size `n`."""
    match layer:
        case Conv():
            return ConvShape(batch, maps, layer.out, n, layer.kernel, layer.activation, precision=precision)
        case Pool():
            return PoolShape(batch, maps, n, layer.window, precision=precision)
        case MaxFilter():
            return FilterShape(batch, maps, n, layer.window, precision)
        case Maxout():
            return MaxoutShape(batch, maps, n, layer.of, precision)


def _maps_after(layer: Layer, maps: int) -> int:
    match layer:
        case Conv():
            return layer.out
        case Maxout():
            return maps // layer.of
        case _:
            return maps
