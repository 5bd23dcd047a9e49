"""Make tables of `gpu_graphs` results."""

from __future__ import annotations

from benchmarks.harness import markdown
from benchmarks.harness.results import Program, Result, Results

COMMAND = "gpu_graphs"
KITS_VOXELS = 32.9e6  # mean of the volumes of MLPerf's set
LEGEND = (
    "*from an array to an array, uploads and downloads counted; planning and compiling not; samples: volumes of "
    "32.9 million voxels, the mean of MLPerf's set; PyTorch: single windows, channels last, times the number of "
    "windows with half overlap, without blending and transfers*"
)


def table(results: Results) -> str:
    """Return a table for each card of whole runs, and of PyTorch's windows."""
    found, parts = [r for r in results.get(COMMAND, ()) if r.of_group("runs")], []
    for result in found:
        rows = []
        for row in (*result.of_group("runs"), *result.of_group("half overlap")):
            if not row.values:
                rows.append((row.case, row.subject, row.failure or "", "", ""))
                continue
            samples = f"{row.median / KITS_VOXELS:.2f}" if "mlperf" in row.case else ""
            planned = row.facts.get("predicted_seconds")
            times = "" if planned is None else f"{planned / row.facts['computing']:.2f}"
            rows.append((row.case, row.subject, markdown.speed(row.median), samples, times))
        head = ("network", "", "voxels/s", "samples/s", "times the plan")
        parts.append(f"{markdown.table(head, rows, left=2)}\n\n{LEGEND}")
    return markdown.sections(found, parts, COMMAND, ("runs",))


def headline(result: Result) -> str:
    """Return the fastest speed of a whole run."""
    rows = [row for row in result.of_group("runs") if row.values]
    best = max(rows, key=lambda row: row.median, default=None)
    return "" if best is None else f"{best.case}, {best.subject}: {markdown.speed(best.median)} voxels/s"


PROGRAM = Program(
    name=COMMAND,
    question="How fast are U-Nets on a GPU, over a volume and in windows, and in PyTorch?",
    command=COMMAND,
    tables={"gpu-graphs": table},
    headline=headline,
)
