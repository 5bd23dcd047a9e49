"""The pages of docs/, README.md and CONTRIBUTING.md name files, functions, options and tables that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import znnpy
from znnpy.kernels.table import IN_HOST_RAM, TABLE

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((REPOSITORY / "docs").rglob("*.md"))
FOLDERS = ("znnpy", "kernels", "planner", "tests", "benchmarks", "docs", "deploy", "examples", ".ci")
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PRIMITIVE = re.compile(r"`((?:cpu|gpu)\.[a-z]+\.\w+)`")
TYPE = re.compile(r"`([A-Z][a-z]\w+)`")
MARK = re.compile(r"^<!-- (begin|end) table: ([\w-]+) -->$", re.MULTILINE)


def paths_in(text: str) -> list[str]:
    """Words in backticks that look like a file or folder of the repository: `znnpy/ops.py`, `tests/`."""
    codes = INLINE_CODE.findall(FENCED.sub("", text))
    return [code for code in codes if code.partition("/")[0] in FOLDERS and "/" in code and "*" not in code]


def id_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_files_and_folders_named_on_a_page_exist(page: Path) -> None:
    assert [path for path in paths_in(page.read_text()) if not (REPOSITORY / path).exists()] == []


def test_missing_file_is_detected() -> None:
    assert paths_in("`znnpy/gone.py`, `a/b`, `--ram 2G`, `tests/` and\n```text\n`znnpy/code.py`\n```\n") == [
        "znnpy/gone.py",
        "tests/",
    ]


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_types_named_on_a_page_exist(page: Path) -> None:
    sources = [path for folder in ("znnpy", "kernels", "planner") for path in (REPOSITORY / folder).rglob("*.py")]
    defined = set(re.findall(r"^(?:class (\w+)|(\w+) = )", "\n".join(map(Path.read_text, sources)), re.MULTILINE))
    known = {name for pair in defined for name in pair} | {"None", "ValueError"}
    example = {"ConvDirectRows"} if page.name == "adding_a_primitive.md" else set()
    assert set(TYPE.findall(page.read_text())) - known == example


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_primitives_named_on_a_page_exist(page: Path) -> None:
    known = {primitive.name for primitive in (*TABLE, *IN_HOST_RAM)}
    example = {"cpu.conv.direct_rows"} if page.name == "adding_a_primitive.md" else set()
    assert set(PRIMITIVE.findall(page.read_text())) - known == example


def test_reference_holds_every_public_name() -> None:
    """A name that is missing here is missing on the page docs/python.md; add `autofunction` or `autoclass` for it."""
    page = (REPOSITORY / "docs" / "python.md").read_text()
    named = set(re.findall(r"auto(?:function|class):: (\w+)", page)) | set(
        re.findall(r"automodule:: znnpy\.(\w+)", page)
    )
    errors = {name for name in znnpy.__all__ if name.endswith("Error")}  # all of them are in znnpy.errors
    assert set(znnpy.__all__) - errors == named - {"errors"}


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_table_marks_come_in_pairs(page: Path) -> None:
    marks = MARK.findall(page.read_text())
    names = [name for mark, name in marks if mark == "begin"]
    assert marks == [(mark, name) for name in names for mark in ("begin", "end")]
    assert len(names) == len(set(names))
    assert len(names) == 1 if page.name == "README.md" else bool(names) == (page.name == "performance.md")


def test_glossary_is_short_and_sorted() -> None:
    terms = re.findall(r"^\*\*(.+)\*\*$", (REPOSITORY / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(terms) <= 44
    assert terms == sorted(terms)
