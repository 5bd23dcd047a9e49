"""Put layers before an operator where its input does not have its maps and voxels in the usual order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.formats.files import LARGEST
from znnpy.geometry import vector
from znnpy.importing.drafts import Drafts, Real
from znnpy.importing.tensors import AXES, Axis, Dimension, Factor, LayoutError, Tensor, combinations, kinds, whole
from znnpy.layers import ONE, Conv, ConvTranspose, Upsample
from znnpy.network import ConvWeights
from znnpy.shapes import Vec3

MOST_MADE = 2**25  # weights of all kernels of ones and zeros of a network: a small file can ask for many


@dataclass
class Arranged(Drafts):
    """Layers, and arrays as maps over a volume: an array that has them otherwise costs layers that move values."""

    _made: int = 0  # weights of kernels of ones and zeros so far

    def canonical(self, x: Tensor, depth: int | None = None) -> Tensor:
        """Return an array (1, maps, ...) over `depth` spatial dimensions, with layers for what rearranges values.

        LayoutError if its dimensions are not so.
        """
        depth = len(x.dims) - 2 if depth is None else depth
        if depth == 1:
            raise self.error("is over one dimension; volumes of three, and images of two, can be computed")
        if len(x.dims) != depth + 2 or depth not in (2, 3) or x.shape[0] != 1:
            raise LayoutError(
                f"{self.here} gets an array of shape {x.shape}, and takes (1, maps, {'z, ' * (depth - 2)}y, x)"
            )
        return self._rearranged(x, ((), *x.dims[2:]) if depth == 2 else x.dims[2:], x.dims[1])

    def _as_maps(self, x: Tensor) -> Tensor:
        """Return an array whose first dimension has the maps, with whatever others, as maps over a volume."""
        rest = [(factor, _axis_of(factor, dim)) for dim in x.dims[1:] for factor in dim]
        if any(axis is None for _, axis in rest):
            raise LayoutError(f"{self.here} gets an array of shape {x.shape} in which maps are in several dimensions")
        volume = tuple(tuple(factor for factor, own in rest if own == axis) for axis in AXES)
        return self._rearranged(x, volume, x.dims[0])

    def _with_maps_at(self, x: Tensor, at: int | None) -> Tensor:
        """Return the maps over the volume of an array that has its maps in dimension `at`, or in any one."""
        if at is None:
            held = [i for i, dim in enumerate(x.dims) if "c" in kinds(dim)]
            if len(held) > 1:
                raise LayoutError(
                    f"{self.here} gets an array of shape {x.shape} in which maps are in several dimensions"
                )
            at = held[0] if held else 0
        order = [at, *(i for i in range(len(x.dims)) if i != at)]
        return self._as_maps(x.transposed(order))

    def _rearranged(self, x: Tensor, volume: Sequence[Dimension], maps: Dimension) -> Tensor:
        """Return a tensor with these maps over this volume, after layers that put the values there."""
        if _is_whole(volume, x.size) and maps == ((Factor("c", x.maps),) if x.maps > 1 else ()):
            return replace(x, dims=whole("", x.maps, x.size).dims)
        if prod(f.size for f in maps) > LARGEST:
            raise LayoutError(f"{self.here} gets {prod(f.size for f in maps)} maps, and {LARGEST} at most are read")
        inside = [kinds(dim) for dim in volume]
        allowed: set[Axis] = {"c", "z", "y", "x", "copies"}
        if not set(kinds(maps)) <= allowed or any(
            (dim and n > 1 and dim[0].of != axis)
            or any(f.of in AXES and (i > 0 or f.of != axis) for i, f in enumerate(dim))
            for dim, axis, n in zip(volume, AXES, x.size, strict=True)
        ):
            raise LayoutError(
                f"{self.here} gets an array of shape {x.shape}, whose dimensions are not maps over a volume: {inside}"
            )
        if any(f.of in AXES for f in maps):
            return self._folded_into_maps(x, volume, maps)
        if any(f.of == "c" for dim in volume for f in dim):
            return self._unfolded_from_maps(x, volume, maps)
        made = replace(x, dims=whole("", x.maps, x.size).dims)
        index = [combination["c"] for combination in combinations(maps, ("c",))]
        if index != list(range(x.maps)):
            made = self._selected(made, 1, index)
        factor = vector(prod(f.size for f in dim if f.of == "copies") for dim in volume)
        if factor != ONE:
            made = self._emit(Upsample(factor), (made,))
        return made

    def _folded_into_maps(self, x: Tensor, volume: Sequence[Dimension], maps: Dimension) -> Tensor:
        """Space to depth: the voxels of a block become maps, by a convolution with ones and zeros."""
        stride = vector(dim[0].step if dim else 1 for dim in volume)
        rows = list(combinations(maps, ("c", *AXES)))
        if any(len(dim) > 1 for dim in volume) or any(
            row[a] >= s for row in rows for a, s in zip(AXES, stride, strict=True)
        ):
            raise LayoutError(f"{self.here} gets an array of shape {x.shape} that mixes maps and voxels")
        weight = self._zeros(len(rows), x.maps, *stride)
        for out, row in enumerate(rows):
            weight[out, row["c"], row["z"], row["y"], row["x"]] = 1
        layer = Conv(stride, len(rows), stride=stride)
        made = replace(x, dims=whole("", x.maps, x.size).dims)
        return self._emit(layer, (made,), ConvWeights(weight, np.zeros(len(rows), np.float32)))

    def _unfolded_from_maps(self, x: Tensor, volume: Sequence[Dimension], maps: Dimension) -> Tensor:
        """Depth to space (pixel shuffle): maps become the voxels of a block, by a transposed convolution."""
        inner = [dim[1:] for dim in volume]
        if any(f.of == "copies" for dim in (*inner, maps) for f in dim):
            raise LayoutError(f"{self.here} gets an array of shape {x.shape} that mixes maps and copies")
        outs = list(combinations(maps, ("c",)))
        stride = vector(prod(f.size for f in dim) for dim in inner)
        weight = self._zeros(x.maps, len(outs), *stride)
        offsets = [[c["c"] for c in combinations(dim, ("c",))] for dim in inner]
        for out, base in enumerate(outs):
            for z, dz in enumerate(offsets[0]):
                for y, dy in enumerate(offsets[1]):
                    for c, dx in enumerate(offsets[2]):
                        weight[base["c"] + dz + dy + dx, out, z, y, c] = 1
        layer = ConvTranspose(stride, len(outs), stride)
        made = replace(x, dims=whole("", x.maps, x.size).dims)
        return self._emit(layer, (made,), ConvWeights(weight, np.zeros(len(outs), np.float32)))

    def _selected(self, x: Tensor, at: int, index: Sequence[int]) -> Tensor:
        """Return an array with only these maps in the dimension `at`, by a 1x1x1 convolution with ones and zeros."""
        weight = self._zeros(len(index), x.maps)
        weight[np.arange(len(index)), index] = 1
        made = self._pointwise(self._whole(x), weight, None)
        maps: Dimension = (Factor("c", made.maps),) if made.maps > 1 else ()
        return replace(made, dims=(*x.dims[:at], maps, *x.dims[at + 1 :]))

    def _zeros(self, *shape: int) -> Real:
        """Return zeros for a kernel that moves values; LayoutError if there are too many."""
        self._made += prod(shape)
        if self._made > MOST_MADE:
            raise LayoutError(
                f"{self.here} would move values by a kernel of {prod(shape)} weights, which with others are more than "
                f"the {MOST_MADE} that are made; use fewer maps there"
            )
        return np.zeros(shape, np.float32)

    def _pointwise(self, x: Tensor, weight: npt.NDArray[np.generic], bias: npt.NDArray[np.generic] | None) -> Tensor:
        values = self.values(weight, "weight").reshape(*weight.shape, 1, 1, 1)
        return self._emit(Conv(ONE, weight.shape[0]), (x,), ConvWeights(values, self._bias(bias, weight.shape[0])))

    def _whole(self, x: Tensor) -> Tensor:
        """Return the tensor of an array, as the node gives it."""
        return whole(x.node, x.maps, x.size)


def _is_whole(volume: Sequence[Dimension], size: Vec3) -> bool:
    return tuple(volume) == tuple((Factor(axis, n),) if n > 1 else () for axis, n in zip(AXES, size, strict=True))


def _axis_of(factor: Factor, dim: Dimension) -> Axis | None:
    """Return the axis of the volume that a factor of a dimension is of; copies are of the one that is copied there."""
    held = {one.of for one in dim if one.of != "copies"} if factor.of == "copies" else {factor.of}
    return held.pop() if len(held) == 1 and held <= set(AXES) else None
