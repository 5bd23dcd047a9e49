"""Convolutions of graphs by the convolutions of chains, over a copy of their inputs.

Method   The maps of all inputs are copied side by side into one array with zeros around them, with the voxels of
         upsampled inputs repeated, and a convolution of a chain computes the rest. One input without padding, in C
         order, is not copied.
Memory   The copy, and what the other convolution needs.
Bound    That of the other convolution; the copy takes one pass over memory.
Source   ZNNi (SC16), III and IV, as the other convolution says.
Tested   tests/kernels/cpu/test_graph_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Primitive, Scratch, Step, Variant, Work
from znnpy.kernels.cpu.ending import divided, end_graph, ending_bytes
from znnpy.kernels.cpu.graph_convs import padded_conv, why_not_stride_1
from znnpy.kernels.cpu.graph_layer import NUMPY_BYTES, given
from znnpy.kernels.thread_pool import min_chunk
from znnpy.layers import ONE
from znnpy.shapes import ACTIVATIONS, FLOAT32, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Bytes, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Sized


def _as_chain(shape: GraphConvShape) -> ConvShape:
    """Return the convolution of the copy."""
    if shape.addend or shape.activation not in ACTIVATIONS:
        return padded_conv(shape)
    return replace(padded_conv(shape), activation=shape.activation)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A convolution of a chain that serves graphs."""

    inner: Primitive

    @property
    def name(self) -> str:
        return f"cpu.graph_conv.{self.inner.name.rpartition('.')[2]}_gathered"

    @property
    def kind(self) -> Kind:
        return "graph_conv"

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def summary(self) -> str:
        return f"{self.inner.name} over one copy of all inputs, with zeros around them: stride 1"

    @property
    def source(self) -> str:
        return f"{self.inner.source}; the copy is obvious"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_stride_1(shape):
            return reason
        return self.inner.why_not(_as_chain(given(shape, GraphConvShape)), machine)

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        return self.inner.variants(_as_chain(given(shape, GraphConvShape)), machine)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        shape = given(shape, GraphConvShape)
        chain = _as_chain(shape)
        found = self.inner.footprint(chain, variant, threads)
        own = Scratch("gathered", chain.in_bytes, 0, found.input_until)
        return replace(
            found,
            scratch=(*found.scratch, own),
            reads_carried=False,
            allowance=found.allowance + threads * NUMPY_BYTES + ending_bytes(shape, threads),
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        chain = _as_chain(shape)
        copied = FLOAT32 * prod(shape.in_shape) + chain.in_bytes if _is_copied(shape) else 0
        return (Work("copy", 0.0, float(copied + 3 * shape.addend_bytes)), *self.inner.work(chain, variant))

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> Any:
        return self.inner.prepare(weights, variant, pool)

    def bind(self, resident: Any, shape: Sized, variant: Variant, pool: ThreadPool) -> _Step:
        shape = given(shape, GraphConvShape)
        return _Step(self.inner.bind(resident, _as_chain(shape), variant, pool), shape, pool)


def _is_copied(shape: GraphConvShape) -> bool:
    return len(shape.fins) > 1 or shape.padded != shape.n or shape.upsampled


class _Step:
    """The convolution of one shape."""

    def __init__(self, inner: Step, shape: GraphConvShape, pool: ThreadPool) -> None:
        self._inner, self._shape, self._pool = inner, shape, pool
        self._ended = not shape.addend and shape.activation in ACTIVATIONS

    def run(self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes]) -> None:
        shape = self._shape
        inputs, addend = divided(shape, inputs)
        if _is_copied(shape) or not inputs[0].flags.c_contiguous:
            x = scratch["gathered"].view(np.float32).reshape(*shape.padded, shape.fin)
            self._gather(inputs, x)
        else:
            x = inputs[0]
        self._inner.run(x[np.newaxis], out[np.newaxis], scratch)
        if not self._ended:
            end_graph(shape, addend, out, self._pool)

    def _gather(self, inputs: Sequence[Array], x: Array) -> None:
        """Copy the inputs side by side into `x`, and set what is around them to 0."""
        shape, (before, first_y, first_x) = self._shape, self._shape.before
        held, last_y, last_x = shape.n[0], first_y + shape.n[1], first_x + shape.n[2]
        factors = shape.factors or (ONE,) * len(inputs)

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for z in range(lo, hi):
                self._pool.check()
                plane = x[z]
                if not before <= z < before + held:
                    plane[...] = 0
                    continue
                plane[:first_y], plane[last_y:] = 0, 0
                plane[first_y:last_y, :first_x], plane[first_y:last_y, last_x:] = 0, 0
                start = 0
                for source, maps, factor in zip(inputs, shape.fins, factors, strict=True):
                    target = plane[first_y:last_y, first_x:last_x, start : start + maps]
                    _upsample_plane(
                        target, source[_source(z - before, shape.first[0], factor[0])], shape.first[1:], factor[1:]
                    )
                    start += maps

        self._pool.each(piece, len(x), least=min_chunk(x.nbytes, len(x)))


def _source(voxel: int, first: int, factor: int) -> int:
    """Return the voxel that an upsampled one repeats; inputs with a factor of 1 begin with the first one of `n`."""
    return (voxel + first) // factor if factor > 1 else voxel


def _upsample_plane(target: Array, source: Array, first: tuple[int, int], factor: tuple[int, int]) -> None:
    """Copy a plane: voxel j of `target` is voxel (j + first) // factor of `source`, or j where the factor is 1."""
    for y in range(factor[0]):
        rows = _every(y, first[0], factor[0])
        for x in range(factor[1]):
            columns = _every(x, first[1], factor[1])
            part = target[rows[0], columns[0]]
            part[...] = source[rows[1], columns[1]][: part.shape[0], : part.shape[1]]


def _every(offset: int, first: int, factor: int) -> tuple[slice, slice]:
    """Return every `factor`-th voxel of an upsampled line from `offset` on, and the voxels that they repeat."""
    return slice(offset, None, factor), slice(_source(offset, first, factor), None)
