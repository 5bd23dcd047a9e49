"""Files of `papers.py`, and what is made from them.

    python benchmarks/papers_files.py RESULT.json ...    tables and pictures once more, without a GPU

A file has a list of figures for each case and each competitor, in the order of `case_columns` and `row_columns`.
Microseconds are those of every round where somebody is the fastest of a side, and otherwise the least, the median and
the most. Of cuDNN's plans the fastest few are named, the others counted as `others`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import papers_pictures
from layers_gpu import MAX_ERROR
from papers_cases import Paper
from papers_lines import lines
from papers_tables import CUDNN, INEXACT, TABLES, Case, Match, Row, against, match

from znnpy.shapes import PRECISIONS

WRONG = 2e-2  # rms error, in any precision: beyond, a plan of cuDNN's is not inexact, but wrong
KEPT = {CUDNN: 2, INEXACT: 1}  # the fastest of each that are named; of others all are
DIGITS, TABLE_DIGITS = 6, 8  # of microseconds, and of what is made from them
CASE_COLUMNS = tuple(field.name for field in fields(Case))
ROW_COLUMNS = ("who", "name", "variant", "error", "scratch_bytes", "us")


@dataclass(slots=True)
class Result:
    """Everything of one experiment."""

    paper: Paper
    header: dict[str, Any]
    peaks: dict[str, float | None]  # operations a second, by precision
    matches: list[Match]
    left_out: list[str]  # no time, no memory
    wrong: list[str]  # of cuDNN's
    void: list[str]  # of ours

    @property
    def table(self) -> dict[str, Any]:
        return TABLES[self.paper](self.matches, self.peaks)

    def words(self) -> list[str]:
        """The table as it is printed, and against whom."""
        return [*against(self.matches), *lines(self.paper, self.table)]

    def draw(self, path: Path) -> None:
        card = f"{self.header['gpu']['name']}, {self.header['date'][:10]}"
        papers_pictures.draw(self.paper, path, self.matches, self.table, card, self.peaks.get("fp32"))


def write(out: Path, result: Result) -> None:
    """A line for each case, and for each part of the table."""
    told = {
        "header": result.header,
        "paper": result.paper,
        "against": against(result.matches),
        "errors_allowed": {precision: MAX_ERROR[precision] for precision in PRECISIONS} | {"inexact": WRONG},
        "peak_flops": result.peaks,
        "left_out": result.left_out,
        "wrong": result.wrong,
        "void": result.void,
    }
    table = [f"{json.dumps(key)}: {json.dumps(rounded(value, TABLE_DIGITS))}" for key, value in result.table.items()]
    cases = [json.dumps(_told(kept(m) if result.paper != "first_principles" else m)) for m in result.matches]
    columns = [f'"{what}_columns": {json.dumps(names)}' for what, names in
               (("case", [*CASE_COLUMNS, "rows"]), ("row", ROW_COLUMNS))]  # fmt: skip
    parts = [json.dumps(told, indent=1)[:-2], f' "table": {{\n  {_joined(table, 2)}}}', *(f" {one}" for one in columns)]
    out.parent.mkdir(exist_ok=True)
    out.write_text(",\n".join(parts) + f',\n "cases": [\n  {_joined(cases, 2)}]\n}}\n')


def read(path: Path) -> Result:
    found = json.loads(path.read_text())
    matches = []
    for told in found["cases"]:
        case = dict(zip(found["case_columns"], told, strict=True))
        rows = [_row(dict(zip(found["row_columns"], row, strict=True))) for row in case.pop("rows")]
        matches.append(match(Case(**case | {"too_large": tuple(case["too_large"])}), rows))
    return Result(
        found["paper"], found["header"], found["peak_flops"], matches, found["left_out"], found["wrong"], found["void"]
    )


def kept(found: Match) -> Match:
    """Without cuDNN's slower plans, which are counted."""
    rows, dropped = [], 0
    for row in found.rows:
        faster = sum(other.who == row.who and other.us < row.us for other in found.rows)
        if faster < KEPT.get(row.who, len(found.rows)):
            rows.append(row)
        else:
            dropped += 1
    return match(replace(found.case, others=found.case.others + dropped), rows)


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """All figures within."""
    match value:
        case float():
            return float(f"{value:.{digits}g}")
        case dict():
            return {key: rounded(part, digits) for key, part in value.items()}
        case list() | tuple():
            return [rounded(part, digits) for part in value]
    return value


def _told(found: Match) -> list[Any]:
    """Rows from the fastest on: figures that are alike once they are rounded stay in order."""
    fastest: dict[str, Row] = {}
    rows = []
    for row in sorted(found.rows, key=lambda row: row.us):
        fastest.setdefault(row.who, row)
        spent = row.seconds
        if row is not fastest[row.who] and len(spent) > 1:
            spent = min(spent), median(spent), max(spent)
        us = [1e6 * seconds for seconds in spent]
        rows.append([row.who, row.name, row.variant, row.error, row.scratch_bytes, rounded(us)])
    return [*(getattr(found.case, name) for name in CASE_COLUMNS), rows]


def _row(told: dict[str, Any]) -> Row:
    return Row(**told | {"seconds": tuple(us / 1e6 for us in told.pop("us"))})


def _joined(parts: Sequence[str], indent: int) -> str:
    return f",\n{indent * ' '}".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args(arguments).results:
        result = read(path)
        write(path, result)
        result.draw(path.with_suffix(".png"))
        print("\n".join([str(path), *result.words()]))


if __name__ == "__main__":
    main()
