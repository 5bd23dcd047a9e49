"""Padding with zeros, mirrored voxels or the nearest voxels.

Method   Along each axis a table says which voxel of the input an output is. Each plane of outputs is copied where
         neighbours come from neighbours, one copy of whole lines for the interior, and line by line or voxel by voxel
         on its rim.
Memory   The tables.
Bound    Memory: a copy.
Source   Definition; reflect and replicate as in PyTorch and ONNX.
Tested   tests/kernels/cpu/test_graph_operators.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from znnpy.graph_shapes import PadShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.cpu.graph_layer import NUMPY_BYTES, WeightlessLayer, given, why_not_kind

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring outputs along an axis: copies of neighbours, of voxels in reverse order, of one voxel, or zeros."""

    begin: int
    count: int
    source: int  # voxel of the first output
    step: int  # 1, -1 or 0
    zeros: bool


def _runs(shape: PadShape, axis: int) -> list[_Run]:
    """Divide an axis into what lies before the volume, in it, and behind it."""
    first, m, low, high = shape.first[axis], shape.m[axis], shape.low[axis], shape.high[axis]
    begin, end = min(m, max(0, low - first)), min(m, max(0, high - first))
    zeros = shape.how == "zeros"
    before, behind = low, high - 1
    if shape.how == "reflect":
        before, behind = 2 * low - first, 2 * (high - 1) - (end + first)
    step = -1 if shape.how == "reflect" else 0
    parts = [
        _Run(0, begin, before, step, zeros),
        _Run(begin, end - begin, begin + first, 1, False),
        _Run(end, m - end, behind, step, zeros),
    ]
    return [part for part in parts if part.count > 0]


def _source(run: _Run) -> slice:
    """Return the voxels of a run as a slice; a run of one voxel has only this one."""
    if run.step == 0:
        return slice(run.source, run.source + 1)
    end = run.source + run.step * run.count
    return slice(run.source, end if end >= 0 else None, run.step)


@dataclass(frozen=True, slots=True)
class PadCopy(WeightlessLayer):
    """Padding with zeros, mirrored voxels or the nearest voxels."""

    name: str = "cpu.pad.copy"
    kind: Kind = "pad"
    version: int = 1
    summary: str = "zeros, mirrored or nearest voxels around an image"
    source: str = "definition"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        del machine
        return why_not_kind(shape, PadShape, "paddings", bf16=True)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant
        return Footprint(allowance=min(threads, given(shape, PadShape).m[0]) * NUMPY_BYTES)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        del variant
        shape = given(shape, PadShape)
        return (Work("copy", 0.0, 2.0 * shape.out_bytes),)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        del resident, variant
        return _Step(given(shape, PadShape), pool)


class _Step:
    def __init__(self, shape: PadShape, pool: ThreadPool) -> None:
        self._shape, self._pool = shape, pool
        self._planes, self._lines, self._voxels = (_runs(shape, axis) for axis in range(3))

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        del scratch
        pool, x = self._pool, inputs[0]

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(lo, hi):
                pool.check()
                run = next(run for run in self._planes if run.begin <= z < run.begin + run.count)
                if run.zeros:
                    out[z] = 0
                else:
                    self._plane(x[run.source + run.step * (z - run.begin)], out[z])

        pool.each(piece, self._shape.m[0])

    def _plane(self, x: Array, out: Array) -> None:
        for lines in self._lines:
            for voxels in self._voxels:
                target = out[lines.begin : lines.begin + lines.count, voxels.begin : voxels.begin + voxels.count]
                if lines.zeros or voxels.zeros:
                    target[...] = 0
                else:
                    target[...] = x[_source(lines), _source(voxels)]
