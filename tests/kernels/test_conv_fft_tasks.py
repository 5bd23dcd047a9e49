"""The task-parallel convolution: its graph, who sits where, and what a run really did, read from its trace."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx
import numpy as np
import pytest
from closeness import MACHINE, aligned, assert_close, random_input, random_weights

from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.kernels.cpu import conv_fft_tasks, seats
from znnpy.kernels.cpu.scheduler import Event, Scheduler
from znnpy.kernels.cpu.seats import Seat, Seating, chips_of, pinned
from znnpy.kernels.cpu.task_graph import Task, TaskGraph, check, graph
from znnpy.kernels.cpu.task_sizes import bounds, sizes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import Variant
from znnpy.kernels.table import find
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array

TASKS = find("cpu.conv.fft_tasks")
NARROW = Variant.of(width=16)
GRAPHS = [TaskGraph(1, 1, 1, 1, 1), TaskGraph(4, 5, 1, 4, 4), TaskGraph(2, 3, 4, 5, 2), TaskGraph(3, 1, 2, 1, 3)]
TWO_CHIPS = (0, 1), (2, 3)
SHAPE = ConvShape(3, 33, 48, (17, 19, 23), (3, 2, 4), "relu")  # 2 and 3 blocks, one of them odd; padded everywhere


# The graph


@pytest.mark.parametrize("tasks", GRAPHS, ids=str)
def test_the_graph_has_no_cycle_and_the_distances_that_a_run_uses(tasks: TaskGraph) -> None:
    whole = graph(tasks)
    check(tasks, whole)
    kinds = Counter(task.kind for task in whole)
    assert kinds["multiply"] == tasks.multiplies == tasks.kernels * tasks.products
    assert (kinds["input"], kinds["kernel"], kinds["output"]) == (tasks.inputs, tasks.kernels, tasks.outputs)
    assert kinds["sync"] == 4


def test_a_damaged_graph_is_found() -> None:
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


# How a layer is cut


@pytest.mark.parametrize("maps", [16, 17, 31, 32, 33, 40, 80, 127])
@pytest.mark.parametrize("width", [16, 32])
def test_blocks_are_wide_and_cover_all_maps(maps: int, width: int) -> None:
    found = bounds(maps, width)
    assert found[0][0] == 0
    assert found[-1][1] == maps
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(hi - lo >= min(width, maps) for lo, hi in found)
    assert all(lo % 8 == 0 for lo, _ in found)


@pytest.mark.parametrize(
    "shape",
    [SHAPE, ConvShape(1, 80, 80, (48, 48, 48), (5, 5, 5)), ConvShape(40, 16, 16, (8, 9, 10), (2, 2, 2))],
    ids=str,
)
def test_slabs_and_parts_cover_everything_once(shape: ConvShape) -> None:
    cut = sizes(shape, 16)
    seen = np.zeros((cut.half, cut.padded[1]), int)
    for slab in range(cut.tasks.slabs):
        seen[cut.slab(Task("kernel", slab=slab))] += 1
    assert (seen == 1).all()
    for kind, parts in (("multiply", cut.tasks.products), ("output", cut.tasks.transforms)):
        images = [s for part in range(parts) for s in cut.images(Task(kind, part=part))]  # type: ignore[arg-type]
        assert images == list(range(shape.batch))


# Who sits where


def cores_as_told(root: Path, cores: dict[int, tuple[int, str, str]]) -> Path:
    """A folder like Linux's, for cores with package, third-level cache and siblings; an empty text: no such file."""
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
    found = seats.seats(4, 2, TWO_CHIPS)
    assert [seat.chip for seat in found] == [0, 1, 0, 1]
    assert [seat.core for seat in found] == [0, 2, 1, 3]
    assert [seat.chip for seat in found if seat.primary] == [0, 1]
    assert [seat.core for seat in seats.seats(5, 5, ((0, 1, 2), (3, 4)))] == [0, 3, 1, 4, 2]


