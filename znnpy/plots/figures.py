"""Make figures with matplotlib and save them."""

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
MOST_PIXELS = 2**15  # along a side


def require_matplotlib() -> None:
    """Raise MissingExtraError if matplotlib is not installed, without importing it."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(f"plots need the package matplotlib, which is not installed; `{install('plots')}`")


def new_figure(title: str, height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure of so many inches. It belongs to no window and to no global state of matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, parse_math=False)
    return figure


def save_figure(path: Path, figure: Figure, argument: str = "out", *, overwrite: bool, form: str = "png") -> None:
    """Write `figure` as png, svg or pdf, whole or not at all; OutputError, which names `argument`, where that fails."""
    write_asked(path, drawn(figure, form), argument, overwrite=overwrite)


def drawn(figure: Figure, form: str, dpi: float = DPI) -> bytes:
    """Return a figure as png, svg or pdf."""
    import matplotlib

    saved = io.BytesIO()
    # Neither a date nor random names are written, so that a figure is the same bytes each time.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with matplotlib.rc_context({"svg.hashsalt": "znnpy"}):
        figure.savefig(saved, format=form, dpi=min(dpi, MOST_PIXELS / max(figure.get_size_inches())), metadata=metadata)
    return saved.getvalue()
