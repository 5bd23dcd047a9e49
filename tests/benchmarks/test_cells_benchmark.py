"""The benchmark of cells runs the examples on a small volume, draws a picture, and its table says what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from PIL import Image

from benchmarks.cells import CHAIN, MERGED, MUTEX, PROGRAM, UNET
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read

HEADER = {"processor": "a CPU", "cores": 2, "date": "2026-01-02T00:00", "commit": "abc"}


def ran(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "cells", *words]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def test_every_case_has_figures_and_a_slice_is_drawn(repository: Path, tmp_path: Path) -> None:
    out, drawing = tmp_path / f"cells-{machine_name()}.json", tmp_path / "cells.png"
    done = ran(repository, "--quick", "--out", str(out), "--picture", str(drawing))
    assert done.returncode == 0, done.stderr
    rows = read(out).rows
    assert [(row.case, row.subject) for row in rows] == [(UNET, MERGED), (CHAIN, MERGED), (UNET, MUTEX)]
    for row in rows:
        assert 0 < row.median < 2  # bits; straight walls are easy
        assert row.median == row.facts["vi_split"] + row.facts["vi_merge"]
        assert 0 < row.facts["adapted_rand"] < 0.5
        assert row.facts["seconds"] > 0
    with Image.open(drawing) as image:
        assert image.size == (4 * 48 + 3 * 4, 48)
        assert len(image.convert("RGB").getcolors(4 * 52 * 48) or ()) > 20


def test_a_folder_is_asked_for(repository: Path) -> None:
    done = ran(repository)
    assert done.returncode == 2
    assert "--data" in done.stderr


def test_table_and_headline_say_what_was_found() -> None:
    facts = {"vi_split": 0.25, "vi_merge": 0.5, "adapted_rand": 0.0415, "seconds": 123.4}
    rows = [Row("cells", UNET, MERGED, "bits", (0.75,), None, facts)]
    result = Result("cells", "a-machine", HEADER, rows)
    assert f"| {UNET} | {MERGED} | 0.75 | 0.25 | 0.50 | 0.042 |" in PROGRAM.tables["cells"]({"cells": [result]})
    assert PROGRAM.headline(result) == f"{UNET}: VI 0.75 bits, adapted Rand 0.042"
