"""Keep the rows of the groups of a result file that a run does not measure."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from benchmarks.harness.results import CURRENT, Result, read

OF_RUN = ("date", "commit", "load")  # of the header: what differs between runs on one machine


def merge(result: Result, path: Path | None, measured: Collection[str]) -> None:
    """Add the rows of an earlier file, if it exists, except those of the groups in `measured`.

    "earlier" in the header then has date, commit and load of the run that measured each of the groups kept.

    path  the file; None: the current result of that benchmark on that machine.
    """
    path = path or CURRENT / f"{result.benchmark}-{result.machine}.json"
    if not path.exists():
        return
    old = read(path)
    result.rows += [row for row in old.rows if row.group not in measured]
    result.left_out += [line for line in old.left_out if not line.startswith(tuple(measured))]
    then = {key: old.header[key] for key in OF_RUN if key in old.header}
    before = old.header.get("earlier", {})
    earlier = {row.group: before.get(row.group, then) for row in old.rows if row.group not in measured}
    result.header = {**result.header, "earlier": earlier}
