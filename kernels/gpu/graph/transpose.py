"""Transposed convolution of a graph on float32 units.

Method   kernel=phases   Outputs with equal (j + first) mod stride, a phase, are a convolution with some of the taps.
         Blocks of all phases of the same voxels are neighbours in the grid, so that they read them from L2.
         kernel=columns  Where the kernel is as large as the stride, one product with all taps side by side, of which
         each result goes to its voxel.
         Both are matrix products of conv.cu; the function and, by phases, softmax ride along.
Memory   None besides kernels, in float32 in every precision.
Bound    Arithmetic on float32 units; with few maps memory.
Source   Dumoulin, Visin, A guide to convolution arithmetic for deep learning, 2016; Shi et al. 2016 (sub-pixel).
Tested   tests/kernels/gpu/graph/test_transpose.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.graph_shapes import TransposeShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.gpu.graph.inputs import INPUT, all_inputs, width_of
from znnpy.kernels.gpu.graph.layer import given, why_not_here
from znnpy.kernels.gpu.graph.products import (
    DEEP,
    SOURCE,
    THREADS,
    TILES,
    Resident,
    columns_of,
    pitch_of,
    places_of,
    tap_rows,
    tiles_for,
    transposed_problem,
    upload,
)
from znnpy.layers import ONE
from znnpy.shapes import FLOAT32, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine


def takes_columns(shape: TransposeShape) -> bool:
    """Return whether one product computes all phases."""
    plain = shape.k == shape.stride and shape.dilation == ONE and shape.groups == 1
    return plain and shape.activation != "softmax"


@dataclass(frozen=True, slots=True)
class TransposeDirect:
    """Transposed convolutions of any shape."""

    name: str = "gpu.conv_transpose.direct"
    kind: Kind = "conv_transpose"
    version: int = 1
    summary: str = "transposed convolutions of any shape on float32 units, by phases or as one product"
    source: str = "Dumoulin and Visin 2016; Shi et al. 2016"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        return why_not_here(shape, machine, TransposeShape, "transposed convolutions")

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        """Return tiles for one product, if the shape has one, else for phases."""
        shape = given(shape, TransposeShape)
        places = prod(places_of(shape)[1])
        if takes_columns(shape):
            names = tiles_for(places, columns_of(shape), 1, machine)
            return tuple(Variant.of(kernel="columns", tile=name) for name in names)
        names = tiles_for(places, shape.fout // shape.groups, prod(shape.stride) * shape.groups, machine)
        return tuple(Variant.of(kernel="phases", tile=name) for name in names)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = given(shape, TransposeShape)
        rows, maps = prod(shape.k) * (shape.fin // shape.groups), shape.fout
        if variant.text("kernel") == "columns":
            rows, maps = shape.fin, columns_of(shape)
        return Footprint(resident=FLOAT32 * pitch_of(maps) * (rows + 1), raises_peak=True)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, TransposeShape)
        tile, places, group = TILES[variant.text("tile")], prod(places_of(shape)[1]), shape.fin // shape.groups
        staged = -(-group // DEEP) * DEEP
        if variant.text("kernel") == "columns":
            blocks = tile.blocks(places, columns_of(shape))
        else:  # a tap belongs to one phase
            blocks, staged = tile.blocks(places, shape.fout // shape.groups, shape.groups), staged * prod(shape.k)
        again = 2 if shape.activation == "softmax" and shape.fout > tile.block[1] else 1
        flops = 2.0 * again * blocks * prod(tile.block) * staged * tile.slower
        return (Work("gpu_direct", flops, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        """Upload kernels: the maps of the output side by side, and with kernel=columns those of all taps."""
        assert weights is not None
        if variant.text("kernel") == "phases":
            return upload(tap_rows(weights, transposed=True), weights.bias, device, self.name)
        rows = weights.weight.transpose(0, 2, 3, 4, 1).reshape(len(weights.weight), -1)
        return upload(rows, np.tile(weights.bias, rows.shape[1] // len(weights.bias)), device, self.name)

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step:
        return _Step(resident, given(shape, TransposeShape), variant, device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, resident: Resident, shape: TransposeShape, variant: Variant, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        columns, tile = variant.text("kernel") == "columns", TILES[variant.text("tile")]
        self._problem = transposed_problem(shape, columns=columns)
        soft, places = shape.activation == "softmax", prod(places_of(shape)[1])
        maps, groups = (1, 1) if soft else (int(self._problem["fout"]), shape.groups)
        self._grid = tile.blocks(places, maps, groups) * (1 if columns else prod(shape.stride))
        self._shared = tile.shared_bytes(soft=soft)
        name = tile.kernel(shape, "COLUMNS" if columns else "PHASES")
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        del scratch
        shape, device = self._shape, self._device
        vectors = width_of(device, [shape.fout // shape.groups], out, most=4) == 4
        self._kernel(
            *((self._grid,), (THREADS,)),
            *(all_inputs(device, inputs, shape.groups), self._problem, *self._resident, np.zeros((), INPUT)[()], out),
            *(int(vectors), np.uint64(out_peak)),
            shared=self._shared,
        )
