"""Clocks of `papers.py`, for work that is shorter than its launch, and where the time of a whole experiment goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from gpu_card import Clock, Device, TorchClock

if TYPE_CHECKING:
    from layer_entries_gpu import Times

HOLD_BYTES = 2**27  # of the copy that holds work back, a tenth of a millisecond long
MOST_HOLDS = 300
SPARE = 1.5  # times as long is the device held as the host needs
USUAL_SECONDS = 5e-5  # that the host needs to queue a run, until it is known
LONG_SECONDS = 2e-3  # such a run finds nothing in a cache that was put there before it
TRIES = 3
COPIES = 3  # the median counts
SERIES_SECONDS, MOST_RUNS = 1e-3, 12  # of one series, at least and at most


def series_of(once_seconds: float) -> int:
    """Runs between two events."""
    return min(MOST_RUNS, max(1, ceil(SERIES_SECONDS / max(once_seconds, 1e-9))))


def holds(host_seconds: float, copy_seconds: float) -> int:
    """Copies that take longer than the host takes."""
    return min(MOST_HOLDS, ceil(SPARE * host_seconds / copy_seconds))


class HeldClock:
    """Seconds of work by events of the device, without the host: a launch takes it longer than a small layer runs.

    Work waits on the device behind copies until the host has queued all of it; where the host was slower than known,
    once more. The copies empty the L2 cache, so a run that does not count goes before the first event: those that do
    find the cache as a run before them left it.
    """

    def __init__(self, device: Device, nbytes: int = HOLD_BYTES) -> None:
        self._device, self._nbytes = device, nbytes
        self._source, self._target = (device.allocate(nbytes, "what holds work back") for _ in range(2))
        self._begin(Clock(device))

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Of one run, when `repeats` are queued one behind the other."""
        warm = 1 if self._spent.get(run, 0.0) < LONG_SECONDS else 0
        spent = 0.0
        for _ in range(TRIES):
            self._device.synchronize()
            held = holds((warm + repeats) * self._host.get(run, USUAL_SECONDS), self._copy_seconds)
            for _ in range(held):
                self._copy()
            begin = time.perf_counter()
            for _ in range(warm):
                run()
            host = 0.0

            def series() -> None:
                nonlocal host
                for _ in range(repeats):
                    run()
                host = time.perf_counter() - begin  # noqa: B023  it is called before `begin` changes

            spent = self._elapsed(series) / repeats
            self._host[run] = min(self._host.get(run, host), host / (warm + repeats))
            self._spent[run] = spent
            if held == MOST_HOLDS or held * self._copy_seconds + warm * spent >= host:
                break
            self._host[run] = host / (warm + repeats)
        return spent

    def copied_seconds(self, nbytes: int) -> float:
        """Of a copy that reads half of so many bytes and writes the other half; larger ones than `HOLD_BYTES` scale."""
        half = max(1, nbytes // 2)
        part = min(half, self._nbytes)
        source, target = (self._device.view(one, (part,), np.uint8) for one in (self._source, self._target))

        def copy() -> None:
            self._device.copy_async(target, source, self._device.stream)

        times = series_of(self.seconds(copy))
        return median(self.seconds(copy, times) for _ in range(COPIES)) * half / part

    def _begin(self, clock: Times) -> None:
        clock.seconds(self._copy)
        self._copy_seconds = clock.seconds(self._copy, 4)  # not of the first
        # Of a run that the clock has seen: what the host takes to queue it, what the device to run it.
        self._host: WeakKeyDictionary[Callable[[], Any], float] = WeakKeyDictionary()
        self._spent: WeakKeyDictionary[Callable[[], Any], float] = WeakKeyDictionary()

    def _copy(self) -> None:
        self._device.copy_async(self._target, self._source, self._device.stream)

    def _elapsed(self, work: Callable[[], None]) -> float:
        return float(sum(self._device.elapsed(work)))


class HeldTorchClock(HeldClock):
    """The same for work that PyTorch queues."""

    def __init__(self, device: Device, nbytes: int = HOLD_BYTES) -> None:
        import torch

        self._tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._device = device
        self._begin(TorchClock())

    def _copy(self) -> None:
        self._tensors[0].copy_(self._tensors[1])

    def _elapsed(self, work: Callable[[], None]) -> float:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Spent:
    """Where the time goes: seconds by what they were for, those of what is within something else not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = [0.0]  # seconds of what is done within each that is open

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            total = time.perf_counter() - begin
            self.seconds[what] = self.seconds.get(what, 0.0) + total - self._within.pop()
            self._within[-1] += total

    def line(self) -> str:
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        told = "; ".join(f"{what} {seconds:.1f}" for what, seconds in parts)
        return f"{sum(self.seconds.values()):.0f} s went into: {told}"
