"""Plans and runs of `planner.py`, each in a separate process: the requests, and the work of the processes.

The processes use only the public API of znnpy, so that they run in any version that has the required arguments:
`planner.py --against` compares two versions.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import znnpy
from benchmarks.harness.inputs import field_of_view, layers_of, network_file, noise, volume_file
from benchmarks.harness.isolate import ROOT, run_child
from benchmarks.harness.timing import Budget, LowestFree, peak_bytes
from benchmarks.io_runs import Discard

PLANNING_SECONDS = 300.0  # limit of one plan
LATE = 20.0  # limit of a run: this many times the prediction, and a minute
STAGES = ("preparing", "computing", "waiting")  # times that a plan predicts

Facts = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A network, a cubic volume and a limit of memory: of RAM, or of VRAM on a GPU."""

    network: str
    side: int
    limit: str
    why: str

    def __str__(self) -> str:
        return f"{self.network} {self.side}^3 within {self.limit}"


@dataclass
class Planner:
    """Plans and runs points in child processes.

    run_seconds  predicted time of the part that a run computes.
    costs        cache folders by state; "measured" exists once `measure` ran.
    """

    device: str
    budget: Budget
    folder: Path
    run_seconds: float
    machine: Path | None = None

    def cache(self, state: str) -> Path:
        """Return the cache folder of a state."""
        return self.folder / state

    def measure(self, minutes: float) -> str | None:
        """Run `znnpy measure` for the state "measured"; return why it failed, or None."""
        request = {"cache": str(self.cache("measured")), "device": self.device, "minutes": minutes}
        return run_child("benchmarks.planner_runs:measure", request, seconds=60 * minutes + 120).failure

    def request(self, point: Point, state: str, **arguments: Any) -> Facts:
        """Return the request for a plan.

        arguments  further arguments of `znnpy.plan`, and `why`: whether schemes that no session runs are planned, too.
        """
        size = (point.side,) * 3
        limit = "ram" if self.device == "cpu" else "vram"
        wanted = {"shape": size, limit: point.limit, "device": self.device, **arguments}
        if self.machine is not None:
            wanted["machine"] = str(self.machine)
        return {
            "network": str(network_file(self.folder, point.network)),
            "cache": str(self.cache(state)),
            "calibrate": state != "assumed",
            "arguments": wanted,
        }

    def primitives(self) -> list[str]:
        """Return the names of all primitives of the device that run here."""
        command = [sys.executable, "-m", "znnpy", "primitives", "--json"]
        output = subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout
        return [row["name"] for row in json.loads(output) if row["name"].startswith(self.device) and not row["why_not"]]

    def plan(self, point: Point, state: str, *, fresh: bool = False, **arguments: Any) -> Facts:
        """Plan in a new process; `failure` says why there is no plan.

        fresh  use an empty cache folder, unless the state is "measured"
        """
        asked = self.request(point, state, **arguments)
        if fresh and state != "measured":
            asked["cache"] = str(self.folder / f"{state} {point}")
        outcome = run_child("benchmarks.planner_runs:plan", asked, seconds=PLANNING_SECONDS)
        return outcome.answer if outcome.failure is None else {"failure": outcome.failure}

    def run(self, point: Point, made: Facts, times: int = 1) -> list[Facts]:
        """Run a part of a plan `times` times; each result has `speed`, in output voxels per second of the whole output.

        On a GPU one process makes all runs and one more: the first run compiles kernels and does not count.
        """
        runs = times + (self.device == "gpu")
        part = part_of(made, self.run_seconds)
        size = tuple(length + field_of_view(point.network) - 1 for length in part)
        on_disk = self.device == "cpu"
        request = {
            "network": str(network_file(self.folder, point.network)),
            "cache": str(self.cache("measured")),
            "volume": str(volume_file(self.folder, size)) if on_disk else size,  # type: ignore[arg-type]
            "out": str(self.folder / "out.h5") if on_disk else [layers_of(point.network)[-1].maps, *part],
            "plan": self._plan_file(made["plan"]),
            "part": part,
            "device": self.device,
            "times": runs,
        }
        limit = 60 + LATE * runs * max(1.0, self.run_seconds)
        outcome = run_child("benchmarks.planner_runs:run", request, seconds=limit)
        if outcome.failure is not None:
            return [{"failure": outcome.failure}]
        found = []
        for answer in outcome.answers[runs - times :]:
            scale = made["seconds"] / answer["predicted_seconds"]
            found.append({**answer, "speed": prod(made["output"]) / (scale * answer["seconds"])})
        return found

    def _plan_file(self, plan: str) -> str:
        path = self.folder / "plan.json"
        path.write_text(plan)
        return str(path)


