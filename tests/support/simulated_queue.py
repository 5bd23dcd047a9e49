"""Cells that are dealt without threads, to lanes that take so long for each on a clock of their own."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

from znnpy.errors import Stopped
from znnpy.patches import Cover
from znnpy.run.balanced_queue import BalancedQueue, WorkerProfile
from znnpy.run.work_queue import LOOK_SECONDS, Lease

GRID = Cover((40, 40, 40), (10, 10, 10))  # 64 cells


class NamedLane:
    """All that the queue knows of a lane."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given_up: Sequence[Lease] = ()

    def give_up(self, leases: Sequence[Lease]) -> None:
        assert leases
        assert not self.given_up
        self.given_up = leases


def joined(cells: BalancedQueue, *names: str) -> list[NamedLane]:
    lanes = [NamedLane(name) for name in names]
    for lane in lanes:
        cells.join(lane)
    return lanes


def take_now(cells: BalancedQueue, lane: Any) -> Lease | None:
    """Return what `take` gives without waiting."""
    found: list[Lease | None] = []

    def stops(timeout: float | None = None) -> bool:
        cells.stop()
        return True

    cells._lock.wait = stops  # type: ignore[method-assign]
    try:
        found.append(cells.take(lane))
    except Stopped:
        cells._stopped = False
    return found[0] if found else None


class Played:
    """Lanes that take so long for a cell, and more for the first of a run, on a clock of their own."""

    def __init__(
        self,
        cells: Cover,
        axis: int,
        true: dict[str, float],
        predicted: dict[str, float] | None = None,
        begins: dict[str, float] | None = None,
    ) -> None:
        self.now, self.true = 0.0, true
        self.begins = dict.fromkeys(true, 0.0) | (begins or {})
        hands = {
            name: WorkerProfile(
                lambda box: (),
                (predicted or true)[name],
                runs=name.startswith("GPU"),
                walks=not name.startswith("GPU"),
                begins=self.begins[name],
            )
            for name in true
        }
        self.cells = BalancedQueue(cells, axis, hands, now=lambda: self.now)
        self.taken: dict[str, list[int]] = {name: [] for name in true}
        self.runs: list[tuple[int, ...]] = []

    def ends(self) -> dict[str, float]:
        """Return the times at which the lanes ended their last leases."""
        lanes = dict(zip(self.true, joined(self.cells, *self.true), strict=True))
        max_in_flight: list[tuple[float, int, str, Lease]] = []
        ended, order = dict.fromkeys(self.true, 0.0), count()
        idle = list(self.true)
        while True:
            for name in list(idle):
                lease = take_now(self.cells, lanes[name])
                if lease is not None:
                    idle.remove(name)
                    for index in lease.indices:  # that another gave up
                        for taken in self.taken.values():
                            if index in taken:
                                taken.remove(index)
                    self.taken[name] += lease.indices
                    self.runs.append(lease.indices)
                    spent = len(lease.indices) * self.true[name] + (0 if lease.goes_on else self.begins[name])
                    heapq.heappush(max_in_flight, (self.now + spent, next(order), name, lease))
            max_in_flight = [entry for entry in max_in_flight if not entry[3].void]
            heapq.heapify(max_in_flight)
            if not max_in_flight:
                return ended
            if idle and max_in_flight[0][0] > self.now + LOOK_SECONDS:
                self.now += LOOK_SECONDS
                continue
            self.now, _, name, lease = heapq.heappop(max_in_flight)
            self.cells.finish(lease)
            ended[name] = self.now
            idle.append(name)
