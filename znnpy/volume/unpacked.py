"""Volumes whose file is compressed as a whole (.nii.gz, NRRD with gzip): they are unpacked once, to a temporary file.

Compressed files can be read from their beginning only, and boxes of a volume lie anywhere. The temporary file lies in
the folder that the system has for such files (TMPDIR), has no name, and is gone once the volume is closed or the
process ends.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO

from znnpy.errors import VolumeError
from znnpy.units import human_bytes
from znnpy.volume.axes import Arranged
from znnpy.volume.raw import RawArray, RawVolume

_log = logging.getLogger(__name__)

PIECE = 2**20  # bytes unpacked at once
MOST_RATIO = 1100  # gzip makes nothing more than 1032 times as small
FOLDER: Callable[[], str] = tempfile.gettempdir  # the folder for the temporary file


class UnpackedVolume(RawVolume):
    """One array of a compressed file, which is unpacked when the first box is read."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        array: RawArray,
        arranged: Arranged | None = None,
        *,
        packed_at: int = 0,
        data: Path | None = None,
    ) -> None:
        """Check that the array can be a volume and may be in so short a file.

        array      position of the voxels in the unpacked data
        packed_at  byte of the file at which the compressed data begin
        """
        self._packed_at = packed_at
        self._skipped = array.begin
        self._unpacked: IO[bytes] | None = None
        self._lock = threading.Lock()
        super().__init__(path, file, array, arranged, data=data)
        self._array = replace(array, begin=0)

    def close(self) -> None:
        super().close()
        if self._unpacked is not None:
            self._unpacked.close()

    def _check_size(self, held: int) -> None:
        if (held - self._packed_at) * MOST_RATIO < self._array.end:
            raise VolumeError(
                f"{self._data} is cut short: its {held:,} bytes cannot hold the {self._array.end:,} that its header "
                "promises; copy it again"
            )

    def _descriptor(self) -> int:
        with self._lock:
            if self._unpacked is None:
                self._unpacked = self._unpack()
            return self._unpacked.fileno()

    def _unpack(self) -> IO[bytes]:
        """Unpack the voxels to a temporary file. VolumeError if there is no room, or the data are damaged."""
        needed = self._array.end
        folder = FOLDER()
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise VolumeError(
                f"{self._data} is compressed as a whole, so it is unpacked before it is read; that takes "
                f"{human_bytes(needed)}, and {folder} has {human_bytes(free)} free: set TMPDIR to a folder with more "
                "room, or unpack the file yourself"
            )
        _log.warning(
            "%s",
            f"{self._data} is compressed as a whole, so it is unpacked first, for each run anew: {human_bytes(needed)} "
            f"in {folder}; an uncompressed file saves that",
        )
        there = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it stays open until the volume is closed
        try:
            with open(os.dup(self._file.fileno()), "rb") as again:
                again.seek(self._packed_at)
                with gzip.open(again) as packed:
                    self._copy(packed, self._skipped, None)
                    self._copy(packed, needed, there)
            there.flush()
        except VolumeError:
            there.close()
            raise
        except (OSError, EOFError, zlib.error) as error:
            there.close()
            raise VolumeError(f"{self._data} cannot be unpacked: {error}; copy it again") from None
        except BaseException:
            there.close()
            raise
        return there

    def _copy(self, packed: gzip.GzipFile, count: int, there: IO[bytes] | None) -> None:
        """Unpack so many bytes, and write them where that is given."""
        while count:
            piece = packed.read(min(PIECE, count))
            if not piece:
                raise VolumeError(f"{self._data} ends {count:,} bytes before the voxels do; copy it again")
            count -= len(piece)
            if there is not None:
                there.write(piece)
