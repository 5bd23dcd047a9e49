"""Tilings of the output into patches or columns: each axis is cut into equal parts, in all combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from math import prod

from znnpy.layer_shapes import LayerShape
from znnpy.network import Conv, Network, Pool
from znnpy.patches import Cover, with_size
from znnpy.planner.layout import aligned
from znnpy.planner.plan import patch_in
from znnpy.shapes import ChainShape, Precision, Vec3, fused, turned, turned_back
from znnpy.sliding_layers import extent

FusionGroup = tuple[int, int]  # first and last of the layers that one primitive may run together
Sizes = tuple[Sequence[int], Sequence[int], Sequence[int]]  # along z, y, x, largest first


def fusion_groups(network: Network) -> tuple[FusionGroup, ...]:
    """Group each convolution with the pooling behind it, as they may be fused; other layers are groups of their own."""
    found: list[FusionGroup] = []
    for index, layer in enumerate(network.layers):
        if index and isinstance(layer, Pool) and isinstance(network.layers[index - 1], Conv):
            found[-1] = index - 1, index
        else:
            found.append((index, index))
    return tuple(found)


@dataclass(frozen=True)
class TilingSpace:
    """The tilings into patches, or into columns along one axis. All sizes, and the network, have that axis first."""

    network: Network
    output: Vec3
    axis: int = 0
    streams: bool = False
    precision: Precision = "fp32"
    in_place_carries: frozenset[int] = frozenset()  # groups that read carried planes where they are kept
    stage: tuple[int, int] | None = None  # half-open range of layers of one stage; None: all

    @cached_property
    def stage_network(self) -> Network:
        """The layers of the stage as a network of their own."""
        if self.stage is None:
            return self.network
        begin, end = self.stage
        return Network(self.network.name, self.network.maps[begin], self.network.layers[begin:end])

    @cached_property
    def groups(self) -> tuple[FusionGroup, ...]:
        """The fusion groups of the stage, counted from its first layer."""
        return fusion_groups(self.stage_network)

    @cached_property
    def isotropic(self) -> bool:
        """Return whether the network treats all axes in the same way."""
        return all(len(set(extent(layer))) == 1 for layer in self.network.layers)

    @cached_property
    def warmup_planes(self) -> tuple[int, ...]:
        """The planes that each layer computes before the output begins."""
        begin, end = self.stage or (0, len(self.network.layers))
        return tuple(margin[0] for margin in self.network.margins[begin + 1 : end + 1])


def all_spaces(
    network: Network, output: Vec3, precision: Precision = "fp32", patch: Vec3 | None = None
) -> tuple[TilingSpace, ...]:
    """Return the space of patches, then those of columns along each axis, without axes equivalent to an earlier one.

    patch  the only output patch that is considered, if any
    """
    spaces = [TilingSpace(network, output, precision=precision)]
    seen = set()
    for axis in range(3):
        space = TilingSpace(network.turned(axis), turned(output, axis), axis, streams=True, precision=precision)
        along, *others = zip(space.output, turned(patch or output, axis), strict=True)
        key = (space.network.layers, along, tuple(sorted(others) if space.isotropic else others))
        if key not in seen and network.field_of_view[axis] > 1:
            seen.add(key)
            spaces.append(space)
    return tuple(spaces)


@dataclass(frozen=True)
class Tiling:
    """One tiling for the layers of a stage, with the work and memory that follow from its size alone."""

    space: TilingSpace
    patch: Vec3  # dense output voxels of a step
    column_planes: int  # output planes that a column writes; 0: patches
    shapes: tuple[ChainShape, ...]  # of each layer in a step
    sub_batches: tuple[int, ...]  # executions of each layer in a step: several where it takes a part of the images
    handed_over: Vec3 | None = None  # new voxels per image from the stage before, in a step; None: first stage

    @property
    def images(self) -> int:
        """Number of patches in a step."""
        return self.shapes[0].batch

    @property
    def step_input(self) -> Vec3:
        """Voxels per image that a step takes in; in a column only those that no earlier step has read."""
        return self.handed_over or self.volume_input

    @property
    def volume_input(self) -> Vec3:
        """Voxels per image that a step reads from the volume: the input of the first stage."""
        return patch_in(self.space.network, self.patch, 0, streams=self.space.streams)

    @cached_property
    def cover(self) -> Cover:
        """The columns that cover the output."""
        return Cover(self.space.output, self.patch, 0, self.column_planes, self.space.network.margins[0][0])

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """For each layer the number of steps, of all columns, in which it runs."""
        return self._per_layer(self.steps_of)

    def steps_of(self, ahead: int) -> int:
        """Return the number of steps, of all columns, of work that begins `ahead` planes before the output does."""
        return self.cover.steps(ahead)

    def _per_layer(self, steps_of: Callable[[int], int]) -> tuple[int, ...]:
        """Return `steps_of` for every layer, called once for layers that begin in the same step of a column."""
        thick = self.patch[0]
        whole = [-(-ahead // thick) for ahead in self.space.warmup_planes]
        steps = {count: steps_of(count * thick) for count in set(whole)}
        return tuple(steps[count] for count in whole)

    @cached_property
    def voxels(self) -> tuple[int, ...]:
        """Voxels (one map) of each group's output that are computed for the whole output."""
        return self._voxels_in(self.steps)

    @cached_property
    def column_voxels(self) -> tuple[int, ...]:
        """Voxels (one map) of each group's output that one whole column takes, or one patch."""
        return self._voxels_in(self._per_layer(replace(self.cover, size=self.cover.grid).steps))

    def _voxels_in(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the voxels (one map) of each group's output in so many steps of each layer."""
        runs = [(steps[last] * self.sub_batches[last], self.shapes[last].out_shape) for _, last in self.space.groups]
        return tuple(count * prod(shape[:4]) for count, shape in runs)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of every activation between groups, the input and the output included.

        The input of a convolution and a pooling that may be fused is as large as fusion needs. An output that is handed
        over is not in the arena and counts as 0.
        """
        nbytes, images = [], self.images
        for index, (first, last) in enumerate(self.space.groups):
            whole, kept, _ = _input_bytes(self.shapes[first : last + 1])
            new = whole - kept if index in self.space.in_place_carries else whole
            nbytes.append(aligned(images // self.shapes[first].batch * new))
            images = self.shapes[last].out_shape[0]
        hands_over = self.space.stage is not None and self.space.stage[1] < len(self.space.network.layers)
        return *nbytes, 0 if hands_over else aligned(self.shapes[-1].out_bytes)

    def join_bytes(self, group: int) -> int:
        """Return the extra input bytes of a primitive that does not read carried planes where they are kept."""
        if group not in self.space.in_place_carries:
            return 0
        first, last = self.space.groups[group]
        images = self.shapes[first - 1].out_shape[0] if first else self.images
        return images // self.shapes[first].batch * _input_bytes(self.shapes[first : last + 1])[1]

    @cached_property
    def input_stays(self) -> tuple[bool, ...]:
        """Return whether each group takes its input in parts, so that the input stays while all later layers run."""
        before = (self.sub_batches[0], *self.sub_batches)
        return tuple(self.sub_batches[first] > before[first] for first, _ in self.space.groups)

    @cached_property
    def live_elsewhere(self) -> tuple[int, ...]:
        """Bytes of the inputs that stay while each group runs, its own included."""
        return tuple(accumulate(n if held else 0 for n, held in zip(self.tensor_bytes, self.input_stays, strict=False)))

    def io_bytes(self, group: int) -> int:
        """Return the bytes of a group's output and of its input, unless the input stays anyway."""
        return (0 if self.input_stays[group] else self.tensor_bytes[group]) + self.tensor_bytes[group + 1]

    @cached_property
    def carries(self) -> tuple[int, ...]:
        """The least bytes that a column keeps from step to step for each group, fused or not."""
        if not self.column_planes:
            return (0,) * len(self.space.groups)
        groups = self.space.groups
        return tuple(self.sub_batches[first] * _input_bytes(self.shapes[first : last + 1])[2] for first, last in groups)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest activation between groups, together with inputs that stay and carried planes."""
        own = (
            under + (0 if held else x)
            for under, held, x in zip(self.live_elsewhere, self.input_stays, self.tensor_bytes, strict=False)
        )
        return sum(self.carries) + max(*own, self.live_elsewhere[-1] + self.tensor_bytes[-1])

    @cached_property
    def largest_undivided(self) -> int:
        """Bytes of the largest activation up to the output of the first pooling, which no split makes smaller."""
        pool = next((i for i, (_, last) in enumerate(self.space.groups) if self.shapes[last].kind == "pool"), 0)
        return max(self.tensor_bytes[: pool + 2])

    @property
    def patch_out(self) -> Vec3:
        """The patch in the axis order (z, y, x)."""
        return turned_back(self.patch, self.space.axis)

    def split(self, at_once: Sequence[int]) -> Tiling:
        """Return this tiling, which is not split, with so many images at a time behind each pooling; 0: all.

        Where the images are handed over from a stage before, the first number is that of them at a time.
        """
        wanted, images, before, shapes, parts = iter(at_once), self.shapes[0].batch, 1, [], []
        some = 0 if self.handed_over is None else next(wanted)
        for layer, shape in zip(self.space.stage_network.layers, self.shapes, strict=True):
            batch = min(some or images, images)
            before *= images // batch
            shapes.append(shape if shape.batch == batch else _with_batch(shape, batch))
            parts.append(before)
            images = shapes[-1].out_shape[0]
            some = next(wanted, 0) if isinstance(layer, Pool) else 0
        return replace(self, shapes=tuple(shapes), sub_batches=tuple(parts))

    def shortened(self, pieces: int) -> Tiling:
        """Return this tiling with columns no longer than if `pieces` of them covered the output along their axis."""
        thick = self.patch[0]
        return replace(self, column_planes=-(-self.space.output[0] // (pieces * thick)) * thick)


@lru_cache(maxsize=1024)  # splits of a shape have the same few
def _with_batch(shape: ChainShape, batch: int) -> ChainShape:
    return replace(shape, batch=batch)


@lru_cache(maxsize=1024)
def _input_bytes(layers: tuple[ChainShape, ...]) -> tuple[int, int, int]:
    """Return a group's input bytes as one layer, what a column keeps of them, and the least kept, fused or not."""
    both, separate = fused(layers[0], layers[-1]) if len(layers) > 1 else None, sum(map(carry_bytes, layers))
    if both is None:
        return layers[0].in_bytes, carry_bytes(layers[0]), separate
    kept = carry_bytes(both)
    return both.in_bytes, kept, min(separate, kept)


def carry_bytes(shape: LayerShape) -> int:
    """Return the bytes of `carry_planes` of all images."""
    return shape.in_bytes // shape.in_shape[1] * carry_planes(shape)


def carry_planes(shape: LayerShape) -> int:
    """Return the planes along z of its input that a layer of a chain needs again in the next step of a column.

    Layers of a graph carry none: columns of graphs keep planes of tensors (`graph_tilings`).
    """
    match shape.kind:
        case "conv":
            return shape.k[0] + shape.pool[0] - 2
        case "pool" | "maxfilter":
            return shape.p[0] - 1
        case _:
            return 0


def splits(network: Network) -> list[tuple[int, ...]]:
    """Return the ways to split images for `Tiling.split`: no split first, then larger parts before smaller ones."""
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


MAX_COMBINED_POOLS = 4  # number of poolings of which every combination is tried


def axis_sizes(length: int, period: int) -> tuple[int, ...]:
    """Return patch sizes, largest first, that cover `length` with 1, 2, 3, .. nearly equal patches, to the period.

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
    """Return at most `most` of the sizes, evenly spaced on a log scale, the largest and the smallest included."""
    if len(sizes) <= most:
        return sizes
    largest, smallest = sizes[0], sizes[-1]
    kept = {
        min(sizes, key=lambda size: abs(size - largest * (smallest / largest) ** (step / (most - 1))))
        for step in range(most)
    }
    return tuple(sorted(kept, reverse=True))


def all_sizes(space: TilingSpace, budget: int | None = None) -> Sizes:
    """Return every size per axis; with `budget`, drop those whose largest activation always exceeds it."""
    sizes = [axis_sizes(length, period) for length, period in zip(space.output, space.network.period, strict=True)]
    thinnest = space.network.period
    ways = splits(space.stage_network)  # outputs of all parts stay live: the smallest parts are not always the leanest

    def fitting(axis: int) -> list[int]:
        shapes = [tiling_of(space, with_size(thinnest, axis, size)) for size in sizes[axis]]
        return [
            shape.patch[axis]
            for shape in shapes
            if budget is None or any(shape.split(at_once).largest <= budget for at_once in ways)
        ]

    return fitting(0), fitting(1), fitting(2)


def tiling_of(space: TilingSpace, patch: Vec3) -> Tiling:
    """Return the tiling into patches of one size, or columns from end to end of the output, with no images split."""
    shapes = space.network.layer_shapes(patch, streams=space.streams, precision=space.precision)
    column = -(-space.output[0] // patch[0]) * patch[0] if space.streams else 0
    return Tiling(space, patch, column, shapes, (1,) * len(shapes))


def sizes_between(sizes: Sequence[int], seen: Sequence[int], size: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return `size` with its neighbours in `seen`, which contains it, and those of `sizes` between them."""
    at = seen.index(size)
    near = seen[max(0, at - 1) : at + 2]
    above = near[0] if at else sizes[0] + 1
    below = near[-1] if at + 1 < len(seen) else 0
    return near, [other for other in sizes if below < other < above and other != size]
