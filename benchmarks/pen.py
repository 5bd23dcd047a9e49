"""A pen for pictures with lines, points and words, drawn with Pillow.

Pillow is there already, for the picture of `znnpy demo`; these need nothing that a plotting library would add.
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Place = tuple[float, float]

INK: Colour = (30, 30, 30)
PALE: Colour = (225, 225, 225)
SCALE = 2  # pixels a unit, so that it is sharp on any screen


def blank(width: float, height: float) -> Image.Image:
    """White, of so many units."""
    return Image.new("RGB", (round(width * SCALE), round(height * SCALE)), "white")


class Pen:
    """Draws in units, of which each is SCALE pixels."""

    def __init__(self, on: Image.Image) -> None:
        self._on = ImageDraw.Draw(on)

    def write(self, at: Place, words: str, size: int, anchor: str = "la") -> None:
        font = ImageFont.load_default(size * SCALE)
        self._on.text((at[0] * SCALE, at[1] * SCALE), words, INK, font, anchor=anchor)

    def width(self, words: str, size: int) -> float:
        return self._on.textlength(words, ImageFont.load_default(size * SCALE)) / SCALE

    def line(self, places: Sequence[Place], colour: Colour, width: float) -> None:
        self._on.line([(x * SCALE, y * SCALE) for x, y in places], colour, round(width * SCALE), joint="curve")

    def point(self, at: Place, colour: Colour, radius: float) -> None:
        self._on.ellipse(_box(at, radius), colour, "white", SCALE // 2)

    def ring(self, at: Place, radius: float) -> None:
        self._on.ellipse(_box(at, radius), None, INK, 2 * SCALE)


def _box(at: Place, radius: float) -> tuple[float, float, float, float]:
    x, y = at
    return (x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE
