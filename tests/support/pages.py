"""Read a page as a browser does, as far as it loads something."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Self

VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})  # elements without an end
LOADS = ("src", "href", "srcset", "data", "poster", "action")  # attributes that a browser follows
URL = re.compile(r"(?:https?:)?//[\w.-]+")
DATA = re.compile(r'"data:[^"]*"')
SVG = "data:image/svg+xml;base64,"
LINK = re.compile(r"""(?:href=|src=|url\()["']?([^"')]+)""")


@dataclass
class Page(HTMLParser):
    """The elements, the texts and the pictures of a page."""

    text: str = ""
    ids: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # what the page names as a source
    pictures: list[str] = field(default_factory=list)
    elements: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, html: str) -> Self:
        """Read a page; AssertionError if its elements are not closed in order."""
        page = cls()
        HTMLParser.__init__(page)
        page.feed(html)
        page.close()
        assert page.open == [], f"these are not closed: {page.open}"
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in LOADS and not name.startswith("data-"):
                self.loaded.append(value or "")
            if tag == "img" and name == "src":
                self.pictures.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"{tag} closes nothing"
        assert self.open[-1] == tag, f"{tag} closes {self.open[-1]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def outside(html: str) -> list[str]:
    """Return what a page and its drawings would load from elsewhere, and every address in its text."""
    page = Page.of(html)
    drawings = [b64decode(one.partition(",")[2]).decode() for one in page.pictures if one.startswith(SVG)]
    inside = [link for drawing in drawings for link in LINK.findall(drawing) if not link.startswith("#")]
    return [
        *(source for source in page.loaded if not source.startswith("data:")),
        *inside,
        *URL.findall(DATA.sub("", html)),
    ]
