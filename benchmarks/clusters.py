"""Measure what many processes cost: the scheduler of dask, and the borders of work items.

    python -m benchmarks clusters [-g scale] [-g speed] [--rounds 3]

scale  A scheduler, and 100 workers that share another process, with 10,000 items of 2 s. Of the items 2 % fail, and one
       worker in 20 takes twice as long. Kept are the processor time of the scheduler for an item, the share of the
       workers' time in which they computed nothing, and the growth of the scheduler's memory in the second half.
speed  Two workers with one thread each, and one process with two threads, alternate, from file to file. Both compute
       the output of the case. `borders` is the share of the workers' work that one plan for the whole output would
       save, counted by the plans of one worker; the workers reach at most the rest of the speed of one process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

import znnpy
from benchmarks.harness import markdown, options
from benchmarks.harness.inputs import field_of_view, network_file, noise
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Program, Result, Results, Row, ratio_of

GROUPS = ("scale", "speed")
SCALE = (100, 10_000)  # workers and items
SPEED = ("n337:384", "n926:256")  # networks, and voxels along each side of the output
QUICK_SCALE, QUICK_SPEED = (4, 12), ("tiny:48",)
TOGETHER, ALONE = "two workers", "one process"
START_SECONDS = 60.0


def scale(workers: int, items: int) -> list[Row]:
    """Compute items that only take time; return a row for each figure."""
    from distributed import Client

    from benchmarks.simulated_items import waited
    from znnpy.cluster.dask_workers import Coordinator
    from znnpy.cluster.job import Job

    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        words = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        scheduler = subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_scheduler", *words], **quiet)
        several = None
        try:
            until = time.monotonic() + START_SECONDS
            while not file.exists() and time.monotonic() < until:
                time.sleep(0.1)
            with Client(scheduler_file=str(file)) as client:
                address = str(client.scheduler_info()["address"])
                words = ["-m", "benchmarks.simulated_items", address, str(workers)]
                several = subprocess.Popen([sys.executable, *words], **quiet)
                client.wait_for_workers(workers, timeout=START_SECONDS)
                process, memory = psutil.Process(scheduler.pid), list[int]()
                job = Job(str(Path(folder) / "none.zarr"), "0" * 16)
                made = Coordinator(
                    client, job, items, [], None, lambda _: memory.append(process.memory_info().rss), waited
                )
                before, began = sum(process.cpu_times()[:2]), time.perf_counter()
                made.run()
                spent = time.perf_counter() - began
                used = sum(process.cpu_times()[:2]) - before
        finally:
            for one in (scheduler, several):
                if one is not None:
                    one.kill()
                    one.wait()
    busy = sum(one.seconds for one in made.figures.values())
    facts = {"seconds": spent, "failures": made.failures}
    case = f"{workers} workers, {items:,} items"
    grown = (memory[-1] - memory[len(memory) // 2]) / 2**20
    return [
        Row("scale", case, "processor time of the scheduler", "ms/item", (1e3 * used / items,), None, facts),
        Row("scale", case, "time of workers without items", "%", (100 * (1 - busy / (workers * spent)),)),
        Row("scale", case, "growth of the scheduler", "MiB", (grown,)),
    ]


def speed(case: str, rounds: int) -> list[Row]:
    """Compute an output by two workers and by one process in turn; return a row for each."""
    from distributed import Client, LocalCluster

    network, _, side = case.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        path = network_file(Path(folder), network)
        volume = Path(folder) / "volume.npy"
        np.save(volume, noise((int(side) + field_of_view(network) - 1,) * 3))
        local = LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0")
        with local as cluster, Client(cluster) as client:
            ram = psutil.virtual_memory().total * 3 // 4
            spent: dict[str, list[float]] = {TOGETHER: [], ALONE: []}
            facts: dict[str, Any] = {}
            for number in range(rounds):
                for name in (TOGETHER, ALONE) if number % 2 == 0 else (ALONE, TOGETHER):
                    more: dict[str, Any] = (
                        {"client": client, "ram": ram // 2} if name == TOGETHER else {"threads": 2, "ram": ram}
                    )
                    out = Path(folder) / "out.zarr"
                    report = znnpy.infer(volume, path, out=out, overwrite=True, device="cpu", **more)
                    spent[name].append(report.voxels / report.seconds)
                    if isinstance(report, znnpy.ClusterReport):
                        facts = {"borders": report.lost or 0.0, "item": list(report.item), "items": report.items}
    return [
        Row("speed", case, TOGETHER, "voxels/s", tuple(spent[TOGETHER]), None, facts),
        Row("speed", case, ALONE, "voxels/s", tuple(spent[ALONE])),
    ]


def scale_table(results: Results) -> str:
    """Return what the scheduler costs, of all machines."""
    made = results.get("clusters", ())
    return markdown.sections(made, [_scale_table(result) for result in made], "clusters")


def speed_table(results: Results) -> str:
    """Return how fast two workers are, of all machines."""
    made = results.get("clusters", ())
    return markdown.sections(made, [_speed_table(result) for result in made], "clusters")


def _scale_table(result: Result) -> str:
    rows = [row for row in result.rows if row.group == "scale"]
    lines = [(row.case, row.subject, f"{markdown.number(row.median)} {row.unit}") for row in rows]
    return markdown.table(("case", "figure", "value"), lines, left=2)


def _speed_table(result: Result) -> str:
    lines = []
    for case, (together, alone) in result.cases("speed"):
        network, _, side = case.partition(":")
        ratio, rest = ratio_of(together.values, alone.values), 1 - together.facts["borders"]
        lines.append((
            network, f"{side}^3", markdown.number(together.median), markdown.number(alone.median), str(ratio),
            f"{together.facts['borders']:.1%}", f"{ratio.median / rest:.2f}", f"{together.facts['items']}",
        ))  # fmt: skip
    head = ("network", "output", "two workers", "one process", "ratio", "borders", "ratio without borders", "items")
    return markdown.table(head, lines)


def headline(result: Result) -> str:
    """Return the first figure of each group."""
    first = next((row for row in result.rows if row.group == "scale"), None)
    said = [] if first is None else [f"{first.case}: {markdown.number(first.median)} ms of the scheduler an item"]
    for case, (together, alone) in result.cases("speed"):
        ratio = ratio_of(together.values, alone.values).median / (1 - together.facts["borders"])
        said.append(f"{case}: two workers reach {ratio:.2f} of one process, without borders")
        break
    return "; ".join(said)


PROGRAM = Program(
    "clusters",
    "What do many processes cost?",
    "clusters",
    {"clusters-scale": scale_table, "clusters-speed": speed_table},
    headline,
)


@click.command()
@options.OUT
@options.QUICK
@click.option(
    "-g", "--group", "groups", multiple=True, default=GROUPS, type=click.Choice(GROUPS), help="Part to measure."
)
@click.option("--case", "cases", multiple=True, default=SPEED, show_default=True, help="Network and side of an output.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def command(out: Path | None, quick: bool, groups: Collection[str], cases: Sequence[str], rounds: int) -> None:
    """Measure what many processes cost."""
    result = Result("clusters", machine_name(), header())
    keeps = out is not None or not quick
    if keeps:
        merge(result, out, set(groups))
    if "scale" in groups:
        result.add(scale(*(QUICK_SCALE if quick else SCALE)))
        if keeps:
            result.write(out)
    for case in (QUICK_SPEED if quick else cases) if "speed" in groups else ():
        result.add(speed(case, rounds))
        if keeps:
            result.write(out)
    click.echo(_scale_table(result))
    click.echo(_speed_table(result))
