"""The search: patch shape and a primitive per layer, for the most output voxels per second within the limits.

A convolution and the pooling behind it are chosen for together: layer by layer, or one primitive for both.
For a fixed patch the best primitives are found exactly (`trade`); patch shapes are gone through in the order of an
optimistic bound on the time for the whole output, and those that cannot win any more are skipped.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A: loop over input shapes, best primitive per layer within memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import znnpy
from znnpy.errors import NoPlanError, ShapeError
from znnpy.kernels.primitive import Primitive
from znnpy.kernels.table import TABLE, find
from znnpy.machine import Limits, Machine
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.planner.bounds import Bounds
from znnpy.planner.candidates import Candidate, Sizes, Span, all_sizes, between, candidates, spans, thinned
from znnpy.planner.cost import Rates, assumed_rates
from znnpy.planner.layout import Tensor, chain, live_bytes, place
from znnpy.planner.memory import baseline_bytes, reading_bytes, writing_bytes
from znnpy.planner.options import Options
from znnpy.planner.plan import FORMAT, Choice, Memory, Plan, RunnerUp
from znnpy.planner.trade import (
    Front,
    Option,
    Way,
    fastest,
    fastest_within,
    smallest,
    total_bytes,
    total_seconds,
)
from znnpy.shapes import Vec3, text

RUNNERS_UP = 3
FEW = 6  # sizes per axis that are combined at once; where an axis has no more, every combination is looked at


def make_plan(
    network: Network,
    output: Vec3,
    machine: Machine,
    limits: Limits,
    *,
    itemsize_in: int = 1,
    itemsize_out: int = 4,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    table: tuple[Primitive, ...] = TABLE,
    rates: Rates | None = None,
    baseline: int | None = None,
    masks: bool = False,
) -> Plan:
    """The fastest plan for a dense output of (z, y, x) voxels that keeps the whole process within the limits.

    itemsize_in   bytes per voxel of the volume as stored
    itemsize_out  bytes per value of the output
    patch         this output patch only; a multiple of the pooling period, else ShapeError
    only          name or names of primitives; where one of them applies to a layer no other is considered
    rates         speeds of the machine; assumed from `machine` when not given
    baseline      bytes of the process without the run; measured now when not given
    masks         count masks of the input voxels that are not finite; needed to run with NaN allowed

    NoPlanError names the nearest miss in bytes when nothing fits.
    """
    if limits.ram_bytes < 1 or limits.threads < 1:
        raise NoPlanError(
            f"a run needs memory and at least one thread, not {limits.ram_bytes} bytes and {limits.threads} threads; "
            "raise --ram or --threads"
        )
    if min(output) < 1:
        raise ShapeError(f"there is nothing to compute: the output is {text(output)}; give a larger volume or region")
    if patch is not None and len(patch) != 3:
        raise ShapeError(f"an output patch has three sizes (z, y, x), not {patch}")
    only = (only,) if isinstance(only, str) else tuple(only)
    for name in only:
        try:
            find(name, table)
        except KeyError as error:
            raise NoPlanError(f"{error.args[0]}; `znnpy primitives` lists them all") from None
    search = _Search(
        network=network,
        output=output,
        machine=machine,
        limits=limits,
        itemsize_in=itemsize_in,
        itemsize_out=itemsize_out,
        patch=patch,
        only=frozenset(only),
        options=Options(
            table, machine, limits.threads, rates or assumed_rates(machine, limits.threads), frozenset(only)
        ),
        baseline=baseline_bytes() if baseline is None else baseline,
        masks=masks,
    )
    found = search.run()
    if not found:
        raise search.no_plan()
    return search.plan(found)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best of one patch shape."""

    candidate: Candidate
    options: tuple[Option, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory

    @property
    def seconds(self) -> float:
        """For the whole output."""
        return self.candidate.patches * total_seconds(self.options)


@dataclass
class _Search:
    """What is asked for, and what was worked out so far."""

    network: Network
    output: Vec3
    machine: Machine
    limits: Limits
    itemsize_in: int
    itemsize_out: int
    patch: Vec3 | None
    only: frozenset[str]
    options: Options
    baseline: int
    masks: bool
    _spans: tuple[Span, ...] = field(init=False)
    _bounds: Bounds = field(init=False)
    _seen: set[tuple[int, ...]] = field(default_factory=set)  # counts and sizes of patches that were looked at
    _lost: list[Candidate] = field(default_factory=list)  # shapes that do not fit, or not with their fastest options

    def __post_init__(self) -> None:
        self._spans = spans(self.network)
        self._bounds = Bounds(self.network)

    def run(self) -> list[_Found]:
        """The best patch shapes, best first; none when nothing fits.

        First over a few sizes per axis in all combinations, then again and again over a few more around the best.
        In networks that treat all axes alike patches that are turned to other axes cost nearly the same: one of them is
        looked at, and of the best all are.
        """
        room = self.limits.ram_bytes - self.baseline
        sizes = self._sizes(room)
        seen = _few(sizes)
        first = list(candidates(self.network, self.output, seen, room))
        if first:
            largest = max(first, key=lambda shape: prod(shape.patch))
            for index, options in enumerate(self._all_fronts(largest)):
                self._bounds.learn(largest, index, options)
        best = self._through(self._new(first), [])
        while best:
            beside = [between(*axis) for axis in zip(sizes, seen, best[0].candidate.patch, strict=True)]
            more = _few((beside[0][1], beside[1][1], beside[2][1]))
            if not any(more):
                break
            z, y, x = (sorted({*old, *new}, reverse=True) for (old, _), new in zip(beside, more, strict=True))
            best = self._through(self._new(candidates(self.network, self.output, (z, y, x), room)), best)
            z, y, x = (sorted({*old, *new}, reverse=True) for old, new in zip(seen, more, strict=True))
            seen = (z, y, x)
        if best:
            patch = best[0].candidate.patch
            z, y, x = ([size for size in along if size in patch] for along in sizes)
            turned = candidates(self.network, self.output, (z, y, x), room)
            best = self._through(
                [shape for shape in turned if shape.patch != patch and sorted(shape.patch) == sorted(patch)], best
            )
        return best

    def _new(self, shapes: Iterable[Candidate]) -> list[Candidate]:
        """Those that were not looked at, nor turned to other axes where that makes no difference to speak of."""
        alike = all(len(set(_extent(layer))) == 1 for layer in self.network.layers)
        new = []
        for shape in shapes:
            key = (shape.patches, *sorted(shape.patch)) if alike else (shape.patches, *shape.patch)
            if key not in self._seen:
                self._seen.add(key)
                new.append(shape)
        return new

    def _sizes(self, room: int | None) -> Sizes:
        """Patch sizes to look at along each axis."""
        if self.patch is None:
            return all_sizes(self.network, self.output, room)
        self.network.layer_shapes(self.patch)  # ShapeError when it is none
        z, y, x = self.patch
        return [z], [y], [x]

    def _through(self, shapes: Sequence[Candidate], best: list[_Found]) -> list[_Found]:
        """The best of `best` and of all shapes, best first."""
        for shape in sorted(shapes, key=lambda shape: self._bounds.seconds(shape, self._room(shape), {})):
            below = best[RUNNERS_UP].seconds if len(best) > RUNNERS_UP else inf
            hopeless = best and self._bounds.seconds(shape, self._room(shape), {}) >= best[0].seconds
            found = None if hopeless else self._best_of(shape, below)
            if found is None:
                self._lost.append(shape)
            else:
                ranked = sorted([*best, found], key=lambda found: (found.seconds, found.memory.peak))
                best = _distinct(ranked)[: RUNNERS_UP + 1]
        return best

    def plan(self, found: Sequence[_Found]) -> Plan:
        """The first of `found` as a plan, the others as its runners-up."""
        best = found[0]
        patch = best.candidate.patch
        choices = tuple(
            Choice(
                layers=layers,
                shape=way.shape,
                primitive=way.primitive.name,
                version=way.primitive.version,
                device=way.primitive.name.partition(".")[0],
                variant=way.variant,
                seconds=way.seconds,
                measured=False,
                resident_bytes=way.footprint.resident,
                working_bytes=way.footprint.working(way.shape),
            )
            for layers, way in self._ways(best.options)
        )
        return Plan(
            format=FORMAT,
            znnpy_version=znnpy.__version__,
            network=self.network.sha256,
            network_name=self.network.name,
            machine=self.machine.fingerprint,
            limits=self.limits,
            output=self.output,
            patch_out=patch,
            patch_in=self.network.patch_in(patch),
            batch=1,
            choices=choices,
            tensors=best.tensors,
            memory=best.memory,
            itemsize_in=self.itemsize_in,
            itemsize_out=self.itemsize_out,
            patches=best.candidate.patches,
            rigor="estimate",
            runners_up=self._runners_up(found),
        )

    def no_plan(self) -> NoPlanError:
        """Why nothing fits: the smallest need of all shapes, and the layer that needs most; or a layer nobody runs."""
        least: tuple[int, Candidate, tuple[Option, ...]] | None = None
        refused = ""
        shapes = candidates(self.network, self.output, _few(self._sizes(None)))
        for shape in sorted(shapes, key=lambda shape: shape.largest_bytes):
            around = self._around(shape)
            if least is not None and around.peak + shape.largest_bytes >= least[0]:
                continue
            fronts = self._all_fronts(shape)
            empty = next((index for index, options in enumerate(fronts) if not options), None)
            if empty is not None:
                refused = refused or self._why_none(shape, empty)
                continue
            options = smallest(fronts)
            needed = self._laid_out(shape, options).memory.peak
            if least is None or needed < least[0]:
                least = needed, shape, options
        if least is None:
            return NoPlanError(refused)
        needed, shape, options = least
        most, layer, name = max(
            (live_bytes(way.shape, way.footprint) + way.footprint.resident, first, way.primitive.name)
            for (first, _), way in self._ways(options)
        )
        return NoPlanError(
            f"nothing fits in {self.limits.ram_bytes:,} bytes of RAM: the smallest need is {needed:,}, "
            f"{needed - self.limits.ram_bytes:,} more, with output patches of {text(shape.patch)}; the process itself "
            f"takes {self.baseline:,}, and layer {layer} ({self.network.layers[layer]}) the most of what is left, "
            f"{most:,} with {name}; allow at least --ram {-(-needed // 2**20)}M"
            + (", or drop --patch" if self.patch else "")
            + (", or drop --only" if self.only else "")
        )

    def _around(self, shape: Candidate) -> Memory:
        """What a run needs whatever the primitives are."""
        patch_in = self.network.patch_in(shape.patch)
        return Memory(
            baseline=self.baseline,
            arena=0,
            residents=0,
            reading=reading_bytes(self.network.input_channels, patch_in, self.itemsize_in, masks=self.masks),
            writing=writing_bytes(self.network.output_channels, shape.patch, self.itemsize_out),
            allowance=0,
        )

    def _room(self, shape: Candidate) -> int:
        """Bytes for arena, weights and allowance."""
        return self.limits.ram_bytes - self._around(shape).peak

    def _best_of(self, shape: Candidate, below: float) -> _Found | None:
        """The fastest primitives for one patch shape that fit; None unless below `below` seconds for the output."""
        fronts = self._promising_fronts(shape, below)
        if fronts is None:
            return None
        room = self._room(shape)
        options = fastest_within(fronts, room, below / shape.patches)
        if options is None:
            return None
        while options is not None:
            found = self._laid_out(shape, options)
            if found.memory.peak <= self.limits.ram_bytes:
                return found
            room -= found.memory.arena - max(option.live for option in options)  # the layout lost that much
            options = fastest_within(fronts, room, below / shape.patches)
        found = self._laid_out(shape, smallest(fronts))
        return found if found.memory.peak <= self.limits.ram_bytes and found.seconds < below else None

    def _promising_fronts(self, shape: Candidate, below: float) -> list[Front] | None:
        """Options of every span; None as soon as it is plain that they do not fit, or not below `below` seconds.

        Large layers come first: one of them tells most of the shapes that cannot win.
        """
        layers = self.network.layer_shapes(shape.patch)
        known: dict[int, Front] = {}
        for index in sorted(range(len(self._spans)), key=lambda index: -self._bounds.moved(shape, index)):
            first, last = self._spans[index]
            known[index] = self.options.of(layers[first : last + 1])
            if not known[index]:
                return None
            self._bounds.learn(shape, index, known[index])
            if self._bounds.seconds(shape, self._room(shape), known) >= below:
                return None
        return [known[index] for index in range(len(self._spans))]

    def _all_fronts(self, shape: Candidate) -> list[Front]:
        """Options of every span, whether they fit or not."""
        layers = self.network.layer_shapes(shape.patch)
        return [self.options.of(layers[first : last + 1]) for first, last in self._spans]

    def _ways(self, options: Iterable[Option]) -> Iterator[tuple[Span, Way]]:
        """All steps of a patch, each with the first and the last of its layers."""
        for (first, last), option in zip(self._spans, options, strict=True):
            if len(option.ways) == 1:
                yield (first, last), option.ways[0]
            else:
                yield from (((layer, layer), way) for layer, way in enumerate(option.ways, first))

    def _why_none(self, shape: Candidate, span: int) -> str:
        """Every primitive's reason not to run a layer, the first of the span that nobody runs."""
        layers, (first, last) = self.network.layer_shapes(shape.patch), self._spans[span]
        layer = next(i for i in range(first, last + 1) if not self.options.of(layers[i : i + 1]))
        return (
            f"no primitive runs layer {layer} ({self.network.layers[layer]}) here: "
            f"{self.options.why_none(layers[layer])}; `znnpy primitives` lists them all"
        )

    def _laid_out(self, shape: Candidate, options: tuple[Option, ...]) -> _Found:
        """With the arena as it will be."""
        tensors, arena = place(chain([(way.shape, way.footprint) for option in options for way in option.ways]))
        around = self._around(shape)
        memory = Memory(
            baseline=around.baseline,
            arena=arena,
            residents=sum(option.resident for option in options),
            reading=around.reading,
            writing=around.writing,
            allowance=max(option.allowance for option in options),
        )
        return _Found(shape, options, tensors, memory)

    def _runners_up(self, found: Sequence[_Found]) -> tuple[RunnerUp, ...]:
        """What more memory would buy first, then the next best that fit."""
        voxels = prod(self.output)
        larger = self._next_larger(found[0].seconds)
        slower = [RunnerUp(f.candidate.patch, voxels / f.seconds, 0) for f in found[1:]]
        return tuple([*larger, *slower][:RUNNERS_UP])

    def _next_larger(self, seconds: float) -> list[RunnerUp]:
        """The shape nearest to the limit that would be faster by 5 % or more, run the fastest way."""
        faster = []
        for shape in self._lost:
            ideal, nbytes = self._bounds.fastest(shape)
            if ideal < 0.95 * seconds:
                faster.append((nbytes + self._around(shape).peak, shape))
        for _, shape in sorted(faster, key=lambda guess: guess[0])[:RUNNERS_UP]:
            fronts = self._all_fronts(shape)
            if all(fronts):
                options = fastest(fronts)
                spent = shape.patches * total_seconds(options)
                over = total_bytes(options) - self._room(shape)
                if spent < 0.95 * seconds and over > 0:
                    return [RunnerUp(shape.patch, prod(self.output) / spent, over)]
        return []


def _few(sizes: Sizes) -> Sizes:
    z, y, x = (thinned(along, FEW) for along in sizes)
    return z, y, x


def _extent(layer: Layer) -> Vec3:
    match layer:
        case Conv(kernel=size) | Pool(window=size) | MaxFilter(window=size):
            return size
        case Maxout():
            return 1, 1, 1


def _distinct(ranked: Sequence[_Found]) -> list[_Found]:
    """The first of those that are one patch turned to other axes."""
    by_sides: dict[tuple[int, ...], _Found] = {}
    for found in ranked:
        by_sides.setdefault(tuple(sorted(found.candidate.patch)), found)
    return list(by_sides.values())
