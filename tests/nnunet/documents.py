"""Documents of small models, as nnU-Net writes them, and arrays for their networks."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.nnunet.unet import Unet

CONFIGURATION = "3d_fullres"
UNET = "dynamic_network_architectures.architectures.unet."
INTENSITIES = {"mean": 100.0, "std": 50.0, "percentile_00_5": -20.0, "percentile_99_5": 300.0, "max": 900.0}

ARCHITECTURE: dict[str, Any] = {
    "network_class_name": f"{UNET}PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 3,
        "features_per_stage": [4, 8, 12],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "n_conv_per_stage": [2, 1, 2],
        "n_conv_per_stage_decoder": [1, 2],
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}
OLD_ARCHITECTURE: dict[str, Any] = {
    "UNet_class_name": "PlainConvUNet",
    "UNet_base_num_features": 4,
    "unet_max_num_features": 12,
    "n_conv_per_stage_encoder": [2, 1, 2],
    "n_conv_per_stage_decoder": [1, 2],
    "num_pool_per_axis": [1, 2, 2],
    "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}


def plans(schemes: tuple[str, ...] = ("CTNormalization",), **changed: Any) -> dict[str, Any]:
    """Return the plans of a model; `changed` are keys of its configuration."""
    resampling = {"is_seg": False, "order_z": 0, "force_separate_z": None}
    configuration = {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [8, 16, 16],
        "median_image_size_in_voxels": [20.0, 30.0, 30.0],
        "spacing": [2.0, 1.0, 1.0],
        "normalization_schemes": list(schemes),
        "use_mask_for_norm": [False] * len(schemes),
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {**resampling, "order": 3},
        "resampling_fn_seg_kwargs": {**resampling, "is_seg": True, "order": 1},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {**resampling, "order": 1},
        "architecture": copy.deepcopy(ARCHITECTURE),
        "batch_dice": True,
        **changed,
    }
    return {
        "dataset_name": "Dataset999_Small",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": [2.0, 1.0, 1.0],
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {CONFIGURATION: {key: one for key, one in configuration.items() if one is not None}},
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {str(c): dict(INTENSITIES) for c in range(len(schemes))},
    }


def dataset(channels: int = 1, **changed: Any) -> dict[str, Any]:
    """Return the dataset of a model with two labels; `changed` are keys of it."""
    return {
        "channel_names": {str(channel): "CT" for channel in range(channels)},
        "labels": {"background": 0, "organ": 1, "lesion": 2},
        "numTraining": 3,
        "file_ending": ".nii.gz",
        **changed,
    }


def written(folder: Path, name: str, content: object) -> Path:
    """Write a document into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@dataclass(frozen=True)
class Array:
    """An array in the place of one of a checkpoint."""

    array: npt.NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def values(self) -> npt.NDArray[np.float32]:
        return self.array


def arrays_for(unet: Unet, seed: int = 0) -> dict[str, Array]:
    """Return random arrays for a network by the names of a checkpoint."""
    rng = np.random.default_rng(seed)
    found = {}
    for one in unet.arrays:
        found[one.weight] = Array(rng.normal(size=one.shape).astype(np.float32))
        if one.bias is not None:
            found[one.bias] = Array(rng.normal(size=one.biases).astype(np.float32))
    return found