def part_of(made: Facts, most_seconds: float) -> tuple[int, ...]:
    """Return the part of the output for a run of about `most_seconds`: some steps of a column, some columns, or all.

    It has at least one step.
    """
    output, step, axis = made["output"], made["patch_out"], made["axis"]
    part = [min(a, b) for a, b in zip(step, output, strict=True)]
    for along in sorted(range(3), key=lambda other: other != axis):
        while part[along] < output[along]:
            larger = [*part]
            larger[along] = min(part[along] + step[along], output[along])
            if made["seconds"] * prod(larger) > most_seconds * prod(output):
                return tuple(part)
            part = larger
    return tuple(part)


def facts_of_plan(made: Facts) -> Facts:
    """Return the facts of a plan that a result keeps."""
    names = ("voxels_per_second", "planning_seconds", "planning_wall_seconds", "patch_out", "column", "primitives")
    return {("predicted" if name == names[0] else name): made[name] for name in names if name in made}


# --- what the processes do ---


def measure(request: Facts) -> Facts:
    """Fill a cache folder with the costs of this machine."""
    words = ["measure", "--device", request["device"], "--minutes", str(request["minutes"]), "--quiet"]
    environment = {**os.environ, "XDG_CACHE_HOME": request["cache"]}
    done = subprocess.run(
        [sys.executable, "-m", "znnpy", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    return {}


def plan(request: Facts) -> Facts:
    """Make a plan; `failure` says why there is none."""
    os.environ["XDG_CACHE_HOME"] = request["cache"]
    arguments: Facts = {
        key: tuple(value) if isinstance(value, list) else value for key, value in request["arguments"].items()
    }
    if not request["calibrate"] and "calibrate" in inspect.signature(znnpy.plan).parameters:
        arguments["calibrate"] = False
    begin, begin_wall = time.process_time(), time.perf_counter()
    if arguments.pop("why", False):  # schemes that no session runs are planned only if this is given
        arguments["tell_why"] = lambda rows: None
    make: Callable[..., Any] = znnpy.plan
    try:
        made = make(request["network"], **arguments, tell=lambda sentence: None)
    except (znnpy.NoPlanError, znnpy.ShapeError, ValueError) as error:
        return {"failure": f"{type(error).__name__}: {error}"[:300]}
    spent = {"planning_seconds": time.process_time() - begin, "planning_wall_seconds": time.perf_counter() - begin_wall}
    return spent | {"peak_bytes": peak_bytes()} | facts_of(made)


def facts_of(made: Any) -> Facts:
    """Return the facts of a `znnpy.Plan` that `planner.py` needs; `decisions` are equal if two plans run alike.

    `made` may come from an older source tree (see `--against`), whose plans hold some facts elsewhere.
    """
    main = getattr(made, "main", made)
    older = not hasattr(made, "alternatives")
    column, alternatives = (made.column, made.kinds) if older else (main.column_planes, made.alternatives)
    primitives = [choice.primitive for choice in made.choices]
    sizes: Facts = {"patch_out": main.patch_out, "axis": main.axis, "column": column}
    ways = [f"{choice.primitive} {choice.variant} {choice.shape.batch}" for choice in made.choices]
    return {
        "plan": made.to_json(),
        "seconds": made.seconds,
        "voxels_per_second": made.voxels_per_second,
        "output": made.output,
        "primitives": primitives,
        "decisions": f"{sizes} {ways}",
        "schemes": {kind.scheme: kind.best.voxels_per_second for kind in alternatives if kind.scheme},
        **sizes,
    }


def run(request: Facts) -> Iterator[Facts]:
    """Run a plan: on a CPU from file to file, on a GPU from memory to memory; there `volume` and `out` are sizes."""
    os.environ["XDG_CACHE_HOME"] = request["cache"]
    gpu = request["device"] == "gpu"
    volume: Any = noise(tuple(request["volume"])) if gpu else request["volume"]
    out: Any = Discard(tuple(request["out"])) if gpu else request["out"]
    with ExitStack() as stack:
        free, lowest = free_vram() if gpu else None, None
        if free is not None:
            lowest = stack.enter_context(LowestFree(stack.enter_context(znnpy.Device(znnpy.find_gpu()))))
        for _ in range(request["times"]):
            more: Facts = {} if gpu else {"overwrite": True}
            report = znnpy.infer(
                volume, request["network"], plan=request["plan"], out=out, device=request["device"], **more
            )
            output = report.as_json()
            yield {
                "part": request["part"],
                "seconds": sum(output["stage_seconds"].get(stage, 0.0) for stage in STAGES),
                "whole_seconds": output["seconds"],
                "predicted_seconds": output["predicted"]["seconds"],
                "peak_bytes": None if gpu else output["peak_bytes"],
                "ram_promised": output["predicted"]["peak_bytes"],
                "vram_peak_bytes": free - lowest.free_bytes if free is not None and lowest is not None else None,
                "vram_promised": output["predicted"]["vram_bytes"],
            }


def free_vram() -> int | None:
    """Return the free bytes of the first GPU, by the driver's tool; None if there is no such tool.

    Unlike a call of CUDA this makes no context, whose memory is part of a plan's promise.
    """
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return int(output.split()[0]) * 2**20
