"""Define what a graph that is computed whole gives at some voxels, in float64, from the part that they depend on.

The regions of tensors are those of `geometry`; each layer then takes its inputs by the place of their voxels in the
volume, so that a region that lacks a voxel is an error and never padding. It shares nothing with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from znnpy.geometry import Geometry
from znnpy.graph_operations import Region
from znnpy.graph_shapes import TransposeShape, UpsampleShape
from znnpy.kernels import definition, whole
from znnpy.kernels.definition import Real
from znnpy.layers import (
    NO_PADDING,
    AveragePool,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    MaxFilter,
    Pad,
    PadMode,
    Pool,
    Upsample,
)
from znnpy.network import ConvWeights
from znnpy.patches import Box
from znnpy.shapes import Vec3, add, multiply, subtract


@dataclass(frozen=True)
class _Part:
    """A part of a tensor: its values (z, y, x, f) in a box, and the size of the whole tensor."""

    box: Box
    size: Vec3
    values: Real

    def around(self, box: Box, how: PadMode = "zeros", beyond: float = 0.0) -> Real:
        """Return the values in a box that may reach beyond the tensor, where they are padding; zeros are `beyond`."""
        taken, given = [], []
        for lo, hi, n, first, last in zip(box.lo, box.hi, self.size, self.box.lo, self.box.hi, strict=True):
            at = np.arange(lo, hi)
            if how == "reflect":
                at = np.where(at < 0, -at, at)
                at = np.where(at >= n, 2 * (n - 1) - at, at)
            elif how == "replicate":
                at = np.clip(at, 0, n - 1)
            inside = (at >= 0) & (at < n)
            at = at[inside]
            if at.size and not first <= at.min() <= at.max() < last:
                raise IndexError(f"voxels {at.min()} to {at.max()} are read, and {first} to {last - 1} are there")
            taken.append(at - first)
            given.append(np.flatnonzero(inside))
        out = np.full((*box.size, self.values.shape[3]), beyond)
        out[np.ix_(*given)] = self.values[np.ix_(*taken)]
        return out


def outputs_in(
    geometry: Geometry, weights: Sequence[ConvWeights], wanted: Sequence[Region], read: Callable[[Box], Real]
) -> tuple[Real, ...]:
    """Return the outputs of a graph in some regions, one array (z, y, x, f) for each output.

    geometry  of the network as it is written, with nothing merged
    weights   of the layers that have some, in order
    wanted    voxels of each output
    read      returns a box of the normalised input
    """
    network = geometry.network
    of_layer = dict(zip(network.weighted, weights, strict=True))
    along = [axis.regions([region[index] for region in wanted]) for index, axis in enumerate(geometry.axes)]
    boxes = [_box((z, y, x)) for z, y, x in zip(*along, strict=True)]
    last = {source: index for index, sources in enumerate(network.sources) for source in sources}
    parts = {0: _Part(boxes[0], geometry.size(0), read(boxes[0]))}
    for index, (layer, sources) in enumerate(zip(network.layers, network.sources, strict=True)):
        box, size = boxes[index + 1], geometry.size(index + 1)
        if box.voxels:
            inputs = [parts[source] for source in sources]
            parts[index + 1] = _Part(box, size, _computed(layer, of_layer.get(index), inputs, box))
        else:  # nothing of it is needed
            parts[index + 1] = _Part(box, size, np.empty((*box.size, network.maps[index + 1])))
        for source in set(sources):
            if last[source] == index and source not in network.outputs:
                del parts[source]
    return tuple(parts[tensor].around(_box(region)) for tensor, region in zip(network.outputs, wanted, strict=True))


def _box(region: Region) -> Box:
    z, y, x = region
    return Box((z.lo, y.lo, x.lo), (z.hi, y.hi, x.hi))


def _computed(layer: Layer, weights: ConvWeights | None, inputs: Sequence[_Part], box: Box) -> Real:
    """Return the output of a layer in a box."""
    first = inputs[0]
    match layer:
        case Conv():
            seen = _windows(box, layer.stride, layer.padding[0], layer.reach)
            plain: Layer = replace(layer, padding=NO_PADDING, padding_mode="zeros")
            return whole.computed(plain, weights, [first.around(seen, layer.padding_mode)])
        case ConvTranspose():
            assert weights is not None
            return _transposed(layer, weights, first, box)
        case Pool():
            seen = _windows(box, layer.step, layer.padding[0], layer.window)
            plain = replace(layer, padding=NO_PADDING, ceil=False)
            return whole.computed(plain, None, [first.around(seen, beyond=-np.inf)])
        case AveragePool():
            seen = _windows(box, layer.step, layer.padding[0], layer.window)
            plain = replace(layer, padding=NO_PADDING, ceil=False)
            sums = whole.computed(plain, None, [first.around(seen)]) * prod(layer.window)
            return sums / _counted(layer, box, first.size)
        case MaxFilter():
            return whole.computed(layer, None, [first.around(_windows(box, (1, 1, 1), (0, 0, 0), layer.window))])
        case Upsample():
            return _upsampled(layer, first, box)
        case Crop():
            return first.around(box.shifted(layer.before))
        case Pad():
            return first.around(box.shifted(subtract((0, 0, 0), layer.before)), layer.how)
        case _:
            return whole.computed(layer, weights, [one.around(box) for one in inputs])


def _windows(box: Box, stride: Vec3, before: Vec3, reach: Vec3) -> Box:
    """Return the input voxels of all windows of the outputs in a box, padding included."""
    lo = subtract(multiply(box.lo, stride), before)
    return Box(lo, add(add(lo, multiply(subtract(box.size, (1, 1, 1)), stride)), reach))


def _counted(layer: AveragePool, box: Box, size: Vec3) -> Real:
    """Return the number of voxels by which the sum over each window is divided, (z, y, x, 1)."""
    counts = []
    for axis in range(3):
        begin = np.arange(box.lo[axis], box.hi[axis]) * layer.step[axis] - layer.padding[0][axis]
        end = begin + layer.window[axis]
        if layer.count_padding:
            counts.append(np.minimum(end, size[axis] + layer.padding[1][axis]) - begin)
        else:
            counts.append(np.minimum(end, size[axis]) - np.maximum(begin, 0))
    z, y, x = counts
    found: Real = (z[:, None, None, None] * y[:, None, None] * x[:, None]).astype(np.float64)
    return found


def _transposed(layer: ConvTranspose, weights: ConvWeights, x: _Part, box: Box) -> Real:
    """Return a transposed convolution in a box, from all voxels that contribute to it."""
    lo, hi, first = [], [], []
    for axis in range(3):
        stride, reach, n = layer.stride[axis], layer.reach[axis], x.size[axis]
        begin, end = box.lo[axis] + layer.padding[0][axis], box.hi[axis] + layer.padding[0][axis]
        lo.append(min(max(0, -((reach - 1 - begin) // stride)), n))
        hi.append(max(lo[-1], min(n, (end - 1) // stride + 1)))
        first.append(begin - lo[-1] * stride)
    seen = Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))
    shape = TransposeShape(
        x.values.shape[3], layer.out, seen.size, box.size, layer.kernel, (first[0], first[1], first[2]), layer.stride,
        layer.dilation, layer.groups, layer.activation, layer.parameters,
    )  # fmt: skip
    return definition.transpose(shape, weights, x.around(seen))


def _upsampled(layer: Upsample, x: _Part, box: Box) -> Real:
    """Return an upsampling in a box."""
    assert layer.factor is not None, "resolved before"
    lo, hi = [], []
    for axis, factor in enumerate(layer.factor):
        begin, end, n = box.lo[axis], box.hi[axis], x.size[axis]
        if layer.how == "nearest" or factor == 1:
            lo.append(begin // factor)
            hi.append((end - 1) // factor + 1)
        else:  # between the voxels at floor((i + 0.5) / factor - 0.5) and the next ones
            lo.append(max(0, (2 * begin + 1 - factor) // (2 * factor)))
            hi.append(min(n, (2 * end - 1 - factor) // (2 * factor) + 2))
    seen = Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))
    first = subtract(box.lo, multiply(seen.lo, layer.factor))
    shape = UpsampleShape(x.values.shape[3], seen.size, box.size, layer.factor, first, layer.how)
    return definition.upsample(shape, x.around(seen))
