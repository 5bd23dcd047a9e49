"""Record a run while it goes on: its memory, its progress, and what each device did.

However long the run is, the figures take the same memory: they are kept for at most INTERVALS intervals of time, which
double when the run goes beyond them.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import znnpy
from znnpy.computation import trace_of
from znnpy.errors import OutputError
from znnpy.files import regular_file, write_asked
from znnpy.given_options import given_options, held_place
from znnpy.machine import Machine, process_bytes
from znnpy.messages import one_line, option
from znnpy.network import Network
from znnpy.opened_run import NamedRun
from znnpy.options import InferOptions
from znnpy.planner.run_plan import PlannedWorker, RunPlan
from znnpy.report.layer_names import layer_name
from znnpy.report.plan_text import explain
from znnpy.report.run_report import Report
from znnpy.run.stoppable_thread import Thread
from znnpy.run.trace import Spans
from znnpy.run_record import FORMAT, INTERVALS, OverTime, RecordedLayer, RecordedMachine, RecordedReport, RunRecord

if TYPE_CHECKING:
    from znnpy.run.pipeline import Event

FIRST_SECONDS = 0.02  # of an interval at first
SAMPLE_SECONDS = 0.1  # between looks at the memory of the process
NOT_OF_THE_JOB = (  # options that a second run does not need
    *("record", "progress", "trace", "overwrite", "resume", "as_json", "dry_run"),
)


class Figures:
    """Figures over time, which several threads add to. Seconds are counted from the begin of the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = FIRST_SECONDS
        self._memory: list[float] = []
        self._voxels: list[float] = []
        self._busy: dict[str, list[float]] = {}
        self.of_layers: dict[tuple[str, int], float] = {}  # by track and first layer

    def add_memory(self, at: float, nbytes: int) -> None:
        """Add the memory of the process at a time."""
        with self._lock:
            number = self._interval(at)  # first, as it may replace the series
            _raise_to(self._memory, number, nbytes)

    def add_voxels(self, at: float, done: int) -> None:
        """Add the voxels that are written at a time."""
        with self._lock:
            number = self._interval(at)  # first, as it may replace the series
            _raise_to(self._voxels, number, done)

    def add_span(self, track: str, begin: float, end: float, layer: int | None) -> None:
        """Add what a device or thread did from `begin` to `end`, for a layer if it is one's work."""
        with self._lock:
            if layer is not None:
                self.of_layers[track, layer] = self.of_layers.get((track, layer), 0.0) + end - begin
            last, first = self._interval(end), self._interval(begin)
            busy = self._busy.setdefault(track, [])
            busy += [0.0] * (last + 1 - len(busy))
            for number in range(first, last + 1):
                lo, hi = number * self._seconds, (number + 1) * self._seconds
                busy[number] += max(0.0, min(end, hi) - max(begin, lo))

    def over_time(self) -> OverTime:
        """Return the figures."""
        with self._lock:
            busy = {one_line(track): tuple(seconds) for track, seconds in self._busy.items()}
            return OverTime(self._seconds, tuple(self._memory), tuple(self._voxels), busy)

    def _interval(self, at: float) -> int:
        """Return the number of the interval of a time, after doubling the intervals until there is one."""
        while at >= INTERVALS * self._seconds:
            self._seconds *= 2
            self._memory, self._voxels = (_pairs(series, max) for series in (self._memory, self._voxels))
            self._busy = {track: _pairs(series, sum) for track, series in self._busy.items()}
        return max(0, int(at / self._seconds))


def _raise_to(series: list[float], number: int, value: float) -> None:
    """Set an interval to the largest of its values; intervals that were left out get the one before."""
    if number < len(series):
        series[number] = max(series[number], value)
        return
    series += [series[-1] if series else value] * (number - len(series))
    series.append(value)


def _pairs(series: list[float], joined: Callable[[list[float]], float]) -> list[float]:
    return [joined(series[first : first + 2]) for first in range(0, len(series), 2)]


