"""A run as it goes: a bar with time left on a terminal, plain lines in a log. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import TYPE_CHECKING

from znnpy.planner.explain import human_bytes, human_seconds
from znnpy.stopping import check_stopped

if TYPE_CHECKING:
    from znnpy.planner.throughput import Point
    from znnpy.run.pipeline import Event
    from znnpy.run.timing import Progress

SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 10  # at least; it takes the room that the words leave


@contextmanager
def show(quiet: bool = False) -> Iterator[Callable[[Event], None]]:
    """A callback for `znnpy.infer`, drawn while the context is open; nowhere when `quiet`, or without stderr."""
    if quiet:
        yield lambda event: check_stopped()
    elif sys.stderr is not None and sys.stderr.isatty():
        with _bar() as callback:
            yield callback
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    console, speed = Console(stderr=True, markup=False), _Speed()
    words = TextColumn("{task.description}", table_column=Column(no_wrap=True), markup=False)
    progress = Progress(BarColumn(None), TaskProgressColumn(), words, console=console, expand=True)
    task = progress.add_task("preparing", total=None)
    with ExitStack() as stack:

        def draw(event: Event) -> None:
            check_stopped()
            if not progress.live.is_started:  # now, so that a run that is refused leaves no bar on the screen
                stack.enter_context(progress)
            line = speed.within(event, console.width - BAR_WIDTH - len(" 100% "))
            progress.update(task, total=1.0, completed=event.work_done, description=line)

        yield draw


def _lines() -> Callable[[Event], None]:
    last, speed, broken = time.monotonic(), _Speed(), sys.stderr is None

    def write(event: Event) -> None:
        nonlocal last, broken
        check_stopped()
        line = f"{event.work_done:4.0%}  {speed.describe(event)}"
        now = time.monotonic()
        if not broken and (event.columns_done == event.columns or now - last >= SECONDS_BETWEEN_LINES):
            last = now
            try:
                print(line, file=sys.stderr, flush=True)
            except OSError:  # a full disk, a reader that left: the run matters more than its log
                broken = True

    return write


@contextmanager
def measuring(quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A callback for `znnpy.measurement.measure`, drawn like a run while the context is open."""
    if quiet or sys.stderr is None:
        yield lambda progress: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        words = TextColumn("{task.description}", table_column=Column(no_wrap=True))
        with Bar(BarColumn(None), words, console=Console(stderr=True), expand=True) as bar:
            task = bar.add_task("preparing", total=None)
            yield lambda progress: bar.update(
                task, total=progress.total, completed=progress.done, description=_measured(progress)
            )
    else:
        yield _measured_lines()


def _measured_lines() -> Callable[[Progress], None]:
    last, broken = -SECONDS_BETWEEN_LINES, False

    def write(progress: Progress) -> None:
        nonlocal last, broken
        now = time.monotonic()
        if not broken and (progress.done == progress.total or now - last >= SECONDS_BETWEEN_LINES):
            last = now
            try:
                print(_measured(progress), file=sys.stderr, flush=True)
            except OSError:  # as above
                broken = True

    return write


def _measured(progress: Progress) -> str:
    """`12/112 layers, at most 40 s left, cpu.conv.direct`."""
    left = "" if progress.seconds_left == inf else f", at most {human_seconds(max(1.0, progress.seconds_left))} left"
    doing = f", {progress.doing}" if progress.doing else ""
    return f"{progress.done}/{progress.total} layers{left}{doing}"


