"""`znnpy verify`: finds a wrong voxel, tells it apart from rounding, refuses what did not make the output."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from place import Place

from znnpy.network import Conv, Network
from znnpy.verify import TOLERANCES, _positions, verify


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


@pytest.mark.parametrize(
    ("precision", "passes", "fails"),
    [("fp32", 5e-6, 2e-5), ("tf32", 8e-3, 1.2e-2), ("fp16", 4e-2, 6e-2), (None, 5e-6, 2e-5)],
)
def test_as_much_is_allowed_as_the_precision_may_err(
    place: Place, precision: str | None, passes: float, fails: float
) -> None:
    """As the output says it was made in, or fp32 where an older version did not say; `--tolerance` overrules it."""
    for wrong, code in ((passes, 0), (fails, 1)):
        assert place.infer("--overwrite", "--device", "cpu").exit_code == 0
        with h5py.File(place.out, "r+") as file:
            prediction = file["prediction"]
            prediction[0] = prediction[0] + np.float32(wrong)
            del prediction.attrs["precision"]
            if precision is not None:
                prediction.attrs["precision"] = precision
        result = place.run(*words(place))
        assert result.exit_code == code, result.stderr
        assert ((result.stdout + result.stderr).count(f"(predicted in {precision})")) == (precision in ("tf32", "fp16"))
        assert place.run(*words(place, "--tolerance", 10 * fails)).exit_code == 0


def test_the_help_says_what_is_allowed(place: Place) -> None:
    said = " ".join(place.run("verify", "--help").stdout.split())
    fp32, tf32, fp16 = (f"{TOLERANCES[word]:.0e}".replace("e-0", "e-") for word in ("fp32", "tf32", "fp16"))
    assert f"[default: {fp32}; {tf32} where predicted in tf32, {fp16} in fp16]" in said


def test_a_precision_that_is_none_is_refused(place: Place) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        file["prediction"].attrs["precision"] = "int4"
    assert "says it was predicted in 'int4', which this version does not know" in place.refusal(*words(place))


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


LARGE = 1e5


def large_values(folder: Path) -> Place:
    """An output of values around 1e5 in map 0 and around 1 in map 1: one convolution, no activation."""
    place = Place.furnish(folder, Network("large", 1, (Conv((5, 5, 5), 8, "relu"), Conv((3, 3, 3), 2))))
    rng = np.random.default_rng(8)
    weight = rng.standard_normal((2, 8, 3, 3, 3)).astype(np.float32) / 15
    weight[0] *= LARGE
    place.write_weights(conv1_weight=weight)
    assert place.infer().exit_code == 0
    return place


def test_large_values_round_in_proportion(tmp_path: Path) -> None:
    place = large_values(tmp_path)
    report = json.loads(place.run(*words(place, "--json")).stdout)
    assert report["magnitude"] > LARGE / 10 if report["channel"] == 0 else report["magnitude"] < 100
    assert report["allowed"] == pytest.approx(1e-5 * report["magnitude"])
    result = place.run(*words(place, "--tolerance", "1e-9"))
    assert result.exit_code == 1
    assert "(1e-09 times " in result.stderr
    assert ", the size of the values)" in result.stderr


@pytest.mark.parametrize("channel", [0, 1])
def test_wrong_large_values_are_found(tmp_path: Path, channel: int) -> None:
    """An error a ten-thousandth of the values of its own map, however large those of the other are."""
    place = large_values(tmp_path)
    with h5py.File(place.out, "r+") as file:
        prediction = file["prediction"]
        prediction[channel] += 1e-3 * prediction[channel].std()
    sentence = place.refusal(*words(place))
    assert sentence.split()[0] == "60"
    assert f"map {channel}: " in sentence


def test_more_samples_than_voxels_is_each_voxel_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.infer("--roi", "0:8,0:11,0:9").exit_code == 0
    network = place.folder / "net.yaml"
    assert verify(place.out, place.volume, network=network, samples=10**8).samples == 3 * 4 * 3
    monkeypatch.setattr("znnpy.verify.BLOCK", 7)
    with h5py.File(place.out, "r+") as file:
        file["prediction"][1, 2, 3, 2] += 1e-3
        file["prediction"][0, 0, 1, 0] += 1e-2
    assert "2 of 36 voxels are wrong; worst error 1.00e-02 at (z, y, x) = (0, 1, 0), map 0" in place.refusal(
        "verify", place.out, place.volume, "--network", network, "--samples", 99
    )


def test_samples_are_different_voxels_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("znnpy.verify.BLOCK", 64)
    size = (5, 7, 11)
    for samples in (1, 64, 65, 300, 385):
        blocks = list(_positions(size, samples, seed=4))
        assert all(len(block) <= 64 for block in blocks)
        flat = np.ravel_multi_index(tuple(np.concatenate(blocks).T), size)
        assert len(set(flat.tolist())) == len(flat) == samples
        assert (np.diff(flat) > 0).all()
    drawn = np.concatenate([np.concatenate(list(_positions(size, 40, seed))) for seed in range(300)])
    times = np.bincount(np.ravel_multi_index(tuple(drawn.T), size), minlength=385)
    assert times.sum() == 40 * 300
    assert 8 < times.min() <= times.max() < 60  # about 31 each


def test_words_that_are_none(place: Place) -> None:
    for tolerance in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a tolerance must be positive and finite"):
            verify(place.out, place.volume, tolerance=tolerance)
    with pytest.raises(ValueError, match="0 samples show nothing"):
        verify(place.out, place.volume, samples=0)
