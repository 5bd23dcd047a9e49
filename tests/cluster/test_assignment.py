"""Tasks that workers get: their sizes, and what follows a failure, a loss or a hung worker, step by step."""

from __future__ import annotations

from random import Random

import pytest

from znnpy.cluster.assignment import Assignment, Task


def begun(assignment: Assignment, worker: str, now: float) -> Task:
    """Return the next task of a worker, which has to get one."""
    task = assignment.next(worker, now)
    assert task is not None
    return task


def known(count: int, speeds: dict[str, float], *, tries: int = 3, ahead: int = 1) -> Assignment:
    """Return an assignment of workers of kinds of their own, at 100 s, each of which has computed one more item.

    speeds  items per second.
    """
    assignment = Assignment(count + len(speeds), seconds=100.0, tries=tries, ahead=ahead)
    for worker in speeds:
        assignment.join(worker, worker, 0.0)
    for worker, task in [(worker, begun(assignment, worker, 0.0)) for worker in speeds]:
        assert len(task.items) == 1
        assert assignment.finish(task, worker, 100.0, 1 / speeds[worker]) == ()
    return assignment


def test_an_unknown_worker_gets_one_item_and_a_known_one_as_many_as_it_computes_in_time() -> None:
    assignment = known(10_000, {"a": 0.1, "b": 2.0})
    assert begun(assignment, "a", 100.0).items == tuple(range(2, 12))
    assert begun(assignment, "b", 100.0).items == tuple(range(12, 212))
    assignment.join("c", "c", 100.0)
    assert begun(assignment, "c", 100.0).items == (212,)
    assignment.join("b2", "b", 100.0)
    assert len(begun(assignment, "b2", 100.0).items) == 200  # as its kind


def test_own_speed_counts_more_than_the_kind_and_the_latest_tasks_more_than_the_first() -> None:
    assignment = Assignment(10_000, seconds=100.0)
    for worker in ("a", "b"):
        assignment.join(worker, "gpu", 0.0)
    first = {worker: begun(assignment, worker, 0.0) for worker in ("a", "b")}
    for worker, seconds in (("a", 1.0), ("b", 4.0)):
        assignment.finish(first[worker], worker, seconds)
    assert assignment.rates == {"a": 1.0, "b": 0.25}
    assert len(begun(assignment, "b", 4.0).items) == 25
    now = 4.0
    for seconds in (1.0, 1.0, 1.0, 2.0):
        task = begun(assignment, "a", now)
        assert len(task.items) == 100
        now += seconds * len(task.items)
        assignment.finish(task, "a", now)
    assert assignment.rates["a"] == pytest.approx(0.5, rel=0.01)


def test_times_given_by_the_worker_count_before_the_clock() -> None:
    assignment = Assignment(10)
    assignment.join("a", "cpu", 0.0)
    assignment.finish(begun(assignment, "a", 0.0), "a", 50.0, 4.0)
    assert assignment.rates == {"a": 0.25}


def test_tasks_shrink_to_the_share_of_what_is_left() -> None:
    assignment = known(60, {"a": 1.0, "b": 2.0})
    assert len(begun(assignment, "b", 100.0).items) == 40
    assert len(begun(assignment, "a", 100.0).items) == 6  # a third of 20


def test_items_done_before_are_not_given_out() -> None:
    assignment = Assignment(6, done={0, 2, 3}, first_attempt=7)
    assert (assignment.finished, assignment.left, assignment.is_done) == (3, 3, False)
    assignment.join("a", "cpu", 0.0)
    found = list[int]()
    for attempt in (7, 8, 9):
        task = begun(assignment, "a", 0.0)
        assert task.attempt == attempt
        found += task.items
        assignment.finish(task, "a", 1e9)
    assert found == [1, 4, 5]
    assert assignment.is_done
    assert assignment.next("a", 0.0) is None
    assert Assignment(3, done=range(3)).is_done


def test_done_items_that_the_job_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="item 3"):
        Assignment(3, done={3})


