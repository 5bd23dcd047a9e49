"""Measure how much time a mask saves: runs with a mask and without one, each with the plan that is the fastest for it.

    python -m benchmarks masks [--side 512] [--network shallow --network fib25 ..] [--rounds 3] [--device gpu]

ball   A centred ball that holds 30 % of the volume.
blobs  Balls at random places that hold 30 % of the volume together, each about an eighth of it wide.

Prints the seconds of runs without a mask and with each one, medians of rounds in which they alternate, what the masks
left out, and by which share the time falls. Plans are made with the speeds that are stored for the machine; `znnpy
measure` gives better ones. Seconds of all processor cores together stand beside: they tell more where other programs
run. `shallow` has a field of view of 5, so that small patches cost it little; that of `fib25` is 25.
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
from benchmarks.harness.inputs import SEED, network_file, noise
from benchmarks.harness.options import DEVICE

INSIDE = 0.3  # of the volume
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


def shallow(folder: Path) -> Path:
    """Write a network of two convolutions with a field of view of 5, and return its path."""
    path, rng = folder / "shallow.yaml", np.random.default_rng(SEED)
    arrays = {
        "conv0_weight": rng.standard_normal((32, 1, 3, 3, 3), np.float32) / np.float32(1000),
        "conv0_bias": np.zeros(32, np.float32),
        "conv1_weight": rng.standard_normal((1, 32, 3, 3, 3), np.float32) / np.float32(30),
        "conv1_bias": np.zeros(1, np.float32),
    }
    save: Any = np.savez  # its keywords are arrays, whatever the stubs say
    save(folder / "shallow.npz", **arrays)
    kinds = ((32, "relu"), (1, "none"))
    entries = [f"- {{type: conv, kernel: [3, 3, 3], out: {maps}, activation: {name}}}" for maps, name in kinds]
    layers = "\n".join(entries)
    path.write_text(f"name: shallow\ninput_channels: 1\nweights: shallow.npz\nlayers:\n{layers}\n")
    return path


def measured(folder: Path, network: str, side: int, rounds: int, device: Any) -> None:
    """Print the seconds of runs of one network."""
    volume, out = folder / "volume.npy", folder / "out.h5"
    np.save(volume, noise((side,) * 3))
    path = shallow(folder) if network == "shallow" else network_file(folder, network)
    masks: dict[str, Path | None] = {"no mask": None}
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
    whole, of_cores = median(spent["no mask"]), median(cores["no mask"])
    for name, report in reports.items():
        seconds, plan = median(spent[name]), report.plan
        how = "columns in steps" if plan.main.streams else "patches"
        used = median(cores[name])
        click.echo(
            f"{network:8} {side}^3  {name:8} {seconds:7.2f} s ({min(spent[name]):.2f} to {max(spent[name]):.2f}), "
            f"falls by {1 - seconds / whole:4.0%}; cores {used:.1f} s, by {1 - used / of_cores:4.0%}; "
            f"{report.skipped / report.voxels:.0%} not computed; {how} of {'x'.join(map(str, plan.patch_out))}; "
            f"predicted {report.predicted_seconds:.2f} s"
        )


@click.command()
@DEVICE
@click.option("--side", type=int, default=512, show_default=True, help="Voxels along each axis of the volume.")
@click.option("--network", "networks", multiple=True, default=("shallow", "fib25"), show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True)
def command(device: str, side: int, networks: Sequence[str], rounds: int) -> None:
    """Measure how much time a mask saves."""
    for network in networks:
        with tempfile.TemporaryDirectory() as folder:
            measured(Path(folder), network, side, rounds, device)
