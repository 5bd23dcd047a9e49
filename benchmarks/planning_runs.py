"""The part of planning.py that runs whole plans, and PyTorch beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from apart import run_apart
from networks_gpu import lines_of, sides
from planning_findings import Scheme, shapes_of
from planning_plans import Ground
from planning_tables import Facts, Row, error
from whole_runs import infer, random_volume

from znnpy.machine import parse_bytes
from znnpy.network import Network, Pool
from znnpy.planner.plan import Plan
from znnpy.shapes import Vec3

PEER_CHILD = Path(__file__).with_name("planning_peers.py")
LAYOUT = "channels_last_3d"


@dataclass(frozen=True)
class Point:
    """One row, and what its plans are made on."""

    row: Row
    network: Network
    ground: Ground
    pick: Plan

    def __str__(self) -> str:
        return f"{self.network.name} {self.row.limit}"


def part_of(plan: Plan, network: Network, most_seconds: float) -> Vec3:
    """The whole output, or as many steps along one axis as are predicted to take `most_seconds`; one at least."""
    if plan.seconds <= most_seconds:
        return plan.output
    axis = plan.axis
    thick, z, y, x = plan.patch_out[axis], *plan.patch_out
    best_size, steps = (z, y, x), 2
    while steps * thick <= plan.output[axis]:
        z, y, x = (steps * thick if i == axis else side for i, side in enumerate(plan.patch_out))
        if plan.covering((z, y, x), network, plan.memory).seconds > most_seconds:
            break
        best_size, steps = (z, y, x), steps + 1
    z, y, x = (min(a, b) for a, b in zip(best_size, plan.output, strict=True))
    return z, y, x


def run(folder: Path, point: Point, plan: Plan, most_seconds: float, left: float) -> Facts:
    """Seconds of the whole volume, and peak memory; a process has `left` seconds."""
    return (_on_gpu if plan.device == "gpu" else _on_cpu)(folder, point, plan, most_seconds, left)


def _on_cpu(folder: Path, point: Point, plan: Plan, most_seconds: float, left: float) -> Facts:
    """What is run in part is scaled by its seconds of computing: to open and to close it is done once."""
    output = part_of(plan, point.network, most_seconds)
    volume = random_volume(folder, point.network.patch_in(output), point.network.input_channels)
    done = infer(folder, point.row.network, volume, plan, limit_seconds=left)
    part = plan.covering(output, point.network, plan.memory)
    spent = done.seconds if output == plan.output else done.stage_seconds.get("computing", 0.0)
    return {
        "failure": done.failure,
        "output": output,
        "seconds": spent * plan.seconds / part.seconds,
        "peak_bytes": done.peak_bytes,
        "promised_bytes": done.promised_bytes,
        "stage_seconds": done.stage_seconds,
    }


def _on_gpu(folder: Path, point: Point, plan: Plan, most_seconds: float, left: float) -> Facts:
    """From memory to memory; the second of two runs in a process."""
    del most_seconds  # nothing is run in part
    request = {"job": "znnpy_volume", "network": point.row.network, "side": point.row.side, "plan": plan.to_json()}
    request |= {"precisions": [plan.precision], "vram": point.row.limit, "corner": str(folder / "corner")}
    answers, failure = lines_of(request, left)
    said = answers[0] if answers else {"failure": failure or "no answer"}
    return {
        "failure": said.get("failure"),
        "output": plan.output,
        "seconds": said.get("seconds", 0.0),
        "steady_voxels_per_second": said.get("steady_voxels_per_second"),
        "peak_bytes": said.get("vram_bytes", 0),
        "promised_bytes": said.get("planned_vram_bytes", plan.memory.vram),
    }


def together(what: str, plan: Plan, runs: Sequence[Facts]) -> Facts:
    """All runs of one plan as one figure; `error` is of voxels per second, predicted over measured."""
    if failures := [run["failure"] for run in runs if run["failure"]]:
        return {"what": what, "failure": failures[0]}
    spent, peak = median(run["seconds"] for run in runs), max(run["peak_bytes"] for run in runs)
    promised = min(run["promised_bytes"] for run in runs)
    return {
        "what": what,
        "failure": None,
        "output": runs[0]["output"],
        "rounds": [run["seconds"] for run in runs],
        "seconds": spent,
        "voxels_per_second": prod(plan.output) / spent,
        "error": error(spent, plan.seconds),
        "peak_bytes": peak,
        "promised_bytes": promised,
        "promised_over_peak": promised / peak if peak else None,
    }


def peer_sides(point: Point, method: str, options: argparse.Namespace) -> list[int]:
    """Output sides whose largest layer fits the limit, the largest first."""
    limit = parse_bytes(point.row.limit)
    if options.peer_sides:
        return list(options.peer_sides)
    pools = sum(isinstance(layer, Pool) for layer in point.network.layers)
    found = []
    for side in sides(point.row.network):
        scheme = Scheme(1, (method != "plain",) * pools)
        z, y, x = (side // period for period in point.network.period)
        shapes = shapes_of(point.network, (z, y, x), scheme)
        within = max(shape.in_bytes + shape.out_bytes for shape in shapes) <= limit
        if within and side <= min(point.pick.output):
            found.append(side)
    return found


def peer(point: Point, method: str, side: int, options: argparse.Namespace, left: float) -> Facts:
    """One patch in PyTorch, and what it says of the whole volume."""
    patch = (side, side, side)
    request = {
        "network": point.row.network,
        "method": method,
        "patch": patch,
        "device": "cuda" if options.device == "gpu" else "cpu",
        "precision": options.peer_precision,
        "layout": "contiguous" if options.peer_precision == "fp32" else LAYOUT,
        "threads": options.threads,
        "algorithms": 4,
        "repeat_seconds": options.repeat_seconds,
    }
    limit = parse_bytes(point.row.limit)
    done = run_apart(PEER_CHILD, request, ram_bytes=limit, seconds=min(left, options.peer_seconds))
    facts: Facts = {"method": method, "precision": options.peer_precision, "patch_out": patch, "failure": done.failure}
    if done.failure:
        return facts
    count = prod(-(-length // side) for length in point.pick.output)
    spent = count * median(done.answer["seconds"])
    speed = prod(point.pick.output) / spent
    return facts | {
        "seconds": spent,  # for the whole volume
        "voxels_per_second": speed,
        "of_the_pick": speed / point.pick.voxels_per_second,
        "peak_bytes": done.answer["peak_bytes"],
        "patch_seconds": done.answer["seconds"],
    }
