"""The search in one space, patches or columns along one axis: the best shape, and what nearly was.

Shapes are gone through in the order of an optimistic bound on the time for the whole output, and those that cannot win
are skipped; `layer_search` finds the best primitives for a shape.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A: loop over input shapes, best primitive per layer within memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf, prod

from znnpy.planner.layer_options import LayerContext
from znnpy.planner.layer_search import LayerSearch, Solution
from znnpy.planner.memory import Memory
from znnpy.planner.pareto import fastest, smallest
from znnpy.planner.plan import RunnerUp
from znnpy.planner.tilings import Sizes, Tiling, all_sizes, log_spaced, sizes_between, tiling_of, with_size
from znnpy.shapes import Vec3

RUNNERS_UP = 3
TRIES = 2 * RUNNERS_UP  # shapes that are looked at for them
LEARNING_STEPS = 32  # times that layers of one thickness are learnt from: a part of all layers each time
LEANER_SHARE = 0.75  # of the memory of one plan: another that is as fast is looked for within it
LEANER_TRIES = 8  # shapes that are looked at for it
MAX_LEAST_LAYERS = 2**13  # number of layers, of all shapes together, that are looked at for the least memory
SIZES_AT_ONCE = 8  # sizes per axis that are combined at once; where an axis has no more, every combination is looked at

# The least seconds as far as is known, what breaks ties, whether the memory that there is was weighed, and the shape.
QueueEntry = tuple[float, int, int, bool, Tiling]


@dataclass
class TilingSearch(LayerSearch):
    """The same, and the shapes that were looked at so far."""

    patch: Vec3 | None  # this one only
    rejected: list[Tiling] = field(default_factory=list)  # shapes that are not the best
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # counts and sizes of patches that were looked at
    _across: Sequence[tuple[int, int]] = ()  # sizes of steps across the first axis, the widest first
    _widest: dict[int, Tiling] = field(default_factory=dict)  # steps that may fit, by thickness

    def run(self) -> Solution | None:
        """The best shape; None when nothing fits.

        First over a few sizes per axis in all combinations, then again and again over a few more around the best, and
        over all sizes of one axis with those of the others as they are there.
        In networks that treat all axes alike patches that are turned to other axes cost nearly the same: one of them is
        looked at, and of the best all are.
        """
        sizes = self._sizes(self.limit - (self.baseline if self.device == "cpu" else self.context))
        best = self._among(sizes) if all(sizes) else None
        if best is None:  # what bounds and estimates leave out may still fit
            least = self.least()
            return least if isinstance(least, Solution) and self.fits(least) else None
        patch = best.tiling.patch
        z, y, x = ([size for size in along if size in patch] for along in sizes)
        turned = [shape for shape in self._shapes((z, y, x)) if shape.patch != patch]
        return self._through([shape for shape in turned if self._key(shape.patch) == self._key(patch)], best)

    def undivided(self) -> TilingSearch:
        """The same where all images go through a layer before any goes through the next."""
        search = replace(self, splits=self.splits[:1], rejected=[], _seen=set(), _widest={})
        search.bounds = self.bounds  # what is known of the time holds there too
        return search

    def tiling(self, patch: Vec3) -> Tiling:
        return tiling_of(self.space, patch)

    def _shapes(self, sizes: Sizes) -> Iterator[Tiling]:
        """All combinations of sizes."""
        return map(self.tiling, product(*sizes))

    def _among(self, sizes: Sizes) -> Solution | None:
        """The best shape of these sizes."""
        seen = _few(sizes)
        self._across = sorted(product(seen[1], seen[2]), key=prod, reverse=True)
        best = self._through(self._new(self._shapes(seen)), None)
        while best is not None:
            patch = best.tiling.patch
            seen = _merged(seen, ([patch[0]], [patch[1]], [patch[2]]))
            if (beside := self._beside(sizes, seen, best)) is not None:
                around, seen = beside
                best = self._through(self._new(self._shapes(around)), best)
            elif lines := self._new(self._lines(sizes, patch)):
                best = self._through(lines, best)
            else:
                break
        return best

    def _lines(self, sizes: Sizes, patch: Vec3) -> Iterator[Tiling]:
        """Shapes that differ from this one along one axis."""
        for axis, along in enumerate(sizes):
            yield from (self.tiling(with_size(patch, axis, size)) for size in along)

    def _beside(self, sizes: Sizes, seen: Sizes, best: Solution) -> tuple[Sizes, Sizes] | None:
        """A few more sizes around the best shape, and all that were looked at then; None: there are no more."""
        near = [sizes_between(*axis) for axis in zip(sizes, seen, best.tiling.patch, strict=True)]
        more = _few((near[0][1], near[1][1], near[2][1]))
        return (_merged((near[0][0], near[1][0], near[2][0]), more), _merged(seen, more)) if any(more) else None

    def _key(self, patch: Vec3) -> tuple[int, ...]:
        """Equal for patches that differ in the order of axes which make no difference to speak of."""
        fixed = 1 if self.space.streams else 0
        return (*patch[:fixed], *sorted(patch[fixed:])) if self.space.isotropic else patch

    def _new(self, shapes: Iterable[Tiling]) -> list[Tiling]:
        """Those that were not looked at, nor turned to other axes where that makes no difference to speak of."""
        new = []
        for shape in shapes:
            key = (len(shape.cover), *self._key(shape.patch))
            if key not in self._seen:
                self._seen.add(key)
                new.append(shape)
        return new

    def _through(self, shapes: Iterable[Tiling], best: Solution | None) -> Solution | None:
        """The best of `best` and of all shapes."""
        queue = self._queue(shapes)
        while shape := self._next(queue, best.seconds if best else inf):
            found = self.best_split(shape, best.seconds if best else inf)
            if found is None:
                self.rejected.append(shape)
            else:
                self.rejected += [best.tiling] if best else []
                best = found
        return best

    def _queue(self, shapes: Iterable[Tiling]) -> list[QueueEntry]:
        """Shapes in the order of the least seconds that they take; the larger ones first, of equal ones."""
        queue = [(self.lower_bound(shape), -prod(shape.patch), i, False, shape) for i, shape in enumerate(shapes)]
        heapify(queue)
        return queue

    def _next(self, queue: list[QueueEntry], below: float) -> Tiling | None:
        """The shape that may be the fastest; None where none may take less than `below` seconds.

        What is learnt of one, its time in the memory that there is, or of steps as thick, sends it back in the queue.
        """
        while queue:
            bound, volume, index, weighed, shape = heappop(queue)
            bound = max(bound if weighed else 0.0, self.lower_bound(shape))
            if bound < below and queue and bound > queue[0][0]:
                heappush(queue, (bound, volume, index, weighed, shape))
            elif bound < below and weighed:
                return shape
            elif bound < below and self.may_fit(shape):
                learning = self._learn(shape)
                bound = self.lower_bound(shape) if learning else max(bound, self.bound_within_budget(shape))
                heappush(queue, (bound, volume, index, not learning, shape))
            else:
                self.rejected.append(shape)
        return None

    def _learn(self, shape: Tiling) -> bool:
        """Learn bounds for one more layer, or a part of many, in steps this thick; False if all bounds are known.

        A narrower step is slower per voxel, so the widest one that may fit bounds the others.
        """
        thick = shape.patch[0]
        spans = self.bounds.unknown(thick)
        if not spans:
            return False
        if thick not in self._widest:
            steps = (self.tiling((thick, y, x)) for y, x in self._across)
            self._widest[thick] = next(filter(self.may_fit, steps), shape)
        widest = self._widest[thick]
        at_once = -(
            -len(self.space.groups) // LEARNING_STEPS
        )  # else long networks would be gone through once for each layer
        for span in sorted(spans, key=widest.io_bytes, reverse=True)[:at_once]:
            self.bounds.learn(widest, span, self.front(widest, span))
        return True

    def _sizes(self, room: int | None) -> Sizes:
        """Patch sizes to look at along each axis."""
        if self.patch is None:
            return all_sizes(self.space, room)
        z, y, x = self.patch
        return [z], [y], [x]

    def _need(self, memory: Memory, more: int = 0) -> tuple[int, int]:
        """Bytes above the limits, and bytes held, if its layers took `more` bytes more: the least first."""
        grown = replace(memory, stages=(replace(memory.last, arena=memory.last.arena + more),))
        return sum(grown.excess(self.limits)), grown.device_bytes

    def least(self) -> Solution | int | None:
        """Return the shape with the smallest need of some small ones; or the index of a layer that nobody runs."""
        least: Solution | None = None
        few = self._shapes(_few(self._sizes(None)))
        shapes = sorted(
            (c.split(at_once) for c in few for at_once in self.splits),
            key=lambda shape: self._need(self.fixed_memory(shape), shape.largest),
        )
        for shape in shapes[: MAX_LEAST_LAYERS // len(self.space.groups)]:
            if least is not None and self._need(self.fixed_memory(shape), shape.largest) >= self._need(least.memory):
                continue
            fronts = self.fronts(shape)
            if not all(fronts):
                first, last = self.space.groups[next(index for index, options in enumerate(fronts) if not options)]
                return next(
                    layer
                    for layer in range(first, last + 1)
                    if not self.options.front(shape.shapes[layer : layer + 1], LayerContext())
                )
            found = self.laid_out(shape, smallest(fronts))
            if least is None or self._need(found.memory) < self._need(least.memory):
                least = found
        return least

    def leaner(self, best: Solution, most: float) -> Solution:
        """Find a shape that takes at most `most` seconds and needs less memory, among those that were looked at.

        Each try allows LEANER of the memory that the shape before needed, so the result may not be the very least.
        """
        shapes = {shape.patch: shape for shape in self.rejected}
        shapes[best.tiling.patch] = self.tiling(best.tiling.patch)
        found: Solution | None = best
        while found is not None:
            best = self.least_memory(found, most)
            found = self._within(int(LEANER_SHARE * best.memory.device_bytes)).first(shapes.values(), most)
        return best

    def _within(self, ram_bytes: int) -> TilingSearch:
        """Return this search with another limit of memory; the bounds on time that it knows are kept."""
        search = replace(self, limits=replace(self.limits, ram_bytes=ram_bytes), rejected=[], _seen=set(), _widest={})
        search.bounds = self.bounds
        return search

    def first(self, shapes: Iterable[Tiling], below: float) -> Solution | None:
        """The first of these shapes that fits and takes less than `below` seconds; None after LEANER_TRIES of them."""
        queue = self._queue(shapes)
        for _ in range(LEANER_TRIES):
            shape = self._next(queue, below)
            if shape is None:
                return None
            if (found := self.best_split(shape, below)) is not None:
                return found
        return None

    def runner_up(self, found: Solution, over: tuple[int, int] = (0, 0)) -> RunnerUp:
        shape = found.tiling
        return RunnerUp(
            patch_out=shape.patch_out,
            axis=self.space.axis,
            column_planes=shape.column_planes,
            sub_batches=tuple(way.sub_batches for _, way in found.layer_runs),
            voxels_per_second=prod(self.space.output) / found.seconds,
            waste=found.waste,
            over_bytes=over[0],
            over_vram_bytes=over[1],
        )

    def slower(self, best: Solution, most: int) -> list[RunnerUp]:
        """Of the shapes that look fastest behind the best, turned to other axes or not, some that fit."""
        shapes = {self._key(shape.patch): shape for shape in self.rejected}
        shapes.pop(self._key(best.tiling.patch), None)
        queue, found = self._queue(shapes.values()), list[Solution]()
        for _ in range(TRIES):
            shape = self._next(queue, inf) if len(found) < most else None
            other = self.best_split(shape, inf) if shape else None
            found += [other] if other else []
        return [self.runner_up(other) for other in sorted(found, key=lambda other: other.seconds)]

    def next_larger(self, seconds: float) -> list[RunnerUp]:
        """The shape nearest to the limit that would be faster by 5 % or more, run the fastest way."""
        faster = []
        for lost in (shape for shape in self.rejected if self.lower_bound(shape) < 0.95 * seconds):
            guesses = [(self.bounds.guess(shape), shape) for shape in map(lost.split, self.splits)]
            most = 0.95 * seconds - self.io_seconds(lost)
            needs = [(need + self.fixed_memory(s).device_bytes, s) for (ideal, need), s in guesses if ideal < most]
            faster.extend(sorted(needs, key=lambda need: need[0])[:1])
        for _, shape in sorted(faster, key=lambda need: need[0])[:RUNNERS_UP]:
            fronts = self.fronts(shape)
            if all(fronts):
                found = self.laid_out(shape, fastest(fronts))
                over = found.memory.excess(self.limits)
                if found.seconds < 0.95 * seconds and over != (0, 0):
                    return [self.runner_up(found, over)]
        return []


def _merged(some: Sizes, others: Sizes) -> Sizes:
    z, y, x = (sorted({*a, *b}, reverse=True) for a, b in zip(some, others, strict=True))
    return z, y, x


def _few(sizes: Sizes) -> Sizes:
    z, y, x = (log_spaced(along, SIZES_AT_ONCE) for along in sizes)
    return z, y, x