def test_where_pinning_cannot_be_workers_share_one_chip_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    cores = os.sched_getaffinity(0)
    crowded = seats.seating(len(cores) + 1, 2)
    assert crowded.unpinned == f"{len(cores) + 1} workers have {len(cores)} cores"
    assert {(seat.chip, seat.core) for seat in crowded.seats} == {(0, None)}
    assert seats.seating(1, 1).unpinned == "one worker has nobody to make room for"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert seats.seating(2, 2).unpinned == "the system refuses to pin threads: Operation not permitted"
    with pinned(1):
        pass  # the core was taken away meanwhile: the thread stays where it is
    monkeypatch.delattr(os, "sched_setaffinity")
    assert seats.seating(2, 2).unpinned == "this system pins no threads"


def test_a_pinned_thread_goes_back_to_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)

    def fail() -> None:
        with pinned(core):
            assert os.sched_getaffinity(0) == {core}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.sched_getaffinity(0) == before


# What a run does


def distance_of_best(free: Sequence[Task], tasks: TaskGraph) -> int:
    return max((tasks.distance(task) for task in free), default=-1)


def assert_trace(trace: Sequence[Event], tasks: TaskGraph, found: Sequence[Seat]) -> None:
    """Everything ran once, after what it waits for, by a worker that may, and nothing more distant was passed over."""
    order = list(tasks.tasks())
    ended: set[Task] = set()
    begun: dict[Task, Event] = {}
    running: dict[int, Task] = {}
    for event in trace:
        seat = found[event.worker]
        if event.what == "end":
            assert running.pop(event.worker) == event.task
            ended.add(event.task)
        elif event.what == "begin":
            assert event.task not in begun, f"{event.task} ran twice"
            assert event.worker not in running
            assert all(earlier in ended for earlier in tasks.before(event.task)), f"{event.task} began too early"
            if event.task.kind in ("kernel", "multiply"):
                assert_allowed(event, seat, begun, ended, tasks, found)
            begun[event.task], running[event.worker] = event, event.task
        else:
            assert running[event.worker].kind == "sync", f"{event.what} of {event.buffer} in {running[event.worker]}"
    assert ended == set(order)


def assert_allowed(
    event: Event, seat: Seat, begun: dict[Task, Event], ended: set[Task], tasks: TaskGraph, found: Sequence[Seat]
) -> None:
    """Primary, chip, buffer and priority of a kernel's or multiply-add's begin."""

    def holds(kernel: Task) -> bool:
        return any(kernel._replace(kind="multiply", part=part) not in ended for part in range(tasks.products))

    loaded = {begun[task].owner: task for task in begun if task.kind == "kernel" and holds(task)}
    if event.task.kind == "kernel":
        assert seat.primary, "a worker that is not primary transformed a kernel"
        assert event.owner == event.worker
        assert event.worker not in loaded, "a kernel was overwritten while it was needed"
    else:
        assert loaded[event.owner] == event.task._replace(kind="kernel", part=0)
        assert found[event.owner].chip == seat.chip, "a product on another chip than its kernel"
    free = [
        product
        for owner, kernel in loaded.items()
        if kernel in ended and found[owner].chip == seat.chip
        for part in range(tasks.products)
        if (product := kernel._replace(kind="multiply", part=part)) not in begun
        and all(earlier in ended for earlier in tasks.before(product))
    ]
    if seat.primary and seat.worker not in loaded:
        free += [kernel for kernel in map(tasks.kernel, range(tasks.kernels)) if kernel not in begun][:1]
    assert tasks.distance(event.task) == distance_of_best(free, tasks), "something more distant was passed over"


