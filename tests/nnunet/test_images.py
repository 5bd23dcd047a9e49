"""Images of a case are found by their names, and read with the axes and spacing of nnU-Net's readers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import nibabel
import numpy as np
import numpy.typing as npt
import pytest

from tests.nnunet.documents import CONFIGURATION, plans, written
from znnpy.errors import VolumeError
from znnpy.nnunet.images import files_of, read_images, stated_size
from znnpy.nnunet.plans import Plans, Reader, read_plans

SIZES = np.diag([0.7, 0.8, 2.5, 1.0])
TURNED = np.array([[0, 0, 2.5, 4], [-0.7, 0, 0, 5], [0, 0.8, 0, 6], [0, 0, 0, 1]])  # x runs to the back, y upwards


@pytest.fixture
def model(tmp_path: Path) -> Plans:
    return read_plans(written(tmp_path, "plans.json", plans()), CONFIGURATION, 1)


def saved(
    path: Path, affine: npt.NDArray[np.float64] = SIZES, seed: int = 0, unit: str = "mm"
) -> npt.NDArray[np.int16]:
    """Write an image and return its voxels (x, y, z)."""
    voxels = np.random.default_rng(seed).integers(-1000, 1000, (4, 5, 6)).astype(np.int16)
    image = nibabel.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, path)
    return voxels


@pytest.mark.parametrize("name", ["case.nii", "case.nii.gz"])
def test_voxels_and_spacing_are_those_of_the_file(name: str, model: Plans, tmp_path: Path) -> None:
    voxels = saved(tmp_path / name)
    found = read_images(tmp_path / name, model)
    assert np.array_equal(found.images[0], voxels.transpose(2, 1, 0))
    assert found.spacing == pytest.approx((2.5, 0.8, 0.7), rel=1e-6)
    assert found.space is not None
    assert found.as_stored(found.images[0]) is found.images[0]


@pytest.mark.parametrize(
    ("reader", "spacing"), [("SimpleITKIO", (0.0025, 0.0008, 0.0007)), ("NibabelIO", (2.5, 0.8, 0.7))]
)
def test_units_count_for_the_reader_that_knows_them(
    reader: Reader, spacing: tuple[float, ...], model: Plans, tmp_path: Path
) -> None:
    saved(tmp_path / "case.nii", unit="micron")
    assert read_images(tmp_path / "case.nii", replace(model, reader=reader)).spacing == pytest.approx(spacing, rel=1e-6)


def test_axes_run_to_the_right_to_the_front_and_upwards_if_the_reader_turns_them(model: Plans, tmp_path: Path) -> None:
    voxels = saved(tmp_path / "case.nii", TURNED)
    found = read_images(tmp_path / "case.nii", replace(model, reader="NibabelIOWithReorient"))
    turned = nibabel.as_closest_canonical(nibabel.load(tmp_path / "case.nii"))
    assert np.array_equal(found.images[0], turned.get_fdata().transpose(2, 1, 0))
    assert found.spacing == pytest.approx((0.8, 0.7, 2.5), rel=1e-6)
    assert np.array_equal(found.as_stored(found.images[0]), voxels.transpose(2, 1, 0))


def test_channels_are_the_siblings_of_the_first(model: Plans, tmp_path: Path) -> None:
    two = replace(model, normalisations=model.normalisations * 2)
    voxels = [saved(tmp_path / f"case_000{channel}.nii.gz", seed=channel) for channel in range(2)]
    files = (tmp_path / "case_0000.nii.gz", tmp_path / "case_0001.nii.gz")
    for given in (files[0], str(files[0]), files, list(map(str, files))):
        found = read_images(given, two)
        assert found.files == files
        for own, image in zip(voxels, found.images, strict=True):
            assert np.array_equal(image, own.transpose(2, 1, 0))


@pytest.mark.parametrize(
    ("given", "channels", "said"),
    [
        ("case.nii.gz", 2, "does not end in _0000.nii.gz"),
        ("case_0000.nii.gz", 2, "there is no case_0001.nii.gz"),
        (["a_0000.nii", "b_0000.nii"], 1, "takes 1 channels, and 2 files"),
        (["a_0000.nii", "b_0000.nii"], 3, "takes 3 channels, and 2 files"),
        ([], 1, "takes 1 channels, and 0 files"),
    ],
)
def test_files_that_are_missing_or_too_many_are_refused(given: str | list[str], channels: int, said: str) -> None:
    with pytest.raises(VolumeError) as caught:
        files_of(given, channels)
    assert said in str(caught.value)


def test_one_channel_may_have_any_name() -> None:
    assert files_of("case.nii.gz", 1) == (Path("case.nii.gz"),)


@pytest.mark.parametrize("affine", [np.diag([0.7, 0.8, 2.6, 1.0]), TURNED])
def test_channels_of_different_cases_are_refused(affine: npt.NDArray[np.float64], model: Plans, tmp_path: Path) -> None:
    two = replace(model, normalisations=model.normalisations * 2, reader="NibabelIOWithReorient")
    saved(tmp_path / "case_0000.nii"), saved(tmp_path / "case_0001.nii", affine)
    with pytest.raises(VolumeError, match="give images of one case"):
        read_images(tmp_path / "case_0000.nii", two)


def test_files_that_are_no_images_are_refused(model: Plans, tmp_path: Path) -> None:
    (tmp_path / "case.nii").write_bytes(b"nothing")
    with pytest.raises(VolumeError, match="cannot be read as NIfTI"):
        read_images(tmp_path / "case.nii", model)
    with pytest.raises(VolumeError, match="is not NIfTI"):
        read_images(tmp_path / "case.mha", model)
    nibabel.save(nibabel.Nifti1Image(np.zeros((3, 3, 3, 1, 2), np.float32), SIZES), tmp_path / "two.nii")
    with pytest.raises(VolumeError):
        read_images(tmp_path / "two.nii", model)


@pytest.mark.parametrize("reader", get_args(Reader))
def test_size_is_stated_without_reading_voxels(reader: Reader, model: Plans, tmp_path: Path) -> None:
    saved(tmp_path / "case.nii.gz", TURNED)
    of = replace(model, reader=reader)
    size, spacing, nbytes = stated_size(tmp_path / "case.nii.gz", of)
    found = read_images(tmp_path / "case.nii.gz", of)
    assert (size, spacing) == (found.images[0].shape, found.spacing)
    assert nbytes == found.images[0].nbytes
