"""Transposed convolution of a graph on tensor cores, where the kernel is as large as the stride.

Method   Every result is that of one voxel and one tap: one matrix product of voxels with all taps side by side, whose
         results are scattered in pieces of 16 bytes. transpose_tensor.cu.
Memory   Kernels in float16.
Bound    Memory; with some hundred maps tensor cores.
Exact    Products of float16, sums in float32. What lies beyond 65504 is infinite.
Source   Dumoulin, Visin, A guide to convolution arithmetic for deep learning, 2016; Shi et al. 2016 (sub-pixel).
Tested   tests/kernels/gpu/graph/test_transpose_tensor.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.graph_shapes import TransposeShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.gpu.graph.functions import numbers_of
from znnpy.kernels.gpu.graph.inputs import TRIPLE, one_input, width_of
from znnpy.kernels.gpu.graph.layer import given, why_not_here
from znnpy.kernels.gpu.graph.products import Resident, places_of
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layers import ONE
from znnpy.shapes import FLOAT16, FLOAT32, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

SOURCE = "graph/transpose_tensor.cu"
CHUNK, PITCH, PIECE, STAGES, ROW = 32, 40, 8, 3, 24  # as in transpose_tensor.cu; the last: bytes of a Row
SLICE = 256  # columns are filled up to a multiple of it
WARP = 32
KEPT = 40 << 10  # bytes of kernels that may stay in shared memory
MOST_PLACES = 2**31 - 2**10
SCATTER = np.dtype(
    [
        *((name, TRIPLE) for name in ("n", "places", "low", "stride", "shift", "out")),
        *((name, "i4") for name in ("fin", "fout", "pieces", "columns", "chunks")),
        *((name, "i4") for name in ("kept", "wide_x", "wide_out", "function")),
        *((name, "f4") for name in ("a", "b")),
    ],
    align=True,
)


class Tile(NamedTuple):
    """The warps of a block, and the matrices of a warp, along places and columns."""

    warps: tuple[int, int]
    matrices: tuple[int, int]
    resident: int  # blocks of a multiprocessor

    @property
    def block(self) -> tuple[int, int]:
        """Return the places and columns of a block."""
        return self.warps[0] * self.matrices[0] * 16, self.warps[1] * self.matrices[1] * 8

    @property
    def kernel(self) -> str:
        return f"scatter_products<{', '.join(map(str, (*self.warps, *self.matrices)))}>"

    def keeps(self, chunks: int) -> bool:
        """Return whether the kernels of a slice stay in shared memory."""
        return chunks * self.block[1] * PITCH * FLOAT16 <= KEPT

    def shared_bytes(self, chunks: int) -> int:
        places, columns = self.block
        of_kernels = chunks if self.keeps(chunks) else STAGES
        return STAGES * places * (ROW + PITCH * FLOAT16) + of_kernels * columns * PITCH * FLOAT16


TILES = {  # "256" has not been timed on a card yet
    "128": Tile((4, 2), (2, 8), 2),
    "256": Tile((2, 4), (2, 8), 2),
    "64": Tile((2, 2), (2, 4), 4),
    "32": Tile((4, 1), (1, 4), 4),
}


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    spilled = {"128": (8, 32)}  # on an A100
    return [KernelInstance(SOURCE, tile.kernel, 128, (), *spilled.get(name, ())) for name, tile in TILES.items()]


def _pieces(shape: TransposeShape) -> int:
    """Return the pieces of the maps of one tap."""
    return -(-shape.fout // PIECE)


def _columns(shape: TransposeShape) -> int:
    return prod(shape.k) * _pieces(shape) * PIECE


def _chunks(shape: TransposeShape) -> int:
    return -(-shape.fin // CHUNK)


def _tiles(shape: TransposeShape, tile: Tile) -> tuple[int, int]:
    """Return the tiles along places and columns."""
    places, columns = tile.block
    return -(-prod(places_of(shape)[1]) // places), -(-_columns(shape) // columns)


@dataclass(frozen=True, slots=True)
class TransposeTensor:
    """Transposed convolutions whose kernels are as large as the stride."""

    name: str = "gpu.conv_transpose.tensor"
    kind: Kind = "conv_transpose"
    version: int = 1
    summary: str = "float16: transposed convolutions whose kernel is as large as the stride, on tensor cores"
    source: str = "Dumoulin and Visin 2016; Shi et al. 2016"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_here(shape, machine, TransposeShape, "transposed convolutions"):
            return reason
        shape = given(shape, TransposeShape)
        assert machine.gpu is not None, "why_not_here says so"
        if machine.gpu.capability < (8, 0):
            return f"needs compute capability 8.0, not {'.'.join(map(str, machine.gpu.capability))}"
        if shape.precision != "fp16":
            return f"computes in fp16, not in {shape.precision}"
        if shape.k != shape.stride or shape.dilation != ONE:
            return "needs a kernel as large as the stride, without dilation"
        if shape.groups != 1:
            return f"computes one group of maps, not {shape.groups}"
        if shape.activation in ("softmax", "prelu"):
            return f"applies no {shape.activation}, which needs more than one value"
        if (places := prod(places_of(shape)[1])) > MOST_PLACES:
            return f"computes up to {MOST_PLACES:,} voxels of the input at once, not {places:,}"
        return None

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        """Return up to two tiles that have half their columns filled and leave no multiprocessor idle, or the last."""
        shape = given(shape, TransposeShape)
        assert machine.gpu is not None, "why_not says so"
        filled = (name for name, tile in TILES.items() if tile.block[1] < 2 * _columns(shape))
        busy = [name for name in filled if prod(_tiles(shape, TILES[name])) >= machine.gpu.multiprocessors]
        return tuple(Variant.of(tile=name) for name in (busy or list(TILES)[-1:])[:2])

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = given(shape, TransposeShape)
        columns = -(-_columns(shape) // SLICE) * SLICE
        resident = FLOAT16 * columns * _chunks(shape) * CHUNK + FLOAT32 * _pieces(shape) * PIECE
        return Footprint(resident=resident, raises_peak=True)

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape, tile = given(shape, TransposeShape), TILES[variant.text("tile")]
        flops = 2.0 * prod(_tiles(shape, tile)) * prod(tile.block) * _chunks(shape) * CHUNK
        return (Work("gpu_scatter_half", flops, float(shape.in_bytes + shape.out_bytes)),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        """Upload kernels in the order of transpose_tensor.cu."""
        del variant
        assert weights is not None
        fin, fout, *k = weights.weight.shape
        more = -fout % PIECE
        rows = np.pad(weights.weight.transpose(2, 3, 4, 1, 0), (*[(0, 0)] * 3, (0, more), (0, -fin % CHUNK)))
        rows = rows.reshape(prod(k) * (fout + more), -1)
        rows = np.pad(rows, ((0, -len(rows) % SLICE), (0, 0)))
        rows = rows.reshape(-1, 4, 4, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity show in the result
            halves = rows.astype(np.float16)
        return Resident(
            device.put(halves, f"kernels of {self.name}"),
            device.put(np.pad(weights.bias, (0, more)).astype(np.float32), f"biases of {self.name}"),
        )

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step:
        return _Step(resident, given(shape, TransposeShape), TILES[variant.text("tile")], device)


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, resident: Resident, shape: TransposeShape, tile: Tile, device: Device) -> None:
        self._resident, self._shape, self._tile, self._device = resident, shape, tile, device
        self._kernel = device.kernels(SOURCE, [tile.kernel])[tile.kernel]
        low, places = places_of(shape)
        found = np.zeros((), SCATTER)
        found["n"], found["places"], found["low"], found["out"] = shape.n, places, low, shape.m
        found["stride"] = shape.stride
        found["shift"] = tuple(q * s - first for q, s, first in zip(low, shape.stride, shape.first, strict=True))
        found["fin"], found["fout"], found["pieces"] = shape.fin, shape.fout, _pieces(shape)
        found["columns"], found["chunks"] = _columns(shape) // PIECE, _chunks(shape)
        found["kept"] = tile.keeps(_chunks(shape))
        found["function"], found["a"], found["b"] = numbers_of(shape.activation, shape.parameters)
        self._scatter = found
        along, slices = _tiles(shape, tile)
        at_once = max(1, tile.resident * device.gpu.multiprocessors // slices)
        each = -(-along // at_once)  # tiles of a block
        self._grid = slices, -(-along // each)

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        """Compute the layer; see GraphDeviceStep."""
        del scratch
        shape, device = self._shape, self._device
        self._scatter["wide_x"] = width_of(device, [shape.fin], inputs[0], most=PIECE) == PIECE
        self._scatter["wide_out"] = width_of(device, [shape.fout], out, most=PIECE) == PIECE
        self._kernel(
            *(self._grid, (WARP * prod(self._tile.warps),), one_input(device, inputs[0]), self._scatter[()]),
            *(*self._resident, out, np.uint64(out_peak)),
            shared=self._tile.shared_bytes(_chunks(shape)),
        )
