"""Make tables of `units` results."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import markdown
from benchmarks.harness.results import Program, Result, Results, Row

COMMAND = "units"
LEGEND = (
    "*{} threads; ns a voxel of output, medians of interleaved rounds. Shares are of the unit's peak in registers, and "
    "of what it reaches with factors in L1, both measured between the layers: {} and {} GFLOP/s. Six and three are "
    "products of values divided into three or two bfloat16; float32 is the fastest other method*"
)


def layers_table(results: Results) -> str:
    """Return a table for each machine of layers on a unit, beside float32 and PyTorch."""
    found, parts = [r for r in results.get("units", ()) if r.of_group("layers")], []
    for result in found:
        unit, rows = result.header["unit"], []
        for case, measured in result.cases("layers"):
            by = {row.subject: row for row in measured if row.values}
            own, peer = by.get(f"{unit} bf16"), by.get("PyTorch bf16")
            float32 = [row for row in measured if row.subject.startswith("cpu.") and row.values]
            if own is None:
                continue
            rows.append(
                (
                    case.removesuffix(" none"),
                    markdown.number(own.median),
                    f"{own.facts['share_of_peak']:.2f}, {own.facts['share_of_products']:.2f}",
                    _ns(by.get(f"{unit} bf16x2")),
                    _ns(by.get(f"{unit} fp32")),
                    markdown.number(min(row.median for row in float32)) if float32 else "-",
                    _ns(peer),
                    _ns(by.get("PyTorch fp32")),
                    markdown.times(peer.median / own.median) if peer else "-",
                )
            )
        head = ("layer", "bf16", "shares", "three", "six", "float32", "PyTorch bf16", "fp32", "bf16 faster by")
        peaks = [markdown.number(_limit(result, name)) for name in ("peak of", "products of")]
        legend = LEGEND.format(result.header["threads"], *peaks)
        parts.append(f"{markdown.table(head, rows)}\n\n{legend}")
    return markdown.sections(found, parts, COMMAND, ("layers",))


def _ns(row: Row | None) -> str:
    return "-" if row is None else markdown.number(row.median)


def _limit(result: Result, name: str) -> float:
    """Return the median of a limit over all layers."""
    speeds = sorted(speed for row in result.of_group("layers") if row.subject.startswith(name) for speed in row.values)
    return speeds[len(speeds) // 2] if speeds else float("nan")


def errors_table(results: Results) -> str:
    """Return a table for each machine of the rms errors of layers, relative to their rms results."""
    found, parts = [r for r in results.get("units", ()) if r.of_group("errors")], []
    for result in found:
        rows: list[Sequence[str]] = []
        for case, measured in result.cases("errors"):
            by = {row.subject.split()[-1]: row for row in measured}
            rows.append(
                (case.removesuffix(" none"), *(f"{by[name].median:.1e}" for name in ("bf16", "bf16x2", "fp32")))
            )
        parts.append(markdown.table(("layer", "bf16", "three products", "six products"), rows))
    return markdown.sections(found, parts, COMMAND, ("errors",))


def headline(result: Result) -> str:
    """Return how much faster than PyTorch a layer of 64 maps is."""
    for case, measured in result.cases("layers"):
        by = {row.subject: row for row in measured if row.values}
        own, peer = by.get(f"{result.header['unit']} bf16"), by.get("PyTorch bf16")
        if "64->64" in case and own and peer:
            return f"{case}: {markdown.times(peer.median / own.median)} PyTorch bf16"
    return "-"


PROGRAM = Program(
    "units",
    "How fast are convolutions on AMX and AVX512-BF16, beside float32 methods and PyTorch?",
    COMMAND,
    {"units-layers": layers_table, "units-errors": errors_table},
    headline,
)
