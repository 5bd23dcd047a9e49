"""A case goes in and its labels come out, whole or not at all; what cannot be is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import znnpy
from tests.nnunet import small_model
from tests.nnunet.small_model import PLACE, SIZE
from znnpy.cli import main
from znnpy.errors import MissingExtraError, NetworkFileError, NoPlanError, OutputError, ResumeError, ShapeError
from znnpy.nnunet.export import labels_of
from znnpy.nnunet.folder import read_model
from znnpy.nnunet.images import read_images
from znnpy.nnunet.preprocessing import prepared
from znnpy.trained import TrainedNetwork

ELSEWHERE = PLACE @ np.diag([1, 1, 0.75, 1])  # a spacing that is not that of the model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model and a case."""
    small_model.model(tmp_path / "model", monkeypatch)
    small_model.case(tmp_path)
    return tmp_path


def infer(folder: Path, name: str = "nnunet:{}", **asked: Any) -> znnpy.Report:
    given: dict[str, Any] = {"mirror": "none", "calibrate": False, "out": folder / "seg.nii.gz", **asked}
    network = name.format(folder / "model")
    return znnpy.infer(given.pop("volume", folder / "case_0000.nii.gz"), network, **given)


def run(folder: Path, *arguments: object, code: int = 0) -> str:
    """Run the command line; return what it prints on stdout, or on stderr if it is to fail."""
    given = ("infer", folder / "case_0000.nii.gz", "--network", f"nnunet:{folder / 'model'}", "--no-calibrate")
    result = CliRunner().invoke(main, [str(one) for one in (*given, *arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def labels(path: Path) -> npt.NDArray[Any]:
    """Return the labels of a file, (z, y, x)."""
    return np.asarray(nibabel.load(path).dataobj).transpose(2, 1, 0)


def definition(folder: Path, folds: tuple[str, ...] | None = None) -> npt.NDArray[Any]:
    """Return the labels that follow from the logits of the whole case, all of them in memory."""
    model = read_model(folder / "model", folds)
    images = read_images(folder / "case_0000.nii.gz", model.plans)
    case = prepared(model.plans, images.images, images.spacing)
    network = znnpy.network_files.read_asked(
        TrainedNetwork(model.network, model.weights), znnpy.options.InferOptions(folder, mirror="none")
    ).network
    logits = TrainedNetwork(network, model.weights)(case.data)
    return images.as_stored(labels_of(lambda one: logits[one], len(logits), case, model.plans, model.dataset))


def others(folder: Path) -> set[str]:
    """Return the names beside the model and the case."""
    return {path.name for path in folder.iterdir()} - {"model", "case_0000.nii.gz"}


@pytest.mark.parametrize("affine", [PLACE, ELSEWHERE], ids=["as it is", "resampled"])
@pytest.mark.parametrize("regions", [False, True], ids=["labels", "regions"])
def test_labels_are_those_of_the_logits(
    affine: npt.NDArray[Any], regions: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if regions:
        named = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "inner": 3}
        small_model.model(folder / "model", monkeypatch, labels=named, regions_class_order=[1, 2, 3])
    small_model.case(folder, affine=affine)
    report = infer(folder)
    assert others(folder) == {"seg.nii.gz"}
    found = labels(folder / "seg.nii.gz")
    assert found.dtype == np.uint8
    assert found.shape == SIZE
    assert not found[:2].any()
    assert np.array_equal(found, definition(folder))
    assert len(np.unique(found)) > 2
    assert report.output == folder / "seg.nii.gz"
    assert ("resampled to" in report.case) == (affine is ELSEWHERE)
    assert "23x19x22 voxels, cropped to 21x19x19" in report.case


def test_header_places_labels_as_the_case(folder: Path) -> None:
    infer(folder)
    found, image = nibabel.load(folder / "seg.nii.gz"), nibabel.load(folder / "case_0000.nii.gz")
    assert np.array_equal(found.affine, image.affine)
    for key in ("pixdim", "xyzt_units", "qform_code", "sform_code"):
        assert np.array_equal(found.header[key], image.header[key])
    assert found.get_data_dtype() == np.uint8


def test_labels_take_16_bits_where_they_need_them(folder: Path) -> None:
    from znnpy.nnunet.label_file import LabelHeader

    header = LabelHeader.like(folder / "case_0000.nii.gz")
    for most, dtype in ((254, np.uint8), (255, np.uint16)):
        (folder / "seg.nii").write_bytes(header.content(np.full(SIZE, most, np.uint16), {}, packed=False))
        assert labels(folder / "seg.nii").dtype == dtype
        assert (labels(folder / "seg.nii") == most).all()


def test_folds_and_checkpoints_are_named_behind_the_folder(folder: Path) -> None:
    shutil.copy(folder / "model/fold_1/checkpoint_final.pth", folder / "model/fold_1/checkpoint_best.pth")
    infer(folder, "nnunet:{}:1")
    one = labels(folder / "seg.nii.gz")
    assert np.array_equal(one, definition(folder, ("1",)))
    infer(folder, "nnunet:{}:0,1", overwrite=True)
    assert not np.array_equal(labels(folder / "seg.nii.gz"), one)
    for name in ("nnunet:{}:1:checkpoint_best.pth", "nnunet:{}:checkpoint_best.pth"):
        infer(folder, name, overwrite=True)
        assert np.array_equal(labels(folder / "seg.nii.gz"), one)


def test_notes_on_a_model_are_warnings(folder: Path) -> None:
    (folder / "model/fold_1/checkpoint_final.pth").rename(folder / "model/fold_1/checkpoint_best.pth")
    note = "fold 1 has no checkpoint_final.pth, so that checkpoint_best.pth is read"
    assert infer(folder).warnings[0] == note
    assert f"warning: {note}" in run(folder, "--out", folder / "other.nii", "--ram", "100M", code=1)


def test_command_names_its_output_after_case_and_model(folder: Path) -> None:
    said = run(folder, "--mirror", "none")
    assert others(folder) == {"case_model.nii.gz"}
    for word in ("case_model.nii.gz", "case       23x19x22 voxels", "memory", "speed"):
        assert word in said
    said = run(folder, "--resume", "--mirror", "none")
    assert "complete already: nothing to do" in said
    written = json.loads(run(folder, "--overwrite", "--mirror", "none", "--json"))
    assert written["case"].startswith("23x19x22 voxels")


def test_mirroring_is_that_of_the_checkpoint_unless_given(folder: Path) -> None:
    found = {}
    for mirror in (None, "x", "none", "z"):
        infer(folder, mirror=mirror, overwrite=True)
        found[mirror] = labels(folder / "seg.nii.gz")
    assert np.array_equal(found[None], found["x"])
    assert not np.array_equal(found["none"], found["x"])
    assert not np.array_equal(found["z"], found["x"])


@pytest.mark.parametrize("affine", [PLACE, ELSEWHERE], ids=["as it is", "resampled"])
def test_interrupted_runs_go_on_to_equal_labels(affine: npt.NDArray[Any], folder: Path) -> None:
    small_model.case(folder, affine=affine)
    infer(folder)
    whole = labels(folder / "seg.nii.gz")
    (folder / "seg.nii.gz").unlink()

    stopped = counted(11, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        infer(folder, progress=stopped)
    left = others(folder)
    assert "seg.nii.gz" not in left
    assert {"seg.nii.gz.unfinished.h5.partial", "seg.nii.gz.unfinished.h5.journal"} <= left
    with pytest.raises(OutputError, match="an unfinished run left"):
        infer(folder)
    report = infer(folder, resume=True)
    assert 0 < report.computed < report.voxels
    assert np.array_equal(labels(folder / "seg.nii.gz"), whole)
    assert others(folder) == {"seg.nii.gz"}


def test_interrupted_replacements_go_on(folder: Path) -> None:
    infer(folder)
    before = (folder / "seg.nii.gz").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        infer(folder, "nnunet:{}:0", overwrite=True, progress=counted(11, KeyboardInterrupt))
    assert (folder / "seg.nii.gz").read_bytes() == before
    infer(folder, "nnunet:{}:0", resume=True)
    assert np.array_equal(labels(folder / "seg.nii.gz"), definition(folder, ("0",)))
    assert others(folder) == {"seg.nii.gz"}


def counted(until: int, error: type[BaseException]) -> Callable[[object], None]:
    """Return a function that raises an error when it was called so often."""
    calls = []

    def call(event: object) -> None:
        calls.append(event)
        if len(calls) >= until:
            raise error

    return call


def test_what_windows_gave_is_kept_if_labels_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OutputError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("znnpy.nnunet_inference.write_asked", full)
        with pytest.raises(OutputError, match="full"):
            infer(folder)
    assert others(folder) == {"seg.nii.gz.unfinished.h5"}
    with pytest.raises(OutputError, match=r"an unfinished run left .*resume=True"):
        infer(folder)
    assert infer(folder, resume=True).computed == 0
    assert others(folder) == {"seg.nii.gz"}
    assert np.array_equal(labels(folder / "seg.nii.gz"), definition(folder))


def test_finished_labels_stay_as_they_are(folder: Path) -> None:
    infer(folder)
    before = (folder / "seg.nii.gz").read_bytes()
    assert infer(folder, resume=True).computed == 0
    with pytest.raises(OutputError, match="exists already"):
        infer(folder)
    for other, what in (({"mirror": "x"}, "network and windows"), ({"name": "nnunet:{}:0"}, "network and weights")):
        with pytest.raises(ResumeError, match=f"was made with other {what}"):
            infer(folder, **other, resume=True)
    small_model.case(folder, voxels=np.ones(SIZE, np.float32))
    with pytest.raises(ResumeError, match="was made with other case"):
        infer(folder, resume=True)
    assert (folder / "seg.nii.gz").read_bytes() == before
    nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2), np.uint8), np.eye(4)), folder / "seg.nii.gz")
    with pytest.raises(ResumeError, match="holds no labels that znnpy wrote"):
        infer(folder, resume=True)


