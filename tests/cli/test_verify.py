"""`znnpy verify`: finds a wrong voxel, tells it apart from rounding, refuses what did not make the output."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from place import Place

from znnpy.verify import verify


def words(place: Place, *more: object) -> list[object]:
    return ["verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--samples", 60, *more]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("border", ["valid", "reflect"])
def test_right_output_passes(place: Place, border: str, dtype: str) -> None:
    assert place.infer("--border", border, "--output-dtype", dtype, "--roi", "1:19,2:,:23").exit_code == 0
    result = place.run(*words(place, "--json"))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    half_a_step = {"float32": 0.0, "float16": 2.0**-11, "uint8": 1 / 510}[dtype]
    assert 0 < report["worst"] <= report["allowed"] <= 1e-5 + half_a_step
    assert report["samples"] == 60
    assert abs(report["written"] - report["definition"]) == pytest.approx(report["worst"])


def test_prints_worst_error_and_where(place: Place) -> None:
    assert place.infer("--output-dtype", "uint8").exit_code == 0
    result = place.run(*words(place))
    assert result.exit_code == 0
    assert "out.h5: 60 voxels recomputed by sliding the window in float64" in result.stdout
    assert "allowed 1.97e-03 (half a step of uint8 included)" in result.stdout


@pytest.mark.parametrize("wrong", [1e-4, np.nan, np.inf])
def test_wrong_voxel_is_found(place: Place, wrong: float) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        prediction = file["prediction"]
        prediction[1] = prediction[1] + np.float32(wrong)
    sentence = place.refusal(*words(place))
    assert sentence.startswith("60 of 60 voxels are wrong; worst error ")
    assert "map 1: " in sentence
    assert place.run(*words(place, "--tolerance", "0.01")).exit_code == (0 if wrong == 1e-4 else 1)


def test_wrong_offset_is_found(place: Place) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        file["prediction"].attrs["offset"] = np.array([2, 2, 3])
    assert "voxels are wrong" in place.refusal(*words(place))


def test_nan_is_right_where_the_field_of_view_holds_one(place: Place) -> None:
    grey = np.random.default_rng(1).standard_normal((20, 23, 25)).astype(np.float32)
    grey[10, 12, 13] = np.inf
    place.write_volume(grey)
    assert place.infer("--allow-nan").exit_code == 0
    assert np.isnan(place.prediction()).any()
    assert place.run(*words(place, "--samples", 400)).exit_code == 0


def test_refuses_what_did_not_make_the_output(place: Place) -> None:
    assert place.infer().exit_code == 0
    assert "is not the volume" in _refusal_after(place, lambda: place.write_volume(np.zeros((20, 23, 25), np.uint8)))
    place.write_weights(conv2_bias=np.array([0.5, -0.5], np.float32))
    assert "predicted with other weights" in place.refusal(*words(place))
    place.write_network(normalise={"mean": 0.0, "std": 1.0})
    assert "predicted with other network" in place.refusal(*words(place))
    assert "tiny, which does not ship with znnpy" in place.refusal("verify", place.out, place.volume)


def _refusal_after(place: Place, change: object) -> str:
    """The refusal after a change to the volume, which is put back."""
    before = place.volume.read_bytes()
    assert callable(change)
    change()
    sentence = place.refusal(*words(place))
    place.volume.write_bytes(before)
    return sentence


def test_a_copy_of_the_volume_is_the_volume(place: Place) -> None:
    assert place.infer().exit_code == 0
    copy = place.folder / "copy.h5"
    copy.write_bytes(place.volume.read_bytes())
    assert place.run("verify", place.out, copy, *words(place)[3:]).exit_code == 0


def test_refuses_files_that_are_no_output(place: Place) -> None:
    assert "was not written by znnpy" in place.refusal("verify", place.volume, place.volume)
    assert "there is no file" in place.refusal("verify", place.out, place.volume)


def test_seed_chooses_the_voxels(place: Place) -> None:
    assert place.infer().exit_code == 0
    network = place.folder / "net.yaml"
    worst = [verify(place.out, place.volume, network=network, samples=5, seed=seed).where for seed in (1, 1, 2)]
    assert worst[0] == worst[1] != worst[2]


def test_zarr_output(place: Place) -> None:
    pytest.importorskip("zarr")
    out = place.folder / "out.zarr"
    assert place.run(*place.words[:-1], out).exit_code == 0
    network = place.folder / "net.yaml"
    report = verify(out, place.volume, network=network, samples=30)
    assert 0 < report.worst <= 1e-5


def test_shipped_network_is_found_by_its_name(place: Place) -> None:
    place.write_volume(np.random.default_rng(2).integers(0, 256, (33, 31, 30), np.uint8))
    assert place.run("infer", place.volume, "--out", place.out).exit_code == 0
    report = verify(place.out, place.volume, samples=9)
    assert 0 < report.worst <= 1e-5
