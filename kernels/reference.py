"""Define all layers in plain, slow float64 numpy: the reference for every primitive.

Two functions compute the dense result; they share only the definitions of the layers. `dense_by_fragments` runs the
layers on the whole input with max-pooling fragments and puts the fragments back in place. `dense_by_sliding` crops the
field of view at each position and runs the plain, strided network on it, which is the definition of "dense".

Arrays are (S, z, y, x, f), channels last; the input is already normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from znnpy.kernels.contract import ConvWeights
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.shapes import Activation, Sliding, Vec3, valid
from znnpy.sliding_layers import sliding_activation

Real = npt.NDArray[np.float64]
AnyReal = npt.NDArray[np.floating]
Mode = Literal["correlation", "convolution"]
VALID = Sliding()


def convolve(x: AnyReal, weight: AnyReal, bias: AnyReal, activation: Activation = "none") -> Real:
    """Return out[s, i, g] = activation(bias[g] + sum over d, f of x[s, i + d, f] * weight[g, f, d]).

    x (S, nz, ny, nx, f), weight (f', f, kz, ky, kx), bias (f',); returns (S, n - k + 1, f') float64.
    """
    kernel: Vec3 = weight.shape[2], weight.shape[3], weight.shape[4]
    windows = sliding_window_view(x.astype(np.float64), kernel, axis=(1, 2, 3))  # (S, m, f, k), a view
    matrix = weight.reshape(len(bias), -1).T.astype(np.float64)
    out = np.empty((*windows.shape[:4], len(bias)))
    for row in np.ndindex(out.shape[:3]):
        out[row] = windows[row].reshape(out.shape[3], -1) @ matrix
    return activate(out + bias, activation)


def convolve_sliding(
    x: AnyReal,
    weight: AnyReal,
    bias: AnyReal,
    activation: Activation = "none",
    sliding: Sliding = VALID,
    mode: Mode = "correlation",
) -> Real:
    """Return the strided, padded convolution of `x` in float64.

    out[s, p, g] = activation(bias[g] + sum over d, f of x0[s, p * stride + c(d) - padding, f] * weight[g, f, d]), where
    x0 is x with zeros around it; c(d) is d for a correlation and k - 1 - d for a convolution (Chetlur et al., cuDNN,
    2014, 3, which states the second).
    """
    flipped = weight if mode == "correlation" else weight[:, :, ::-1, ::-1, ::-1]
    sz, sy, sx = sliding.stride
    return convolve(_padded(x, sliding.padding, 0.0), flipped, bias, activation)[:, ::sz, ::sy, ::sx]


def activate(x: Real, activation: Activation) -> Real:
    """Apply the activation; softmax is over maps (the last axis)."""
    match activation:
        case "none":
            return x
        case "relu":
            return np.maximum(x, 0.0)
        case "tanh":
            return np.tanh(x)
        case "sigmoid":
            return 0.5 * (1.0 + np.tanh(0.5 * x))
        case "softmax":
            e = np.exp(x - x.max(axis=-1, keepdims=True))
            return np.asarray(e / e.sum(axis=-1, keepdims=True))


def max_filter(x: AnyReal, p: Vec3) -> Real:
    """Return the maximum over a window at every position: (S, n - p + 1, f)."""
    m = valid(_size(x), p)
    return np.asarray(np.max([_window(x, d, m) for d in product(*map(range, p))], axis=0), np.float64)


def max_pool(x: AnyReal, p: Vec3) -> Real:
    """Return the maximum over disjoint windows: (S, n / p, f); a remainder at the end is ignored."""
    return max_filter(x, p)[:, :: p[0], :: p[1], :: p[2]]


def softmax_of_images(x: AnyReal) -> Real:
    """Return the softmax over all values of an image."""
    return activate(x.astype(np.float64).reshape(len(x), -1), "softmax").reshape(x.shape)


def pool_sliding(
    x: AnyReal, window: Vec3, sliding: Sliding, how: Literal["max", "average"], *, counts_padding: bool = False
) -> Real:
    """Return the maximum or mean over the part of each window inside the image, at every position: (S, positions, f).

    counts_padding  True: the mean is over the whole window, including zeros around the image.
    """
    sz, sy, sx = sliding.stride
    start, counted = (-np.inf, 1.0) if how == "max" else (0.0, 1.0 if counts_padding else 0.0)
    values, counts = (
        sliding_window_view(_padded(array, sliding.padding, around), window, axis=(1, 2, 3))[:, ::sz, ::sy, ::sx]
        for array, around in ((x, start), (np.ones(x.shape), counted))
    )
    if how == "max":
        return np.asarray(values.max(axis=(-3, -2, -1)))
    return np.asarray(values.sum(axis=(-3, -2, -1)) / counts.sum(axis=(-3, -2, -1)))


def fragments(x: AnyReal, p: Vec3) -> Real:
    """Max-pool once per offset: (S * P, n / p, f), fragment (oz * py + oy) * px + ox of image s at s * P + fragment."""
    m: Vec3 = x.shape[1] // p[0], x.shape[2] // p[1], x.shape[3] // p[2]
    pooled = [
        max_pool(image[None, oz:, oy:, ox:], p)[0, : m[0], : m[1], : m[2]]
        for image in x
        for oz, oy, ox in product(*map(range, p))
    ]
    return np.stack(pooled)


def recombine(fragments: AnyReal, windows: Sequence[Vec3]) -> Real:
    """Undo the fragments of all poolings, given in network order: (S * P1 * P2, m, f) to dense (S, m * p1 * p2, f)."""
    dense = fragments.astype(np.float64)
    for pz, py, px in reversed(windows):
        batch, mz, my, mx, f = dense.shape
        parts = dense.reshape(-1, pz, py, px, mz, my, mx, f)
        dense = parts.transpose(0, 4, 1, 5, 2, 6, 3, 7).reshape(batch // (pz * py * px), mz * pz, my * py, mx * px, f)
    return dense


def maxout(x: AnyReal, of: int) -> Real:
    """Return the maximum over groups of `of` neighbouring maps: (S, n, f / of)."""
    return np.asarray(x.reshape(*x.shape[:-1], -1, of).max(axis=-1), np.float64)


def dense_by_fragments(network: Network, weights: Sequence[ConvWeights], x: AnyReal) -> Real:
    """Return the dense output of a whole input (S, n, f), poolings as fragments: (S, n - field of view + 1, f')."""
    windows = [layer.window for layer in network.layers if isinstance(layer, Pool)]
    return recombine(_run(network, weights, x, dense=True), windows)


def dense_by_sliding(
    network: Network, weights: Sequence[ConvWeights], x: AnyReal, positions: Sequence[Vec3] | None = None
) -> Real:
    """Run the plain network on the field of view cropped at each position.

    x (S, n, f). Without `positions` returns the dense (S, n - field of view + 1, f'); with them (S, positions, f').
    """
    fov = network.field_of_view
    m = valid(_size(x), fov)
    every = list(product(*map(range, m)))
    voxels = [
        _run(network, weights, _window(x, at, fov), dense=False)[:, 0, 0, 0]
        for at in (every if positions is None else positions)
    ]
    out = np.stack(voxels, axis=1)
    return out.reshape(x.shape[0], *m, -1) if positions is None else out


def _run(network: Network, weights: Sequence[ConvWeights], x: AnyReal, *, dense: bool) -> Real:
    of_layer = dict(zip(network.weighted, weights, strict=True))
    y = x.astype(np.float64)
    for index, layer in enumerate(network.layers):
        match layer:
            case Conv():
                y = convolve(y, of_layer[index].weight, of_layer[index].bias, sliding_activation(layer))
            case Pool():
                y = fragments(y, layer.window) if dense else max_pool(y, layer.window)
            case MaxFilter():
                y = max_filter(y, layer.window)
            case Maxout():
                y = maxout(y, layer.of)
    return y


def _size(x: AnyReal) -> Vec3:
    return x.shape[1], x.shape[2], x.shape[3]


def _padded(x: AnyReal, padding: Vec3, value: float) -> Real:
    """Return x as float64 with `padding` planes of `value` before and after it along z, y and x."""
    around = ((0, 0), *((pad, pad) for pad in padding), (0, 0))
    return np.pad(x.astype(np.float64), around, constant_values=value)


def _window(x: AnyReal, at: tuple[int, ...], size: Vec3) -> AnyReal:
    z, y, x0 = at
    return x[:, z : z + size[0], y : y + size[1], x0 : x0 + size[2]]
