"""The implicit matrix product: a convolution as one product, whose left matrix nobody writes to memory.

Method   [voxels x (taps, maps)] @ [(taps, maps) x maps], the left matrix of which is built in shared memory, a part
         at a time. units=float: on float32 units, any shape and activation. floats.cu.
Memory   Nothing beside kernels.
Bound    float: arithmetic, 2 k^3 f f' flops a voxel.
Source   Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3.
Tested   tests/gpu/test_implicit_gemm.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.kernels.gpu.implicit_gemm import floats
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering
from znnpy.kernels.primitive import Footprint, Kind, Variant, Work, as_conv, why_not_plain

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.primitive import ConvWeights
    from znnpy.machine import Machine
    from znnpy.shapes import ConvShape, LayerShape


@dataclass(frozen=True, slots=True)
class ConvImplicitGemm:
    """Implicit matrix product; see above."""

    name: str = "gpu.conv.implicit_gemm"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "small kernels, any shape: the lowered matrix is built in shared memory alone"
    source: str = "Chetlur et al., cuDNN, 2014"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if machine.gpu is None:
            return "needs a CUDA device"
        return why_not_plain(shape, "gpu.conv.fft_tiled")

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant.of(units="float"),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del variant, threads
        shape = as_conv(shape)
        resident = floats.resident_bytes(shape.fin, shape.fout, prod(shape.k))
        return Footprint(resident=resident, reads_carried=True, raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        del variant
        shape = as_conv(shape)
        rounds = 2 if shape.activation == "softmax" else 1
        products = prod(shape.out_shape[:4]) * prod(shape.k) * shape.fin * floats.padded(shape.fout)
        return (Work("gpu_gemm_float", 2.0 * rounds * products, shape.in_bytes + shape.out_bytes),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Any:
        del variant
        assert weights is not None
        return floats.prepare(weights, device)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        del variant
        return _Step(resident, as_conv(shape), device)


class _Step:
    """A DeviceStep."""

    def __init__(self, resident: Any, shape: ConvShape, device: Device) -> None:
        self._product = floats.FloatProduct(resident, Lowering.of(shape), device)

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
        del scratch
        self._product.run(x, out, before, x_peak, out_peak)
