"""PT2 archives made by hand, as torch.export.save writes them, without PyTorch; and the reader's answer to them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.damage import ended
from znnpy.errors import NetworkFileError
from znnpy.importing.program import Program
from znnpy.importing.pt2_file import read_pt2


def ints(values: list[int] | tuple[int, ...]) -> list[dict[str, int]]:
    return [{"as_int": value} for value in values]


def tensor_meta(sizes: tuple[int, ...], dtype: int = 7, **changes: Any) -> dict[str, Any]:
    """Describe an array in C order at the beginning of its storage, with some fields changed."""
    strides = [int(np.prod(sizes[at + 1 :], dtype=object)) for at in range(len(sizes))]
    return {
        "dtype": dtype,
        "sizes": ints(sizes),
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "strides": ints(strides),
        "storage_offset": {"as_int": 0},
        "layout": 7,
        **changes,
    }


def payload(path: str, meta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"path_name": path, "is_param": True, "use_pickle": False, "tensor_meta": meta, **changes}


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def node(
    target: str, arguments: dict[str, dict[str, Any]], outputs: list[dict[str, Any]], path: str = ""
) -> dict[str, Any]:
    return {
        "target": f"torch.ops.{target}",
        "inputs": [{"name": name, "arg": value, "kind": 1} for name, value in arguments.items()],
        "outputs": outputs,
        "metadata": {"nn_module_stack": f"L__self__,,net.Net;L__self__{path},{path},torch.nn.Conv3d" if path else ""},
        "is_hop_single_tensor_return": None,
    }


class Archive:
    """A network of a convolution and a relu_ with outputs {"aff": ...}, whose parts a test may change."""

    def __init__(self) -> None:
        self.weight: npt.NDArray[np.float32] = np.linspace(-3, 5, 2 * 27, dtype=np.float32).reshape(2, 1, 3, 3, 3)
        self.bias: npt.NDArray[np.float32] = np.array([0.5, -1.5], np.float32)
        self.weights: dict[str, Any] = {
            "net.conv.weight": payload("weight_0", tensor_meta((2, 1, 3, 3, 3))),
            "net.conv.bias": payload("weight_1", tensor_meta((2,))),
        }
        self.constants: dict[str, Any] = {"two": payload("tensor_0", tensor_meta((), 5))}
        conv = {"input": tensor("x"), "weight": tensor("p_w"), "bias": tensor("p_b"), "stride": {"as_ints": [1, 1, 1]}}
        self.nodes: list[Any] = [
            node("aten.conv3d.default", conv, [tensor("conv3d")], "net.conv"),
            node("aten.relu_.default", {"self": tensor("conv3d")}, [tensor("relu_")]),
        ]
        self.inputs: list[Any] = [
            {"parameter": {"arg": {"name": "p_w"}, "parameter_name": "net.conv.weight"}},
            {"parameter": {"arg": {"name": "p_b"}, "parameter_name": "net.conv.bias"}},
            {"tensor_constant": {"arg": {"name": "c_two"}, "tensor_constant_name": "two"}},
            {"user_input": {"arg": tensor("x")}},
        ]
        self.outputs: list[Any] = [{"user_output": {"arg": tensor("relu_")}}]
        leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
        self.out_spec: Any = [1, {"type": "builtins.dict", "context": '["aff"]', "children_spec": [leaf]}]
        self.tensor_values: dict[str, Any] = {"x": tensor_meta((1, 1, 5, 6, 7))}
        self.sym_int_values: dict[str, Any] = {}
        self.schema: tuple[int, int] = (8, 20)
        self.members: dict[str, bytes | None] = {}  # further members, or other contents; None: left out

    def model(self) -> dict[str, Any]:
        graph = {
            "inputs": [],
            "outputs": [],
            "nodes": self.nodes,
            "tensor_values": self.tensor_values,
            "sym_int_values": self.sym_int_values,
        }
        signature = {"inputs": [], "outputs": [], "in_spec": "", "out_spec": json.dumps(self.out_spec)}
        return {
            "graph_module": {
                "graph": graph,
                "signature": {"input_specs": self.inputs, "output_specs": self.outputs},
                "module_call_graph": [{"fqn": "", "signature": signature}],
                "treespec_namedtuple_fields": {},
            },
            "opset_version": {"aten": 10},
            "schema_version": {"major": self.schema[0], "minor": self.schema[1]},
            "torch_version": "2.14.1",
        }

    def contents(self) -> dict[str, bytes]:
        """Return the members without the archive's folder in their names."""
        made: dict[str, bytes | None] = {
            "data/weights/weight_0": self.weight.tobytes(),
            "data/weights/weight_1": self.bias.tobytes(),
            "data/weights/model_weights_config.json": json.dumps({"config": self.weights}).encode(),
            "data/constants/tensor_0": np.int64(2).tobytes(),
            "data/constants/model_constants_config.json": json.dumps({"config": self.constants}).encode(),
            "models/model.json": json.dumps(self.model()).encode(),
            "data/sample_inputs/model.pt": b"not a pickle",
            "archive_format": b"pt2",
            "archive_version": b"0",
            "byteorder": b"little",
            **self.members,
        }
        return {name: content for name, content in made.items() if content is not None}

    def zipped(self, compression: int = zipfile.ZIP_STORED, root: str = "net/") -> bytes:
        return zipped({root + name: content for name, content in self.contents().items()}, compression)


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return file.getvalue()


def read(tmp_path: Path, archive: Archive | bytes) -> Program:
    """Write an archive to net.pt2 and read it."""
    path = tmp_path / "net.pt2"
    path.write_bytes(archive if isinstance(archive, bytes) else archive.zipped())
    return read_pt2(path)


def refused(tmp_path: Path, archive: Archive | bytes, *parts: str) -> str:
    """Read an archive, which must be refused with a message that names the file and holds the parts."""
    with pytest.raises(NetworkFileError) as caught:
        read(tmp_path, archive)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "net.pt2"))
    for part in parts:
        assert part in message, message
    return message


def attempt(path: Path, content: bytes) -> bool:
    """Say whether an archive is read; AssertionError if it ends in anything but a Program or a ZnnpyError."""
    path.write_bytes(content)
    return ended(lambda: read_pt2(path), str(path))