def test_a_worker_that_never_joined_or_has_left_gets_nothing() -> None:
    assignment = Assignment(3)
    assert assignment.next("a", 0.0) is None
    assignment.join("a", "cpu", 0.0)
    assert assignment.leave("a", 0.0) == ()
    assert assignment.leave("a", 0.0) == ()
    assert assignment.next("a", 0.0) is None


def test_failed_items_go_to_others_in_smaller_tasks_and_are_alone_at_last() -> None:
    assignment = known(1000, {"a": 1.0, "b": 1.0, "c": 1.0})
    first = begun(assignment, "a", 100.0)
    assert len(first.items) == 100
    assignment.fail(first, "a", "one", 110.0)
    assert not set(begun(assignment, "a", 110.0).items) & set(first.items)
    second = begun(assignment, "b", 110.0)
    assert second.items == first.items[:10]
    assignment.fail(second, "b", "two", 120.0)
    third = begun(assignment, "c", 120.0)
    assert third.items == first.items[:1]
    assignment.fail(third, "c", "three", 130.0)
    assert assignment.given_up == {first.items[0]: "three"}
    assert begun(assignment, "c", 130.0).items == (first.items[1],)


def test_a_worker_gets_items_again_that_failed_on_it_only_where_no_other_may_compute_them() -> None:
    assignment = known(1, {"a": 1.0, "b": 1.0})
    task = begun(assignment, "a", 100.0)
    assignment.fail(task, "a", "one", 101.0)
    assert assignment.next("a", 101.0) is None
    assignment.leave("b", 101.0)
    again = begun(assignment, "a", 101.0)
    assert again.items == task.items
    assignment.fail(again, "a", "two", 102.0)
    assignment.fail(begun(assignment, "a", 102.0), "a", "three", 103.0)
    assert assignment.given_up == {task.items[0]: "three"}
    assert assignment.is_done
    assert assignment.left == 0


def test_a_worker_does_not_wait_for_another_that_hangs_to_take_what_failed_on_it() -> None:
    assignment = known(2, {"a": 1.0, "b": 1.0})
    begun(assignment, "b", 100.0)
    task = begun(assignment, "a", 100.0)
    assignment.fail(task, "a", "one", 100.5)
    assert assignment.next("a", 100.5) is None
    assert begun(assignment, "a", 103.0).items == task.items


def test_items_of_a_lost_worker_go_back_and_only_those_it_was_computing_count_as_tried() -> None:
    assignment = known(100, {"a": 0.02, "b": 0.02}, tries=1, ahead=2)
    first, second = begun(assignment, "a", 100.0), begun(assignment, "a", 100.0)
    assert assignment.next("a", 100.0) is None  # it holds two
    assert assignment.leave("a", 110.0) == (first, second)
    assert list(assignment.given_up) == list(first.items)
    assert "a" in assignment.given_up[first.items[0]]
    assert begun(assignment, "b", 110.0).items == second.items
    assert "a" not in assignment.rates


def test_a_waiting_task_begins_when_the_one_before_it_ends() -> None:
    assignment = known(100, {"a": 0.02, "b": 0.02}, ahead=2)
    first, second = begun(assignment, "a", 100.0), begun(assignment, "a", 100.0)
    assert len(first.items) == len(second.items) == 2
    assignment.finish(first, "a", 200.0)
    assignment.finish(second, "a", 300.0)
    assert assignment.rates["a"] == pytest.approx(0.02)


def test_at_the_end_no_task_waits_in_a_queue() -> None:
    assignment = known(4, {"a": 1.0, "b": 1.0}, ahead=2)
    assert len(begun(assignment, "a", 100.0).items) == 2
    assert assignment.next("a", 100.0) is None
    assert assignment.next("b", 100.0) is not None


def test_a_late_result_of_a_lost_worker_counts_and_its_items_are_not_computed_again() -> None:
    assignment = known(2, {"a": 1.0, "b": 1.0})
    task = begun(assignment, "a", 100.0)
    assignment.leave("a", 101.0)
    assert assignment.left == 2
    assert assignment.finish(task, "a", 102.0) == ()
    assert assignment.left == 1
    assert begun(assignment, "b", 102.0).items == (3,)


