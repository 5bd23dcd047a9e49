"""Seconds of one layer, run by itself on values of its own: on the crew of a processor, on a GPU, or on both.

FFTW's timing rules: warm, repeated until a clock can tell. On a processor, and where it copies for a GPU, the median of
a few runs, since a network's layers meet with what disturbs them, too; on a GPU alone, where little does, the least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from znnpy.errors import DeviceError, DeviceLostError, VramError
from znnpy.kernels.aligned import aligned_bytes, touch
from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.measure.budget import LayerTimer, Placement
from znnpy.measure.fftw_wisdom import wisdom_kept
from znnpy.measure.layer_bench import DeviceLayer, HostLayer, HostRamLayer
from znnpy.shapes import LayerShape

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

REPEATS = 4
LONG_SECONDS = 0.02  # on a GPU: a layer that is estimated to take longer is measured on a smaller volume
CLOCK_SECONDS = 1e-3  # that a clock has to run, to be read exactly enough
SLOW_SECONDS = 0.25  # on a CPU: a run that takes longer is repeated only once
TOUCHED_PART = 2**26  # bytes of new memory between looks at the clock
MOST_TOUCHING = 2.0  # seconds, after which no further part is touched


@dataclass(frozen=True, slots=True)
class CpuTimer:
    """Times layers as `crew` runs them."""

    crew: ThreadPool
    now: Callable[[], float] = time.perf_counter

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """The median of a few runs after one that does not count; without preparing weights and planning transforms.

        Holds as many bytes as the primitive's footprint says, and the weights as they came.
        """
        return _median_seconds(HostLayer(self.crew, primitive, shape, variant).run, self.now)


@dataclass(frozen=True, slots=True)
class GpuTimer:
    """Times layers as `device` runs them, by events on its stream."""

    device: Device

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """As `measure`; DeviceError where the device refuses the layer, DeviceLostError where one broke it."""
        with _refusing(self.device):
            return measure(self.device, primitive, shape, variant)


@dataclass(frozen=True, slots=True)
class HostRamTimer:
    """Times layers as `device` and `crew` run them together: copies, uploads, all sub-layers and downloads."""

    device: Device
    crew: ThreadPool
    now: Callable[[], float] = time.perf_counter

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """The median of a few runs after one that does not count; errors as those of GpuClock."""
        with _refusing(self.device):
            return _median_seconds(HostRamLayer(self.device, self.crew, primitive, shape, variant).run, self.now)


@contextmanager
def timer_on(where: Placement, device: Device | None, machine: Machine, seconds: float) -> Iterator[LayerTimer]:
    """That of the layers which run there: inside, its threads are there.

    seconds  as long as a run takes for which transforms are planned
    """
    if where.device == "gpu":
        assert device is not None, "layers of a GPU are timed where one is open"
        if not where.hosted:
            yield GpuTimer(device)
            return
        with ThreadPool(where.threads) as crew:
            yield HostRamTimer(device, crew)
        return
    with ThreadPool(where.threads) as crew, wisdom_kept(machine, seconds):
        yield CpuTimer(crew)


def touching_rate(threads: int, nbytes: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second at which so many threads write to new memory for the first time, as a run does before its steps.

    Takes `nbytes` of memory meanwhile. It stops after MOST_TOUCHING seconds: what was written to until then counts.
    """
    block, done = aligned_bytes(nbytes), 0
    with ThreadPool(threads) as crew:
        begin = now()
        while done < nbytes and now() - begin < MOST_TOUCHING:
            part = block[done : done + TOUCHED_PART]
            touch(part, crew)
            done += part.size
        return done / (now() - begin)


@contextmanager
def _refusing(device: Device) -> Iterator[None]:
    """What a device refuses inside is a DeviceError; a DeviceLostError where it runs nothing any more."""
    try:
        yield
    except VramError:
        raise
    except DeviceError as refused:
        try:
            device.synchronize()
        except DeviceError:
            raise DeviceLostError(f"{device.gpu.name} runs nothing any more: {refused}") from None
        raise


def _median_seconds(run: Callable[[], None], now: Callable[[], float]) -> float:
    """Of one run, after one that does not count."""

    def spent(times: int) -> float:
        begin = now()
        for _ in range(times):
            run()
        return now() - begin

    spent(1)
    times = 1
    while (took := spent(times)) < CLOCK_SECONDS:
        times *= 2
    more = 1 if took > SLOW_SECONDS else REPEATS - 1
    return median([took, *(spent(times) for _ in range(more))]) / times


def measure(device: Device, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
    """Seconds that the GPU takes to run a layer: the least of a few runs, after one that does not count."""
    layer = DeviceLayer(device, primitive, shape, variant)
    started = time.perf_counter()
    layer.run()
    device.synchronize()
    long = time.perf_counter() - started > 10 * LONG_SECONDS  # unless it was compiled now: then it is run again
    first = min(device.elapsed(layer.run))
    return first if long and first > LONG_SECONDS else min(first, *device.elapsed(layer.run, REPEATS - 1))
