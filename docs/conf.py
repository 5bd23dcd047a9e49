"""Settings of the documentation: `sphinx-build -W docs build/docs` makes the site."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import znnpy

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx

project = "znnpy"
author = "the znnpy authors"
version = release = znnpy.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3  # links such as memory.md#columns
html_theme = "furo"
html_title = f"znnpy {version}"
default_role = "code"  # single backticks in docstrings and help texts mark code
autodoc_preserve_defaults = True  # as the source has them, not what they evaluate to
autodoc_member_order = "bysource"
maximum_signature_line_length = 80  # longer signatures have one parameter per line

_CODE = re.compile(r"(`[^`\n]+`)")
_SPECIAL = re.compile(r"([\\*|_])")
# One parameter of a docstring: its name, or several with commas, two or more spaces, and its description.
_PARAMETER = re.compile(r"^(?P<names>\w+(?:, \w+)*) {2,}(?P<text>\S.*)$")


def to_rst(lines: list[str]) -> list[str]:
    """Return a plain-text docstring as reStructuredText.

    Lines that begin with a name and two spaces become a definition list. Other indented lines are shown as they are.
    Characters that mean something to reStructuredText are escaped.
    """
    converted: list[str] = []
    in_parameter = in_literal = False
    for number, line in enumerate(lines):
        if not line.strip():
            in_parameter = in_parameter and _begins_parameter(lines[number + 1 : number + 2])
            converted.append("")
            continue
        indented, parameter = line[0] == " ", _PARAMETER.match(line)
        if in_parameter and indented:
            converted.append(f"    {_escaped(line.strip())}")
            continue
        if parameter:
            converted += ["", parameter["names"], f"    {_escaped(parameter['text'])}"]
            in_parameter, in_literal = True, False
            continue
        if in_parameter:
            converted.append("")
            in_parameter = False
        if indented:
            converted += [] if in_literal else ["", "::", ""]
            converted.append(line)
            in_literal = True
            continue
        if in_literal:
            converted.append("")
            in_literal = False
        converted.append(_escaped(line))
    return [*converted, ""]


def _begins_parameter(following: list[str]) -> bool:
    return bool(following) and _PARAMETER.match(following[0]) is not None


def _escaped(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(f"`{part}`" if _CODE.fullmatch(part) else _SPECIAL.sub(r"\\\1", part) for part in parts)


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def _help_text(app: Sphinx, context: object, lines: list[str]) -> None:
    lines[:] = [_escaped(line) for line in lines]


def setup(app: Sphinx) -> None:
    """Convert docstrings and help texts before Sphinx reads them."""
    connect: Callable[..., int] = app.connect
    connect("autodoc-process-docstring", _docstring)
    connect("sphinx-click-process-description", _help_text)
