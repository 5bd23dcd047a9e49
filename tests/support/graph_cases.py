"""Layers of graphs to try primitives on: shapes of every kind on odd sizes, their weights, inputs and exact outputs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

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
from znnpy.layers import FUNCTIONS
from znnpy.network import ConvWeights

if TYPE_CHECKING:
    from typing import Any

    from znnpy.kernels.contract import Array

PARAMETERS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.2,), "elu": (1.3,), "clip": (-0.5, 0.7)}
CONVS = [
    GraphConvShape((3,), 4, (5, 7, 6), (3, 3, 3)),
    GraphConvShape((3, 2), 4, (5, 7, 6), (3, 2, 1), (1, 0, 0), (1, 1, 0), activation="relu"),
    GraphConvShape((1,), 1, (3, 3, 3), (3, 3, 3)),  # one voxel
    GraphConvShape((1,), 5, (9, 8, 7), (3, 5, 2), (1, 2, 0), (1, 2, 1), stride=(2, 1, 3)),
    GraphConvShape((17, 3), 33, (6, 5, 9), (1, 3, 3), (0, 1, 1), (0, 1, 1), stride=(1, 2, 2), activation="elu"),
    GraphConvShape((16,), 8, (11, 10, 9), (3, 3, 3), (2, 0, 4), (2, 4, 0), dilation=(2, 2, 2)),
    GraphConvShape((4,), 6, (11, 7, 9), (2, 3, 2), (0, 3, 1), (0, 3, 1), stride=(3, 1, 2), dilation=(4, 3, 1)),
    GraphConvShape((6, 2), 12, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), groups=4, stride=(1, 2, 1)),
    GraphConvShape((7,), 7, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), groups=7, activation="silu"),
    GraphConvShape((20,), 40, (4, 6, 7), (1, 3, 2), (0, 1, 0), (0, 0, 1), groups=20, stride=(1, 2, 2)),
    GraphConvShape((35,), 35, (6, 9, 21), (3, 5, 3), (1, 2, 1), (1, 2, 1), groups=35, activation="relu"),
    GraphConvShape((3,), 4, (5, 7, 6), (1, 1, 1), activation="softmax"),
    GraphConvShape((3, 4), 4, (5, 7, 6), (1, 1, 1), stride=(2, 2, 2)),
    GraphConvShape((200,), 6, (4, 5, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1)),  # deep: several products
    GraphConvShape((2100,), 3, (3, 3, 4), (2, 3, 2)),  # deeper than a product may be
    GraphConvShape((2,), 16, (40, 41, 39), (2, 2, 2), stride=(2, 2, 2), activation="relu"),  # several blocks
    GraphConvShape((8,), 16, (20, 31, 39), (3, 3, 3), (1, 1, 1), (1, 1, 1), stride=(2, 2, 2), activation="leaky_relu"),
    GraphConvShape((3,), 2, (2, 3, 2), (3, 3, 3), (3, 2, 4), (3, 1, 3)),  # more padding than voxels
]
TRANSPOSES = [
    TransposeShape(3, 4, (3, 4, 5), (6, 8, 10), (2, 2, 2), (0, 0, 0), (2, 2, 2)),
    TransposeShape(3, 4, (3, 4, 5), (5, 7, 3), (2, 2, 2), (1, 1, 3), (2, 2, 2), activation="relu"),  # a part of it
    TransposeShape(5, 2, (3, 4, 2), (7, 9, 4), (3, 3, 3), (-1, 0, 1), (2, 2, 2)),
    TransposeShape(17, 19, (3, 4, 2), (8, 9, 6), (4, 3, 2), (1, 1, -2), (2, 2, 3), activation="elu"),
    TransposeShape(4, 6, (4, 3, 5), (8, 5, 7), (3, 2, 4), (0, 1, 2), (2, 3, 1), (1, 2, 3), groups=2),
    TransposeShape(6, 6, (3, 3, 3), (7, 7, 7), (3, 3, 3), (0, 0, 0), (2, 2, 2), groups=6, activation="softmax"),
    TransposeShape(2, 3, (2, 3, 2), (4, 6, 7), (1, 2, 1), (0, 0, 0), (3, 3, 4), activation="sigmoid"),  # gaps
    TransposeShape(1, 1, (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0)),
    TransposeShape(2, 3, (4, 4, 4), (4, 4, 4), (3, 3, 3), (1, 1, 1)),
    TransposeShape(2, 2, (2, 2, 2), (9, 3, 4), (2, 2, 2), (-3, 3, -1), (2, 2, 2)),  # beyond all inputs
    TransposeShape(16, 8, (12, 15, 21), (24, 30, 42), (2, 2, 2), (0, 0, 0), (2, 2, 2), activation="softmax"),
    TransposeShape(16, 24, (13, 9, 31), (25, 18, 61), (4, 4, 4), (1, 1, 1), (2, 2, 2), activation="leaky_relu"),
]
POOLS = [
    WindowPoolShape(3, (6, 8, 10), (2, 2, 2), (2, 2, 2)),
    WindowPoolShape(5, (7, 9, 11), (2, 2, 2), (2, 2, 2), "average"),
    WindowPoolShape(1, (5, 5, 5), (3, 2, 1), (1, 2, 3)),
    WindowPoolShape(33, (5, 6, 7), (3, 3, 3), (2, 1, 2), "max", (1, 1, 1), (1, 1, 1)),
    WindowPoolShape(2, (5, 6, 7), (3, 3, 3), (2, 2, 2), "average", (1, 1, 1), (1, 1, 1)),
    WindowPoolShape(17, (5, 6, 7), (3, 3, 3), (2, 2, 2), "average", (1, 1, 0), (1, 1, 1), count_padding=False),
    WindowPoolShape(4, (6, 6, 8), (3, 2, 3), (2, 2, 2), "average", (0, 0, 1), (1, 1, 2), (1, 1, 1)),
    WindowPoolShape(4, (6, 6, 8), (3, 2, 3), (2, 2, 2), "average", (0, 0, 1), (1, 1, 2), (1, 1, 1), False),
    WindowPoolShape(4, (6, 6, 8), (3, 3, 3), (2, 2, 2), "max", (0, 0, 1), (1, 1, 2), (1, 1, 1)),
    WindowPoolShape(3, (4, 5, 6), (4, 5, 6), (4, 5, 6)),  # one voxel
    WindowPoolShape(3, (4, 5, 6), (4, 5, 6), (1, 1, 1), "average"),
    WindowPoolShape(3, (4, 5, 6), (1, 1, 1), (1, 2, 3)),
    WindowPoolShape(16, (20, 70, 66), (2, 2, 2), (2, 2, 2)),  # several blocks
    WindowPoolShape(40, (4, 50, 60), (3, 3, 3), (1, 1, 1), "average", (1, 1, 1), (1, 1, 1)),
    WindowPoolShape(700, (3, 5, 40), (2, 2, 3), (1, 2, 2), "max", (1, 0, 1), (0, 1, 1)),
]
UPSAMPLES = [
    UpsampleShape(f, n, m, factor, first, how)
    for how in ("nearest", "linear")
    for f, n, m, factor, first in (
        (3, (3, 4, 5), (6, 8, 10), (2, 2, 2), (0, 0, 0)),
        (17, (3, 4, 5), (6, 5, 7), (2, 3, 2), (0, 1, 3)),
        (1, (3, 4, 1), (3, 4, 4), (1, 1, 4), (0, 0, 0)),
        (2, (1, 1, 1), (3, 2, 1), (3, 3, 3), (0, 1, 2)),
        (4, (3, 4, 5), (3, 1, 2), (2, 3, 5), (3, 4, 11)),
        (16, (5, 21, 33), (10, 42, 66), (2, 2, 2), (0, 0, 0)),  # several blocks
        (20, (3, 30, 40), (6, 61, 117), (2, 3, 3), (0, 2, 1)),
    )
]
POINTS: list[GraphShape] = [
    PointShape("add", (3, 3), (3, 4, 5), "relu"),
    PointShape("add", (3, 1, 3), (3, 4, 5), "leaky_relu"),
    PointShape("add", (1, 20), (3, 4, 5)),
    PointShape("add", (33, 33), (3, 40, 45), "elu"),  # several blocks
    PointShape("multiply", (1, 17), (3, 4, 5), "sigmoid"),
    PointShape("multiply", (4, 4, 1), (3, 4, 5)),
    PointShape("multiply", (1, 1), (1, 1, 1), "gelu"),
    PointShape("multiply", (5, 5), (3, 4, 5), "relu", single=(1,)),  # of one voxel
    PointShape("multiply", (33, 33), (3, 40, 45), single=(0,)),
    PointShape("add", (1, 20, 20), (3, 4, 5), single=(0, 2)),
    PointShape("concat", (3, 1, 17), (3, 4, 5)),
    PointShape("concat", (16, 16), (3, 40, 45), "relu"),
    PointShape("scale", (5,), (3, 4, 5), "relu"),
    PointShape("scale", (32,), (3, 40, 45), "silu"),
    PointShape("scale", (1,), (3, 4, 5), "leaky_relu"),
    PointShape("function", (6,), (3, 4, 5), "prelu"),
    PointShape("function", (1,), (3, 4, 5), "prelu"),
    *(PointShape("function", (5,), (3, 4, 5), function) for function in FUNCTIONS if function != "prelu"),
]
PADS = [
    PadShape(f, n, m, first, low, high, how)
    for how in ("zeros", "reflect", "replicate")
    for f, n, m, first, low, high in (
        (3, (4, 5, 6), (6, 8, 9), (-1, -2, -3), (0, 0, 0), (4, 5, 6)),  # a whole volume
        (16, (4, 5, 6), (4, 5, 6), (0, 0, 0), (-9, -9, -9), (99, 99, 99)),  # nothing of its rim
        (2, (4, 5, 6), (5, 3, 6), (-2, 1, 3), (0, -9, 1), (9, 5, 6)),
        (1, (4, 5, 6), (1, 2, 1), (-1, -3, 7), (0, 0, 0), (4, 5, 6)),  # its rim alone
        (1, (1, 4, 4), (3, 4, 6), (-1, 0, -1), (0, 0, 0), (1, 4, 4)) if how != "reflect" else
        (1, (2, 4, 4), (4, 4, 6), (-1, 0, -1), (0, 0, 0), (2, 4, 4)),
    )
]  # fmt: skip
NORMS: list[GraphShape] = [
    NormShape(3, (3, 4, 5), 3),
    NormShape(1, (5, 1, 3), 1, affine=True),  # one map
    NormShape(5, (1, 1, 1), 5, affine=True),  # one voxel
    NormShape(5, (1, 1, 1), 1),
    NormShape(6, (1, 2, 1), 2, 0.1),
    NormShape(12, (2, 7, 9), 3, 1e-3, True, "relu"),
    NormShape(33, (5, 13, 11), 11, activation="leaky_relu"),
    NormShape(40, (5, 13, 11), 1, affine=True),
    NormShape(16, (13, 21, 33), 16, affine=True, activation="leaky_relu"),  # several blocks
    NormShape(1, (29, 40, 37), 1, activation="sigmoid"),
    NormShape(130, (3, 11, 17), 65, 0.0, True),
    NormShape(1500, (2, 3, 7), 1500),
    *(NormShape(6, (3, 4, 5), 6, 1e-5, True, function) for function in FUNCTIONS if function not in ("none", "prelu")),
    *(
        GlobalPoolShape(f, n, how)
        for how in ("average", "max")
        for f, n in ((1, (1, 1, 1)), (1, (29, 40, 37)), (5, (3, 4, 5)), (16, (13, 21, 33)), (1500, (2, 3, 7)))
    ),
]
SHAPES: list[GraphShape] = [*CONVS, *TRANSPOSES, *POOLS, *UPSAMPLES, *POINTS, *PADS, *NORMS]


def with_parameters(shape: Any) -> Any:
    """Return the same shape with parameters of its activation that are not the usual ones."""
    parameters = PARAMETERS.get(getattr(shape, "activation", "none"))
    return replace(shape, parameters=parameters) if parameters else shape


def ids(value: object) -> str:
    return value.name if hasattr(value, "name") else str(value)


def weights_for(shape: GraphShape) -> ConvWeights | None:
    rng = np.random.default_rng(5)
    match shape:
        case GraphConvShape():
            size: tuple[int, ...] = (shape.fout, shape.fin // shape.groups, *shape.k)
            fan, maps = shape.fin // shape.groups * math.prod(shape.k), shape.fout
        case TransposeShape():
            size = (shape.fin, shape.fout // shape.groups, *shape.k)
            fan, maps = shape.fin // shape.groups, shape.fout
        case PointShape(how="scale") | PointShape(activation="prelu") | NormShape(affine=True):
            size, fan, maps = (shape.f,), 2, shape.f
        case _:
            return None
    weight = rng.standard_normal(size, np.float32) * np.float32(math.sqrt(2 / fan))
    return ConvWeights(weight, rng.standard_normal(maps, np.float32))


def input_sizes(shape: GraphShape) -> list[tuple[int, ...]]:
    """Return the size (z, y, x, f) of every input in memory, that of an addend last."""
    if not isinstance(shape, GraphConvShape | PointShape):
        return [shape.in_shape[1:]]
    sizes: list[tuple[int, ...]] = [(*shape.size_of(index), f) for index, f in enumerate(shape.fins)]
    added = isinstance(shape, GraphConvShape) and shape.addend
    return [*sizes, shape.out_shape[1:]] if added else sizes


def inputs_for(shape: GraphShape, *, strided: bool = False) -> list[Array]:
    """Random inputs; `strided`: views of larger arrays with NaN around them."""
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(size, np.float32) for size in input_sizes(shape)]
    if not strided:
        return arrays
    views = []
    for array in arrays:
        z, y, x, f = array.shape
        larger = np.full((z + 1, y + 2, 2 * x + 3, f + 1), np.nan, np.float32)
        views.append(larger[1:, 1 : 1 + y, 1 : 1 + 2 * x : 2, 1:])
        views[-1][...] = array
    return views


@cache
def exact(shape: GraphShape) -> np.ndarray:
    """Return the definition of `inputs_for(shape)` and `weights_for(shape)`."""
    return definition.layer(shape, weights_for(shape), inputs_for(shape))
