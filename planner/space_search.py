"""The search in one space, patches or columns along one axis: the best shapes, and what nearly was.

For a fixed shape the best primitives are found exactly (`trade`), for every way to run images in parts; shapes are gone
through in the order of an optimistic bound on the time for the whole output, and those that cannot win are skipped.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A: loop over input shapes, best primitive per layer within memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

from znnpy.machine import Limits
from znnpy.planner.bounds import Bounds
from znnpy.planner.candidates import (
    Candidate,
    Sizes,
    Space,
    Span,
    all_sizes,
    between,
    candidate,
    candidates,
    thinned,
)
from znnpy.planner.cost import edge_seconds
from znnpy.planner.layout import Tensor, carried_bytes, chain, place
from znnpy.planner.memory import DeviceKind, Memory, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.options import Options, Place
from znnpy.planner.plan import RunnerUp, patch_in, waste
from znnpy.planner.trade import Front, Option, Way, fastest, fastest_within, smallest, total_seconds
from znnpy.shapes import Vec3

NO_LIMIT = 2**62  # bytes
LOST_SECONDS = 480.0  # of a column, as predicted: what a run that is killed computes again, in ten minutes at most
RUNNERS_UP = 3
FEW = 8  # sizes per axis that are combined at once; where an axis has no more, every combination is looked at


@dataclass(frozen=True, slots=True)
class Found:
    """The best of one shape."""

    candidate: Candidate
    options: tuple[Option, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory
    edges: float  # seconds in which nothing is computed

    @property
    def seconds(self) -> float:
        """For the whole output."""
        return total_seconds(self.options) + self.edges

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
class SpaceSearch:
    """What is asked for, and what was worked out so far, in one space."""

    space: Space
    limits: Limits
    itemsize_in: int
    itemsize_out: int
    patch: Vec3 | None
    options: Options
    device: DeviceKind
    baseline: int
    context: int
    masks: bool
    splits: Sequence[tuple[int, ...]]
    lost: list[Candidate] = field(default_factory=list)  # shapes that do not fit, or not with their fastest options
    _bounds: Bounds = field(init=False)
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # counts and sizes of patches that were looked at

    def __post_init__(self) -> None:
        if self.space.walks:
            shapes = candidate(self.space, self.space.network.period).shapes
            apart = (i for i, (first, _) in enumerate(self.space.spans) if self.options.reads_carried(shapes[first]))
            self.space = replace(self.space, apart=frozenset(apart))
        self._bounds = Bounds(self.space)

    def run(self) -> list[Found]:
        """The best shapes, best first; none when nothing fits.

        First over a few sizes per axis in all combinations, then again and again over a few more around the best.
        In networks that treat all axes alike patches that are turned to other axes cost nearly the same: one of them is
        looked at, and of the best all are.
        """
        sizes = self._sizes(self._within - (self.baseline if self.device == "cpu" else self.context))
        best = self._among(sizes) if all(sizes) else []
        if not best:  # what bounds and estimates leave out may still fit
            least = self.least()
            return [least] if isinstance(least, Found) and self._fits(least) else []
        patch = best[0].candidate.patch
        z, y, x = ([size for size in along if size in patch] for along in sizes)
        turned = [shape for shape in candidates(self.space, (z, y, x)) if shape.patch != patch]
        return self._through([shape for shape in turned if self._key(shape.patch) == self._key(patch)], best)

    def _among(self, sizes: Sizes) -> list[Found]:
        """The best shapes of these sizes, best first."""
        seen = _few(sizes)
        first = list(candidates(self.space, seen))
        for thick in seen[0]:
            largest = max((shape for shape in first if shape.patch[0] == thick), key=lambda shape: prod(shape.patch))
            for index, options in enumerate(self._fronts(largest)):
                self._bounds.learn(largest, index, options)
        best = self._through(self._new(first), [])
        beside = self._beside(sizes, seen, best)
        while beside is not None:
            around, seen = beside
            best = self._through(self._new(candidates(self.space, around)), best)
            beside = self._beside(sizes, seen, best)
        return best

    def _beside(self, sizes: Sizes, seen: Sizes, best: Sequence[Found]) -> tuple[Sizes, Sizes] | None:
        """A few more sizes around the best shape, and all that were looked at then; None: there are no more."""
        if not best:
            return None
        near = [between(*axis) for axis in zip(sizes, seen, best[0].candidate.patch, strict=True)]
        more = _few((near[0][1], near[1][1], near[2][1]))
        return (_merged((near[0][0], near[1][0], near[2][0]), more), _merged(seen, more)) if any(more) else None

    def _key(self, patch: Vec3) -> tuple[int, ...]:
        """Equal for patches that differ in the order of axes which make no difference to speak of."""
        fixed = 1 if self.space.walks else 0
        return (*patch[:fixed], *sorted(patch[fixed:])) if self.space.alike else patch

    def _new(self, shapes: Iterable[Candidate]) -> list[Candidate]:
        """Those that were not looked at, nor turned to other axes where that makes no difference to speak of."""
        new = []
        for shape in shapes:
            key = (len(shape.cover), *self._key(shape.patch))
            if key not in self._seen:
                self._seen.add(key)
                new.append(shape)
        return new

    def _sizes(self, room: int | None) -> Sizes:
        """Patch sizes to look at along each axis."""
        if self.patch is None:
            return all_sizes(self.space, room)
        z, y, x = self.patch
        return [z], [y], [x]

    def _through(self, shapes: Sequence[Candidate], best: list[Found]) -> list[Found]:
        """The best of `best` and of all shapes, best first."""
        for shape in sorted(shapes, key=self._at_best):
            least = best[0].seconds if best else inf
            below = best[RUNNERS_UP].seconds if len(best) > RUNNERS_UP else inf
            found = self._best_split(shape, least, below) if self._at_best(shape) < least else None
            if found is None:
                self.lost.append(shape)
            else:
                best = self._distinct(sorted([*best, found], key=lambda found: (found.seconds, found.memory.held)))
                best = best[: RUNNERS_UP + 1]
        return best

    def _at_best(self, shape: Candidate) -> float:
        """The least seconds for the whole output whatever memory there is, and however images are split."""
        return self._bounds.seconds(shape, NO_LIMIT, {}) + self._edges(shape)

    def _distinct(self, ranked: Sequence[Found]) -> list[Found]:
        """The first of those that are one patch turned to other axes."""
        by_sides: dict[tuple[int, ...], Found] = {}
        for found in ranked:
            by_sides.setdefault(self._key(found.candidate.patch), found)
        return list(by_sides.values())

    def _best_split(self, shape: Candidate, best: float, below: float) -> Found | None:
        """The fastest way to split one shape; None unless one of them stays below `below` seconds for the output.

        `best` is what another shape reaches: one that cannot is not worked out.
        """
        fastest_found = None
        for at_once in self.splits:
            split = shape.split(at_once)
            if self._bounds.seconds(split, self._room(split), {}) + self._edges(split) >= min(best, below):
                continue
            found = self._short_enough(split, below)
            if found is not None:
                fastest_found, below = found, found.seconds
                best = min(best, below)
                if total_seconds(found.options) <= total_seconds(fastest(self._fronts(found.candidate))):
                    break  # nothing was given up for memory: smaller parts only cost
        return fastest_found

    def _short_enough(self, shape: Candidate, below: float) -> Found | None:
        """The best of one shape, with columns of at most LOST_SECONDS as far as they are of several steps."""
        found, pieces = self._best_of(shape, below), 1
        while found is not None and found.column_seconds > LOST_SECONDS and shape.column > shape.patch[0]:
            pieces = max(pieces + 1, int(found.seconds / len(found.candidate.cover) / LOST_SECONDS))
            shape = shape.cut(pieces)
            found = self._best_of(shape, below)
        return found

    def around(self, shape: Candidate) -> Memory:
        """What a run needs whatever the primitives are."""
        network = self.space.network
        new = patch_in(network, shape.patch, 0, walks=self.space.walks)
        maps_in, maps_out = network.input_channels, network.output_channels
        reads, writes = shape.cover.steps(shape.cover.margin), shape.cover.steps(0)
        seen = network.patch_in(shape.patch) if self.masks else None
        staging = staging_bytes(*self._patch_bytes(shape), reads=reads, writes=writes) if self.device == "gpu" else 0
        return Memory(
            device=self.device,
            baseline=self.baseline,
            arena=0,
            carries=0,
            residents=0,
            reading=reading_bytes(maps_in, new, self.itemsize_in, steps=reads, seen=seen, device=self.device),
            writing=writing_bytes(maps_out, shape.patch, self.itemsize_out, steps=writes, device=self.device),
            allowance=0,
            staging=staging,
            context=self.context,
        )

    def _patch_bytes(self, shape: Candidate) -> tuple[int, int]:
        """Of what a step reads and of what it writes, as stored."""
        network = self.space.network
        new = patch_in(network, shape.patch, 0, walks=self.space.walks)
        raw_bytes = network.input_channels * prod(new) * self.itemsize_in
        return raw_bytes, network.output_channels * prod(shape.patch) * self.itemsize_out

    def _edges(self, shape: Candidate) -> float:
        """Seconds of a run in which nothing is computed."""
        return edge_seconds(self.device, sum(self._patch_bytes(shape)))

    @property
    def _within(self) -> int:
        """The limit of where the layers run."""
        return self.limits.ram_bytes if self.device == "cpu" else self.limits.vram_bytes or 0

    def _fits(self, found: Found) -> bool:
        return found.memory.over(self.limits) == (0, 0)

    def _need(self, memory: Memory, more: int = 0) -> tuple[int, int]:
        """Bytes above the limits, and bytes held, if its layers took `more` bytes more: the least first."""
        grown = replace(memory, arena=memory.arena + more)
        return sum(grown.over(self.limits)), grown.held

    def _room(self, shape: Candidate) -> int:
        """Bytes for arena, weights, carried planes and allowance; -1 where all else is too much already."""
        around = self.around(shape)
        return self._within - around.held if around.over(self.limits) == (0, 0) else -1

    def _best_of(self, shape: Candidate, below: float) -> Found | None:
        """The fastest primitives for one shape that fit; None unless below `below` seconds for the output."""
        edges = self._edges(shape)
        fronts = self._promising_fronts(shape, below - edges)
        if fronts is None:
            return None
        room, below = self._room(shape), below - edges
        options = fastest_within(fronts, room, below)
        if options is None:
            return None
        while options is not None:
            found = self._laid_out(shape, options)
            if self._fits(found):
                return found
            if found.memory.pinned and found.memory.over(self.limits)[0]:  # the process has no room for any
                fronts = [tuple(option for option in options if not option.pinned) for options in fronts]
                options = fastest_within(fronts, room, below) if all(fronts) else None
                if options is None:
                    return None
                continue
            lost = found.memory.arena - max(option.live for option in options)  # by the layout
            room -= max(lost, *found.memory.over(self.limits))
            options = fastest_within(fronts, room, below)
        found = self._laid_out(shape, smallest(fronts))
        return found if self._fits(found) and found.seconds < below + edges else None

    def _promising_fronts(self, shape: Candidate, below: float) -> list[Front] | None:
        """Options of every span; None as soon as it is plain that they do not fit, or not below `below` seconds.

        Large layers come first: one of them tells most of the shapes that cannot win.
        """
        known: dict[int, Front] = {}
        for index in sorted(range(len(self.space.spans)), key=lambda index: -shape.moved(index)):
            known[index] = self._front(shape, index)
            if not known[index]:
                return None
            self._bounds.learn(shape, index, known[index])
            if self._bounds.seconds(shape, self._room(shape), known) >= below:
                return None
        return [known[index] for index in range(len(self.space.spans))]

    def _front(self, shape: Candidate, span: int) -> Front:
        """Options of one span, whether they fit or not."""
        first, last = self.space.spans[span]
        place = Place(
            under=shape.under[span],
            x=0 if shape.held[span] else shape.tensors[span],
            out=shape.tensors[span + 1],
            parts=shape.parts[first],
            steps=shape.steps[first : last + 1],
            walks=self.space.walks,
            joined=shape.joined(span),
        )
        return self.options.of(shape.shapes[first : last + 1], place)

    def _fronts(self, shape: Candidate) -> list[Front]:
        """Options of every span."""
        return [self._front(shape, index) for index in range(len(self.space.spans))]

    def _laid_out(self, shape: Candidate, options: tuple[Option, ...]) -> Found:
        """With the arena as it will be."""
        steps = [(way.shape, way.footprint) for option in options for way in option.ways]
        new = patch_in(self.space.network, shape.patch, 0, walks=self.space.walks)[0]
        tensors, arena = place(chain(steps, new))
        memory = replace(
            self.around(shape),
            arena=arena,
            carries=carried_bytes([shape for shape, _ in steps], new),
            residents=sum(footprint.resident for _, footprint in steps),
            pinned=sum(footprint.host for _, footprint in steps),
            allowance=max(option.allowance for option in options),
        )
        return Found(shape, options, tensors, memory, self._edges(shape))

    def least(self) -> Found | int | None:
        """The shape with the smallest need there is; or the index of a layer that nobody runs."""
        least: Found | None = None
        few = candidates(self.space, _few(self._sizes(None)))
        for shape in sorted(
            (c.split(at_once) for c in few for at_once in self.splits), key=lambda shape: shape.largest
        ):
            if least is not None and self._need(self.around(shape), shape.largest) >= self._need(least.memory):
                continue
            fronts = self._fronts(shape)
            if not all(fronts):
                first, last = self.space.spans[next(index for index, options in enumerate(fronts) if not options)]
                return next(
                    layer
                    for layer in range(first, last + 1)
                    if not self.options.of(shape.shapes[layer : layer + 1], Place())
                )
            found = self._laid_out(shape, smallest(fronts))
            if least is None or self._need(found.memory) < self._need(least.memory):
                least = found
        return least

    def runner_up(self, found: Found, over: tuple[int, int] = (0, 0)) -> RunnerUp:
        shape = found.candidate
        return RunnerUp(
            patch_out=shape.patch_out,
            axis=self.space.axis,
            column=shape.column,
            parts=tuple(way.parts for _, way in found.ways),
            voxels_per_second=prod(self.space.output) / found.seconds,
            waste=found.waste,
            over_bytes=over[0],
            over_vram_bytes=over[1],
        )

    def next_larger(self, seconds: float) -> list[RunnerUp]:
        """The shape nearest to the limit that would be faster by 5 % or more, run the fastest way."""
        faster = []
        for lost in self.lost:
            guesses = [(self._bounds.fastest(shape), shape) for shape in map(lost.split, self.splits)]
            most = 0.95 * seconds - self._edges(lost)
            needs = [(need + self.around(s).held, s) for (ideal, need), s in guesses if ideal < most]
            faster.extend(sorted(needs, key=lambda need: need[0])[:1])
        for _, shape in sorted(faster, key=lambda need: need[0])[:RUNNERS_UP]:
            fronts = self._fronts(shape)
            if all(fronts):
                found = self._laid_out(shape, fastest(fronts))
                over = found.memory.over(self.limits)
                if found.seconds < 0.95 * seconds and over != (0, 0):
                    return [self.runner_up(found, over)]
        return []


def _merged(some: Sizes, others: Sizes) -> Sizes:
    z, y, x = (sorted({*a, *b}, reverse=True) for a, b in zip(some, others, strict=True))
    return z, y, x


def _few(sizes: Sizes) -> Sizes:
    z, y, x = (thinned(along, FEW) for along in sizes)
    return z, y, x
