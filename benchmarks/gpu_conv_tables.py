"""Make tables of `gpu_convs` results."""

from __future__ import annotations

from benchmarks.harness import markdown
from benchmarks.harness.results import Program, Result, Results, Row

COMMAND = "gpu_convs"
LEGEND = (
    "*fp16, channels last, microseconds of the device, medians of interleaved rounds. Shares are of {:.0f} TFLOP/s of "
    "tensor cores, or of a copy's {:.1f} TB/s where that takes longer*"
)


def fastest(rows: list[Row], *, peer: bool) -> Row | None:
    """Return the fastest method of znnpy, or of others."""
    found = [row for row in rows if row.values and row.subject.startswith("gpu.") != peer]
    return min(found, key=lambda row: row.median, default=None)


def layers_table(results: Results) -> str:
    """Return a table for each machine."""
    found, parts = [r for r in results.get("gpu_convs", ()) if r.of_group("layers")], []
    for result in found:
        rows = []
        for case, measured in result.cases("layers"):
            own, peer = fastest(measured, peer=False), fastest(measured, peer=True)
            if own is None:
                continue
            share = f"{own.facts['share']:.2f} {own.facts['bound']}" if "share" in own.facts else "-"
            rows.append(
                (
                    case.removesuffix(" fp16").removesuffix(" none"),
                    f"`{own.subject.removeprefix('gpu.graph_conv.')}`",
                    markdown.number(own.facts["us"]),
                    markdown.number(own.facts["tflops"]),
                    share,
                    "-" if peer is None else markdown.number(peer.facts["us"]),
                    "-" if peer is None else markdown.times(peer.median / own.median),
                )
            )
        head = ("layer", "method", "us", "TFLOP/s", "share", "cuDNN", "times as fast")
        legend = LEGEND.format(
            (result.header["peak_flops"] or 0) / 1e12, (result.header["copy_bytes_per_second"] or 0) / 1e12
        )
        parts.append(f"{markdown.table(head, rows, left=2)}\n\n{legend}")
    return markdown.sections(found, parts, COMMAND, ("layers",))


def headline(result: Result) -> str:
    """Return the speed of a layer of 64 maps."""
    for case, measured in result.cases("layers"):
        own, peer = fastest(measured, peer=False), fastest(measured, peer=True)
        if "64->64" in case and own:
            times = f", {markdown.times(peer.median / own.median)} cuDNN" if peer else ""
            return f"{case}: {markdown.number(own.facts['tflops'])} TFLOP/s{times}"
    return "-"


PROGRAM = Program(
    "gpu_convs",
    "How fast are convolutions of graphs on a GPU, beside cuDNN through PyTorch?",
    COMMAND,
    {"gpu-convs-layers": layers_table},
    headline,
)
