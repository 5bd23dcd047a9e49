"""Predict cases with nnU-Net's own predictor, by a model that `tests.nnunet.with_nnunet` made.

    python -m tests.nnunet.predicted_by_nnunet trained FOLDER
    python -m tests.nnunet.predicted_by_nnunet assembled FOLDER

Leaves in FOLDER, for each of the runs and both kinds of sums, `predicted/RUN_SUMS/NAME.nii.gz` with the labels and
`NAME.npz` with the probabilities. nnU-Net adds windows in half precision; in the runs `float` it adds in float32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np


@dataclass(frozen=True)
class Run:
    """A case, and the folds and the mirroring that it is predicted with."""

    case: str
    channels: int
    folds: tuple[str, ...]
    mirrored: bool

    @property
    def name(self) -> str:
        """The name of the folder."""
        return f"{self.case}_{'_'.join(self.folds)}{'_mirrored' if self.mirrored else ''}"


RUNS = {
    "trained": (
        Run("equal", 2, ("0", "1"), mirrored=True),
        Run("equal", 2, ("1",), mirrored=False),
        Run("together", 2, ("0", "1"), mirrored=False),
        Run("together", 2, ("0",), mirrored=True),
        Run("separate", 2, ("0",), mirrored=False),
        Run("empty", 2, ("0",), mirrored=False),
    ),
    "assembled": (Run("turned", 3, ("all",), mirrored=False),),
}
SUMS = ("float", "half")


def main() -> None:
    """Predict every run of a model."""
    import torch
    from nnunetv2.inference import predict_from_raw_data

    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "trained":
        empty(folder / "cases")
    torch.set_num_threads(1)
    for run in RUNS[kind]:
        for sums in SUMS:
            half = torch.half if sums == "half" else torch.float32
            predict_from_raw_data.torch = SimpleNamespace(**{**vars(torch), "half": half})
            predictor = predict_from_raw_data.nnUNetPredictor(
                use_mirroring=run.mirrored, device=torch.device("cpu"), allow_tqdm=False
            )
            predictor.initialize_from_trained_model_folder(str(folder / "model"), run.folds)
            files = [str(folder / "cases" / f"{run.case}_{channel:04d}.nii.gz") for channel in range(run.channels)]
            out = folder / "predicted" / f"{run.name}_{sums}"
            out.mkdir(parents=True)
            predictor.predict_from_files_sequential([files], [str(out / run.case)], save_probabilities=True)


def empty(folder: Path) -> None:
    """Write a case of which all voxels are zero."""
    for channel in range(2):
        image = nibabel.Nifti1Image(np.zeros((17, 18, 9), np.float32), np.diag([1, 1, 2.0, 1]))
        nibabel.save(image, folder / f"empty_{channel:04d}.nii.gz")


if __name__ == "__main__":
    main()
