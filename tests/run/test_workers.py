"""Several lanes of one run: every voxel once, whoever computes it; what a lost lane had begun goes to the others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_pipeline import (
    FAULTS,
    NETWORK,
    PATCH,
    SIZE,
    WALKER,
    Hook,
    Output,
    Session,
    Source,
    dense,
    is_fault,
    no_thread_is_left,
    quiet,
    volume,
    walking,
)
from znnpy.errors import DeviceError, DeviceLostError
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Network
from znnpy.patches import Column, Cover, cover
from znnpy.run import pipeline
from znnpy.run.work_queue import ColumnQueue
from znnpy.run.worker import Worker

COLUMNS = cover(SIZE, PATCH)
DELAYS = (0.0, 0.0, 0.0001, 0.0003)  # seconds at most: a stage of a step takes about 0.1 ms


class Under(Session):
    """Two steps at a time, as on a GPU."""

    max_in_flight = 1


class Lenient(Output):
    """An output that accepts a second, equal write of a column of a lost worker."""

    def write(self, box: Any, voxels: Any, number: int = 0) -> None:
        old = self.written[(slice(None), *box.slices)].copy()
        self.written[(slice(None), *box.slices)] = -1
        super().write(box, voxels)
        new = self.written[(slice(None), *box.slices)]
        assert ((old == -1) | (old == new)).all()

    def finish_column(self, index: int) -> None:
        assert index not in self.finished
        super().finish_column(index)


@cache
def exact(network: Network = NETWORK) -> npt.NDArray[Any]:
    """Return what is to be written of `volume(network)`."""
    return dense(volume(network), network)


def any_columns(seed: int, rng: random.Random) -> tuple[Cover, Network]:
    """Patches of an even seed, columns of an odd one; 12 to 81 steps."""
    patch = rng.choice([PATCH, (3, 3, 5)])
    if seed % 2:
        return walking(seed % 3, rng.choice([1, 2, 50]), patch), WALKER
    return cover(SIZE, patch), NETWORK


def workers_of(
    hooks: Sequence[Hook],
    pool: ThreadPool,
    network: Network,
    columns: Sequence[Column],
    done: frozenset[int] = frozenset(),
) -> list[Worker]:
    """One a hook, of the same shares; every other one with a step under way."""
    shares = ColumnQueue(columns, done=done)
    return [
        Worker(f"device {number}", (Under if number % 2 else Session)(hook, pool, network, columns), pool, shares)
        for number, hook in enumerate(hooks)
    ]


def went(
    hooks: Sequence[Hook],
    columns: Sequence[Column] = COLUMNS,
    network: Network = NETWORK,
    hook: Hook = quiet,
    done: frozenset[int] = frozenset(),
    progress: Callable[[pipeline.Event], None] | None = None,
    output: Output | None = None,
) -> tuple[Output, pipeline.Timings]:
    with ThreadPool(1) as pool:
        output = output or Lenient(hook, done)
        lanes = workers_of(hooks, pool, network, columns, done)
        timings = pipeline.run_workers(lanes, Source(volume(network), hook), output, progress)
    for lane, timed in zip(lanes, timings.workers, strict=True):
        assert isinstance(lane.session, Session)
        assert lane.session.abandoned == bool(timed.lost)
    return output, timings


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("walks", [False, True])
def test_every_column_is_computed_once(count: int, walks: bool) -> None:
    columns: Cover = walking(1, 1) if walks else COLUMNS
    network = WALKER if walks else NETWORK
    events: list[pipeline.Event] = []
    output, timings = went([quiet] * count, columns, network, progress=events.append)
    np.testing.assert_array_equal(output.written, exact(network))
    assert sorted(output.finished) == list(range(len(columns)))
    assert timings.columns == len(columns)
    assert timings.voxels == sum(lane.voxels for lane in timings.workers) == 7 * 5 * 9
    assert [lane.name for lane in timings.workers] == [f"device {number}" for number in range(count)]
    assert not any(lane.lost for lane in timings.workers)
    assert (events[-1].columns_done, events[-1].voxels_done, events[-1].work_done) == (len(columns), 315, 1.0)
    assert no_thread_is_left()


def test_faster_worker_computes_more() -> None:
    def slow(stage: str, patch: int) -> None:
        if stage == "compute":
            time.sleep(0.02)

    _, timings = went([slow, quiet])
    assert timings.workers[0].voxels < timings.workers[1].voxels / 2


@pytest.mark.parametrize("seed", range(200))
def test_lost_workers_return_their_columns(seed: int) -> None:
    """All but one fail, at random places, under random delays."""
    rng = random.Random(seed)
    columns, network = any_columns(seed, rng)
    count = rng.choice([2, 3, 4])
    survivor = rng.randrange(count)
    slow = {stage: rng.choice(DELAYS) for stage in ("read", "compute", "write")}
    lost = set[int]()

    def hook_of(number: int) -> Hook:
        when = rng.randrange(6)
        error = rng.choice([DeviceError, DeviceLostError])

        def hook(stage: str, patch: int) -> None:
            time.sleep(rng.random() * slow[stage])
            if number != survivor and stage == "compute" and patch == when:
                lost.add(number)
                raise error("cudaErrorIllegalAddress")

        return hook

    def hook(stage: str, patch: int) -> None:
        time.sleep(rng.random() * slow[stage])

    done = frozenset(rng.sample(range(len(columns)), rng.randrange(2)))
    output, timings = went([hook_of(number) for number in range(count)], columns, network, hook, done)
    whole = np.ones(SIZE, bool)
    for index in done:
        for step in columns[index].steps:
            whole[step.write.slices] = False
    np.testing.assert_array_equal(output.written[:, whole], exact(network)[:, whole])
    assert sorted(output.finished) == sorted(set(range(len(columns))) - done)
    assert {number for number, lane in enumerate(timings.workers) if lane.lost} == lost
    assert all("cudaErrorIllegalAddress" in (timings.workers[number].lost or "") for number in lost)
    assert timings.voxels == sum(lane.voxels for lane in timings.workers) == whole.sum()
    assert no_thread_is_left()


def test_error_of_the_last_lost_worker_is_raised() -> None:
    def broken(stage: str, patch: int) -> None:
        if stage == "compute" and patch == 1:
            raise DeviceError("cudaErrorECCUncorrectable")

    output = Lenient(quiet)
    with pytest.raises(DeviceError, match=r"step 0 of column \d+: cudaErrorECCUncorrectable"):
        went([broken, broken, broken], output=output)
    assert no_thread_is_left()
    for index in output.finished:
        kept = (slice(None), *COLUMNS[index].steps[0].write.slices)
        np.testing.assert_array_equal(output.written[kept], exact()[kept])


@pytest.mark.parametrize("seed", range(200))
def test_any_failure_stops_every_worker(seed: int) -> None:
    rng = random.Random(seed)
    columns, network = any_columns(seed, rng)
    where = rng.choice(["read", "compute", "write"])
    count, when = rng.choice([2, 3]), rng.randrange(4)
    faulty = rng.randrange(count)
    slow = {stage: rng.choice(DELAYS) for stage in ("read", "compute", "write")}
    fault = rng.choice([fault for fault in FAULTS if not isinstance(fault, DeviceError)])
    met = threading.Event()

    def hook_of(number: int | None) -> Hook:
        def hook(stage: str, patch: int) -> None:
            time.sleep(rng.random() * slow[stage])
            if stage == where and patch == when and number in (None, faulty):
                met.set()
                raise fault

        return hook

    output, caught = Lenient(hook_of(None)), list[BaseException]()
    began = time.perf_counter()
    try:
        went([hook_of(number) for number in range(count)], columns, network, hook_of(None), output=output)
    except BaseException as error:
        caught.append(error)
    assert bool(caught) == met.is_set(), "unless the faulty lane had less to do than that"
    assert all(is_fault(error, fault) for error in caught)
    assert time.perf_counter() - began < 3
    assert no_thread_is_left()
    for index in output.finished:
        for step in columns[index].steps:
            kept = (slice(None), *step.write.slices)
            np.testing.assert_array_equal(output.written[kept], exact(network)[kept])


def test_ctrl_c_stops_every_worker() -> None:
    def interrupting(event: pipeline.Event) -> None:
        if event.columns_done > 2:
            raise KeyboardInterrupt

    def slow(stage: str, patch: int) -> None:
        if stage == "compute":
            time.sleep(0.01)

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        went([slow, slow, slow], progress=interrupting)
    assert time.perf_counter() - began < 2
    assert no_thread_is_left()


def test_idle_worker_takes_over_a_column_lost_late() -> None:
    """The last column is begun by a lane that is lost late: who has nothing left to do takes it."""
    columns = COLUMNS[:6]  # one for the quick lane, whatever the other has begun
    released = threading.Event()

    def late(stage: str, patch: int) -> None:
        if stage == "compute":
            released.wait(5)
            time.sleep(0.05)
            raise DeviceError("cudaErrorLaunchTimeout")

    def quick(stage: str, patch: int) -> None:
        if stage == "compute":
            released.set()

    output, timings = went([late, quick], columns)
    assert released.is_set()
    assert sorted(output.finished) == list(range(6))
    assert [bool(lane.lost) for lane in timings.workers] == [True, False]
