"""Turn grey values into cells: boundaries by znnpy, fragments by a watershed of scikit-image, merged by waterz.

    python examples/cells.py fib25_train.h5 fib25_train_labels.h5 --network fib25_unet --split 195

Two thresholds are picked on the planes before `--split`. The planes from there on are segmented by themselves, and the
figures are theirs. Then the whole volume is segmented; boundaries.h5 and cells.h5 hold its boundaries and its cells.
"""

import argparse

import h5py
import numpy as np
import waterz
from scipy.ndimage import distance_transform_edt, gaussian_filter
from scores import scores
from skimage import feature, segmentation

import znnpy

INSIDE, MERGE = (0.2, 0.3, 0.4), (0.4, 0.5, 0.6, 0.7, 0.8)  # thresholds of seeds and of merging that are tried


def segmented(boundary, inside, merge):
    """Yield cells for each threshold of merging. Seeds lie where the probability of a boundary is below `inside`."""
    distance = gaussian_filter(distance_transform_edt(boundary < inside), 1.6)
    peaks = feature.peak_local_max(distance, min_distance=2, exclude_border=False)
    seeds = np.zeros(boundary.shape, np.int32)
    seeds[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    fragments = segmentation.watershed(boundary - distance / distance.max() / 10, seeds).astype(np.uint64)
    affinities = np.stack([1 - np.maximum(boundary, np.roll(boundary, 1, axis)) for axis in range(3)])
    yield from waterz.agglomerate(affinities, merge, fragments=fragments)


words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
words.add_argument("volume", help="HDF5 file, as that of the labels; the dataset of both is `main`")
words.add_argument("labels", help="the number of the cell of each voxel")
words.add_argument("--network", default="fib25_unet")
words.add_argument("--split", type=int, default=195)
asked = words.parse_args()
net = znnpy.load_network(asked.network)
border = "reflect" if net.network.meaning == "sliding" else "valid"  # U-Nets pad by themselves
znnpy.infer(f"{asked.volume}::main", net, out="boundaries.h5", border=border, overwrite=True)
with h5py.File("boundaries.h5") as prediction, h5py.File(asked.labels) as truth:
    boundary, labels = prediction["prediction"][:], truth["main"][:]
tried = {}
for inside in INSIDE:
    for merge, cells in zip(MERGE, segmented(boundary[: asked.split], inside, MERGE), strict=True):
        tried[inside, merge] = scores(cells, labels[: asked.split])
inside, merge = min(tried, key=lambda pair: tried[pair]["vi_split"] + tried[pair]["vi_merge"])
(rest,) = segmented(boundary[asked.split :], inside, [merge])
figures = {"inside": inside, "merge": merge, **scores(rest, labels[asked.split :])}

(cells,) = segmented(boundary, inside, [merge])
with h5py.File("cells.h5", "w") as file:
    file.create_dataset("cells", data=cells, compression="gzip").attrs.update(figures, voxel_offset=(0, 0, 0))
print(f"{asked.network}:", ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
