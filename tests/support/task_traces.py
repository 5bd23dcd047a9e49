"""The trace of a run of tasks shows whether the run kept to its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.kernels.cpu.pinning import Placement
    from znnpy.kernels.cpu.scheduler import Event
    from znnpy.kernels.cpu.task_graph import Task, TaskGraph

TWO_CHIPS = (0, 1), (2, 3)


def distance_of_best(free: Sequence[Task], tasks: TaskGraph) -> int:
    return max((tasks.distance(task) for task in free), default=-1)


def assert_trace(trace: Sequence[Event], tasks: TaskGraph, found: Sequence[Placement]) -> None:
    """Everything ran once, after what it waits for, by a worker that may, and nothing more distant was passed over."""
    order = list(tasks.tasks())
    ended: set[Task] = set()
    begun: dict[Task, Event] = {}
    running: dict[int, Task] = {}
    for event in trace:
        place = found[event.worker]
        if event.what == "end":
            assert running.pop(event.worker) == event.task
            ended.add(event.task)
        elif event.what == "begin":
            assert event.task not in begun, f"{event.task} ran twice"
            assert event.worker not in running
            assert all(earlier in ended for earlier in tasks.before(event.task)), f"{event.task} began too early"
            if event.task.kind in ("kernel", "multiply"):
                assert_allowed(event, place, begun, ended, tasks, found)
            begun[event.task], running[event.worker] = event, event.task
        else:
            assert running[event.worker].kind == "sync", f"{event.what} of {event.buffer} in {running[event.worker]}"
    assert ended == set(order)


def assert_allowed(
    event: Event,
    place: Placement,
    begun: dict[Task, Event],
    ended: set[Task],
    tasks: TaskGraph,
    found: Sequence[Placement],
) -> None:
    """Primary, chip, buffer and priority of a kernel's or multiply-add's begin."""

    def holds(kernel: Task) -> bool:
        return any(kernel._replace(kind="multiply", part=part) not in ended for part in range(tasks.products))

    loaded = {begun[task].owner: task for task in begun if task.kind == "kernel" and holds(task)}
    if event.task.kind == "kernel":
        assert place.primary, "a worker that is not primary transformed a kernel"
        assert event.owner == event.worker
        assert event.worker not in loaded, "a kernel was overwritten while it was needed"
    else:
        assert loaded[event.owner] == event.task._replace(kind="kernel", part=0)
        assert found[event.owner].chip == place.chip, "a product on another chip than its kernel"
    free = [
        product
        for owner, kernel in loaded.items()
        if kernel in ended and found[owner].chip == place.chip
        for part in range(tasks.products)
        if (product := kernel._replace(kind="multiply", part=part)) not in begun
        and all(earlier in ended for earlier in tasks.before(product))
    ]
    if place.primary and place.worker not in loaded:
        free += [kernel for kernel in map(tasks.kernel, range(tasks.kernels)) if kernel not in begun][:1]
    assert tasks.distance(event.task) == distance_of_best(free, tasks), "something more distant was passed over"
