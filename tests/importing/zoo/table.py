"""The table of docs/zoo.md: what became of each network. This module needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.importing.zoo.nets import ROUTES, Net, Route

PAGE = Path(__file__).resolve().parents[3] / "docs" / "zoo.md"
BLOCK = re.compile(r"(?<=<!-- begin zoo -->\n).*?(?=<!-- end zoo -->)", re.DOTALL)
HEAD = ("network", "from", "layers", "parameters", "period", "context", *(f"`{route}`" for route in ROUTES), "why")


@dataclass(frozen=True)
class Entry:
    """The facts of a network after it was read.

    verdicts  `equal`, `one window` or `refused`, for each route by which it was read
    why       it is refused; a network that is not even read has no layers
    """

    net: Net
    verdicts: Mapping[Route, str]
    why: str = ""
    layers: str = ""
    parameters: str = ""
    period: str = ""
    context: str = ""

    @property
    def row(self) -> str:
        """Return the row of the table."""
        cells = (
            self.net.name,
            self.net.package,
            self.layers,
            self.parameters,
            self.period,
            self.context,
            *(self.verdicts.get(route, "") for route in ROUTES),
            self.why,
        )
        return row_of(cells)


def row_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head() -> list[str]:
    right = "---:"
    return [row_of(HEAD), row_of(["---"] * 2 + [right] * 4 + ["---"] * 4)]


def committed(page: Path = PAGE) -> dict[tuple[str, str], str]:
    """Return the rows of the page by network and package."""
    found = BLOCK.search(page.read_text())
    assert found is not None, f"{page} has no marks of the zoo"
    rows = [line for line in found.group().splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {(each[0], each[1]): row for each, row in zip(cells, rows, strict=True)}


def written(entries: Sequence[Entry], versions: Mapping[str, str], page: Path = PAGE) -> None:
    """Put a table into the page, and the versions of packages below it."""
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [*head(), *(entry.row for entry in entries), "", f"Versions: {said}."]
    page.write_text(BLOCK.sub(lambda _: "\n".join(lines) + "\n", page.read_text()))
