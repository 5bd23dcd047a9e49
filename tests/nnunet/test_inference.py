"""The whole command gives the labels that nnU-Net's predictor writes for the same files.

nnU-Net adds its windows in half precision. Where its sums are made float32, all labels are equal. As it is, labels
differ where two classes are as near as these sums err, most of all at the corners of a case, where weights of windows
are so small that their products with logits are rounded to few bits. These cases are small, so that much of them is
corner, and the networks hardly trained, so that classes are near; 99.9 % of the labels of clear voxels are equal.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from tests.nnunet.predicted_by_nnunet import RUNS, SUMS, Run
from znnpy.cli import main
from znnpy.network_files import read_asked
from znnpy.nnunet.export import probabilities_of
from znnpy.nnunet.folder import read_model
from znnpy.nnunet.images import read_images
from znnpy.nnunet.preprocessing import prepared
from znnpy.options import InferOptions
from znnpy.trained import TrainedNetwork

pytestmark = pytest.mark.torch

SECONDS = 600  # until a process that predicts is given up
EQUAL = {"float": 0.9999, "half": 0.995}  # share of voxels with the labels of nnU-Net, by its sums
EQUAL_IF_CLEAR = 0.999  # with sums in half precision, where the largest probability leads by `CLEAR`
CLEAR = 0.05
EVERY = [(kind, run) for kind, runs in RUNS.items() for run in runs]


@pytest.fixture(scope="module")
def predicted(repository: Path, trained: Path, assembled: Path) -> dict[str, Path]:
    """Return the folders of both models, in which nnU-Net predicted the cases."""
    folders = {"trained": trained, "assembled": assembled}
    for kind, folder in folders.items():
        command = [sys.executable, "-m", "tests.nnunet.predicted_by_nnunet", kind, str(folder)]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    return folders


def arguments(folder: Path, run: Run, out: Path) -> list[str]:
    """Return the words of the command."""
    network = f"nnunet:{folder / 'model'}:{','.join(run.folds)}"
    words = ["infer", folder / "cases" / f"{run.case}_0000.nii.gz", "--network", network, "--out", out]
    return [str(word) for word in (*words, "--no-calibrate", *(() if run.mirrored else ("--mirror", "none")))]


def voxels(path: Path) -> npt.NDArray[Any]:
    return np.asarray(nibabel.load(path).dataobj)


@pytest.mark.parametrize(("kind", "run"), EVERY, ids=[run.name for _, run in EVERY])
def test_labels_are_those_that_nnunet_writes(kind: str, run: Run, predicted: dict[str, Path], tmp_path: Path) -> None:
    folder, out = predicted[kind], tmp_path / "seg.nii.gz"
    result = CliRunner().invoke(main, arguments(folder, run, out), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = voxels(out)
    for sums in SUMS:
        path = folder / "predicted" / f"{run.name}_{sums}" / f"{run.case}.nii.gz"
        theirs = voxels(path)
        assert (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
        share = np.count_nonzero(found == theirs) / found.size
        print(f"{run.name} {sums}: {share:.6f} of {found.size} labels, {np.unique(theirs)}")
        assert share >= EQUAL[sums]
        if kind == "trained":
            with np.load(folder / "predicted" / f"{run.name}_float" / f"{run.case}.npz") as exact:
                largest = np.sort(exact["probabilities"], axis=0)[-2:]
            clear = (largest[1] - largest[0] > CLEAR).transpose(2, 1, 0)
            share = np.count_nonzero((found == theirs)[clear]) / np.count_nonzero(clear)
            print(f"{run.name} {sums}: {share:.6f} of {np.count_nonzero(clear)} clear labels")
            assert share >= EQUAL_IF_CLEAR
        assert np.allclose(nibabel.load(out).affine, nibabel.load(path).affine, atol=1e-4)
        assert np.allclose(nibabel.load(out).header.get_zooms(), nibabel.load(path).header.get_zooms(), rtol=1e-5)


@pytest.mark.parametrize(("kind", "run"), EVERY, ids=[run.name for _, run in EVERY])
def test_probabilities_are_those_that_nnunet_writes(kind: str, run: Run, predicted: dict[str, Path]) -> None:
    folder = predicted[kind]
    model = read_model(folder / "model", run.folds)
    images = read_images(folder / "cases" / f"{run.case}_0000.nii.gz", model.plans)
    case = prepared(model.plans, images.images, images.spacing)
    trained = TrainedNetwork(model.network, model.weights)
    if not run.mirrored:
        trained = TrainedNetwork(read_asked(trained, InferOptions("", mirror="none")).network, model.weights)
    logits = trained(case.data)
    found = probabilities_of(lambda one: logits[one], len(logits), case, model.plans, model.dataset)
    for sums, allowed in (("float", 1e-3), ("half", 1.0)):
        with np.load(folder / "predicted" / f"{run.name}_{sums}" / f"{run.case}.npz") as theirs:
            apart = np.abs(found - theirs["probabilities"])
        print(f"{run.name} {sums}: probabilities differ by {apart.max():.2g} at most, {apart.mean():.2g} in the mean")
        assert apart.max() <= allowed


@pytest.mark.parametrize("run", [RUNS["trained"][0], RUNS["trained"][3]], ids=["as it is", "resampled"])
def test_killed_runs_go_on_to_equal_labels(run: Run, predicted: dict[str, Path], tmp_path: Path) -> None:
    folder, whole, killed = predicted["trained"], tmp_path / "whole.nii.gz", tmp_path / "killed.nii.gz"
    result = CliRunner().invoke(main, arguments(folder, run, whole), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    process = subprocess.Popen([sys.executable, "-m", "znnpy", *arguments(folder, run, killed)])
    journal = killed.with_name(f"{killed.name}.unfinished.h5.journal")
    until = time.monotonic() + SECONDS
    while not (journal.exists() and len(journal.read_text().splitlines()) > 2):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not killed.exists()
    result = CliRunner().invoke(main, [*arguments(folder, run, killed), "--resume"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "of them in this run" in result.stdout
    assert np.array_equal(voxels(killed), voxels(whole))
    assert {path.name for path in tmp_path.iterdir()} == {"whole.nii.gz", "killed.nii.gz"}
