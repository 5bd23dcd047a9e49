"""Parts of the output that nobody has begun, and the lanes that take them: columns one by one, or cells as they suit.

Columns  Lanes with equal plans (`ColumnQueue`): a lane takes a column whole, since it carries planes from step to step.
Cells    Lanes with plans of their own (`Cells`), a GPU and the processor side by side: each covers what it has taken
         with its own columns or patches. Cells behind each other along the axis are a stack. A GPU takes runs of cells
         from the end of the last stack, the processor one cell at a time from the beginning of the first: where it has
         just computed the cell before, it goes on with the same column, as if both were one. All should finish
         together: a GPU leaves as many cells as the others are likely to compute meanwhile, the processor begins none
         that the GPUs would have computed, with all that is left, before it ends, and a GPU none of the last that the
         processor ends sooner. What a lane takes for a cell is as predicted until it has computed one, and as measured
         from then on: so the processor reads a cell ahead only where that is not likely to be one of the last. A GPU
         that has waited for the processor's last cells as long as it takes for them itself, one by one, and does not
         see them end sooner, computes them instead, and the processor gives up: so it is late by no more than about
         three times that.

What a lost lane had not computed goes to the others: so a lane that finds nothing waits for as long as another might
still be lost.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil, fsum, prod
from typing import Protocol

from znnpy.errors import Stopped
from znnpy.patches import Box, Column, Cover
from znnpy.planner.memory import PINNED
from znnpy.shapes import Vec3

LOOK_SECONDS = 0.5
# Of one lease, as far as known; half of it while nothing is: what a run that is killed computes again.
LOST_SECONDS = 480.0
DOUBT = 2.0  # times as long as predicted: what a processor at work may take for that and the next cell


class QueueUser(Protocol):
    """A lane, as far as it matters here. Hashable."""

    @property
    def name(self) -> str: ...

    def give_up(self, leases: Sequence[Lease]) -> None:
        """Others compute these, all that it had taken: it ends. Nothing is waited for here."""


@dataclass(slots=True, eq=False)
class Lease:
    """What a lane has taken. Void once the lane was lost, or gave up, before it had computed all: another takes it."""

    indices: tuple[int, ...]  # in the run's output
    columns: Sequence[Column]  # that the lane computes for it
    lane: QueueUser
    what: str  # "column", or "cell"
    goes_on: bool = False  # its first column goes on from the lane's lease before
    seconds: float = 0.0  # as predicted
    void: bool = False
    steps: int = 0  # that count in the run, and were written, or computed where they give no output
    work: float = 0.0  # in them
    voxels: int = 0  # written

    @property
    def of_cells(self) -> bool:
        """Its columns are not the run's: cells count when all of them are done."""
        return self.what == "cell"

    def __str__(self) -> str:
        return f"{self.what}{'s' * (len(self.indices) > 1)} {', '.join(map(str, self.indices))}"


