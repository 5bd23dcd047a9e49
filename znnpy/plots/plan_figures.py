"""The figures of a page on a plan: how the output is cut, where the time goes, what takes memory, and what lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.planner.memory import Memory
from znnpy.planner.plan import Plan
from znnpy.planner.run_plan import RunPlan
from znnpy.plots.figures import new_figure
from znnpy.plots.run_figures import AROUND, LIMIT, LONGEST_NAME, ROW, RUN, WIDE
from znnpy.report.layer_names import layer_name
from znnpy.shapes import Vec3
from znnpy.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GPU = "#d6604d"
BOX, PART, CUT = "#34495e", "#f0a03c", "#aeb6bf"  # edges of the output, one column or patch, and other cuts
MOST_CUTS = 60  # lines along an axis; of more, only some are drawn
DEPTH = (0.45, 0.32)  # right and up for a step to the back, in an oblique view
SLICES = ("#2a6fb0", "#7fb3d5", "#48a999", "#f0a03c", "#9b59b6", "#95a5a6", "#566573")

Point = tuple[float, float]


def cut_figure(plan: Plan) -> Figure:
    """Return a view of the output as a box, cut into columns or patches, with one of them filled."""
    figure = new_figure("", 4.4, WIDE)
    axes = figure.subplots()
    size = plan.output
    part = _part(plan)
    for axis in range(3):
        for at in _cuts(size[axis], part[axis]):
            _draw_cut(axes, size, axis, at)
    _draw_box(axes, (0, 0, 0), size, BOX, 1.6)
    _fill_box(axes, (0, 0, 0), part, PART)
    if plan.streams:
        step = plan.patch_out[plan.axis]
        for at in _cuts(part[plan.axis], step):
            _draw_cut(axes, part, plan.axis, at, colour="#7e4c0a")
    z, y, x = size
    for name, voxels, middle, aside in (
        ("z", z, (z / 2, y, x), (8, -12)),
        ("y", y, (0, y / 2, 0), (-44, -4)),
        ("x", x, (0, y, x / 2), (-14, -16)),
    ):
        axes.annotate(f"{name} {voxels:,}", _seen(middle), xytext=aside, textcoords="offset points", fontsize=9)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.axis("off")
    return figure


def _part(plan: Plan) -> Vec3:
    """Return the voxels of one column or patch, as far as they lie in the output."""
    whole = list(plan.patch_out)
    if plan.streams:
        whole[plan.axis] = plan.column_planes
    z, y, x = (min(part, size) for part, size in zip(whole, plan.output, strict=True))
    return z, y, x


def _cuts(size: int, part: int) -> list[int]:
    """Return where an axis is cut; if there are very many cuts, some of them."""
    cuts = list(range(part, size, part))
    return cuts[:: 1 + len(cuts) // MOST_CUTS]


def _seen(at: tuple[float, float, float]) -> Point:
    """Return where a point (z, y, x) is drawn: x to the right, y down, z to the back."""
    z, y, x = at
    return x + DEPTH[0] * z, y - DEPTH[1] * z


def _draw_cut(axes: Axes, size: Vec3, axis: int, at: int, colour: str = CUT) -> None:
    """Draw a cut across an axis on the faces that are seen: the front, the top and the right."""
    z, y, x = size
    corners: list[tuple[float, float, float]]
    if axis == 0:
        corners = [(at, 0, 0), (at, 0, x), (at, y, x)]
    elif axis == 1:
        corners = [(0, at, 0), (0, at, x), (z, at, x)]
    else:
        corners = [(0, y, at), (0, 0, at), (z, 0, at)]
    _line(axes, corners, colour, 0.7)


def _draw_box(axes: Axes, lo: Vec3, hi: Vec3, colour: str, width: float) -> None:
    """Draw the edges of a box that are seen."""
    (z0, y0, x0), (z1, y1, x1) = lo, hi
    _line(axes, [(z0, y0, x0), (z0, y0, x1), (z0, y1, x1), (z0, y1, x0), (z0, y0, x0)], colour, width)
    _line(axes, [(z0, y0, x0), (z1, y0, x0), (z1, y0, x1), (z0, y0, x1)], colour, width)
    _line(axes, [(z1, y0, x1), (z1, y1, x1), (z0, y1, x1)], colour, width)


def _fill_box(axes: Axes, lo: Vec3, hi: Vec3, colour: str) -> None:
    """Fill the faces of a box that are seen: the front, the top and the right."""
    (z0, y0, x0), (z1, y1, x1) = lo, hi
    faces = (
        [(z0, y0, x0), (z0, y0, x1), (z0, y1, x1), (z0, y1, x0)],
        [(z0, y0, x0), (z1, y0, x0), (z1, y0, x1), (z0, y0, x1)],
        [(z0, y0, x1), (z1, y0, x1), (z1, y1, x1), (z0, y1, x1)],
    )
    for face, alpha in zip(faces, (0.85, 0.6, 0.45), strict=True):
        x, y = zip(*map(_seen, face), strict=True)
        axes.fill(x, y, color=colour, alpha=alpha, linewidth=0)
    _draw_box(axes, lo, hi, "#7e4c0a", 1.2)


def _line(axes: Axes, corners: Sequence[tuple[float, float, float]], colour: str, width: float) -> None:
    x, y = zip(*map(_seen, corners), strict=True)
    axes.plot(x, y, color=colour, linewidth=width, solid_joinstyle="round")


def time_figure(run: RunPlan, network: Network) -> Figure:
    """Return bars of the predicted seconds of every layer for the whole output."""
    every = [(worker.plan, choice) for worker in run.workers for choice in worker.plan.choices]
    figure = new_figure("", AROUND + ROW * len(every), WIDE)
    axes = figure.subplots()
    seconds = [choice.total_seconds for _, choice in every]
    colours = [GPU if choice.device == "gpu" else RUN for _, choice in every]
    bars = axes.barh(range(len(every)), seconds, color=colours, height=0.7)
    total = sum(seconds) or 1.0
    axes.bar_label(bars, [f"{human_seconds(one)}, {one / total:.0%}" for one in seconds], padding=4, fontsize=8)
    names = [
        f"{excerpt(layer_name(plan, network, choice), LONGEST_NAME)}\n{choice.primitive}" for plan, choice in every
    ]
    axes.set_yticks(range(len(every)), names, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("predicted seconds for the whole output")
    axes.margins(x=0.18)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def process_parts(memory: Memory) -> list[tuple[str, int]]:
    """Return what takes memory of the process; the bytes add up to what the plan promises."""
    own = [stage for stage in memory.stages if stage.device == "cpu"]
    parts = [
        ("the process itself", memory.baseline),
        ("volume and output on their way", memory.reading + memory.writing),
        ("activations and scratch", sum(stage.arena for stage in own)),
        ("planes kept between steps", sum(stage.carries for stage in own)),
        ("prepared weights", sum(stage.weights for stage in own) + memory.pinned),
        ("handed over between devices", memory.handover),
        ("allowance for libraries", sum(stage.allowance for stage in own)),
    ]
    return [(name, nbytes) for name, nbytes in parts if nbytes]


def gpu_parts(memory: Memory) -> list[tuple[str, int]]:
    """Return what takes memory of each GPU; nothing if none is used."""
    if memory.device != "gpu":
        return []
    own = [stage for stage in memory.stages if stage.device == "gpu"]
    parts = [
        ("CUDA and its libraries", memory.context + sum(stage.allowance for stage in own)),
        ("volume and output on their way", memory.staging),
        ("activations and scratch", sum(stage.arena for stage in own)),
        ("planes kept between steps", sum(stage.carries for stage in own)),
        ("prepared weights", sum(stage.weights for stage in own)),
    ]
    return [(name, nbytes) for name, nbytes in parts if nbytes]


def memory_figure(run: RunPlan) -> Figure:
    """Return a bar for the process, and one for each GPU, of what takes their memory, with the limits."""
    limits = run.limits
    bars = [("process", process_parts(run.memory), limits.ram_bytes)]
    if gpu := gpu_parts(run.memory):
        bars.append(("each GPU", gpu, limits.vram_bytes or 0))
    names = list(dict.fromkeys(name for _, parts, _ in bars for name, _ in parts))
    colours = dict(zip(names, (SLICES * 2)[: len(names)], strict=True))
    figure = new_figure("", 1.5 + 0.6 * len(bars), WIDE)
    axes = figure.subplots()
    shown: set[str] = set()
    for row, (_, parts, limit) in enumerate(bars):
        begin = 0.0
        for name, nbytes in parts:
            label = name if name not in shown else None
            axes.barh(row, nbytes / 2**20, left=begin, color=colours[name], label=label, height=0.6)
            begin += nbytes / 2**20
            shown.add(name)
        if limit <= 3 * sum(nbytes for _, nbytes in parts):
            axes.plot([limit / 2**20] * 2, [row - 0.4, row + 0.4], color=LIMIT, linewidth=2)
    rows = [f"{name}\n{human_bytes(sum(n for _, n in parts))} of {human_bytes(limit)}" for name, parts, limit in bars]
    axes.set_yticks(range(len(bars)), rows, fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("MiB")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure
