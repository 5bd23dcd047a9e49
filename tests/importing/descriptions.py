"""Small model descriptions of bioimage.io for tests, and what they mean in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from tests.importing.onnx_models import random

Real = npt.NDArray[np.float64]
KERNEL = 0.3 * random(2, 1, 3, 3, 3, seed=3)
BIAS = np.array([0.1, -0.2], np.float32)


def model(axes: str = "bczyx", maps: int = 1, outputs: Sequence[str] = ("y",)) -> Any:
    """Return a model of one padded convolution of `maps` maps to two, over volumes of any size."""
    kernel = 0.3 * random(2, maps, 3, 3, 3, seed=3)
    sizes: dict[str, Any] = {"b": 1, "c": maps, "z": "z", "y": "y", "x": "x"}
    nodes, name = [], "x"
    if axes.endswith("c"):
        nodes.append(helper.make_node("Transpose", ["x"], ["t"], perm=[0, 4, 1, 2, 3]))
        name = "t"
    for one in outputs:
        last = f"{one}_maps" if axes.endswith("c") else one
        nodes.append(helper.make_node("Conv", [name, "w", "b"], [last], name=f"conv_{one}", pads=[1] * 6))
        if axes.endswith("c"):
            nodes.append(helper.make_node("Transpose", [last], [one], perm=[0, 2, 3, 4, 1]))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [sizes[axis] for axis in axes])],
        [helper.make_tensor_value_info(one, TensorProto.FLOAT, None) for one in outputs],
        [numpy_helper.from_array(kernel, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def planar_model() -> Any:
    """Return a model of one padded convolution over images."""
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1] * 4)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, "y", "x"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(KERNEL[:, :, 1], "w"), numpy_helper.from_array(BIAS, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def old(**changes: Any) -> dict[str, Any]:
    """Return a description in format 0.4; keys `pre`, `post`, `axes` are of its tensors."""
    tensor = {"name": "x", "data_type": "float32", "axes": changes.pop("axes", "bczyx"), "data_range": [0, 255]}
    shape = {"min": [1, 1, 16, 16, 16], "step": [0, 0, 16, 16, 16]}
    pre, post = changes.pop("pre", []), changes.pop("post", [])
    return {
        "format_version": "0.4.10",
        "type": "model",
        "name": "a small net",
        "authors": [{"name": "nobody"}],
        "timestamp": "2022-01-01T00:00:00",
        "inputs": [{**tensor, "shape": shape, "preprocessing": pre}],
        "outputs": [{**tensor, "name": "y", "halo": [0, 0, 4, 4, 4], "postprocessing": post}],
        "weights": {"onnx": {"source": "net.onnx", "opset_version": 18}},
        **changes,
    }


def axes_of(letters: str, channels: int, tensor: str | None = None) -> list[dict[str, Any]]:
    """Return axes in format 0.5; of an output if the tensor that it refers to is given."""
    found: list[dict[str, Any]] = []
    for letter in letters:
        size = {"min": 16, "step": 16} if tensor is None else {"tensor_id": tensor, "axis_id": letter}
        match letter:
            case "b":
                found.append({"type": "batch"})
            case "c":
                found.append({"type": "channel", "channel_names": [f"channel{i}" for i in range(channels)]})
            case _:
                halo = {} if tensor is None else {"halo": 4}
                found.append({"type": "space", "id": letter, "size": size, **halo})
    return found


def new(**changes: Any) -> dict[str, Any]:
    """Return a description in format 0.5; keys `pre`, `post`, `axes`, `maps` are of its tensors."""
    letters, maps = changes.pop("axes", "bczyx"), changes.pop("maps", 1)
    pre, post = changes.pop("pre", []), changes.pop("post", [])
    return {
        "format_version": "0.5.3",
        "type": "model",
        "name": "a small net",
        "inputs": [{"id": "x", "axes": axes_of(letters, maps), "data": {"type": "float32"}, "preprocessing": pre}],
        "outputs": [{"id": "y", "axes": axes_of(letters, 2, "x"), "postprocessing": post}],
        "weights": {"onnx": {"source": "net.onnx", "sha256": None, "opset_version": 18}},
        **changes,
    }


def step(word: str, /, **kwargs: Any) -> dict[str, Any]:
    """Return a step in format 0.5."""
    return {"id": word, "kwargs": kwargs}


def old_step(word: str, /, **kwargs: Any) -> dict[str, Any]:
    """Return a step in format 0.4."""
    return {"name": word, "kwargs": kwargs}


def written(description: Mapping[str, Any], folder: Path, net: Any = None, name: str = "rdf.yaml") -> Path:
    """Write a description (as block YAML of JSON values) with its network, and return its path."""
    (folder / "net.onnx").write_bytes((model() if net is None else net).SerializeToString())
    path = folder / name
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in description.items()))
    return path


def convolved(maps: Real) -> Real:
    """Return what the network of `model` gives for normalised maps (c, z, y, x)."""
    channels, *size = maps.shape
    kernel = 0.3 * random(2, channels, 3, 3, 3, seed=3).astype(np.float64)
    padded = np.pad(maps, [(0, 0), (1, 1), (1, 1), (1, 1)])
    found = np.zeros((2, *size))
    for z, y, x in np.ndindex(3, 3, 3):
        part = padded[:, z : z + size[0], y : y + size[1], x : x + size[2]]
        found += np.einsum("oi,izyx->ozyx", kernel[:, :, z, y, x], part)
    return found + BIAS.astype(np.float64)[:, None, None, None]
