"""Random shapes of the layers of graphs, for measurements of footprints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from znnpy.errors import ShapeError
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
from znnpy.layers import FUNCTIONS, PAD_MODES, Function

if TYPE_CHECKING:
    import numpy as np

    from znnpy.shapes import Vec3

MAPS = (1, 2, 3, 4, 8, 10, 16, 24, 31, 48, 64, 80, 100)
ONE: Vec3 = (1, 1, 1)
TWO: Vec3 = (2, 2, 2)


def random_graph_shape(kind: str, rng: np.random.Generator, n: Vec3) -> GraphShape:
    """Return any layer of this kind on an image of n voxels; ShapeError for sizes that do not go together."""
    f, other, factor = int(rng.choice(MAPS)), int(rng.choice(MAPS)), _size(rng, 1, 3)
    functions = [function for function in FUNCTIONS if function != "prelu"]
    function: Function = functions[int(rng.integers(len(functions)))]
    match kind:
        case "graph_conv":
            k, plain = _size(rng, 1, 5), rng.random() < 0.6
            stride, dilation = (ONE, ONE) if plain else (_size(rng, 1, 2), _size(rng, 1, 2))
            groups = f if not plain and rng.random() < 0.4 else 1
            fins, fout = ((f,), f) if groups > 1 else ((f, other) if rng.random() < 0.3 else (f,), other)
            before, behind = _less(rng, k), _less(rng, k)
            shape = GraphConvShape(fins, fout, n, k, before, behind, stride, dilation, groups, function)
            shape = replace(shape, addend=bool(rng.random() < 0.4))
            if plain and rng.random() < 0.2:
                shape = replace(shape, factors=(*([ONE] * (len(fins) - 1)), TWO))
            if min(shape.out) < 1:
                raise ShapeError("the kernel is larger than the image")
            return shape
        case "conv_transpose":
            k = factor if rng.random() < 0.5 else _size(rng, 1, 4)
            return TransposeShape(f, other, n, _times(n, factor), k, (0, 0, 0), factor, activation=function)
        case "window_pool":
            window = _size(rng, 1, 3)
            return WindowPoolShape(f, n, window, _size(rng, 1, 3), "max" if rng.random() < 0.5 else "average")
        case "upsample":
            how: Any = "nearest" if rng.random() < 0.5 else "linear"
            return UpsampleShape(f, n, _times(n, factor), factor, (0, 0, 0), how)
        case "point":
            ways: tuple[Any, ...] = ("add", "multiply", "concat", "scale", "function")
            way = ways[int(rng.integers(5))]
            return PointShape(way, (f,) if way in ("scale", "function") else (f, f), n, function)
        case "pad":
            m = n[0] + 3, n[1] + 2, n[2] + 1
            return PadShape(f, n, m, (-2, -1, -1), (0, 0, 0), n, PAD_MODES[int(rng.integers(3))])
        case "norm":
            groups = int(rng.choice([divisor for divisor in range(1, f + 1) if f % divisor == 0]))
            return NormShape(f, n, groups, affine=bool(rng.random() < 0.5), activation=function)
        case "global_pool":
            return GlobalPoolShape(f, n, "max" if rng.random() < 0.5 else "average")
    raise ValueError(f"no random shapes are known for layers of kind {kind!r}: add them here")


SMALLEST: tuple[GraphShape, ...] = (
    GraphConvShape((2,), 2, (9, 9, 9), TWO, ONE, ONE, activation="tanh"),
    GraphConvShape((32,), 32, (12, 12, 12), (3, 3, 3), ONE, ONE, activation="tanh"),
    GraphConvShape((2,), 2, (9, 9, 9), TWO, stride=TWO),
    GraphConvShape((4,), 4, (9, 9, 9), TWO, groups=4),
    TransposeShape(2, 2, (4, 4, 4), (8, 8, 8), TWO, (0, 0, 0), TWO),
    WindowPoolShape(2, (6, 6, 6), TWO, TWO),
    UpsampleShape(2, (4, 4, 4), (8, 8, 8), TWO, (0, 0, 0)),
    PointShape("add", (2, 2), (5, 5, 5)),
    NormShape(2, (5, 5, 5), 2),
    GlobalPoolShape(2, (5, 5, 5)),
    PadShape(2, (5, 5, 5), (6, 6, 6), (-1, -1, -1), (0, 0, 0), (5, 5, 5), "reflect"),
)


def _size(rng: np.random.Generator, low: int, high: int) -> Vec3:
    z, y, x = rng.integers(low, high + 1, 3).tolist()
    return z, y, x


def _less(rng: np.random.Generator, k: Vec3) -> Vec3:
    """Return a padding that is smaller than the kernel."""
    z, y, x = (int(rng.integers(0, size)) for size in k)
    return z, y, x


def _times(n: Vec3, factor: Vec3) -> Vec3:
    return n[0] * factor[0], n[1] * factor[1], n[2] * factor[2]