def test_a_late_result_makes_the_task_of_another_worker_needless() -> None:
    assignment = known(1, {"a": 1.0, "b": 1.0})
    task = begun(assignment, "a", 100.0)
    assignment.leave("a", 101.0)
    other = begun(assignment, "b", 101.0)
    assert assignment.finish(task, "a", 102.0) == (other,)
    assert assignment.is_done


def test_a_late_result_of_given_up_items_counts() -> None:
    assignment = known(1, {"a": 1.0}, tries=1)
    task = begun(assignment, "a", 100.0)
    assignment.leave("a", 101.0)
    assert (list(assignment.given_up), assignment.finished) == ([1], 1)
    assignment.finish(task, "a", 102.0)
    assert (dict(assignment.given_up), assignment.finished, assignment.left) == ({}, 2, 0)


def test_an_idle_worker_copies_what_takes_longest_once_it_would_end_it_clearly_sooner() -> None:
    assignment = known(2, {"slow": 0.01, "fast": 1.0, "third": 1.0})
    last = begun(assignment, "slow", 100.0)
    assignment.finish(begun(assignment, "fast", 100.0), "fast", 101.0)
    copy = begun(assignment, "fast", 101.0)
    assert (copy.items, copy.is_copy, last.is_copy) == (last.items, True, False)
    assert assignment.next("third", 101.0) is None  # one copy is enough
    assert assignment.finish(copy, "fast", 102.0) == (last,)
    assert assignment.is_done
    assignment.fail(last, "slow", "cancelled", 103.0)  # says nothing new
    assert assignment.is_done
    assert not assignment.given_up


def test_no_copy_is_made_where_it_would_not_end_clearly_sooner() -> None:
    assignment = known(1, {"a": 0.01, "b": 0.01})
    begun(assignment, "a", 100.0)
    assert assignment.next("b", 101.0) is None
    assert assignment.next("b", 200.0) is None  # it should be about to end
    assert begun(assignment, "b", 270.0).is_copy  # it is far too late


def test_copies_of_a_large_task_are_shared_by_the_idle_workers() -> None:
    assignment = known(120, {"hung": 1.0, "a": 1.0, "b": 1.0})
    task = begun(assignment, "hung", 100.0)
    assert len(task.items) == 40
    now, busy = 100.0, {"a", "b"}
    while busy:
        for worker in sorted(busy):
            taken = begun(assignment, worker, now)
            if taken.is_copy:
                busy.discard(worker)
                assert len(taken.items) < 40
                assert set(taken.items) < set(task.items)
            else:
                now += len(taken.items)
                assignment.finish(taken, worker, now)
        now += 30


def test_an_item_goes_back_only_when_neither_the_task_nor_its_copy_runs() -> None:
    assignment = known(1, {"slow": 0.001, "fast": 1.0, "third": 1.0}, tries=2)
    first, copy = begun(assignment, "slow", 100.0), begun(assignment, "fast", 100.0)
    assert copy.is_copy
    assignment.fail(first, "slow", "one", 101.0)
    assert assignment.next("slow", 101.0) is None
    assignment.fail(copy, "fast", "two", 101.5)
    assert assignment.given_up == {3: "two"}
    assert assignment.is_done


def test_a_copy_that_hangs_is_copied_again() -> None:
    assignment = known(1, {"hung": 1.0, "a": 1.0, "b": 1.0})
    begun(assignment, "hung", 100.0)
    assert begun(assignment, "a", 200.0).is_copy
    assert assignment.next("b", 201.0) is None
    assert begun(assignment, "b", 204.0).is_copy


