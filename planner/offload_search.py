"""The search for plans of two stages: first layers with tensors in RAM, all others on the GPU (ZNNi VII-B and C).

cpu-to-gpu  The CPU computes the first stage of a step while the GPU computes the second stage of the step before.
gpu-host    One stage runs after the other. Convolutions of the first stage run on the GPU, in sub-layers, or on the
            CPU, whichever is faster; everything else of it runs on the CPU.

Method  For every number of offloaded layers (`cut`) and every number of images that the GPU takes at a time of what is
        handed over, the fastest primitives of both stages are found separately, each exactly within its memory
        (`pareto`), because the seconds of the whole grow with those of each. In the first steps of a column few layers
        run; with overlap and little memory, other primitives may be better there.
Sizes   The search begins with the patches of the best plans of either device alone, or of the plan that is to be
        beaten, and with some others (`initial_sizes`). It moves on to the sizes next to the best one for as long as one
        of them is better. Another size may be better still.
GPU     An offloaded convolution that the GPU computes has its scratch in the arena of the second stage, and what it
        keeps on the GPU is taken from that stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from znnpy.costs.model import seconds, unhidden_io_seconds
from znnpy.costs.two_stages import two_stage_seconds, upload_wait_seconds
from znnpy.errors import NoPlanError
from znnpy.kernels.contract import Work, device_of
from znnpy.messages import option
from znnpy.option_values import OffloadMode
from znnpy.planner.found_plan import choice_of, plan_of
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.layer_search import MAX_COLUMN_SECONDS, Solution
from znnpy.planner.layout import place
from znnpy.planner.memory import Memory, StepSizes
from znnpy.planner.offload_sizes import initial_sizes, neighbouring_sizes
from znnpy.planner.pareto import total_seconds
from znnpy.planner.plan import Choice, Plan, Stage
from znnpy.planner.request import PlanRequest
from znnpy.planner.stage_search import StageSearch
from znnpy.planner.stages import handover_buffers, in_host_ram, stage_needs
from znnpy.planner.sublayers import Sublayers
from znnpy.planner.tilings import Tiling, TilingSpace, splits, tiling_of
from znnpy.shapes import Vec3, text, turned
from znnpy.units import mebibytes

MAX_MOVES = 16  # times that shapes next to the best one are looked at
SEED_SLACK = 2.0  # times the seconds of another plan, or those asked for: no neighbours of a slower plan are looked at


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers of a tiling in two stages, and the search for the primitives of each stage."""

    whole: Tiling
    layers: int  # of the first stage
    front: Tiling
    back: Tiling
    host: StageSearch
    gpu: StageSearch


@dataclass(frozen=True, slots=True)
class TwoStages:
    """The best primitives for one tiling, one cut and one number of images at a time."""

    tiling: Tiling
    cut: int  # layers of the first stage
    front: Solution
    back: Solution
    memory: Memory
    stages: tuple[Stage, ...]
    seconds: float  # for the whole output

    @property
    def column_seconds(self) -> float:
        return self.seconds / len(self.tiling.cover)


