"""The fastest primitives for one patch or column shape that fit, exactly.

For a fixed shape the best primitives are found exactly (`pareto`); layers are worked out one after the other, the large
ones first, until it is plain that the shape cannot win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf, prod
from types import MappingProxyType

from znnpy.machine import Limits
from znnpy.planner.bounds import NOTHING, Bounds, Needs, Paces, Reached, least_priced, least_seconds, needs_of, reached
from znnpy.planner.cost_model import edge_seconds
from znnpy.planner.layer_options import Options, Place
from znnpy.planner.layout import Tensor, place
from znnpy.planner.memory import DeviceKind, Memory, StageMemory, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.pareto import (
    Front,
    Option,
    Way,
    cheapest,
    fastest,
    fastest_within,
    smallest,
    total_bytes,
    total_seconds,
)
from znnpy.planner.plan import waste
from znnpy.planner.stages import last_stage
from znnpy.planner.tilings import Candidate, Space, Span, candidate

MOST_PIECES = 10**6
DEAREST = 32.0  # the highest price of memory that is tried, over what memory costs: its logarithm to base 2
PRICES = 6  # number of prices of memory that are tried
LOOKS = 32  # bounds on a shape while its layers are gone through
LAYOUTS = 16  # of one shape, before what they lose is taken for granted
LOST_SECONDS = 480.0  # of a column, as predicted: what a run that is killed computes again, in ten minutes at most


@dataclass(frozen=True, slots=True)
class Found:
    """The best of one shape."""

    candidate: Candidate
    options: tuple[Option, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory
    edges: float  # seconds in which nothing is computed
    preparing: float  # seconds before the first step, in which memory is written to for the first time

    @property
    def seconds(self) -> float:
        """For the whole output."""
        return total_seconds(self.options) + self.edges + self.preparing

    @property
    def ways(self) -> Iterator[tuple[Span, Way]]:
        """All layers of a step, those in one together, each with the first and the last of its layers."""
        for (first, last), option in zip(self.candidate.space.spans, self.options, strict=True):
            if len(option.ways) == 1:
                yield (first, last), option.ways[0]
            else:
                yield from (((layer, layer), way) for layer, way in enumerate(option.ways, first))

    @property
    def column_seconds(self) -> float:
        """Of one whole column; of one patch where no column walks."""
        shape = self.candidate
        one = replace(shape.cover, size=shape.cover.grid)
        ahead = shape.space.ahead
        return sum(way.seconds * way.parts * one.steps(ahead[last]) for (_, last), way in self.ways)

    @property
    def waste(self) -> float:
        """Work done over the work that no border would need."""
        return waste(self.candidate.space.output, [(way.shape, way.seconds, way.runs) for _, way in self.ways])


@dataclass
class ShapeSearch:
    """What is asked for in one space, and what is known of the time there."""

    space: Space
    limits: Limits
    itemsize_in: int
    itemsize_out: int
    options: Options
    device: DeviceKind
    baseline: int
    context: int
    masks: bool
    splits: Sequence[tuple[int, ...]]
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        if self.space.walks:
            part = replace(self.space, network=self.space.part, stage=None)
            shapes = candidate(part, part.network.period).shapes
            apart = (i for i, (first, _) in enumerate(self.space.spans) if self.options.reads_carried(shapes[first]))
            self.space = replace(self.space, apart=frozenset(apart))
        self.bounds = Bounds(self.space)

    def may_fit(self, shape: Candidate) -> bool:
        """As far as its size alone tells; up to the first pooling's output every split has all of each tensor."""
        room = self.room(shape)
        return shape.undivided <= room and any(shape.split(at_once).largest <= room for at_once in self.splits)

    def at_best(self, shape: Candidate, paces: Mapping[int, float] = MappingProxyType({})) -> float:
        """The least seconds for the whole output whatever memory there is, and however images are split.

        paces  seconds per voxel of spans, where they are known
        """
        idle, thick, pieces = self.idle(shape), shape.patch[0], 1
        least = self.bounds.at_best(thick, shape.voxels, paces)
        while shape.column > thick and self.bounds.at_best(thick, shape.column_voxels, paces) > LOST_SECONDS:
            pieces = _more_pieces(pieces, least / len(shape.cover))
            shape = shape.cut(pieces)
            least = self.bounds.at_best(thick, shape.voxels, paces)
        return least + idle

    def least_within(self, shape: Candidate) -> float:
        """The least seconds for the whole output in the memory that there is, as far as is known; inf: nothing fits."""
        room, least = self.room(shape), inf
        ideal = self.idle(shape) + self.bounds.at_best(shape.patch[0], shape.voxels)
        for at_once in self.splits:
            split = shape.split(at_once)
            least = min(least, self._least(split, self.bounds.needs(split), room, least))
            if least <= ideal:
                break  # no split is faster
        return max(least, ideal)

    def _least(self, shape: Candidate, needs: list[Needs], room: int, enough: float = inf) -> float:
        """The least seconds for the whole output of one shape in `room` bytes, where its spans need at least so much.

        enough  a bound that is no less is as good as any
        """
        prepared = self.price * shape.largest
        idle = self.edges(shape) + prepared
        least = idle + least_seconds(needs, room, enough - idle)
        if prepared and least < enough:
            return max(least, self.edges(shape) + least_priced(needs, self.price))
        return least

    def best_split(self, shape: Candidate, below: float) -> Found | None:
        """The fastest way to split one shape; None unless one of them stays below `below` seconds for the output.

        Smaller parts only cost, but for the memory that they save: what the shape does not reach undivided in any
        memory, large layers first, no split does.
        """
        best, room = None, self.room(shape)
        whole: dict[int, Paces] = {}
        least: dict[int, float] = {}
        for number, index in enumerate(_largest_first(shape), 1):
            whole[index] = reached(shape, index, self._learnt(shape, index))
            least[index] = min((pace for pace, _, _ in whole[index]), default=inf)
            if self._looks(number) and self.at_best(shape, least) >= below:
                return None
        for at_once in self.splits:
            split = shape.split(at_once)
            if self._least(split, self.bounds.needs(split, whole), room, below) >= below:
                continue
            found = self._short_enough(split, below, whole)
            if found is not None:
                best, below = found, found.seconds
                ideal = total_seconds(fastest(self.fronts(found.candidate)))
                if not self.price and total_seconds(found.options) <= ideal:
                    break  # nothing was given up for memory: smaller parts only cost
        return best

    def _short_enough(self, shape: Candidate, below: float, whole: Reached) -> Found | None:
        """`best_of` one shape, with columns of at most LOST_SECONDS as far as they are of several steps."""
        found, pieces = self.best_of(shape, below, whole), 1
        while found is not None and found.column_seconds > LOST_SECONDS and shape.column > shape.patch[0]:
            pieces = _more_pieces(pieces, found.seconds / len(found.candidate.cover))
            shape = shape.cut(pieces)
            found = self.best_of(shape, below)
        return found

    def best_of(self, shape: Candidate, below: float, whole: Reached = NOTHING) -> Found | None:
        """The fastest primitives for one shape that fit; None unless below `below` seconds for the output.

        `whole` is what the same shape undivided takes. Large layers come first: one of them tells most of the shapes
        that cannot win.
        """
        room = self.room(shape)
        known: dict[int, Front] = {}
        needs = self.bounds.needs(shape, whole)
        for number, index in enumerate(_largest_first(shape), 1):
            options = known[index] = self._learnt(shape, index)
            needs[index] = needs_of(options)
            if not options or (self._looks(number) and self._least(shape, needs, room, below) >= below):
                return None
        return self._within_room(shape, [known[index] for index in range(len(known))], below)

    def _looks(self, number: int) -> bool:
        """After so many layers it is asked whether the shape may win: LOOKS times at most, and after the last one."""
        count = len(self.space.spans)
        return number % -(-count // LOOKS) == 0 or number == count

    def _learnt(self, shape: Candidate, span: int) -> Front:
        """Options of one span, which bounds learn from."""
        options = self.front(shape, span)
        self.bounds.learn(shape, span, options)
        return options

    def _within_room(self, shape: Candidate, fronts: list[Front], below: float) -> Found | None:
        """The fastest of these options that fit; None unless below `below` seconds for the output.

        What a layout loses between tensors is known when it is there: LAYOUTS of the fastest choices are laid out, and
        if none of them fits, others count as losing as much.
        """
        found: Found | None = None
        first = islice(self._leaner(shape, fronts, below), LAYOUTS)
        for choices in (first, self._leaner(shape, fronts, below, lossy=True)):
            for found in choices:
                if self.fits(found):  # what the layout loses may cost what others do not take
                    return found if not self.price or found.seconds < below else None
        if found is None:
            return None
        found = self.laid_out(shape, smallest(fronts))
        return found if self.fits(found) and found.seconds < below else None

    def _leaner(
        self, shape: Candidate, fronts: Sequence[Front], below: float, *, lossy: bool = False
    ) -> Iterator[Found]:
        """Choices below `below` seconds in turn, each the fastest of those that need fewer bytes than the one before.

        lossy  what the layout of one loses counts for all that come after it
        """
        room, most = self.room(shape), below - self.edges(shape)
        while all(fronts) and (options := fastest_within(fronts, room, most, self.price)) is not None:
            found = self.laid_out(shape, options)
            yield found
            over = found.memory.over(self.limits)
            most_pinned = max(option.pinned for option in options)
            if most_pinned and over[0]:  # the process has no room for so much
                fronts = [tuple(option for option in front if option.pinned < most_pinned) for front in fronts]
            elif lossy:
                room -= max(found.memory.last.arena - max(option.live for option in options), *over)
            else:
                room = total_bytes(options) - 1

    def front(self, shape: Candidate, span: int) -> Front:
        """Options of one span, whether they fit or not."""
        first, last = self.space.spans[span]
        return self.options.of(shape.shapes[first : last + 1], self.place(shape, span))

    def place(self, shape: Candidate, span: int) -> Place:
        """Where a span stands."""
        first, last = self.space.spans[span]
        return Place(
            under=shape.under[span],
            x=0 if shape.held[span] else shape.tensors[span],
            out=shape.tensors[span + 1],
            parts=shape.parts[first],
            steps=shape.steps[first : last + 1],
            walks=self.space.walks,
            joined=shape.joined(span),
        )

    def fronts(self, shape: Candidate) -> list[Front]:
        """Options of every span."""
        return [self.front(shape, index) for index in range(len(self.space.spans))]

    def laid_out(self, shape: Candidate, options: tuple[Option, ...]) -> Found:
        """With the arena as it will be."""
        steps = [(way.shape, way.footprint) for option in options for way in option.ways]
        needs = last_stage(steps, 0, shape.new[0], self.device)
        tensors, arena = place(needs.tensors)
        stage = replace(needs.memory, arena=arena)
        memory = replace(self.around(shape), stages=(stage,))
        prepared = stage.arena + stage.carries + stage.residents
        return Found(shape, options, tensors, memory, self.edges(shape), self.price * prepared)

    def least_memory(self, best: Found, most: float) -> Found:
        """Choose options for the shape of `best` that need less memory within `most` seconds; return `best` if none do.

        A higher price of memory gives leaner and slower choices. The highest price within `most` is searched for.
        """
        shape, fronts = best.candidate, self.fronts(best.candidate)
        low, high = 0.0, DEAREST
        for _ in range(PRICES):
            middle = (low + high) / 2
            found = self.laid_out(shape, cheapest(fronts, self.price * 2**middle))
            if found.seconds > most:
                high = middle
                continue
            low = middle
            if self.fits(found) and found.memory.held < best.memory.held:
                best = found
        return best

    @property
    def price(self) -> float:
        """Seconds before the first step for each byte that the layers keep; 0 on a GPU."""
        return 1 / self.options.rates.touching if self.device == "cpu" else 0.0

    def idle(self, shape: Candidate) -> float:
        """Seconds of a run in which nothing is computed, at the least, however images are split."""
        return self.edges(shape) + (self.price * shape.undivided if self.price else 0.0)

    def around(self, shape: Candidate) -> Memory:
        """What a run needs whatever the primitives are."""
        network, new = self.space.network, shape.new
        maps_in, maps_out = shape.images * network.input_channels, shape.images * network.output_channels
        reads, writes = shape.steps_of(shape.cover.margin), shape.steps_of(0)
        seen = network.patch_in(shape.patch) if self.masks else None
        staging = staging_bytes(*self._patch_bytes(shape), reads=reads, writes=writes) if self.device == "gpu" else 0
        return Memory(
            stages=(StageMemory(self.device),),
            baseline=self.baseline,
            reading=reading_bytes(maps_in, new, self.itemsize_in, steps=reads, seen=seen, device=self.device),
            writing=writing_bytes(maps_out, shape.patch, self.itemsize_out, steps=writes, device=self.device),
            staging=staging,
            context=self.context,
        )

    def _patch_bytes(self, shape: Candidate) -> tuple[int, int]:
        """Of what a step reads and of what it writes, as stored."""
        network = self.space.network
        raw_bytes = shape.images * network.input_channels * prod(shape.new) * self.itemsize_in
        return raw_bytes, shape.images * network.output_channels * prod(shape.patch) * self.itemsize_out

    def edges(self, shape: Candidate) -> float:
        """Seconds of a run in which nothing is computed."""
        return edge_seconds(self.device, sum(self._patch_bytes(shape)))

    @property
    def within(self) -> int:
        """The limit of where the layers run."""
        return self.limits.ram_bytes if self.device == "cpu" else self.limits.vram_bytes or 0

    def fits(self, found: Found) -> bool:
        return found.memory.over(self.limits) == (0, 0)

    def room(self, shape: Candidate) -> int:
        """Bytes for arena, weights, carried planes and allowance; -1 where all else is too much already."""
        around = self.around(shape)
        return self.within - around.held if around.over(self.limits) == (0, 0) else -1


def _largest_first(shape: Candidate) -> list[int]:
    """Spans, by the bytes of their input and output."""
    return sorted(range(len(shape.space.spans)), key=shape.moved, reverse=True)


def _more_pieces(pieces: int, column_seconds: float) -> int:
    """To cut columns into that take so long, cut into `pieces` so far."""
    return max(pieces + 1, int(min(column_seconds / LOST_SECONDS, MOST_PIECES)))
