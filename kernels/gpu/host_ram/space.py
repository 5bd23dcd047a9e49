"""The divisions of a layer that are searched: sizes of the parts of each axis, and both orders.

For a long axis the candidates are the smallest size for each number of parts: others differ only in the last part. For
maps, which tensor cores take by eights, the sizes rounded up to eights are candidates as well. All other multiples of
eight would improve the time by at most 0.08 % over the benchmark's layers (2026-11-22), 0.5 % if images are not cut
along z, and 0.1 % over 190 synthetic layers, at about twice as many queries to the inner primitive.

Tested  tests/kernels/gpu/host_ram/test_division.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from znnpy.kernels.gpu.host_ram.division import Division, Order
from znnpy.shapes import ConvShape

FEW = 16  # up to this length of an axis, every size is a candidate
TOGETHER = 8  # maps that primitives take at a time, or pad to


def sizes(length: int, step: int = 0) -> list[int]:
    """Return candidate sizes of an axis's parts: all up to FEW, or to `step`; else the smallest per number of parts.

    step  adds these sizes rounded up to multiples of `step`; 0: adds none.
    """
    if length <= (step or FEW):
        return list(range(1, length + 1))
    smallest = {-(-length // parts) for parts in range(1, length + 1)}
    rounded = {-(-size // step) * step for size in smallest} if step else set()
    return sorted(smallest | {size for size in rounded if size < length})


@dataclass(frozen=True, slots=True)
class Space:
    """The searched space: chunks of images and planes, and numbers of maps."""

    chunks: Sequence[tuple[int, int]]
    maps_in: Sequence[int]
    maps_out: Sequence[int]
    orders: Sequence[Order] = ("outputs", "inputs")

    def __post_init__(self) -> None:
        for name in ("chunks", "maps_in", "maps_out", "orders"):  # hashable, for caches
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    @lru_cache(maxsize=16)  # the planner requests many primitives for one layer
    def whole(cls, shape: ConvShape) -> Space:
        """Return the whole space. A softmax needs all maps of a voxel at once."""
        planes = shape.out[0]
        images = [(count, planes) for count in sizes(shape.batch)]
        soft = shape.activation == "softmax"
        return cls(
            [*images, *((1, count) for count in sizes(planes) if count < planes)],
            [shape.fin] if soft else sizes(shape.fin, TOGETHER),
            [shape.fout] if soft else sizes(shape.fout, TOGETHER),
        )

    def divisions(self) -> Iterator[Division]:
        for images, planes in self.chunks:
            for maps_in in self.maps_in:
                for maps_out in self.maps_out:
                    for order in self.orders:
                        yield Division(images, planes, maps_in, maps_out, order)
