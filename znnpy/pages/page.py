"""Fill the templates of pages. Everything that comes from files is escaped, and pictures are part of the page."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from znnpy.errors import MissingExtraError
from znnpy.extras import install
from znnpy.plots.figures import drawn

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a page. `source` holds its bytes as a data URI."""

    source: str
    words: str  # for those who do not see it


def require_report() -> None:
    """Raise MissingExtraError if a package that pages need is not installed."""
    for package in ("jinja2", "matplotlib"):
        if find_spec(package) is None:
            raise MissingExtraError(f"pages need the package {package}, which is not installed; `{install('report')}`")


def figure_picture(figure: Figure, words: str) -> Picture:
    """Return a figure as a picture of a page, and let go of it."""
    picture = Picture(_uri(drawn(figure, "svg"), "image/svg+xml"), words)
    figure.clear()
    return picture


def png_picture(content: bytes, words: str) -> Picture:
    """Return a PNG as a picture of a page."""
    return Picture(_uri(content, "image/png"), words)


def filled(template: str, **content: Any) -> str:
    """Return a page."""
    return _templates().get_template(template).render(**content)


def threads_text(count: int) -> str:
    """Return a number of threads in words."""
    return f"{count} thread{'s' if count != 1 else ''}"


def _uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("znnpy.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
