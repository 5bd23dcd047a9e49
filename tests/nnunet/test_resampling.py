"""Sizes, axes and values of resampled arrays follow from their definitions, written here in other words."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.nnunet.plans import Resampling
from znnpy.nnunet.resampling import resampled, separate_axis, size_at

ISOTROPIC = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("size", "spacing", "to", "expected"),
    [
        ((10, 20, 30), (2.0, 1.0, 0.5), ISOTROPIC, (20, 20, 15)),
        ((5, 5, 5), (0.5, 0.5, 0.5), ISOTROPIC, (2, 2, 2)),  # 2.5 goes to the even number
        ((7, 7, 7), (0.5, 0.5, 0.5), ISOTROPIC, (4, 4, 4)),
        ((1, 9, 9), (0.1, 1.0, 1.0), ISOTROPIC, (0, 9, 9)),
    ],
)
def test_sizes_are_rounded_to_even(
    size: tuple[int, int, int], spacing: tuple[float, float, float], to: tuple[float, float, float], expected: object
) -> None:
    assert size_at(size, spacing, to) == expected


@pytest.mark.parametrize(
    ("separate", "spacing", "to", "axis"),
    [
        (None, ISOTROPIC, ISOTROPIC, None),
        (None, (3.0, 1.0, 1.0), ISOTROPIC, None),  # three times is not more than three times
        (None, (3.1, 1.0, 1.0), ISOTROPIC, 0),
        (None, ISOTROPIC, (1.0, 5.0, 1.0), 1),
        (None, (1.0, 1.0, 9.0), (5.0, 1.0, 1.0), 2),
        (None, (0.2, 1.0, 1.0), ISOTROPIC, None),  # two axes have the largest spacing
        (False, (9.0, 1.0, 1.0), ISOTROPIC, None),
        (True, (1.0, 1.1, 1.0), (9.0, 1.0, 1.0), 1),
        (True, ISOTROPIC, (9.0, 1.0, 1.0), None),
    ],
)
def test_axis_of_the_one_much_larger_spacing_is_separate(
    separate: bool | None, spacing: tuple[float, float, float], to: tuple[float, float, float], axis: int | None
) -> None:
    assert separate_axis(Resampling(3, separate), spacing, to) == axis


def linear(line: npt.NDArray[np.float64], to: int) -> npt.NDArray[np.float64]:
    """Return a line interpolated between centres of voxels, which is clamped at its ends."""
    at = np.clip((np.arange(to) + 0.5) * len(line) / to - 0.5, 0, len(line) - 1)
    return np.asarray(np.interp(at, np.arange(len(line)), line))


def test_orders_of_one_interpolate_between_centres() -> None:
    image = np.random.default_rng(0).normal(size=(5, 6, 7))
    expected = image
    for axis, to in enumerate((9, 4, 15)):
        expected = np.apply_along_axis(linear, axis, expected, to)
    found = resampled(image, (9, 4, 15), Resampling(1), ISOTROPIC, ISOTROPIC)
    assert np.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_separate_axis_takes_the_nearest_plane(axis: int) -> None:
    spacing = tuple(9.0 if one == axis else 1.0 for one in range(3))
    image = np.random.default_rng(axis).normal(size=(6, 6, 6))
    size = tuple(10 if one == axis else 8 for one in range(3))
    centres = (np.arange(10) + 0.5) * 0.6 - 0.5
    nearest = np.clip(np.floor(centres + 0.5), 0, 5).astype(int).tolist()
    expected = np.take(image, nearest, axis)
    for other in range(3):
        if other != axis:
            expected = np.apply_along_axis(linear, other, expected, 8)
    found = resampled(image, size, Resampling(1), spacing, ISOTROPIC)  # type: ignore[arg-type]
    assert np.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_keep_their_type_and_range(dtype: Any) -> None:
    image = np.random.default_rng(1).normal(size=(4, 5, 6)).astype(dtype)
    found = resampled(image, (9, 9, 9), Resampling(3), ISOTROPIC, ISOTROPIC)
    assert (found.dtype, found.shape) == (dtype, (9, 9, 9))
    assert image.min() <= found.min() <= found.max() <= image.max()


@pytest.mark.parametrize("how", [Resampling(3), Resampling(1, True), None])
def test_arrays_of_the_size_are_not_touched(how: Resampling | None) -> None:
    image = np.zeros((4, 5, 6), np.float32)
    assert resampled(image, (4, 5, 6), how, (9.0, 1.0, 1.0), ISOTROPIC) is image


def test_planes_of_one_count_are_resized_each_by_itself() -> None:
    image = np.random.default_rng(2).normal(size=(3, 6, 6)).astype(np.float32)
    found = resampled(image, (3, 9, 9), Resampling(3), (9.0, 1.0, 1.0), ISOTROPIC)
    for plane, one in zip(image, found, strict=True):
        alone = resampled(plane[None], (1, 9, 9), Resampling(3), (9.0, 1.0, 1.0), ISOTROPIC)
        assert np.array_equal(alone[0], one)
