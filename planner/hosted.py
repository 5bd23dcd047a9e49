"""Plans whose first layers run with tensors in the memory of the host, and all others on the GPU (ZNNi VII-B and C).

cpu-to-gpu  The processor computes the first layers of a step while the GPU computes the others of the step before.
gpu-host    One after the other: convolutions of the first layers run on the GPU, in sub-layers, or on the processor,
            whichever is faster; all else of them on the processor.

Method  For every number of first layers (theta), and every number of images that the GPU takes at a time of what is
        handed over, the fastest primitives are found for both sides apart, each exactly within its memory (`trade`):
        the seconds of both grow with those of each. (In the first steps of columns few layers run; there, side by side
        and within little memory, others may be better.) First layers take all images at a time.
Shapes  Those of the best plans of the processor alone and of the GPU alone within the same limits, or of the plan that
        is to be beaten; where axes have few sizes, all combinations, else a few steps along all axes together, of
        columns also in thickness; and then the next sizes along each axis of the best patch and of the best column, for
        as long as one of them is better. Another shape may be better still.
GPU     A hosted convolution may take a part of its memory, LENT of what CUDA leaves: its arena is that of the others
        too, and what it keeps there is taken from theirs. How it is divided does not depend on what they take.
Sizes   Of the images at a time: all that divide what there are; a part of them behind later poolings only where they
        go one by one, or all at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, Literal

from znnpy.errors import NoPlanError
from znnpy.kernels.contract import Work
from znnpy.machine import Limits, Machine
from znnpy.network import Network, Pool
from znnpy.planner.both_sides import both_sides, waiting_seconds
from znnpy.planner.candidates import Candidate, Space, candidate, splits
from znnpy.planner.cost import Rates, edge_seconds, seconds
from znnpy.planner.found_plan import choice_of, plan_of
from znnpy.planner.hosted_steps import first_steps, next_to
from znnpy.planner.layout import Tensor, place
from znnpy.planner.memory import Memory, mebibytes
from znnpy.planner.options import Options
from znnpy.planner.part_search import Part, PartSearch, PartSpace
from znnpy.planner.plan import Plan, device_of, handovers
from znnpy.planner.shape_search import LOST_SECONDS, Found
from znnpy.planner.sides import lives_with_host, sides
from znnpy.planner.trade import Way, total_seconds
from znnpy.planner.with_host import Divided, WithHost
from znnpy.shapes import LayerShape, Precision, Vec3, text, turned
from znnpy.wording import option

HostedMode = Literal["gpu-host", "cpu-to-gpu"]

LENT = 0.75  # of the GPU's memory beside CUDA's, that a hosted convolution may take
NEARER = 16  # times that shapes next to the best one are looked at
LOSING = 2.0  # times the seconds of another, or those that are asked for: next to what is slower nothing is looked at


@dataclass(frozen=True, slots=True)
class Both:
    """The best of one shape, one theta and one number of images at a time."""

    whole: Candidate
    theta: int
    front: Found
    back: Found
    memory: Memory
    tensors: tuple[Tensor, ...]  # of the GPU, all together
    seconds: float  # for the whole output
    handover_seconds: float  # of a step, in which the GPU waits

    @property
    def column_seconds(self) -> float:
        return self.seconds / len(self.whole.cover)


@dataclass
class HostedSearch:
    """What is asked for, and what may run on either side."""

    network: Network
    output: Vec3
    machine: Machine
    limits: Limits
    mode: HostedMode
    cpu: Options
    gpu: Options
    itemsize_in: int
    itemsize_out: int
    baseline: int
    context: int
    masks: bool
    precision: Precision
    depth_first: bool
    divided: Sequence[Divided] = ()  # compute hosted convolutions on the GPU, in mode gpu-host
    asked: bool = False  # one of them, by name
    below: float = inf  # seconds that a plan has to stay below
    with_host: WithHost | None = field(init=False)
    _most: float = field(init=False)  # seconds, of a shape that may lead to the best
    _searches: dict[tuple[Space, int, bool], PartSearch] = field(default_factory=dict)
    _seen: set[tuple[Space, Vec3]] = field(default_factory=set)
    _fronts: dict[Any, Found | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._most = LOSING * self.below
        lent = int(LENT * ((self.limits.vram_bytes or 0) - self.context))
        self.with_host = None
        if not self.overlaps and self.divided:
            rates = self.cpu.rates, self.gpu.rates
            self.with_host = WithHost(
                self.divided, self.machine, self.limits.threads, lent, *rates, self.precision, asked=self.asked
            )

    @property
    def overlaps(self) -> bool:
        return self.mode == "cpu-to-gpu"

    def run(self, spaces: Sequence[Space], patch: Vec3 | None, seeds: Sequence[Plan]) -> Plan:
        """The best plan; NoPlanError with the smallest need where nothing fits, or where nothing is as fast as asked.

        patch  this output patch only
        seeds  plans whose shapes are among those to begin with
        """
        begun: list[Both] = []
        for space in spaces:
            patches = self._starts(space, seeds) if patch is None else [turned(patch, space.axis)]
            found = self._among(space, patches, None)
            if found is not None:
                begun.append(found)
                self._most = min(self._most, LOSING * found.seconds)
        best: Both | None = None
        for found in sorted(begun, key=lambda found: found.seconds):
            if best is None or found.seconds < LOSING * best.seconds:
                near = self._nearer(found) if patch is None else found
                best = near if best is None or near.seconds < best.seconds else best
        if self.below < inf and (best is None or best.seconds >= self.below):
            raise NoPlanError(f"mode {self.mode}: no plan was found that takes less than {self.below:.3g} s")
        if best is None:  # what bounds and estimates leave out may still fit
            least = self._least_need(spaces, patch)
            if least is None or least.memory.over(self.limits) != (0, 0):
                raise self._no_plan(least)
            best = least
        return self._plan(best)

    def _starts(self, space: Space, seeds: Sequence[Plan]) -> list[Vec3]:
        """The shapes to begin with in one space."""
        kind = space.walks, space.axis if space.walks else 0
        of_seeds = (turned(s.patch_out, space.axis) for s in seeds if (s.walks, s.axis if s.walks else 0) == kind)
        return [*of_seeds, *first_steps(space)]

    def _nearer(self, best: Both) -> Both:
        """The best of `best` and of the shapes next to it, while one of them is better."""
        for _ in range(NEARER):
            better = self._among(best.whole.space, next_to(best.whole), best)
            if better is best or better is None:
                break
            best = better
        return best

    def _among(self, space: Space, patches: Iterable[Vec3], best: Both | None) -> Both | None:
        """The best of `best` and of shapes that nobody has looked at."""
        for patch in patches:
            if (space, patch) in self._seen:
                continue
            self._seen.add((space, patch))
            best = self._of_shape(candidate(space, patch), best)
        return best

    def _of_shape(self, whole: Candidate, best: Both | None) -> Both | None:
        """The best of `best` and of one shape. Smaller parts only cost, but for the memory that they save."""
        thetas = []
        for theta in range(1, len(self.network.layers)):
            one, _, front, back = self._sides(whole, theta, (0,))
            if one.room(front) >= front.largest:
                thetas.append((self._least(back, one.over_link(front)), theta))
        for least, theta in sorted(thetas):
            if least >= self._limit(best):
                break
            one, other, front, back = self._sides(whole, theta, (0,))
            hosted = one.quickest(front)
            if self._least(back, hosted) >= self._limit(best):
                continue
            undivided = other.quickest(back)
            for at_once in self._images(whole, theta):
                if undivided < inf and self._least(back, hosted, undivided) >= self._limit(best):
                    break
                best = self._short_enough(whole, theta, at_once, self._limit(best)) or best
        return best

    def _limit(self, best: Both | None) -> float:
        """That another has to stay below."""
        return self._most if best is None else best.seconds

    def _least(self, back: Part, front_seconds: float, back_seconds: float = 0.0) -> float:
        """Seconds for the whole output at the least: side by side neither waits for the other."""
        steps, whole = back.whole.steps[back.layers[0][0] - 1], back.parts[0] * self._upload_seconds(back)
        images = back.whole.shapes[back.layers[0][0] - 1].out_shape[0]  # the first of which goes up by itself
        behind = back_seconds + steps * whole / images
        return max(front_seconds, behind) if self.overlaps else front_seconds + behind

    def _short_enough(self, whole: Candidate, theta: int, at_once: tuple[int, ...], below: float) -> Both | None:
        """With columns that take at most LOST_SECONDS, as far as they are of several steps."""
        found, pieces = self._of_theta(whole, theta, at_once, below), 1
        while found is not None and found.column_seconds > LOST_SECONDS and whole.column > whole.patch[0]:
            pieces = max(pieces + 1, int(found.column_seconds / LOST_SECONDS))
            whole = whole.cut(pieces)
            found = self._of_theta(whole, theta, at_once, below)
        return found

    def _of_theta(self, whole: Candidate, theta: int, at_once: tuple[int, ...], below: float) -> Both | None:
        """The fastest of both sides that fit together; None unless below `below` seconds.

        Where hosted layers that the GPU computes leave too little of it to the others, none does.
        """
        one, other, front, back = self._sides(whole, theta, at_once)
        if other.quickest(back) >= below or other.room(back) < back.largest:
            return None
        ahead = self._ahead(one, front)
        if ahead is None:
            return None
        found = self._fitted(whole, theta, one, other, ahead, back, below)
        if not self.asked and any(lives_with_host(way.footprint) for _, way in ahead.ways):
            most = below if found is None else found.seconds
            if found is None or total_seconds(found.back.options) > other.quickest(back):
                by_host = replace(one, with_host=None, taken=0)
                alone = by_host.fastest(front, most)
                found = (alone and self._fitted(whole, theta, by_host, other, alone, back, most)) or found
        return found

    def _fitted(
        self, whole: Candidate, theta: int, one: PartSearch, other: PartSearch, ahead: Found, back: Part, below: float
    ) -> Both | None:
        """With the fastest back beside `ahead`."""
        other.taken = sum(way.footprint.resident for _, way in ahead.ways if lives_with_host(way.footprint))
        behind = other.fastest(back, below)
        if behind is not None and behind.memory.pinned:
            front = ahead.candidate
            one.taken = behind.memory.pinned
            again = one.fastest(front, below)
            if again is None:
                return None
            ahead = again
        if behind is None:
            return None
        found = self._both(whole, theta, ahead, behind)
        return found if found.seconds < below and found.memory.over(self.limits) == (0, 0) else None

    def _ahead(self, one: PartSearch, front: Part) -> Found | None:
        """The fastest primitives for hosted layers: the same however many images the GPU takes at a time."""
        key = front.whole.space, front.shapes, front.column
        if key not in self._fronts:
            self._fronts = {key: one.fastest(front)}  # one shape after the other
        return self._fronts[key]

    def _both(self, whole: Candidate, theta: int, front: Found, back: Found) -> Both:
        """Of a shape, side by side or one after the other."""
        once = sum(way.parts * way.seconds for _, way in back.ways)
        handed = waiting_seconds(self._upload_seconds(back.candidate), back.candidate.parts[0], once)
        network, patch = whole.space.network, whole.patch
        edges = self.itemsize_in * network.input_channels * prod(whole.new)
        edges += self.itemsize_out * network.output_channels * prod(patch)
        columns = len(whole.cover)
        spent = both_sides(_ran(front), _ran(back), handed, columns, overlaps=self.overlaps) + edge_seconds(
            "gpu", edges
        )
        ways = [way for found in (front, back) for _, way in found.ways]
        laid = sides([(way.shape, way.footprint) for way in ways], len([*front.ways]), whole.new[0])
        tensors, arena = place(laid.device.tensors)
        memory = replace(
            back.memory,
            arena=arena,
            carries=laid.device.carries,
            residents=laid.device.residents,
            allowance=laid.device.allowance,
            pinned=laid.device.pinned,
            host_arena=front.memory.arena,
            host_carries=laid.host.carries,
            host_residents=laid.host.residents,
            host_allowance=laid.host.allowance,
        )
        return Both(whole, theta, front, back, memory, tensors, spent, handed)

    def _upload_seconds(self, back: Candidate) -> float:
        """Of one part of what is handed over in a step."""
        shape = back.shapes[0]
        nbytes = shape.in_bytes // shape.in_shape[1] * back.new[0]
        return seconds((Work("gpu_link", 0.0, float(nbytes)),), self.gpu.rates)

    def _sides(
        self, whole: Candidate, theta: int, at_once: tuple[int, ...]
    ) -> tuple[PartSearch, PartSearch, Part, Part]:
        """Searches and layers of both sides."""
        front, back = self._front(whole, theta), self._back(whole, theta, at_once)
        one, other = (self._search(whole.space, theta, on_gpu=on_gpu) for on_gpu in (False, True))
        one.handed = other.handed = handovers(overlaps=self.overlaps) * front.shapes[-1].out_bytes
        other.slots = back.shapes[0].in_bytes // back.shapes[0].in_shape[1] * back.fed[0]
        one.taken = other.taken = 0
        return one, other, front, back

    def _search(self, space: Space, theta: int, *, on_gpu: bool) -> PartSearch:
        key = space, theta, on_gpu
        found = self._searches.get(key)
        if found is None:
            layers = range(theta, len(space.network.layers)) if on_gpu else range(theta)
            part = PartSpace.of(space if on_gpu else replace(space, precision="fp32"), layers)
            found = self._searches[key] = PartSearch(
                space=replace(part, whole=space),
                limits=self.limits,
                itemsize_in=self.itemsize_in,
                itemsize_out=self.itemsize_out,
                options=self.gpu if on_gpu else self.cpu,
                device="gpu" if on_gpu else "cpu",
                baseline=self.baseline,
                context=self.context,
                masks=self.masks,
                splits=(),
                with_host=None if on_gpu else self.with_host,
            )
        return found

    def _front(self, whole: Candidate, theta: int) -> Part:
        """All images at a time, in fp32."""
        space = self._search(whole.space, theta, on_gpu=False).space
        shapes = tuple(replace(shape, precision="fp32") for shape in whole.shapes[:theta])
        return Part(space, whole.patch, whole.column, shapes, (1,) * theta, whole, whole.new, behind=False)

    def _back(self, whole: Candidate, theta: int, at_once: tuple[int, ...]) -> Part:
        """at_once  images at a time of what is handed over, and behind each pooling of these layers; 0: all."""
        space = self._search(whole.space, theta, on_gpu=True).space
        given = whole.shapes[theta - 1]
        images = given.out_shape[0]
        batch = at_once[0] or images
        before, wanted = images // batch, iter(at_once[1:])
        shapes: list[LayerShape] = []
        parts = []
        for layer, shape in zip(space.network.layers, whole.shapes[theta:], strict=True):
            shapes.append(replace(shape, batch=batch))
            parts.append(before)
            batch = made = shapes[-1].out_shape[0]
            if isinstance(layer, Pool):
                batch = min(next(wanted, 0) or made, made)
            before *= made // batch
        return Part(space, whole.patch, whole.column, tuple(shapes), tuple(parts), whole, given.out, behind=True)

    def _images(self, whole: Candidate, theta: int) -> list[tuple[int, ...]]:
        """Images at a time on the GPU, for `_back`: the most first."""
        images = whole.shapes[theta - 1].out_shape[0]
        if not self.depth_first:
            return [(0,)]
        later = splits(Network("rest", self.network.maps[theta], whole.space.network.layers[theta:]))[1:]
        later = [at_once for at_once in later if any(at_once)]
        some = [(count,) for count in range(images, 0, -1) if images % count == 0]
        ends = [(images,), (1,)] if images > 1 else [(1,)]
        return [*some, *((*end, *at_once) for end in ends for at_once in later)]

    def _plan(self, best: Both) -> Plan:
        sides = ((0, best.front), (best.theta, best.back))
        choices = [
            choice_of((offset + first, offset + last), way, self._rates(way))
            for offset, found in sides
            for (first, last), way in found.ways
        ]
        made = plan_of(
            self.network,
            self.machine,
            self.limits,
            best.whole,
            choices,
            best.tensors,
            best.memory,
            itemsize_in=self.itemsize_in,
            itemsize_out=self.itemsize_out,
        )
        return replace(
            made,
            hosted=len([*best.front.ways]),
            overlaps=self.overlaps,
            host_tensors=best.front.tensors,
            feeders=self.limits.threads - self.cpu.threads,
            handover_seconds=best.handover_seconds,
        )

    def _rates(self, way: Way) -> Rates:
        return (self.gpu if device_of(way.primitive.name) == "gpu" else self.cpu).rates

    def _least_need(self, spaces: Sequence[Space], patch: Vec3 | None) -> Both | None:
        """That of the smallest shapes; None where no theta leaves layers that both sides run."""
        least: Both | None = None
        for space in spaces:
            whole = candidate(space, turned(patch, space.axis) if patch else space.network.period)
            for theta in range(1, len(self.network.layers)):
                for at_once in self._images(whole, theta):
                    found = self._leanest(whole, theta, at_once)
                    if found is not None and (least is None or self._lacks(found) < self._lacks(least)):
                        least = found
        return least

    def _no_plan(self, least: Both | None) -> NoPlanError:
        """What `least`, the smallest need there is, lacks."""
        if least is None:
            return NoPlanError(
                f"mode {self.mode}: no primitives run the first layers of {self.network.name} with "
                f"the host and all others on the GPU; drop {option('mode')} or {option('only')}"
            )
        memory, limits = least.memory, self.limits
        needs = memory.peak, memory.vram
        ram, vram = (option(name, f"{-(-need // 2**20)}M") for name, need in zip(("ram", "vram"), needs, strict=True))
        error = NoPlanError(
            f"mode {self.mode}: nothing fits in {mebibytes(limits.ram_bytes)} of RAM and "
            f"{mebibytes(limits.vram_bytes or 0)} of VRAM: the smallest need is {mebibytes(needs[0])} and "
            f"{mebibytes(needs[1])}, with patches of {text(least.whole.patch_out)} and {least.theta} layers on the "
            f"host; allow at least {ram} and {vram}"
        )
        error.needs = needs
        error.needed_bytes = memory.vram if memory.over(limits)[1] else memory.peak
        return error

    def _leanest(self, whole: Candidate, theta: int, at_once: tuple[int, ...]) -> Both | None:
        one, other, front, back = self._sides(whole, theta, at_once)
        ahead, behind = one.leanest(front), other.leanest(back)
        return None if ahead is None or behind is None else self._both(whole, theta, ahead, behind)

    def _lacks(self, found: Both) -> tuple[int, int]:
        return sum(found.memory.over(self.limits)), found.memory.peak + found.memory.vram


def _ran(found: Found) -> list[tuple[int, float]]:
    """Steps in which each layer runs, and its seconds in one."""
    return [(way.runs // way.parts, way.parts * way.seconds) for _, way in found.ways]
