"""Prepare a case for the network: transpose, crop to what is not zero, normalise and resample, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, VolumeError
from znnpy.extras import install
from znnpy.nnunet.plans import Normalisation, Plans, Spacing
from znnpy.nnunet.resampling import resampled, separate_axis, size_at
from znnpy.patches import Box
from znnpy.shapes import Vec3, text

SMALLEST = 1e-8  # deviation that values are divided by
SPLINE_BYTES = 51  # of a voxel while an image is resampled along all axes, ..
NORMALISING_BYTES = 15  # .. and while it is normalised, or resampled plane by plane
RESAMPLED_BYTES = 12  # of a voxel of the result
MOST_VOXELS = 2**36  # of a channel that is resampled

Image = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NnunetCase:
    """A prepared case. Its axes are the transposed ones of the plans.

    data     (c, z, y, x), in C order: the network runs over this
    spacing  of the images of the case
    size     of the images of the case
    crop     the part of them that was kept, before it was resampled
    """

    data: Image
    spacing: Spacing
    size: Vec3
    crop: Box

    @property
    def is_resampled(self) -> bool:
        """Return whether logits are resampled before they become labels."""
        return self.data.shape[1:] != self.crop.size


def prepared(plans: Plans, images: Sequence[npt.NDArray[Any]], spacing: Spacing) -> NnunetCase:
    """Return the case of images, one of each channel, (z, y, x) as their files have them.

    spacing  of the files, along z, y and x

    VolumeError: images do not fit each other or the model, or hold what it cannot take; MissingExtraError without scipy
    or scikit-image.
    """
    _check(plans, images, spacing)
    turned = [image.transpose(plans.forward).astype(np.float32) for image in images]
    z, y, x = (spacing[axis] for axis in plans.forward)
    size: Vec3 = turned[0].shape
    mask = _not_zero(turned)
    crop = _box(mask)
    inside = mask[crop.slices]
    to = crop.size if plans.data is None else size_at(crop.size, (z, y, x), plans.spacing)
    if min(to) < 1 or to[0] * to[1] * to[2] > MOST_VOXELS:
        raise VolumeError(
            f"a case of {text(crop.size)} voxels with the spacing {_listed((z, y, x))} has {text(to)} at the spacing "
            f"{_listed(plans.spacing)} of the model; check the spacing in the files"
        )
    data = np.empty((len(turned), *to), np.float32)
    for channel, how in enumerate(plans.normalisations):
        image = _normalised(turned[channel][crop.slices], inside, how, channel)
        data[channel] = resampled(image, to, plans.data, (z, y, x), plans.spacing)
    return NnunetCase(data, (z, y, x), size, crop)


def preparing_bytes(plans: Plans, size: Vec3, spacing: Spacing, image_bytes: int) -> int:
    """Return the most memory that reading, preparing and later labelling a case takes.

    image_bytes  of the voxels of one image, of `size`
    """
    channels, voxels = len(plans.normalisations), size[0] * size[1] * size[2]
    z, y, x = (size[axis] for axis in plans.forward)
    old: Spacing = (spacing[plans.forward[0]], spacing[plans.forward[1]], spacing[plans.forward[2]])
    how, at_model = plans.data, (z, y, x)
    by_splines = False
    if how is not None and all(0 < one < np.inf for one in spacing):
        at_model = size_at(at_model, old, plans.spacing)
        by_splines = at_model != (z, y, x) and separate_axis(how, old, plans.spacing) is None
    each = SPLINE_BYTES if by_splines else NORMALISING_BYTES
    kept = channels * np.dtype(np.float32).itemsize
    made = at_model[0] * at_model[1] * at_model[2]
    return channels * image_bytes + (kept + each) * voxels + (kept + RESAMPLED_BYTES) * made


def _check(plans: Plans, images: Sequence[npt.NDArray[Any]], spacing: Spacing) -> None:
    channels = len(plans.normalisations)
    if len(images) != channels:
        raise VolumeError(
            f"the model takes {channels} channels, and the case has {len(images)}; give one image of each"
        )
    for image in images:
        if image.ndim != 3 or image.size == 0 or image.shape != images[0].shape:
            raise VolumeError(
                f"the channels of a case have the shapes {' and '.join(str(one.shape) for one in images)}, and must "
                "have the same three sizes; give images of one case"
            )
        if not np.isfinite(image).all():
            wrong = image.size - int(np.count_nonzero(np.isfinite(image)))
            raise VolumeError(f"{wrong} voxels are not finite, which nnU-Net cannot normalise; replace them")
    if not all(0 < one < np.inf for one in spacing):
        raise VolumeError(f"the spacing is {_listed(spacing)}, and must be positive; correct it in the files")


def _listed(spacing: Spacing) -> str:
    return " x ".join(f"{one:.6g}" for one in spacing)


def _not_zero(images: Sequence[Image]) -> Mask:
    """Return where any channel is not zero, and what such voxels enclose."""
    try:
        from scipy.ndimage import binary_fill_holes
    except ImportError:
        raise MissingExtraError(
            f"cropping as nnU-Net does needs scipy, which is not installed; `{install('nnunet')}`"
        ) from None
    mask = images[0] != 0
    for image in images[1:]:
        mask |= image != 0
    return np.asarray(binary_fill_holes(mask))


def _box(mask: Mask) -> Box:
    """Return the box of the voxels of a mask; all, if it has none."""
    lo, hi = [0, 0, 0], list(mask.shape)
    for axis in range(3):
        found = np.flatnonzero(mask.any(axis=tuple(other for other in range(3) if other != axis)))
        if found.size:
            lo[axis], hi[axis] = int(found[0]), int(found[-1]) + 1
    return Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2]))


def _normalised(image: Image, inside: Mask, how: Normalisation, channel: int) -> Image:
    """Return a normalised image, in the same memory."""
    match how.scheme:
        case "CTNormalization":
            assert how.intensities is not None
            mean, deviation, least, most = how.intensities
            np.clip(image, least, most, out=image)
            image -= mean
            image /= max(deviation, SMALLEST)
        case "ZScoreNormalization" if how.masked:
            values = image[inside]
            if values.size:
                image[inside] = (values - values.mean()) / max(values.std(), SMALLEST)
        case "ZScoreNormalization":
            mean, deviation = image.mean(), image.std()
            image -= mean
            image /= max(deviation, SMALLEST)
        case "RescaleTo01Normalization":
            image -= image.min()
            image /= max(image.max(), SMALLEST)
        case "RGBTo01Normalization":
            if image.min() < 0 or image.max() > 255:
                raise VolumeError(
                    f"channel {channel} has values from {image.min():g} to {image.max():g}, and the model takes "
                    "colours from 0 to 255; give such images"
                )
            image /= 255.0
        case "NoNormalization":
            pass
    return image
