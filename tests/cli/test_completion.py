"""Shells complete commands, options and their values, as docs/cli.md describes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("znnpy")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def asked(instruction: str, **words: str) -> str:
    """Return what the program answers to a shell."""
    environment = {**os.environ, "_ZNNPY_COMPLETE": instruction, **words}
    return subprocess.run([PROGRAM], capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_what_the_page_says(shell: str) -> None:
    assert f"_ZNNPY_COMPLETE={shell}_source znnpy" in PAGE.read_text()
    assert "_ZNNPY_COMPLETE" in asked(f"{shell}_source")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("znnpy", "inf"), ["plain,infer", "plain,info"]),
        (("znnpy", "infer", "--dr"), ["plain,--dry-run"]),
        (("znnpy", "infer", "--border", "re"), ["plain,reflect"]),
    ],
)
def test_commands_options_and_values_are_completed(words: tuple[str, ...], found: list[str]) -> None:
    answer = asked("bash_complete", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
    assert answer.split() == found
