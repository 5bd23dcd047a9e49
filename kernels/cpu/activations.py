"""Apply the functions of graphs to blocks of values that are in the cache, in place.

Method   Numpy, on pieces so small that all temporaries stay in L1 and L2. Compiled, where the library is: a
         vector at a time.
Exact    The error of gelu, gelu_tanh, silu and hardswish is at most 2e-7 of |x|, of the others 3e-7 of the result.
Memory   ROWS_BYTES a thread.
Tested   tests/kernels/cpu/test_graph_activations.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.cpu.epilogue import quiet
from znnpy.kernels.cpu.native.library import library, why_not
from znnpy.layers import DEFAULT_PARAMETERS, FUNCTIONS, Function
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array
    from znnpy.kernels.thread_pool import ThreadPool

PIECE = 2**13  # values processed at a time
ROWS_BYTES = 6 * FLOAT32 * PIECE  # most bytes of temporaries, per thread; softmax of many maps has a voxel as its piece
BLOCK_BYTES = 256 * 1024  # output processed between two checks of the stop flag
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
# Upper tail of the normal distribution at x >= 0: exp(-x^2 / 2) * t * (TAIL[0] + TAIL[1] t + ..), t = 1 / (1 + 0.35 x);
# the relative error is 3e-8 before rounding, also in activations.hpp.
TAIL_SCALE = 0.35
TAIL = (
    0.13962140679359436, 0.13986174762248993, 0.11983375251293182, 0.10550432652235031, -0.02310061827301979,
    0.15915991365909576, -0.255700945854187, 0.14396481215953827, -0.029144419357180595,
)  # fmt: skip


def temporary_bytes(function: Function, maps: int) -> int:
    """Return the most bytes that `activate_rows` allocates for voxels of so many maps."""
    return max(ROWS_BYTES, 4 * FLOAT32 * maps) if function not in ("none", "relu") else 0


def code_of(function: Function) -> int:
    """Return the number by which the library knows a function."""
    return FUNCTIONS.index(function)


def parameters_of(function: Function, parameters: Sequence[float]) -> tuple[float, float]:
    """Return two parameters of a function: those given, else the usual ones, and zeros where it has none."""
    a, b = (*(parameters or DEFAULT_PARAMETERS.get(function, ())), 0.0, 0.0)[:2]
    return a, b


@cache
def compiled() -> bool:
    """Return whether the compiled functions run here."""
    return why_not(this_machine()) is None


def activate_graph(function: Function, parameters: Sequence[float], out: Array, pool: ThreadPool) -> None:
    """Apply a function to all of `out` (z, y, x, f), float32 or bfloat16 in C order, in place."""
    if function == "none":
        return
    voxels = out.reshape(-1, out.shape[-1], copy=False)
    block = max(1, BLOCK_BYTES // (out.itemsize * voxels.shape[1]))

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for unit in range(lo, hi):
            pool.check()
            activate_rows(function, parameters, voxels[unit * block : (unit + 1) * block])

    pool.each(piece, -(-len(voxels) // block))


def activate_rows(function: Function, parameters: Sequence[float], voxels: Array) -> None:
    """Apply a function in place to voxels (count, f), float32 or bfloat16 in C order: compiled, if the library is."""
    if function == "none":
        return
    if compiled() and function != "prelu":
        a, b = map(ctypes.c_double, parameters_of(function, parameters))
        count, maps, bf16 = map(ctypes.c_int64, (*voxels.shape, voxels.dtype != np.float32))
        address = ctypes.c_void_p(voxels.ctypes.data)
        library(this_machine().simd).znnpy_activate(ctypes.c_int64(code_of(function)), a, b, address, count, maps, bf16)
        return
    if voxels.dtype != np.float32:
        step = max(1, PIECE // 2 // voxels.shape[1])  # a copy, and temporaries of its size
        for first in range(0, len(voxels), step):
            rows = voxels[first : first + step].astype(np.float32)
            activate_rows(function, parameters, rows)
            voxels[first : first + step] = rows
        return
    parameters = parameters_of(function, parameters)
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
            beyond = x * _tail(np.abs(x))  # of the mass of a normal distribution
            np.subtract(x, beyond, out=beyond, where=x > 0)
            x[...] = beyond
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


def _tail(x: Array) -> Array:
    """Return the upper tail of the normal distribution at x >= 0."""
    t = np.reciprocal(x * np.float32(TAIL_SCALE) + np.float32(1))
    total = np.full_like(t, TAIL[-1])
    for factor in TAIL[-2::-1]:
        total *= t
        total += np.float32(factor)
    total *= t
    total *= np.exp(x * x * np.float32(-0.5))
    return np.asarray(total)


def _softmax(voxels: Array) -> None:
    np.subtract(voxels, voxels.max(axis=-1, keepdims=True), out=voxels)
    np.exp(voxels, out=voxels)
    np.divide(voxels, voxels.sum(axis=-1, keepdims=True), out=voxels)
