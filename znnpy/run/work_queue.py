"""Work of a run that no worker has begun, and the workers that take it.

Workers with equal plans take columns one by one (`ColumnQueue`): a worker computes a whole column, because it carries
planes from step to step. Workers with plans of their own, a GPU and the CPU, take cells (`BalancedQueue`).

The work of a lost worker goes to the others. A worker that finds no work therefore waits while another may still be
lost.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from znnpy.errors import Stopped
from znnpy.patches import Column

if TYPE_CHECKING:
    from znnpy.run.masked_windows import MaskedWindows
    from znnpy.window_cover import WindowCover

LOOK_SECONDS = 0.5  # between looks at whether waiting still pays


class QueueUser(Protocol):
    """The part of a worker that a queue needs; it is hashable."""

    @property
    def name(self) -> str: ...

    def give_up(self, leases: Sequence[Lease]) -> None:
        """End without waiting: other workers compute these leases, which are all that this one had taken."""


@dataclass(slots=True, eq=False)
class Lease:
    """The work that a worker has taken. It is void if the worker was lost or gave up before all was computed."""

    indices: tuple[int, ...]  # of columns or cells of the run
    columns: Sequence[Column]  # that the worker computes for it
    worker: QueueUser
    what: str  # "column", or "cell"
    goes_on: bool = False  # its first column continues the last column of the worker's lease before
    seconds: float = 0.0  # predicted
    void: bool = False
    steps: int = 0  # that count in the run and are done: written, or computed where they give no output
    work: float = 0.0  # in these steps
    voxels: int = 0  # written

    @property
    def of_cells(self) -> bool:
        """Return whether it is of cells, which count in the run when all columns of the lease are done."""
        return self.what == "cell"

    def __str__(self) -> str:
        return f"{self.what}{'s' * (len(self.indices) > 1)} {', '.join(map(str, self.indices))}"


class WorkQueue(ABC):
    """The common part of `ColumnQueue` and `BalancedQueue`: the leases of each worker, and waiting for work."""

    def __init__(self, columns: Sequence[Column], done: Set[int]) -> None:
        self.columns, self.done = columns, done  # all of the run, and the indices that earlier runs finished
        self._workers: set[QueueUser] = set()
        self._held: list[Lease] = []
        self._lock = threading.Condition()
        self._stopped = False

    def join(self, worker: QueueUser) -> None:
        """Announce a worker, before any worker takes something."""
        self._workers.add(worker)

    def take(self, worker: QueueUser) -> Lease | None:
        """Return the next lease, or None if there never will be one for `worker`. Stopped once `stop` was called."""
        with self._lock:
            while True:
                if self._stopped:
                    raise Stopped
                if worker not in self._workers:
                    return None
                if (lease := self._next(worker)) is not None:
                    self._held.append(lease)
                    return lease
                if not self._left() and all(held.worker == worker for held in self._held):
                    return None
                self._lock.wait(LOOK_SECONDS)  # whether it still pays to wait changes with time

    def finish(self, lease: Lease) -> None:
        """Note that all of a lease was computed and lies in RAM. Stopped where another worker computes it."""
        with self._lock:
            if lease.void:
                raise Stopped
            self._held.remove(lease)
            self._finished(lease)
            self._lock.notify_all()

    def lose(self, worker: QueueUser) -> list[Lease] | None:
        """Remove a worker; return its leases, which are void now, or None where no worker is left to compute them."""
        with self._lock:
            others = any(other != worker for other in self._workers)
            if not others and (self._left() or any(held.worker == worker for held in self._held)):
                self._workers.discard(worker)
                return None
            return self._void(worker)

    def _void(self, worker: QueueUser) -> list[Lease]:
        """Take all leases from a worker, which then takes nothing any more."""
        self._workers.discard(worker)
        found = [lease for lease in self._held if lease.worker == worker]
        for lease in found:
            lease.void = True
            self._held.remove(lease)
        self._give_back(index for lease in found for index in lease.indices)
        self._lock.notify_all()
        return found

    def stop(self) -> None:
        """Raise Stopped in every worker that waits or takes, from any thread."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def close(self) -> None:
        """Let go of the workers, which refer to their queue, at the end of a run."""
        with self._lock:
            self._workers.clear()
            for lease in self._held:
                lease.void = True
            self._held.clear()

    @abstractmethod
    def moves(self) -> tuple[int, int]:
        """Count the steps that read and those that write, of a worker that takes everything; PINNED means many."""

    @abstractmethod
    def _left(self) -> bool:
        """Return whether some work was not begun."""

    @abstractmethod
    def _next(self, worker: QueueUser) -> Lease | None:
        """Return what a worker is to begin; None where that is nothing now."""

    @abstractmethod
    def _give_back(self, numbers: Iterable[int]) -> None:
        """Put columns or cells back into the queue."""

    def _finished(self, lease: Lease) -> None:
        """Note that a lease was computed."""
        del lease  # of no interest here


