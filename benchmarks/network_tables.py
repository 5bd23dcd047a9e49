"""Make tables and plots of `networks` results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import markdown, plots
from benchmarks.harness.results import Result, Results, Row, device_of

# Voxels/s of ZNNi on `ORIGINAL_MACHINE`; on a GPU those of the paper's Table V.
ORIGINAL: dict[str, dict[str, float]] = {
    "cpu": {"n337": 30_804, "n537": 7_908, "n726": 23_883, "n926": 12_497},
    "gpu": {"n337": 1.06e6, "n537": 0.33e6, "n726": 0.47e6, "n926": 0.375e6},
}
ORIGINAL_MACHINE = {"cpu": "its code of 2016 on 2 Zen 5 cores", "gpu": "its paper of 2016, a Titan X and 72 CPU cores"}
LEGEND = (
    "*times the plan: measured over predicted speed; peer: PyTorch on the same machine, in the way that is fastest "
    "there; ZNNi: {}*"
)


def fastest_of(rows: Sequence[Row], start: str) -> Row | None:
    """Return the fastest row whose subject begins with `start`."""
    found = [row for row in rows if row.values and row.subject.startswith(start)]
    return max(found, key=lambda row: row.median, default=None)


def of_device(results: Results, device: str, group: str) -> list[Result]:
    """Return the results of a device that have a group."""
    return [r for r in results.get("networks", ()) if device_of(r) == device and r.of_group(group)]


def networks_table(device: str, results: Results) -> str:
    """Return a table for each machine: znnpy in each precision, PyTorch's best, ratios."""
    found, parts = of_device(results, device, "networks"), []
    for result in found:
        rows = []
        for case, of_case in result.cases("networks"):
            peer = fastest_of(of_case, "PyTorch")
            original = ORIGINAL[device].get(case)
            for row in of_case:
                if not row.subject.startswith("znnpy") or not row.values:
                    continue
                speed, planned = row.median, row.facts["planned"]
                of_plan = f"{speed / planned:.2f}" if planned else "-"
                best_peer = f"{markdown.speed(peer.median)} ({peer.subject})" if peer else "-"
                times = [markdown.times(speed / other) if other else "-" for other in (peer and peer.median, original)]
                volume = f"{row.facts['side']}^3"
                rows.append((case, row.subject, markdown.speed(speed), volume, of_plan, best_peer, *times))
        head = ("network", "", "voxels/s", "volume", "times the plan", "fastest peer", "times the peer", "times ZNNi")
        parts.append(f"{markdown.table(head, rows, left=2)}\n\n{LEGEND.format(ORIGINAL_MACHINE[device])}")
    return markdown.sections(found, parts, f"networks --device {device}", ("networks",))


def pairs_table(group: str, device: str, results: Results) -> str:
    """Return a table for each machine with a column for every subject of a group."""
    found, parts = of_device(results, device, group), []
    for result in found:
        subjects = list(dict.fromkeys(row.subject for row in result.of_group(group)))
        rows = []
        for case, of_case in result.cases(group):
            by = {row.subject: row for row in of_case}
            cells = [markdown.speed(by[s].median) if s in by and by[s].values else "-" for s in subjects]
            rows.append((case, *cells))
        parts.append(markdown.table(("voxels/s", *subjects), rows))
    return markdown.sections(found, parts, f"networks --device {device} -g {group}", (group,))


def exactness_table(results: Results) -> str:
    """Return the largest and the rms error of every network and method, on every machine."""
    found = [result for result in results.get("networks", ()) if result.of_group("exactness")]
    parts = []
    for result in found:
        rows = [(row.case, row.subject, f"{row.median:.1e}", f"{row.facts['rms']:.1e}")
                for row in result.of_group("exactness") if row.values]  # fmt: skip
        parts.append(markdown.table(("network", "", "largest error", "rms error"), rows, left=2))
    return markdown.sections(found, parts, "networks -g exactness", ("exactness",))


def headline(result: Result) -> str:
    """Return the speed of the first network, and how many times as fast as PyTorch it is."""
    for case, rows in result.cases("networks"):
        if ours := fastest_of(rows, "znnpy"):
            peer = fastest_of(rows, "PyTorch")
            times = f", {markdown.times(ours.median / peer.median)} as fast as {peer.subject}" if peer else ""
            return f"{case}: {markdown.speed(ours.median)} voxels/s{times}"
    return "-"


def draw(results: Results, path: Path) -> None:
    """Draw all networks of all machines as bars."""
    groups = []
    for result in results.get("networks", ()):
        for case, rows in result.cases("networks"):
            shown = sorted((row for row in rows if row.values), key=lambda row: -row.median)
            bars = [
                plots.Bar(r.subject, r.median, markdown.speed(r.median), r.subject.startswith("znnpy")) for r in shown
            ]
            groups.append((f"{result.machine}: {case}", bars))
    plots.bars(path, "Dense inference, output voxels per second", groups)
