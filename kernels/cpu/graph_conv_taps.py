"""Convolution of a graph with any stride, dilation, groups and padding: matrix products by BLAS over gathered inputs.

Method   For a block of outputs that fits the cache, the inputs of each are gathered as a row (graph_columns.py) and
         multiplied by the kernels [taps x f'] straight into the output; bias and activation follow in place. Deep
         kernels are divided along z, y and x, and the products are summed up.
Memory   One block of inputs and one of rows per thread.
Bound    Compute: sgemm, plus the gather (taps * f floats an output, in cache).
Source   Zlateski, Lee, Seung, ZNNi (SC16), IV-A.1 (direct); lowering: Chellapilla, Puri, Simard 2006.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.activations import temporary_bytes
from znnpy.kernels.cpu.blas import product_bytes
from znnpy.kernels.cpu.ending import divided, end_block
from znnpy.kernels.cpu.epilogue import Epilogue, quiet
from znnpy.kernels.cpu.graph_columns import Taps, columns, is_by_tap, patch
from znnpy.kernels.cpu.graph_convs import why_not_upsampled
from znnpy.kernels.cpu.graph_layer import (
    GraphLayer,
    Kernels,
    block_at,
    block_counts,
    block_of,
    box,
    float_bytes,
    given,
    kernels_of,
    lines_of,
    why_not_kind,
)
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized, Vec3

BLOCK_BYTES = 1024 * 1024  # size of a worker's rows, which stay in L2 until BLAS has packed them
DEEP = 2048  # most floats of a row, if it can be divided between taps
CACHED = 3  # a copy within the cache is this many times faster than one that misses it
STRIDED = 1.8  # a copy of every second, third, ... float is this many times slower
RUN_FLOATS = 10  # floats copied in the time it takes to start a run


class _Blocks(NamedTuple):
    size: Vec3  # outputs of a block
    reads: Vec3  # voxels that a block of this size reads
    taps: Vec3  # taps of one product
    patch_bytes: int  # 0: blocks are read in place
    rows_bytes: int
    sums_bytes: int
    rounded_bytes: int  # in bf16: the outputs before they are rounded

    @property
    def worker_bytes(self) -> int:
        return self.patch_bytes + self.rows_bytes + self.sums_bytes + self.rounded_bytes


def _blocks(shape: GraphConvShape) -> _Blocks:
    kz, ky, kx = shape.k
    taps = kz, ky, kx
    if prod(taps) * shape.fin > DEEP:
        taps = max(1, DEEP // (ky * kx * shape.fin)), ky, kx
    if prod(taps) * shape.fin > DEEP:
        taps = 1, max(1, DEEP // (kx * shape.fin)), kx
    if prod(taps) * shape.fin > DEEP:
        taps = 1, 1, max(1, DEEP // shape.fin)
    row = prod(taps) * shape.fin
    m = shape.out
    size = block_of(m, max(1, BLOCK_BYTES // (FLOAT32 * row)))
    reads = _reads(shape, size)
    rounds = shape.precision == "bf16"
    copied = len(shape.fins) > 1 or shape.padded != shape.n or rounds
    outputs = prod(size)
    return _Blocks(
        size,
        reads,
        taps,
        float_bytes(prod(reads) * shape.fin) if copied else 0,
        float_bytes(outputs * row),
        float_bytes(outputs * shape.fout) if taps != shape.k else 0,
        float_bytes(outputs * shape.fout) if rounds else 0,
    )


def _reads(shape: GraphConvShape, size: Vec3) -> Vec3:
    """Return the voxels that a block of so many outputs reads."""
    z, y, x = (
        (m - 1) * stride + dilation * (k - 1) + 1
        for m, stride, dilation, k in zip(size, shape.stride, shape.dilation, shape.k, strict=True)
    )
    return z, y, x


def _products(shape: GraphConvShape, most: Vec3) -> Iterator[tuple[Vec3, Taps]]:
    """Yield the first tap and the taps of each product."""
    for first in product(*(range(0, k, step) for k, step in zip(shape.k, most, strict=True))):
        z, y, x = (min(step, k - at) for at, k, step in zip(first, shape.k, most, strict=True))
        from_place = first[0] * shape.dilation[0], first[1] * shape.dilation[1], first[2] * shape.dilation[2]
        yield (first[0], first[1], first[2]), Taps(from_place, (z, y, x), shape.dilation, shape.stride)


@dataclass(frozen=True, slots=True)
class GraphConvTaps(GraphLayer):
    """Convolution through sgemm: any stride, dilation, groups and padding."""

    name: str = "cpu.graph_conv.taps"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "any stride, dilation, groups and padding: matrix products per block, very little memory"
    source: str = "ZNNi IV-A.1; lowering after Chellapilla, Puri, Simard 2006"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, GraphConvShape, "convolutions of graphs", bf16=True) or why_not_upsampled(shape)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, GraphConvShape)
        b = _blocks(shape)
        workers = min(threads, prod(block_counts(shape.out, b.size)))
        inner, outer = prod(b.taps) * shape.fin // shape.groups, shape.fout // shape.groups
        library = product_bytes(inner, outer, FLOAT32) + temporary_bytes(shape.activation, shape.fout)
        return Footprint(
            resident=shape.weight_bytes + Epilogue.nbytes(shape.fout, "none", b.size[2]),
            scratch=(Scratch("blocks", workers * b.worker_bytes),),
            allowance=workers * library,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, GraphConvShape)
        b = _blocks(shape)
        voxels, row = float(prod(shape.out)), prod(shape.k) * shape.fin
        gathered = 2 * FLOAT32 * voxels * row / CACHED
        if is_by_tap(Taps((0, 0, 0), b.taps, shape.dilation, shape.stride), shape.fin, shape.groups):
            gathered *= STRIDED
        else:
            run = shape.fin // shape.groups * (shape.k[2] if shape.dilation[2] == 1 and shape.groups == 1 else 1)
            gathered *= 1 + RUN_FLOATS / run
        copied = 2 * FLOAT32 * prod(b.reads) * shape.fin * voxels / prod(b.size) if b.patch_bytes else 0.0
        return (
            Work("product", 2.0 * voxels * row * (shape.fout // shape.groups), 0.0),
            Work("copy", 0.0, gathered + copied + shape.in_bytes + shape.out_bytes),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Kernels:
        del variant, pool
        return kernels_of(weights, (2, 3, 4, 1, 0))

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, GraphConvShape), pool)


class _Step:
    def __init__(self, resident: Kernels, shape: GraphConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._blocks = shape, pool, _blocks(shape)
        self._products = [
            (taps, self._matrices(resident.kernels[box(first, taps.count)]))
            for first, taps in _products(shape, self._blocks.taps)
        ]
        self._epilogue = Epilogue(resident.bias, "none", self._blocks.size[2])

    def _matrices(self, kernels: Array) -> Array:
        """Return the kernels of some taps as matrices (groups, taps * f / groups, f' / groups): a view."""
        groups = self._shape.groups
        matrix = kernels.reshape(-1, kernels.shape[4], copy=False)
        return matrix.reshape(len(matrix), groups, -1, copy=False).transpose(1, 0, 2)

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, b, pool = self._shape, self._blocks, self._pool
        inputs, addend = divided(shape, inputs)
        stores = scratch["blocks"].reshape(-1, b.worker_bytes)

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                pool.check()
                first, size = block_at(unit, shape.out, b.size)
                block, store = box(first, size), stores[worker]
                target = out[block]
                if b.rounded_bytes:
                    target = np.ndarray(target.shape, np.float32, store, b.worker_bytes - b.rounded_bytes)
                self._compute(inputs, target, first, store)
                end_block(shape, None if addend is None else addend[block], target)
                if b.rounded_bytes:
                    out[block] = target

        pool.each(piece, prod(block_counts(shape.out, b.size)))

    def _compute(self, inputs: Sequence[Array], target: Array, first: Vec3, store: Bytes) -> None:
        """Compute the sums of a block that begins at `first`, with the bias."""
        shape, b = self._shape, self._blocks
        size = target.shape[0], target.shape[1], target.shape[2]
        z, y, x = (at * stride - before for at, stride, before in zip(first, shape.stride, shape.before, strict=True))
        voxels = patch(inputs, (z, y, x), _reads(shape, size), store)
        rows, sums = store[b.patch_bytes : b.patch_bytes + b.rows_bytes], store[b.patch_bytes + b.rows_bytes :]
        flat = target.reshape(-1, shape.fout, copy=False)
        total = flat
        for taps, matrices in self._products:
            gathered = columns(voxels, taps, size, shape.groups, rows)
            by_group = total.reshape(len(total), shape.groups, -1, copy=False).transpose(1, 0, 2)
            np.matmul(gathered, matrices, out=by_group)
            if total is flat:
                total = np.ndarray(flat.shape, np.float32, sums) if len(self._products) > 1 else flat
            else:
                np.add(flat, total, out=flat)
        lines = lines_of(target)
        self._epilogue(lines, lines)
