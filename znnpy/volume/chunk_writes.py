"""Write and read files of chunks by tensorstore, in folders and in buckets, several at a time."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from znnpy.errors import MissingExtraError
from znnpy.extras import install
from znnpy.volume.chunk_assembly import Place, Voxels
from znnpy.volume.chunked_formats import ChunkedFormat, StoredArray
from znnpy.volume.regions import Region

try:
    import tensorstore
except ImportError:
    raise MissingExtraError(
        f"writing .zarr, .n5 and precomputed outputs needs the package tensorstore, which is not installed; "
        f"`{install('io')}`"
    ) from None

PACKING = 2  # threads that pack chunks
WRITING = 4  # files that are written at a time
MOST_WAITING = 512  # files that are packed, written or wait for it: they are packed while the next slabs are copied
COPIES = 2  # of a file that is packed: its packed chunks, and those joined to a file
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")
_ERRORS = (ValueError, RuntimeError, OSError)  # raised by tensorstore

KvStore = Callable[[str], Mapping[str, Any]]  # makes the key-value store of a folder below the output's root


def context() -> Any:
    """Return the limits of tensorstore: nothing is cached, and few threads work."""
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": PACKING},
            "file_io_concurrency": {"limit": WRITING},
        }
    )


class ChunkFiles:
    """The files of the arrays of one output."""

    more: ClassVar[Mapping[str, Any]] = {}  # what tensorstore is told besides

    def __init__(
        self,
        form: ChunkedFormat,
        arrays: Sequence[StoredArray],
        store: KvStore,
        most_bytes: int,
        *,
        note: Callable[[str], None] | None = None,
        inside: Any = None,
    ) -> None:
        """Open arrays without reading anything.

        store       place of a folder below the root; of precomputed volumes, that of the volume
        most_bytes  of files that are packed or written at a time; a single one may have more
        note        called with the key of each file, before it is written
        inside      the context; None: a new one of local files
        """
        self._form, self._arrays, self._note, self.most_bytes = form, arrays, note, most_bytes
        inside = inside or context()
        self._opened = [self._open(array, store, inside) for array in arrays]
        self._waiting: deque[tuple[Any, Callable[[], Any], Voxels]] = deque()
        self._bytes = 0
        self._largest = max(array.file_bytes for array in arrays)

    def start(self, place: Place, region: Region, voxels: Voxels, buffer: Voxels) -> None:
        """Begin to write a file; see `chunk_assembly.Files`."""
        number, index = place
        if self._note is not None:
            self._note(self._form.key(self._arrays[number], index))
        target = self._opened[number][region.slices]

        def begin() -> Any:
            future = target.write(voxels, can_reference_source_data_indefinitely=True)
            future.commit.force()
            return future

        try:
            future = begin()
        except _ERRORS as error:
            raise self._explained(error) from error
        self._waiting.append((future, begin, buffer))
        self._bytes += buffer.nbytes

    def finished(self, *, wait: bool) -> list[Voxels]:
        """Return the buffers of files that are written; see `chunk_assembly.Files`."""
        back: list[Voxels] = []
        while self._waiting and (
            (wait and not back)
            or len(self._waiting) > MOST_WAITING
            or self._bytes > self.most_bytes - self._largest  # so that one more fits
            or self._waiting[0][0].done()
        ):
            future, begin, buffer = self._waiting.popleft()
            self._bytes -= buffer.nbytes
            back.append(buffer)
            self._wait_for(future, begin)
        return back

    def read(self, number: int, region: Region) -> Voxels:
        """Return what is stored of an array; zeros where nothing is."""
        try:
            found: Voxels = self._opened[number][region.slices].read().result()
        except _ERRORS as error:
            raise as_system_error(error) from error
        return found

    def close(self) -> None:
        """Wait for what is being written, whatever becomes of it."""
        while self._waiting:
            self._waiting.popleft()[0].exception()
        self._opened = []

    def _explained(self, error: Exception) -> Exception:
        return as_system_error(error)

    def _wait_for(self, future: Any, begin: Callable[[], Any]) -> None:
        """Return once a file is written, which `begin` would begin to write again."""
        del begin  # what fails in a folder fails again
        try:
            future.result()
        except _ERRORS as error:
            raise as_system_error(error) from error

    def _open(self, array: StoredArray, store: KvStore, inside: Any) -> Any:
        """Open an array with the axes (maps, z, y, x)."""
        form = self._form
        folder = array.name if form.whole_maps else form.folder(array)
        spec = {
            **form.spec(array),
            "kvstore": store(folder),
            "open": True,
            "assume_metadata": True,
            "store_data_equal_to_fill_value": form.keeps_zeros,
            **self.more,
        }
        return form.turned(tensorstore.open(spec, context=inside).result())


def as_system_error(error: Exception) -> OSError:
    """Return an error of tensorstore as that of the system which it tells of."""
    text = " ".join(str(error).split())
    if found := _SYSTEM_ERROR.search(text):
        number = int(found[1])
        return OSError(number, os.strerror(number))
    return error if isinstance(error, OSError) else OSError(text)
