"""Hold what the primitives of graphs' layers on the CPU have in common."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from znnpy.kernels.contract import Variant, why_not_fp32, why_not_fp32_or_bf16, why_not_two
from znnpy.shapes import FLOAT32, Sized

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, ConvWeights
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Vec3

Shape = TypeVar("Shape")
NUMPY_BYTES = 128 * 1024  # upper bound of what numpy's iterators and views allocate, per thread


class GraphLayer:
    """The common part of the primitives: one variant."""

    __slots__ = ()

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        del shape, machine
        return (Variant(),)


class WeightlessLayer(GraphLayer):
    """The common part of the primitives of layers without weights."""

    __slots__ = ()

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: ThreadPool) -> None:
        """Return None: there are no weights."""
        del weights, variant, pool


class Kernels(NamedTuple):
    """The weights of a convolution, its kernels in the order in which they are read."""

    kernels: Array  # (z, y, x, maps, maps)
    bias: Array


def kernels_of(weights: ConvWeights | None, axes: tuple[int, int, int, int, int]) -> Kernels:
    """Return weights with the axes of the kernels in this order."""
    assert weights is not None
    return Kernels(np.ascontiguousarray(weights.weight.transpose(axes)), weights.bias)


def given(shape: Sized, kind: type[Shape]) -> Shape:
    """Return `shape` as one of its kind; TypeError if it is another."""
    if not isinstance(shape, kind):
        raise TypeError(f"a primitive of {kind.__name__} was given {shape}; ask why_not first")
    return shape


def why_not_kind(shape: Sized, kind: type[Shape], what: str, *, bf16: bool = False) -> str | None:
    """Return None if `shape` is of this kind and in fp32, or with `bf16` in bf16, else a reason; `what`: in words."""
    if not isinstance(shape, kind):
        return f"computes {what}, not {shape}"
    return why_not_two(shape) or (why_not_fp32_or_bf16(shape) if bf16 else why_not_fp32(shape))


def block_of(m: Vec3, voxels: int) -> Vec3:
    """Return the size of blocks of about so many voxels: whole lines and planes unless these alone are larger."""
    mz, my, mx = m
    if voxels < mx:
        return 1, 1, max(1, voxels)
    if voxels < mx * my:
        return 1, voxels // mx, mx
    return min(mz, voxels // (mx * my)), my, mx


def block_counts(m: Vec3, size: Vec3) -> Vec3:
    """Return the number of blocks along each axis."""
    return -(-m[0] // size[0]), -(-m[1] // size[1]), -(-m[2] // size[2])


def block_at(unit: int, m: Vec3, size: Vec3) -> tuple[Vec3, Vec3]:
    """Return the first voxel and the size of a block, given its number."""
    _, along_y, along_x = block_counts(m, size)
    iz, iy, ix = unit // (along_y * along_x), unit // along_x % along_y, unit % along_x
    first = iz * size[0], iy * size[1], ix * size[2]
    return first, (min(size[0], m[0] - first[0]), min(size[1], m[1] - first[1]), min(size[2], m[2] - first[2]))


def box(first: Vec3, size: Vec3) -> tuple[slice, slice, slice]:
    """Return the slices of a box."""
    z, y, x = (slice(at, at + count) for at, count in zip(first, size, strict=True))
    return z, y, x


def lines_of(voxels: Array) -> Array:
    """Return a block (z, y, x, f) in C order as lines (z, y, x * f)."""
    return voxels.reshape(*voxels.shape[:2], prod(voxels.shape[2:]), copy=False)


def float_bytes(count: int, itemsize: int = FLOAT32) -> int:
    """Return the bytes of so many float32, or of values of `itemsize`, rounded up to whole cache lines."""
    return -(-itemsize * count // 64) * 64
