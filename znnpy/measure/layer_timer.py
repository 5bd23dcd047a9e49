"""Time one layer by itself: on the threads of a processor, on a GPU, or on both.

The rules are FFTW's: a first run does not count, and short runs are repeated until a clock can tell. On a processor,
also if it copies for a GPU, the median of a few runs counts, since the layers of a network are disturbed like these. On
a GPU alone, where little disturbs, the least counts.
"""

from __future__ import annotations

import logging
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
from znnpy.layer_shapes import LayerShape
from znnpy.measure.budget import LayerTimer, Placement
from znnpy.measure.fftw_wisdom import wisdom_kept
from znnpy.measure.layer_bench import DeviceLayer, HostLayer, HostRamLayer

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine

_log = logging.getLogger(__name__)

REPEATS = 4
LONG_SECONDS = 0.02  # on a GPU: a layer that is estimated to take longer is measured on a smaller volume
CLOCK_SECONDS = 1e-3  # shorter times are not read exactly enough from a clock
SLOW_SECONDS = 0.25  # on a CPU: a run that takes longer is repeated only once
TOUCHED_PART = 2**26  # bytes of new memory between looks at the clock
MOST_TOUCHING = 2.0  # seconds, after which no further part is touched


@dataclass(frozen=True, slots=True)
class CpuTimer:
    """Times layers on the threads of `pool`."""

    pool: ThreadPool
    now: Callable[[], float] = time.perf_counter

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """Return the median of a few runs after one that does not count.

        Weights are prepared and transforms are planned before. As many bytes are held as the footprint of the primitive
        says, and the plain weights.
        """
        return _median_seconds(HostLayer(self.pool, primitive, shape, variant).run, self.now)


@dataclass(frozen=True, slots=True)
class GpuTimer:
    """Times layers on `device` by events on its stream."""

    device: Device

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """Return what `measure` does; DeviceError if the device refuses the layer, DeviceLostError if it broke."""
        with _refusing(self.device):
            return measure(self.device, primitive, shape, variant)


@dataclass(frozen=True, slots=True)
class HostRamTimer:
    """Times layers that `device` and `pool` run together: copies, uploads, all sub-layers and downloads."""

    device: Device
    pool: ThreadPool
    now: Callable[[], float] = time.perf_counter

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """Return the median of a few runs after one that does not count; errors are those of GpuTimer."""
        with _refusing(self.device):
            return _median_seconds(HostRamLayer(self.device, self.pool, primitive, shape, variant).run, self.now)


@contextmanager
def timer_on(where: Placement, device: Device | None, machine: Machine, seconds: float) -> Iterator[LayerTimer]:
    """Open the timer of layers that run there; its threads live inside the block.

    seconds  length of the run for which transforms are planned
    """
    if where.device == "gpu":
        assert device is not None, "layers of a GPU are timed where one is open"
        if not where.in_host_ram:
            yield GpuTimer(device)
            return
        with ThreadPool(where.threads) as pool:
            yield HostRamTimer(device, pool)
        return
    with ThreadPool(where.threads) as pool, wisdom_kept(machine, seconds) as wisdom:
        yield CpuTimer(pool)
    for sentence in wisdom.sentences:
        _log.warning("%s", sentence)


def touching_rate(threads: int, nbytes: int, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the bytes per second at which threads write to new memory, as a run does before its steps.

    It takes `nbytes` of memory meanwhile. It stops after MOST_TOUCHING seconds, and what was written by then counts.
    """
    block, done = aligned_bytes(nbytes), 0
    with ThreadPool(threads) as pool:
        begin = now()
        while done < nbytes and now() - begin < MOST_TOUCHING:
            part = block[done : done + TOUCHED_PART]
            touch(part, pool)
            done += part.size
        return done / (now() - begin)


@contextmanager
def _refusing(device: Device) -> Iterator[None]:
    """Raise what a device refuses inside as a DeviceError, and as a DeviceLostError if it runs nothing any more."""
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
    """Return the median seconds of one run, after one that does not count."""

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
    """Return the seconds that the GPU takes to run a layer: the least of a few runs, after one that does not count."""
    layer = DeviceLayer(device, primitive, shape, variant)
    started = time.perf_counter()
    layer.run()
    device.synchronize()
    long = time.perf_counter() - started > 10 * LONG_SECONDS  # unless it was compiled now: then it is run again
    first = min(device.elapsed(layer.run))
    return first if long and first > LONG_SECONDS else min(first, *device.elapsed(layer.run, REPEATS - 1))
