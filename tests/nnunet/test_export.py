"""Labels of logits that come class by class are those of all logits at once, where the images were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.nnunet.documents import CONFIGURATION, plans, written
from znnpy.nnunet.dataset import Dataset
from znnpy.nnunet.export import labels_of, placed, probabilities_of
from znnpy.nnunet.plans import Plans, read_plans
from znnpy.nnunet.preprocessing import NnunetCase
from znnpy.nnunet.resampling import resampled
from znnpy.patches import Box

ORGANS = Dataset(1, ".nii.gz", 4, None, wide=False)
REGIONS = Dataset(1, ".nii.gz", 3, (1, 3, 2), wide=False)
SIZE, CROP = (9, 10, 11), Box((1, 2, 3), (7, 8, 10))
Array = npt.NDArray[Any]


@pytest.fixture
def model(tmp_path: Path) -> Plans:
    return read_plans(written(tmp_path, "plans.json", plans()), CONFIGURATION, 1)


def case_of(size: tuple[int, int, int], spacing: tuple[float, float, float] = (2.0, 1.0, 1.0)) -> NnunetCase:
    return NnunetCase(np.zeros((1, *size), np.float32), spacing, SIZE, CROP)


def logits_of(classes: int, size: tuple[int, int, int], dtype: Any = np.float32) -> Array:
    return np.random.default_rng(classes).normal(size=(classes, *size)).round(1).astype(dtype)  # with many ties


def in_images(crop: Array) -> Array:
    whole = np.zeros(SIZE, crop.dtype)
    whole[CROP.slices] = crop
    return whole


def at_images(logits: Array, case: NnunetCase, model: Plans) -> Array:
    """Return all logits at the voxels of the crop."""
    how = (model.probabilities, model.spacing, case.spacing)
    return np.stack([resampled(one, CROP.size, *how) for one in logits])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_labels_are_the_first_of_the_largest_logits(dtype: Any, model: Plans) -> None:
    case, logits = case_of(CROP.size), logits_of(4, CROP.size, dtype)
    asked: list[int] = []

    def one(number: int) -> Array:
        asked.append(number)
        return np.asarray(logits[number])

    found = labels_of(one, 4, case, model, ORGANS)
    assert found.dtype == np.uint8
    assert np.array_equal(found, in_images(logits.argmax(axis=0)))
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("spacing", [(1.2, 1.0, 1.0), (9.0, 1.0, 1.0)], ids=["together", "separate"])
def test_labels_are_chosen_of_resampled_logits(spacing: tuple[float, float, float], model: Plans) -> None:
    size = (12, 5, 8)
    case, logits = case_of(size, spacing), logits_of(4, size)
    assert case.is_resampled
    expected = at_images(logits, case, model).argmax(axis=0)
    assert np.array_equal(labels_of(lambda one: logits[one], 4, case, model, ORGANS), in_images(expected))


def test_later_regions_write_over_earlier_ones(model: Plans) -> None:
    case, logits = case_of(CROP.size), logits_of(3, CROP.size)
    expected = np.zeros(CROP.size, np.uint8)
    for label, one in zip((1, 3, 2), logits, strict=True):
        expected[one > 0] = label
    assert np.array_equal(labels_of(lambda one: logits[one], 3, case, model, REGIONS), in_images(expected))


def test_many_labels_take_16_bits(model: Plans) -> None:
    case, logits = case_of(CROP.size), np.zeros((300, *CROP.size), np.float32)
    logits[299] = 1
    found = labels_of(lambda one: logits[one], 300, case, model, replace(ORGANS, heads=300, wide=True))
    assert found.dtype == np.uint16
    assert found.max() == 299


def test_axes_of_files_are_given_back(model: Plans) -> None:
    turned = replace(model, forward=(2, 0, 1), backward=(1, 2, 0))
    labels = np.random.default_rng(0).integers(0, 4, CROP.size).astype(np.uint8)
    found = placed(labels, case_of(CROP.size), turned)
    assert found.shape == (10, 11, 9)
    assert np.array_equal(found.transpose(2, 0, 1), in_images(labels))
    assert found.flags.c_contiguous


@pytest.mark.parametrize("spacing", [(2.0, 1.0, 1.0), (1.2, 1.0, 1.0)])
def test_probabilities_are_those_of_all_classes(spacing: tuple[float, float, float], model: Plans) -> None:
    size = CROP.size if spacing == (2.0, 1.0, 1.0) else (12, 5, 8)
    case, logits = case_of(size, spacing), logits_of(4, size)
    found = probabilities_of(lambda one: logits[one], 4, case, model, ORGANS)
    expected = np.exp(at_images(logits, case, model).astype(np.float64))
    expected /= expected.sum(axis=0)
    inside = found[:, *CROP.slices]
    assert np.allclose(inside, expected, rtol=0, atol=1e-6)
    inside[:] = np.array([1, 0, 0, 0]).reshape(4, 1, 1, 1)  # a view: so is everything outside
    assert (found == np.array([1, 0, 0, 0]).reshape(4, 1, 1, 1)).all()


def test_regions_are_nowhere_outside_the_crop(model: Plans) -> None:
    case, logits = case_of(CROP.size), logits_of(3, CROP.size)
    found = probabilities_of(lambda one: logits[one], 3, case, model, REGIONS)
    assert np.allclose(found[:, *CROP.slices], 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=0, atol=1e-6)
    found[:, *CROP.slices] = 0
    assert not found.any()
