"""A run as it goes: a bar with time left on a terminal, plain lines in a log. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from znnpy.planner.explain import human_seconds

if TYPE_CHECKING:
    from znnpy.run.pipeline import Event

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def show() -> Iterator[Callable[[Event], None]]:
    """A callback for `znnpy.infer`, drawn while the context is open."""
    if sys.stderr.isatty():
        with _bar() as callback:
            yield callback
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console, speed = Console(stderr=True), _Speed()
    with Progress(BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("preparing", total=None)

        def draw(event: Event) -> None:
            progress.update(task, total=event.voxels, completed=event.voxels_done, description=speed.describe(event))

        yield draw


def _lines() -> Callable[[Event], None]:
    last, speed = time.monotonic(), _Speed()

    def write(event: Event) -> None:
        nonlocal last
        line = f"{event.voxels_done / event.voxels:4.0%}  {speed.describe(event)}"
        now = time.monotonic()
        if event.columns_done == event.columns or now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(line, file=sys.stderr, flush=True)

    return write


class _Speed:
    """Words for events; speed and time left count what this run did, not what the runs it resumes had done."""

    def __init__(self) -> None:
        self._before: int | None = None  # voxels done when this run began

    def describe(self, event: Event) -> str:
        """Columns, speed, time left, and the seconds each stage has worked."""
        if self._before is None:
            self._before = event.voxels_done
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in event.stage_seconds.items())
        done = event.voxels_done - self._before
        speed = done / event.seconds if event.seconds else 0.0
        left = human_seconds((event.voxels - event.voxels_done) / speed) if speed else "unknown time"
        return f"{event.columns_done}/{event.columns} columns, {speed:,.0f} voxels/s, {left} left ({stages})"
