"""The part of memory.py that runs whole plans: what the system counts for a run, beside what its plan promises.

Random networks, volumes, limits and ways, each run from end to end by `znnpy infer`, from file to file. Measured is the
peak of the resident memory of that process (VmHWM), promised what its plan says of it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from columns_plans import own_bytes
from whole_runs import infer, random_volume

from znnpy.errors import NoPlanError
from znnpy.formats.networks import read_network, shipped
from znnpy.machine import Limits, this_machine
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.shapes import FLOAT32, Vec3, text

MIB = 2**20
LEAST_BYTES = 256 * MIB  # promised: below, what every process takes decides
MOST_RATIO = 1.15
LIMITS_MIB = 300, 2048
OUTPUT = 16, 300  # per axis
WAYS: tuple[tuple[bool | None, bool], ...] = (  # `columns` and `depth_first` of `make_plan`
    (None, True),
    (True, True),
    (False, True),
    (True, False),
    (False, False),
)
ODD = {
    "flat": """\
name: flat
input_channels: 1
layers:
- {type: conv, kernel: [1, 5, 4], out: 24, activation: relu}
- {type: pool, window: [1, 2, 2]}
- {type: conv, kernel: [3, 3, 3], out: 32, activation: relu}
- {type: pool, window: [2, 3, 1]}
- {type: conv, kernel: [2, 4, 3], out: 32, activation: tanh}
- {type: conv, kernel: [1, 1, 1], out: 2, activation: sigmoid}
""",
    "pools": """\
name: pools
input_channels: 2
layers:
- {type: pool, window: [2, 1, 2]}
- {type: conv, kernel: [3, 5, 3], out: 20, activation: relu}
- {type: pool, window: [2, 2, 2]}
- {type: pool, window: [1, 2, 1]}
- {type: conv, kernel: [3, 3, 3], out: 40, activation: relu}
- {type: pool, window: [3, 1, 1]}
""",
    "groups": """\
name: groups
input_channels: 1
layers:
- {type: conv, kernel: [5, 5, 5], out: 32, activation: relu}
- {type: maxout, of: 2}
- {type: maxfilter, window: [2, 3, 3]}
- {type: conv, kernel: [3, 3, 3], out: 48, activation: relu}
- {type: pool, window: [5, 1, 3]}
- {type: conv, kernel: [3, 3, 3], out: 24, activation: relu}
- {type: conv, kernel: [3, 3, 3], out: 3, activation: softmax}
""",
}


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One run; bytes."""

    network: str
    volume: Vec3
    limit: int
    patch_out: Vec3
    axis: int
    column: int
    parts: tuple[int, ...]
    threads: int
    promised: int
    measured: int
    seconds: float
    failure: str | None  # why nothing was measured

    @property
    def ratio(self) -> float:
        return self.promised / self.measured if self.measured else 0.0

    @property
    def kept(self) -> bool:
        return self.measured <= self.promised <= MOST_RATIO * self.measured and self.measured <= self.limit


def random_plan(networks: dict[str, str], options: argparse.Namespace, rng: np.random.Generator) -> tuple[str, Plan]:
    """A network, by name or file, and a plan that runs for a while and needs some memory."""
    while True:
        name = networks[str(rng.choice(list(networks)))]
        network = read_network(name).network
        z, y, x = np.exp(rng.uniform(np.log(OUTPUT[0]), np.log(OUTPUT[1]), 3)).astype(int).tolist()
        ram = int(np.exp(rng.uniform(np.log(LIMITS_MIB[0]), np.log(LIMITS_MIB[1])))) * MIB
        columns, depth_first = WAYS[rng.integers(len(WAYS))]
        threads = int(rng.choice(options.threads))
        try:
            plan = make_plan(
                network,
                (z, y, x),
                this_machine(),
                Limits(ram, threads),
                baseline=own_bytes() + FLOAT32 * network.parameters,
                columns=columns,
                depth_first=depth_first,
            )
        except NoPlanError:
            continue  # another limit will do
        if plan.memory.peak >= LEAST_BYTES and plan.seconds <= options.most_seconds:
            return name, plan


def measured(options: argparse.Namespace) -> Iterator[PlanRow]:
    """One row after the other."""
    own_bytes()  # before anything is planned
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        networks = {name: name for name in shipped()}
        for name, words in ODD.items():
            (folder / f"{name}.yaml").write_text(words)
            networks[name] = str(folder / f"{name}.yaml")
        networks = {name: networks[name] for name in options.networks or networks}
        for _ in range(options.plans):
            name, plan = random_plan(networks, options, rng)
            network = read_network(name).network
            size = network.patch_in(plan.output)
            volume = random_volume(folder, size, network.input_channels)
            done = infer(folder, name, volume, plan, limit_seconds=10 * options.most_seconds)
            volume.unlink()
            yield PlanRow(
                network=network.name,
                volume=size,
                limit=plan.limits.ram_bytes,
                patch_out=plan.patch_out,
                axis=plan.axis,
                column=plan.column_planes,
                parts=plan.sub_batches,
                threads=plan.limits.threads,
                promised=done.promised_bytes,
                measured=done.peak_bytes,
                seconds=done.seconds,
                failure=done.failure,
            )


def show(row: PlanRow) -> None:
    way = f"columns along {'zyx'[row.axis]} by" if row.column else "patches of"
    what = f"{row.network:15} {text(row.volume):12} {way} {text(row.patch_out)}, parts {max(row.parts)}"
    sizes = f"{row.promised / MIB:7.1f} / {row.measured / MIB:7.1f} of {row.limit / MIB:6.0f} MiB"
    verdict = row.failure or f"{sizes} {row.ratio:.3f}{'' if row.kept else '  not kept'}"
    print(f"{what:72} {verdict}", flush=True)


def summary(rows: list[PlanRow]) -> str:
    ratios = [row.ratio for row in rows]
    return (
        f"{len(rows)} plans: promised / measured {min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}; "
        f"kept {sum(row.kept for row in rows)} of {len(rows)}"
    )
