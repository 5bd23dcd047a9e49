"""Simulate workers that compute the items of a job as `Assignment` tells them, event by event and without waiting.

A worker computes its items one after the other, each in the seconds that the item takes at a speed of 1, divided by the
worker's speed. Workers join, die and hang at given times. A task fails at a random moment, or, if it has an item that
always fails, at the end of that item. A death is noticed at once, a hung worker never.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from time import process_time
from typing import Any, TypeVar

from znnpy.cluster.assignment import Assignment, Task

Result = TypeVar("Result")


@dataclass(frozen=True)
class SimulatedWorker:
    """A worker of a simulation.

    speed  seconds of items that it computes in a second.
    joins  seconds from the beginning on when it comes.
    dies   seconds from the beginning on when it is lost, not before it comes.
    hangs  seconds from the beginning on after which it finishes nothing, and is still there; not before it comes.
    """

    name: str
    kind: str
    speed: float
    joins: float = 0.0
    dies: float = inf
    hangs: float = inf


def least_seconds(items: Sequence[float], workers: Sequence[SimulatedWorker]) -> float:
    """Return the bound for the end of a job: all seconds of items over the speed of all workers as they are there.

    It is the least time until which the speeds of the workers, each from when it joins until it dies or hangs, add up
    to the seconds of all items at a speed of 1. Nothing is taken off for failed tasks, for what dies with a worker, for
    copies, for the time between two tasks, or because items cannot be divided. It is infinite where the workers that
    are there at last are none.
    """
    changes = [(worker.joins, worker.speed) for worker in workers]
    changes += [(min(worker.dies, worker.hangs), -worker.speed) for worker in workers]
    left, speed, now = sum(items), 0.0, 0.0
    for time, change in sorted(changes):
        if speed > 0 and left <= speed * (time - now):
            break
        if time == inf:
            return inf
        left, now, speed = left - speed * (time - now), time, speed + change
    return now + left / speed if speed > 0 else inf


@dataclass
class Outcome:
    """Figures of a simulation that has ended.

    end          seconds from the beginning until nothing was left; infinite where items were left.
    cpu_seconds  processor time in calls of `Assignment`.
    tasks        number of all tasks; `copies`, `failures` and `needless` count those that were copies, failed, and were
                 cancelled since all of their items were done elsewhere.
    computed     how often each item was computed by a task that finished.
    work         seconds at a speed of 1 that workers spent on tasks, with those that failed, were lost or cancelled.
    """

    end: float = inf
    cpu_seconds: float = 0.0
    tasks: int = 0
    copies: int = 0
    failures: int = 0
    needless: int = 0
    computed: Counter[int] = field(default_factory=Counter)
    work: float = 0.0


@dataclass(eq=False)
class _Running:
    worker: SimulatedWorker
    queue: list[Task] = field(default_factory=list)
    began: float = 0.0


class Simulation:
    """A job that is computed by simulated workers.

    items     seconds that each item takes at a speed of 1.
    failing   share of the tasks that fail, each at a random moment.
    poisoned  items that fail whenever they are computed.
    pause     seconds from the end of a task until its worker begins another one, unless one waits in its queue.
    polls     seconds between two questions of a worker that got nothing.
    seed      number from which everything random follows.
    """

    def __init__(
        self,
        assignment: Assignment,
        items: Sequence[float],
        workers: Sequence[SimulatedWorker],
        *,
        failing: float = 0.0,
        poisoned: Collection[int] = (),
        pause: float = 0.0,
        polls: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.assignment, self.outcome = assignment, Outcome()
        self._items, self._failing, self._poisoned = items, failing, frozenset(poisoned)
        self._pause, self._polls, self._random = pause, polls, Random(seed)
        self._there: dict[str, _Running] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = 0
        self._last = 4 * least_seconds(items, workers) + 20 * max(items)  # by then everything should be done
        for worker in workers:
            self._at(worker.joins, self._join, worker)
            if worker.dies < inf:
                self._at(worker.dies, self._die, worker)

    def run(self) -> Outcome:
        """Simulate until nothing is left, or nothing can happen any more."""
        while self._events and not self.assignment.is_done:
            now, _, happens = heapq.heappop(self._events)
            if now > self._last:
                break
            happens(now)
            if self.assignment.is_done:
                self.outcome.end = now
        return self.outcome

    def _at(self, time: float, happens: Callable[..., None], *about: Any) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time, self._numbers, lambda now: happens(*about, now)))

    def _timed(self, call: Callable[..., Result], *arguments: Any) -> Result:
        began = process_time()
        result = call(*arguments)
        self.outcome.cpu_seconds += process_time() - began
        return result

    def _join(self, worker: SimulatedWorker, now: float) -> None:
        self._there[worker.name] = running = _Running(worker)
        self._timed(self.assignment.join, worker.name, worker.kind, now)
        self._ask(running, now)

    def _die(self, worker: SimulatedWorker, now: float) -> None:
        running = self._there.pop(worker.name)
        if running.queue:
            self._worked(running, now)
        assert list(self._timed(self.assignment.leave, worker.name, now)) == running.queue

    def _ask(self, running: _Running, now: float) -> None:
        """Ask for tasks until there is none; ask again later if the worker then has nothing to do."""
        if self._there.get(running.worker.name) is not running:
            return
        while (task := self._timed(self.assignment.next, running.worker.name, now)) is not None:
            self.outcome.tasks += 1
            self.outcome.copies += task.is_copy
            running.queue.append(task)
            if len(running.queue) == 1:
                self._begin(running, now)
        if not running.queue:
            self._at(now + self._polls, self._ask, running)

    def _begin(self, running: _Running, now: float) -> None:
        """Decide when and how the first task of a worker's queue ends."""
        task, worker, running.began = running.queue[0], running.worker, now
        seconds, fails = sum(self._items[item] for item in task.items) / worker.speed, False
        if self._random.random() < self._failing:
            seconds, fails = seconds * self._random.random(), True
        for place, item in enumerate(task.items):
            if item in self._poisoned:
                until = sum(self._items[i] for i in task.items[: place + 1]) / worker.speed
                seconds, fails = min(seconds, until), True
                break
        if now + seconds <= worker.hangs:
            self._at(now + seconds, self._end, running, task, fails)

    def _worked(self, running: _Running, now: float) -> None:
        self.outcome.work += running.worker.speed * (now - running.began)

    def _end(self, running: _Running, task: Task, fails: bool, now: float) -> None:
        if self._there.get(running.worker.name) is not running or running.queue[:1] != [task]:
            return  # it was cancelled, or its worker died
        self._worked(running, now)
        del running.queue[0]
        name = running.worker.name
        if fails:
            self.outcome.failures += 1
            self._timed(self.assignment.fail, task, name, f"attempt {task.attempt} failed", now)
        else:
            self.outcome.computed.update(task.items)
            for needless in self._timed(self.assignment.finish, task, name, now, now - running.began):
                self.outcome.needless += 1
                self._cancel(needless, now)
        self._go_on(running, now)

    def _cancel(self, task: Task, now: float) -> None:
        (running,) = (running for running in self._there.values() if task in running.queue)
        is_first = running.queue[0] is task
        if is_first:
            self._worked(running, now)
        running.queue.remove(task)
        if is_first:
            self._go_on(running, now)

    def _go_on(self, running: _Running, now: float) -> None:
        if running.queue:
            self._begin(running, now)
        self._at(now if running.queue else now + self._pause, self._ask, running)
