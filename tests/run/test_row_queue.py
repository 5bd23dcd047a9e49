"""Rows of windows for several workers: each once, in sequence where that saves work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from znnpy.patches import Box
from znnpy.run.work_queue import Lease, RowQueue
from znnpy.window_cover import WindowCover
from znnpy.windows.settings import Windows


class User:
    """A worker that only takes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def give_up(self, leases: Sequence[Lease]) -> None:
        raise AssertionError("nobody gives up here")


def cover(planes: int = 40, parts: int = 1) -> WindowCover:
    volume = planes, 24, 24
    return WindowCover(Windows((8, 8, 8)), volume, Box((0, 0, 0), volume), 0, parts)


def taken(queue: RowQueue, user: User) -> tuple[int, bool, int]:
    """Return which row a worker takes, whether it goes on, and how many windows it computes; the row is finished."""
    lease = queue.take(user)
    assert lease is not None
    queue.finish(lease)
    (column,) = lease.columns
    return lease.indices[0], lease.goes_on, len(column.steps)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_one_worker_takes_all_rows_in_sequence(parts: int) -> None:
    there, user = cover(parts=parts), User("a")
    queue = RowQueue(there)
    queue.join(user)
    found = [taken(queue, user) for _ in range(len(there))]
    assert [number for number, _, _ in found] == list(range(len(there)))
    assert [goes_on for _, goes_on, _ in found] == [there.goes_on(number) for number in range(len(there))]
    assert sum(windows for _, _, windows in found) == there.computed, "no window is computed again"
    assert queue.take(user) is None


def test_a_second_worker_begins_in_the_middle_of_what_is_left() -> None:
    queue, first, second, rows = RowQueue(cover()), User("a"), User("b"), len(cover())
    for user in (first, second):
        queue.join(user)
    row = len(cover()[0].steps)
    assert taken(queue, first) == (0, False, row)
    middle = 1 + (rows - 1) // 2
    assert taken(queue, second) == (middle, False, 2 * row), "the row before adds to what it finishes"
    assert taken(queue, first) == (1, True, row)
    assert taken(queue, second) == (middle + 1, True, row)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_row_is_taken_once(workers: int, parts: int) -> None:
    queue, users, there = (
        RowQueue(cover(parts=parts), {2, 5}),
        [User(str(n)) for n in range(workers)],
        cover(parts=parts),
    )
    for user in users:
        queue.join(user)
    found = []
    for turn in range(len(there) - 2):
        number, goes_on, windows = taken(queue, users[turn % workers])
        assert windows == len((there[number] if goes_on else there.begun_at(number)).steps)
        found.append(number)
    assert sorted(found) == [number for number in range(len(there)) if number not in (2, 5)]
    assert all(queue.take(user) is None for user in users)


def test_rows_of_a_lost_worker_are_taken_by_others() -> None:
    queue, first, second = RowQueue(cover()), User("a"), User("b")
    for user in (first, second):
        queue.join(user)
    assert queue.take(first) is not None
    assert queue.take(second) is not None
    assert queue.lose(first) is not None
    found = []
    while (lease := queue.take(second)) is not None:
        queue.finish(lease)
        found.append(lease.indices[0])
        if len(found) == len(cover()) - 1:
            break
    assert 0 in found
