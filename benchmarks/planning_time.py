"""How long the planner thinks, and how much memory that takes: the paper's four networks and one of 20 layers.

    python benchmarks/planning_time.py [--networks n337 ...] [--ram 256] [--vram 4 [--mode gpu-host]] [--side 1024]
                                       [--rounds 6] [--against CHECKOUT] [--quick] [--out RESULT.json]

Each plan is made in a process of its own, as `znnpy plan` makes it with the best plan of every other kind; with
`--vram` as `znnpy infer` makes it, for an H200 of which nothing was measured, within so many GiB of its memory. Seconds
are the process time of `make_plan` on one core, and memory is the most that the process held, libraries included. With
`--against`, another checkout of znnpy plans in turn with this one, which first alternating, so that what else the
machine does meets both; its compiled kernels have to be there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from header import machine_header, without_forced_blas_kernels

HERE = Path(__file__).parents[1]
GIB = 2**30
BASELINE = 150 * 2**20  # bytes of the process that a plan is made for
DEEP = "20 layers"
H200: dict[str, Any] = {
    "name": "NVIDIA H200, assumed",
    "capability": (9, 0),
    "multiprocessors": 132,
    "memory_bytes": 150109880320,
    "l2_bytes": 62914560,
    "shared_block_bytes": 232448,
    "shared_multiprocessor_bytes": 233472,
    "bandwidth": 4.8e12,
    "driver": 13000,
    "versions": (("cupy", "14.2.0"), ("cudnn-cu13", "9.19.0.56"), ("cudnn-frontend", "1.28.0")),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One network to plan."""

    network: str
    why: str


CASES = (
    *(Case(name, why="one of the paper's: is it under 2 s on one core?") for name in ("n337", "n537", "n726", "n926")),
    Case(DEEP, why="as deep as networks come: is it under 5 s?"),
)


def one_plan(name: str, ram: float, side: int, vram: float, mode: Any) -> dict[str, Any]:
    """Of this process; nothing else was planned in it. vram  0: for the processor; mode  None: of the device alone."""
    from znnpy.formats.networks import read_network
    from znnpy.inference import peak_bytes
    from znnpy.machine import Gpu, Limits, this_machine
    from znnpy.network import Conv, Network, Pool
    from znnpy.planner.search import make_plan

    if name == DEEP:
        conv, pool = Conv((3, 3, 3), 40, "relu"), Pool((2, 2, 2))
        network = Network(name, 1, (conv, conv, pool, conv, conv, pool, *(conv,) * 13, Conv((1, 1, 1), 3, "none")))
    else:
        network = read_network(name).network
    machine = this_machine()
    limits, output = Limits(int(ram * GIB), machine.cores), network.dense_size((side, side, side))
    wishes: dict[str, Any] = {"kinds": True}
    if vram:
        machine, limits = replace(machine, gpu=Gpu(**H200)), replace(limits, vram_bytes=int(vram * GIB))
        wishes = {"device": "gpu", "mode": mode}
    begin = time.process_time()
    plan = make_plan(network, output, machine, limits, baseline=BASELINE, **wishes)
    return {
        "seconds": time.process_time() - begin,
        "peak_mib": peak_bytes() / 2**20,
        "layers": len(network.layers),
        "voxels_per_second": plan.voxels_per_second,
        "patch_out": plan.patch_out,
        "column": plan.column_planes,
    }


def planned(checkout: Path, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    words = [sys.executable, str(Path(__file__).resolve()), "--one", name]
    words += ["--ram", str(asked.ram), "--side", str(asked.side), "--vram", str(asked.vram)]
    words += ["--mode", asked.mode] if asked.mode else []
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"planning {name} in {checkout} ended with {done.returncode}: {done.stderr.strip()}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds: the plans are the same."""
    seconds = [run["seconds"] for run in runs]
    return {
        **runs[0],
        "seconds": {"least": min(seconds), "median": median(seconds), "most": max(seconds)},
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[case.network for case in CASES])
    parser.add_argument("--ram", type=float, default=256.0, help="GiB")
    parser.add_argument("--vram", type=float, default=0.0, help="GiB; 0: plans for the processor")
    parser.add_argument("--mode", choices=["gpu-host", "cpu-to-gpu"], help="of two devices, with --vram")
    parser.add_argument("--side", type=int, default=1024, help="of the volume, in voxels")
    parser.add_argument("--rounds", type=int, default=6, help="an even number")
    parser.add_argument("--against", type=Path, help="another checkout of znnpy")
    parser.add_argument("--quick", action="store_true", help="one network, a small volume")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        print(json.dumps(one_plan(words.one, words.ram, words.side, words.vram, words.mode)))
        return
    if words.quick:
        words.networks, words.ram, words.side, words.rounds = ["n926"], 64.0, 300, 2
    checkouts = {"here": HERE, **({"against": words.against.resolve()} if words.against else {})}
    results = []
    for name in words.networks:
        runs: dict[str, list[dict[str, Any]]] = {which: [] for which in checkouts}
        for index in range(words.rounds):
            for which in sorted(checkouts, reverse=bool(index % 2)):
                runs[which].append(planned(checkouts[which], name, words))
        row = {"network": name, **{which: summary(found) for which, found in runs.items()}}
        results.append(row)
        for which in checkouts:
            spent, peak = row[which]["seconds"], row[which]["peak_mib"]
            spread = f"{spent['least']:.2f} to {spent['most']:.2f}, median {spent['median']:.2f} s"
            print(f"{name} {which}: {spread}, {peak:.0f} MiB, {row[which]['voxels_per_second']:,.0f} voxels/s")
    if words.out:
        limits = {"ram_gib": words.ram, "vram_gib": words.vram, "mode": words.mode}
        limits |= {"side": words.side, "rounds": words.rounds}
        content = {"machine": machine_header(), **limits, "results": results}
        words.out.parent.mkdir(exist_ok=True)
        words.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
