"""A clock for work on a GPU that is shorter than its launch, such as small layers of the papers."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

HOLD_BYTES = 2**27  # size of the copy that holds work back, a tenth of a millisecond long
MOST_HOLDS = 300
SPARE = 1.5  # the device is held this many times as long as the host needs
USUAL_SECONDS = 5e-5  # assumed time that the host needs to queue a run, until it is measured
LONG_SECONDS = 2e-3  # a run this long finds nothing in a cache that was put there before it
TRIES = 3
COPIES = 3  # the median counts


def holds(host_seconds: float, copy_seconds: float) -> int:
    """Return how many copies take longer than the host needs."""
    return min(MOST_HOLDS, ceil(SPARE * host_seconds / copy_seconds))


class HeldClock:
    """A clock that times work by events of the device, without the host, which needs longer to launch a small layer.

    The work waits on the device behind copies until the host has queued all of it; if the host was slower than assumed,
    the series is timed again. The copies empty the L2 cache, so a run that does not count precedes the first event: the
    runs that count find the cache in the state that a previous run left.
    """

    def __init__(self, device: Any, nbytes: int = HOLD_BYTES) -> None:
        self._device, self._nbytes = device, nbytes
        self._source, self._target = (device.allocate(nbytes, "what holds work back") for _ in range(2))
        self._begin()

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Return the seconds of one run, when `repeats` are queued one after the other."""
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
        """Return the seconds of a copy that reads half of `nbytes` and writes the other half.

        The time of copies larger than `HOLD_BYTES` is scaled.
        """
        half = max(1, nbytes // 2)
        part = min(half, self._nbytes)
        source, target = (self._device.view(one, (part,), np.uint8) for one in (self._source, self._target))

        def copy() -> None:
            self._device.copy_async(target, source, self._device.stream)

        self.seconds(copy)
        return median(self.seconds(copy, 4) for _ in range(COPIES)) * half / part

    def _begin(self) -> None:
        """Measure how long a copy takes, in a series of copies."""
        self._elapsed(self._copy)
        self._copy_seconds = self._elapsed(self._copies) / COPIES
        # Time that the host takes to queue a known run, and time that the device takes to run it.
        self._host: WeakKeyDictionary[Callable[[], Any], float] = WeakKeyDictionary()
        self._spent: WeakKeyDictionary[Callable[[], Any], float] = WeakKeyDictionary()

    def _copy(self) -> None:
        self._device.copy_async(self._target, self._source, self._device.stream)

    def _copies(self) -> None:
        for _ in range(COPIES):
            self._copy()

    def _elapsed(self, work: Callable[[], Any]) -> float:
        return float(sum(self._device.elapsed(work)))


class HeldTorchClock(HeldClock):
    """A clock that times work queued by PyTorch as `HeldClock` does."""

    def __init__(self, device: Any, nbytes: int = HOLD_BYTES) -> None:
        import torch

        self._tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._device = device
        self._begin()

    def _copy(self) -> None:
        self._tensors[0].copy_(self._tensors[1])

    def _elapsed(self, work: Callable[[], Any]) -> float:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
