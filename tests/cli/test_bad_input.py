"""Bad input: exit 1, one sentence with the numbers and what to do, and no file in the folder changes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place

GREY = np.zeros((20, 23, 25), np.uint8)


# --- the volume ---


def test_missing_volume_is_refused(place: Place) -> None:
    assert str(place.folder / "gone.h5") in place.refusal("infer", place.folder / "gone.h5")


def test_file_of_another_format_is_refused(place: Place) -> None:
    other = place.folder / "picture.h5"
    other.write_bytes(b"GIF89a, surely")
    sentence = place.refusal("infer", other)
    assert "picture.h5" in sentence
    assert "14 bytes" in sentence


def test_folder_as_volume_is_refused(place: Place) -> None:
    assert "folder" in place.refusal("infer", place.folder)


def test_several_datasets_are_refused_unless_one_is_named(place: Place) -> None:
    place.write_volume(GREY, second=GREY)
    sentence = place.refusal(*place.arguments)
    for part in ("raw (20x23x25 uint8)", "second (20x23x25 uint8)", "--dataset"):
        assert part in sentence
    sentence = place.refusal(*place.arguments, "--dataset", "third")
    for part in ("'third'", "raw (20x23x25 uint8)", "second"):
        assert part in sentence
    assert place.infer("--dataset", "second").exit_code == 0


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((20, 23), np.uint8), "(20, 23)"),
        (np.zeros((2, 1, 20, 23, 25), np.uint8), "(2, 1, 20, 23, 25)"),
        (np.zeros((20, 23, 25), np.bool_), "bool"),
        (np.zeros((20, 23, 25), np.complex64), "complex64"),
    ],
    ids=["2D", "5D", "bool", "complex"],
)
def test_dataset_of_wrong_type_or_axes_is_refused(place: Place, array: np.ndarray[Any, Any], said: str) -> None:
    place.write_volume(array)
    assert said in place.refusal(*place.arguments, "--dataset", "raw")


def test_big_endian_volume_is_read(place: Place) -> None:
    assert place.infer().exit_code == 0
    expected = place.prediction()
    with h5py.File(place.volume) as file:
        grey = file["raw"][()]
    place.write_volume(grey.astype(">u2"))
    assert place.infer("--overwrite").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), expected)


def test_volume_smaller_than_the_field_of_view_is_refused(place: Place) -> None:
    place.write_volume(GREY[:5])
    sentence = place.refusal(*place.arguments)
    assert "5x23x25" in sentence
    assert "6x8x7" in sentence


def test_wrong_number_of_channels_is_refused(place: Place) -> None:
    place.write_volume(np.zeros((2, 20, 23, 25), np.uint8))
    assert "2 channels" in place.refusal(*place.arguments)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_not_finite_are_refused(place: Place, bad: float) -> None:
    grey = GREY.astype(np.float32)
    grey[9, 11, 13] = grey[9, 11, 14] = bad
    place.write_volume(grey)
    result = place.infer()
    assert result.exit_code == 1
    assert "2 voxels" in result.stderr
    assert "(9, 11, 13)" in result.stderr
    assert "--allow-nan" in result.stderr
    assert not place.out.exists()
    assert place.infer("--allow-nan", "--overwrite").exit_code == 0
    seen = np.isnan(place.prediction()).all(axis=0)
    assert seen.sum() == 6 * 8 * 8  # the field of view, and one more along x
    assert seen[9 - 5 : 9 + 1, 11 - 7 : 11 + 1, 13 - 6 : 14 + 1].all()


def test_nan_in_uint8_output_is_refused(place: Place) -> None:
    assert "--output-dtype float32" in place.refusal(*place.arguments, "--allow-nan", "--output-dtype", "uint8")


def test_volume_locked_by_another_program_is_refused(place: Place) -> None:
    code = f"import h5py; file = h5py.File({str(place.volume)!r}, 'r+'); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        sentence = place.refusal(*place.arguments)
        other.communicate("\n")
    assert "locked" in sentence


def test_missing_filter_plugin_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(place.volume, "w") as file:
        file.create_dataset("raw", data=GREY, chunks=True, compression="lzf")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    sentence = place.refusal(*place.arguments)
    assert "32000 (lzf)" in sentence
    assert "hdf5plugin" in sentence


def test_roi_outside_the_volume_is_refused(place: Place) -> None:
    sentence = place.refusal(*place.arguments, "--roi", "0:20,0:23,0:26")
    assert "0:26" in sentence
    assert "0:25" in sentence


def test_roi_smaller_than_the_field_of_view_is_refused(place: Place) -> None:
    sentence = place.refusal(*place.arguments, "--roi", "0:5,0:23,0:25")
    for part in ("--roi", "5x23x25", "6x8x7"):
        assert part in sentence


def test_debug_shows_the_traceback(place: Place) -> None:
    result = place.run("infer", place.folder / "gone.h5", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("Error: ")


# --- network and weights ---


def test_missing_network_is_refused(place: Place) -> None:
    assert "met.yaml" in place.refusal("infer", place.volume, "--network", place.folder / "met.yaml")
    assert "n337" in place.refusal("plan", "n377")


def test_missing_weights_are_refused(place: Place) -> None:
    place.write_network(weights="gone.npz")
    sentence = place.refusal(*place.arguments)
    assert "gone.npz" in sentence
    place.write_network(weights=None)
    assert "--weights" in place.refusal(*place.arguments)


def test_weights_of_a_wrong_shape_are_refused(place: Place) -> None:
    place.write_weights(conv0_weight=np.zeros((3, 1, 1, 5, 3), np.float32))
    sentence = place.refusal(*place.arguments)
    assert "conv0_weight" in sentence
    assert "3, 1, 1, 5, 3" in sentence
    assert "3, 1, 1, 5, 2" in sentence


def test_weights_of_text_are_refused(place: Place) -> None:
    place.write_weights(conv1_bias=np.array([0, np.nan, 0, 0], np.float32))
    assert "conv1_bias" in place.refusal(*place.arguments)


def test_pickled_weights_are_refused(place: Place) -> None:
    place.write_weights(conv0_bias=np.array([{"a": 1}, None, None], dtype=object))
    assert "conv0_bias" in place.refusal(*place.arguments)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"type": "deconv", "kernel": 3, "out": 1}, "deconv"),
        ({"type": "conv", "kernel": [3, -3, 3], "out": 1}, "-3"),
        ({"type": "conv", "kernel": 3, "out": 1, "strid": 2}, "strid"),
    ],
    ids=["unknown type", "negative kernel", "unknown key"],
)
def test_unknown_layer_is_refused(place: Place, layer: dict[str, Any], said: str) -> None:
    place.write_network(layers=[layer])
    sentence = place.refusal(*place.arguments)
    assert said in sentence
    assert "layer 0" in sentence or "layers[0]" in sentence


def test_overflowing_values_are_refused(place: Place) -> None:
    weights = np.full((4, 3, 3, 2, 3), 3e38, np.float32)
    place.write_weights(conv1_weight=weights)
    result = place.infer()
    assert result.exit_code == 1
    assert "layer 2" in result.stderr
    assert not place.out.exists()


def test_weights_larger_than_the_ram_limit_are_not_read(place: Place) -> None:
    """A compressed file of 1 MiB may hold a gigabyte of weights."""
    place.write_network(layers=[{"type": "conv", "kernel": 1, "out": 4096}, {"type": "conv", "kernel": 2, "out": 4096}])
    sentence = place.refusal(*place.arguments, "--ram", "400M")
    assert "512.1 MiB" in sentence
    assert "400.0 MiB" in sentence