@dataclass
class OffloadSearch:
    """The search for the best plan of two stages, with the options of either stage."""

    request: PlanRequest  # for the GPU
    mode: OffloadMode
    cpu: OptionTable
    gpu: OptionTable
    sublayers: Sublayers | None  # offloaded convolutions that the GPU may compute, in mode gpu-host
    below: float = inf  # seconds that a plan has to stay below
    _most: float = field(init=False)  # seconds, of a shape that may lead to the best
    _searches: dict[tuple[TilingSpace, tuple[int, int]], StageSearch] = field(default_factory=dict)
    _seen: set[tuple[TilingSpace, Vec3]] = field(default_factory=set)
    _fronts: dict[Tiling, Solution | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._most = SEED_SLACK * self.below

    @property
    def overlap(self) -> bool:
        return self.mode == "cpu-to-gpu"

    def run(self, spaces: Sequence[TilingSpace], patch: Vec3 | None, seeds: Sequence[Plan]) -> Plan:
        """Return the best plan.

        patch  look at this output patch only
        seeds  begin with the shapes of these plans, among others

        NoPlanError with the smallest need where nothing fits, or where nothing is as fast as asked.
        """
        begun: list[TwoStages] = []
        for space in spaces:
            patches = self._starts(space, seeds) if patch is None else [turned(patch, space.axis)]
            found = self._among(space, patches, None)
            if found is not None:
                begun.append(found)
                self._most = min(self._most, SEED_SLACK * found.seconds)
        best: TwoStages | None = None
        for found in sorted(begun, key=lambda found: found.seconds):
            if best is None or found.seconds < SEED_SLACK * best.seconds:
                near = self._improved(found) if patch is None else found
                best = near if best is None or near.seconds < best.seconds else best
        if self.below < inf and (best is None or best.seconds >= self.below):
            raise NoPlanError(f"mode {self.mode}: no plan was found that takes less than {self.below:.3g} s")
        if best is None:  # what bounds and estimates leave out may still fit
            least = self._least_need(spaces, patch)
            if least is None or least.memory.excess(self.request.limits) != (0, 0):
                raise self._no_plan(least)
            best = least
        return self._plan(best)

    def _starts(self, space: TilingSpace, seeds: Sequence[Plan]) -> list[Vec3]:
        """Return the shapes to begin with in one space."""
        kind = space.streams, space.axis if space.streams else 0
        of_seeds = (turned(s.patch_out, space.axis) for s in seeds if (s.streams, s.axis if s.streams else 0) == kind)
        return [*of_seeds, *initial_sizes(space)]

    def _improved(self, best: TwoStages) -> TwoStages:
        """Move from `best` to the best of the shapes next to it, for as long as one of them is better."""
        for _ in range(MAX_MOVES):
            better = self._among(best.tiling.space, neighbouring_sizes(best.tiling), best)
            if better is best or better is None:
                break
            best = better
        return best

    def _among(self, space: TilingSpace, patches: Iterable[Vec3], best: TwoStages | None) -> TwoStages | None:
        """Return the best of `best` and of those shapes that were not looked at before."""
        for patch in patches:
            if (space, patch) in self._seen:
                continue
            self._seen.add((space, patch))
            best = self._of_tiling(tiling_of(space, patch), best)
        return best

    def _of_tiling(self, whole: Tiling, best: TwoStages | None) -> TwoStages | None:
        """Return the best of `best` and of one tiling. Smaller parts only cost time, unless they save memory."""
        cuts = []
        for layers in range(1, len(self.request.network.layers)):
            cut = self._cut(whole, layers, (0,))
            if cut.host.budget(cut.front) >= cut.front.largest:
                cuts.append((self._least(cut, cut.host.over_link(cut.front)), layers))
        for least, layers in sorted(cuts):
            if least >= self._limit(best):
                break
            cut = self._cut(whole, layers, (0,))
            offloaded = cut.host.quickest(cut.front)
            if self._least(cut, offloaded) >= self._limit(best):
                continue
            undivided = cut.gpu.quickest(cut.back)
            for at_once in self._images(whole, layers):
                if undivided < inf and self._least(cut, offloaded, undivided) >= self._limit(best):
                    break
                best = self._short_enough(whole, layers, at_once, self._limit(best)) or best
        return best

    def _limit(self, best: TwoStages | None) -> float:
        """Return the seconds below which another plan has to stay."""
        return self._most if best is None else best.seconds

    def _least(self, cut: Cut, front_seconds: float, back_seconds: float = 0.0) -> float:
        """Return a lower bound on the seconds for the whole output: with overlap, neither stage waits for the other."""
        upload = cut.back.sub_batches[0] * self._upload_seconds(cut.back)
        images = cut.front.shapes[-1].out_shape[0]  # the first of which is uploaded before anything is computed
        behind = back_seconds + cut.front.steps[-1] * upload / images
        return max(front_seconds, behind) if self.overlap else front_seconds + behind

    def _short_enough(self, whole: Tiling, layers: int, at_once: tuple[int, ...], below: float) -> TwoStages | None:
        """Find the fastest of one cut, with columns of several steps shortened to at most MAX_COLUMN_SECONDS."""
        found, pieces = self._of_cut(self._cut(whole, layers, at_once), below), 1
        while found is not None and found.column_seconds > MAX_COLUMN_SECONDS and whole.column_planes > whole.patch[0]:
            pieces = max(pieces + 1, int(found.column_seconds / MAX_COLUMN_SECONDS))
            whole = whole.shortened(pieces)
            found = self._of_cut(self._cut(whole, layers, at_once), below)
        return found

    def _of_cut(self, cut: Cut, below: float) -> TwoStages | None:
        """Find the fastest primitives of both stages that fit together; None unless faster than `below` seconds.

        Where offloaded layers that the GPU computes leave it too little memory, it computes none of them.
        """
        if cut.gpu.quickest(cut.back) >= below or cut.gpu.budget(cut.back) < cut.back.largest:
            return None
        front = self._fastest_front(cut)
        if front is None:
            return None
        found = self._fitted(cut, front, below)
        must_divide = self.sublayers is not None and self.sublayers.asked
        if not must_divide and any(in_host_ram(way.footprint) for _, way in front.layer_runs):
            most = below if found is None else found.seconds
            if found is None or total_seconds(found.back.options) > cut.gpu.quickest(cut.back):
                by_host = replace(cut, host=replace(cut.host, sublayers=None, taken=0))
                alone = by_host.host.fastest(cut.front, most)
                found = (alone and self._fitted(by_host, alone, most)) or found
        return found

    def _fitted(self, cut: Cut, front: Solution, below: float) -> TwoStages | None:
        """Find the fastest second stage that fits together with a first stage."""
        cut.gpu.taken = sum(way.footprint.resident for _, way in front.layer_runs if in_host_ram(way.footprint))
        back = cut.gpu.fastest(cut.back, below)
        if back is not None and back.memory.pinned:
            cut.host.taken = back.memory.pinned
            again = cut.host.fastest(front.tiling, below)
            if again is None:
                return None
            front = again
        if back is None:
            return None
        found = self._two_stages(cut, front, back)
        return found if found.seconds < below and found.memory.excess(self.request.limits) == (0, 0) else None

    def _fastest_front(self, cut: Cut) -> Solution | None:
        """Find the fastest primitives for offloaded layers, which do not depend on the images that the GPU takes."""
        if cut.front not in self._fronts:
            self._fronts = {cut.front: cut.host.fastest(cut.front)}  # one tiling after the other
        return self._fronts[cut.front]

    def _two_stages(self, cut: Cut, front: Solution, back: Solution) -> TwoStages:
        """Put two stages together, with their memory and the seconds for the whole output."""
        whole, once = cut.whole, sum(way.sub_batches * way.seconds for _, way in back.layer_runs)
        wait = upload_wait_seconds(self._upload_seconds(back.tiling), back.tiling.sub_batches[0], once)
        sizes = StepSizes(self.request.network, whole.step_input, whole.patch, self.request.itemsizes)
        idle = unhidden_io_seconds("gpu", sizes.raw_bytes + sizes.out_bytes)
        spent = two_stage_seconds(_runs(front), _runs(back), wait, len(whole.cover), overlap=self.overlap)
        steps = [(way.shape, way.footprint) for found in (front, back) for _, way in found.layer_runs]
        choices = self._choices(0, front), self._choices(cut.layers, back)
        placed = [
            (needs.memory, *place(needs.tensors))
            for needs in stage_needs(steps, len(choices[0]), whole.step_input[0], "gpu")
        ]
        stages = tuple(
            Stage(own.device, chosen, tensors, wait if own.device == "gpu" else 0.0)
            for chosen, (own, tensors, _) in zip(choices, placed, strict=True)
        )
        memory = replace(back.memory, stages=tuple(replace(own, arena=arena) for own, _, arena in placed))
        return TwoStages(whole, cut.layers, front, back, memory, stages, spent + idle)

    def _choices(self, first: int, found: Solution) -> tuple[Choice, ...]:
        """Return the choices of a stage, whose first layer is layer `first` of the network."""
        rates = {"cpu": self.cpu.rates, "gpu": self.gpu.rates}
        return tuple(
            choice_of((first + a, first + b), way, rates[device_of(way.primitive.name)])
            for (a, b), way in found.layer_runs
        )

    def _upload_seconds(self, back: Tiling) -> float:
        """Return the seconds for the upload of one part of what is handed over in a step."""
        shape = back.shapes[0]
        nbytes = shape.in_bytes // shape.in_shape[1] * back.step_input[0]
        return seconds((Work("gpu_link", 0.0, float(nbytes)),), self.gpu.rates)

    def _cut(self, whole: Tiling, layers: int, at_once: tuple[int, ...]) -> Cut:
        """Cut a tiling behind so many layers. Those before, in fp32, take all images at a time.

        at_once  images at a time of what is handed over, and behind each pooling of the later layers; 0: all
        """
        host, gpu = self._search(whole.space, (0, layers)), self._search(whole.space, (layers, len(whole.shapes)))
        shapes = tuple(replace(shape, precision="fp32") for shape in whole.shapes[:layers])
        later, handed_over = whole.shapes[layers:], shapes[-1].out
        front = Tiling(host.space, whole.patch, whole.column_planes, shapes, (1,) * layers)
        back = Tiling(gpu.space, whole.patch, whole.column_planes, later, (1,) * len(later), handed_over).split(at_once)
        host.handover = gpu.handover = handover_buffers(overlap=self.overlap) * shapes[-1].out_bytes
        gpu.slot = back.shapes[0].in_bytes // back.shapes[0].in_shape[1] * back.step_input[0]
        host.taken = gpu.taken = 0
        return Cut(whole, layers, front, back, host, gpu)

    def _search(self, space: TilingSpace, stage: tuple[int, int]) -> StageSearch:
        """Return the search for the layers of a stage."""
        found = self._searches.get((space, stage))
        if found is None:
            if stage[0] > 0:
                found = StageSearch(self.request, replace(space, stage=stage), self.gpu, splits=())
            else:
                host, own = self.request.on("cpu"), replace(space, stage=stage, precision="fp32")
                found = StageSearch(host, own, self.cpu, splits=(), sublayers=self.sublayers)
            self._searches[space, stage] = found
        return found

    def _images(self, whole: Tiling, cut: int) -> list[tuple[int, ...]]:
        """Return the numbers of images at a time on the GPU, for `_cut`: the most first."""
        images = whole.shapes[cut - 1].out_shape[0]
        if not self.request.constraints.depth_first:
            return [(0,)]
        rest = replace(whole.space, stage=(cut, len(self.request.network.layers)))
        later = [at_once for at_once in splits(rest.stage_network)[1:] if any(at_once)]
        some = [(count,) for count in range(images, 0, -1) if images % count == 0]
        ends = [(images,), (1,)] if images > 1 else [(1,)]
        return [*some, *((*end, *at_once) for end in ends for at_once in later)]

    def _plan(self, best: TwoStages) -> Plan:
        return plan_of(
            self.request,
            best.tiling,
            best.stages,
            best.memory,
            overlap=self.overlap,
            feed_threads=self.request.limits.threads - self.cpu.threads,
        )

    def _least_need(self, spaces: Sequence[TilingSpace], patch: Vec3 | None) -> TwoStages | None:
        """Find the smallest need of the smallest shapes; None where no cut leaves layers that both stages run."""
        least: TwoStages | None = None
        for space in spaces:
            whole = tiling_of(space, turned(patch, space.axis) if patch else space.network.period)
            for layers in range(1, len(self.request.network.layers)):
                for at_once in self._images(whole, layers):
                    cut = self._cut(whole, layers, at_once)
                    front, back = cut.host.smallest(cut.front), cut.gpu.smallest(cut.back)
                    if front is not None and back is not None:
                        found = self._two_stages(cut, front, back)
                        least = found if least is None else min(least, found, key=self._lacks)
        return least

    def _no_plan(self, least: TwoStages | None) -> NoPlanError:
        """Say what `least`, the smallest need there is, lacks."""
        if least is None:
            return NoPlanError(
                f"mode {self.mode}: no primitives run the first layers of {self.request.network.name} with "
                f"the host and all others on the GPU; drop {option('mode')} or {option('only')}"
            )
        memory, limits = least.memory, self.request.limits
        needs = memory.peak, memory.vram
        ram, vram = (option(name, f"{-(-need // 2**20)}M") for name, need in zip(("ram", "vram"), needs, strict=True))
        error = NoPlanError(
            f"mode {self.mode}: nothing fits in {mebibytes(limits.ram_bytes)} of RAM and "
            f"{mebibytes(limits.vram_bytes or 0)} of VRAM: the smallest need is {mebibytes(needs[0])} and "
            f"{mebibytes(needs[1])}, with patches of {text(least.tiling.patch_out)} and {least.cut} layers on the "
            f"host; allow at least {ram} and {vram}"
        )
        error.needs = needs
        error.needed_bytes = memory.vram if memory.excess(limits)[1] else memory.peak
        return error

    def _lacks(self, found: TwoStages) -> tuple[int, int]:
        return sum(found.memory.excess(self.request.limits)), found.memory.peak + found.memory.vram


def _runs(found: Solution) -> list[tuple[int, float]]:
    """Return the steps in which each layer runs, and its seconds in one."""
    return [(way.executions // way.sub_batches, way.sub_batches * way.seconds) for _, way in found.layer_runs]
