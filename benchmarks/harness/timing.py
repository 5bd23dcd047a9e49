"""Time work in interleaved rounds, with clocks of host and device and a time budget; find peaks of memory.

Each round runs every entry once, in an order that alternates, so that a drift of the machine's speed affects all
entries alike. Every entry runs once before the first round counts: in this run memory is touched for the first time,
kernels are compiled and libraries choose their algorithms.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol, Self

PAUSE = 0.02  # seconds before a run on the CPU: OpenMP's threads spin for a while when their work is done
LEAST_SECONDS = 4e-3  # shorter work is repeated, and timed together
MOST_REPEATS = 50
LOOK_SECONDS = 0.02  # time between two readings of memory


class Budget:
    """The time that a benchmark may take; it writes the results so far when the time is up."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Remaining seconds; never negative."""
        return max(0.0, self._end - time.monotonic())

    def allows(self, seconds: float) -> bool:
        """Return whether work that takes `seconds` fits into the remaining time."""
        return seconds <= self.left


class Clock(Protocol):
    """A clock that times work."""

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Return the seconds of one run, averaged over `repeats` consecutive ones."""
        ...


class WallClock:
    """A clock for work on the CPU, which is done when the call returns."""

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Return the seconds of one run, by the host's clock."""
        time.sleep(self._pause)
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats


class DeviceClock:
    """A clock for work queued on the stream of a `znnpy.Device`, by events of the device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds of one run, when `repeats` are queued one behind the other on an idle device."""
        self._device.synchronize()
        return float(sum(self._device.elapsed(run, repeats))) / repeats


class TorchClock:
    """A clock for work that PyTorch queues on a GPU, by events."""

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds of one run, when `repeats` are queued one behind the other on an idle device."""
        import torch

        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats


class Rotation:
    """Input arrays in rotation: together they are larger than the cache, so that it never holds the next one."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays, self._next = arrays, 0

    def __call__(self) -> Any:
        """Return the next array."""
        self._next = (self._next + 1) % len(self._arrays)
        return self._arrays[self._next]

    @staticmethod
    def count(nbytes: int, cache_bytes: int, most: int = 8) -> int:
        """Return how many arrays of `nbytes` exceed twice the cache; at least 1, at most `most`."""
        return max(1, min(most, ceil(2 * cache_bytes / max(1, nbytes)) + 1)) if nbytes < 2 * cache_bytes else 1


@dataclass
class Entry:
    """A piece of work that is timed in interleaved rounds.

    repeats  runs that are timed together; 0: as many as last LEAST_SECONDS.
    """

    name: str
    run: Callable[[], Any]
    clock: Clock
    seconds: list[float] = field(default_factory=list)
    repeats: int = 0


def interleave(entries: Sequence[Entry], rounds: int, budget: Budget) -> None:
    """Fill `seconds` of all entries in at least one round; no further round begins when the time is up.

    Every entry must have run before.
    """
    for entry in entries:
        entry.repeats = entry.repeats or repeats_of(entry.clock.seconds(entry.run))
    for number in range(rounds):
        if number and not budget.allows(sum(entry.seconds[-1] * entry.repeats for entry in entries)):
            return
        for entry in entries if number % 2 == 0 else reversed(entries):
            entry.seconds.append(entry.clock.seconds(entry.run, entry.repeats))


def repeats_of(seconds: float) -> int:
    """Return how many runs of this length are timed together."""
    return min(MOST_REPEATS, max(1, ceil(LEAST_SECONDS / max(seconds, 1e-9))))


class LowestFree:
    """Finds the least free memory of a device while it is open; a context manager.

    free_bytes  least free memory so far.
    """

    def __init__(self, device: Any, pause: float = LOOK_SECONDS) -> None:
        self._device, self._pause = device, pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.free_bytes = int(device.free_bytes())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *cause: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._pause):
            self.free_bytes = min(self.free_bytes, int(self._device.free_bytes()))


def peak_bytes() -> int:
    """Return the largest resident memory that this process ever had."""
    import resource

    scale = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