def test_copies_are_left_to_much_faster_workers_that_are_there() -> None:
    assignment = known(2, {"hung": 1.0, "slow": 0.1, "fast": 1.0})
    begun(assignment, "hung", 100.0)
    other = begun(assignment, "fast", 200.0)
    assert assignment.next("slow", 200.5) is None
    assignment.leave("fast", 200.6)
    assert begun(assignment, "slow", 200.6).items == other.items  # open again
    assignment.leave("slow", 200.7)
    assignment.join("slow2", "slow", 200.7)
    assignment.finish(begun(assignment, "slow2", 200.7), "slow2", 210.7)
    assert begun(assignment, "slow2", 211.7).is_copy


def test_the_time_left_is_that_of_all_workers_and_counts_what_they_have_begun() -> None:
    assignment = Assignment(10)
    assert assignment.seconds_left(0.0) is None
    assignment = known(40, {"a": 1.0, "b": 3.0})
    assert assignment.seconds_left(100.0) == pytest.approx(10.0)
    assert len(begun(assignment, "a", 100.0).items) == 10
    assert assignment.seconds_left(105.0) == pytest.approx(35 / 4)
    assert assignment.seconds_left(1e6) == pytest.approx(30 / 4)
    assert Assignment(0).seconds_left(0.0) == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_no_order_of_calls_loses_an_item(seed: int) -> None:
    """Whatever is lost, late, repeated or cancelled: each item is open, held, done or given up, and the job ends."""
    random = Random(seed)
    tries, ahead = random.choice([1, 2, 4]), random.choice([1, 2])
    assignment = Assignment(30, random.sample(range(30), 3), seconds=20.0, tries=tries, ahead=ahead)
    there, tasks, now, names = set[str](), list[tuple[Task, str]](), 0.0, 0
    done = set(assignment._done)
    for step in range(400):
        now += random.random()
        worker = random.choice(sorted(there)) if there else ""
        match random.randrange(8):
            case 0 if len(there) < 5:
                names += 1
                assignment.join(f"worker {names}", random.choice(["cpu", "gpu"]), now)
                there.add(f"worker {names}")
            case 1 if step % 5 == 0 and worker:
                there.remove(worker)
                gone = assignment.leave(worker, now)
                assert len(gone) <= ahead
            case 2 | 3 if tasks:  # also tasks that were lost, cancelled, or reported already
                task, name = random.choice(tasks[-6:])
                needless = assignment.finish(task, name, now)
                done |= set(task.items)
                assert all(set(other.items) <= done for other in needless)
            case 4 if tasks:
                task, name = random.choice(tasks[-6:])
                assignment.fail(task, name, f"step {step}", now)
            case _ if worker and (found := assignment.next(worker, now)) is not None:
                assert not set(found.items) & (done | assignment.given_up.keys())
                assert found.attempt == len(tasks) + 1
                tasks.append((found, worker))
        open_items = [item for items in assignment._open for item in items]
        parts = [*open_items, *assignment._holders, *assignment._done, *assignment.given_up]
        assert sorted(parts) == list(range(30))
        assert assignment._done == done
        assert assignment.left == len(open_items) + len(assignment._holders)
    for name in sorted(there):
        assignment.leave(name, now)
    assignment.join("last", "cpu", now)
    while not assignment.is_done:
        task = begun(assignment, "last", now)
        now += 1.0
        assignment.finish(task, "last", now)
    assert assignment.finished + len(assignment.given_up) == 30


def test_only_the_item_that_failed_counts_as_tried() -> None:
    assignment = Assignment(6, tries=2)
    for worker in ("a", "b"):
        assignment.join(worker, "kind", 0.0)
    first = assignment.next("a", 0.0)
    assert first is not None
    assignment.finish(first, "a", 1.0, 1.0)
    task = assignment.next("a", 1.0)
    assert task is not None
    assert len(task.items) > 1
    assignment.fail(task, "a", "broken", 2.0, task.items[0])
    again = assignment.next("b", 2.0)
    assert again is not None
    assert again.items == task.items[:1]  # alone at its last try
    assignment.fail(again, "b", "broken", 3.0, again.items[0])
    assert assignment.given_up == {again.items[0]: "broken"}
    assert assignment.left == len(range(6)) - len(first.items) - 1
