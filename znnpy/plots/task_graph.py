"""The tasks of a small task-parallel convolution as a plot, as in Fig. 3 of the ZNNi paper: SVG, or Graphviz's DOT.

The SVG is written as text: a plain installation can do that, and tooltips name the tasks, which matplotlib cannot do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from znnpy.errors import ShapeError
from znnpy.kernels.cpu.task_graph import Kind, Task, TaskGraph, check, graph
from znnpy.messages import option

if TYPE_CHECKING:
    import networkx

MOST_TASKS = 1000  # a plot of more tasks would be a black rectangle
FORMATS = (".svg", ".dot")
SPACING, LEVEL, RADIUS, MARGIN = 22, 90, 7, 40  # pixels: between tasks, between levels, of a task, around the plot

COLOURS: dict[Kind, str] = {
    "sync": "#222222",
    "input": "#4c78a8",
    "kernel": "#f58518",
    "multiply": "#54a24b",
    "output": "#b279a2",
}
MEANINGS: dict[Kind, str] = {
    "sync": "synchronisation",
    "input": "input image transform",
    "kernel": "kernel transform",
    "multiply": "multiply-add",
    "output": "output image transform",
}


def task_graph(maps: tuple[int, int], batch: int, form: str) -> str:
    """Return the plot of a layer of `maps` (in, out) on `batch` images; the graph is checked before it is drawn.

    form  one of FORMATS.

    There is a task for each map and image; ShapeError if there are more than MOST_TASKS.
    """
    tasks = TaskGraph(rows=maps[0], columns=maps[1], slabs=1, transforms=batch, products=batch)
    count = tasks.inputs + tasks.kernels + tasks.multiplies + tasks.outputs + 4
    if count > MOST_TASKS:
        raise ShapeError(
            f"{batch} images of {maps[0]} maps in and {maps[1]} out make {count:,} tasks, but a plot can show "
            f"{MOST_TASKS:,}; give fewer {option('maps')}, or a smaller {option('batch')}"
        )
    whole = graph(tasks)
    check(tasks, whole)
    return _dot(whole) if form == ".dot" else _svg(tasks, whole)


def _svg(tasks: TaskGraph, whole: networkx.DiGraph) -> str:
    """Draw levels from top to bottom, each task below all tasks that it waits for."""
    import networkx

    levels = list(networkx.topological_generations(whole))
    width = max(3 * 180, SPACING * max(map(len, levels))) + 2 * MARGIN
    height = LEVEL * (len(levels) - 1) + 2 * MARGIN + LEVEL
    at: dict[Task, tuple[float, float]] = {}
    for depth, level in enumerate(levels):
        for place, task in enumerate(sorted(level, key=lambda task: (task.column, task.row, task.part))):
            x = width / 2 + (place - (len(level) - 1) / 2) * (width - 2 * MARGIN) / max(1, len(level))
            at[task] = x, MARGIN + LEVEL * (depth + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f"<title>Tasks of a convolution: {tasks.rows} maps in, {tasks.columns} out, {tasks.products} images</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
        '<g stroke="#999999" stroke-width="0.7">',
    ]
    for earlier, later in whole.edges:
        (x0, y0), (x1, y1) = at[earlier], at[later]
        lines.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')
    lines.append("</g>")
    for task, (x, y) in at.items():
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{COLOURS[task.kind]}">'
        lines.append(f"{shape}<title>{task}, distance {tasks.distance(task)}</title></circle>")
    return "\n".join([*lines, "</svg>", ""])


def _legend() -> list[str]:
    """Return SVG elements that explain the colours."""
    lines = []
    for place, (kind, colour) in enumerate(COLOURS.items()):
        x, y = MARGIN + 180 * (place % 3), 24 + 22 * (place // 3)
        lines.append(f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{colour}"/>')
        lines.append(f'<text x="{x + 12}" y="{y + 4}" font-size="13">{MEANINGS[kind]}</text>')
    return lines


def _dot(whole: networkx.DiGraph) -> str:
    lines = ["digraph tasks {", "node [style=filled, fontcolor=white];"]
    lines += [f'"{task}" [fillcolor="{COLOURS[task.kind]}"];' for task in whole]
    lines += [f'"{earlier}" -> "{later}";' for earlier, later in whole.edges]
    return "\n".join([*lines, "}", ""])
