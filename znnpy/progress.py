"""A run as it goes: a bar with time left on a terminal, plain lines in a log. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from znnpy.planner.explain import human_bytes, human_seconds

if TYPE_CHECKING:
    from znnpy.run.pipeline import Event

SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 10  # at least; it takes the room that the words leave


@contextmanager
def show() -> Iterator[Callable[[Event], None]]:
    """A callback for `znnpy.infer`, drawn while the context is open; nowhere when there is no stderr."""
    if sys.stderr is not None and sys.stderr.isatty():
        with _bar() as callback:
            yield callback
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    console, speed = Console(stderr=True), _Speed()
    words = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    with Progress(BarColumn(None), TaskProgressColumn(), words, console=console, expand=True) as progress:
        task = progress.add_task("preparing", total=None)

        def draw(event: Event) -> None:
            line = speed.within(event, console.width - BAR_WIDTH - len(" 100% "))
            progress.update(task, total=event.voxels, completed=event.voxels_done, description=line)

        yield draw


def _lines() -> Callable[[Event], None]:
    last, speed, broken = time.monotonic(), _Speed(), sys.stderr is None

    def write(event: Event) -> None:
        nonlocal last, broken
        line = f"{event.voxels_done / event.voxels:4.0%}  {speed.describe(event)}"
        now = time.monotonic()
        if not broken and (event.columns_done == event.columns or now - last >= SECONDS_BETWEEN_LINES):
            last = now
            try:
                print(line, file=sys.stderr, flush=True)
            except OSError:  # a full disk, a reader that left: the run matters more than its log
                broken = True

    return write


class _Speed:
    """Words for events; speed and time left count what this run did, not what the runs it resumes had done."""

    def __init__(self) -> None:
        self._before: int | None = None  # voxels done when this run began

    def describe(self, event: Event) -> str:
        """Patches, speed, bytes written, time left, and the seconds each stage has worked."""
        speed, left = self._measure(event)
        return (
            f"{event.columns_done}/{event.columns} patches, {speed:,.0f} voxels/s, "
            f"{human_bytes(event.bytes_done)} written, {left} left ({_stages(event)})"
        )

    def within(self, event: Event, width: int) -> str:
        """The same, short, and with the stages only where `width` characters hold them."""
        speed, left = self._measure(event)
        short = (
            f"{event.columns_done}/{event.columns} patches {_rounded(speed)} voxels/s "
            f"{human_bytes(event.bytes_done)} {left} left"
        )
        full = f"{short} ({_stages(event)})"
        return full if len(full) <= width else short

    def _measure(self, event: Event) -> tuple[float, str]:
        """Voxels per second, and the time left in words."""
        if self._before is None:
            self._before = event.voxels_done
        speed = (event.voxels_done - self._before) / event.seconds if event.seconds else 0.0
        return speed, human_seconds((event.voxels - event.voxels_done) / speed) if speed else "unknown time"


def _stages(event: Event) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in event.stage_seconds.items())


def _rounded(number: float) -> str:
    """Three digits and a unit: 1234567 as `1.23M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
