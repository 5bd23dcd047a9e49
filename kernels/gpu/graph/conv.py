"""Convolution of any shape of a graph on float32 units.

Method   tile=..  A matrix product whose left matrix is gathered in shared memory, some maps of a tap at a time, from
         all inputs: strides, dilations, groups, padding and upsampling are addresses. A thread sums 16 to 64
         results in registers. conv.cu. An addend, the function and softmax ride along.
         tile=maps  Where each output map reads one input map, a thread sums four neighbours along x. depthwise.cu.
Memory   None besides kernels, in float32 in every precision.
Bound    Arithmetic: 2 k^3 f f' / groups flops a voxel on float32 units; with as many groups as maps, memory.
Source   Chetlur et al., cuDNN, 2014, 3; Volkov and Demmel 2008.
Tested   tests/kernels/gpu/graph/test_conv.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.gpu.graph.inputs import INPUT, MOST_INPUTS, all_inputs, one_input, width_of
from znnpy.kernels.gpu.graph.layer import given, value_type, why_not_here
from znnpy.kernels.gpu.graph.products import (
    DEEP,
    SOURCE,
    THREADS,
    TILES,
    Resident,
    Tile,
    pitch_of,
    problem_of,
    tap_rows,
    tiles_for,
    upload,
)
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import FLOAT32, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

DEPTHWISE = "graph/depthwise.cu"
ENTRY_BYTES = 24  # size of Entry in conv.cu
MOST_ENTRIES = 512
FEWEST_BLOCKS = 264  # that a card works on at a time, two a multiprocessor: fewer take as long
LINE = 4  # voxels of a thread in depthwise.cu
WIDTHS_ALONG_X = (3, 5, 7)  # kernels that have code of their own in depthwise.cu


def instances() -> list[KernelInstance]:
    """Return the kernels of depthwise.cu."""
    kinds = [GraphConvShape((1,), 1, (1, 1, 1), (1, 1, 1), precision=p) for p in ("fp16", "fp32")]
    return [
        KernelInstance(DEPTHWISE, f"lines<{value_type(kind)}, {width}, {kx}>", 168)
        for width in (1, 4)
        for kind in kinds
        for kx in (0, *WIDTHS_ALONG_X)
    ]


def is_flat(shape: GraphConvShape) -> bool:
    """Return whether values that are staged together are of several taps, because there are few maps."""
    few = shape.fin // shape.groups < DEEP and len(shape.fins) == 1 and not shape.upsampled
    return few and shape.fin // shape.groups * prod(shape.k) <= MOST_ENTRIES


def is_depthwise(shape: GraphConvShape) -> bool:
    """Return whether each output map reads one input map, and depthwise.cu takes the shape."""
    alone = len(shape.fins) == 1 and not shape.upsampled and shape.activation != "softmax"
    return alone and shape.groups == shape.fin and shape.groups > 1


@dataclass(frozen=True, slots=True)
class GraphConvDirect:
    """Convolutions of graphs, of any shape."""

    name: str = "gpu.graph_conv.direct"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "convolutions of graphs of any shape on float32 units: the exact one, and for few maps or groups"
    source: str = "Chetlur et al., cuDNN, 2014, 3; Volkov and Demmel 2008"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_here(shape, machine, GraphConvShape, "convolutions of graphs"):
            return reason
        inputs = len(given(shape, GraphConvShape).fins)
        return f"takes up to {MOST_INPUTS} inputs, not {inputs}" if inputs > MOST_INPUTS else None

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        shape = given(shape, GraphConvShape)
        if is_depthwise(shape):
            return (Variant.of(tile="maps"),)
        names = tiles_for(prod(shape.out), shape.fout // shape.groups, shape.groups, machine)
        return tuple(Variant.of(tile=name) for name in names)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = given(shape, GraphConvShape)
        rows = prod(shape.k) * (shape.fin // shape.groups)
        return Footprint(resident=FLOAT32 * pitch_of(shape.fout) * (rows + 1), raises_peak=True)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        nbytes = shape.in_bytes + shape.out_bytes
        if variant.text("tile") == "maps":
            return (Work("gpu_stream", 2.0 * prod(shape.out_shape) * prod(shape.k), nbytes),)
        tile = TILES[variant.text("tile")]
        voxels, maps = tile.block
        blocks = tile.blocks(prod(shape.out), shape.fout // shape.groups, shape.groups)
        again = 2 if shape.activation == "softmax" and shape.fout > maps else 1
        flops = 2.0 * again * max(blocks, FEWEST_BLOCKS) * voxels * maps * _staged(shape) * tile.slower
        return (Work("gpu_direct", flops, nbytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        """Upload kernels and biases, the maps of the output side by side."""
        del variant
        assert weights is not None
        return upload(tap_rows(weights), weights.bias, device, self.name)

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step | _LinesStep:
        shape, name = given(shape, GraphConvShape), variant.text("tile")
        if name == "maps":
            return _LinesStep(resident, shape, device)
        return _Step(resident, shape, TILES[name], device)


def _staged(shape: GraphConvShape) -> int:
    """Return the values that are staged for a voxel, zeros included."""
    fin = shape.fin // shape.groups
    if is_flat(shape):
        return -(-prod(shape.k) * fin // DEEP) * DEEP
    parts = shape.fins if shape.groups == 1 else (fin,)
    return prod(shape.k) * sum(-(-maps // DEEP) * DEEP for maps in parts)


class _Step:
    """A GraphDeviceStep by matrix products."""

    def __init__(self, resident: Resident, shape: GraphConvShape, tile: Tile, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._problem, self._flat = problem_of(shape), is_flat(shape)
        soft, group = shape.activation == "softmax", shape.fout // shape.groups
        self._grid = tile.blocks(prod(shape.out), 1 if soft else group, 1 if soft else shape.groups)
        table = ENTRY_BYTES * int(self._problem["fin"]) * prod(shape.k) if self._flat else 0
        self._shared = tile.shared_bytes(soft=soft) + table
        name = tile.kernel(shape, "FLAT" if self._flat else "TAPS")
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        shape, device = self._shape, self._device
        maps, addend = _divided(shape, inputs, device)
        vectors = width_of(device, [shape.fout // shape.groups], out, most=4) == 4
        self._kernel(
            *((self._grid,), (THREADS,)),
            *(all_inputs(device, maps, shape.groups, shape.factors), self._problem, *self._resident, addend, out),
            *(int(vectors), np.uint64(out_peak)),
            shared=self._shared,
        )


def _divided(shape: GraphConvShape, inputs: Sequence[Any], device: Device) -> tuple[Sequence[Any], Any]:
    """Return the inputs without the addend, and a struct of the addend, which without one is all zeros."""
    if not shape.addend:
        return inputs, np.zeros((), INPUT)[()]
    group = shape.fout // shape.groups
    return inputs[:-1], one_input(device, inputs[-1], starts=[group] if shape.groups > 1 else [])


class _LinesStep:
    """A GraphDeviceStep for one input map per output map."""

    def __init__(self, resident: Resident, shape: GraphConvShape, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._problem = problem_of(shape)
        kx = shape.k[2] if shape.k[2] in WIDTHS_ALONG_X and shape.stride[2] == shape.dilation[2] == 1 else 0
        names = {width: f"lines<{value_type(shape)}, {width}, {kx}>" for width in (1, 4)}
        kernels = device.kernels(DEPTHWISE, list(names.values()))
        self._kernels = {width: kernels[name] for width, name in names.items()}

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        shape, device = self._shape, self._device
        (x,), addend = _divided(shape, inputs, device)
        arrays = [x, out, *inputs[1:]]
        width = 4 if shape.fin == shape.fout and width_of(device, [shape.fout], *arrays, most=4) == 4 else 1
        mz, my, mx = shape.out
        threads = mz * my * -(-mx // LINE) * (shape.fout // width)
        self._kernels[width](
            *((-(-threads // THREADS),), (THREADS,)),
            *(one_input(device, x), self._problem, *self._resident, addend, out, np.uint64(out_peak)),
        )
