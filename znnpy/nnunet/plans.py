"""The facts of a model that its plans.json states: spacing, patch, normalisation, resampling and architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt
from znnpy.nnunet.architecture import Architecture, architecture_of
from znnpy.nnunet.documents import MOST_ITEMS, SHOWN, Count, Document, Finite, Positive, Word, checked, read_object
from znnpy.shapes import Vec3, text

Scheme = Literal[
    "CTNormalization", "ZScoreNormalization", "NoNormalization", "RescaleTo01Normalization", "RGBTo01Normalization"
]
Reader = Literal["SimpleITKIO", "NibabelIO", "NibabelIOWithReorient"]
ANISOTROPY = 3.0  # ratio of spacings above which the axis of the largest one is resampled by itself
RESAMPLING, NO_RESAMPLING = "resample_data_or_seg_to_shape", "no_resampling_hack"
LOW, HIGH = "percentile_00_5", "percentile_99_5"
MOST_PATCH = 2**31  # voxels of a patch

Axes = tuple[Literal[0, 1, 2], Literal[0, 1, 2], Literal[0, 1, 2]]
Spacing = tuple[float, float, float]


class _ResamplingKeys(Document):
    is_seg: Literal[False] = False
    order: Annotated[int, Field(ge=0, le=5)] = 3
    order_z: Literal[0] = 0
    force_separate_z: bool | None = False
    separate_z_anisotropy_threshold: Positive = ANISOTROPY


class _Configuration(Document):
    patch_size: Annotated[list[Count], Field(min_length=2, max_length=3)]
    spacing: Annotated[list[Positive], Field(min_length=2, max_length=3)]
    normalization_schemes: Annotated[list[Word], Field(max_length=MOST_ITEMS)]
    use_mask_for_norm: Annotated[list[bool], Field(max_length=MOST_ITEMS)]
    preprocessor_name: Word = "DefaultPreprocessor"
    previous_stage: str | None = None
    resampling_fn_data: Word = RESAMPLING
    resampling_fn_data_kwargs: dict[str, Any]
    resampling_fn_probabilities: Word = RESAMPLING
    resampling_fn_probabilities_kwargs: dict[str, Any]


class _Plans(Document):
    transpose_forward: Axes
    transpose_backward: Axes
    image_reader_writer: Word
    label_manager: Word = "LabelManager"


class _Intensities(Document):
    mean: Finite
    std: Finite
    percentile_00_5: Finite
    percentile_99_5: Finite


@dataclass(frozen=True, slots=True)
class Normalisation:
    """The normalisation of one channel.

    masked       whether mean and deviation are those of the voxels that are not zero, the only ones that change
    intensities  mean, deviation, and least and largest value; of CT alone
    """

    scheme: Scheme
    masked: bool
    intensities: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Resampling:
    """The way in which arrays are resampled.

    order       of the splines
    separate    whether one axis is resampled by itself, with its nearest voxel; None: where spacings differ much
    anisotropy  ratio of spacings that is much
    """

    order: int
    separate: bool | None = None
    anisotropy: float = ANISOTROPY


@dataclass(frozen=True, slots=True)
class Plans:
    """The facts of one configuration of the plans; spacing and patch are along the transposed axes.

    forward, backward    order of the axes (z, y, x) of files in the network, and the way back
    data, probabilities  resampling of images and of logits; None: they stay as they are
    """

    configuration: str
    reader: Reader
    spacing: Spacing
    patch: Vec3
    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    normalisations: tuple[Normalisation, ...]
    data: Resampling | None
    probabilities: Resampling | None
    architecture: Architecture


def read_plans(path: Path, configuration: str, channels: int) -> Plans:
    """Read what plans.json says about a configuration, for a dataset of so many channels.

    NetworkFileError for what cannot be, and for what only nnU-Net itself can do, such as cascades.
    """
    content = read_object(path)
    plans = checked(_Plans, content, str(path))
    raw = _inherited(content.get("configurations"), configuration, path)
    where = f"{path}: configuration {excerpt(configuration, SHOWN)}"
    found = checked(_Configuration, raw, where)
    if found.previous_stage is not None:
        raise NetworkFileError(
            f"{where} is the second stage of a cascade, which needs the segmentation of "
            f"{excerpt(found.previous_stage, SHOWN)}; give the folder of that, or of 3d_fullres"
        )
    if len(found.patch_size) != 3 or len(found.spacing) != 3:
        raise NetworkFileError(
            f"{where} is over images with patches of {text(tuple(found.patch_size))}, and only 3d configurations are "
            "read; give the folder of 3d_fullres or 3d_lowres"
        )
    (z, y, x), (dz, dy, dx) = found.patch_size, found.spacing
    if z * y * x > MOST_PATCH:
        raise NetworkFileError(
            f"{where} has patches of {text((z, y, x))}, more than {MOST_PATCH:,} voxels; copy it again"
        )
    _check_known(found.preprocessor_name, ("DefaultPreprocessor",), "preprocessor", where)
    _check_known(plans.label_manager, ("LabelManager",), "label manager", str(path))
    _check_known(plans.image_reader_writer, get_args(Reader), "reader of images", str(path))
    if sorted(plans.transpose_forward) != [0, 1, 2] or [
        plans.transpose_forward[axis] for axis in plans.transpose_backward
    ] != [0, 1, 2]:
        raise NetworkFileError(
            f"{path} has transpose_forward {plans.transpose_forward} and transpose_backward "
            f"{plans.transpose_backward}, which do not undo each other; copy the folder again"
        )
    return Plans(
        configuration,
        plans.image_reader_writer,  # type: ignore[arg-type]
        (dz, dy, dx),
        (z, y, x),
        plans.transpose_forward,
        plans.transpose_backward,
        _normalisations(found, content, channels, where),
        _resampling(found.resampling_fn_data, found.resampling_fn_data_kwargs, where),
        _resampling(found.resampling_fn_probabilities, found.resampling_fn_probabilities_kwargs, where),
        architecture_of(raw, (z, y, x), where),
    )


def _inherited(configurations: object, name: str, path: Path) -> dict[str, Any]:
    """Return a configuration with what it inherits from others."""
    known = configurations if isinstance(configurations, dict) else {}
    found: dict[str, Any] = {}
    seen: list[str] = []
    at: object = name
    while at is not None:
        if not isinstance(at, str) or not isinstance(known.get(at), dict):
            raise NetworkFileError(
                f"{path} has no configuration {excerpt(at, SHOWN)}; it has {excerpt(', '.join(known) or 'none')}"
            )
        if at in seen:
            raise NetworkFileError(f"{path}: configuration {excerpt(at, SHOWN)} inherits from itself; copy it again")
        seen.append(at)
        found = known[at] | found
        at = known[at].get("inherits_from")
    return found


def _normalisations(
    found: _Configuration, content: Mapping[str, Any], channels: int, where: str
) -> tuple[Normalisation, ...]:
    schemes, masks = found.normalization_schemes, found.use_mask_for_norm
    if not len(schemes) == len(masks) == channels:
        raise NetworkFileError(
            f"{where} has {len(schemes)} normalization_schemes and {len(masks)} use_mask_for_norm for the {channels} "
            "channels of dataset.json; copy the folder again"
        )
    old, new = "foreground_intensity_properties_by_modality", "foreground_intensity_properties_per_channel"
    intensities = content.get(new, content.get(old))
    known = intensities if isinstance(intensities, dict) else {}
    made = []
    for channel, (scheme, masked) in enumerate(zip(schemes, masks, strict=True)):
        _check_known(scheme, get_args(Scheme), f"normalisation of channel {channel}", where)
        numbers = None
        if scheme == "CTNormalization":
            stated = checked(_Intensities, known.get(str(channel)), f"{where}: {new}.{channel}")
            numbers = (stated.mean, stated.std, stated.percentile_00_5, stated.percentile_99_5)
        made.append(Normalisation(scheme, masked, numbers))  # type: ignore[arg-type]
    return tuple(made)


def _resampling(function: str, keys: Mapping[str, Any], where: str) -> Resampling | None:
    _check_known(function, (RESAMPLING, NO_RESAMPLING), "resampling", where)
    if function == NO_RESAMPLING:
        return None
    if unknown := [key for key in keys if key not in _ResamplingKeys.model_fields]:
        raise NetworkFileError(f"{where}: resampling has the unknown key {excerpt(unknown[0], SHOWN)}; remove it")
    found = checked(_ResamplingKeys, keys, f"{where}: resampling")
    return Resampling(found.order, found.force_separate_z, found.separate_z_anisotropy_threshold)


def _check_known(name: str, known: tuple[str, ...], what: str, where: str) -> None:
    if name not in known:
        raise NetworkFileError(
            f"{where} has the {what} {excerpt(name, SHOWN)}, and only {', '.join(known)} is known here; predict with "
            "nnU-Net itself"
        )
