"""Plans and datasets of nnU-Net are read in both formats, and what they cannot state is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nnunet.documents import ARCHITECTURE, CONFIGURATION, OLD_ARCHITECTURE, UNET, dataset, plans, written
from znnpy.errors import NetworkFileError
from znnpy.nnunet.dataset import Dataset, read_dataset
from znnpy.nnunet.plans import Normalisation, Plans, Resampling, read_plans


def read(folder: Path, content: object, configuration: str = CONFIGURATION, channels: int = 1) -> Plans:
    return read_plans(written(folder, "plans.json", content), configuration, channels)


def test_plans_state_what_a_prediction_needs(tmp_path: Path) -> None:
    found = read(tmp_path, plans(("CTNormalization", "ZScoreNormalization")), channels=2)
    assert (found.spacing, found.patch, found.reader) == ((2, 1, 1), (8, 16, 16), "SimpleITKIO")
    assert found.normalisations == (
        Normalisation("CTNormalization", False, (100, 50, -20, 300)),
        Normalisation("ZScoreNormalization", False),
    )
    assert (found.data, found.probabilities) == (Resampling(3), Resampling(1))
    assert found.architecture.features == (4, 8, 12)
    assert found.architecture.period == (2, 4, 4)
    assert (found.architecture.function, found.architecture.parameters) == ("leaky_relu", (0.01,))


def test_old_plans_describe_the_same_architecture(tmp_path: Path) -> None:
    old = read(tmp_path, plans(architecture=None, **OLD_ARCHITECTURE))
    assert old.architecture == read(tmp_path, plans()).architecture


def test_configurations_inherit_from_others(tmp_path: Path) -> None:
    content = plans()
    content["configurations"]["bs4"] = {"inherits_from": CONFIGURATION, "patch_size": [16, 32, 32]}
    found = read(tmp_path, content, "bs4")
    assert (found.patch, found.spacing) == ((16, 32, 32), (2, 1, 1))


@pytest.mark.parametrize(
    ("function", "expected"),
    [("resample_data_or_seg_to_shape", Resampling(1, True)), ("no_resampling_hack", None)],
)
def test_resampling_is_what_the_plans_name(function: str, expected: Resampling | None, tmp_path: Path) -> None:
    keywords = {"order": 1, "order_z": 0, "force_separate_z": True}
    found = read(tmp_path, plans(resampling_fn_data=function, resampling_fn_data_kwargs=keywords))
    assert found.data == expected


def cascade(content: dict[str, Any]) -> None:
    content["configurations"][CONFIGURATION]["previous_stage"] = "3d_lowres"


def planar(content: dict[str, Any]) -> None:
    content["configurations"][CONFIGURATION] |= {"patch_size": [64, 64], "spacing": [1.0, 1.0]}


def inherited_twice(content: dict[str, Any]) -> None:
    content["configurations"][CONFIGURATION]["inherits_from"] = CONFIGURATION


def setting(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["configurations"][CONFIGURATION][key] = value

    return change


def keyword(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["configurations"][CONFIGURATION]["architecture"]["arch_kwargs"][key] = value

    return change


def fact(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cascade, "second stage of a cascade"),
        (planar, "only 3d configurations"),
        (inherited_twice, "inherits from itself"),
        (fact("configurations", {}), "no configuration 3d_fullres; it has none"),
        (fact("transpose_forward", [0, 1, 1]), "do not undo each other"),
        (fact("transpose_backward", [2, 1, 0]), "do not undo each other"),
        (fact("transpose_forward", [0, 1, 7]), "transpose_forward.2 = 7"),
        (fact("image_reader_writer", "Tiff3DIO"), "the reader of images Tiff3DIO"),
        (fact("label_manager", "Mine"), "the label manager Mine"),
        (fact("foreground_intensity_properties_per_channel", {}), "per_channel.0"),
        (setting("preprocessor_name", "Mine"), "the preprocessor Mine"),
        (setting("patch_size", [8, 16, 10**9]), "patch_size.2 = 1000000000"),
        (setting("patch_size", [99_968, 99_968, 99_968]), "more than 2,147,483,648 voxels"),
        (setting("patch_size", [8, 16, 18]), "does not divide those of 8x16x18"),
        (setting("patch_size", "all"), "patch_size = all"),
        (setting("spacing", [0.0, 1.0, 1.0]), "spacing.0 = 0"),
        (setting("spacing", [float("nan"), 1.0, 1.0]), "spacing.0 = nan"),
        (setting("normalization_schemes", []), "0 normalization_schemes"),
        (setting("normalization_schemes", ["os.system"]), "the normalisation of channel 0 os.system"),
        (setting("resampling_fn_data", "resample_torch_fornnunet"), "the resampling resample_torch_fornnunet"),
        (setting("resampling_fn_data_kwargs", {"order": 9}), "order = 9"),
        (setting("resampling_fn_data_kwargs", {"order_z": 1}), "order_z = 1"),
        (setting("resampling_fn_data_kwargs", {"dtype_out": "int8"}), "unknown key dtype_out"),
        (setting("architecture", {}), "no network_class_name"),
        (setting("architecture", ARCHITECTURE | {"network_class_name": "os.system"}), "architecture is os.system"),
        (setting("architecture", ARCHITECTURE | {"network_class_name": f"{UNET}Other"}), "and only PlainConvUNet"),
        (keyword("n_stages", 10**6), "n_stages = 1000000"),
        (keyword("features_per_stage", [4, 8]), "2 values in features_per_stage for 3 stages"),
        (keyword("features_per_stage", [4, 8, 10**9]), "features_per_stage"),
        (keyword("kernel_sizes", 2), "the kernel 2x2x2"),
        (keyword("kernel_sizes", [[3, 3]] * 3), "has kernel_sizes"),
        (keyword("strides", 2), "the first stage has stride 2x2x2"),
        (keyword("norm_op", "torch.nn.modules.batchnorm.BatchNorm3d"), "BatchNorm3d, and only InstanceNorm3d"),
        (keyword("nonlin", "builtins.eval"), "builtins.eval"),
        (keyword("nonlin", "torch.nn.GELU"), "GELU, and only LeakyReLU and ReLU"),
        (keyword("conv_op", "torch.nn.modules.conv.Conv2d"), "Conv2d"),
        (keyword("n_blocks_per_stage", [1, 1, 1]), "a PlainConvUNet has n_conv_per_stage"),
        (keyword("n_conv_per_stage", None), "a PlainConvUNet has n_conv_per_stage"),
        (keyword("n_conv_per_stage", [1, 1, 10**9]), "n_conv_per_stage"),
        (keyword("squeeze_excitation", True), "squeeze_excitation, which is not known"),
        (keyword("norm_op_kwargs", {"track_running_stats": True}), "track_running_stats"),
    ],
)
def test_plans_that_cannot_be_are_refused(change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path) -> None:
    content = plans()
    change(content)
    with pytest.raises(NetworkFileError, match=r"plans\.json") as caught:
        read(tmp_path, content)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


@pytest.mark.parametrize("key", ["patch_size", "spacing", "normalization_schemes", "resampling_fn_data_kwargs"])
def test_missing_keys_are_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match=f"has no {key}; copy the folder again"):
        read(tmp_path, plans(("CTNormalization",), **{key: None}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "damaged or cut off"),
        ("{", "damaged or cut off"),
        ("[" * 10**5, "damaged or cut off"),
        ("[1, 2]", "and not an object"),
        (" " * (2**24 + 1), "longer than 16,777,216 bytes"),
        ('{"a": 1' + "0" * 10**5 + "}", ""),
    ],
)
@pytest.mark.parametrize("kind", [read_dataset, lambda path: read_plans(path, CONFIGURATION, 1)])
def test_damaged_documents_are_refused(content: str, said: str, kind: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError) as caught:
        kind(written(tmp_path, "some.json", content))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


def test_folder_without_documents_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match=r"no dataset\.json, which every model folder"):
        read_dataset(tmp_path / "dataset.json")


def test_labels_are_counted_as_heads(tmp_path: Path) -> None:
    def found(**changed: Any) -> Dataset:
        return read_dataset(written(tmp_path, "dataset.json", dataset(2, **changed)))

    assert found() == Dataset(2, ".nii.gz", 3, None, wide=False)
    assert found(labels={"background": 0, "a": 1, "ignore": 2}).heads == 2
    regions = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}
    assert found(labels=regions, regions_class_order=[1, 2]) == Dataset(2, ".nii.gz", 2, (1, 2), wide=False)
    assert found(labels={"background": 0, "one": [1]}).order is None
    many = {"background": 0} | {f"label {n}": n for n in range(1, 256)}
    assert found(labels=many).wide


def test_datasets_of_older_versions_name_modalities(tmp_path: Path) -> None:
    content = dataset()
    content["modality"] = {"0": "CT", "1": "PET"}
    assert read_dataset(written(tmp_path, "dataset.json", content)).channels == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"labels": {"organ": 1}}, "no label background = 0"),
        ({"labels": {"background": 1}}, "no label background = 0"),
        ({"labels": {"background": 0, "a": -1}}, "labels.a"),
        ({"labels": {"background": 0, "a": 10**9}}, "labels.a"),
        ({"labels": {"background": 0, "a": "1"}}, "labels.a"),
        ({"labels": {"background": 0, "a": [1, 2]}}, "1 regions (a) and 0 labels in regions_class_order"),
        ({"labels": {"background": 0, "a": [1, 2]}, "regions_class_order": [1, 2]}, "and 2 labels"),
        ({"labels": {"background": 0, "a": [1, 2]}, "regions_class_order": [300]}, "the label 300"),
        ({"channel_names": {}}, "channel_names"),
        ({"file_ending": "/../../etc"}, "file_ending"),
    ],
)
def test_datasets_that_cannot_be_are_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError) as caught:
        read_dataset(written(tmp_path, "dataset.json", dataset(**changed)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
