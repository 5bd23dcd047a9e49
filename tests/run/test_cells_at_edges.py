"""Cells that are thinner or narrower than others, at an edge of the output: they count as much as they are."""

from __future__ import annotations

from tests.support.simulated_queue import NamedLane, joined, take_now
from znnpy.patches import Cover
from znnpy.run.balanced_queue import BalancedQueue, WorkerProfile
from znnpy.run.work_queue import Lease


def test_narrow_items_at_an_edge_count_their_own_size() -> None:
    """Columns are 4, 4 and 1 steps wide; predictions for the GPU and the CPU's last item follow them."""
    cells = Cover((40, 9, 4), (10, 4, 4))
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 6.0, runs=False),
    }
    shares = BalancedQueue(cells, 0, hands, step=(10, 1, 4), now=lambda: 0.0)
    gpu, cpu = joined(shares, "GPU", "CPU")
    taken = take_now(shares, gpu)
    assert taken is not None
    assert taken.indices == (2, 5, 8, 11)
    assert taken.seconds == 1.0, "4 cells, a quarter as wide as others"
    first = take_now(shares, cpu)
    assert first is not None
    assert first.indices == (0,)
    assert take_now(shares, cpu) is None, "in 12 seconds the GPU does 1 and 7"


def test_thin_last_item_counts_its_own_size() -> None:
    """Two cells of 60 planes, 0 and 1, and two of 6 behind: the processor, which reads ahead, takes no thin one."""
    hands = {
        "GPU": WorkerProfile(lambda box: (), 60.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 65.0, runs=False),
    }
    now = [0.0]
    cells = BalancedQueue(Cover((66, 10, 20), (60, 10, 10)), 0, hands, step=(3, 10, 10), now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    first, taken = take_now(cells, cpu), []
    assert first is not None
    assert first.indices == (0,)
    while (lease := take_now(cells, gpu)) is not None:
        assert take_now(cells, cpu) is None, "in 130 seconds the GPU has done all others, in 72"
        taken.append((lease.indices, lease.seconds))
        now[0] += lease.seconds
        cells.finish(lease)
    assert taken == [((3,), 6.0), ((1,), 60.0), ((2,), 6.0)]
    assert now[0] == 72.0


def test_thick_item_is_left_to_the_cpu() -> None:
    """It ends it in 29 seconds, a GPU in 78, and in 13 the thin one behind it, of which it counts two at first."""
    hands = {
        "GPU": WorkerProfile(lambda box: (), 78.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 29.0, runs=False),
    }
    cells = BalancedQueue(Cover((280, 10, 10), (240, 10, 10)), 0, hands, step=(40, 10, 10), now=lambda: 0.0)
    gpu, cpu = joined(cells, "GPU", "CPU")
    thin, thick = take_now(cells, gpu), take_now(cells, cpu)
    assert thin is not None
    assert thick is not None
    assert (thin.indices, thick.indices) == ((1,), (0,))


def test_range_of_narrow_items_begins_sooner() -> None:
    """4 cells of a quarter of the columns, behind each other: a quarter of the 8 seconds too."""
    hands = {"GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=8.0)}
    shares = BalancedQueue(Cover((40, 9, 4), (10, 4, 4)), 0, hands, step=(10, 1, 4), now=lambda: 0.0)
    (gpu,) = joined(shares, "GPU")
    taken = take_now(shares, gpu)
    assert taken is not None
    assert (taken.indices, taken.seconds) == ((2, 5, 8, 11), 3.0)


def test_gpu_computes_the_last_item_first() -> None:
    """The thin one, in 6 of its 60 seconds: so the processor, which takes 25 for all others, leaves it that one."""
    hands = {
        "GPU": WorkerProfile(lambda box: (), 60.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 10.0, runs=False),
    }
    cells = BalancedQueue(Cover((126, 10, 10), (60, 10, 10)), 0, hands, step=(3, 10, 10), now=lambda: 0.0)
    gpu, cpu = joined(cells, "GPU", "CPU")
    first = take_now(cells, cpu)
    assert first is not None
    assert cells._within(gpu, 6.0) == cells._weight((2,)) == 0.1
    last = take_now(cells, gpu)
    assert last is not None
    assert last.indices == (2,)


def test_gpu_waits_for_a_thin_item_only_as_long_as_it_would_take() -> None:
    hands = {
        "GPU": WorkerProfile(lambda box: (), 60.0, runs=True, begins=2.0),
        "CPU": WorkerProfile(lambda box: (), 65.0, runs=False),
    }
    now = [0.0]
    cells = BalancedQueue(Cover((66, 10, 10), (60, 10, 10)), 0, hands, step=(3, 10, 10), now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    late = Lease((1,), (), cpu, "cell", seconds=65.0)
    cells._held.append(late)
    cells._stacks[0].clear()
    now[0] = 7.9
    assert take_now(cells, gpu) is None
    now[0] = 8.0
    lease = take_now(cells, gpu)
    assert lease is not None
    assert lease.indices == (1,)
    assert cpu.given_up == [late]


def test_expected_items_of_each_worker_count_their_sizes() -> None:
    """A GPU from the end, where cells weigh less and take as much less; to the processor all take the same."""
    cells = Cover((40, 9, 4), (10, 4, 4))
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=4.0),
        "CPU": WorkerProfile(lambda box: (), 6.0, runs=False),
    }
    shares = BalancedQueue(cells, 0, hands, step=(10, 1, 4), now=lambda: 0.0)
    assert shares._within(NamedLane("GPU"), 2.0) == 1.0, "4 cells that weigh a quarter"
    narrow = frozenset(index for index in range(len(cells)) if cells[index].steps[0].write.size[1] > 1)
    shares = BalancedQueue(cells, 0, hands, narrow, step=(10, 1, 4), now=lambda: 0.0)
    assert shares._within(NamedLane("CPU"), 12.0) == 0.5, "2 cells"


def test_gpu_time_for_late_items_is_measured_and_scaled_at_an_edge() -> None:
    """It takes twice as long as predicted, and half of that for cells half as wide."""
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 1e3, runs=False),
    }
    cells = BalancedQueue(Cover((10, 10, 25), (10, 10, 10)), 0, hands, step=(10, 10, 5), now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    last = take_now(cells, gpu)
    assert last is not None
    assert last.indices == (2,)
    now[0] = 1.0
    cells.finish(last)
    for index, waits in ((0, 2.0), (2, 1.0)):
        cells._workers.add(cpu)
        for stack in cells._stacks.values():
            stack.clear()
        cells._held.append(Lease((index,), (), cpu, "cell", seconds=1e3))
        cpu.given_up = ()
        begun, cells._since["GPU"] = now[0], now[0]
        now[0] = begun + waits - 0.01
        assert take_now(cells, gpu) is None
        now[0] = begun + waits
        lease = take_now(cells, gpu)
        assert lease is not None
        assert lease.indices == (index,)
        assert cpu.given_up
        cells._held.remove(lease)
