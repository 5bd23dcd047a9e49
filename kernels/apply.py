"""Run one primitive on one array without a plan: for pipelines that need a single layer, and for experiments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from znnpy.errors import ShapeError, ValuesOverflowError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import Variant
from znnpy.kernels.dtypes import kept_dtype
from znnpy.kernels.gpu.device import Device, find_gpu
from znnpy.kernels.table import find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import this_machine
from znnpy.network import ConvWeights
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.kernels.contract import Array, Primitive, Unit, Work
    from znnpy.layer_shapes import LayerShape

# Rough time of a floating-point operation and of a byte, relative to a flop of a matrix product, on any CPU or GPU.
# This is precise enough to choose a tile; the planner knows more.
_FLOP: dict[Unit, float] = {
    "product": 1.0,
    "fft": 5.0,
    "copy": 8.0,
    "pool": 8.0,
    "lane_product": 0.8,
    "lane_bf16_product": 0.4,
    "lane_amx_product": 0.1,
    "lane_fft": 1.3,
    "lane_stream": 0.8,
    "amx_product": 0.1,
    "bf16_product": 0.5,
}
_BYTE = 16.0


def apply(
    name: str,
    shape: LayerShape,
    x: Array,
    weights: ConvWeights | None = None,
    *,
    variant: Variant | None = None,
    threads: int | None = None,
) -> Array:
    """Compute the layer `shape` of `x` with the primitive called `name`.

    name     name of the primitive, for example "cpu.conv.fft_tiled"; `znnpy primitives` lists them.
    shape    sizes, kernel and activation of the layer; for a convolution a ConvShape.
    x        `shape.in_shape`, (S, z, y, x, f) float32, C order; read only.
    weights  for a convolution: kernels (f', f, kz, ky, kx), cross-correlation, and biases (f',); else None.
    variant  tile size, blocking and the like; default: the one with the least work.
    threads  threads on the CPU; default: every core this process may use.

    Returns `shape.out_shape` float32. Raises ShapeError if `x` or the weights do not fit the shape or the primitive
    does not apply (with the reason); KeyError for an unknown name; DeviceError if a GPU primitive finds no GPU or the
    GPU refuses memory; ValuesOverflowError if a convolution's result is not finite. Each call prepares weights and
    scratch again: a session keeps them.
    """
    machine, primitive = this_machine(), find(name)
    _check(shape, x, weights)
    on_gpu = name.startswith("gpu.")
    if on_gpu:
        machine = replace(machine, gpu=find_gpu())
    if reason := primitive.why_not(shape, machine):
        raise ShapeError(f"{name} does not apply to {shape}: {reason}")
    offered = primitive.variants(shape, machine)
    if variant is not None and variant not in offered:
        names = "; ".join(map(str, offered))
        raise ShapeError(f"{name} has no variant {variant or '(none)'} for {shape}; omit it, or pass one of: {names}")
    chosen = variant or min(offered, key=lambda v: _effort(primitive.work(shape, v)))
    if machine.gpu is not None:
        with Device(machine.gpu) as device:
            return _on_gpu(primitive, shape, x, weights, chosen, device)
    with ThreadPool(threads or machine.cores) as pool:
        step = primitive.bind(primitive.prepare(weights, chosen, pool), shape, chosen, pool)
        buffers = primitive.footprint(shape, chosen, pool.threads).scratch
        out = aligned_bytes(shape.out_bytes).view(kept_dtype(shape.precision)).reshape(shape.out_shape)
        step.run(
            x.astype(out.dtype, copy=False), out, {scratch.name: aligned_bytes(scratch.nbytes) for scratch in buffers}
        )
    return out.astype(np.float32, copy=False)


def _on_gpu(
    primitive: Primitive, shape: LayerShape, x: Array, weights: ConvWeights | None, variant: Variant, device: Device
) -> Array:
    footprint = primitive.footprint(shape, variant, 1)
    kept = kept_dtype(shape.precision)
    largest = np.abs(x).max()
    if largest > np.finfo(kept).max:
        raise ValuesOverflowError(f"{shape} received values up to {largest:.6g}, beyond float16; choose fp32 or tf32")
    step = primitive.bind(primitive.prepare(weights, variant, device), shape, variant, device)
    source = device.put(x.astype(kept), "a layer's input")
    target = device.view(device.allocate(shape.out_bytes, "a layer's output"), shape.out_shape, kept)
    scratch = {buffer.name: device.allocate(buffer.nbytes, buffer.name) for buffer in footprint.scratch}
    peaks = device.put(np.array([largest, 0.0], np.float32), "largest values")
    first = device.address(peaks)
    step.run(
        source,
        target,
        scratch,
        x_peak=first if footprint.reads_peak else 0,
        out_peak=first + peaks.itemsize if footprint.raises_peak else 0,
    )
    out: Array = device.get(target).astype(np.float32)
    if isinstance(shape, ConvShape) and not np.isfinite(out).all():
        raise ValuesOverflowError(f"{primitive.name} computed non-finite values for {shape} in {shape.precision}")
    return out


def _check(shape: LayerShape, x: Array, weights: ConvWeights | None) -> None:
    if x.shape != shape.in_shape or x.dtype != np.float32 or not x.flags.c_contiguous:
        raise ShapeError(
            f"{shape} takes (S, z, y, x, f) = {shape.in_shape} float32 in C order, not {x.shape} {x.dtype}; "
            "use numpy.ascontiguousarray(x, numpy.float32)"
        )
    needed = (shape.fout, shape.fin, *shape.k) if isinstance(shape, ConvShape) else None
    given = None if weights is None else weights.weight.shape
    if given != needed:
        raise ShapeError(f"{shape} takes kernels of shape {needed}, not {given}; give ConvWeights to convolutions only")
    if weights is None or not isinstance(shape, ConvShape):
        return
    if weights.bias.shape != (shape.fout,):
        raise ShapeError(f"{shape} takes biases of shape {(shape.fout,)}, not {weights.bias.shape}")
    for what, array in (("kernels", weights.weight), ("biases", weights.bias)):
        if array.dtype != np.float32:
            raise ShapeError(f"{shape} takes {what} of float32, not {array.dtype}; use numpy.float32(array)")


def _effort(work: Sequence[Work]) -> float:
    """Return a number that grows with the time of all stages."""
    return sum(max(_FLOP.get(stage.unit, 1.0) * stage.flops, _BYTE * stage.nbytes) for stage in work)
