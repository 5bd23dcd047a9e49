"""What planning.py plans for: every network within every limit, on a machine that `znnpy measure` has measured.

The volume of a point is the largest of those allowed in which a part of the run takes seconds: whole steps along one
axis, and columns where whole ones fit, as many as are predicted to take `--point-seconds`, steps before the output
begins among them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from columns_plans import own_bytes, planned
from planning_plans import Ground
from planning_tables import Facts, Row

from znnpy.errors import DeviceError, NoPlanError, PlanFileError, ShapeError
from znnpy.formats.networks import read_network
from znnpy.machine import parse_bytes
from znnpy.network import Network
from znnpy.planner.cost_model import assumed_rates
from znnpy.planner.plan import Plan
from znnpy.planner.validate import check_runs
from znnpy.run.devices import Site, opened
from znnpy.run.shelf import Shelf
from znnpy.shapes import FLOAT32, Vec3

SIDES = {"cpu": (512, 384, 256, 192), "gpu": (1024, 768, 512, 384)}  # of volumes
SPARE_SECONDS = 120.0  # of `znnpy measure`, beside those that it is given

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Point:
    """One row, and what its plans are made on."""

    row: Row
    network: Network
    ground: Ground
    pick: Plan
    part: Vec3  # of the output that a whole run computes

    def __str__(self) -> str:
        return f"{self.network.name} {self.row.limit}"

    def part_seconds(self, plan: Plan) -> float:
        """Predicted, of such a run by a plan."""
        return plan.for_output(part_of(plan, self.network, self.row.point_seconds), self.network, plan.memory).seconds


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What one process plans."""

    network: Network
    ground: Ground
    sides: tuple[int, ...]
    point_seconds: float


@dataclass(frozen=True, slots=True)
class _Made:
    side: int
    plan: Plan | None
    seconds: float  # that it took to plan
    failure: str | None = None


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Inside, what is measured is kept in a folder of its own, here and in processes that are started."""
    name = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    before = os.environ.get(name)
    os.environ[name] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def measured(options: argparse.Namespace) -> list[Facts]:
    """What `znnpy measure` said of the machine, and of each network where there is time for that."""
    words = [sys.executable, "-m", "znnpy", "measure", "--device", options.device, "--json"]
    words += ["--precision", options.precision] if options.device == "gpu" else ["--threads", str(options.threads)]
    turns: list[tuple[list[str], float]] = [([], options.measure_minutes)]
    if options.device == "cpu":  # plans for a GPU come with their layers measured
        turns += [([name], options.network_minutes) for name in options.networks]
    found = []
    for more, minutes in turns:
        if minutes <= 0:
            continue
        begin = time.perf_counter()
        done = subprocess.run(
            [*words, *more, "--minutes", str(minutes)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * minutes + SPARE_SECONDS,
        )
        if done.returncode:
            raise SystemExit(f"znnpy measure {' '.join(more)}: {done.stderr.strip()[-300:]}")
        spent = time.perf_counter() - begin
        print(f"znnpy measure {' '.join(more)}: {spent:.1f} s", flush=True)
        found.append(json.loads(done.stdout) | {"network": more[0] if more else None, "wall_seconds": spent})
    return found


def points(options: argparse.Namespace, rows: dict[tuple[str, str], Row]) -> list[Point]:
    """Every network within every limit that has a plan; plans that `rows` hold are taken up where they still run."""
    wanted: dict[tuple[str, str], _Wanted] = {}
    found: dict[tuple[str, str], Point] = {}
    for key, ground in apart(grounds, options, alone=options.device == "gpu").items():
        network = read_network(key[0]).network
        if isinstance(ground, str):
            rows[key] = Row(*key, failure=ground)
        elif (kept := _taken_up(rows.get(key), network, ground)) is not None:
            found[key] = kept
        else:
            wanted[key] = _Wanted(network, ground, tuple(options.sides), options.point_seconds)
    for (key, want), made in zip(wanted.items(), spread(_made, list(wanted.values()), options.workers), strict=True):
        rows[key] = row = Row(*key, made.side, options.point_seconds, failure=made.failure)
        if made.plan is not None:
            row.plan = json.loads(made.plan.to_json())
            part = part_of(made.plan, want.network, options.point_seconds)
            row.planned = planned(made.plan) | {
                "planning_seconds": made.seconds,
                "fitted": made.plan.fitted,
                "vram_bytes": made.plan.memory.vram,
                "context_bytes": want.ground.context,
                "part": part,
                "part_seconds": made.plan.for_output(part, want.network, made.plan.memory).seconds,
            }
            found[key] = Point(row, want.network, want.ground, made.plan, part)
        print(f"{Path(key[0]).stem} {key[1]}: {said_of(row)}", flush=True)
    return [found[name, limit] for name in options.networks for limit in options.limits if (name, limit) in found]


def said_of(row: Row) -> str:
    if row.failure:
        return row.failure
    facts = row.planned
    return (
        f"{facts['voxels_per_second']:,.0f} voxels/s planned in {facts['planning_seconds']:.1f} s for a volume of "
        f"{row.side}^3, of which {'x'.join(map(str, facts['part']))} take {facts['part_seconds']:.1f} s"
    )


def grounds(options: argparse.Namespace) -> dict[tuple[str, str], Ground | str]:
    """What plans are made on for every network within every limit, a GPU's layers measured; or why there are none."""
    own_bytes()  # before anything else is held
    found: dict[tuple[str, str], Ground | str] = {}
    with opened(options.device, options.precision if options.device == "gpu" else None) as site:
        site = replace(site, costs=Shelf(options.costs))
        for name in options.networks:
            network = read_network(name).network
            for limit in sorted(options.limits, key=parse_bytes, reverse=True):  # what is measured first holds for less
                try:
                    found[name, limit] = _ground(site, network, limit, options)
                except DeviceError as error:
                    found[name, limit] = str(error)
    return found


