"""Tasks: their graph, where workers sit, and what a scheduler really does with them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest

from tests.support.task_traces import TWO_CHIPS, assert_trace
from znnpy.errors import ValuesOverflowError
from znnpy.kernels.cpu import pinning
from znnpy.kernels.cpu.pinning import Placement, chips_of, pinned
from znnpy.kernels.cpu.scheduler import Event, Scheduler
from znnpy.kernels.cpu.task_graph import Task, TaskGraph, check, graph

GRAPHS = [TaskGraph(1, 1, 1, 1, 1), TaskGraph(4, 5, 1, 4, 4), TaskGraph(2, 3, 4, 5, 2), TaskGraph(3, 1, 2, 1, 3)]


# The graph


@pytest.mark.parametrize("tasks", GRAPHS, ids=str)
def test_graph_has_no_cycle_and_correct_distances(tasks: TaskGraph) -> None:
    whole = graph(tasks)
    check(tasks, whole)
    kinds = Counter(task.kind for task in whole)
    assert kinds["multiply"] == tasks.multiplies == tasks.kernels * tasks.products
    assert (kinds["input"], kinds["kernel"], kinds["output"]) == (tasks.inputs, tasks.kernels, tasks.outputs)
    assert kinds["sync"] == 4


def test_damaged_graph_is_refused() -> None:
    tasks = TaskGraph(2, 2, 1, 1, 1)
    first, second = Task("multiply", 0, 0), Task("multiply", 1, 0)
    whole = graph(tasks)
    whole.add_edge(second, first)
    with pytest.raises(ValueError, match="has a cycle"):
        check(tasks, whole)
    whole = graph(tasks)
    whole.remove_edge(first, second)
    with pytest.raises(ValueError, match="ends with"):
        check(tasks, whole)
    whole = graph(tasks)
    whole.add_edge(second, Task("multiply", 0, 1))
    with pytest.raises(ValueError, match="tasks from the sink, not"):
        check(tasks, whole)


def test_kernels_are_numbered_from_the_most_distant_on() -> None:
    tasks = TaskGraph(3, 2, 4, 1, 1)
    kernels = [tasks.kernel(number) for number in range(tasks.kernels)]
    assert len(set(kernels)) == 24
    distances = [tasks.distance(kernel) for kernel in kernels]
    assert distances == sorted(distances, reverse=True)


def test_graph_of_the_paper_converts_to_networkx() -> None:
    """Figure 3 has four input maps, five output maps and four images."""
    whole = graph(TaskGraph(4, 5, 1, 4, 4))
    assert isinstance(whole, networkx.DiGraph)
    assert len(whole) == 4 + 4 * 4 + 4 * 5 + 4 * 5 * 4 + 5 * 4
    assert sorted(task.part for task in whole.successors(Task("kernel", 2, 3)) if task.kind == "multiply") == [
        0,
        1,
        2,
        3,
    ]


# The places of the workers


def cores_as_told(root: Path, cores: dict[int, tuple[int, str, str]]) -> Path:
    """Make a folder like Linux's, with package, cache and siblings of each core; empty text means no file."""
    for core, (package, cache, siblings) in cores.items():
        told = {"topology/physical_package_id": str(package)}
        told |= {"cache/index3/shared_cpu_list": cache, "topology/thread_siblings_list": siblings}
        for name, content in told.items():
            path = root / f"cpu{core}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content:
                path.write_text(content + "\n")
    return root