class Recorder(Spans):
    """Collects the figures of a run that has begun, and hands spans on to its trace if it has one."""

    def __init__(self, path: Path, asked: InferOptions) -> None:
        self._path, self._asked = path, asked
        self._began, self._zero = datetime.now(UTC).astimezone(), time.perf_counter()
        self._figures = Figures()
        self._trace: Spans | None = None

    def tracing(self, trace: Spans | None) -> Recorder:
        """Return this recorder, which hands spans on to `trace` from now on."""
        self._trace = trace
        return self

    def record(self, track: str, name: str, begin: float, end: float, **facts: int | float | str) -> None:
        layer = facts.get("layer")
        number = layer if isinstance(layer, int) else None
        self._figures.add_span(track, begin - self._zero, end - self._zero, number)
        if self._trace is not None:
            self._trace.record(track, name, begin, end, **facts)

    def progress(self, tell: Callable[[Event], None] | None) -> Callable[[Event], None]:
        """Return a callback that notes the progress of the run before it calls `tell`."""

        def noted(event: Event) -> None:
            self._figures.add_voxels(time.perf_counter() - self._zero, event.voxels_done)
            if tell is not None:
                tell(event)

        return noted

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Look at the memory of the process again and again in this context."""
        over = threading.Event()

        def look() -> None:
            while True:
                self._figures.add_memory(time.perf_counter() - self._zero, process_bytes())
                if over.wait(SAMPLE_SECONDS):
                    return

        watcher = Thread("memory", look)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.wait()

    def write(self, report: Report, machine: Machine, network: Network, job: Mapping[str, Any]) -> None:
        """Write the record of a finished run. OutputError if that fails."""
        arguments, in_python = given_options(self._asked, NOT_OF_THE_JOB)
        record = RunRecord(
            format=FORMAT,
            znnpy_version=znnpy.__version__,
            began=self._began.isoformat(timespec="seconds"),
            arguments=arguments,
            in_python=in_python,
            volume=str(arguments["volume"]),
            output=held_place(report.output),
            network=one_line(network.name),
            network_sha256=network.sha256,
            weights_sha256=str(job["weights"]),
            machine=_machine(machine, report.gpu),
            report=_figures(report),
            lines=_safe(report.lines()),
            plan=_safe(explain(report.plan, machine).splitlines()),
            layers=layers_of(report, network, self._figures.of_layers),
            over_time=self._figures.over_time(),
        )
        write_asked(self._path, record.to_json(), "record", "the record ", overwrite=self._asked.overwrite)


def recorder_of(named: NamedRun) -> Recorder | None:
    """Return a recorder of the run, or None if none is asked for; OutputError if its file may not be written."""
    asked, output = named.asked, named.destination
    if asked.record is None:
        return None
    path = Path(asked.record)
    if path.suffix.lower() != ".json":
        raise OutputError(f"{path} does not end in .json: give a {option('record')} that does")
    inputs = {**named.inputs, "output": output if isinstance(output, Path) else None}
    return Recorder(regular_file(path, asked.overwrite, "record", inputs=inputs), asked)


def check_files(named: NamedRun) -> None:
    """Raise OutputError if the record or the trace of a run may not be written; nothing is."""
    recorder_of(named)
    trace_of(named)


def layers_of(report: Report, network: Network, measured: Mapping[tuple[str, int], float]) -> tuple[RecordedLayer, ...]:
    """Return each choice of a plan with its seconds, predicted for what this run computed, and measured.

    measured  seconds by track and first layer
    """
    plan = report.plan
    found = []
    for worker in plan.workers:
        share = _share(report, plan, worker)
        for choice in worker.plan.choices:
            seconds = [
                spent
                for (track, layer), spent in measured.items()
                if layer == choice.layers[0] and (len(plan.workers) == 1 or _is_of(track, worker))
            ]
            found.append(
                RecordedLayer(
                    name=one_line(layer_name(worker.plan, network, choice)),
                    primitive=choice.primitive,
                    device=choice.device.upper(),
                    predicted=share * choice.total_seconds,
                    measured=sum(seconds),
                )
            )
    return tuple(found)


def _share(report: Report, plan: RunPlan, worker: PlannedWorker) -> float:
    """Return the share of the whole output that a worker computed in this run."""
    voxels = report.computed
    if len(plan.workers) > 1:
        voxels = sum(one.voxels for one in report.workers if _is_of(one.name, worker))
    return voxels / report.voxels


def _is_of(track: str, worker: PlannedWorker) -> bool:
    return track.startswith(worker.plan.device.upper())


def _figures(report: Report) -> RecordedReport:
    said = report.as_json()
    return RecordedReport(
        shape=report.plan.output,
        voxels=report.voxels,
        computed=report.computed,
        seconds=report.seconds,
        predicted_seconds=report.predicted_seconds,
        stage_seconds=dict(report.stage_seconds),
        peak_bytes=report.peak_bytes,
        promised_bytes=report.plan.memory.peak,
        limit_bytes=report.plan.limits.ram_bytes,
        vram_bytes=report.vram_bytes,
        promised_vram_bytes=report.plan.memory.vram,
        device=one_line(report.gpu or "CPU"),
        mode=report.plan.mode,
        precision=report.precision,
        threads=said["threads"],
        off_by=said["off_by"],
        warnings=_safe(said["warnings"]),
    )


def _machine(machine: Machine, gpu: str | None) -> RecordedMachine:
    graphics = dict(machine.gpu.versions) if gpu and machine.gpu else {}
    return RecordedMachine(
        host=one_line(platform.node()),
        system=one_line(platform.platform()),
        python=platform.python_version(),
        processor=one_line(machine.processor),
        cores=machine.cores,
        ram_bytes=machine.ram_bytes,
        blas=one_line(machine.blas),
        gpu=gpu,
        versions={"znnpy": znnpy.__version__, **dict(machine.versions), **graphics},
    )


def _safe(lines: list[str]) -> tuple[str, ...]:
    return tuple(map(one_line, lines))
