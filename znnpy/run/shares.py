"""Columns that nobody has begun, and the lanes that take them one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field

from znnpy.errors import Stopped
from znnpy.patches import Column


@dataclass(slots=True, eq=False)
class Lease:
    """A column that a lane has taken. Void once the lane was lost before all of it was computed: another takes it."""

    index: int  # in the run's output
    column: Column
    lane: Hashable
    void: bool = False
    steps: int = 0  # of it that were written, or computed where they give no output
    work: float = 0.0  # in them
    voxels: int = 0  # written


@dataclass(slots=True)
class Shares:
    """Columns of one cover, for every lane whose plan they are of.

    A lane takes a column whole, since it carries planes from step to step. What a lost lane had not computed goes to
    the others: so a lane that finds nothing waits for as long as another might still be lost.
    """

    columns: Sequence[Column]
    first: int = 0  # index of the first of them in the run's output
    done: Set[int] = frozenset()  # indices that earlier runs finished
    _begun: int = field(default=0, init=False)  # all columns before it
    _returned: deque[int] = field(default_factory=deque, init=False)  # and of them those that lost lanes had
    _lanes: set[Hashable] = field(default_factory=set, init=False)
    _held: dict[int, Lease] = field(default_factory=dict, init=False)
    _turn: threading.Condition = field(default_factory=threading.Condition, init=False)
    _stopped: bool = field(default=False, init=False)

    def join(self, lane: Hashable) -> None:
        """Before anybody takes: `lane` will."""
        self._lanes.add(lane)

    def take(self, lane: Hashable) -> Lease | None:
        """The next column; None where there is none for `lane`, nor will be. Stopped once `stop` was called."""
        with self._turn:
            while True:
                if self._stopped:
                    raise Stopped
                if lane not in self._lanes:
                    return None
                if (number := self._next()) is not None:
                    lease = self._held[number] = Lease(self.first + number, self.columns[number], lane)
                    return lease
                if all(lease.lane == lane for lease in self._held.values()):
                    return None
                self._turn.wait()

    def finish(self, lease: Lease) -> None:
        """All of it was computed, and lies in the host's memory."""
        with self._turn:
            del self._held[lease.index - self.first]
            self._turn.notify_all()

    def lose(self, lane: Hashable) -> list[Lease] | None:
        """`lane` computes nothing any more: what it had begun, which is void now; None where no lane is left for it."""
        with self._turn:
            self._lanes.discard(lane)
            lost = [lease for lease in self._held.values() if lease.lane == lane]
            if not self._lanes and (lost or self._left()):
                return None
            for lease in lost:
                lease.void = True
                del self._held[lease.index - self.first]
            self._returned.extend(sorted(lease.index - self.first for lease in lost))
            self._turn.notify_all()
            return lost

    def _left(self) -> bool:
        """Somebody has yet to begin some."""
        while self._begun < len(self.columns) and self.first + self._begun in self.done:
            self._begun += 1
        return bool(self._returned) or self._begun < len(self.columns)

    def _next(self) -> int | None:
        if not self._left():
            return None
        if self._returned:
            return self._returned.popleft()
        self._begun += 1
        return self._begun - 1

    def stop(self) -> None:
        """From any thread: whoever waits, or takes, is Stopped."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
