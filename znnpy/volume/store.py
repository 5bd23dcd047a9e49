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
DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # raised by h5py and zarr for incomplete files
CHUNK = 64  # largest number of voxels of a chunk along each axis: 1 MiB of float32


class Store(ABC):
    """A file or folder of the output's full size: voxels (c, z, y, x) written box by box."""

    @abstractmethod
    def __init__(self, path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        """Open what `create` made. OutputError if shape or type differ, ResumeError if it is damaged."""

    @staticmethod
    @abstractmethod
    def create(
        path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        """Create it, with attributes (texts, numbers, arrays) of the prediction. It is on disk on return.

        FileExistsError if there is anything at `path`.
        """

    @staticmethod
    @abstractmethod
    def attributes_of(path: Path) -> dict[str, Any]:
        """Return the attributes of the prediction at `path`; none if it is no such file, or cannot be read."""

    @classmethod
    def run_of(cls, path: Path) -> str | None:
        """Return the id of the run that made the file or folder at `path`; None if no run did, or it cannot be read."""
        run = cls.attributes_of(path).get(RUN_ATTRIBUTE)
        return run if isinstance(run, str) and RUN.fullmatch(run) else None

    @abstractmethod
    def is_still_there(self) -> bool:
        """Return whether the path is still the file or folder that was opened."""

    @abstractmethod
    def write(self, box: Box, voxels: npt.NDArray[Any]) -> None:
        """Write voxels (c, *box.size) of the store's dtype, any strides; OSError if the system refuses."""

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


def stored_bytes(shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> int:
    """Return the bytes of all chunks of an output (c, z, y, x); the last ones are as large as any."""
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
    """Raise OutputError unless what is stored, (c, z, y, x) or (z, y, x), is what this run writes."""
    stored = (1,) * (4 - len(found)) + tuple(found)
    if stored != shape or found_dtype != dtype:
        raise OutputError(
            f"{path} holds {stored} {found_dtype}, and this run writes {shape} {dtype}; "
            f"start again with {option('overwrite', True)}"
        )


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
