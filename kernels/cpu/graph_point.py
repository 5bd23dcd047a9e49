"""Layers that take their inputs voxel by voxel: sums, products, concatenations, scales, functions alone.

Method   Blocks of voxels that stay in the cache until the function that follows has been applied.
Memory   None but temporaries of a piece of a block.
Bound    Memory: the inputs are read once, the output is written once.
Source   Definition.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import PointShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu.activations import activate_rows, temporary_bytes
from znnpy.kernels.cpu.epilogue import overflow, quiet
from znnpy.kernels.cpu.graph_layer import (
    NUMPY_BYTES,
    GraphLayer,
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

BLOCK_BYTES = 256 * 1024  # output of a block, which stays in L2
COSTLY_BYTES = 40.0  # cost of a function other than relu for a value, in bytes that are moved in that time


def _block(shape: PointShape) -> Vec3:
    return block_of(shape.n, max(1, BLOCK_BYTES // (FLOAT32 * shape.f)))


class Resident(NamedTuple):
    """The weights of a scale or a prelu."""

    weight: Array  # factors or slopes
    bias: Array


def resident_bytes(shape: PointShape) -> int:
    """Return the most bytes of a layer's weights."""
    return 2 * FLOAT32 * shape.f if shape.how == "scale" or shape.activation == "prelu" else 0


class PointLayer(GraphLayer):
    """The common part of the primitives of layers voxel by voxel: weights are used as they are."""

    __slots__ = ()

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Resident | None:
        del variant, pool
        return None if weights is None else Resident(weights.weight, weights.bias)


@dataclass(frozen=True, slots=True)
class PointLines(PointLayer):
    """Sums, products, concatenations, scales, and functions of each value."""

    name: str = "cpu.point.lines"
    kind: Kind = "point"
    version: int = 1
    summary: str = "sums, products, concatenations, scales and functions, voxel by voxel"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, PointShape, "layers voxel by voxel", bf16=True)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = given(shape, PointShape)
        block = _block(shape)
        workers = min(threads, prod(block_counts(shape.n, block)))
        block_bytes = FLOAT32 * prod(block) * shape.f
        slopes = 2 * block_bytes if shape.activation == "prelu" else 0
        rounded = 2 * block_bytes if shape.precision == "bf16" else 0  # the output, and an input
        return Footprint(
            resident=resident_bytes(shape),
            allowance=workers * (NUMPY_BYTES + temporary_bytes(shape.activation, shape.f) + slopes + rounded),
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, PointShape)
        costly = 0.0 if shape.activation in ("none", "relu") else COSTLY_BYTES * prod(shape.out_shape)
        return (Work("copy", 0.0, shape.in_bytes + shape.out_bytes + costly),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, given(shape, PointShape), pool)


class _Step:
    def __init__(self, resident: Resident | None, shape: PointShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._resident = shape, pool, resident

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        del scratch
        shape, pool = self._shape, self._pool
        size, rounds = _block(shape), shape.precision == "bf16"

        inputs = [np.broadcast_to(part, (*shape.n, part.shape[3])) for part in inputs]

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for unit in range(lo, hi):
                pool.check()
                block = box(*block_at(unit, shape.n, size))
                found = np.empty(out[block].shape, np.float32) if rounds else out[block]
                self._compute([part[block] for part in inputs], found)
                if rounds:
                    out[block] = found

        pool.each(piece, prod(block_counts(shape.n, size)))

    def _compute(self, inputs: Sequence[Array], out: Array) -> None:
        shape = self._shape
        match shape.how:
            case "add" | "multiply":
                join = np.add if shape.how == "add" else np.multiply
                join(inputs[0], inputs[1], out=out, dtype=np.float32)
                for other in inputs[2:]:
                    join(out, other, out=out)
            case "concat":
                first = 0
                for part in inputs:
                    out[..., first : first + part.shape[3]] = part
                    first += part.shape[3]
            case "scale":
                assert self._resident is not None
                np.multiply(inputs[0], self._resident.weight, out=out)
                out += self._resident.bias
            case "function":
                out[...] = inputs[0]
        if shape.how in ("add", "multiply", "scale"):
            bad = out.size - int(np.count_nonzero(np.isfinite(out)))
            if bad:
                raise overflow(bad, out.size)
        if shape.activation == "prelu":
            assert self._resident is not None
            np.copyto(out, out * self._resident.weight, where=out < 0)
        else:
            activate_rows(shape.activation, shape.parameters, out.reshape(-1, shape.f, copy=False))
