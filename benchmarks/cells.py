"""Measure how good the cells are that the examples make of FIB-SEM, with each of the networks that ship.

    python -m benchmarks cells --data FOLDER [--picture docs/images/cells.png]

The folder holds `fib25_train.h5` (grey values) and `fib25_train_labels.h5` (the number of each voxel's cell), both
250^3 voxels with the dataset `main`. Each case runs a script of examples/ as a user does, from grey values to cells.
The figures are of the planes that no network was trained on, which are segmented by themselves. --quick makes a small
volume instead.

--picture draws a plane that is scored: grey values, the boundaries of the U-Net, its cells, and the labels.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import numpy.typing as npt

from benchmarks.harness import markdown, options
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.results import Program, Result, Results, Row

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
UNET, CHAIN = "fib25_unet", "fib25_boundary"
MERGED, MUTEX = "watershed, waterz", "affinities, mwatershed"
HELD_OUT = 195  # first plane z that neither network was trained on
QUICK_SIDE, QUICK_HELD_OUT, QUICK_CELLS = 48, 24, 12
FIGURE = re.compile(r"(\w+) (\d+\.\d+)")  # in the last line that a script prints
SPLIT, MERGE, RAND = "vi_split", "vi_merge", "adapted_rand"
COLOURS = 256  # of the picture
GAP = 4  # pixels between its parts


@dataclass(frozen=True)
class Data:
    """Files of grey values and of labels, and the first plane z that is scored."""

    volume: Path
    labels: Path
    held_out: int

    @classmethod
    def of_folder(cls, folder: Path) -> Data:
        """Return the files that the networks were trained on."""
        return cls(folder / "fib25_train.h5", folder / "fib25_train_labels.h5", HELD_OUT)

    @classmethod
    def made(cls, folder: Path) -> Data:
        """Write a small volume of cells with straight walls, which are dark."""
        random = np.random.default_rng(0)
        centres = random.uniform(0, QUICK_SIDE, (QUICK_CELLS, 3, 1, 1, 1))
        squares = ((np.indices((QUICK_SIDE,) * 3) - centres) ** 2).sum(1)
        nearest, next_one = np.sqrt(np.sort(squares, axis=0)[:2])
        grey = np.where(next_one - nearest < 3, 70, 145) + random.normal(0, 8, nearest.shape)
        data = cls(folder / "volume.h5", folder / "labels.h5", QUICK_HELD_OUT)
        arrays = {data.volume: grey.astype(np.uint8), data.labels: 1 + squares.argmin(axis=0).astype(np.uint16)}
        for path, array in arrays.items():
            with h5py.File(path, "w") as file:
                file["main"] = array
        return data


def merged(data: Data, network: str, folder: Path) -> Row:
    """Run cells.py with a network; it writes boundaries.h5 and cells.h5 into the folder."""
    words = [data.volume, data.labels, "--network", network, "--split", data.held_out]
    return row(network, MERGED, [["cells.py", *words]], folder)


def mutex(data: Data, network: str, folder: Path) -> Row:
    """Run affinities.py with a network on the planes that are scored, and compare its cells with the labels."""
    words = [data.volume, "--network", network, "--roi", f"{data.held_out}:,:,:", "--out", "mutex.h5"]
    return row(network, MUTEX, [["affinities.py", *words], ["scores.py", "mutex.h5", data.labels]], folder)


def row(network: str, method: str, scripts: list[list[Any]], folder: Path) -> Row:
    """Run scripts in turn, and return the figures in the last line that they print."""
    began = time.perf_counter()
    for script, *words in scripts:
        command = [sys.executable, str(EXAMPLES / script), *map(str, words)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{script}: {done.stderr}")
    facts = {name: float(value) for name, value in FIGURE.findall(done.stdout.splitlines()[-1])}
    facts["seconds"] = time.perf_counter() - began
    return Row("cells", network, method, "bits", (facts[SPLIT] + facts[MERGE],), None, facts)


def picture(data: Data, folder: Path, out: Path) -> None:
    """Draw a plane that is scored: grey values, boundaries, and both cells and labels over the grey values."""
    from PIL import Image
    from skimage.color import label2rgb

    def plane(file: Path, name: str) -> npt.NDArray[Any]:
        with h5py.File(file) as opened:
            found: npt.NDArray[Any] = opened[name][(data.held_out + len(opened[name])) // 2]
        return found

    grey = plane(data.volume, "main") / 255
    boundary = plane(folder / "boundaries.h5", "prediction")
    cells, labels = plane(folder / "cells.h5", "cells"), plane(data.labels, "main")
    parts = [np.dstack([grey] * 3), np.dstack([boundary] * 3)]
    parts += [label2rgb(numbers.astype(np.int64), grey, alpha=0.4) for numbers in (cells, labels)]
    pixels = np.ones((len(grey), sum(part.shape[1] + GAP for part in parts) - GAP, 3))
    for place, part in enumerate(parts):
        left = place * (part.shape[1] + GAP)
        pixels[:, left : left + part.shape[1]] = part
    drawn = Image.fromarray((255 * pixels).astype(np.uint8)).quantize(COLOURS, dither=Image.Dither.NONE)
    drawn.save(out, optimize=True)


def figures_table(results: Results) -> str:
    """Return the figures of all networks and methods."""
    made = results.get("cells", ())
    return markdown.sections(made, [_figures(result) for result in made], "cells")


def _figures(result: Result) -> str:
    head = ("network", "cells by", "VI", "split", "merge", "adapted Rand")
    lines = [
        (one.case, one.subject, *(f"{bits:.2f}" for bits in (one.median, one.facts[SPLIT], one.facts[MERGE])),
         f"{one.facts[RAND]:.3f}")
        for one in result.rows
    ]  # fmt: skip
    return markdown.table(head, lines, left=2)


def headline(result: Result) -> str:
    """Return the figures of the first row."""
    first = result.rows[0]
    return f"{first.case}: VI {first.median:.2f} bits, adapted Rand {first.facts[RAND]:.3f}"


PROGRAM = Program(
    "cells", "How good are the cells that the examples make?", "cells --data FOLDER", {"cells": figures_table}, headline
)


@click.command()
@options.OUT
@options.QUICK
@click.option("--data", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of the volume.")
@click.option("--picture", "drawing", type=click.Path(path_type=Path, dir_okay=False), help="PNG file to draw.")
def command(out: Path | None, quick: bool, data: Path | None, drawing: Path | None) -> None:
    """Measure how good the cells are that the examples make."""
    if data is None and not quick:
        raise click.UsageError("name the folder of the volume with --data, or run --quick")
    result = Result("cells", machine_name(), header())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        files = Data.made(folder) if data is None else Data.of_folder(data.resolve())
        for network in (CHAIN, UNET):
            result.add([merged(files, network, folder)])
        if drawing is not None:
            picture(files, folder, drawing)
        result.add([mutex(files, UNET, folder)])
    result.rows.sort(key=lambda one: (one.subject != MERGED, one.case != UNET))
    if out is not None or not quick:
        result.write(out)
    click.echo(_figures(result))
