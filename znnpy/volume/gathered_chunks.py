"""The chunks of an output that is open for writing: gathered until they are whole, then written as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy.typing as npt

from znnpy.patches import Box
from znnpy.volume.chunk_assembly import Assembler
from znnpy.volume.chunk_writes import ChunkFiles
from znnpy.volume.chunked_formats import StoredArray, box_region
from znnpy.volume.coarser_levels import write_coarser

ON_THE_WAY = 4  # the part of the budget for files that are packed and written, one in so many


class GatheredChunks:
    """The levels of the arrays of an output, in a folder or a bucket."""

    def __init__(
        self,
        levels: Sequence[Sequence[StoredArray]],
        budget: int,
        opened: Callable[[Sequence[StoredArray], int], ChunkFiles],
    ) -> None:
        """Open the files of all levels.

        levels  of each array, the finest first
        budget  bytes in which chunks are gathered
        opened  opens the files of arrays; its second argument are the bytes of those on their way
        """
        self._levels, first = levels, [some[0] for some in levels]
        every = first + [one for some in levels for one in some[1:]]
        self._numbers = {(one.name, one.level): number for number, one in enumerate(every)}
        self._files = opened(every, budget // ON_THE_WAY)
        self._assembler = Assembler(every, self._files, budget)

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

    def read(self, box: Box, number: int) -> npt.NDArray[Any]:
        """Return voxels (c, *box.size) of an array as they are stored."""
        found: npt.NDArray[Any] = self._files.read(number, box_region(box, self._levels[number][0].shape[0]))
        return found

    def flush(self, serials: Set[int] | None = None) -> None:
        """Write chunks that wait for more voxels, with what is stored in their place; None: all of them."""
        self._assembler.flush(serials)

    def sync(self) -> None:
        """Return once everything that was passed on is stored."""
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
