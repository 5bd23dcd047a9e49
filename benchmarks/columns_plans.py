"""What columns.py plans: networks, volumes, limits and ways; many at a time, kept in a folder."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from contestants import arithmetic_waste

from znnpy.errors import NoPlanError, ShapeError
from znnpy.formats.networks import read_network
from znnpy.machine import Limits, parse_bytes, this_machine
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.shapes import FLOAT32, Vec3, text

WAYS: dict[str, tuple[bool, bool]] = {  # `columns` and `depth_first` of `make_plan`
    "patches": (False, False),
    "depth_first": (False, True),
    "columns": (True, True),
}


@dataclass(frozen=True, slots=True)
class Point:
    """What is planned for."""

    network: str  # name of one that ships, or a file
    volume: Vec3
    ram: str
    way: str

    def __str__(self) -> str:
        return f"{Path(self.network).stem}_{text(self.volume)}_{self.ram}_{self.way}"


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, or why there is none."""

    plan: Plan | None
    failure: str | None
    planning_seconds: float


def make(point: Point, threads: int) -> Made:
    """In a process of the pool."""
    network = read_network(point.network).network
    limits = Limits(parse_bytes(point.ram), threads)
    columns, depth_first = WAYS[point.way]
    begin = time.perf_counter()
    try:
        plan = make_plan(
            network,
            network.dense_size(point.volume),
            this_machine(),
            limits,
            baseline=own_bytes() + FLOAT32 * network.parameters,
            columns=columns,
            depth_first=depth_first,
        )
    except (NoPlanError, ShapeError) as error:  # of the smaller limits and volumes some allow nothing
        return Made(None, str(error), time.perf_counter() - begin)
    return Made(plan, None, time.perf_counter() - begin)


@cache
def own_bytes() -> int:
    """Of the process, before it has planned anything: what a run begins with."""
    return baseline_bytes()


def all_plans(points: Sequence[Point], folder: Path, threads: int, workers: int) -> dict[Point, Made]:
    """Plans of all points: those that lie in the folder, and the others, which are put there."""
    found: dict[Point, Made] = {}
    missing = []
    for point in points:
        path = folder / f"{point}.json"
        if path.is_file():
            kept = json.loads(path.read_text())
            plan = Plan.from_json(json.dumps(kept["plan"])) if kept["plan"] else None
            found[point] = Made(plan, kept["failure"], kept["planning_seconds"])
        else:
            missing.append(point)
    if not missing:
        return found
    context = multiprocessing.get_context("spawn")  # nothing of this process counts in the baseline
    with ProcessPoolExecutor(workers, context, initializer=own_bytes) as pool:
        for point, made in zip(missing, pool.map(make, missing, [threads] * len(missing)), strict=True):
            found[point] = made
            plan_json = json.loads(made.plan.to_json()) if made.plan else None
            kept = {"plan": plan_json, "failure": made.failure, "planning_seconds": made.planning_seconds}
            (folder / f"{point}.json").write_text(json.dumps(kept))
            speed = f"{made.plan.voxels_per_second:,.0f} voxels/s" if made.plan else made.failure
            print(f"planned {point!s:40} in {made.planning_seconds:5.1f} s: {speed}", flush=True)
    return {point: found[point] for point in points}


def planned(plan: Plan) -> dict[str, Any]:
    """What the plan says, but for its bytes in detail."""
    return {
        "output": plan.output,
        "patch_out": plan.patch_out,
        "axis": plan.axis,
        "column": plan.column_planes,
        "columns": plan.columns,
        "parts": plan.sub_batches,
        "seconds": plan.seconds,
        "voxels_per_second": plan.voxels_per_second,
        "waste": plan.waste,
        "arithmetic_waste": arithmetic_waste(plan),
        "peak_bytes": plan.memory.peak,
        "carries_bytes": plan.memory.carries,
        "descent_seconds": sum(choice.seconds for choice in plan.choices),
        "step_seconds": plan.seconds_per_step,
        "choices": [f"{choice.primitive} {choice.variant}".strip() for choice in plan.choices],
        "layer_seconds": [choice.seconds for choice in plan.choices],
        "runs": [choice.executions for choice in plan.choices],
    }
