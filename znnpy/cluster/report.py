"""The report of an output that many processes computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from znnpy.messages import excerpt, option
from znnpy.report.run_report import Report
from znnpy.shapes import Vec3, text
from znnpy.units import human_bytes, human_seconds

SLOW = 0.5  # of the median speed of the workers: one below it is named


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The work that one process did.

    items, voxels  that it finished in this run
    seconds        that these took
    peak_bytes     of memory that it had at most
    is_lost        whether it left before the end
    """

    items: int
    voxels: int
    seconds: float
    peak_bytes: int
    is_lost: bool = False

    @property
    def voxels_per_second(self) -> float:
        """Output voxels per second of the items; 0 where there were none."""
        return self.voxels / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class ClusterReport(Report):
    """A run by many processes: where its output is, and what each of them did. `plan` is that of one work item.

    item         voxels (z, y, x) of a work item
    items        number of work items; `done_before` were finished by earlier runs
    processes    what each process computed, by its name
    failures     tasks that failed, or were lost with their workers
    lost         share of the work that one plan for the whole output would save, on the machine that prepared the job;
                 None: it has no such plan
    is_complete  whether the output is complete; a part of a job leaves it unfinished
    """

    item: Vec3
    items: int
    done_before: int
    processes: Mapping[str, WorkerReport]
    failures: int = 0
    lost: float | None = None
    is_complete: bool = True

    def __repr__(self) -> str:
        """Return one line; `str(report)` is the whole report."""
        return (
            f"<ClusterReport on {excerpt(self.output)}: {self.computed:,} of {self.voxels:,} voxels computed by "
            f"{len(self.processes)} processes in {human_seconds(self.seconds)}>"
        )

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        state = "complete" if self.is_complete else f"unfinished: {option('finish', True)} completes it after all parts"
        found = [
            f"output      {self.output} ({state})",
            f"computed    {self.computed:,} of {self.voxels:,} voxels in {human_seconds(self.seconds)}, "
            f"{self.voxels_per_second:,.0f} voxels/s",
            f"work items  {self.items} of {text(self.item)} voxels, {self.done_before} of them finished before",
        ]
        if self.lost is not None:
            found.append(f"borders     {self.lost:.1%} of the work, which one plan for the whole output would save")
        speeds = [one.voxels_per_second for one in self.processes.values() if one.items]
        usual = median(speeds) if speeds else 0.0
        for name, one in sorted(self.processes.items()):
            notes = [word for word, holds in (("lost", one.is_lost), ("slow", _is_slow(one, usual))) if holds]
            found.append(
                f"worker      {name}: {one.items} items, {one.voxels_per_second:,.0f} voxels/s, "
                f"{human_bytes(one.peak_bytes)} at the peak{''.join(f', {note}' for note in notes)}"
            )
        if self.failures:
            found.append(f"failures    {self.failures} tasks failed or were lost, and were computed again")
        return [*found, *(f"warning     {sentence}" for sentence in self.warnings)]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        processes = {
            name: {**asdict(one), "voxels_per_second": one.voxels_per_second} for name, one in self.processes.items()
        }
        return {
            "output": str(self.output),
            "is_complete": self.is_complete,
            "voxels": self.voxels,
            "computed": self.computed,
            "seconds": self.seconds,
            "voxels_per_second": self.voxels_per_second,
            "peak_bytes": self.peak_bytes,
            "item": self.item,
            "items": self.items,
            "done_before": self.done_before,
            "processes": processes,
            "failures": self.failures,
            "lost": self.lost,
            "warnings": self.warnings,
        }


def _is_slow(worker: WorkerReport, usual: float) -> bool:
    return bool(worker.items) and worker.voxels_per_second < SLOW * usual
