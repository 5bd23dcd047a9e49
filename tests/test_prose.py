"""Docstrings and comments on lines of their own begin like sentences, not like fragments without a subject."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("znnpy", "kernels", "planner", "tests", "benchmarks", "docs", "examples")
LINKS = tuple(REPOSITORY / "znnpy" / name for name in ("kernels", "planner"))  # the same files by another name
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".hpp")

NO_SUBJECT = re.compile(r"(of|what|those|the same|who|whose|which|than|and|nor|also)\b", re.IGNORECASE)
PRONOUN = re.compile(r"(it|they)\b", re.IGNORECASE)  # stands for nothing at the beginning of a text
CLAUSE = re.compile(r"(as|where|wherever|that)\b", re.IGNORECASE)
CLAUSE_IN_A_SENTENCE = re.compile(
    r"(as|where|wherever)\b[^.;:]+, |that (is|was|would|may|can|must|does|has)\b", re.IGNORECASE
)
CPP_COMMENT = re.compile(r"(?:^[ \t]*//[^\n]*\n)+|^[ \t]*/\*.*?\*/", re.MULTILINE | re.DOTALL)

Text = tuple[int, str]  # number of its first line, and its words


def is_fragment(text: str, subject_is_named: bool = False) -> bool:
    """Return whether a text opens without a subject; `subject_is_named` where the name above it is the subject."""
    if NO_SUBJECT.match(text) or (PRONOUN.match(text) and not subject_is_named):
        return True
    return CLAUSE.match(text) is not None and CLAUSE_IN_A_SENTENCE.match(text) is None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether it belongs to a test, whose name says what the docstring is about."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text, getattr(node, "name", "").startswith("test_")


def comment_blocks(source: str) -> Iterator[Text]:
    """Yield the comments that stand on lines of their own, neighbouring lines joined."""
    lines: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        if lines and token.start[0] != begin + len(lines):
            yield begin, " ".join(lines)
            lines = []
        begin = begin if lines else token.start[0]
        lines.append(token.string.lstrip("#: ").strip())
    if lines:
        yield begin, " ".join(lines)


def cpp_comments(source: str) -> Iterator[Text]:
    """Yield the comments of C++ that begin on a line of their own, neighbouring lines joined."""
    for block in CPP_COMMENT.finditer(source):
        text = " ".join(line.strip().strip("/* ") for line in block[0].splitlines())
        yield source.count("\n", 0, block.start()) + 1, text.strip()


def fragments(source: str, suffix: str) -> list[Text]:
    """Return the fragments in the text of one file."""
    if suffix != ".py":
        return [(line, text) for line, text in cpp_comments(source) if is_fragment(text)]
    in_docstrings = [(line, text) for line, text, named in docstrings(ast.parse(source)) if is_fragment(text, named)]
    return in_docstrings + [(line, text) for line, text in comment_blocks(source) if is_fragment(text)]


def sources(folder: str) -> list[Path]:
    paths = (REPOSITORY / folder).rglob("*")
    return sorted(p for p in paths if p.suffix in SUFFIXES and not any(link in p.parents for link in LINKS))


@pytest.mark.parametrize(
    "text",
    [
        "Of one image, after the pooling.",
        "What the writer needs.",
        "Those than which no other is as good.",
        "The same of one step.",
        "That of the layer behind it.",
        "As `measure`.",
        "Where to write.",
        "It is the first.",
        "of a block",
    ],
)
def test_fragments_are_found(text: str) -> None:
    python = f'def f():\n    """{text}"""\n    # {text}\n    g()  # {text}\n'
    assert fragments(python, ".py") == [(2, text), (3, text)]
    for comment in (f"// {text}", f"/* {text} */"):
        assert fragments(f"int a;\n{comment}\nint b;  {comment}\n", ".cu") == [(2, text)]


@pytest.mark.parametrize(
    "text",
    [
        "Size of the patch in voxels.",
        "Return the bytes of one image.",
        "As the file is locked, nobody else writes to it.",
        "Where a chunk is missing, zeros are read.",
        "That is why the order matters.",
        "Offset of the window.",
        "Item of the queue.",
    ],
)
def test_sentences_and_noun_phrases_are_accepted(text: str) -> None:
    assert fragments(f'"""{text}"""\n# {text}\n', ".py") == []


def test_docstring_of_a_test_may_refer_to_its_name() -> None:
    text = '"""It also holds for one voxel."""'
    assert fragments(f"def test_sums_are_exact():\n    {text}\n", ".py") == []
    assert fragments(f"def exact_sum():\n    {text}\n", ".py") != []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_begin_with_a_subject_or_an_imperative(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {' '.join(text.split())[:100]}"
        for path in sources(folder)
        for line, text in fragments(path.read_text(), path.suffix)
    ]
    assert found == [], "\n" + "\n".join(found)
