"""Draw results with matplotlib (extra `plots`): bars by group, and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

OURS, PEER = "#1f6f8b", "#c9a227"


@dataclass(frozen=True, slots=True)
class Bar:
    """A value of one subject; `note` is written after its bar."""

    label: str
    value: float
    note: str = ""
    is_ours: bool = True


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) of one subject, joined by a line."""

    label: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


def bars(path: Path, title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> None:
    """Draw horizontal bars, a block for each group with its title above."""
    plots = _pyplot()
    count = sum(len(group) for _, group in groups) + len(groups)
    figure, axes = plots.subplots(len(groups) or 1, 1, figsize=(9, 1 + 0.32 * count), squeeze=False)
    for (name, group), (ax,) in zip(groups, axes, strict=False):
        places = range(len(group), 0, -1)
        colours = [OURS if bar.is_ours else PEER for bar in group]
        drawn = ax.barh(places, [bar.value for bar in group], color=colours)
        ax.bar_label(drawn, [bar.note for bar in group], padding=3, fontsize=8)
        ax.set_yticks(places, [bar.label for bar in group], fontsize=8)
        ax.set_title(name, loc="left", fontsize=9)
        ax.margins(x=0.2)
        ax.spines[["top", "right"]].set_visible(False)
    _save(figure, path, title)


def curves(path: Path, title: str, across: str, up: str, drawn: Sequence[Curve], *, log: bool = True) -> None:
    """Draw curves over one pair of axes, named `across` and `up`."""
    figure, ax = _pyplot().subplots(figsize=(8, 5))
    for curve in drawn:
        x, y = zip(*curve.points, strict=True)
        ax.plot(x, y, "--" if curve.is_dashed else "-", marker="o", markersize=3, label=curve.label)
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
    ax.set_xlabel(across)
    ax.set_ylabel(up)
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    _save(figure, path, title)


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)


def _pyplot() -> Any:
    if find_spec("matplotlib") is None:
        raise click.ClickException("pictures need matplotlib; pip install 'znnpy[plots]'")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
