"""The schema of all results: a file holds the rows of one benchmark on one machine.

    {"schema": 1, "benchmark": "layers", "machine": "amd-epyc-2cores", "header": {..}, "left_out": [..], "rows": [..]}

A row is one subject in one case. Rows of one case are comparable with each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

SCHEMA = 1
CURRENT = Path(__file__).resolve().parents[1] / "results" / "current"


@dataclass(frozen=True)
class Row:
    """One subject in one case.

    group    part of the benchmark, such as "layers" or "pools".
    case     text that identifies what was measured among the cases of the group.
    subject  method or library, such as "cpu.conv.fft_tiled" or "PyTorch fp32".
    unit     unit of the values, such as "ns/voxel", "voxels/s" or "relative error".
    values   one value per round, in the order in which they were measured; empty after a failure.
    failure  reason why there is no value; None where there is one.
    facts    anything else worth keeping: numbers, text, lists and dictionaries of them.
    """

    group: str
    case: str
    subject: str
    unit: str
    values: tuple[float, ...] = ()
    failure: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a row that has neither values nor a reason for that, or both."""
        if bool(self.values) == (self.failure is not None):
            raise ValueError(f"a row needs values or a failure, and not both: {self}")

    @property
    def median(self) -> float:
        """Median of the values; NaN after a failure."""
        return median(self.values) if self.values else float("nan")

    @property
    def spread(self) -> float:
        """Half the distance from the least to the largest value, as a share of the median."""
        return (max(self.values) - min(self.values)) / 2 / self.median if self.values and self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """The ratio of one row's values to those of another.

    low, high  least and largest ratio of values of the same round.
    """

    median: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether every round agrees on which of the two is larger."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return `values` over `others`, both of interleaved rounds; ValueError if either has none."""
    if not values or not others:
        raise ValueError("a ratio needs values on both sides")
    rounds = [a / b if b else inf for a, b in zip(values, others, strict=False)]
    return Ratio(median(values) / median(others) if median(others) else inf, min(rounds), max(rounds))


@dataclass
class Result:
    """All rows of one benchmark on one machine.

    header    machine, versions, commit, command and time, as `harness.machine.header` gives them.
    left_out  cases that were not measured for lack of time.
    """

    benchmark: str
    machine: str
    header: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def of_group(self, group: str) -> list[Row]:
        """Return the rows of one group."""
        return [row for row in self.rows if row.group == group]

    def cases(self, group: str) -> Iterator[tuple[str, list[Row]]]:
        """Yield each case of a group with its rows, in the order in which they were measured."""
        rows = self.of_group(group)
        for case in dict.fromkeys(row.case for row in rows):
            yield case, [row for row in rows if row.case == case]

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows; those of the same group, case and subject replace older ones."""
        for row in rows:
            key = row.group, row.case, row.subject
            self.rows = [old for old in self.rows if (old.group, old.case, old.subject) != key]
            self.rows.append(row)

    def write(self, path: Path | None = None) -> Path:
        """Write the file in one step and return its path; None: `results/current/BENCHMARK-MACHINE.json`."""
        path = path or CURRENT / f"{self.benchmark}-{self.machine}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        content = {"schema": SCHEMA, **asdict(self)}
        rows = [json.dumps(row, default=list, allow_nan=False) for row in content.pop("rows")]
        head = json.dumps(content, indent=1, default=list, allow_nan=False)[:-2]  # text without the closing brace
        partial.write_text(f'{head},\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n")  # a line for each row
        os.replace(partial, path)
        return path


def read(path: Path) -> Result:
    """Read a result file; ValueError names what does not fit the schema."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is no result of schema {SCHEMA}")
    try:
        rows = [Row(**{**row, "values": tuple(row["values"])}) for row in found.pop("rows")]
        result = Result(rows=rows, **found)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not fit schema {SCHEMA}: {error}") from error
    if path.stem != f"{result.benchmark}-{result.machine}":
        raise ValueError(f"{path} holds {result.benchmark} on {result.machine}: the file's name must say so")
    return result


Results = Mapping[str, Sequence[Result]]  # results by benchmark, in the order of machine names


def current(folder: Path = CURRENT) -> Results:
    """Read all current results."""
    found: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        found.setdefault(result.benchmark, []).append(result)
    return found


def device_of(result: Result) -> str:
    """Return "gpu" or "cpu": the device that a result was measured on."""
    return "gpu" if result.header.get("gpu") else "cpu"


@dataclass(frozen=True)
class Program:
    """The description of a benchmark for `tables`; each program's module has one, called PROGRAM.

    name      name of the program and of its results.
    question  question that it answers, for the index.
    command   arguments of `python -m benchmarks`.
    tables    functions from all current results to Markdown, by the name of the marked block.
    headline  function that returns the most important figure of one result as short text.
    plots     functions that draw all current results into a file, by the name of the picture.
    """

    name: str
    question: str
    command: str
    tables: Mapping[str, Callable[[Results], str]]
    headline: Callable[[Result], str]
    plots: Mapping[str, Callable[[Results, Path], None]] = field(default_factory=dict)
