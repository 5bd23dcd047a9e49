"""Seconds of one layer, run by itself on values of its own: on the crew of a processor, or on a GPU.

FFTW's timing rules: warm, repeated until a clock can tell. On a processor the median of a few runs, since a network's
layers meet with what disturbs them, too; on a GPU, where little does, the least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from znnpy.errors import DeviceError, DeviceLostError, VramError
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import Primitive, Variant
from znnpy.run.layer import DeviceLayer, HostLayer
from znnpy.run.wisdom import wisdom_kept
from znnpy.shapes import LayerShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

REPEATS = 4
LONG_SECONDS = 0.02  # on a GPU: a layer that is estimated to take longer is measured on a smaller volume
CLOCK_SECONDS = 1e-3  # that a clock has to run, to be read exactly enough
SLOW_SECONDS = 0.25  # on a CPU: a run that takes longer is repeated only once


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Times layers as `crew` runs them."""

    crew: Crew
    now: Callable[[], float] = time.perf_counter

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """The median of a few runs after one that does not count; without preparing weights and planning transforms.

        Holds as many bytes as the primitive's footprint says, and the weights as they came.
        """
        layer = HostLayer(self.crew, primitive, shape, variant)

        def spent(times: int) -> float:
            begin = self.now()
            for _ in range(times):
                layer.run()
            return self.now() - begin

        spent(1)
        times = 1
        while (took := spent(times)) < CLOCK_SECONDS:
            times *= 2
        more = 1 if took > SLOW_SECONDS else REPEATS - 1
        return median([took, *(spent(times) for _ in range(more))]) / times


@dataclass(frozen=True, slots=True)
class GpuClock:
    """Times layers as `device` runs them, by events on its stream."""

    device: Device

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """As `measure`; DeviceError where the device refuses the layer, DeviceLostError where one broke it."""
        try:
            return measure(self.device, primitive, shape, variant)
        except VramError:
            raise
        except DeviceError as refused:
            try:
                self.device.synchronize()
            except DeviceError:
                raise DeviceLostError(f"{self.device.gpu.name} runs nothing any more: {refused}") from None
            raise


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
    layer = DeviceLayer(device, primitive, shape, variant)
    started = time.perf_counter()
    layer.run()
    device.synchronize()
    long = time.perf_counter() - started > 10 * LONG_SECONDS  # unless it was compiled now: then it is run again
    first = min(device.elapsed(layer.run))
    return first if long and first > LONG_SECONDS else min(first, *device.elapsed(layer.run, REPEATS - 1))
