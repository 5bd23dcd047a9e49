"""Make tables of `graphs` results."""

from __future__ import annotations

from benchmarks.harness import markdown
from benchmarks.harness.results import Program, Result, Results, Row

COMMAND = "graphs"
LEGEND = (
    "*{} threads; everything counted: planning, reading and writing, from file to file; memory: peak over promise; "
    "work: what was computed over what the output needs*"
)
PEER_LEGEND = (
    "*{} threads each; single windows of PyTorch, channels last; for the whole volume times the number of windows with "
    "half overlap, or of tiles of 128 with an exact halo, without blending, reading and writing*"
)


def runs_table(results: Results) -> str:
    """Return a table for each machine of whole runs within limits of memory."""
    found, parts = [r for r in results.get("graphs", ()) if r.of_group("runs")], []
    for result in found:
        rows = []
        for row in result.of_group("runs"):
            if not row.values:
                rows.append((row.case, row.subject, row.failure or "", "", "", "", ""))
                continue
            facts = row.facts
            computing = facts["voxels"] / facts["computing"]
            memory = (
                f"{facts['peak_bytes'] / facts['promised_bytes']:.2f} of {facts['promised_bytes'] / 2**20:,.0f} MiB"
            )
            planned = facts["predicted_seconds"] / facts["computing"]
            rows.append(
                (row.case, row.subject, markdown.speed(row.median), markdown.speed(computing), f"{planned:.2f}", memory,
                 f"{facts['waste']:.2f}")
            )  # fmt: skip
        head = ("network", "", "voxels/s", "of computing", "times the plan", "memory", "work")
        parts.append(f"{markdown.table(head, rows, left=2)}\n\n{LEGEND.format(result.header['threads'])}")
    return markdown.sections(found, parts, COMMAND, ("runs",))


def peers_table(results: Results) -> str:
    """Return a table for each machine of PyTorch, window by window."""
    found, parts = [r for r in results.get("graphs", ()) if r.of_group("windows")], []
    for result in found:
        rows = [
            (row.group, row.case, row.subject, markdown.speed(row.median), _times(result, row))
            for group in ("windows", "half overlap", "exact halo")
            for row in result.of_group(group)
            if row.values
        ]
        head = ("", "network", "", "voxels/s", "znnpy is faster by (fp32, bf16)")
        parts.append(f"{markdown.table(head, rows, left=3)}\n\n{PEER_LEGEND.format(result.header['threads'])}")
    return markdown.sections(found, parts, COMMAND, ("windows",))


def _times(result: Result, peer: Row) -> str:
    """Return how many times as fast znnpy's fastest run of the same network is, in fp32 and in bf16."""
    name, found = peer.case.split(",")[0], []
    for subject in ("znnpy fp32", "znnpy bf16"):
        mine = [row for row in result.of_group("runs") if row.values and row.case.startswith(f"{name} ")]
        speeds = [row.median for row in mine if row.subject == subject]
        found += [markdown.times(max(speeds) / peer.median)] if speeds else []
    return ", ".join(found) or "-"


def layers_table(results: Results) -> str:
    """Return a table for each machine of the layers of a plan, and the share of the machine that each reaches."""
    found, parts = [r for r in results.get("graphs", ()) if r.of_group("layers")], []
    for result in found:
        rows = []
        for row in result.of_group("layers"):
            if not row.values:
                continue
            facts = row.facts
            rows.append(
                (row.case, row.subject.split()[0], f"{1e3 * row.median:,.1f}", f"{facts['bytes'] / 2**20:,.0f}",
                 f"{facts['multiply_adds'] / 1e9:,.1f}", f"{facts['share']:.0%}")
            )  # fmt: skip
        rates = (
            f"*{_rates(result)}. Share: the least time at these rates over the measured one; it is above 100 % where "
            "an operation moves memory faster than the copy, which reads each line that it writes*"
        )
        head = ("layer", "primitive", "ms", "MiB", "Gmultiply-adds", "share")
        parts.append(f"{markdown.table(head, rows, left=2)}\n\n{rates}")
    return markdown.sections(found, parts, COMMAND, ("layers",))


def _rates(result: Result) -> str:
    """Return the rates that were measured before the layers of each network."""
    measured = {row.case.split()[0]: row.facts for row in result.of_group("layers") if row.values}
    return "; ".join(
        f"{name}: copy {facts['copy_bytes_per_second'] / 1e9:,.0f} GB/s, matrix product "
        f"{facts['sgemm_flops'] / 1e9:,.0f} GFLOP/s"
        for name, facts in measured.items()
    )


def headline(result: Result) -> str:
    """Return the speed of the fastest whole run."""
    runs = [row for row in result.of_group("runs") if row.values]
    best = max(runs, key=lambda row: row.median, default=None)
    return "-" if best is None else f"{best.case}: {markdown.speed(best.median)} voxels/s"


PROGRAM = Program(
    "graphs",
    "How fast are U-Nets over a volume, beside PyTorch window by window?",
    COMMAND,
    {"graphs-runs": runs_table, "graphs-peers": peers_table, "graphs-layers": layers_table},
    headline,
)
