"""Apply the functions of graphs to blocks of values that are in the cache, in place.

Method   Numpy, on pieces so small that all temporaries stay in L1 and L2. The erf of a gelu is a quotient of
         polynomials (XLA, Eigen), and the error of a gelu at most 2e-7 of |x|.
Memory   ROWS_BYTES a thread.
Tested   tests/kernels/cpu/test_graph_activations.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.cpu.epilogue import quiet
from znnpy.layers import DEFAULT_PARAMETERS, Function
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array
    from znnpy.kernels.thread_pool import ThreadPool

PIECE = 2**13  # values processed at a time
ROWS_BYTES = 6 * FLOAT32 * PIECE  # most bytes of temporaries, per thread; softmax of many maps has a voxel as its piece
BLOCK_BYTES = 256 * 1024  # output processed between two checks of the stop flag
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
# Quotient of odd and even polynomials for erf between -4 and 4, from the highest power down.
ERF_ABOVE = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
ERF_BELOW = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip


def temporary_bytes(function: Function, maps: int) -> int:
    """Return the most bytes that `activate_rows` allocates for voxels of so many maps."""
    return max(ROWS_BYTES, 3 * FLOAT32 * maps) if function not in ("none", "relu") else 0


def activate_graph(function: Function, parameters: Sequence[float], out: Array, pool: ThreadPool) -> None:
    """Apply a function to all of `out` (z, y, x, f), in C order, in place."""
    if function == "none":
        return
    voxels = out.reshape(-1, out.shape[-1], copy=False)
    block = max(1, BLOCK_BYTES // (FLOAT32 * voxels.shape[1]))

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for unit in range(lo, hi):
            pool.check()
            activate_rows(function, parameters, voxels[unit * block : (unit + 1) * block])

    pool.each(piece, -(-len(voxels) // block))


def activate_rows(function: Function, parameters: Sequence[float], voxels: Array) -> None:
    """Apply a function in place to voxels (count, f) in C order."""
    if function == "none":
        return
    parameters = parameters or DEFAULT_PARAMETERS.get(function, ())
    with quiet():
        if function == "softmax":
            step = max(1, PIECE // voxels.shape[1])
            for first in range(0, len(voxels), step):
                _softmax(voxels[first : first + step])
            return
        values = voxels.reshape(-1, copy=False)
        for first in range(0, values.size, PIECE):
            _apply(function, parameters, values[first : first + PIECE])


def _apply(function: Function, parameters: Sequence[float], x: Array) -> None:
    """Apply a function of each value to a piece, in place."""
    match function:
        case "relu":
            np.maximum(x, np.zeros_like(x), out=x)  # six times as fast as with a scalar
        case "leaky_relu":
            np.copyto(x, x * np.float32(parameters[0]), where=x < 0)
        case "elu":
            np.copyto(x, np.expm1(x) * np.float32(parameters[0]), where=x < 0)
        case "selu":
            np.copyto(x, np.expm1(x) * np.float32(SELU_ALPHA), where=x < 0)
            x *= np.float32(SELU_SCALE)
        case "gelu":
            x *= (_erf(x * np.float32(0.5**0.5)) + np.float32(1)) * np.float32(0.5)
        case "gelu_tanh":
            inner = (x * x * np.float32(0.044715) + np.float32(1)) * x
            x *= (np.tanh(inner * np.float32((2 / np.pi) ** 0.5)) + np.float32(1)) * np.float32(0.5)
        case "silu":
            x *= _sigmoid(x)
        case "softplus":
            x[...] = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, np.float32(0))
        case "sigmoid":
            x[...] = _sigmoid(x)
        case "tanh":
            np.tanh(x, out=x)
        case "hardswish":
            x *= np.clip(x + np.float32(3), np.float32(0), np.float32(6)) * np.float32(1 / 6)
        case "clip":
            np.clip(x, np.float32(parameters[0]), np.float32(parameters[1]), out=x)
        case "prelu":
            raise ValueError("a prelu has weights: it is a layer of its own")
        case "none" | "softmax":
            pass


def _sigmoid(x: Array) -> Array:
    values = np.exp(-x)
    values += np.float32(1)
    return np.reciprocal(values, out=values)


def _erf(x: Array) -> Array:
    """Return erf with an error of at most 3e-7."""
    x = np.clip(x, np.float32(-4), np.float32(4))
    square = x * x
    above, below = np.full_like(x, ERF_ABOVE[0]), np.full_like(x, ERF_BELOW[0])
    for sums, factors in ((above, ERF_ABOVE), (below, ERF_BELOW)):
        for factor in factors[1:]:
            sums *= square
            sums += np.float32(factor)
    return np.asarray(x * above / below, np.float32)


def _softmax(voxels: Array) -> None:
    np.subtract(voxels, voxels.max(axis=-1, keepdims=True), out=voxels)
    np.exp(voxels, out=voxels)
    np.divide(voxels, voxels.sum(axis=-1, keepdims=True), out=voxels)
