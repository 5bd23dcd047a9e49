"""Messages name arguments as the caller writes them, and show content of files without steering a terminal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from znnpy.messages import LONGEST_EXCERPT, excerpt, one_line, option, speaking_to_command_line


@pytest.mark.parametrize(
    ("name", "value", "in_python", "in_shell"),
    [
        ("ram", None, "`ram`", "--ram"),
        ("ram", "2G", "ram='2G'", "--ram 2G"),
        ("output_dtype", "float16", "output_dtype='float16'", "--output-dtype float16"),
        ("overwrite", True, "overwrite=True", "--overwrite"),
        ("depth_first", False, "depth_first=False", "--no-depth-first"),
        ("patch", (8, 16, 16), "patch=(8, 16, 16)", "--patch 8,16,16"),
        ("threads", 2, "threads=2", "--threads 2"),
    ],
)
def test_arguments_are_named_as_the_caller_writes_them(name: str, value: Any, in_python: str, in_shell: str) -> None:
    assert option(name, value) == in_python
    with speaking_to_command_line():
        assert option(name, value) == in_shell
    assert option(name, value) == in_python


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines", "two\\nlines"),
        ("\u202eback", "\\u202eback"),
        ("\ud800", "\\ud800"),
        ("\x9b", "\\x9b"),
        ("θ × 日本", "θ × 日本"),
        (12, "12"),
    ],
)
def test_control_characters_in_shown_file_content_are_escaped(content: object, shown: str) -> None:
    assert excerpt(content) == shown
    assert one_line(str(content)) == shown


@pytest.mark.parametrize("content", ["a" * 10**6, "\x1b" * 10**5, "\ud800" * 201])
def test_excerpt_is_never_longer_than_the_limit(content: str) -> None:
    assert len(excerpt(content)) <= LONGEST_EXCERPT
    assert "..." in excerpt(content)


NAMED_THERE = {
    "cli.py",
    "plot_commands.py",
    "import_command.py",
    "page_commands.py",
    "command_options.py",
    "command_runtime.py",
    "messages.py",
}  # modules of the command line
PROGRAMS = {"kernel_source.py", "browser.py"}  # options of CUDA's compiler, and of Chromium


def literals(module: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of all strings of a module that are no docstrings; values of an f-string are dots."""
    tree = ast.parse(module.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    first = [body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)]
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = [value for whole in joined for value in whole.values]
    for whole in joined:
        texts = [str(value.value) if isinstance(value, ast.Constant) else "..." for value in whole.values]
        yield whole.lineno, "".join(texts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in (*first, *parts):
            yield node.lineno, node.value


@pytest.mark.slow
def test_messages_write_options_only_through_option(repository: Path) -> None:
    """Only whole commands, such as `znnpy measure --threads 2`, write options out; other messages use `option`."""
    command = re.compile(r"znnpy [a-z]+ [^`]*")
    found = []
    for folder in ("znnpy", "kernels", "planner"):
        for module in sorted((repository / folder).rglob("*.py")):
            inner = module.relative_to(repository / folder).parts
            if inner[0] in ("kernels", "planner") or module.name in NAMED_THERE | PROGRAMS:
                continue  # links for tools
            texts = [(line, command.sub("", text)) for line, text in literals(module)]
            found += [f"{module}:{line}: {text}" for line, text in texts if re.search(r"--[a-z]", text)]
    assert found == []


@pytest.mark.parametrize(("name", "on_the_command_line"), [("begin", "--from"), ("end", "--to")])
def test_arguments_with_another_option_name_are_translated(name: str, on_the_command_line: str) -> None:
    assert option(name) == f"`{name}`"
    with speaking_to_command_line():
        assert option(name) == on_the_command_line
