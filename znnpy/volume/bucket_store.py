"""The chunks of an output in a bucket: gathered in memory until they are whole, and written."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy.typing as npt

from znnpy.patches import Box
from znnpy.volume.bucket import Bucket
from znnpy.volume.bucket_files import BucketFiles
from znnpy.volume.bucket_journal import BucketJournal
from znnpy.volume.chunk_assembly import Assembler
from znnpy.volume.chunked_formats import ChunkedFormat, StoredArray, box_region
from znnpy.volume.chunked_store import ON_THE_WAY
from znnpy.volume.coarser_levels import write_coarser
from znnpy.volume.store import Storage


class BucketStore:
    """The chunks of an output that is open for writing."""

    def __init__(
        self,
        bucket: Bucket,
        journal: BucketJournal,
        form: ChunkedFormat,
        levels: Sequence[Sequence[StoredArray]],
        storage: Storage,
    ) -> None:
        self._levels, first = levels, [some[0] for some in levels]
        every = first + [one for some in levels for one in some[1:]]
        self._numbers = {(one.name, one.level): number for number, one in enumerate(every)}
        self._files = BucketFiles(form, every, bucket, journal, storage.budget // ON_THE_WAY)
        self._assembler = Assembler(every, self._files, storage.budget)

    @property
    def unfinished(self) -> Set[int]:
        """The numbers of chunks that wait in memory for more voxels."""
        return self._assembler.unfinished

    @property
    def rewritten(self) -> int:
        """Number of times that a file was written again."""
        return self._assembler.rewritten

    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""
        self._assembler.budget, self._files.most_bytes = budget, budget // ON_THE_WAY

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int) -> None:
        """Gather voxels (c, *box.size) of an array."""
        if voxels.size:
            self._assembler.add(number, box_region(box, len(voxels)), voxels)

    def flush(self, serials: Set[int] | None = None) -> None:
        """Write chunks that wait for more voxels, with what is stored in their place; None: all of them."""
        self._assembler.flush(serials)

    def sync(self) -> None:
        """Return once everything that was passed on is in the bucket."""
        self._assembler.settle()

    def write_coarser(self) -> None:
        """Write the coarser levels."""
        for levels in self._levels:
            numbers = [self._numbers[one.name, one.level] for one in levels]
            write_coarser(levels, numbers, self._assembler, self._files)

    def close(self) -> None:
        """Wait for what is being written, and forget the rest."""
        self._files.close()
        self._assembler.drop()
