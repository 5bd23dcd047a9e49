"""The epilogue of every convolution: bias, activation, and a check that all values are finite.

It works on blocks that are in the cache, on rows of whole voxels, without temporaries of the block's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from znnpy.errors import ValuesOverflowError
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from collections.abc import Callable

    from znnpy.kernels.contract import Array
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.shapes import Activation

LINES_BYTES = 256 * 1024  # lines processed at once, which stay in L2


class Epilogue:
    """Bias and activation of one layer, for rows of up to `width` voxels."""

    def __init__(self, bias: Array, activation: Activation, width: int) -> None:
        self._maps = len(bias)
        # Whole rows: numpy is many times faster on them than on a few maps or with a scalar (maximum with 0: six
        # times).
        self._bias = np.tile(bias, width)
        self._ones = np.ones_like(self._bias)
        self._zeros = np.zeros_like(self._bias) if activation == "relu" else self._ones
        self._activation = activation

    @staticmethod
    def nbytes(maps: int, activation: Activation, width: int) -> int:
        """Return the bytes of the rows it keeps."""
        return FLOAT32 * maps * width * (3 if activation == "relu" else 2)

    def __call__(self, source: Array, out: Array) -> None:
        """Compute out = activation(source + bias).

        source, out  (..., voxels * f') float32, the last axis contiguous, at most `width` voxels; may be one array.
                     Call it under `quiet()`: overflow is detected here, not by numpy.

        Raises ValuesOverflowError if a value is infinite or not a number before the activation hides it.
        """
        length = source.shape[-1]
        np.add(source, self._bias[:length], out=out)
        # The sums of rows are one cheap pass of BLAS; only if one is not finite (it may overflow by itself) check every
        # value.
        if not np.isfinite(np.matmul(out, self._ones[:length])).all():
            bad = out.size - int(np.count_nonzero(np.isfinite(out)))
            if bad:
                raise overflow(bad, out.size)
        if self._activation == "relu":
            np.maximum(out, self._zeros[:length], out=out)
        else:
            activate_rows(self._activation, out, self._maps)


def overflow(bad: int, size: int) -> ValuesOverflowError:
    """Return the error for `bad` of `size` values."""
    return ValuesOverflowError(
        f"{bad} of {size} values of a block became infinite or not a number in float32; "
        "check the weights and that the input is normalised as in training"
    )


def apply_epilogue(epilogue: Epilogue, out: Array, pool: ThreadPool) -> None:
    """Apply `epilogue` to every voxel of `out` (S, z, y, x, f') in place: for methods that compute one map at a time.

    epilogue  the epilogue for rows of x voxels.
    """
    _each_block(lambda rows: epilogue(rows, rows), out, pool)


def activate_rows(activation: Activation, rows: Array, maps: int) -> None:
    """Apply tanh, sigmoid or softmax in place to rows of whole voxels of `maps` channels; others change nothing.

    Call it under `quiet()`.
    """
    match activation:
        case "tanh":
            np.tanh(rows, out=rows)
        case "sigmoid":
            _sigmoid(rows)
        case "softmax":
            _softmax(rows.reshape(*rows.shape[:-1], -1, maps, copy=False))
        case "none" | "relu":
            pass


def activate_output(activation: Activation, out: Array, pool: ThreadPool) -> None:
    """Apply `activate_rows` to all of `out` (S, z, y, x, f') in place; softmax by lines, to keep temporaries small."""
    if activation not in ("none", "relu"):
        most = 0 if activation == "softmax" else LINES_BYTES
        _each_block(lambda rows: activate_rows(activation, rows, out.shape[-1]), out, pool, most)


def _each_block(work: Callable[[Array], None], out: Array, pool: ThreadPool, most: int = LINES_BYTES) -> None:
    """Call `work` on parts (lines, x * f') of `out` (S, z, y, x, f') of up to `most` bytes, at least a line."""
    batch, mz, my, mx, fout = out.shape
    lines = max(1, most // (FLOAT32 * mx * fout))
    parts = -(-my // lines)

    @quiet()
    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for unit in range(lo, hi):
            pool.check()
            rest, part = divmod(unit, parts)
            s, z = divmod(rest, mz)
            rows = out[s, z, part * lines : (part + 1) * lines]
            work(rows.reshape(len(rows), -1, copy=False))

    pool.each(piece, batch * mz * parts)


def quiet() -> np.errstate:
    """Return a context or decorator that silences overflow: `Epilogue` detects it, and an exp may well overflow."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def _sigmoid(values: Array) -> None:
    np.negative(values, out=values)
    np.exp(values, out=values)
    np.add(values, np.float32(1), out=values)
    np.reciprocal(values, out=values)


def _softmax(voxels: Array) -> None:
    """Apply softmax over the last axis, in place."""
    np.subtract(voxels, voxels.max(axis=-1, keepdims=True), out=voxels)
    np.exp(voxels, out=voxels)
    np.divide(voxels, voxels.sum(axis=-1, keepdims=True), out=voxels)
