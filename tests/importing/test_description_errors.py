"""Model descriptions of bioimage.io that are refused, each with a sentence that names what is wrong."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.importing.descriptions import axes_of, model, new, old, old_step, planar_model, step, written
from znnpy.errors import NetworkFileError
from znnpy.importing.finish import Wishes
from znnpy.network import Normalise
from znnpy.network_files import read_model, read_network

FOLDER_OF_OTHERS = "others"


def refused(path: Path, *words: str, wishes: Wishes | None = None) -> None:
    """Fail unless a file is refused in one sentence with these words, by both ways to read it."""
    with pytest.raises(NetworkFileError) as caught:
        read_model(path, wishes or Wishes())
    said = str(caught.value)
    for word in words:
        assert word in said
    assert len(said) < 900
    assert "\n" not in said
    if wishes is None:
        with pytest.raises(NetworkFileError, match=re.escape(words[0])):
            read_network(path)


PRE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "binarize": (step("binarize", threshold=0.5), ("binarize", "no layer")),
    "custom": (step("custom", threshold=0.5), ("custom", "no code")),
    "unknown": (step("scale_lineal", gain=2), ("scale_lineal", "scale_linear")),
    "no word": ({"kwargs": {}}, ("preprocessing 0", "id")),
    "not a mapping": ("sigmoid", ("preprocessing 0", "'sigmoid'")),  # type: ignore[dict-item]
    "parameter": (step("scale_linear", gian=2), ("gian", "gain")),
    "NaN": (step("scale_linear", gain=float("nan")), ("gain", "finite")),
    "a text": (step("clip", min="low"), ("min", "'low'")),
    "empty clip": (step("clip", min=2, max=1), ("min is 2 and max is 1",)),
    "std 0": (step("fixed_zero_mean_unit_variance", mean=1, std=0), ("std", "above 0")),
    "lengths": (step("fixed_zero_mean_unit_variance", mean=[1, 2, 3], std=[1, 2], axis="channel"), ("3", "2")),
    "along z": (step("scale_linear", gain=[1, 2], axis="z"), ("'z'", "channels")),
    "no such axis": (step("scale_linear", gain=[1], axis="time"), ("'time'", "lacks")),
    "many factors": (step("scale_linear", gain=[1, -2, 3], axis="channel"), ("3 values", "1 channels")),
    "dtype": (step("ensure_dtype", dtype="uint8"), ("'uint8'", "float32")),
    "percentile clip": (step("clip", min_percentile=1), ("percentiles", "scale_range")),
    "per data set": (step("zero_mean_unit_variance", axes=["batch", "z", "y", "x"]), ("data set", "fixed")),
    "per plane": (step("zero_mean_unit_variance", axes=["y", "x"]), ("along z", "whole volume")),
    "reference": (step("scale_range", axes=["z", "y", "x"], reference_tensor="raw"), ("'raw'", "reference_tensor")),
    "percentiles": (step("scale_range", min_percentile=60, max_percentile=40), ("60", "40")),
    "eps": (step("zero_mean_unit_variance", eps=0), ("eps", "0.1")),
}


@pytest.mark.parametrize("name", PRE)
def test_a_step_that_cannot_be_computed_is_refused(name: str, tmp_path: Path) -> None:
    entry, words = PRE[name]
    raw = new(pre=[entry])
    path = written(raw, tmp_path)
    if name == "NaN":
        path.write_text(path.read_text().replace("NaN", ".nan"))
    refused(path, *words)


def test_statistics_of_a_data_set_are_refused_in_the_old_format(tmp_path: Path) -> None:
    raw = old(pre=[old_step("zero_mean_unit_variance", mode="per_dataset", axes="zyx")])
    refused(written(raw, tmp_path), "data set", "mode fixed")


def test_statistics_behind_another_step_are_refused(tmp_path: Path) -> None:
    raw = new(pre=[step("scale_linear", gain=2.0), step("zero_mean_unit_variance")])
    refused(written(raw, tmp_path), "preprocessing 1", "put it first")


def test_statistics_of_each_image_are_refused(tmp_path: Path) -> None:
    raw = new(axes="bcyx", pre=[step("zero_mean_unit_variance", axes=["y", "x"])])
    refused(written(raw, tmp_path, planar_model()), "each image", "fixed values")


@pytest.mark.parametrize(
    "word",
    ["binarize", "zero_mean_unit_variance", "scale_range", "scale_mean_variance", "stardist_postprocessing", "custom"],
)
def test_postprocessing_of_a_whole_output_is_refused_by_name(word: str, tmp_path: Path) -> None:
    refused(written(new(post=[step(word)]), tmp_path), f"postprocessing of y 0 ({word})", "delete the step")


def test_two_normalisations_are_refused(tmp_path: Path) -> None:
    path = written(new(pre=[step("scale_linear", gain=2.0)]), tmp_path)
    refused(path, "leave out", wishes=Wishes(normalise=Normalise((1.0,), (2.0,))))


def test_a_normalisation_replaces_statistics_of_each_image(tmp_path: Path) -> None:
    given, pre = Normalise((1.0,), (2.0,)), [step("zero_mean_unit_variance", axes=["y", "x"])]
    made = read_model(written(new(axes="bcyx", pre=pre), tmp_path, planar_model()), Wishes(normalise=given))
    assert made.network.normalise == given


def test_a_test_array_that_is_missing_matters_for_a_check_alone(tmp_path: Path) -> None:
    raw = old(test_inputs=["in.npy"], test_outputs=["https://zenodo.org/out.npy"])
    made = read_model(written(raw, tmp_path), Wishes())
    assert made.tested is not None
    with pytest.raises(NetworkFileError, match=r"in\.npy"):
        made.tested()


def test_a_text_about_versions_is_no_description(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    layers = "layers: [{type: conv, kernel: 3, out: 1}]"
    path.write_text(f"description: |\n  format_version: 0.5.3\ninput_channels: 1\n{layers}\n")
    assert read_network(path).network.input_channels == 1


def test_an_unknown_output_is_refused(tmp_path: Path) -> None:
    refused(written(new(), tmp_path), "boundary", "y", wishes=Wishes(outputs=("boundary",)))


def test_another_number_of_outputs_is_refused(tmp_path: Path) -> None:
    raw = new()
    raw["outputs"].append({"id": "z", "axes": axes_of("bczyx", 2, "x")})
    refused(written(raw, tmp_path), "lists 2 outputs", "has 1 (y)")


AXES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "time": (old(axes="btcyx"), ("'t'",)),
    "index": (new(axes="bczyx"), ("'index'",)),
    "no batch": (old(axes="czyx"), ("'czyx'",)),
    "twice": (old(axes="bczyy"), ("'bczyy'",)),
    "order": (old(axes="bcxyz"), ("bcxyz", "bczyx")),
    "no channels": (old(axes="bzyx"), ("bzyx", "bczyx")),
    "images": (old(axes="bcyx"), ("bcyx", "5 dimensions")),
    "last": (old(axes="bzyxc"), ("maps",)),
    "channels": (new(maps=3), ("3 channels", "takes 1")),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_that_do_not_agree_are_refused(name: str, tmp_path: Path) -> None:
    raw, words = AXES[name]
    raw = json.loads(json.dumps(raw))
    if name == "index":
        raw["inputs"][0]["axes"][0] = {"type": "index"}
    refused(written(raw, tmp_path), *words)


def test_channels_of_outputs_must_agree(tmp_path: Path) -> None:
    raw = new()
    raw["outputs"][0]["axes"] = axes_of("bczyx", 5, "x")
    refused(written(raw, tmp_path), "5 channels", "has 2")


def test_several_inputs_are_refused(tmp_path: Path) -> None:
    raw = new()
    raw["inputs"] *= 2
    refused(written(raw, tmp_path), "takes 2 tensors")


WEIGHTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "pytorch_state_dict": ({"source": "a.pt"}, ("from_torch(module, description='rdf.yaml')",)),
    "torchscript": ({"source": "a.pt"}, ("TorchScript", "from_torch")),
    "keras_hdf5": ({"source": "a.h5"}, ("Keras", "tf2onnx")),
    "keras_v3": ({"source": "a.keras"}, ("Keras", "export")),
    "tensorflow_saved_model_bundle": ({"source": "a.zip"}, ("TensorFlow", "tf2onnx")),
    "tensorflow_js": ({"source": "a.zip"}, ("TensorFlow.js",)),
    "jax": ({"source": "a"}, ("jax", "onnx")),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_other_weights_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    entry, words = WEIGHTS[kind]
    refused(written(new(weights={kind: entry}), tmp_path), kind, *words)


SOURCES = {
    "https://zenodo.org/records/1/files/net.onnx?download=1": ("curl -L -o net.onnx", "nothing is downloaded"),
    "../net.onnx": ("../net.onnx", "own folder"),
    "inner/../../net.onnx": ("own folder",),
    "/etc/passwd": ("/etc/passwd", "own folder"),
    "~/net.onnx": ("own folder",),
    "..\\net.onnx": ("own folder",),
    "missing.onnx": ("missing.onnx", "there is no file"),
    "link.onnx": ("symbolic link",),
    "folder/net.onnx": ("symbolic link",),
    ".": ("own folder",),
    "net.bin": ("net.bin", ".onnx"),
    "inner": ("there is no file",),
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_outside_the_folder_are_refused(source: str, tmp_path: Path) -> None:
    folder, others = tmp_path / "model", tmp_path / FOLDER_OF_OTHERS
    for one in (folder, others, folder / "inner"):
        one.mkdir()
    for one in (tmp_path, others):
        (one / "net.onnx").write_bytes(model().SerializeToString())
    (folder / "link.onnx").symlink_to(others / "net.onnx")
    (folder / "folder").symlink_to(others)
    (folder / "net.bin").write_bytes(model().SerializeToString())
    refused(written(new(weights={"onnx": {"source": source}}), folder), *SOURCES[source])


def test_another_digest_is_refused(tmp_path: Path) -> None:
    raw = new(weights={"onnx": {"source": "net.onnx", "sha256": "0" * 64}})
    refused(written(raw, tmp_path), "000000000000", "download it again")


def test_the_digest_of_external_data_is_checked(tmp_path: Path) -> None:
    (tmp_path / "net.data").write_bytes(b"weights")
    data = {"source": "net.data", "sha256": "1" * 64}
    raw = new(weights={"onnx": {"source": "net.onnx", "external_data": data}})
    refused(written(raw, tmp_path), "net.data", "111111111111")


def _version(version: object) -> dict[str, Any]:
    return new(format_version=version)


FILES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "version 0.3": (lambda: _version("0.3.6"), ("'0.3.6'", "update-format")),
    "version 0.6": (lambda: _version("0.6.0"), ("'0.6.0'",)),
    "version as a number": (lambda: _version(0.5), ("format_version", "0.5")),
    "a data set": (lambda: new(type="dataset"), ("'dataset'", "type: model")),
    "no outputs": (lambda: new(outputs=[]), ("outputs",)),
    "inputs a text": (lambda: new(inputs="x"), ("inputs", "'x'")),
    "an input of text": (lambda: new(inputs=["x"]), ("input", "'x'")),
    "weights a list": (lambda: new(weights=[]), ("weights",)),
    "no weights": (lambda: new(weights={}), ("weights", "nothing")),
    "a digest of words": (lambda: new(weights={"onnx": {"source": "net.onnx", "sha256": "abc"}}), ("sha256", "64")),
}


@pytest.mark.parametrize("name", FILES)
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    make, words = FILES[name]
    refused(written(make(), tmp_path), *words)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = written(new(), tmp_path)
    path.write_text(path.read_text() + "#" * 2**20)
    refused(path, "1,048,576 bytes")


@pytest.mark.parametrize(
    "content", [b"\xff\xfeformat_version: 0.5.3", b"- 1\n", b"", b"a: [1, 2", b"!!python/object:os.x {}"]
)
def test_a_file_of_other_content_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rdf.yaml"
    path.write_bytes(content)
    refused(path, "rdf.yaml")


JUNK: tuple[Any, ...] = (None, True, -1, 1e300, "", "x" * 300, [], {}, [[]], "../x", 10**25, "\x1b[31m", {"min": None})


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value within a value."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_any_value_in_place_of_another_is_read_or_refused(version: str, tmp_path: Path) -> None:
    if version == "0.4":
        pre = [old_step("zero_mean_unit_variance", mode="per_sample", axes="zyx"), old_step("clip", min=0, max=1)]
        raw = old(pre=pre, post=[old_step("sigmoid")], test_inputs=["a.npy"], test_outputs=["b.npy"])
    else:
        pre = [step("scale_range", axes=["z", "y", "x"], reference_tensor="x"), step("scale_linear", gain=[2.0])]
        raw = new(pre=pre, post=[step("softmax", axis="channel"), step("ensure_dtype", dtype="float32")])
    rng = np.random.default_rng(0)
    for *where, key in (at for at in places(raw) if at):
        damaged = copy.deepcopy(raw)
        inner: Any = damaged
        for one in where:
            inner = inner[one]
        inner[key] = JUNK[rng.integers(len(JUNK))]
        try:
            read_model(written(damaged, tmp_path), Wishes())
        except NetworkFileError as error:
            said = str(error)
            assert said.isprintable()
            assert len(said) < 1200


def test_a_package_is_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    path.write_bytes(b"PK\x03\x04")
    refused(path, "model.zip", "unzip")


def test_a_folder_with_two_descriptions_is_refused(tmp_path: Path) -> None:
    written(new(), tmp_path)
    written(new(), tmp_path, name="a.bioimageio.yaml")
    refused(tmp_path, "2 descriptions", "a.bioimageio.yaml")
