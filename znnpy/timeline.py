"""`znnpy timeline`: what each device and thread of a run did when, from its trace, and how busy it was.

As in Zlateski, Lee, Seung, ZNNi (SC16), figure 8: a row for each, time across.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, log10
from pathlib import Path
from typing import Any

from znnpy.errors import ZnnpyError
from znnpy.files import write_asked
from znnpy.messages import option
from znnpy.pen import INK, PALE, SCALE, Colour, Pen, blank
from znnpy.run.trace import Span, read_spans

WAITING: Colour = (190, 190, 190)
WIDTH, MARGIN, ROW, BAR, LINE = 1100, 24, 30, 20, 20  # units; of a bar, and of a line of words
SHARES = 160  # beside the rows, for how busy they are
TICKS = 10  # at most
GOLDEN = 0.618034  # of the circle of hues: neighbours in the legend differ


@dataclass(frozen=True, slots=True)
class Bar:
    """A span within the window."""

    begin: float  # seconds since the trace began
    end: float
    kind: str  # what has one colour: a layer, or all that a track does to one patch after the other


@dataclass(slots=True)
class Row:
    """A track."""

    name: str
    bars: list[Bar] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Its spans are those in which somebody stood still."""
        return self.name.endswith("waiting")

    @property
    def seconds(self) -> float:
        """Covered by its bars."""
        covered, until = 0.0, -inf
        for bar in sorted(self.bars, key=lambda bar: bar.begin):
            covered += max(0.0, bar.end - max(bar.begin, until))
            until = max(until, bar.end)
        return covered


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run, or a window of it."""

    begin: float  # seconds since the trace began
    end: float
    rows: Sequence[Row]
    ended: str | None  # why it ended early

    def share(self, row: Row) -> float:
        """Of the window, that a row is busy or, where it waits, waits."""
        return row.seconds / (self.end - self.begin) if self.end > self.begin else 0.0

    def told(self, row: Row) -> str:
        share = 100 * self.share(row)
        return f"{share:.1f} % of the time" if row.waits else f"busy {share:.1f} %, idle {100 - share:.1f} %"

    def lines(self) -> list[str]:
        """How busy each row was, in words."""
        wide = max(len(row.name) for row in self.rows)
        early = [] if self.ended is None else [f"the run ended early: {self.ended}"]
        return [f"{'':{wide}}  from {self.begin:.6g} s to {self.end:.6g} s", *self._shares(wide), *early]

    def _shares(self, wide: int) -> list[str]:
        return [f"{row.name:{wide}}  {self.told(row)}" for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """For machines: `seconds` and `share` are what spans cover of the window, of `waits` the standing still."""
        rows = [
            {
                "track": row.name,
                "waits": row.waits,
                "spans": len(row.bars),
                "seconds": row.seconds,
                "share": self.share(row),
            }
            for row in self.rows
        ]
        return {"from": self.begin, "to": self.end, "tracks": rows, "ended_early": self.ended}


def read_timeline(path: Path, begin: float | None = None, end: float | None = None) -> Timeline:
    """A trace from second `begin` to second `end`, without them all of it. ZnnpyError if nothing was done then."""
    lo, hi = -inf if begin is None else begin, inf if end is None else end
    rows: dict[str, Row] = {}
    ended = None
    first, last = inf, -inf
    for span in read_spans(path):
        if isinstance(span, str):
            ended = span
            continue
        row = rows.setdefault(span.track, Row(span.track))
        first, last = min(first, span.begin), max(last, span.end)
        if span.end >= lo and span.begin <= hi:
            row.bars.append(Bar(max(lo, span.begin), min(hi, span.end), _kind(span)))
    if not rows:
        raise ZnnpyError(f"{path} holds nothing that was done: run `znnpy infer --trace` again")
    if not any(row.bars for row in rows.values()):
        raise ZnnpyError(
            f"nothing was done from {lo:.6g} s to {hi:.6g} s: {path} goes from {first:.6g} s to {last:.6g} s; "
            f"give another {option('begin')} or {option('end')}"
        )
    return Timeline(first if begin is None else lo, last if end is None else hi, tuple(rows.values()), ended)


def _kind(span: Span) -> str:
    """A name with a number that is no layer's stands for one of many."""
    many = any(letter.isdigit() for letter in span.name) and "layer" not in span.facts
    return span.track if many or span.track.endswith("waiting") else span.name


