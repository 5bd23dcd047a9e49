"""The last cells of an output: to whoever ends them sooner, however fast the processor is."""

from __future__ import annotations

import pytest

from tests.support.simulated_queue import GRID, joined, take_now
from znnpy.patches import Cover
from znnpy.run.balanced_queue import BalancedQueue, WorkerProfile
from znnpy.run.work_queue import Lease


def test_last_item_is_not_taken_before_the_previous_one_ends() -> None:
    """Until then the CPU might be half as fast as it seems."""
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 5.0, runs=False),
    }
    cells = BalancedQueue(GRID, 2, hands, now=lambda: 0.0)
    _, cpu = joined(cells, "GPU", "CPU")
    taken = [lease for _ in range(9) if (lease := take_now(cells, cpu)) is not None]
    assert len(taken) == 5, "with the sixth it might take 60 seconds, in which the GPU does the 59 others"
    cells.finish(taken[0])
    assert take_now(cells, cpu) is not None


@pytest.mark.parametrize(("seconds", "asks"), [(4.9, True), (5.0, True), (4.9, False)])
def test_gpu_leaves_an_item_the_cpu_is_about_to_take(seconds: float, asks: bool) -> None:
    """The CPU has ended its cell and has not asked for the last one yet, which the GPU would end no sooner, in 5 s."""
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=4.0),
        "CPU": WorkerProfile(lambda box: (), seconds, runs=False),
    }
    cells = BalancedQueue(Cover((30, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    last, first = take_now(cells, gpu), take_now(cells, cpu)
    assert last is not None
    assert first is not None
    assert (last.indices, first.indices) == ((2,), (0,))
    assert not asks or take_now(cells, cpu) is None, "twice 10 seconds may pass, the GPU is done with it in 10"
    now[0] = seconds
    cells.finish(first)
    now[0] = 5.0
    cells.finish(last)
    assert (take_now(cells, gpu) is None) == asks
    takes = asks and seconds < 5
    assert (take_now(cells, cpu) is not None) == takes
    assert (take_now(cells, gpu) is not None) == (asks and not takes)


def test_cpu_about_to_ask_is_not_late() -> None:
    """A GPU has waited for 30 seconds when the processor ends its cell, as soon as predicted; to begin takes it 4."""
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=4.0),
        "CPU": WorkerProfile(lambda box: (), 4.9, runs=False),
    }
    cells = BalancedQueue(Cover((20, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    now[0] = 30.0
    first = take_now(cells, cpu)
    assert first is not None
    assert take_now(cells, cpu) is None
    now[0] = 34.9
    cells.finish(first)
    assert take_now(cells, gpu) is None
    assert not cpu.given_up
    assert take_now(cells, cpu) is not None


def test_item_the_cpu_ends_sooner_is_not_revoked() -> None:
    """A GPU has waited for 10 seconds, as long as it takes for the cell; the processor began it 5 seconds ago."""
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 10.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 12.0, runs=False),
    }
    cells = BalancedQueue(Cover((10, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    now[0] = 5.0
    cells._held.append(Lease((0,), (), cpu, "cell", seconds=12.0))
    cells._since["CPU"] = 5.0
    cells._stacks[0].clear()
    for now[0] in (10.0, 16.9):
        assert take_now(cells, gpu) is None
        assert not cpu.given_up
    now[0] = 17.0
    assert take_now(cells, gpu) is not None, "it should have ended"
    assert cpu.given_up


def test_two_items_go_to_one_worker_each() -> None:
    """The processor is done with one half a second after the GPU with the other."""
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 1.0, runs=False),
    }
    cells = BalancedQueue(Cover((40, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    first = take_now(cells, gpu)
    assert first is not None
    assert first.indices == (3,)
    now[0] = 0.5
    assert take_now(cells, cpu) is not None
    now[0] = 1.0
    cells.finish(first)
    lease = take_now(cells, gpu)
    assert lease is not None
    assert lease.indices == (2,)
