"""Pictures of what `papers.py` measured: speed-ups as curves, shares of the peak and milliseconds as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import bars
import curves
from papers_cases import CUCONV_AT_ONE, CUDNN_BATCH_16, PASCAL_SAYS, POST_SAYS, PROFILES, Paper
from papers_lines import possible_words
from papers_tables import BESIDE, COPIED, CUDNN, INEXACT, OURS, Match, against
from pen import INK, Place

COLOURS = {
    OURS: bars.OURS,
    COPIED: bars.OURS_TOO,
    CUDNN: bars.PEER,
    INEXACT: bars.PEER_LESS_EXACT,
    BESIDE: bars.OURS_TOO,
}


BESIDE_COLOUR, POSSIBLE_COLOUR = INK, bars.PEER_LESS_EXACT


def draw(
    paper: Paper, path: Path, matches: Sequence[Match], table: dict[str, Any], card: str, flops: float | None
) -> None:
    """Write a PNG; of cudnn the largest batch, and the share of the best that the smallest has.

    flops  float32 operations a second, for what is possible at most
    """
    notes = [card, *against(matches)]
    match paper:
        case "cuconv":
            _speedups(path, "cuConv against cuDNN: times its speed, by batch", matches, "batch", [*notes, *_won(table)])
        case "pascal":
            _speedups(
                path,
                "Pascal's methods against cuDNN: times its speed, by side",
                matches,
                "side",
                [*notes, *_won(table), *possible_words(table)],
                flops,
            )
        case "cudnn":
            _shares(path, table, notes)
        case "first_principles":
            post = (
                f"the post, whole processes: {POST_SAYS['processor']} s on a processor, {POST_SAYS['GPU']} s on a GPU"
            )
            _milliseconds(path, matches, [*notes, post])


def _speedups(
    path: Path,
    title: str,
    matches: Sequence[Match],
    across: Literal["batch", "side"],
    notes: Sequence[str],
    flops: float | None = None,
) -> None:
    """A diagram for each set, kernel and precision: every layer a point, the line their mean, and 1."""
    places = sorted({getattr(m.case, across) for m in matches})
    kernels = sorted({m.case.kernel for m in matches})
    rows = []
    for which, precision in dict.fromkeys((_kind(m), m.case.precision) for m in matches):
        row = []
        for kernel in kernels:
            some = [m for m in matches if (_kind(m), m.case.precision, m.case.kernel) == (which, precision, kernel)]
            points = [(float(getattr(m.case, across)), m.speedup) for m in some if m.speedup is not None]
            beside = [(float(getattr(m.case, across)), m.beside_speedup) for m in some if m.beside_speedup is not None]
            possible = [(float(getattr(m.case, across)), most) for m in some if (most := m.possible(flops)) is not None]
            one = curves.Curve(bars.PEER, [(float(places[0]), 1.0), (float(places[-1]), 1.0)])
            found = [curves.Curve(bars.OURS_TOO, (), points), curves.Curve(bars.OURS, _means(points)), one]
            found += [curves.Curve(BESIDE_COLOUR, _means(beside)), curves.Curve(POSSIBLE_COLOUR, _means(possible))]
            if which:
                says = PASCAL_SAYS[which].mean
                found.append(curves.Curve(bars.ORIGINAL, [(float(places[0]), says), (float(places[-1]), says)]))
            elif precision == "fp32":  # the paper's
                found.append(curves.Curve(bars.ORIGINAL, (), _profiled(kernel, places)))
            row.append(curves.Diagram(f"{which} {precision}, k = {kernel}".strip(), found))
        rows.append(row)
    legend = [("a layer", bars.OURS_TOO), ("mean", bars.OURS), ("cuDNN", bars.PEER)]
    if any(m.beside for m in matches):
        legend.append(("beside, not the paper's", BESIDE_COLOUR))
    if any(m.possible(flops) for m in matches):
        legend.append(("possible at most", POSSIBLE_COLOUR))
    single = any(_kind(m) for m in matches)
    legend.append(("the paper's mean" if single else "the paper's: mean at 1, Tables 3 to 5", bars.ORIGINAL))
    curves.draw(path, title, notes, legend, places, rows, "")


def _means(points: Sequence[Place]) -> list[Place]:
    return [(x, mean(y for at, y in points if at == x)) for x in sorted({at for at, _ in points})]


def _won(table: dict[str, Any]) -> list[str]:
    """The shares of configurations won, and what they would be with cuDNN's inexact plans."""
    words = []
    for name, gain in table.items():
        if name != "paper" and gain["cases"]:
            counted = gain["if_inexact_counted"]
            words.append(
                f"{name}: {gain['won']} of {gain['cases']} won ({gain['share_won']:.2%}); {counted['won']}"
                f" ({counted['share_won']:.2%}) if the plans of cuDNN's beyond the error allowed counted"
            )
    if "paper" in table:
        words.append(f"the paper, fp32, V100: {table['paper']['share won']:.2%}")
    return words


def _profiled(kernel: int, batches: Sequence[int]) -> list[tuple[float, float]]:
    """cuConv's own speed-ups over cuDNN, of the batches that are drawn."""
    found = [(p.batch, p.speedup) for p in PROFILES if p.layer.kernel == kernel]
    if kernel in CUCONV_AT_ONE:
        found.append((1, CUCONV_AT_ONE[kernel][0]))
    return [(float(batch), speedup) for batch, speedup in found if batch in batches]


def _kind(one: Match) -> str:
    """Of pascal single or multi; cuconv's sets are its kernels."""
    return one.case.set if one.case.set in PASCAL_SAYS else ""


def _shares(path: Path, table: dict[str, Any], notes: Sequence[str]) -> None:
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
    for row in (row for row in table["batches"] if row["batch"] == 16 and "ours_of_best" in row):
        shares = [("ours", OURS, bars.OURS), ("cudnn", CUDNN, bars.PEER)]
        found = [bars.Bar(who, row[f"{key}_of_best"], f"{row[f'{key}_of_best']:.0%}", colour)
                 for key, who, colour in shares if f"{key}_of_best" in row]  # fmt: skip
        paper = [bars.Bar("paper, Tesla K40, fp32", CUDNN_BATCH_16, f"{CUDNN_BATCH_16:.0%}", bars.ORIGINAL)]
        groups.append(
            bars.Group(f"batch 16 of the best batch, mean of the layers, {row['precision']}", [*found, *paper])
        )
    title = "Shares of peak of the cuDNN paper's layers, beside the paper's"
    bars.draw(path, title, [*notes, "more is better"], groups)


def _milliseconds(path: Path, matches: Sequence[Match], notes: Sequence[str]) -> None:
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
    bars.draw(path, "Milliseconds of one image", [*notes, "less is better"], groups)


def _cut(bar: bars.Bar) -> bars.Bar:
    return bars.Bar(bar.label[:58], bar.value, bar.figure, bar.colour)
