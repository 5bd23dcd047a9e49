"""What a run did, each figure beside what its plan predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from znnpy.messages import excerpt
from znnpy.planner.explain import AXES, offloaded_layers, reaches_beyond
from znnpy.planner.plan import Plan
from znnpy.shapes import Precision, text
from znnpy.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from znnpy.run.pipeline import LaneTimings
    from znnpy.values import Values
    from znnpy.volume.base import Chunks

PRECISION_WORDS: Mapping[Precision, str] = {
    "fp32": "fp32, 32-bit floating point",
    "tf32": "tf32, 32-bit floating point rounded to 11 significant bits in products",
    "fp16": "fp16, 16-bit floating point",
}


OFF = 2.0  # times the predicted seconds, or less than one such part of them, from which on a report says why
LEAST_OFF = 1.0  # seconds; less is lost when a process begins


@dataclass(frozen=True)
class Report:
    """A finished run: where its output is, how long it took, what it held in memory."""

    output: Path  # or what it is called, where blocks were assigned to an object of the caller's
    voxels: int  # of the dense output, per map
    computed: int  # of them in this run; fewer than `voxels` after a resume
    seconds: float  # from opening the volume to renaming the output: planning and preparation included
    stage_seconds: Mapping[str, float]  # planning and preparing; then reading, computing, writing, which overlap
    peak_bytes: int  # most resident memory the process ever had
    plan: Plan
    blas: str  # kernels of the matrix products, e.g. `openblas SkylakeX`
    warnings: tuple[str, ...]
    gpu: str | None = None  # name of the one that the layers ran on; None: the CPU, or nothing was left to do
    vram_bytes: int | None = None  # that the process took of it in the end
    notes: tuple[str, ...] = ()  # why it is not another device or precision
    lanes: tuple[LaneTimings, ...] = ()  # of every device that computed
    chunks: Chunks | None = None  # of the volume that were looked for; None where nothing was left to do
    values: Values | None = None  # that this run wrote; None where nothing finite was
    idle_seconds: Mapping[str, float] = field(default_factory=dict)  # of both sides, where a step goes through two
    earlier_peak_bytes: int = 0  # most resident memory the process had before the run began

    def __repr__(self) -> str:
        """One line; `str(report)` is the whole report in words."""
        return (
            f"<Report on {excerpt(self.output)}: {self.computed:,} of {self.voxels:,} voxels computed in "
            f"{human_seconds(self.seconds)}, {human_bytes(self.peak_bytes)} at the peak>"
        )

    def __str__(self) -> str:
        """The lines of `lines`."""
        return "\n".join(self.lines())

    @property
    def precision(self) -> Precision:
        """What was stored and multiplied."""
        return self.plan.precision

    @property
    def voxels_per_second(self) -> float:
        """Output voxels computed per second of the whole run, from its start to the finished output."""
        return self.computed / self.seconds

    @property
    def predicted_speed(self) -> float:
        """Output voxels per second, as the plan predicts; 0 where one edited by hand says no possible time."""
        speed = self.voxels / self.plan.seconds if self.plan.seconds else 0.0
        return speed if speed < inf else 0.0

    @property
    def predicted_seconds(self) -> float:
        """What the plan predicts for the voxels computed in this run; 0 like `predicted_speed`."""
        if not self.predicted_speed:
            return 0.0
        preparing = self.plan.preparing_seconds
        return preparing + (self.plan.seconds - preparing) * self.computed / self.voxels

    def lines(self) -> list[str]:
        """The report in words, one line each."""
        if not self.computed:
            return [f"{self.output}: {text(self.plan.output)}, {self.voxels:,} voxels, complete already: nothing to do"]
        resumed = f", {self.computed:,} of them in this run" if self.computed < self.voxels else ""
        threads = (self.plan.cpu_plan or self.plan).compute_threads
        return [
            f"{self.output}: {text(self.plan.output)}, {self.voxels:,} voxels{resumed}",
            f"speed      {self.voxels_per_second:,.0f} voxels/s (plan: {self.predicted_speed:,.0f})",
            f"time       {human_seconds(self.seconds)} (plan: {human_seconds(self.predicted_seconds)})",
            f"memory     {human_bytes(self.peak_bytes)} at the peak (plan: {human_bytes(self.plan.memory.peak)}, "
            f"limit: {human_bytes(self.plan.limits.ram_bytes)})",
            *(f"off by     {sentence}" for sentence in self._off()),
            *self._vram(),
            *self._values(),
            *self._chunks(),
            f"stages     {self._stages()}",
            *self._lanes(),
            *self._mode(),
            f"{self._cover()}, computed by {threads} thread{'s' if threads != 1 else ''}",
            f"methods    {self._methods()}; `znnpy primitives` explains them",
            f"device     {'; '.join((self.gpu or 'CPU', *self.notes))}",
            f"precision  {PRECISION_WORDS[self.precision]}" + ("" if self.gpu else f"; BLAS kernels {self.blas}"),
            *(f"warning: {warning}" for warning in (*self.above_limit, *self.warnings)),
        ]

    @property
    def above_limit(self) -> tuple[str, ...]:
        """A sentence with both numbers where this run took the process above its memory limit, and otherwise none."""
        limit = self.plan.limits.ram_bytes
        if self.peak_bytes <= max(limit, self.earlier_peak_bytes):
            return ()
        peak = f"{human_bytes(self.peak_bytes)} at its peak ({self.peak_bytes:,} bytes)"
        return (f"the process held {peak}, more than the limit of {human_bytes(limit)} ({limit:,} bytes)",)

    def _off(self) -> list[str]:
        """Explain why the run took much more or less time than its plan predicted, and what helps."""
        spent, predicted = self.seconds, self.predicted_seconds
        if not predicted or abs(spent - predicted) < LEAST_OFF or 1 / OFF < spent / predicted < OFF:
            return []
        stages, preparing = self.stage_seconds, self.plan.preparing_seconds
        waiting, prepared = stages.get("waiting", 0.0), stages.get("preparing", 0.0)
        computing = stages.get("computing", 0.0)
        planning = stages.get("planning", 0.0)
        slow_memory = f"preparing took {human_seconds(prepared)} instead of {human_seconds(preparing)}"
        apart = {
            f"opening files, measuring devices and planning took {human_seconds(planning)}": planning,
            slow_memory: prepared - preparing,
            f"the layers took {human_seconds(computing)} instead of {human_seconds(predicted - preparing)}": (
                computing - (predicted - preparing)
            ),
            f"the layers waited {human_seconds(waiting)} for reading and writing": waiting,
        }
        why = max(apart, key=lambda reason: apart[reason] if spent > predicted else -apart[reason])
        rates = "measured on this machine"
        if not (self.plan.preparing_measured if why == slow_memory else self.plan.fitted):
            rates = "assumed: `znnpy measure` takes a minute and measures those of this machine"
        factor = max(spent / predicted, predicted / spent)
        return [f"{factor:.1f} times from the plan: {why}; its rates are {rates}"]

    def _values(self) -> list[str]:
        """The range of the output, by which one sees that a network answers at all."""
        if self.values is None:
            return []
        scale = ", which are 255 times the network's" if self.plan.itemsize_out == 1 else ""
        part = " in the part of this run" if self.computed < self.voxels else ""
        return [f"values     {self.values}{scale}{part}"]

    def _chunks(self) -> list[str]:
        """Say how much of the volume was never written."""
        if self.chunks is None or not self.chunks.missing:
            return []
        missing, looked = f"{self.chunks.missing:,}", f"{self.chunks.looked:,}"
        return [f"volume     {missing} of {looked} {self.chunks.unit} are missing and were read as the fill value"]

    def _stages(self) -> str:
        """Planning and preparing, one after the other, and what came after them side by side."""
        spent = {name: human_seconds(seconds) for name, seconds in self.stage_seconds.items()}
        first = [f"{name} {spent.pop(name)}" for name in ("planning", "preparing") if name in spent]
        return "; ".join([*first, f"{', '.join(f'{name} {time}' for name, time in spent.items())} (side by side)"])

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
        if not self.plan.offloaded:
            return []
        idle = ", ".join(f"{side} {human_seconds(seconds)}" for side, seconds in self.idle_seconds.items())
        return [f"mode       {self.plan.mode}, {offloaded_layers(self.plan)}{f'; idle: {idle}' if idle else ''}"]

    def _vram(self) -> list[str]:
        limit = self.plan.limits.vram_bytes
        if self.vram_bytes is None or limit is None:
            return []
        promised = human_bytes(self.plan.memory.vram)
        return [f"VRAM       {human_bytes(self.vram_bytes)} (plan: {promised}, limit: {human_bytes(limit)})"]

    def _methods(self) -> str:
        """Primitives in the order in which they first run, with numbers of layers; last those beside GPUs."""
        layers = Counter[str]()
        for plan in filter(None, (self.plan, self.plan.cpu_plan)):
            for choice in plan.choices:
                layers[choice.primitive] += 1 + choice.layers[1] - choice.layers[0]
        return ", ".join(f"{name} ({count} layer{'s' if count != 1 else ''})" for name, count in layers.items())

    def _cover(self) -> str:
        plan = self.plan
        if plan.streams:
            cover = f"columns    {plan.columns} along {AXES[plan.axis]} in steps of {text(plan.patch_out)}"
        else:
            cover = f"patches    {plan.columns} of {text(plan.patch_out)}"
        return f"{cover} output voxels{' (rounded up to whole periods of the network)' if reaches_beyond(plan) else ''}"

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
            "values": asdict(self.values) if self.values else None,
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
            "threads": (self.plan.cpu_plan or self.plan).compute_threads,
            "patch": list(self.plan.patch_out),
            "columns": self.plan.columns,
            "axis": self.plan.axis,
            "column": self.plan.column_planes,
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
            "chunks": asdict(self.chunks) if self.chunks else None,
            "precision": self.precision,
            "blas": self.blas,
            "off_by": next(iter(self._off()), None),
            "warnings": [*self.above_limit, *self.warnings],
        }