def _ground(site: Site, network: Network, limit: str, options: argparse.Namespace) -> Ground:
    gpu = options.device == "gpu"
    limits = site.limits(None if gpu else limit, options.threads, limit if gpu else None)
    return Ground(
        machine=site.machine,
        limits=limits,
        rates=site.rates(network, limits) or assumed_rates(site.machine, limits.threads, site.device),
        baseline=own_bytes() + FLOAT32 * network.parameters + site.later_bytes,
        device=site.device,
        precision=site.precision,
        context=site.context_bytes,
    )


def _taken_up(row: Row | None, network: Network, ground: Ground) -> Point | None:
    """A row whose plan still runs here, in a process that takes what it took then; None where there is none."""
    if row is None or not row.plan:
        return None
    try:
        pick = Plan.from_json(json.dumps(row.plan))
        check_runs(pick, network, ground.machine)
    except PlanFileError as error:
        print(f"{network.name} {row.limit} begins anew: {error}", flush=True)
        return None
    ground = replace(ground, baseline=pick.memory.baseline, context=row.planned["context_bytes"])
    z, y, x = row.planned["part"]
    return Point(row, network, ground, pick, (z, y, x))


def _made(want: _Wanted) -> _Made:
    """The plan for the largest volume whose part takes at most twice as long as it should; else for the smallest."""
    made = _Made(0, None, 0.0, "no volume is larger than the field of view")
    for side in want.sides:
        if side < max(want.network.field_of_view) + max(want.network.period) - 1:
            continue
        begin = time.process_time()
        try:
            plan = want.ground.plan(want.network, want.network.dense_size((side,) * 3))
        except (NoPlanError, ShapeError) as error:
            return _Made(side, None, time.process_time() - begin, str(error))
        made = _Made(side, plan, time.process_time() - begin)
        part = part_of(plan, want.network, want.point_seconds)
        if plan.for_output(part, want.network, plan.memory).seconds <= 2 * want.point_seconds:
            break
    return made


def apart(work: Callable[[Asked], Answer], asked: Asked, *, alone: bool) -> Answer:
    """An answer; `alone`, of a process that ends: what CUDA takes of a GPU stays taken while a process lives."""
    if not alone:
        return work(asked)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, asked).result()


def spread(work: Callable[[Asked], Answer], asked: Sequence[Asked], workers: int) -> list[Answer]:
    """Answers in order, by so many processes at a time."""
    if min(workers, len(asked)) < 2:
        return [work(one) for one in asked]
    context = multiprocessing.get_context("spawn")  # a GPU that is open here does not bear copies of the process
    with ProcessPoolExecutor(min(workers, len(asked)), context) as pool:
        return list(pool.map(work, asked))


def part_of(plan: Plan, network: Network, most_seconds: float) -> Vec3:
    """The whole output, or a part that is predicted to take at most `most_seconds`; one step at least.

    Steps along one axis; where all of that axis fits, columns along the next, then along the last.
    """
    if plan.seconds <= most_seconds:
        return plan.output
    z, y, x = (min(a, b) for a, b in zip(plan.patch_out, plan.output, strict=True))
    part: Vec3 = z, y, x
    for axis in sorted(range(3), key=lambda axis: axis != plan.axis):
        while part[axis] < plan.output[axis]:
            larger = min(part[axis] + plan.patch_out[axis], plan.output[axis])
            z, y, x = (larger if i == axis else side for i, side in enumerate(part))
            if plan.for_output((z, y, x), network, plan.memory).seconds > most_seconds:
                return part
            part = z, y, x
    return part
