"""Check what is refused of an ONNX file, in which words, and what a file that is read gives."""

from __future__ import annotations

import os
import pickle
import random as chance
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.importing.onnx_models import FREE, external, layers, model_of, node, random, saved, walked, whole
from tests.support.damage import ended
from tests.support.messages import assert_holds
from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.importing.builder import Builder
from znnpy.importing.onnx_constants import MOST_FOLDED
from znnpy.importing.onnx_file import MOST_NODES, read_model
from znnpy.importing.onnx_graph import read_onnx, walk
from znnpy.importing.tensors import LayoutError

KERNEL = random(3, 2, 1, 1, 1)


def conv(**options: Any) -> Any:
    return model_of([node("Conv", "x w")], {"w": KERNEL}, **options)


def refused(path: Path, *words: object) -> str:
    with pytest.raises(NetworkFileError) as caught:
        read_onnx(path)
    assert_holds(caught.value, *words)
    return str(caught.value)


def refused_model(model: Any, folder: Path, *words: object) -> None:
    refused(saved(model, folder), *words)


# --- files ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("is empty",)),
        (b"<!DOCTYPE html><html></html>", ("HTML",)),
        (pickle.dumps({"weight": [1.0] * 100}), ("pickle",)),
        (chance.Random(3).randbytes(4096), ("not an ONNX file",)),
        (b"version https://git-lfs.github.com/spec/v1\n", ("git lfs pull",)),
        (b"\x08\x07", ("not an ONNX file", "0 nodes")),
    ],
)
def test_file_that_is_no_model_is_refused(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    refused(path, path, *words)


def test_zip_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    refused(path, "zip archive")


def test_file_larger_than_protobuf_allows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    refused(path, "2,147,483,648", "2,147,483,647", "external data")


def test_missing_file_folder_and_pipe_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "other.onnx", "no ONNX file")
    (tmp_path / "folder.onnx").mkdir()
    refused(tmp_path / "folder.onnx", "folder")
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", "pipe")


def test_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(conv(), tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError) as caught:
        read_model(path)
    assert_holds(caught.value, path, "onnx", "pip install")


def test_damaged_file_ends_in_one_sentence(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "n"),
        node("ConstantOfShape", "n", "zero", value=numpy_helper.from_array(np.zeros(1, np.float32))),
        node("Conv", "x w", "a", pads=[1, 1, 1, 1, 1, 1]),
        node("Reshape", "a n", "c"),
        node("Resize", "c - s", "d", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    ]
    arrays = {"w": random(2, 2, 3, 3, 3), "s": np.asarray([1, 1, 2, 2, 2], np.float32)}
    content = model_of(nodes, arrays, dims=(1, 2, 4, 4, 4), outputs=["d"]).SerializeToString()
    path = tmp_path / "net.onnx"

    def act() -> None:
        model = read_onnx(path)
        walk(model, Builder(), (4, 4, 4), model.input.orders[0])

    source, good = chance.Random(5), 0
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(source.choice((1, 1, 2, 5))):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        path.write_bytes(damaged[: source.choice((len(damaged), source.randrange(len(damaged))))])
        good += ended(act, str(path))
    assert 0 < good < 1500


# --- versions, inputs and outputs ---


def test_opset_outside_what_is_known_is_refused(tmp_path: Path) -> None:
    refused_model(conv(opset=11), tmp_path, "opset 11", "13", "onnx.version_converter.convert_version(model, 13)")
    newest = onnx.defs.onnx_opset_version()
    refused_model(conv(opset=newest + 1), tmp_path, f"opset {newest + 1}", f"up to {newest}", onnx.__version__)
    model = conv()
    model.opset_import[0].domain = "ai.onnx.ml"
    refused_model(model, tmp_path, "0 versions")


def test_number_of_inputs_must_be_one(tmp_path: Path) -> None:
    model = conv()
    model.graph.input.append(helper.make_tensor_value_info("sigma", TensorProto.FLOAT, FREE))
    refused_model(model, tmp_path, "2 inputs: x, sigma")
    model = conv()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, KERNEL.shape))
    assert read_onnx(saved(model, tmp_path)).input.name == "x"
    del model.graph.input[0]
    refused_model(model, tmp_path, "0 inputs")


