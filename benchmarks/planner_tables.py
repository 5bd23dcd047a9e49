"""Make tables and statistics of `planner` results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from statistics import median

from benchmarks.harness import markdown
from benchmarks.harness.results import Result, Results, Row

MARGIN = 0.03  # a rival beats the pick if it is faster by more than this share, in every round
COMMAND = "planner [--device gpu]"
STATES = ("assumed", "calibrated", "measured")  # origins of the costs
ORIGINS = dict(zip(STATES, ("`--no-calibrate`", "calibrated", "after `znnpy measure`"), strict=True))


def error_of(row: Row) -> float:
    """Return the error of a prediction as a share of the measurement: 0.25 for 1.25 or 0.8 times it."""
    return max(row.median, 1 / row.median) - 1 if row.values else inf


def beaten_by(rows: Sequence[Row]) -> list[Row]:
    """Return the rivals that were faster than the pick in every round, by more than MARGIN in the median."""
    return [row for row in rows if row.values and row.median > 1 + MARGIN and min(row.values) > 1]


def kept(row: Row) -> bool:
    """Return whether no run took more memory than its plan promised."""
    return bool(row.values) and min(row.values) >= 1


def speed_table(result: Result) -> str:
    """Return a table of predicted over measured speed, by the origin of the costs."""
    lines = []
    for case, rows in result.cases("predict"):
        found = {row.subject: row for row in rows if row.values}
        fastest = max((median(row.facts["voxels_per_second"]) for row in found.values()), default=0.0)
        figures = [markdown.number(found[state].median) if state in found else "-" for state in STATES]
        lines.append([case, *figures, markdown.speed(fastest) if found else "-"])
    head = ["network, volume, limit", "assumed", "calibrated before", "after `znnpy measure`", "voxels/s"]
    return markdown.table(head, lines) if lines else ""


def first_table(result: Result) -> str:
    """Return a table of the planned and the measured speed of first plans, by the origin of the costs."""
    lines = []
    for case, rows in result.cases("first"):
        for row in rows:
            if row.values:
                speeds = markdown.speed(row.facts["predicted"]), markdown.speed(median(row.facts["voxels_per_second"]))
                seconds = markdown.number(row.facts["planning_wall_seconds"])
                lines.append([case, ORIGINS[row.subject], *speeds, markdown.number(row.median), seconds])
    head = ["network, volume, limit", "costs", "planned voxels/s", "measured", "planned/measured", "s of planning"]
    return markdown.table(head, lines, left=2) if lines else ""


def regret_table(result: Result) -> str:
    """Return a table of the best rival of each kind, relative to the speed of the pick."""
    lines = []
    for case, rows in result.cases("regret"):
        for kind in ("uniform", "without", "neighbour", "random"):
            some = [row for row in rows if row.facts.get("kind") == kind]
            ran = [row for row in some if row.values]
            if not some:
                continue
            best = max(ran, key=lambda row: row.median, default=None)
            figure = [markdown.number(best.median), best.subject] if best else ["-", "-"]
            lines.append([case, kind, str(len(some)), str(len(ran)), *figure, str(len(beaten_by(some)))])
    head = [
        "network, volume, limit",
        "rivals",
        "planned",
        "run",
        "best, times the pick",
        "which",
        "faster in all rounds",
    ]
    return markdown.table(head, lines, left=2) if lines else ""


def memory_table(result: Result) -> str:
    """Return a table of promised over peak memory, of RAM and of VRAM."""
    lines = []
    for what in ("RAM", "VRAM"):
        rows = [row for row in result.of_group("memory") if row.case.endswith(f", {what}") and row.values]
        if rows:
            values = sorted(min(row.values) for row in rows)
            numbers = [markdown.number(value) for value in (values[0], median(values), values[-1])]
            lines.append([what, str(len(rows)), str(sum(map(kept, rows))), *numbers])
    head = ["memory", "plans", "kept", "least promise/peak", "median", "largest"]
    return markdown.table(head, lines) if lines else ""


def time_table(result: Result) -> str:
    """Return a table of planning times, relative to another tree if one was measured."""
    lines = []
    for case, rows in result.cases("time"):
        by_tree = {row.subject: row for row in rows if row.values}
        here, other = by_tree.get("here"), by_tree.get("against")
        if here:
            spread = f"{markdown.number(min(here.values))} to {markdown.number(max(here.values))}"
            ratio = markdown.number(here.median / other.median) if other else "-"
            lines.append([case, markdown.number(here.median), spread, ratio])
    head = ["network, volume, limit", "s", "least to largest", "times the other tree's"]
    return markdown.table(head, lines) if lines else ""


def _of_all(table: Callable[[Result], str], group: str) -> Callable[[Results], str]:
    def made(results: Results) -> str:
        some = results.get("planner", ())
        return markdown.sections(some, map(table, some), COMMAND, (group,))

    return made


TABLES: Mapping[str, Callable[[Results], str]] = {
    "planner-first": _of_all(first_table, "first"),
    "planner-speed": _of_all(speed_table, "predict"),
    "planner-regret": _of_all(regret_table, "regret"),
    "planner-memory": _of_all(memory_table, "memory"),
    "planner-time": _of_all(time_table, "time"),
}


def headline(result: Result) -> str:
    """Return the median error of predicted speeds, broken promises, and rivals that beat the pick."""
    return ", ".join(_headlines(result)) or "nothing measured"


def _headlines(result: Result) -> Iterator[str]:
    for group, name in (("first", "first plans"), ("predict", "measured costs")):
        rows = [row for row in result.of_group(group) if row.values]
        rows = [row for row in rows if row.subject == ("calibrated" if group == "first" else "measured")]
        if rows:
            yield f"{name} off by {100 * median(map(error_of, rows)):.0f} %"
    promises = [row for row in result.of_group("memory") if row.values]
    if promises:
        yield f"{sum(not kept(row) for row in promises)} of {len(promises)} promises of memory broken"
    rivals = [row for row in result.of_group("regret") if row.values]
    if rivals:
        yield f"{len(beaten_by(rivals))} of {len(rivals)} rivals faster"
