"""Measured speeds of workers, and of all workers of one kind."""

from __future__ import annotations

from dataclasses import dataclass

WORKER_ITEMS = 16  # of a worker that its mean is over: its speed may change when others use its machine
KIND_ITEMS = 256  # of all workers of a kind
LEAST_SECONDS = 1e-3  # of an item: a coarse clock may have seen nothing


@dataclass(slots=True)
class MeanSeconds:
    """An exponential mean of the seconds of an item, over about the last `items`; a plain mean up to then."""

    items: int
    seen: int = 0
    seconds: float | None = None  # None: nothing was measured

    def add(self, seconds: float, count: int) -> None:
        """Add `count` items that took `seconds` together."""
        self.seen += count
        new, weight = max(seconds / count, LEAST_SECONDS), min(1.0, count / min(self.seen, self.items))
        self.seconds = new if self.seconds is None else self.seconds + weight * (new - self.seconds)

    @property
    def speed(self) -> float:
        """Items per second; 0 where nothing was measured."""
        return 1 / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Kind:
    mean: MeanSeconds
    unmeasured: int = 0  # workers that are there and that nothing was measured of


class Speeds:
    """Speeds of the workers that are there, and their sum."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[MeanSeconds, _Kind]] = {}
        self._kinds: dict[str, _Kind] = {}
        self._measured = 0.0  # items per second of all workers that were measured

    def join(self, worker: str, kind: str) -> None:
        """Add a worker, of which nothing is known but its kind."""
        of_kind = self._kinds.setdefault(kind, _Kind(MeanSeconds(KIND_ITEMS)))
        of_kind.unmeasured += 1
        self._workers[worker] = MeanSeconds(WORKER_ITEMS), of_kind

    def leave(self, worker: str) -> None:
        """Remove a worker. The mean of its kind stays as it is."""
        own, kind = self._workers.pop(worker)
        self._measured -= own.speed
        kind.unmeasured -= own.seconds is None

    def measured(self, worker: str, items: int, seconds: float) -> None:
        """Note that a worker took `seconds` for `items` items."""
        own, kind = self._workers[worker]
        kind.unmeasured -= own.seconds is None
        self._measured -= own.speed
        own.add(seconds, items)
        kind.mean.add(seconds, items)
        self._measured += own.speed

    def item_seconds(self, worker: str) -> float | None:
        """Return the seconds of an item on a worker, or on its kind; None where neither was measured."""
        own, kind = self._workers[worker]
        return own.seconds or kind.mean.seconds

    @property
    def total(self) -> float:
        """Items per second of all workers together, without those of kinds that were never measured."""
        of_kinds = sum(kind.unmeasured * kind.mean.speed for kind in self._kinds.values())
        return max(0.0, self._measured) + of_kinds  # sums of floats may end slightly below 0

    @property
    def rates(self) -> dict[str, float]:
        """Items per second of each worker that was measured."""
        return {worker: own.speed for worker, (own, _) in self._workers.items() if own.seconds}
