"""Follow which map and which voxel each dimension of a framework's array stands for, through reshapes and transposes.

Frameworks permute, split and merge the dimensions of arrays. Here a dimension is a product of factors, each of which is
a part of an axis: of the maps (c), of the volume (z, y, x), or of equal copies. So a chain of reshapes and transposes
costs nothing, and what it amounts to is known when a layer needs its input as maps over a volume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Literal

from znnpy.errors import NetworkFileError
from znnpy.shapes import Vec3

Axis = Literal["c", "z", "y", "x", "copies"]
AXES: tuple[Axis, ...] = ("z", "y", "x")


class LayoutError(NetworkFileError):
    """The dimensions of an array are not those that an operator takes."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of an axis: its index is the one along the axis `of`, divided by `step`, modulo `size`."""

    of: Axis
    size: int
    step: int = 1


Dimension = tuple[Factor, ...]  # the outer factor first; without factors, of size 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array of a framework: what a node of the network gives, and what each dimension of the array is of it."""

    node: str
    maps: int
    size: Vec3  # of the node
    dims: tuple[Dimension, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        return tuple(prod(factor.size for factor in dim) for dim in self.dims)

    def transposed(self, order: Sequence[int]) -> Tensor:
        """Return the array with its dimensions in another order."""
        if sorted(at % len(self.dims) for at in order) != list(range(len(self.dims))):
            raise LayoutError(f"the order {tuple(order)} is not one of {len(self.dims)} dimensions")
        return replace(self, dims=tuple(self.dims[at] for at in order))

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """Return the array with another shape of as many values; LayoutError: dimensions would mix parts of axes."""
        wanted = list(shape)
        total = prod(self.shape)
        if wanted.count(-1) == 1:
            known = prod(size for size in wanted if size != -1)
            wanted[wanted.index(-1)] = total // known if known else 0
        if prod(wanted) != total or min(wanted, default=1) < 1:
            raise LayoutError(f"the shape {tuple(shape)} does not hold the {total} values of {self.shape}")
        factors = [factor for dim in self.dims for factor in dim]
        dims = []
        for size in wanted:
            dim: list[Factor] = []
            left = size
            while left > 1:
                factor = factors.pop(0)
                if factor.size > left:
                    factor, inner = _split(factor, left, self.shape, shape)
                    factors.insert(0, inner)
                if left % factor.size:
                    raise _mixes(self.shape, shape)
                left //= factor.size
                dim.append(factor)
            dims.append(_merged(dim))
        return replace(self, dims=tuple(dims))

    def without(self, dimension: int) -> Tensor:
        """Return the array without a dimension of size 1."""
        return replace(self, dims=self.dims[:dimension] + self.dims[dimension + 1 :])

    def expanded(self, shape: Sequence[int]) -> Tensor:
        """Return the array broadcast to a shape, whose last dimensions are its own; -1 keeps a size."""
        added = len(shape) - len(self.dims)
        if added < 0:
            raise LayoutError(f"an array of {len(self.dims)} dimensions does not broadcast to {tuple(shape)}")
        dims: list[Dimension] = []
        for dim, own, size in zip([()] * added + list(self.dims), [1] * added + list(self.shape), shape, strict=True):
            if size in (-1, own):
                dims.append(dim)
            elif own == 1:
                dims.append((Factor("copies", size),))
            else:
                raise LayoutError(f"an array of shape {self.shape} does not broadcast to {tuple(shape)}")
        return replace(self, dims=tuple(dims))

    def tiled(self, times: Sequence[int]) -> Tensor:
        """Return the array repeated as a whole so many times along each dimension."""
        dims = tuple((Factor("copies", n), *dim) if n > 1 else dim for n, dim in zip(times, self.dims, strict=True))
        return replace(self, dims=dims)


def whole(node: str, maps: int, size: Vec3, order: str = "nczyx") -> Tensor:
    """Return the array of a node with whole axes in the order of the letters n (of size 1), c, z, y and x."""
    sizes = dict(zip("czyx", (maps, *size), strict=True))
    dims = tuple((Factor(letter, sizes[letter]),) if letter != "n" and sizes[letter] > 1 else () for letter in order)  # type: ignore[arg-type]
    return Tensor(node, maps, size, dims)


def combinations(dim: Dimension, of: Sequence[Axis]) -> Iterator[dict[str, int]]:
    """Yield for each index of a dimension the index that it has along each of the axes `of`, the last fastest."""
    if not dim:
        yield dict.fromkeys(of, 0)
        return
    for index in range(dim[0].size):
        for rest in combinations(dim[1:], of):
            found = dict(rest)
            if dim[0].of in found:
                found[dim[0].of] += index * dim[0].step
            yield found


def _split(factor: Factor, outer: int, was: tuple[int, ...], to: Sequence[int]) -> tuple[Factor, Factor]:
    if factor.size % outer:
        raise _mixes(was, to)
    inner = factor.size // outer
    return replace(factor, size=outer, step=factor.step * inner), replace(factor, size=inner)


def _merged(dim: Sequence[Factor]) -> Dimension:
    """Return a dimension with factors joined that are neighbours along their axis."""
    found: list[Factor] = []
    for factor in dim:
        last = found[-1] if found else None
        if last and last.of == factor.of and (factor.of == "copies" or last.step == factor.step * factor.size):
            found[-1] = replace(factor, size=last.size * factor.size)
        else:
            found.append(factor)
    return tuple(found)


def _mixes(was: tuple[int, ...], to: Sequence[int]) -> LayoutError:
    return LayoutError(f"reshaping {was} to {tuple(to)} mixes parts of axes, which no layer does")


def kinds(dim: Dimension) -> list[Axis]:
    """Return the axes that a dimension has parts of, in order."""
    return [of for of, _ in groupby(factor.of for factor in dim)]


def order_of(dims: Sequence[Dimension], at: int) -> list[Axis | None]:
    """Return which axis each dimension of an array is, with the maps in dimension `at`; None for size 1."""
    return ["c" if i == at else next(iter(kinds(dim)), None) for i, dim in enumerate(dims)]


def in_order(x: Tensor, order: Sequence[Axis | None]) -> tuple[Dimension, ...]:
    """Return the dimensions of a tensor in an order of axes."""
    sizes = dict(zip(("c", *AXES), (x.maps, *x.size), strict=True))
    return tuple((Factor(of, sizes[of]),) if of is not None and sizes.get(of, 1) > 1 else () for of in order)
