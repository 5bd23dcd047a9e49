"""Cells of an output, dealt from one queue without threads: who takes which, and that all end together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_queue import GRID, Played, joined, take_now
from znnpy.errors import Stopped
from znnpy.patches import Box, Column, Cover
from znnpy.run import balanced_queue
from znnpy.run.balanced_queue import BalancedQueue, WorkerProfile
from znnpy.run.work_queue import LOOK_SECONDS, Lease


@pytest.fixture
def no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU take items as if it were as fast as it seems."""
    monkeypatch.setattr(balanced_queue, "DOUBT", 1.0)


@pytest.mark.parametrize("axis", [0, 1, 2, pytest.param(3, id="one stack")])
@pytest.mark.parametrize(
    ("true", "predicted"),
    [
        ({"GPU": 1.0, "CPU": 4.0}, None),
        ({"GPU": 1.0, "CPU": 9.0}, None),
        ({"GPU": 1.0, "CPU": 1.0}, None),
        ({"GPU": 3.0, "CPU": 1.0}, None),
        ({"GPU 0": 1.0, "GPU 1": 1.0, "CPU": 7.0}, None),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 1.3, "CPU": 3.0}),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 0.8, "CPU": 6.0}),
        ({"GPU": 1.0, "CPU": 4.0}, {"GPU": 4.0, "CPU": 1.0}),
    ],
)
def test_all_workers_end_together(axis: int, true: dict[str, float], predicted: dict[str, float] | None) -> None:
    """They end at most one item of the slowest later than the ideal."""
    played = Played(GRID if axis < 3 else Cover((640, 10, 10), (10, 10, 10)), axis % 3, true, predicted)
    ends = played.ends()
    assert sorted(index for some in played.taken.values() for index in some) == list(range(64))
    perfect = 64 / sum(1 / seconds for seconds in true.values())
    slowest = max(true.values())
    assert max(ends.values()) <= perfect + slowest
    if predicted is None:
        assert max(ends.values()) <= perfect + 1.01 * max(min(true.values()) * 2, 0.5 * slowest)


@given(st.data())
def test_every_item_is_taken_by_a_worker(data: st.DataObject) -> None:
    """Two workers never leave the same items to each other, whatever their speeds."""
    names = data.draw(st.sampled_from([("GPU", "CPU"), ("GPU 0", "GPU 1", "CPU"), ("GPU",), ("CPU",)]))
    some = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 20.0])
    true, predicted, begins = ({name: data.draw(some) for name in names} for _ in range(3))
    if data.draw(st.booleans()):
        predicted = true
    cells = data.draw(st.sampled_from([GRID, Cover((40, 10, 10), (10, 10, 10)), Cover((25, 9, 4), (10, 4, 4))]))
    played = Played(cells, data.draw(st.integers(0, 2)), true, predicted, begins)
    played.ends()
    assert sorted(index for some in played.taken.values() for index in some) == list(range(len(cells)))


@pytest.mark.parametrize("late", [30.0, 400.0, 1e9])
@pytest.mark.parametrize("names", [("GPU",), ("GPU 0", "GPU 1")])
def test_gpu_waits_at_most_twice_its_own_time_for_a_late_cpu(names: tuple[str, ...], late: float) -> None:
    """Items that the CPU finished remain its own."""
    gpus = dict.fromkeys(names, 1.0)
    played = Played(GRID, 0, gpus | {"CPU": late}, gpus | {"CPU": 4.0})
    ends = played.ends()
    assert sorted(index for some in played.taken.values() for index in some) == list(range(64))
    assert max(ends[name] for name in names) <= 64 / len(names) + 2 + LOOK_SECONDS
    assert len(played.taken["CPU"]) == (64 / len(names) + 2) // late


