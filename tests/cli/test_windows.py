"""Networks in windows on the command line: planned, run, stopped and resumed, verified, and refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import znnpy
from tests.support import normed_unet
from znnpy.cli import main
from znnpy.errors import NoPlanError, PlanFileError, ShapeError
from znnpy.kernels.whole import whole
from znnpy.run.pipeline import Event
from znnpy.windows.definition import blended
from znnpy.windows.settings import Windows

WINDOW = ("--window", "8,8,12")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    normed_unet.written(tmp_path)
    return tmp_path


def run(*arguments: object, code: int = 0) -> str:
    """Run the command line; return what it prints on stdout, or on stderr if it is to fail."""
    result = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def infer(folder: Path, *arguments: object, code: int = 0) -> str:
    out = folder / "out.h5"
    return run(
        "infer", folder / "volume.npy", "--network", folder / "net.yaml", "--out", out, "--no-calibrate", *arguments,
        code=code,
    )  # fmt: skip


def prediction(folder: Path) -> npt.NDArray[Any]:
    with h5py.File(folder / "out.h5") as file:
        return np.array(file["prediction"])


def definition(folder: Path, windows: Windows) -> npt.NDArray[np.float64]:
    """Return the blended maps in float64."""
    trained = znnpy.load_network(folder / "net.yaml")
    mean, std = normed_unet.NORMALISE
    volume = (np.load(folder / "volume.npy").astype(np.float64) - mean) / std

    def computed(window: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        (found,) = whole(trained.network, trained.weights, window.transpose(1, 2, 3, 0))
        return found.transpose(3, 0, 1, 2)

    return blended(volume[None], computed, windows)


@pytest.mark.parametrize(
    ("arguments", "windows"),
    [
        ((), Windows((8, 8, 12))),
        (("--overlap", "0.25", "--blend", "constant"), Windows((8, 8, 12), (0.25,) * 3, "constant")),
        (("--overlap", "0.5,0.25,0", "--mirror", "z,x"), Windows((8, 8, 12), (0.5, 0.25, 0.0), mirror=(0, 2))),
        (("--windows-like", "nnunet"), Windows((8, 8, 12), rule="nnunet")),
        (("--sigma", "0.25"), Windows((8, 8, 12), sigma=0.25)),
    ],
)
def test_options_say_which_windows(folder: Path, arguments: tuple[str, ...], windows: Windows) -> None:
    infer(folder, *WINDOW, *arguments)
    wanted = definition(folder, windows)
    np.testing.assert_allclose(prediction(folder), wanted, atol=1e-5 * np.abs(wanted).max())
    report = run("verify", folder / "out.h5", folder / "volume.npy", "--network", folder / "net.yaml", "--samples", 50)
    assert "all windows around each" in report


def test_mirroring_that_a_file_names_is_switched_off(tmp_path: Path) -> None:
    normed_unet.written(tmp_path, windows={"size": [8, 8, 12], "mirror": ["z", "x"]})
    infer(tmp_path, "--mirror", "none")
    wanted = definition(tmp_path, Windows((8, 8, 12)))
    np.testing.assert_allclose(prediction(tmp_path), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"windows": None}, "does not state them"),
        ({"windows": {"size": [2**40] * 3}}, "computed again"),
        ({"result": {"kind": "above", "above": [0.1, 0.2]}}, "2 thresholds for 3 maps"),
        ({"windows": {"size": [8, 8, 12], "sigma": 1e200}}, "sigma"),
    ],
)
def test_outputs_that_state_odd_windows_are_not_verified(folder: Path, change: dict[str, Any], words: str) -> None:
    infer(folder, *WINDOW)
    with h5py.File(folder / "out.h5", "r+") as file:
        holders = [where for where in (file, file["prediction"]) if "job" in where.attrs]
        for where in holders:
            where.attrs["job"] = json.dumps({**json.loads(where.attrs["job"]), **change})
    assert holders
    error = run("verify", folder / "out.h5", folder / "volume.npy", "--network", folder / "net.yaml", code=1)
    assert words in error
    assert error.count("\n") == 1


def test_windows_of_the_network_file(tmp_path: Path) -> None:
    normed_unet.written(tmp_path, windows={"size": [8, 8, 12], "overlap": 0.25, "blend": "constant"})
    infer(tmp_path)
    wanted = definition(tmp_path, Windows((8, 8, 12), (0.25, 0.25, 0.25), "constant"))
    np.testing.assert_allclose(prediction(tmp_path), wanted, atol=1e-5 * np.abs(wanted).max())
    infer(tmp_path, "--overlap", "0.5", "--overwrite")
    other = definition(tmp_path, Windows((8, 8, 12), blend="constant"))
    np.testing.assert_allclose(prediction(tmp_path), other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("kind", ["labels", "softmax", "sigmoid", "above"])
def test_results_are_written_and_verified(folder: Path, kind: str) -> None:
    infer(folder, *WINDOW, "--output", kind, *(("--threshold", "0.1,0.2,-0.1") if kind == "above" else ()))
    maps = definition(folder, Windows((8, 8, 12)))
    found = prediction(folder)
    if kind in ("labels", "above"):
        wanted = maps.argmax(axis=0) if kind == "labels" else maps > np.array([0.1, 0.2, -0.1])[:, None, None, None]
        assert found.dtype == np.uint8
        assert (found != wanted).mean() < 1e-3
    run("verify", folder / "out.h5", folder / "volume.npy", "--network", folder / "net.yaml", "--samples", 50)
    with h5py.File(folder / "out.h5", "r+") as file:
        file["prediction"][...] = 1 - file["prediction"][...]
    error = run(
        "verify", folder / "out.h5", folder / "volume.npy", "--network", folder / "net.yaml", "--samples", 50, code=1
    )
    assert "voxels are wrong" in error


def test_a_region_is_that_of_the_whole(folder: Path) -> None:
    infer(folder, *WINDOW, "--roi", "3:9,:,11:25")
    wanted = definition(folder, Windows((8, 8, 12)))[:, 3:9, :, 11:25]
    np.testing.assert_allclose(prediction(folder), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("ensemble", "kind"),
    [("logits", "maps"), ("probabilities", "softmax"), ("probabilities", "labels"), ("probabilities", "above")],
)
def test_ensembles(folder: Path, tmp_path: Path, ensemble: str, kind: str) -> None:
    """Several networks with equal layers: their maps are averaged, or the probabilities that follow from them."""
    second = tmp_path / "second"
    second.mkdir()
    normed_unet.written(second, seed=9)
    result = ("--ensemble", ensemble, "--output", kind)  # above 0.5, which is the usual threshold
    infer(folder, "--network", second / "net.yaml", *WINDOW, "--mirror", "y", *result)
    windows = Windows((8, 8, 12), mirror=(1,))
    each = np.stack([definition(folder, windows), definition(second, windows)])
    if ensemble == "logits":
        wanted: npt.NDArray[Any] = each.mean(axis=0)
    elif kind == "above":
        wanted = (1 / (1 + np.exp(-each))).mean(axis=0) > 0.5
    else:
        wanted = (np.exp(each) / np.exp(each).sum(axis=1, keepdims=True)).mean(axis=0)
        wanted = wanted.argmax(axis=0) if kind == "labels" else wanted
    if wanted.dtype.kind == "f":
        np.testing.assert_allclose(prediction(folder), wanted, atol=1e-5 * np.abs(wanted).max())
    else:
        assert (prediction(folder) != wanted).mean() < 1e-3
    both = ("--network", folder / "net.yaml", "--network", second / "net.yaml")
    run("verify", folder / "out.h5", folder / "volume.npy", *both, "--samples", 50)
    error = run("verify", folder / "out.h5", folder / "volume.npy", *both[:2], "--samples", 50, code=1)
    assert "other network" in error


def test_ensembles_of_other_layers_and_without_windows(folder: Path) -> None:
    error = infer(folder, "--network", "fib25_unet", *WINDOW, code=1)
    assert "has other layers than" in error
    with pytest.raises(ShapeError, match="2 networks are an ensemble"):
        znnpy.infer(folder / "volume.npy", ["fib25_unet", "fib25_unet"], out=folder / "out.h5")


@pytest.mark.parametrize("place", [np.s_[12:14, 3:5, 20:24], np.s_[0:2, 17:, :3], np.s_[::22, ::19, ::24], np.s_[5:6]])
def test_windows_outside_a_mask_are_left_out(folder: Path, place: Any) -> None:
    mask = np.zeros(normed_unet.SIZE, np.uint8)
    mask[place] = 1
    np.save(folder / "mask.npy", mask)
    report = znnpy.infer(
        folder / "volume.npy", folder / "net.yaml", window=(8, 8, 12), mask=folder / "mask.npy", out=folder / "out.h5",
        overlap=0.25, calibrate=False,
    )  # fmt: skip
    wanted = np.where(mask, definition(folder, Windows((8, 8, 12), (0.25, 0.25, 0.25))), 0)
    np.testing.assert_allclose(prediction(folder), wanted, atol=1e-5 * np.abs(wanted).max())
    assert report.skipped
    run(
        "verify", folder / "out.h5", folder / "volume.npy", "--network", folder / "net.yaml", "--samples", 50, "--mask",
        folder / "mask.npy",
    )  # fmt: skip


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_stopped_run_goes_on_with_the_same_bytes(folder: Path, after: int) -> None:
    class Enough(Exception):
        pass

    def stop(event: Event) -> None:
        assert event.steps_done <= event.steps
        if event.steps_done >= after:
            raise Enough

    given: dict[str, Any] = {"window": (8, 8, 12), "calibrate": False, "out": folder / "out.h5"}
    volume, network = folder / "volume.npy", folder / "net.yaml"
    znnpy.infer(volume, network, **given)
    whole_run = prediction(folder)
    (folder / "out.h5").unlink()
    with pytest.raises(Enough):
        znnpy.infer(volume, network, **given, progress=stop)
    events: list[Event] = []
    znnpy.infer(volume, network, **given, resume=True, progress=events.append)
    np.testing.assert_array_equal(prediction(folder), whole_run)
    assert events[-1].steps_done == events[-1].steps
    assert events[0].voxels_done < events[-1].voxels_done


def test_a_plan_of_windows_is_saved_and_run(folder: Path) -> None:
    plan = folder / "plan.json"
    network = folder / "net.yaml"
    text = run("plan", network, "--volume", folder / "volume.npy", *WINDOW, "--out", plan, "--no-calibrate")
    assert "windows of 8x8x12" in text
    infer(folder, *WINDOW, "--plan", plan)
    first = prediction(folder)
    infer(folder, *WINDOW, "--overwrite")
    np.testing.assert_allclose(first, prediction(folder), atol=1e-5)
    with pytest.raises(PlanFileError, match="another network"):
        znnpy.infer(folder / "volume.npy", network, window=(8, 8, 8), plan=plan, out=folder / "other.h5")


def test_little_memory_divides_the_output(tmp_path: Path) -> None:
    """The plan of a volume with large sums fits into less memory with several parts, and then in half precision."""
    normed_unet.written(tmp_path)
    given: dict[str, Any] = {"window": (8, 32, 32), "shape": (200, 1000, 1200), "calibrate": False}
    ample = znnpy.plan(tmp_path / "net.yaml", ram="8G", **given)
    assert ample.main.sums is not None
    assert ample.main.sums.dtype == "float32"
    tight = znnpy.plan(tmp_path / "net.yaml", ram=ample.memory.peak - 2**22, **given)
    assert tight.main.sums is not None
    assert tight.main.sums.parts > ample.main.sums.parts
    assert tight.memory.peak < ample.memory.peak
    assert tight.main.choices[0].executions > ample.main.choices[0].executions


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --window, such as --window 128,128,128"),
        (("--window", "8,7,12"), "next larger one is 8x8x12"),
        ((*WINDOW, "--meaning", "whole"), "in windows"),
        ((*WINDOW, "--border", "reflect"), "leave out --border"),
        ((*WINDOW, "--patch", "8,8,8"), "leave out --patch"),
        ((*WINDOW, "--allow-nan"), "leave out --allow-nan"),
        ((*WINDOW, "--blend", "constant", "--sigma", "0.2"), "leave it out"),
        ((*WINDOW, "--sigma", "1e200"), "sigma of weights must be a share"),
        ((*WINDOW, "--output", "above", "--threshold", "0.1,0.2"), "2 thresholds for 3 maps"),
        ((*WINDOW, "--threshold", "0.5"), "--threshold has no effect on --output maps: leave it out, or give --output"),
        ((*WINDOW, "--output", "labels", "--threshold", "0.1"), "--threshold has no effect on --output labels"),
        (
            (*WINDOW, "--output", "labels", "--output-dtype", "float16"),
            "--output labels is written as uint8, and not as float16: leave out --output-dtype float16",
        ),
        ((*WINDOW, "--output", "above", "--output-dtype", "float16"), "--output above is written as uint8"),
    ],
)
def test_refusals(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    error = infer(folder, *arguments, code=1)
    assert words in error
    assert error.count("\n") == 1
    assert not (folder / "out.h5").exists()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_labels_are_uint8_where_the_usual_dtype_or_their_own_is_given(folder: Path, dtype: str) -> None:
    infer(folder, *WINDOW, "--output", "labels", "--output-dtype", dtype)
    assert prediction(folder).dtype == np.uint8


def test_plans_of_results_refuse_what_runs_refuse(folder: Path) -> None:
    given: dict[str, Any] = {"window": (8, 8, 12), "shape": (30, 30, 30), "calibrate": False}
    with pytest.raises(ShapeError, match="`threshold` has no effect on output='softmax': leave it out, or give"):
        znnpy.plan(folder / "net.yaml", output="softmax", threshold=0.5, **given)
    with pytest.raises(ShapeError, match="leave out output_dtype='float16', or write another `output`"):
        znnpy.plan(folder / "net.yaml", output="above", output_dtype="float16", **given)


def with_maps(folder: Path, maps: int) -> None:
    """Write a network that gives so many maps, and a small volume."""
    normed_unet.written(folder, layers=[{"name": "leave", "type": "conv", "kernel": 1, "out": maps}])
    np.save(folder / "volume.npy", np.load(folder / "volume.npy")[:9, :8, :14])


def test_labels_of_as_many_maps_as_a_byte_numbers(tmp_path: Path) -> None:
    with_maps(tmp_path, 256)
    infer(tmp_path, *WINDOW, "--output", "labels")
    wanted = definition(tmp_path, Windows((8, 8, 12))).argmax(axis=0)
    found = prediction(tmp_path)
    assert found.dtype == np.uint8
    assert (found != wanted).mean() < 1e-3
    assert wanted.max() > 127


@pytest.mark.parametrize("maps", [1, 257, 1000])
def test_labels_of_one_map_or_of_more_than_a_byte_numbers_are_refused(tmp_path: Path, maps: int) -> None:
    with_maps(tmp_path, maps)
    words = f"labels are the numbers of the largest of 2 to 256 maps, and the network gives {maps}; write its maps"
    error = infer(tmp_path, *WINDOW, "--output", "labels", code=1)
    assert words in error
    assert error.count("\n") == 1
    with pytest.raises(ShapeError, match=words):
        znnpy.load_network(tmp_path / "net.yaml")(np.load(tmp_path / "volume.npy"), window=(8, 8, 12), output="labels")


@pytest.mark.parametrize(("size", "overlap"), [(1000, 0.99), (2**40, 0.0)])
def test_more_windows_than_can_be_planned_are_refused(folder: Path, size: int, overlap: float) -> None:
    with pytest.raises(NoPlanError, match="more than the 10,000,000 that can be planned; give larger ones as"):
        znnpy.plan(folder / "net.yaml", window=(8, 8, 8), overlap=overlap, shape=(size,) * 3, calibrate=False)


def test_more_windows_of_a_network_file_than_can_be_planned_are_refused(tmp_path: Path) -> None:
    layers = [{"name": "leave", "type": "conv", "kernel": 1, "out": 2}]
    normed_unet.written(tmp_path, layers=layers, windows={"size": [1, 1, 1], "overlap": 0})
    error = run("plan", tmp_path / "net.yaml", "--shape", "100000,100000,100000", "--no-calibrate", code=1)
    assert "are 1,000,000,000,000,000 in a volume of 100000x100000x100000, more than the 10,000,000" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--overlap", "1"), "each below 1"),
        (("--overlap", "0.5,0.5"), "nor three"),
        (("--mirror", "z,z"), "one or several of the axes"),
        (("--mirror", "t"), "one or several of the axes"),
        (("--threshold", "nan"), "is not a number"),
        (("--blend", "median"), "median"),
    ],
)
def test_values_that_options_do_not_take(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in infer(folder, *WINDOW, *arguments, code=2)


def test_options_of_windows_are_refused_without_windows(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="leave out `overlap`"):
        znnpy.infer(np.zeros((30, 30, 30), np.uint8), overlap=0.5, out=tmp_path / "out.h5")
    with pytest.raises(ShapeError, match="blended results of windows"):
        znnpy.infer(np.zeros((30, 30, 30), np.uint8), output="softmax", out=tmp_path / "out.h5")
