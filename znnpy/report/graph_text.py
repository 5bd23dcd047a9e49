"""The plan of a graph that is computed whole, in words and a table with a row for each operation."""

from __future__ import annotations

from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from znnpy.geometry import AXES
from znnpy.messages import excerpt
from znnpy.planner.described_graph import DescribedGraph
from znnpy.planner.plan import Choice, Plan, Sums
from znnpy.report.wide_table import WideOrNarrow
from znnpy.shapes import Vec3, text, turned_back
from znnpy.units import human_bytes, human_seconds


def cover_text(plan: Plan, graph: DescribedGraph, name: str) -> str:
    """Say what is computed at a time, and how the output is covered with it."""
    area = plan.area
    assert area is not None, "plans of graphs have it"
    if plan.sums is not None:
        return _windows_text(plan, plan.sums, name, area.volume)
    lattice = "" if graph.level == "1" else f", one for {graph.level} of the volume,"
    of = f"of a volume of {text(area.volume)}"
    if graph.padded != area.volume:
        of += f", padded at its far faces to {text(graph.padded)} ({graph.pad_to_period})"
    further = f", and {', '.join(text(box.size) for box in area.others)} of further outputs," if area.others else ""
    whole = f"{name}, computed whole {of}: {text(plan.output)} output voxels{lattice}{further} in"
    sizes = f"at most {text(plan.patch_in)} in and {text(plan.patch_out)} out (period {text(graph.period)})"
    if not plan.streams:
        return f"{whole} {plan.columns:,} patch{'es' if plan.columns != 1 else ''}, each {sizes}"
    columns = f"{plan.columns:,} column{'s' if plan.columns != 1 else ''} along {AXES[plan.axis]}"
    if plan.column_planes < plan.output[plan.axis]:
        columns += f", each at most {plan.column_planes:,} planes of output,"
    silent = f", of which the first {graph.silent:,} give no output" if graph.silent else ""
    return (
        f"{whole} {columns} in steps of {plan.patch_out[plan.axis]:,} planes, each {sizes}; a column has "
        f"{graph.steps:,} step{'s' if graph.steps != 1 else ''}{silent}, and keeps planes for later steps, "
        f"{human_bytes(plan.memory.last.carries)} in all"
    )


def _windows_text(plan: Plan, sums: Sums, name: str, volume: Vec3) -> str:
    """Say in how many windows the output is computed, and how their results are summed up."""
    times = plan.choices[0].executions
    parts = f" in each of {sums.parts} parts of the output" if sums.parts > 1 else ""
    half = ", of which those that a row keeps for the next are rounded to float16" if sums.dtype == "float16" else ""
    return (
        f"{name}, computed in windows of {text(plan.patch_out)} over a volume of {text(volume)}: {text(plan.output)} "
        f"output voxels in {times:,} window{'s' if times != 1 else ''}, mirrored ones counted, in {plan.columns:,} "
        f"row{'s' if plan.columns != 1 else ''} along {AXES[plan.axis]}; their results are summed up{parts} until no "
        f"later window adds to them, in {human_bytes(plan.memory.last.carries)}{half}"
    )


def operations_table(plan: Plan, graph: DescribedGraph) -> RenderableType:
    """Lay out the operations with what they give in a full step, their seconds and the planes that are kept of it."""
    return WideOrNarrow(_table(plan, graph), _table(plan, graph, stacked=True))


def _table(plan: Plan, graph: DescribedGraph, *, stacked: bool = False) -> Table:
    """Return the table; `stacked` puts size and primitive below the node, in fewer columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("node; its inputs if not the one above", no_wrap=True)
    table.add_column("level", justify="right", no_wrap=True)
    if not stacked:
        table.add_column("gives in a step", no_wrap=True)
        table.add_column("primitive", no_wrap=True)
    for column in ("time", "share", *(("kept planes", "bytes") if plan.streams else ())):
        table.add_column(column, justify="right", no_wrap=" " not in column, max_width=6 if " " in column else None)
    total = sum(choice.total_seconds for choice in plan.choices)
    widest = max(len(choice.primitive) for choice in plan.choices)
    above = "input"
    for node, choice in zip(graph.nodes, (None, *plan.by_node), strict=True):
        merged = choice is None and node.reads != ()
        reads = [] if node.reads in ((), (above,)) else [f"of {', '.join(node.reads)}"]
        above = node.name.split(" + ", 1)[0]
        size = "" if merged else _size(plan, choice)
        method = [] if choice is None else [choice.primitive, *wrap(str(choice.variant), widest)]
        method = ["in one with the node above"] if merged else method
        first = [node.name, *([f" {node.layer}"] if merged or choice else []), *(f" {line}" for line in reads)]
        if stacked:
            first += [f" {line}" for line in (*([] if merged else [f"gives {size}"]), *method)]
        spent = "" if choice is None else human_seconds(choice.seconds)
        share = f"{choice.total_seconds / total:.0%}" if choice is not None and total else ""
        held = (f"{node.planes:,}", human_bytes(node.nbytes)) if node.planes else ("", "")
        cells = (
            "\n".join(excerpt(line, 2000) for line in first),
            excerpt(node.level),
            *(() if stacked else (size, "\n".join(method))),
            spent,
            share,
            *(held if plan.streams else ()),
        )
        table.add_row(*map(Text, cells))
    return table


def _size(plan: Plan, choice: Choice | None) -> str:
    """Write size (z, y, x) and maps of what a full step computes, or reads of the input."""
    if choice is None:
        return text((*plan.patch_in, plan.choices[0].shape.in_shape[4]))
    _, z, y, x, maps = choice.shape.out_shape
    return text((*turned_back((z, y, x), plan.axis), maps))
