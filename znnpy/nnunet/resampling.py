"""Resample arrays between spacings as nnU-Net does: splines, along an axis of much larger spacing the nearest voxel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError
from znnpy.extras import install
from znnpy.nnunet.plans import Resampling, Spacing
from znnpy.shapes import Vec3


def size_at(size: Vec3, spacing: Spacing, to: Spacing) -> Vec3:
    """Return the voxels along each axis that an array has at another spacing; an axis may get none."""
    z, y, x = (round(old / new * n) for old, new, n in zip(spacing, to, size, strict=True))
    return z, y, x


def separate_axis(how: Resampling, spacing: Spacing, to: Spacing) -> int | None:
    """Return the axis that is resampled by itself: that of the largest spacing, if no other has it; None: no axis."""
    if how.separate is False:
        return None
    if how.separate or max(spacing) / min(spacing) > how.anisotropy:
        decides = spacing
    elif max(to) / min(to) > how.anisotropy:
        decides = to
    else:
        return None
    axes = [axis for axis, one in enumerate(decides) if max(decides) / one == 1]
    return axes[0] if len(axes) == 1 else None


def resampled(
    image: npt.NDArray[Any], size: Vec3, how: Resampling | None, spacing: Spacing, to: Spacing
) -> npt.NDArray[Any]:
    """Return an image (z, y, x) with another size, of its type; the image itself if it has that size.

    spacing, to  of the image and of the result, which tell whether an axis is resampled by itself
    """
    if how is None or image.shape == size:
        return image
    axis = separate_axis(how, spacing, to)
    found = np.empty(size, image.dtype)
    if axis is None:
        found[:] = _resized(image.astype(np.float64), size, how.order)
        return found
    planes, made = np.moveaxis(image, axis, 0), np.moveaxis(found, axis, 0)
    nearest = _nearest(len(planes), len(made))
    for number in np.unique(nearest):
        plane = _resized(planes[number].astype(np.float64), made.shape[1:], how.order)
        made[nearest == number] = plane
    return found


def _resized(image: npt.NDArray[np.float64], size: tuple[int, ...], order: int) -> npt.NDArray[np.float64]:
    """Resize by splines; values stay within those of the image."""
    try:
        from skimage.transform import resize
    except ImportError:
        raise MissingExtraError(
            f"resampling as nnU-Net does needs scikit-image, which is not installed; `{install('nnunet')}`"
        ) from None
    return np.asarray(resize(image, size, order, mode="edge", anti_aliasing=False))


def _nearest(count: int, to: int) -> npt.NDArray[np.int64]:
    """Return the plane that each of `to` planes is taken from."""
    if count == to:
        return np.arange(count)
    from scipy.ndimage import map_coordinates  # comes with scikit-image

    centres = count / to * (np.arange(to) + 0.5) - 0.5
    numbers = np.arange(count, dtype=np.float64)
    return np.asarray(map_coordinates(numbers, centres[None], order=0, mode="nearest")).astype(np.int64)
