"""`znnpy plan --plot`: throughput against memory for every kind of plan, and a table of their layers.

It follows Zlateski, Lee, Seung, ZNNi (SC16): figures 5 and 7, and table IV below them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.messages import excerpt
from znnpy.planner.plan import Plan
from znnpy.planner.run_plan import RunPlan
from znnpy.plots.figures import new_figure, save_figure
from znnpy.report.memory_sweep import Point
from znnpy.shapes import text
from znnpy.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = tuple[str, bool]  # device; whether columns stream along an axis

COLOURS: dict[Kind, str] = {
    ("cpu", True): "#1f77b4",
    ("cpu", False): "#9ecae1",
    ("gpu", True): "#d6604d",
    ("gpu", False): "#fdbb84",
}
DIAGRAM, ROW = 4.2, 0.22  # inches: height of the diagram, and of a row of the table
CELLS = 4  # rows of the table above those of the layers


def draw(path: Path, title: str, chosen: RunPlan, found: Sequence[Point], *, overwrite: bool) -> None:
    """Write the plot as a PNG, whole or not at all."""
    save_figure(path, memory_sweep_figure(title, chosen, found), "plot", overwrite=overwrite)


def memory_sweep_figure(title: str, chosen: RunPlan, found: Sequence[Point]) -> Figure:
    """Return a figure with the points `found`, of plans of all kinds, in which the chosen plan is marked."""
    kinds = sorted({_kind(point.plan) for point in found} | {_kind(chosen.main)})
    layers = 1 + max(choice.layers[1] for choice in chosen.main.choices)
    table_height = ROW * (layers + CELLS + 1)
    figure = new_figure(title, DIAGRAM + table_height)
    diagram, table = figure.subplots(2, height_ratios=[DIAGRAM, table_height])
    _draw_diagram(diagram, chosen, found, kinds)
    best = [(kind, _best_of(kind, chosen, found)) for kind in kinds]
    plans = [("chosen", chosen.main), *((_name(kind), plan) for kind, plan in best if plan is not None)]
    _draw_table(table, plans, layers)
    return figure


def _draw_diagram(axes: Axes, chosen: RunPlan, found: Sequence[Point], kinds: Sequence[Kind]) -> None:
    """Draw voxels per second over memory, with logarithmic scales and a point for each limit."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    for kind in kinds:
        own = sorted((p.limit, p.plan.voxels_per_second) for p in found if _kind(p.plan) == kind)
        limits, speeds = [limit for limit, _ in own], [speed for _, speed in own]
        axes.plot(limits, speeds, "o-", color=COLOURS[kind], label=_name(kind))
    held, speed = [chosen.memory.device_bytes], [chosen.voxels_per_second]
    axes.plot(held, speed, "ko", markersize=12, fillstyle="none", label="the chosen plan")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: human_bytes(round(nbytes))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("limit on the memory of the device that runs the layers")
    axes.set_ylabel("output voxels/s")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_table(axes: Axes, plans: Sequence[tuple[str, Plan]], layers: int) -> None:
    """List the limit, the patch sizes and the primitive of every layer of each plan."""
    axes.axis("off")
    graph = plans[0][1].graph
    names = [f"layer {index}" for index in range(layers)]
    if graph is not None:
        names = [excerpt(node.name.split(" + ", 1)[0]) for node in graph.nodes[1:]]
    rows = ["limit", "in", "out", *names]
    columns = []
    for _, plan in plans:
        limit = plan.limits.ram_bytes if plan.device == "cpu" else plan.limits.vram_bytes or 0
        columns.append([human_bytes(limit), text(plan.patch_in), text(plan.patch_out), *_primitives(plan, layers)])
    axes.table(
        [list(cells) for cells in zip(*columns, strict=True)],
        rowLabels=rows,
        colLabels=[name for name, _ in plans],
        cellLoc="left",
        colLoc="left",
        edges="horizontal",
        loc="upper center",
    )


def _primitives(plan: Plan, layers: int) -> list[str]:
    """Return the primitive of every layer, without device and kind, and the number of parts it runs in."""
    if plan.graph is not None:
        return ["in one" if choice is None else choice.primitive.rpartition(".")[2] for choice in plan.by_node]
    names = [""] * layers
    for choice, parts in zip(plan.choices, plan.sub_batches, strict=True):
        name = choice.primitive.rpartition(".")[2] + (f" in {parts}" if parts > 1 else "")
        first, last = choice.layers
        names[first] = name
        if last > first:
            names[last] = "in one"
    return names


def _best_of(kind: Kind, chosen: RunPlan, found: Sequence[Point]) -> Plan | None:
    """Return the best plan of a kind within the limit of the chosen plan, or else that of its smallest limit.

    None: there is no plan of this kind, or the chosen plan is of this kind.
    """
    limit = chosen.limits.ram_bytes if kind[0] == "cpu" else chosen.limits.vram_bytes
    own = sorted((point for point in found if _kind(point.plan) == kind), key=lambda point: point.limit)
    within = [point for point in own if limit is None or point.limit <= limit] or own[:1]
    return within[-1].plan if within and kind != _kind(chosen.main) else None


def _kind(plan: Plan) -> Kind:
    return plan.device, plan.streams


def _name(kind: Kind) -> str:
    return f"{'columns' if kind[1] else 'patches'} on the {kind[0].upper()}"
