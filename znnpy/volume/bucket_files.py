"""Write and read files of chunks in a bucket; see `chunk_writes`. Requests whose faults may pass are repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np

from znnpy.errors import OutputError
from znnpy.messages import option
from znnpy.volume.bucket import ERRORS, Bucket
from znnpy.volume.bucket_journal import BucketJournal
from znnpy.volume.chunk_assembly import Voxels
from znnpy.volume.chunk_writes import ChunkFiles
from znnpy.volume.chunked_formats import ChunkedFormat, StoredArray
from znnpy.volume.object_store import SECONDS
from znnpy.volume.regions import Region


class BucketFiles(ChunkFiles):
    """The files of the arrays of one output in a bucket, each of which is written whole."""

    # Every file is written, so that one which is not there was not written; and none is read as zeros.
    more: ClassVar = {"fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}

    def __init__(
        self,
        form: ChunkedFormat,
        arrays: Sequence[StoredArray],
        bucket: Bucket,
        journal: BucketJournal,
        most_bytes: int,
    ) -> None:
        """Open arrays without reading anything; `most_bytes` as in `ChunkFiles`."""
        self._bucket, self._journal = bucket, journal
        super().__init__(form, arrays, self._below, most_bytes, inside=bucket.limits)

    def read(self, number: int, region: Region) -> Voxels:
        """Return what is stored of an array; zeros where the bucket lists no file."""
        array = self._arrays[number]
        found = np.zeros(region.shape, array.dtype)
        steps = region.in_steps(array.file)
        for index in product(*(range(lo, hi) for lo, hi in zip(steps.lo, steps.hi, strict=True))):
            if self._is_there(self._form.key(array, index)):
                part = array.region_of(index).clipped(region)
                found[part.shifted([-at for at in region.lo]).slices] = self._stored(number, part)
        return found

    def _is_there(self, key: str) -> bool:
        """Return whether the bucket lists a file. Of Google's, a bucket that is gone or denied lists nothing at all."""
        if self._bucket.holds(key):
            return True
        if not self._journal.is_listed:
            raise OutputError(
                f"{self._journal.place} is not listed any more, so the bucket is gone or may not be listed; see to it, "
                f"and continue with {option('resume', True)}"
            )
        return self._bucket.holds(key)  # the bucket may have been back when the journal was listed

    def _stored(self, number: int, region: Region) -> Voxels:
        """Return what files hold that are known to be there."""
        target = self._opened[number][region.slices]
        found: Voxels = self._bucket.repeated(lambda: target.read().result(timeout=SECONDS))
        return found

    def _explained(self, error: Exception) -> Exception:
        return self._bucket.error(error)

    def _wait_for(self, future: Any, begin: Callable[[], Any]) -> None:
        try:
            future.result(timeout=SECONDS)
        except ERRORS:
            self._bucket.repeated(lambda: begin().result(timeout=SECONDS))

    def _below(self, folder: str) -> dict[str, Any]:
        """Return the key-value store of a folder below the output."""
        path = self._bucket.spec["path"]
        return {**self._bucket.spec, "path": f"{path}{folder}/" if folder else path}
