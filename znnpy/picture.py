"""`znnpy plan --plot`: throughput against memory for every kind of plan, and choices per layer.

As in Zlateski, Lee, Seung, ZNNi (SC16): figures 5 and 7, and below them table IV.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import ceil, floor, log2, log10
from pathlib import Path

from znnpy.files import write_asked
from znnpy.pen import INK, PALE, Colour, Pen, Place, blank
from znnpy.planner.explain import human_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.throughput import Point
from znnpy.shapes import text

Kind = tuple[str, bool]  # device; whether columns walk

COLOURS: dict[Kind, Colour] = {
    ("cpu", True): (31, 119, 180),
    ("cpu", False): (158, 202, 225),
    ("gpu", True): (214, 96, 77),
    ("gpu", False): (253, 187, 132),
}
WIDTH, HEIGHT, MARGIN, ROW = 1100, 420, 24, 22
LEFT, BELOW = 80, 40  # of the frame, for its scales
LABEL = 200  # of the table's first column
POINT, RING = 4.0, 9.0  # radii


def draw(path: Path, title: str, chosen: Plan, found: Sequence[Point], *, overwrite: bool) -> None:
    """Write a PNG; it appears whole or not at all. `found` are the points of all kinds, `chosen` is marked."""
    kinds = sorted({_kind(point.plan) for point in found} | {_kind(chosen)})
    beside = [(kind, _beside(kind, chosen, found)) for kind in kinds]
    columns = [("chosen", chosen), *((_name(kind), plan) for kind, plan in beside if plan is not None)]
    layers = 1 + max(choice.layers[1] for choice in chosen.choices)
    top = MARGIN + 34 + 1.5 * ROW
    height = top + HEIGHT + ROW * (layers + 5) + MARGIN
    image = blank(WIDTH, height)
    pen = Pen(image)
    pen.write((MARGIN, MARGIN), title, 20)
    x = float(MARGIN)
    for kind in kinds:
        pen.line([(x, MARGIN + 46), (x + 22, MARGIN + 46)], COLOURS[kind], 3)
        pen.write((x + 28, MARGIN + 38), _name(kind), 13)
        x += 60 + pen.width(_name(kind), 13)
    pen.ring((x + 8, MARGIN + 46), RING)
    pen.write((x + 22, MARGIN + 38), "the chosen plan", 13)
    _diagram(pen, top, chosen, found, kinds)
    _table(pen, top + HEIGHT + ROW, columns, layers)
    drawn = io.BytesIO()
    image.save(drawn, "PNG", optimize=True)
    write_asked(path, drawn.getvalue(), "plot", overwrite=overwrite)


def _diagram(pen: Pen, top: float, chosen: Plan, found: Sequence[Point], kinds: Sequence[Kind]) -> None:
    """Memory across by powers of 2, voxels per second upright by powers of 10; a point for each limit."""
    held = [point.limit for point in found] + [chosen.memory.held]
    speeds = [point.plan.voxels_per_second for point in found] + [chosen.voxels_per_second]
    left, right = floor(log2(min(held))), ceil(log2(max(held)) + 1e-6)
    low, high = floor(log10(min(speeds))), ceil(log10(max(speeds)) + 1e-6)
    x0, x1, y0, y1 = float(MARGIN + LEFT), float(WIDTH - MARGIN), top + HEIGHT - BELOW, top

    def place(nbytes: int, speed: float) -> Place:
        across, up = (log2(nbytes) - left) / (right - left), (log10(speed) - low) / (high - low)
        return x0 + (x1 - x0) * across, y0 + (y1 - y0) * up

    for power in range(low, high + 1):
        _, y = place(2**left, 10.0**power)
        pen.line([(x0, y), (x1, y)], PALE, 0.5)
        pen.write((x0 - 6, y), f"{10.0**power:,.10g}", 11, "rm")
    for power in range(left, right + 1):
        x, _ = place(2**power, 10.0**low)
        pen.line([(x, y0), (x, y0 + 4)], INK, 0.5)
        pen.write((x, y0 + 6), human_bytes(2**power).replace(".00", "").replace(".0", ""), 11, "ma")
    pen.line([(x0, y1), (x0, y0), (x1, y0)], INK, 0.5)
    pen.write((x0 + 6, y1), "output voxels/s", 11)
    pen.write((x1, y0 + 22), "limit on the memory where the layers run", 11, "ra")
    for kind in kinds:
        places = sorted(place(p.limit, p.plan.voxels_per_second) for p in found if _kind(p.plan) == kind)
        if len(places) > 1:
            pen.line(places, COLOURS[kind], 2)
        for at in places:
            pen.point(at, COLOURS[kind], POINT)
    pen.ring(place(chosen.memory.held, chosen.voxels_per_second), RING)


def _table(pen: Pen, top: float, columns: Sequence[tuple[str, Plan]], layers: int) -> None:
    """Of each plan: limit, what goes in and comes out at a time, and the primitive of every layer."""
    wide = (WIDTH - 2 * MARGIN - LABEL) / len(columns)
    rows = ["", "limit", "in", "out", *(f"layer {index}" for index in range(layers))]
    for down, label in enumerate(rows):
        pen.write((MARGIN, top + down * ROW), label, 12)
    for along, (name, plan) in enumerate(columns):
        limit = plan.limits.ram_bytes if plan.device == "cpu" else plan.limits.vram_bytes or 0
        cells = [name, human_bytes(limit), text(plan.patch_in), text(plan.patch_out), *_methods(plan, layers)]
        for down, cell in enumerate(cells):
            pen.write((MARGIN + LABEL + along * wide, top + down * ROW), cell, 12)
    y = top + ROW - 4
    pen.line([(MARGIN, y), (WIDTH - MARGIN, y)], INK, 0.5)


def _methods(plan: Plan, layers: int) -> list[str]:
    """Of every layer the primitive without its device and kind, the same for two in one; and in how many parts."""
    names = [""] * layers
    for choice, parts in zip(plan.choices, plan.parts, strict=True):
        name = choice.primitive.rpartition(".")[2] + (f" in {parts}" if parts > 1 else "")
        first, last = choice.layers
        names[first] = name
        if last > first:
            names[last] = "in one"
    return names


def _beside(kind: Kind, chosen: Plan, found: Sequence[Point]) -> Plan | None:
    """The best of a kind within the limit of the chosen plan, or of the smallest limit where none is; None: itself."""
    limit = chosen.limits.ram_bytes if kind[0] == "cpu" else chosen.limits.vram_bytes
    own = sorted((point for point in found if _kind(point.plan) == kind), key=lambda point: point.limit)
    within = [point for point in own if limit is None or point.limit <= limit] or own[:1]
    return within[-1].plan if within and kind != _kind(chosen) else None


def _kind(plan: Plan) -> Kind:
    return plan.device, plan.walks


def _name(kind: Kind) -> str:
    return f"{'columns' if kind[1] else 'patches'} on the {kind[0].upper()}"
