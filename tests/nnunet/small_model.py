"""A model of two folds that is read without PyTorch, and images of a case for it.

    python -m tests.nnunet.small_model FOLDER Z,Y,X ARGUMENT...

Writes such a model, whose patches have Z,Y,X voxels, to FOLDER/model, and runs the command line with the arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest

from tests.nnunet.documents import ARCHITECTURE, CONFIGURATION, Array, arrays_for, dataset, plans, written
from znnpy.nnunet.architecture import architecture_of
from znnpy.nnunet.checkpoint import Checkpoint
from znnpy.nnunet.unet import unet_of
from znnpy.shapes import Vec3

FOLDS = 2
BIASES = ((-1.92, 0.89, 0.85), (-0.86, -1.77, -1.55))  # with which each class is the largest somewhere
SIZE = (23, 19, 22)  # voxels z, y, x of a case
PLACE = np.array([[-1.0, 0, 0, 5], [0, 1.0, 0, -6], [0, 0, 2.0, 7], [0, 0, 0, 1]])


def model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, channels: int = 1, patch: Vec3 = (8, 16, 16), **changed: Any
) -> Path:
    """Write the folder of a model, and let its checkpoints be read as random arrays; `changed` are of its dataset."""
    unet = unet_of(architecture_of({"architecture": ARCHITECTURE}, (8, 16, 16), "plans"), channels, 3, "n")
    written(folder, "plans.json", plans(("ZScoreNormalization",) * channels, patch_size=list(patch)))
    written(folder, "dataset.json", dataset(channels, **changed))
    for fold in range(FOLDS):
        written(folder / f"fold_{fold}", "checkpoint_final.pth", "")

    def read(path: Path) -> Checkpoint:
        fold = int(path.parent.name.removeprefix("fold_"))
        arrays: Any = arrays_for(unet, fold)
        arrays["decoder.seg_layers.1.bias"] = Array(np.array(BIASES[fold], np.float32))
        return Checkpoint(arrays, CONFIGURATION, "nnUNetTrainer", (2,))

    monkeypatch.setattr("znnpy.nnunet.folder.read_checkpoint", read)
    return folder


def case(
    folder: Path,
    name: str = "case_0000.nii.gz",
    voxels: npt.NDArray[Any] | None = None,
    affine: npt.NDArray[np.float64] = PLACE,
) -> Path:
    """Write an image of a case, with zeros at two faces, and return its path."""
    if voxels is None:
        voxels = np.random.default_rng(5).normal(100, 40, SIZE).astype(np.float32)
        voxels[:2], voxels[..., -3:] = 0, 0
    image = nibabel.Nifti1Image(voxels.transpose(2, 1, 0), affine)
    image.header.set_xyzt_units("mm")
    image.set_qform(affine, 1)
    image.set_sform(affine, 1)
    nibabel.save(image, folder / name)
    return folder / name


def main() -> None:
    """Run the command line with a model."""
    from znnpy.__main__ import main as command

    z, y, x = map(int, sys.argv[2].split(","))
    with pytest.MonkeyPatch.context() as monkeypatch:
        model(Path(sys.argv[1]) / "model", monkeypatch, patch=(z, y, x))
        sys.argv[1:] = sys.argv[3:]
        command()


if __name__ == "__main__":
    main()
