"""Norms over a whole image, and means and maxima of one, in numpy.

Method   Blocks of voxels that stay in the cache. The first pass finds the mean of each map of a block in float64, and
         the sum of squared deviations from it; blocks are joined by their means, so that no large numbers cancel. The
         second pass subtracts the mean, multiplies and adds. It subtracts a mean that float32 holds, and what that
         leaves out is part of the offset.
Memory   A block in float64 for each thread, and the moments of all blocks.
Bound    Memory: the input is read twice, the output is written once.
Exact    A maximum does not round. NaN in, NaN out; a norm counts what is not finite as an overflow.
Source   Chan, Golub and LeVeque 1979, Updating formulae and a pairwise algorithm for computing sample variances.
Tested   tests/kernels/cpu/test_graph_norm.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.graph_shapes import GlobalPoolShape, NormShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu.activations import activate_rows, temporary_bytes
from znnpy.kernels.cpu.epilogue import overflow, quiet
from znnpy.kernels.cpu.graph_layer import (
    NUMPY_BYTES,
    GraphLayer,
    WeightlessLayer,
    block_at,
    block_counts,
    block_of,
    box,
    given,
    why_not_kind,
)
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized, Vec3

Doubles = npt.NDArray[np.float64]

BLOCK_BYTES = 256 * 1024  # float32 of a block, which stays in L2
LEAST_VOXELS = 1024  # of a block: the moments of fewer would need much memory
FLOAT64 = 8  # bytes
SLOWER = 10.0  # times as long as copying: numpy goes over blocks again and again, and widens values to float64
COSTLY_BYTES = 40.0  # cost of a function other than relu for a value, in bytes that are moved in that time


class Terms(NamedTuple):
    """The terms by which a norm changes each map, in float32: (x - shift) * factor + offset."""

    shift: Array
    factor: Array
    offset: Array


class Resident(NamedTuple):
    """The weights of an affine norm."""

    weight: Array
    bias: Array


def joined(counts: Sequence[int], means: Doubles, deviations: Doubles) -> tuple[Doubles, Doubles]:
    """Return the mean of each map, and its sum of squared deviations, from those of parts: a row for each part.

    counts  voxels of each part
    """
    of_part = np.array(counts, np.float64)[:, None]
    mean = (means * of_part).sum(axis=0) / of_part.sum()
    return mean, deviations.sum(axis=0) + (of_part * np.square(means - mean)).sum(axis=0)


def terms(shape: NormShape, mean: Doubles, deviations: Doubles, weights: Resident | None) -> Terms:
    """Return what a norm does to each map, from the moments of maps; ValuesOverflowError if these are not finite."""
    voxels, each = prod(shape.n), shape.f // shape.groups
    of_group = mean.reshape(shape.groups, each)
    centre = of_group.mean(axis=1, keepdims=True)
    squares = deviations.reshape(shape.groups, each).sum(axis=1)
    squares = squares + voxels * np.square(of_group - centre).sum(axis=1)
    bad = int(np.count_nonzero(~np.isfinite(squares)))
    if bad:
        raise overflow(bad * each * voxels, shape.f * voxels)
    middle = np.repeat(centre[:, 0], each)
    factor = np.repeat(1 / np.sqrt(squares / (voxels * each) + shape.epsilon), each)
    offset = np.zeros(shape.f)
    if weights is not None:
        factor, offset = factor * weights.weight, weights.bias.astype(np.float64)
    shift = middle.astype(np.float32)
    return Terms(shift, factor.astype(np.float32), (offset - (middle - shift) * factor).astype(np.float32))


def resident_bytes(shape: NormShape) -> int:
    """Return the most bytes of a norm's weights."""
    return 2 * FLOAT32 * shape.f if shape.affine else 0


class NormLayer(GraphLayer):
    """The common part of the primitives of norms: weights are used as they are."""

    __slots__ = ()

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident | None:
        del variant, pool
        return None if weights is None else Resident(weights.weight, weights.bias)


