"""Read the folder of a trained model, as nnUNetv2_train leaves it: plans, dataset, and a checkpoint of each fold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt
from znnpy.network import ConvWeights, Network
from znnpy.nnunet.checkpoint import Checkpoint, read_checkpoint
from znnpy.nnunet.dataset import Dataset, read_dataset
from znnpy.nnunet.plans import Plans, read_plans
from znnpy.nnunet.unet import unet_of
from znnpy.windows.settings import Windows

CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")  # the first that a fold has is read
OVERLAP, SIGMA = 0.5, 0.125  # of nnU-Net's windows: parts of a patch
MOST_FOLDS = 20
SHOWN = 60  # characters of a name in a message
_FOLD = re.compile(r"fold_(\d{1,3}|all)")
TRAINER = "nnUNetTrainer"  # others may build any network in their code, which is not read
_POSTPROCESSING = "postprocessing.pkl"


@dataclass(frozen=True)
class NnunetModel:
    """A trained model of nnU-Net.

    network  gives logits, in windows that overlap; folds are the members of an ensemble
    weights  of each fold, one after the other
    notes    sentences for the user
    """

    folder: Path
    network: Network
    weights: tuple[ConvWeights, ...]
    plans: Plans
    dataset: Dataset
    folds: tuple[str, ...]
    trainer: str
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line; the fields hold the rest."""
        return f"<NnunetModel {excerpt(self.folder.name, SHOWN)}, folds {', '.join(self.folds)}: {self.network!r}>"


def read_model(folder: str | Path, folds: Sequence[str] | None = None, checkpoint: str | None = None) -> NnunetModel:
    """Read a model folder, such as nnUNetTrainer__nnUNetPlans__3d_fullres.

    folds       their names behind `fold_`; None: all with a checkpoint, `all` only if it is the only one
    checkpoint  name of the file of each fold; None: checkpoint_final.pth, or checkpoint_best.pth where that is missing

    NetworkFileError for whatever is wrong with the folder; ShapeError if the network has more layers than networks may
    have; MissingExtraError without PyTorch.
    """
    folder = Path(folder)
    dataset = read_dataset(folder / "dataset.json")
    files = _checkpoints(folder, folds, checkpoint)
    notes = [
        f"fold {fold} has no {CHECKPOINTS[0]}, so that {path.name} is read"
        for fold, path in files.items()
        if checkpoint is None and path.name != CHECKPOINTS[0]
    ]
    held = {fold: read_checkpoint(path) for fold, path in files.items()}
    first = next(iter(held.values()))
    plans = read_plans(folder / "plans.json", first.configuration, dataset.channels)
    unet = unet_of(plans.architecture, dataset.channels, dataset.heads, excerpt(folder.name, SHOWN) or "nnunet")
    for fold, one in held.items():
        _check_same(first, one, files[fold])
    weights = [unet.weights(one.arrays, str(files[fold])) for fold, one in held.items()]
    windows = Windows(plans.patch, (OVERLAP, OVERLAP, OVERLAP), "gaussian", SIGMA, first.mirrored, "nnunet")
    network = replace(unet.network, windows=windows, members=len(held))
    if first.trainer != TRAINER:
        notes.append(
            f"the trainer {excerpt(first.trainer, SHOWN)} is taken to build the network that plans.json describes, as "
            f"{TRAINER} does"
        )
    if any(path.is_file() for path in (folder / _POSTPROCESSING, *folder.glob(f"crossval_results*/{_POSTPROCESSING}"))):
        notes.append(f"{_POSTPROCESSING} is not applied; run nnUNetv2_apply_postprocessing on the result")
    return NnunetModel(
        folder, network, tuple(chain(*weights)), plans, dataset, tuple(held), first.trainer, tuple(notes)
    )


def _checkpoints(folder: Path, folds: Sequence[str] | None, checkpoint: str | None) -> dict[str, Path]:
    """Return the checkpoint of each fold, in order."""
    names = CHECKPOINTS if checkpoint is None else (checkpoint,)
    there: dict[str, Path] = {}
    for path in sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name)):
        match = _FOLD.fullmatch(path.name)
        file = next((path / name for name in names if (path / name).is_file()), None)
        if match is not None and file is not None:
            there[match[1]] = file
    wanted = [fold for fold in there if fold != "all" or len(there) == 1] if folds is None else list(map(str, folds))
    missing = [fold for fold in wanted if fold not in there]
    if missing or not wanted:
        raise NetworkFileError(
            f"{folder} has no {' or '.join(names)} in fold_{excerpt(missing[0], SHOWN) if missing else '0'}; it has "
            f"{', '.join(f'fold_{fold}' for fold in there) or 'no fold with one'}"
        )
    if len(wanted) > MOST_FOLDS or len(set(wanted)) < len(wanted):
        raise NetworkFileError(f"{folder} has {len(wanted)} folds to read; name up to {MOST_FOLDS} different ones")
    return {fold: there[fold] for fold in wanted}


def _check_same(first: Checkpoint, one: Checkpoint, path: Path) -> None:
    """Refuse folds of different configurations."""
    if one.configuration != first.configuration:
        raise NetworkFileError(
            f"{path} is of the configuration {excerpt(one.configuration, SHOWN)}, and other folds are of "
            f"{excerpt(first.configuration, SHOWN)}; keep the folds of one in a folder"
        )
