"""Tables for terminals of any width: names are never cut, and where a table is too wide another layout is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

SENTENCE = 36  # columns of a table in which a sentence can be read
BESIDE = 3  # columns between two columns of a table, at most
STEP = 2  # columns by which each further paragraph moves in


@dataclass(frozen=True, slots=True)
class WideOrNarrow:
    """Print one layout if there are enough columns for it, else the other.

    least  columns that the wide one needs; None: as many as it takes if no line of it is wrapped.
    """

    wide: RenderableType
    narrow: RenderableType
    least: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = self.least
        if least is None:
            least = Measurement.get(console, options.update(max_width=10**4), self.wide).maximum
        yield self.wide if least <= options.max_width else self.narrow


def columns_for(*cells: Iterable[str], sentences: int) -> int:
    """Return the width of a table with these cells, which are not wrapped, and some columns of sentences."""
    return sum(max(map(len, column), default=0) + BESIDE for column in cells) + sentences * (SENTENCE + BESIDE)


def indented(paragraphs: Sequence[str]) -> list[Padding]:
    """Stack paragraphs, each indented STEP columns further and wrapped between words. Empty ones take no line."""
    return [Padding(Text(words), (0, 0, 0, STEP * depth)) for depth, words in enumerate(paragraphs) if words]
