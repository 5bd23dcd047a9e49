"""Partition a layer for cuConv: sides of its blocks, taps of a part, voxels of a launch. Arithmetic only.

A part is the sum over some taps of all f values; in the paper it is one tap (a row of a filter). More taps per part
make fewer partial sums and fewer blocks. All taps in one part make a single stage, as for 1x1x1 kernels.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from znnpy.shapes import FLOAT32, ConvShape

SIDES = (16, 32, 64)  # voxels, and maps, of a block, as in stages.cu
THREADS, STAGES = 128, 4  # as in stages.cu
PARTS_BYTES = 32 << 20  # partial sums at a time: they stay in the L2 cache of a large GPU until they are summed
MOST_TERMS = 3000  # longest float32 sum of a part: longer ones cost more than 1e-6 and are cut
MOST_PARTS = 65535  # blocks of a grid along y
TENSOR_SPEED = 4.0  # throughput of tensor cores relative to float32 units
# Assumed clock cycles of a recent GPU; only their ratios matter.
LAUNCH, BEGIN, LATENCY = 3000, 1500, 800  # a kernel after another, a block before its first product, a read of L2
L2_BYTES = 64  # per clock and multiprocessor
OF_PEAK = {
    16: 0.5,
    32: 0.6,
    64: 0.8,
}  # fraction of peak that reads of shared memory allow: lanes that sum less read more
TOGETHER = 4  # blocks that fit a multiprocessor's memory


class Partition(NamedTuple):
    """One partitioned layer."""

    side: int  # voxels, and maps, of a block
    taps: int  # taps of a part; the last may have fewer
    parts: int
    maps: int  # maps of the output, in whole fours
    values: int  # maps of the input, in whole fours
    voxels: int  # voxels of all images
    at_once: int  # voxels of a launch

    @property
    def parts_bytes(self) -> int:
        """Bytes of the partial sums of one launch; 0 if one part has all taps."""
        return FLOAT32 * self.maps * self.parts * self.at_once if self.parts > 1 else 0


def partition(shape: ConvShape, side: int, taps: int) -> Partition:
    """Divide `shape` into blocks of `side` voxels by `side` maps, and parts of `taps` taps."""
    parts, maps, values = -(-prod(shape.k) // taps), _fours(shape.fout), _fours(shape.fin)
    voxels = shape.batch * prod(shape.out)
    largest = SIDES[-1]
    fitting = max(1, PARTS_BYTES // (FLOAT32 * maps * parts * largest)) * largest
    return Partition(side, taps, parts, maps, values, voxels, voxels if parts == 1 else min(voxels, fitting))


def choices(shape: ConvShape, multiprocessors: int, units: str) -> tuple[tuple[int, int], ...]:
    """Return (side, taps) worth trying, the most promising first: the best for each side, and the paper's single taps.

    Parts are omitted if not even the fewest voxels fit PARTS_BYTES.
    """
    kz, ky, kx = shape.k
    counts = [taps for taps in dict.fromkeys((1, kx, ky * kx)) if taps < kz * ky * kx and _fits(shape, taps)]
    counts.append(kz * ky * kx)

    spent = {
        (side, taps): cycles(partition(shape, side, taps), kz * ky * kx, multiprocessors, units)
        for side in SIDES
        for taps in counts
    }
    tried = [min(((side, taps) for taps in counts), key=spent.__getitem__) for side in SIDES]
    tried.append(min(((side, counts[0]) for side in SIDES), key=spent.__getitem__))
    return tuple(sorted(dict.fromkeys(tried), key=spent.__getitem__))


def cycles(c: Partition, all_taps: int, multiprocessors: int, units: str) -> float:
    """Estimate the cycles of both stages: rounds of blocks; a step takes its products, its reads or a latency."""
    depth = 1024 // c.side
    launches = -(-c.voxels // c.at_once)
    blocks = -(-c.at_once // c.side) * -(-c.maps // c.side) * c.parts
    together = min(TOGETHER, -(-blocks // multiprocessors))
    speed = THREADS * OF_PEAK[c.side] * (TENSOR_SPEED if units == "tensor" else 1.0)
    work = max(c.side * c.side * depth / speed, 2 * c.side * depth * FLOAT32 / L2_BYTES)
    step = max(together * work, LATENCY / (STAGES - 1))
    steps = -(-min(c.taps, all_taps) * c.values // depth)
    one = -(-blocks // (multiprocessors * together)) * (BEGIN + steps * step)
    if c.parts > 1:
        one += LAUNCH + 2 * c.parts_bytes / (multiprocessors * L2_BYTES)
    return launches * (LAUNCH + one)


def _fits(shape: ConvShape, taps: int) -> bool:
    c = partition(shape, SIDES[0], taps)
    return c.parts <= MOST_PARTS and c.parts_bytes <= PARTS_BYTES


def _fours(maps: int) -> int:
    return -(-maps // 4) * 4