class ColumnQueue(WorkQueue):
    """Columns of one cover, for workers with the same plan."""

    def __init__(self, columns: Sequence[Column], done: Set[int] = frozenset()) -> None:
        super().__init__(columns, done)
        self._begun = 0  # columns below this index were begun
        self._returned: deque[int] = deque()  # columns of lost workers among them

    def moves(self) -> tuple[int, int]:
        reads = writes = 0
        for index, column in enumerate(self.columns):  # a cover makes its columns anew each time
            if index not in self.done:
                reads += sum(step.computed for step in column.steps)
                writes += sum(step.computed and step.writes for step in column.steps)
        return reads, writes

    def _left(self) -> bool:
        while self._begun < len(self.columns) and self._begun in self.done:
            self._begun += 1
        return bool(self._returned) or self._begun < len(self.columns)

    def _next(self, worker: QueueUser) -> Lease | None:
        if not self._left():
            return None
        if self._returned:
            number = self._returned.popleft()
        else:
            number, self._begun = self._begun, self._begun + 1
        return Lease((number,), (self.columns[number],), worker, "column")

    def _give_back(self, numbers: Iterable[int]) -> None:
        self._returned.extend(sorted(numbers))


class RowQueue(ColumnQueue):
    """Rows of windows: a row that does not continue the one before on its worker computes parts of that again.

    So each worker goes on with the next row as long as nobody has it. Then it begins in the middle of the rows that
    another worker would come to.
    """

    def __init__(self, columns: WindowCover | MaskedWindows, done: Set[int] = frozenset()) -> None:
        super().__init__(columns, done)
        self._rows = columns
        self._open = [number for number in range(len(columns)) if number not in done]  # ascending
        self._latest: dict[QueueUser, int] = {}  # the row that each worker took last

    def _left(self) -> bool:
        return bool(self._open)

    def _next(self, worker: QueueUser) -> Lease | None:
        if not self._open:
            return None
        number = self._latest.get(worker, -1) + 1
        goes_on = number in self._open and worker in self._latest and self._rows.goes_on(number)
        number = number if goes_on else self._beginning()
        self._open.remove(number)
        self._latest[worker] = number
        column = self.columns[number] if goes_on else self._rows.begun_at(number)
        return Lease((number,), (column,), worker, "column", goes_on=goes_on)

    def _beginning(self) -> int:
        """Return where a worker begins that cannot go on: in the most rows in sequence that are left."""
        ends = [i for i, (a, b) in enumerate(pairwise(self._open), start=1) if b != a + 1]
        runs = [self._open[lo:hi] for lo, hi in pairwise((0, *ends, len(self._open)))]
        rows = max(runs, key=len)
        before = {self._latest.get(worker) for worker in self._workers}
        awaited = self._rows.goes_on(rows[0]) and rows[0] - 1 in before  # somebody goes on with them
        return rows[len(rows) // 2] if awaited else rows[0]

    def _give_back(self, numbers: Iterable[int]) -> None:
        self._open = sorted((*self._open, *numbers))
