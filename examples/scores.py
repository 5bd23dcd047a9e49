"""Compare cells with labels: variation of information (split and merge, in bits) and adapted Rand error.

    python examples/scores.py cells.h5 fib25_train_labels.h5

The datasets are `cells`, whose attribute `voxel_offset` says where it lies in the volume, and `main`.
"""

import argparse

import h5py
import numpy as np
from skimage import measure, metrics


def scores(cells, labels):
    """Return the figures by name. Connected pieces of the labels are the truth; 0 is no label and counts nowhere."""
    truth, cells = measure.label(labels.astype(np.int32), connectivity=1), cells.astype(np.int64)
    split, merge = metrics.variation_of_information(truth, cells, ignore_labels=[0])
    error = metrics.adapted_rand_error(truth, cells)[0]
    return {"vi_split": float(split), "vi_merge": float(merge), "adapted_rand": float(error)}


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("cells")
    words.add_argument("labels")
    asked = words.parse_args()
    with h5py.File(asked.cells) as cells, h5py.File(asked.labels) as labels:
        found, first = cells["cells"], cells["cells"].attrs["voxel_offset"]
        box = tuple(slice(low, low + size) for low, size in zip(first, found.shape, strict=True))
        print(", ".join(f"{name} {value:.3f}" for name, value in scores(found[:], labels["main"][box]).items()))
