"""Run plans of graphs in poisoned memory, and compare what they give with the definition on the whole volume."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.seeded_graphs import Case
from znnpy.errors import NoPlanError
from znnpy.graph_columns import Area, GraphCover
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.kernels.whole import whole
from znnpy.machine import Limits, this_machine
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.planner.graph_plan import plan_of
from znnpy.planner.graph_search import GraphSearch
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, PlanRequest, Target
from znnpy.planner.validate import check_plan
from znnpy.run.graph_session import GraphSession
from znnpy.run.worker import outputs_in
from znnpy.shapes import Vec3
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

MACHINE = this_machine()
HERE = Target(MACHINE, mode="cpu")
CPU = tuple(primitive for primitive in TABLE if primitive.name.startswith("cpu."))
POISON = 0xFF  # four of these are a NaN
CLOSE = 1e-5  # of the largest value

Maps = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Ran:
    """The outputs of a plan, each (maps, z, y, x), and the voxels that each operation wrote."""

    outs: list[Maps]
    written: list[int]

    @property
    def out(self) -> Maps:
        """Outputs of one size, one after the other."""
        return np.concatenate(self.outs)


def references(case: Case) -> list[npt.NDArray[np.float64]]:
    """Return the outputs of the definition on the whole padded volume, each (maps, z, y, x)."""
    return [found.transpose(3, 0, 1, 2) for found in whole(case.network, case.weights, case.grown)]


def reference(case: Case) -> npt.NDArray[np.float64]:
    """Return all outputs of one size of the definition, one after the other, (maps, z, y, x)."""
    return np.concatenate(references(case))


def searched(
    network: Network,
    volume: Vec3,
    region: Box,
    table: Sequence[Primitive] = CPU,
    threads: int = 2,
    ram: int = 2**34,
    others: tuple[Box, ...] = (),
    target: Target = HERE,
) -> GraphSearch:
    """Return a search for plans of a region of the output, and others of further outputs."""
    area = Area(volume, region, others)
    vram = 2**34 if target.device == "gpu" else None
    request = PlanRequest(network, region.size, Limits(ram, threads, vram), target, area=area)
    return GraphSearch(request, CostModel(table=tuple(table)).options(request), area)


def planned(
    network: Network,
    volume: Vec3,
    region: Box,
    patch: Vec3,
    *,
    axis: int = 0,
    column: int = 0,
    table: Sequence[Primitive] = CPU,
    threads: int = 2,
    others: tuple[Box, ...] = (),
    target: Target = HERE,
) -> Plan:
    """Return the plan with steps of `patch` periods and columns of `column` periods, the axis of columns first."""
    search = searched(network, volume, region, table, threads, others=others, target=target)
    found = search.solve(GraphTiling(GraphCover(search.graph(axis), patch, column, region, others)))
    assert found is not None
    plan = plan_of(search, found)
    check_plan(plan, network, target.machine, tuple(table))
    return plan


def some_plan(
    case: Case,
    region: Box,
    rng: random.Random,
    others: tuple[Box, ...] = (),
    target: Target = HERE,
    table: Sequence[Primitive] = CPU,
) -> Plan:
    """Return a plan with any split into patches, or columns along any axis, of any primitives."""
    axis = rng.randrange(3)
    search = searched(case.network, case.size, region, others=others, target=target)
    begin, end = GraphCover(search.graph(axis), (1, 1, 1), 0, region, others).periods
    counts = [b - a for a, b in zip(begin, end, strict=True)]
    z, y, x = (rng.randint(1, count) for count in counts)
    column = z * rng.randint(1, -(-counts[0] // z)) if rng.random() < 0.7 else 0
    some = [primitive for primitive in table if rng.random() < 0.7]
    split: Any = {"axis": axis, "column": column, "threads": rng.choice((1, 2)), "others": others, "target": target}
    try:
        return planned(case.network, case.size, region, (z, y, x), table=some, **split)
    except NoPlanError:
        return planned(case.network, case.size, region, (z, y, x), table=table, **split)


def some_region(size: Vec3, rng: random.Random) -> Box:
    """Return a box within a size; often up to its faces."""
    ranges = []
    for n in size:
        lo = rng.randrange(n) if rng.random() < 0.4 else 0
        ranges.append((lo, rng.randint(lo + 1, n) if rng.random() < 0.4 else n))
    z, y, x = ranges
    return Box((z[0], y[0], x[0]), (z[1], y[1], x[1]))


def ran(plan: Plan, case: Case, device: Any = None) -> Ran:
    """Run a plan in poisoned memory; fail if a voxel is written twice, or more is read or written than was planned.

    device  of a plan for a GPU: emulated, so that its arrays are numpy's
    """
    volume, network = ArrayVolume(case.volume), case.network
    source = Source(volume, roi=None, border="valid", network=network, allow_nan=False)
    cover = plan.graph_cover(network)
    sizes = [region.size for region in cover.regions]
    outs = [np.full((maps, *size), np.nan, np.float32) for maps, size in zip(network.output_maps, sizes, strict=True)]
    times = [np.zeros(size, np.int64) for size in sizes]
    with (
        ThreadPool(plan.compute_threads) as pool,
        GraphSession(plan, network, case.weights, pool, device=device) as session,
    ):
        _poison(session, everything=True)
        for column in cover:
            for index, step in enumerate(column.steps):
                assert step.size is not None
                _fits(step.size, plan.patch_in)
                raw = np.empty((network.input_channels, *step.size), case.volume.dtype)
                source.read(step.read, raw)
                raw.flags.writeable = False
                given = np.full(cover.values, np.nan, np.float32)
                if device is not None:
                    device.synchronize()
                _poison(session, everything=index == 0)
                session.run(raw, given if step.writes else None, begins=index == 0, step=step.step)
                if not step.writes:
                    continue
                _fits(step.out.size, plan.patch_out)
                found = outputs_in(given, step, network.output_maps)
                for number, (piece, voxels) in enumerate(zip(step.pieces, found, strict=True)):
                    kept = piece.write.shifted(_negative(piece.out.lo))
                    outs[number][(slice(None), *piece.write.slices)] = voxels[(slice(None), *kept.slices)]
                    times[number][piece.write.slices] += 1
        for count in times:
            assert (count == 1).all(), f"{(count != 1).sum()} voxels are not written once"
        return Ran(outs, list(session.written))


def _poison(session: GraphSession, *, everything: bool) -> None:
    """Fill all memory of a session whose content no later step may read."""
    for tensor in session._tensors.values():
        if everything or tensor.storage != "resident":
            tensor.block.view(np.uint8)[...] = POISON
        if everything:
            tensor.beside.view(np.uint8)[...] = POISON
    for bound in session._bound:
        for scratch in bound.scratch.values():
            scratch.view(np.uint8)[...] = POISON


def _fits(size: Vec3, most: Vec3) -> None:
    assert all(a <= b for a, b in zip(size, most, strict=True)), (size, most)


def _negative(at: Vec3) -> Vec3:
    return -at[0], -at[1], -at[2]


def whole_region(case: Case) -> Box:
    """Return the box of all voxels of the first output."""
    return Box((0, 0, 0), case.geometry.size(case.network.outputs[0]))


def assert_equal(
    found: npt.NDArray[Any], exact: npt.NDArray[Any], what: object, largest: float = 0.0, close: float = CLOSE
) -> None:
    """Fail unless two arrays are equal to `close` of the largest value, and finite.

    largest  a value of the whole output, which may be larger than those of a part of it
    """
    assert found.shape == exact.shape, (found.shape, exact.shape, str(what))
    assert np.isfinite(found).all(), f"{np.isnan(found).sum()} of {found.size} values are missing: {what}"
    worst, most = np.abs(found - exact).max(), max(largest, np.abs(exact).max())
    assert worst <= close * max(most, 1e-3), f"differs by {worst} of {most}: {what}"


def needed_at_once(plan: Plan, network: Network) -> list[int]:
    """Return the voxels of each operation's output that the planned region needs, if it is computed at once."""
    cover = plan.graph_cover(network)
    begin, end = cover.periods
    along = [cover.graph.regions(axis, begin[axis], end[axis]) for axis in range(3)]
    operations = cover.graph.computing(choice.shape for choice in plan.choices)
    return [prod(regions[operation.tensor].size for regions in along) for operation in operations]
