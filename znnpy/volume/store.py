"""The interface of the files and folders that hold an output's voxels, and what their formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError, ResumeError
from znnpy.messages import excerpt, option
from znnpy.patches import Box
from znnpy.shapes import Vec3, ceil_divide, multiply
from znnpy.volume.output_names import RUN

RUN_ATTRIBUTE = "znnpy_run"  # the id of the run that made an output
JOURNAL_ATTRIBUTE = "znnpy_journal"  # the digest of the header of its journal
DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # what h5py and zarr raise for incomplete files
CHUNK = 64  # largest number of voxels of a chunk along each axis: 1 MiB of float32


class Store(ABC):
    """A file or folder of the output's full size: voxels (c, z, y, x) written box by box."""

    @abstractmethod
    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        """Open what `create` made. OutputError when it is another shape or type, ResumeError when it is damaged."""

    @staticmethod
    @abstractmethod
    def create(
        path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        """Make it, with attributes (texts, numbers, arrays) on the prediction; on disk on return.

        FileExistsError where there is anything at `path`.
        """

    @staticmethod
    @abstractmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        """Attributes of the prediction at `path`; none when it is no such file, or cannot be read."""

    @classmethod
    def run_of(cls, path: Path) -> str | None:
        """The id of the run that made the file or folder at `path`; None where no run did, or it cannot be read."""
        run = cls.attributes_of(path).get(RUN_ATTRIBUTE)
        return run if isinstance(run, str) and RUN.fullmatch(run) else None

    @abstractmethod
    def is_still_there(self) -> bool:
        """Return whether the path is still the file or folder that was opened."""

    @abstractmethod
    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        """Write voxels (c, *box.size) of the store's dtype, any strides; OSError when the system refuses."""

    @abstractmethod
    def sync(self) -> None:
        """Return once everything written is on disk."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; more than once is fine."""


def chunk_of(size: Vec3) -> Vec3:
    """Chunk size of an output of this size: at most CHUNK along each axis, and little left over in the last chunk."""
    chunks = ceil_divide(size, (CHUNK, CHUNK, CHUNK))
    return ceil_divide(size, chunks)


def stored_bytes(shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> int:
    """Bytes of all chunks of an output (c, z, y, x), those at its end as large as any."""
    size = (shape[1], shape[2], shape[3])
    chunk = chunk_of(size)
    return shape[0] * prod(multiply(ceil_divide(size, chunk), chunk)) * dtype.itemsize


def check_stored(
    path: Path,
    found: tuple[int, ...],
    found_dtype: np.dtype[Any],
    shape: tuple[int, int, int, int],
    dtype: np.dtype[Any],
) -> None:
    """OutputError unless what is stored, (c, z, y, x) or (z, y, x), is what this run writes."""
    stored = (1,) * (4 - len(found)) + tuple(found)
    if stored != shape or found_dtype != dtype:
        raise OutputError(
            f"{path} holds {stored} {found_dtype}, and this run writes {shape} {dtype}; "
            f"start again with {option('overwrite', True)}"
        )


def taken_over(path: Path) -> OutputError:
    """A run's files are no longer those that it opened."""
    return OutputError(
        f"{path} was removed or replaced while this run wrote it, perhaps by another run, so this run gives no output; "
        "see that one run at a time writes, and start again"
    )


def damaged(path: Path, why: object) -> ResumeError:
    """An unfinished output that cannot be gone on with."""
    return ResumeError(
        f"the unfinished {path} is damaged ({excerpt(why)}), so nothing can go on from it; remove it and start again"
    )


def chunks_of(box: Box, chunk: Vec3) -> Iterator[Vec3]:
    """Indices of the chunks that a box touches."""
    z, y, x = (range(lo // c, -(-hi // c)) for lo, c, hi in zip(box.lo, chunk, box.hi, strict=True))
    yield from product(z, y, x)
