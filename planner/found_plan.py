"""Make a plan without alternatives from what a search found."""

from __future__ import annotations

from znnpy.costs.model import Rates
from znnpy.kernels.contract import device_of
from znnpy.planner.memory import Memory
from znnpy.planner.pareto import LayerRun
from znnpy.planner.plan import Choice, Plan, Stage
from znnpy.planner.request import PlanRequest
from znnpy.planner.tilings import Tiling
from znnpy.shapes import turned_back


def choice_of(layers: tuple[int, int], way: LayerRun, rates: Rates) -> Choice:
    """Return the choice for the first to the last of `layers`, and how `rates` know its seconds."""
    known = way.primitive, way.shape, way.variant
    return Choice(
        layers=layers,
        shape=way.shape,
        primitive=way.primitive.name,
        version=way.primitive.version,
        device="gpu" if device_of(way.primitive.name) == "gpu" else "cpu",
        variant=way.variant,
        seconds=way.seconds,
        executions=way.executions,
        measured=rates.measured_similar(*known),
        fitted=rates.all_fitted(*known),
        resident_bytes=way.footprint.resident,
        working_bytes=way.footprint.working(way.shape),
    )


def plan_of(
    request: PlanRequest,
    shape: Tiling,
    stages: tuple[Stage, ...],
    memory: Memory,
    *,
    overlap: bool = False,
    feed_threads: int = 0,
    preparing_seconds: float = 0.0,
    preparing_measured: bool = False,
) -> Plan:
    """Return the plan of patches or columns of one shape."""
    space, axis = shape.space, shape.space.axis
    return Plan(
        limits=request.limits,
        output=turned_back(space.output, axis),
        patch_out=shape.patch_out,
        patch_in=turned_back(shape.step_input, axis),
        axis=axis,
        column_planes=shape.column_planes,
        stages=stages,
        memory=memory,
        itemsize_in=request.itemsize_in,
        itemsize_out=request.itemsize_out,
        columns=len(shape.cover),
        overlap=overlap,
        feed_threads=feed_threads,
        preparing_seconds=preparing_seconds,
        preparing_measured=preparing_measured,
    )
