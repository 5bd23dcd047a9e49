"""Models that nnU-Net made are read, and data, logits and labels are those that nnU-Net gives for the same files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from tests.nnunet.with_nnunet import HEADERS
from znnpy.kernels.whole import whole
from znnpy.nnunet.export import labels_of, placed, probabilities_of
from znnpy.nnunet.folder import read_model
from znnpy.nnunet.images import read_images
from znnpy.nnunet.plans import Reader
from znnpy.nnunet.preprocessing import NnunetCase, prepared
from znnpy.patches import Box
from znnpy.trained import TrainedNetwork
from znnpy.windows.settings import Windows

pytestmark = pytest.mark.torch

CLOSE = 1e-5
HALF = 4e-3  # error of most logits whose sums are float16, as a part of the largest

Answers = dict[str, npt.NDArray[Any]]


def answers(folder: Path, name: str) -> Answers:
    with np.load(folder / f"{name}.npz") as found:
        return dict(found)


def check_case(folder: Path, name: str) -> NnunetCase:
    """Compare the data of a case, and the labels and probabilities of random logits."""
    model, expected = read_model(folder / "model"), answers(folder, name)
    images = read_images(folder / "cases" / f"{name}_0000.nii.gz", model.plans)
    case = prepared(model.plans, images.images, images.spacing)
    assert case.data.shape == expected["data"].shape
    assert abs(case.data - expected["data"]).max() <= CLOSE * abs(expected["data"]).max()
    assert [case.crop.lo, case.crop.hi] == [tuple(corner) for corner in expected["crop"].T]

    given = (lambda one: expected["logits"][one], len(expected["logits"]), case, model.plans, model.dataset)
    labels = labels_of(*given)
    assert labels.dtype == expected["labels"].dtype
    assert np.array_equal(labels, expected["labels"])
    assert len(np.unique(labels)) > 2
    assert np.array_equal(images.as_stored(labels), expected["stored"])
    assert np.allclose(probabilities_of(*given), expected["probabilities"], rtol=0, atol=1e-6)
    return case


def check_patch(folder: Path) -> None:
    """Compare the logits of each fold for a patch, computed by the definition of each layer."""
    model, expected = read_model(folder / "model"), answers(folder, "patch")
    each = len(model.network.weighted)
    for fold, logits in enumerate(expected["logits"]):
        weights = model.weights[fold * each : (fold + 1) * each]
        (found,) = whole(model.network, weights, expected["patch"].transpose(1, 2, 3, 0))
        assert abs(found.transpose(3, 0, 1, 2) - logits).max() <= CLOSE * abs(logits).max()


def test_trained_model_is_read_with_its_folds(trained: Path) -> None:
    model = read_model(trained / "model")
    assert (model.folds, model.trainer, model.notes) == (("0", "1"), "nnUNetTrainer", ())
    assert model.network.windows == Windows((8, 16, 16), mirror=(0, 1, 2), rule="nnunet")
    assert model.network.members == 2
    assert model.plans.patch == (8, 16, 16)
    assert model.plans.spacing == pytest.approx((2, 1, 1))
    assert [one.scheme for one in model.plans.normalisations] == ["CTNormalization", "ZScoreNormalization"]
    assert (model.dataset.channels, model.dataset.heads, model.dataset.order) == (2, 3, None)
    assert read_model(trained / "model", folds=["1"]).folds == ("1",)


def test_logits_of_trained_folds_are_those_of_their_modules(trained: Path) -> None:
    check_patch(trained)


@pytest.mark.parametrize("name", ["equal", "together", "separate"])
def test_cases_of_trained_models_equal_those_of_nnunet(name: str, trained: Path) -> None:
    case = check_case(trained, name)
    assert case.is_resampled == (name != "equal")
    assert case.crop != Box((0, 0, 0), case.size)


def test_prediction_of_a_case_is_that_of_the_predictor(trained: Path) -> None:
    """The predictor sums logits in float16, where in the corners of a case products with small weights become 0."""
    model, expected = read_model(trained / "model"), answers(trained, "equal.predicted")
    images = read_images(trained / "cases" / "equal_0000.nii.gz", model.plans)
    case = prepared(model.plans, images.images, images.spacing)

    logits = TrainedNetwork(model.network, model.weights)(case.data)
    allowed = HALF * abs(logits).max()
    close = (abs(logits - expected["logits"]) <= allowed).all(axis=0)
    assert np.count_nonzero(close) > 0.95 * close.size
    labels = labels_of(lambda one: logits[one], len(logits), case, model.plans, model.dataset)
    largest = np.sort(logits, axis=0)
    clear = placed(close & (largest[-1] - largest[-2] > 2 * allowed), case, model.plans)
    assert np.count_nonzero(clear) > 0.8 * close.size
    assert np.array_equal(labels[clear], expected["labels"][clear])
    assert len(np.unique(labels[clear])) > 1


def test_assembled_model_mirrors_nothing_and_predicts_regions(assembled: Path) -> None:
    model = read_model(assembled / "model")
    assert model.folds == ("all",)
    assert model.network.windows == Windows((8, 16, 16), rule="nnunet")
    assert (model.dataset.heads, model.dataset.order) == (3, (1, 2, 3))
    assert model.plans.architecture.kind == "ResidualEncoderUNet"


def test_logits_of_a_residual_network_are_those_of_its_module(assembled: Path) -> None:
    check_patch(assembled)


def test_turned_cases_with_regions_equal_those_of_nnunet(assembled: Path) -> None:
    assert check_case(assembled, "turned").is_resampled


@pytest.mark.parametrize("reader", get_args(Reader))
def test_images_are_read_as_by_the_readers_of_nnunet(reader: Reader, assembled: Path) -> None:
    model = read_model(assembled / "model").plans
    alone = replace(model, normalisations=model.normalisations[:1], reader=reader)
    for number in range(HEADERS):
        found = read_images(assembled / "cases" / f"header_{number}.nii.gz", alone)
        expected = answers(assembled, f"header_{number}")
        assert np.allclose(found.images[0], expected[reader], rtol=1e-6, atol=0)
        assert found.spacing == pytest.approx(tuple(expected[f"{reader}_spacing"]), rel=1e-6)
