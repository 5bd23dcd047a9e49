"""Damaged HDF5 volumes, read one after the other: run in a process of its own, which HDF5 may end.

    python -m tests.support.damaged_hdf5 FOLDER FIRST END

Prints the number of each case before it is read. Exit code 0: each ended in a value or in a ZnnpyError.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
from pathlib import Path

import h5py
import numpy as np

from tests.support.damage import damaged_bytes, ended
from znnpy.patches import Box
from znnpy.volume import open_volume

MOST_SECONDS = 10  # of one case, after which the system ends this process
MOST_GROWTH = 200 * 2**20  # bytes of the process, over all cases


def written(folder: Path) -> list[bytes]:
    """Volumes of every layout."""
    voxels = np.arange(480, dtype=np.uint16).reshape(8, 6, 10)
    path = folder / "whole.h5"
    (folder / "outside.raw").write_bytes(voxels.tobytes())
    found = []
    for libver in ("earliest", "latest"):
        for arguments in (
            {},
            {"chunks": (4, 3, 5)},
            {"chunks": (4, 3, 5), "compression": "gzip", "shuffle": True, "fletcher32": True},
            {"chunks": (4, 3, 5), "maxshape": (None, 6, 10)},
            {"chunks": (4, 3, 5), "maxshape": (None, None, 10), "scaleoffset": 0},
        ):
            with h5py.File(path, "w", libver=libver) as file:
                file.create_dataset("deep/raw", data=voxels, **arguments)
                file["link"] = h5py.SoftLink("/deep/raw")
                file["deep"].attrs["note"] = "words"
            found.append(path.read_bytes())
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("raw", (8, 6, 10), "u2", external=[(str(folder / "outside.raw"), 0, 960)])
            file["other"] = np.zeros((2, 3))
        found.append(path.read_bytes())
        with h5py.File(folder / "source.h5", "w", libver=libver) as file:
            file["a"] = voxels
        layout = h5py.VirtualLayout((8, 6, 10), "u2")
        for z in range(8):
            layout[z] = h5py.VirtualSource(str(folder / "source.h5"), "a", (8, 6, 10))[z]
        with h5py.File(path, "w", libver=libver) as file:
            file.create_virtual_dataset("raw", layout)
        found.append(path.read_bytes())
    return found


def read(path: Path) -> None:
    """Read a few voxels of the volume."""
    with open_volume(path) as volume:
        size = tuple(min(n, 16) for n in volume.size)
        box = Box((0, 0, 0), (size[0], size[1], size[2]))
        if volume.channels <= 64:
            volume.expect(box)
            volume.read(box, np.zeros((volume.channels, *box.size), volume.dtype))


def main(folder: Path, numbers: range) -> None:
    """All cases."""
    whole = written(folder)
    path = folder / "case.h5"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in numbers:
        rng = random.Random(number)
        content = rng.choice(whole)
        path.unlink(missing_ok=True)  # HDF5 knows files by their inode
        path.write_bytes(damaged_bytes(content, rng))
        print(number, flush=True)
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        refused += not ended(lambda: read(path), str(path))
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_GROWTH, f"{grown} bytes"
    assert refused > len(numbers) // 10, refused


if __name__ == "__main__":
    main(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3])))
