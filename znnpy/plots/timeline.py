"""`znnpy timeline --out`: the timeline of a run as a plot, with a row for each track.

It follows Zlateski, Lee, Seung, ZNNi (SC16), figure 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.messages import excerpt
from znnpy.plots.figures import DPI, WIDTH, new_figure, save_figure
from znnpy.timeline import Bar, Row, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

WAITING: Colour = (0.75, 0.75, 0.75)
GOLDEN = 0.618034  # turns of the hue from one colour to the next, so that neighbours in the legend differ
ROW, AROUND = 0.35, 1.6  # inches: height of a row, and of title, axis and legend
SHORTEST = 4  # pixels of a bar at least: as wide as the frame of the axes, and still seen beside it
BAR = 0.7  # height of a bar as a share of its row
LEGEND_COLUMNS = 4
LONGEST_REASON = 120  # characters: more do not fit into the width


def draw(path: Path, title: str, found: Timeline, *, overwrite: bool) -> None:
    """Write the plot as a PNG, whole or not at all."""
    save_figure(path, timeline_figure(title, found), overwrite=overwrite)


def timeline_figure(title: str, found: Timeline) -> Figure:
    """Return a figure of the timeline: time along x, tracks along y, a colour for each kind of work."""
    colours = colours_of(found.rows)
    legend_rows = -(-len(colours) // LEGEND_COLUMNS)
    figure = new_figure(title, AROUND + ROW * len(found.rows) + 0.25 * legend_rows)
    axes = figure.subplots()
    end = max(found.end, found.begin + 1e-6)  # a window of no length has no scale
    shortest = SHORTEST * (end - found.begin) / (WIDTH * DPI)
    labelled: set[str] = set()
    for number, row in enumerate(found.rows):
        for kind in dict.fromkeys(bar.kind for bar in row.bars):
            spans = list(visible_spans((bar for bar in row.bars if bar.kind == kind), shortest))
            label = None if kind in labelled else kind
            axes.broken_barh(spans, (number - BAR / 2, BAR), facecolors=[colours[kind]], label=label)
            labelled.add(kind)
    axes.set_xlim(found.begin, end)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    ticks = range(len(found.rows))
    axes.set_yticks(ticks, [row.name for row in found.rows], parse_math=False)
    axes.set_ylim(len(found.rows) - 0.5, -0.5)
    right = axes.secondary_yaxis("right")
    right.set_yticks(ticks, [found.describe(row) for row in found.rows])
    if found.ended is not None:
        reason = excerpt(f"the run ended early: {found.ended}", LONGEST_REASON)
        axes.set_title(reason, loc="left", fontsize=10, parse_math=False)
    legend = figure.legend(loc="outside lower left", ncols=LEGEND_COLUMNS, fontsize=9, frameon=False)
    for entry in legend.get_texts():
        entry.set_parse_math(False)
    return figure


def visible_spans(bars: Iterable[Bar], shortest: float) -> Iterator[tuple[float, float]]:
    """Yield begin and length of the bars, each at least `shortest` seconds long; skip those that are covered."""
    drawn = -inf
    for bar in sorted(bars, key=lambda bar: bar.begin):
        begin = max(bar.begin, drawn)
        if bar.end > drawn:
            drawn = max(bar.end, begin + shortest)
            yield begin, drawn - begin


def colours_of(rows: Sequence[Row]) -> dict[str, Colour]:
    """Return a colour for each kind of bar, in the order in which the kinds first appear."""
    from matplotlib.colors import hsv_to_rgb

    colours: dict[str, Colour] = {}
    for row in rows:
        for bar in row.bars:
            if bar.kind in colours:
                continue
            number = len(colours)
            hue, saturation, value = (
                (0.58 + GOLDEN * number) % 1,
                (0.45, 0.75, 0.9)[number % 3],
                (0.85, 0.6)[number % 2],
            )
            red, green, blue = (float(part) for part in hsv_to_rgb((hue, saturation, value)))
            colours[bar.kind] = WAITING if row.waits else (red, green, blue)
    return colours
