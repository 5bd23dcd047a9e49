"""Define the layers of graphs on one part of a volume in plain, slow float64 numpy: the reference for every primitive.

Each function takes a shape of `graph_shapes.py` and arrays (z, y, x, f), computes what the shape's docstring says as
directly as possible, and shares nothing with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import erfc, prod

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

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
from znnpy.layers import DEFAULT_PARAMETERS, Function
from znnpy.network import ConvWeights

Real = npt.NDArray[np.float64]
AnyReal = npt.NDArray[np.floating]

WINDOW_VALUES = 2**20  # values of windows that are multiplied at a time
SELU_SCALE = 1.0507009873554804934193349852946
SELU_ALPHA = 1.6732632423543772848170429916717


def layer(shape: GraphShape, weights: ConvWeights | None, inputs: Sequence[AnyReal]) -> Real:
    """Return the output of a layer of any shape."""
    match shape:
        case GraphConvShape():
            assert weights is not None, "a convolution has weights"
            out = convolve(shape, weights, inputs)
            return out if shape.norm_shape is None else norm(shape.norm_shape, weights.norm, out)
        case TransposeShape():
            assert weights is not None, "a convolution has weights"
            return transpose(shape, weights, inputs[0])
        case WindowPoolShape():
            return pool(shape, inputs[0])
        case UpsampleShape():
            return upsample(shape, inputs[0])
        case PointShape():
            return point(shape, weights, inputs)
        case PadShape():
            return pad(shape, inputs[0])
        case NormShape():
            return norm(shape, weights, inputs[0])
        case GlobalPoolShape():
            return global_pool(shape, inputs[0])


def convolve(shape: GraphConvShape, weights: ConvWeights, inputs: Sequence[AnyReal]) -> Real:
    """Return out[i, g] = activation(bias[g] + sum over d, f of x0[i * stride + d * dilation, f] * weight[g, f, d]).

    x0 holds the maps of all inputs one after the other, with zeros `before` and `behind` them. With groups, the maps
    and the outputs are divided into as many equal parts, and an output sums over the maps of its own part. An addend
    is the last of the inputs; addend[i, g] is one more term of the sum.
    """
    *inputs, addend = inputs if shape.addend else (*inputs, np.zeros(1))
    x = np.concatenate([part.astype(np.float64) for part in repeated(shape, inputs)], axis=-1)
    x = np.pad(x, [*zip(shape.before, shape.behind, strict=True), (0, 0)])
    weight, out = weights.weight.astype(np.float64), np.zeros(shape.out_shape[1:])
    fin, fout = shape.fin // shape.groups, shape.fout // shape.groups
    reaches = [(k - 1) * dilation + 1 for k, dilation in zip(shape.k, shape.dilation, strict=True)]
    (sz, sy, sx), (dz, dy, dx) = shape.stride, shape.dilation
    windows = sliding_window_view(x, reaches, axis=(0, 1, 2))[::sz, ::sy, ::sx, :, ::dz, ::dy, ::dx]
    values = fin * prod(shape.k)  # of a window
    rows = max(1, min(out.shape[1], WINDOW_VALUES // (out.shape[2] * values)))
    planes = max(1, WINDOW_VALUES // (out.shape[1] * out.shape[2] * values)) if rows == out.shape[1] else 1
    starts = product(range(0, out.shape[0], planes), range(0, out.shape[1], rows), range(shape.groups))
    for plane, row, group in starts:
        maps, outs = slice(group * fin, (group + 1) * fin), slice(group * fout, (group + 1) * fout)
        part = windows[plane : plane + planes, row : row + rows, :, maps]
        sums = part.reshape(-1, values) @ weight[outs].reshape(fout, values).T
        out[plane : plane + planes, row : row + rows, :, outs] = sums.reshape(*part.shape[:3], fout)
    return activate(shape.activation, shape.parameters, out + weights.bias + addend)


def pooled(shape: GraphConvShape, out: Real) -> Real:
    """Return the second output of a convolution: the maximum over each window of the first."""
    assert shape.pooled is not None, "it has one"
    ends = zip(shape.pooled.first, shape.pooled.m, shape.pooled.window, strict=True)
    z, y, x = (slice(first, first + count * size) for first, count, size in ends)
    n = (z.stop - z.start, y.stop - y.start, x.stop - x.start)
    return pool(WindowPoolShape(shape.fout, n, shape.pooled.window, shape.pooled.window), out[z, y, x])


def repeated(shape: GraphConvShape, inputs: Sequence[AnyReal]) -> list[AnyReal]:
    """Return the inputs of a convolution with `n` voxels each: voxel j repeats voxel (j + first) // factor."""
    found = []
    for x, factors in zip(inputs, shape.factors or [(1, 1, 1)] * len(inputs), strict=True):
        for axis, (n, first, factor) in enumerate(zip(shape.n, shape.first, factors, strict=True)):
            x = x if factor == 1 else np.take(x, (np.arange(n) + first) // factor, axis)
        found.append(x)
    return found


def transpose(shape: TransposeShape, weights: ConvWeights, x: AnyReal) -> Real:
    """Return out[j, g] = activation(bias[g] + sum over i, d, f of x[i, f] * weight[f, g, d]).

    The sum is over all i and d with i * stride + d * dilation = j + first. With groups, the maps and the outputs are
    divided into as many equal parts, and an output sums over the maps of its own part.
    """
    weight, out = weights.weight.astype(np.float64), np.zeros(shape.out_shape[1:])
    fin, fout = shape.fin // shape.groups, shape.fout // shape.groups
    for d in product(*map(range, shape.k)):
        taken, given = [], []
        for n, m, stride, tap, dilation, first in zip(
            shape.n, shape.m, shape.stride, d, shape.dilation, shape.first, strict=True
        ):
            j = np.arange(n) * stride + tap * dilation - first
            inside = np.flatnonzero((j >= 0) & (j < m))
            taken.append(inside)
            given.append(j[inside])
        part = x[np.ix_(*taken)].astype(np.float64)
        for group in range(shape.groups):
            maps, outs = slice(group * fin, (group + 1) * fin), np.arange(group * fout, (group + 1) * fout)
            out[np.ix_(*given, outs)] += part[..., maps] @ weight[maps, :, d[0], d[1], d[2]]
    return activate(shape.activation, shape.parameters, out + weights.bias)


def pool(shape: WindowPoolShape, x: AnyReal) -> Real:
    """Return the maximum or the mean over each window, which begins at i * stride - before.

    A maximum is over the voxels in the image. A mean is the sum over these, divided by their number, or with
    `count_padding` by the number of the window's voxels that lie in the image or in its padding without `overhang`.
    """
    sides = [*((a, max(0, b)) for a, b in zip(shape.before, shape.behind, strict=True)), (0, 0)]
    largest = shape.how == "max"
    x = np.pad(x.astype(np.float64), sides, constant_values=-np.inf if largest else 0.0)
    size = shape.out_shape[1:4]
    taps = [
        x[
            tuple(
                slice(tap, tap + (m - 1) * stride + 1, stride)
                for tap, m, stride in zip(d, size, shape.stride, strict=True)
            )
        ]
        for d in product(*map(range, shape.window))
    ]
    if largest:
        return np.asarray(np.max(taps, axis=0))
    counted = np.ones((1, 1, 1, 1))
    for axis, (m, n) in enumerate(zip(size, shape.n, strict=True)):
        begin = np.arange(m) * shape.stride[axis] - shape.before[axis]
        end = begin + shape.window[axis]
        if shape.count_padding:
            count = np.minimum(end, n + shape.behind[axis] - shape.overhang[axis]) - begin
        else:
            count = np.minimum(end, n) - np.maximum(begin, 0)
        counted = counted * count.reshape([-1 if one == axis else 1 for one in range(4)])
    return np.asarray(np.sum(taps, axis=0) / counted)


def upsample(shape: UpsampleShape, x: AnyReal) -> Real:
    """Return in[(j + first) // factor] for `nearest`; else in at (j + first + 0.5) / factor - 0.5, linearly, clamped.

    Between two voxels an axis is interpolated linearly, one axis after the other.
    """
    out = x.astype(np.float64)
    for axis, (n, m, factor, first) in enumerate(zip(shape.n, shape.m, shape.factor, shape.first, strict=True)):
        at = np.arange(m) + first
        if shape.how == "nearest":
            out = out.take(at // factor, axis)
            continue
        position = np.clip((at + 0.5) / factor - 0.5, 0, n - 1)
        low = np.floor(position).astype(int)
        part = (position - low).reshape([-1 if i == axis else 1 for i in range(4)])
        out = out.take(low, axis) * (1 - part) + out.take(np.minimum(low + 1, n - 1), axis) * part
    return out


def point(shape: PointShape, weights: ConvWeights | None, inputs: Sequence[AnyReal]) -> Real:
    """Return the sum, product, concatenation, or scaled values of the inputs, followed by the activation.

    add, multiply  an input of one map is added to, or multiplies, all maps, and one of one voxel all voxels
    concat         the maps of all inputs one after the other
    scale          x[f] * weight[f] + bias[f]
    function       x; a prelu has a slope for all maps or one for each
    """
    first, *others = (part.astype(np.float64) for part in inputs)
    match shape.how:
        case "add":
            for other in others:
                first = first + other
        case "multiply":
            for other in others:
                first = first * other
        case "concat":
            first = np.concatenate([first, *others], axis=-1)
        case "scale":
            assert weights is not None
            first = first * weights.weight.astype(np.float64) + weights.bias
        case "function":
            pass
    if shape.activation == "prelu":
        assert weights is not None
        return np.where(first > 0, first, weights.weight.astype(np.float64) * first)
    return activate(shape.activation, shape.parameters, first)


def norm(shape: NormShape, weights: ConvWeights | None, x: AnyReal) -> Real:
    """Return activation((x - mean) / sqrt(variance + epsilon) * weight[f] + bias[f]) of a whole image.

    The mean and the variance, which is the mean squared deviation, are those of all values of a group of maps.
    """
    groups = x.astype(np.float64).reshape(-1, shape.groups, shape.f // shape.groups)
    away = groups - groups.mean(axis=(0, 2), keepdims=True)
    variance = np.square(away).mean(axis=(0, 2), keepdims=True)
    found = (away / np.sqrt(variance + shape.epsilon)).reshape(x.shape)
    if shape.affine:
        assert weights is not None
        found = found * weights.weight.astype(np.float64) + weights.bias
    return activate(shape.activation, shape.parameters, found)


def global_pool(shape: GlobalPoolShape, x: AnyReal) -> Real:
    """Return the maximum or the mean of each map as an image of one voxel."""
    x = x.astype(np.float64)
    return np.asarray((x.max if shape.how == "max" else x.mean)(axis=(0, 1, 2), keepdims=True))


def pad(shape: PadShape, x: AnyReal) -> Real:
    """Return out[j] = in[j + first], or beyond `low` .. `high` - 1 zero, the mirrored voxel, or the nearest voxel.

    Voxels are mirrored at the centre of the outermost voxel, so that this one is not repeated.
    """
    out = np.zeros((*shape.m, shape.f))
    for j in np.ndindex(shape.m):
        at = []
        for axis in range(3):
            i, low, high = j[axis] + shape.first[axis], shape.low[axis], shape.high[axis]
            if shape.how == "reflect":
                i = 2 * low - i if i < low else 2 * (high - 1) - i if i >= high else i
            elif shape.how == "replicate":
                i = min(max(i, low), high - 1)
            at.append(i)
        if all(low <= i < high for low, i, high in zip(shape.low, at, shape.high, strict=True)):
            out[j] = x[tuple(at)]
    return out


def activate(function: Function, parameters: Sequence[float], x: Real) -> Real:
    """Return a function of each value; softmax is over the maps (the last axis). PyTorch's definitions hold.

    leaky_relu  x, or slope * x below zero
    elu         x, or alpha * (exp(x) - 1) below zero
    selu        scale * elu with the constants of Klambauer et al. 2017
    gelu        x * (1 + erf(x / sqrt 2)) / 2
    gelu_tanh   x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
    silu        x * sigmoid(x)
    softplus    log(1 + exp(x))
    hardswish   x * min(max(x + 3, 0), 6) / 6
    clip        min(max(x, least), most)

    Without parameters those of DEFAULT_PARAMETERS hold.
    """
    parameters = parameters or DEFAULT_PARAMETERS.get(function, ())
    match function:
        case "none":
            return x
        case "relu":
            return np.maximum(x, 0.0)
        case "leaky_relu":
            return np.where(x > 0, x, parameters[0] * x)
        case "elu":
            return np.where(x > 0, x, parameters[0] * np.expm1(np.minimum(x, 0)))
        case "selu":
            return SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(np.minimum(x, 0)))
        case "gelu":
            return np.asarray(x * 0.5 * np.vectorize(erfc, otypes=[np.float64])(-x / np.sqrt(2.0)))
        case "gelu_tanh":
            return np.asarray(x * 0.5 * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))))
        case "silu":
            return x * _sigmoid(x)
        case "softplus":
            return np.logaddexp(0.0, x)
        case "sigmoid":
            return _sigmoid(x)
        case "tanh":
            return np.tanh(x)
        case "hardswish":
            return x * np.clip(x + 3.0, 0.0, 6.0) / 6.0
        case "clip":
            return np.minimum(np.maximum(x, parameters[0]), parameters[1])
        case "softmax":
            e = np.exp(x - x.max(axis=-1, keepdims=True))
            return np.asarray(e / e.sum(axis=-1, keepdims=True))
        case "prelu":
            raise ValueError("a prelu has weights: it is defined by `point`")


def _sigmoid(x: Real) -> Real:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))
