"""Pictures of results: a grid of small diagrams with lines and points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2, log10
from pathlib import Path

from bars import MARGIN, ROW
from pen import INK, PALE, Colour, Pen, Place, blank

WIDTH, HEIGHT = 270, 210  # of one diagram, its scales included
LEFT, RIGHT, ABOVE, BELOW = 62, 14, 26, 26  # of its frame
LEAST_WIDTH = 4 * WIDTH  # of the picture: room for title, notes and legend
POINT = 3.5  # radius
TICKS = 5  # about so many on the upright scale


@dataclass(frozen=True, slots=True)
class Curve:
    """Figures of one kind in one diagram: a line through some, single points for others."""

    colour: Colour
    line: Sequence[Place]
    points: Sequence[Place] = ()


@dataclass(frozen=True, slots=True)
class Diagram:
    """Upright from 0 on, across by powers of two."""

    title: str
    curves: Sequence[Curve]


def draw(
    path: Path,
    title: str,
    notes: Sequence[str],
    legend: Sequence[tuple[str, Colour]],
    across: Sequence[float],
    rows: Sequence[Sequence[Diagram]],
    unit: str = " GiB",
) -> None:
    """Write a PNG: title, lines of notes, the legend, then rows of diagrams with the ticks `across`, all positive.

    unit  behind the last tick
    """
    head = MARGIN + 34 + ROW * (len(notes) + 1.5)
    wide = max(LEAST_WIDTH, WIDTH * max(len(row) for row in rows))
    image = blank(2 * MARGIN + wide, head + HEIGHT * len(rows) + MARGIN)
    pen = Pen(image)
    pen.write((MARGIN, MARGIN), title, 20)
    y = MARGIN + 34.0
    for note in notes:
        pen.write((MARGIN, y), note, 13)
        y += ROW
    x = float(MARGIN)
    for label, colour in legend:
        pen.line([(x, y + 8), (x + 22, y + 8)], colour, 2.5)
        pen.write((x + 28, y), label, 13)
        x += 52 + pen.width(label, 13)
    for down, row in enumerate(rows):
        for along, diagram in enumerate(row):
            _diagram(pen, MARGIN + along * WIDTH, head + down * HEIGHT, diagram, across, unit)
    image.save(path, optimize=True)


def _diagram(pen: Pen, left: float, top: float, diagram: Diagram, across: Sequence[float], unit: str) -> None:
    lo, hi = log2(min(across)) - 0.25, log2(max(across)) + 0.25
    found = [y for curve in diagram.curves for _, y in (*curve.line, *curve.points)]
    high = 1.08 * max(found, default=1.0)
    x0, x1, y0, y1 = left + LEFT, left + WIDTH - RIGHT, top + HEIGHT - BELOW, top + ABOVE

    def place(at: Place) -> Place:
        return x0 + (x1 - x0) * (log2(at[0]) - lo) / (hi - lo), y0 + (y1 - y0) * at[1] / high

    pen.write((x0, top + 4), diagram.title, 13)
    for tick in ticks(high):
        _, y = place((across[0], tick))
        pen.line([(x0, y), (x1, y)], PALE, 0.5)
        pen.write((x0 - 6, y), f"{tick:,.10g}", 11, "rm")
    for tick in across:
        x, _ = place((tick, 0))
        pen.line([(x, y0), (x, y0 + 4)], INK, 0.5)
        pen.write((x, y0 + 6), f"{tick:g}{unit if tick == across[-1] else ''}", 11, "ma")
    pen.line([(x0, y1), (x0, y0), (x1, y0)], INK, 0.5)
    for curve in diagram.curves:
        if len(curve.line) > 1:
            pen.line([place(at) for at in curve.line], curve.colour, 2.5)
        for at in curve.points:
            pen.point(place(at), curve.colour, POINT)


def ticks(high: float) -> list[float]:
    """Round numbers from 0 to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = high / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * i for i in range(int(high / step) + 1)]
