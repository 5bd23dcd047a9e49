"""Define what a graph gives for a whole volume, layer by layer in float64: the reference for patches and columns.

It works on whole images alone and shares nothing with `geometry` and the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from znnpy.graph_shapes import (
    GlobalPoolShape,
    GraphConvShape,
    NormShape,
    PointShape,
    TransposeShape,
    UpsampleShape,
    WindowPoolShape,
)
from znnpy.kernels import definition
from znnpy.kernels.definition import AnyReal, Real
from znnpy.layers import (
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    GlobalPool,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Norm,
    Pad,
    PadMode,
    Pool,
    Scale,
    Sides,
    Upsample,
)
from znnpy.network import ConvWeights, Network
from znnpy.shapes import Vec3

_NUMPY = {"zeros": "constant", "reflect": "reflect", "replicate": "edge"}  # names of np.pad


def grown_by(image: AnyReal, more: Vec3, how: PadMode) -> AnyReal:
    """Return an image (z, y, x, f) padded behind its far faces by `more` voxels."""
    return np.pad(image, [*((0, one) for one in more), (0, 0)], mode=_NUMPY[how])  # type: ignore[call-overload,no-any-return]


def whole(network: Network, weights: Sequence[ConvWeights], image: AnyReal) -> tuple[Real, ...]:
    """Return the outputs of a graph for a whole image.

    image    (z, y, x, f), normalised, of a size that the network admits
    weights  of the layers that have some, in order

    Returns one array (z, y, x, f') float64 for each output.
    """
    of_layer = dict(zip(network.weighted, weights, strict=True))
    tensors: list[Real] = [image.astype(np.float64)]
    names = {"input": 0, **{name: index + 1 for index, name in enumerate(network.names)}}
    for index, (layer, sources) in enumerate(zip(network.layers, network.sources, strict=True)):
        inputs = [tensors[source] for source in sources]
        like = getattr(layer, "like", None)
        size = None if like is None else tensors[names[like]].shape[:3]
        tensors.append(computed(layer, of_layer.get(index), inputs, size))
    return tuple(tensors[tensor] for tensor in network.outputs)


def computed(
    layer: Layer, weights: ConvWeights | None, inputs: Sequence[Real], like: tuple[int, ...] | None = None
) -> Real:
    """Return the output of one layer for whole images; `like` is the size of the node that it refers to."""
    x = inputs[0]
    n: Vec3 = x.shape[0], x.shape[1], x.shape[2]
    maps = x.shape[3]
    match layer:
        case Conv():
            assert weights is not None
            before, behind = layer.padding
            if layer.padding_mode != "zeros":
                x = _padded(x, layer.padding, layer.padding_mode)
                n, before, behind = (x.shape[0], x.shape[1], x.shape[2]), (0, 0, 0), (0, 0, 0)
            shape = GraphConvShape(
                (maps,), layer.out, n, layer.kernel, before, behind, layer.stride, layer.dilation, layer.groups,
                layer.activation, layer.parameters,
            )  # fmt: skip
            return definition.convolve(shape, weights, [x])
        case ConvTranspose():
            assert weights is not None
            axes = zip(n, layer.stride, layer.reach, *layer.padding, layer.output_padding, strict=True)
            z, y, x_ = ((size - 1) * stride + reach - a - b + more for size, stride, reach, a, b, more in axes)
            transposed = TransposeShape(
                maps, layer.out, n, (z, y, x_), layer.kernel, layer.padding[0], layer.stride, layer.dilation,
                layer.groups, layer.activation, layer.parameters,
            )  # fmt: skip
            return definition.transpose(transposed, weights, x)
        case Pool() | AveragePool():
            return definition.pool(_pool_shape(layer, maps, n), x)
        case MaxFilter():
            return definition.pool(WindowPoolShape(maps, n, layer.window, (1, 1, 1)), x)
        case Maxout():
            return np.asarray(x.reshape(*n, maps // layer.of, layer.of).max(axis=-1))
        case Upsample():
            return _upsampled(layer, x, like)
        case Crop():
            spare = [a - b for a, b in zip(n, like, strict=True)] if like is not None else None
            before = tuple(one // 2 for one in spare) if spare is not None else layer.before  # type: ignore[assignment]
            behind = tuple(one - one // 2 for one in spare) if spare is not None else layer.behind  # type: ignore[assignment]
            return x[tuple(slice(a, size - b) for a, b, size in zip(before, behind, n, strict=True))]
        case Pad():
            return _padded(x, (layer.before, layer.behind), layer.how)
        case Norm():
            groups = {"instance_norm": maps, "group_norm": layer.groups, "layer_norm": 1}[layer.type]
            norm = NormShape(maps, n, groups, layer.epsilon, layer.affine, layer.activation, layer.parameters)
            return definition.norm(norm, weights, x)
        case GlobalPool():
            return definition.global_pool(GlobalPoolShape(maps, n, layer.how), x)
        case _:
            return _pointwise(layer, weights, inputs, n)


def _pool_shape(layer: Pool | AveragePool, maps: int, n: Vec3) -> WindowPoolShape:
    """Return the shape of a pooling of a whole image; windows that `ceil` adds reach beyond the padding."""
    behind, overhang = [], []
    for axis in range(3):
        before, after = layer.padding[0][axis], layer.padding[1][axis]
        window, stride = layer.window[axis], layer.step[axis]
        starts = [at for at in range(-before, n[axis] + after, stride) if at + window <= n[axis] + after]
        following = starts[-1] + stride if starts else -before
        missing = following + window - (n[axis] + after)
        if layer.ceil and following < n[axis] and 0 < missing < stride:
            starts.append(following)
        assert all(b - a == stride for a, b in pairwise(starts))
        end = max(0, starts[-1] + window - n[axis])  # where strides leave voxels out, nothing is behind
        behind.append(end)
        overhang.append(max(0, end - after))
    how, counts = ("max", True) if isinstance(layer, Pool) else ("average", layer.count_padding)
    return WindowPoolShape(
        maps, n, layer.window, layer.step, how, layer.padding[0],  # type: ignore[arg-type]
        (behind[0], behind[1], behind[2]), (overhang[0], overhang[1], overhang[2]), counts,
    )  # fmt: skip


def _upsampled(layer: Upsample, x: Real, like: tuple[int, ...] | None) -> Real:
    n: Vec3 = x.shape[0], x.shape[1], x.shape[2]
    if like is not None and any(b == a + 1 and a > 1 for a, b in zip(n, like, strict=True)):
        for axis, size in enumerate(like):  # as PyTorch: voxel floor(i * n / size)
            x = x.take(np.arange(size) * x.shape[axis] // size, axis)
        return x
    factor = layer.factor if like is None else tuple(b // a for a, b in zip(n, like, strict=True))
    assert factor is not None
    z, y, x_ = (size * times for size, times in zip(n, factor, strict=True))
    f: Vec3 = factor[0], factor[1], factor[2]
    return definition.upsample(UpsampleShape(x.shape[3], n, (z, y, x_), f, (0, 0, 0), layer.how), x)


def _padded(x: Real, sides: Sides, how: PadMode) -> Real:
    return np.pad(x, [*zip(*sides, strict=True), (0, 0)], mode=_NUMPY[how])  # type: ignore[call-overload,no-any-return]


def _pointwise(layer: Layer, weights: ConvWeights | None, inputs: Sequence[Real], n: Vec3) -> Real:
    fins = tuple(one.shape[3] for one in inputs)
    match layer:
        case Add():
            shape = PointShape("add", fins, n, layer.activation, layer.parameters)
        case Multiply():
            shape = PointShape("multiply", fins, n, layer.activation, layer.parameters)
        case Concat():
            shape = PointShape("concat", fins, n)
        case Scale():
            shape = PointShape("scale", fins, n, layer.activation, layer.parameters)
        case Activate():
            shape = PointShape("function", fins, n, layer.function, layer.parameters)
        case _:
            raise TypeError(f"{layer.type} has no definition on a part of a volume")
    return definition.point(shape, weights, inputs)
