"""The last pass of every convolution: bias, activation, and a look at whether the values are still finite.

Works on blocks that are in the cache, row by row of whole voxels, without temporaries of the block's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from znnpy.errors import ValuesOverflowError

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array
    from znnpy.shapes import Activation


class Finish:
    """Bias and activation of one layer, for rows of up to `width` voxels."""

    def __init__(self, bias: Array, activation: Activation, width: int) -> None:
        self._maps = len(bias)
        self._bias = np.tile(bias, width)  # one add over a whole row is many times faster than one a voxel
        self._activation = activation

    def __call__(self, source: Array, out: Array) -> None:
        """out = activation(source + bias).

        source, out  (..., voxels * f') float32, the last axis contiguous, at most `width` voxels; may be one array.
                     Call it under `quiet()`: overflow is looked for here, not by numpy.

        Raises ValuesOverflowError when a value is infinite or not a number before the activation hides it.
        """
        np.add(source, self._bias[: source.shape[-1]], out=out)
        # A sum is one cheap pass; only when it is not finite (it may also overflow by itself) every value is looked at.
        if not np.isfinite(np.add.reduce(out, axis=None)):
            bad = out.size - int(np.count_nonzero(np.isfinite(out)))
            if bad:
                raise ValuesOverflowError(
                    f"{bad} of {out.size} values of a block became infinite or not a number in float32; "
                    "check the weights and that the input is normalised as in training"
                )
        _ACTIVATE[self._activation](out, self._maps)


def quiet() -> np.errstate:
    """A context or decorator in which overflow passes silently: `Finish` finds it; an exp that overflows is meant to."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def _none(rows: Array, maps: int) -> None:
    del rows, maps


def _relu(rows: Array, maps: int) -> None:
    del maps
    np.maximum(rows, np.float32(0), out=rows)


def _tanh(rows: Array, maps: int) -> None:
    del maps
    np.tanh(rows, out=rows)


def _sigmoid(rows: Array, maps: int) -> None:
    del maps
    np.negative(rows, out=rows)
    np.exp(rows, out=rows)
    np.add(rows, np.float32(1), out=rows)
    np.reciprocal(rows, out=rows)


def _softmax(rows: Array, maps: int) -> None:
    voxels = rows.reshape(*rows.shape[:-1], -1, maps, copy=False)
    np.subtract(voxels, voxels.max(axis=-1, keepdims=True), out=voxels)
    np.exp(voxels, out=voxels)
    np.divide(voxels, voxels.sum(axis=-1, keepdims=True), out=voxels)


_ACTIVATE = {"none": _none, "relu": _relu, "tanh": _tanh, "sigmoid": _sigmoid, "softmax": _softmax}