def run_scheduler(tasks: TaskGraph, found: Sequence[Seat], execute: Callable[[Task, int, int], None]) -> list[Event]:
    trace: list[Event] = []
    scheduler = Scheduler(tasks, found, execute, lambda: None, trace.append)
    threads = [threading.Thread(target=scheduler.work, args=(seat,)) for seat in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the run hangs"
    return trace


@pytest.mark.parametrize("primaries", [1, 2, 4])
@pytest.mark.parametrize("tasks", GRAPHS, ids=str)
def test_any_timing_respects_the_graph_the_chips_and_the_priorities(tasks: TaskGraph, primaries: int) -> None:
    found = seats.seats(4, primaries, TWO_CHIPS)
    for seed in range(3):
        delays = np.random.default_rng(seed).exponential(2e-4, 1000)

        def execute(task: Task, worker: int, owner: int, delays: Any = delays) -> None:
            time.sleep(delays[hash(task) % 1000])

        assert_trace(run_scheduler(tasks, found, execute), tasks, found)


def test_one_worker_that_begins_does_all() -> None:
    """The pool may be busy elsewhere: nobody waits for a worker that never comes."""
    tasks, trace = TaskGraph(2, 3, 2, 2, 2), list[Event]()
    found = seats.seats(4, 2, TWO_CHIPS)
    Scheduler(tasks, found, lambda task, worker, owner: None, lambda: None, trace.append).work(found[0])
    assert {event.worker for event in trace} == {0}
    assert_trace(trace, tasks, found)


def test_an_error_stops_every_worker_and_comes_out_once() -> None:
    tasks, raised = TaskGraph(4, 4, 4, 4, 4), list[str]()
    executed: list[Task] = []
    fails = Task("multiply", 1, 2, 3, 0)

    def execute(task: Task, worker: int, owner: int) -> None:
        executed.append(task)
        time.sleep(1e-4)
        if task == fails:
            raise ValuesOverflowError(str(task))

    found = seats.seats(4, 4, TWO_CHIPS)
    scheduler = Scheduler(tasks, found, execute, lambda: None)

    def work(seat: Seat) -> None:
        try:
            scheduler.work(seat)
        except ValuesOverflowError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=work, args=(seat,), daemon=True) for seat in found]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start < 5
    assert raised == [str(fails)]
    assert len(executed) - executed.index(fails) <= 2 * len(found), "workers went on"


# The primitive


def run(
    shape: ConvShape,
    threads: int,
    monkeypatch: pytest.MonkeyPatch | None = None,
    observe: Callable[[Event], None] | None = None,
    variant: Variant = NARROW,
) -> Array:
    """One run; with `monkeypatch`, workers sit on two chips that are not there."""
    if monkeypatch is not None:
        unpinned = [replace(seat, core=None) for seat in seats.seats(threads, min(threads, shape.fout), TWO_CHIPS)]
        monkeypatch.setattr(conv_fft_tasks, "seating", lambda *counts: Seating(tuple(unpinned)))
    out = np.full(shape.out_shape, np.nan, np.float32)
    with Crew(threads) as crew:
        step: Any = TASKS.bind(TASKS.prepare(random_weights(shape), variant, crew), shape, variant, crew)
        step.observe = observe
        scratch = {s.name: aligned(s.nbytes) for s in TASKS.footprint(shape, variant, threads).scratch}
        step.run(random_input(shape), out, scratch)
    return out


def test_delays_change_no_byte_and_only_synchronisations_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.kernels.cpu.task_sizes.KERNEL_BYTES", 2**18)  # several slabs
    monkeypatch.setattr("znnpy.kernels.cpu.task_sizes.PRODUCT_BYTES", 2**14)  # an image a product
    monkeypatch.setattr("znnpy.kernels.cpu.task_sizes.TASK_VALUES", 1)
    first = run(SHAPE, 1)
    assert_close(first, random_input(SHAPE), random_weights(SHAPE), SHAPE)
    tasks = sizes(SHAPE, 16).tasks
    assert (tasks.rows, tasks.columns, tasks.transforms, tasks.products) == (2, 3, 3, 3)
    assert tasks.slabs > 5
    found = seats.seats(4, 4, TWO_CHIPS)
    workers = set()
    for seed in range(3):
        trace: list[Event] = []
        delays = np.random.default_rng(seed).exponential(3e-4, 1000)

        def observe(event: Event, trace: list[Event] = trace, delays: Any = delays) -> None:
            trace.append(event)
            if event.what == "begin":
                time.sleep(delays[len(trace) % 1000])

        assert run(SHAPE, 4, monkeypatch, observe).tobytes() == first.tobytes()
        assert_trace(trace, tasks, found)
        workers |= {event.worker for event in trace}
        given = [(event.what, event.buffer, event.task.part) for event in trace if event.what in ("allocate", "free")]
        assert ("free", "input", 1) in given
        assert ("allocate", "kernels", 1) in given
        assert ("free", "input spectra", 2) in given
        assert ("allocate", "output", 2) in given
        assert len([name for what, name, _ in given if what == "free"]) == len(given) / 2
    assert len(workers) > 1