def test_empty_cases_are_predicted_whole(folder: Path) -> None:
    small_model.case(folder, voxels=np.zeros(SIZE, np.float32))
    assert "cropped" not in infer(folder).case
    assert labels(folder / "seg.nii.gz").shape == SIZE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "region": ({"roi": "0:2,:,:"}, "leave out --roi"),
    "mask": ({"mask": "mask.h5", "border": "reflect"}, "leave out --mask and --border"),
    "array": ({"dataset": "raw", "scale": 1, "time": 0}, "leave out --dataset and --scale and --time"),
    "window": ({"window": "8,8,8"}, "leave out --window"),
    "rule": ({"windows_like": "monai"}, "leave out --windows-like"),
    "meaning": ({"meaning": "windows"}, "leave out --meaning"),
    "weights": ({"weights": "w.npz"}, "leave out --weights"),
    "ensemble": ({"ensemble": "probabilities"}, "leave out --ensemble"),
    "dtype": ({"output_dtype": "float16"}, "leave out --output-dtype"),
    "output": ({"output": "softmax"}, "leave out --output softmax"),
    "missing": ({"fill_missing": "0"}, "leave out --fill-missing"),
    "name": ({"out": "seg.h5"}, "ends in .nii.gz or .nii as --out"),
    "bucket": ({"out": "s3://bucket/seg.nii.gz"}, "ends in .nii.gz or .nii as --out"),
    "no folder": ({"out": "gone/seg.nii.gz"}, "is not a folder"),
    "itself": ({"out": "case_0000.nii.gz", "overwrite": None}, "itself; give another name as --out"),
    "ram": ({"ram": "100M"}, "preparing the case takes up to"),
    "several": ({"network": "fib25_unet"}, "give it alone"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_options_that_do_not_apply_are_refused_in_a_sentence(given: str, folder: Path) -> None:
    values, sentence = REFUSED[given]
    arguments: list[object] = []
    for name, value in values.items():
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not None:
            arguments.append(folder / value if name == "out" and "://" not in value else value)
    said = run(folder, *arguments, code=1)
    assert sentence in said
    assert said.startswith("Error: ")
    assert said.count("\n") == 1
    assert others(folder) == set()


def hostile(folder: Path, kind: str) -> str:
    """Spoil a model or a case, and return the sentence that says so."""
    path = folder / "case_0000.nii.gz"
    match kind:
        case "no folder":
            shutil.rmtree(folder / "model")
            return "has no dataset.json"
        case "no case":
            path.unlink()
            return "there is no file"
        case "text":
            path.write_bytes(gzip.compress(b"no image" * 1000))
            return "cannot be read as NIfTI"
        case "cut off":
            path.write_bytes(path.read_bytes()[:-2000])
            return "case_0000.nii.gz"
        case "spacing":
            content = bytearray(gzip.decompress(path.read_bytes()))
            content[76 + 4 * 3 : 76 + 4 * 4] = b"\0\0\0\0"
            path.write_bytes(gzip.compress(bytes(content)))
            return "must be positive"
        case "not finite":
            small_model.case(folder, voxels=np.full(SIZE, np.nan, np.float32))
            return "not finite"
        case "channels":
            small_model.case(folder, voxels=np.zeros(SIZE, np.float32))
            document = json.loads((folder / "model/dataset.json").read_text())
            document["channel_names"]["1"] = "MR"
            (folder / "model/dataset.json").write_text(json.dumps(document))
            return "channels"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["no folder", "no case", "text", "cut off", "spacing", "not finite", "channels"])
