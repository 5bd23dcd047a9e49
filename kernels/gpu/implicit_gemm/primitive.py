"""The implicit matrix product: a convolution as one product whose left matrix is never written to memory.

Method   [voxels x (taps, maps)] @ [(taps, maps) x maps], the left matrix of which is built in shared memory, a part at
         a time. units=tensor: in float16 on tensor cores, values as one word (tf32, fp16) or two (fp32); the input
         voxels of a tile are kept instead of the matrix's rows; tensor.cu. units=warpgroup: the same where tensor cores
         read both factors from shared memory themselves, on an H100 or H200; warpgroup.cu. units=float: on float32
         units, any shape and activation; floats.cu.
         bfloat16 is not used: it is as fast as float16 and 8 times as coarse; instead of its range, values stored in
         float32 are scaled by a power of two.
Memory   None besides kernels.
Bound    Arithmetic: 2 k^3 f f' flops a voxel; three times as many if values are two words. With few input maps:
         writing.
Source   Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3.
Tested   tests/kernels/gpu/implicit_gemm/test_primitive.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from znnpy.kernels.contract import Footprint, Kind, Variant, Work, as_conv, why_not_on_gpu
from znnpy.kernels.gpu.implicit_gemm import floats, tensor, warpgroup
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Gpu, Machine
    from znnpy.shapes import ConvShape


@dataclass(frozen=True, slots=True)
class ConvImplicitGemm:
    """Implicit matrix product on tensor cores or float32 units."""

    name: str = "gpu.conv.implicit_gemm"
    kind: Kind = "conv"
    version: int = 2
    summary: str = "small kernels, any shape: the lowered matrix exists only in shared memory"
    source: str = "Chetlur et al., cuDNN, 2014"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_on_gpu(shape, machine):
            return reason
        if not self.variants(shape, machine):
            terms = prod(as_conv(shape).k) * as_conv(shape).fin
            return f"adds {terms:,} products in sequence, which costs more than 1e-6 in fp32: see gpu.conv.direct"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return tensor cores first, if they may be used; weights are stored for the precision."""
        assert machine.gpu is not None
        return _variants(as_conv(shape), machine.gpu)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = as_conv(shape)
        if variant.text("units") == "float":
            resident = floats.resident_bytes(shape.fin, shape.fout, prod(shape.k))
            return Footprint(resident=resident, reads_carried=True, raises_peak=True)
        kernels = warpgroup if variant.text("units") == "warpgroup" else tensor
        resident = kernels.resident_bytes(shape.fin, shape.fout, shape.k, shape.precision)
        return Footprint(resident=resident, reads_carried=True, reads_peak=shape.precision != "fp16", raises_peak=True)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = as_conv(shape)
        ends = float(shape.in_bytes + shape.out_bytes)
        if variant.text("units") == "float":
            rounds = 2 if shape.activation == "softmax" else 1
            products = prod(shape.out_shape[:4]) * prod(shape.k) * shape.fin * floats.padded(shape.fout)
            return (Work("gpu_gemm_float", 2.0 * rounds * products, ends),)
        problem, split = Lowering.of(shape), shape.precision == "fp32"
        if variant.text("units") == "warpgroup":
            flops = warpgroup.flops_of(problem, shape.batch, warpgroup.SHARED)
            return (Work("gpu_wgmma_split" if split else "gpu_wgmma_half", flops, ends),)
        flops = tensor.flops_of(problem, shape.batch, tensor.LARGE)
        return (Work("gpu_gemm_split" if split else "gpu_gemm_half", flops, ends),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Any:
        assert weights is not None
        if variant.text("units") == "float":
            return floats.prepare(weights, device)
        kernels = warpgroup if variant.text("units") == "warpgroup" else tensor
        return kernels.prepare(weights, tensor.PRECISIONS[variant.text("precision")], device)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        shape = as_conv(shape)
        if variant.text("units") == "float":
            return _Step(floats.FloatProduct(resident, Lowering.of(shape), device))
        if variant.text("units") == "warpgroup":
            return _Step(warpgroup.WarpgroupProduct(resident, Lowering.of(shape), shape.batch, device))
        return _Step(tensor.TensorProduct(resident, Lowering.of(shape), shape.batch, device))


@lru_cache(maxsize=2)  # why_not and variants of a shape are requested one after the other
def _variants(shape: ConvShape, gpu: Gpu) -> tuple[Variant, ...]:
    problem, found = Lowering.of(shape), []
    if warpgroup.applies(problem, gpu):
        found.append(Variant.of(units="warpgroup", precision=shape.precision))
    if shape.activation != "softmax" and gpu.capability >= (8, 0):
        plan = tensor.plan_of(problem, shape.batch, gpu.shared_block_bytes)
        if plan is not None:
            found.append(Variant.of(units="tensor", precision=shape.precision))
    if shape.precision != "fp32" or prod(shape.k) * shape.fin <= floats.MOST_TERMS:
        found.append(Variant.of(units="float"))
    return tuple(found)


class _Step:
    """A DeviceStep."""

    def __init__(self, product: floats.FloatProduct | tensor.TensorProduct | warpgroup.WarpgroupProduct) -> None:
        self._product = product

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
