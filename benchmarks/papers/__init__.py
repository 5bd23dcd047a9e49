"""Repeat the experiments of the source papers on this machine.

    python -m benchmarks papers [--device gpu] [--minutes 30] [--paper cuconv ..] [--resume]

first_principles  One image of 4000 x 4000, kernels of 3 to 15; on a GPU with copies and without, and on the CPU.
pascal            One map to many, many to as many: the peer's time over ours, and over the least that this card allows.
cuconv            All layers of stride 1 of five networks in batches of 1 to 256: how many does the method win?
cudnn             Five layers in batches of 128 to 16, as shares of the device's peak.
znni              The four networks in every mode, compared with Table V, and the schemes of section VI.

Layers and printed figures are in cases.yaml. Peers are cuDNN's plans for three dimensions, as primitives of znnpy run
them, and PyTorch's conv2d: on a GPU it finds cuDNN's plans for two dimensions, on a CPU oneDNN's. Contenders that take
at most 1.5 times as long as the fastest of their side take part in interleaved rounds. Every output is compared with
the float64 definition. Beyond the limit of its precision, a figure of ours is void, and a plan of a peer is inexact,
as Winograd's are, and does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.harness import options
from benchmarks.harness.layer_runner import place_of
from benchmarks.harness.machine import find_gpu, header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import CURRENT, Program, Result
from benchmarks.harness.timing import Budget
from benchmarks.papers.cases import LAYERS, PAPERS
from benchmarks.papers.run import layer_rows, network_rows
from benchmarks.papers.tables import TABLES, headline, peak_flops

MATRIX = 2048  # rows and columns of the product by which the peak of a CPU is measured
WRITE_SECONDS = 30.0  # interval at which the file is written again


@click.command()
@options.shared
@click.option(
    "--paper", "papers", type=click.Choice(PAPERS), multiple=True, help="Measure only these papers; repeatable."
)
@click.option("--resume", is_flag=True, help="Keep the cases of the result file and measure the others.")
@click.option("--rounds", type=int, default=6, show_default=True)
@click.option("--variants", type=int, default=4, show_default=True, help="Variants of a method that are tried.")
@click.option(
    "--slow-seconds",
    type=float,
    default=2.0,
    show_default=True,
    help="Limit of a run on a CPU: cases that take longer are not measured.",
)
def command(
    device: str,
    minutes: float,
    quick: bool,
    out: Path | None,
    papers: Sequence[str],
    resume: bool,
    rounds: int,
    variants: int,
    slow_seconds: float,
) -> None:
    """Repeat the measurements of the papers."""
    gpu = find_gpu(device)
    result = Result("papers", machine_name(gpu), header(gpu))
    path = out or CURRENT / f"papers-{result.machine}.json"
    if resume or papers:
        merge(result, path, () if resume else papers)
    about: dict[str, Any] = dict(result.header)
    about["peak_flops"] = peak_flops(about) if gpu is not None else {"fp32": product_rate(128 if quick else MATRIX)}
    result.header = about
    wanted, begun = papers or PAPERS, time.monotonic()
    rounds = 2 if quick else rounds
    for number, paper in enumerate(wanted):
        left = 60 * minutes - (time.monotonic() - begun)
        budget = Budget(max(0.0, left) / 60 / (len(wanted) - number))  # the others get what one leaves
        result.left_out = [line for line in result.left_out if not line.startswith(paper)]
        if paper in LAYERS:
            with place_of(device) as place:
                known = {row.case for row in result.of_group(paper)}
                rows = layer_rows(paper, place, budget, result.left_out, quick=quick, rounds=rounds, variants=variants,
                                  slow=slow_seconds, known=known)  # fmt: skip
                keep(result, rows, None if quick and out is None else path)
        else:
            rows = network_rows(device, budget, result.left_out, quick=quick, rounds=rounds)
            keep(result, rows, None if quick and out is None else path)


def keep(result: Result, rows: Any, path: Path | None) -> None:
    """Print rows and add them to the result, which is written at intervals, and at the end or after an error."""
    written = time.monotonic()
    try:
        for row in rows:
            figure = row.failure or f"{row.median:.4g} {row.unit} ({min(row.values):.4g} to {max(row.values):.4g})"
            click.echo(f"{row.group:16} {row.case:36} {row.subject:32} {figure}"[:200])
            result.add([row])
            if path is not None and time.monotonic() > written + WRITE_SECONDS:
                result.write(path)
                written = time.monotonic()
    finally:
        if path is not None:
            result.write(path)


def product_rate(size: int) -> float:
    """Return the operations per second of the best of a few products of random matrices on the CPU."""
    a, b = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
    spent = []
    for _ in range(4):
        begin = time.perf_counter()
        np.matmul(a, b)
        spent.append(time.perf_counter() - begin)
    return float(2 * size**3 / min(spent))


PROGRAM = Program(
    name="papers",
    question="What did the papers measure, and what do their methods reach here?",
    command="papers [--device gpu]",
    tables=TABLES,
    headline=headline,
)
