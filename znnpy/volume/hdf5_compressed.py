"""Check compressed chunks before HDF5 unpacks them, since its filters allocate what a chunk asks for.

Checked are deflate, LZF, bzip2, Blosc, Blosc2, LZ4, bitshuffle and Zstandard. Other filters (szip, zfp, SZ and others)
are not checked, nor are chunks of the sources of a virtual dataset.
"""

from __future__ import annotations

import threading
from itertools import product
from math import prod

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.volume.decompression import (
    ChunkTooLargeError,
    blosc_bytes,
    check_declared,
    lzf_bytes,
    most_bytes,
    unpacked,
    zstd_bytes,
)
from znnpy.volume.hdf5_links import HDF5_ERRORS
from znnpy.volume.hdf5_sources import Stored
from znnpy.volume.regions import Region

FLETCHER32, BITSHUFFLE = 3, 32008
CHECKSUM_BYTES = 4
STREAMS = {1: "zlib", 307: "bz2"}  # filters whose data do not state their unpacked size
LZF, BLOSC, LZ4, ZSTD, BLOSC2 = 32000, 32001, 32004, 32015, 32026
PACKERS = frozenset((*STREAMS, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2))
MOST_RATIO = {1: 1032, LZF: 88}  # largest number of bytes that one byte unpacks to
HARMLESS_BYTES = 2**20  # size to which any chunk may unpack
REMEMBERED = 4096  # checked chunks that are not checked again


class CompressedChunks:
    """The chunks of one dataset, whose unpacked size is checked before they are read."""

    def __init__(self, dataset: h5py.h5d.DatasetID, stored: Stored, name: str) -> None:
        """Inspect the filters of `dataset`, called `name` in errors. VolumeError if chunks are packed twice."""
        made = dataset.get_create_plist()
        self._dataset, self._chunk, self._name = dataset, stored.chunk, name
        self._chunk_bytes = prod(stored.chunk) * stored.itemsize
        filters = [made.get_filter(number) for number in range(made.get_nfilters())]
        codes = [one[0] for one in filters]
        packers = [i for i, code in enumerate(codes) if code in PACKERS]
        behind = [code for code in codes[packers[0] + 1 :] if code != FLETCHER32] if packers else []
        if behind:
            raise VolumeError(
                f"{name} is packed by HDF5 filter {codes[packers[0]]} and then by {behind[0]}, and chunks that are "
                "packed once are read; pack it again, for example with h5repack -f GZIP=4"
            )
        self._packer = packers[0] if packers and stored.chunk else None
        if self._packer is not None and codes[self._packer] == BITSHUFFLE:
            settings = filters[self._packer][2]
            if len(settings) < 5 or not settings[4]:  # the filter only reorders bits
                self._packer = None
        self._codes = codes
        self._seen: dict[tuple[int, ...], None] = {}
        self._lock = threading.Lock()

    def check(self, box: Region) -> None:
        """Raise VolumeError if a stored chunk that the box touches unpacks to more bytes than a chunk has."""
        if self._packer is None:
            return
        ranges = [range(lo // n, -(-hi // n)) for lo, hi, n in zip(box.lo, box.hi, self._chunk, strict=True)]
        buffer = np.empty(max(most_bytes(self._chunk_bytes), HARMLESS_BYTES), np.uint8)
        with self._lock:
            for index in product(*ranges):
                if index not in self._seen:
                    self._check(index, self._packer, buffer)
                    self._seen[index] = None
                    if len(self._seen) > REMEMBERED:
                        del self._seen[next(iter(self._seen))]

    def _check(self, index: tuple[int, ...], packer: int, buffer: npt.NDArray[np.uint8]) -> None:
        most = buffer.size
        offset = tuple(at * size for at, size in zip(index, self._chunk, strict=True))
        try:
            if self._dataset.get_chunk_info_by_coord(offset).byte_offset is None:
                return  # the chunk is not stored
            mask, data = self._dataset.read_direct_chunk(offset, out=buffer)
        except ValueError as error:
            raise self._too_large(index, f"takes more than {most:,} bytes of the file ({error})") from None
        except HDF5_ERRORS:
            return  # the chunk is not stored, or reading its voxels reports the damage
        for number in range(len(self._codes) - 1, packer, -1):  # checksums after the packed data
            if not mask >> number & 1:
                data = data[:-CHECKSUM_BYTES]
        if mask >> packer & 1:
            return
        try:
            check_unpacked(self._codes[packer], data, most)
        except ChunkTooLargeError as error:
            raise self._too_large(index, f"unpacks to {error}") from None

    def _too_large(self, index: tuple[int, ...], what: str) -> VolumeError:
        return VolumeError(
            f"{self._name}: chunk {index} {what}, and a chunk of the dataset has {self._chunk_bytes:,}; it is damaged: "
            "copy the file again"
        )


def check_unpacked(code: int, data: memoryview, most: int) -> None:
    """Raise ChunkTooLargeError if data of the HDF5 filter `code` unpack to more than `most` bytes.

    Other damage is left to the filter, which refuses it.
    """
    if len(data) * MOST_RATIO.get(code, most) <= most:
        return
    if code in STREAMS:
        try:
            unpacked(STREAMS[code], data, most)
        except ChunkTooLargeError:
            raise
        except ValueError:
            return  # the filter meets the same damage after equally few bytes
    elif code == LZF:
        size = lzf_bytes(data, most)
        if size > most:
            raise ChunkTooLargeError(size, is_all=False)
    elif code == BLOSC:
        check_declared(blosc_bytes(data), most)
    elif code in (LZ4, BITSHUFFLE):
        check_declared(int.from_bytes(data[:8], "big"), most)
    elif code == BLOSC2:
        check_declared(int.from_bytes(data[30:38], "big"), most)
    elif code == ZSTD:
        check_declared(zstd_bytes(data), most)
