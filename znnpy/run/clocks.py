"""Seconds of one layer, run by itself on values of its own: on the crew of a processor, or on a GPU.

FFTW's timing rules: warm, repeated until a clock can tell, the least of a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import ConvWeights, Primitive, Variant
from znnpy.run.wisdom import wisdom_kept
from znnpy.shapes import ConvShape, LayerShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

REPEATS = 4
LONG_SECONDS = 0.02  # on a GPU: a layer that is estimated to take longer is measured on a smaller volume
CLOCK_SECONDS = 1e-3  # that a clock has to run, to be read exactly enough
SLOW_SECONDS = 0.25  # on a CPU: a run that takes longer is repeated only once
BLOCK = 2**20  # random numbers that inputs are made of


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Times layers as `crew` runs them."""

    crew: Crew
    now: Callable[[], float] = time.perf_counter

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """The least of a few runs after one that does not count; without preparing weights and planning transforms.

        Holds as many bytes as the primitive's footprint says, and the weights as they came.
        """
        rng = np.random.default_rng(20261121)
        resident = primitive.prepare(_weights(shape, rng), variant, self.crew)
        step = primitive.bind(resident, shape, variant, self.crew)
        x = aligned_bytes(shape.in_bytes).view(np.float32)
        block = rng.standard_normal(min(BLOCK, x.size), np.float32)
        for start in range(0, x.size, block.size):
            x[start : start + block.size] = block[: x.size - start]
        image = x.reshape(shape.in_shape)
        out = aligned_bytes(shape.out_bytes).view(np.float32).reshape(shape.out_shape)
        scratch = {
            s.name: aligned_bytes(s.nbytes) for s in primitive.footprint(shape, variant, self.crew.threads).scratch
        }

        def spent(times: int) -> float:
            begin = self.now()
            for _ in range(times):
                step.run(image, out, scratch)
            return self.now() - begin

        spent(1)
        times = 1
        while (took := spent(times)) < CLOCK_SECONDS:
            times *= 2
        more = 1 if took > SLOW_SECONDS else REPEATS - 1
        return min(took, *(spent(times) for _ in range(more))) / times


@dataclass(frozen=True, slots=True)
class GpuClock:
    """Times layers as `device` runs them, by events on its stream."""

    device: Device

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """As `measure`; DeviceError where the device refuses the layer, or a layer before broke it."""
        return measure(self.device, primitive, shape, variant)


@contextmanager
def clock_of(device: Device | None, machine: Machine, threads: int, seconds: float) -> Iterator[CpuClock | GpuClock]:
    """That of a GPU; of the processor where there is none: inside, its threads are there.

    seconds  as long as a run takes for which transforms are planned
    """
    if device is not None:
        yield GpuClock(device)
        return
    with Crew(threads) as crew, wisdom_kept(machine, seconds):
        yield CpuClock(crew)


def measure(device: Device, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
    """Seconds that the GPU takes to run a layer: the least of a few runs, after one that does not count."""
    rng = np.random.default_rng(20261121)
    dtype = np.dtype(np.float16 if shape.precision == "fp16" else np.float32)
    footprint = primitive.footprint(shape, variant, 1)
    resident = primitive.prepare(_weights(shape, rng), variant, device)
    step = primitive.bind(resident, shape, variant, device)
    x = device.view(device.allocate(shape.in_bytes, "a layer's input"), shape.in_shape, dtype)
    _fill(device, x, rng)
    out = device.view(device.allocate(shape.out_bytes, "a layer's output"), shape.out_shape, dtype)
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in footprint.scratch}
    peaks = device.put(np.array([8.0, 0.0], np.float32), "largest values")
    words = {
        "x_peak": device.address(peaks) if footprint.reads_peak else 0,
        "out_peak": device.address(peaks) + peaks.itemsize if footprint.raises_peak else 0,
    }

    def run() -> None:
        step.run(x, out, scratch, **words)

    started = time.perf_counter()
    run()
    device.synchronize()
    long = time.perf_counter() - started > 10 * LONG_SECONDS  # unless it was compiled now: then it is run again
    first = min(device.elapsed(run))
    return first if long and first > LONG_SECONDS else min(first, *device.elapsed(run, REPEATS - 1))


def _weights(shape: LayerShape, rng: np.random.Generator) -> ConvWeights | None:
    """Such that values neither grow nor shrink much."""
    if not isinstance(shape, ConvShape):
        return None
    kernels = rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32)
    kernels /= np.float32(np.sqrt(kernels[0].size))
    return ConvWeights(kernels, np.zeros(shape.fout, np.float32))


def _fill(device: Device, x: Any, rng: np.random.Generator) -> None:
    """Random numbers, the same again and again: zeros would be multiplied faster."""
    flat = x.reshape(-1)
    block = device.put(rng.standard_normal(min(BLOCK, flat.size), np.float32).astype(flat.dtype), "random numbers")
    for start in range(0, flat.size, block.size):
        part = flat[start : start + block.size]
        device.copy_async(part, block[: part.size], device.stream)
    device.synchronize(device.stream)
