"""Array operations of networks on numpy arrays; convolutions may have strides and padding.

`znnpy.ops` checks and documents the arguments. Arrays are float32 or float16 of any strides, computed in float32.

Method   Arrays are processed in pieces of BLOCK values in float32, which stay in the cache. Convolutions are products
         of BLAS: direct adds up one per tap; implicit_gemm computes one per piece, from a lowered matrix of that piece
         alone.
Memory   A few pieces for arrays of any size; a piece is at least a line of the output along x, with its taps.
Source   Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3.
Tested   tests/kernels/cpu/test_ops.py
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from znnpy.kernels.cpu.epilogue import activate_rows, quiet

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.shapes import Activation, Sliding, Vec3

Values: TypeAlias = npt.NDArray[Any]  # float32 or float16
Floats: TypeAlias = npt.NDArray[np.float32]
BLOCK = 1 << 18  # values of a piece: 1 MiB of float32


@quiet()
def pointwise(activation: Activation, x: Values, out: Values) -> None:
    """Compute out = activation(x), value by value; out may be x."""
    zeros = np.zeros(BLOCK, np.float32)  # numpy is many times faster on rows than with a scalar
    with np.nditer(
        [x, out],
        ["external_loop", "buffered", "zerosize_ok"],
        [["readonly"], ["writeonly"]],
        op_dtypes=[np.float32, np.float32],
        casting="same_kind",
        buffersize=BLOCK,
    ) as pieces:
        for source, target in pieces:
            if activation == "relu":
                np.maximum(source, zeros[: len(source)], out=target)
            else:
                target[...] = source
                activate_rows(activation, target, 1)


@quiet()
def softmax(x: Values, out: Values, *, over_maps: bool) -> None:
    """Apply softmax over the maps of each voxel, or over all values of an image; out may be x."""
    for source, target in zip(x, out, strict=True):
        if over_maps:
            for part in _lines(source):
                rows = np.array(source[part], np.float32, order="C")
                activate_rows("softmax", rows.reshape(len(rows), -1), x.shape[-1])
                target[part] = rows
            continue
        largest = np.float32(source.max())
        total = sum(
            float(np.exp(source[part] - largest, dtype=np.float32).sum(dtype=np.float64)) for part in _lines(x[0])
        )
        for part in _lines(source):
            target[part] = np.exp(source[part] - largest, dtype=np.float32) / np.float32(total)


@quiet()
def pool(
    x: Values,
    out: Values,
    window: Vec3,
    sliding: Sliding,
    how: Literal["max", "average"],
    *,
    counts_padding: bool,
) -> None:
    """Compute the maximum or the mean over the part of each window inside the image."""
    start, combine = (-np.inf, np.maximum) if how == "max" else (0.0, np.add)
    counts = np.ones((1, 1, 1), np.float32)
    if how == "average":
        z, y, x_counts = (_counts(x, out, window, sliding, axis, whole=counts_padding) for axis in range(3))
        counts = z[:, None, None] * y[:, None] * x_counts
    for s, z0, rows in _planes(out):
        values = np.full(out[s, z0, rows].shape, start, np.float32)
        for (source, at), _ in _taps(x[s], out.shape[1:4], window, sliding, z0, rows):
            combine(values[at], source, out=values[at], dtype=np.float32)
        out[s, z0, rows] = values if how == "max" else values / counts[z0, rows, :, None]


def copy(x: Values, out: Values) -> None:
    """Compute out = x for equal shapes and any strides; values are rounded to out's type."""
    with quiet():
        np.copyto(out, x, casting="same_kind")


