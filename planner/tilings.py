"""Patch and column shapes worth a look: every axis cut into equal parts, in all combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from math import prod

from znnpy.network import Conv, Network, Pool, extent
from znnpy.patches import Cover
from znnpy.planner.layout import aligned
from znnpy.planner.plan import patch_in
from znnpy.shapes import LayerShape, Precision, Vec3, fused, turned, turned_back

FusionGroup = tuple[int, int]  # the first and the last of the layers that one choice may be made for
Sizes = tuple[Sequence[int], Sequence[int], Sequence[int]]  # along z, y, x, largest first


def fusion_groups(network: Network) -> tuple[FusionGroup, ...]:
    """All layers in order: a convolution with the pooling behind it, which may run in one, every other layer alone."""
    found: list[FusionGroup] = []
    for index, layer in enumerate(network.layers):
        if index and isinstance(layer, Pool) and isinstance(network.layers[index - 1], Conv):
            found[-1] = index - 1, index
        else:
            found.append((index, index))
    return tuple(found)


@dataclass(frozen=True)
class TilingSpace:
    """Patches, or columns along one axis. All sizes have that axis first, the network too."""

    network: Network
    output: Vec3
    axis: int = 0
    streams: bool = False
    precision: Precision = "fp32"
    in_place_carries: frozenset[int] = (
        frozenset()
    )  # spans that read planes carried from step to step where they are kept
    stage: tuple[int, int] | None = None  # begin and end of the layers of one stage; None: all layers are one stage

    @property
    def first_layer(self) -> int:
        """Index of the first layer of the stage in the network."""
        return 0 if self.stage is None else self.stage[0]

    @property
    def hands_over(self) -> bool:
        """Another stage follows."""
        return self.stage is not None and self.stage[1] < len(self.network.layers)

    @cached_property
    def stage_network(self) -> Network:
        """The layers of the stage as a network of their own."""
        if self.stage is None:
            return self.network
        begin, end = self.stage
        return Network(self.network.name, self.network.maps[begin], self.network.layers[begin:end])

    @cached_property
    def groups(self) -> tuple[FusionGroup, ...]:
        """The spans of the stage, counted from its first layer."""
        return fusion_groups(self.stage_network)

    @cached_property
    def isotropic(self) -> bool:
        """The network treats all axes in the same way."""
        return all(len(set(extent(layer))) == 1 for layer in self.network.layers)

    @cached_property
    def warmup_planes(self) -> tuple[int, ...]:
        """Of every layer, the planes that it computes before the output begins."""
        margins = self.network.margins[self.first_layer + 1 : self.first_layer + 1 + len(self.stage_network.layers)]
        return tuple(margin[0] for margin in margins)


def all_spaces(
    network: Network, output: Vec3, precision: Precision = "fp32", patch: Vec3 | None = None
) -> tuple[TilingSpace, ...]:
    """Patches first, then columns along each axis, but for axes that are like one before.

    patch  of the output, that alone is looked at
    """
    spaces = [TilingSpace(network, output, precision=precision)]
    seen = set()
    for axis in range(3):
        space = TilingSpace(network.turned(axis), turned(output, axis), axis, streams=True, precision=precision)
        along, *beside = zip(space.output, turned(patch or output, axis), strict=True)
        key = (space.network.layers, along, tuple(sorted(beside) if space.isotropic else beside))
        if key not in seen and network.field_of_view[axis] > 1:
            seen.add(key)
            spaces.append(space)
    return tuple(spaces)


@dataclass(frozen=True)
class Tiling:
    """One patch or column shape of the layers of a stage, and what its size alone says of work and memory."""

    space: TilingSpace
    patch: Vec3  # dense output voxels of a step
    column_planes: int  # output planes that a column writes; 0: patches
    shapes: tuple[LayerShape, ...]  # of every layer in a step
    sub_batches: tuple[
        int, ...
    ]  # how often every layer runs in a step: more than once where it takes a part of the images
    handed_over: Vec3 | None = (
        None  # new voxels of each image that the stage before hands over in a step; None: there is none
    )

    @property
    def images(self) -> int:
        """Patches in a step."""
        return self.shapes[0].batch

    @property
    def step_input(self) -> Vec3:
        """What a step reads of each image: of a column that walks, only what no step before it has read."""
        return self.handed_over or self.volume_input

    @property
    def volume_input(self) -> Vec3:
        """What a step of the run reads of each image of the volume: the input of the first stage."""
        return patch_in(self.space.network, self.patch, 0, streams=self.space.streams)

    @cached_property
    def cover(self) -> Cover:
        """The columns that cover the output."""
        return Cover(self.space.output, self.patch, 0, self.column_planes, self.space.network.margins[0][0])

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps of all columns in which every layer runs."""
        return self._per_layer(self.steps_of)

    def steps_of(self, ahead: int) -> int:
        """Steps of all columns in which something is computed that begins `ahead` planes before the output does."""
        return self.cover.steps(ahead)

    def _per_layer(self, steps_of: Callable[[int], int]) -> tuple[int, ...]:
        """What `steps_of` gives for every layer, asked once for those that begin in the same step of a column."""
        thick = self.patch[0]
        whole = [-(-ahead // thick) for ahead in self.space.warmup_planes]
        steps = {count: steps_of(count * thick) for count in set(whole)}
        return tuple(steps[count] for count in whole)

    @cached_property
    def voxels(self) -> tuple[int, ...]:
        """Of the last output of every span, one map, that are computed for the whole output."""
        steps = self.steps
        return tuple(steps[last] * once for (_, last), once in zip(self.space.groups, self._in_step, strict=True))

    @cached_property
    def column_voxels(self) -> tuple[int, ...]:
        """The same of one whole column, or of one patch where no column walks."""
        steps = self._per_layer(replace(self.cover, size=self.cover.grid).steps)
        return tuple(steps[last] * once for (_, last), once in zip(self.space.groups, self._in_step, strict=True))

    @cached_property
    def _in_step(self) -> tuple[int, ...]:
        """The same of one step."""
        return tuple(self.sub_batches[last] * prod(self.shapes[last].out_shape[:4]) for _, last in self.space.groups)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of every activation between spans that is there at a time, the first and the last among them.

        Of a convolution and a pooling that may run in one, the input is as large as it has to be then.
        """
        nbytes, images = [], self.images
        for index, (first, last) in enumerate(self.space.groups):
            whole, kept, _ = _input_bytes(self.shapes[first : last + 1])
            new = whole - kept if index in self.space.in_place_carries else whole
            nbytes.append(aligned(images // self.shapes[first].batch * new))
            images = self.shapes[last].out_shape[0]
        return *nbytes, 0 if self.space.hands_over else aligned(
            self.shapes[-1].out_bytes
        )  # handed over: not in the arena

    def join_bytes(self, span: int) -> int:
        """Bytes that its input is larger by for a primitive that does not read carried planes where they are kept."""
        if span not in self.space.in_place_carries:
            return 0
        first, last = self.space.groups[span]
        images = self.shapes[first - 1].out_shape[0] if first else self.images
        return images // self.shapes[first].batch * _input_bytes(self.shapes[first : last + 1])[1]

    @cached_property
    def input_stays(self) -> tuple[bool, ...]:
        """Of every span: it takes a part of its input at a time, so that the input stays while all layers after run."""
        before = (self.sub_batches[0], *self.sub_batches)
        return tuple(self.sub_batches[first] > before[first] for first, _ in self.space.groups)

    @cached_property
    def live_elsewhere(self) -> tuple[int, ...]:
        """Of every span: bytes of the inputs that stay while it runs, its own among them."""
        return tuple(accumulate(n if held else 0 for n, held in zip(self.tensor_bytes, self.input_stays, strict=False)))

    def io_bytes(self, span: int) -> int:
        """Bytes of a span's input, unless it is held, and of its output."""
        return (0 if self.input_stays[span] else self.tensor_bytes[span]) + self.tensor_bytes[span + 1]

    @cached_property
    def carries(self) -> tuple[int, ...]:
        """Of every span: bytes that a column keeps from step to step at least, its layers apart or in one."""
        if not self.column_planes:
            return (0,) * len(self.space.groups)
        spans = self.space.groups
        return tuple(self.sub_batches[first] * _input_bytes(self.shapes[first : last + 1])[2] for first, last in spans)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest activation between spans, with those that are held and those that are carried."""
        own = (
            under + (0 if held else x)
            for under, held, x in zip(self.live_elsewhere, self.input_stays, self.tensor_bytes, strict=False)
        )
        return sum(self.carries) + max(*own, self.live_elsewhere[-1] + self.tensor_bytes[-1])

    @cached_property
    def largest_undivided(self) -> int:
        """Bytes of the largest activation up to the output of the first pooling: every split has all of each."""
        pool = next((i for i, (_, last) in enumerate(self.space.groups) if self.shapes[last].kind == "pool"), 0)
        return max(self.tensor_bytes[: pool + 2])

    @property
    def patch_out(self) -> Vec3:
        """The patch with its axes in the order (z, y, x)."""
        return turned_back(self.patch, self.space.axis)

    def split(self, at_once: Sequence[int]) -> Tiling:
        """The same with so many images at a time behind each pooling; 0: all there are."""
        wanted, images, before, shapes, parts = iter(at_once), 1, 1, [], []
        some = 0
        for layer, shape in zip(self.space.stage_network.layers, self.shapes, strict=True):
            batch = min(some or images, images)
            before *= images // batch
            shapes.append(shape if shape.batch == batch else _with_batch(shape, batch))
            parts.append(before)
            images = shapes[-1].out_shape[0]
            some = next(wanted) if isinstance(layer, Pool) else 0
        return replace(self, shapes=tuple(shapes), sub_batches=tuple(parts))

    def shortened(self, pieces: int) -> Tiling:
        """The same with columns that are no longer than if `pieces` covered the output along their axis."""
        thick = self.patch[0]
        return replace(self, column_planes=-(-self.space.output[0] // (pieces * thick)) * thick)


@lru_cache(maxsize=1024)  # splits of a shape have the same few
def _with_batch(shape: LayerShape, batch: int) -> LayerShape:
    return replace(shape, batch=batch)


@lru_cache(maxsize=1024)
def _input_bytes(layers: tuple[LayerShape, ...]) -> tuple[int, int, int]:
    """Of a span as one layer: its input, what a column keeps of it, and what it keeps at least, in one or apart."""
    both, apart = as_one_layer(layers), sum(map(carry_bytes, layers))
    kept = carry_bytes(both)
    return both.in_bytes, kept, apart if both is layers[0] else min(apart, kept)


def as_one_layer(layers: Sequence[LayerShape]) -> LayerShape:
    """A span as one layer: as if a convolution and its pooling ran in one, where they may."""
    both = fused(layers[0], layers[-1]) if len(layers) > 1 else None
    return both or layers[0]


def carry_bytes(shape: LayerShape) -> int:
    """Bytes of `carry_planes` of all images."""
    return shape.in_bytes // shape.in_shape[1] * carry_planes(shape)


def carry_planes(shape: LayerShape) -> int:
    """Planes along z of its input that a layer looks at again in the next step of a column."""
    match shape.kind:
        case "conv":
            return shape.k[0] + shape.pool[0] - 2
        case "pool" | "maxfilter":
            return shape.p[0] - 1
        case "maxout":
            return 0


def splits(network: Network) -> list[tuple[int, ...]]:
    """Ways to run images in parts, for `Candidate.split`: nothing first, then larger parts before smaller ones."""
    pools = [index for index, layer in enumerate(network.layers) if isinstance(layer, Pool)]
    choices: list[tuple[int, ...]] = []
    for number, index in enumerate(pools):
        layer = network.layers[index]
        assert isinstance(layer, Pool)
        fragments = prod(layer.window)
        useful = fragments > 1 and index + 1 < len(network.layers)
        sizes = [n for n in range(fragments // 2, 0, -1) if fragments % n == 0] if useful else []
        if number or len(pools) > MAX_COMBINED_POOLS:
            sizes = sizes[-1:]
        choices.append((0, *sizes))
    if len(pools) > MAX_COMBINED_POOLS:
        singles = [
            tuple(n if i == at else 0 for i in range(len(pools))) for at, sizes in enumerate(choices) for n in sizes[1:]
        ]
        return [(0,) * len(pools), *singles, tuple(sizes[-1] for sizes in choices)]
    return sorted(product(*choices), key=lambda at_once: (sum(map(bool, at_once)), [-n for n in at_once]))


MAX_COMBINED_POOLS = 4  # of which every combination is looked at


def axis_sizes(length: int, period: int) -> tuple[int, ...]:
    """Patch sizes, largest first, that cover `length` with 1, 2, 3, .. nearly equal patches, down to the period.

    A size in between takes as many patches as the next smaller one here and does more work in each.
    """
    sizes = []
    size = -(-length // period) * period
    while size >= period:
        sizes.append(size)
        if size == period:
            break
        parts = -(-length // (size - period))  # the fewest patches of a smaller size
        size = -(-length // (parts * period)) * period
    return tuple(sizes)


def log_spaced(sizes: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` of the sizes, spread evenly on a logarithmic scale, the largest and the smallest among them."""
    if len(sizes) <= most:
        return sizes
    largest, smallest = sizes[0], sizes[-1]
    kept = {
        min(sizes, key=lambda size: abs(size - largest * (smallest / largest) ** (step / (most - 1))))
        for step in range(most)
    }
    return tuple(sorted(kept, reverse=True))


def all_sizes(space: TilingSpace, room: int | None = None) -> Sizes:
    """Every size per axis; with `room`, less those whose largest activation exceeds it whatever the other axes are."""
    sizes = [axis_sizes(length, period) for length, period in zip(space.output, space.network.period, strict=True)]
    thinnest = space.network.period
    ways = splits(space.stage_network)  # parts hold what they are parts of: the smallest are not always the leanest

    def fitting(axis: int) -> list[int]:
        shapes = [tiling_of(space, with_size(thinnest, axis, size)) for size in sizes[axis]]
        return [
            shape.patch[axis]
            for shape in shapes
            if room is None or any(shape.split(at_once).largest <= room for at_once in ways)
        ]

    return fitting(0), fitting(1), fitting(2)


def tiling_of(space: TilingSpace, patch: Vec3) -> Tiling:
    """Patches of one shape, or columns that write the output along their axis from end to end. Nothing is split."""
    shapes = space.network.layer_shapes(patch, streams=space.streams, precision=space.precision)
    column = -(-space.output[0] // patch[0]) * patch[0] if space.streams else 0
    return Tiling(space, patch, column, shapes, (1,) * len(shapes))


def sizes_between(sizes: Sequence[int], seen: Sequence[int], size: int) -> tuple[Sequence[int], Sequence[int]]:
    """`size` and its neighbours in `seen`, of which it is one; and those of `size_trend` that lie between them."""
    at = seen.index(size)
    beside = seen[max(0, at - 1) : at + 2]
    above = beside[0] if at else sizes[0] + 1
    below = beside[-1] if at + 1 < len(seen) else 0
    return beside, [other for other in sizes if below < other < above and other != size]


def with_size(patch: Vec3, axis: int, size: int) -> Vec3:
    """The same but for its size along one axis."""
    z, y, x = (size if axis == i else extent for i, extent in enumerate(patch))
    return z, y, x
