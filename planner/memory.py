"""What a run needs beside arena and weights: the process itself, and patches on their way in and out."""

from __future__ import annotations

from math import prod

from znnpy.machine import process_bytes
from znnpy.shapes import Vec3

MIB = 2**20
BUFFERS = 2  # patches on their way in, and as many on their way out: one is filled while the other is used
MASKS = 2 * BUFFERS + 1  # one for each of those patches, and what a column has seen
READER_BYTES = 16 * MIB  # chunk cache of the volume, decompression, one chunk at a time
WRITER_BYTES = 6 * MIB  # buffers of the output
MARGIN_BYTES = 8 * MIB  # threads, allocators that keep what was freed, modules that are loaded later
_GRAIN = 4 * MIB  # the baseline is rounded up to it, so that equal runs make equal plans


def reading_bytes(channels: int, patch_in: Vec3, itemsize: int, *, seen: Vec3 | None = None) -> int:
    """Raw input patches (c, z, y, x) of the volume's dtype, and the reader.

    seen  size of a mask (z, y, x) bool of the voxels that are not finite, of all that the output of a step depends on,
          where they are counted.
    """
    return BUFFERS * channels * prod(patch_in) * itemsize + (MASKS * prod(seen) if seen else 0) + READER_BYTES


def writing_bytes(maps: int, patch_out: Vec3, itemsize: int) -> int:
    """Dense output patches (maps, z, y, x) of the output's dtype, and the writer."""
    return BUFFERS * maps * prod(patch_out) * itemsize + WRITER_BYTES


def baseline_bytes() -> int:
    """Resident memory of this process with its libraries and whatever the caller holds, plus a margin; measured now."""
    import h5py  # noqa: F401 - a run loads it: it counts

    return -(-(process_bytes() + MARGIN_BYTES) // _GRAIN) * _GRAIN
