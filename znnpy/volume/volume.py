"""What every volume is, whatever stores it: channels, size and type of its voxels, boxes to read, an identity."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.shapes import Vec3, text

SAMPLE = 8  # voxels along each axis of one sampled box
SAMPLES = (0.0, 0.5, 1.0)  # where they stand, per axis, from the first to the last


class Volume(ABC):
    """Voxels (c, z, y, x) of an integer or floating type, on disk or in memory. A context manager."""

    def __init__(self, path: Path, dataset: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Checks that the array can be a volume; VolumeError says why it cannot.

        shape  as stored: (z, y, x) or (c, z, y, x).
        dtype  as stored, any byte order.
        """
        self.path = path
        self.dataset = dataset
        why = why_not(shape, dtype)
        if why is not None:
            raise VolumeError(f"{self} {why}")
        self.has_channel_axis = len(shape) == 4
        self.channels: int = shape[0] if self.has_channel_axis else 1
        self.size: Vec3 = (shape[-3], shape[-2], shape[-1])
        self.dtype: np.dtype[Any] = dtype.newbyteorder("=")

    def __str__(self) -> str:
        return f"{self.path}: {self.dataset}" if self.dataset else str(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(c, z, y, x); c is 1 where the array has no channel axis."""
        return self.channels, *self.size

    @property
    def extra_bytes(self) -> int:
        """Memory that reading takes beyond the READER_BYTES that every plan sets aside for it."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; more than once is fine."""

    @abstractmethod
    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy the voxels of `box` into `out`: (c, *box.size) of `self.dtype`, C order.

        VolumeError when the storage cannot deliver them.
        """

    @abstractmethod
    def stored(self) -> tuple[int, int]:
        """Size in bytes and time of last change in ns of what holds the voxels."""

    def identity(self) -> dict[str, Any]:
        """What tells this volume from another, whatever folder it lies in; a resumed run compares it.

        The content is sampled: a digest of boxes of 8^3 voxels at corners, middles of edges and faces, and centre.
        """
        size, changed = self.stored()
        return {
            "bytes": size,
            "mtime_ns": changed,
            "dataset": self.dataset,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "samples_sha256": self._samples(),
        }

    def _samples(self) -> str:
        digest = hashlib.sha256()
        spare = [max(0, n - SAMPLE) for n in self.size]
        for at in sorted(set(product(*([round(s * part) for part in SAMPLES] for s in spare)))):
            lo = (at[0], at[1], at[2])
            box = Box(lo, (lo[0] + SAMPLE, lo[1] + SAMPLE, lo[2] + SAMPLE)).clipped(Box((0, 0, 0), self.size))
            voxels = np.empty((self.channels, *box.size), self.dtype)
            self.read(box, voxels)
            digest.update(voxels.tobytes())
        return digest.hexdigest()


def why_not(shape: tuple[int, ...] | None, dtype: np.dtype[Any]) -> str | None:
    """None if an array of this shape and type can be a volume; else the end of a sentence that begins with its name."""
    if dtype.kind not in "iuf":
        kind = {"b": "bool", "c": f"complex ({dtype})", "V": f"compound ({dtype})"}.get(dtype.kind, f"text ({dtype})")
        advice = {
            "b": "store it as uint8",
            "c": "store one real part of it, such as its magnitude",
            "V": "store the field to predict as a dataset of its own",
        }.get(dtype.kind, "name another dataset with --dataset")
        return f"holds {kind} voxels, and only integers and floating-point numbers can be read; {advice}"
    if shape is None or len(shape) not in (3, 4):
        axes = "no axes" if not shape else f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'} {shape}"
        return f"has {axes}, and a volume has 3 (z, y, x) or 4 (c, z, y, x); reshape it or name another with --dataset"
    if prod(shape) == 0:
        return f"is empty: {shape}; name a dataset that holds voxels with --dataset"
    return None


def pick(arrays: Mapping[str, tuple[tuple[int, ...] | None, np.dtype[Any]]], dataset: str | None, path: Path) -> str:
    """The name of the array to read out of all that a file holds: name -> (shape, dtype).

    None asks for the only one that can be a volume. VolumeError lists them where the choice is not clear.
    """
    if dataset is not None:
        wanted = dataset.strip("/")
        if wanted in arrays:
            return wanted
        raise VolumeError(f"{path} has no dataset {dataset!r}; it holds {_listed(arrays, arrays)}")
    fitting = [name for name, (shape, dtype) in arrays.items() if why_not(shape, dtype) is None]
    if len(fitting) == 1:
        return fitting[0]
    if len(arrays) == 1:
        name = next(iter(arrays))
        raise VolumeError(f"{path}: {name} {why_not(*arrays[name])}")
    if not fitting:
        raise VolumeError(
            f"{path} holds no 3D or 4D dataset of numbers but {_listed(arrays, arrays)}; "
            "store the volume as (z, y, x) or (c, z, y, x)"
        )
    raise VolumeError(
        f"{path} holds {len(fitting)} datasets that could be the volume: {_listed(arrays, fitting)}; "
        "name one with --dataset"
    )


def _listed(
    arrays: Mapping[str, tuple[tuple[int, ...] | None, np.dtype[Any]]], names: Sequence[str] | Mapping[str, Any]
) -> str:
    shown = [f"{name} ({text(arrays[name][0] or ()) or 'scalar'} {arrays[name][1]})" for name in list(names)[:10]]
    more = [f"and {len(names) - 10} more"] if len(names) > 10 else []
    return ", ".join(shown + more) or "nothing"
