"""The interface of outputs that a run needs: of files, folders, buckets and arrays, and of parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.patches import Box, Columns
from znnpy.volume.journal import JournalHeader


class RunOutput(Protocol):
    """A context manager that takes the voxels of a run; `Output` says what each method does.

    dtype     of the voxels
    header    of the run that is resumed or was begun; None: none was begun
    finished  the output is complete, and nothing is left to do
    done      columns that earlier runs finished
    """

    dtype: np.dtype[Any]
    header: JournalHeader | None
    finished: bool
    done: Set[int]

    def __enter__(self) -> Self:
        """Check what can be checked before anything is written."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Keep what was finished."""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the output that is there."""

    @property
    def folder(self) -> Path | None:
        """The folder on this machine that the output is written to; None: it is elsewhere, or no file."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole output if its chunks are gathered in memory until they are whole; else 0."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the output itself takes once it is written."""

    @property
    def rewritten(self) -> int:
        """Number of files of chunks that were written again because they had been written in part."""

    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""

    def begin(self, header: JournalHeader, attributes: Mapping[str, Any], plans: Sequence[Columns] = ()) -> None:
        """Begin a new run."""

    def pause(self) -> None:
        """Keep what a run finished that ended early and will continue."""

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Write voxels (maps, *box.size) of an output at coordinates `box`."""

    def finish_column(self, index: int) -> None:
        """Note that a column is written."""

    def complete(self) -> None:
        """Make the output complete after the last column."""
