"""`znnpy verify`: finds a wrong voxel, tells it apart from rounding, refuses what did not make the output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorstore

from tests.support.cli import Place
from tests.support.messages import assert_holds
from znnpy.network import Conv, Network
from znnpy.verify import TOLERANCES, _positions, verify

pytestmark = pytest.mark.slow


def arguments(place: Place, *more: object) -> list[object]:
    return ["verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--samples", 60, *more]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("border", ["valid", "reflect"])
def test_right_output_passes(place: Place, border: str, dtype: str) -> None:
    assert place.infer("--border", border, "--output-dtype", dtype, "--roi", "1:19,2:,:23").exit_code == 0
    result = place.run(*arguments(place, "--json"))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    half_a_step = {"float32": 0.0, "float16": 2.0**-11, "uint8": 1 / 510}[dtype]
    assert 0 < report["worst"] <= report["allowed"] <= 1e-5 + half_a_step
    assert report["samples"] == 60
    assert abs(report["written"] - report["definition"]) == pytest.approx(report["worst"])


def test_worst_error_is_printed_with_its_position(place: Place) -> None:
    assert place.infer("--output-dtype", "uint8").exit_code == 0
    result = place.run(*arguments(place))
    assert result.exit_code == 0
    assert "out.h5: 60 voxels recomputed by sliding the window in float64" in result.stdout
    assert "allowed 1.97e-03 (the tolerance of fp32; half a step of uint8 included)" in result.stdout


@pytest.mark.parametrize("wrong", [1e-4, np.nan, np.inf])
def test_wrong_voxel_is_found(place: Place, wrong: float) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        prediction = file["prediction"]
        prediction[1] = prediction[1] + np.float32(wrong)
    sentence = place.refusal(*arguments(place))
    assert sentence.startswith("60 of 60 voxels are wrong; worst error ")
    assert "map 1: " in sentence
    assert place.run(*arguments(place, "--tolerance", "0.01")).exit_code == (0 if wrong == 1e-4 else 1)


def add_everywhere(place: Place, wrong: float, **attributes: object) -> None:
    """Predict anew, then add `wrong` to all voxels of map 0 and set attributes of the prediction."""
    assert place.infer("--overwrite", "--device", "cpu").exit_code == 0
    with h5py.File(place.out, "r+") as file:
        prediction = file["prediction"]
        prediction[0] = prediction[0] + np.float32(wrong)
        for name, value in attributes.items():
            prediction.attrs[name] = value


@pytest.mark.parametrize(("precision", "passes", "fails"), [("fp32", 5e-6, 2e-5), ("tf32", 8e-3, 1.2e-2)])
def test_tolerance_follows_the_requested_precision(place: Place, precision: str, passes: float, fails: float) -> None:
    """The tolerance does not depend on the output; `--tolerance` sets another, and the result names it."""
    for wrong, code in ((passes, 0), (fails, 1)):
        add_everywhere(place, wrong)
        result = place.run(*arguments(place, "--precision", precision))
        assert result.exit_code == code, result.stderr
        assert f"(the tolerance of {precision})" in result.stdout + result.stderr
        result = place.run(*arguments(place, "--tolerance", 10 * fails))
        assert result.exit_code == 0
        assert "(the tolerance asked for)" in result.stdout


@pytest.mark.parametrize(("said", "wrong"), [("tf32", 8e-3), ("fp16", 4e-2)])
def test_precision_named_by_the_output_alone_raises_no_tolerance(place: Place, said: str, wrong: float) -> None:
    add_everywhere(place, wrong, precision=said)
    sentence = place.refusal(*arguments(place))
    assert sentence.startswith("60 of 60 voxels are wrong; worst error ")
    assert "allowed 1.00e-05 (the tolerance of fp32)" in sentence
    assert f"the output says that it was predicted in {said}: if it was, allow " in sentence
    assert sentence.endswith(f" with --precision {said}")
    result = place.run(*arguments(place, "--precision", said, "--json"))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["precision"], report["predicted_in"], report["tolerance"]) == (said, said, TOLERANCES[said])


def test_help_states_the_tolerances(place: Place) -> None:
    said = " ".join(place.run("verify", "--help").stdout.split())
    fp32, split, tf32, half, bf16 = (
        f"{TOLERANCES[precision]:.0e}".replace("e-0", "e-") for precision in ("fp32", "bf16x2", "tf32", "fp16", "bf16")
    )
    assert half == bf16
    assert f"allowed: {fp32}, {split} in bf16x2, {tf32} in tf32, {half} in fp16 and bf16 [default: fp32, " in said


def test_unknown_precision_is_refused(place: Place) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        file["prediction"].attrs["precision"] = "int4"
    assert "says it was predicted in 'int4', which this version does not know" in place.refusal(*arguments(place))


def test_wrong_offset_is_found(place: Place) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        file["prediction"].attrs["voxel_offset"] = np.array([2, 2, 3])
    sentence = place.refusal(*arguments(place))
    assert_holds(sentence, "out.h5 has offset (2, 2, 3), and (2, 3, 3) follows", "border valid")


def replace_prediction(place: Place, voxels: np.ndarray[Any, Any]) -> None:
    """Store `voxels` as the prediction, with the attributes that it had."""
    with h5py.File(place.out, "r+") as file:
        attributes = dict(file["prediction"].attrs)
        del file["prediction"]
        file["prediction"] = voxels
        file["prediction"].attrs.update(attributes)


@pytest.mark.parametrize(
    "change",
    [
        lambda voxels: voxels[:, :7],
        lambda voxels: voxels[:, :, :, 1:],
        lambda voxels: voxels[0],
        lambda voxels: np.concatenate([voxels, voxels], axis=1),
        lambda voxels: np.concatenate([voxels, voxels], axis=0),
        lambda voxels: voxels.astype(np.float64),
    ],
    ids=["half its planes", "a row less", "one map", "grown", "more maps", "another dtype"],
)
def test_shape_and_dtype_follow_from_the_job(place: Place, change: Callable[[Any], Any]) -> None:
    """An output that was cut or grown does not pass, however right its voxels are."""
    assert place.infer("--border", "reflect", "--roi", "0:15,2:,:23").exit_code == 0
    assert place.run(*arguments(place)).exit_code == 0
    replace_prediction(place, change(place.prediction()))
    sentence = place.refusal(*arguments(place))
    assert_holds(sentence, "follows from region 0:15,2:23,0:23", "border reflect", "field of view")


def test_result_names_the_predicted_part(place: Place) -> None:
    """A cut output whose attributes were made to fit is a right output of that part, and says so."""
    assert place.infer("--roi", "0:15,2:,:23").exit_code == 0
    assert "the output covers part 0:15,2:23,0:23 of the volume, border valid" in place.run(*arguments(place)).stdout
    assert place.infer("--overwrite").exit_code == 0
    assert "the output covers the whole volume, border valid" in place.run(*arguments(place)).stdout


def test_roi_outside_the_volume_is_refused(place: Place) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        attributes = file["prediction"].attrs
        attributes["job"] = attributes["job"].replace('"roi": ""', '"roi": "0:999,0:5,0:5"')
    sentence = place.refusal(*arguments(place))
    assert "names a region that cannot have been predicted" in sentence
    assert "0:999 of 0:20" in sentence


def test_nan_passes_if_the_field_of_view_holds_one(place: Place) -> None:
    grey = np.random.default_rng(1).standard_normal((20, 23, 25)).astype(np.float32)
    grey[10, 12, 13] = np.inf
    place.write_volume(grey)
    assert place.infer("--allow-nan").exit_code == 0
    assert np.isnan(place.prediction()).any()
    assert place.run(*arguments(place, "--samples", 400)).exit_code == 0


def test_other_inputs_than_those_of_the_output_are_refused(place: Place) -> None:
    assert place.infer().exit_code == 0
    assert "is not the volume" in _refusal_after(place, lambda: place.write_volume(np.zeros((20, 23, 25), np.uint8)))
    place.write_weights(conv2_bias=np.array([0.5, -0.5], np.float32))
    assert "predicted with other weights" in place.refusal(*arguments(place))
    place.write_network(normalise={"mean": 0.0, "std": 1.0})
    assert "predicted with other network" in place.refusal(*arguments(place))
    assert "tiny, which does not ship with znnpy" in place.refusal("verify", place.out, place.volume)


def _refusal_after(place: Place, change: object) -> str:
    """Change the volume, return the refusal, and restore the volume."""
    before = place.volume.read_bytes()
    assert callable(change)
    change()
    sentence = place.refusal(*arguments(place))
    place.volume.write_bytes(before)
    return sentence


def test_copy_of_the_volume_is_accepted(place: Place) -> None:
    assert place.infer().exit_code == 0
    copy = place.folder / "copy.h5"
    copy.write_bytes(place.volume.read_bytes())
    assert place.run("verify", place.out, copy, *arguments(place)[3:]).exit_code == 0


def test_files_other_than_outputs_are_refused(place: Place) -> None:
    assert "has no dataset 'prediction'; it holds raw" in place.refusal("verify", place.volume, place.volume)
    assert "there is no file" in place.refusal("verify", place.out, place.volume)
    array = place.folder / "array.npy"
    np.save(array, np.zeros((5, 6, 7), np.float32))
    assert "was not written by znnpy" in place.refusal("verify", array, place.volume)
    place.write_volume(np.zeros((5, 6, 7), np.uint8), "other.h5", prediction=np.zeros((5, 6, 7), np.float32))
    assert "was not written by znnpy" in place.refusal("verify", place.folder / "other.h5", place.volume)


def test_other_datasets_beside_the_prediction_are_ignored(place: Place) -> None:
    assert place.infer().exit_code == 0
    with h5py.File(place.out, "r+") as file:
        file["labels"] = np.zeros((5, 6, 7), np.uint8)
    assert place.run(*arguments(place)).exit_code == 0


def test_dataset_option_names_the_voxels_of_the_volume(place: Place) -> None:
    """The default is the dataset that was predicted; `--dataset` names the same voxels under another name."""
    with h5py.File(place.volume, "r+") as file:
        file["other"] = np.zeros((20, 23, 25), np.uint8)
    assert place.infer("--dataset", "raw").exit_code == 0
    assert place.run(*arguments(place)).exit_code == 0
    assert "is not the volume" in place.refusal(*arguments(place, "--dataset", "other"))
    with h5py.File(place.volume, "r+") as file:
        file.move("raw", "grey")
    assert "has no dataset 'raw'" in place.refusal(*arguments(place))
    assert place.run(*arguments(place, "--dataset", "grey")).exit_code == 0


def test_seed_chooses_the_voxels(place: Place) -> None:
    assert place.infer().exit_code == 0
    network = place.folder / "net.yaml"
    worst = [verify(place.out, place.volume, network=network, samples=5, seed=seed).where for seed in (1, 1, 2)]
    assert worst[0] == worst[1] != worst[2]


@pytest.mark.parametrize(
    "words",
    [
        ["out.zarr"],
        ["zarr2://out.zarr"],
        ["out.zarr", "--sharded"],
        ["out.n5"],
        ["out.precomputed"],
        ["precomputed://out"],
        ["out.zarr", "--multiscale", "2"],
    ],
    ids=" ".join,
)
def test_outputs_of_every_chunked_format_pass(place: Place, words: list[str]) -> None:
    prefix, mark, name = words[0].rpartition("://")
    out = place.folder / name
    result = place.run(*place.arguments[:-1], f"{prefix}{mark}{out}", *words[1:])
    assert result.exit_code == 0, result.output
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
    """Make an output with values around 1e5 in map 0 and around 1 in map 1: one convolution, no activation."""
    place = Place.furnish(folder, Network("large", 1, (Conv((5, 5, 5), 8, "relu"), Conv((3, 3, 3), 2))))
    rng = np.random.default_rng(8)
    weight = rng.standard_normal((2, 8, 3, 3, 3)).astype(np.float32) / 15
    weight[0] *= LARGE
    place.write_weights(conv1_weight=weight)
    assert place.infer().exit_code == 0
    return place


def test_large_values_round_in_proportion(tmp_path: Path) -> None:
    place = large_values(tmp_path)
    report = json.loads(place.run(*arguments(place, "--json")).stdout)
    assert report["magnitude"] > LARGE / 10 if report["channel"] == 0 else report["magnitude"] < 100
    assert report["allowed"] == pytest.approx(1e-5 * report["magnitude"])
    result = place.run(*arguments(place, "--tolerance", "1e-9"))
    assert result.exit_code == 1
    assert "(1e-09 times " in result.stderr
    assert ", the size of the values; the tolerance asked for)" in result.stderr


@pytest.mark.parametrize("channel", [0, 1])
def test_wrong_large_values_are_found(tmp_path: Path, channel: int) -> None:
    """An error a ten-thousandth of the values of its own map, however large those of the other are."""
    place = large_values(tmp_path)
    with h5py.File(place.out, "r+") as file:
        prediction = file["prediction"]
        prediction[channel] += 1e-3 * prediction[channel].std()
    sentence = place.refusal(*arguments(place))
    assert sentence.split()[0] == "60"
    assert f"map {channel}: " in sentence


def test_more_samples_than_voxels_check_each_voxel_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.infer("--roi", "0:8,0:11,0:9").exit_code == 0
    network = place.folder / "net.yaml"
    assert verify(place.out, place.volume, network=network, samples=10**8).samples == 3 * 4 * 3
    monkeypatch.setattr("znnpy.verify.BLOCK", 7)
    with h5py.File(place.out, "r+") as file:
        file["prediction"][1, 2, 3, 2] += 1e-3
        file["prediction"][0, 0, 1, 0] += 1e-2
    sentence = place.refusal("verify", place.out, place.volume, "--network", network, "--samples", 99)
    assert_holds(sentence, "2 of 36 voxels are wrong", "1.00e-02 at (z, y, x) = (0, 1, 0), map 0")


def test_samples_are_distinct_and_spread_over_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_invalid_options_are_usage_errors(place: Place) -> None:
    for tolerance in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a tolerance must be positive and finite"):
            verify(place.out, place.volume, tolerance=tolerance)
    with pytest.raises(ValueError, match="there is no precision 'int4'; choose one of fp32, tf32, fp16"):
        verify(place.out, place.volume, precision="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a precision implies a tolerance: give one of them"):
        verify(place.out, place.volume, precision="tf32", tolerance=1e-3)
    assert place.run(*arguments(place, "--precision", "tf32", "--tolerance", 1e-3)).exit_code == 2
    with pytest.raises(ValueError, match="0 samples show nothing"):
        verify(place.out, place.volume, samples=0)


def test_coarser_resolution_of_a_precomputed_volume_is_verified(place: Place) -> None:
    volume = place.folder / "volume.precomputed"
    for level, size in enumerate(((40, 46, 50), (20, 23, 25))):
        spec: Any = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": f"{volume}/"},
            "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
            "scale_metadata": {
                "size": size[::-1],
                "chunk_size": [16, 16, 16],
                "resolution": [2**level] * 3,
                "encoding": "raw",
            },
        }
        voxels = np.random.default_rng(level).integers(0, 256, (*size[::-1], 1), np.uint8)
        tensorstore.open(spec, create=True).result()[...] = voxels
    network = ("--network", place.folder / "net.yaml")
    done = place.run("infer", volume, "--scale", "1", "--out", place.out, *network)
    assert done.exit_code == 0, done.output
    checked = place.run("verify", place.out, volume, *network, "--samples", "50")
    assert checked.exit_code == 0, checked.output
