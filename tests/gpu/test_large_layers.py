"""Layers of more than 2^31 values, on a device: every way to convolve, at voxels from the first to the last."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest
from closeness import MACHINE, random_weights

from znnpy.kernels.table import of_kind
from znnpy.shapes import PRECISIONS, ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.primitive import Primitive
    from znnpy.shapes import Precision

SHAPE = ConvShape(1, 80, 80, (304, 302, 302), (2, 3, 2), "relu")
PLANES = 7  # that differ: a prime, so that a step of 2^32 bytes hits another
VOXELS = 200
MARGIN = 2**30  # bytes of the device for what is not counted here
ALLOWED = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 5e-3}
CONVOLUTIONS = [primitive for primitive in of_kind("conv") if primitive.name.startswith("gpu.")]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("primitive", CONVOLUTIONS, ids=lambda primitive: primitive.name)
def test_equals_the_definition_up_to_the_last_voxel(
    cuda_device: Device, primitive: Primitive, precision: Precision
) -> None:
    device, shape = cuda_device, replace(SHAPE, precision=precision)
    assert min(prod(shape.in_shape), prod(shape.out_shape)) > 2**31
    machine = replace(MACHINE, gpu=device.gpu)
    if reason := primitive.why_not(shape, machine):
        pytest.skip(reason)
    prints = [(v, primitive.footprint(shape, v, 1)) for v in primitive.variants(shape, machine)]
    variant, footprint = min(prints, key=lambda pair: pair[1].working(shape) + pair[1].resident)
    needed = shape.in_bytes + shape.out_bytes + footprint.resident + sum(s.nbytes for s in footprint.scratch) + MARGIN
    if needed > device.free_bytes():
        pytest.skip(f"wants {needed / 2**30:.0f} GiB of the device")

    dtype = np.float16 if precision == "fp16" else np.float32
    weights = random_weights(shape)
    planes = np.random.default_rng(20261121).standard_normal((PLANES, *shape.in_shape[2:]), np.float32).astype(dtype)
    few = device.put(planes, "planes")
    x = device.view(device.allocate(shape.in_bytes, "x"), shape.in_shape, dtype)
    for z in range(shape.n[0]):
        device.copy_async(x[0, z], few[z % PLANES], device.stream)
    out = device.view(device.allocate(shape.out_bytes, "out"), shape.out_shape, dtype)
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in footprint.scratch}
    peaks = device.put(np.array([float(np.abs(planes).max()), 0.0], np.float32), "peaks")
    step = primitive.bind(primitive.prepare(weights, variant, device), shape, variant, device)
    address = device.address(peaks)
    step.run(
        x,
        out,
        scratch,
        x_peak=address if footprint.reads_peak else 0,
        out_peak=address + 4 if footprint.raises_peak else 0,
    )

    rng = np.random.default_rng(1)
    places = [tuple(int(rng.integers(m)) for m in shape.out) for _ in range(VOXELS)]
    places += [(0, 0, 0), (shape.out[0] - 1, shape.out[1] - 1, shape.out[2] - 1)]
    kernel = weights.weight.astype(np.float64).transpose(2, 3, 4, 1, 0)
    found, exact = [], []
    for z, y, v in places:
        window = np.stack([planes[(z + d) % PLANES, y : y + shape.k[1], v : v + shape.k[2]] for d in range(shape.k[0])])
        exact.append(np.maximum(np.tensordot(window.astype(np.float64), kernel, 4) + weights.bias, 0))
        found.append(device.get(out[0, z, y, v]).astype(np.float64))
    error = np.sqrt(np.mean(np.square(np.array(found) - exact)) / np.mean(np.square(exact)))
    assert error <= ALLOWED[precision]
