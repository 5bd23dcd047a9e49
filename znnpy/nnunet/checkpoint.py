"""Read a checkpoint of nnU-Net with PyTorch's reader of weights alone, which makes arrays and plain values.

Nothing else is unpickled: of numpy, scalars and their types are allowed, since nnU-Net keeps losses as such.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.extras import install
from znnpy.importing.pt2_archive import opened_zip
from znnpy.messages import excerpt

if TYPE_CHECKING:
    import torch

MOST_ARRAYS = 20_000
SHOWN = 60  # characters of a name in a message
NUMPY_TYPES = (
    "Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float16", "Float32", "Float64",
    "Str",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """The part of a checkpoint that predicting needs.

    mirrored  axes along which predictions of mirrored patches are averaged
    """

    arrays: Mapping[str, StoredTensor]
    configuration: str
    trainer: str
    mirrored: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An array of a checkpoint, whose values were not looked at yet."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the file states."""
        return tuple(self.tensor.shape)

    def values(self) -> npt.NDArray[np.float32]:
        """Return the values, in C order; ValueError for types that float32 does not hold, or repeated values."""
        import torch

        found = self.tensor
        if found.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"values of type {found.dtype}")
        if found.layout != torch.strided or found.untyped_storage().nbytes() < prod(self.shape) * found.element_size():
            raise ValueError(f"fewer values than its shape {self.shape} has")
        return np.array(found.detach().to(torch.float32).numpy(), np.float32, order="C")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; NetworkFileError if it is damaged, or holds what is no weight or plain value.

    MissingExtraError without PyTorch.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            f"reading checkpoints of nnU-Net needs PyTorch, which is not installed; `{install('torch')}`"
        ) from None
    _check_archive(path)
    with torch.serialization.safe_globals(_allowed()):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the library raises whatever a damaged file leads to
            raise NetworkFileError(
                f"{path} is damaged, or holds objects other than arrays and plain values, which are never read "
                f"({excerpt(_reason(error))}); copy it again"
            ) from None
    if not isinstance(found, dict):
        raise NetworkFileError(f"{path} holds a {type(found).__name__}, and no checkpoint of nnU-Net; copy it again")
    weights, began = found.get("network_weights"), found.get("init_args")
    if not isinstance(weights, dict) or not isinstance(began, dict):
        raise NetworkFileError(
            f"{path} has no network_weights or init_args, as checkpoints of nnU-Net v2 have; give a folder of that "
            "version"
        )
    configuration, trainer = began.get("configuration"), found.get("trainer_name")
    if not isinstance(configuration, str) or not isinstance(trainer, str):
        raise NetworkFileError(
            f"{path} has the configuration {excerpt(configuration, SHOWN)} and the trainer {excerpt(trainer, SHOWN)}, "
            "and both are words; copy it again"
        )
    arrays: dict[str, StoredTensor] = {}
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or len(arrays) == MOST_ARRAYS:
            raise NetworkFileError(
                f"{path} has network_weights that are not at most {MOST_ARRAYS:,} arrays with names; copy it again"
            )
        arrays[name] = StoredTensor(tensor)
    return Checkpoint(arrays, configuration, trainer, _axes(found.get("inference_allowed_mirroring_axes"), path))


def _check_archive(path: Path) -> None:
    """Refuse what is no archive of torch.save, and one whose members could fill the memory."""
    try:
        size = os.path.getsize(path)
        with opened_zip(path) as archive:
            members = archive.infolist()
    except NetworkFileError as error:
        raise NetworkFileError(f"{path} is no checkpoint of nnU-Net: {error}") from None
    except OSError as error:
        raise NetworkFileError(f"{path} cannot be read: {error.strerror}; check the file") from None
    packed = [one for one in members if one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size]
    if packed or sum(one.file_size for one in members) > size:
        raise NetworkFileError(
            f"{path} is an archive whose {len(members)} members are compressed or longer than its {size:,} bytes, "
            "which torch.save never writes; copy it again"
        )


def _allowed() -> list[Any]:
    """Return the classes and functions of numpy that scalars are made with, by both names that numpy had for them."""
    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
    types = [getattr(np.dtypes, f"{name}DType") for name in NUMPY_TYPES]
    return [
        (scalar, "numpy._core.multiarray.scalar"),
        (scalar, "numpy.core.multiarray.scalar"),
        np.dtype,
        *types,
    ]


def _reason(error: Exception) -> str:
    """Return the line of an error that names what is wrong; PyTorch's advice to trust the file is left out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line), lines[0] if lines else type(error).__name__)


def _axes(given: object, path: Path) -> tuple[int, ...]:
    """Return the axes to mirror along; a checkpoint that names none, or is older than they are, has none."""
    if given is None:
        return ()
    axes = tuple(given) if isinstance(given, tuple | list) and len(given) <= 3 else (None,)
    if any(type(axis) is not int or not 0 <= axis <= 2 for axis in axes) or len(set(axes)) < len(axes):
        raise NetworkFileError(
            f"{path} has inference_allowed_mirroring_axes = {excerpt(given, SHOWN)}, and these are different axes from "
            "0 to 2; copy it again"
        )
    return tuple(sorted(axis for axis in axes if axis is not None))
