"""Check how layers of a graph are computed: primitives on small images against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from znnpy.graph_shapes import (
    GlobalPoolShape,
    GraphConvShape,
    GraphShape,
    NormShape,
    PadShape,
    PointShape,
    TransposeShape,
    UpsampleShape,
    WindowPoolShape,
)
from znnpy.kernels import definition
from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.definition import Real
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import ONE
from znnpy.measure.layer_bench import HostLayer, Position, inputs_of
from znnpy.shapes import Vec3, subtract

STEPS: Vec3 = (3, 5, 37)  # outputs of a small image along each axis, about: rows longer than registers hold


def small(shape: GraphShape) -> GraphShape:
    """Return a shape of the same layer with few voxels, and its padding and its place on the lattice as they are."""
    match shape:
        case GraphConvShape():
            reach = _reach(shape.k, shape.dilation)
            return shape.of_size(_few(shape.n, reach, shape.stride))
        case WindowPoolShape():
            return replace(shape, n=_few(shape.n, shape.window, shape.stride))
        case PointShape() | NormShape() | GlobalPoolShape():
            return replace(shape, n=_few(shape.n, ONE, ONE))
        case TransposeShape():
            n, m = _fewer(shape.n, shape.m, shape.stride)
            return replace(shape, n=n, m=m)
        case UpsampleShape():
            n, m = _fewer(shape.n, shape.m, shape.factor)
            return replace(shape, n=n, m=m)
        case PadShape():
            n, m = _fewer(shape.n, shape.m, ONE)
            return replace(shape, n=n, m=m, high=subtract(shape.high, subtract(shape.n, n)))


def _reach(kernel: Vec3, dilation: Vec3) -> Vec3:
    z, y, x = (d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    return z, y, x


def _few(n: Vec3, reach: Vec3, stride: Vec3) -> Vec3:
    """Return the size of an input that gives about STEPS outputs, and as many voxels more than whole steps as `n`."""
    sizes = []
    for size, extent, step, count in zip(n, reach, stride, STEPS, strict=True):
        least = extent + step * count
        sizes.append(size if size <= least else least + (size - least) % step)
    return sizes[0], sizes[1], sizes[2]


def _fewer(n: Vec3, m: Vec3, factor: Vec3) -> tuple[Vec3, Vec3]:
    """Return the size of an input that gives about STEPS outputs, and that of the output, which keeps its ends."""
    inputs, outputs = [], []
    for size, out, times, count in zip(n, m, factor, STEPS, strict=True):
        less = max(0, min(size - 2, (out - times * 4 - count) // times))
        inputs.append(size - less)
        outputs.append(out - less * times)
    return (inputs[0], inputs[1], inputs[2]), (outputs[0], outputs[1], outputs[2])


def compared(
    shape: GraphShape, primitive: Primitive, variant: Variant, pool: ThreadPool
) -> tuple[list[Position], Real, Real]:
    """Return positions of a layer on random values, what a primitive gives there, and what it is by definition.

    Positions of a second output are in image 1.
    """
    layer = HostLayer(pool, primitive, shape, variant)
    layer.run()
    x = np.resize(layer.values.block, shape.in_bytes // shape.itemsize)
    exact = definition.layer(shape, layer.values.weights, inputs_of(shape, x))
    outputs = [exact]
    if isinstance(shape, GraphConvShape) and shape.pooled is not None:
        outputs.append(definition.pooled(shape, exact))
    at: list[Position] = [
        (number, z, y, x) for number, one in enumerate(outputs) for z, y, x in np.ndindex(*one.shape[:3])
    ]
    written = np.stack([layer.at(position) for position in at])
    return at, written, np.concatenate([one.reshape(-1, one.shape[3]) for one in outputs])
