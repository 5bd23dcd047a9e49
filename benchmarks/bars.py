"""Pictures of results: groups of horizontal bars, each with its figure, drawn with Pillow.

Pillow is there already, for `znnpy demo`; bars with figures need nothing that a plotting library would add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

OURS: Colour = (31, 119, 180)
OURS_TOO: Colour = (158, 202, 225)  # our other ways
PEER: Colour = (214, 96, 77)
PEER_LESS_EXACT: Colour = (253, 187, 132)  # bf16
ORIGINAL: Colour = (120, 120, 120)
INK: Colour = (30, 30, 30)

SCALE = 2  # pixels a unit, so that it is sharp on any screen
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
    image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), "white")
    pen = ImageDraw.Draw(image)
    large, plain = ImageFont.load_default(20 * SCALE), ImageFont.load_default(13 * SCALE)

    def write(x: float, y: float, text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> None:
        pen.text((x * SCALE, y * SCALE), text, INK, font)

    write(MARGIN, MARGIN, title, large)
    y = MARGIN + 34.0
    for note in notes:
        write(MARGIN, y, note, plain)
        y += ROW
    for group in groups:
        y += ROW / 2
        write(MARGIN, y, group.title, ImageFont.load_default(15 * SCALE))
        y += 1.2 * ROW
        longest = max((bar.value for bar in group.bars), default=1.0)
        for bar in group.bars:
            write(MARGIN + 12, y, bar.label, plain)
            left = MARGIN + LABEL
            length = (WIDTH - 2 * MARGIN - LABEL - FIGURE) * bar.value / longest
            box = (left * SCALE, (y + 1) * SCALE, (left + max(1.0, length)) * SCALE, (y + 1 + BAR) * SCALE)
            pen.rectangle(box, bar.colour)
            write(left + length + 8, y, bar.figure, plain)
            y += ROW
        y += 0.3 * ROW
    image.save(path, optimize=True)
