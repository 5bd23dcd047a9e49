"""Measure graph networks on a GPU: a U-Net over a volume, MLPerf's in windows, and PyTorch window by window.

znnpy runs from an array in memory to an array in memory, with uploads and downloads; a first run over a small part, in
which layers are timed and kernels are compiled, does not count. PyTorch's time for a volume is that of a window by
events, times the number of windows with half overlap; uploads and blending are not counted for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.gpu_graph_tables import PROGRAM as PROGRAM
from benchmarks.graphs import half_overlapping
from benchmarks.harness.inputs import Vec3
from benchmarks.harness.isolate import run_child
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.options import OUT, QUICK
from benchmarks.harness.results import Result, Row
from benchmarks.harness.window_nets import NETS as WINDOW_NETS
from znnpy.kernels.gpu.device import find_gpu
from znnpy.shapes import GPU_PRECISIONS

CHILDREN = "benchmarks.gpu_graph_children"
SIZES: dict[str, Vec3] = {"plain_unet": (1024, 1024, 1024), "mlperf_unet": (256, 384, 384)}
SIDES = (128, 192, 256, 320)  # of PyTorch's windows over the plain U-Net
GROUPS = ("runs", "layers", "windows", "half overlap", "exactness")
RUN_SECONDS = 560.0


class Bench:
    """The measurements of one network."""

    def __init__(self, network: str, folder: Path, size: Vec3, rounds: int, vram: str | None) -> None:
        self._name, self._size, self._rounds = network, size, rounds
        self._request: dict[str, Any] = {
            "folder": str(folder), "network": network, "size": size, "rounds": rounds, "vram": vram, "output": "maps"
        }  # fmt: skip

    @property
    def _case(self) -> str:
        return f"{self._name} {'x'.join(map(str, self._size))}"

    def runs(self, precision: str, output: str = "maps") -> Iterator[Row]:
        """Yield whole runs, and what is known of their layers."""
        request = {**self._request, "precision": precision, "output": output}
        outcome = run_child(f"{CHILDREN}:run_znnpy", request, seconds=RUN_SECONDS)
        answers = outcome.answers
        values = tuple(answer["voxels"] / answer["computing"] for answer in answers)
        facts = {**answers[-1], "runs": [answer["seconds"] for answer in answers]} if answers else {}
        layers = facts.pop("layers", [])
        subject = f"znnpy {precision}" + (f", {output}" if output != "maps" else "")
        yield Row("runs", self._case, subject, "voxels/s", values, None if values else outcome.failure, facts)
        for number, (shape, primitive, seconds, executions, measured) in enumerate(layers):
            more = {"executions": executions, "measured": measured, "precision": precision}
            yield Row("layers", f"{self._case} {number}: {shape}", primitive, "s", (seconds,), None, more)

    def exactness(self, precision: str) -> Iterator[Row]:
        """Yield the difference of a run's corner from that of the run in fp32."""
        outcome = run_child(f"{CHILDREN}:compare", {**self._request, "precision": precision}, seconds=RUN_SECONDS)
        values = () if outcome.failure else (max(outcome.answer["difference"] / outcome.answer["largest"], 1e-12),)
        yield Row(
            "exactness", self._case, f"znnpy {precision}", "relative to the largest", values, outcome.failure,
            outcome.answer,
        )  # fmt: skip

    def torch(self, precision: str, compiled: bool, sides: Sequence[int]) -> Iterator[Row]:
        """Yield the speed of PyTorch on one window, and with half overlap."""
        request = {**self._request, "precision": precision, "compiled": compiled, "sides": sides, "rounds": 7}
        outcome = run_child(f"{CHILDREN}:run_torch", request, seconds=RUN_SECONDS)
        subject = f"PyTorch {precision}{', compiled' if compiled else ''}"
        if not outcome.answers:
            yield Row("windows", self._case, subject, "voxels/s", (), outcome.failure or "no window ended")
        for answer in outcome.answers:
            voxels, count = prod(answer["size"]), half_overlapping(self._size, answer["size"])
            case, facts = f"{self._case}, window {answer['size'][2]}", {**answer, "windows": count}
            values = tuple(voxels / spent for spent in answer["seconds"])
            yield Row("windows", case, subject, "voxels/s", values, None, facts)
            whole = (prod(self._size) / (count * median(answer["seconds"])),)
            yield Row("half overlap", case, subject, "voxels/s", whole, None, facts)


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(SIZES)), help="Measure only these networks.")
@click.option("--precision", "precisions", multiple=True, type=click.Choice(GPU_PRECISIONS), default=("fp16", "fp32"),
              show_default=True, help="Of znnpy.")  # fmt: skip
@click.option("--size", type=int, nargs=3, help="Voxels of the volume, z y x, instead of the network's own.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each that count.")
@click.option("--vram", help="Memory of the GPU that znnpy may take [default: what is free].")
@click.option("--torch/--no-torch", "with_torch", default=True, help="Also run PyTorch.")
@OUT
@QUICK
def command(
    names: tuple[str, ...],
    precisions: tuple[str, ...],
    size: Vec3 | None,
    rounds: int,
    vram: str | None,
    with_torch: bool,
    out: Path | None,
    quick: bool,
) -> None:
    """Measure graph networks on a GPU, and PyTorch window by window."""
    gpu = find_gpu()
    result = Result("gpu_graphs", machine_name(gpu), header(gpu))
    if out is not None or not quick:
        merge(result, out, () if names else GROUPS)
    for name in names or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            whole = size or ((128, 128, 128) if quick else SIZES[name])
            bench = Bench(name, Path(folder), whole, 1 if quick else rounds, vram)
            rows = [bench.runs(precision) for precision in precisions]
            if "fp32" in precisions:
                rows += [bench.exactness(precision) for precision in precisions if precision != "fp32"]
            if name in WINDOW_NETS:
                rows += [bench.runs(precision, "labels") for precision in precisions if precision != "fp32"]
            if with_torch:
                sides = (128,) if quick or name in WINDOW_NETS else SIDES
                ways = [(precision, compiled) for precision in ("fp16", "bf16") for compiled in (False, True)]
                rows += [bench.torch(*way, sides) for way in ways]
            for row in (row for some in rows for row in some):
                if row.group != "layers":
                    text = row.failure or f"{row.median:,.4g} {row.unit}"
                    click.echo(f"{row.group}: {row.case}, {row.subject}: {text}")
                result.add([row])
                if out is not None or not quick:
                    result.write(out)
