"""Search for the fastest primitives for one tiling that fit in memory.

For a fixed tiling the best primitives are found exactly (`pareto`). Layers are worked out one after the other, the
large ones first, until the tiling is known to lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from znnpy.costs.model import unhidden_io_seconds
from znnpy.machine import Limits
from znnpy.option_values import DeviceKind
from znnpy.planner.bounds import (
    NONE_KNOWN,
    Bounds,
    Needs,
    UnitCosts,
    UnitCostsByGroup,
    least_priced,
    least_seconds,
    unit_costs,
)
from znnpy.planner.layer_options import LayerContext, OptionTable
from znnpy.planner.layout import Tensor, place
from znnpy.planner.memory import Memory, StageMemory, StepSizes
from znnpy.planner.pareto import (
    LayerOption,
    LayerRun,
    ParetoFront,
    cheapest,
    fastest,
    fastest_within,
    smallest,
    total_bytes,
    total_seconds,
)
from znnpy.planner.request import PlanRequest
from znnpy.planner.stages import StageNeeds, Steps, last_stage
from znnpy.planner.tilings import FusionGroup, Tiling, TilingSpace, tiling_of

MAX_PIECES = 10**6
MAX_LOG2_PRICE = 32.0  # log2 of the highest price of memory that is tried, relative to what memory costs
PRICE_STEPS = 6  # number of prices of memory that are tried
BOUND_CHECKS = 32  # most bounds on a tiling computed while its layers are worked out
MAX_LAYOUTS = 16  # arenas laid out for a tiling before all are assumed to lose as much to fragmentation
MAX_COLUMN_SECONDS = 480.0  # predicted: a killed run computes a column again, within ten minutes


@dataclass(frozen=True, slots=True)
class Solution:
    """The best primitives for one tiling."""

    tiling: Tiling
    options: tuple[LayerOption, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory
    io_seconds: float  # of reading and writing, in which nothing is computed
    preparing: float  # seconds before the first step, to write to memory for the first time

    @property
    def seconds(self) -> float:
        """Predicted seconds for the whole output."""
        return total_seconds(self.options) + self.io_seconds + self.preparing

    @property
    def layer_runs(self) -> Iterator[tuple[FusionGroup, LayerRun]]:
        """Yield how the layers of a step run, fused ones together, each with its first and last layer."""
        for (first, last), option in zip(self.tiling.space.groups, self.options, strict=True):
            if len(option.layer_runs) == 1:
                yield (first, last), option.layer_runs[0]
            else:
                yield from (((layer, layer), way) for layer, way in enumerate(option.layer_runs, first))

    @property
    def column_seconds(self) -> float:
        """Seconds of one whole column, or of one patch."""
        shape = self.tiling
        one = replace(shape.cover, size=shape.cover.grid)
        ahead = shape.space.warmup_planes
        return sum(way.seconds * way.sub_batches * one.steps(ahead[last]) for (_, last), way in self.layer_runs)


@dataclass
class LayerSearch:
    """The search for primitives in one tiling space, with the bounds on time known so far."""

    request: PlanRequest  # for the device that runs the layers
    space: TilingSpace
    options: OptionTable
    splits: Sequence[tuple[int, ...]]
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        if self.space.streams:
            part = replace(self.space, network=self.space.stage_network, stage=None)
            shapes = tiling_of(part, part.network.period).shapes
            apart = (i for i, (first, _) in enumerate(self.space.groups) if self.options.reads_carried(shapes[first]))
            self.space = replace(self.space, in_place_carries=frozenset(apart))
        self.bounds = Bounds(self.space)

    @property
    def limits(self) -> Limits:
        return self.request.limits

    @property
    def device(self) -> DeviceKind:
        return self.request.target.device

    def may_fit(self, shape: Tiling) -> bool:
        """Return whether a tiling may fit, judged by its size alone. Up to the first pooling no split saves memory."""
        budget = self.budget(shape)
        return shape.largest_undivided <= budget and any(
            shape.split(at_once).largest <= budget for at_once in self.splits
        )

    def lower_bound(self, shape: Tiling, costs: Mapping[int, float] = NONE_KNOWN) -> float:
        """Return a lower bound on the seconds for the whole output, in any memory and for any split of the images.

        costs  seconds per voxel of groups, where they are known
        """
        idle, thick, pieces = self.idle_seconds(shape), shape.patch[0], 1
        least = self.bounds.lower_bound(thick, shape.voxels, costs)
        while (
            shape.column_planes > thick
            and self.bounds.lower_bound(thick, shape.column_voxels, costs) > MAX_COLUMN_SECONDS
        ):
            pieces = _more_pieces(pieces, least / len(shape.cover))
            shape = shape.shortened(pieces)
            least = self.bounds.lower_bound(thick, shape.voxels, costs)
        return least + idle

    def bound_within_budget(self, shape: Tiling) -> float:
        """Return a lower bound on the seconds for the whole output within the memory; inf: nothing fits."""
        budget, least = self.budget(shape), inf
        ideal = self.idle_seconds(shape) + self.bounds.lower_bound(shape.patch[0], shape.voxels)
        for at_once in self.splits:
            split = shape.split(at_once)
            least = min(least, self._least(split, self.bounds.needs(split), budget, least))
            if least <= ideal:
                break  # no split is faster
        return max(least, ideal)

    def _least(self, shape: Tiling, needs: list[Needs], budget: int, enough: float = inf) -> float:
        """Return a lower bound on the seconds for the whole output within `budget` bytes, given the groups' needs.

        enough  stop at a bound that is no less
        """
        prepared = self.price * shape.largest
        idle = self.io_seconds(shape) + prepared
        least = idle + least_seconds(needs, budget, enough - idle)
        if prepared and least < enough:
            return max(least, self.io_seconds(shape) + least_priced(needs, self.price))
        return least

    def best_split(self, shape: Tiling, below: float) -> Solution | None:
        """Find the fastest split of one tiling; None unless it takes less than `below` seconds for the output.

        Smaller parts only cost time, except for the memory they save: a time that the undivided tiling does not reach
        in unlimited memory, checked with large layers first, no split reaches.
        """
        best, budget = None, self.budget(shape)
        whole: dict[int, UnitCosts] = {}
        least: dict[int, float] = {}
        for number, index in enumerate(_largest_first(shape), 1):
            whole[index] = unit_costs(shape, index, self._learnt(shape, index))
            least[index] = min((cost for cost, _, _ in whole[index]), default=inf)
            if self._checks_bound(number) and self.lower_bound(shape, least) >= below:
                return None
        for at_once in self.splits:
            split = shape.split(at_once)
            if self._least(split, self.bounds.needs(split, whole), budget, below) >= below:
                continue
            found = self._short_enough(split, below, whole)
            if found is not None:
                best, below = found, found.seconds
                ideal = total_seconds(fastest(self.fronts(found.tiling)))
                if not self.price and total_seconds(found.options) <= ideal:
                    break  # memory cost no time, so smaller parts cannot be faster
        return best

    def _short_enough(self, shape: Tiling, below: float, whole: UnitCostsByGroup) -> Solution | None:
        """Solve for one tiling, with columns of several steps shortened to at most MAX_COLUMN_SECONDS."""
        found, pieces = self.solve(shape, below, whole), 1
        while found is not None and found.column_seconds > MAX_COLUMN_SECONDS and shape.column_planes > shape.patch[0]:
            pieces = _more_pieces(pieces, found.seconds / len(found.tiling.cover))
            shape = shape.shortened(pieces)
            found = self.solve(shape, below)
        return found

    def solve(self, shape: Tiling, below: float, whole: UnitCostsByGroup = NONE_KNOWN) -> Solution | None:
        """Find the fastest primitives for one tiling that fit; None unless below `below` seconds for the output.

        `whole` holds the costs of the same tiling undivided. Large layers come first, as one of them rules out most
        losing tilings.
        """
        budget = self.budget(shape)
        known: dict[int, ParetoFront] = {}
        needs = self.bounds.needs(shape, whole)
        for number, index in enumerate(_largest_first(shape), 1):
            options = known[index] = self._learnt(shape, index)
            needs[index] = [(o.seconds, o.resident, o.arena_bytes) for o in options]
            if not options or (self._checks_bound(number) and self._least(shape, needs, budget, below) >= below):
                return None
        return self._fastest_fitting(shape, [known[index] for index in range(len(known))], below)

    def _checks_bound(self, number: int) -> bool:
        """Return whether to check the bound after so many layers: BOUND_CHECKS times at most, and after the last."""
        count = len(self.space.groups)
        return number % -(-count // BOUND_CHECKS) == 0 or number == count

    def _learnt(self, shape: Tiling, group: int) -> ParetoFront:
        """Return the options of one group, after the bounds have learnt from them."""
        options = self.front(shape, group)
        self.bounds.learn(shape, group, options)
        return options

    def _fastest_fitting(self, shape: Tiling, fronts: list[ParetoFront], below: float) -> Solution | None:
        """Find the fastest of these options that fit; None unless below `below` seconds for the output.

        Fragmentation of the arena is known only after layout: MAX_LAYOUTS of the fastest choices are laid out, and if
        none of them fits, others are assumed to lose as much.
        """
        found: Solution | None = None
        first = islice(self._ever_smaller(shape, fronts, below), MAX_LAYOUTS)
        for choices in (first, self._ever_smaller(shape, fronts, below, lossy=True)):
            for found in choices:
                if self.fits(found):  # fragmentation may cost more than other tilings take
                    return found if not self.price or found.seconds < below else None
        if found is None:
            return None
        found = self.laid_out(shape, smallest(fronts))
        return found if self.fits(found) and found.seconds < below else None

    def _ever_smaller(
        self, shape: Tiling, fronts: Sequence[ParetoFront], below: float, *, lossy: bool = False
    ) -> Iterator[Solution]:
        """Yield choices below `below` seconds, each the fastest of those that need fewer bytes than the one before.

        lossy  assume that later choices lose as many bytes to fragmentation
        """
        budget, most = self.budget(shape), below - self.io_seconds(shape)
        while all(fronts) and (options := fastest_within(fronts, budget, most, self.price)) is not None:
            found = self.laid_out(shape, options)
            yield found
            over = found.memory.excess(self.limits)
            most_pinned = max(option.pinned for option in options)
            if most_pinned and over[0]:  # the process has no memory for so much
                fronts = [tuple(option for option in front if option.pinned < most_pinned) for front in fronts]
            elif lossy:
                budget -= max(found.memory.last.arena - max(option.arena_bytes for option in options), *over)
            else:
                budget = total_bytes(options) - 1

    def front(self, shape: Tiling, group: int) -> ParetoFront:
        """Return the options of one group, whether they fit or not."""
        first, last = self.space.groups[group]
        return self.options.front(shape.shapes[first : last + 1], self.layer_context(shape, group))

    def layer_context(self, shape: Tiling, group: int) -> LayerContext:
        """Return what surrounds a group."""
        first, last = self.space.groups[group]
        return LayerContext(
            live_elsewhere=shape.live_elsewhere[group],
            input_bytes=0 if shape.input_stays[group] else shape.tensor_bytes[group],
            output_bytes=shape.tensor_bytes[group + 1],
            sub_batches=shape.sub_batches[first],
            steps=shape.steps[first : last + 1],
            streams=self.space.streams,
            join_bytes=shape.join_bytes(group),
        )

    def fronts(self, shape: Tiling) -> list[ParetoFront]:
        """Return the options of every group."""
        return [self.front(shape, index) for index in range(len(self.space.groups))]

    def laid_out(self, shape: Tiling, options: tuple[LayerOption, ...]) -> Solution:
        """Return these options with the arena laid out."""
        needs = self.needs(shape, [(way.shape, way.footprint) for option in options for way in option.layer_runs])
        tensors, arena = place(needs.tensors)
        around, own = self.fixed_memory(shape), needs.memory
        weights, pinned = around.last.weights + own.weights, around.last.pinned + own.pinned
        stage = replace(own, arena=arena, weights=weights, pinned=pinned)
        memory = replace(around, stages=(stage,))
        return Solution(shape, options, tensors, memory, self.io_seconds(shape), self.price * stage.prepared)

    def needs(self, shape: Tiling, steps: Steps) -> StageNeeds:
        """Return what these layers need, with their shapes and footprints."""
        return last_stage(steps, 0, shape.step_input[0], self.device)

    def least_memory(self, best: Solution, most: float) -> Solution:
        """Choose options for the shape of `best` that need less memory within `most` seconds; return `best` if none do.

        A higher price of memory gives smaller and slower choices. The highest price within `most` is searched for.
        """
        shape, fronts = best.tiling, self.fronts(best.tiling)
        low, high = 0.0, MAX_LOG2_PRICE
        for _ in range(PRICE_STEPS):
            middle = (low + high) / 2
            found = self.laid_out(shape, cheapest(fronts, self.price * 2**middle))
            if found.seconds > most:
                high = middle
                continue
            low = middle
            if self.fits(found) and found.memory.device_bytes < best.memory.device_bytes:
                best = found
        return best

    @property
    def price(self) -> float:
        """Seconds of preparing each byte of memory before the first step; 0 on a GPU."""
        return 1 / self.options.rates.first_touch if self.device == "cpu" else 0.0

    def idle_seconds(self, shape: Tiling) -> float:
        """Return the least seconds of a run in which nothing is computed, for any split of the images."""
        return self.io_seconds(shape) + (self.price * shape.largest_undivided if self.price else 0.0)

    def fixed_memory(self, shape: Tiling) -> Memory:
        """Return the memory that a run needs whatever the primitives are."""
        request, reads, writes = self.request, shape.steps_of(shape.cover.margin), shape.steps_of(0)
        reading, writing, staging = self.step_sizes(shape).transfer_bytes(
            self.device, masks=request.masks, reads=reads, writes=writes
        )
        around = StageMemory(self.device)
        return Memory((around,), request.baseline, reading, writing, staging, request.target.cuda_bytes)

    def step_sizes(self, shape: Tiling) -> StepSizes:
        """Return what a step reads and writes."""
        return StepSizes(self.space.network, shape.step_input, shape.patch, self.request.itemsizes, shape.images)

    def io_seconds(self, shape: Tiling) -> float:
        """Return the seconds of reading and writing in which nothing is computed."""
        if self.device == "cpu":  # all is hidden, and this is asked for thousands of times
            return 0.0
        sizes = self.step_sizes(shape)
        return unhidden_io_seconds(self.device, sizes.raw_bytes + sizes.out_bytes)

    @property
    def limit(self) -> int:
        """The limit on the memory of the device that runs the layers."""
        return self.limits.ram_bytes if self.device == "cpu" else self.limits.vram_bytes or 0

    def fits(self, found: Solution) -> bool:
        return found.memory.excess(self.limits) == (0, 0)

    def budget(self, shape: Tiling) -> int:
        """Return the bytes left for arena, weights, carried planes and allowance; -1 if the rest is too much."""
        around = self.fixed_memory(shape)
        return self.limit - around.device_bytes if around.excess(self.limits) == (0, 0) else -1


def _largest_first(shape: Tiling) -> list[int]:
    """Return the groups, those with most bytes of input and output first."""
    return sorted(range(len(shape.space.groups)), key=shape.io_bytes, reverse=True)


def _more_pieces(pieces: int, column_seconds: float) -> int:
    """Return the number of pieces to cut columns into that take so long, now cut into `pieces`."""
    return max(pieces + 1, int(min(column_seconds / MAX_COLUMN_SECONDS, MAX_PIECES)))
