"""Names of trained models in place of network files, and of the files that are made of a case.

    nnunet:FOLDER                          all folds of the model in a folder
    nnunet:FOLDER:0,1                      these folds
    nnunet:FOLDER:checkpoint_best.pth      the checkpoints with this name
    nnunet:FOLDER:0,1:checkpoint_best.pth  both

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from znnpy.errors import NetworkFileError, OutputError, VolumeError
from znnpy.messages import excerpt, option
from znnpy.volume.location import Location

PREFIX = "nnunet:"
SUFFIXES = (".nii.gz", ".nii")
_FOLDS = re.compile(r"(?:all|\d{1,3})(?:,(?:all|\d{1,3}))*")
_CASE = re.compile(r"(?P<case>.+?)(?:_0000)?\.nii(?:\.gz)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelName:
    """The folder of a model, and which folds and checkpoints of it are meant; None: as `read_model` chooses."""

    folder: Path
    folds: tuple[str, ...] | None = None
    checkpoint: str | None = None

    @classmethod
    def of(cls, name: str) -> ModelName:
        """Read what stands behind the prefix; a folder whose own name ends like folds or a checkpoint is a folder."""
        folder, folds, checkpoint = name, None, None
        if not Path(folder).is_dir() and folder.endswith(".pth"):
            folder, _, checkpoint = folder.rpartition(":")
        before, _, last = folder.rpartition(":")
        if not Path(folder).is_dir() and _FOLDS.fullmatch(last):
            folder, folds = before, tuple(last.split(","))
        if not folder:
            raise NetworkFileError(f"{PREFIX}{excerpt(name)} names no folder; write {PREFIX}FOLDER or {PREFIX}FOLDER:0")
        return cls(Path(folder), folds, checkpoint)

    @property
    def word(self) -> str:
        """The name of the folder, which is that of the network."""
        return self.folder.name or self.folder.resolve().name or "nnunet"


def model_of(network: object) -> ModelName | None:
    """Return the model that is named in place of a network file; None: another network is given.

    NetworkFileError if it is one of several networks.
    """
    if isinstance(network, str | Path):
        name = str(network)
        return ModelName.of(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if isinstance(network, Sequence) and any(model_of(one) is not None for one in network):
        if len(network) == 1:
            return model_of(network[0])
        raise NetworkFileError(
            f"{len(network)} networks are given, and one of them is a model of nnU-Net, whose folds are an ensemble "
            f"already; give it alone, with its folds behind the folder as in {PREFIX}FOLDER:0,1"
        )
    return None


def case_path(volume: object) -> Path:
    """Return the path of the first image of a case; VolumeError for what is no file of this machine."""
    place = Location.of(volume) if isinstance(volume, str | Path) else None
    if place is None or not place.is_local or place.dataset is not None or place.prefix is not None:
        what = excerpt(volume, 60) if place is not None else f"an object of type {type(volume).__name__}"
        raise VolumeError(f"a case of nnU-Net is a NIfTI file on this machine, and not {what}; save it as .nii.gz")
    return place.path


def label_path(volume: object, out: object, model: ModelName) -> Path:
    """Return the path of the labels of a case; OutputError for a name that such a file cannot have.

    out  what was asked for; None: a name after the case and the model
    """
    case = case_path(volume)
    if out is None:
        match, word = _CASE.fullmatch(case.name), re.sub(r"[^\w.+-]+", "_", model.word)
        return case.with_name(f"{case.name if match is None else match['case']}_{word}.nii.gz")
    place = Location.of(out) if isinstance(out, str | Path) else None
    if place is None or not place.is_local or not place.path.name.endswith(SUFFIXES):
        what = excerpt(out, 60) if place is not None else f"an object of type {type(out).__name__}"
        raise OutputError(
            f"labels of nnU-Net are written as NIfTI on this machine, and not to {what}; give a name that ends in "
            f".nii.gz or .nii as {option('out')}"
        )
    return place.path


def unfinished(labels: Path) -> Path:
    """Return the path of what is computed before the labels, which exists as long as these are not complete."""
    path = Path(os.path.realpath(labels))
    return path.with_name(f"{path.name}.unfinished.h5")