def draw(path: Path, title: str, found: Timeline, *, overwrite: bool) -> None:
    """Write a PNG; it appears whole or not at all."""
    colours = _colours(found.rows)
    ruler = Pen(blank(1, 1))
    places, below = _legend(ruler, colours)
    left = MARGIN + 12 + max(ruler.width(row.name, 13) for row in found.rows)
    top = MARGIN + 40 + (0 if found.ended is None else LINE)
    axis = top + ROW * len(found.rows)
    image = blank(WIDTH, axis + 44 + below + MARGIN)
    pen = Pen(image)
    pen.write((MARGIN, MARGIN), title, 20)
    if found.ended is not None:
        pen.write((MARGIN, MARGIN + 30), _cut(ruler, f"the run ended early: {found.ended}"), 13)
    _axis(pen, left, top, axis, found)
    for number, row in enumerate(found.rows):
        y = top + ROW * number + ROW / 2
        pen.write((MARGIN, y), row.name, 13, "lm")
        pen.write((WIDTH - MARGIN, y), found.told(row), 13, "rm")
        _bars(pen, left, y, row, found, colours)
    for kind, (x, y) in places.items():
        at = axis + 44 + y
        pen.line([(x, at + 8), (x + 22, at + 8)], colours[kind], 12)
        pen.write((x + 28, at), kind, 13)
    drawn = io.BytesIO()
    image.save(drawn, "PNG", optimize=True)
    write_asked(path, drawn.getvalue(), overwrite=overwrite)


def _colours(rows: Sequence[Row]) -> dict[str, Colour]:
    """Of each kind, in the order of the rows."""
    colours: dict[str, Colour] = {}
    for row in rows:
        for bar in row.bars:
            if bar.kind in colours:
                continue
            pure, bright = (0.45, 0.75, 0.9)[len(colours) % 3], (0.85, 0.6)[len(colours) % 2]
            red, green, blue = colorsys.hsv_to_rgb((0.58 + GOLDEN * len(colours)) % 1, pure, bright)
            colours[bar.kind] = WAITING if row.waits else (round(255 * red), round(255 * green), round(255 * blue))
    return colours


def _legend(ruler: Pen, colours: dict[str, Colour]) -> tuple[dict[str, tuple[float, float]], float]:
    """Where each kind is named, and how much room all take."""
    places: dict[str, tuple[float, float]] = {}
    x, y = float(MARGIN), 0.0
    for kind in colours:
        wide = 52 + ruler.width(kind, 13)
        if x > MARGIN and x + wide > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        places[kind] = x, y
        x += wide
    return places, y + LINE


def _axis(pen: Pen, left: float, top: float, axis: float, found: Timeline) -> None:
    right = WIDTH - MARGIN - SHARES
    seconds = found.end - found.begin
    step = _step(seconds / TICKS) if seconds > 0 else 1.0
    for number in range(ceil(found.begin / step), floor(found.end / step) + 1):
        x = left + (right - left) * ((number * step - found.begin) / seconds if seconds > 0 else 0.0)
        pen.line([(x, top), (x, axis + 4)], PALE, 0.5)
        pen.write((x, axis + 6), f"{number * step:.10g}", 11, "ma")
    pen.line([(left, axis), (right, axis)], INK, 0.5)
    pen.write((right, axis + 22), "seconds", 11, "ra")


def _bars(pen: Pen, left: float, y: float, row: Row, found: Timeline, colours: dict[str, Colour]) -> None:
    """At least a pixel each; of several within one pixel the first."""
    right, drawn = WIDTH - MARGIN - SHARES, -inf
    scale = (right - left) / (found.end - found.begin) if found.end > found.begin else 0.0
    for bar in sorted(row.bars, key=lambda bar: bar.begin):
        x0, x1 = (left + scale * (at - found.begin) for at in (bar.begin, bar.end))
        x0 = max(x0, drawn)
        if x1 > drawn:
            drawn = max(x1, x0 + 1 / SCALE)
            pen.line([(x0, y), (drawn, y)], colours[bar.kind], BAR)


def _step(least: float) -> float:
    """1, 2 or 5 times a power of ten, and no less than `least`."""
    power = 10.0 ** floor(log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _cut(ruler: Pen, words: str) -> str:
    """As many as a line has room for."""
    kept = words
    while ruler.width(kept, 13) > WIDTH - 2 * MARGIN:
        kept = f"{kept.removesuffix('...')[:-1]}..."
    return kept
