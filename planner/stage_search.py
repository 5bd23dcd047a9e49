"""The search for the fastest primitives of one of two stages: the offloaded layers, or those behind them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from znnpy.planner.layer_search import LayerSearch, Solution
from znnpy.planner.layout import aligned
from znnpy.planner.memory import Memory, StageMemory, StepSizes
from znnpy.planner.pareto import ParetoFront, in_sequence, pareto_front, smallest
from znnpy.planner.stages import StageNeeds, Steps, host_stage, in_host_ram
from znnpy.planner.sublayers import Sublayers
from znnpy.planner.tilings import Tiling


@dataclass
class StageSearch(LayerSearch):
    """The search for one stage of a shape, within the memory that the other stage leaves."""

    handover: int = 0  # bytes of all buffers for what is handed over, page-locked
    taken: int = 0  # bytes of this stage's memory that the other stage takes
    slot: int = 0  # bytes of a part of what is handed over, on the GPU
    sublayers: Sublayers | None = None  # offloaded convolutions that a GPU computes

    def front(self, shape: Tiling, group: int) -> ParetoFront:
        """Return the options of one group; for offloaded layers also those that a GPU computes."""
        found, lent = super().front(shape, group), self.sublayers
        first, last = self.space.groups[group]
        conv, pool = shape.shapes[first], shape.shapes[last]
        asked = {way.primitive.name for option in found for way in option.layer_runs if way.shape.kind == "conv"}
        if lent is None or conv.kind != "conv" or asked & self.options.only:
            return found
        place, below = self.layer_context(shape, group), found[-1].seconds if found and not lent.asked else inf
        if first == last:
            by_gpu = pareto_front(lent.options(conv, place, below))
        else:
            between = aligned(pool.in_bytes)
            before = pareto_front(lent.options(conv, replace(place, output_bytes=between), below))
            after = replace(place, input_bytes=between, join_bytes=0, steps=place.steps[1:])
            by_gpu = pareto_front(in_sequence(before, self.options.front((pool,), after)))
        return by_gpu if by_gpu and lent.asked else pareto_front((*found, *by_gpu))

    def io_seconds(self, shape: Tiling) -> float:
        """Return 0: what is read and written belongs to both stages together."""
        del shape
        return 0.0

    @property
    def price(self) -> float:
        """Seconds of preparing a byte: always 0, since plans of two stages do not count it."""
        return 0.0

    def fixed_memory(self, shape: Tiling) -> Memory:
        """Return what a run needs whatever the primitives are, with what the other stage takes of this memory."""
        request, on_gpu = self.request, self.device == "gpu"
        sizes = StepSizes(shape.space.network, shape.volume_input, shape.patch, request.itemsizes)
        reads, writes = shape.steps_of(shape.cover.margin), shape.steps_of(0)
        reading, writing, staging = sizes.transfer_bytes(
            "gpu", masks=request.masks, reads=reads, writes=writes, handed_over=self.slot
        )
        taken = self.taken if on_gpu else 0
        return Memory(
            stages=(StageMemory(self.device, weights=taken, pinned=self.taken - taken),),
            baseline=request.baseline,
            reading=reading,
            writing=writing,
            staging=staging if on_gpu else 0,
            context=request.target.cuda_bytes,
            handover=self.handover,
        )

    def needs(self, shape: Tiling, steps: Steps) -> StageNeeds:
        """Return what these layers need, with the page-locked weights of those that run on the other device."""
        if self.device == "cpu":
            found = host_stage(steps, shape.step_input[0])
            pinned = sum(footprint.host for _, footprint in steps if in_host_ram(footprint))
            return replace(found, memory=replace(found.memory, pinned=pinned))
        found = super().needs(shape, steps)
        return replace(found, memory=replace(found.memory, carries=shape.sub_batches[0] * found.memory.carries))

    def fastest(self, shape: Tiling, below: float = inf) -> Solution | None:
        """Return the fastest primitives within the memory; None unless they take less than `below` seconds in all."""
        fronts = self.fronts(shape)
        return self._fastest_fitting(shape, fronts, below) if all(fronts) else None

    def quickest(self, shape: Tiling) -> float:
        """Return the seconds for the whole output with unlimited memory; inf where some layer runs nowhere."""
        return sum(options[0].seconds if options else inf for options in self.fronts(shape))

    def over_link(self, shape: Tiling) -> float:
        """Return a lower bound on those seconds: what the CPU takes, or the link to the GPU."""
        least, lent = 0.0, self.sublayers
        for index, (first, _) in enumerate(self.space.groups):
            options = super().front(shape, index)
            link = inf if lent is None else lent.link_seconds(shape.shapes[first]) * shape.steps[first]
            least += min(options[0].seconds if options else inf, link)
        return least

    def smallest(self, shape: Tiling) -> Solution | None:
        """Return the primitives that need the least memory; None where some layer runs nowhere."""
        fronts = self.fronts(shape)
        return self.laid_out(shape, smallest(fronts)) if all(fronts) else None