def test_input_that_is_no_image_of_float32_is_refused(tmp_path: Path) -> None:
    refused_model(conv(dims=(4, 2, "z", "y", "x")), tmp_path, "batch of 4", "4 x 2 x ? x ? x ?")
    refused_model(conv(dims=(1, 2, "x")), tmp_path, "3 dimensions", "1 x 2 x ?")
    refused_model(conv(dims=()), tmp_path, "0 dimensions")
    model = conv()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    refused_model(model, tmp_path, "UINT8", "float32")
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    model.graph.input[0].type.tensor_type.ClearField("shape")
    refused_model(model, tmp_path, "states no sizes")


def test_sizes_of_the_input_are_given(tmp_path: Path) -> None:
    found = read_onnx(saved(conv(dims=("n", 2, None, 8, "x")), tmp_path)).input
    assert (found.name, found.dims, found.orders) == ("x", (None, 2, None, 8, None), ("nczyx", "nzyxc"))
    assert found.maps("nczyx") == 2
    assert found.size("nczyx") == (None, 8, None)
    assert found.size("nzyxc") == (2, None, 8)
    with pytest.raises(LayoutError) as caught:
        found.maps("nzyxc")
    assert_holds(caught.value, "? x 2 x ? x 8 x ?", 4)
    image = read_onnx(saved(model_of([node("Relu", "x")], dims=(1, 3, "y", 20)), tmp_path)).input
    assert (image.orders, image.size("ncyx"), image.maps("nyxc")) == (("ncyx", "nyxc"), (1, None, 20), 20)


def test_source_says_version_and_maker(tmp_path: Path) -> None:
    model = conv(opset=20)
    model.producer_name, model.producer_version = "pytorch", "2.9"
    assert read_onnx(saved(model, tmp_path)).source == "ONNX, opset 20, by pytorch 2.9"


def test_names_are_checked(tmp_path: Path) -> None:
    refused_model(model_of([node("Relu", "z")]), tmp_path, "Relu_y", "reads z")
    refused_model(model_of([node("Relu", "x"), node("Tanh", "x")]), tmp_path, "Tanh_y", "gives y")
    refused_model(model_of([node("Relu", "x")], outputs=["q"]), tmp_path, "gives no q")
    refused_model(model_of([node("Relu", "x")], outputs=[]), tmp_path, "no output")


def test_what_no_output_needs_is_left_out(tmp_path: Path) -> None:
    model = model_of([node("Unknown", "x w", "a"), node("Relu", "x")], {"w": KERNEL})
    found = read_onnx(saved(model, tmp_path))
    assert [step.kind for step in found.steps] == ["Relu"]
    assert not found.constants


# --- arrays ---


def test_declared_size_is_compared_with_the_bytes_before_an_array_is_made(tmp_path: Path) -> None:
    model = conv()
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([2**30, 2**30])
    path = saved(model, tmp_path)
    assert path.stat().st_size < 1000
    refused(path, "array w", 2**62, "holds 24")
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].float_data.extend([1.0, 2.0])
    refused_model(model, tmp_path, "array w", 2**60, "holds 2")
    model.graph.initializer[0].dims[:] = [-1, -2]
    refused_model(model, tmp_path, "(-1, -2)")
    model.graph.initializer[0].dims[:] = [1] * 64
    refused_model(model, tmp_path, "32 sizes")


@pytest.mark.parametrize(
    ("kind", "name", "stored"),
    [
        (TensorProto.FLOAT, "float_data", [1.5, -2.0]),
        (TensorProto.FLOAT16, "int32_data", [0x3E00, 0xC000]),
        (TensorProto.BFLOAT16, "int32_data", [0x3FC0, 0xC000]),
    ],
)
def test_weights_are_read_from_fields_as_float32(kind: int, name: str, stored: list[Any], tmp_path: Path) -> None:
    model = model_of([node("Conv", "x w")], {"w": random(1, 2, 1, 1, 1)})
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_type = kind
    getattr(tensor, name).extend(stored)
    found = read_onnx(saved(model, tmp_path)).constants["w"]
    assert found.dtype == np.float32
    assert found.reshape(-1).tolist() == [1.5, -2.0]
    assert not found.flags.writeable


def test_raw_half_precision_becomes_float32(tmp_path: Path) -> None:
    model = model_of([node("Conv", "x w")], {"w": np.asarray([1.5, -2], np.float16).reshape(1, 2, 1, 1, 1)})
    assert read_onnx(saved(model, tmp_path)).constants["w"].reshape(-1).tolist() == [1.5, -2.0]
    model.graph.initializer[0].data_type = TensorProto.BFLOAT16
    model.graph.initializer[0].raw_data = np.asarray([0x3FC0, 0xC000], np.uint16).tobytes()
    assert read_onnx(saved(model, tmp_path)).constants["w"].reshape(-1).tolist() == [1.5, -2.0]


