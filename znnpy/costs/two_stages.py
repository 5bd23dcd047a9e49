"""The time of a step that passes through two stages: first layers on the host, then all others on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Runs = Sequence[tuple[int, float]]  # for each layer the steps in which it runs, and its seconds in one step


def two_stage_seconds(front: Runs, back: Runs, wait_seconds: float, columns: int, *, overlap: bool) -> float:
    """Return the seconds for the whole output of a host stage and a GPU stage, one after the other or overlapped.

    front, back   the layers of each stage, with their steps in all columns
    wait_seconds  how long the GPU waits for its input, in each step in which the last layer of the front runs
    columns       number of columns; in the first steps of each, few layers run

    With overlap the back of a step runs while the front of the next step does, which may belong to the next column, and
    each waits for the other. The first front and the last back run alone.
    """
    back = [(front[-1][0], wait_seconds), *back]
    if not overlap:
        return sum(steps * seconds for steps, seconds in (*front, *back))
    output = back[-1][0]
    one, other = ([((steps - output) // columns, seconds) for steps, seconds in side] for side in (front, back))
    first = max(0, *(ahead for ahead, _ in (*one, *other)))  # first step of a column that gives output

    def once(stage: Runs, step: int) -> float:
        return sum(seconds for ahead, seconds in stage if ahead >= first - step)

    changes = {1, 1 + first, *(first - ahead for ahead, _ in one), *(1 + first - ahead for ahead, _ in other)}
    later = sum(
        (until - step) * max(once(one, step), once(other, step - 1))
        for step, until in pairwise(sorted(change for change in changes if 1 <= change <= 1 + first))
    )
    begin, front_seconds, back_seconds = once(one, 0), once(one, first), once(other, first)
    alike = (output - columns) * max(front_seconds, back_seconds)
    return columns * (max(begin, back_seconds) + later) + alike + min(begin, back_seconds)


def upload_wait_seconds(upload: float, parts: int, once: float) -> float:
    """Return how long a GPU waits in a step: the first part is uploaded before it computes, later ones meanwhile.

    upload  seconds for one part
    once    seconds of all that is computed in the step
    """
    return upload + (parts - 1) * max(0.0, upload - once / parts)
