"""Foresee a run without computing it: its plan, the size of its output, the free disk, and its time."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from znnpy.computation import foreseen
from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt, one_line, option
from znnpy.network import Network
from znnpy.nnunet.names import model_of
from znnpy.opened_run import named_run, opened_run
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.recording import check_files
from znnpy.run.resume import statistics_kept
from znnpy.units import human_bytes, human_seconds
from znnpy.volume.location import Location


@dataclass(frozen=True, slots=True)
class DryRun:
    """The foreseen plan, output and time of a run.

    output        path or URL of the output
    arrays        shape (maps, z, y, x) of each array of it
    dtype         of the arrays
    output_bytes  of all arrays, before compression and without coarser resolutions
    free_bytes    of the disk of the output; None: it is in a bucket
    network       that is run
    plan          plan of the run; None: the output is complete
    left          share of the work items that an earlier run has not finished
    seconds       predicted
    notes         sentences on what is odd, and on what was measured
    """

    output: Path | Location
    arrays: tuple[tuple[int, ...], ...]
    dtype: str
    output_bytes: int
    free_bytes: int | None
    network: Network
    plan: RunPlan | None
    left: float
    seconds: float
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the lines that the command prints below the plan."""
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.arrays)
        free = "" if self.free_bytes is None else f"; {human_bytes(self.free_bytes)} are free on its disk"
        found = [f"output     {self.output}: {shapes} {self.dtype}, {human_bytes(self.output_bytes)}{free}"]
        if self.plan is None:
            found.append("time       none: the output is complete")
        else:
            rest = "" if self.left == 1.0 else f" for the {self.left:.0%} that are left"
            peak, limit = human_bytes(self.plan.memory.peak), human_bytes(self.plan.limits.ram_bytes)
            found += [
                f"memory     {peak} at the peak (limit: {limit})",
                f"time       about {human_seconds(self.seconds)}{rest}; nothing was run",
            ]
        return [one_line(line) for line in (*found, *self.notes)]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers as JSON types."""
        plan = self.plan
        return {
            "dry_run": True,
            "output": str(self.output),
            "arrays": [list(shape) for shape in self.arrays],
            "output_dtype": self.dtype,
            "output_bytes": self.output_bytes,
            "free_bytes": self.free_bytes,
            "complete": plan is None,
            "left": self.left,
            "seconds": self.seconds,
            "peak_bytes": None if plan is None else plan.memory.peak,
            "ram_bytes": None if plan is None else plan.limits.ram_bytes,
            "notes": list(self.notes),
            "plan": None if plan is None else json.loads(plan.to_json()),
        }


def dry_run(asked: InferOptions) -> DryRun:
    """Return what a run with these options would do; it raises what the run would raise before it computes.

    Nothing is written that stays: the output is looked at under its lock.
    """
    if model_of(asked.network) is not None:
        raise NetworkFileError(
            f"{excerpt(asked.network, 60)} is a model of nnU-Net, whose plan follows from the case once that is "
            f"resampled; leave out {option('dry_run', True)}"
        )
    named = named_run(asked)
    with ExitStack() as stack:
        needs = named.trained.network.statistics is not None and asked.resume
        run = stack.enter_context(opened_run(named, statistics_kept(named.destination) if needs else None))
        check_files(named)
        output = stack.enter_context(run.output())
        network, dtype = run.trained.network, run.dtype
        folder = output.folder
        plan, transfers = (None, None) if output.finished else foreseen(run, output)
        left, seconds = 0.0, 0.0
        if plan is not None:
            items = plan.work_items(network)
            left = 1.0 - sum(items[index].voxels for index in output.done) / sum(item.voxels for item in items)
            seconds = left * max(plan.seconds, 0.0 if transfers is None else transfers.seconds)
        return DryRun(
            named.destination,
            tuple(array.shape for array in run.arrays),
            dtype.name,
            sum(array.nbytes(dtype) for array in run.arrays),
            None if folder is None else shutil.disk_usage(folder).free,
            network,
            plan,
            left,
            seconds,
            (*run.doubts, *(() if transfers is None else (str(transfers),))),
        )
