"""How much faster are several GPUs of one host than one, and than the planner says they can be?

    python benchmarks/several_gpus.py [--networks n337 n537 n726 n926] [--gpus 2 4] [--side 1024] [--rounds 2]
                                      [--precision tf32] [--vram 64G] [--quick] [--out RESULT.json]

For each network plans for the same volume: one GPU's, and several GPUs' (`planner.several`), for each of `--gpus`. From
the host's memory into the host's memory, which `--writers` threads write, through the pipeline that a run goes through;
one and several in turn, `--rounds` times, each once before it counts. Beside voxels per second stand what the plans
said, and the bound: so many times that of one, less the borders that cutting the volume costs and the columns that do
not come out even. Every voxel has to be written, and what several GPUs write has to be what one does: apart by no more,
of the size of the values, than both plans may round together. In fp32 no voxel may be further apart; in tf32 and fp16,
whose tolerances are for samples, the root of the mean square may not, and no voxel five times as far. Where it is, the
results say so and the command fails.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from contestants import random_network
from contestants_gpu import Held, Kept, Warm, noise
from gpu_card import gpu_header
from header import machine_header

from znnpy.formats.weights import random_weights
from znnpy.kernels.crew import Crew
from znnpy.kernels.gpu import device
from znnpy.network import Network
from znnpy.planner.plan import Plan
from znnpy.planning import plan
from znnpy.run import pipeline
from znnpy.run.devices import Site, site_for
from znnpy.run.lane import Lane
from znnpy.run.session import Session
from znnpy.run.shares import Shares
from znnpy.shapes import PRECISIONS
from znnpy.verify import TOLERANCES

NETWORKS = ("n337", "n537", "n726", "n926")
FAR = 5  # times what two plans may round together: a lost patch is further, of 2e9 voxels the furthest was 1.6 times
Facts = dict[str, Any]


@contextmanager
def lanes(site: Site, made: Plan, network: Network) -> Iterator[list[tuple[str, Warm, Crew]]]:
    """A session on each of as many GPUs as the plan is for."""
    with Crew(made.limits.threads) as crew, ExitStack() as stack:
        yield [
            (
                f"GPU {gpu.number}",
                Warm(stack.enter_context(Session(made, network, random_weights(network), crew, device=gpu))),
                crew,
            )
            for gpu in site.gpus[: made.devices]
        ]


def runs(site: Site, made: Plan, network: Network, source: Held, target: Kept, times: int) -> list[pipeline.Timings]:
    """The first does not count: in it kernels are compiled and buffers pinned."""
    columns, found = made.cover(network), []
    with lanes(site, made, network) as ready:
        for _ in range(1 + times):
            shares = Shares(columns)
            target.voxels[:] = np.nan
            found.append(pipeline.run_lanes([Lane(*lane, shares) for lane in ready], source, target))
            assert not np.isnan(target.voxels).any(), "voxels were not written"
    return found[1:]


class Apart(NamedTuple):
    """How far two outputs are apart, as a share of the size of the values: what TOLERANCES are of."""

    most: float
    rms: float


def apart(one: npt.NDArray[np.floating], other: npt.NDArray[np.floating], threads: int = 1) -> Apart:
    """Of two outputs, both (maps, z, y, x).

    As `znnpy verify` measures errors: the size of a value is the largest of 1, the value, and the rms of its map, in
    `one`.
    """
    found = []
    with ThreadPoolExecutor(threads) as pool:  # a plane at a time: an output may take half of the memory
        for planes, others in zip(one, other, strict=True):
            rms = float(
                np.sqrt(np.mean(list(pool.map(lambda plane: np.square(plane, dtype=np.float64).mean(), planes))))
            )

            def of(plane: Any, beside: Any, least: float = max(1.0, rms)) -> tuple[float, float]:
                shares = np.abs(plane - beside) / np.maximum(np.abs(plane), least)
                return float(shares.max()), float(np.square(shares, dtype=np.float64).mean())

            found += list(pool.map(of, planes, others))
    most, squares = np.array(found).T
    return Apart(float(most.max()), float(np.sqrt(squares.mean())))


def of_plan(made: Plan) -> Facts:
    """What is kept of it."""
    return {
        "network": made.network_name,
        "limits": asdict(made.limits),
        "patch_out": made.patch_out,
        "axis": made.axis,
        "column": made.column_planes,
        "choices": [
            {"primitive": c.primitive, "variant": str(c.variant), "seconds": c.seconds, "runs": c.executions}
            for c in made.choices
        ],
        "memory": asdict(made.memory),
    }


def compared(name: str, options: argparse.Namespace) -> Facts:
    """One network."""
    network = random_network(name)
    words: Facts = {"device": "gpu", "precision": options.precision, "vram": options.vram}
    shape, counts = (options.side,) * 3, [1, *options.gpus]
    plans = [plan(name, shape=shape, gpus=gpus, output_dtype="float32", **words) for gpus in counts]
    source = Held(noise(shape, network.input_channels))
    size = (network.output_channels, *plans[0].output)
    targets = [Kept(np.empty(size, np.float32), options.writers) for _ in range(2)]  # of one GPU, and of several
    timings: list[list[pipeline.Timings]] = [[] for _ in plans]
    with site_for(lambda site: plans[-1], "gpu", options.vram, options.precision, gpus=max(counts)) as (site, _):
        furthest = [Apart(0.0, 0.0)] * len(plans)
        for _ in range(options.rounds):
            for place, made in enumerate(plans):
                target = targets[made.memory.devices > 1]
                timings[place] += runs(site, made, network, source, target, 1)
                found = apart(targets[0].voxels, target.voxels, options.writers)
                furthest[place] = Apart(*np.maximum(furthest[place], found).tolist())  # NaN stays
    seconds = [median(t.seconds for t in found) for found in timings]
    return {
        "network": name,
        "precision": options.precision,
        "side": options.side,
        "output": plans[0].output,
        "writers": options.writers,
        "gpus": counts,
        "plans": [of_plan(made) for made in plans],
        "seconds": [[t.seconds for t in found] for found in timings],
        "writing_seconds": [[t.stage_seconds["writing"] for t in found] for found in timings],
        "lanes": [
            [{lane.name: {"voxels": lane.voxels, **lane.seconds} for lane in t.lanes} for t in found]
            for found in timings
        ],
        "voxels_per_second": [prod(plans[0].output) / spent for spent in seconds],
        "planned_voxels_per_second": [made.voxels_per_second for made in plans],
        "gain": [seconds[0] / spent for spent in seconds],
        "bound": [plans[0].seconds / made.seconds for made in plans],
        "apart": [each.most for each in furthest],
        "apart_rms": [each.rms for each in furthest],
        "allowed": 2 * TOLERANCES[options.precision],  # each plan rounds in its own way
    }


def too_far(facts: Facts) -> list[int]:
    """Counts of GPUs whose output is; NaN is too."""
    allowed = Apart(facts["allowed"], facts["allowed"])
    if facts["precision"] != "fp32":
        allowed = Apart(FAR * facts["allowed"], facts["allowed"])
    found = map(Apart, facts["apart"], facts["apart_rms"])
    return [
        gpus
        for gpus, far in zip(facts["gpus"], found, strict=True)
        if not (far.most <= allowed.most and far.rms <= allowed.rms)
    ]


def lines(facts: Facts) -> list[str]:
    """One for each number of GPUs."""
    found, wrong = [], too_far(facts)
    for place, gpus in enumerate(facts["gpus"][1:], 1):
        speeds, gain, bound = facts["voxels_per_second"], facts["gain"][place], facts["bound"][place]
        far = f"apart by {facts['apart'][place]:.1e} of the values, rms {facts['apart_rms'][place]:.1e}"
        found.append(
            f"{facts['network']:6} one GPU {speeds[0]:,.0f} voxels/s, {gpus} GPUs {speeds[place]:,.0f}: "
            f"{gain:.3f} times, bound {bound:.3f}, {gain / bound:.3f} of it; {far}, {facts['allowed']:.0e} allowed"
            f"{': TOO FAR' * (gpus in wrong)}"
        )
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--gpus", type=int, nargs="+", default=[2])
    parser.add_argument("--side", type=int, default=1024, help="of the volume")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32")
    parser.add_argument("--vram", default="64G", help="of each GPU")
    parser.add_argument("--writers", type=int, default=8, help="threads that copy what came out into the output")
    parser.add_argument("--quick", action="store_true", help="a small volume, one round: to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "several_gpus.json")
    options = parser.parse_args(given)
    if options.quick:
        options.side, options.rounds = min(options.side, 40), 1
    rows = []
    for name in options.networks:
        rows.append(compared(name, options))
        print("\n".join(lines(rows[-1])), flush=True)
        options.out.write_text(
            json.dumps({"header": machine_header() | gpu_header(device.find_gpu()), "rows": rows}) + "\n"
        )
    print(options.out)
    if any(map(too_far, rows)):
        raise SystemExit("several GPUs do not write what one does: see TOO FAR above")


if __name__ == "__main__":
    main()
