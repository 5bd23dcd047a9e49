"""Make the plan of a graph of what the search finds, or say by how much the nearest one does not fit."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from znnpy.errors import NoPlanError
from znnpy.messages import option
from znnpy.planner.described_graph import described
from znnpy.planner.found_plan import choice_of
from znnpy.planner.graph_search import RUNNERS_UP, GraphSearch, GraphSolution
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.memory import run_memory
from znnpy.planner.plan import Plan, Stage
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunnerUp, RunPlan
from znnpy.planner.window_tilings import WindowTiling
from znnpy.units import human_bytes


def plan_graph(request: PlanRequest, costs: CostModel, options: OptionTable | None = None) -> RunPlan:
    """Return the fastest plan of a graph on one device; NoPlanError names the nearest miss in bytes if nothing fits."""
    if request.target.mode not in ("auto", request.target.device):
        raise NoPlanError(
            f"{request.network.name} is computed on one kind of device: leave out {option('mode', request.target.mode)}"
        )
    if request.area is None:
        raise NoPlanError(f"{request.network.name} is computed whole, and the size of the volume is not known")
    options = options or costs.options(request)
    search = GraphSearch(request, options, request.area)
    found = search.run()
    windows = request.network.windows
    if not found and windows is not None and windows.suit_half_precision:
        search = GraphSearch(request, options, request.area, sums="float16")
        found = search.run()
    try:
        return _run_plan(search, found)
    finally:
        for graph in search.graphs.values():
            graph.forget()  # they are kept, but not for the regions of the sizes that were tried


def _run_plan(search: GraphSearch, found: list[GraphSolution]) -> RunPlan:
    request = search.request
    if not found:
        raise NoPlanError(_nearest(search))
    best, *others = found
    runners_up = tuple(_runner_up(other) for other in others[:RUNNERS_UP])
    other = next((_runner_up(one) for one in others if one.tiling.streams != best.tiling.streams), None)
    run = RunPlan.of(request.network, request.target.machine, plan_of(search, best)).on_devices(request.target.devices)
    return replace(run, runners_up=runners_up, other=other)


def _nearest(search: GraphSearch) -> str:
    name, on_gpu = search.request.network.name, search.device == "gpu"
    if search.smallest is None:
        return f"{name}: no patch and no column is allowed; drop {option('cover')} or {option('patch')}"
    memory, limits = search.smallest.memory, search.request.limits
    needed, limit, word = run_memory(memory, search.request.target.devices, ()).peak, limits.ram_bytes, "ram"
    if on_gpu and memory.vram > (limits.vram_bytes or 0):
        needed, limit, word = memory.vram, limits.vram_bytes or 0, "vram"
    where = " of the GPU" if word == "vram" else ""
    return (
        f"{name} does not fit: its smallest plan needs {human_bytes(needed)}{where}, {needed - limit:,} bytes more "
        f"than the limit of {human_bytes(limit)}; raise {option(word)} to at least {-(-needed // 2**20)}M"
    )


def plan_of(search: GraphSearch, found: GraphSolution) -> Plan:
    """Return what was found as a plan."""
    request, tiling, rates = search.request, found.tiling, search.options.rates
    cover, axis = tiling.cover, tiling.graph.axis
    operations = tiling.graph.computing(run.shape for run in found.runs)
    choices = tuple(
        choice_of(operation.layers, run, rates) for operation, run in zip(operations, found.runs, strict=True)
    )
    return Plan(
        limits=request.limits,
        output=search.area.region.size,
        patch_out=tiling.patch_out,
        patch_in=tiling.patch_in,
        axis=axis,
        column_planes=cover.column * tiling.graph.voxels[0],
        stages=(Stage(search.device, choices, found.tensors),),
        memory=found.memory,
        itemsize_in=request.itemsize_in,
        itemsize_out=request.itemsize_out,
        columns=len(tiling.windows) if isinstance(tiling, WindowTiling) else len(cover),
        preparing_seconds=found.preparing,
        preparing_measured=found.preparing > 0 and rates.first_touch_measured,
        area=search.area,
        work_ratio=waste(tiling),
        graph=described(tiling),
        sums=tiling.sums if isinstance(tiling, WindowTiling) else None,
    )


def _runner_up(found: GraphSolution) -> RunnerUp:
    tiling = found.tiling
    return RunnerUp(
        patch_out=tiling.patch_out,
        axis=tiling.graph.axis,
        column_planes=tiling.cover.column * tiling.graph.voxels[0],
        sub_batches=(1,) * len(found.runs),
        voxels_per_second=prod(tiling.output) / found.seconds,
        waste=waste(tiling),
        over_bytes=0,
        over_vram_bytes=0,
    )


def waste(tiling: GraphTiling) -> float:
    """Return the values computed over those that the predicted region needs if it is computed at once."""
    if isinstance(tiling, WindowTiling):
        return tiling.work_ratio
    cover, graph = tiling.cover, tiling.graph
    begin, end = cover.periods
    needed = [1] * len(graph.network.maps)
    for along in range(3):
        regions = graph.regions(along, begin[along], end[along])
        needed = [many * region.size for many, region in zip(needed, regions, strict=True)]
    figures = tiling.figures
    done = tiling.totals[figures.computed] @ figures.work
    return float(done / (np.array(needed, np.float64)[figures.computed] @ figures.work))
