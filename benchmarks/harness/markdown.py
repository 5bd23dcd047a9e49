"""Format Markdown tables and the numbers in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.results import Result

NOTHING = "No current result: run `python -m benchmarks {command}`."


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are aligned left and all others right."""
    lines = [head, [":--" if column < left else "--:" for column in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, without exponent: "0.0123", "1,230"."""
    if value != value or value in (float("inf"), float("-inf")):
        return "-"
    if value == 0:
        return "0"
    size = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    if size >= digits:
        rounded = round(value, digits - size)
        return f"{rounded:,.0f}"
    if size:
        return f"{value:.{digits - size}f}"
    return f"{float(f'{value:.{digits}g}'):.10f}".rstrip("0")


def speed(voxels_per_second: float) -> str:
    """Return a speed in a unit that fits: "31 k", "4.2 M"."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if voxels_per_second >= factor:
            return f"{number(voxels_per_second / factor)} {unit}"
    return number(voxels_per_second)


def times(ratio: float) -> str:
    """Return a ratio: "2.4x"."""
    return f"{ratio:.2g}x" if ratio < 9.95 else f"{ratio:.0f}x"


def source_of(result: Result, groups: Collection[str] = ()) -> str:
    """Return a line that says where and when the groups of a table were measured; without groups, all of them."""
    header = result.header
    where = header["gpu"]["name"] if header.get("gpu") else f"{header['processor']}, {header['cores']} cores"
    measured = {row.group: None for row in result.rows if not groups or row.group in groups}
    settings = [f"{name}={value}" for name, value in header.get("settings", {}).items()]
    runs = dict.fromkeys(_run_of({**header, **header.get("earlier", {}).get(group, {})}) for group in measured)
    file = f"`results/current/{result.benchmark}-{result.machine}.json`"
    return f"*{'; '.join((where, *(runs or [_run_of(header)]), *settings, file))}*"


def _run_of(header: Mapping[str, Any]) -> str:
    """Return date and commit of a run, and the load of the machine before it if other programs ran."""
    busy = f", while other programs ran (load {header['load']})" if header.get("load", 0) > header["cores"] / 2 else ""
    return f"{str(header['date'])[:10]}, commit {header['commit']}{busy}"


def sections(results: Sequence[Result], parts: Iterable[str], command: str, groups: Collection[str] = ()) -> str:
    """Join the tables of all results, each with its source; if there is no result, name the command to run.

    groups  the groups of rows that the tables show; none: all.
    """
    made = [f"{part}\n\n{source_of(result, groups)}" for result, part in zip(results, parts, strict=True) if part]
    return "\n\n".join(made) or NOTHING.format(command=command)
