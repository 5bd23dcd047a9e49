"""Layers of more than 2^31 values, on a device: every way to convolve, at voxels from the first to the last.

Every variant that computes places in a way of its own is a case: blocks, parts and units are compiled in, each with its
own arithmetic. Tiles and groups of gpu.conv.fft_tiled are not: they give other sizes to the same arithmetic, so of
either way to hold its kernels the least scratch, whose loops go round most often, and the most, whose places lie
farthest, stand for all. A case is one run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, random_weights
from tests.support.emulator import EMULATED_GPU
from znnpy.kernels.table import of_kind
from znnpy.shapes import GPU_PRECISIONS, ConvShape

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import ConvWeights, Footprint, Primitive, Variant
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine
    from znnpy.shapes import Precision

SHAPE = ConvShape(1, 80, 80, (304, 302, 302), (2, 3, 2), "relu")
PLANES = 7  # that differ: a prime, so that a step of 2^32 bytes hits another
VOXELS = 200
MARGIN = 2**30  # bytes of the device for what is not counted here
ALLOWED = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 5e-3}
CONVOLUTIONS = [primitive for primitive in of_kind("conv") if primitive.name.startswith("gpu.")]


SAME_ARITHMETIC = "gpu.conv.fft_tiled"  # in all its sizes
Case = tuple["Primitive", "Precision", "Variant | None"]  # None: what this machine does not know


def by_memory(primitive: Primitive, shape: ConvShape, machine: Machine) -> list[Variant]:
    """All variants, the least greedy first."""

    def needs(variant: Variant) -> int:
        footprint = primitive.footprint(shape, variant, 1)
        return footprint.working(shape) + footprint.resident

    return sorted(primitive.variants(shape, machine), key=needs)


def cases() -> list[Case]:
    """Return one case for each way of indexing on the emulated card; cuDNN chooses on the device."""
    machine = replace(MACHINE, gpu=EMULATED_GPU)
    found: list[Case] = []
    for primitive in CONVOLUTIONS:
        for precision in GPU_PRECISIONS:
            shape = replace(SHAPE, precision=precision)
            if primitive.why_not(shape, machine):
                found.append((primitive, precision, None))
                continue
            variants = by_memory(primitive, shape, machine)
            if primitive.name == SAME_ARITHMETIC:
                ways = {word: [v for v in variants if v.text("kernels") == word] for word in ("kept", "streamed")}
                variants = [variant for some in ways.values() for variant in (some[0], some[-1])]
            found += [(primitive, precision, variant) for variant in variants]
    return found


def words(case: Case) -> str:
    primitive, precision, variant = case
    return f"{primitive.name}-{precision}-{str(variant or '').replace(' ', ',')}".rstrip("-")


@cache
def random_planes() -> npt.NDArray[np.float32]:
    """PLANES of the input: (PLANES, y, x, f)."""
    return np.random.default_rng(20261121).standard_normal((PLANES, *SHAPE.in_shape[2:]), np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=words)
def test_large_layers_equal_the_definition_up_to_the_last_voxel(cuda_device: Device, case: Case) -> None:
    primitive, precision, variant = case
    device, shape = cuda_device, replace(SHAPE, precision=precision)
    assert min(prod(shape.in_shape), prod(shape.out_shape)) > 2**31
    machine = replace(MACHINE, gpu=device.gpu)
    if reason := primitive.why_not(shape, machine):
        pytest.skip(reason)
    variants = by_memory(primitive, shape, machine)
    if variant is not None and variant not in variants:
        pytest.skip(f"this card has no {variant} of {primitive.name}")
    compare(device, primitive, shape, variants[0] if variant is None else variant)


def compare(device: Device, primitive: Primitive, shape: ConvShape, variant: Variant) -> None:
    """One run, against the definition at VOXELS places and both ends."""
    footprint = primitive.footprint(shape, variant, 1)
    needed = shape.in_bytes + shape.out_bytes + footprint.resident + sum(s.nbytes for s in footprint.scratch) + MARGIN
    if needed > device.free_bytes():
        pytest.skip(f"wants {needed / 2**30:.0f} GiB of the device")
    weights = random_weights(shape)
    planes = random_planes().astype(np.float16 if shape.precision == "fp16" else np.float32)
    out = computed(device, primitive, shape, variant, footprint, planes, weights)

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
    assert error <= ALLOWED[shape.precision]


def computed(
    device: Device,
    primitive: Primitive,
    shape: ConvShape,
    variant: Variant,
    footprint: Footprint,
    planes: npt.NDArray[Any],
    weights: ConvWeights,
) -> Any:
    """Return the output on the device, which held NaN before."""
    few = device.put(planes, "planes")
    x = device.view(device.allocate(shape.in_bytes, "x"), shape.in_shape, planes.dtype)
    for z in range(shape.n[0]):
        device.copy_async(x[0, z], few[z % PLANES], device.stream)
    out = device.view(device.allocate(shape.out_bytes, "out"), shape.out_shape, planes.dtype)
    device.synchronize()
    out.fill(np.nan)
    device.synchronize()
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
    device.synchronize()  # what it works on goes when this returns
    return out
