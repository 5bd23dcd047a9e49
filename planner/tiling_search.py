"""Search of one space, patches or columns along one axis, for the best tiling and its runners-up.

This is branch and bound: tilings are taken in the order of an optimistic bound on the time for the whole output, and
those that cannot win are skipped. `layer_search` finds the best primitives for a tiling.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A: loop over input shapes, best primitive per layer within memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice, product
from math import inf, prod

from znnpy.patches import with_size
from znnpy.planner.layer_options import LayerContext
from znnpy.planner.layer_search import LayerSearch, Solution
from znnpy.planner.memory import Memory
from znnpy.planner.pareto import fastest, smallest
from znnpy.planner.plan import waste
from znnpy.planner.request import PlanRequest
from znnpy.planner.run_plan import RunnerUp
from znnpy.planner.tilings import Sizes, Tiling, all_sizes, log_spaced, sizes_between, tiling_of
from znnpy.shapes import Vec3

RUNNERS_UP = 3
TRIES = 2 * RUNNERS_UP  # tilings that are tried for them
LEARNING_STEPS = 32  # times that bounds learn from steps of one thickness, a part of the layers each time
SMALLER_SHARE = 0.75  # share of a plan's memory within which another as fast is searched
SMALLER_TRIES = 8  # tilings that are tried for it
MAX_LEAST_LAYERS = 2**13  # layers, of all tilings together, that are tried for the least memory
SIZES_AT_ONCE = 8  # sizes per axis that are combined at once; axes with no more sizes are searched fully

# Lower bound on the seconds, two tie breakers, whether the bound considers memory, and the tiling.
QueueEntry = tuple[float, int, int, bool, Tiling]


@dataclass
class TilingSearch(LayerSearch):
    """The search of one space, with the tilings that were tried so far."""

    patch: Vec3 | None  # the only patch that is tried, if any
    rejected: list[Tiling] = field(default_factory=list)  # tilings that are not the best
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # counts and sizes of patches that were tried
    _across: Sequence[tuple[int, int]] = ()  # sizes of steps across the first axis, the widest first
    _widest: dict[int, Tiling] = field(default_factory=dict)  # widest steps that may fit, by thickness

    def run(self) -> Solution | None:
        """Find the best tiling; None if nothing fits.

        The search tries a few sizes per axis in all combinations, then repeatedly a few more around the best, and all
        sizes of one axis with the best's sizes of the others. In networks that treat all axes alike, patches with
        permuted axes cost nearly the same: one of them is tried, but for the best all are.
        """
        taken = self.request.baseline if self.device == "cpu" else self.request.target.cuda_bytes
        sizes = self._sizes(self.limit - taken)
        best = self._among(sizes) if all(sizes) else None
        if best is None:  # a tiling that bounds and estimates exclude may still fit
            least = self.least()
            return least if isinstance(least, Solution) and self.fits(least) else None
        patch = best.tiling.patch
        z, y, x = ([size for size in along if size in patch] for along in sizes)
        turned = [shape for shape in self._shapes((z, y, x)) if shape.patch != patch]
        return self._through([shape for shape in turned if self._key(shape.patch) == self._key(patch)], best)

    def undivided(self) -> TilingSearch:
        """Return this search without sub-batches: all images go through a layer before any goes through the next."""
        return self._again(self.request, self.splits[:1])

    def _again(self, request: PlanRequest, splits: Sequence[tuple[int, ...]]) -> TilingSearch:
        """Return this search for another request, or with other splits; it keeps the bounds on time, which hold too."""
        search = replace(self, request=request, splits=splits, rejected=[], _seen=set(), _widest={})
        search.bounds = self.bounds
        return search

    def tiling(self, patch: Vec3) -> Tiling:
        return tiling_of(self.space, patch)

    def _shapes(self, sizes: Sizes) -> Iterator[Tiling]:
        """Yield the tilings of all combinations of sizes."""
        return map(self.tiling, product(*sizes))

    def _among(self, sizes: Sizes) -> Solution | None:
        """Find the best tiling of these sizes."""
        seen = _few(sizes)
        self._across = sorted(product(seen[1], seen[2]), key=prod, reverse=True)
        best = self._through(self._new(self._shapes(seen)), None)
        while best is not None:
            patch = best.tiling.patch
            seen = _merged(seen, ([patch[0]], [patch[1]], [patch[2]]))
            if (found := self._next_sizes(sizes, seen, best)) is not None:
                around, seen = found
                best = self._through(self._new(self._shapes(around)), best)
            elif lines := self._new(self._lines(sizes, patch)):
                best = self._through(lines, best)
            else:
                break
        return best

    def _lines(self, sizes: Sizes, patch: Vec3) -> Iterator[Tiling]:
        """Yield the tilings that differ from a patch along one axis."""
        for axis, along in enumerate(sizes):
            yield from (self.tiling(with_size(patch, axis, size)) for size in along)

    def _next_sizes(self, sizes: Sizes, seen: Sizes, best: Solution) -> tuple[Sizes, Sizes] | None:
        """Return a few more sizes around the best tiling, and all sizes tried after them; None: there are no more."""
        near = [sizes_between(*axis) for axis in zip(sizes, seen, best.tiling.patch, strict=True)]
        more = _few((near[0][1], near[1][1], near[2][1]))
        return (_merged((near[0][0], near[1][0], near[2][0]), more), _merged(seen, more)) if any(more) else None

    def _key(self, patch: Vec3) -> tuple[int, ...]:
        """Return a key that is equal for patches that differ only in the order of equivalent axes."""
        fixed = 1 if self.space.streams else 0
        return (*patch[:fixed], *sorted(patch[fixed:])) if self.space.isotropic else patch

    def _new(self, shapes: Iterable[Tiling]) -> list[Tiling]:
        """Return the tilings that were not tried, not even with equivalent axes permuted."""
        new = []
        for shape in shapes:
            key = (len(shape.cover), *self._key(shape.patch))
            if key not in self._seen:
                self._seen.add(key)
                new.append(shape)
        return new

    def _through(self, shapes: Iterable[Tiling], best: Solution | None) -> Solution | None:
        """Return the best of `best` and of all these tilings."""
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
        """Return a heap of tilings by their lower bound on the seconds; of equal ones the larger comes first."""
        queue = [(self.lower_bound(shape), -prod(shape.patch), i, False, shape) for i, shape in enumerate(shapes)]
        heapify(queue)
        return queue

    def _next(self, queue: list[QueueEntry], below: float) -> Tiling | None:
        """Pop the tiling that may be the fastest; None if none may take less than `below` seconds.

        A tiling whose bound rises, by its memory or by steps as thick, goes back into the queue.
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
        at_once = -(-len(self.space.groups) // LEARNING_STEPS)  # else long networks take one pass for each layer
        for group in sorted(spans, key=widest.io_bytes, reverse=True)[:at_once]:
            self.bounds.learn(widest, group, self.front(widest, group))
        return True

    def _sizes(self, budget: int | None) -> Sizes:
        """Return the patch sizes to try along each axis."""
        if self.patch is None:
            return all_sizes(self.space, budget)
        z, y, x = self.patch
        return [z], [y], [x]

    def need(self, memory: Memory, more: int = 0) -> tuple[int, int]:
        """Return the bytes above the limits and the bytes in all, if the layers took `more` bytes more."""
        grown = replace(memory, stages=(replace(memory.last, arena=memory.last.arena + more),))
        return sum(grown.excess(self.limits)), grown.device_bytes

    def least(self) -> Solution | int | None:
        """Return the smallest need of some small tilings; or the index of a layer that no primitive runs."""
        least: Solution | None = None
        few = self._shapes(_few(self._sizes(None)))
        shapes = sorted(
            (c.split(at_once) for c in few for at_once in self.splits),
            key=lambda shape: self.need(self.fixed_memory(shape), shape.largest),
        )
        for shape in shapes[: MAX_LEAST_LAYERS // len(self.space.groups)]:
            if least is not None and self.need(self.fixed_memory(shape), shape.largest) >= self.need(least.memory):
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
            if least is None or self.need(found.memory) < self.need(least.memory):
                least = found
        return least

    def smaller(self, best: Solution, most: float) -> Solution:
        """Find a tiling that takes at most `most` seconds and needs less memory, among those that were tried."""
        shapes = {shape.patch: shape for shape in self.rejected}
        shapes[best.tiling.patch] = self.tiling(best.tiling.patch)
        found: Solution | None = best
        while found is not None:
            best = self.least_memory(found, most)
            limits = replace(self.limits, ram_bytes=int(SMALLER_SHARE * best.memory.device_bytes))
            within = self._again(replace(self.request, limits=limits), self.splits)
            found = next(within.solutions(shapes.values(), most, SMALLER_TRIES), None)
        return best

    def solutions(self, shapes: Iterable[Tiling], below: float, tries: int) -> Iterator[Solution]:
        """Yield those of these tilings that fit and take less than `below` seconds; at most `tries` are tried."""
        queue = self._queue(shapes)
        for _ in range(tries):
            if (shape := self._next(queue, below)) is None:
                return
            if (found := self.best_split(shape, below)) is not None:
                yield found

    def runner_up(self, found: Solution, over: tuple[int, int] = (0, 0)) -> RunnerUp:
        shape = found.tiling
        return RunnerUp(
            patch_out=shape.patch_out,
            axis=self.space.axis,
            column_planes=shape.column_planes,
            sub_batches=tuple(way.sub_batches for _, way in found.layer_runs),
            voxels_per_second=prod(self.space.output) / found.seconds,
            waste=waste(self.space.output, [(way.shape, way.seconds, way.executions) for _, way in found.layer_runs]),
            over_bytes=over[0],
            over_vram_bytes=over[1],
        )

    def slower(self, best: Solution, most: int) -> list[RunnerUp]:
        """Return some tilings that fit and look fastest after the best; equivalent axes are not permuted."""
        shapes = {self._key(shape.patch): shape for shape in self.rejected}
        shapes.pop(self._key(best.tiling.patch), None)
        found = islice(self.solutions(shapes.values(), inf, TRIES), most)
        return [self.runner_up(other) for other in sorted(found, key=lambda other: other.seconds)]

    def next_larger(self, seconds: float) -> list[RunnerUp]:
        """Return the tiling nearest to the limit that would be faster by 5 % or more, with its fastest primitives."""
        faster = []
        for rejected in (shape for shape in self.rejected if self.lower_bound(shape) < 0.95 * seconds):
            guesses = [(self.bounds.guess(shape), shape) for shape in map(rejected.split, self.splits)]
            most = 0.95 * seconds - self.io_seconds(rejected)
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


def smallest_need(searches: Iterable[TilingSearch]) -> tuple[TilingSearch, Solution] | None:
    """Return the smallest need of all tilings, and its search; None where no primitive runs some layer."""
    found = [(search, least) for search in searches if isinstance(least := search.least(), Solution)]
    return min(found, default=None, key=lambda pair: pair[0].need(pair[1].memory))


def _merged(some: Sizes, others: Sizes) -> Sizes:
    z, y, x = (sorted({*a, *b}, reverse=True) for a, b in zip(some, others, strict=True))
    return z, y, x


def _few(sizes: Sizes) -> Sizes:
    z, y, x = (log_spaced(along, SIZES_AT_ONCE) for along in sizes)
    return z, y, x
