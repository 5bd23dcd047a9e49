"""Collect the layers and weights of a network while a graph of another framework is walked.

The walker of a framework says which node it is at (`at`), and calls a method per operator, with arrays as `Tensor` and
weights as numpy arrays in the order that PyTorch and ONNX share: (out, in / groups, z, y, x) and so on. An operator
over two spatial dimensions becomes one over three, of depth 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from znnpy.geometry import vector
from znnpy.importing.drafts import planar_dims
from znnpy.importing.joins import Joins
from znnpy.importing.tensors import (
    AXES,
    Dimension,
    Factor,
    LayoutError,
    Tensor,
    combinations,
    in_order,
    kinds,
    order_of,
    whole,
)
from znnpy.layers import (
    NO_PADDING,
    ONE,
    ZERO,
    Activate,
    AveragePool,
    Conv,
    ConvTranspose,
    Crop,
    Function,
    GlobalPool,
    Layer,
    Norm,
    NormType,
    Pad,
    PadMode,
    Pool,
    Scale,
    Sides,
    Upsample,
)
from znnpy.network import ConvWeights
from znnpy.shapes import Vec3, text

NO_BIAS = np.zeros(0, np.float32)


@dataclass
class Builder(Joins):
    """The layers so far, and a method for each operator that adds some."""

    # --- operators with weights ---

    def conv(
        self,
        x: Tensor,
        weight: npt.NDArray[np.generic],
        bias: npt.NDArray[np.generic] | None,
        *,
        stride: Sequence[int] = (),
        padding: Sequence[int] = (),
        behind: Sequence[int] | None = None,
        dilation: Sequence[int] = (),
        groups: int = 1,
        mode: PadMode = "zeros",
    ) -> Tensor:
        """Convolve with weights (out, in / groups, ...). `behind` pads the far faces, by default as the near ones."""
        kernel, spatial = self._kernel(weight)
        x, depth = self.canonical(x, spatial), spatial
        if weight.shape[1] * groups != x.maps:
            raise LayoutError(f"{self.here} takes {weight.shape[1] * groups} maps and gets {x.maps}")
        before = self._vector(padding, depth, 0)
        sides = (before, before if behind is None else self._vector(behind, depth, 0))
        layer = Conv(
            self._vector(kernel.shape[2:], 3, 1),
            kernel.shape[0],
            "none",
            self._vector(stride, depth, 1),
            self._vector(dilation, depth, 1),
            groups,
            sides,
            mode if sides != NO_PADDING else "zeros",
        )
        weights = ConvWeights(self.values(kernel, "weight"), self._bias(bias, layer.out))
        return self._emit(layer, (x,), weights, dimensions=depth + 2)

    def conv_transpose(
        self,
        x: Tensor,
        weight: npt.NDArray[np.generic],
        bias: npt.NDArray[np.generic] | None,
        *,
        stride: Sequence[int] = (),
        padding: Sequence[int] = (),
        behind: Sequence[int] | None = None,
        output_padding: Sequence[int] = (),
        dilation: Sequence[int] = (),
        groups: int = 1,
    ) -> Tensor:
        """Convolve transposed, with weights (in, out / groups, ...)."""
        kernel, depth = self._kernel(weight)
        x = self.canonical(x, depth)
        if kernel.shape[0] != x.maps:
            raise LayoutError(f"{self.here} takes {kernel.shape[0]} maps and gets {x.maps}")
        before = self._vector(padding, depth, 0)
        layer = ConvTranspose(
            self._vector(kernel.shape[2:], 3, 1),
            kernel.shape[1] * groups,
            self._vector(stride, depth, 1),
            (before, before if behind is None else self._vector(behind, depth, 0)),
            self._vector(output_padding, depth, 0),
            self._vector(dilation, depth, 1),
            groups,
        )
        weights = ConvWeights(self.values(kernel, "weight"), self._bias(bias, layer.out))
        return self._emit(layer, (x,), weights, dimensions=depth + 2)

    def linear(self, x: Tensor, weight: npt.NDArray[np.generic], bias: npt.NDArray[np.generic] | None = None) -> Tensor:
        """Multiply the last dimension, which holds the maps, by weights (out, in)."""
        dims = x.dims
        if not dims or kinds(dims[-1]) not in ([], ["c"]) or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise LayoutError(
                f"{self.here} multiplies an array of shape {x.shape} by {weight.shape}, not the maps of it"
            )
        order = [len(dims) - 1, *range(len(dims) - 1)]
        first = x.transposed(order)
        made = self._pointwise(self._as_maps(first), weight, bias)
        return replace(made, dims=(*dims[:-1], (Factor("c", made.maps),) if made.maps > 1 else ()))

    def affine(
        self, x: Tensor, factor: npt.NDArray[np.floating] | float, offset: npt.NDArray[np.floating] | float
    ) -> Tensor:
        """Multiply each map by a factor and add an offset, one value or one per map (computed in float64)."""
        rank, x = len(x.dims), self.canonical(x)
        one = np.broadcast_to(np.asarray(factor, np.float64), (x.maps,))
        two = np.broadcast_to(np.asarray(offset, np.float64), (x.maps,))
        weights = ConvWeights(self._finite(one, "factor"), self._finite(two, "offset"))
        return self._emit(Scale(), (x,), weights, dimensions=rank)

    def batch_norm(
        self,
        x: Tensor,
        weight: npt.NDArray[np.generic] | None,
        bias: npt.NDArray[np.generic] | None,
        mean: npt.NDArray[np.generic],
        variance: npt.NDArray[np.generic],
        epsilon: float,
    ) -> Tensor:
        """Normalise each map by stored statistics."""
        stored = [self.values(one, what).astype(np.float64) for one, what in ((mean, "mean"), (variance, "variance"))]
        if stored[1].min(initial=0) < 0:
            raise self.error(f"has the variance {stored[1].min():g}, and a variance is never negative; save it again")
        scale = (1.0 if weight is None else self.values(weight, "weight").astype(np.float64)) / np.sqrt(
            stored[1] + epsilon
        )
        shift = (0.0 if bias is None else self.values(bias, "bias").astype(np.float64)) - stored[0] * scale
        return self.affine(x, scale, shift)

    def prelu(self, x: Tensor, slope: npt.NDArray[np.generic]) -> Tensor:
        """Multiply negative values by a slope, one or one per map."""
        rank, x = len(x.dims), self.canonical(x)
        slopes = self.values(slope, "slope").reshape(-1)
        if slopes.size not in (1, x.maps):
            raise self.error(f"has {slopes.size} slopes for {x.maps} maps; one, or one per map, can be read")
        return self._emit(Activate("prelu"), (x,), ConvWeights(slopes, NO_BIAS), dimensions=rank)

    # --- operators without weights ---

    def activation(self, x: Tensor, function: Function, *parameters: float) -> Tensor:
        """Apply a function to each value; softmax has a method of its own."""
        return self._emit(Activate(function, parameters), (x,), like=x)

    def softmax(self, x: Tensor, dimension: int) -> Tensor:
        """Apply softmax over a dimension, which must be that of the maps."""
        if kinds(x.dims[dimension]) not in ([], ["c"]) or x.shape[dimension] != x.maps:
            raise self.error(f"is over dimension {dimension} of {x.shape}, and only softmax over the maps is local")
        return self._emit(Activate("softmax"), (x,), like=x)

    def pool(
        self,
        x: Tensor,
        how: Literal["max", "average"],
        window: Sequence[int],
        *,
        stride: Sequence[int] = (),
        padding: Sequence[int] = (),
        behind: Sequence[int] | None = None,
        ceil: bool = False,
        count_padding: bool = True,
    ) -> Tensor:
        """Take the maximum or the mean over windows."""
        depth = len(window)
        x = self.canonical(x, depth)
        size = self._vector(window, depth, 1)
        step = self._vector(stride, depth, 1) if stride else size
        before = self._vector(padding, depth, 0)
        sides: Sides = (before, before if behind is None else self._vector(behind, depth, 0))
        other = None if step == size else step
        layer = (
            Pool(size, other, sides, ceil)
            if how == "max"
            else AveragePool(size, other, sides, ceil, count_padding or sides == NO_PADDING)
        )
        return self._emit(layer, (x,), dimensions=depth + 2)

    def upsample(
        self, x: Tensor, how: Literal["nearest", "linear"], sizes: Sequence[int], *, align_corners: bool = False
    ) -> Tensor:
        """Interpolate to so many voxels along each spatial dimension."""
        depth, given = len(sizes), x
        x = self.canonical(x, depth)
        target = self._vector(sizes, depth, 1)
        options: list[Layer] = []
        if all(to % n == 0 for to, n in zip(target, x.size, strict=True)):
            factor = vector(to // n for to, n in zip(target, x.size, strict=True))
            options.append(Upsample(factor, None, how, align_corners and factor != ONE))
        likes: list[Layer] = [Upsample(None, name, how, align_corners) for name in self._of_size(target)]
        options = (
            likes + options if x.size == ONE else options + likes
        )  # one voxel, as of a global pooling, has no step
        if not options:
            raise LayoutError(
                f"{self.here} goes from {text(x.size)} to {text(target)} voxels, which is neither a whole factor nor "
                "the size of another node"
            )
        if options[0] == Upsample(ONE, None, how):
            return given
        return self._emit(options[0], (x,), options=options, size=target, dimensions=depth + 2)

    def cut(self, x: Tensor, dimension: int, begin: int, end: int, step: int = 1) -> Tensor:
        """Take the part begin <= i < end of a dimension, every step-th."""
        at = dimension % len(x.dims)
        own = kinds(x.dims[at])
        if step < 1 or begin >= end or end > x.shape[at]:
            raise self.error(f"takes {begin} to {end} in steps of {step} of {x.shape[at]}, which gives nothing")
        if (begin, end, step) == (0, x.shape[at], 1):
            return x
        if own in ([], ["c"]):
            index = [combination["c"] for combination in combinations(x.dims[at], ("c",))][begin:end:step]
            if prod(f.size for dim in x.dims for f in dim if f.of == "c") != x.shape[at]:
                raise LayoutError(f"{self.here} takes a part of the maps of {x.shape}, which are in several dimensions")
            return self._selected(x, at, index)
        if len(x.dims[at]) != 1 or own[0] not in AXES or x.shape[at] != x.size[AXES.index(own[0])]:
            raise LayoutError(f"{self.here} takes a part of dimension {dimension} of {x.shape}, which is no whole axis")
        axis = AXES.index(own[0])
        order = order_of(x.dims, next((i for i, dim in enumerate(x.dims) if kinds(dim) == ["c"]), -1))
        x = self._with_maps_at(x, None)
        before, behind = [0, 0, 0], [0, 0, 0]
        before[axis], behind[axis] = begin, x.size[axis] - end
        made = self.crop(x, vector(before), vector(behind))
        if step > 1:
            every = [1, 1, 1]
            every[axis] = step
            made = self._emit(
                Conv(ONE, made.maps, stride=vector(every), groups=made.maps),
                (made,),
                ConvWeights(np.ones((made.maps, 1, 1, 1, 1), np.float32), np.zeros(made.maps, np.float32)),
            )
        return replace(made, dims=in_order(made, order))

    def every(self, x: Tensor, steps: Sequence[int]) -> Tensor:
        """Take the first voxel of each block; voxels behind the last whole block are left out."""
        depth = len(steps)
        x = self.canonical(x, depth)
        block = self._vector(steps, depth, 1)
        weight = self._zeros(x.maps, 1, *block)
        weight[:, :, 0, 0, 0] = 1
        layer = Conv(block, x.maps, stride=block, groups=x.maps)
        return self._emit(layer, (x,), ConvWeights(weight, np.zeros(x.maps, np.float32)), dimensions=depth + 2)

    def crop(self, x: Tensor, before: Vec3, behind: Vec3) -> Tensor:
        """Cut voxels off a tensor with maps over a volume. Crops of several dimensions that follow become one."""
        last, read = self._drafts_by_name.get(x.node), x
        if last is not None and isinstance(last.layer, Crop):  # nothing may read the earlier one: then it goes
            before, behind = _plus(last.layer.before, before), _plus(last.layer.behind, behind)
            read = whole(last.reads[0], x.maps, self._sizes[last.reads[0]])
        size = vector(n - a - b for n, a, b in zip(read.size, before, behind, strict=True))
        options: list[Layer] = [Crop(before, behind)]
        if all(b - a in (0, 1) for a, b in zip(before, behind, strict=True)):
            options += [Crop(like=name) for name in self._of_size(size) if name != read.node]
        made = self._emit(options[0], (read,), options=options, size=size)
        return replace(made, dims=_resized(x.dims, x.size, size))

    def pad(self, x: Tensor, before: Sequence[int], behind: Sequence[int], how: PadMode) -> Tensor:
        """Add voxels around the spatial dimensions of an array; negative numbers cut some off."""
        depth = len(before)
        x = self.canonical(x, depth)
        near, far = self._vector(before, depth, 0), self._vector(behind, depth, 0)
        if min(*near, *far) < 0:
            x = self.crop(x, vector(max(0, -n) for n in near), vector(max(0, -n) for n in far))
        near, far = vector(max(0, n) for n in near), vector(max(0, n) for n in far)
        if near == far == ZERO:
            return x if depth == 3 else replace(x, dims=planar_dims(x, x.maps))
        return self._emit(Pad(near, far, how), (x,), dimensions=depth + 2)

    def pad_maps(self, x: Tensor, before: int, behind: int) -> Tensor:
        """Add maps of zeros before and behind those of an array."""
        rank, x = len(x.dims), self.canonical(x)
        weight = self._zeros(before + x.maps + behind, x.maps)
        weight[before : before + x.maps] = np.eye(x.maps, dtype=np.float32)
        made = self._pointwise(x, weight, None)
        return made if rank == 5 else replace(made, dims=planar_dims(made, made.maps))

    def norm(self, x: Tensor, of: NormType, epsilon: float = 1e-5, groups: int = 1) -> Tensor:
        """Normalise an image by its own mean and variance."""
        return self._emit(Norm(of, epsilon, groups), (x,), like=x)

    def global_pool(self, x: Tensor, how: Literal["average", "max"], *, keep: bool) -> Tensor:
        """Take the mean or maximum over the whole image; `keep` says whether its dimensions stay, of size 1."""
        rank, x = len(x.dims), self.canonical(x)
        made = self._emit(GlobalPool(how), (x,))
        maps: Dimension = (Factor("c", x.maps),) if x.maps > 1 else ()
        return replace(made, dims=((), maps, *([()] * (rank - 2 if keep else 0))))

    # --- the parts of layers ---

    def _kernel(self, weight: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.generic], int]:
        """Return weights with three spatial dimensions, and how many they had."""
        depth = weight.ndim - 2
        if depth not in (2, 3):
            raise self.error(f"is over {depth} dimensions; volumes of three, and images of two, can be computed")
        return (weight if depth == 3 else weight[:, :, None]), depth

    def _vector(self, given: Sequence[int], depth: int, usual: int) -> Vec3:
        """Return sizes along z, y and x from those of the framework's spatial dimensions, or from one for all."""
        values = [int(value) for value in given] or [usual]
        values = values * depth if len(values) == 1 else values
        if len(values) == 2 and depth == 2:
            values = [usual if usual else 0, *values]
        if len(values) != 3:
            raise self.error(f"has {len(values)} sizes for {depth} dimensions")
        return values[0], values[1], values[2]


def _resized(dims: Sequence[Dimension], was: Vec3, size: Vec3) -> tuple[Dimension, ...]:
    """Return whole dimensions after the volume changed its size."""
    sizes = dict(zip(AXES, size, strict=True))
    return tuple(
        tuple(replace(f, size=sizes[f.of]) for f in dim if sizes[f.of] > 1) if kinds(dim) and dim[0].of in AXES else dim
        for dim in dims
    )


def _plus(a: Vec3, b: Vec3) -> Vec3:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