class _Blocks:
    """The blocks of an image."""

    def __init__(self, n: Vec3, f: int) -> None:
        self._n = n
        self._size = block_of(n, max(LEAST_VOXELS, BLOCK_BYTES // (FLOAT32 * f)))
        self.count = prod(block_counts(n, self._size))
        self.values = prod(self._size) * f
        self.moments_bytes = 2 * FLOAT64 * f * self.count

    def voxels(self, unit: int) -> int:
        """Return the voxels of a block."""
        return prod(block_at(unit, self._n, self._size)[1])

    def each(self, pool: ThreadPool, work: Callable[[int, tuple[slice, slice, slice]], None]) -> None:
        """Call work(number, place) for every block."""

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for unit in range(lo, hi):
                pool.check()
                work(unit, box(*block_at(unit, self._n, self._size)))

        pool.each(piece, self.count)


@dataclass(frozen=True, slots=True)
class NormLines(NormLayer):
    """Norms over a whole image."""

    name: str = "cpu.norm.lines"
    kind: Kind = "norm"
    version: int = 1
    summary: str = "norms over a whole image"
    source: str = "Chan, Golub and LeVeque 1979"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, NormShape, "norms over a whole image", bf16=True)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, NormShape)
        blocks = _Blocks(shape.n, shape.f)
        each = NUMPY_BYTES + 2 * FLOAT64 * blocks.values + temporary_bytes(shape.activation, shape.f)
        return Footprint(
            resident=resident_bytes(shape),
            allowance=min(threads, blocks.count) * each + 3 * blocks.moments_bytes + 16 * FLOAT64 * shape.f,
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, NormShape)
        costly = 0.0 if shape.activation in ("none", "relu") else COSTLY_BYTES * prod(shape.out_shape)
        return (Work("copy", 0.0, SLOWER * (2.0 * shape.in_bytes + shape.out_bytes) + costly),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _NormStep:
        del variant
        return _NormStep(resident, given(shape, NormShape), pool)


class _NormStep:
    def __init__(self, resident: Resident | None, shape: NormShape, pool: ThreadPool) -> None:
        self._resident, self._shape, self._pool = resident, shape, pool

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        del scratch
        shape, x = self._shape, inputs[0]
        blocks = _Blocks(shape.n, shape.f)
        means, deviations = np.empty((2, blocks.count, shape.f))

        def find(unit: int, place: tuple[slice, slice, slice]) -> None:
            block = x[place].astype(np.float64)
            means[unit] = block.mean(axis=(0, 1, 2))
            block -= means[unit]
            deviations[unit] = np.square(block, out=block).sum(axis=(0, 1, 2))

        blocks.each(self._pool, find)
        with quiet():
            moments = joined([blocks.voxels(unit) for unit in range(blocks.count)], means, deviations)
            each_map = terms(shape, *moments, self._resident)

        def normalise(unit: int, place: tuple[slice, slice, slice]) -> None:
            del unit
            target = out[place]
            found = target if target.dtype == np.float32 else np.empty(target.shape, np.float32)
            np.subtract(x[place], each_map.shift, out=found)
            found *= each_map.factor
            found += each_map.offset
            bad = found.size - int(np.count_nonzero(np.isfinite(found)))
            if bad:
                raise overflow(bad, found.size)
            activate_rows(shape.activation, shape.parameters, found.reshape(-1, shape.f, copy=False))
            if found is not target:
                target[...] = found

        blocks.each(self._pool, normalise)


@dataclass(frozen=True, slots=True)
class GlobalPoolLines(WeightlessLayer):
    """The mean or the maximum of each map over a whole image."""

    name: str = "cpu.global_pool.lines"
    kind: Kind = "global_pool"
    version: int = 1
    summary: str = "means and maxima over a whole image"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, GlobalPoolShape, "means and maxima over a whole image", bf16=True)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, GlobalPoolShape)
        blocks = _Blocks(shape.n, shape.f)
        each = NUMPY_BYTES + 2 * FLOAT64 * blocks.values
        return Footprint(allowance=min(threads, blocks.count) * each + blocks.moments_bytes)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        return (Work("copy", 0.0, SLOWER * given(shape, GlobalPoolShape).in_bytes),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _PoolStep:
        del resident, variant
        return _PoolStep(given(shape, GlobalPoolShape), pool)


class _PoolStep:
    def __init__(self, shape: GlobalPoolShape, pool: ThreadPool) -> None:
        self._shape, self._pool = shape, pool

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        del scratch
        shape, x = self._shape, inputs[0]
        blocks = _Blocks(shape.n, shape.f)
        found = np.empty((blocks.count, shape.f))

        def find(unit: int, place: tuple[slice, slice, slice]) -> None:
            block = x[place].astype(np.float64)
            found[unit] = block.max(axis=(0, 1, 2)) if shape.how == "max" else block.sum(axis=(0, 1, 2))

        blocks.each(self._pool, find)
        with quiet():
            out[0, 0, 0] = found.max(axis=0) if shape.how == "max" else found.sum(axis=0) / prod(shape.n)
