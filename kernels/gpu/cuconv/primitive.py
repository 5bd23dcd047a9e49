"""cuConv on a GPU: many small blocks, each with few rows of the filters; for small layers of one image.

Method   0  Products of rows of filters with the rows of the input they meet, as stored in memory: partial sums, each of
         a few taps. Rows of both are copied to shared memory, in blocks of 16, 32 or 64 voxels and as many maps.
         1  Partial sums of a voxel are added, then bias and activation. If one part has all taps, as for a 1x1x1
            kernel, this stage is omitted. units=float: on float32 units, long sums in several runs; units=tensor: in
            matrix products of tf32, whose rounding tf32 and fp16 allow. stages.cu.
Memory   Partial sums of as many voxels as 32 MiB hold.
Bound    Large layers: arithmetic, 2 k^3 f f' flops a voxel. Small ones, its purpose: latency of a few steps.
Source   Jorda, Valero-Lara, Pena, cuConv: A CUDA implementation of convolution for CNN inference, 2021; in 3D, channels
         last.
Tested   tests/kernels/gpu/cuconv/test_primitive.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work, as_conv, why_not_on_gpu
from znnpy.kernels.gpu.cuconv.partition import MOST_TERMS, SIDES, TENSOR_SPEED, THREADS, Partition, choices, partition
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ACTIVATIONS, FLOAT32, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

SOURCE = "cuconv/stages.cu"
REGISTERS, MOST_REGISTERS = 128, 168  # per thread; the second: for blocks of 64 on float32 units
FOUR = 4  # values of one copy
HEAVIEST = 2**31  # taps per map of a kernel, which are counted in 32 bits


def _units(shape: LayerShape) -> str:
    """Return the units that compute: fp32 allows no rounding to tf32."""
    return "float" if shape.precision == "fp32" else "tensor"


def _products(itemsize: int, side: int, units: str, *, vectors: bool, long: bool) -> str:
    flags = ", ".join(str(flag).lower() for flag in (units == "tensor", vectors, long))
    return f"products<{'half' if itemsize == 2 else 'float'}, {side}, {flags}>"


def _sum_parts(itemsize: int) -> str:
    return f"sum_parts<{'half' if itemsize == 2 else 'float'}>"


def instances() -> list[KernelInstance]:
    """Return all kernels."""
    kinds = ((4, "float", False), (4, "float", True), (4, "tensor", False), (2, "tensor", False))
    products = [
        KernelInstance(
            SOURCE, _products(itemsize, side, units, vectors=vectors, long=long), registers, stack_bytes=stack
        )
        for itemsize, units, long in kinds
        for side in SIDES
        for registers in (MOST_REGISTERS if (side, units) == (SIDES[-1], "float") else REGISTERS,)
        for stack in ((256 if side == SIDES[-1] else 64) if long else 0,)
        for vectors in (False, True)
    ]
    return [*products, *(KernelInstance(SOURCE, _sum_parts(itemsize), REGISTERS) for itemsize in (4, 2))]


class _Resident(NamedTuple):
    kernels: Any  # (kz * ky * kx, padded f, padded f') float32
    bias: Any  # (padded f',) float32


@dataclass(frozen=True, slots=True)
class CuConv:
    """Direct convolution in two stages, or in one."""

    name: str = "gpu.conv.cuconv"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "small layers of one image, 1x1x1 kernels: many small blocks of partial sums, then their sums"
    source: str = "Jorda, Valero-Lara, Pena, cuConv: A CUDA implementation of convolution for CNN inference, 2021"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_on_gpu(shape, machine, softmax=False):
            return reason
        shape = as_conv(shape)
        if prod(shape.k) >= HEAVIEST:
            return f"takes kernels of fewer than {HEAVIEST} taps, not {prod(shape.k)}"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return sides of the blocks and taps of a part, the most promising first."""
        assert machine.gpu is not None
        units = _units(shape)
        found = choices(as_conv(shape), machine.gpu.multiprocessors, units)
        return tuple(Variant.of(side=side, taps=taps, units=units) for side, taps in found)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = as_conv(shape)
        c = _partition(shape, variant)
        resident = FLOAT32 * c.maps * (prod(shape.k) * c.values + 1)
        scratch = () if c.parts == 1 else (Scratch("parts", c.parts_bytes),)
        return Footprint(resident=resident, scratch=scratch, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        c = _partition(shape, variant)
        rows, columns = -(-c.voxels // c.side) * c.side, -(-c.maps // c.side) * c.side
        flops = 2.0 * rows * columns * prod(shape.k) * c.values
        flops = flops if variant.text("units") == "float" else flops / TENSOR_SPEED
        if c.parts == 1:
            return (Work("gpu_cuconv", flops, shape.in_bytes + shape.out_bytes),)
        sums = c.voxels * c.maps * c.parts
        return (
            Work("gpu_cuconv", flops, shape.in_bytes + FLOAT32 * sums),
            Work("gpu_stream", float(sums), FLOAT32 * sums + shape.out_bytes),
        )

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> _Resident:
        assert weights is not None
        fout, fin = weights.weight.shape[:2]
        matrix = weights.weight.transpose(2, 3, 4, 1, 0).reshape(-1, fin, fout)
        kernels = np.pad(matrix, ((0, 0), (0, -fin % FOUR), (0, -fout % FOUR)))
        return _Resident(
            device.put(kernels if variant.text("units") == "float" else _tf32(kernels), "kernels of gpu.conv.cuconv"),
            device.put(np.pad(weights.bias, (0, -fout % FOUR)), "biases of gpu.conv.cuconv"),
        )

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        return _Step(resident, as_conv(shape), variant, device)


def _partition(shape: ConvShape, variant: Variant) -> Partition:
    return partition(shape, variant.count("side"), variant.count("taps"))


def _tf32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to the nearest tf32."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


class _Step:
    def __init__(self, resident: _Resident, shape: ConvShape, variant: Variant, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._partition = _partition(shape, variant)
        units = variant.text("units")
        long = units == "float" and self._partition.taps * shape.fin > MOST_TERMS
        products = [
            _products(shape.itemsize, self._partition.side, units, vectors=vectors, long=long)
            for vectors in (False, True)
        ]
        sums = _sum_parts(shape.itemsize)
        compiled = device.kernels(SOURCE, [*products, sums])
        self._products, self._sums = [compiled[name] for name in products], compiled[sums]

    def run(
        self,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        del before, x_peak
        shape, c, itemsize, (_, my, mx) = self._shape, self._partition, self._shape.itemsize, self._shape.out
        products = self._products[self._in_fours(x, shape.fin)]
        to, voxels = (out, out.strides[0] // itemsize), prod(shape.out)
        last = (
            shape.fout,
            ACTIVATIONS.index(shape.activation),
            int(self._in_fours(out, shape.fout)),
            np.uint64(out_peak),
        )
        parts = None if c.parts == 1 else scratch["parts"]
        for first in range(0, c.voxels, c.at_once):
            count = min(c.at_once, c.voxels - first)
            products(
                (-(-count // c.side) * -(-shape.fout // c.side), c.parts),
                (THREADS,),
                *(x, x.strides[0] // itemsize, *to, parts, *self._resident, first, count),
                *(*shape.n[1:], shape.fin, my, mx, voxels, prod(shape.k), c.taps, *shape.k[1:], *last),
            )
            if parts is not None:
                self._sums(
                    (-(-count * c.maps // (FOUR * THREADS)),),
                    (THREADS,),
                    *(parts, c.parts, *to, self._resident.bias, first, count, voxels, *last),
                )

    def _in_fours(self, images: Any, maps: int) -> bool:
        """Return whether four maps of every voxel are aligned for a copy of four."""
        begins = (self._device.address(images), images.strides[0], maps * self._shape.itemsize)
        return all(begin % (FOUR * self._shape.itemsize) == 0 for begin in begins)
