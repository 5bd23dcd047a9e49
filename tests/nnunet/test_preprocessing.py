"""Cases are transposed, cropped, normalised and resampled, each by its definition."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.nnunet.documents import CONFIGURATION, plans, written
from znnpy.errors import MissingExtraError, VolumeError
from znnpy.nnunet.plans import Normalisation, Plans, Resampling, Spacing, read_plans
from znnpy.nnunet.preprocessing import prepared, preparing_bytes
from znnpy.nnunet.resampling import resampled
from znnpy.patches import Box

ALL = Box((0, 0, 0), (6, 7, 8))
Image = npt.NDArray[np.float32]


@pytest.fixture
def model(tmp_path: Path) -> Plans:
    return read_plans(written(tmp_path, "plans.json", plans()), CONFIGURATION, 1)


def with_schemes(model: Plans, *schemes: Normalisation) -> Plans:
    return replace(model, normalisations=schemes)


def image_of(seed: int, size: tuple[int, int, int] = (6, 7, 8)) -> Image:
    return np.random.default_rng(seed).uniform(1, 500, size).astype(np.float32)


def test_intensities_of_ct_are_clipped_and_scaled(model: Plans) -> None:
    image = image_of(0)
    expected = (np.clip(image.astype(np.float64), -20, 300) - 100) / 50
    case = prepared(model, [image], (2, 1, 1))
    assert np.allclose(case.data[0], expected, rtol=0, atol=1e-6)
    assert (case.size, case.crop, case.spacing, case.is_resampled) == ((6, 7, 8), ALL, (2, 1, 1), False)
    assert case.data.dtype == np.float32
    assert case.data.flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64])
def test_images_of_any_type_are_taken_and_not_changed(dtype: Any, model: Plans) -> None:
    image = np.random.default_rng(0).integers(1, 200, (6, 7, 8)).astype(dtype)
    before = image.copy()
    assert np.allclose(prepared(model, [image], (2, 1, 1)).data[0], (before - 100.0) / 50, rtol=0, atol=1e-6)
    assert np.array_equal(image, before)


def test_deviation_is_that_of_the_crop(model: Plans) -> None:
    image = np.zeros((9, 9, 9), np.float32)
    image[1:7, 1:8, 1:9] = image_of(1)
    case = prepared(with_schemes(model, Normalisation("ZScoreNormalization", False)), [image], (2, 1, 1))
    inner = image[1:7, 1:8, 1:9].astype(np.float64)
    assert case.crop == Box((1, 1, 1), (7, 8, 9))
    assert case.size == (9, 9, 9)
    assert np.allclose(case.data[0], (inner - inner.mean()) / inner.std(), rtol=0, atol=1e-5)


def test_masked_deviation_is_that_of_voxels_that_are_not_zero_or_enclosed(model: Plans) -> None:
    image = image_of(2)
    image[0] = 0
    image[0, 3, 3] = 7  # so that the first plane is in the crop, and most of it is outside the mask
    image[3, 3, 3] = 0  # enclosed: part of the mask
    inside = image != 0
    inside[3, 3, 3] = True
    case = prepared(with_schemes(model, Normalisation("ZScoreNormalization", True)), [image], (2, 1, 1))
    values = image[inside].astype(np.float64)
    assert np.allclose(case.data[0][inside], (values - values.mean()) / values.std(), rtol=0, atol=1e-5)
    assert not case.data[0][~inside].any()


def test_other_normalisations_scale_or_leave_values(model: Plans) -> None:
    image = image_of(3) / 2
    schemes = [
        Normalisation("NoNormalization", False),
        Normalisation("RescaleTo01Normalization", False),
        Normalisation("RGBTo01Normalization", False),
    ]
    found = prepared(with_schemes(model, *schemes), [image] * 3, (2, 1, 1)).data
    assert np.array_equal(found[0], image)
    assert np.allclose(found[1], (image - image.min()) / (image.max() - image.min()), rtol=0, atol=1e-6)
    assert np.allclose(found[2], image / 255, rtol=0, atol=1e-6)


def test_channels_are_cropped_together(model: Plans) -> None:
    one, two = np.zeros((6, 7, 8), np.float32), np.zeros((6, 7, 8), np.float32)
    one[2, 2, 2], two[3, 4, 5] = 5, 6
    schemes = [Normalisation("NoNormalization", False)] * 2
    case = prepared(with_schemes(model, *schemes), [one, two], (2, 1, 1))
    assert case.crop == Box((2, 2, 2), (4, 5, 6))
    assert case.data.shape == (2, 2, 3, 4)
    assert (case.data[0, 0, 0, 0], case.data[1, 1, 2, 3]) == (5, 6)


@pytest.mark.parametrize("scheme", ["ZScoreNormalization", "RescaleTo01Normalization", "CTNormalization"])
@pytest.mark.parametrize("masked", [False, True])
def test_images_without_anything_stay_whole(scheme: str, masked: bool, model: Plans) -> None:
    how = Normalisation(scheme, masked, (100, 50, -20, 300) if scheme == "CTNormalization" else None)  # type: ignore[arg-type]
    case = prepared(with_schemes(model, how), [np.zeros((6, 7, 8), np.float32)], (2, 1, 1))
    assert case.crop == ALL
    assert np.isfinite(case.data).all()


def test_axes_are_transposed_with_their_spacing(model: Plans) -> None:
    turned = replace(
        with_schemes(model, Normalisation("NoNormalization", False)), forward=(2, 0, 1), backward=(1, 2, 0)
    )
    image = image_of(4)
    case = prepared(turned, [image], (1.0, 1.0, 2.0))
    assert case.spacing == (2.0, 1.0, 1.0)
    assert case.size == (8, 6, 7)
    assert np.array_equal(case.data[0], image.transpose(2, 0, 1))


def test_images_are_normalised_before_they_are_resampled(model: Plans) -> None:
    image = image_of(5)
    case = prepared(model, [image], (4.0, 1.0, 1.0))
    normal = ((np.clip(image, -20, 300) - 100) / 50).astype(np.float32)
    assert case.data.shape == (1, 12, 7, 8)
    assert case.is_resampled
    expected = resampled(normal, (12, 7, 8), Resampling(3), (4.0, 1.0, 1.0), (2.0, 1.0, 1.0))
    assert np.allclose(case.data[0], expected, rtol=0, atol=1e-5)


def test_models_that_resample_nothing_keep_the_size(model: Plans) -> None:
    case = prepared(replace(model, data=None), [image_of(6)], (4.0, 1.0, 1.0))
    assert case.data.shape == (1, 6, 7, 8)


@pytest.mark.parametrize(
    ("images", "spacing", "said"),
    [
        ([], (2, 1, 1), "takes 1 channels, and the case has 0"),
        ([image_of(0)] * 2, (2, 1, 1), "takes 1 channels, and the case has 2"),
        ([np.zeros((3, 3))], (2, 1, 1), "have the shapes (3, 3)"),
        ([np.zeros((0, 3, 3))], (2, 1, 1), "have the shapes (0, 3, 3)"),
        ([np.full((2, 2, 2), np.nan)], (2, 1, 1), "8 voxels are not finite"),
        ([image_of(0)], (0, 1, 1), "the spacing is 0 x 1 x 1, and must be positive"),
        ([image_of(0)], (float("nan"), 1, 1), "the spacing is nan"),
        ([image_of(0)], (1e9, 1e9, 1e9), "check the spacing in the files"),
        ([image_of(0)], (0.01, 1, 1), "has 0x7x8 at the spacing"),
    ],
)
def test_cases_that_do_not_fit_are_refused(
    images: list[Image], spacing: tuple[float, float, float], said: str, model: Plans
) -> None:
    with pytest.raises(VolumeError) as caught:
        prepared(model, images, spacing)
    assert said in str(caught.value)


def test_colours_beyond_their_range_are_refused(model: Plans) -> None:
    colours = with_schemes(model, Normalisation("RGBTo01Normalization", False))
    with pytest.raises(VolumeError, match="channel 0 has values from 1 to 256"):
        prepared(colours, [np.linspace(1, 256, 27, dtype=np.float32).reshape(3, 3, 3)], (2, 1, 1))


@pytest.mark.parametrize(
    ("module", "package", "spacing"),
    [("scipy.ndimage", "scipy", (2, 1, 1)), ("skimage.transform", "scikit-image", (4, 1, 1))],
)
def test_missing_packages_are_named_with_how_to_install_them(
    module: str, package: str, spacing: tuple[float, float, float], model: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}, which is not installed; `pip install"):
        prepared(model, [image_of(0)], spacing)


@pytest.mark.parametrize("spacing", [(2, 1, 1), (1.5, 0.8, 0.9), (3, 1.4, 1.2), (7, 1, 0.8)])
@pytest.mark.parametrize("channels", [1, 2])
def test_preparing_takes_the_memory_that_is_stated(spacing: Spacing, channels: int, model: Plans) -> None:
    several = with_schemes(model, *[Normalisation("ZScoreNormalization", True)] * channels)
    size = (60, 80, 80)
    stated = preparing_bytes(several, size, spacing, 4 * 60 * 80 * 80)
    prepared(several, [image_of(0)] * channels, spacing)  # loads what resamples
    images = [image_of(channel, size) for channel in range(channels)]
    tracemalloc.start()
    prepared(several, images, spacing)
    taken = tracemalloc.get_traced_memory()[1] + sum(image.nbytes for image in images)
    tracemalloc.stop()
    assert 0.4 * stated < taken < stated
