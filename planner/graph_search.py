"""The search for the fastest plan of a graph on a CPU: sizes of patches and columns, and a primitive per operation.

Operations run in the order of the network's layers. For one size the choice of primitives is that of `pareto`; sizes
whose bound is above the best plan found, or whose tensors alone do not fit, are not worked out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, prod

from znnpy.errors import NoPlanError
from znnpy.graph_columns import Area, TurnedGraph
from znnpy.graph_operations import Operation
from znnpy.messages import option
from znnpy.planner.described_graph import described
from znnpy.planner.found_plan import choice_of
from znnpy.planner.graph_tilings import GraphTiling, tilings
from znnpy.planner.layer_options import LayerContext, OptionTable
from znnpy.planner.layer_search import MAX_COLUMN_SECONDS
from znnpy.planner.layout import Tensor, place
from znnpy.planner.memory import Memory, StageMemory, reading_bytes, writing_bytes
from znnpy.planner.pareto import LayerOption, ParetoFront, fastest_within, smallest, total_bytes, total_seconds
from znnpy.planner.plan import Plan, Stage
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunnerUp, RunPlan
from znnpy.shapes import Vec3, text, turned, turned_back
from znnpy.units import human_bytes

FASTER = 0.9  # assumed: no operation takes less time per voxel than this share of the least seen so far
AS_FAST = 0.97  # the same for steps with as many planes as one that was seen
SLOW = 4.0  # primitives that take so many times as long as the fastest for every operation are tried no more
ATTEMPTS = 4  # layouts of one size: each allows for what the one before lost between tensors
RUNNERS_UP = 3
EXACT_OPERATIONS = 12  # up to which the choice is exact; beyond, it may be a little slower but takes far less time
MOST_TRIED = 150  # sizes that are worked out, the least work first; small graphs have fewer


@dataclass(frozen=True)
class GraphSolution:
    """The best primitives for one size."""

    tiling: GraphTiling
    options: tuple[LayerOption, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory
    preparing: float  # seconds before the first step, to write to memory for the first time

    @property
    def seconds(self) -> float:
        """Predicted seconds for the whole output."""
        return total_seconds(self.options) + self.preparing


@dataclass(frozen=True)
class Draft:
    """A size with the predicted seconds of its fastest primitives; its tensors are not placed yet."""

    tiling: GraphTiling
    seconds: float


@dataclass
class GraphSearch:
    """The search for one request."""

    request: PlanRequest
    options: OptionTable
    area: Area
    graphs: dict[int, TurnedGraph] = field(default_factory=dict)
    least: dict[int, float] = field(default_factory=dict)  # seconds per voxel of each layer, over all sizes seen
    least_at: dict[tuple[int, int, int], float] = field(default_factory=dict)  # of axis, layer, and planes of a step
    narrowed: bool = False  # only some primitives are tried
    nearest: Memory | None = None  # that of the size that came nearest to the limit

    def run(self) -> list[GraphSolution]:
        """Return the fastest that fits and the next ones, the fastest first; empty if nothing fits.

        Tensors are placed only for sizes that may be among these.
        """
        drafts: list[Draft] = []
        best, tried = inf, 0
        for tiling in sorted(self._tilings(), key=self._effort):
            if self._bound(tiling) > best or not self._may_fit(tiling):
                continue
            draft, tried = self._draft(tiling), tried + 1
            if tried > MOST_TRIED and drafts:
                break
            if draft is not None:
                drafts.append(draft)
                best = min(best, draft.seconds)
        found: list[GraphSolution] = []
        for draft in sorted(drafts, key=lambda one: one.seconds):
            if len(found) > RUNNERS_UP:
                break
            if (solution := self.solve(draft.tiling)) is not None:
                found.append(solution)
        return sorted(found, key=lambda one: one.seconds)

    def _tilings(self) -> Iterator[GraphTiling]:
        wanted = self.request.constraints
        area = self.area.volume, *(size for region in self.area.regions for size in (region.size, region.lo))
        seen = set()
        for axis in range(3):
            graph = self.graph(axis)
            alike = graph.lowered.original.layers, *(turned(size, axis) for size in area)
            if alike in seen:  # the same sizes again, with voxels in another order
                continue
            seen.add(alike)
            patch = None if wanted.patch is None else self._periods(graph, wanted.patch)
            for streams in (True, False):
                if (axis and not streams) or wanted.cover not in (None, "columns" if streams else "patches"):
                    continue
                yield from tilings(graph, self.area, streams=streams, patch=patch)

    def graph(self, axis: int) -> TurnedGraph:
        """Return the graph with an axis first."""
        if axis not in self.graphs:
            self.graphs[axis] = TurnedGraph.of(self.request.network, self.area.volume, axis)
        return self.graphs[axis]

    @staticmethod
    def _periods(graph: TurnedGraph, patch: Vec3) -> Vec3:
        """Return a patch in periods; NoPlanError unless it holds whole ones."""
        mine, voxels = turned(patch, graph.axis), graph.voxels
        if any(size < 1 or size % each for size, each in zip(mine, voxels, strict=True)):
            raise NoPlanError(
                f"an output patch must be a multiple of the network's period, "
                f"{text(turned_back(voxels, graph.axis))} voxels of the output, and {text(patch)} is not; "
                f"change {option('patch')}"
            )
        z, y, x = (size // each for size, each in zip(mine, voxels, strict=True))
        return z, y, x

    def _effort(self, tiling: GraphTiling) -> tuple[float, int]:
        """Return how much a size computes in all, in values, and how small its steps are."""
        maps = tiling.graph.network.maps
        totals = tiling.totals
        work = sum(
            totals[operation.tensor] * maps[operation.tensor] * sum(read.maps for read in operation.reads)
            for operation in tiling.graph.operations
        )
        return work, -prod(tiling.cover.patch)

    def _bound(self, tiling: GraphTiling) -> float:
        """Return a lower bound on the seconds, if FASTER holds."""
        seconds = (max(tiling.live) + tiling.carries) / self.options.rates.first_touch
        for operation in tiling.graph.operations:
            layer = operation.layer
            at = self.least_at.get((tiling.graph.axis, layer, tiling.new[operation.tensor].size))
            rate = FASTER * self.least.get(layer, 0.0) if at is None else AS_FAST * at
            seconds += tiling.totals[operation.tensor] * rate
        return seconds

    def _may_fit(self, tiling: GraphTiling) -> bool:
        """Return whether the tensors alone fit."""
        least_bytes = max(tiling.live) + tiling.carries + self._around(tiling).peak
        if least_bytes > self.request.limits.ram_bytes:
            stage = StageMemory("cpu", max(tiling.live), tiling.carries)
            self._note(replace(self._around(tiling), stages=(stage,)))
            return False
        return True

    def _around(self, tiling: GraphTiling) -> Memory:
        """Return the memory of the process without that of the layers."""
        request, network = self.request, self.request.network
        steps = len(tiling.steps)
        reading = reading_bytes(network.input_channels, tiling.patch_in, request.itemsize_in, steps=steps)
        writing = writing_bytes(tiling.cover.values, (1, 1, 1), request.itemsize_out, steps=steps)
        return Memory((StageMemory("cpu"),), request.baseline, reading, writing)

    def _draft(self, tiling: GraphTiling) -> Draft | None:
        """Return the seconds of the fastest primitives of one size, if their bytes fit before tensors are placed."""
        fronts, around = self._fronts(tiling), self._around(tiling)
        budget = self.request.limits.ram_bytes - around.peak - tiling.carries
        chosen = self._chosen(fronts, budget)
        if chosen is None:
            needed = total_bytes(smallest(fronts)) + tiling.carries
            self._note(replace(around, stages=(StageMemory("cpu", needed),)))
            return None
        prepared = tiling.carries + max(tiling.live) + sum(option.resident for option in chosen)
        return Draft(tiling, total_seconds(chosen) + prepared / self.options.rates.first_touch)

    @staticmethod
    def _chosen(fronts: Sequence[ParetoFront], budget: int) -> tuple[LayerOption, ...] | None:
        """Return the fastest options within so many bytes; None if none fit."""
        return fastest_within(fronts, budget, exact_groups=EXACT_OPERATIONS) if budget > 0 else None

    def _note(self, memory: Memory) -> None:
        """Remember what came nearest to the limit."""
        if self.nearest is None or memory.peak < self.nearest.peak:
            self.nearest = memory

    def solve(self, tiling: GraphTiling) -> GraphSolution | None:
        """Return the fastest primitives of one size within the memory; None if none fit."""
        fronts = self._fronts(tiling)
        around, limit = self._around(tiling), self.request.limits.ram_bytes
        budget = limit - around.peak - tiling.carries
        for _ in range(ATTEMPTS):
            chosen = self._chosen(fronts, budget)
            fits = chosen is not None
            chosen = chosen or smallest(fronts)
            solution = self._laid_out(tiling, chosen, around)
            excess = solution.memory.peak - limit
            if excess <= 0:
                return self._in_shorter_columns(solution)
            self._note(solution.memory)
            if not fits:
                return None
            budget -= excess
        return None

    def _fronts(self, tiling: GraphTiling) -> list[ParetoFront]:
        fronts = []
        for operation, live in zip(tiling.graph.operations, tiling.live, strict=True):
            context = LayerContext(live_elsewhere=live, steps=(tiling.executions(operation),))
            front = self.options.front((tiling.shape(operation),), context)
            if not front:
                raise NoPlanError(self._why_none(tiling, operation))
            moving = tiling.carry_traffic(operation.tensor) / self.options.rates.copy_bandwidth
            if moving:
                front = tuple(_slower(one, moving) for one in front)
            fronts.append(front)
            spent = front[0].seconds / max(1, tiling.totals[operation.tensor])
            layer, key = operation.layer, (tiling.graph.axis, operation.layer, tiling.new[operation.tensor].size)
            self.least[layer] = min(self.least.get(layer, inf), spent)
            self.least_at[key] = min(self.least_at.get(key, inf), spent)
        if not self.narrowed:
            self._narrow(fronts)
        return fronts

    def _narrow(self, fronts: Sequence[ParetoFront]) -> None:
        """Try only primitives from here on that are fast for some operation, or need the least memory."""
        self.narrowed, names = True, set[str]()
        for front in fronts:
            lean = min(front, key=lambda option: option.arena_bytes + option.resident)
            fast = [option for option in front if option.seconds <= SLOW * front[0].seconds]
            names |= {option.layer_runs[0].primitive.name for option in (*fast, lean)}
        table = tuple(primitive for primitive in self.options.table if primitive.name in names)
        self.options = OptionTable(
            table, self.options.machine, self.options.threads, self.options.rates, self.options.only
        )

    def _why_none(self, tiling: GraphTiling, operation: Operation) -> str:
        name, layer = tiling.graph.network.names[operation.layer], tiling.graph.network.layers[operation.layer]
        return f"no primitive runs node {name} ({layer}) here: {self.options.why_none(tiling.shape(operation))}"

    def _laid_out(self, tiling: GraphTiling, chosen: Sequence[LayerOption], around: Memory) -> GraphSolution:
        """Place the tensors of a size with these primitives, and count memory and seconds."""
        runs = [option.layer_runs[0] for option in chosen]
        footprints = [
            tiling.footprint(operation, run.primitive, run.variant, self.request.limits.threads)
            for operation, run in zip(tiling.graph.operations, runs, strict=True)
        ]
        tensors, arena = place(tiling.tensors(footprints))
        stage = StageMemory(
            "cpu",
            arena=arena,
            carries=tiling.carries,
            weights=sum(footprint.resident for footprint in footprints),
            allowance=max(footprint.allowance for footprint in footprints),
        )
        rates = self.options.rates
        memory = replace(around, stages=(stage,))
        return GraphSolution(tiling, tuple(chosen), tensors, memory, stage.prepared / rates.first_touch)

    def _in_shorter_columns(self, solution: GraphSolution) -> GraphSolution | None:
        """Return a plan whose columns take no longer than a killed run may lose."""
        cover, tiling = solution.tiling.cover, solution.tiling
        if not tiling.streams or solution.seconds <= MAX_COLUMN_SECONDS * len(cover):
            return solution
        pieces = -(-int(solution.seconds) // int(MAX_COLUMN_SECONDS * cover.counts[1] * cover.counts[2])) + 1
        thick, (begin, end) = cover.patch[0], (cover.periods[0][0], cover.periods[1][0])
        column = ceil((end - begin) / pieces / thick) * thick
        if column >= cover.column:
            return solution
        return self.solve(GraphTiling(replace(cover, column=column)))


def _slower(option: LayerOption, seconds: float) -> LayerOption:
    """Return an option that takes so much longer each time it runs: its output is kept from step to step."""
    (run,) = option.layer_runs
    slower = replace(run, seconds=run.seconds + seconds)
    return replace(option, layer_runs=(slower,), seconds=option.seconds + run.executions * seconds)


def plan_graph(request: PlanRequest, costs: CostModel, options: OptionTable | None = None) -> RunPlan:
    """Return the fastest plan of a graph on the CPU; NoPlanError names the nearest miss in bytes if nothing fits."""
    if request.target.device != "cpu":
        raise NoPlanError(
            f"{request.network.name} is a graph, and graphs run on the CPU: choose {option('device', 'cpu')}"
        )
    if request.area is None:
        raise NoPlanError(f"{request.network.name} is computed whole, and the size of the volume is not known")
    search = GraphSearch(request, options or costs.options(request), request.area)
    found = search.run()
    if not found:
        raise NoPlanError(_nearest(search))
    best, *others = found
    runners_up = tuple(_runner_up(other) for other in others[:RUNNERS_UP])
    other = next((_runner_up(one) for one in others if one.tiling.streams != best.tiling.streams), None)
    run = RunPlan.of(request.network, request.target.machine, plan_of(search, best))
    return replace(run, runners_up=runners_up, other=other)


def _nearest(search: GraphSearch) -> str:
    memory, limit = search.nearest, search.request.limits.ram_bytes
    name = search.request.network.name
    if memory is None:
        return f"{name}: no patch and no column is allowed; drop {option('cover')} or {option('patch')}"
    return (
        f"{name} does not fit: its smallest plan needs {human_bytes(memory.peak)}, {memory.peak - limit:,} bytes more "
        f"than the limit of {human_bytes(limit)}; raise {option('ram')} to at least {-(-memory.peak // 2**20)}M"
    )


def plan_of(search: GraphSearch, found: GraphSolution) -> Plan:
    """Return what was found as a plan."""
    request, tiling, rates = search.request, found.tiling, search.options.rates
    cover, axis = tiling.cover, tiling.graph.axis
    choices = tuple(
        choice_of((operation.layer, operation.layer), option.layer_runs[0], rates)
        for operation, option in zip(tiling.graph.operations, found.options, strict=True)
    )
    return Plan(
        limits=request.limits,
        output=search.area.region.size,
        patch_out=tiling.patch_out,
        patch_in=tiling.patch_in,
        axis=axis,
        column_planes=cover.column * tiling.graph.voxels[0],
        stages=(Stage("cpu", choices, found.tensors),),
        memory=found.memory,
        itemsize_in=request.itemsize_in,
        itemsize_out=request.itemsize_out,
        columns=len(cover),
        preparing_seconds=found.preparing,
        preparing_measured=found.preparing > 0 and rates.first_touch_measured,
        area=search.area,
        work_ratio=waste(tiling),
        graph=described(tiling),
    )


def _runner_up(found: GraphSolution) -> RunnerUp:
    tiling = found.tiling
    return RunnerUp(
        patch_out=tiling.patch_out,
        axis=tiling.graph.axis,
        column_planes=tiling.cover.column * tiling.graph.voxels[0],
        sub_batches=(1,) * len(found.options),
        voxels_per_second=prod(tiling.cover.region.size) / found.seconds,
        waste=waste(tiling),
        over_bytes=0,
        over_vram_bytes=0,
    )


def waste(tiling: GraphTiling) -> float:
    """Return the values computed over those that the predicted region needs if it is computed at once."""
    cover, graph = tiling.cover, tiling.graph
    begin, end = cover.periods
    needed = [1] * len(graph.network.maps)
    for along in range(3):
        regions = graph.regions(along, begin[along], end[along])
        needed = [many * region.size for many, region in zip(needed, regions, strict=True)]
    maps = graph.network.maps

    def weight(operation: Operation) -> int:
        return maps[operation.tensor] * sum(read.maps for read in operation.reads)

    done = sum(tiling.totals[operation.tensor] * weight(operation) for operation in graph.operations)
    return done / sum(needed[operation.tensor] * weight(operation) for operation in graph.operations)
