"""Convert raw voxels to the input of a network, and its output to the dtype that is written, on a processor."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels.thread_pool import ThreadPool, min_chunk
from znnpy.network import Normalise
from znnpy.run.backend import Voxels, input_overflow, output_overflow
from znnpy.shapes import FLOAT32

Array = npt.NDArray[Any]  # float32, or bfloat16 in bf16

BLOCK_BYTES = 2**18  # values that a thread converts at a time


def load_voxels(raw: Voxels, x: Any, normalise: Normalise | None, pool: ThreadPool) -> None:
    """Normalise raw voxels (c, z, y, x) of any real dtype and strides into `x` (z, y, x, c), float32 or bfloat16.

    A thread takes a few rows at a time where it needs memory for them, so that it holds no more than BLOCK_BYTES, or a
    row, besides.
    """
    wide = raw.dtype.itemsize > 2 and raw.dtype != np.float32  # float32 would round before the mean is subtracted
    dtype = np.float64 if wide else np.float32
    rows = max(1, BLOCK_BYTES // (FLOAT32 * x.shape[2])) if x.dtype != np.float32 else x.shape[1]

    def normalised(source: Voxels, target: Array, channel: int) -> None:
        if normalise is None:
            np.copyto(target, source, casting="unsafe")
            return
        mean, std = dtype(normalise.mean[channel]), dtype(normalise.std[channel])
        wanted = target if x.dtype == np.float32 else np.empty(target.shape, np.float32)
        np.subtract(source, mean, out=wanted, dtype=dtype, casting="unsafe")
        np.divide(wanted, np.float32(std), out=wanted)
        if wanted is not target:
            np.copyto(target, wanted, casting="unsafe")

    @np.errstate(over="raise")
    def piece(lo: int, hi: int, worker: int) -> None:
        for channel in range(raw.shape[0]):
            if rows == x.shape[1]:
                normalised(raw[channel, lo:hi], x[lo:hi, ..., channel], channel)
                continue
            for plane in range(lo, hi):
                for first in range(0, x.shape[1], rows):
                    there = slice(first, first + rows)
                    normalised(raw[channel, plane, there], x[plane, there, :, channel], channel)

    try:
        pool.each(piece, x.shape[0], least=min_chunk(x.nbytes, x.shape[0]))
    except FloatingPointError:
        raise input_overflow(raw) from None


def store_voxels(image: Array, out: Voxels, pool: ThreadPool) -> None:
    """Convert an image (z, y, x, maps) to the dtype of `out` (maps, z, y, x), whose strides may be any.

    float32 and float16 are rounded; uint8 is `round(255 * clip(x, 0, 1))`. A thread takes a few rows at a time, so that
    it holds no more than BLOCK_BYTES, or a row, besides.
    """

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        store_image(image[lo:hi], out[:, lo:hi])

    pool.each(piece, image.shape[0], least=min_chunk(image.nbytes, image.shape[0]))


def store_image(image: Array, out: Voxels) -> None:
    """Convert an image (z, y, x, maps) to the dtype of `out` (maps, z, y, x); see `store_voxels`.

    Float32 is copied at once unless `out` is uint8; else some planes or rows are converted at a time.
    """
    plane_bytes = FLOAT32 * max(1, prod(image.shape[1:]))
    if image.dtype == np.float32 and out.dtype != np.uint8:
        _convert(image, out)
    elif plane_bytes <= BLOCK_BYTES:
        planes = BLOCK_BYTES // plane_bytes
        for first in range(0, image.shape[0], planes):
            _convert(image[first : first + planes], out[:, first : first + planes])
    else:
        rows = max(1, BLOCK_BYTES // (FLOAT32 * prod(image.shape[2:])))
        for plane in range(image.shape[0]):
            for first in range(0, image.shape[1], rows):
                there = slice(first, first + rows)
                _convert(image[plane : plane + 1, there], out[:, plane : plane + 1, there])


def _convert(image: Array, out: Voxels) -> None:
    values = image.astype(np.float32, copy=False)
    if out.dtype == np.uint8:
        values = np.clip(values, 0, 1)
        np.multiply(values, np.float32(255), out=values)
        np.rint(values, out=values)
    try:
        with np.errstate(over="raise"):
            np.copyto(out, np.moveaxis(values, 3, 0), casting="unsafe")
    except FloatingPointError:
        raise output_overflow(float(np.abs(values).max()), out.dtype) from None
