"""Arrays that are looked at lie where their metadata, or the prediction itself, say, and are drawn by their kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from tests.support.viewed_files import RESOLUTION, grey, written
from znnpy.errors import VolumeError
from znnpy.inference import infer
from znnpy.view.scene import Layer, Scene, _between, opened_scene
from znnpy.volume.space import Space


def scene_of(*paths: Path | str | None) -> tuple[Scene, list[Layer]]:
    """Return the scene of a prediction, a volume and labels."""
    prediction, volume, *labels = (None if path is None else str(path) for path in (*paths, *[None] * (len(paths) < 2)))
    assert prediction is not None
    with opened_scene(prediction, volume, [one for one in labels if one is not None]) as scene:
        return scene, list(scene.layers)


def placed(layer: Layer) -> tuple[list[float], list[float]]:
    """Return position and step of a layer."""
    return [round(float(at), 6) for at in layer.place[:3, 3]], [round(float(layer.place[a, a]), 6) for a in range(3)]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return written(tmp_path / "volume.h5", grey(), RESOLUTION, (400.0, 80.0, 16.0))


def test_metadata_place_a_prediction_in_its_volume(tmp_path: Path, volume: Path) -> None:
    prediction = written(tmp_path / "p.h5", np.zeros((4, 5, 6), np.float32), RESOLUTION, (480.0, 104.0, 56.0))
    scene, (below, layer) = scene_of(prediction, volume)
    assert scene.scale == pytest.approx((40e-9, 8e-9, 8e-9))
    assert scene.notes == ()
    assert placed(below) == ([0.0] * 3, [1.0] * 3)
    assert placed(layer) == ([2.0, 3.0, 5.0], [1.0] * 3)
    assert (below.kind, layer.kind) == ("grey", "prediction")


def test_units_of_both_files_count(tmp_path: Path, volume: Path) -> None:
    half = np.zeros((4, 5, 6), np.float32)
    prediction = written(tmp_path / "p.h5", half, (0.08, 0.016, 0.016), (0.42, 0.084, 0.02), "micrometer")
    _, (_, layer) = scene_of(prediction, volume)
    assert placed(layer) == ([0.5] * 3, [2.0] * 3)
    low, high = layer.corners  # its voxels have the centres 0.5, 2.5, .. and are two wide: from 0 to 8
    assert low.tolist() == pytest.approx([0.0, 0.0, 0.0])
    assert high.tolist() == pytest.approx([8.0, 10.0, 12.0])


def test_each_axis_of_the_volume_may_have_a_unit_of_its_own() -> None:
    mixed = Space((0.04, 8.0, 8.0), (0.4, 80.0, 16.0), ("micrometer", "nanometer", "nanometer"))
    plain = Space((80.0, 8.0, 16.0), (440.0, 80.0, 32.0), ("nanometer",) * 3)
    for below, above, steps, position in (
        (mixed, plain, [2.0, 1.0, 2.0], [1.0, 0.0, 2.0]),
        (plain, mixed, [0.5, 1.0, 0.5], [-0.5, 0.0, -1.0]),
    ):
        place = _between(below, above)
        assert place is not None
        np.testing.assert_allclose(np.diag(place)[:3], steps)
        np.testing.assert_allclose(place[:3, 3], position)


def test_a_size_without_a_unit_is_taken_to_be_in_nanometers(tmp_path: Path) -> None:
    scene, _ = scene_of(written(tmp_path / "p.h5", grey(), RESOLUTION, unit=""))
    assert scene.scale == pytest.approx((40e-9, 8e-9, 8e-9))
    assert "taken to be nm" in scene.notes[0]


@pytest.mark.parametrize("scale", [None, (1.0, 1.0, 1.0)])
def test_without_a_size_positions_are_in_voxels(tmp_path: Path, scale: tuple[float, ...] | None) -> None:
    scene, _ = scene_of(written(tmp_path / "p.h5", grey(), scale, unit=""))
    assert scene.scale is None
    assert scene.notes == ("the size of a voxel is not stated, so positions are in voxels",)


def test_a_file_without_metadata_lies_in_the_middle_unless_it_is_as_large(tmp_path: Path) -> None:
    volume = written(tmp_path / "volume.h5", grey((20, 24, 28)))
    small = written(tmp_path / "p.h5", np.zeros((14, 18, 22), np.float32))
    scene, (_, layer) = scene_of(small, volume)
    assert placed(layer)[0] == [3.0] * 3
    assert_holds(scene.notes[-1], "prediction", "in the middle")
    alike = written(tmp_path / "q.h5", np.zeros((20, 24, 28), np.float32))
    scene, (_, layer) = scene_of(alike, volume)
    assert placed(layer)[0] == [0.0] * 3
    assert len(scene.notes) == 1


def test_labels_lie_with_the_array_of_their_size(tmp_path: Path) -> None:
    volume = written(tmp_path / "volume.h5", grey((20, 24, 28)))
    small = written(tmp_path / "p.h5", np.zeros((14, 18, 22), np.float32))
    of_volume = written(tmp_path / "cells.h5", np.zeros((20, 24, 28), np.uint16))
    (tmp_path / "other").mkdir()
    of_prediction = written(tmp_path / "other" / "cells.h5", np.zeros((14, 18, 22), np.int64))
    _, layers = scene_of(small, volume, of_volume, of_prediction)
    assert [layer.name for layer in layers] == ["volume", "prediction", "cells.h5", "cells.h5 2"]
    assert [layer.kind for layer in layers] == ["grey", "prediction", "labels", "labels"]
    assert [placed(layer)[0][0] for layer in layers] == [0.0, 3.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("array", "kind", "contrast"),
    [
        (np.linspace(0, 1, 64, dtype=np.float32).reshape(4, 4, 4), "prediction", (0.0, 1.0)),
        (np.linspace(-2, 6, 64, dtype=np.float32).reshape(4, 4, 4), "prediction", (-2.0, 6.0)),
        (np.full((4, 4, 4), np.nan, np.float32), "prediction", (0.0, 1.0)),
        (np.full((4, 4, 4), 3.0, np.float32), "prediction", (3.0, 4.0)),
        (np.zeros((4, 4, 4), np.uint8), "prediction", (0.0, 255.0)),
        (np.zeros((4, 4, 4), np.uint32), "labels", (0.0, 1.0)),
    ],
)
def test_voxels_of_other_programs_are_drawn_by_their_type(
    tmp_path: Path, array: Any, kind: str, contrast: tuple[float, float]
) -> None:
    _, (layer,) = scene_of(written(tmp_path / "p.h5", array))
    assert (layer.kind, layer.contrast) == (kind, contrast)


def test_grey_values_are_drawn_within_their_usual_range(tmp_path: Path) -> None:
    values = np.full((20, 20, 20), 100, np.uint8)
    values[::2] = 120
    values[0, 0, 0] = 255
    _, (layer, _) = scene_of(written(tmp_path / "p.h5", grey()), written(tmp_path / "v.h5", values))
    assert layer.contrast[0] == 100
    assert 120 < layer.contrast[1] < 145


def test_a_turned_prediction_is_no_place_for_a_straight_volume(tmp_path: Path) -> None:
    matrix = np.eye(4)
    matrix[:3, :3] = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    with opened_scene(str(written(tmp_path / "p.h5", grey()))) as scene:
        (layer,) = scene.layers
        turned = Layer("turned", "prediction", layer.volume, matrix, (0.0, 1.0))
    assert layer.is_straight
    assert not turned.is_straight


def test_missing_file_is_named(tmp_path: Path, volume: Path) -> None:
    with pytest.raises(VolumeError, match=r"there is no file .*gone\.h5"):
        scene_of(tmp_path / "gone.h5", volume)
    with pytest.raises(VolumeError, match=r"there is no file .*gone\.h5"):
        scene_of(volume, tmp_path / "gone.h5")


@pytest.fixture
def predicted(place: Place) -> Callable[..., Path]:
    """Return a function that predicts a part of the volume, with options."""

    def predict(name: str = "out.h5", **options: Any) -> Path:
        out = place.folder / name
        how = {"device": "cpu", "threads": 1, "calibrate": False, "patch": (4, 4, 4), "roi": "2:20,3:23,4:25"}
        infer(place.volume, place.folder / "net.yaml", out=out, **{**how, **options})
        return out

    return predict


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.h5", "out.zarr", "out.n5", "out.precomputed", "out.tif", "out.nii"])
@pytest.mark.parametrize("has_size", [False, True])
def test_every_format_places_a_prediction(
    place: Place, predicted: Callable[..., Path], name: str, has_size: bool
) -> None:
    """The field of view of the network is 6x8x7: the first output voxel lies at the roi and half of it, less one."""
    if has_size:
        written(place.volume, grey((20, 23, 25)), RESOLUTION, (400.0, 80.0, 16.0))
    out = predicted(name)
    _, (_, layer) = scene_of(out, place.volume)
    at, step = placed(layer)
    assert at == pytest.approx([4, 6, 7], abs=1e-5)
    assert step == pytest.approx([1] * 3, abs=1e-6)
    scene, (alone,) = scene_of(out)
    assert placed(alone)[0] == pytest.approx([4, 6, 7], abs=1e-5)
    assert scene.scale is None or scene.scale == pytest.approx((40e-9, 8e-9, 8e-9) if has_size else (1e-9,) * 3)


@pytest.mark.slow
def test_larger_voxels_of_an_output_are_placed_by_themselves_as_in_the_volume(tmp_path: Path) -> None:
    """A network that pools gives one voxel for each 2x2x2, whose centre lies between theirs."""
    volume, network = written(tmp_path / "v.h5", grey(), RESOLUTION), tmp_path / "net.yaml"
    layers = [
        {"name": "enter", "type": "conv", "kernel": 3, "out": 1, "padding": "same"},
        {"name": "pool", "type": "pool", "window": 2},
    ]
    what = {"name": "half", "input_channels": 1, "weights": "net.npz", "meaning": "whole", "layers": layers}
    network.write_text(json.dumps(what))
    arrays: Any = {"enter.weight": np.ones((1, 1, 3, 3, 3), "f4"), "enter.bias": np.zeros(1, "f4")}
    np.savez(tmp_path / "net.npz", **arrays)
    out = tmp_path / "o.h5"
    infer(volume, network, out=out, device="cpu", calibrate=False, threads=1)
    for below in (None, volume):
        scene, layers_of_scene = scene_of(out, below)
        assert scene.scale == pytest.approx((40e-9, 8e-9, 8e-9))
        assert placed(layers_of_scene[-1]) == ([0.5] * 3, [2.0] * 3)


@pytest.mark.slow
def test_another_array_of_the_predicted_file_is_drawn_by_its_type(place: Place, predicted: Callable[..., Path]) -> None:
    out = predicted()
    with h5py.File(out, "r+") as file:
        file["cells"] = np.zeros((4, 5, 6), np.uint64)
    _, (_, layer) = scene_of(f"{out}::cells", place.volume)
    assert (layer.kind, layer.volume.dtype) == ("labels", np.dtype(np.uint64))


@pytest.mark.slow
def test_another_volume_than_the_predicted_one_is_noted(place: Place, predicted: Callable[..., Path]) -> None:
    other = written(place.folder / "other.h5", grey())
    scene, _ = scene_of(predicted(), other)
    assert_holds(scene.notes[-1], "20x23x25", "20x24x28")


@pytest.mark.slow
def test_the_predicted_array_of_a_file_with_several_is_found(place: Place, predicted: Callable[..., Path]) -> None:
    place.write_volume(grey((20, 23, 25)), other=np.zeros((30, 30, 30), np.uint8))
    out = predicted(dataset="raw")
    _, (below, _) = scene_of(out, place.volume)
    assert below.volume.dataset == "raw"
    _, (below, _) = scene_of(out, f"{place.volume}::other")
    assert below.volume.size == (30, 30, 30)


@pytest.mark.slow
def test_a_damaged_position_is_refused(place: Place, predicted: Callable[..., Path]) -> None:
    import h5py

    out = predicted()
    with h5py.File(out, "r+") as file:
        file["prediction"].attrs["voxel_position"] = [1.0, np.nan, 2.0]
    with pytest.raises(VolumeError, match="the attribute position of"):
        scene_of(out, place.volume)
