"""Make tables of `windows` results."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks.harness import markdown
from benchmarks.harness.results import Program, Result, Results, Row, ratio_of

COMMAND = "windows"
OURS = "znnpy"
PEERS_LEGEND = (
    "*from an array to an array; s: median of the runs; of planning: the part in which znnpy plans and prepares "
    "weights, which counts; znnpy faster by: in the same precision, bold where every round agrees; difference: the "
    "largest one from PyTorch in fp32, relative to its largest value*"
)
OPERATIONS_LEGEND = "*seconds of one window, of a run that is traced; load and store: voxels in and out of the network*"
MEMORY_LEGEND = (
    "*from file to file, labels out; memory: peak of the process over the promise; logits: what nnU-Net holds for the "
    "sums of all maps in float16, without windows, weights and network*"
)


def peers_table(results: Results) -> str:
    """Return a table for each machine of the speeds over a volume, beside MONAI's."""
    found, parts = [r for r in results.get("windows", ()) if r.of_group("peers")], []
    for result in found:
        exact = {(row.case, row.subject): row for row in result.of_group("exactness") if row.values}
        lines = []
        for case, rows in result.cases("peers"):
            ours = {_precision(row): row for row in rows if row.subject.startswith(OURS) and row.values}
            lines += [_peer(case, row, ours, exact.get((case, row.subject))) for row in rows]
        head = ("network", "", "voxels/s", "s", "of planning", "windows", "memory", "znnpy faster by", "difference")
        parts.append(f"{markdown.table(head, lines, left=2)}\n\n{PEERS_LEGEND}")
    return markdown.sections(found, parts, COMMAND, ("peers", "exactness"))


def _peer(case: str, row: Row, ours: Mapping[str, Row], exact: Row | None) -> tuple[str, ...]:
    if not row.values:
        return (case, row.subject, row.failure or "", "", "", "", "", "", "")
    mine, stages = ours.get(_precision(row)), row.facts.get("stage_seconds")
    return (
        case,
        row.subject,
        markdown.speed(row.median),
        markdown.number(median(row.facts["seconds"])),
        "-" if stages is None else markdown.number(stages["planning"] + stages["preparing"]),
        str(row.facts["windows"]),
        f"{row.facts['peak_bytes'] / 2**20:,.0f} MiB",
        "-" if mine is None or mine is row else _times(mine, row),
        "-" if exact is None else f"{exact.median:.1e}",
    )


def _times(mine: Row, row: Row) -> str:
    ratio = ratio_of(mine.values, row.values)
    agreed = ratio.is_clear and min(len(mine.values), len(row.values)) > 1
    return f"**{markdown.times(ratio.median)}**" if agreed else markdown.times(ratio.median)


def _precision(row: Row) -> str:
    return row.subject.split()[-1]


def operations_table(results: Results) -> str:
    """Return a table for each machine of the seconds that each kind of operation takes of a window."""
    found, parts = [r for r in results.get("windows", ()) if r.of_group("operations")], []
    for result in found:
        lines = []
        for case, rows in result.cases("operations"):
            all_kinds = sum(row.median for row in rows if row.values)
            for row in rows:
                if not row.values:
                    lines.append((case, row.subject, row.failure or "", "", ""))
                    continue
                count, share = f"{row.facts['operations']:.3g}", f"{row.median / all_kinds:.0%}"
                lines.append((case, row.subject, count, markdown.number(row.median), share))
        head = ("network", "kind", "operations", "s", "share")
        parts.append(f"{markdown.table(head, lines, left=2)}\n\n{OPERATIONS_LEGEND}")
    return markdown.sections(found, parts, COMMAND, ("operations",))


def memory_table(results: Results) -> str:
    """Return a table for each machine of labels of many classes within a limit of memory."""
    found, parts = [r for r in results.get("windows", ()) if r.of_group("memory")], []
    for result in found:
        lines = []
        for row in result.of_group("memory"):
            facts = row.facts
            logits = f"{facts['nnunet_logits_bytes'] / 1e9:.3g} GB"
            if not row.values:
                lines.append((row.case, row.subject, row.failure or "", "", logits))
                continue
            promised = facts["promised_bytes"]
            held = f"{facts['peak_bytes'] / promised:.2f} of {promised / 2**20:,.0f} MiB"
            lines.append((row.case, row.subject, markdown.number(row.median), held, logits))
        head = ("network", "", "s", "memory", "logits")
        parts.append(f"{markdown.table(head, lines, left=2)}\n\n{MEMORY_LEGEND}")
    return markdown.sections(found, parts, f"{COMMAND} --group memory", ("memory",))


def headline(result: Result) -> str:
    """Return the speed of the fastest run, beside the fastest peer in the same case."""
    runs = [row for row in result.of_group("peers") if row.values]
    best = max((row for row in runs if row.subject.startswith(OURS)), key=lambda row: row.median, default=None)
    if best is None:
        return "-"
    text = f"{best.case}: {markdown.speed(best.median)} voxels/s"
    others = [row for row in runs if row.case == best.case and not row.subject.startswith(OURS)]
    peer = max(others, key=lambda row: row.median, default=None)
    return text if peer is None else f"{text}, {markdown.times(best.median / peer.median)} as fast as {peer.subject}"


PROGRAM = Program(
    "windows",
    "How fast are U-Nets in windows with half overlap, beside MONAI with PyTorch and OpenVINO?",
    COMMAND,
    {"windows-peers": peers_table, "windows-operations": operations_table, "windows-memory": memory_table},
    headline,
)
