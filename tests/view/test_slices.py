"""Slices show each array where it lies in the scene, in proportion, and in the colours of its kind."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.support.viewed_files import RESOLUTION, block, grey, written
from znnpy.view.scene import Layer, Scene, opened_scene
from znnpy.view.slices import PIXELS, left_out, sheet, slices


def pixels(picture: Image.Image) -> npt.NDArray[np.uint8]:
    return np.asarray(picture.convert("RGB"))


def bright(picture: Image.Image) -> tuple[float, float, float, float]:
    """Return the box of bright pixels, as shares of height and width: top, bottom, left, right."""
    found = pixels(picture).min(axis=2) > 127
    rows, columns = np.flatnonzero(found.any(axis=1)), np.flatnonzero(found.any(axis=0))
    height, width = found.shape
    return rows[0] / height, (rows[-1] + 1) / height, columns[0] / width, (columns[-1] + 1) / width


def test_a_plane_shows_the_same_place_in_all_arrays(tmp_path: Path) -> None:
    """A block at the same place of the specimen, in a volume and in a prediction that is shifted and half as fine."""
    volume = np.full((32, 32, 32), 10, np.uint8)
    volume[16:24, 8:16, 20:28] = 200
    below = written(tmp_path / "v.h5", volume, (8.0, 8.0, 8.0))
    prediction = block((12, 12, 12), (6, 2, 8), (10, 6, 12))
    above = written(tmp_path / "p.h5", prediction, (16.0, 16.0, 16.0), (36.0, 36.0, 36.0))
    with opened_scene(str(above), str(below)) as scene:
        for axis in range(3):
            (row,) = slices(scene, (axis,))
            assert [one.layer for one in row] == ["volume", "prediction"]
            assert row[0].picture.size == row[1].picture.size == (PIXELS, PIXELS)
        (row,) = slices(scene, (0,))
    assert row[0].at == row[1].at == 16
    assert row[0].title == "volume, z = 16"
    expected = ((8 - 4) / 24, (16 - 4) / 24, (20 - 4) / 24, (28 - 4) / 24)
    assert bright(row[0].picture) == pytest.approx(expected, abs=0.03)
    assert bright(row[1].picture) == pytest.approx(expected, abs=0.04)


def test_slices_are_in_proportion(tmp_path: Path) -> None:
    """Voxels of 40x8x8 nm: 20x24x28 of them are 800x192x224 nm."""
    with opened_scene(str(written(tmp_path / "p.h5", grey(), RESOLUTION))) as scene:
        sizes = [row[0].picture.size for row in slices(scene)]
    assert sizes == [(PIXELS, round(PIXELS * 192 / 224)), (round(PIXELS * 224 / 800), PIXELS), (101, PIXELS)]


def test_voxels_outside_an_array_are_black(tmp_path: Path) -> None:
    below = written(tmp_path / "v.h5", np.full((4, 4, 4), 200, np.uint8), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    above = written(tmp_path / "p.h5", np.ones((8, 8, 8), np.float32), (1.0, 1.0, 1.0))
    with opened_scene(str(above), str(below)) as scene:
        (row,) = slices(scene, (1,))
    shown = pixels(row[0].picture)
    assert shown[0].max() == 0
    assert shown[PIXELS // 2, PIXELS // 2].max() == 0  # 200 is the lowest value of this volume, and drawn black
    assert pixels(row[1].picture).min() == 255


def test_labels_are_drawn_in_a_colour_for_each_number(tmp_path: Path) -> None:
    labels = np.zeros((4, 6, 6), np.uint64)
    labels[:, :2], labels[:, 2:4] = 7, 2**60 + 7
    above = written(tmp_path / "p.h5", np.zeros((4, 6, 6), np.float32))
    with opened_scene(str(above), None, [str(written(tmp_path / "l.h5", labels))]) as scene:
        (row,) = slices(scene, (0,))
    assert row[1].layer == "l.h5"
    colours = {tuple(colour) for colour in pixels(row[1].picture).reshape(-1, 3).tolist()}
    assert len(colours) == 3
    assert (0, 0, 0) in colours


@pytest.mark.parametrize(("channels", "colour"), [(2, (255, 0, 0)), (3, (255, 0, 255)), (5, (255, 0, 255))])
def test_the_first_channels_are_red_green_and_blue(tmp_path: Path, channels: int, colour: tuple[int, int, int]) -> None:
    maps = np.zeros((channels, 4, 4, 4), np.float32)
    maps[0::2] = 1
    with opened_scene(str(written(tmp_path / "p.h5", maps))) as scene:
        (row,) = slices(scene, (2,))
    assert (pixels(row[0].picture) == colour).all()


def test_infinite_values_are_drawn(tmp_path: Path) -> None:
    maps = np.full((4, 4, 4), np.nan, np.float32)
    maps[:2] = np.inf
    with opened_scene(str(written(tmp_path / "p.h5", maps))) as scene:
        (row,) = slices(scene, (1,))
    shown = pixels(row[0].picture)
    assert (shown[0].max(), shown[-1].max()) == (255, 0)


def test_only_the_middle_of_a_large_plane_is_read(tmp_path: Path) -> None:
    large = np.zeros((1, 1, 3000), np.float32)
    large[0, 0, 988:2012] = 1
    with opened_scene(str(written(tmp_path / "p.h5", large))) as scene:
        (row,) = slices(scene, (0,))
    assert pixels(row[0].picture).min() == 255


def test_turned_arrays_are_left_out_and_named(tmp_path: Path) -> None:
    matrix = np.eye(4)
    matrix[:3, :3] = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    with opened_scene(str(written(tmp_path / "p.h5", grey()))) as scene:
        (layer,) = scene.layers
        both = Scene((layer, Layer("turned", "labels", layer.volume, matrix, (0.0, 1.0))), None)
        assert [[one.layer for one in row] for row in slices(both)] == [["prediction"]] * 3
        assert left_out(both) == ["turned is left out: its axes are turned against those of the volume"]
        assert left_out(scene) == []


def test_sheet_is_a_picture_of_three_planes(tmp_path: Path) -> None:
    below = written(tmp_path / "v.h5", grey())
    with opened_scene(str(written(tmp_path / "p.h5", grey())), str(below)) as scene:
        drawn = Image.open(io.BytesIO(sheet(scene)))
    assert drawn.format == "PNG"
    assert drawn.width > 2 * PIXELS
    assert drawn.height > 3 * PIXELS * 20 / 28
