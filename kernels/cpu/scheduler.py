"""Execute a `TaskGraph`: tasks most distant from the sink go first, to any allowed worker (ZNNi IV-A.3).

Tasks are counted instead of stored: a stage ends when its count is 0; a multiply-add waits for its kernel and for the
one before it in its chain. The worker that completes the last task of a stage executes the synchronisation that
follows.

Two constraints come from the paper: kernels are transformed by primary workers, each into its own buffer, and
multiplied by workers of the same chip. A buffer is free again once all multiply-adds of its kernel are done. No run can
deadlock: of all kernels in buffers, the first in order waits for no other, and its own primary worker may multiply by
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple, Protocol

from znnpy.errors import Stopped
from znnpy.kernels.cpu.pinning import Placement
from znnpy.kernels.cpu.task_graph import Task, TaskGraph

POLL_SECONDS = 0.1  # interval at which an idle worker checks the stop flag


class Event(NamedTuple):
    """One event of a run, reported to observers in order."""

    what: Literal["begin", "end", "allocate", "free"]
    worker: int
    task: Task
    buffer: str = ""  # name of the buffer allocated or freed
    owner: int = 0  # for kernel and multiply: the worker whose buffer holds the kernel


Observer = Callable[[Event], None]


class Execute(Protocol):
    """A function that does the work of one task in the calling thread."""

    def __call__(self, task: Task, worker: int, owner: int, /) -> None:
        """Execute `task`; `owner` is the primary worker whose buffer holds the kernel, or the worker itself."""


@dataclass(slots=True)
class _Held:
    """A kernel in a primary worker's buffer."""

    kernel: Task
    owner: int
    chip: int
    ready: list[Task] = field(default_factory=list)  # multiply-adds ready to run, last one first
    left: int = 0  # multiply-adds not done yet
    queued: bool = False  # whether it is in its chip's queue


