"""Model folders are read with the folds that they hold; hostile ones are refused, and nothing in them runs."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nnunet.documents import ARCHITECTURE, CONFIGURATION, arrays_for, dataset, plans, written
from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.nnunet.architecture import architecture_of
from znnpy.nnunet.folder import read_model
from znnpy.nnunet.unet import unet_of
from znnpy.windows.settings import Windows

FINAL, BEST = "checkpoint_final.pth", "checkpoint_best.pth"
FIRST = "encoder.stages.0.0.convs.0.conv.weight"
UNET_OF = unet_of(architecture_of({"architecture": ARCHITECTURE}, (8, 16, 16), "plans"), 1, 3, "n")


def checkpoint(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Return a checkpoint of random weights, as nnU-Net saves it."""
    import torch

    arrays = arrays_for(UNET_OF, seed)
    return {
        "network_weights": {name: torch.from_numpy(one.array) for name, one in arrays.items()},
        "optimizer_state": {"state": {}, "param_groups": []},
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float32(0.5)], "ema_fg_dice": [np.float64(0.25)], "counts": [np.int64(3)]},
        "_best_ema": np.float64(0.5),
        "current_epoch": 1000,
        "init_args": {"configuration": CONFIGURATION, "fold": 0, "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (2, 0, 1),
        **changed,
    }


def folder_of(path: Path, folds: dict[str, object]) -> Path:
    """Write a model folder, with files of folds by their paths."""
    import torch

    written(path, "plans.json", plans())
    written(path, "dataset.json", dataset())
    for name, content in folds.items():
        (path / name).parent.mkdir(exist_ok=True)
        torch.save(content, path / name)
    return path


def repacked(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write an archive again with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))


@pytest.mark.torch
def test_folder_holds_weights_of_each_fold(tmp_path: Path) -> None:
    model = read_model(
        folder_of(tmp_path, {f"fold_{n}/{FINAL}": checkpoint(n) for n in (10, 2)} | {f"fold_all/{FINAL}": checkpoint()})
    )
    assert (model.folds, model.notes) == (("2", "10"), ())
    assert model.network.windows == Windows((8, 16, 16), (0.5, 0.5, 0.5), "gaussian", 0.125, (0, 1, 2), "nnunet")
    assert model.network.members == 2
    each = len(model.network.weighted)
    assert len(model.weights) == 2 * each
    for seed, first in zip((2, 10), model.weights[::each], strict=True):
        assert np.array_equal(first.weight, arrays_for(UNET_OF, seed)[FIRST].array)
    assert model.network.layers == UNET_OF.network.layers
    assert repr(model).startswith("<NnunetModel ")


@pytest.mark.torch
def test_best_checkpoints_are_read_with_a_word(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"fold_0/{BEST}": checkpoint(), f"fold_1/{FINAL}": checkpoint()})
    assert read_model(folder).notes == (f"fold 0 has no {FINAL}, so that {BEST} is read",)
    assert read_model(folder, checkpoint=BEST).folds == ("0",)


@pytest.mark.torch
def test_all_is_read_alone_or_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"fold_all/{FINAL}": checkpoint()})
    assert read_model(folder).folds == ("all",)
    folder = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint()})
    assert read_model(folder).folds == ("0",)
    assert read_model(folder, folds=["all"]).folds == ("all",)


@pytest.mark.torch
def test_other_trainers_are_taken_to_build_the_same_network(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint(trainer_name="nnUNetTrainerNoMirroring")})
    assert read_model(folder).notes[0].startswith("the trainer nnUNetTrainerNoMirroring is taken to build the network")


@pytest.mark.torch
@pytest.mark.parametrize("where", [".", "crossval_results_folds_0_1_2_3_4"])
def test_postprocessing_is_named_and_not_read(where: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint()})
    written(folder / where, "postprocessing.pkl", "no pickle")
    assert read_model(folder).notes[0].startswith("postprocessing.pkl is not applied")


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_widened(dtype: str, tmp_path: Path) -> None:
    import torch

    saved = checkpoint()
    saved["network_weights"] = {name: one.to(getattr(torch, dtype)) for name, one in saved["network_weights"].items()}
    weights = read_model(folder_of(tmp_path, {f"fold_0/{FINAL}": saved})).weights
    assert np.allclose(weights[0].weight, arrays_for(UNET_OF)[FIRST].array, rtol=0.01)
    assert weights[0].weight.dtype == np.float32


@pytest.mark.torch
def test_scalars_that_older_numpy_saved_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint()})
    repacked(
        folder / "fold_0" / FINAL,
        lambda name, content: content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"),
    )
    assert read_model(folder).folds == ("0",)


