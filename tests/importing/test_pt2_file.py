"""Files of torch.export.save, made by hand: what is read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.damage import VALUES
from tests.support.pt2_archives import Archive, attempt, ints, node, payload, read, refused, tensor, tensor_meta
from znnpy.importing.program import Call, Ref

# --- what is read ---


def test_archive_gives_its_calls_inputs_constants_and_outputs(tmp_path: Path) -> None:
    made = Archive()
    program = read(tmp_path, made)
    conv = {"input": Ref("x"), "weight": Ref("p_w"), "bias": Ref("p_b"), "stride": [1, 1, 1]}
    assert program.calls == [
        Call("net.conv", "aten.conv3d.default", conv, ("conv3d",)),
        Call("relu_", "aten.relu_.default", {"self": Ref("conv3d")}, ("relu_",)),
    ]
    assert program.inputs == [("x", (1, 1, 5, 6, 7))]
    assert program.outputs == {"aff": "relu_"}
    assert list(program.constants) == ["p_w", "p_b", "c_two"]
    np.testing.assert_array_equal(program.constants["p_w"], made.weight)
    np.testing.assert_array_equal(program.constants["p_b"], made.bias)
    assert program.constants["c_two"].dtype == np.int64
    assert program.constants["c_two"] == 2
    for array in program.constants.values():
        assert array.flags.c_contiguous
        assert not array.flags.writeable


ARGUMENTS: list[tuple[dict[str, Any], object]] = [
    ({"as_none": True}, None),
    ({"as_int": -3}, -3),
    ({"as_bool": True}, True),
    ({"as_string": "constant"}, "constant"),
    ({"as_float": 0.5}, 0.5),
    ({"as_float": "-Infinity"}, -np.inf),
    ({"as_floats": [2.0, "Infinity"]}, [2.0, np.inf]),
    ({"as_ints": []}, []),
    ({"as_bools": [True, False]}, [True, False]),
    ({"as_strings": ["a"]}, ["a"]),
    ({"as_int_lists": [[1], [2, 3]]}, [[1], [2, 3]]),
    ({"as_tensors": [{"name": "x"}, {"name": "p_w"}]}, [Ref("x"), Ref("p_w")]),
    ({"as_optional_tensors": [{"as_none": True}, {"as_tensor": {"name": "x"}}]}, [None, Ref("x")]),
    ({"as_optional_tensor": {"as_tensor": {"name": "x"}}}, Ref("x")),
    ({"as_nested_tensors": [[{"name": "x"}]]}, [[Ref("x")]]),
    ({"as_sym_int": {"as_int": 4}}, 4),
    ({"as_sym_int": {"as_name": "known"}}, 9),
    ({"as_sym_ints": [{"as_int": 4}, {"as_name": "known"}]}, [4, 9]),
    ({"as_sym_float": {"as_float": 1.5}}, 1.5),
    ({"as_scalar_type": 6}, "float16"),
    ({"as_memory_format": 3}, "channels_last_3d"),
    ({"as_layout": 7}, "strided"),
    ({"as_device": {"type": "cuda", "index": 1}}, "cuda:1"),
    ({"as_device": {"type": "cpu", "index": None}}, "cpu"),
]


@pytest.mark.parametrize(("stored", "value"), ARGUMENTS, ids=lambda value: str(value)[:30])
def test_argument_is_read_as_the_value_that_it_stands_for(
    tmp_path: Path, stored: dict[str, Any], value: object
) -> None:
    made = Archive()
    made.sym_int_values["known"] = {"as_int": 9}
    made.nodes[1]["inputs"].append({"name": "more", "arg": stored, "kind": 2})
    found = read(tmp_path, made).calls[1].arguments["more"]
    assert found == value
    assert type(found) is type(value)


def test_operator_with_several_results_names_each(tmp_path: Path) -> None:
    made = Archive()
    made.nodes[1] = node(
        "aten.chunk.default", {"self": tensor("conv3d")}, [{"as_tensors": [{"name": "a"}, {"name": "b"}]}]
    )
    made.outputs = [{"user_output": {"arg": tensor("b")}}]
    assert read(tmp_path, made).calls[1].results == ("a", "b")
    made.nodes[1]["outputs"] = [tensor("a"), tensor("b")]
    assert read(tmp_path, made).calls[1].results == ("a", "b")
    assert read(tmp_path, made).calls[1].name == "a"


def leaf() -> dict[str, Any]:
    return {"type": None, "context": None, "children_spec": []}


def part(kind: str, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


STRUCTURES: list[tuple[Any, list[str]]] = [
    ([1, part("builtins.tuple", "null", leaf(), leaf())], ["0", "1"]),
    ([1, part("builtins.dict", '["z", "a"]', leaf(), part("builtins.list", "null", leaf()))], ["z", "a.0"]),
    ([1, part("builtins.dict", "[3, 1]", leaf(), leaf())], ["3", "1"]),
    ([1, part("my.Result", '[["u", "w"], ["v"]]', leaf(), leaf())], ["u", "w"]),
    ([1, part("collections.namedtuple", "my.Pair", leaf(), leaf())], ["p", "q"]),
    ([1, part("collections.namedtuple", "my.Other", leaf(), leaf())], ["0", "1"]),
    ([1, part("collections.defaultdict", {"dict_context": ["k", "l"]}, leaf(), leaf())], ["k", "l"]),
    ([1, part("builtins.dict", '[{"__enum__": true}, "b"]', leaf(), leaf())], ["0", "1"]),
    ([1, part("builtins.dict", '["0.1", "0"]', leaf(), part("builtins.list", "null", leaf()))], ["0.1", "0.0"]),
    ([1, part("builtins.dict", '["a.0", "a"]', leaf(), part("builtins.list", "null", leaf()))], ["0", "1"]),
    ([1, part("builtins.tuple", "null", leaf())], ["0", "1"]),
    ([2, "another version"], ["0", "1"]),
]


@pytest.mark.parametrize(("structure", "words"), STRUCTURES, ids=range(len(STRUCTURES)))
def test_outputs_have_the_words_of_their_structure(tmp_path: Path, structure: Any, words: list[str]) -> None:
    made = Archive()
    made.outputs = [{"user_output": {"arg": tensor(name)}} for name in ("relu_", "x")]
    made.out_spec = structure
    model = made.model()
    model["graph_module"]["treespec_namedtuple_fields"] = {"my.Pair": {"field_names": ["p", "q"]}}
    made.members["models/model.json"] = json.dumps(model).encode()
    assert read(tmp_path, made).outputs == dict(zip(words, ("relu_", "x"), strict=True))


def test_outputs_that_are_no_arrays_are_left_out(tmp_path: Path) -> None:
    made = Archive()
    made.outputs = [{"user_output": {"arg": arg}} for arg in ({"as_none": True}, tensor("relu_"), {"as_int": 3})]
    made.out_spec = [1, part("builtins.tuple", "null", leaf(), leaf(), leaf())]
    assert read(tmp_path, made).outputs == {"1": "relu_"}
    made.outputs = made.outputs[:1]
    refused(tmp_path, made, "no array")


# --- arrays ---


def test_parameters_that_share_bytes_share_memory(tmp_path: Path) -> None:
    made = Archive()
    made.weights["net.conv.bias"] = payload(
        "weight_0", tensor_meta((2,), strides=ints([27]), storage_offset={"as_int": 13})
    )
    constants = read(tmp_path, made).constants
    assert np.shares_memory(constants["p_w"], constants["p_b"])
    np.testing.assert_array_equal(constants["p_b"], made.weight[:, 0, 1, 1, 1])


def test_transposed_and_repeated_arrays_have_their_values(tmp_path: Path) -> None:
    made = Archive()
    made.weights["net.conv.weight"]["tensor_meta"]["sizes"] = ints([3, 18])
    made.weights["net.conv.weight"]["tensor_meta"]["strides"] = ints([1, 3])
    made.weights["net.conv.bias"] = payload("weight_1", tensor_meta((5, 1), strides=ints([0, 2**62])))
    constants = read(tmp_path, made).constants
    np.testing.assert_array_equal(constants["p_w"], made.weight.reshape(18, 3).T)
    np.testing.assert_array_equal(constants["p_b"], np.full((5, 1), made.bias[0]))


def test_types_of_values_are_kept_and_bfloat16_is_widened(tmp_path: Path) -> None:
    made = Archive()
    values = np.array([1.5, -3.0], np.float32)
    made.members["data/weights/weight_1"] = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    made.weights["net.conv.bias"] = payload("weight_1", tensor_meta((2,), 13))
    found = read(tmp_path, made).constants["p_b"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)
    for number, dtype in ((6, "<f2"), (8, "<f8"), (4, "<i4"), (12, "bool")):
        made.members["data/weights/weight_1"] = np.array([1, 0]).astype(dtype).tobytes()
        made.weights["net.conv.bias"] = payload("weight_1", tensor_meta((2,), number))
        found = read(tmp_path, made).constants["p_b"]
        assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found, [1, 0])


def test_array_without_values_keeps_its_shape(tmp_path: Path) -> None:
    made = Archive()
    made.members["data/weights/weight_1"] = b""
    made.weights["net.conv.bias"] = payload("weight_1", tensor_meta((0, 3)))
    assert read(tmp_path, made).constants["p_b"].shape == (0, 3)


def test_type_unknown_to_numpy_is_refused_only_where_it_is_read(tmp_path: Path) -> None:
    made = Archive()
    made.members["data/constants/tensor_0"] = b"1234"
    made.constants["two"] = payload("tensor_0", tensor_meta((4,), 29))
    assert list(read(tmp_path, made).constants) == ["p_w", "p_b"]
    made.nodes[1]["inputs"].append({"name": "other", "arg": tensor("c_two"), "kind": 1})
    refused(tmp_path, made, "c_two", "float8_e4m3fn")


SIZES: list[dict[str, Any]] = [
    {"sizes": ints([2**60])},
    {"sizes": ints([2**31, 2**31]), "strides": ints([0, 0])},
    {"sizes": ints([2**60]), "strides": ints([0])},
    {"sizes": ints([0, 2**60, 2**60]), "strides": ints([1, 1, 1])},
    {"sizes": ints([3])},
    {"storage_offset": {"as_int": 1}},
    {"storage_offset": {"as_int": -1}},
    {"storage_offset": {"as_int": 2**62}},
    {"strides": ints([-1])},
    {"strides": ints([2**62])},
    {"strides": ints([2])},
    {"strides": []},
    {"sizes": ints([-2])},
    {"sizes": ints([1] * 40), "strides": ints([1] * 40)},
    {"sizes": [{"as_expr": {"expr_str": "s0"}}]},
    {"sizes": [2]},
    {"sizes": "2"},
    {"dtype": 8},
    {"dtype": 99},
    {"dtype": True},
    {"storage_offset": None},
]


@pytest.mark.parametrize("changes", SIZES, ids=lambda changes: str(changes)[:50])
def test_array_that_is_not_inside_its_bytes_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = Archive()
    made.weights["net.conv.bias"]["tensor_meta"].update(changes)
    refused(tmp_path, made)


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda made: made.weights.pop("net.conv.bias"), ["net.conv.bias", "weights"]),
        (lambda made: made.constants.clear(), ["two", "constants"]),
        (lambda made: made.members.update({"data/weights/weight_1": None}), ["data/weights/weight_1"]),
        (lambda made: made.members.update({"models/other.json": b"{}"}), ["2 networks"]),
        (lambda made: made.members.update({"byteorder": b"big"}), ["big"]),
        (lambda made: made.members.update({"models/model.json": b'{"graph_module": 3}'}), ["graph_module"]),
        (lambda made: made.members.update({"models/model.json": b"[" * 10**5}), ["models/model.json"]),
        (lambda made: made.nodes.pop(0), ["conv3d"]),
        (lambda made: made.nodes.append(made.nodes[0]), ["conv3d"]),
        (lambda made: made.outputs.append({"user_output": {"arg": tensor("nothing")}}), ["nothing"]),
        (lambda made: made.nodes[0].update(target="torch.ops.higher_order.cond"), ["torch.cond"]),
        (lambda made: made.nodes[0].update(target="_operator.mul"), ["while it runs"]),
        (lambda made: made.nodes[0]["inputs"][0].update(arg={"as_graph": {"name": "g", "graph": {}}}), ["torch.cond"]),
        (lambda made: made.nodes[0]["inputs"][0].update(arg={"as_custom_obj": {"name": "g"}}), ["as_custom_obj"]),
        (lambda made: made.nodes[0]["inputs"][0].update(arg={"as_sym_int": {"as_name": "s0"}}), ["while it runs"]),
        (lambda made: made.nodes[0].update(outputs=[{"as_sym_float": {"as_name": "item"}}]), ["while it runs"]),
        (lambda made: made.nodes[0].update(outputs=[{"as_none": True}]), ["as_none"]),
        (lambda made: made.inputs.append({"custom_obj": {}}), ["custom_obj"]),
        (lambda made: made.inputs[0].update(buffer={}), ["input"]),
        (lambda made: made.tensor_values["x"]["sizes"].append({"as_expr": {"expr_str": "s0"}}), ["dynamic_shapes"]),
    ],
)
def test_archive_with_parts_that_cannot_be_read_is_refused(
    tmp_path: Path, change: Callable[[Archive], object], parts: list[str]
) -> None:
    made = Archive()
    change(made)
    refused(tmp_path, made, *parts)


def test_network_in_training_mode_is_refused_with_the_remedy(tmp_path: Path) -> None:
    made = Archive()
    made.outputs.append({"buffer_mutation": {"arg": {"name": "relu_"}, "buffer_name": "net.norm.running_mean"}})
    refused(tmp_path, made, "net.norm.running_mean", "module.eval()")
    made = Archive()
    made.nodes.append(node("aten.add_.Tensor", {"self": tensor("c_two"), "other": {"as_int": 1}}, [tensor("add_")]))
    refused(tmp_path, made, "c_two", "module.eval()")


def test_value_that_is_read_after_it_changed_in_place_is_refused(tmp_path: Path) -> None:
    made = Archive()
    view = node("aten.slice.Tensor", {"self": tensor("conv3d")}, [tensor("part")])
    made.nodes.insert(1, view)
    read(tmp_path, made)
    made.nodes.append(node("aten.add.Tensor", {"self": tensor("relu_"), "other": tensor("part")}, [tensor("add")]))
    refused(tmp_path, made, "part", "relu_", "in place")
    made.nodes[-1] = node("aten.add.Tensor", {"self": tensor("relu_"), "other": tensor("relu_")}, [tensor("add")])
    read(tmp_path, made)
    made.outputs[0] = {"user_output": {"arg": tensor("part")}}
    refused(tmp_path, made, "part", "relu_", "in place")


def test_newer_version_is_read_if_it_can_be_and_named_if_not(tmp_path: Path) -> None:
    made = Archive()
    made.schema = (9, 1)
    read(tmp_path, made)
    made.members["archive_version"] = b"3"
    made.nodes[0].pop("outputs")
    refused(tmp_path, made, "9.1", "8.20", "format 3")


def test_any_argument_of_any_kind_gives_a_program_or_an_error(tmp_path: Path) -> None:
    kinds = sorted({kind for stored, _ in ARGUMENTS for kind in stored})
    path = tmp_path / "net.pt2"
    for kind in kinds:
        for value in VALUES:
            made = Archive()
            made.nodes[1]["inputs"].append({"name": "more", "arg": {kind: value}, "kind": 2})
            attempt(path, made.zipped())
