"""The implicit matrix product on float32 units, for any shape: floats.cu."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering, image_step
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import ACTIVATIONS, FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device

SOURCE = "implicit_gemm/floats.cu"
WARP, MOST_WARPS = 32, 4
VOXELS, STEP, ROW = 128, 16, 130  # as in floats.cu
WINDOW_BYTES, SUMMED_BYTES = 32, 8  # sizes of Window and Summed in floats.cu
REGISTERS = 128
MOST_TERMS = 2500  # longest sum, in sequence, for an error of 1e-6 of the rms answer: they leave 9e-7


def group_of(maps: int) -> int:
    """Return the maps that a warp sums at a time."""
    return 4 if maps <= 4 else 16


def padded(maps: int) -> int:
    """Return the maps rounded up to whole groups."""
    return -(-maps // group_of(maps)) * group_of(maps)


def resident_bytes(fin: int, fout: int, taps: int) -> int:
    """Return the bytes of weights on the device."""
    return FLOAT32 * padded(fout) * (taps * fin + 1)


def _kernel(itemsize: int, group: int, *, pads: bool) -> str:
    return f"lowered<{'half' if itemsize == 2 else 'float'}, {group}, {'true' if pads else 'false'}>"


def instances() -> list[KernelInstance]:
    """Return the kernels for both types, group sizes and paddings."""
    forgiven = (24, 64)  # bytes on the stack and spilled, tolerated for sm_120's compiler
    return [
        KernelInstance(SOURCE, _kernel(itemsize, group, pads=pads), REGISTERS, (), *forgiven)
        for itemsize, group, pads in ((2, 4, False), (4, 16, False), (2, 16, True), (4, 4, True), (4, 16, True))
    ]


class FloatWeights(NamedTuple):
    """Weights on the device."""

    kernels: Any  # (taps * f, padded f') float32, taps in the order (dz, dy, dx)
    bias: Any  # (padded f',) float32


def prepare(weights: ConvWeights, device: Device) -> FloatWeights:
    """Upload weights, with maps padded to whole groups."""
    fout = len(weights.bias)
    matrix = weights.weight.transpose(2, 3, 4, 1, 0).reshape(-1, fout)
    more = padded(fout) - fout
    return FloatWeights(
        device.put(np.pad(matrix, ((0, 0), (0, more))), "kernels of gpu.conv.implicit_gemm"),
        device.put(np.pad(weights.bias, (0, more)), "biases of gpu.conv.implicit_gemm"),
    )


class FloatProduct:
    """One problem, ready to run on arrays."""

    def __init__(self, weights: FloatWeights, problem: Lowering, device: Device) -> None:
        self._weights, self._problem = weights, problem
        self._group = group_of(problem.fout)
        name = _kernel(problem.itemsize, self._group, pads=max(problem.sliding.padding) > 0)
        self._kernel = device.kernels(SOURCE, [name])[name]

    def run(self, x: Any, out: Any, before: Any | None, x_peak: int, out_peak: int) -> None:
        """Compute the layer; see DeviceStep."""
        del x_peak
        problem, (mz, my, mx) = self._problem, self._problem.out
        old = x if before is None else before
        warps = min(MOST_WARPS, -(-problem.fout // self._group))
        blocks = 1 if problem.activation == "softmax" else -(-problem.fout // (warps * self._group))
        self._kernel(
            (-(-len(x) * mz * my * mx // VOXELS), blocks),
            (warps * WARP,),
            *(old, image_step(old), x, image_step(x), out, image_step(out)),
            *self._weights,
            *(len(x), problem.n[0] - x.shape[1], *problem.n, problem.fin, my, mx, mz * my * mx),
            *(prod(problem.k) * problem.fin, *problem.k[1:]),
            *(*problem.sliding.stride, *problem.sliding.padding, problem.fout),
            ACTIVATIONS.index(problem.activation),
            np.uint64(out_peak),
            shared=WINDOW_BYTES * VOXELS + FLOAT32 * STEP * ROW + SUMMED_BYTES * warps * VOXELS,
        )
