"""The search for the fastest plan of a graph on one device: sizes of patches and columns, a primitive per operation.

Operations run in the order of the network's layers. For one size the choice of primitives is that of `pareto`; sizes
whose bound is above the best plan found, or whose tensors alone do not fit, are not worked out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, prod
from typing import Literal

import numpy as np

from znnpy.errors import NoPlanError
from znnpy.graph_columns import Area, GraphCover, TurnedGraph
from znnpy.messages import option
from znnpy.option_values import DeviceKind
from znnpy.planner.graph_options import fronts_of, runs_of
from znnpy.planner.graph_tilings import MOST_STEPS, GraphTiling, tilings
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.layer_search import MAX_COLUMN_SECONDS, MAX_LOG2_PRICE, PRICE_STEPS
from znnpy.planner.layout import Tensor, place
from znnpy.planner.least_seen import LeastSeen
from znnpy.planner.memory import Memory, StageMemory, reading_bytes, run_memory, staging_bytes, writing_bytes
from znnpy.planner.pareto import (
    LayerOption,
    LayerRun,
    ParetoFront,
    cheapest,
    fastest_within,
    priced_seconds,
    smallest,
    total_bytes,
    total_seconds,
)
from znnpy.planner.request import PlanRequest
from znnpy.planner.search import ALIKE
from znnpy.planner.tiling_search import SMALLER_SHARE
from znnpy.planner.window_tilings import WindowTiling, window_tilings
from znnpy.shapes import Vec3, text, turned, turned_back

SLOW = 4.0  # primitives that take so many times as long as the fastest for every operation are tried no more
ATTEMPTS = 4  # layouts of one size: each allows for what the one before lost between tensors
RUNNERS_UP = 3
EXACT_OPERATIONS = 12  # up to which the choice is exact; beyond, it may be a little slower but takes far less time
MOST_TRIED = 150  # sizes that are worked out, the least work first; small graphs have fewer
CUT = 1.1  # columns are cut, so that a killed run loses less, if this takes at most so many times as long
MOST_SMALL = 2000  # operations, of all sizes together, that are worked out for the least memory
MOST_KINDS = 20_000  # shapes of operations in one size beyond which it is not tried: laying it out takes too long
KINDS_EACH = 8  # the same for each operation of large graphs
FEWEST_SMALL = 4  # sizes that are worked out for it at least


@dataclass(frozen=True)
class GraphSolution:
    """The best primitives for one size."""

    tiling: GraphTiling
    options: tuple[LayerOption, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory
    preparing: float  # seconds before the first step, to write to memory for the first time
    idle: float = 1.0  # times as long, since devices wait for the last of them

    @property
    def seconds(self) -> float:
        """Predicted seconds for the whole output."""
        return self.idle * total_seconds(self.options) + self.preparing

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The primitives in the order in which they run."""
        return runs_of(self.options)


@dataclass(frozen=True)
class Draft:
    """A size with the predicted seconds of its fastest primitives; its tensors are not placed yet."""

    tiling: GraphTiling
    seconds: float
    nbytes: int  # of the process, about


