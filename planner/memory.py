"""What a run needs beside arena and weights: the process itself, and patches on their way in and out."""

from __future__ import annotations

from math import prod

from znnpy.machine import process_bytes
from znnpy.shapes import Vec3

MIB = 2**20
BUFFERS = 2  # patches on their way in, and as many on their way out: one is filled while the other is used
READER_BYTES = 16 * MIB  # chunk cache of the volume, decompression, one chunk at a time
WRITER_BYTES = 6 * MIB  # buffers of the output
MARGIN_BYTES = 8 * MIB  # threads, allocators that keep what was freed, modules that are loaded later
_GRAIN = 4 * MIB  # the baseline is rounded up to it, so that equal runs make equal plans


def reading_bytes(
    channels: int, patch_in: Vec3, itemsize: int, *, steps: int = BUFFERS, seen: Vec3 | None = None
) -> int:
    """Raw input patches (c, z, y, x) of the volume's dtype, and the reader.

    steps  that read, in all: the buffers of a run of one are not all touched
    seen   size of a mask (z, y, x) bool of the voxels that are not finite, of all that the output of a step depends on,
           where they are counted: one for each patch on its way out, and one that a column keeps where it is more than
           `patch_in`. Each patch on its way in has one of its own size.
    """
    buffers = min(BUFFERS, steps)
    masks = 0
    if seen is not None:
        masks = buffers * (prod(patch_in) + prod(seen)) + (prod(seen) if seen != patch_in else 0)
    return buffers * channels * prod(patch_in) * itemsize + masks + READER_BYTES


def writing_bytes(maps: int, patch_out: Vec3, itemsize: int, *, steps: int = BUFFERS) -> int:
    """Dense output patches (maps, z, y, x) of the output's dtype, and the writer; `steps` give output in all."""
    return min(BUFFERS, steps) * maps * prod(patch_out) * itemsize + WRITER_BYTES


def baseline_bytes() -> int:
    """Resident memory of this process with its libraries and whatever the caller holds, plus a margin; measured now."""
    import h5py  # noqa: F401 - a run loads it: it counts

    return -(-(process_bytes() + MARGIN_BYTES) // _GRAIN) * _GRAIN
