"""Direct convolution by its definition (ZNNi algorithm 1), one output map of one image after the other.

Method   Workers take output maps of the batch. For each plane of a map they add up, tap by tap, the weighted sum over
         input maps. Bias and activation follow at the end, over whole voxels.
Memory   The least of all primitives: two planes of one map for each worker.
Bound    Reading the input k^3 fout times, at best from the cache.
Source   Zlateski, Lee, Seung, ZNNi (SC16), IV-A.1, algorithm 1.
Tested   tests/kernels/cpu/test_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_fp32, why_not_plain
from znnpy.kernels.cpu.epilogue import Epilogue, apply_epilogue, quiet
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import FLOAT32, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine

# Costs as bytes of traffic, fitted to 1 to 80 maps, k = 3 and 5, on 2 Zen 5 cores (2026-11-21): per sum over input
# maps, per input map, per line of sums and per plane of sums.
SUM_BYTES, MAP_BYTES, LINE_BYTES, PLANE_BYTES = 20.0, 2.5, 500.0, 25_000.0


class _Resident(NamedTuple):
    kernels: Array  # (fout, kz, ky, kx, fin)
    bias: Array


@dataclass(frozen=True, slots=True)
class ConvDirectNaive:
    """Direct convolution, parallel over the batch and the output maps: the baseline for the others."""

    name: str = "cpu.conv.direct_naive"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "baseline for comparisons: the definition, tap by tap"
    source: str = "ZNNi IV-A.1 (algorithm 1)"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        del machine
        return why_not_fp32(shape) or why_not_plain(shape)

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant
        shape = as_conv(shape)
        return Footprint(
            resident=shape.weight_bytes + Epilogue.nbytes(shape.fout, shape.activation, shape.out[2]),
            scratch=(Scratch("planes", threads * 2 * FLOAT32 * prod(shape.out[1:])),),
            allowance=threads * 2**16,  # numpy's buffers
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_conv(shape)
        sums = float(prod(shape.out_shape) * prod(shape.k))
        _, my, mx = shape.out
        nbytes = SUM_BYTES + MAP_BYTES * shape.fin + LINE_BYTES / mx + PLANE_BYTES / (my * mx)
        return (Work("copy", 2.0 * sums * shape.fin, sums * nbytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> _Resident:
        del variant, pool
        assert weights is not None
        return _Resident(np.ascontiguousarray(weights.weight.transpose(0, 2, 3, 4, 1)), weights.bias)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: ThreadPool) -> _Step:
        del variant
        return _Step(resident, as_conv(shape), pool)


class _Step:
    def __init__(self, resident: _Resident, shape: ConvShape, pool: ThreadPool) -> None:
        self._shape, self._pool, self._kernels = shape, pool, resident.kernels
        self._epilogue = Epilogue(resident.bias, shape.activation, shape.out[2])

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape, pool, kernels = self._shape, self._pool, self._kernels
        mz, my, mx = shape.out
        planes = scratch["planes"].view(np.float32).reshape(pool.threads, 2, my, mx)

        @quiet()
        def piece(lo: int, hi: int, worker: int) -> None:
            total, term = planes[worker]
            for unit in range(lo, hi):
                s, j = divmod(unit, shape.fout)
                for z in range(mz):
                    total[...] = 0
                    for dz, dy, dx in product(*map(range, shape.k)):
                        pool.check()
                        np.matmul(x[s, z + dz, dy : dy + my, dx : dx + mx], kernels[j, dz, dy, dx], out=term)
                        np.add(total, term, out=total)
                    out[s, z, :, :, j] = total

        pool.each(piece, shape.batch * shape.fout)
        apply_epilogue(self._epilogue, out, pool)