class Runs:
    """An object that runs a command when it is unpickled."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.call = (function, given)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.torch
@pytest.mark.parametrize("key", ["network_weights", "logging", "init_args", "more"])
@pytest.mark.parametrize("function", [os.mkdir, eval, functools.partial], ids=["mkdir", "eval", "partial"])
def test_objects_that_would_run_are_refused(function: Any, key: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    given = {os.mkdir: str(ran), eval: f"__import__('os').mkdir({str(ran)!r})", functools.partial: print}[function]
    folder = folder_of(tmp_path / "model", {f"fold_0/{FINAL}": checkpoint(0, **{key: Runs(function, given)})})
    with pytest.raises(NetworkFileError, match="objects other than arrays and plain values, which are never read"):
        read_model(folder)
    assert not ran.exists()


@pytest.mark.torch
def test_modules_are_refused(tmp_path: Path) -> None:
    import torch

    folder = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint(network_weights=torch.nn.Conv3d(1, 1, 1))})
    with pytest.raises(NetworkFileError, match=r"torch\.nn\.modules\.conv\.Conv3d"):
        read_model(folder)


def of_integers(saved: dict[str, Any]) -> None:
    saved["network_weights"][FIRST] = saved["network_weights"][FIRST].int()


def repeated(saved: dict[str, Any]) -> None:
    saved["network_weights"][FIRST] = saved["network_weights"][FIRST][:1, :1, :1, :1, :1].clone().expand(4, 1, 1, 3, 3)


def huge(saved: dict[str, Any]) -> None:
    saved["network_weights"][FIRST] = (
        saved["network_weights"][FIRST][:1, :1, :1, :1, :1].clone().expand(10**9, 10**6, 1, 3, 3)
    )


def numbered(saved: dict[str, Any]) -> None:
    saved["network_weights"][7] = saved["network_weights"].pop(FIRST)


def a_list(saved: dict[str, Any]) -> None:
    saved["network_weights"][FIRST] = [1.0]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.pop("network_weights"), "has no network_weights or init_args"),
        (lambda saved: saved.pop("init_args"), "has no network_weights or init_args"),
        (lambda saved: saved.update(init_args={"configuration": 3}), "has the configuration 3"),
        (lambda saved: saved.update(init_args={"configuration": "2d"}), "no configuration 2d; it has 3d_fullres"),
        (lambda saved: saved.update(trainer_name=None), "the trainer None"),
        (lambda saved: saved["network_weights"].pop(FIRST), f"has no array {FIRST}"),
        (lambda saved: saved.update(inference_allowed_mirroring_axes=(0, 3)), "= (0, 3), and these are different"),
        (lambda saved: saved.update(inference_allowed_mirroring_axes=(0, 0)), "= (0, 0), and these are different"),
        (lambda saved: saved.update(inference_allowed_mirroring_axes="all"), "= all, and these are different"),
        (of_integers, "values of type torch.int32"),
        (repeated, "fewer values than its shape (4, 1, 1, 3, 3) has"),
        (huge, "of shape (1000000000, 1000000, 1, 3, 3), and the architecture"),
        (numbered, "are not at most 20,000 arrays with names"),
        (a_list, "are not at most 20,000 arrays with names"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    saved = checkpoint()
    change(saved)
    with pytest.raises(NetworkFileError) as caught:
        read_model(folder_of(tmp_path, {f"fold_0/{FINAL}": saved}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.torch
def test_checkpoint_without_mirroring_mirrors_nothing(tmp_path: Path) -> None:
    saved = checkpoint()
    del saved["inference_allowed_mirroring_axes"]
    windows = read_model(folder_of(tmp_path, {f"fold_0/{FINAL}": saved})).network.windows
    assert windows is not None
    assert windows.mirror == ()


@pytest.mark.torch
def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint()}) / "fold_0" / FINAL
    whole = path.read_bytes()
    for content in (b"", b"nothing", whole[:-100], whole[: len(whole) // 2], b"\x80\x02]q\x00."):
        path.write_bytes(content)
        with pytest.raises(NetworkFileError, match=FINAL):
            read_model(tmp_path)
    for at in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes(16) + whole[at + 16 :])
        with suppress(NetworkFileError):
            read_model(tmp_path)  # where a value of an array changed, the file is not known to be damaged


@pytest.mark.torch
def test_archives_that_unpack_to_more_are_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint()}) / "fold_0" / FINAL
    repacked(path, lambda name, content: content + bytes(10**7), zipfile.ZIP_DEFLATED)
    with pytest.raises(NetworkFileError, match="members are compressed or longer than its"):
        read_model(tmp_path)


@pytest.mark.torch
def test_folds_of_other_configurations_are_refused(tmp_path: Path) -> None:
    other = checkpoint(init_args={"configuration": "3d_lowres"})
    with pytest.raises(NetworkFileError, match="is of the configuration 3d_lowres, and other folds are of 3d_fullres"):
        read_model(folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint(), f"fold_1/{FINAL}": other}))


@pytest.mark.torch
def test_folds_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"fold_0/{FINAL}": checkpoint()})
    with pytest.raises(NetworkFileError, match=r"has no checkpoint_final\.pth .* in fold_3; it has fold_0"):
        read_model(folder, folds=["0", "3"])
    with pytest.raises(NetworkFileError, match="name up to 20 different ones"):
        read_model(folder, folds=["0", "0"])
    shutil.rmtree(folder / "fold_0")
    with pytest.raises(NetworkFileError, match="it has no fold with one"):
        read_model(folder)


def test_missing_torch_is_named_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    written(tmp_path, "plans.json", plans())
    written(tmp_path, "dataset.json", dataset())
    written(tmp_path / "fold_0", FINAL, "")
    with pytest.raises(MissingExtraError, match=r"needs PyTorch, which is not installed; `pip install"):
        read_model(tmp_path)
