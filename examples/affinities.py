"""Turn grey values into cells without seeds and thresholds: affinities, and the mutex watershed of mwatershed.

    python examples/affinities.py fib25_train.h5 --roi 195:250,:,:

An affinity says whether two voxels belong to one cell. Those of neighbours merge, those of voxels further apart keep
cells separate, the strongest first. A network that was trained for affinities gives them as its maps. Here they follow
from boundaries: a boundary keeps two voxels apart as far as it is surer between them than at either.
"""

import argparse

import h5py
import mwatershed
import numpy as np

import znnpy
from znnpy import ops

NEAR, FAR = (1,), (4, 9)  # distances in voxels along each axis


def affinity(boundary, distance, axis):
    """Return what draws each voxel to the one that lies `distance` before it, or, if negative, keeps them apart."""
    window = [distance + 1 if i == axis else 1 for i in range(3)]
    highest = ops.max_pool(boundary[None, ..., None], tuple(window), stride=(1, 1, 1))[0, ..., 0]
    voxels = np.arange(distance, boundary.shape[axis])
    ends = np.maximum(boundary.take(voxels, axis), boundary.take(voxels - distance, axis))
    return np.pad(1 - ends if distance in NEAR else ends - highest, [(size - 1, 0) for size in window])


words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
words.add_argument("volume")
words.add_argument("--network", default="fib25_unet")
words.add_argument("--roi", help="part of the volume, as for `znnpy infer`")
words.add_argument("--out", default="cells.h5")
asked = words.parse_args()

net = znnpy.load_network(asked.network)
znnpy.infer(asked.volume, net, out="boundaries.h5", roi=asked.roi, overwrite=True)
with h5py.File("boundaries.h5") as file:
    boundary, first = file["prediction"][:], file["prediction"].attrs["voxel_offset"]

pairs = [(distance, axis) for distance in NEAR + FAR for axis in range(3)]
affinities = np.stack([affinity(boundary, *pair) for pair in pairs]).astype(np.float64)
offsets = [[-distance if i == axis else 0 for i in range(3)] for distance, axis in pairs]
cells = mwatershed.agglom(affinities, offsets)
with h5py.File(asked.out, "w") as file:
    file.create_dataset("cells", data=cells, compression="gzip").attrs["voxel_offset"] = first
print(f"{len(np.unique(cells))} cells")
