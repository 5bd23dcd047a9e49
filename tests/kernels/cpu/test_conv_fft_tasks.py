"""The task-parallel convolution: how a layer is cut into tasks, and what a run did, read from its trace."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, aligned, assert_close, random_input, random_weights
from tests.support.task_traces import TWO_CHIPS, assert_trace
from znnpy.costs.model import Rates, seconds
from znnpy.errors import Stopped
from znnpy.kernels.contract import Variant
from znnpy.kernels.cpu import conv_fft_tasks, pinning
from znnpy.kernels.cpu.pinning import Placements
from znnpy.kernels.cpu.scheduler import Event
from znnpy.kernels.cpu.task_graph import Task
from znnpy.kernels.cpu.task_sizes import bounds, sizes
from znnpy.kernels.table import find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array

TASKS = find("cpu.conv.fft_tasks")
NARROW = Variant.of(width=16)
SHAPE = ConvShape(3, 33, 48, (17, 19, 23), (3, 2, 4), "relu")  # 2 and 3 blocks, one of them odd; padded everywhere


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


def run(
    shape: ConvShape,
    threads: int,
    monkeypatch: pytest.MonkeyPatch | None = None,
    observe: Callable[[Event], None] | None = None,
    variant: Variant = NARROW,
) -> Array:
    """One run; with `monkeypatch`, workers sit on two chips that are not there."""
    if monkeypatch is not None:
        unpinned = [
            replace(place, core=None) for place in pinning.placements(threads, min(threads, shape.fout), TWO_CHIPS)
        ]
        monkeypatch.setattr(conv_fft_tasks, "place_workers", lambda *counts: Placements(tuple(unpinned)))
    out = np.full(shape.out_shape, np.nan, np.float32)
    with ThreadPool(threads) as pool:
        step: Any = TASKS.bind(TASKS.prepare(random_weights(shape), variant, pool), shape, variant, pool)
        step.observe = observe
        scratch = {s.name: aligned(s.nbytes) for s in TASKS.footprint(shape, variant, threads).scratch}
        step.run(random_input(shape), out, scratch)
    return out


@pytest.mark.slow
def test_delays_change_no_byte_and_only_synchronisations_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.kernels.cpu.task_sizes.KERNEL_BYTES", 2**18)  # several slabs
    monkeypatch.setattr("znnpy.kernels.cpu.task_sizes.PRODUCT_BYTES", 2**14)  # an image a product
    monkeypatch.setattr("znnpy.kernels.cpu.task_sizes.TASK_VALUES", 1)
    first = run(SHAPE, 1)
    assert_close(first, random_input(SHAPE), random_weights(SHAPE), SHAPE)
    tasks = sizes(SHAPE, 16).tasks
    assert (tasks.rows, tasks.columns, tasks.transforms, tasks.products) == (2, 3, 3, 3)
    assert tasks.slabs > 5
    found = pinning.placements(4, 4, TWO_CHIPS)
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
def test_every_width_of_blocks_equals_the_definition(variant: Variant) -> None:
    shape = ConvShape(4, 64, 65, (9, 10, 6), (2, 3, 2), "softmax")
    out = run(shape, 2, variant=variant)
    assert_close(out, random_input(shape), random_weights(shape), shape)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to pin")
def test_workers_are_pinned_to_one_core_each_and_released() -> None:
    cores: dict[int, set[int]] = {}
    before = os.sched_getaffinity(0)

    def observe(event: Event) -> None:
        cores.setdefault(event.worker, os.sched_getaffinity(0))
        time.sleep(1e-3)

    seen: list[set[int]] = []
    with ThreadPool(2) as pool:
        shape = ConvShape(2, 16, 16, (9, 9, 9), (3, 3, 3))
        step: Any = TASKS.bind(TASKS.prepare(random_weights(shape), NARROW, pool), shape, NARROW, pool)
        step.observe = observe
        scratch = {s.name: aligned(s.nbytes) for s in TASKS.footprint(shape, NARROW, 2).scratch}
        step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)
        pool.each(lambda lo, hi, worker: seen.append(os.sched_getaffinity(0)), 2)
    assert all(len(where) == 1 for where in cores.values())
    assert len(set.union(*cores.values())) == len(cores)
    assert seen == [before, before]


def test_thread_pool_stopped_in_the_middle_stops_promptly() -> None:
    shape = ConvShape(2, 32, 32, (24, 24, 24), (3, 3, 3))
    with ThreadPool(2) as pool:
        step: Any = TASKS.bind(TASKS.prepare(random_weights(shape), NARROW, pool), shape, NARROW, pool)
        trace: list[Event] = []

        def observe(event: Event) -> None:
            trace.append(event)
            if event.task.kind == "multiply":
                pool.stop()

        step.observe = observe
        scratch = {s.name: aligned(s.nbytes) for s in TASKS.footprint(shape, NARROW, 2).scratch}
        with pytest.raises(Stopped):
            step.run(random_input(shape), np.empty(shape.out_shape, np.float32), scratch)
    assert Counter(event.task.kind for event in trace)["output"] == 0


def test_unsupported_shape_gets_a_reason() -> None:
    def reason(shape: ConvShape, cores: int = 2) -> str:
        return TASKS.why_not(shape, replace(MACHINE, cores=cores)) or ""

    wide = ConvShape(1, 16, 16, (9, 9, 9), (3, 3, 3))
    assert reason(wide) == ""
    assert "a task is 16 maps wide, and there are 15 input maps" in reason(replace(wide, fin=15))
    assert "a task is 16 maps wide, and there are 3 output maps" in reason(replace(wide, fout=3))
    assert "1 images of 16 input maps are too few tasks for 17 cores" in reason(wide, 17)
    assert reason(replace(wide, batch=2), 17) == ""
    assert "see cpu.conv.direct" in reason(replace(wide, k=(1, 1, 1)))


@pytest.mark.parametrize(
    ("shape", "width", "milliseconds"),
    [
        (ConvShape(1, 80, 80, (32, 32, 32), (5, 5, 5), "relu"), 16, 57.4),
        (ConvShape(1, 80, 80, (32, 32, 32), (5, 5, 5), "relu"), 32, 54.2),
        (ConvShape(8, 80, 80, (24, 24, 24), (5, 5, 5), "relu"), 16, 100.6),
        (ConvShape(8, 80, 80, (24, 24, 24), (5, 5, 5), "relu"), 32, 76.0),
        (ConvShape(1, 32, 32, (48, 48, 48), (3, 3, 3), "relu"), 16, 37.4),
        (ConvShape(1, 48, 80, (50, 60, 64), (9, 9, 9), "relu"), 16, 276.9),
        (ConvShape(64, 80, 80, (14, 14, 14), (3, 3, 3), "relu"), 16, 129.0),
        (ConvShape(1, 16, 16, (64, 64, 64), (5, 5, 5), "relu"), 16, 44.4),
    ],
    ids=str,
)
def test_work_fits_measured_times(shape: ConvShape, width: int, milliseconds: float) -> None:
    """The times are the shortest of three runs of 2 threads on 2 Zen 5 cores, 2026-11-21."""
    expected = 1000 * seconds(TASKS.work(shape, Variant.of(width=width)), Rates())
    assert 0.7 < milliseconds / expected < 1.4, f"{milliseconds} measured, {expected:.0f} expected"


@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        (ConvShape(1, 1, 8, (40, 40, 40), (3, 3, 3), "relu"), 28.7),
        (ConvShape(1, 32, 32, (24, 24, 24), (3, 3, 3), "relu"), 56.2),
        (ConvShape(1, 8, 8, (40, 40, 40), (5, 5, 5), "relu"), 134.4),
        (ConvShape(1, 80, 80, (12, 12, 12), (3, 3, 3), "relu"), 49.4),
    ],
    ids=str,
)
def test_work_of_the_plain_direct_convolution_fits_measured_times(shape: ConvShape, milliseconds: float) -> None:
    """The times are as above; it never beats the other direct convolution."""
    naive, fast = find("cpu.conv.direct_naive"), find("cpu.conv.direct")
    expected = 1000 * seconds(naive.work(shape, Variant()), Rates())
    assert 0.7 < milliseconds / expected < 1.4, f"{milliseconds} measured, {expected:.0f} expected"
    assert expected > 2000 * seconds(fast.work(shape, Variant()), Rates())
