"""Work out where the voxels of a graph's tensors lie in a volume, and which of them an output needs.

Everything follows from one function per layer: for an interval of a layer's output along an axis, `needed` gives the
interval of its input. Regions of patches, planes that a column computes in a step, and planes that it keeps are found
by taking intervals from the outputs back to the input, as Halide's bounds inference does (Ragan-Kelley et al. 2013).

A tensor's voxels are counted from the volume's first voxel. Regions never exceed the volume: what a layer needs beyond
a face is its padding, which no tensor holds. Tensor 0 is the input, tensor i + 1 the output of layer i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple

from znnpy.layers import (
    OF_WHOLE_IMAGES,
    Add,
    AveragePool,
    Conv,
    ConvTranspose,
    Crop,
    GlobalPool,
    Layer,
    MaxFilter,
    Multiply,
    Pad,
    PadMode,
    Pool,
    Upsample,
)
from znnpy.network import Network
from znnpy.shapes import Vec3

AXES = "zyx"


class Interval(NamedTuple):
    """The voxels lo <= i < hi along an axis."""

    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi - self.lo

    def within(self, lo: int, hi: int) -> Interval:
        """Return the part within lo .. hi, which may be empty but never has a negative size."""
        begin = min(max(self.lo, lo), hi)
        return Interval(begin, max(begin, min(self.hi, hi)))

    def joined(self, other: Interval) -> Interval:
        """Return the smallest interval with both; an empty one counts for nothing."""
        if self.size <= 0 or other.size <= 0:
            return other if self.size <= 0 else self
        return Interval(min(self.lo, other.lo), max(self.hi, other.hi))


NOTHING = Interval(0, 0)


def vector(values: Iterable[int]) -> Vec3:
    """Return three numbers, of z, y and x, as a tuple of that length."""
    z, y, x = values
    return z, y, x


def _windows(n: int, reach: int, stride: int, padding: int, *, ceil: bool = False, before: int = 0) -> int:
    """Return the number of windows in n voxels with so much padding in all; `before` of it lies before the first.

    A window that `ceil` adds begins within the image or its padding before, as PyTorch requires.
    """
    free = n + padding - reach
    count = max(0, (-(-free // stride) if ceil else free // stride) + 1)
    return count - 1 if ceil and count and (count - 1) * stride >= n + before else count


class AxisLayer(NamedTuple):
    """One layer along one axis."""

    layer: Layer
    axis: int

    @property
    def step(self) -> Fraction:
        """Return the size of an output voxel, in voxels of the input."""
        layer, axis = self.layer, self.axis
        match layer:
            case Conv():
                return Fraction(layer.stride[axis])
            case Pool() | AveragePool():
                return Fraction(layer.step[axis])
            case ConvTranspose():
                return Fraction(1, layer.stride[axis])
            case Upsample(factor=factor) if factor is not None:
                return Fraction(1, factor[axis])
            case _:
                return Fraction(1)

    @property
    def repeats(self) -> bool:
        """Return whether an input of one voxel counts for all voxels of the output."""
        return isinstance(self.layer, Add | Multiply)

    @property
    def needs_all(self) -> bool:
        """Return whether each voxel of the output depends on all of the input."""
        return isinstance(self.layer, OF_WHOLE_IMAGES)

    def size(self, n: int) -> int:
        """Return the size of the output for an input of n voxels; 0 or less: there is none."""
        layer, axis = self.layer, self.axis
        match layer:
            case Conv():
                padding = layer.padding[0][axis] + layer.padding[1][axis]
                return _windows(n, layer.reach[axis], layer.stride[axis], padding)
            case Pool() | AveragePool():
                before, behind = layer.padding[0][axis], layer.padding[1][axis]
                padding = before + behind
                return _windows(n, layer.window[axis], layer.step[axis], padding, ceil=layer.ceil, before=before)
            case MaxFilter():
                return n - layer.window[axis] + 1
            case ConvTranspose():
                padding = layer.padding[0][axis] + layer.padding[1][axis] - layer.output_padding[axis]
                return (n - 1) * layer.stride[axis] - padding + layer.reach[axis]
            case Upsample(factor=factor):
                assert factor is not None, "resolved before"
                return n * factor[axis]
            case Crop():
                return n - layer.before[axis] - layer.behind[axis]
            case Pad():
                return n + layer.before[axis] + layer.behind[axis]
            case GlobalPool():
                return 1
            case _:
                return n

    def needed(self, lo: int, hi: int, n: int | None) -> Interval:
        """Return the input voxels that the output voxels lo .. hi - 1 need, of an input of n voxels.

        What lies outside 0 .. n is padding. Values that padding repeats are included. n = None: as if the input went
        on without faces; what a layer of the whole image needs besides the voxels themselves is then left out.
        """
        return Interval(*self.ends_needed(lo, hi, n))

    def ends_needed(self, lo: Any, hi: Any, n: int | None) -> tuple[Any, Any]:
        """Return the ends of what `needed` gives, for one interval or for arrays of them."""
        layer, axis = self.layer, self.axis
        if n is not None and (self.needs_all or (self.repeats and n == 1)):
            return 0 * lo, 0 * hi + n
        match layer:
            case Conv():
                begin = lo * layer.stride[axis] - layer.padding[0][axis]
                end = begin + (hi - 1 - lo) * layer.stride[axis] + layer.reach[axis]
                return _unpadded(layer.padding_mode, begin, end, n)
            case Pool() | AveragePool():
                begin = lo * layer.step[axis] - layer.padding[0][axis]
                return begin, begin + (hi - 1 - lo) * layer.step[axis] + layer.window[axis]
            case MaxFilter():
                return lo, hi + layer.window[axis] - 1
            case ConvTranspose():
                stride, padding = layer.stride[axis], layer.padding[0][axis]
                begin = -((layer.reach[axis] - 1 - lo - padding) // stride)
                # At least one voxel, even if it contributes nothing: the last one that begins at `lo` or before.
                begin, end = _least(begin, (lo + padding) // stride), (hi - 1 + padding) // stride + 1
                return begin if n is None else _least(begin, n - 1), end
            case Upsample(factor=factor, how=how):
                assert factor is not None, "resolved before"
                f = factor[axis]
                if how == "nearest" or f == 1:
                    return lo // f, (hi - 1) // f + 1
                # between the voxels at floor((i + 0.5) / f - 0.5) and the next one
                return (2 * lo + 1 - f) // (2 * f), (2 * hi - 1 - f) // (2 * f) + 2
            case Crop():
                return lo + layer.before[axis], hi + layer.before[axis]
            case Pad(how="zeros") if n is not None:  # at least one voxel, even if it contributes nothing
                return _least(lo - layer.before[axis], n - 1), _most(hi - layer.before[axis], 1)
            case Pad():
                return _unpadded(layer.how, lo - layer.before[axis], hi - layer.before[axis], n)
            case _:
                return lo, hi


def _least(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers, or of an array and numbers at each place."""
    return min(a, b) if isinstance(a, int) else a.clip(max=b)


