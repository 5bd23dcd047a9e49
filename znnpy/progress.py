"""Show the progress of a run on stderr: as a bar with the time left on a terminal, else as lines of a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import TYPE_CHECKING

from znnpy.run_log import PROGRESS
from znnpy.stopping import check_stopped
from znnpy.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from znnpy.measure.budget import Progress
    from znnpy.report.memory_sweep import Point
    from znnpy.run.pipeline import Event

SECONDS_BETWEEN_LINES = 10.0  # of what takes minutes
SECONDS_OF_RUNS = 60.0  # the same of a run, which may take days
BAR_WIDTH = 10  # characters at least; the bar takes the room that the text leaves


class _Clock:
    """Says when a line is due: at most one in so many seconds, and the last one."""

    def __init__(self, last: float, seconds: float | None = None) -> None:
        self._last = last  # time of the last line, by the monotonic clock
        self._seconds = seconds  # None: SECONDS_BETWEEN_LINES

    def is_due(self, *, is_last: bool = False) -> bool:
        """Return whether a line is to be written now, which is then the latest."""
        now = time.monotonic()
        between = SECONDS_BETWEEN_LINES if self._seconds is None else self._seconds
        if not (is_last or now - self._last >= between):
            return False
        self._last = now
        return True


class _Log:
    """Writes lines to stderr that are due. A stderr that cannot be written stops no run."""

    def __init__(self, last: float, seconds: float | None = None) -> None:
        self._clock = _Clock(last, seconds)
        self._broken = sys.stderr is None

    def write(self, line: str, *, is_last: bool = False) -> None:
        """Print `line` if it is due or the last one."""
        if self._broken or not self._clock.is_due(is_last=is_last):
            return
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:  # a full disk, or a reader that left
            self._broken = True


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def show(quiet: bool = False) -> Iterator[Callable[[Event], None]]:
    """Yield a callback for `znnpy.infer` that shows the events while the context is open; nothing when `quiet`.

    The log of the command gets a line each minute in every case.
    """
    if quiet:
        yield _recording(lambda event: check_stopped())
    elif _is_terminal():
        with _bar() as callback:
            yield _recording(callback)
    else:
        yield _recording(_lines())


def _recording(tell: Callable[[Event], None]) -> Callable[[Event], None]:
    """Return a callback that also tells the log."""
    log, clock, speed = logging.getLogger(PROGRESS), _Clock(time.monotonic(), SECONDS_OF_RUNS), _Speed()

    def record(event: Event) -> None:
        tell(event)
        line = _line(event, speed)
        if clock.is_due(is_last=event.columns_done == event.columns):
            log.info("%s", line)

    return record


@contextmanager
def _bar() -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    console, speed = Console(stderr=True, markup=False), _Speed()
    description = TextColumn("{task.description}", table_column=Column(no_wrap=True), markup=False)
    progress = Progress(BarColumn(None), TaskProgressColumn(), description, console=console, expand=True)
    task = progress.add_task("preparing", total=None)
    with ExitStack() as stack:

        def draw(event: Event) -> None:
            check_stopped()
            if not progress.live.is_started:  # only now, so that a run that is refused leaves no bar on the screen
                stack.enter_context(progress)
            line = speed.within(event, console.width - BAR_WIDTH - len(" 100% "))
            progress.update(task, total=1.0, completed=event.work_done, description=line)

        yield draw


def _lines() -> Callable[[Event], None]:
    log, speed = _Log(time.monotonic(), SECONDS_OF_RUNS), _Speed()

    def write(event: Event) -> None:
        check_stopped()
        log.write(_line(event, speed), is_last=event.columns_done == event.columns)

    return write


def _line(event: Event, speed: _Speed) -> str:
    return f"{event.work_done:4.0%}  {speed.describe(event)}"


@contextmanager
def measuring(quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """Yield a callback for `znnpy.measurement.measure` that shows its progress while the context is open."""
    if quiet:
        yield lambda progress: None
    elif _is_terminal():
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        description = TextColumn("{task.description}", table_column=Column(no_wrap=True))
        with Bar(BarColumn(None), description, console=Console(stderr=True), expand=True) as bar:
            task = bar.add_task("preparing", total=None)
            yield lambda progress: bar.update(
                task, total=progress.total, completed=progress.done, description=_measured(progress)
            )
    else:
        log = _Log(-inf)
        yield lambda progress: log.write(_measured(progress), is_last=progress.done == progress.total)


def _measured(progress: Progress) -> str:
    """Describe a measurement: `12/112 layers, at most 40 s left, cpu.conv.direct`."""
    left = "" if progress.seconds_left == inf else f", at most {human_seconds(max(1.0, progress.seconds_left))} left"
    doing = f", {progress.doing}" if progress.doing else ""
    return f"{progress.done}/{progress.total} layers{left}{doing}"


@contextmanager
def curves(quiet: bool = False) -> Iterator[Callable[[list[Point]], Callable[[Point], None]]]:
    """Yield a function that makes a callback for `znnpy.plan`, which adds points to a list and shows the progress."""
    if quiet:
        yield _collecting(lambda done, description: None)
    elif _is_terminal():
        from rich.console import Console
        from rich.progress import Progress, TaskProgressColumn, TextColumn

        with Progress(
            TextColumn("curves"), TaskProgressColumn(), TextColumn("{task.description}"), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task("", total=1.0)
            yield _collecting(lambda done, description: bar.update(task, completed=done, description=description))
    else:
        log = _Log(time.monotonic())
        yield _collecting(lambda done, description: log.write(f"curves {done:4.0%}  {description}"))


def _collecting(tell: Callable[[float, str], None]) -> Callable[[list[Point]], Callable[[Point], None]]:
    def into(found: list[Point]) -> Callable[[Point], None]:
        started = time.monotonic()

        def add(point: Point) -> None:
            found.append(point)
            spent = time.monotonic() - started
            left = human_seconds(max(1.0, spent * (1 - point.done) / max(point.done, 1e-3)))
            tell(point.done, f"limit {human_bytes(point.limit)}, about {left} left")

        return add

    return into


class _Speed:
    """Describes events. Speed and time left count the work of this run, not that of the runs it resumes.

    Both depend on the work done, which grows even in the first steps of a column, before any voxel is written. The
    speed is that of the report: output voxels divided by all seconds of the run, including preparation. The time left
    assumes the average speed since computing began; rich's own estimate covers only the last 30 s, and steps of a
    column differ.
    """

    def __init__(self) -> None:
        self._before: float | None = None  # share of the work that was done when this run began
        self._began = 0.0  # seconds of the run when it began to compute

    def describe(self, event: Event) -> str:
        """Describe the patches or columns, speed, bytes written, time left, and the seconds that each stage worked."""
        if event.preparing is not None:
            return _preparing(*event.preparing)
        speed, left = self._measure(event)
        if event.elsewhere:
            return ", ".join((_columns(event), f"{speed:,.0f} voxels/s", *left))
        parts = [_columns(event), f"{speed:,.0f} voxels/s", f"{human_bytes(event.bytes_done)} written", *left]
        return f"{', '.join(parts)} ({_stages(event)})"

    def within(self, event: Event, width: int) -> str:
        """Return a short description of an event; it names the stages only if `width` characters hold them."""
        if event.preparing is not None:
            return _preparing(*event.preparing)
        speed, left = self._measure(event)
        if event.elsewhere:
            return " ".join((_columns(event), f"{_rounded(speed)} voxels/s", *left))
        rest = " ".join((f"{_rounded(speed)} voxels/s {human_bytes(event.bytes_done)}", *left))
        short = f"{_steps(event) or _columns(event)} {rest}"
        full = f"{_columns(event)} {rest} ({_stages(event)})"
        return full if len(full) <= width else short

    def _measure(self, event: Event) -> tuple[float, list[str]]:
        """Return voxels per second, and a list with the time left as text, which is empty at the end."""
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
    """Describe the preparation: `preparing 4.48 GiB, 40 %`."""
    return f"preparing {human_bytes(nbytes)}, {100 * done // nbytes} %"


def _columns(event: Event) -> str:
    """Return the patches done, or the columns and steps."""
    steps = _steps(event)
    return f"{event.columns_done}/{event.columns} " + (f"columns, {steps}" if steps else event.elsewhere or "patches")


def _steps(event: Event) -> str:
    """Describe the steps done; return nothing for patches, which are columns of one step."""
    return f"{event.steps_done}/{event.steps} steps" if event.steps > event.columns else ""


def _stages(event: Event) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in event.stage_seconds.items())


def _rounded(number: float) -> str:
    """Return a number with three digits and a unit: 1234567 as `1.23M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