def test_arrays_of_other_kinds_are_refused(tmp_path: Path) -> None:
    model = conv()
    model.graph.initializer[0].data_type = TensorProto.INT4
    refused_model(model, tmp_path, "array w", "INT4")
    model.graph.initializer[0].data_type = 77
    refused_model(model, tmp_path, "number 77")
    model = conv()
    model.graph.initializer.append(numpy_helper.from_array(KERNEL, "w"))
    refused_model(model, tmp_path, "two arrays w")
    model = conv()
    model.graph.sparse_initializer.add()
    refused_model(model, tmp_path, "1 sparse")


def test_large_model_is_read_fast_and_without_copies(tmp_path: Path) -> None:
    size = 100 * 2**20
    path = saved(model_of([node("Mul", "x w")], {"w": np.zeros(size // 4, np.float32)}), tmp_path)
    script = (
        "import sys, time, resource, onnx\n"
        "from pathlib import Path\n"
        "from znnpy.importing.onnx_graph import read_onnx\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "start = time.process_time()\n"
        "model = read_onnx(Path(sys.argv[1]))\n"
        "print(time.process_time() - start, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    seconds, held = map(float, done.stdout.split())
    assert seconds < 5
    assert held < 3 * size


# --- external data ---


def test_external_data_are_read(tmp_path: Path) -> None:
    path = external(conv(), tmp_path)
    assert (tmp_path / "weights.bin").exists()
    np.testing.assert_array_equal(read_onnx(path).constants["w"], KERNEL)


def _set(model: Any, key: str, value: str) -> None:
    entries = model.graph.initializer[0].external_data
    for entry in [entry for entry in entries if entry.key == key]:
        entries.remove(entry)
    entries.add(key=key, value=value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("location", "/etc/hostname", ("/etc/hostname", "inside the model's folder")),
        ("location", "../weights.bin", ("../weights.bin", "inside the model's folder")),
        ("location", "a/../weights.bin", ("inside the model's folder",)),
        ("location", "a\\weights.bin", ("inside the model's folder",)),
        ("location", "", ("inside the model's folder",)),
        ("location", "absent.bin", ("absent.bin", "cannot be opened")),
        ("location", "weights.bin/deeper", ("cannot be opened",)),
        ("location", "pipe.bin", ("no regular file",)),
        ("location", "link.bin", ("link.bin", "symbolic link")),
        ("location", "linked/weights.bin", ("linked/weights.bin", "symbolic link")),
        ("offset", "8", ("bytes 8 to 32", "has 24")),
        ("offset", "-8", ("offset", "-8")),
        ("offset", "9" * 40, ("offset",)),
        ("length", "99", ("bytes 0 to 99", "has 24")),
        ("length", "20", ("24 bytes", "holds 20")),
    ],
)
def test_external_data_outside_their_file_are_refused(
    key: str, value: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = external(conv(), tmp_path)
    (tmp_path / "link.bin").symlink_to(tmp_path / "weights.bin")
    (tmp_path / "linked").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.bin")
    model = onnx.load(path, load_external_data=False)
    _set(model, key, value)
    refused(saved(model, tmp_path), "array w", *words)


def test_arrays_may_share_external_data_but_not_overlap(tmp_path: Path) -> None:
    model = onnx.load(external(conv(), tmp_path), load_external_data=False)
    for name in ("w1", "w2"):
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(model.graph.initializer[0])
        tensor.name = name
    assert read_onnx(saved(model, tmp_path)).constants.keys() == {"w"}
    tensor.dims[:] = [5]
    for entry in tensor.external_data:
        entry.value = {"offset": "4", "length": "20"}.get(entry.key, entry.value)
    refused_model(model, tmp_path, "array w2", "overlaps", 24)


# --- known values ---


def ones(count: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"n": whole(*[2**15] * count), "one": np.ones((1,) * count, np.float32)}


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ConstantOfShape", "n", "k")],
        [node("Expand", "one n", "k")],
        [node("Tile", "one n", "k")],
        [node("Range", "a b c", "k")],
        [node("Tile", "one half", "k0"), node("Transpose", "k0", "k1"), node("Add", "k0 k1", "k")],
        [node("Tile", "one half", "k0"), node("Concat", " ".join(["k0"] * 70000), "k", axis=0)],
    ],
)
def test_known_values_are_counted_before_they_are_made(nodes: list[Any], tmp_path: Path) -> None:
    arrays = {
        **ones(2),
        "half": whole(1, 2**15),
        "a": np.asarray(0),
        "b": np.asarray(2**60),
        "c": np.asarray(1),
    }
    model = model_of([*nodes, node("Add", "x k", "y")], arrays)
    with pytest.raises(NetworkFileError) as caught:
        read_onnx(saved(model, tmp_path))
    assert_holds(caught.value, "would make", "known values", MOST_FOLDED // 1000 // 1000)


def test_values_of_many_operators_are_counted_together(tmp_path: Path) -> None:
    nodes = [node("ConstantOfShape", "n", "k0"), *(node("Neg", f"k{i}", f"k{i + 1}") for i in range(40))]
    model = model_of([*nodes, node("Add", "x k40", "y")], {"n": whole(2**12, 2**10)})
    refused_model(model, tmp_path, "would make 4194304 known values")


def test_known_values_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    def case(step: Any, **arrays: Any) -> None:
        refused_model(model_of([step, node("Add", "x k")], arrays), tmp_path, step.name, "(")

    case(node("Add", "a b", "k"), a=random(2), b=random(3))
    case(node("Reshape", "a b", "k"), a=random(2), b=whole(3))
    case(node("Gather", "a b", "k"), a=random(2), b=whole(5))
    case(node("ConstantOfShape", "b", "k"), b=whole(-5))
    case(node("Tile", "a b", "k"), a=random(2), b=whole(-1))
    case(node("Slice", "a", "k"), a=random(2))
    case(node("Cast", "a", "k", to=8), a=random(2))
    case(node("NonZero", "a", "k"), a=random(2))
    case(node("RandomNormal", "", "k", shape=[2]))
    case(node("Constant", "", "k", value_string="word"))


def test_shape_arithmetic_gives_what_it_says(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "n", start=2),
        node("Constant", "", "two", value_int=2),
        node("Div", "n two", "half"),
        node("Mul", "half two", "even"),
        node("ReduceProd", "even", "product", keepdims=0),
        node("Sub", "even n", "less"),
        node("Where", "mask less less0", "pads"),
        node("Concat", "zeros pads", "p0", axis=0),
        node("Concat", "zeros zeros3 p0", "p", axis=0),
        node("Pad", "x p", "y"),
    ]
    arrays = {"mask": np.ones(3, np.bool_), "less0": whole(0, 0, 0), "zeros": whole(0, 0), "zeros3": whole(0, 0, 0)}
    made = walked(model_of(nodes, arrays), tmp_path, (5, 6, 7))
    assert layers(made) == ["crop 0x0x0 1x0x1"]


# --- functions of a model ---


def with_functions(count: int, calls: Callable[[int], list[str]]) -> Any:
    """Return a model with functions F0, F1, .. of which each is a chain of calls."""
    functions = []
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    for at in range(count):
        names = calls(at)
        nodes = [
            helper.make_node(
                kind, [f"v{i}" if i else "a"], [f"v{i + 1}" if i + 1 < len(names) else "b"],
                domain="own" if kind.startswith("F") else "",
            )
            for i, kind in enumerate(names)
        ]  # fmt: skip
        functions.append(helper.make_function("own", f"F{at}", ["a"], ["b"], nodes, opsets))
    model = model_of([node("F0", "x", domain="own")])
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.extend(functions)
    return model


def test_functions_of_a_model_are_written_out(tmp_path: Path) -> None:
    model = with_functions(2, lambda at: [["F1", "Tanh", "F1"], ["Relu"]][at])
    assert layers(walked(model, tmp_path)) == ["relu", "tanh", "relu"]


def test_functions_without_end_are_refused(tmp_path: Path) -> None:
    refused_model(with_functions(2, lambda at: [f"F{1 - at}"]), tmp_path, "calls itself")
    deep = with_functions(60, lambda at: [f"F{at + 1}"] if at < 59 else ["Relu"])
    refused_model(deep, tmp_path, "more than 40")
    wide = with_functions(30, lambda at: [f"F{at + 1}"] * 2 if at < 29 else ["Relu"])
    refused_model(wide, tmp_path, 2**29, MOST_NODES)