@contextmanager
def curves(quiet: bool = False) -> Iterator[Callable[[list[Point]], Callable[[Point], None]]]:
    """Of a list, a callback for `znnpy.plan` that adds points to it and, in the context, says how far it is."""
    if quiet:
        yield _counting(lambda done, words: None)
    elif sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, TaskProgressColumn, TextColumn

        with Progress(
            TextColumn("curves"), TaskProgressColumn(), TextColumn("{task.description}"), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task("", total=1.0)
            yield _counting(lambda done, words: bar.update(task, completed=done, description=words))
    else:
        yield _counting(_said_now_and_then())


def _counting(tell: Callable[[float, str], None]) -> Callable[[list[Point]], Callable[[Point], None]]:
    def into(found: list[Point]) -> Callable[[Point], None]:
        started = time.monotonic()

        def add(point: Point) -> None:
            found.append(point)
            spent = time.monotonic() - started
            left = human_seconds(max(1.0, spent * (1 - point.done) / max(point.done, 1e-3)))
            tell(point.done, f"limit {human_bytes(point.limit)}, about {left} left")

        return add

    return into


def _said_now_and_then() -> Callable[[float, str], None]:
    last, broken = time.monotonic(), sys.stderr is None

    def write(done: float, words: str) -> None:
        nonlocal last, broken
        now = time.monotonic()
        if not broken and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            try:
                print(f"curves {done:4.0%}  {words}", file=sys.stderr, flush=True)
            except OSError:  # as above
                broken = True

    return write


class _Speed:
    """Words for events; speed and time left count what this run did, not what the runs it resumes had done.

    Both follow the work, which goes on in the first steps of a column too, before any voxel is written. The speed is
    that of the report: voxels of the output over all seconds of the run, preparing included. The time left is for
    computing at the pace since it began.
    """

    def __init__(self) -> None:
        self._before: float | None = None  # share of the work that was done when this run began
        self._began = 0.0  # seconds of the run when it began to compute

    def describe(self, event: Event) -> str:
        """Patches or columns, speed, bytes written, time left, and the seconds each stage has worked."""
        if event.preparing is not None:
            return _preparing(*event.preparing)
        speed, left = self._measure(event)
        parts = [_columns(event), f"{speed:,.0f} voxels/s", f"{human_bytes(event.bytes_done)} written", *left]
        return f"{', '.join(parts)} ({_stages(event)})"

    def within(self, event: Event, width: int) -> str:
        """The same, short, and with the stages only where `width` characters hold them."""
        if event.preparing is not None:
            return _preparing(*event.preparing)
        speed, left = self._measure(event)
        rest = " ".join((f"{_rounded(speed)} voxels/s {human_bytes(event.bytes_done)}", *left))
        short = f"{_steps(event) or _columns(event)} {rest}"
        full = f"{_columns(event)} {rest} ({_stages(event)})"
        return full if len(full) <= width else short

    def _measure(self, event: Event) -> tuple[float, list[str]]:
        """Voxels per second, and the time left in words: none at the end."""
        if self._before is None:
            self._before, self._began = event.work_done, event.seconds
        done, rest, computing = event.work_done - self._before, 1 - event.work_done, event.seconds - self._began
        speed = done * event.voxels / event.seconds if event.seconds else 0.0
        pace = done / computing if computing > 0 else 0.0
        if event.columns_done == event.columns or not rest:
            return speed, []
        if not pace:
            return speed, ["unknown time left"]
        return speed, [f"{human_seconds(rest / pace)} left" if rest >= pace else "under 1 s left"]


def _preparing(done: int, nbytes: int) -> str:
    """`preparing 4.48 GiB, 40 %`."""
    return f"preparing {human_bytes(nbytes)}, {100 * done // nbytes} %"


def _columns(event: Event) -> str:
    """Patches done, or columns and steps."""
    steps = _steps(event)
    return f"{event.columns_done}/{event.columns} " + (f"columns, {steps}" if steps else "patches")


def _steps(event: Event) -> str:
    """Empty where patches run: they are columns of one step."""
    return f"{event.steps_done}/{event.steps} steps" if event.steps > event.columns else ""


def _stages(event: Event) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in event.stage_seconds.items())


def _rounded(number: float) -> str:
    """Three digits and a unit: 1234567 as `1.23M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
