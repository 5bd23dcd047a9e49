"""Join several arrays, or the maps of one, in a network that is being made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.importing.arranged import Arranged
from znnpy.importing.drafts import planar_dims
from znnpy.importing.tensors import (
    Dimension,
    Factor,
    LayoutError,
    Tensor,
    combinations,
    in_order,
    kinds,
    order_of,
)
from znnpy.layers import ONE, Add, Concat, Maxout, Multiply
from znnpy.shapes import text


@dataclass
class Joins(Arranged):
    """The layers so far, and the operators that take several arrays, or several maps."""

    def add(self, first: Tensor, second: Tensor) -> Tensor:
        """Add two arrays, of which one may have a single map."""
        return self._join(Add(), first, second)

    def multiply(self, first: Tensor, second: Tensor) -> Tensor:
        """Multiply two arrays value by value, of which one may have a single map."""
        return self._join(Multiply(), first, second)

    def maximum(self, first: Tensor, second: Tensor) -> Tensor:
        """Take the larger of two arrays at each value, as the maximum over pairs of maps."""
        if first.shape != second.shape:
            raise self.error(f"compares arrays of shapes {first.shape} and {second.shape}, and only equal ones can be")
        pairs = self.canonical(self.stacked((first, second), 2).reshaped((1, 2 * first.shape[1], *first.shape[2:])))
        made = self._emit(Maxout(2), (pairs,))
        return replace(made, dims=planar_dims(made, made.maps)) if len(first.dims) == 4 else made

    def largest_map(self, x: Tensor, dimension: int, *, keep: bool) -> Tensor:
        """Take the maximum over all maps, which are in a dimension of their own."""
        at = dimension % len(x.dims)
        if set(kinds(x.dims[at])) - {"c"} or x.shape[at] != x.maps:
            raise LayoutError(f"{self.here} is over dimension {dimension} of {x.shape}, which are not all maps")
        made = self._emit(Maxout(x.maps), (self._whole(x),)) if x.maps > 1 else x
        dims = [() if i == at else dim for i, dim in enumerate(x.dims)]
        if not keep:
            del dims[at]
        return replace(made, dims=tuple(dims))

    def concat(self, parts: Sequence[Tensor], dimension: int) -> Tensor:
        """Put arrays one behind the other along the dimension of the maps."""
        at = dimension % len(parts[0].dims)
        if len(parts) == 1:
            return parts[0]
        if not any(part.dims[at] for part in parts) and any("c" in kinds(dim) for dim in parts[0].dims):
            return self.stacked([part.without(at) for part in parts], at)
        found = [self._with_maps_at(part, at) for part in parts]
        if len({part.size for part in found}) > 1:
            sizes = " and ".join(dict.fromkeys(text(part.size) for part in found))
            raise LayoutError(
                f"{self.here} joins {sizes} voxels along dimension {dimension}, and only maps can be joined"
            )
        made = self._emit(Concat(), found)
        return replace(made, dims=in_order(made, order_of(parts[0].dims, at)))

    def joined(self, parts: Sequence[Tensor | npt.NDArray[np.generic]], dimension: int) -> Tensor:
        """Put arrays one behind the other, of which some may be known maps that are the same at every voxel."""
        like = next(part for part in parts if isinstance(part, Tensor))
        found = []
        for part in parts:
            if isinstance(part, Tensor):
                found.append(part)
                continue
            values = part.reshape(*part.shape[:2], -1)[0] if part.ndim == len(like.dims) > 2 else part[None]
            if dimension % len(like.dims) != 1 or part.shape[2:] != like.shape[2:] or (values != values[:, :1]).any():
                raise self.error(
                    f"joins an array of shape {like.shape} with known values of shape {part.shape}, and only maps that "
                    "are the same at every voxel do not depend on the place in the volume"
                )
            found.append(self.constant_maps(like, values[:, 0]))
        return self.concat(found, dimension)

    def stacked(self, parts: Sequence[Tensor], dimension: int) -> Tensor:
        """Put arrays (1, maps, ...) side by side along a new dimension."""
        joined = self.concat(parts, 1)
        maps = parts[0].shape[1]
        dims: list[Dimension] = [(), (Factor("c", maps),) if maps > 1 else (), *joined.dims[2:]]
        dims.insert(dimension, (Factor("c", len(parts), maps),) if len(parts) > 1 else ())
        return replace(joined, dims=tuple(dims))

    def over_maps(self, x: Tensor, dimension: int, weight: float, *, keep: bool) -> Tensor:
        """Sum over a dimension of maps, times a weight, by a 1x1x1 convolution."""
        at = dimension % len(x.dims)
        rest = [f for i, dim in enumerate(x.dims) if i != at for f in dim if f.of == "c"]
        if set(kinds(x.dims[at])) - {"c"} or prod(f.size for f in (*rest, *x.dims[at])) != x.maps:
            raise LayoutError(f"{self.here} is over dimension {dimension} of {x.shape}, which are not maps alone")
        summed = [c["c"] for c in combinations(x.dims[at], ("c",))]
        kept = [c["c"] for c in combinations(tuple(rest), ("c",))]
        matrix = self._zeros(len(kept), x.maps)
        for row, base in enumerate(kept):
            matrix[row, [base + one for one in summed]] = weight
        made = self._pointwise(self._whole(x), matrix, None)
        steps = iter(_steps([f.size for f in rest]))
        dims: list[Dimension] = [
            () if i == at else tuple(replace(f, step=next(steps)) if f.of == "c" else f for f in dim)
            for i, dim in enumerate(x.dims)
        ]
        if not keep:
            del dims[at]
        return replace(made, dims=tuple(dims))

    def constant_maps(self, like: Tensor, values: npt.NDArray[np.generic]) -> Tensor:
        """Return maps over the volume of an array, each of which has one value everywhere."""
        x = self.canonical(like)
        made = self._pointwise(x, self._zeros(values.size, x.maps), values)
        return replace(made, dims=planar_dims(made, made.maps)) if len(like.dims) == 4 else made

    def _join(self, layer: Add | Multiply, first: Tensor, second: Tensor) -> Tensor:
        """Join two arrays value by value, with broadcasting."""
        shuffled = any(a and b and a != b for a, b in zip(first.dims, second.dims, strict=False))
        if any(f.of == "copies" for dim in (*first.dims, *second.dims) for f in dim) or (
            shuffled and len(first.dims) == len(second.dims) == 5
        ):
            first, second = self.canonical(first), self.canonical(second)
        many = max(len(first.dims), len(second.dims))
        one, two = ([()] * (many - len(t.dims)) + list(t.dims) for t in (first, second))
        shape = tuple(max(prod(f.size for f in a), prod(f.size for f in b)) for a, b in zip(one, two, strict=True))
        widest = first if prod(first.shape) >= prod(second.shape) else second
        for a, b in zip(one, two, strict=True):
            if a and b and a != b:
                raise LayoutError(f"{self.here} joins arrays of shapes {first.shape} and {second.shape}")
        if prod(widest.shape) != prod(shape):
            raise self.error(f"joins arrays of shapes {first.shape} and {second.shape}, neither of which has {shape}")
        for t in (first, second):
            if t.size not in (widest.size, ONE) or t.maps not in (widest.maps, 1):
                raise LayoutError(f"{self.here} joins arrays of shapes {first.shape} and {second.shape}")
        if widest.dims != tuple(one) and widest.dims != tuple(two):
            raise LayoutError(f"{self.here} joins arrays of shapes {first.shape} and {second.shape}")
        return self._emit(layer, (first, second), like=widest)


def _steps(sizes: Sequence[int]) -> list[int]:
    """Return how far apart neighbours are along each of several parts of an axis, the outer part first."""
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]
