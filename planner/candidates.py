"""Output patch shapes worth a look: every axis cut into equal parts, in all combinations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from znnpy.network import Network
from znnpy.shapes import FLOAT32, Vec3, ceil_divide

AXIS_SIZES = 32  # most sizes tried along one axis


@dataclass(frozen=True, slots=True)
class Candidate:
    """One patch shape, and what its size alone says of the work and the memory."""

    patch: Vec3  # dense output voxels
    patches: int  # that cover the output
    voxels: tuple[int, ...]  # of every activation x0, x1, .. in one patch, all fragments, one map
    largest_bytes: int  # of the largest activation: no plan needs less


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


def candidates(network: Network, output: Vec3, room: int | None = None) -> Iterator[Candidate]:
    """Patch shapes for a dense output, anisotropic ones too.

    With `room`, only those whose largest activation fits in so many bytes. Where an axis offers more than AXIS_SIZES
    sizes, those too large for any patch are left out first, the others thinned.
    """
    sizes = [axis_sizes(length, period) for length, period in zip(output, network.period, strict=True)]
    thinnest: Vec3 = (sizes[0][-1], sizes[1][-1], sizes[2][-1])
    per_voxel = [FLOAT32 * maps for maps in network.maps]
    fragments = [shape[0] for shape in _activations(network, thinnest)]
    kept: list[list[tuple[int, list[int]]]] = []
    for axis in range(3):
        fitting = []
        for size in sizes[axis]:
            patch = (*thinnest[:axis], size, *thinnest[axis + 1 :])
            shapes = _activations(network, (patch[0], patch[1], patch[2]))
            if room is None or max(FLOAT32 * prod(shape) for shape in shapes) <= room:
                fitting.append((size, [shape[1 + axis] for shape in shapes]))
        chosen = set(thinned([size for size, _ in fitting], AXIS_SIZES))
        kept.append([(size, extents) for size, extents in fitting if size in chosen])
    for z, z_extents in kept[0]:
        for y, y_extents in kept[1]:
            plane = [s * a * b for s, a, b in zip(fragments, z_extents, y_extents, strict=True)]
            for x, x_extents in kept[2]:
                voxels = tuple([s * c for s, c in zip(plane, x_extents, strict=True)])
                largest = max([v * b for v, b in zip(voxels, per_voxel, strict=True)])
                if room is None or largest <= room:
                    yield Candidate((z, y, x), prod(ceil_divide(output, (z, y, x))), voxels, largest)


def candidate(network: Network, output: Vec3, patch: Vec3) -> Candidate:
    """One patch shape that the caller wants; ShapeError when it is not a multiple of the pooling period."""
    shapes = _activations(network, patch)
    return Candidate(
        patch,
        prod(ceil_divide(output, patch)),
        tuple(prod(shape[:4]) for shape in shapes),
        max(FLOAT32 * prod(shape) for shape in shapes),
    )


def _activations(network: Network, patch: Vec3) -> list[tuple[int, int, int, int, int]]:
    """Shapes of x0, x1, .. for one patch: (S, z, y, x, f)."""
    shapes = network.layer_shapes(patch)
    return [shapes[0].in_shape, *(shape.out_shape for shape in shapes)]
