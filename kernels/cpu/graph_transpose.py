"""Transposed convolution by matrix products: one for all outputs that read the same inputs.

Method   Along an axis the outputs j with equal (j + first) mod stride, a phase, are a convolution with every so many-th
         tap. Phases whose taps read the same inputs share one product [voxels, taps * f] x [taps * f, phases * f'];
         where the kernel is as large as the stride, this is a single product without any gather. Bias and activation
         are applied to the product, and each phase is then written to its outputs: compiled, where the library is and
         there are no groups, line by line, and large outputs past the caches.
Memory   The kernels in the order of the products; one block of inputs, rows and products per thread.
Bound    Compute: sgemm; with few maps memory.
Source   Dumoulin, Visin, A guide to convolution arithmetic for deep learning, 2016; Shi et al. 2016 (sub-pixel).
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import TransposeShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.cpu.activations import (
    activate_rows,
    code_of,
    compiled,
    parameters_of,
    temporary_bytes,
)
from znnpy.kernels.cpu.blas import product_bytes
from znnpy.kernels.cpu.epilogue import Epilogue, overflow, quiet
from znnpy.kernels.cpu.graph_calls import is_bf16, is_past
from znnpy.kernels.cpu.graph_columns import Taps, columns, patch
from znnpy.kernels.cpu.graph_layer import (
    GraphLayer,
    Kernels,
    block_at,
    block_counts,
    block_of,
    float_bytes,
    given,
    kernels_of,
    why_not_kind,
)
from znnpy.kernels.cpu.native.library import library
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized, Vec3

BLOCK_BYTES = 1024 * 1024  # size of a worker's rows and products
MIN_VOXELS = 32  # fewest rows of a product: below it, reading the kernels limits the speed
CACHED = 3  # a copy within the cache is this many times faster than one that misses it
RUN_FLOATS = 10  # floats copied in the time it takes to start a run


class _Axis(NamedTuple):
    """Phases along an axis whose taps read the same inputs: in[q + offset], in[q + offset + step], .."""

    phases: tuple[int, ...]
    taps: tuple[tuple[int, ...], ...]  # of each phase, in the order of the inputs
    offset: int
    step: int


def _axes(k: int, stride: int, dilation: int) -> tuple[_Axis, ...]:
    """Return the phases along an axis, joined where they read the same inputs."""
    joined: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for phase in range(stride):
        taps = tuple(d for d in range(k) if (d * dilation - phase) % stride == 0)
        offsets = tuple((phase - d * dilation) // stride for d in taps)
        joined.setdefault(offsets, []).append((phase, taps))
    return tuple(
        _Axis(
            tuple(phase for phase, _ in members),
            tuple(taps for _, taps in members),
            offsets[0] if offsets else 0,
            offsets[1] - offsets[0] if len(offsets) > 1 else 1,
        )
        for offsets, members in joined.items()
    )


@dataclass(frozen=True, slots=True)
class _Product:
    """One product for some phases along each axis."""

    axes: tuple[_Axis, _Axis, _Axis]
    taps: Taps
    phases: Vec3
    kernel: int  # first float of its matrices in the kernels

    @property
    def count(self) -> int:
        return prod(self.taps.count)


class _Blocks(NamedTuple):
    places: Vec3  # places q = (j + first) // stride of all outputs
    origin: Vec3  # the first of them
    size: Vec3  # places of a block
    low: Vec3  # from a place to the first voxel that it reads
    reach: Vec3  # voxels that one place reads
    products: tuple[_Product, ...]
    patch_bytes: int
    rows_bytes: int
    sums_bytes: int
    line_bytes: int  # a line of outputs, for compiled code

    @property
    def worker_bytes(self) -> int:
        return self.patch_bytes + self.rows_bytes + self.sums_bytes + self.line_bytes


def _blocks(shape: TransposeShape) -> _Blocks:
    by_axis = [_axes(k, s, d) for k, s, d in zip(shape.k, shape.stride, shape.dilation, strict=True)]
    offsets = [[a.offset + a.step * tap for a in axes for tap in range(len(a.taps[0]))] or [0] for axes in by_axis]
    low = min(offsets[0]), min(offsets[1]), min(offsets[2])
    reach = max(offsets[0]) - low[0] + 1, max(offsets[1]) - low[1] + 1, max(offsets[2]) - low[2] + 1
    products, kernel = [], 0
    for axes in product(*by_axis):
        z, y, x = axes
        taps = Taps(
            (z.offset - low[0], y.offset - low[1], x.offset - low[2]),
            (len(z.taps[0]), len(y.taps[0]), len(x.taps[0])),
            (z.step, y.step, x.step),
            (1, 1, 1),
        )
        phases = len(z.phases), len(y.phases), len(x.phases)
        products.append(_Product((z, y, x), taps, phases, kernel))
        kernel += prod(taps.count) * prod(phases) * shape.fin * (shape.fout // shape.groups)
    origin = tuple(first // stride for first, stride in zip(shape.first, shape.stride, strict=True))
    pz, py, px = (
        (m - 1 + first) // stride - at + 1
        for m, first, stride, at in zip(shape.m, shape.first, shape.stride, origin, strict=True)
    )
    row = max(p.count for p in products) * shape.fin
    sums = max(prod(p.phases) for p in products) * shape.fout
    size = block_of((pz, py, px), max(MIN_VOXELS, BLOCK_BYTES // (FLOAT32 * (row + sums))))
    voxels = prod(size)
    read = prod(m + r - 1 for m, r in zip(size, reach, strict=True))
    return _Blocks(
        (pz, py, px),
        (origin[0], origin[1], origin[2]),
        size,
        low,
        reach,
        tuple(products),
        float_bytes(read * shape.fin),
        float_bytes(voxels * row),
        float_bytes(voxels * sums),
        float_bytes(size[2] * shape.stride[2] * shape.fout) if _ends_compiled(shape) else 0,
    )


def _ends_compiled(shape: TransposeShape) -> bool:
    """Return whether compiled code adds the bias, applies the function and writes the outputs."""
    return shape.groups == 1 and compiled()


class _Phases(ctypes.Structure):
    """The arguments of a call: struct Phases in phases.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64 * 3) for name in ("size", "count", "m", "stride")),
        *((name, ctypes.c_int64) for name in ("fout", "side_by_side", "function")),
        *((name, ctypes.c_double) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("past", "bf16")),
        ("first", ctypes.c_void_p * 3),
        *((name, ctypes.c_void_p) for name in ("product", "bias", "out")),
    )


