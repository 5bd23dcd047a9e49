"""Let workers of dask compute the items of a job. This is the one module that imports `distributed`. Extra: cluster.

The coordinator gives each worker one task at a time, and another that waits behind it where items are short, so that
dask itself never holds a queue and decides nothing. A task holds the name of the job and numbers of items; its result
are the records of the items, which are in the files of the job too. So whatever dask computes again, because a result
was lost with a worker, is looked up there.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from znnpy.cluster.assignment import Assignment, Task
from znnpy.cluster.claims import AttemptLostError, ItemRecord, record_of, withdraw
from znnpy.cluster.job import Job
from znnpy.cluster.running import Limits, release, run_items
from znnpy.errors import ClusterError, MissingExtraError, ZnnpyError
from znnpy.extras import install
from znnpy.machine import this_machine
from znnpy.messages import excerpt, option
from znnpy.units import human_bytes

try:
    import distributed
    from distributed import Client, Future, LocalCluster, fire_and_forget
    from distributed.client import AllExit, ClosedClientError, FutureCancelledError
    from distributed.utils import silence_logging_cmgr
except ImportError:
    raise MissingExtraError(f"clusters need the package distributed; `{install('cluster')}`") from None

_log = logging.getLogger(__name__)

GONE = (ClosedClientError, FutureCancelledError)  # raised by a client whose scheduler is gone
NO_TASK = -1  # number of a task that no worker holds
LOOK_SECONDS = 2.0  # between looks at which workers are there
TASK_SECONDS = 120.0  # that a task should take; one of several items on a worker that is faster than others
SHORT_SECONDS = 20.0  # items that take less have another task waiting behind them
COPY_SECONDS = 10.0  # that a task is expected to take still, before another worker computes its items too
TRIES = 3  # of an item, before it is given up
HOPELESS = 3  # items that are given up before any is finished end the run
WAIT_SECONDS = 300.0  # for a worker, where there is none
ANSWER_SECONDS = 60.0  # for the scheduler
OF_LIMIT = 0.75  # of the memory limit of a worker: dask takes no tasks from 0.8 on, and ends a worker at 0.95


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The answer of a worker to a task.

    records  of the items that are finished
    failed   why the others are not; empty: all are finished
    is_lost  whether that is because another attempt has them
    item     that failed; None: the task did before its first one
    """

    records: tuple[ItemRecord, ...]
    failed: str = ""
    is_lost: bool = False
    item: int | None = None


def compute_task(job: Job, items: Sequence[int], attempt: str, only: int | None = None) -> TaskResult:
    """Compute items on a worker of dask; it runs there, in a thread of the worker.

    only  memory limit that the job names
    """
    worker = distributed.get_worker()
    records: list[ItemRecord] = []
    item = None
    try:
        limits = limits_of_worker(worker.memory_manager.memory_limit, worker.state.nthreads, only)
        for item in items:
            found = run_items(job, [item], attempt=attempt, worker=str(worker.address), limits=limits)
            records += [record for record in found if record.attempt == attempt]  # others were finished elsewhere
    except ZnnpyError as error:
        return TaskResult(tuple(records), str(error), isinstance(error, AttemptLostError), item)
    return TaskResult(tuple(records))


def limits_of_worker(memory_limit: int | None, threads: int, asked: int | None) -> Limits:
    """Return what a worker may take: as many threads as dask gives it, and the part of its memory that dask leaves it.

    memory_limit  bytes that dask allows the process; None or 0: it watches no limit
    asked         memory limit in bytes that the job names; None: it names none

    ClusterError if the job allows more than dask does.
    """
    if not memory_limit:
        return Limits(asked, threads)
    most = int(OF_LIMIT * memory_limit)
    if asked is not None and asked > most:
        raise ClusterError(
            f"{option('ram', human_bytes(asked))} is more than {human_bytes(most)}, the part of the "
            f"{human_bytes(memory_limit)} of this worker that dask leaves to a task before it pauses the worker; start "
            f"workers without a memory limit, or with {human_bytes(int(asked / OF_LIMIT))}, or lower {option('ram')}"
        )
    return Limits(most if asked is None else asked, threads)