class Scheduler:
    """One run of one graph by the workers of `places`. The first must call `work` once, the others may.

    execute  does the work of a task.
    check    raises Stopped if the run is to stop.
    observe  if given, is called when a task begins and when it ends.
    """

    def __init__(
        self,
        tasks: TaskGraph,
        places: Sequence[Placement],
        execute: Execute,
        check: Callable[[], None],
        observe: Observer | None = None,
    ) -> None:
        self._tasks, self._execute, self._outer_check, self._observe = tasks, execute, check, observe
        self._lock = threading.Condition()
        self._waiting = 0
        self._failed = False
        self._stage = -1  # number of completed synchronisations, minus one
        self._syncing = False
        self._begun = 0  # started tasks of this stage's numbered kind: inputs, kernels, outputs
        self._left = 0  # unfinished tasks of this stage, except kernels
        self._chains: list[int] = []  # multiply-adds done in each chain, which is the next row
        self._held: dict[tuple[int, int, int], _Held] = {}  # kernels in buffers by row, column, slab
        self._buffers: dict[int, _Held] = {}  # kernels in buffers by owner; also while they are being transformed
        self._queues: dict[int, list[tuple[int, int, _Held]]] = {place.chip: [] for place in places}
        self._queued = 0

    def check(self) -> None:
        """Raise Stopped if the run is to stop or a task of another worker failed."""
        self._outer_check()
        if self._failed:
            raise Stopped

    def work(self, place: Placement) -> None:
        """Execute tasks until all are done. If one raises, all workers stop and the exception is raised once."""
        try:
            while (taken := self._take(place)) is not None:
                self.check()
                self._execute(taken[0], place.worker, taken[1])
                self._end(place, *taken)
        except BaseException as error:  # after any error the others must not wait for this worker
            others = self._failed
            with self._lock:
                self._failed = True
                self._lock.notify_all()
            if not (others and isinstance(error, Stopped)):
                raise

    def _take(self, place: Placement) -> tuple[Task, int] | None:
        """Wait for the next task for this worker; return it and the owner of its buffer, or None when all are done."""
        with self._lock:
            while True:
                self.check()
                if self._stage == 3:
                    return None
                if (taken := self._next(place)) is not None:
                    self._report("begin", place, *taken)
                    return taken
                self._waiting += 1
                self._lock.wait(POLL_SECONDS)
                self._waiting -= 1

    def _next(self, place: Placement) -> tuple[Task, int] | None:
        tasks = self._tasks
        if self._syncing:
            return None
        if self._stage == -1:
            self._syncing = True
            return Task("sync", part=0), place.worker
        if self._stage == 1:
            return self._next_product(place)
        count, numbered = (tasks.inputs, tasks.input) if self._stage == 0 else (tasks.outputs, tasks.output)
        if self._begun == count:
            return None
        self._begun += 1
        return numbered(self._begun - 1), place.worker

    def _next_product(self, place: Placement) -> tuple[Task, int] | None:
        """Return a kernel or a multiply-add, whichever is more distant from the sink; if equal, the multiply-add."""
        tasks, queue = self._tasks, self._queues[place.chip]
        while queue and not queue[0][2].ready:
            heappop(queue)[2].queued = False
        if place.primary and place.worker not in self._buffers and self._begun < tasks.kernels:
            kernel = tasks.kernel(self._begun)
            if not queue or tasks.distance(kernel) > -queue[0][0]:
                self._begun += 1
                self._buffers[place.worker] = _Held(kernel, place.worker, place.chip)
                return kernel, place.worker
        if not queue:
            return None
        held = queue[0][2]
        own = self._buffers.get(place.worker)
        if own is not None and own.ready and own.kernel.row == held.kernel.row:
            held = own  # equally distant, and in this core's cache
        return held.ready.pop(), held.owner

    def _end(self, place: Placement, task: Task, owner: int) -> None:
        """Count `task` as done; if a synchronisation waited for it alone, execute that."""
        with self._lock:
            self._report("end", place, task, owner)
            match task.kind:
                case "sync":
                    self._begin_stage(task.part)
                case "kernel":
                    self._hold(task, owner)
                case "multiply":
                    self._multiplied(task, owner)
            if task.kind in ("input", "multiply", "output"):
                self._left -= 1
            if self._waiting:
                self._lock.notify_all()
            if task.kind == "sync" or self._left:
                return
            self._syncing = True
            sync = Task("sync", part=self._stage + 1)
            self._report("begin", place, sync, place.worker)
        self._execute(sync, place.worker, place.worker)
        self._end(place, sync, place.worker)

    def _begin_stage(self, stage: int) -> None:
        tasks = self._tasks
        self._stage, self._syncing, self._begun = stage, False, 0
        self._left = (tasks.inputs, tasks.multiplies, tasks.outputs, 0)[stage]
        self._chains = [0] * (tasks.columns * tasks.slabs * tasks.products) if stage == 1 else []

    def _hold(self, kernel: Task, owner: int) -> None:
        """Make the kernel's multiply-adds ready, except those that wait for others of their chains."""
        held = self._buffers[owner]
        held.left = self._tasks.products
        self._held[kernel.row, kernel.column, kernel.slab] = held
        for part in reversed(range(self._tasks.products)):
            if self._chains[self._chain(kernel, part)] == kernel.row:
                held.ready.append(kernel._replace(kind="multiply", part=part))
        self._queue(held)

    def _multiplied(self, task: Task, owner: int) -> None:
        held = self._buffers[owner]
        held.left -= 1
        if held.left == 0:
            del self._buffers[owner], self._held[task.row, task.column, task.slab]
        self._chains[self._chain(task, task.part)] += 1
        later = self._held.get((task.row + 1, task.column, task.slab))
        if later is not None:
            later.ready.append(task._replace(row=task.row + 1))
            self._queue(later)

    def _queue(self, held: _Held) -> None:
        if held.ready and not held.queued:
            held.queued = True
            self._queued += 1
            distance = self._tasks.distance(held.ready[0])
            heappush(self._queues[held.chip], (-distance, self._queued, held))

    def _chain(self, task: Task, part: int) -> int:
        return (task.column * self._tasks.slabs + task.slab) * self._tasks.products + part

    def _report(self, what: Literal["begin", "end"], place: Placement, task: Task, owner: int) -> None:
        if self._observe is not None:
            self._observe(Event(what, place.worker, task, owner=owner))
