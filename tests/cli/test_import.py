"""The command `znnpy import`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import helper, numpy_helper

from znnpy.cli import main
from znnpy.trained import load_network


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def model(folder: Path, *, norm: str = "", name: str = "net.onnx") -> Path:
    """Write a small U-Net with two outputs, and a norm over space if one is named."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((4, 1, 3, 3, 3)), "w2": rng.standard_normal((4, 4, 1, 3, 3)),
        "w3": rng.standard_normal((2, 8, 1, 1, 1)), "scale": np.ones(4), "bias": np.zeros(4),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "enc", pads=[1] * 6),
        *([helper.make_node(norm, ["a", "scale", "bias"], ["n"], "norm")] if norm else []),
        helper.make_node("Relu", ["n" if norm else "a"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[1, 2, 2], strides=[1, 2, 2]),
        helper.make_node("Conv", ["p", "w2"], ["b"], "deep", pads=[0, 1, 1, 0, 1, 1]),
        helper.make_node("Resize", ["b", "", "factors"], ["u"], "up", mode="nearest", nearest_mode="floor",
                         coordinate_transformation_mode="asymmetric"),
        helper.make_node("Concat", ["r", "u"], ["c"], "skip", axis=1),
        helper.make_node("Conv", ["c", "w3"], ["o"], "last"),
        helper.make_node("Sigmoid", ["o"], ["probabilities"], "sigmoid"),
        helper.make_node("Tanh", ["r"], ["edges"], "tanh"),
    ]  # fmt: skip
    arrays = [numpy_helper.from_array(array.astype(np.float32), key) for key, array in weights.items()]
    arrays.append(numpy_helper.from_array(np.array([1, 1, 1, 2, 2], np.float32), "factors"))
    values = [
        helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, [1, maps, "z", "y", "x"])
        for key, maps in (("x", 1), ("probabilities", 2), ("edges", 4))
    ]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], arrays)
    path = folder / name
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_network_is_listed_and_described(tmp_path: Path) -> None:
    result = run("import", model(tmp_path))
    assert result.exit_code == 0
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines() if line[:1].isalpha()}
    assert facts["source"].startswith("ONNX, opset 18")
    assert facts["period"] == "1x2x2 voxels"
    assert facts["context"] == "1x3x3 voxels before and 1x3x3 behind one period of output (z, y, x)"
    multiply_adds = 27 * 4 + 9 * 4 * 4 / 4 + 8 * 2
    assert facts["work"].startswith(f"{2 * multiply_adds / 1000:,.1f} kFLOP")
    assert "simplified" in facts
    assert not list(tmp_path.glob("*.npz"))


def test_written_files_are_the_network(tmp_path: Path) -> None:
    path, out = model(tmp_path), tmp_path / "my.yaml"
    words = ("--name", "mine", "--normalise", "100,20", "--output", "probabilities", "--pad-to-period", "zeros")
    result = run("import", path, "--out", out, *words)
    assert result.exit_code == 0
    assert f"{out} and my.npz" in result.stdout
    written, direct = load_network(out), load_network(path)
    assert (written.network.name, written.network.pad_to_period) == ("mine", "zeros")
    assert written.network.normalise is not None
    assert (written.network.normalise.mean, written.network.normalise.std) == ((100.0,), (20.0,))
    volume = np.random.default_rng(1).standard_normal((6, 8, 10), np.float32)
    ours = written(100 + 20 * volume, calibrate=False)
    assert np.allclose(ours, direct(volume, calibrate=False)[:2], atol=1e-5)  # the volume was rounded at 100
    assert run("import", path, "--out", out).exit_code == 1  # it is there already
    assert run("import", path, "--out", out, "--overwrite").exit_code == 0


def test_json_holds_what_the_table_does(tmp_path: Path) -> None:
    result = run("import", model(tmp_path), "--json")
    document = json.loads(result.stdout)
    assert (document["meaning"], document["period"], document["check"]) == ("whole", [1, 2, 2], [])
    assert (
        sum(document["folded"].values()) == 2
    )  # relu and sigmoid at the end of convolutions; others read what tanh does


def test_norm_over_space_is_named_as_the_reason(tmp_path: Path) -> None:
    path = model(tmp_path, norm="InstanceNormalization")
    listed = run("import", path)
    assert listed.exit_code == 0
    (line,) = (line for line in listed.stdout.splitlines() if line.startswith("meaning"))
    assert "windows" in line
    assert "node norm (instance_norm) depends on the whole image" in line
    with h5py.File(tmp_path / "volume.h5", "w") as file:
        file["raw"] = np.zeros((8, 8, 8), np.uint8)
    for words, said in (((), "give --window"), (("--meaning", "whole"), "depends on the whole image")):
        refused = run("infer", tmp_path / "volume.h5", "--network", path, *words)
        assert refused.exit_code == 1
        assert said in refused.stderr
    assert not (tmp_path / "volume_net.h5").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--overwrite"], 2, "--out"),
        (["--out", "net.txt"], 2, "net.txt"),
        (["--normalise", "1"], 2, "MEAN,STD"),
        (["--normalise", "nan,1"], 2, "finite"),
        (["--normalise", "1,0"], 2, "above 0"),
        (["--output", "mask"], 1, "the outputs are probabilities, edges"),
        (["--axes", "nzyxc"], 1, "1 x 1 x ? x ? x ?"),
        (["--axes", "ncyx"], 1, "5 dimensions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_refused(words: list[str], code: int, said: str, tmp_path: Path) -> None:
    result = run("import", model(tmp_path), *words)
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    for name, content in (("a.onnx", b"no model"), ("a.pt2", b"PK\x03\x04"), ("a.yaml", b"layers: []"), ("a.h5", b"")):
        (tmp_path / name).write_bytes(content)
        result = run("import", tmp_path / name)
        assert result.exit_code == 1
        assert str(tmp_path / name) in result.stderr
        assert "Traceback" not in result.stderr
    assert run("import", tmp_path / "missing.onnx").exit_code == 1


@pytest.mark.torch
def test_check_compares_with_onnxruntime(tmp_path: Path) -> None:
    result = run("import", model(tmp_path), "--check")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("check")]
    assert len(lines) == 2
    assert all("equal but for rounding" in line and "onnxruntime" in line for line in lines)


@pytest.mark.torch
def test_model_that_onnxruntime_does_not_run_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["o"], "conv", auto_pad="SAME_UPPER", dilations=[2, 2, 2])
    values = [helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, [1, 1, "z", "y", "x"]) for key in ("x", "o")]
    weight = numpy_helper.from_array(np.ones((1, 1, 3, 3, 3), np.float32), "w")
    graph = helper.make_graph([node], "net", values[:1], values[1:], [weight])
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    result = run("import", path, "--check")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert all(word in result.stderr for word in (str(path), "Dilation", "without --check"))
