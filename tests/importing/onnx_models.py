"""Small ONNX models for tests, and what they give by the definitions of the package onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from znnpy.importing.builder import Builder
from znnpy.importing.finish import Walk, Wishes, imported
from znnpy.importing.imported import Imported
from znnpy.importing.onnx_graph import read_onnx, walk
from znnpy.kernels import whole as definition
from znnpy.layers import OF_WHOLE_IMAGES
from znnpy.shapes import Vec3
from znnpy.trained import TrainedNetwork

Array = npt.NDArray[Any]
SIZE: Vec3 = (6, 8, 10)
FREE: tuple[int | str, ...] = (1, 2, "z", "y", "x")


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def whole(*values: int) -> Array:
    return np.asarray(values, np.int64)


def floats(*values: float) -> Array:
    return np.asarray(values, np.float32)


def one(value: float) -> Array:
    return np.asarray(value, np.float32)


def node(kind: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    """Return a node; a `-` stands for an input that is left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(kind, names, outputs.split(), name=f"{kind}_{outputs.split()[0]}", **attributes)


def model_of(
    nodes: Sequence[Any],
    arrays: Mapping[str, Array] | None = None,
    dims: Sequence[int | str | None] = FREE,
    outputs: Sequence[str] = ("y",),
    opset: int = 18,
) -> Any:
    """Return a model with input `x`."""
    stored = [numpy_helper.from_array(array, name) for name, array in (arrays or {}).items()]
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def saved(model: Any, folder: Path) -> Path:
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def read(model: Any, folder: Path, size: Vec3 = SIZE, order: str | None = None, *, fixed: bool = False) -> Imported:
    """Return the network that a model in a file is."""
    found = read_onnx(saved(model, folder))

    letters = order or found.input.orders[0]

    def walk_at(at: Vec3) -> Walk:
        builder = Builder()
        return Walk(at, builder, walk(found, builder, at, letters), letters)

    return imported("net", walk_at, size, Wishes(), found.source, fixed=fixed)


def walked(model: Any, folder: Path, size: Vec3 = SIZE, order: str | None = None) -> Walk:
    """Return the layers of a model in a file for one size."""
    found = read_onnx(saved(model, folder))
    builder, letters = Builder(), order or found.input.orders[0]
    return Walk(size, builder, walk(found, builder, size, letters), letters)


def layers(walk: Walk) -> list[str]:
    return [str(draft.layer) for draft in walk.builder.drafts]


def assert_same(
    model: Any, folder: Path, size: Vec3 = SIZE, order: str = "nczyx", maps: int = 2, *, fixed: bool = False
) -> Imported:
    """Fail unless the network of a model gives what onnx's definitions give, for an array with random values."""
    found = read(model, folder, size, order, fixed=fixed)
    image = random(maps, *size, seed=7)
    letters = "czyx"
    given = image if "z" in order else image[:, 0]
    own = [letter for letter in letters if letter in order]
    array = given.transpose([own.index(letter) for letter in order[1:]])[None]
    expected = ReferenceEvaluator(model).run(None, {"x": array})[0][0]
    back = expected.transpose([order[1:].index(letter) for letter in own])
    back = back if "z" in order else back[:, None]
    if any(isinstance(layer, OF_WHOLE_IMAGES) for layer in found.network.layers):  # refused over volumes
        result: Array = definition.whole(found.network, found.weights, image.transpose(1, 2, 3, 0))[0].transpose(
            3, 0, 1, 2
        )
    else:
        network = TrainedNetwork(found.network, found.weights)
        result = network(image, calibrate=False, ram="4G", threads=1)
    assert result.shape == back.shape
    np.testing.assert_allclose(result, back, rtol=1e-4, atol=1e-4)
    return found


def external(model: Any, folder: Path) -> Path:
    """Save a model with its arrays in the file `weights.bin` beside it."""
    path = folder / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path
