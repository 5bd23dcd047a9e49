"""Add the results of windows, times their weights, to sums, and divide these by the sums of the weights."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels.cpu.native.library import library, why_not
from znnpy.machine import this_machine

Array = npt.NDArray[Any]

BLOCK_BYTES = 2**17  # of products that a thread holds at a time


class _Blend(ctypes.Structure):
    """The arguments of a call: struct Blend in blend.hpp."""

    _fields_ = (
        ("n", ctypes.c_int64 * 2),
        *(
            (name, ctypes.c_int64)
            for name in (
                "maps",
                *(f"{array}_{step}" for array in ("sums", "values", "weights") for step in ("row", "voxel")),
                "bf16",
            )
        ),
        ("share", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("sums", "values", "weights")),
    )


class _Mean(ctypes.Structure):
    """The arguments of a call: struct BlendedMean in blend.hpp."""

    _fields_ = (
        ("n", ctypes.c_int64 * 2),
        ("maps", ctypes.c_int64),
        *((f"{array}_{step}", ctypes.c_int64) for array in ("sums", "totals") for step in ("row", "voxel")),
        *((f"out_{step}", ctypes.c_int64) for step in ("map", "row", "voxel")),
        *((name, ctypes.c_void_p) for name in ("sums", "totals", "out")),
    )


def add_weighted(sums: Array, values: Array, weights: npt.NDArray[np.float32], share: float = 1.0) -> None:
    """Add `values * weights * share` to sums, in compiled code where it is there and sums are float32.

    sums     (y, x, maps) float32 or float16, with the maps of a voxel next to each other; products are added in
             float32, and sums rounded
    values   (y, x, maps) float32 or bfloat16, with the maps of a voxel next to each other
    weights  (y, x) float32, any strides
    """
    if sums.dtype == np.float32 and why_not(this_machine()) is None:
        _compiled(sums, values, weights, share)
    else:
        add_in_numpy(sums, values, weights, share)


def _compiled(sums: Array, values: Array, weights: npt.NDArray[np.float32], share: float) -> None:
    height, width, maps = sums.shape
    for array in (values, sums):
        assert maps == 1 or array.strides[2] == array.itemsize, "the maps of a voxel are next to each other"
    call = _Blend(
        (ctypes.c_int64 * 2)(height, width),
        maps,
        *(stride // 4 for stride in sums.strides[:2]),
        *(stride // values.itemsize for stride in values.strides[:2]),
        *(stride // 4 for stride in weights.strides),
        values.dtype != np.float32,
        share,
        *(array.ctypes.data for array in (sums, values, weights)),
    )
    library(this_machine().simd).znnpy_blend(ctypes.byref(call))


def add_in_numpy(sums: Array, values: Array, weights: npt.NDArray[np.float32], share: float = 1.0) -> None:
    """Do what `add_weighted` does, some rows at a time."""
    rows = max(1, BLOCK_BYTES // (4 * max(1, values.shape[1] * values.shape[2])))
    for first in range(0, values.shape[0], rows):
        part = slice(first, first + rows)
        products = np.multiply(values[part], weights[part, :, None] * np.float32(share), dtype=np.float32)
        with np.errstate(over="ignore"):  # sums in float16 that are not finite are found when they are taken
            np.add(sums[part], products, out=sums[part], dtype=np.float32, casting="unsafe")


def write_mean(sums: Array, totals: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
    """Write `sums / totals`, map by map, in compiled code where it is there.

    sums    (y, x, maps) float32, with the maps of a voxel next to each other
    totals  (y, x) float32, any strides
    out     (maps, y, x) float32, any strides
    """
    if why_not(this_machine()) is not None:
        np.divide(np.moveaxis(sums, 2, 0), totals, out=out)
        return
    height, width, maps = sums.shape
    assert maps == 1 or sums.strides[2] == 4, "the maps of a voxel are next to each other"
    call = _Mean(
        (ctypes.c_int64 * 2)(height, width),
        maps,
        *(stride // 4 for stride in (*sums.strides[:2], *totals.strides, *out.strides)),
        *(array.ctypes.data for array in (sums, totals, out)),
    )
    library(this_machine().simd).znnpy_blended_mean(ctypes.byref(call))
