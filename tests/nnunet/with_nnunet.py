"""Make models with nnU-Net itself, and write down what it gives for some cases.

    python -m tests.nnunet.with_nnunet trained FOLDER
    python -m tests.nnunet.with_nnunet assembled FOLDER

The first plans, preprocesses and trains, a dozen steps, a plain U-Net of two folds. The second assembles a model of a
residual U-Net with random weights, which predicts regions of turned images. Both leave in FOLDER

    model/             the folder of the model
    cases/             images of cases
    NAME.npz           of each case: the data, a random logit for each class and voxel, and the labels of these
    header_NUMBER.npz  what readers make of images; of the second model alone
    patch.npz          a random patch, and the logits of each fold for it, in float64
    NAME.predicted.npz of one case: the logits of all folds for its data, and their labels

It is a process of its own, since nnU-Net takes its folders from the environment, and warns about much.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from copy import deepcopy
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt

from tests.nnunet.documents import ARCHITECTURE, CONFIGURATION, UNET, dataset, plans

NUMBER, DATASET = 999, "Dataset999_Small"
FOLDERS = ("raw", "preprocessed", "results")
STEPS = 6  # of training, for each fold
PATCH = [8, 16, 16]
HEADERS = 12  # images that readers are compared with

Sizes = tuple[float, float, float]


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    for name in FOLDERS:
        os.environ[f"nnUNet_{name}"] = str(folder / name)
        (folder / name).mkdir()
    os.environ |= {"nnUNet_n_proc_DA": "1", "nnUNet_compile": "f", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}
    multiprocessing.get_context = lambda method=None: SimpleNamespace(Pool=ThreadPool)  # type: ignore[assignment]
    (folder / "cases").mkdir()
    (trained if kind == "trained" else assembled)(folder)


def trained(folder: Path) -> None:
    """Make the model that nnU-Net plans and trains."""
    from nnunetv2.experiment_planning.plan_and_preprocess_api import extract_fingerprints, plan_experiments, preprocess
    from nnunetv2.run.run_training import get_trainer_from_args

    raw = folder / "raw" / DATASET
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True)
    (raw / "dataset.json").write_text(json.dumps(dataset(2, channel_names={"0": "CT", "1": "MR"}, numTraining=5)))
    for number in range(5):
        saved(raw / "imagesTr", f"case_{number}", 2, number, (2.0, 1.0, 1.0), labels=raw / "labelsTr")
    extract_fingerprints([NUMBER], num_processes=1)
    plan_experiments([NUMBER])
    path = folder / "preprocessed" / DATASET / "nnUNetPlans.json"
    planned = json.loads(path.read_text())
    own = planned["configurations"][CONFIGURATION]
    own |= {"patch_size": PATCH, "batch_size": 2}
    keywords = ARCHITECTURE["arch_kwargs"]
    own["architecture"]["arch_kwargs"] |= {
        key: keywords[key] for key in ("n_stages", "features_per_stage", "kernel_sizes", "strides", "n_conv_per_stage")
    } | {"n_conv_per_stage_decoder": keywords["n_conv_per_stage_decoder"]}
    path.write_text(json.dumps(planned))
    preprocess([NUMBER], configurations=(CONFIGURATION,), num_processes=(1,))

    import torch

    os.environ |= {"nnUNet_n_proc_DA": "0"}  # batches are made by this process
    made: Any = None
    for fold in (0, 1):
        torch.manual_seed(fold)
        np.random.seed(fold)  # noqa: NPY002 - nnU-Net draws patches with this one
        trainer: Any = get_trainer_from_args(DATASET, CONFIGURATION, fold, device=torch.device("cpu"))
        trainer.on_train_start()
        trainer.on_train_epoch_start()
        losses = [trainer.train_step(next(trainer.dataloader_train)) for _ in range(STEPS)]
        trainer.on_train_epoch_end(losses)
        trainer.save_checkpoint(str(Path(trainer.output_folder) / "checkpoint_final.pth"))
        made = trainer.output_folder_base
    shutil.copytree(made, folder / "model")
    for name, spacing in {
        "equal": (2.0, 1.0, 1.0),
        "together": (1.5, 1.2, 0.9),
        "separate": (7.0, 1.0, 0.8),
    }.items():
        saved(folder / "cases", name, 2, 7, spacing)
        answered(folder, name, 2)
    patch_answered(folder, 2)
    predicted(folder, "equal")


def assembled(folder: Path) -> None:
    """Make a model of parts that the other one does not have."""
    import torch
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    architecture = ARCHITECTURE | {"network_class_name": f"{UNET}ResidualEncoderUNet"}
    keywords = {key: one for key, one in architecture["arch_kwargs"].items() if key != "n_conv_per_stage"}
    architecture["arch_kwargs"] = keywords | {"n_blocks_per_stage": [1, 3, 2]}
    content = plans(
        ("ZScoreNormalization", "RescaleTo01Normalization", "NoNormalization"),
        architecture=architecture,
        spacing=[1.0, 1.5, 1.0],
        use_mask_for_norm=[True, False, False],
    ) | {
        "image_reader_writer": "NibabelIOWithReorient",
        "transpose_forward": [2, 0, 1],
        "transpose_backward": [1, 2, 0],
    }
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "inner": 3}
    described = dataset(3, labels=labels, regions_class_order=[1, 2, 3])
    model = folder / "model"
    (model / "fold_all").mkdir(parents=True)
    (model / "plans.json").write_text(json.dumps(content))
    (model / "dataset.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    network = get_network_from_plans(
        architecture["network_class_name"], architecture["arch_kwargs"], architecture["_kw_requires_import"], 3, 3,
        deep_supervision=True,
    )  # fmt: skip
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(
        {
            "network_weights": network.state_dict(),
            "optimizer_state": {},
            "grad_scaler_state": None,
            "logging": {"mean_fg_dice": [np.float32(0.5), np.float64(0.25)]},
            "_best_ema": np.float64(0.5),
            "current_epoch": 1000,
            "init_args": {"plans": content, "configuration": CONFIGURATION, "fold": "all", "dataset_json": described},
            "trainer_name": "nnUNetTrainer",
            "inference_allowed_mirroring_axes": None,
        },
        model / "fold_all" / "checkpoint_final.pth",
    )
    turned = np.array([[0, 0, 1.1, 4], [-1.6, 0, 0, 5], [0, 1.2, 0, 6], [0, 0, 0, 1]])
    saved(folder / "cases", "turned", 3, 8, affine=turned)
    answered(folder, "turned", 3)
    patch_answered(folder, 3)
    read_by_readers(folder)


def read_by_readers(folder: Path) -> None:
    """Write images with headers of many kinds, and what each reader of nnU-Net makes of them."""
    from nnunetv2.imageio.nibabel_reader_writer import NibabelIO, NibabelIOWithReorient
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    rng = np.random.default_rng(0)
    for number in range(HEADERS):
        turned = np.zeros((3, 3))
        turned[rng.permutation(3), range(3)] = rng.choice([-1, 1], 3)
        if number % 3 == 0:  # by an angle too
            turned = np.array([[0.8, -0.6, 0], [0.6, 0.8, 0], [0, 0, 1]]) @ turned
        affine = np.eye(4)
        affine[:3] = np.column_stack([turned * rng.uniform(0.3, 4, 3), rng.normal(size=3) * 50])
        dtype = (np.int16, np.uint8, np.float32, np.float64)[number % 4]
        image = nibabel.Nifti1Image((rng.random((4, 5, 6)) * 100).astype(dtype), affine)
        image.header.set_xyzt_units(("mm", "meter", "micron", "unknown")[number % 4])
        if number % 2:
            image.set_qform(affine if number % 4 == 1 else None, number % 4)
            image.set_sform(None, 0)
        if dtype is np.int16:
            image.header.set_slope_inter(0.5, -3)
        path = folder / "cases" / f"header_{number}.nii.gz"
        nibabel.save(image, path)
        found: dict[str, Any] = {}
        for reader in (SimpleITKIO, NibabelIO, NibabelIOWithReorient):
            voxels, properties = reader().read_images([str(path)])
            found |= {reader.__name__: voxels[0], f"{reader.__name__}_spacing": properties["spacing"]}
        np.savez(folder / f"header_{number}.npz", **found)


def saved(
    folder: Path,
    name: str,
    channels: int,
    seed: int,
    spacing: Sizes = (1.0, 1.0, 1.0),
    affine: npt.NDArray[np.float64] | None = None,
    labels: Path | None = None,
) -> None:
    """Write images of a case, in which a sphere lies in a larger one, and zeros around both; and perhaps its labels."""
    rng = np.random.default_rng(seed)
    place = np.diag([*spacing[::-1], 1.0]) if affine is None else affine
    z, y, x = np.ogrid[-1:1:20j, -1:1:34j, -1:1:36j]
    apart = (z**2 + y**2 + x**2) + 0.1 * rng.random((20, 34, 36))
    found = (apart < 0.5).astype(np.uint8) + (apart < 0.15)
    for channel in range(channels):
        voxels = (found * 100.0 + rng.normal(50, 20, found.shape)).astype(np.float32)
        voxels[apart > 0.9] = 0
        image = nibabel.Nifti1Image(voxels.transpose(2, 1, 0), place)
        nibabel.save(image, folder / f"{name}_{channel:04d}.nii.gz")
    if labels is not None:
        nibabel.save(nibabel.Nifti1Image(found.transpose(2, 1, 0), place), labels / f"{name}.nii.gz")


@cache
def predictor(folder: Path) -> Any:
    """Return the predictor of a model."""
    import torch
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    found: Any = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    folds = ("all",) if (folder / "model" / "fold_all").is_dir() else None
    found.initialize_from_trained_model_folder(str(folder / "model"), folds)
    return found


def answered(folder: Path, name: str, channels: int) -> None:
    """Write down the data of a case, and the labels of random logits."""
    from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

    model, (data, properties) = predictor(folder), prepared(folder, name, channels)
    heads = model.label_manager.num_segmentation_heads
    logits = np.random.default_rng(1).normal(size=(heads, *data.shape[1:])).astype(np.float32)
    managers = (model.plans_manager, model.configuration_manager, model.label_manager, properties)
    labels = convert_predicted_logits_to_segmentation_with_correct_shape(logits.copy(), *managers)
    both = convert_predicted_logits_to_segmentation_with_correct_shape(
        logits.copy(), *managers, return_probabilities=True
    )
    written = folder / "labels.nii.gz"
    model.plans_manager.image_reader_writer_class().write_seg(labels, str(written), properties)
    np.savez(
        folder / f"{name}.npz",
        data=data,
        logits=logits,
        labels=labels,
        stored=np.asarray(nibabel.load(written).dataobj).transpose(2, 1, 0),
        probabilities=both[1],
        crop=properties["bbox_used_for_cropping"],
    )


def predicted(folder: Path, name: str) -> None:
    """Write down the logits and the labels that the predictor gives for the data of a case."""
    import torch
    from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

    model, (data, properties) = predictor(folder), prepared(folder, name, 2)
    with torch.no_grad():
        logits = model.predict_logits_from_preprocessed_data(torch.from_numpy(data))
    managers = (model.plans_manager, model.configuration_manager, model.label_manager, properties)
    labels = convert_predicted_logits_to_segmentation_with_correct_shape(logits.clone(), *managers)
    np.savez(folder / f"{name}.predicted.npz", logits=logits.numpy(), labels=labels)


def prepared(folder: Path, name: str, channels: int) -> tuple[Any, dict[str, Any]]:
    """Return the data of a case, and what nnU-Net keeps of its images."""
    model = predictor(folder)
    files = [str(folder / "cases" / f"{name}_{channel:04d}.nii.gz") for channel in range(channels)]
    preprocessor = model.configuration_manager.preprocessor_class(verbose=False)
    data, _, properties = preprocessor.run_case(
        files, None, model.plans_manager, model.configuration_manager, model.dataset_json
    )
    return data, properties


def patch_answered(folder: Path, channels: int) -> None:
    """Write down the logits of each fold for a random patch."""
    import torch

    model = predictor(folder)
    patch = np.random.default_rng(2).normal(size=(channels, *PATCH)).astype(np.float32)
    found = []
    for parameters in model.list_of_parameters:
        model.network.load_state_dict(parameters)
        with torch.no_grad():
            network = deepcopy(model.network).double().eval()
            found.append(network(torch.from_numpy(patch[None]).double())[0].numpy())
    np.savez(folder / "patch.npz", patch=patch, logits=np.stack(found))


if __name__ == "__main__":
    main()