class WorkQueue(ABC):
    """What `ColumnQueue` and `Cells` have in common: who has what, and who waits."""

    def __init__(self, columns: Sequence[Column], done: Set[int]) -> None:
        self.columns, self.done = columns, done  # of the run's output, and those that earlier runs finished
        self._lanes: set[QueueUser] = set()
        self._held: list[Lease] = []
        self._turn = threading.Condition()
        self._stopped = False

    def join(self, lane: QueueUser) -> None:
        """Before anybody takes: `lane` will."""
        self._lanes.add(lane)

    def take(self, lane: QueueUser) -> Lease | None:
        """The next lease; None where there is none for `lane`, nor will be. Stopped once `stop` was called."""
        with self._turn:
            while True:
                if self._stopped:
                    raise Stopped
                if lane not in self._lanes:
                    return None
                if (lease := self._next(lane)) is not None:
                    self._held.append(lease)
                    return lease
                if not self._left() and all(held.lane == lane for held in self._held):
                    return None
                self._turn.wait(LOOK_SECONDS)  # whether it still pays to wait changes with time

    def finish(self, lease: Lease) -> None:
        """All of it was computed, and lies in the host's memory. Stopped where another computes it."""
        with self._turn:
            if lease.void:
                raise Stopped
            self._held.remove(lease)
            self._finished(lease)
            self._turn.notify_all()

    def lose(self, lane: QueueUser) -> list[Lease] | None:
        """`lane` computes nothing any more: what it had begun, which is void now; None where no lane is left for it."""
        with self._turn:
            others = any(other != lane for other in self._lanes)
            if not others and (self._left() or any(held.lane == lane for held in self._held)):
                self._lanes.discard(lane)
                return None
            return self._void(lane)

    def _void(self, lane: QueueUser) -> list[Lease]:
        """What a lane has, which goes to others: it takes nothing any more."""
        self._lanes.discard(lane)
        found = [lease for lease in self._held if lease.lane == lane]
        for lease in found:
            lease.void = True
            self._held.remove(lease)
        self._give_back(index for lease in found for index in lease.indices)
        self._turn.notify_all()
        return found

    def stop(self) -> None:
        """From any thread: whoever waits, or takes, is Stopped."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def close(self) -> None:
        """The run has ended: lanes, which refer to their queue, are let go of."""
        with self._turn:
            self._lanes.clear()
            for lease in self._held:
                lease.void = True
            self._held.clear()

    @abstractmethod
    def moves(self) -> tuple[int, int]:
        """Steps that a lane has if it takes all, those that read and those that write; PINNED stands for many."""

    @abstractmethod
    def _left(self) -> bool:
        """Somebody has yet to begin some."""

    @abstractmethod
    def _next(self, lane: QueueUser) -> Lease | None:
        """What `lane` is to begin; None where that is nothing now."""

    @abstractmethod
    def _give_back(self, numbers: Iterable[int]) -> None:
        """Nobody has begun these any more."""

    def _finished(self, lease: Lease) -> None:
        """It was computed."""
        del lease  # of no interest here


class ColumnQueue(WorkQueue):
    """Columns of one cover, for every lane whose plan they are of."""

    def __init__(self, columns: Sequence[Column], done: Set[int] = frozenset()) -> None:
        super().__init__(columns, done)
        self._begun = 0  # all columns before it
        self._returned: deque[int] = deque()  # and of them those that lost lanes had

    def moves(self) -> tuple[int, int]:
        reads = writes = 0
        for index, column in enumerate(self.columns):  # a cover makes its columns anew: none is kept
            if index not in self.done:
                reads += len(column.steps)
                writes += sum(step.write.voxels > 0 for step in column.steps)
        return reads, writes

    def _left(self) -> bool:
        while self._begun < len(self.columns) and self._begun in self.done:
            self._begun += 1
        return bool(self._returned) or self._begun < len(self.columns)

    def _next(self, lane: QueueUser) -> Lease | None:
        if not self._left():
            return None
        if self._returned:
            number = self._returned.popleft()
        else:
            number, self._begun = self._begun, self._begun + 1
        return Lease((number,), (self.columns[number],), lane, "column")

    def _give_back(self, numbers: Iterable[int]) -> None:
        self._returned.extend(sorted(numbers))


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """How a lane takes cells. Seconds are as predicted, of one who takes runs for cells of weight 1."""

    columns: Callable[[Box], Sequence[Column]]  # of its plan, that cover a box of the output
    seconds: float  # for a cell behind another
    runs: bool  # it takes several that lie behind each other, from the back; else one from the front
    walks: bool = False  # one that takes them singly has one column for all that lie behind each other
    begins: float = 0.0  # more for the first of a run, or of such a column


class BalancedQueue(WorkQueue):
    """Cells of an output for lanes with plans of their own.

    cells  patches that write without overlap, as `Cover` makes them where no column walks
    axis   along which those who take runs walk
    hands  by the names of lanes
    step   patch of those who take runs: a cell at an edge is less to them, by the columns and steps that it is less
    now    seconds of a clock
    """

    def __init__(
        self,
        cells: Cover,
        axis: int,
        hands: Mapping[str, WorkerProfile],
        done: Set[int] = frozenset(),
        *,
        step: Vec3 = (1, 1, 1),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(cells, done)
        self._hands, self._now = hands, now
        strides = (cells.counts[1] * cells.counts[2], cells.counts[2], 1)
        self._stride, self._long = strides[axis], cells.counts[axis]
        self._stacks: dict[int, list[int]] = {}  # of cells that nobody has begun, each in order along the axis
        self._wide: dict[int, float] = {}  # columns of each, to those who take runs: 1 of the first
        self._weights: list[float] = []  # of all cells, to those who take runs: 1 of the first
        steps = [ceil(size / step[axis]) for size in cells.sizes(axis)]
        across = [i for i in range(3) if i != axis]
        most = prod(ceil(cells.sizes(i)[0] / step[i]) for i in across)
        for index in range(len(cells)):
            place = self._place(index)
            if place not in self._stacks:
                size = cells[index].steps[0].write.size
                self._wide[place] = prod(ceil(size[i] / step[i]) for i in across) / most
            self._weights.append(self._wide[place] * steps[index // self._stride % self._long] / steps[0])
            stack = self._stacks.setdefault(place, [])
            if index not in done:
                stack.append(index)
        self._spent = {name: [0.0, 0.0] for name in hands}  # seconds, and those predicted for what was computed
        self._last: dict[str, int] = {}  # cell that a lane took
        self._since = dict.fromkeys(hands, now())  # when a lane took its lease, or ended the one before
        self._later: set[str] = set()  # names of lanes that had work when they asked, and ask again when it is done

    def moves(self) -> tuple[int, int]:
        return PINNED, PINNED

    def _left(self) -> bool:
        return any(self._stacks.values())

    def _next(self, lane: QueueUser) -> Lease | None:
        hand = self._hands[lane.name]
        lease = self._run(lane, hand) if hand.runs else self._one(lane, hand)
        if lease is None and hand.runs and self._takes_back(lane, hand):
            lease = self._run(lane, hand)
        if lease is not None:
            if not any(held.lane == lane for held in self._held):
                self._since[lane.name] = self._now()
            self._last[lane.name] = lease.indices[-1]
        return lease

    def _free(self) -> float:
        """Cells that nobody has begun, by their weights."""
        return self._weight(chain(*self._stacks.values()))

    def _weight(self, indices: Iterable[int]) -> float:
        """Of these cells together."""
        return fsum(map(self._weights.__getitem__, indices))

    def _of_run(self, hand: WorkerProfile, indices: Sequence[int]) -> float:
        """Seconds, as predicted, of one who takes these, which lie behind each other."""
        return self._wide[self._place(indices[0])] * hand.begins + hand.seconds * self._weight(indices)

    def _run(self, lane: QueueUser, hand: WorkerProfile) -> Lease | None:
        """The last cells of the last stack, which lie behind each other.

        None where one that takes cells singly, and is at work or about to ask, ends all before this lane ends one.
        """
        if not self._left():
            return None
        free, stack = self._free(), next(filter(None, reversed(self._stacks.values())))
        ended = self._busy(lane) + self._of_run(hand, stack[-1:]) * self._pace(lane.name)
        if any(self._within(other, ended) >= free for other in self._singly(asking=True)):
            return None
        times = 2 if len(self._lanes) > 1 and not self._spent[lane.name][1] else 1  # later more is known of who is fast
        wide = self._wide[self._place(stack[0])]
        lost = LOST_SECONDS / times / self._pace(lane.name) - wide * hand.begins
        gaps = (count for count, (b, a) in enumerate(pairwise(reversed(stack)), 1) if b != a + self._stride)
        most = min(max(1, int(lost / (wide * hand.seconds))), next(gaps, len(stack)))
        count = self._fair(lane, free, stack[-most:], times)
        taken = tuple(stack[-count:])
        del stack[-count:]
        return Lease(taken, hand.columns(self._box(taken)), lane, "cell", seconds=self._of_run(hand, taken))

    def _one(self, lane: QueueUser, hand: WorkerProfile) -> Lease | None:
        """The first cell of the first stack; None where others are done with all before it is.

        A lane at work does not take it yet where that may be so, were it slower than it seems.
        """
        self._later.discard(lane.name)
        if not self._left():
            return None
        free, stack = self._free(), next(filter(None, self._stacks.values()))
        index, goes_on = stack[0], self._goes_on(lane, stack[0])
        seconds = hand.seconds + (0.0 if goes_on else hand.begins)
        ended = self._busy(lane) + seconds * self._pace(lane.name)
        is_at_work = any(held.lane == lane for held in self._held)
        if self._others(lane, ended * (DOUBT if is_at_work else 1.0)) >= free:
            if is_at_work:
                self._later.add(lane.name)
            return None
        del stack[0]
        columns = hand.columns(self._box((index,)))
        if goes_on:
            columns = [Column(tuple(step for step in column.steps if step.write.voxels)) for column in columns]
        return Lease((index,), columns, lane, "cell", goes_on, seconds)

    def _takes_back(self, lane: QueueUser, hand: WorkerProfile) -> bool:
        """Whether `lane`, which takes runs, is to compute what is left to those who take cells singly.

        Once it has waited for as long as it takes for all of that, cell by cell, and does not see it end sooner.
        """
        late = self._singly()
        if not late or any(held.lane == lane for held in self._held):
            return False
        cells = [index for held in self._held if held.lane in late for index in held.indices]
        cells += chain(*self._stacks.values())
        waits = self._pace(lane.name) * fsum(self._of_run(hand, (index,)) for index in cells)
        if self._now() - self._since[lane.name] < waits:
            return False
        if any(0 < self._busy(other) < waits for other in late):
            return False  # it seems to end them sooner
        for other in late:
            other.give_up(self._void(other))
        return True

    def _goes_on(self, lane: QueueUser, index: int) -> bool:
        """With the column of the cell that it took before."""
        behind = index // self._stride % self._long > 0 and self._last.get(lane.name) == index - self._stride
        return self._hands[lane.name].walks and behind

    def _place(self, index: int) -> int:
        """Of its stack."""
        return index - index // self._stride % self._long * self._stride

    def _box(self, indices: Sequence[int]) -> Box:
        first, last = (self.columns[index].steps[0].write for index in (indices[0], indices[-1]))
        return Box(first.lo, last.hi)

    def _pace(self, name: str) -> float:
        """Seconds of a lane for one that was predicted."""
        spent, predicted = self._spent[name]
        return spent / predicted if spent and predicted else 1.0  # a coarse clock may have seen nothing

    def _fair(self, lane: QueueUser, free: float, cells: Sequence[int], times: int) -> int:
        """How many of the last of some cells: so that `times` as many end about when the others have done the rest.

        One at least. The next lease makes up for too few, nothing for too many.
        """
        busy, hand, pace = self._busy(lane), self._hands[lane.name], self._pace(lane.name)

        def done(count: int) -> float:
            taken = list(cells[-count:]) * times
            return self._weight(taken) + self._others(lane, busy + pace * self._of_run(hand, taken))

        enough = 1 + bisect_left(range(1, len(cells)), free, key=done)
        if enough == 1:
            return 1
        nearer = free - done(enough - 1) < done(enough) - free
        as_soon = times == 1 and done(enough) - self._weights[cells[-enough]] >= free  # if the others end it
        return enough - 1 if nearer or as_soon else enough

    def _others(self, lane: QueueUser, seconds: float) -> float:
        """BalancedQueue, by their weights, that the other lanes are likely to begin and end within `seconds`."""
        return sum(self._within(other, seconds) for other in self._lanes if other != lane)

    def _singly(self, *, asking: bool = False) -> set[QueueUser]:
        """Lanes that take cells singly, and are at work: each of them will ask for another, or is about to."""
        later = {lane for lane in self._lanes if asking and lane.name in self._later}
        return later | {held.lane for held in self._held if not self._hands[held.lane.name].runs}

    def _within(self, lane: QueueUser, seconds: float) -> float:
        """BalancedQueue, by their weights, that a lane is likely to begin and end, from now on, if no other does."""
        hand, ended = self._hands[lane.name], list[float]()
        left = (seconds - self._busy(lane)) / self._pace(lane.name)
        for stack in reversed(self._stacks.values()) if hand.runs else self._stacks.values():
            if not stack:
                continue
            if hand.runs:
                left -= self._wide[self._place(stack[0])] * hand.begins
            elif not self._goes_on(lane, stack[0]):
                left -= hand.begins
            for index in reversed(stack) if hand.runs else stack:
                weight = self._weights[index]
                left -= hand.seconds * (weight if hand.runs else 1.0)
                if left < 0:
                    return fsum(ended)
                ended.append(weight)
        return fsum(ended)  # all of them are what is free, in whatever order

    def _busy(self, lane: QueueUser) -> float:
        """Seconds, about, until a lane is done with what it has."""
        held = [lease.seconds for lease in self._held if lease.lane == lane]
        return max(0.0, sum(held) * self._pace(lane.name) - (self._now() - self._since[lane.name])) if held else 0.0

    def _give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            insort(self._stacks[self._place(number)], number)
        busy = {held.lane.name for held in self._held}  # the others wait for these from now on
        self._since |= {name: self._now() for name in self._since if name not in busy}

    def _finished(self, lease: Lease) -> None:
        name, now = lease.lane.name, self._now()
        spent = self._spent[name]
        spent[0], spent[1] = spent[0] + now - self._since[name], spent[1] + lease.seconds
        self._since[name] = now