@contextmanager
def client_of(cluster: str) -> Iterator[Client]:
    """Yield a client of a cluster: of the scheduler at an address, of a scheduler file, or of local:N processes.

    Inside, dask logs only what is critical: a lost scheduler, which it logs with tracebacks, ends in a ClusterError.
    """
    logging.getLogger("asyncio").addFilter(unless_dask_ends_a_task)
    with ExitStack() as stack:
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
        yield _opened(cluster, stack)


def unless_dask_ends_a_task(record: logging.LogRecord) -> bool:
    """Return whether a message is of anything but AllExit, by which dask ends tasks of its own.

    After an interrupt nobody waits for such a task, and asyncio says so with a traceback, maybe as the process ends.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], AllExit)


def _opened(cluster: str, stack: ExitStack) -> Client:
    """Return a client that is open for as long as `stack`."""
    kind, _, count = cluster.partition(":")
    try:
        if kind == "local":
            if not count.isdecimal() or not 1 <= int(count) <= 1024:
                raise ClusterError(
                    f"{option('cluster', cluster)} names no number of processes from 1 to 1024, such as local:4"
                )
            threads = max(1, this_machine().cores // int(count))
            local = LocalCluster(
                n_workers=int(count),
                threads_per_worker=threads,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",  # any free port
                silence_logs=logging.ERROR,
            )
            return stack.enter_context(Client(stack.enter_context(local)))
        if cluster.endswith(".json"):
            if not Path(cluster).is_file():
                raise ClusterError(f"there is no scheduler file {cluster}; start a scheduler of dask that writes it")
            return stack.enter_context(Client(scheduler_file=cluster, timeout=ANSWER_SECONDS))
        return stack.enter_context(Client(cluster, timeout=ANSWER_SECONDS))
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ZnnpyError):
            raise
        raise ClusterError(
            f"no scheduler answers at {excerpt(cluster)} ({excerpt(error)}); give the address that `dask scheduler` "
            f"prints, its scheduler file, or local:4 in {option('cluster')}"
        ) from None


@dataclass(slots=True)
class WorkerFigures:
    """The work that a worker has done.

    items, voxels  that it finished
    seconds        that these took
    peak           bytes of memory that the process had at most
    lost           whether it left before the end
    """

    items: int = 0
    voxels: int = 0
    seconds: float = 0.0
    peak: int = 0
    lost: bool = False


@dataclass(slots=True)
class Coordinator:
    """Gives the items of one job to the workers of a client, until all are finished or given up.

    tell     called with the coordinator about once a second, and after every task
    compute  computes a task on a worker
    """

    client: Client
    job: Job
    count: int
    done: Collection[int]
    ram: int | None = None
    tell: Callable[[Coordinator], None] | None = None
    compute: Callable[..., TaskResult] = compute_task
    figures: dict[str, WorkerFigures] = field(default_factory=dict)
    failures: int = 0  # tasks that failed, or were lost with their workers
    _running: dict[str, dict[str, tuple[Future, Task]]] = field(default_factory=dict)  # by workers, and keys of futures
    _ended: SimpleQueue[tuple[str, str]] = field(default_factory=SimpleQueue)  # workers, and keys of futures
    _looked: float = 0.0
    _seen: float = 0.0  # when there was a worker
    _token: str = field(default_factory=lambda: secrets.token_hex(4))  # of this coordinator among those of the job
    _assignment: Assignment = field(init=False)

    def __post_init__(self) -> None:
        self._assign(self.done)

    def _assign(self, done: Collection[int]) -> None:
        """Begin to assign the items that are not done."""
        self._assignment = Assignment(
            self.count, done, seconds=TASK_SECONDS, tries=TRIES, least_left=COPY_SECONDS, ahead=2
        )

    @property
    def finished(self) -> int:
        """Number of items that are finished."""
        return self._assignment.finished

    @property
    def workers(self) -> Mapping[str, float]:
        """Items per second of each worker that is there and has finished a task."""
        return self._assignment.rates

    def compute_again(self, items: Collection[int]) -> None:
        """Compute items once more, which were finished."""
        again = set(items)
        self._assign([item for item in range(self.count) if item not in again])
        for figures in self.figures.values():
            figures.lost = True  # until the worker is seen again
        self.run()

    def run(self) -> None:
        """Return once all items are finished. ClusterError if the cluster fails, or names items that failed."""
        self._seen = time.monotonic()
        self._looked = self._seen - LOOK_SECONDS
        if self.tell is not None:
            self.tell(self)
        try:
            while not self._assignment.is_done:
                with self._answered():
                    self._look()
                    with suppress(Empty):
                        self._settle(*self._ended.get(timeout=LOOK_SECONDS / 2))
                        while True:
                            self._settle(*self._ended.get_nowait())
                if self.tell is not None:
                    self.tell(self)
                self._check_hope()
        finally:
            self._stop()
        if given_up := self._assignment.given_up:
            item, reason = next(iter(given_up.items()))
            more = f" (and {len(given_up) - 1} more)" if len(given_up) > 1 else ""
            raise ClusterError(
                f"work item {item}{more} failed {TRIES} times, the last time with: {reason}; the other items are kept: "
                f"see to it, and continue with {option('resume', True)}"
            )

    def release(self) -> None:
        """Let workers drop what they keep of the job: weights, and files that are removed. Nothing waits for it."""
        for name, figures in self.figures.items():
            if not figures.lost:
                words = {"key": f"znnpy-{self.job.run}-{self._token}-release-{name}", "workers": [name], "pure": False}
                fire_and_forget(self.client.submit(release, **words))

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Turn what a client raises without its scheduler into a ClusterError."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, *GONE) as error:
            if isinstance(error, ZnnpyError):
                raise
            raise ClusterError(
                f"the scheduler is gone ({excerpt(error)}); what is finished is kept: start the cluster again, and "
                f"continue with {option('resume', True)}"
            ) from error

    def _look(self) -> None:
        """See now and then which workers are there; give tasks to those that have none."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self.client.status != "running":
            raise OSError(f"the client is {self.client.status}")
        there: Mapping[str, int] = self.client.nthreads()
        new = [name for name in there if name not in self.figures or self.figures[name].lost]
        kinds = self.client.scheduler_info(n_workers=-1)["workers"] if new else {}
        for name in new:
            about = kinds.get(name, {})
            self.figures.setdefault(name, WorkerFigures()).lost = False
            self._assignment.join(name, f"{there[name]} threads, {about.get('memory_limit')} bytes", now)
        for name, figures in self.figures.items():
            if name not in there and not figures.lost:
                figures.lost = True
                self._lose(name, now)
        if there:
            self._seen = now
        elif now - self._seen > WAIT_SECONDS:
            address = self.client.scheduler_info()["address"]
            raise ClusterError(
                f"the scheduler has no workers; start some with `dask worker {address}`, and "
                f"continue with {option('resume', True)}"
            )
        for name in there:
            self._give(name, now)

    def _lose(self, name: str, now: float) -> None:
        """Take back the tasks of a worker that is gone."""
        for task in [task for _, task in self._running.get(name, {}).values()]:
            self._note_finished(task, name, now)
        tasks = self._assignment.leave(name, now)
        self.failures += bool(tasks)
        _log.warning("the worker %s was lost with %d tasks, which others compute", name, len(tasks))
        for future, _ in self._running.pop(name, {}).values():
            future.cancel()

    def _give(self, name: str, now: float) -> None:
        """Give a worker the tasks that it may have."""
        mine, rate = self._running.setdefault(name, {}), self._assignment.rates.get(name, 0.0)
        most = 2 if rate * SHORT_SECONDS > 1 else 1
        while len(mine) < most and (task := self._assignment.next(name, now)) is not None:
            attempt = self._attempt(task)
            future = self.client.submit(
                self.compute,
                self.job,
                task.items,
                attempt,
                self.ram,
                key=f"znnpy-{attempt}",
                workers=[name],
                allow_other_workers=False,
                pure=False,
                priority=-task.attempt,
            )
            mine[future.key] = future, task
            future.add_done_callback(partial(self._note, name))

    def _attempt(self, task: Task) -> str:
        """Return the id of the attempt that a task is."""
        return f"{self.job.run}-{self._token}-{task.attempt}"

    def _note(self, name: str, future: Future) -> None:
        """Note, in a thread of the client, that a task has ended."""
        self._ended.put((name, future.key))

    def _settle(self, name: str, key: str) -> None:
        """Note what came of a task, and give its worker another one."""
        now = time.monotonic()
        found = self._running.get(name, {}).pop(key, None)
        if found is None:  # it was needless, or its worker was lost
            return
        future, task = found
        result = self._result(future)
        if result is None or result.failed:
            self._note_finished(task, name, now, () if result is None else result.records)
        if result is not None:
            self._count(name, result)
            if result.is_lost:
                _log.info("%s", result.failed)
                self._assignment.drop(task, now)
            elif result.failed:
                self.failures += 1
                _log.warning("work items %s failed on %s: %s", excerpt(task.items), name, result.failed)
                self._assignment.fail(task, name, result.failed, now, result.item)
            else:
                took = sum(record.seconds for record in result.records) or None  # None: others had finished them
                self._cancel(self._assignment.finish(task, name, now, took))
        else:
            self.failures += 1
            reason = str(future.exception()) if future.status == "error" else "the task or its result was lost"
            _log.warning("work items %s failed on %s: %s", excerpt(task.items), name, reason)
            self._assignment.fail(task, name, reason, now)
        self._give(name, now)

    def _result(self, future: Future) -> TaskResult | None:
        """Return the result of a task; None if it failed, or was lost with its worker since."""
        if future.status != "finished":
            return None
        try:
            found: TaskResult = future.result(timeout=ANSWER_SECONDS)
        except (TimeoutError, *GONE) as error:
            _log.warning("the result of a task was lost (%s), and its items are looked up", excerpt(error))
            return None
        return found

    def _note_finished(self, task: Task, name: str, now: float, records: Sequence[ItemRecord] = ()) -> None:
        """Note those items of a task that failed, or whose result was lost, which its worker finished before.

        records  that the worker has told of; others are looked up
        """
        told = {record.item for record in records}
        done = tuple(item for item in task.items if item in told or record_of(self.job.files, item) is not None)
        if done:
            self._cancel(self._assignment.finish(Task(done, NO_TASK, is_copy=False), name, now))

    def _count(self, name: str, result: TaskResult) -> None:
        """Add what a task has done to the figures of its worker."""
        figures = self.figures.setdefault(name, WorkerFigures())
        for record in result.records:
            figures.items += 1
            figures.voxels += record.voxels
            figures.seconds += record.seconds
            figures.peak = max(figures.peak, record.peak)

    def _cancel(self, tasks: Sequence[Task]) -> None:
        """Cancel tasks that are needless."""
        needless = {task.attempt for task in tasks}
        for mine in self._running.values() if needless else ():
            for key, (future, task) in list(mine.items()):
                if task.attempt in needless:
                    del mine[key]
                    withdraw(self.job.files, self._attempt(task), task.items)
                    future.cancel()

    def _check_hope(self) -> None:
        """Raise ClusterError if items are given up, and none was ever finished."""
        given_up = self._assignment.given_up
        if len(given_up) >= min(HOPELESS, self.count) and not any(one.items for one in self.figures.values()):
            raise ClusterError(
                f"no work item could be computed; item {min(given_up)} failed {TRIES} times, the last time with: "
                f"{given_up[min(given_up)]}"
            )

    def _stop(self) -> None:
        """Take the items of tasks that run from them, so that workers stop before they write any more."""
        for future, task in (one for mine in self._running.values() for one in mine.values()):
            withdraw(self.job.files, self._attempt(task), task.items)
            with suppress(OSError, RuntimeError):  # the scheduler may be gone
                future.cancel()
        self._running.clear()
