"""Use the blocks of a prediction while the run goes on: a map of a quarter of the resolution, and a share.

    python examples/stream.py volume.h5 --out coarse.npy

The prediction itself is never stored, and memory stays within `--ram` and two blocks, however large the volume is. Each
block is averaged by a primitive of znnpy, as any pipeline may: blocks of this network begin at multiples of 8 voxels.
"""

import argparse

import numpy as np

import znnpy
from znnpy import ops

FACTOR = 4  # voxels along each axis that one value of the map is the mean of
SURE = 0.5  # probability from which a voxel counts as a boundary

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
words.add_argument("volume")
words.add_argument("--out", default="coarse.npy")
words.add_argument("--ram", default="2G")
asked = words.parse_args()

voxels = boundaries = 0
with znnpy.stream(asked.volume, "fib25_unet", ram=asked.ram) as blocks:
    coarse = np.zeros([size // FACTOR for size in blocks.shape[1:]], np.float32)
    whole = np.prod(blocks.shape)
    for box, block in blocks:  # (maps, z, y, x) of one map
        if min(box.size) >= FACTOR:  # the last block may be thinner than one value of the map
            means = ops.average_pool(block[..., None], (FACTOR,) * 3)[0, ..., 0]
            first = [low // FACTOR for low in box.lo]
            coarse[tuple(slice(low, low + size) for low, size in zip(first, means.shape, strict=True))] = means
        voxels, boundaries = voxels + block.size, boundaries + np.count_nonzero(block >= SURE)
        print(f"{voxels / whole:4.0%} of the volume: {boundaries / voxels:.1%} boundaries so far", flush=True)
np.save(asked.out, coarse)
