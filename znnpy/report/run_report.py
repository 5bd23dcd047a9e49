"""The report of a run, with each figure next to the one that the plan predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from znnpy.messages import excerpt
from znnpy.planner.alternatives import offloaded_layers
from znnpy.planner.run_plan import RunPlan
from znnpy.report.plan_text import AXES, reaches_beyond
from znnpy.shapes import Precision, text
from znnpy.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from znnpy.measure.transfers import Transfers
    from znnpy.run.pipeline import WorkerTimings
    from znnpy.values import Values
    from znnpy.volume.base import Chunks
    from znnpy.volume.location import Location

PRECISION_WORDS: Mapping[Precision, str] = {
    "fp32": "fp32, 32-bit floating point",
    "tf32": "tf32, 32-bit floating point rounded to 11 significant bits in products",
    "fp16": "fp16, 16-bit floating point",
    "bf16x2": "bf16x2, 32-bit floating point rounded to two bfloat16, or 16 significant bits, in products",
    "bf16": "bf16, 16-bit floating point with 8 significant bits",
}


OFF = 2.0  # a report explains a run that took this many times the predicted seconds, or that fraction of them
LEAST_OFF = 1.0  # seconds; smaller differences are due to the start of a process


@dataclass(frozen=True)
class Report:
    """A finished run: where its output is, how long it took, what it held in memory."""

    output: Path | Location  # path or URL of the output, or a description of the caller's array
    voxels: int  # of the dense output, per map
    computed: int  # voxels computed in this run; fewer than `voxels` after a resume
    seconds: float  # from opening the volume to renaming the output, including planning and preparation
    stage_seconds: Mapping[str, float]  # planning and preparing; then reading, computing, writing, which overlap
    peak_bytes: int  # largest resident memory of the process
    plan: RunPlan
    blas: str  # kernels that BLAS ran, e.g. `openblas SkylakeX`
    warnings: tuple[str, ...]
    gpu: str | None = None  # name of the GPU that ran the layers; None: the CPU ran them, or nothing was left to do
    vram_bytes: int | None = None  # GPU memory of the process at the end
    notes: tuple[str, ...] = ()  # why the run did not use another device or precision
    workers: tuple[WorkerTimings, ...] = ()  # of every device that computed
    chunks: Chunks | None = None  # count of the volume's chunks; None if nothing was left to do
    values: Values | None = None  # range of what this run wrote; None if nothing was finite
    idle_seconds: Mapping[str, float] = field(default_factory=dict)  # of both sides, if a step uses two devices
    region: str = ""  # the region in voxels, where it was named by position
    mask: str = ""  # the mask, and how its voxels were found; empty: there is none
    skipped: int = 0  # voxels of the (first) output outside of it that no run of the job computed
    earlier_peak_bytes: int = 0  # largest resident memory of the process before the run began
    transfers: Transfers | None = None  # predicted reading and writing; None if they were not measured
    case: str = ""  # what was made of the images of a case of nnU-Net; empty: there is none
    rewritten: int = 0  # files of chunks that were written again because they had been written in part

    def __repr__(self) -> str:
        """Return one line; `str(report)` is the whole report."""
        return (
            f"<Report on {excerpt(self.output)}: {self.computed:,} of {self.voxels:,} voxels computed in "
            f"{human_seconds(self.seconds)}, {human_bytes(self.peak_bytes)} at the peak>"
        )

    def __str__(self) -> str:
        """Return the lines of `lines` as one text."""
        return "\n".join(self.lines())

    @property
    def precision(self) -> Precision:
        """The precision in which values are stored and multiplied."""
        return self.plan.precision

    @property
    def voxels_per_second(self) -> float:
        """Output voxels per second of the whole run, from its start to the finished output."""
        return self.computed / self.seconds

    @property
    def predicted_speed(self) -> float:
        """Output voxels per second that the plan predicts; 0 if a plan edited by hand states an impossible time."""
        speed = self.voxels / self._seconds if self._seconds else 0.0
        return speed if speed < inf else 0.0

    @property
    def _seconds(self) -> float:
        """Predicted seconds for the whole output: of computing, or of reading or writing if that takes longer."""
        return max(self.plan.seconds, 0.0 if self.transfers is None else self.transfers.seconds)

    @property
    def predicted_seconds(self) -> float:
        """Seconds that the plan predicts for the voxels of this run; 0 if `predicted_speed` is 0."""
        if not self.predicted_speed:
            return 0.0
        preparing = self.plan.main.preparing_seconds
        return preparing + (self._seconds - preparing) * self.computed / self.voxels

    @property
    def _threads(self) -> int:
        """Number of threads that compute on the CPU, or that feed the GPUs where it computes nothing."""
        return self.plan.workers[-1].plan.compute_threads

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        if not self.computed:
            return [f"{self.output}: {text(self.plan.output)}, {self.voxels:,} voxels, complete already: nothing to do"]
        resumed = f", {self.computed:,} of them in this run" if self.computed < self.voxels else ""
        threads = self._threads
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
            *([f"region     {self.region}"] if self.region else []),
            *([f"case       {self.case}"] if self.case else []),
            *self._masked(),
            f"stages     {self._stages()}",
            *([] if self.transfers is None else [f"transfers  {self.transfers}"]),
            *self._rewritten(),
            *self._workers(),
            *self._mode(),
            f"{self._cover()}, computed by {threads} thread{'s' if threads != 1 else ''}",
            f"methods    {self._methods()}; `znnpy primitives` explains them",
            f"device     {'; '.join((self.gpu or 'CPU', *self.notes))}",
            f"precision  {PRECISION_WORDS[self.precision]}" + ("" if self.gpu else f"; BLAS kernels {self.blas}"),
            *(f"warning: {warning}" for warning in (*self.above_limit, *self.warnings)),
        ]

    @property
    def above_limit(self) -> tuple[str, ...]:
        """A sentence with both numbers if this run took the process above its memory limit; else nothing."""
        limit = self.plan.limits.ram_bytes
        if self.peak_bytes <= max(limit, self.earlier_peak_bytes):
            return ()
        peak = f"{human_bytes(self.peak_bytes)} at its peak ({self.peak_bytes:,} bytes)"
        return (f"the process held {peak}, more than the limit of {human_bytes(limit)} ({limit:,} bytes)",)

    def _off(self) -> list[str]:
        """Explain why the run took much more or less time than predicted, and what to do."""
        spent, predicted = self.seconds, self.predicted_seconds
        if not predicted or abs(spent - predicted) < LEAST_OFF or 1 / OFF < spent / predicted < OFF:
            return []
        stages, preparing = self.stage_seconds, self.plan.main.preparing_seconds
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
        if not (self.plan.main.preparing_measured if why == slow_memory else self.plan.fitted):
            rates = "assumed: `znnpy measure` takes a minute and measures those of this machine"
        factor = max(spent / predicted, predicted / spent)
        return [f"{factor:.1f} times from the plan: {why}; its rates are {rates}"]

    def _rewritten(self) -> list[str]:
        """Say how many files were written more than once."""
        if not self.rewritten:
            return []
        files = "file of chunks was" if self.rewritten == 1 else "files of chunks were"
        return [f"chunks     {self.rewritten:,} {files} written again, since more of them came later"]

    def _values(self) -> list[str]:
        """Describe the range of the output, which shows whether the network responds at all."""
        if self.values is None:
            return []
        scale = ", which are 255 times the network's" if self.plan.main.itemsize_out == 1 else ""
        part = " in the part of this run" if self.computed < self.voxels else ""
        return [f"values     {self.values}{scale}{part}"]

    def _chunks(self) -> list[str]:
        """Describe how much of the volume was never written or is damaged."""
        if self.chunks is None:
            return []
        of = f"of {self.chunks.looked:,} {self.chunks.unit} are"
        said = {
            "missing and were read as the fill value": self.chunks.missing,
            "damaged and were read as the value given for missing voxels": self.chunks.damaged,
        }
        return [f"volume     {count:,} {of} {what}" for what, count in said.items() if count]

    def _masked(self) -> list[str]:
        """Say how much of the output was not computed."""
        if not self.mask:
            return []
        share = self.skipped / self.voxels
        return [f"mask       {share:.0%} of the output lies outside the mask and was not computed ({self.mask})"]

    def _stages(self) -> str:
        """Describe planning and preparing, which run in turn, and then the stages that overlap."""
        spent = {name: human_seconds(seconds) for name, seconds in self.stage_seconds.items()}
        first = [f"{name} {spent.pop(name)}" for name in ("planning", "preparing") if name in spent]
        return "; ".join([*first, f"{', '.join(f'{name} {time}' for name, time in spent.items())} (side by side)"])

    def _workers(self) -> list[str]:
        """Describe what each of several devices did."""
        if len(self.workers) < 2 or not self.computed:
            return []
        shares = (
            f"{worker.name} {worker.voxels / self.computed:.1%} of the voxels, waiting "
            f"{human_seconds(worker.seconds['waiting'])}"
            for worker in self.workers
        )
        return [f"devices    {'; '.join(shares)}"]

    def _mode(self) -> list[str]:
        """Describe which layers kept their tensors in host memory, and how long both sides were idle."""
        if not self.plan.main.offloaded:
            return []
        idle = ", ".join(f"{side} {human_seconds(seconds)}" for side, seconds in self.idle_seconds.items())
        return [f"mode       {self.plan.mode}, {offloaded_layers(self.plan.main)}{f'; idle: {idle}' if idle else ''}"]

    def _vram(self) -> list[str]:
        limit = self.plan.limits.vram_bytes
        if self.vram_bytes is None or limit is None:
            return []
        promised = human_bytes(self.plan.memory.vram)
        return [f"VRAM       {human_bytes(self.vram_bytes)} (plan: {promised}, limit: {human_bytes(limit)})"]

    def _methods(self) -> str:
        """List primitives with their number of layers, in order of first use; those of a second worker come last."""
        layers = Counter[str]()
        for choice in self.plan.choices:
            layers[choice.primitive] += 1 + choice.layers[1] - choice.layers[0]
        return ", ".join(f"{name} ({count} layer{'s' if count != 1 else ''})" for name, count in layers.items())

    def _cover(self) -> str:
        plan = self.plan.main
        if plan.streams:
            cover = f"columns    {plan.columns} along {AXES[plan.axis]} in steps of {text(plan.patch_out)}"
        else:
            cover = f"patches    {plan.columns} of {text(plan.patch_out)}"
        return f"{cover} output voxels{' (rounded up to whole periods of the network)' if reaches_beyond(plan) else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain dictionaries, numbers and text.

        `patch` is the output of a step, `columns` the number of columns or patches, `axis` (0: z) the axis of the
        columns, and `column` their output planes along it, 0 for patches.
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
            "transfers": asdict(self.transfers) if self.transfers else None,
            "rewritten": self.rewritten,
            "ram_bytes": self.plan.limits.ram_bytes,
            "threads": self._threads,
            "patch": list(self.plan.patch_out),
            "columns": self.plan.main.columns,
            "axis": self.plan.main.axis,
            "column": self.plan.main.column_planes,
            "primitives": [choice.primitive for choice in self.plan.main.choices],
            "device": self.plan.device,
            "mode": self.plan.mode,
            "idle_seconds": dict(self.idle_seconds),
            "devices": [
                {"name": worker.name, "voxels": worker.voxels, "seconds": dict(worker.seconds), "lost": worker.lost}
                for worker in self.workers
            ],
            "gpu": self.gpu,
            "notes": list(self.notes),
            "chunks": asdict(self.chunks) if self.chunks else None,
            "region": self.region or None,
            "case": self.case or None,
            "mask": self.mask or None,
            "skipped": self.skipped,
            "precision": self.precision,
            "blas": self.blas,
            "off_by": next(iter(self._off()), None),
            "warnings": [*self.above_limit, *self.warnings],
        }
