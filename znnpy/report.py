"""What a run did, each figure beside what its plan predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from znnpy.planner.explain import AXES, hosted_layers, human_bytes, human_seconds
from znnpy.planner.plan import Plan
from znnpy.shapes import Precision, text

if TYPE_CHECKING:
    from znnpy.run.pipeline import LaneTimings


@dataclass(frozen=True)
class Report:
    """A finished run: where its output is, how long it took, what it held in memory."""

    output: Path
    voxels: int  # of the dense output, per map
    computed: int  # of them in this run; fewer than `voxels` after a resume
    seconds: float  # from opening the volume to renaming the output: planning and preparation included
    stage_seconds: Mapping[str, float]  # reading, computing, writing; they overlap
    peak_bytes: int  # most resident memory the process ever had
    plan: Plan
    blas: str  # kernels of the matrix products, e.g. `openblas SkylakeX`
    warnings: tuple[str, ...]
    gpu: str | None = None  # name of the one that the layers ran on; None: the CPU, or nothing was left to do
    vram_bytes: int | None = None  # that the process took of it in the end
    notes: tuple[str, ...] = ()  # why it is not another device or precision
    lanes: tuple[LaneTimings, ...] = ()  # of every device that computed
    idle_seconds: Mapping[str, float] = field(default_factory=dict)  # of both sides, where a step goes through two

    @property
    def precision(self) -> Precision:
        """What was stored and multiplied."""
        return self.plan.precision

    @property
    def voxels_per_second(self) -> float:
        """Output voxels computed per second of this run."""
        return self.computed / self.seconds

    @property
    def predicted_speed(self) -> float:
        """Output voxels per second, as the plan predicts; 0 where one edited by hand says no possible time."""
        speed = self.voxels / self.plan.seconds if self.plan.seconds else 0.0
        return speed if speed < inf else 0.0

    @property
    def predicted_seconds(self) -> float:
        """What the plan predicts for the voxels computed in this run; 0 like `predicted_speed`."""
        return self.computed / self.predicted_speed if self.predicted_speed else 0.0

    def lines(self) -> list[str]:
        """The report in words, one line each."""
        if not self.computed:
            return [f"{self.output}: {text(self.plan.output)}, {self.voxels:,} voxels, complete already: nothing to do"]
        resumed = f", {self.computed:,} of them in this run" if self.computed < self.voxels else ""
        stages = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in self.stage_seconds.items())
        return [
            f"{self.output}: {text(self.plan.output)}, {self.voxels:,} voxels{resumed}",
            f"speed      {self.voxels_per_second:,.0f} voxels/s (plan: {self.predicted_speed:,.0f})",
            f"time       {human_seconds(self.seconds)} (plan: {human_seconds(self.predicted_seconds)})",
            f"memory     {human_bytes(self.peak_bytes)} at the peak (plan: {human_bytes(self.plan.memory.peak)}, "
            f"limit: {human_bytes(self.plan.limits.ram_bytes)})",
            *self._vram(),
            f"stages     {stages} (side by side)",
            *self._lanes(),
            *self._mode(),
            f"{self._cover()}, {(self.plan.beside or self.plan).crew} threads",
            f"methods    {self._methods()}",
            f"device     {'; '.join((self.gpu or 'CPU', *self.notes))}",
            f"precision  {self.precision}" + ("" if self.gpu else f", BLAS kernels {self.blas}"),
            *(f"warning: {warning}" for warning in self.warnings),
        ]

    def _lanes(self) -> list[str]:
        """What each of several devices did."""
        if len(self.lanes) < 2 or not self.computed:
            return []
        shares = (
            f"{lane.name} {lane.voxels / self.computed:.1%} of the voxels, waiting "
            f"{human_seconds(lane.seconds['waiting'])}"
            for lane in self.lanes
        )
        return [f"devices    {'; '.join(shares)}"]

    def _mode(self) -> list[str]:
        """Where layers ran that had their tensors in the memory of the host, and how long both sides stood still."""
        if not self.plan.hosted:
            return []
        idle = ", ".join(f"{side} {human_seconds(seconds)}" for side, seconds in self.idle_seconds.items())
        return [f"mode       {self.plan.mode}, {hosted_layers(self.plan)}{f'; idle: {idle}' if idle else ''}"]

    def _vram(self) -> list[str]:
        limit = self.plan.limits.vram_bytes
        if self.vram_bytes is None or limit is None:
            return []
        promised = human_bytes(self.plan.memory.vram)
        return [f"VRAM       {human_bytes(self.vram_bytes)} (plan: {promised}, limit: {human_bytes(limit)})"]

    def _methods(self) -> str:
        """Primitives in the order in which they first run, and how many layers each ran; last those beside GPUs."""
        layers = Counter[str]()
        for plan in filter(None, (self.plan, self.plan.beside)):
            for choice in plan.choices:
                layers[choice.primitive] += 1 + choice.layers[1] - choice.layers[0]
        return ", ".join(f"{name} ({count})" for name, count in layers.items())

    def _cover(self) -> str:
        plan = self.plan
        if plan.walks:
            return f"columns    {plan.columns} along {AXES[plan.axis]} in steps of {text(plan.patch_out)}"
        return f"patches    {plan.columns} of {text(plan.patch_out)}"

    def as_json(self) -> dict[str, Any]:
        """The report for machines: plain dictionaries, numbers and text.

        `patch` is the output of a step, `columns` the number of columns or patches, `axis` (0: z) the one that columns
        walk along and `column` their output planes along it, 0 for patches.
        """
        return {
            "output": str(self.output),
            "shape": list(self.plan.output),
            "voxels": self.voxels,
            "computed": self.computed,
            "seconds": self.seconds,
            "voxels_per_second": self.voxels_per_second,
            "stage_seconds": dict(self.stage_seconds),
            "peak_bytes": self.peak_bytes,
            "vram_bytes": self.vram_bytes,
            "predicted": {
                "seconds": self.predicted_seconds,
                "voxels_per_second": self.predicted_speed,
                "peak_bytes": self.plan.memory.peak,
                "vram_bytes": self.plan.memory.vram,
            },
            "ram_bytes": self.plan.limits.ram_bytes,
            "threads": (self.plan.beside or self.plan).crew,
            "patch": list(self.plan.patch_out),
            "columns": self.plan.columns,
            "axis": self.plan.axis,
            "column": self.plan.column,
            "primitives": [choice.primitive for choice in self.plan.choices],
            "device": self.plan.device,
            "mode": self.plan.mode,
            "idle_seconds": dict(self.idle_seconds),
            "devices": [
                {"name": lane.name, "voxels": lane.voxels, "seconds": dict(lane.seconds), "lost": lane.lost}
                for lane in self.lanes
            ],
            "gpu": self.gpu,
            "notes": list(self.notes),
            "precision": self.precision,
            "blas": self.blas,
            "warnings": list(self.warnings),
        }