@pytest.mark.parametrize("variant", TASKS.variants(ConvShape(4, 64, 64, (9, 9, 9), (2, 2, 2)), MACHINE), ids=str)
def test_every_width_of_blocks_is_right(variant: Variant) -> None:
    shape = ConvShape(4, 64, 65, (9, 10, 6), (2, 3, 2), "softmax")
    out = run(shape, 2, variant=variant)
    assert_close(out, random_input(shape), random_weights(shape), shape)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to pin")
def test_workers_are_pinned_one_a_core_and_released() -> None:
    cores: dict[int, set[int]] = {}
    before = os.sched_getaffinity(0)

    def observe(event: Event) -> None:
        cores.setdefault(event.worker, os.sched_getaffinity(0))
        time.sleep(1e-3)

    seen: list[set[int]] = []
    with Crew(2) as crew:
        shape = ConvShape(2, 16, 16, (9, 9, 9), (3, 3, 3))
        step: Any = TASKS.bind(TASKS.prepare(random_weights(shape), NARROW, crew), shape, NARROW, crew)
        step.observe = observe
        scratch = {s.name: aligned(s.nbytes) for s in TASKS.footprint(shape, NARROW, 2).scratch}
        step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)
        crew.each(lambda lo, hi, worker: seen.append(os.sched_getaffinity(0)), 2)
    assert all(len(where) == 1 for where in cores.values())
    assert len(set.union(*cores.values())) == len(cores)
    assert seen == [before, before]


def test_a_crew_stopped_in_the_middle_stops_promptly() -> None:
    shape = ConvShape(2, 32, 32, (24, 24, 24), (3, 3, 3))
    with Crew(2) as crew:
        step: Any = TASKS.bind(TASKS.prepare(random_weights(shape), NARROW, crew), shape, NARROW, crew)
        trace: list[Event] = []

        def observe(event: Event) -> None:
            trace.append(event)
            if event.task.kind == "multiply":
                crew.stop()

        step.observe = observe
        scratch = {s.name: aligned(s.nbytes) for s in TASKS.footprint(shape, NARROW, 2).scratch}
        with pytest.raises(Stopped):
            step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)
    assert Counter(event.task.kind for event in trace)["output"] == 0


def test_why_not_says_why() -> None:
    def reason(shape: ConvShape, cores: int = 2) -> str:
        return TASKS.why_not(shape, replace(MACHINE, cores=cores)) or ""

    wide = ConvShape(1, 16, 16, (9, 9, 9), (3, 3, 3))
    assert reason(wide) == ""
    assert "a task is 16 maps wide, and 15 come in" in reason(replace(wide, fin=15))
    assert "a task is 16 maps wide, and 3 come out" in reason(replace(wide, fout=3))
    assert "1 images of 16 maps that come in are too few tasks for 17 cores" in reason(wide, 17)
    assert reason(replace(wide, batch=2), 17) == ""
    assert "see cpu.conv.direct" in reason(replace(wide, k=(1, 1, 1)))


def test_a_graph_of_the_paper_is_a_networkx_graph() -> None:
    """Fig. 3: four input and five output maps, four images."""
    whole = graph(TaskGraph(4, 5, 1, 4, 4))
    assert isinstance(whole, networkx.DiGraph)
    assert len(whole) == 4 + 4 * 4 + 4 * 5 + 4 * 5 * 4 + 5 * 4
    assert sorted(task.part for task in whole.successors(Task("kernel", 2, 3)) if task.kind == "multiply") == [
        0,
        1,
        2,
        3,
    ]
