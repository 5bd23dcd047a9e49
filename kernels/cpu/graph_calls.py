"""Hold what the primitives of graphs in compiled code have in common: calls for some units at a time, bytes moved."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from znnpy.kernels.cpu.epilogue import overflow
from znnpy.kernels.cpu.native.library import STREAM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.shapes import Sized


def compute_units(
    function: Callable[..., int | None],
    arguments: ctypes.Structure,
    units: int,
    most: int,
    out: Array,
    pool: ThreadPool,
    buffers: Bytes | None = None,
    least: int = 1,
) -> None:
    """Call a function of the library for all units; ValuesOverflowError if it counts results that are not finite.

    function   takes the arguments, a worker's buffer if there are any, the first unit and the one behind the last
    most       units of a call; the stop flag is checked between calls
    buffers    one row for each worker
    least      units that are worth the cost of giving them to a thread
    """
    bad = [0] * pool.threads

    def piece(lo: int, hi: int, worker: int) -> None:
        buffer = () if buffers is None else (ctypes.c_void_p(buffers[worker].ctypes.data),)
        for first in range(lo, hi, most):
            pool.check()
            last = ctypes.c_int64(min(hi, first + most))
            bad[worker] += function(ctypes.byref(arguments), *buffer, ctypes.c_int64(first), last) or 0

    pool.each(piece, units, least=least)
    if sum(bad):
        raise overflow(sum(bad), out.size)


def pitches(x: Array) -> list[int]:
    """Return the values from one voxel of an image to the next along each axis."""
    return [stride // x.itemsize for stride in x.strides[:3]]


def is_bf16(shape: Sized) -> bool:
    """Return whether a layer's inputs and output are bfloat16, as structures of the library say it."""
    return shape.precision == "bf16"


def is_past(shape: Sized) -> bool:
    """Return whether outputs are written past the caches."""
    return shape.out_bytes > STREAM_BYTES


def moved_bytes(shape: Sized) -> int:
    """Return the bytes that are moved: an output that is written through the caches is read first."""
    return shape.in_bytes + shape.out_bytes * (1 if is_past(shape) else 2) + 2 * shape.pooled_bytes
