"""Networks that a model description of bioimage.io describes: what they compute, against numpy in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.importing.descriptions import (
    Real,
    axes_of,
    convolved,
    model,
    new,
    old,
    old_step,
    planar_model,
    step,
    written,
)
from znnpy.importing.finish import Wishes
from znnpy.network import Normalise
from znnpy.network_files import read_model, read_network
from znnpy.normalisation import VolumeStatistics
from znnpy.trained import load_network

SIZE = (7, 9, 11)


def grey(channels: int = 1, seed: int = 0) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(seed).integers(0, 256, (channels, *SIZE), np.uint8)
    return values // np.arange(1, channels + 1, dtype=np.uint8)[:, None, None, None]


def run(path: Path, volume: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return load_network(path)(volume, calibrate=False, ram="3G", threads=1)


def assert_is(path: Path, volume: npt.NDArray[Any], expected: Real) -> None:
    result = run(path, volume)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def per_channel(values: list[float]) -> Real:
    return np.array(values)[:, None, None, None]


def over_all(x: Real, of: Callable[..., Any]) -> Real:
    return np.asarray(of(x))


def over_space(x: Real, of: Callable[..., Any]) -> Real:
    return np.asarray(of(x.reshape(len(x), -1), axis=1))[:, None, None, None]


BEFORE: dict[str, tuple[list[Any], list[Any], Callable[[Real], Real]]] = {  # in 0.4 and in 0.5
    "nothing": ([], [], lambda x: x),
    "fixed": (
        [old_step("zero_mean_unit_variance", mode="fixed", axes="czyx", mean=120.0, std=33.5, eps=1e-6)],
        [step("fixed_zero_mean_unit_variance", mean=120.0, std=33.5)],
        lambda x: (x - 120) / 33.5,
    ),
    "fixed by channel": (
        [old_step("zero_mean_unit_variance", mode="fixed", axes="zyx", mean=[120, 50], std=[33.5, 12])],
        [step("fixed_zero_mean_unit_variance", mean=[120, 50], std=[33.5, 12.0], axis="channel")],
        lambda x: (x - per_channel([120, 50])) / per_channel([33.5, 12]),
    ),
    "scale_linear": (
        [old_step("scale_linear", gain=0.02, offset=-1.5)],
        [step("scale_linear", gain=0.02, offset=-1.5)],
        lambda x: 0.02 * x - 1.5,
    ),
    "negative gain": (
        [old_step("scale_linear", axes="zyx", gain=[-0.02, 0.01], offset=[1, 2])],
        [step("scale_linear", gain=[-0.02, 0.01], offset=[1, 2], axis="channel")],
        lambda x: per_channel([-0.02, 0.01]) * x + per_channel([1, 2]),
    ),
    "clip first": (
        [old_step("clip", min=20, max=200), old_step("scale_linear", gain=0.01)],
        [step("clip", min=20, max=200), step("ensure_dtype", dtype="float32"), step("scale_linear", gain=0.01)],
        lambda x: np.clip(x, 20, 200) * 0.01,
    ),
    "normalised and clipped": (
        [old_step("scale_linear", gain=1 / 255), old_step("clip", min=0.1, max=0.8), old_step("sigmoid")],
        [step("scale_linear", gain=1 / 255), step("clip", min=0.1), step("clip", max=0.8), {"id": "sigmoid"}],
        lambda x: 1 / (1 + np.exp(-np.clip(x / 255, 0.1, 0.8))),
    ),
    "statistics by channel": (
        [old_step("zero_mean_unit_variance", mode="per_sample", axes="zyx")],
        [step("ensure_dtype", dtype="float32"), step("zero_mean_unit_variance", axes=["z", "y", "x"])],
        lambda x: (x - over_space(x, np.mean)) / (over_space(x, np.std) + 1e-6),
    ),
    "statistics of all": (
        [old_step("zero_mean_unit_variance", mode="per_sample", axes="czyx", eps=0.01)],
        [step("zero_mean_unit_variance", eps=0.01)],
        lambda x: (x - x.mean()) / (x.std() + 0.01),
    ),
    "percentiles": (
        [
            old_step("scale_range", mode="per_sample", axes="zyx", min_percentile=1, max_percentile=99.8, eps=1e-4),
            old_step("clip", min=0, max=1),
        ],
        [
            step("scale_range", axes=["z", "y", "x"], min_percentile=1, max_percentile=99.8, eps=1e-4),
            step("clip", min=0.0, max=1.0),
        ],
        lambda x: np.clip(
            (x - over_space(x, lambda v, axis: np.percentile(v, 1, axis=axis)))
            / (
                over_space(x, lambda v, axis: np.percentile(v, 99.8, axis=axis))
                - over_space(x, lambda v, axis: np.percentile(v, 1, axis=axis))
                + 1e-4
            ),
            0,
            1,
        ),
    ),
    "the whole range": (
        [old_step("scale_range", mode="per_sample", axes="czyx", reference_tensor="x")],
        [step("scale_range", axes=["channel", "z", "y", "x"], reference_tensor="x")],
        lambda x: (x - x.min()) / (x.max() - x.min() + 1e-6),
    ),
}
AFTER: dict[str, tuple[list[Any], list[Any], Callable[[Real], Real]]] = {
    "sigmoid": ([old_step("sigmoid")], [step("sigmoid")], lambda y: 1 / (1 + np.exp(-y))),
    "scaled and clipped": (
        [old_step("scale_linear", gain=-2, offset=0.5), old_step("clip", min=-1, max=0.75)],
        [step("scale_linear", gain=-2, offset=0.5), step("clip", min=-1, max=0.75)],
        lambda y: np.clip(-2 * y + 0.5, -1, 0.75),
    ),
    "by channel": (
        [old_step("scale_linear", gain=[1, 3], offset=[0.5, 0])],
        [step("scale_linear", gain=[1, 3], offset=[0.5, 0], axis="channel"), step("ensure_dtype", dtype="float32")],
        lambda y: y * per_channel([1, 3]) + per_channel([0.5, 0]),
    ),
    "softmax": (
        [],
        [step("softmax"), step("softmax", axis="channel")],
        lambda y: _softmax(_softmax(y)),
    ),
}


def _softmax(y: Real) -> Real:
    powers = np.exp(y - y.max(axis=0))
    found: Real = powers / powers.sum(axis=0)
    return found


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("name", BEFORE)
def test_preprocessing_is_what_it_is_in_numpy(name: str, version: str, tmp_path: Path) -> None:
    before_old, before_new, expected = BEFORE[name]
    maps = 2
    shape = {"min": [1, maps, 16, 16, 16], "step": [0, 0, 16, 16, 16]}
    if version == "0.4":
        raw = old(pre=before_old)
        raw["inputs"][0]["shape"] = shape
    else:
        raw = new(pre=before_new, maps=maps)
    volume = grey(maps)
    assert_is(written(raw, tmp_path, model(maps=maps)), volume, convolved(expected(volume.astype(np.float64))))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("name", AFTER)
def test_postprocessing_is_what_it_is_in_numpy(name: str, version: str, tmp_path: Path) -> None:
    after_old, after_new, expected = AFTER[name]
    if version == "0.4" and not after_old:
        pytest.skip("0.4 has no such step")
    raw = old(post=after_old) if version == "0.4" else new(post=after_new)
    raw["inputs"][0]["preprocessing"] = [step("scale_linear", gain=0.01)]
    volume = grey()
    assert_is(written(raw, tmp_path), volume, expected(convolved(volume.astype(np.float64) * 0.01)))


def test_a_fixed_normalisation_is_kept_as_such(tmp_path: Path) -> None:
    path = written(new(pre=[step("fixed_zero_mean_unit_variance", mean=120.5, std=33.7)]), tmp_path)
    network = read_network(path).network
    assert network.normalise == Normalise((120.5,), (33.7,))
    assert network.statistics is None
    assert network.name == "a small net"


def test_a_description_in_a_folder_is_found(tmp_path: Path) -> None:
    volume = grey()
    written(new(), tmp_path, name="model.bioimageio.yaml")
    np.testing.assert_array_equal(run(tmp_path, volume), run(tmp_path / "model.bioimageio.yaml", volume))


def test_a_description_is_known_by_its_content(tmp_path: Path) -> None:
    path = written(new(), tmp_path, name="net.yml")
    assert read_network(path).network.name == "a small net"


@pytest.mark.parametrize("raw", [old(axes="bzyxc"), new(axes="bzyxc")])
def test_channels_may_come_last(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["inputs"][0]["shape"] = [1, 16, 16, 16, 1]
    volume = grey()
    assert_is(written(raw, tmp_path, model("bzyxc")), volume, convolved(volume.astype(np.float64)))


def test_a_network_over_images_takes_each_plane(tmp_path: Path) -> None:
    raw = new(axes="bcyx", pre=[step("scale_linear", gain=0.01)], post=[step("sigmoid")])
    path = written(raw, tmp_path, planar_model())
    volume = grey()
    result = run(path, volume)
    alone = np.stack([run(path, volume[:, z : z + 1])[:, 0] for z in range(SIZE[0])], axis=1)
    np.testing.assert_allclose(result, alone, atol=1e-6)


def test_one_of_several_outputs_is_chosen_by_its_name(tmp_path: Path) -> None:
    raw = new(pre=[step("scale_linear", gain=0.01)])
    first = {"id": "first", "axes": axes_of("bczyx", 2, "x"), "postprocessing": [step("binarize", threshold=0.5)]}
    second = {"id": "second", "axes": axes_of("bczyx", 2, "x"), "postprocessing": [step("sigmoid")]}
    raw["outputs"] = [first, second]
    path = written(raw, tmp_path, model(outputs=("one", "two")))
    made = read_model(path, Wishes(outputs=("second",)))
    assert made.words == ("two",)
    assert made.network.layers[-1].activation == "sigmoid"  # type: ignore[union-attr]


def test_a_normalisation_of_the_user_replaces_statistics(tmp_path: Path) -> None:
    path = written(new(pre=[step("zero_mean_unit_variance"), step("clip", min=-3.0, max=3.0)]), tmp_path)
    made = read_model(path, Wishes(normalise=Normalise((128.0,), (33.0,))))
    assert made.network.normalise == Normalise((128.0,), (33.0,))
    assert made.network.statistics is None
    assert read_model(path, Wishes()).network.statistics == VolumeStatistics("mean_and_std", jointly=True)


def test_the_digest_of_weights_is_checked(tmp_path: Path) -> None:
    digest = hashlib.sha256(model().SerializeToString()).hexdigest()
    raw = new(weights={"onnx": {"source": "net.onnx", "sha256": digest}, "torchscript": {"source": "other.pt"}})
    path = written(raw, tmp_path)
    volume = grey()
    assert_is(path, volume, convolved(volume.astype(np.float64)))
