"""Pictures of what `papers.py` measured: speed-ups as curves, shares of the peak and milliseconds as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import bars
import curves
from papers_cases import CUDNN_SAYS, PASCAL_SAYS, Paper
from papers_tables import COPIED, CUDNN, OURS, Match

COLOURS = {OURS: bars.OURS, COPIED: bars.OURS_TOO, CUDNN: bars.PEER}


def draw(paper: Paper, path: Path, matches: Sequence[Match], table: dict[str, Any], card: str) -> None:
    """Write a PNG; of cudnn the largest batch alone."""
    match paper:
        case "cuconv":
            _speedups(path, "cuConv against cuDNN: times its speed, by batch", matches, "batch", card)
        case "pascal":
            _speedups(path, "Pascal's methods against cuDNN: times its speed, by side", matches, "side", card)
        case "cudnn":
            _shares(path, table, card)
        case "first_principles":
            _milliseconds(path, matches, card)


def _speedups(path: Path, title: str, matches: Sequence[Match], across: Literal["batch", "side"], card: str) -> None:
    """A diagram for each set, kernel and precision: every layer a point, the line their mean, and 1."""
    places = sorted({getattr(m.case, across) for m in matches})
    kernels = sorted({m.case.kernel for m in matches})
    rows = []
    for which, precision in dict.fromkeys((_kind(m), m.case.precision) for m in matches):
        row = []
        for kernel in kernels:
            some = [m for m in matches if (_kind(m), m.case.precision, m.case.kernel) == (which, precision, kernel)]
            points = [(float(getattr(m.case, across)), m.speedup) for m in some if m.speedup is not None]
            line = [(x, mean(y for at, y in points if at == x)) for x in sorted({at for at, _ in points})]
            one = curves.Curve(bars.PEER, [(float(places[0]), 1.0), (float(places[-1]), 1.0)])
            found = [curves.Curve(bars.OURS_TOO, (), points), curves.Curve(bars.OURS, line), one]
            if which:
                says = PASCAL_SAYS[which].mean
                found.append(curves.Curve(bars.ORIGINAL, [(float(places[0]), says), (float(places[-1]), says)]))
            row.append(curves.Diagram(f"{which} {precision}, k = {kernel}".strip(), found))
        rows.append(row)
    legend = [("a layer", bars.OURS_TOO), ("mean", bars.OURS), ("cuDNN", bars.PEER)]
    if any(_kind(m) for m in matches):
        legend.append(("the paper's mean", bars.ORIGINAL))
    curves.draw(path, title, [card], legend, places, rows, "")


def _kind(one: Match) -> str:
    """Of pascal single or multi; cuconv's sets are its kernels."""
    return one.case.set if one.case.set in PASCAL_SAYS else ""


def _shares(path: Path, table: dict[str, Any], card: str) -> None:
    groups = []
    largest = max((row["batch"] for row in table["layers"]), default=0)
    for row in (row for row in table["layers"] if row["batch"] == largest):
        found = [
            bars.Bar(name, row[key], f"{row[key]:.0%}", colour)
            for key, name, colour in (
                ("ours_of_peak", row.get("ours", ""), bars.OURS),
                ("cudnn_of_peak", row.get("cudnn", ""), bars.PEER),
            )
            if key in row
        ]
        if found:
            paper = [bars.Bar(f"paper, {name}, fp32", share, f"{share:.0%}", bars.ORIGINAL)
                     for name, share in row["paper_of_peak"].items()]  # fmt: skip
            title = f"{row['set']}: {row['layer']}, batch {row['batch']}, {row['precision']}"
            groups.append(bars.Group(title, [*(_cut(bar) for bar in found), *paper]))
    bars.draw(path, f"Share of peak of the layers of {' and '.join(CUDNN_SAYS)}", [card, "more is better"], groups)


def _milliseconds(path: Path, matches: Sequence[Match], card: str) -> None:
    groups = [
        bars.Group(
            f"{m.case.side} x {m.case.side}, k = {m.case.kernel}",
            [
                _cut(bars.Bar(row.words, row.us / 1e3, f"{row.us / 1e3:.3f} ms", COLOURS.get(row.who, bars.ORIGINAL)))
                for row in sorted(m.rows, key=lambda row: row.us)
            ],
        )
        for m in matches
    ]
    bars.draw(path, "Milliseconds of one image", [card, "less is better"], groups)


def _cut(bar: bars.Bar) -> bars.Bar:
    return bars.Bar(bar.label[:58], bar.value, bar.figure, bar.colour)