def test_chips_are_told_by_caches_and_packages(tmp_path: Path) -> None:
    two_threads_a_core = {core: (core // 4, "", f"{core // 2 * 2}-{core // 2 * 2 + 1}") for core in range(8)}
    root = cores_as_told(tmp_path / "threads", two_threads_a_core)
    assert chips_of(range(8), root) == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert chips_of({2, 3, 5}, root) == ((2, 3), (5,))
    far = {core: (0, "", f"{core % 2},{core % 2 + 2}") for core in range(4)}
    assert chips_of(range(4), cores_as_told(tmp_path / "far", far)) == ((0, 1, 2, 3),)
    caches = {core: (0, "0-1" if core < 2 else "2-3", str(core)) for core in range(4)}
    assert chips_of(range(4), cores_as_told(tmp_path / "caches", caches)) == ((0, 1), (2, 3))
    assert chips_of(range(3), tmp_path / "nothing") == ((0, 1, 2),)


def test_workers_and_primaries_are_spread_over_chips() -> None:
    found = pinning.placements(4, 2, TWO_CHIPS)
    assert [place.chip for place in found] == [0, 1, 0, 1]
    assert [place.core for place in found] == [0, 2, 1, 3]
    assert [place.chip for place in found if place.primary] == [0, 1]
    assert [place.core for place in pinning.placements(5, 5, ((0, 1, 2), (3, 4)))] == [0, 3, 1, 4, 2]


def test_workers_share_one_chip_with_a_note_if_pinning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    cores = os.sched_getaffinity(0)
    crowded = pinning.place_workers(len(cores) + 1, 2)
    assert crowded.unpinned == f"{len(cores) + 1} workers have {len(cores)} cores"
    assert {(place.chip, place.core) for place in crowded.places} == {(0, None)}
    assert pinning.place_workers(1, 1).unpinned == "a single worker needs no pinning"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert pinning.place_workers(2, 2).unpinned == "the system refuses to pin threads: Operation not permitted"
    with pinned(1):
        pass  # the core was taken away meanwhile: the thread stays where it is
    monkeypatch.delattr(os, "sched_setaffinity")
    assert pinning.place_workers(2, 2).unpinned == "this system cannot pin threads"


def test_pinned_thread_returns_to_its_former_cores() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)

    def fail() -> None:
        with pinned(core):
            assert os.sched_getaffinity(0) == {core}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.sched_getaffinity(0) == before


# Runs


def run_scheduler(
    tasks: TaskGraph, found: Sequence[Placement], execute: Callable[[Task, int, int], None]
) -> list[Event]:
    trace: list[Event] = []
    scheduler = Scheduler(tasks, found, execute, lambda: None, trace.append)
    threads = [threading.Thread(target=scheduler.work, args=(place,)) for place in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the run hangs"
    return trace


@pytest.mark.parametrize("primaries", [1, 2, 4])
@pytest.mark.parametrize("tasks", GRAPHS, ids=str)
def test_any_timing_respects_the_graph_the_chips_and_the_priorities(tasks: TaskGraph, primaries: int) -> None:
    found = pinning.placements(4, primaries, TWO_CHIPS)
    for seed in range(3):
        delays = np.random.default_rng(seed).exponential(2e-4, 1000)

        def execute(task: Task, worker: int, owner: int, delays: Any = delays) -> None:
            time.sleep(delays[hash(task) % 1000])

        assert_trace(run_scheduler(tasks, found, execute), tasks, found)


def test_one_worker_alone_does_all_tasks() -> None:
    """The pool may be busy elsewhere: nobody waits for a worker that never comes."""
    tasks, trace = TaskGraph(2, 3, 2, 2, 2), list[Event]()
    found = pinning.placements(4, 2, TWO_CHIPS)
    Scheduler(tasks, found, lambda task, worker, owner: None, lambda: None, trace.append).work(found[0])
    assert {event.worker for event in trace} == {0}
    assert_trace(trace, tasks, found)


def test_error_stops_every_worker_and_is_raised_once() -> None:
    tasks, raised = TaskGraph(4, 4, 4, 4, 4), list[str]()
    executed: list[Task] = []
    fails = Task("multiply", 1, 2, 3, 0)

    def execute(task: Task, worker: int, owner: int) -> None:
        executed.append(task)
        time.sleep(1e-4)
        if task == fails:
            raise ValuesOverflowError(str(task))

    found = pinning.placements(4, 4, TWO_CHIPS)
    scheduler = Scheduler(tasks, found, execute, lambda: None)

    def work(place: Placement) -> None:
        try:
            scheduler.work(place)
        except ValuesOverflowError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in found]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start < 5
    assert raised == [str(fails)]
    assert len(executed) - executed.index(fails) <= 2 * len(found), "workers went on"
