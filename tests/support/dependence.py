"""Find voxels that an output depends on, along one axis, followed voxel by voxel by the definition of each layer.

An edge of a layer is a list: for each voxel of its output, the voxels of its input that its value depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

from znnpy.geometry import Geometry
from znnpy.layers import AveragePool, Conv, ConvTranspose, Crop, Layer, MaxFilter, Pad, PadMode, Pool, Upsample

Edge = list[set[int]]


def edge_of(layer: Layer, axis: int, n: int) -> Edge:
    """Return the edge of a layer that takes n voxels; no voxel for a layer that gives none."""
    match layer:
        case Conv():
            before, behind = layer.padding[0][axis], layer.padding[1][axis]
            padded = _padded(before, behind, n, layer.padding_mode)
            taps = [tap * layer.dilation[axis] for tap in range(layer.kernel[axis])]
            begins = range(0, len(padded) - taps[-1], layer.stride[axis])
            return [set().union(*(padded[begin + tap] for tap in taps)) for begin in begins]
        case Pool() | AveragePool():
            before, behind = layer.padding[0][axis], layer.padding[1][axis]
            found: Edge = []
            begin = -before
            while _has_window(layer, axis, begin, n, behind):
                found.append({i for i in range(begin, begin + layer.window[axis]) if 0 <= i < n})
                begin += layer.step[axis]
            return found
        case MaxFilter():
            return [set(range(i, i + layer.window[axis])) for i in range(n - layer.window[axis] + 1)]
        case ConvTranspose():
            size = (n - 1) * layer.stride[axis] + layer.reach[axis] + layer.output_padding[axis]
            found = [set() for _ in range(size)]
            for i in range(n):
                for tap in range(layer.kernel[axis]):
                    found[i * layer.stride[axis] + tap * layer.dilation[axis]].add(i)
            return found[layer.padding[0][axis] : size - layer.padding[1][axis]]
        case Upsample(factor=factor, how="nearest"):
            assert factor is not None
            return [{i} for i in range(n) for _ in range(factor[axis])]
        case Upsample(factor=factor):
            assert factor is not None
            return [_interpolated(Fraction(2 * i + 1, 2 * factor[axis]), n) for i in range(n * factor[axis])]
        case Crop():
            return [{i} for i in range(n)][layer.before[axis] : n - layer.behind[axis]]
        case Pad():
            return _padded(layer.before[axis], layer.behind[axis], n, layer.how)
        case _:
            return [{i} for i in range(n)]


def _has_window(layer: Pool | AveragePool, axis: int, begin: int, n: int, behind: int) -> bool:
    """Return whether a window begins there, as PyTorch defines it."""
    missing = begin + layer.window[axis] - (n + behind)
    if not layer.ceil:
        return missing <= 0
    return missing < layer.step[axis] and begin < n


def _padded(before: int, behind: int, n: int, how: PadMode) -> Edge:
    """Return what each voxel of a padded image repeats."""
    if how == "zeros":
        return [{i} if 0 <= i < n else set() for i in range(-before, n + behind)]
    if how == "replicate":
        return [{min(max(i, 0), n - 1)} for i in range(-before, n + behind)]
    return [{-i if i < 0 else 2 * (n - 1) - i if i >= n else i} for i in range(-before, n + behind)]


def _interpolated(at: Fraction, n: int) -> set[int]:
    """Return the voxels with weight at a position, where voxel i lies at i + 1/2."""
    at = max(at - Fraction(1, 2), Fraction(0))
    low = min(floor(at), n - 1)
    return {low} if at == low else {low, min(low + 1, n - 1)}


def edges_of(geometry: Geometry, axis: int) -> list[Edge]:
    """Return the edge of each layer; all inputs of a layer have one size."""
    along = geometry.axes[axis]
    return [
        edge_of(one.layer, axis, along.sizes[sources[0]])
        for one, sources in zip(along.layers, along.sources, strict=True)
    ]


def needed_by(geometry: Geometry, axis: int, wanted: Sequence[range]) -> list[set[int]]:
    """Return the voxels of every tensor that those wanted of each output depend on."""
    along, edges = geometry.axes[axis], edges_of(geometry, axis)
    found: list[set[int]] = [set() for _ in along.sizes]
    for tensor, own in zip(along.outputs, wanted, strict=True):
        found[tensor] |= set(own)
    for index in reversed(range(len(along.layers))):
        for voxel in found[index + 1]:
            for source in along.sources[index]:
                found[source] |= edges[index][voxel]
    return found
