"""Measure how much time a mask saves: runs with a mask and without one, each with the plan that is the fastest for it.

    python -m benchmarks masks [--case shallow:512 --case chain:256 ..] [--rounds 3] [--device gpu]

ball   A centred ball that holds 30 % of the volume.
blobs  Balls at random places that hold 30 % of the volume together, each about an eighth of it wide.

Runs without a mask and with each one alternate. The wall clock and the seconds of all processor cores together are
kept: the latter tell more where other programs run. A run is a call of `znnpy.infer` from file to file, with planning
and the reading of the mask. Plans are made with the speeds that are stored for the machine.

shallow  two convolutions with 32 maps between them, field of view 5: it computes little, so that what every run takes
         beside its layers counts.
chain    four convolutions with 24 maps between them, field of view 9.
fib25    field of view 25: small patches compute much twice.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import znnpy
from benchmarks.harness import markdown, options
from benchmarks.harness.inputs import SEED, network_file, noise
from benchmarks.harness.machine import find_gpu, header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Program, Ratio, Result, Results, Row, ratio_of

INSIDE = 0.3  # of the volume
WHOLE = "none"  # the name of a run without a mask
PLAIN = {"shallow": (2, 32), "chain": (4, 24)}  # convolutions of a network, and maps between them
CASES = ("shallow:512", "chain:512", "fib25:384")
BLOB = 0.06  # radius of a blob, in sides of the volume
Mask = npt.NDArray[np.uint8]


def ball(side: int) -> Mask:
    """Return a centred ball that holds INSIDE of a cube."""
    radius = (INSIDE * 3 / 4 / np.pi) ** (1 / 3) * side
    return _ball((side,) * 3, np.full(3, (side - 1) / 2), radius)


def blobs(side: int) -> Mask:
    """Return balls at random places, as many as hold INSIDE of a cube."""
    rng, mask = np.random.default_rng(SEED), np.zeros((side,) * 3, np.uint8)
    radius = BLOB * side
    while mask.mean() < INSIDE:
        centre = rng.random(3) * side
        lo = np.maximum(0, np.floor(centre - radius)).astype(int)
        hi = np.minimum(side, np.ceil(centre + radius) + 1).astype(int)
        part = mask[lo[0] : hi[0], lo[1] : hi[1], lo[2] : hi[2]]
        part |= _ball(part.shape, centre - lo, radius)
    return mask


def _ball(size: Sequence[int], centre: npt.NDArray[np.float64], radius: float) -> Mask:
    z, y, x = (np.square(np.arange(n) - at) for n, at in zip(size, centre, strict=True))
    found: Mask = (z[:, None, None] + y[:, None] + x <= radius * radius).astype(np.uint8)
    return found


def plain(folder: Path, name: str) -> Path:
    """Write a network of convolutions with kernels of 3 in PLAIN, and return its path."""
    path, rng, (count, maps) = folder / f"{name}.yaml", np.random.default_rng(SEED), PLAIN[name]
    arrays, entries, fin = {}, [], 1
    for number in range(count):
        last = number == count - 1
        out = 1 if last else maps
        scale = np.float32(np.sqrt(2 / (fin * 27)) / (1 if number else 128))
        arrays[f"conv{number}_weight"] = scale * rng.standard_normal((out, fin, 3, 3, 3), np.float32)
        arrays[f"conv{number}_bias"] = np.zeros(out, np.float32)
        entries.append(f"- {{type: conv, kernel: [3, 3, 3], out: {out}, activation: {'none' if last else 'relu'}}}")
        fin = out
    save: Any = np.savez  # its keywords are arrays, whatever the stubs say
    save(folder / f"{name}.npz", **arrays)
    layers = "\n".join(entries)
    path.write_text(f"name: {name}\ninput_channels: 1\nweights: {name}.npz\nlayers:\n{layers}\n")
    return path


def measured(folder: Path, network: str, side: int, rounds: int, device: Any) -> list[Row]:
    """Run one network without a mask and with each; return a row for each."""
    volume, out = folder / "volume.npy", folder / "out.h5"
    np.save(volume, noise((side,) * 3))
    path = plain(folder, network) if network in PLAIN else network_file(folder, network)
    masks: dict[str, Path | None] = {WHOLE: None}
    for name, made in (("ball", ball(side)), ("blobs", blobs(side))):
        masks[name] = folder / f"{name}.npy"
        np.save(folder / f"{name}.npy", made)
    spent: dict[str, list[float]] = {name: [] for name in masks}
    cores: dict[str, list[float]] = {name: [] for name in masks}
    reports = {}
    for number in range(rounds):
        for name in masks if number % 2 == 0 else reversed(masks):
            begin, used = time.perf_counter(), time.process_time()
            reports[name] = znnpy.infer(
                volume, path, out=out, mask=masks[name], border="reflect", device=device, output_dtype="uint8",
                overwrite=True,
            )  # fmt: skip
            spent[name].append(time.perf_counter() - begin)
            cores[name].append(time.process_time() - used)
    found = []
    for name, report in reports.items():
        facts = {
            "core_seconds": cores[name],
            "not_computed": report.skipped / report.voxels,
            "steps": f"{'columns in steps' if report.plan.main.streams else 'patches'} of {_text(report.plan)}",
            "predicted": report.predicted_seconds,
            "stages": dict(report.stage_seconds),
        }
        found.append(Row(network, f"{side}^3", name, "s", tuple(spent[name]), None, facts))
    return found


def _text(plan: Any) -> str:
    return "x".join(map(str, plan.patch_out))


def table_of(results: Results) -> str:
    """Return how much time masks save, of all machines."""
    made = results.get("masks", ())
    return markdown.sections(made, [_table(result) for result in made], "masks")


def _table(result: Result) -> str:
    lines = []
    for network in dict.fromkeys(row.group for row in result.rows):
        for case, rows in result.cases(network):
            whole = next(row for row in rows if row.subject == WHOLE)
            for row in rows:
                wall, used = ratio_of(row.values, whole.values), _cores(row, whole)
                saved = ("", "") if row is whole else (_fall(wall), _fall(used))
                lines.append((
                    network, case, row.subject, markdown.number(row.median),
                    markdown.number(median(row.facts["core_seconds"])), *saved,
                    f"{row.facts['not_computed']:.0%}", row.facts["steps"],
                ))  # fmt: skip
    head = ("network", "volume", "mask", "s", "core s", "s fall by", "core s fall by", "not computed", "plan")
    return markdown.table(head, lines, left=3)


def _cores(row: Row, whole: Row) -> Ratio:
    return ratio_of(row.facts["core_seconds"], whole.facts["core_seconds"])


def _fall(ratio: Ratio) -> str:
    return f"{1 - ratio.median:.0%} ({1 - ratio.high:.0%} to {1 - ratio.low:.0%})"


def headline(result: Result) -> str:
    """Return what the ball saves in the first case."""
    first = result.rows[0]
    whole, masked = (row for row in result.rows[:2])
    return f"{first.group} {first.case}: core seconds fall by {1 - _cores(masked, whole).median:.0%} with a ball"


PROGRAM = Program("masks", "How much time does a mask save?", "masks [--device gpu]", {"masks": table_of}, headline)


@click.command()
@options.DEVICE
@options.OUT
@options.QUICK
@click.option("--case", "cases", multiple=True, default=CASES, show_default=True, help="Network and side of a volume.")
@click.option("--rounds", type=int, default=3, show_default=True)
def command(device: str, out: Path | None, quick: bool, cases: Sequence[str], rounds: int) -> None:
    """Measure how much time a mask saves."""
    gpu = find_gpu(device)
    result = Result("masks", machine_name(gpu), header(gpu))
    cases = ["shallow:40"] if quick else cases
    if out is not None or not quick:
        merge(result, out, {case.split(":")[0] for case in cases})
    for case in cases:
        network, side = case.split(":")
        with tempfile.TemporaryDirectory() as folder:
            result.add(measured(Path(folder), network, int(side), rounds, device))
        if out is not None or not quick:
            result.write(out)
    click.echo(_table(result))
