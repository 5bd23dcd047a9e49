"""Seconds of layers that run with the host and of those on a GPU, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Ran = Sequence[tuple[int, float]]  # of choices: steps, and seconds of one


def both_sides(front: Ran, back: Ran, handover_seconds: float, columns: int, *, overlaps: bool) -> float:
    """Seconds for the whole output of hosted choices and of the others, one after the other, or side by side.

    front, back       of each choice in how many steps it runs, those of all columns, and its seconds in one
    handover_seconds  in each step that the last hosted choice runs in
    columns           in whose first steps few choices run

    Side by side the back of a step runs beside the front of the next, which may be of the next column, and each waits
    for the other; the first front and the last back run alone.
    """
    back = [(front[-1][0], handover_seconds), *back]
    if not overlaps:
        return sum(steps * seconds for steps, seconds in (*front, *back))
    output = back[-1][0]
    one, other = ([((steps - output) // columns, seconds) for steps, seconds in side] for side in (front, back))
    first = max(0, *(ahead for ahead, _ in (*one, *other)))  # step of a column that gives output

    def once(side: Ran, step: int) -> float:
        return sum(seconds for ahead, seconds in side if ahead >= first - step)

    turns = {1, 1 + first, *(first - ahead for ahead, _ in one), *(1 + first - ahead for ahead, _ in other)}
    later = sum(
        (until - step) * max(once(one, step), once(other, step - 1))
        for step, until in pairwise(sorted(turn for turn in turns if 1 <= turn <= 1 + first))
    )
    begin, front_seconds, back_seconds = once(one, 0), once(one, first), once(other, first)
    alike = (output - columns) * max(front_seconds, back_seconds)
    return columns * (max(begin, back_seconds) + later) + alike + min(begin, back_seconds)


def waiting_seconds(upload: float, parts: int, once: float) -> float:
    """That a GPU stands still in a step: the first part goes up before it is computed, each later one meanwhile.

    upload  seconds of one part; once: of all that is computed in the step
    """
    return upload + (parts - 1) * max(0.0, upload - once / parts)
