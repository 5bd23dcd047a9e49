"""Measure how fast graph networks are over a volume, within memory, and in PyTorch window by window.

znnpy runs from file to file, everything counted. PyTorch's time for a volume is that of a window times the number of
windows that MONAI's SlidingWindowInferer takes with half overlap, or that tiles with an exact halo take; reading,
blending and writing are not counted for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

import click

from benchmarks.graph_tables import PROGRAM as PROGRAM
from benchmarks.harness.graph_nets import NETS, GraphNet
from benchmarks.harness.inputs import Vec3
from benchmarks.harness.isolate import run_child
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.options import OUT, QUICK
from benchmarks.harness.results import Result, Row
from znnpy.shapes import CPU_PRECISIONS

CHILDREN = "benchmarks.graph_children"
SIDES = (96, 128, 160)  # of PyTorch's windows
HALO_SIDE = 128  # output of tiles with an exact halo
RUN_SECONDS = 1500.0
WINDOW_SECONDS = 120.0  # for all windows of one precision
GROUPS = ("runs", "plans", "layers", "windows", "half overlap", "exact halo", "exactness")
QUICK_SIZE: Vec3 = (32, 64, 64)


def half_overlapping(size: Vec3, window: Sequence[int]) -> int:
    """Return how many windows MONAI's SlidingWindowInferer takes with overlap 0.5."""
    return prod(ceil(max(0, n - w) / max(1, w // 2)) + 1 for n, w in zip(size, window, strict=True))


def with_halo(net: GraphNet, size: Vec3) -> tuple[int, Vec3]:
    """Return how many tiles of HALO_SIDE cover a volume, and the size of a tile with its halo."""
    count = prod(ceil(n / HALO_SIDE) for n in size)
    z, y, x = (
        min(-(-n // period) * period, HALO_SIDE + 2 * -(-reach // period) * period)
        for n, reach, period in zip(size, net.reach, net.period, strict=True)
    )
    return count, (z, y, x)


class Bench:
    """The measurements of one network."""

    def __init__(
        self, net: GraphNet, folder: Path, threads: int, size: Vec3, rounds: int, precision: str = "fp32"
    ) -> None:
        self._net, self._size, self._rounds, self._subject = net, size, rounds, f"znnpy {precision}"
        self._request: dict[str, Any] = {
            "folder": str(folder), "network": net.name, "size": size, "threads": threads, "precision": precision
        }  # fmt: skip

    def runs(self, rams: Sequence[str]) -> Iterator[Row]:
        """Yield whole runs within each limit."""
        for ram in rams:
            answers, failure = [], None
            for _ in range(self._rounds):
                outcome = run_child(f"{CHILDREN}:run_znnpy", {**self._request, "ram": ram}, seconds=RUN_SECONDS)
                failure = failure or outcome.failure
                answers += [outcome.answer] if outcome.failure is None else []
            values = tuple(answer["voxels"] / answer["seconds"] for answer in answers)
            facts = answers[-1] if answers else {}
            reason = None if values else failure or "no run ended"
            yield Row("runs", f"{self._net.name} within {ram}", self._subject, "voxels/s", values, reason, facts)

    def layers(self, ram: str) -> Iterator[Row]:
        """Yield the seconds of each operation of a plan, and the share of the machine that it reaches."""
        request = {**self._request, "ram": ram}
        outcome = run_child("benchmarks.graph_layers:layers", request, seconds=RUN_SECONDS)
        if outcome.failure is not None:
            yield Row("layers", self._net.name, self._subject, "s", (), outcome.failure)
        for number, answer in enumerate(outcome.answers):
            case = f"{self._net.name} {number}: {answer['shape']}"
            yield Row("layers", case, answer["primitive"], "s", tuple(answer["seconds"]), None, answer)

    def plans(self, rams: Sequence[str]) -> Iterator[Row]:
        """Yield the predicted speed within each limit, to see which have a plan."""
        for ram in rams:
            outcome = run_child(f"{CHILDREN}:plan_znnpy", {**self._request, "ram": ram}, seconds=RUN_SECONDS)
            values = (outcome.answer["voxels_per_second"],) if outcome.failure is None else ()
            yield Row(
                "plans", f"{self._net.name} within {ram}", self._subject, "voxels/s", values, outcome.failure,
                outcome.answer,
            )  # fmt: skip

    def torch(self, precisions: Sequence[str], sides: Sequence[int]) -> Iterator[Row]:
        """Yield the speed of PyTorch on one window, with half overlap, and with exact halos."""
        for precision in precisions:
            request = {
                **self._request, "precision": precision, "sides": sides, "rounds": 3, "seconds": WINDOW_SECONDS
            }  # fmt: skip
            outcome = run_child(f"{CHILDREN}:run_torch", request, seconds=6 * WINDOW_SECONDS)
            yield from self._of_windows(precision, outcome.answers, outcome.failure)

    def _of_windows(self, precision: str, answers: Sequence[Any], failure: str | None) -> Iterator[Row]:
        subject, case = f"PyTorch {precision}", self._net.name
        if not answers:
            yield Row("windows", case, subject, "voxels/s", (), failure or "no window ended")
            return
        for answer in answers:
            voxels, count = prod(answer["size"]), half_overlapping(self._size, answer["size"])
            facts = {"size": answer["size"], "windows": count, "peak_bytes": answer["peak_bytes"]}
            values = tuple(voxels / spent for spent in answer["seconds"])
            yield Row("windows", f"{case}, window {answer['size'][2]}", subject, "voxels/s", values, None, facts)
            whole = tuple(prod(self._size) / (count * spent) for spent in answer["seconds"])
            yield Row("half overlap", f"{case}, window {answer['size'][2]}", subject, "voxels/s", whole, None, facts)
        best = max(answers, key=lambda one: prod(one["size"]) / one["median"])
        count, tile = with_halo(self._net, self._size)
        rate = prod(best["size"]) / best["median"]
        values = (prod(self._size) / (count * prod(tile) / rate),)
        facts = {"tiles": count, "tile": tile, "estimated_from": best["size"]}
        yield Row("exact halo", f"{case}, tiles of {HALO_SIDE}", subject, "voxels/s", values, None, facts)

    def exactness(self) -> Iterator[Row]:
        """Yield the difference of the last run's corner from PyTorch."""
        outcome = run_child(f"{CHILDREN}:compare_with_torch", self._request, seconds=RUN_SECONDS)
        values = (max(outcome.answer["difference"], 1e-12),) if outcome.failure is None else ()
        yield Row(
            "exactness", self._net.name, self._subject, "difference from PyTorch fp32", values, outcome.failure,
            outcome.answer,
        )  # fmt: skip


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETS)), help="Measure only these networks.")
@click.option("--ram", "rams", multiple=True, default=("16G", "4G", "2G"), show_default=True, help="Limits of memory.")
@click.option("--threads", type=int, help="Threads of each [default: all cores].")
@click.option("--rounds", default=1, show_default=True, help="Whole runs within each limit.")
@click.option("--precision", type=click.Choice(CPU_PRECISIONS), default="fp32", show_default=True, help="Of znnpy.")
@click.option("--layers/--no-layers", "with_layers", default=True, help="Also time the layers of the plan alone.")
@click.option("--torch/--no-torch", "with_torch", default=True, help="Also run PyTorch.")
@OUT
@QUICK
def command(
    names: tuple[str, ...],
    rams: tuple[str, ...],
    threads: int | None,
    rounds: int,
    precision: str,
    with_layers: bool,
    with_torch: bool,
    out: Path | None,
    quick: bool,
) -> None:
    """Measure whole runs of U-Nets, from file to file, and PyTorch window by window."""
    threads = threads or os.cpu_count() or 1
    result = Result("graphs", machine_name(), {**header(), "threads": threads})
    if out is not None or not quick:
        merge(result, out, () if names else GROUPS)
    for name in names or NETS:
        net = NETS[name]
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(net, Path(folder), threads, QUICK_SIZE if quick else net.size, rounds, precision)
            rows = [bench.runs(("2G",) if quick else rams), bench.plans(("1G",))]
            if with_layers:
                rows.append(bench.layers("2G" if quick else rams[0]))
            if with_torch:
                sides = (32,) if quick else SIDES
                rows += [bench.exactness(), bench.torch(("fp32", "bf16"), sides)]
            for row in (row for some in rows for row in some):
                share = f", {row.facts['share']:.0%} of the machine" if row.group == "layers" and row.values else ""
                text = row.failure or f"{row.median:,.4g} {row.unit}{share}"
                click.echo(f"{row.group}: {row.case}, {row.subject}: {text}")
                result.add([row])
                if out is not None or not quick:
                    result.write(out)
