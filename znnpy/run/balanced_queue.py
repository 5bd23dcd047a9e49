"""A queue from which GPUs and the CPU, each with a plan of its own, take cells so that all finish together.

Stacks   Cells that lie behind each other along the axis are a stack. A worker covers what it takes with columns or
         patches of its own plan.
Taking   A GPU takes runs of cells from the end of the last stack. The CPU takes one cell at a time from the
         beginning of the first stack; where it has just computed the cell before, it continues the same column.
Balance  A GPU leaves as many cells as the others are likely to compute meanwhile. The CPU takes a cell only if it
         would finish it before the GPUs could finish everything left; a GPU leaves the last cells to the CPU if
         the CPU would be done first.
Speeds   The time of a cell is as predicted until a worker has computed one, and as measured from then on. The
         processor therefore reads a cell ahead only where that cell is not likely to be one of the last.
Rescue   A GPU that has waited for the CPU's last cells for as long as it would take for them itself, and does not
         see them end sooner, computes them, and the CPU gives up. The CPU delays a run by no more than
         about three times that.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil, fsum, prod

from znnpy.patches import Box, Column, Cover
from znnpy.planner.memory import PINNED
from znnpy.run.work_queue import Lease, QueueUser, WorkQueue
from znnpy.shapes import Vec3

LOST_SECONDS = 480.0  # of one lease, as far as known; half of it at first: what a run that is killed computes again
DOUBT = 2.0  # times as long as predicted: what a busy processor may take for its work and the next cell


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """How a worker takes cells. Seconds are predicted; those of a worker that takes runs are for a cell of weight 1."""

    columns: Callable[[Box], Sequence[Column]]  # columns of its plan that cover a box of the output
    seconds: float  # for a cell behind another one
    runs: bool  # it takes several cells behind each other, from the back; else one cell from the front
    walks: bool = False  # a worker that takes single cells computes those behind each other as one column
    begins: float = 0.0  # additional seconds for the first cell of a run, or of such a column


class BalancedQueue(WorkQueue):
    """Cells of an output for workers with plans of their own.

    cells     patches that write without overlap, as `Cover` makes them without columns
    axis      the axis of the columns of workers that take runs
    profiles  of the workers, by name
    step      patch of the workers that take runs; a cell at an edge weighs less, by the columns and steps it lacks
    masked    the same cells, those outside a mask marked as not computed; empty: there is no mask
    now       returns the seconds of a clock
    """

    def __init__(
        self,
        cells: Cover,
        axis: int,
        profiles: Mapping[str, WorkerProfile],
        done: Set[int] = frozenset(),
        *,
        step: Vec3 = (1, 1, 1),
        masked: Sequence[Column] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(cells, done)
        self._profiles, self._now, self._masked = profiles, now, masked
        strides = (cells.counts[1] * cells.counts[2], cells.counts[2], 1)
        self._stride, self._long = strides[axis], cells.counts[axis]
        self._stacks: dict[int, list[int]] = {}  # cells that no worker has begun, each in order along the axis
        self._outside: dict[int, Column] = {}  # cells outside a mask that no worker has begun
        self._wide: dict[int, float] = {}  # columns in each stack for workers that take runs, relative to the first
        self._weights: list[float] = []  # of all cells for workers that take runs, relative to the first
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
            if index in done:
                continue
            left = masked[index] if masked else None
            if left is None or left.computed_voxels:
                stack.append(index)
            else:
                self._outside[index] = left
        self._spent = {name: [0.0, 0.0] for name in profiles}  # measured and predicted seconds of what was computed
        self._last: dict[str, int] = {}  # the last cell that each worker took
        self._since = dict.fromkeys(profiles, now())  # when each worker took its lease, or ended the one before
        self._later: set[str] = set()  # names of busy workers that got nothing and ask again when their work is done

    def moves(self) -> tuple[int, int]:
        return PINNED, PINNED

    def _left(self) -> bool:
        return bool(self._outside) or any(self._stacks.values())

    def _next(self, worker: QueueUser) -> Lease | None:
        if self._outside:
            index = next(iter(self._outside))
            self._last.pop(worker.name, None)  # it computes nothing that the next cell may continue
            return Lease((index,), (self._outside.pop(index),), worker, "cell")
        profile = self._profiles[worker.name]
        lease = self._run(worker, profile) if profile.runs else self._one(worker, profile)
        if lease is None and profile.runs and self._takes_over(worker, profile):
            lease = self._run(worker, profile)
        if lease is not None:
            if not any(held.worker == worker for held in self._held):
                self._since[worker.name] = self._now()
            self._last[worker.name] = lease.indices[-1]
        return lease

    def _free(self) -> float:
        """Return the total weight of the cells that no worker has begun."""
        return self._weight(chain(*self._stacks.values()))

    def _weight(self, indices: Iterable[int]) -> float:
        """Return the total weight of these cells."""
        return fsum(map(self._weights.__getitem__, indices))

    def _of_run(self, profile: WorkerProfile, indices: Sequence[int]) -> float:
        """Predict the seconds of a worker for these cells, which lie behind each other."""
        return self._wide[self._place(indices[0])] * profile.begins + profile.seconds * self._weight(indices)

    def _run(self, worker: QueueUser, profile: WorkerProfile) -> Lease | None:
        """Take the last cells of the last stack, which lie behind each other.

        None where a worker that takes single cells, and is busy or about to ask, would end all of them before this
        worker ends one.
        """
        if not self._left():
            return None
        free, stack = self._free(), next(filter(None, reversed(self._stacks.values())))
        ended = self._busy(worker) + self._of_run(profile, stack[-1:]) * self._pace(worker.name)
        if any(self._within(other, ended) >= free for other in self._singly(asking=True)):
            return None
        unknown = len(self._workers) > 1 and not self._spent[worker.name][1]
        times = 2 if unknown else 1  # later the speeds are known better
        wide = self._wide[self._place(stack[0])]
        lost = LOST_SECONDS / times / self._pace(worker.name) - wide * profile.begins
        gaps = (count for count, (b, a) in enumerate(pairwise(reversed(stack)), 1) if b != a + self._stride)
        most = min(max(1, int(lost / (wide * profile.seconds))), next(gaps, len(stack)))
        count = self._fair(worker, free, stack[-most:], times)
        taken = tuple(stack[-count:])
        del stack[-count:]
        return Lease(taken, profile.columns(self._box(taken)), worker, "cell", seconds=self._of_run(profile, taken))

    def _one(self, worker: QueueUser, profile: WorkerProfile) -> Lease | None:
        """Take the first cell of the first stack; None where others would be done with everything before.

        A busy worker does not take it yet if that would hold were the worker slower than it seems.
        """
        self._later.discard(worker.name)
        if not self._left():
            return None
        free, stack = self._free(), next(filter(None, self._stacks.values()))
        index, goes_on = stack[0], self._goes_on(worker, stack[0])
        seconds = profile.seconds + (0.0 if goes_on else profile.begins)
        ended = self._busy(worker) + seconds * self._pace(worker.name)
        is_at_work = any(held.worker == worker for held in self._held)
        if self._others(worker, ended * (DOUBT if is_at_work else 1.0)) >= free:
            if is_at_work:
                self._later.add(worker.name)
            return None
        del stack[0]
        columns = profile.columns(self._box((index,)))
        if goes_on:
            columns = [Column(tuple(step for step in column.steps if step.write.voxels)) for column in columns]
        return Lease((index,), columns, worker, "cell", goes_on, seconds)

    def _takes_over(self, worker: QueueUser, profile: WorkerProfile) -> bool:
        """Return whether `worker`, which takes runs, takes over what is left to workers that take single cells.

        It does once it has waited as long as it needs for all of that, cell by cell, and does not see it end sooner.
        """
        late = self._singly()
        if not late or any(held.worker == worker for held in self._held):
            return False
        cells = [index for held in self._held if held.worker in late for index in held.indices]
        cells += chain(*self._stacks.values())
        waits = self._pace(worker.name) * fsum(self._of_run(profile, (index,)) for index in cells)
        if self._now() - self._since[worker.name] < waits:
            return False
        if any(0 < self._busy(other) < waits for other in late):
            return False  # it seems to end them sooner
        for other in late:
            other.give_up(self._void(other))
        return True

    def _goes_on(self, worker: QueueUser, index: int) -> bool:
        """Return whether a cell continues the column of the cell that the worker took before."""
        behind = index // self._stride % self._long > 0 and self._last.get(worker.name) == index - self._stride
        return self._profiles[worker.name].walks and behind

    def _place(self, index: int) -> int:
        """Return the first index of the stack of a cell."""
        return index - index // self._stride % self._long * self._stride

    def _box(self, indices: Sequence[int]) -> Box:
        first, last = (self.columns[index].steps[0].write for index in (indices[0], indices[-1]))
        return Box(first.lo, last.hi)

    def _pace(self, name: str) -> float:
        """Return the measured seconds of a worker over the predicted ones."""
        spent, predicted = self._spent[name]
        return spent / predicted if spent and predicted else 1.0  # a coarse clock may have seen nothing

    def _fair(self, worker: QueueUser, free: float, cells: Sequence[int], times: int) -> int:
        """Return how many of the last cells to take, so that `times` as many end when the others finish the rest.

        It is at least one. The next lease makes up for too few, nothing for too many.
        """
        busy, profile, pace = self._busy(worker), self._profiles[worker.name], self._pace(worker.name)

        def done(count: int) -> float:
            taken = list(cells[-count:]) * times
            return self._weight(taken) + self._others(worker, busy + pace * self._of_run(profile, taken))

        enough = 1 + bisect_left(range(1, len(cells)), free, key=done)
        if enough == 1:
            return 1
        nearer = free - done(enough - 1) < done(enough) - free
        as_soon = times == 1 and done(enough) - self._weights[cells[-enough]] >= free  # if the others end it
        return enough - 1 if nearer or as_soon else enough

    def _others(self, worker: QueueUser, seconds: float) -> float:
        """Return the weight of the cells that the other workers are likely to begin and end within `seconds`."""
        return sum(self._within(other, seconds) for other in self._workers if other != worker)

    def _singly(self, *, asking: bool = False) -> set[QueueUser]:
        """Return the busy workers that take single cells: each of them will ask for another, or is about to."""
        later = {worker for worker in self._workers if asking and worker.name in self._later}
        return later | {held.worker for held in self._held if not self._profiles[held.worker.name].runs}

    def _within(self, worker: QueueUser, seconds: float) -> float:
        """Return the weight of the cells that a worker is likely to compute within `seconds`, if no other does."""
        profile, ended = self._profiles[worker.name], list[float]()
        left = (seconds - self._busy(worker)) / self._pace(worker.name)
        for stack in reversed(self._stacks.values()) if profile.runs else self._stacks.values():
            if not stack:
                continue
            if profile.runs:
                left -= self._wide[self._place(stack[0])] * profile.begins
            elif not self._goes_on(worker, stack[0]):
                left -= profile.begins
            for index in reversed(stack) if profile.runs else stack:
                weight = self._weights[index]
                left -= profile.seconds * (weight if profile.runs else 1.0)
                if left < 0:
                    return fsum(ended)
                ended.append(weight)
        return fsum(ended)  # these are all free cells, in whatever order

    def _busy(self, worker: QueueUser) -> float:
        """Estimate the seconds until a worker is done with its leases."""
        held = [lease.seconds for lease in self._held if lease.worker == worker]
        return max(0.0, sum(held) * self._pace(worker.name) - (self._now() - self._since[worker.name])) if held else 0.0

    def _give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._masked and not self._masked[number].computed_voxels:
                self._outside[number] = self._masked[number]
            else:
                insort(self._stacks[self._place(number)], number)
        busy = {held.worker.name for held in self._held}  # the others wait from now on
        self._since |= {name: self._now() for name in self._since if name not in busy}

    def _finished(self, lease: Lease) -> None:
        name, now = lease.worker.name, self._now()
        spent = self._spent[name]
        spent[0], spent[1] = spent[0] + now - self._since[name], spent[1] + lease.seconds
        self._since[name] = now