def _most(a: Any, b: Any) -> Any:
    """Return the larger of two numbers, or of an array and numbers at each place."""
    return max(a, b) if isinstance(a, int) else a.clip(min=b)


def _unpadded(how: PadMode, lo: Any, hi: Any, n: int | None) -> tuple[Any, Any]:
    """Return what the voxels lo .. hi - 1 need, counted from the first one that is no padding.

    Voxel -i repeats voxel i by reflection, and n - 1 + i voxel n - 1 - i; by replication they repeat 0 and n - 1.
    """
    if how == "zeros" or n is None:
        return lo, hi
    if how == "reflect":
        return _least(lo, 2 * n - 1 - hi), _most(hi, 1 - lo)
    return _least(lo, n - 1), _most(hi, 1)


@dataclass(frozen=True)
class AxisGeometry:
    """The tensors of a network along one axis, for a volume of `n` voxels there."""

    layers: tuple[AxisLayer, ...]
    sources: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]  # of each tensor
    steps: tuple[Fraction, ...]  # size of a voxel of each tensor, in voxels of the input

    @cached_property
    def period(self) -> int:
        """Voxels of the input after which the network does the same again: every tensor has whole voxels in it."""
        return lcm(*(step.numerator for step in self.steps))

    def voxels(self, tensor: int) -> int:
        """Return the voxels of a tensor in a period."""
        return self._voxels[tensor]

    @cached_property
    def _voxels(self) -> tuple[int, ...]:
        return tuple(int(self.period / step) for step in self.steps)

    def regions(self, wanted: Sequence[Interval]) -> tuple[Interval, ...]:
        """Return the voxels of every tensor that those wanted of the outputs need, within the volume.

        wanted  of each output, in the order of `outputs`
        """
        found = [NOTHING] * len(self.sizes)
        for tensor, interval in zip(self.outputs, wanted, strict=True):
            found[tensor] = found[tensor].joined(interval.within(0, self.sizes[tensor]))
        for index in reversed(range(len(self.layers))):
            mine = found[index + 1]
            if mine.size > 0:
                if self.layers[index].needs_all:  # it is computed at once
                    found[index + 1] = Interval(0, self.sizes[index + 1])
                for source in self.sources[index]:
                    found[source] = found[source].joined(self.read(index, mine, source))
        return tuple(found)

    def needed(self, index: int, region: Interval, source: int) -> Interval:
        """Return what layer `index` needs of tensor `source` for a region of its output, padding included."""
        return self.layers[index].needed(region.lo, region.hi, self.sizes[source])

    def read(self, index: int, region: Interval, source: int) -> Interval:
        """Return what layer `index` reads of tensor `source` for a region of its output, which may be empty."""
        if region.size <= 0:
            return NOTHING
        return self.needed(index, region, source).within(0, self.sizes[source])


@dataclass(frozen=True)
class Geometry:
    """The tensors of a network over a volume of a size that the network admits."""

    network: Network  # with all sizes resolved: no layer refers to the size of another
    volume: Vec3
    axes: tuple[AxisGeometry, AxisGeometry, AxisGeometry]

    @cached_property
    def period(self) -> Vec3:
        """Voxels of the input after which the network does the same again."""
        return vector(axis.period for axis in self.axes)

    def size(self, tensor: int) -> Vec3:
        """Return the size of a tensor."""
        return vector(axis.sizes[tensor] for axis in self.axes)

    def step(self, tensor: int) -> tuple[Fraction, Fraction, Fraction]:
        """Return the size of a tensor's voxel, in voxels of the input."""
        z, y, x = (axis.steps[tensor] for axis in self.axes)
        return z, y, x

    def voxels(self, tensor: int) -> Vec3:
        """Return the voxels of a tensor in a period."""
        return vector(axis.voxels(tensor) for axis in self.axes)
