"""The interface of the files and folders that hold an output's voxels, and what their formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError, ResumeError
from znnpy.messages import excerpt, option
from znnpy.patches import Box, Columns
from znnpy.shapes import Vec3, ceil_divide, multiply
from znnpy.volume.output_names import RUN, RUN_ATTRIBUTE
from znnpy.volume.space import Space

JOURNAL_ATTRIBUTE = "znnpy_journal"  # the digest of the header of its journal
DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # raised by h5py and zarr for incomplete files
CHUNK = 64  # largest number of voxels of a chunk along each axis: 1 MiB of float32


@dataclass(frozen=True, slots=True)
class OutputArray:
    """One array of an output, (maps, z, y, x): all that a network gives, or one of several outputs.

    name        in the file; empty: the array is the only one, which every format has its own place for
    attributes  of the array, name -> text, number or array; those that all arrays share, and those of its space, are
                not among them
    space       the position of its voxels in the specimen, if it is known; each format has its own form for it
    """

    shape: tuple[int, int, int, int]
    name: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    space: Space | None = None

    @property
    def size(self) -> Vec3:
        return self.shape[1], self.shape[2], self.shape[3]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file: without the maps where there is one."""
        return self.shape if self.shape[0] > 1 else self.shape[1:]

    @property
    def chunk(self) -> Vec3:
        """Voxels of a chunk, which holds one map."""
        return chunk_of(self.size)

    @property
    def stored_chunk(self) -> tuple[int, ...]:
        """The chunk as it is stored: with an axis for the maps where there are several."""
        return self.chunk if self.shape[0] == 1 else (1, *self.chunk)

    def nbytes(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes of all chunks; the last ones are as large as any."""
        return self.shape[0] * prod(multiply(ceil_divide(self.size, self.chunk), self.chunk)) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Storage:
    """How an output is stored, as far as its format leaves a choice.

    prefix      word that was written before its name, of `location.PREFIXES`
    sharded     files hold many chunks
    multiscale  coarser levels, for viewers
    budget      bytes in which chunks are gathered until they are whole
    plans       columns that are computed; several, where workers share the output
    shared      other processes write at the same time: each chunk lies in one column, and incomplete files are left
    """

    prefix: str | None = None
    sharded: bool = False
    multiscale: int = 0
    budget: int = 64 * 2**20
    plans: tuple[Columns, ...] = ()
    shared: bool = False


class Store(ABC):
    """A file or folder of the output's full size: voxels (c, z, y, x) of its arrays, written box by box."""

    folder: ClassVar[bool] = False  # whether it is a folder
    gathers: ClassVar[bool] = False  # whether chunks stay in memory until they are whole

    @abstractmethod
    def __init__(
        self, path: Path, arrays: Sequence[OutputArray], dtype: np.dtype[Any], storage: Storage | None = None
    ) -> None:
        """Open what `create` made. OutputError if a shape or type differs, ResumeError if it is damaged."""

    @classmethod
    @abstractmethod
    def check(cls, dtype: np.dtype[Any], storage: Storage) -> None:
        """Raise OutputError for what the format does not have."""

    @classmethod
    def check_arrays(cls, arrays: Sequence[OutputArray]) -> None:
        """Raise OutputError if the format cannot hold these arrays; most formats hold any."""
        del arrays

    @classmethod
    @abstractmethod
    def create(
        cls,
        path: Path,
        arrays: Sequence[OutputArray],
        dtype: np.dtype[Any],
        attributes: Mapping[str, Any],
        storage: Storage | None = None,
    ) -> None:
        """Create it, with attributes (texts, numbers, arrays) of the output. It is on disk on return.

        The attributes are those of the array if there is one, and otherwise those of the file or folder.
        FileExistsError if there is anything at `path`.
        """

    @classmethod
    @abstractmethod
    def dataset_of(cls, path: Path, name: str) -> str | None:
        """Return the name by which the voxels of an array of the output at `path` are read; None: it needs none."""

    @classmethod
    @abstractmethod
    def attributes_of(cls, path: Path, name: str = "") -> dict[str, Any]:
        """Return the attributes of the output at `path`; none if it is no such file, or cannot be read.

        name  of an array of its own, whose attributes are returned instead
        """

    @classmethod
    def run_of(cls, path: Path) -> str | None:
        """Return the id of the run that made the file or folder at `path`; None if no run did, or it cannot be read."""
        run = cls.attributes_of(path).get(RUN_ATTRIBUTE)
        return run if isinstance(run, str) and RUN.fullmatch(run) else None

    @abstractmethod
    def is_still_there(self) -> bool:
        """Return whether the path is still the file or folder that was opened."""

    @abstractmethod
    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        """Write voxels (c, *box.size) of the store's dtype, any strides; OSError if the system refuses.

        number  of the array, in the order in which arrays were given
        """

    @abstractmethod
    def read(self, box: Box, number: int = 0) -> npt.NDArray[Any]:
        """Return voxels (c, *box.size) of an array as they are stored; they may be anything where none were written."""

    @property
    def unfinished(self) -> Set[int]:
        """The numbers of chunks that wait in memory for more voxels. What was written is otherwise on its way."""
        return frozenset()

    @property
    def rewritten(self) -> int:
        """Number of times that a file was written again because it had been written in part."""
        return 0

    @abstractmethod
    def limit(self, budget: int) -> None:
        """Set the bytes in which chunks are gathered."""

    @abstractmethod
    def flush(self, serials: Set[int] | None = None) -> None:
        """Write chunks that wait for more voxels, with what is stored in their place; None: all of them."""

    @abstractmethod
    def write_coarser(self) -> None:
        """Write the coarser levels, once all voxels are written and synced."""

    def sweep(self) -> None:
        """Remove what killed processes left incomplete, once nobody else writes."""
        return  # formats that write in place leave nothing of it

    @abstractmethod
    def sync(self) -> None:
        """Return once everything written is on disk."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. It may be called more than once."""


def chunk_of(size: Vec3) -> Vec3:
    """Return the chunk size for an output: at most CHUNK along each axis, with the last chunk nearly full."""
    chunks = ceil_divide(size, (CHUNK, CHUNK, CHUNK))
    return ceil_divide(size, chunks)


def check_stored(
    path: Path, found: tuple[int, ...], found_dtype: np.dtype[Any], array: OutputArray, dtype: np.dtype[Any]
) -> None:
    """Raise OutputError unless what is stored, (c, z, y, x) or (z, y, x), is what this run writes."""
    stored = (1,) * (4 - len(found)) + tuple(found)
    if stored != array.shape or found_dtype != dtype:
        there = f"{path}: {array.name}" if array.name else f"{path}"
        raise OutputError(
            f"{there} holds {stored} {found_dtype}, and this run writes {array.shape} {dtype}; "
            f"start again with {option('overwrite', True)}"
        )


def check_filled(box: Box, voxels: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise ValueError unless voxels (c, z, y, x) fill a box, and are of the dtype of a store."""
    if voxels.shape[1:] != box.size or voxels.dtype != dtype:
        raise ValueError(f"{voxels.dtype} {voxels.shape} does not fill {box} of {dtype}")


def taken_over(path: Path) -> OutputError:
    """Make the error for files of a run that are no longer those that it opened."""
    return OutputError(
        f"{path} was removed or replaced while this run wrote it, perhaps by another run, so this run gives no output; "
        "make sure that only one run writes it, and start again"
    )


def damaged(path: Path, why: object) -> ResumeError:
    """Make the error for an unfinished output that cannot be continued."""
    return ResumeError(
        f"the unfinished {path} is damaged ({excerpt(why)}), so it cannot be continued; remove it and start again"
    )


def chunks_of(box: Box, chunk: Vec3) -> Iterator[Vec3]:
    """Yield the indices of the chunks that a box touches."""
    z, y, x = (range(lo // c, -(-hi // c)) for lo, c, hi in zip(box.lo, chunk, box.hi, strict=True))
    yield from product(z, y, x)