def test_bad_models_and_cases_are_refused_in_a_sentence(kind: str, folder: Path) -> None:
    sentence = hostile(folder, kind)
    said = [line for line in run(folder, code=1).splitlines() if not line.startswith("warning: ")]
    assert len(said) == 1
    assert said[0].startswith("Error: ")
    assert sentence in said[0]
    assert not others(folder) - {"case_0000.nii.gz"}


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="needs PyTorch, which is not installed; `pip install"):
        infer(folder)


def test_names_without_a_folder_and_arrays_are_refused(folder: Path) -> None:
    with pytest.raises(NetworkFileError, match="names no folder"):
        infer(folder, "nnunet:")
    with pytest.raises(znnpy.errors.VolumeError, match="an object of type ndarray"):
        infer(folder, volume=np.zeros(SIZE, np.float32))
    with pytest.raises(OutputError, match="an object of type ndarray"):
        infer(folder, out=np.zeros(SIZE, np.float32))


def test_plan_describes_the_network_of_a_model(folder: Path) -> None:
    name = f"nnunet:{folder / 'model'}:0"
    result = CliRunner().invoke(main, ["plan", name, "--shape", "16,24,24"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "windows" in result.stdout
    assert CliRunner().invoke(main, ["graph", name], catch_exceptions=False).exit_code == 0
    with pytest.raises(NoPlanError):
        znnpy.plan(name, shape=(16, 24, 24), ram="20M")
    assert znnpy.load_network(name).network.members == 1


def test_verify_says_how_labels_are_checked(folder: Path) -> None:
    infer(folder, paranoid=True)
    for network in ((), ("--network", f"nnunet:{folder / 'model'}")):
        given = ["verify", str(folder / "seg.nii.gz"), str(folder / "case_0000.nii.gz"), *network]
        result = CliRunner().invoke(main, given, catch_exceptions=False)
        assert result.exit_code == 1
        assert "predict it again with --paranoid" in result.stderr


def test_shape_errors_are_of_the_usual_kind(folder: Path) -> None:
    with pytest.raises(ShapeError, match="leave out `roi`"):
        infer(folder, roi="0:1,:,:")


@pytest.mark.slow
def test_memory_stays_within_the_promise(repository: Path, tmp_path: Path) -> None:
    """Arrays of the case are a part of the process that the plan counts; of one window layers take the most here."""
    size = (48, 256, 256)
    voxels = np.random.default_rng(0).normal(100, 20, size).astype(np.float32)
    small_model.case(tmp_path, "case.nii", voxels)
    words = [tmp_path, "48,256,256", "infer", tmp_path / "case.nii", "--network", f"nnunet:{tmp_path / 'model'}:0"]
    words += ["--mirror", "none", "--ram", "900M", "--no-calibrate", "--json", "--out", tmp_path / "seg.nii"]
    command = [sys.executable, "-m", "tests.nnunet.small_model", *map(str, words)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    promised = report["predicted"]["peak_bytes"]
    assert 0.7 * promised < report["peak_bytes"] <= promised <= 900 * 2**20
    assert report["warnings"] == []
    assert labels(tmp_path / "seg.nii").shape == size
