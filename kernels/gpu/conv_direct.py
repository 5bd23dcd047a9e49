"""Direct convolution on a GPU, any shape: the slow but sure one.

Method   The definition as a matrix product [voxels x taps] @ [taps x maps] whose left matrix exists only in shared
         memory, some taps at a time; sums in float32 registers. conv_direct.cu.
Memory   Nothing beside kernels, in float32 in every precision.
Bound    Arithmetic: 2 k^3 f f' flops a voxel on float32 units.
Source   First principles; lowering within the kernel after Chetlur et al., cuDNN, 2014.
Tested   tests/gpu/test_conv_direct.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.gpu.modules import Instance
from znnpy.kernels.primitive import Footprint, Kind, Variant, Work, as_conv, why_not_plain
from znnpy.shapes import ACTIVATIONS, FLOAT32, ConvShape, LayerShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.primitive import ConvWeights
    from znnpy.machine import Machine

SOURCE = "conv_direct.cu"
WARP, MOST_WARPS = 32, 4
VOXELS, STEP, ROW = 128, 16, 130  # conv_direct.cu
WINDOW_BYTES, SUMMED_BYTES = 24, 8  # conv_direct.cu: Window, Summed
REGISTERS = 128


def _group(maps: int) -> int:
    """Maps that a warp sums at a time."""
    return 4 if maps <= 4 else 16


def _padded(maps: int) -> int:
    return -(-maps // _group(maps)) * _group(maps)


def _kernel(itemsize: int, group: int) -> str:
    return f"direct<{'half' if itemsize == 2 else 'float'}, {group}>"


def instances() -> list[Instance]:
    forgiven = (24, 64)  # bytes on the stack, spilled: by sm_120's compiler alone
    return [
        Instance(SOURCE, _kernel(itemsize, group), REGISTERS, (), *forgiven) for itemsize in (2, 4) for group in (4, 16)
    ]


class _Resident(NamedTuple):
    kernels: Any  # (taps, padded f') float32, taps in the order (dz, dy, dx, f)
    bias: Any  # (padded f',) float32


@dataclass(frozen=True, slots=True)
class ConvDirect:
    """Direct convolution: what no other primitive takes, and what the others are compared with."""

    name: str = "gpu.conv.direct"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "any shape, slow but sure: 1x1x1 kernels, softmax, few maps"
    source: str = "definition; lowering within the kernel after Chetlur et al., cuDNN, 2014"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        return why_not_plain(shape, "gpu.conv.fft_tiled")

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = as_conv(shape)
        padded = _padded(shape.fout)
        resident = FLOAT32 * padded * (prod(shape.k) * shape.fin + 1)
        return Footprint(resident=resident, reads_carried=True, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_conv(shape)
        rounds = 2 if shape.activation == "softmax" else 1
        products = prod(shape.out_shape[:4]) * prod(shape.k) * shape.fin * _padded(shape.fout)
        return (Work("gpu_direct", 2.0 * rounds * products, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> _Resident:
        del variant
        assert weights is not None
        fout = len(weights.bias)
        matrix = weights.weight.transpose(2, 3, 4, 1, 0).reshape(-1, fout)
        more = _padded(fout) - fout
        return _Resident(
            device.put(np.pad(matrix, ((0, 0), (0, more))), "kernels of gpu.conv.direct"),
            device.put(np.pad(weights.bias, (0, more)), "biases of gpu.conv.direct"),
        )

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        del variant
        return _Step(resident, as_conv(shape), device)


class _Step:
    def __init__(self, resident: _Resident, shape: ConvShape, device: Device) -> None:
        self._resident, self._shape = resident, shape
        self._group = _group(shape.fout)
        name = _kernel(shape.itemsize, self._group)
        self._kernel = device.kernels(SOURCE, [name])[name]

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
        del scratch, x_peak
        shape, itemsize, (mz, my, mx) = self._shape, self._shape.itemsize, self._shape.out
        old = x if before is None else before
        warps = min(MOST_WARPS, -(-shape.fout // self._group))
        blocks = 1 if shape.activation == "softmax" else -(-shape.fout // (warps * self._group))
        self._kernel(
            (-(-len(x) * mz * my * mx // VOXELS), blocks),
            (warps * WARP,),
            *(old, old.strides[0] // itemsize, x, x.strides[0] // itemsize, out, out.strides[0] // itemsize),
            *self._resident,
            *(len(x), shape.n[0] - x.shape[1], *shape.n[1:], shape.fin, my, mx, mz * my * mx),
            *(prod(shape.k) * shape.fin, *shape.k[1:], shape.fout),
            ACTIVATIONS.index(shape.activation),
            np.uint64(out_peak),
            shared=WINDOW_BYTES * VOXELS + FLOAT32 * STEP * ROW + SUMMED_BYTES * warps * VOXELS,
        )
