"""Measure how fast a volume is read and the disk of the output takes voxels, and predict a run's reading and writing.

Bytes are those of voxels in memory, so compression is a part of the rates. A run reads, computes and writes at the same
time: the slowest of the three decides how long it takes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from statistics import median

import numpy as np

from znnpy.network import Network
from znnpy.patches import Box, Column
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import Vec3, add
from znnpy.units import human_bytes, human_seconds
from znnpy.volume.base import Volume
from znnpy.volume.source import Source

SECONDS = 0.4  # after which nothing more is read or written to measure it
PIECE_BYTES = 8 * 2**20  # of voxels that are read at once, unless a chunk has more
MOST_BYTES = 2**26  # of such a chunk; of a larger one a part is read
PLACES = (0.5, 0.25, 0.75, 0.125, 0.875)  # of what is read, as a share of the way from corner to corner
DISK_BYTES = 2**25  # written at once
LONG_SECONDS = 10.0  # predicted seconds of a run from which on its transfers are measured
COLUMNS = 256  # columns whose reading is counted one by one; of more so many are taken for all


@dataclass(frozen=True, slots=True)
class Transfers:
    """The bytes that a run reads and writes, and the measured bytes per second of both.

    write_rate  None where it was not measured: the output is an array, or the file system has no nameless files
    """

    read_bytes: int
    read_rate: float
    written_bytes: int
    write_rate: float | None

    @property
    def reading(self) -> float:
        """Predicted seconds of reading."""
        return self.read_bytes / self.read_rate

    @property
    def writing(self) -> float:
        """Predicted seconds of writing; 0 where the rate is not known."""
        return self.written_bytes / self.write_rate if self.write_rate else 0.0

    @property
    def seconds(self) -> float:
        """Predicted seconds of the longer of both."""
        return max(self.reading, self.writing)

    def __str__(self) -> str:
        """Return a sentence without its first letter large."""
        read = (
            f"reading {human_bytes(self.read_bytes)} takes {human_seconds(self.reading)} at "
            f"{human_bytes(int(self.read_rate))}/s"
        )
        if self.write_rate is None:
            return f"{read}, measured"
        return (
            f"{read}, and writing {human_bytes(self.written_bytes)} takes {human_seconds(self.writing)} at "
            f"{human_bytes(int(self.write_rate))}/s, measured"
        )


def transfers_of(plan: RunPlan, network: Network, source: Source, folder: Path | None) -> Transfers:
    """Measure the volume, and the disk of a folder if one is given, and count what a plan reads and writes."""
    itemsize = plan.main.itemsize_out
    written = sum(maps * prod(one.size) for maps, one in zip(network.output_maps, source.outputs, strict=False))
    return Transfers(
        read_bytes(plan, network, source),
        reading_rate(source.volume, source.needed),
        written * itemsize,
        None if folder is None else writing_rate(folder),
    )


def read_bytes(plan: RunPlan, network: Network, source: Source) -> int:
    """Count the bytes of the voxels that all columns read, whole chunks across each column."""
    items = plan.work_items(network)
    counted = [items[number * len(items) // COLUMNS] for number in range(COLUMNS)] if len(items) > COLUMNS else items
    voxels = sum(_column_voxels(column, plan.main.patch_in, source) for column in counted)
    per_voxel = source.channels * source.dtype.itemsize
    return round(voxels * per_voxel * len(items) / max(1, len(counted)))


def _column_voxels(column: Column, patch_in: Vec3, source: Source) -> int:
    """Return the voxels of all chunks that a column reads."""
    first = [add(step.read, source.domain.lo) for step in column.steps]
    ends = [add(lo, step.size or patch_in) for lo, step in zip(first, column.steps, strict=True)]
    lo = tuple(min(along) for along in zip(*first, strict=True))
    hi = tuple(max(along) for along in zip(*ends, strict=True))
    inside = Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2])).clipped(Box((0, 0, 0), source.volume.size))
    chunk, size = source.volume.chunk_size, source.volume.size
    return prod(
        min(-(-end // each) * each, most) - begin // each * each
        for begin, end, each, most in zip(inside.lo, inside.hi, chunk, size, strict=True)
    )


def reading_rate(volume: Volume, needed: Box) -> float:
    """Measure the bytes per second of reading whole chunks of a part of a volume; VolumeError if it cannot be read."""
    size = _piece(volume, needed.size)
    rates: list[float] = []
    until = time.perf_counter() + SECONDS
    for place in PLACES:
        z, y, x = (
            min(lo + int(place * (hi - lo)) // chunk * chunk, max(lo, hi - n))
            for lo, hi, chunk, n in zip(needed.lo, needed.hi, volume.chunk_size, size, strict=True)
        )
        box = Box((z, y, x), add((z, y, x), size)).clipped(needed)
        voxels = np.empty((volume.channels, *box.size), volume.dtype)
        begin = time.perf_counter()
        volume.read(box, voxels)
        end = time.perf_counter()
        rates.append(voxels.nbytes / (end - begin) if end > begin else inf)
        if end > until:
            break
    return median(rates)


def _piece(volume: Volume, size: Vec3) -> Vec3:
    """Return the size of a box of whole chunks within a part of the volume, of about PIECE_BYTES."""
    each = volume.channels * volume.dtype.itemsize
    piece = [min(chunk, n) for chunk, n in zip(volume.chunk_size, size, strict=True)]
    for axis in (2, 1, 0):
        room = PIECE_BYTES // (each * prod(piece))
        piece[axis] = min(size[axis], piece[axis] * max(1, room))
    while each * prod(piece) > MOST_BYTES:
        axis = piece.index(max(piece))
        piece[axis] = -(-piece[axis] // 2)
    return piece[0], piece[1], piece[2]


def writing_rate(folder: Path) -> float | None:
    """Measure the bytes per second that a folder's disk takes until they are on it, in a file without a name.

    None where the file system has no files without a name, or is full: the run itself says so if that stops it.
    """
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        values = np.random.default_rng(1).integers(0, 256, DISK_BYTES, np.uint8).data
        begin, written = time.perf_counter(), 0
        while not written or time.perf_counter() - begin < SECONDS:
            written += os.pwrite(file, values, written)
            os.fsync(file)
        return written / (time.perf_counter() - begin)
    except OSError:
        return None
    finally:
        os.close(file)
