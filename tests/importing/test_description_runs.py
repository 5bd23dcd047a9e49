"""Runs of networks that a description normalises by statistics of the whole volume, and the commands that take one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from click.testing import CliRunner

import znnpy
from tests.importing.descriptions import convolved, model, new, old, old_step, planar_model, step, written
from tests.importing.test_description import run
from znnpy.cli import main
from znnpy.errors import ResumeError, VerifyError, VolumeError
from znnpy.formats.network_writer import network_text
from znnpy.formats.network_yaml import parse
from znnpy.network import Normalise
from znnpy.network_files import read_network
from znnpy.normalisation import VolumeStatistics
from znnpy.verify import verify
from znnpy.volume import statistics
from znnpy.volume.array import ArrayVolume
from znnpy.volume.registry import open_volume
from znnpy.volume.statistics import normalise_of, statistics_of, statistics_record, with_statistics

SIZE = (21, 34, 45)
ZSCORE = [step("zero_mean_unit_variance", axes=["z", "y", "x"])]
PERCENTILES = [step("scale_range", axes=["z", "y", "x"], min_percentile=1, max_percentile=99.8)]
DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"]


def voxels(dtype: str = "uint16", channels: int = 1, seed: int = 0) -> npt.NDArray[Any]:
    values = np.random.default_rng(seed).normal(90, 25, (channels, *SIZE))
    return values.clip(0, 120 if dtype == "int8" else 250).astype(dtype)


def stored(volume: npt.NDArray[Any], folder: Path, suffix: str, chunk: tuple[int, int, int] = (8, 16, 5)) -> Path:
    """Return the path of a file of a volume (c, z, y, x), in chunks that do not divide it."""
    path = folder / f"volume{suffix}"
    match suffix:
        case ".npy":
            np.save(path, volume)
        case ".h5":
            with h5py.File(path, "w") as file:
                file.create_dataset("raw", data=volume, chunks=(1, *chunk), compression="gzip")
        case _:
            array = zarr.create_array(path, shape=volume.shape, dtype=volume.dtype, chunks=(1, *chunk))
            array[:] = volume
    return path


@pytest.mark.parametrize("jointly", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_numpy(dtype: str, jointly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "READ_VOXELS", 1000)
    volume = voxels(dtype, 2)
    volume[1] //= 2
    if dtype.startswith("f"):
        volume[0, 3, 4, :3] = np.nan, np.inf, -np.inf
        volume[:, 5] *= -1
    wide = volume.astype(np.float64)
    parts = [part[np.isfinite(part)] for part in ([wide, wide] if jointly else wide)]
    moments = statistics_of(ArrayVolume(volume), VolumeStatistics("mean_and_std", jointly))
    np.testing.assert_allclose(moments, [(part.mean(), part.std()) for part in parts], rtol=1e-12)
    for percentiles in ((0.0, 100.0), (1.0, 99.8), (33.3, 50.0)):
        found = statistics_of(ArrayVolume(volume), VolumeStatistics("percentiles", jointly, percentiles))
        np.testing.assert_allclose(found, [np.percentile(part, percentiles) for part in parts], rtol=1e-13)


@pytest.mark.parametrize("of", ["mean_and_std", "percentiles"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("suffix", [".npy", ".h5", ".zarr"])
def test_statistics_of_files_are_those_of_the_array(
    suffix: str, dtype: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "READ_VOXELS", 3000)
    volume, what = voxels(dtype, 2), VolumeStatistics(of, percentiles=(2.0, 98.0))  # type: ignore[arg-type]
    with open_volume(stored(volume, tmp_path, suffix)) as opened:
        sizes = [part.shape for part in statistics._parts(opened)]
        assert len(sizes) > 4
        assert sum(np.prod(size) for size in sizes) == volume.size
        found = statistics_of(opened, what)
    np.testing.assert_allclose(found, statistics_of(ArrayVolume(volume), what), rtol=1e-13)


def test_large_chunks_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "READ_VOXELS", 100)
    monkeypatch.setattr(statistics, "MOST_CHUNK", 4000)
    volume = voxels()
    with open_volume(stored(volume, tmp_path, ".h5", SIZE)) as opened:
        assert max(np.prod(part.shape) for part in statistics._parts(opened)) <= 4000
        mean, std = statistics_of(opened, VolumeStatistics("mean_and_std"))[0]
    np.testing.assert_allclose((mean, std), (volume.mean(), volume.std()), rtol=1e-12)


def test_a_constant_volume_becomes_zeros(tmp_path: Path) -> None:
    volume = np.full((1, *SIZE), 77, np.uint8)
    for index, pre in enumerate((ZSCORE, PERCENTILES)):
        folder = tmp_path / str(index)
        folder.mkdir()
        np.testing.assert_allclose(
            run(written(new(pre=pre), folder), volume), convolved(np.zeros(volume.shape)), atol=1e-6
        )


def test_a_volume_without_finite_voxels_is_refused() -> None:
    volume = ArrayVolume(np.full((2, 3, 4), np.nan, np.float32))
    for of in ("mean_and_std", "percentiles"):
        with pytest.raises(VolumeError, match="finite"):
            statistics_of(volume, VolumeStatistics(of))


def test_statistics_beyond_float32_are_refused() -> None:
    volume = ArrayVolume(np.array([[[1e200, -1e200]]]))
    for of in ("mean_and_std", "percentiles"):
        with pytest.raises(VolumeError, match="float32"):
            statistics_of(volume, VolumeStatistics(of))


def infer(volume: Path, network: Path, out: Path, **options: Any) -> Any:
    return znnpy.infer(volume, network=network, out=out, ram="3G", threads=1, calibrate=False, **options)


def read(path: Path) -> npt.NDArray[Any]:
    with h5py.File(path) as file:
        return np.asarray(file["prediction"])


@pytest.mark.parametrize("pre", [ZSCORE, PERCENTILES])
def test_a_run_normalises_by_the_whole_volume(pre: list[Any], tmp_path: Path) -> None:
    volume = voxels("float32")
    source, network = stored(volume, tmp_path, ".h5"), written(new(pre=pre), tmp_path)
    whole, part = tmp_path / "whole.h5", tmp_path / "part.h5"
    infer(source, network, whole)
    infer(source, network, part, roi="3:12,4:30,7:41")
    np.testing.assert_array_equal(read(whole), run(network, volume))
    np.testing.assert_array_equal(read(part), read(whole)[:, 3:12, 4:30, 7:41])
    report = verify(whole, volume=source, network=network, samples=50)
    assert report.worst < 1e-5


def test_statistics_are_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stored(voxels(), tmp_path, ".h5")
    network, out = written(new(pre=ZSCORE), tmp_path), tmp_path / "out.h5"

    class Ended(Exception):
        pass

    def interrupt(event: Any) -> None:
        if 0 < event.columns_done < event.columns:
            raise Ended

    with pytest.raises(Ended):
        infer(source, network, out, progress=interrupt, patch=(7, 12, 15))
    kept = json.loads((tmp_path / "out.h5.journal").read_bytes().splitlines()[1])["job"]["statistics"]
    assert kept["mean"] == [pytest.approx(voxels().mean())]

    def refuse(*_: object) -> None:
        raise AssertionError("statistics were computed again")

    monkeypatch.setattr(statistics, "statistics_of", refuse)
    infer(source, network, out, resume=True)
    infer(source, network, out, resume=True)  # of the complete output
    verify(out, volume=source, network=network, samples=20)
    monkeypatch.undo()
    infer(source, network, tmp_path / "again.h5", patch=(7, 12, 15))
    np.testing.assert_array_equal(read(out), read(tmp_path / "again.h5"))
    with h5py.File(out) as file:
        assert json.loads(file["prediction"].attrs["job"])["statistics"] == kept


def test_other_statistics_are_another_job(tmp_path: Path) -> None:
    source, out = stored(voxels(), tmp_path, ".h5"), tmp_path / "out.h5"
    infer(source, written(new(pre=ZSCORE), tmp_path), out)
    other = written(new(pre=PERCENTILES), tmp_path)
    with pytest.raises(ResumeError):
        infer(source, other, out, resume=True)
    with pytest.raises(VerifyError):
        verify(out, volume=source, network=other, samples=5)


def test_an_output_without_its_statistics_is_not_verified(tmp_path: Path) -> None:
    source, out = stored(voxels(), tmp_path, ".h5"), tmp_path / "out.h5"
    network = written(new(pre=ZSCORE), tmp_path)
    infer(source, network, out)
    with h5py.File(out, "r+") as file:
        attributes = file["prediction"].attrs
        job = json.loads(attributes["job"])
        attributes["job"] = json.dumps({**job, "statistics": {**job["statistics"], "std": [float("inf")]}})
    with pytest.raises(VerifyError, match="statistics"):
        verify(out, volume=source, network=network, samples=5)


@pytest.mark.parametrize(
    "changed",
    [
        {"mean": [1.0, 2.0]},
        {"mean": "1"},
        {"std": [0.0]},
        {"std": [-1.0]},
        {"mean": [True]},
        {"jointly": True},
        {"of": "x"},
    ],
)
def test_damaged_records_are_not_used(changed: dict[str, Any], tmp_path: Path) -> None:
    network = read_network(written(new(pre=ZSCORE), tmp_path)).network
    made = with_statistics(network, ArrayVolume(voxels()))
    record = statistics_record(made)["statistics"]
    assert normalise_of(network, record) == made.normalise
    assert normalise_of(network, {**record, **changed}) is None
    assert normalise_of(network, None) is None


def test_a_session_normalises_each_array_by_itself(tmp_path: Path) -> None:
    path = written(new(pre=ZSCORE), tmp_path)
    first, second = voxels(seed=1), voxels(seed=2) // 2
    for shape in (first.shape, None):
        options: dict[str, Any] = {"dtype": "uint16", "ram": "3G", "threads": 1, "calibrate": False}
        with znnpy.load_network(path).session(shape, **options) as session:
            for volume in (first, second, first):
                np.testing.assert_array_equal(session(volume), run(path, volume))


def test_a_plan_needs_no_statistics_and_fits_a_run(tmp_path: Path) -> None:
    source, network = stored(voxels(), tmp_path, ".h5"), written(new(pre=ZSCORE), tmp_path)
    plan = znnpy.plan(network, volume=source, ram="3G", threads=1, calibrate=False)
    out = tmp_path / "out.h5"
    znnpy.infer(source, network=network, out=out, plan=plan, calibrate=False)
    assert out.exists()


@pytest.mark.parametrize(
    "what",
    [
        VolumeStatistics("mean_and_std", jointly=True),
        VolumeStatistics("percentiles", percentiles=(1.0, 99.8), epsilon=1e-3),
    ],
)
def test_statistics_can_be_written_into_a_network_file(what: VolumeStatistics, tmp_path: Path) -> None:
    network = replace(read_network(written(new(), tmp_path)).network, statistics=what)
    again = parse(network_text(network, None), "net").network
    assert again.statistics == what
    assert again.sha256 == network.sha256
    assert replace(network, normalise=Normalise((1.0,), (2.0,))).sha256 == network.sha256


@pytest.mark.parametrize("text", ["{of_volume: median}", "{of_volume: percentiles, percentiles: [9, 1]}"])
def test_other_statistics_in_a_network_file_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(f"input_channels: 1\nnormalise: {text}\nlayers: [{{type: conv, kernel: 3, out: 1}}]\n")
    with pytest.raises(znnpy.NetworkFileError, match="normalise"):
        read_network(path)


def command(*words: object) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_take_a_description(tmp_path: Path) -> None:
    source, out = stored(voxels(), tmp_path, ".h5"), tmp_path / "out.h5"
    network = written(new(pre=ZSCORE, post=[step("sigmoid")]), tmp_path)
    limits = ("--ram", "3G", "--threads", 1, "--no-calibrate")
    command("plan", network, "--volume", source, *limits)
    assert "mean and standard deviation of each channel" in command("graph", network)
    command("import", tmp_path, "--out", tmp_path / "net.yaml")
    command("infer", source, "--network", tmp_path, "--out", out, *limits)
    command("verify", out, source, "--network", network)
    np.testing.assert_array_equal(read(out), run(tmp_path / "net.yaml", voxels()))


@pytest.mark.torch  # and with it onnxruntime
@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_the_arrays_of_a_description_are_compared(version: str, tmp_path: Path) -> None:
    given = voxels()[None, :, :16, :32, :32].astype(np.float32)
    expected = 1 / (1 + np.exp(-convolved((given[0] - given.mean()) / (given.std() + 1e-6))))[None]
    np.save(tmp_path / "in.npy", given)
    np.save(tmp_path / "out.npy", expected.astype(np.float32))
    if version == "0.4":
        pre, post = [old_step("zero_mean_unit_variance", mode="per_sample", axes="zyx")], [old_step("sigmoid")]
        raw = old(pre=pre, post=post, test_inputs=["in.npy"], test_outputs=["out.npy"])
    else:
        raw = new(pre=ZSCORE, post=[step("sigmoid")])
        raw["inputs"][0]["test_tensor"] = {"source": "in.npy"}
        raw["outputs"][0]["test_tensor"] = {"source": "out.npy"}
    path = written(raw, tmp_path)
    said = json.loads(command("import", path, "--check", "--json"))["check"]
    assert [one["tested"] for one in said] == [False, True]
    assert "arrays of the description" in command("import", path, "--check")
    np.save(tmp_path / "out.npy", expected.astype(np.float32) + 0.01)
    result = CliRunner().invoke(main, ["import", str(path), "--check"])
    assert result.exit_code != 0
    assert "the import is wrong" in result.output


@pytest.mark.torch
def test_a_check_covers_several_channels_last_and_images(tmp_path: Path) -> None:
    pre = [step("scale_linear", gain=[0.5, -2.0], axis="channel"), step("clip", min=-1.0)]
    for index, (axes, maps, net) in enumerate((("bzyxc", 2, model("bzyxc", 2)), ("bcyx", 1, planar_model()))):
        folder = tmp_path / str(index)
        folder.mkdir()
        raw = new(axes=axes, maps=maps, pre=pre if maps == 2 else pre[1:], post=[step("softmax")])
        (one,) = json.loads(command("import", written(raw, folder, net), "--check", "--json"))["check"]
        assert one["largest"] < 1e-5
