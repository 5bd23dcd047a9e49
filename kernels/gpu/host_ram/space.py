"""Which divisions of a layer are looked at: sizes of the parts of each axis, and both orders.

Of a long axis the smallest size for each number of parts: others differ in what is left for the last part. Of maps, as
tensor cores take them by eights, also these rounded up. All other multiples of eight would better the time by 0.08 % at
most over the benchmark's layers (2026-11-22), 0.5 % where images are not cut along z, and by 0.1 % over 190 made-up
layers, for about twice as many questions to the inner primitive.

Tested  tests/kernels/gpu/test_host_ram_division.py; benchmarks/host_ram_divisions.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from znnpy.kernels.gpu.host_ram.division import Division, Order
from znnpy.shapes import ConvShape

FEW = 16  # along an axis: every size is a candidate
TOGETHER = 8  # maps that primitives take at a time, or pad to


def sizes(length: int, step: int = 0) -> list[int]:
    """Of the parts of an axis: all up to FEW, or to `step`; of longer ones the smallest for each number of parts.

    step  sizes are these, too, rounded up to its multiples; 0: they are not.
    """
    if length <= (step or FEW):
        return list(range(1, length + 1))
    smallest = {-(-length // parts) for parts in range(1, length + 1)}
    rounded = {-(-size // step) * step for size in smallest} if step else set()
    return sorted(smallest | {size for size in rounded if size < length})


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched: chunks of images and planes, and numbers of maps."""

    chunks: Sequence[tuple[int, int]]
    maps_in: Sequence[int]
    maps_out: Sequence[int]
    orders: Sequence[Order] = ("outputs", "inputs")

    def __post_init__(self) -> None:
        for name in ("chunks", "maps_in", "maps_out", "orders"):  # so that it can be looked up
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    @lru_cache(maxsize=16)  # a planner asks about many primitives for one layer
    def whole(cls, shape: ConvShape) -> Space:
        """All of it. A softmax sees all maps of a voxel at once."""
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
