"""Write the coarser levels of an output: each voxel is the mean of up to 2 by 2 by 2 voxels of the level before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from znnpy.volume.chunk_assembly import Assembler, Files, Voxels
from znnpy.volume.chunked_formats import StoredArray
from znnpy.volume.regions import Region

MOST_VALUES = 2**18  # of a block that is written at a time; eight times as many are read


def write_coarser(levels: Sequence[StoredArray], numbers: Sequence[int], assembler: Assembler, files: Files) -> None:
    """Write all levels but the first, block by block.

    numbers  of the levels, as the assembler and the files count arrays
    """
    assembler.settle()
    for level in range(1, len(levels)):
        finer, coarse = levels[level - 1], levels[level]
        counts = Region((0,) * 4, coarse.shape).in_steps(coarse.file).hi
        for index in product(*map(range, counts)):
            for block in _blocks(coarse, coarse.region_of(index)):
                source = _source(block, finer)
                assembler.add(numbers[level], block, mean(files.read(numbers[level - 1], source)))
        assembler.settle()


def mean(voxels: Voxels) -> Voxels:
    """Return the means of 2 by 2 by 2 voxels (maps, z, y, x), of fewer at the ends; whole numbers are rounded."""
    found = voxels.astype(np.float32)
    for axis in (1, 2, 3):
        moved = np.moveaxis(found, axis, 0)
        even, odd = moved[::2].copy(), moved[1::2]
        even[: len(odd)] += odd
        even[: len(odd)] *= np.float32(0.5)
        found = np.moveaxis(even, 0, axis)
    if voxels.dtype.kind in "iu":
        found = np.rint(found)
    return found.astype(voxels.dtype)


def _blocks(array: StoredArray, region: Region) -> list[Region]:
    """Return a region of a file cut into chunks, and these into blocks of bounded size."""
    step = [array.file[0], *array.layout.chunk]
    while prod(step) > MOST_VALUES and max(step[1:]) > 1:
        longest = max((1, 2, 3), key=lambda axis: step[axis])
        step[longest] = -(-step[longest] // 2)
    begins = (range(lo, hi, each) for lo, hi, each in zip(region.lo, region.hi, step, strict=True))
    return [
        Region(lo, tuple(at + each for at, each in zip(lo, step, strict=True))).clipped(region)
        for lo in product(*begins)
    ]


def _source(block: Region, finer: StoredArray) -> Region:
    """Return the voxels of the finer level that a block is the mean of."""
    lo = (block.lo[0], *(2 * at for at in block.lo[1:]))
    hi = (block.hi[0], *(min(2 * at, most) for at, most in zip(block.hi[1:], finer.size, strict=True)))
    return Region(lo, hi)
