"""Hold what the direct convolutions of graphs in compiled code have in common: kernels in panels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ALIGNMENT, Footprint, Scratch
from znnpy.kernels.cpu.graph_calls import compute_units
from znnpy.kernels.cpu.graph_layer import float_bytes
from znnpy.kernels.cpu.native.library import LANES, blocks
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.graph_shapes import GraphConvShape, TransposeShape
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool

ENDING_TAPS = 12  # taps that take as long as starting and ending a block of outputs
MOST_TAPS = 2048  # over all inputs, as in strided.cpp and transpose.cpp
CALL_BYTES = 2**17  # Python memory and stack of calls into the library, per worker
CALL_FLOPS = 10e9  # per call into the library; the stop flag is checked between calls


class Panels(NamedTuple):
    """The kernels in the order they are read."""

    kernels: Array  # panel by panel (z, y, x, f, lane)
    bias: Array  # padded to whole panels


def panels_of(weights: ConvWeights | None, axes: tuple[int, int, int, int, int]) -> Panels:
    """Return the panels of kernels; `axes` are those of the weights that are (z, y, x, f, f')."""
    assert weights is not None
    kernels, bias = weights.weight.transpose(axes), weights.bias
    fout, count = len(bias), blocks(len(bias))
    inner = kernels.shape[:4]
    store = aligned_bytes(FLOAT32 * prod(inner) * count * LANES).view(np.float32)
    store[...] = 0
    padded = np.zeros(LANES * count, np.float32)
    padded[:fout] = bias
    for panel, block in enumerate(store.reshape(count, *inner, LANES)):
        maps = kernels[..., panel * LANES : (panel + 1) * LANES]
        block[..., : maps.shape[4]] = maps
    return Panels(store, padded)


def lane_count(shape: GraphConvShape | TransposeShape) -> int:
    """Return the channels of all panels, those that are empty too."""
    return LANES * blocks(shape.fout)


def panels_footprint(shape: GraphConvShape | TransposeShape, threads: int) -> Footprint:
    """Return the memory of a convolution with its kernels in panels and a line of outputs for each thread."""
    workers = min(threads, shape.out[0] * shape.out[1])
    return Footprint(
        resident=FLOAT32 * lane_count(shape) * (shape.fin * prod(shape.k) + 1),
        scratch=(Scratch("lines", workers * _line_bytes(shape)),),
        allowance=ALIGNMENT + workers * CALL_BYTES,
    )


def _line_bytes(shape: GraphConvShape | TransposeShape) -> int:
    return float_bytes(shape.out[2] * lane_count(shape))


def compute_lines(
    function: Callable[..., int],
    arguments: ctypes.Structure,
    shape: GraphConvShape | TransposeShape,
    taps: int,
    out: Array,
    scratch: Mapping[str, Bytes],
    pool: ThreadPool,
) -> None:
    """Call a function of the library for all lines of outputs, whose voxels sum so many taps of each map."""
    line_flops = 2.0 * shape.out[2] * lane_count(shape) * shape.fin * taps
    most = max(1, int(CALL_FLOPS // line_flops))
    buffers = scratch["lines"].reshape(-1, _line_bytes(shape))
    compute_units(function, arguments, shape.out[0] * shape.out[1], most, out, pool, buffers)
