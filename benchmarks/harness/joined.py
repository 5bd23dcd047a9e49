"""A run that measures some groups of a benchmark keeps what the result file holds of the others."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from benchmarks.harness.results import CURRENT, Result, read


def join(result: Result, path: Path | None, anew: Collection[str]) -> None:
    """Add the rows of a file, if it is there, but for groups that are measured anew.

    The header then names date and commit of every run whose rows the file holds.

    path  None: the current result of that benchmark on that machine.
    """
    path = path or CURRENT / f"{result.benchmark}-{result.machine}.json"
    if not path.exists():
        return
    old = read(path)
    result.rows += [row for row in old.rows if row.group not in anew]
    result.left_out += [line for line in old.left_out if not line.startswith(tuple(anew))]
    earlier = [*old.header.get("joined", ()), {key: old.header[key] for key in ("date", "commit")}]
    result.header = {**result.header, "joined": earlier}
