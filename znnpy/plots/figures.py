"""Make figures with matplotlib and save them as PNG files."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.errors import MissingExtraError
from znnpy.extras import install
from znnpy.files import write_asked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 11.0  # inches
DPI = 200  # pixels per inch


def require_matplotlib() -> None:
    """Raise MissingExtraError if matplotlib is not installed, without importing it."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(f"plots need the package matplotlib, which is not installed; `{install('plots')}`")


def new_figure(title: str, height: float) -> Figure:
    """Return an empty figure of `height` inches. It belongs to no window and to no global state of matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, parse_math=False)
    return figure


def save_figure(path: Path, figure: Figure, argument: str = "out", *, overwrite: bool) -> None:
    """Write `figure` as a PNG, whole or not at all; OutputError, which names `argument`, where that fails."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    write_asked(path, drawn.getvalue(), argument, overwrite=overwrite)
