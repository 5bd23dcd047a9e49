"""Traces what a GPU does, from events on its streams around each piece of work.

Clock  A GPU gives the seconds between two events in float32. Each step therefore has an event of its own, on an idle
       stream, whose time the host reads when it happens, usually within ten microseconds: errors do not add up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from znnpy.run.trace import Spans

ANCHOR_SECONDS = 0.001  # within which the host has to see the event of a step; otherwise the event before is used


@dataclass(frozen=True, slots=True)
class _Work:
    """A queued piece of work, and the events around it."""

    track: str
    name: str
    begin: Any
    end: Any
    facts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Step:
    number: int  # counted from the first of the session
    event: Any  # it happened before all work of the step
    at: float  # its time by `time.perf_counter()`
    work: list[_Work] = field(default_factory=list)


class GpuTrace:
    """Records what a session queues on `device` in `trace`, when each step is over."""

    def __init__(self, trace: Spans, device: Any) -> None:
        self._trace, self._device = trace, device
        self._steps: deque[_Step] = deque()  # steps that are not over
        self._count = 0
        self._ended: dict[str, float] = {}  # end of the last span of each track
        self._anchor(inf)

    def begin(self) -> None:
        """Begin the next step, to which what is queued from now on belongs."""
        self._anchor(ANCHOR_SECONDS)
        self._steps.append(_Step(self._count, *self._base))
        self._count += 1

    @contextmanager
    def span(self, track: str, stream: Any, name: str, **facts: int) -> Iterator[None]:
        """Trace what is queued on `stream` within."""
        begin = self._mark(stream)
        yield
        self._steps[-1].work.append(_Work(track, name, begin, self._mark(stream), facts))

    def end(self) -> None:
        """Record the oldest step, which the device has finished."""
        step = self._steps.popleft()
        for work in step.work:
            begin, end = (step.at + self._device.seconds_between(step.event, event) for event in (work.begin, work.end))
            begin = max(begin, self._ended.get(work.track, -inf))  # the clocks of two steps may differ by microseconds
            self._ended[work.track] = end = max(begin, end)
            self._trace.record(work.track, work.name, begin, end, step=step.number, **work.facts)

    def end_all(self) -> None:
        """Record all steps, which the device has finished."""
        while self._steps:
            self.end()

    def _anchor(self, seconds: float) -> None:
        """Read the host's clock at an event, if the event is seen within so many seconds."""
        until = time.perf_counter() + seconds
        event = self._mark(self._device.uploads)
        with self._device.calling("cudaEventQuery"):
            while not (happened := event.done) and time.perf_counter() < until:
                pass
        now = time.perf_counter()
        if happened and now <= until:
            self._base = event, now

    def _mark(self, stream: Any) -> Any:
        event = self._device.event(timing=True)
        with self._device.calling("cudaEventRecord"):
            stream.record(event)
        return event
