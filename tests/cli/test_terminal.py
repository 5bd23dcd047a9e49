"""Output fits the width of a terminal and the encoding of a stream, and control characters in names are escaped."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tests.support.cli import Place
from znnpy.command_runtime import PIPED_WIDTH, print_lines, print_table, wrapped
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.primitive_list import primitives_table

pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("znnpy")
EVERY = (*TABLE, *IN_HOST_RAM)
SENTENCE = (
    "the output out.h5 exists; give --overwrite to replace it, or name another file of the same folder with --out"
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [80, 120, 200])
def test_names_of_primitives_are_whole_at_any_width(width: int) -> None:
    stream = io.StringIO()
    Console(width=width, file=stream).print(primitives_table(EVERY), crop=False)
    lines = stream.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert "…" not in stream.getvalue()
    words = stream.getvalue().split()
    for primitive in EVERY:
        assert primitive.name in words
        assert set(primitive.summary.split()) <= set(words)
        assert set(primitive.source.split()) <= set(words)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_sentences_break_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = wrapped(SENTENCE, Terminal()).splitlines()
    assert len(lines) == (2 if width < len(SENTENCE) else 1)
    assert max(map(len, lines)) <= width
    assert " ".join(lines) == SENTENCE
    path = "/data/" + "long-name" * 30
    assert path in wrapped(f"{SENTENCE}: {path}", Terminal()).splitlines()


def test_lines_written_to_a_file_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapped(SENTENCE, io.StringIO()) == SENTENCE


def test_long_report_lines_are_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    line = "stages     reading 6.47 ms, computing 438 ms, writing 15.6 ms, waiting 18 µs (side by side)"
    first, second = wrapped(line, Terminal()).splitlines()
    assert len(first) <= 80
    assert second.startswith(11 * " ")
    assert f"{first} {second.strip()}" == line


def named(place: Place, name: str) -> Path:
    """Write the network under another name."""
    path = place.folder / "ünet.yaml"
    path.write_text((place.folder / "net.yaml").read_text().replace('"tiny"', json.dumps(name)), "utf-8")
    return path


def run(place: Place, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["PYTHONIOENCODING", "LC_ALL"],
)
def test_output_works_in_any_encoding(place: Place, environment: dict[str, str]) -> None:
    network = named(place, "grauwert-Netz µ")
    planned = run(place, ["plan", str(network), "--shape", "40,40,40"], **environment)
    assert (planned.returncode, planned.stderr) == (0, b"")
    assert planned.stdout.decode("ascii").startswith("grauwert-Netz u: ")
    out = place.folder / "prädiktion.h5"
    arguments = [*place.arguments[:-1], str(out)]
    assert run(place, arguments, **environment).returncode == 0
    refused = run(place, arguments, **environment)
    assert refused.returncode == 1
    assert b"Traceback" not in refused.stderr
    refused.stderr.decode("ascii")


def test_undecodable_name_is_printed(place: Place) -> None:
    refused = run(place, ["infer", os.fsdecode(os.fsencode(place.folder) + b"/v\xff.h5")])
    assert refused.returncode == 1
    assert refused.stderr.endswith(b"/v\\udcff.h5; check the path\n")


HOSTILE = "\x1b[31mnet\x1b]0;title[bold]"
ESCAPED = "\\x1b[31mnet\\x1b]0;title[bold]"


def test_control_characters_in_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and markup in a table, in a paragraph and in a line come out as text."""
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE))
    print_table(Group(table, Text(f"{HOSTILE}\n{HOSTILE}"), HOSTILE))
    print_lines([HOSTILE])
    said = capsys.readouterr().out
    assert said.count(ESCAPED) == 6
    assert not {sign for sign in said if sign < " "} - {"\n"}


def test_control_characters_from_files_are_escaped(place: Place) -> None:
    place.write_volume(np.zeros((20, 23, 25), np.uint8), "volume.h5", **{HOSTILE: np.zeros((9, 9, 9), np.uint8)})
    assert ESCAPED in place.refusal(*place.arguments)
    out = place.folder / f"{HOSTILE.replace('/', '')}.h5"
    done = place.run(*place.arguments[:-1], out, "--dataset", "raw")
    assert done.exit_code == 0
    assert f"{ESCAPED}.h5: 15x16x19" in done.stdout
    assert "\x1b" not in done.output


def test_piped_table_is_as_wide_as_needed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = place.run("primitives").stdout.splitlines()
    assert 80 < max(len(line) for line in lines if " cannot run here" not in line) <= PIPED_WIDTH


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("infer", "gone.h5", "--json"), 1),
        (("infer", "gone.h5", "--json", "--ram", "12Q"), 2),
        (("infer", "gone.h5", "--json", "--overwrite", "--resume"), 2),
        (("verify", "gone.h5", "gone.h5", "--json"), 1),
    ],
)
def test_error_is_a_json_document_with_json_option(place: Place, arguments: tuple[str, ...], code: int) -> None:
    result = place.run(*arguments)
    assert result.exit_code == code
    (sentence,) = json.loads(result.stdout).values()
    assert json.loads(result.stdout) == {"error": sentence}
    assert f"Error: {sentence}\n" in result.stderr
