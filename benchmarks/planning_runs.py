"""The part of planning.py that runs whole plans, and PyTorch beside them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Self

from networks_gpu import sides
from planning_child import Child, NoTimeLeft
from planning_peers import METHODS
from planning_points import Point, part_of
from planning_tables import Facts, error
from whole_runs import infer, random_volume

from znnpy.machine import parse_bytes
from znnpy.network import Pool
from znnpy.planner.plan import Plan
from znnpy.planner.schemes import Scheme, shapes_of
from znnpy.shapes import Vec3

GPU_CHILD = Path(__file__).with_name("planning_gpu.py")
PEER_CHILD = Path(__file__).with_name("planning_peers.py")
LAYOUT = "channels_last_3d"
PREPARING_SECONDS = 120.0  # of a plan on a GPU, kernels compiled
LATE = 5.0  # so many times as long as predicted is too long


class Runs:
    """Runs plans in processes of their own. A context manager; a GPU's process stays for the runs that follow."""

    def __init__(self, folder: Path, end: float) -> None:
        self._folder, self._end = folder, end
        self._child = Child(GPU_CHILD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self._child.stop()

    def of(self, point: Point, contest: Sequence[tuple[str, Plan]], times: int) -> list[Facts]:
        """Every contestant's runs as one figure; on a CPU they take turns, on a GPU one comes after the other."""
        found: dict[str, list[Facts]] = {what: [] for what, _ in contest}
        if point.pick.device == "gpu":
            for what, plan in contest:
                found[what] = self._on_gpu(point, plan, times)
        else:
            for turn in range(times):  # there and back: a machine that gets slower meanwhile favours nobody
                for what, plan in contest if turn % 2 == 0 else reversed(contest):
                    if not any(run["failure"] for run in found[what]):
                        found[what].append(self._on_cpu(point, plan))
        return [together(what, plan, found[what]) for what, plan in contest]

    def _on_cpu(self, point: Point, plan: Plan) -> Facts:
        """From the first patch that is computed to the last: opening, planning and preparing are not counted."""
        output = part_for(point, plan)
        volume = random_volume(self._folder, point.network.patch_in(output), point.network.input_channels)
        left = max(0.1, self._end - time.monotonic())
        done = infer(self._folder, point.row.network, volume, plan, limit_seconds=left)
        if done.failure and time.monotonic() > self._end:
            raise NoTimeLeft
        return {
            "failure": done.failure,
            "output": output,
            "seconds": sum(done.stage_seconds.get(stage, 0.0) for stage in ("computing", "waiting")),
            "predicted": plan.for_output(output, point.network, plan.memory).seconds,
            "peak_bytes": done.peak_bytes,
            "promised_bytes": done.promised_bytes,
            "start_seconds": done.wall_seconds - done.seconds,
        }

    def _on_gpu(self, point: Point, plan: Plan, times: int) -> list[Facts]:
        """From memory to memory, after a run that does not count."""
        output = part_for(point, plan)
        part = plan.for_output(output, point.network, plan.memory)
        request = {"plan": part.to_json(), "network": point.row.network, "vram": point.row.limit, "times": times}
        self._child.tell(request)
        said = self._child.line(PREPARING_SECONDS + LATE * (times + 1) * part.seconds, self._end)
        if said is None:
            self._child.stop()
            said = {"failure": "it took too long"}
        if said.get("failure") is None and said["not_written"]:
            said = {"failure": f"{said['not_written']:,} voxels were not written"}
        facts: Facts = {"failure": said.get("failure"), "output": output, "predicted": part.seconds}
        if facts["failure"]:
            return [facts]
        facts |= {"peak_bytes": said["vram_bytes"], "promised_bytes": plan.memory.vram}
        facts |= {"start_seconds": said["first_seconds"]}
        return [facts | {"seconds": seconds} for seconds in said["seconds"]]


def part_for(point: Point, plan: Plan) -> Vec3:
    """Of the output, what a whole run by a plan computes: where it walks in the steps of the pick, just what that does.

    Times of the same part compare as they are, whatever is predicted of the rest.
    """
    pick = point.pick
    alike = (plan.patch_out, plan.axis, plan.column_planes) == (pick.patch_out, pick.axis, pick.column)
    return part_of(pick if alike else plan, point.network, point.row.point_seconds)


def decided(plan: Plan) -> Facts:
    """What makes a plan another one for the same network, output and machine."""
    return {
        "patch_out": list(plan.patch_out),
        "axis": plan.axis,
        "column": plan.column_planes,
        "parts": list(plan.sub_batches),
        "choices": [f"{c.primitive} {c.variant}".strip() for c in plan.choices],
    }


def together(what: str, plan: Plan, runs: Sequence[Facts]) -> Facts:
    """All runs of one plan as one figure, for the whole output; `error` is of voxels per second, planned over measured.

    What was run in part is scaled by what the plan says of both.
    """
    if failures := [run["failure"] for run in runs if run["failure"]]:
        return {"what": what, "failure": failures[0]}
    scale = plan.seconds / runs[0]["predicted"]
    rounds = [run["seconds"] * scale for run in runs]
    spent, peak = median(rounds), max(run["peak_bytes"] for run in runs)
    promised = min(run["promised_bytes"] for run in runs)
    return {
        "what": what,
        "failure": None,
        "output": runs[0]["output"],
        "run_seconds": [run["seconds"] for run in runs],
        "start_seconds": [run["start_seconds"] for run in runs],
        "rounds": rounds,
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


def peers(points: Sequence[Point], options: argparse.Namespace, end: float) -> list[list[Facts]]:
    """PyTorch's ways of one network within every limit: each with the fastest of the patches that fit.

    A patch is timed once, and what it took of the memory says within which limits it fits.
    """
    found: list[list[Facts]] = [[] for _ in points]
    most = max(parse_bytes(point.row.limit) for point in points)
    for method in METHODS:
        tried = sorted({side for point in points for side in peer_sides(point, method, options)[:2]})
        timed = _patches(points[0], method, tried, options, most, min(end, time.monotonic() + options.peer_seconds))
        for point, facts in zip(points, found, strict=True):
            facts.append(_fastest(point, method, timed, options))
    return found


def _patches(
    point: Point, method: str, tried: Sequence[int], options: argparse.Namespace, most: int, end: float
) -> list[Facts]:
    """What each side gave, from the smallest up, until one fails or time is up: of a process only the peak is known."""
    first: dict[str, Any] = {
        "network": point.row.network,
        "method": method,
        "device": "cuda" if options.device == "gpu" else "cpu",
        "precision": options.peer_precision,
        "layout": "contiguous" if options.peer_precision == "fp32" else LAYOUT,
        "threads": options.threads,
        "algorithms": 4,
        "repeat_seconds": options.repeat_seconds,
        "ram_bytes": most,
    }
    found: list[Facts] = []
    with Child(PEER_CHILD, first) as child:
        for side in tried:
            child.tell({"patch": [side] * 3})
            said = child.line(max(0.0, end - time.monotonic()), end + 1)
            said = {"failure": "there was no time for it"} if said is None else said
            found.append({"side": side} | said)
            print(f"{point.network.name} PyTorch {method} {side}: {said.get('failure') or said['seconds']}", flush=True)
            if said.get("failure"):
                break
    return found


def _fastest(point: Point, method: str, timed: Sequence[Facts], options: argparse.Namespace) -> Facts:
    """Of the patches that were timed and fit, for the whole volume."""
    limit = parse_bytes(point.row.limit)
    facts: Facts = {"method": method, "precision": options.peer_precision}
    failures = [one["failure"] for one in timed if one.get("failure")]
    fitting = [one for one in timed if not one.get("failure") and one["peak_bytes"] <= limit]

    def seconds(one: Facts) -> float:
        count = prod(-(-length // one["side"]) for length in point.pick.output)
        return float(count * median(one["seconds"]))

    if not fitting:
        return facts | {"failure": failures[0] if failures else "no patch fits"}
    best = min(fitting, key=seconds)
    speed = prod(point.pick.output) / seconds(best)
    return facts | {
        "failure": None,
        "patch_out": [best["side"]] * 3,
        "seconds": seconds(best),
        "voxels_per_second": speed,
        "of_the_pick": speed / point.pick.voxels_per_second,
        "peak_bytes": best["peak_bytes"],
        "patch_seconds": best["seconds"],
        "patches": list(timed),
    }
