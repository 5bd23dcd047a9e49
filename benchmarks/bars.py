"""Pictures of results: groups of horizontal bars, each with its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pen import Colour, Pen, blank

OURS: Colour = (31, 119, 180)
OURS_TOO: Colour = (158, 202, 225)  # our other ways
PEER: Colour = (214, 96, 77)
PEER_LESS_EXACT: Colour = (253, 187, 132)  # bf16
ORIGINAL: Colour = (120, 120, 120)

WIDTH, MARGIN, LABEL, ROW, BAR = 1100, 24, 400, 22, 15
FIGURE = 190  # room for the figure behind the longest bar


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    figure: str  # printed behind the bar
    colour: Colour


@dataclass(frozen=True, slots=True)
class Group:
    """Bars on one scale, the group's longest filling the width."""

    title: str
    bars: Sequence[Bar]


def draw(path: Path, title: str, notes: Sequence[str], groups: Sequence[Group]) -> None:
    """Write a PNG: title, lines of notes, then the groups one below the other."""
    rows = sum(len(group.bars) + 2 for group in groups)
    height = 2 * MARGIN + 34 + ROW * (len(notes) + rows)
    image = blank(WIDTH, height)
    pen = Pen(image)
    pen.write((MARGIN, MARGIN), title, 20)
    y = MARGIN + 34.0
    for note in notes:
        pen.write((MARGIN, y), note, 13)
        y += ROW
    for group in groups:
        y += ROW / 2
        pen.write((MARGIN, y), group.title, 15)
        y += 1.2 * ROW
        longest = max((bar.value for bar in group.bars), default=1.0)
        for bar in group.bars:
            pen.write((MARGIN + 12, y), bar.label, 13)
            left, middle = MARGIN + LABEL, y + 1 + BAR / 2
            length = (WIDTH - 2 * MARGIN - LABEL - FIGURE) * bar.value / longest
            pen.line([(left, middle), (left + max(1.0, length), middle)], bar.colour, BAR)
            pen.write((left + length + 8, y), bar.figure, 13)
            y += ROW
        y += 0.3 * ROW
    image.save(path, optimize=True)