def test_worker_that_gave_up_takes_no_more_items() -> None:
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 4.0, runs=False),
    }
    cells = BalancedQueue(Cover((20, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    first = cells.take(gpu)
    assert first is not None
    now[0] = 1.0
    cells.finish(first)
    late = Lease((0,), (), cpu, "cell", seconds=4.0)
    cells._held.append(late)
    cells._stacks[0].clear()
    now[0] = 1.9
    assert take_now(cells, gpu) is None, "it has not waited for as long as it takes"
    now[0] = 2.0
    lease = take_now(cells, gpu)
    assert lease is not None
    assert lease.indices == (0,)
    assert cpu.given_up == [late]
    assert late.void
    with pytest.raises(Stopped):
        cells.finish(late)
    assert cells.take(cpu) is None
    cells.finish(lease)
    assert cells.take(gpu) is None


def test_items_reserved_for_a_late_cpu_go_to_the_gpu() -> None:
    """The GPU takes 11 seconds for one of the two cells, and so it waits for 22."""
    now = [0.0]
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=10.0),
        "CPU": WorkerProfile(lambda box: (), 5.0, runs=False, walks=True),
    }
    cells = BalancedQueue(Cover((20, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    gpu, cpu = joined(cells, "GPU", "CPU")
    late = take_now(cells, cpu)
    assert late is not None
    for now[0] in (0.0, 12.0, 21.9):
        assert take_now(cells, gpu) is None
    now[0] = 22.0
    lease = take_now(cells, gpu)
    assert lease is not None
    assert lease.indices == (0, 1)
    assert cpu.given_up == [late]


def test_items_of_a_lost_gpu_do_not_make_the_cpu_late() -> None:
    """The CPU takes it, and is not late."""
    now = [0.0]
    hands = {name: WorkerProfile(lambda box: (), 1.0, runs=True, begins=10.0) for name in ("GPU 0", "GPU 1")}
    hands["CPU"] = WorkerProfile(lambda box: (), 4.0, runs=False)
    cells = BalancedQueue(Cover((20, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    first, second, cpu = joined(cells, "GPU 0", "GPU 1", "CPU")
    for stack in cells._stacks.values():
        stack.clear()
    cells._held.append(Lease((0,), (), second, "cell", seconds=11.0))
    now[0] = 40.0
    assert take_now(cells, first) is None
    assert cells.lose(second)
    assert take_now(cells, cpu) is not None
    assert take_now(cells, first) is None
    assert not cpu.given_up


def test_gpu_leaves_items_the_cpu_ends_sooner() -> None:
    """A GPU needs 10 seconds to begin, in which the CPU ends two items."""
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=10.0),
        "CPU": WorkerProfile(lambda box: (), 5.0, runs=False, walks=True),
    }
    cells = BalancedQueue(Cover((40, 10, 10), (10, 10, 10)), 0, hands, now=lambda: 0.0)
    gpu, cpu = joined(cells, "GPU", "CPU")
    first = take_now(cells, gpu)
    assert first is not None
    assert (first.indices, first.seconds) == ((3,), 11.0), "until another were done the CPU is with three"
    at_work = take_now(cells, cpu)
    assert at_work is not None
    assert take_now(cells, gpu) is None, "the CPU is done with the other two in 15 seconds, a GPU with one in 22"
    cells.finish(at_work)
    lease = take_now(cells, gpu)
    assert lease is not None, "the CPU may take no other"
    assert lease.indices == (2,)


def test_range_takes_at_most_the_seconds_that_may_be_lost() -> None:
    """The time to begin counts as far as known, and small items count less."""
    now = [0.0]
    hands = {"GPU": WorkerProfile(lambda box: (), 100.0, runs=True, begins=80.0)}
    cells = BalancedQueue(
        Cover((400, 20, 10), (10, 10, 10), later=(10, 5, 10)), 0, hands, step=(10, 5, 10), now=lambda: now[0]
    )
    (gpu,) = joined(cells, "GPU")
    taken = []
    for _ in range(11):
        lease = take_now(cells, gpu)
        assert lease is not None
        taken.append(len(lease.indices))
        now[0] += lease.seconds if len(taken) < 10 else 0.0
        cells.finish(lease)
    assert taken[:10] == [8] * 10, "half of 80 and 8 times half of 100 seconds are 440, of 480"
    assert taken[10] == 4
    cells = BalancedQueue(Cover((400, 10, 10), (10, 10, 10)), 0, hands, now=lambda: now[0])
    cells.join(gpu)
    first = take_now(cells, gpu)
    assert first is not None
    assert (len(first.indices), first.seconds) == (4, 480.0)
    now[0] += 960.0
    cells.finish(first)
    second = take_now(cells, gpu)
    assert second is not None
    assert len(second.indices) == 1, "280 seconds as measured, and another would be 200 more"


def test_one_of_two_workers_ending_together_begins() -> None:
    cells = BalancedQueue(
        Cover((10, 10, 10), (10, 10, 10)),
        0,
        {name: WorkerProfile(lambda box: (), 0.3, name == "GPU", begins=0.1) for name in ("GPU", "CPU")},
        now=lambda: 0.0,
    )
    gpu, cpu = joined(cells, "GPU", "CPU")
    assert take_now(cells, cpu) is None
    assert take_now(cells, gpu) is not None


@pytest.mark.usefixtures("no_doubt")
def test_time_to_begin_counts() -> None:
    """It counts for each range of a GPU, and for each new column of the CPU."""
    one_stack = Cover((400, 10, 10), (10, 10, 10))
    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=10.0),
        "CPU": WorkerProfile(lambda box: (), 3.0, runs=False),
    }
    cells = BalancedQueue(one_stack, 0, hands, now=lambda: 0.0)
    gpu, cpu = joined(cells, "GPU", "CPU")
    lease = take_now(cells, gpu)
    assert lease is not None
    assert len(lease.indices) == 28 // 2, "28 cells in 38 seconds, in which the CPU is done with 12"

    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True, begins=4.0),
        "CPU": WorkerProfile(lambda box: (), 30.0, runs=False),
    }
    cells = BalancedQueue(GRID, 0, hands, now=lambda: 0.0)
    for lane in (gpu, cpu):
        cells.join(lane)
    taken = [lease for _ in range(9) if (lease := take_now(cells, cpu)) is not None]
    assert len(taken) == 4, "120 of the 120 seconds that the GPU takes for 15 stacks of 4"

    hands = {
        "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
        "CPU": WorkerProfile(lambda box: (), 1.0, False, True, 30.0),
    }
    cells = BalancedQueue(one_stack, 0, hands, now=lambda: 0.0)
    for lane in (gpu, cpu):
        cells.join(lane)
    first = take_now(cells, cpu)
    assert first is not None
    cells.finish(first)
    lease = take_now(cells, gpu)
    assert lease is not None
    assert len(lease.indices) == 20 // 2, "of 39: the CPU needs not begin again"


@pytest.mark.usefixtures("no_doubt")
def test_worker_computes_every_item_it_read_ahead() -> None:
    """A reader asks for the next cell before the last one is computed."""
    cells = BalancedQueue(
        GRID,
        2,
        {"GPU": WorkerProfile(lambda box: (), 1.0, runs=True), "CPU": WorkerProfile(lambda box: (), 20.0, runs=False)},
    )
    _, cpu = joined(cells, "GPU", "CPU")
    taken = [lease for _ in range(9) if (lease := take_now(cells, cpu)) is not None]
    assert len(taken) == 3, "60 of the 61 seconds that the GPU takes for the others"


def steps_within(box: Box) -> tuple[Column, ...]:
    """One column along z, of two steps before each cell of GRID."""
    return tuple(column.shifted(box.lo) for column in Cover(box.size, (10, 10, 10), 0, 640, 15))


@pytest.mark.usefixtures("no_doubt")
def test_cpu_continues_its_column_from_item_to_item() -> None:
    """The first item of each stack has warm-up steps, and the others have none."""
    hands = {
        "GPU": WorkerProfile(steps_within, 1.0, runs=True),
        "CPU": WorkerProfile(steps_within, 2.0, runs=False, walks=True, begins=3.0),
    }
    cells = BalancedQueue(GRID, 0, hands, frozenset({32}), now=lambda: 0.0)
    _, cpu = joined(cells, "GPU", "CPU")
    taken = [lease for _ in range(8) if (lease := take_now(cells, cpu)) is not None]
    assert [lease.indices for lease in taken] == [(0,), (16,), (48,), (1,), (17,), (33,), (49,), (2,)]
    assert [lease.goes_on for lease in taken] == [False, True, False, False, True, True, True, False]
    assert [len(lease.columns[0].steps) for lease in taken] == [1 if lease.goes_on else 3 for lease in taken]
    assert [lease.seconds for lease in taken] == [2.0 if lease.goes_on else 5.0 for lease in taken]
    assert all(lease.columns[0].steps[-1].write == GRID[lease.indices[0]].steps[0].write for lease in taken)


@pytest.mark.usefixtures("no_doubt")
def test_cpu_begins_a_column_only_if_it_pays() -> None:
    """The GPU is done with all 64 sooner than the CPU with a first one, or a second."""
    for begins, most in ((100.0, 0), (40.0, 1), (0.0, 3)):
        hands = {
            "GPU": WorkerProfile(lambda box: (), 1.0, runs=True),
            "CPU": WorkerProfile(lambda box: (), 20.0, runs=False, begins=begins),
        }
        cells = BalancedQueue(GRID, 0, hands, now=lambda: 0.0)
        _, cpu = joined(cells, "GPU", "CPU")
        assert len([1 for _ in range(9) if take_now(cells, cpu) is not None]) == most


def test_ranges_run_along_the_axis() -> None:
    played = Played(GRID, 1, {"GPU": 1.0, "CPU": 1000.0})
    played.ends()
    assert not played.taken["CPU"], "the GPU is done before it is"
    stacks = [tuple(16 * z + x + 4 * y for y in range(4)) for z in range(4) for x in range(4)]
    assert played.runs == stacks[::-1]


def test_first_range_leaves_half_until_speeds_are_known() -> None:
    played = Played(Cover((640, 10, 10), (10, 10, 10)), 0, {"GPU": 1.0, "CPU": 1000.0})
    played.ends()
    assert [len(run) for run in played.runs] == [32, 32]


def test_cpu_begins_at_the_front() -> None:
    played = Played(GRID, 2, {"GPU": 1.0, "CPU": 8.0})
    played.ends()
    assert played.taken["CPU"] == list(range(7))
    assert played.runs[0] == (60, 61, 62, 63)


def test_single_stack_is_taken_from_both_ends() -> None:
    played = Played(Cover((640, 10, 10), (10, 10, 10)), 0, {"GPU": 1.0, "CPU": 3.0})
    played.ends()
    assert played.taken["CPU"] == list(range(len(played.taken["CPU"])))
    assert 15 <= len(played.taken["CPU"]) <= 16


def test_range_is_no_longer_than_may_be_lost() -> None:
    played = Played(GRID, 0, {"GPU": 200.0, "CPU": 1e6})
    played.ends()
    assert [len(run) for run in played.runs[:3]] == [1, 2, 1], "half of it until speeds are known"
    assert max(len(run) for run in played.runs) == 2


def test_worker_still_computing_at_the_end_is_stopped() -> None:
    cells = BalancedQueue(GRID, 2, {"GPU": WorkerProfile(lambda box: (), 1.0, runs=True)})
    (gpu,) = joined(cells, "GPU")
    lease = cells.take(gpu)
    assert lease is not None
    cells.close()
    with pytest.raises(Stopped):
        cells.finish(lease)
    assert cells.take(gpu) is None


def test_items_of_a_lost_gpu_are_taken_again() -> None:
    cells = BalancedQueue(
        GRID,
        2,
        {"GPU": WorkerProfile(lambda box: (), 1.0, runs=True), "CPU": WorkerProfile(lambda box: (), 5.0, runs=False)},
    )
    gpu, cpu = joined(cells, "GPU", "CPU")
    lost = cells.take(gpu)
    assert lost is not None
    assert lost.indices == (60, 61, 62, 63)
    assert cells.lose(gpu) == [lost]
    assert lost.void
    left: list[int] = []
    while (lease := cells.take(cpu)) is not None:
        left += lease.indices
        cells.finish(lease)
    assert left == list(range(64))