@dataclass
class GraphSearch:
    """The search for one request."""

    request: PlanRequest
    options: OptionTable
    area: Area
    graphs: dict[int, TurnedGraph] = field(default_factory=dict)
    least: LeastSeen = field(default_factory=LeastSeen)
    every: OptionTable | None = None  # all primitives, from when only some of them are tried
    smallest: GraphSolution | None = None  # the plan that needs the least memory, if it was searched for
    sums: Literal["float32", "float16"] = "float32"  # of windows that are blended

    def run(self) -> list[GraphSolution]:
        """Return the best that fits and the next ones, the fastest first; empty if nothing fits.

        The best is the one that needs the least memory of those that take at most ALIKE times the least seconds.
        Tensors are placed only for sizes that may be among these.
        """
        drafts = sorted(self._drafts(), key=lambda one: one.seconds)
        found: list[GraphSolution] = []
        for draft in drafts:
            if len(found) > RUNNERS_UP:
                break
            if (solution := self.solve(draft.tiling)) is not None:
                found.append(solution)
        if found:
            return self._smallest_first(sorted(found, key=lambda one: one.seconds), drafts)
        self.smallest = self._smallest()
        fits = self.smallest is not None and self._excess(self.smallest.memory) <= 0
        return [self.smallest] if self.smallest is not None and fits else []

    @property
    def device(self) -> DeviceKind:
        """The device on which all operations run."""
        return self.request.target.device

    @property
    def limit(self) -> int:
        """Bytes that the memory of the device may hold: of the process, or of the GPU."""
        limits = self.request.limits
        return limits.ram_bytes if self.device == "cpu" else limits.vram_bytes or 0

    def _excess(self, memory: Memory) -> int:
        """Return the bytes above the limit of the device; on a GPU, those of the process where they are more."""
        over = memory.device_bytes - self.limit
        if self.device == "cpu":
            return over
        peak = run_memory(memory, self.request.target.devices, ()).peak
        return max(over, peak - self.request.limits.ram_bytes)

    def _idle(self, tiling: GraphTiling) -> float:
        """Return how many times as long equal devices take because their shares of the columns are not equal."""
        devices = self.request.target.devices
        columns = len(tiling.windows) if isinstance(tiling, WindowTiling) else len(tiling.cover)
        return devices * ceil(columns / devices) / columns

    def _drafts(self) -> list[Draft]:
        """Return the sizes that may be the best or nearly as fast, with the least work first."""
        drafts: list[Draft] = []
        seconds, nbytes, tried = inf, 0, 0  # of the fastest so far
        alike = ALIKE if self.price else 1.0
        for tiling in sorted(self._tilings(), key=self._effort):
            bound, least = self._bound(tiling), self._least_bytes(tiling)
            slower = bound > seconds and least > SMALLER_SHARE * nbytes
            if bound > alike * seconds or slower or least > self.limit:
                continue
            draft, tried = self._draft(tiling, alike * seconds), tried + 1
            if tried > MOST_TRIED and drafts:
                break
            if draft is not None:
                drafts.append(draft)
                seconds, nbytes = min((seconds, nbytes), (draft.seconds, draft.nbytes))
        return drafts

    @property
    def price(self) -> float:
        """Seconds of preparing each byte of memory before the first step."""
        return 1 / self.options.rates.first_touch

    def _smallest_first(self, found: list[GraphSolution], drafts: Sequence[Draft]) -> list[GraphSolution]:
        """Put a plan first that needs less memory than the fastest and is nearly as fast, if there is one.

        If memory costs no time, the fastest plan stays first.
        """
        best, most = found[0], ALIKE * found[0].seconds
        if not self.price:
            return found
        slim: list[tuple[int, GraphTiling, Sequence[LayerOption]]] = []
        near = [draft.tiling for draft in drafts if draft.seconds <= most]
        least = best.memory.device_bytes
        for tiling in sorted(near, key=self._least_bytes):
            if self._least_bytes(tiling) >= least:
                break
            if (chosen := self._slimmest(tiling, most)) is not None:
                needed = total_bytes(chosen) + tiling.carries + self._around(tiling).device_bytes
                slim.append((needed, tiling, chosen))
                least = min(least, needed)
        for _, tiling, leanest in sorted(slim, key=lambda one: one[0]):
            one = self._in_shorter_columns(self._laid_out(tiling, leanest, self._around(tiling)))
            if one.seconds <= most and one.memory.device_bytes < best.memory.device_bytes:
                return [one, *(other for other in found if other.tiling != tiling)]
        return found

    def _slimmest(self, tiling: GraphTiling, most: float) -> tuple[LayerOption, ...] | None:
        """Return primitives of a size that need little memory within `most` seconds; None if there are none.

        A higher price of memory gives smaller and slower choices. The highest price within `most` is searched for.
        """
        fronts, best = self._fronts(tiling), None
        low, high = 0.0, MAX_LOG2_PRICE
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2
            chosen = cheapest(fronts, self.price * 2**middle)
            if priced_seconds(chosen, self.price) + self.price * tiling.carries <= most:
                low, best = middle, chosen
            else:
                high = middle
        return best

    def _smallest(self) -> GraphSolution | None:
        """Return the plan that needs the least memory, however long it takes; it does not depend on the limit.

        Of large graphs, and where there are very many sizes, only those whose tensors need the least are worked out.
        """
        best: GraphSolution | None = None
        every = sorted(self._tilings(), key=lambda tiling: (self._least_bytes(tiling), self._effort(tiling)))
        for tiling in every[: max(FEWEST_SMALL, MOST_SMALL // len(self.graph(0).operations))]:
            if best is not None and self._least_bytes(tiling) >= best.memory.device_bytes:
                break
            fronts = self._fronts(tiling, self.every)
            found = self._laid_out(tiling, smallest(fronts), self._around(tiling))
            if best is None or found.memory.device_bytes < best.memory.device_bytes:
                best = found
        return best

    def _tilings(self) -> Iterator[GraphTiling]:
        wanted, network = self.request.constraints, self.request.network
        if network.windows is not None:
            if wanted.patch is not None or wanted.cover is not None:
                given = option("patch") if wanted.patch is not None else option("cover")
                raise NoPlanError(f"{network.name} is computed in windows of one size; leave out {given}")
            precision = self.request.target.device_precision
            yield from window_tilings(network, self.area, precision, self.sums, self.graph, self.device)
            return
        area = self.area.volume, *(size for region in self.area.regions for size in (region.size, region.lo))
        seen, whole = set(), (self.area.region, self.area.others)
        for axis in range(3):
            graph = self.graph(axis)
            alike = graph.lowered.original.layers, *(turned(size, axis) for size in area)
            if alike in seen:  # the same sizes again, with voxels in another order
                continue
            seen.add(alike)
            patch = None if wanted.patch is None else self._periods(graph, wanted.patch)
            if patch is not None and (most := max(GraphCover(graph, patch, 0, *whole).counts)) > MOST_STEPS:
                raise NoPlanError(
                    f"patches of {text(wanted.patch or patch)} are {most:,} along an axis, more than the "
                    f"{MOST_STEPS:,} that can be planned; give a larger {option('patch')}"
                )
            for streams in (True, False):
                if (axis and not streams) or wanted.cover not in (None, "columns" if streams else "patches"):
                    continue
                for tiling in tilings(graph, self.area, streams=streams, patch=patch):
                    if patch is not None or tiling.kinds <= max(MOST_KINDS, KINDS_EACH * len(graph.operations)):
                        yield tiling

    def graph(self, axis: int) -> TurnedGraph:
        """Return the graph with an axis first."""
        if axis not in self.graphs:
            network = self.request.network
            volume = self.area.volume if network.windows is None else network.windows.size
            self.graphs[axis] = TurnedGraph.of(network, volume, axis, self.request.target.device_precision)
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
        return float(tiling.totals[tiling.figures.computed] @ tiling.figures.work), -prod(tiling.cover.patch)

    def _bound(self, tiling: GraphTiling) -> float:
        """Return a lower bound on the seconds, if those of `LeastSeen` hold."""
        return self.least.seconds(tiling) + (tiling.most_live + tiling.carries) / self.options.rates.first_touch

    def _least_bytes(self, tiling: GraphTiling) -> int:
        """Return the bytes that the memory of the device needs for the tensors alone."""
        return tiling.most_live + tiling.carries + self._around(tiling).device_bytes

    def _around(self, tiling: GraphTiling) -> Memory:
        """Return the memory of the process, and of the GPU, without that of the layers."""
        request, device, steps = self.request, self.device, tiling.steps
        maps, item_in, item_out = request.network.input_channels, request.itemsize_in, request.itemsize_out
        reading = reading_bytes(maps, tiling.patch_in, item_in, steps=steps, device=device)
        writing = writing_bytes(tiling.values, (1, 1, 1), item_out, steps=steps, device=device)
        if device == "cpu":
            return Memory((StageMemory(device, allowance=tiling.kept_bytes),), request.baseline, reading, writing)
        staging = staging_bytes(maps * prod(tiling.patch_in) * item_in, tiling.values * item_out)
        baseline = request.baseline + tiling.kept_bytes
        return Memory((StageMemory(device),), baseline, reading, writing, staging, request.target.cuda_bytes)

    def _draft(self, tiling: GraphTiling, below: float) -> Draft | None:
        """Return the seconds of the fastest primitives of one size, if their bytes fit before tensors are placed."""
        fronts, around = self._fronts(tiling), self._around(tiling)
        budget = self.limit - around.device_bytes - tiling.carries
        chosen = self._chosen(fronts, budget, below - self.price * tiling.carries)
        if chosen is None:
            return None
        seconds = self._idle(tiling) * priced_seconds(chosen, self.price) + self.price * tiling.carries
        return Draft(tiling, seconds, around.device_bytes + tiling.carries + total_bytes(chosen))

    def _chosen(self, fronts: Sequence[ParetoFront], budget: int, below: float = inf) -> tuple[LayerOption, ...] | None:
        """Return the fastest options within so many bytes, preparing them included; None: none take less time."""
        if budget <= 0:
            return None
        return fastest_within(fronts, budget, below, self.price, EXACT_OPERATIONS)

    def solve(self, tiling: GraphTiling) -> GraphSolution | None:
        """Return the fastest primitives of one size within the memory; None if none fit."""
        fronts = self._fronts(tiling)
        around = self._around(tiling)
        budget = self.limit - around.device_bytes - tiling.carries
        for _ in range(ATTEMPTS):
            chosen = self._chosen(fronts, budget)
            solution = self._laid_out(tiling, chosen or smallest(fronts), around)
            excess = self._excess(solution.memory)
            if excess <= 0:
                return self._in_shorter_columns(solution)
            if chosen is None:
                return None
            budget -= excess
        return None

    def _fronts(self, tiling: GraphTiling, options: OptionTable | None = None) -> list[ParetoFront]:
        found = fronts_of(tiling, options or self.options)
        self.least.note(tiling, found.spent / np.maximum(1, tiling.totals[tiling.figures.computed]))
        if self.every is None:
            self._narrow(found.parts)
        return found.groups

    def _narrow(self, fronts: Sequence[ParetoFront]) -> None:
        """Try only primitives from here on that are fast for some operation, or need the least memory."""
        self.every, names = self.options, set[str]()
        for front in fronts:
            lean = min(front, key=lambda option: option.arena_bytes + option.resident)
            fast = [option for option in front if option.seconds <= SLOW * front[0].seconds]
            names |= {run.primitive.name for option in (*fast, lean) for run in option.layer_runs}
        table = tuple(primitive for primitive in self.options.table if primitive.name in names)
        self.options = OptionTable(
            table, self.options.machine, self.options.threads, self.options.rates, self.options.only
        )

    def _laid_out(self, tiling: GraphTiling, chosen: Sequence[LayerOption], around: Memory) -> GraphSolution:
        """Place the tensors of a size with these primitives, and count memory and seconds."""
        runs = runs_of(chosen)
        operations = tiling.graph.computing(run.shape for run in runs)
        footprints = [
            tiling.footprint(operation, run.primitive, run.variant, self.request.limits.threads)
            for operation, run in zip(operations, runs, strict=True)
        ]
        tensors, arena = place(tiling.tensors(operations, footprints))
        stage = tiling.memory(operations, footprints, arena, self.device)
        rates = self.options.rates
        memory = replace(around, stages=(stage,))
        return GraphSolution(
            tiling, tuple(chosen), tensors, memory, stage.prepared / rates.first_touch, self._idle(tiling)
        )

    def _in_shorter_columns(self, solution: GraphSolution) -> GraphSolution:
        """Return a plan whose columns take no longer than a killed run may lose, if that costs little and fits."""
        cover, tiling = solution.tiling.cover, solution.tiling
        if not tiling.streams or solution.seconds <= MAX_COLUMN_SECONDS * len(cover):
            return solution
        pieces = -(-int(solution.seconds) // int(MAX_COLUMN_SECONDS * cover.counts[1] * cover.counts[2])) + 1
        thick, (begin, end) = cover.patch[0], (cover.periods[0][0], cover.periods[1][0])
        column = ceil((end - begin) / pieces / thick) * thick
        if column >= cover.column:
            return solution
        cut = GraphTiling(replace(cover, column=column))
        if self._effort(cut)[0] > CUT * self._effort(tiling)[0]:
            return solution
        shorter = self.solve(cut)
        return solution if shorter is None or shorter.seconds > CUT * solution.seconds else shorter
