"""Decide which worker computes which items of a job, where workers of different speeds come and go.

Order    A task takes the lowest open numbers. Distant regions for different workers would need a plan of who gets
         which, to be made anew whenever a worker comes or goes. With the lowest numbers nothing has to be planned,
         tasks that run at the same time read neighbouring voxels, which storage and its caches serve well, and what is
         open remains one range.
Size     A task has as many items as the worker computes in the time that is asked for, and never more than its share,
         by speed, of the open items. Towards the end tasks therefore become small, and all workers end together.
Failure  Items of a task that failed come before all others, in smaller tasks, and on other workers if there are any.
         At its last try an item is alone, so that only items that fail by themselves are given up.
Copies   A worker for which nothing is open gets a copy of items that run elsewhere, where it would end them clearly
         sooner. Copies end what hung, paused and slow workers have begun.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from types import MappingProxyType

from znnpy.cluster.number_ranges import NumberRanges
from znnpy.cluster.speeds import Speeds

SOONER = 0.75  # of the time that a task is expected to take still: a copy has to end within it
FASTER = 0.5  # of the seconds for an item that a worker takes which is clearly faster
LATE = 2.0  # times as long as expected
LOOKS = 200  # at the tasks that run longest, in the time that a task should take


@dataclass(frozen=True, slots=True)
class Task:
    """Items for a worker to compute.

    items    their numbers, sorted, and contiguous as far as possible.
    attempt  number of the task, which no other task of the run has.
    is_copy  another task that runs has these items too.
    """

    items: tuple[int, ...]
    attempt: int
    is_copy: bool


@dataclass(slots=True, eq=False)
class _Held:
    """A task that a worker computes, or that waits in its queue."""

    task: Task
    worker: str
    undone: int  # items of the task that are not done
    began: float | None  # seconds; None while the task waits


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    queue: list[_Held] = field(default_factory=list)  # the first one is computed, the others wait
    failed: NumberRanges = field(default_factory=NumberRanges)  # items of tasks that failed on it


class Assignment:
    """The items of a job, and the workers that compute them.

    All times are seconds of one clock of the caller, which never goes back. Nothing is waited for: a worker for which
    `next` has nothing may get something after another call, and later, when tasks elsewhere become late; so ask again
    from time to time, until `is_done`.

    count          items of the job, numbered from 0 on in the order of space.
    done           numbers of items that are done already.
    seconds        time that a task should take.
    tries          times that an item is begun before it is given up.
    first_attempt  number of the first task.
    least_left     seconds that a task has to be expected to take still, for a copy of its items to be worth it.
    ahead          tasks that a worker may hold at a time; from the second on they wait in its queue.
    """

    def __init__(
        self,
        count: int,
        done: Collection[int] = (),
        *,
        seconds: float = 180.0,
        tries: int = 3,
        first_attempt: int = 1,
        least_left: float = 0.0,
        ahead: int = 1,
    ) -> None:
        self._count, self._seconds, self._tries, self._ahead = count, seconds, tries, ahead
        self._least_left = least_left
        self._attempt = first_attempt
        self._open = [NumberRanges() for _ in range(tries)]  # items that no worker holds, by how often they were tried
        self._open[0].add(0, count)
        self._done = set(done)
        for item in self._done:
            if not 0 <= item < count:
                raise ValueError(f"item {item} is done, but the job has the items 0 to {count - 1}")
            self._open[0].remove(item, item + 1)
        self._workers: dict[str, _Worker] = {}
        self._speeds = Speeds()
        self._held: dict[int, _Held] = {}  # by attempt
        self._holders: dict[int, tuple[int, ...]] = {}  # attempts that have an item; the first and perhaps a copy
        self._reasons: dict[int, list[str]] = {}  # why tries of an item were without success
        self._given_up: dict[int, str] = {}
        self._looked: float | None = None  # when `_longest` was found
        self._longest: list[tuple[float, _Held]] = []  # seconds that tasks are expected to take still, sorted
        self._single = 0  # number of items that one task alone has
        self._item_seconds: list[float] = []  # seconds of an item on each worker that is not far too late, sorted
        self._speed_sums: list[
            float
        ] = []  # items per second of the first of these workers, of the first two, and so on

    @property
    def is_done(self) -> bool:
        """Say whether every item is done or given up."""
        return self.left == 0

    @property
    def finished(self) -> int:
        """Number of items that are done, with those that were done at the beginning."""
        return len(self._done)

    @property
    def left(self) -> int:
        """Number of items that are neither done nor given up."""
        return self._count - len(self._done) - len(self._given_up)

    @property
    def given_up(self) -> Mapping[int, str]:
        """Items that were tried in vain as often as allowed, each with the last reason."""
        return MappingProxyType(self._given_up)

    @property
    def rates(self) -> Mapping[str, float]:
        """Items per second of each worker that is there and has finished a task."""
        return self._speeds.rates

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds until everything is done by the workers that are there; None while no speed is known."""
        total = self._speeds.total
        if total == 0:
            return 0.0 if self.is_done else None
        begun = 0.0  # items that the workers are likely to have computed of their tasks
        for worker in self._workers.values():
            each = self._seconds_of_item(worker)
            if worker.queue and not worker.queue[0].task.is_copy:
                begun += min(self._elapsed(worker, now) / each, worker.queue[0].undone)
        return max(0.0, self.left - begun) / total

    def join(self, worker: str, kind: str, now: float) -> None:
        """Add a worker, which may get tasks from now on; a worker that is there already stays as it is.

        kind  name that workers of about the same speed share.
        """
        del now  # a worker is as good as any other whenever it comes
        if worker not in self._workers:
            self._workers[worker] = _Worker(worker)
            self._speeds.join(worker, kind)

    def next(self, worker: str, now: float) -> Task | None:
        """Return a task for a worker to begin, or to begin after those that it holds; None: nothing for it now."""
        found = self._workers.get(worker)
        if found is None or len(found.queue) >= self._ahead:
            return None
        items, is_copy = self._open_items(found, now), False
        if not items and not found.queue:
            items, is_copy = self._items_elsewhere(found, now), True
        if not items:
            return None
        task = Task(tuple(items), self._attempt, is_copy)
        self._attempt += 1
        self._held[task.attempt] = held = _Held(task, worker, len(items), None if found.queue else now)
        found.queue.append(held)
        for item in items:
            self._holders[item] = (*self._holders.get(item, ()), task.attempt)
        return task

    def finish(self, task: Task, worker: str, now: float, took: float | None = None) -> tuple[Task, ...]:
        """Note that a worker has computed a task; return tasks elsewhere that are needless now and to be cancelled.

        A task is needless once all of its items are done. Its worker may be given another one, and what it says of the
        needless task afterwards changes nothing. The items of a task that a lost worker has finished count as done.

        took  seconds that the worker took for the task; None: since it began, as far as known here.
        """
        held = self._held.get(task.attempt)
        if held is not None:
            if took is None and held.began is not None:
                took = now - held.began
            if took is not None and held.worker == worker:
                self._speeds.measured(worker, len(task.items), took)
            self._let_go(held, now)
        needless = []
        for item in task.items:
            if item in self._done:
                continue
            self._done.add(item)
            if self._given_up.pop(item, None) is None and item not in self._holders:
                self._open[len(self._reasons.get(item, ()))].remove(item, item + 1)
            for attempt in self._holders.pop(item, ()):
                if attempt != task.attempt:
                    other = self._held[attempt]
                    other.undone -= 1
                    if not other.undone:
                        self._let_go(other, now)
                        needless.append(other.task)
        return tuple(needless)

    def drop(self, task: Task, now: float) -> None:
        """Note that a worker stopped a task because another one has its items: that is no try of them."""
        held = self._held.get(task.attempt)
        if held is not None:
            self._let_go(held, now)
            self._give_back(task, None)

    def fail(self, task: Task, worker: str, reason: str, now: float, item: int | None = None) -> None:
        """Note that a task failed on a worker, so that its items are tried again, or given up with this reason.

        item  that failed, where it is known: the others of the task were not tried

        A task that is not held by anyone, because it was needless or its worker left, changes nothing.
        """
        held = self._held.get(task.attempt)
        if held is None:
            return
        if worker in self._workers:
            for one in task.items if item is None else (item,):
                self._workers[worker].failed.add(one, one + 1)
        self._let_go(held, now)
        self._give_back(task, reason, item)

    def leave(self, worker: str, now: float) -> tuple[Task, ...]:
        """Remove a worker that was lost or stopped; return its tasks, whose items go back to be begun by others.

        The items of the task that it was computing count as tried, those of waiting tasks do not.
        """
        lost = self._workers.pop(worker, None)
        if lost is None:
            return ()
        self._speeds.leave(worker)
        tasks = tuple(held.task for held in lost.queue)
        for task in tasks:
            del self._held[task.attempt]
            self._give_back(task, f"the worker {worker} was lost" if task is tasks[0] else None)
        return tasks

    def _let_go(self, held: _Held, now: float) -> None:
        """Remove a task from the queue of its worker, which begins the next one in it."""
        del self._held[held.task.attempt]
        queue = self._workers[held.worker].queue
        queue.remove(held)
        if queue and queue[0].began is None:
            queue[0].began = now

    def _give_back(self, task: Task, reason: str | None, tried: int | None = None) -> None:
        """Open the items of a task that nobody else has, or give them up.

        reason  why they failed; None: they were not tried
        tried   the one item that was tried; None: all were
        """
        for item in task.items:
            if item in self._done:
                continue
            reasons = self._reasons.get(item, [])
            if reason is not None and tried in (None, item):
                self._reasons[item] = reasons = [*reasons, reason]
            others = tuple(attempt for attempt in self._holders.pop(item) if attempt != task.attempt)
            if others:
                self._holders[item] = others
            elif len(reasons) < self._tries:
                self._open[len(reasons)].add(item, item + 1)
            else:
                self._given_up[item] = reasons[-1]

    def _open_items(self, worker: _Worker, now: float) -> list[int]:
        """Take open items for a worker, of which none or all were tried before, equally often."""
        count = sum(map(len, self._open))
        size = self._size(worker, count) if count else 0
        if size < 1:
            return []
        for tried, items in reversed(list(enumerate(self._open))):
            if items and (taken := items.take(self._size_of_try(size, tried), worker.failed)):
                return taken
        for items in self._open:
            if items and not self._has_others(worker, next(iter(items)), now):
                return items.take(1, NumberRanges())
        return []

    def _size(self, worker: _Worker, among: int) -> int:
        """Return how many of `among` items a task for a worker has; 0 where the tasks that it holds are its share."""
        each = self._speeds.item_seconds(worker.name)
        if each is None:
            return 1
        held = sum(len(held.task.items) for held in worker.queue)
        share = int(among / max(1.0, each * self._speeds.total)) - held
        return max(0 if held else 1, min(share, max(1, int(self._seconds / each))))

    def _size_of_try(self, size: int, tried: int) -> int:
        """Return how many items a task has that were tried before: fewer each time by the same factor, 1 at last."""
        return size if not tried else int(size ** (1 - tried / (self._tries - 1)))

    def _items_elsewhere(self, worker: _Worker, now: float) -> list[int]:
        """Return items that only one other worker has, and that this one would end clearly sooner.

        They are of the task that is expected to take the longest time still, and as many as the worker's share.
        """
        each = self._seconds_of_item(worker)
        longest = self._find_longest(now)
        # Items without a copy are left to faster workers if these can end them while this one computes an item. They
        # have to compute about half of them: the other half ends meanwhile where it runs.
        faster = FASTER * each if each * self._speed_below(FASTER * each) > self._single / 2 else 0.0
        for place in reversed(range(len(longest))):
            seconds, held = longest[place]
            if each > SOONER * seconds or seconds < self._least_left:
                break  # as for all others, which take less
            single = [item for item in held.task.items if self._lacks_copy(item, now)] if self._is_held(held) else []
            if not single:
                del longest[place]
                continue
            if faster and self._has_others(worker, single[0], now, faster):
                break
            items = [i for i in single if i not in worker.failed or not self._has_others(worker, i, now)]
            if items:
                return items[-min(self._size(worker, self._single), int(SOONER * seconds / each)) :]
        return []

    def _is_held(self, held: _Held) -> bool:
        """Return whether a task has neither ended nor been lost."""
        return held.task.attempt in self._held

    def _lacks_copy(self, item: int, now: float) -> bool:
        """Return whether an item runs and has no copy, except those that are far too late."""
        holders = self._holders.get(item, ())
        others = (self._workers[self._held[attempt].worker] for attempt in holders[1:])
        return bool(holders) and all(self._is_late(other, now) for other in others)

    def _speed_below(self, seconds: float) -> float:
        """Return the items per second of all workers together that take at most so many seconds for an item."""
        place = bisect_right(self._item_seconds, seconds)
        return self._speed_sums[place - 1] if place else 0.0

    def _find_longest(self, now: float) -> list[tuple[float, _Held]]:
        """Return the held tasks, sorted by the seconds that they are expected to take still, as found recently."""
        if self._looked is None or now - self._looked >= self._seconds / LOOKS:
            self._looked = now
            ends = (end for worker in self._workers.values() for end in self._ends(worker, now))
            self._longest = sorted(ends, key=lambda end: (end[0], -end[1].task.attempt))
            self._single = sum(len(holders) == 1 for holders in self._holders.values())
            on_time = (worker for worker in self._workers.values() if not self._is_late(worker, now))
            self._item_seconds = sorted(self._seconds_of_item(worker) for worker in on_time)
            self._speed_sums = list(accumulate(1 / seconds for seconds in self._item_seconds))
        return self._longest

    def _ends(self, worker: _Worker, now: float) -> Iterator[tuple[float, _Held]]:
        """Yield the seconds that each task of a worker is expected to take still, with those before it."""
        each, seconds = self._seconds_of_item(worker), 0.0
        for held in worker.queue:
            expected = each * len(held.task.items)
            if held is worker.queue[0]:
                elapsed = self._elapsed(worker, now)
                # A task that is far too late is expected to take as long again as it has taken up to now.
                late = (elapsed - expected) * LATE / (LATE - 1)
                seconds = max(expected - elapsed, min(elapsed, late))
            else:
                seconds += expected
            yield seconds, held

    def _seconds_of_item(self, worker: _Worker) -> float:
        """Return the seconds of an item on a worker; the time of a task while no speed of its kind is known."""
        return self._speeds.item_seconds(worker.name) or self._seconds

    def _elapsed(self, worker: _Worker, now: float) -> float:
        """Return the seconds since the worker began what it computes."""
        began = worker.queue[0].began
        return 0.0 if began is None else now - began

    def _has_others(self, worker: _Worker, item: int, now: float, most: float = inf) -> bool:
        """Return whether another worker is there on which an item did not fail, and which is not far too late.

        most  seconds for an item that it takes at most.
        """
        return any(
            other is not worker
            and self._seconds_of_item(other) <= most
            and item not in other.failed
            and not self._is_late(other, now)
            for other in self._workers.values()
        )

    def _is_late(self, worker: _Worker, now: float) -> bool:
        """Return whether a worker takes far longer for its task than expected."""
        return bool(worker.queue) and (
            self._elapsed(worker, now) > LATE * self._seconds_of_item(worker) * len(worker.queue[0].task.items)
        )