@quiet()
def convolve(
    x: Values,
    out: Values,
    weights: ConvWeights,
    sliding: Sliding,
    activation: Activation,
    method: Literal["direct", "implicit_gemm"],
) -> None:
    """Compute the cross-correlation with zeros around the image, bias and activation."""
    k: Vec3 = weights.weight.shape[2], weights.weight.shape[3], weights.weight.shape[4]
    taps = np.ascontiguousarray(weights.weight.transpose(2, 3, 4, 1, 0).reshape(-1, *weights.weight.shape[1::-1]))
    held = taps.shape[1] * (len(taps) if method == "implicit_gemm" else 1)  # values per voxel, besides the result
    for s, z, rows in _planes(out, out.shape[3] * held):
        shape = out[s, z, rows].shape
        around = _taps(x[s], out.shape[1:4], k, sliding, z, rows)
        if method == "direct":
            values = np.zeros(shape, np.float32)
            for (source, at), tap in around:
                values[at] += np.ascontiguousarray(source, np.float32) @ taps[tap]
        else:
            lowered = np.zeros((*shape[:2], len(taps), taps.shape[1]), np.float32)
            for (source, at), tap in around:
                lowered[(*at, tap)] = source
            values = (lowered.reshape(-1, held) @ taps.reshape(held, -1)).reshape(shape)
        values += weights.bias
        if activation == "relu":
            np.maximum(values, np.float32(0), out=values)
        activate_rows(activation, values.reshape(len(values), -1), shape[-1])
        out[s, z, rows] = values


def _lines(image: Values) -> Iterator[tuple[int, slice]]:
    """Yield the pieces (z, lines along y) of an image."""
    lines = max(1, BLOCK // max(1, image.shape[2] * image.shape[3]))
    for z in range(image.shape[0]):
        for y in range(0, image.shape[1], lines):
            yield z, slice(y, y + lines)


def _planes(out: Values, line: int = 0) -> Iterator[tuple[int, int, slice]]:
    """Yield the pieces (image, z, lines along y) of `out`: up to BLOCK values, if a line counts as `line` values."""
    lines = max(1, BLOCK // max(1, line, out.shape[3] * out.shape[4]))
    for s, z in product(range(out.shape[0]), range(out.shape[1])):
        for y in range(0, out.shape[2], lines):
            yield s, z, slice(y, min(y + lines, out.shape[2]))


def _taps(
    image: Values, m: tuple[int, ...], k: Vec3, sliding: Sliding, z: int, rows: slice
) -> Iterator[tuple[tuple[Values, tuple[slice, slice]], int]]:
    """Yield for each tap its view of `image`, the range within the piece (z, rows) of the output, and its number."""
    for tap, (dz, dy, dx) in enumerate(product(*map(range, k))):
        plane = z * sliding.stride[0] + dz - sliding.padding[0]
        if not 0 <= plane < len(image):
            continue
        from_y, to_y = _inside(image.shape[1], rows.start, rows.stop, dy, sliding, 1)
        from_x, to_x = _inside(image.shape[2], 0, m[2], dx, sliding, 2)
        if to_y.start < to_y.stop and to_x.start < to_x.stop:
            yield (image[plane, from_y, from_x], (to_y, to_x)), tap


def _inside(n: int, first: int, end: int, d: int, sliding: Sliding, axis: int) -> tuple[slice, slice]:
    """Return the range in the image and in the piece of the positions first .. end whose tap `d` lies in the image."""
    step, offset = sliding.stride[axis], d - sliding.padding[axis]
    low = max(first, -(offset // step))
    high = max(low, min(end, (n - 1 - offset) // step + 1))
    start = low * step + offset
    return slice(start, start + (high - low) * step, step), slice(low - first, high - first)


def _counts(x: Values, out: Values, window: Vec3, sliding: Sliding, axis: int, *, whole: bool) -> Floats:
    """Return the number of values that each window along an axis has in the image; if `whole`, the window's size."""
    starts = np.arange(out.shape[1 + axis]) * sliding.stride[axis] - sliding.padding[axis]
    inside = np.minimum(starts + window[axis], x.shape[1 + axis]) - np.maximum(starts, 0)
    return np.where(whole, window[axis], inside).astype(np.float32)
