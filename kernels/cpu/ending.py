"""Hold what follows the sums of a layer of a graph: an addend, and a function of each value.

Method   Compiled kernels end results while they are in the cache, with `Ending`. Where numpy or another primitive
         computes the sums, `end_graph` does the rest by blocks that stay in L2.
Tested   tests/kernels/cpu/test_graph_addend.py
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from znnpy.kernels.cpu.activations import activate_rows, code_of, parameters_of, temporary_bytes
from znnpy.kernels.cpu.epilogue import overflow, quiet
from znnpy.kernels.cpu.graph_calls import is_bf16, is_past, pitches
from znnpy.kernels.cpu.graph_layer import NUMPY_BYTES, block_at, block_counts, block_of, box
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.graph_shapes import GraphConvShape, TransposeShape
    from znnpy.kernels.contract import Array
    from znnpy.kernels.thread_pool import ThreadPool

BLOCK_BYTES = 256 * 1024  # output that is ended at once, which stays in L2


class Addend(ctypes.Structure):
    """An array that is added to the results: struct Addend in ending.hpp."""

    _fields_ = (("x", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("plane", "row", "voxel")))


class Ending(ctypes.Structure):
    """An addend and a function, which follow the sums: struct Ending in ending.hpp."""

    _fields_ = (
        ("function", ctypes.c_int64),
        ("a", ctypes.c_double),
        ("b", ctypes.c_double),
        ("past", ctypes.c_int64),
        ("bf16", ctypes.c_int64),
        ("addend", Addend),
    )


def ending_of(shape: GraphConvShape | TransposeShape, addend: Array | None = None) -> Ending:
    """Return what follows the sums of a layer."""
    a, b = parameters_of(shape.activation, shape.parameters)
    found = Ending(code_of(shape.activation), a, b, is_past(shape), is_bf16(shape))
    if addend is not None:
        found.addend = Addend(addend.ctypes.data, *pitches(addend))
    return found


def divided(shape: GraphConvShape, inputs: Sequence[Array]) -> tuple[Sequence[Array], Array | None]:
    """Return the inputs of a convolution, and its addend if it has one."""
    return (inputs[:-1], inputs[-1]) if shape.addend else (inputs, None)


def ending_bytes(shape: GraphConvShape, threads: int) -> int:
    """Return the most bytes that `end_graph` allocates."""
    return threads * (NUMPY_BYTES + temporary_bytes(shape.activation, shape.fout))


def end_graph(shape: GraphConvShape, addend: Array | None, out: Array, pool: ThreadPool) -> None:
    """Add the addend to all of `out` (z, y, x, f), in C order, and apply the function, in place."""
    if addend is None and shape.activation == "none":
        return
    size = block_of(shape.out, max(1, BLOCK_BYTES // (FLOAT32 * shape.fout)))

    @quiet()
    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for unit in range(lo, hi):
            pool.check()
            block = box(*block_at(unit, shape.out, size))
            end_block(shape, None if addend is None else addend[block], out[block])

    pool.each(piece, prod(block_counts(shape.out, size)))


def end_block(shape: GraphConvShape, addend: Array | None, out: Array) -> None:
    """Do what `end_graph` does for whole lines of the output. Call it under `quiet()`."""
    if addend is not None:
        np.add(out, addend, out=out)
        bad = out.size - int(np.count_nonzero(np.isfinite(out)))
        if bad:
            raise overflow(bad, out.size)
    activate_rows(shape.activation, shape.parameters, out.reshape(-1, shape.fout, copy=False))
