"""Seconds of a layer: its work, stage by stage, divided by the rates of the machine.

The default rates are assumed, not measured on the machine a plan is for: they were fitted on 2 cores of a Zen 5
processor with AVX-512 and 2 threads (2026-11-20: 27 runs of convolutions, 1 to 80 maps, k = 3 to 9, within 40 %, most
within 20 %; 20 of poolings, max-filters and maxouts, windows of 2 to 5, within a factor of 1.5), and are scaled by
threads and by the width of the vector instructions. Ratios between primitives hold better than the seconds do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from znnpy.kernels.primitive import Unit, Work
from znnpy.machine import Machine

_THREADS = 2  # of the run that the default rates come from
_SHARED = 0.8  # traffic grows with threads to this power: 14 GB/s of copies with 1 thread, 25 with 2
# 16 lanes, 8, and 4 with no fused multiply-add
_FLOPS_OF_AVX512 = {"avx512": 1.0, "avx2": 0.5, "other": 0.125}


@dataclass(frozen=True, slots=True)
class Rate:
    """What one kind of unit reaches when nothing else limits it."""

    flops: float  # per second
    nbytes: float  # per second, read and written together


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a machine with a given number of threads, per kind of unit."""

    product: Rate = Rate(flops=400e9, nbytes=25e9)
    fft: Rate = Rate(flops=74e9, nbytes=25e9)
    copy: Rate = Rate(flops=50e9, nbytes=25e9)
    pool: Rate = Rate(flops=50e9, nbytes=30e9)
    lane_product: Rate = Rate(flops=450e9, nbytes=28e9)
    lane_fft: Rate = Rate(flops=300e9, nbytes=40e9)
    lane_stream: Rate = Rate(flops=500e9, nbytes=42e9)
    stage_seconds: float = 5e-5  # to hand one stage to the threads and to wait for the last of them

    def of(self, unit: Unit) -> Rate:
        match unit:
            case "product":
                return self.product
            case "fft":
                return self.fft
            case "copy":
                return self.copy
            case "pool":
                return self.pool
            case "lane_product":
                return self.lane_product
            case "lane_fft":
                return self.lane_fft
            case "lane_stream":
                return self.lane_stream

    def scaled(self, flops: float, nbytes: float) -> Rates:
        """All rates multiplied."""

        def times(rate: Rate) -> Rate:
            return Rate(rate.flops * flops, rate.nbytes * nbytes)

        return Rates(
            times(self.product),
            times(self.fft),
            times(self.copy),
            times(self.pool),
            times(self.lane_product),
            times(self.lane_fft),
            times(self.lane_stream),
            self.stage_seconds,
        )


def assumed_rates(machine: Machine, threads: int) -> Rates:
    """The default rates for a machine that was not measured.

    Arithmetic grows with the threads, up to the cores; memory traffic less, as cores share the memory.
    """
    workers = min(threads, machine.cores) / _THREADS
    rates = Rates().scaled(flops=workers * _FLOPS_OF_AVX512[machine.simd], nbytes=workers**_SHARED)
    if machine.blas_warning is None:
        return rates
    slow = Rate(rates.product.flops * _FLOPS_OF_AVX512["avx2"], rates.product.nbytes)
    return replace(rates, product=slow)


def seconds(work: Sequence[Work], rates: Rates) -> float:
    """Time of all stages, one after the other; each takes as long as its arithmetic or its traffic, the longer one."""
    total = 0.0
    for stage in work:
        rate = rates.of(stage.unit)
        total += max(stage.flops / rate.flops, stage.nbytes / rate.nbytes) + rates.stage_seconds
    return total
