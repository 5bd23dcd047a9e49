"""Volumes in chunks, read by tensorstore: Zarr, N5 and precomputed, in folders, in buckets and on web servers.

Needs the extra `io`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import ThreadError, VolumeError
from znnpy.files import MOST_METADATA_BYTES
from znnpy.messages import excerpt, option
from znnpy.patches import Box
from znnpy.planner.memory import READER_BYTES
from znnpy.shapes import Vec3
from znnpy.volume.axes import Arranged
from znnpy.volume.base import Chunks, MissingVoxels, Volume
from znnpy.volume.chunk_files import ChunkFiles, Index, Look, table_bytes
from znnpy.volume.object_store import (
    ATTEMPTS,
    ObjectFiles,
    is_transient,
    kvstore_spec,
    pause,
    remote_error,
    threads,
    ts,
)
from znnpy.volume.regions import Region, pieces
from znnpy.volume.stored_array import Node
from znnpy.volume.stored_files import StoredFiles

PIECE_BYTES = 4 * 2**20  # voxels read at once, unless one chunk is larger
AT_ONCE = 64  # chunks per piece: each takes some KiB while it is read
STEPS = 3  # copies of a chunk while it is unpacked: as stored, unpacked, and in another order
KEPT_STEPS = 3  # and as many that the allocator keeps for the next one, unless they are so large that it returns them
KEPT_BYTES = 12 * 2**20  # that it keeps beside them, in the memory of several threads
RETURNED = 2**25  # bytes of a chunk from which on the allocator returns its memory at once
INDEX_STEPS = 4  # copies of the index of a shard while it is read
LOOKED_FOR = 100_000  # chunk files: up to this number they are all looked up before a run, if none may be missing
THREAD_BYTES = 2 * 2**20  # memory kept by each thread: its stack, and memory that it freed
SPARE_BYTES = 4 * 2**20  # of tensorstore, for its own records
SHOWN = 10  # damaged chunks that are named one by one

_log = logging.getLogger(__name__)
_REASON = re.compile(r"^[A-Z_]+: (?:Error (?:reading|decoding)[^\"]*\"[^\"]*\": )?")


class TensorVolume(Volume):
    """An array in chunks, whose metadata were checked."""

    def __init__(
        self,
        files: StoredFiles,
        name: str,
        node: Node,
        arranged: Arranged | None,
        missing_voxels: MissingVoxels,
        limits: ts.Context,
        document: str,
    ) -> None:
        """Open an array.

        name      of the array, which is the folder of its chunks below `files`
        arranged  how its axes become those of a volume; None: by their number
        document  key of the file with its metadata
        """
        super().__init__(files.place, name, node.shape, node.dtype or np.dtype(object), arranged)
        if node.refused is not None:
            raise VolumeError(f"{self} {node.refused}")
        self._node, self._missing_voxels, self._limits = node, missing_voxels, limits
        self._stored_files, self._document = files, document
        missing_voxels.check_value(self)
        self._files = ChunkFiles(files, name, node)
        place = files.place.inside(name) if name else files.place
        spec = {**node.spec, "kvstore": kvstore_spec(place), "open": True, "assume_metadata": True}
        try:
            found, self._filled = (
                ts.open({**spec, "fill_missing_data_reads": is_filled}, read=True, context=limits).result()
                for is_filled in (False, True)
            )
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # RuntimeError: text that is not UTF-8
            ThreadError.check(error)
            raise VolumeError(f"{self} cannot be opened: {excerpt(_reason(error))}; copy it again") from None
        self._voxels: ts.TensorStore = found[ts.d[:].translate_to[0]]  # precomputed ones may begin elsewhere
        if tuple(self._voxels.shape) != node.shape or self._voxels.dtype.numpy_dtype != self.dtype:
            raise VolumeError(
                f"{self} is {self._voxels.dtype.name} of shape {self._voxels.shape}, not as its metadata state; "
                "copy it again"
            )
        self._fill_value = self._fill()
        self._lock = threading.Lock()  # one thread reads at a time, so that memory is counted once
        self._expected: Region | None = None  # chunks
        self._seen = bytearray()  # a bit for each expected chunk
        self._counts = [0, 0, 0]  # chunks that are missing, looked up, and damaged

    def _fill(self) -> Any:
        """Return the value of chunks that are not stored; None: there is none."""
        if self._node.fill == "stored":
            return self._voxels.fill_value
        if self._missing_voxels.fill is not None:
            return self._missing_voxels.fill
        return 0 if self._node.fill == "zero" else None

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    @property
    def files(self) -> Collection[Path]:
        return (self.path, self.path / self.dataset) if self.location.is_local else ()

    @property
    def chunk_size(self) -> Vec3:
        return self.arranged.per_axis(self._node.chunk)

    @property
    def chunks(self) -> Chunks:
        missing, looked, damaged = self._counts
        return Chunks(missing, looked, damaged=damaged)

    def expect(self, box: Box) -> None:
        needed = self.stored_region(box).in_steps(self._node.chunk)
        self._expected, self._counts = needed, [0, 0, 0]
        self._seen = bytearray(-(-needed.elements // 8))
        if self._missing_voxels.chunks == "error":
            if self._node.is_nested:
                raise VolumeError(
                    f"{self}: chunks that are missing within its shards are not found here; leave out "
                    f"{option('missing_chunks', 'error')}"
                )
            files = needed.in_steps(self._node.chunks_per_file).elements
            lost = self._files.missing_file(needed) if files <= LOOKED_FOR else None
            if lost is not None:
                raise self._must_be_there(f"{lost} is missing")

    @property
    def extra_bytes(self) -> int:
        """Memory for the chunks of a piece while they are unpacked, a shard's index, and the count of chunks."""
        chunk, node = self._node.chunk_bytes, self._node
        at_once = min(AT_ONCE, max(1, PIECE_BYTES // chunk), node.chunks)
        index = INDEX_STEPS * node.index_bytes
        table = table_bytes(node.shape, node.chunk)
        kept = KEPT_STEPS * chunk + KEPT_BYTES if PIECE_BYTES <= chunk < RETURNED else 0
        most = at_once * STEPS * chunk + kept + threads() * THREAD_BYTES + index + table + SPARE_BYTES
        return max(0, most - READER_BYTES)

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        asked, target = self.stored_region(box), self.arranged.view(out)
        back = [-at for at in asked.lo]
        most = PIECE_BYTES // self.dtype.itemsize
        running: _Piece | None = None
        with self._lock:
            try:
                for region in pieces(asked, self._node.chunk, elements=most, chunks=AT_ONCE):
                    look = self._files.look(region.in_steps(self._node.chunk))  # while the last piece is read
                    last, running = running, None
                    if last is not None:
                        self._finish(last)
                    running = _Piece(region, target[region.shifted(back).slices], look)
                    running.start(self._voxels, self._limits)
                last, running = running, None
                if last is not None:
                    self._finish(last)
            finally:
                if running is not None:
                    running.wait()

    def _finish(self, piece: _Piece) -> None:
        """Wait for a piece, and count its chunks; where it cannot be read at once, read its chunks one by one."""
        error = piece.wait()
        chunks = piece.region.in_steps(self._node.chunk)
        if error is None and piece.look.is_whole:
            self._note_all(chunks)
            return
        single: list[tuple[Index, _Piece]] = []
        for chunk in product(*(range(lo, hi) for lo, hi in zip(chunks.lo, chunks.hi, strict=True))):
            lo = tuple(at * size for at, size in zip(chunk, self._node.chunk, strict=True))
            whole = Region(lo, tuple(at + size for at, size in zip(lo, self._node.chunk, strict=True)))
            there = whole.clipped(piece.region)
            one = _Piece(there, piece.target[there.shifted([-at for at in piece.region.lo]).slices], Look())
            if chunk not in piece.look.missing and chunk not in piece.look.damaged:
                one.start(self._voxels, self._limits)
            single.append((chunk, one))
        try:
            for chunk, one in single:
                self._read_chunk(chunk, one, piece.look)
        finally:
            for _, one in single:
                one.wait()

    def _read_chunk(self, chunk: Index, one: _Piece, look: Look) -> None:
        """Wait for a chunk, which was begun; repeat it where that helps, or put the value there that stands for it."""
        why = look.damaged.get(chunk)
        is_missing = chunk in look.missing
        attempts = 1 if self.location.is_local else ATTEMPTS
        for attempt in range(attempts):
            if is_missing or why is not None:
                break
            if attempt:
                one.start(self._voxels, self._limits)
            is_last = attempt == attempts - 1
            error = one.wait()
            if error is None:
                break
            if not str(error).startswith("NOT_FOUND"):
                if is_last or not is_transient(error):
                    why = self._why(error, chunk)
                else:
                    pause(attempt)
            elif self._files.is_confirmed_missing(chunk):
                is_missing = True
            elif is_last:
                self._check_there()
                is_missing = not self._node.is_nested
                why = None if is_missing else self._read_filled(one, chunk)
        if not is_missing and why is None:
            self._note(chunk)
            return
        if why is not None:
            self._fill_damaged(chunk, one.target, why)
            return
        if self._missing_voxels.chunks == "error":
            name = self._files.name_of(chunk)
            lo = tuple(at * size for at, size in zip(chunk, self._node.chunk, strict=True))
            is_file = not self._node.is_sharded or not (self.location.is_local and os.path.lexists(name))
            raise self._must_be_there(f"{name} {'is missing' if is_file else f'holds no chunk that begins at {lo}'}")
        if self._fill_value is None:
            raise VolumeError(
                f"{self._files.name_of(chunk)} is missing, and the fill value of the array is null; write the chunk or "
                f"the value, or give {option('fill_missing')}"
            )
        one.target[...] = self._fill_value
        self._note(chunk, missing=True)

    def _check_there(self) -> None:
        """Raise VolumeError if the whole volume is gone, of which every chunk seems to be missing."""
        if isinstance(self._stored_files, ObjectFiles):
            self._stored_files.check_there(self._document)

    def _read_filled(self, one: _Piece, chunk: Index) -> str | None:
        """Read a shard whose chunks may be missing, which are filled; return why it cannot be read."""
        one.start(self._filled, self._limits)
        error = one.wait()
        return None if error is None else self._why(error, chunk)

    def _why(self, error: Exception, chunk: Index) -> str:
        """Return why a chunk cannot be read, as the end of a sentence; VolumeError if the chunk is not at fault."""
        ThreadError.check(error)
        said = str(error)
        is_content = said.startswith(("FAILED_PRECONDITION", "DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE"))
        if self.location.is_local or (is_content and "retry attempts" not in said):
            return excerpt(_reason(error))
        raise remote_error(self._files.name_of(chunk), error)

    def _fill_damaged(self, chunk: Index, target: npt.NDArray[Any], why: str) -> None:
        """Put the value for missing voxels in place of a damaged chunk; VolumeError if none is given."""
        name = self._files.name_of(chunk)
        value = self._missing_voxels.fill
        if value is None:
            raise VolumeError(
                f"{self}: chunk {chunk} in {name} is damaged: {why}; copy the volume again, or give "
                f"{option('fill_missing')} with the value to read there"
            )
        target[...] = value
        if self._note(chunk, damaged=True) and self._counts[2] <= SHOWN:
            _log.warning("%s: chunk %s in %s is damaged (%s) and was read as %s", self, chunk, name, why, value)

    def _must_be_there(self, said: str) -> VolumeError:
        return VolumeError(
            f"{said}; write it, or leave out {option('missing_chunks', 'error')} to read the fill value of the array "
            "there"
        )

    def _note_all(self, chunks: Region) -> None:
        if self._expected is not None:
            inside = chunks.clipped(self._expected)
            for chunk in product(*(range(lo, hi) for lo, hi in zip(inside.lo, inside.hi, strict=True))):
                self._note(chunk)

    def _note(self, chunk: Index, *, missing: bool = False, damaged: bool = False) -> bool:
        """Count an expected chunk; return whether it is counted for the first time."""
        if self._expected is None:
            return damaged
        flat = 0
        for at, lo, hi in zip(chunk, self._expected.lo, self._expected.hi, strict=True):
            if not lo <= at < hi:
                return False
            flat = flat * (hi - lo) + at - lo
        if self._seen[flat >> 3] & 1 << (flat & 7):
            return False
        self._seen[flat >> 3] |= 1 << (flat & 7)
        self._counts[0] += missing
        self._counts[1] += 1
        self._counts[2] += damaged
        return True

    def stored(self) -> tuple[int, int]:
        """Return the bytes of all files of the array, and the latest change of any; other arrays may change.

        In a bucket or on a web server, where asking for every chunk would take hours, these are the bytes of its
        metadata and a number made of their content.
        """
        if not self.location.is_local:
            content = self._stored_files.read(self._document, MOST_METADATA_BYTES) or b""
            return len(content), int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        try:
            found = list(_statuses(self.path / self.dataset))
        except OSError as error:
            raise VolumeError(f"{self} cannot be listed: {error.strerror}; copy the folder again") from None
        return sum(one.st_size for one in found), max((one.st_mtime_ns for one in found), default=0)


class _Piece:
    """A region that is read into the memory of the caller."""

    def __init__(self, region: Region, target: npt.NDArray[Any], look: Look) -> None:
        self.region, self.target, self.look = region, target, look
        self._running: Any = None
        self._error: Exception | None = None

    def start(self, voxels: ts.TensorStore, limits: ts.Context) -> None:
        """Begin to read, unless it is known that chunks are missing or damaged."""
        if self.look.is_whole:
            memory = ts.array(self.target, copy=False, context=limits)
            self._running = memory.write(voxels[self.region.slices][ts.d[:].translate_to[0]])

    def wait(self) -> Exception | None:
        """Wait until the region is read; return the error that ended it, if any."""
        running, self._running = self._running, None
        self._error = None if running is not None else self._error
        if running is not None:
            try:
                running.result()
            except (ValueError, RuntimeError, OverflowError, OSError) as error:
                self._error = error
        return self._error


def _reason(error: Exception) -> str:
    """Return the message of tensorstore without its code and the name of the file."""
    return _REASON.sub("", str(error), count=1)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    """Yield the statuses of all regular files in a folder, at any depth."""
    waiting = [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file():
                    yield entry.stat()
