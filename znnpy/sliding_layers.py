"""Say which layers slide over a volume in a chain, how far each reaches, and what its shape is for a patch."""

from __future__ import annotations

from znnpy.layers import Conv, Layer, MaxFilter, Maxout, Pool
from znnpy.shapes import (
    ACTIVATIONS,
    Activation,
    ChainShape,
    ConvShape,
    FilterShape,
    MaxoutShape,
    PoolShape,
    Precision,
    Vec3,
)


def slides(layer: Layer) -> bool:
    """Return whether a layer is one of those that slide over a volume in a chain."""
    return layer.slides if isinstance(layer, Conv | Pool) else isinstance(layer, MaxFilter | Maxout)


def extent(layer: Layer) -> Vec3:
    """Return how many inputs one output of a layer depends on along each axis; for a pooling, its window."""
    match layer:
        case Conv(kernel=size) | Pool(window=size) | MaxFilter(window=size):
            return size
        case _:
            return 1, 1, 1


def sliding_activation(layer: Conv) -> Activation:
    """Return the activation of a convolution that slides over a volume."""
    for known in ACTIVATIONS:
        if layer.activation == known:
            return known
    raise TypeError(f"a network that slides over a volume has no {layer.activation}")


def layer_shape(layer: Layer, batch: int, maps: int, n: Vec3, precision: Precision = "fp32") -> ChainShape:
    """Return the shape of one layer for `batch` images of `maps` maps and size `n`."""
    match layer:
        case Conv():
            return ConvShape(batch, maps, layer.out, n, layer.kernel, sliding_activation(layer), precision=precision)
        case Pool():
            return PoolShape(batch, maps, n, layer.window, precision=precision)
        case MaxFilter():
            return FilterShape(batch, maps, n, layer.window, precision)
        case Maxout():
            return MaxoutShape(batch, maps, n, layer.of, precision)
        case _:
            raise TypeError(f"a network that slides over a volume has no {layer.type}")