@dataclass(frozen=True, slots=True)
class TransposePhases(GraphLayer):
    """Transposed convolution through sgemm, phase by phase."""

    name: str = "cpu.conv_transpose.phases"
    kind: Kind = "conv_transpose"
    version: int = 1
    summary: str = "any kernel, stride, dilation and groups: matrix products per block"
    source: str = "Dumoulin, Visin 2016; Shi et al. 2016"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, TransposeShape, "transposed convolutions", bf16=True)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, TransposeShape)
        b = _blocks(shape)
        workers = min(threads, prod(block_counts(b.places, b.size)))
        columns_most = max(prod(p.phases) for p in b.products) * shape.fout // shape.groups
        rows_most = max(p.count for p in b.products) * shape.fin // shape.groups
        library = product_bytes(rows_most, columns_most, FLOAT32) + temporary_bytes(shape.activation, shape.fout)
        library += FLOAT32 * prod(b.size) * shape.fout if shape.activation == "softmax" else 0  # a phase
        epilogues = sum(Epilogue.nbytes(shape.fout * prod(p.phases), "none", b.size[2]) for p in b.products)
        return Footprint(
            resident=shape.weight_bytes + epilogues,
            scratch=(
                Scratch("kernels", float_bytes(shape.weight_bytes // FLOAT32)),
                Scratch("blocks", workers * b.worker_bytes),
            ),
            allowance=workers * library,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, TransposeShape)
        b = _blocks(shape)
        places = float(prod(b.places))
        row = shape.fin // shape.groups
        products = sum(2.0 * places * p.count * row * prod(p.phases) * shape.fout for p in b.products)
        gathered = sum(2 * FLOAT32 * places * p.count * shape.fin for p in b.products if p.count > 1) / CACHED
        gathered *= 1 + RUN_FLOATS / row
        written = shape.out_bytes * (1 + 2 / CACHED) * (1 + RUN_FLOATS / shape.fout)
        return (
            Work("product", products, 0.0),
            Work("copy", 0.0, gathered + written + shape.in_bytes + 2.0 * shape.weight_bytes),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Kernels:
        del variant, pool
        return kernels_of(weights, (2, 3, 4, 0, 1))

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, TransposeShape), pool)


class _Step:
    def __init__(self, resident: Kernels, shape: TransposeShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._weight, self._blocks = shape, pool, resident.kernels, _blocks(shape)
        self._bias = resident.bias
        by_group = resident.bias.reshape(shape.groups, 1, -1)
        self._epilogues = [
            Epilogue(np.tile(by_group, (1, prod(p.phases), 1)).reshape(-1), "none", self._blocks.size[2])
            for p in self._blocks.products
        ]

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        b, pool = self._blocks, self._pool
        stores = scratch["blocks"].reshape(-1, b.worker_bytes)
        kernels = scratch["kernels"].view(np.float32)
        matrices = [self._matrices(p, kernels[p.kernel :]) for p in b.products]

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            for unit in range(lo, hi):
                pool.check()
                first, size = block_at(unit, b.places, b.size)
                self._compute(inputs, out, (first, size), matrices, stores[worker])

        pool.each(piece, prod(block_counts(b.places, b.size)))

    def _matrices(self, p: _Product, store: Array) -> Array:
        """Return the kernels of a product (groups, taps * f / groups, phases * f' / groups), written to `store`."""
        shape = self._shape
        fin, fout = shape.fin // shape.groups, shape.fout // shape.groups
        size = shape.groups, *p.taps.count, fin, *p.phases, fout
        kernels = store[: prod(size)].reshape(size)
        weight = self._weight.reshape(*shape.k, shape.groups, fin, fout)
        for at in np.ndindex(p.phases):
            z, y, x = (axis.taps[phase] for axis, phase in zip(p.axes, at, strict=True))
            for tap in np.ndindex(p.taps.count):
                of_tap = weight[z[tap[0]], y[tap[1]], x[tap[2]]]
                kernels[:, tap[0], tap[1], tap[2], :, at[0], at[1], at[2]] = of_tap
        return kernels.reshape(shape.groups, p.count * fin, prod(p.phases) * fout)

    def _compute(
        self, inputs: Sequence[Array], out: Array, places: tuple[Vec3, Vec3], matrices: Sequence[Array], store: Bytes
    ) -> None:
        """Compute all phases of a block of places."""
        shape, b = self._shape, self._blocks
        first, size = places
        place = first[0] + b.origin[0], first[1] + b.origin[1], first[2] + b.origin[2]
        low = place[0] + b.low[0], place[1] + b.low[1], place[2] + b.low[2]
        reads = size[0] + b.reach[0] - 1, size[1] + b.reach[1] - 1, size[2] + b.reach[2] - 1
        voxels = patch(inputs, low, reads, store)
        rows, sums = store[b.patch_bytes : b.patch_bytes + b.rows_bytes], store[b.patch_bytes + b.rows_bytes :]
        bad = 0
        for p, matrix, epilogue in zip(b.products, matrices, self._epilogues, strict=True):
            total = np.ndarray((prod(size), shape.groups, matrix.shape[2]), np.float32, sums)
            if p.count:
                np.matmul(columns(voxels, p.taps, size, shape.groups, rows), matrix, out=total.transpose(1, 0, 2))
            else:
                total[...] = 0
            if _ends_compiled(shape):
                bad += self._end(p, total, out, (place, size), store[b.worker_bytes - b.line_bytes :])
                continue
            lines = total.reshape(*size[:2], -1, copy=False)
            epilogue(lines, lines)
            if shape.activation != "softmax":
                activate_rows(shape.activation, shape.parameters, total.reshape(len(total), -1, copy=False))
            self._scatter(p, total.reshape(*size, shape.groups, *p.phases, -1, copy=False), out, place)
        if bad:
            raise overflow(bad, prod(size) * prod(shape.stride) * shape.fout)

    def _end(self, p: _Product, total: Array, out: Array, places: tuple[Vec3, Vec3], line: Bytes) -> int:
        """Add the bias, apply the function and write the outputs; return how many are not finite."""
        shape = self._shape
        place, size = places
        a, b = parameters_of(shape.activation, shape.parameters)
        first = [
            np.array([at * s + phase - begin for phase in axis.phases], np.int64)
            for at, s, axis, begin in zip(place, shape.stride, p.axes, shape.first, strict=True)
        ]
        phases = _Phases(
            fout=shape.fout,
            side_by_side=p.phases[2] == shape.stride[2],
            function=code_of(shape.activation),
            a=a,
            b=b,
            past=is_past(shape),
            bf16=is_bf16(shape),
            product=total.ctypes.data,
            bias=self._bias.ctypes.data,
            out=out.ctypes.data,
        )
        phases.size[:], phases.count[:], phases.m[:], phases.stride[:] = size, p.phases, shape.m, shape.stride
        phases.first[:] = [of_axis.ctypes.data for of_axis in first]
        ends = library(this_machine().simd).znnpy_phases
        return int(ends(ctypes.byref(phases), ctypes.c_void_p(line.ctypes.data)))

    def _scatter(self, p: _Product, total: Array, out: Array, place: Vec3) -> None:
        """Write the phases (z, y, x, groups, phases, f' / groups) to their outputs, if there are such."""
        shape = self._shape
        targets = out.reshape(*shape.m, shape.groups, -1, copy=False)
        for at in np.ndindex(p.phases):
            source, target = [], []
            for axis in range(3):
                stride, m = shape.stride[axis], shape.m[axis]
                j = place[axis] * stride + p.axes[axis].phases[at[axis]] - shape.first[axis]
                skipped = max(0, -(j // stride))
                count = min(total.shape[axis], -(-(m - j) // stride))
                source.append(slice(skipped, max(skipped, count)))
                target.append(slice(j + skipped * stride, m, stride))
            part = total[(*source, slice(None), *at)]
            if shape.activation == "softmax":  # a voxel's maps are apart in the product of groups
                rows = part.reshape(-1, shape.fout, copy=True)
                activate_rows(shape.activation, shape.parameters, rows)
                part = rows.reshape(part.shape)
            z, y, x = target
            np.copyto(targets[z, y, x][: part.shape[0], : part.shape[1], : part.shape[2]], part)
