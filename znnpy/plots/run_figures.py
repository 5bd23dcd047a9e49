"""The figures of a page on a run: layers and stages beside the plan, memory, progress and devices over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from znnpy.messages import excerpt
from znnpy.plots.figures import new_figure
from znnpy.plots.timeline import WAITING
from znnpy.run_record import OverTime, RecordedLayer, RecordedReport
from znnpy.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 9.0  # inches
PLAN, RUN, LIMIT = "#b8c4d6", "#2a6fb0", "#c0392b"
ROW, AROUND = 0.5, 1.1  # inches: a layer, and title and axis
TRACK = 0.55  # inches
LONGEST_NAME = 44  # characters of a layer
MUCH = 3.0  # times what a run holds: a limit beyond it would flatten the curve


def layers_figure(layers: Sequence[RecordedLayer]) -> Figure:
    """Return bars of the seconds of every layer, planned and measured."""
    figure = new_figure("", AROUND + ROW * len(layers), WIDE)
    axes = figure.subplots()
    places = range(len(layers))
    for shift, colour, name, seconds in (
        (-0.2, PLAN, "plan", [layer.predicted for layer in layers]),
        (0.2, RUN, "measured", [layer.measured for layer in layers]),
    ):
        axes.barh([place + shift for place in places], seconds, height=0.38, color=colour, label=name)
    names = [f"{excerpt(layer.name, LONGEST_NAME)}\n{layer.primitive}" for layer in layers]
    axes.set_yticks(places, names, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("seconds in this run")
    _finish(axes)
    return figure


def memory_figure(over_time: OverTime, report: RecordedReport) -> Figure:
    """Return the memory of the process over time, with the promise of the plan and the limit."""
    figure = new_figure("", 2.8, WIDE)
    axes = figure.subplots()
    held = over_time.memory
    _steps(axes, over_time, [nbytes / 2**20 for nbytes in held], RUN, "memory of the process")
    axes.axhline(report.promised_bytes / 2**20, color="#5d6d7e", linestyle="--", label="promise of the plan")
    if report.limit_bytes <= MUCH * max(report.promised_bytes, report.peak_bytes):
        axes.axhline(report.limit_bytes / 2**20, color=LIMIT, label="limit")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
    axes.set_xlabel("seconds since the run began")
    _finish(axes)
    return figure


def progress_figure(over_time: OverTime, report: RecordedReport) -> Figure:
    """Return the share of the output that is written over time, with the speed that the plan predicts."""
    figure = new_figure("", 2.8, WIDE)
    axes = figure.subplots()
    share = [100 * done / report.voxels for done in over_time.voxels]
    _steps(axes, over_time, share, RUN, "written")
    before = 100 * (report.voxels - report.computed) / report.voxels
    began = report.stage_seconds.get("planning", 0.0)
    planned = [began, began + report.predicted_seconds]
    axes.plot(planned, [before, 100.0], color="#5d6d7e", linestyle="--", label="plan, from when it was made")
    axes.set_ylim(0, 105)
    axes.set_ylabel("% of the output")
    axes.set_xlabel("seconds since the run began")
    _finish(axes)
    return figure


def devices_figure(over_time: OverTime) -> Figure:
    """Return a row for each device and thread, filled as high as it was busy, or waited, at that time."""
    tracks = over_time.busy
    figure = new_figure("", 0.8 + TRACK * len(tracks), WIDE)
    axes = figure.subplots()
    ends = [number * over_time.seconds for number in range(max(map(len, tracks.values()), default=0) + 1)]
    for number, (name, busy) in enumerate(tracks.items()):
        shares = [min(1.0, spent / over_time.seconds) for spent in busy]
        shares += [0.0] * (len(ends) - 1 - len(shares))
        low = len(tracks) - 1 - number
        colour = WAITING if name.endswith("waiting") else RUN
        axes.stairs([low + 0.8 * share for share in shares], ends, baseline=low, fill=True, color=colour)
        axes.axhline(low, color="#d5d8dc", linewidth=0.6)
    axes.set_yticks([len(tracks) - 1 - n + 0.4 for n in range(len(tracks))], list(tracks), parse_math=False)
    axes.set_xlim(0, ends[-1] or over_time.seconds)
    axes.set_ylim(-0.1, len(tracks))
    axes.set_xlabel("seconds since the run began")
    axes.grid(axis="x", alpha=0.3)
    return figure


def limit_note(report: RecordedReport) -> str:
    """Say in words how much memory was held, promised and allowed."""
    return (
        f"{human_bytes(report.peak_bytes)} at the peak; the plan promised {human_bytes(report.promised_bytes)}, and "
        f"the limit was {human_bytes(report.limit_bytes)}"
    )


def _steps(axes: Axes, over_time: OverTime, values: Sequence[float], colour: str, label: str) -> None:
    """Draw a value for each interval of time."""
    ends = [number * over_time.seconds for number in range(len(values) + 1)]
    axes.stairs(values, ends, color=colour, label=label, linewidth=1.6, baseline=None)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="best")
