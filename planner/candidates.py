"""Output patch shapes worth a look: every axis cut into equal parts, in all combinations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from znnpy.network import Conv, Network, Pool
from znnpy.shapes import FLOAT32, Vec3, ceil_divide


@dataclass(frozen=True, slots=True)
class Candidate:
    """One patch shape, and what its size alone says of the work and the memory."""

    patch: Vec3  # dense output voxels
    patches: int  # that cover the output
    voxels: tuple[int, ...]  # of every activation x0, x1, .. in one patch, all fragments, one map
    largest_bytes: int  # of the largest activation between two spans: no plan needs less


Span = tuple[int, int]  # the first and the last of the layers that one choice may be made for


def spans(network: Network) -> tuple[Span, ...]:
    """All layers in order: a convolution with the pooling behind it, which may run in one, every other layer alone."""
    found: list[Span] = []
    for index, layer in enumerate(network.layers):
        if index and isinstance(layer, Pool) and isinstance(network.layers[index - 1], Conv):
            found[-1] = index - 1, index
        else:
            found.append((index, index))
    return tuple(found)


Sizes = tuple[Sequence[int], Sequence[int], Sequence[int]]  # along z, y, x, largest first


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


def thinned(sizes: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` of the sizes, spread evenly on a logarithmic scale, the largest and the smallest among them."""
    if len(sizes) <= most:
        return sizes
    largest, smallest = sizes[0], sizes[-1]
    kept = {
        min(sizes, key=lambda size: abs(size - largest * (smallest / largest) ** (step / (most - 1))))
        for step in range(most)
    }
    return tuple(sorted(kept, reverse=True))


def all_sizes(network: Network, output: Vec3, room: int | None = None) -> Sizes:
    """Every size per axis; with `room`, less those whose largest activation exceeds it whatever the other axes are."""
    sizes = [axis_sizes(length, period) for length, period in zip(output, network.period, strict=True)]
    thinnest: Vec3 = (sizes[0][-1], sizes[1][-1], sizes[2][-1])

    def fitting(axis: int) -> list[int]:
        return [
            size
            for size in sizes[axis]
            if room is None
            or max(FLOAT32 * prod(shape) for shape in _between(network, _with(thinnest, axis, size))) <= room
        ]

    return fitting(0), fitting(1), fitting(2)


def candidates(network: Network, output: Vec3, sizes: Sizes, room: int | None = None) -> Iterator[Candidate]:
    """All combinations of sizes; with `room`, those whose largest activation fits in so many bytes."""
    thinnest = network.period
    per_voxel = [0] * len(network.maps)
    for index in (0, *(last + 1 for _, last in spans(network))):
        per_voxel[index] = FLOAT32 * network.maps[index]
    fragments = [shape[0] for shape in _activations(network, thinnest)]
    extents = [
        [(size, [shape[1 + axis] for shape in _activations(network, _with(thinnest, axis, size))]) for size in along]
        for axis, along in enumerate(sizes)
    ]
    for z, z_extents in extents[0]:
        for y, y_extents in extents[1]:
            plane = [s * a * b for s, a, b in zip(fragments, z_extents, y_extents, strict=True)]
            for x, x_extents in extents[2]:
                voxels = tuple([s * c for s, c in zip(plane, x_extents, strict=True)])
                largest = max([v * b for v, b in zip(voxels, per_voxel, strict=True)])
                if room is None or largest <= room:
                    yield Candidate((z, y, x), prod(ceil_divide(output, (z, y, x))), voxels, largest)


def between(sizes: Sequence[int], seen: Sequence[int], size: int) -> tuple[Sequence[int], Sequence[int]]:
    """`size` and its neighbours in `seen`, of which it is one; and those of `sizes` that lie between them."""
    at = seen.index(size)
    beside = seen[max(0, at - 1) : at + 2]
    above = beside[0] if at else sizes[0] + 1
    below = beside[-1] if at + 1 < len(seen) else 0
    return beside, [other for other in sizes if below < other < above and other != size]


def _activations(network: Network, patch: Vec3) -> list[tuple[int, int, int, int, int]]:
    """Shapes of x0, x1, .. for one patch: (S, z, y, x, f)."""
    shapes = network.layer_shapes(patch)
    return [shapes[0].in_shape, *(shape.out_shape for shape in shapes)]


def _between(network: Network, patch: Vec3) -> list[tuple[int, int, int, int, int]]:
    """The activations that every plan writes: those between spans, the first and the last."""
    shapes = _activations(network, patch)
    return [shapes[0], *(shapes[last + 1] for _, last in spans(network))]


def _with(patch: Vec3, axis: int, size: int) -> Vec3:
    z, y, x = (size if axis == i else extent for i, extent in enumerate(patch))
    return z, y, x
