"""The layers of ONNX operators give what the definitions of the package onnx give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.importing.onnx_models import (
    Array,
    assert_same,
    floats,
    layers,
    model_of,
    node,
    one,
    random,
    read,
    walked,
    whole,
)
from znnpy.importing.builder import Builder
from znnpy.importing.tensors import LayoutError
from znnpy.trained import TrainedNetwork

KERNEL = random(3, 2, 3, 3, 3)
TRANSPOSED = random(2, 3, 2, 3, 4)
PER_MAP = random(2, 1, 1, 1, seed=3)
Nodes = Sequence[Any]


WINDOWS: Mapping[str, tuple[Nodes, Mapping[str, Array]]] = {
    "conv valid": ([node("Conv", "x w b")], {"w": KERNEL, "b": random(3)}),
    "conv padded": (
        [node("Conv", "x w", pads=[1, 0, 2, 0, 1, 1], strides=[1, 2, 3], dilations=[2, 1, 1], kernel_shape=[3, 3, 3])],
        {"w": KERNEL},
    ),
    "conv by groups": ([node("Conv", "x w", group=2)], {"w": random(4, 1, 1, 3, 3)}),
    "conv SAME_UPPER": ([node("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2, 2])], {"w": KERNEL}),
    "conv SAME_LOWER": ([node("Conv", "x w", auto_pad="SAME_LOWER", strides=[2, 2, 2])], {"w": KERNEL}),
    "conv VALID": ([node("Conv", "x w", auto_pad="VALID", strides=[1, 2, 2])], {"w": KERNEL}),
    "conv float16": ([node("Cast", "h", "w", to=1), node("Conv", "x w")], {"h": KERNEL.astype(np.float16)}),
    "transposed": (
        [node("ConvTranspose", "x w b", strides=[2, 3, 2], pads=[0, 1, 1, 1, 0, 0], output_padding=[1, 0, 1])],
        {"w": TRANSPOSED, "b": random(3)},
    ),
    "transposed SAME_UPPER": (
        [node("ConvTranspose", "x w", auto_pad="SAME_UPPER", strides=[2, 2, 3])],
        {"w": TRANSPOSED},
    ),
    "transposed SAME_LOWER": (
        [node("ConvTranspose", "x w", auto_pad="SAME_LOWER", strides=[2, 2, 3])],
        {"w": TRANSPOSED},
    ),
    "max pool": ([node("MaxPool", "x", kernel_shape=[2, 3, 3], strides=[2, 2, 1], pads=[0, 1, 0, 0, 1, 1])], {}),
    "max pool ceil": ([node("MaxPool", "x", kernel_shape=[2, 3, 3], strides=[2, 3, 3], ceil_mode=1)], {}),
    "average pool": ([node("AveragePool", "x", kernel_shape=[2, 2, 2], strides=[2, 2, 2])], {}),
    "average pool padded": (
        [node("AveragePool", "x", kernel_shape=[3, 3, 3], strides=[1, 2, 2], pads=[1] * 6, count_include_pad=1)],
        {},
    ),
    "average pool inside": ([node("AveragePool", "x", kernel_shape=[3, 3, 3], strides=[1, 2, 2], pads=[1] * 6)], {}),
    "batch norm": (
        [node("BatchNormalization", "x s b m v", epsilon=1e-3)],
        {"s": random(2), "b": random(2, seed=1), "m": random(2, seed=2), "v": floats(0.5, 2)},
    ),
    "pad": ([node("Pad", "x p")], {"p": whole(0, 0, 1, 0, 2, 0, 0, 0, 1, 0)}),
    "pad reflect": ([node("Pad", "x p", mode="reflect")], {"p": whole(0, 0, 1, 0, 2, 0, 0, 0, 1, 0)}),
    "pad edge by axes": ([node("Pad", "x p - a", mode="edge")], {"p": whole(1, 2, 0, 1), "a": whole(2, -1)}),
    "pad maps and volume": ([node("Pad", "x p")], {"p": whole(0, 1, 1, 0, 0, 0, 2, 0, 0, 1)}),
    "nearest": (
        [node("Resize", "x - s", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"s": floats(1, 1, 1, 2, 3)},
    ),
    "nearest half_pixel": ([node("Resize", "x - s")], {"s": floats(1, 1, 3, 2, 1)}),
    "nearest by sizes": (
        [node("Resize", "x - - n", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"n": whole(1, 2, 12, 16, 10)},
    ),
    "nearest by axes": ([node("Resize", "x - s", axes=[3, 4])], {"s": floats(2, 2)}),
    "nearest to fewer": (
        [node("Resize", "x - s", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"s": floats(1, 1, 1, 0.5, 0.5)},
    ),
    "linear": ([node("Resize", "x - s", mode="linear")], {"s": floats(1, 1, 1, 2, 3)}),
    "linear pytorch": (
        [node("Resize", "x - s", mode="linear", coordinate_transformation_mode="pytorch_half_pixel")],
        {"s": floats(1, 1, 2, 2, 2)},
    ),
}
VALUES: Mapping[str, tuple[Nodes, Mapping[str, Array]]] = {
    "add one": ([node("Add", "x c")], {"c": one(0.5)}),
    "add per map": ([node("Add", "c x")], {"c": PER_MAP}),
    "subtract": ([node("Sub", "x c")], {"c": PER_MAP}),
    "subtract from": ([node("Sub", "c x")], {"c": PER_MAP}),
    "multiply": ([node("Mul", "x c")], {"c": PER_MAP[None]}),
    "multiply uniform": ([node("Mul", "x c")], {"c": np.broadcast_to(PER_MAP, (2, 1, 1, 10))}),
    "divide": ([node("Div", "x c")], {"c": PER_MAP}),
    "negative": ([node("Neg", "x")], {}),
    "absolute": ([node("Abs", "x")], {}),
    "smaller of two": ([node("Relu", "x", "a"), node("Neg", "x", "b"), node("Min", "a b")], {}),
    "larger of two": ([node("Sigmoid", "x", "a"), node("Max", "a x")], {}),
    "square": ([node("Pow", "x c")], {"c": one(2)}),
    "two": ([node("Relu", "x", "a"), node("Sub", "x a", "b"), node("Mul", "a b")], {}),
    "twice": ([node("Add", "x x")], {}),
    "sum": ([node("Relu", "x", "a"), node("Sum", "x c a")], {"c": one(2)}),
    "max": ([node("Max", "x c")], {"c": one(0.25)}),
    "min": ([node("Min", "c x")], {"c": one(0.25)}),
    "relu": ([node("Relu", "x")], {}),
    "sigmoid": ([node("Sigmoid", "x")], {}),
    "tanh": ([node("Tanh", "x")], {}),
    "softplus": ([node("Softplus", "x")], {}),
    "hard swish": ([node("HardSwish", "x")], {}),
    "hard sigmoid": ([node("HardSigmoid", "x", alpha=0.25, beta=0.4)], {}),
    "leaky relu": ([node("LeakyRelu", "x", alpha=0.2)], {}),
    "elu": ([node("Elu", "x", alpha=0.7)], {}),
    "celu": ([node("Celu", "x")], {}),
    "selu": ([node("Selu", "x")], {}),
    "prelu per map": ([node("PRelu", "x c")], {"c": PER_MAP}),
    "prelu one": ([node("PRelu", "x c")], {"c": floats(0.3)}),
    "mish": ([node("Mish", "x")], {}),
    "softmax": ([node("Softmax", "x", axis=1)], {}),
    "softmax last": ([node("Softmax", "x", axis=-4)], {}),
    "clip": ([node("Clip", "x a b")], {"a": one(-0.5), "b": one(0.5)}),
    "clip below": ([node("Clip", "x a")], {"a": one(-0.5)}),
    "clip above": ([node("Clip", "x - b")], {"b": one(0.5)}),
    "relu by clip": ([node("Clip", "x a")], {"a": one(0)}),
}
LAYOUT: Mapping[str, tuple[Nodes, Mapping[str, Array]]] = {
    "slice": (
        [node("Slice", "x s e a t")],
        {"s": whole(1, -6), "e": whole(2**63 - 1, -1), "a": whole(2, 4), "t": whole(1, 2)},
    ),
    "one map": ([node("Slice", "x s e a")], {"s": whole(1), "e": whole(2), "a": whole(1)}),
    "split and join": (
        [node("Split", "x", "a b", axis=1, num_outputs=2), node("Concat", "b x a", axis=1)],
        {},
    ),
    "split unequal": ([node("Split", "x n", "a y", axis=-1)], {"n": whole(3, 7)}),
    "gather map": (
        [node("Gather", "x i", "a", axis=1), node("Unsqueeze", "a o")],
        {"i": np.asarray(-1), "o": whole(1)},
    ),
    "gather planes": ([node("Gather", "x i", axis=2)], {"i": whole(0, 2, 4)}),
    "transposed twice": (
        [
            node("Transpose", "x", "a", perm=[0, 2, 3, 4, 1]),
            node("Add", "a c", "b"),
            node("Transpose", "b", perm=[0, 4, 1, 2, 3]),
        ],
        {"c": random(2)},
    ),
    "dense over maps": (
        [
            node("Transpose", "x", "a", perm=[0, 2, 3, 4, 1]),
            node("MatMul", "a w", "b"),
            node("Add", "b c", "d"),
            node("Transpose", "d", perm=[0, 4, 1, 2, 3]),
        ],
        {"w": random(2, 3), "c": random(3)},
    ),
    "nearest by tile": (
        [
            node("Unsqueeze", "x o", "a"),
            node("Tile", "a t", "b"),
            node("Reshape", "b n"),
        ],
        {"o": whole(3), "t": whole(1, 1, 1, 2, 1, 1), "n": whole(1, 2, 12, 8, 10)},
    ),
    "nearest by expand": (
        [node("Unsqueeze", "x o", "a"), node("Expand", "a t", "b"), node("Reshape", "b n")],
        {"o": whole(5), "t": whole(1, 1, 1, 1, 1, 3), "n": whole(0, 0, 0, 0, 30)},
    ),
    "identity": (
        [node("Identity", "x", "a"), node("Dropout", "a", "b"), node("Cast", "b", "c", to=1), node("Relu", "c")],
        {},
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_operator_over_windows_is_exact(case: str, tmp_path: Path) -> None:
    nodes, arrays = WINDOWS[case]
    assert_same(model_of(nodes, arrays, dims=(1, 2, 6, 8, 10)), tmp_path, fixed=True)


@pytest.mark.parametrize("case", VALUES)
def test_operator_on_values_is_exact(case: str, tmp_path: Path) -> None:
    nodes, arrays = VALUES[case]
    assert_same(model_of(nodes, arrays), tmp_path, fixed=True)


@pytest.mark.parametrize("case", LAYOUT)
def test_operator_that_rearranges_is_exact(case: str, tmp_path: Path) -> None:
    nodes, arrays = LAYOUT[case]
    assert_same(model_of(nodes, arrays), tmp_path, fixed=True)


def test_shape_of_a_transposed_convolution_becomes_its_padding(tmp_path: Path) -> None:
    found = []
    for step in (
        node("ConvTranspose", "x w", strides=[2, 2, 2], output_shape=[11, 17, 20]),
        node("ConvTranspose", "x w", strides=[2, 2, 2], pads=[1, 0, 1, 0, 0, 1]),
    ):
        made = walked(model_of([step], {"w": TRANSPOSED}), tmp_path)
        found.append((made.builder.drafts[0].layer, made.outputs["y"].size))
    assert found[0] == found[1]
    assert found[0][1] == (11, 17, 20)


def test_align_corners_is_noted(tmp_path: Path) -> None:
    step = node("Resize", "x - s", mode="linear", coordinate_transformation_mode="align_corners")
    made = walked(model_of([step], {"s": floats(1, 1, 2, 2, 2)}), tmp_path)
    assert layers(made) == ["upsample 2x2x2 linear align_corners"]


def test_negative_padding_crops(tmp_path: Path) -> None:
    made = walked(model_of([node("Pad", "x p")], {"p": whole(0, 0, -1, 0, 0, 0, 0, 0, -2, 1)}), tmp_path)
    assert layers(made) == ["crop 1x0x0 0x2x0", "pad 0x0x0 0x0x1 zeros"]


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space_and_back_is_exact(mode: str, tmp_path: Path) -> None:
    nodes = [
        node("DepthToSpace", "x", "a", blocksize=2, mode=mode),
        node("Relu", "a", "b"),
        node("SpaceToDepth", "b", blocksize=2),
    ]
    assert_same(model_of(nodes, dims=(1, 8, "y", "x")), tmp_path, (1, 4, 6), "ncyx", maps=8)


def test_pixel_shuffle_before_norm_and_slope_is_exact(tmp_path: Path) -> None:
    nodes = [
        node("DepthToSpace", "x", "a", blocksize=2, mode="CRD"),
        node("Mul", "a c", "b"),
        node("PRelu", "b p", "d"),
        node("BatchNormalization", "d s s s v"),
    ]
    arrays = {"c": random(2, 1, 1), "p": random(2, 1, 1, seed=1), "s": random(2), "v": floats(1, 2)}
    assert_same(model_of(nodes, arrays, dims=(1, 8, "y", "x")), tmp_path, (1, 4, 6), "ncyx", maps=8)


def test_axes_of_size_1_are_not_mixed_up(tmp_path: Path) -> None:
    nodes = [node("Transpose", "x", "a", perm=[0, 1, 3, 2, 4]), node("Conv", "a w")]
    with pytest.raises(LayoutError):
        walked(model_of(nodes, {"w": random(1, 2, 1, 1, 1)}), tmp_path, (1, 5, 4))


def test_network_of_images_is_exact(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "a s s s v", "b"),
        node("PRelu", "b p", "c"),
        node("MaxPool", "c", "d", kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", "d - n", "e", mode="linear"),
        node("Pad", "e q", "f"),
        node("Slice", "f i j k", "g"),
        node("Concat", "g c", "h", axis=1),
        node("Add", "h t", "y"),
    ]
    arrays = {
        "w": random(3, 2, 3, 3), "s": random(3), "v": floats(1, 2, 3), "p": random(3, 1, 1), "n": floats(1, 1, 2, 2),
        "q": whole(0, 0, 1, 0, 0, 0, 0, 1), "i": whole(1, 0), "j": whole(99, -1), "k": whole(2, 3),
        "t": random(6, 1, 1),
    }  # fmt: skip
    assert_same(model_of(nodes, arrays, dims=(1, 2, "y", "x")), tmp_path, (1, 8, 6), "ncyx")


def test_channels_last_network_is_exact(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "x", "a", perm=[0, 4, 1, 2, 3]),
        node("Conv", "a w", "b", auto_pad="SAME_UPPER"),
        node("Transpose", "b", perm=[0, 2, 3, 4, 1]),
    ]
    model = model_of(nodes, {"w": KERNEL}, dims=(None, None, None, None, 2))
    assert_same(model, tmp_path, order="nzyxc")
    with pytest.raises(LayoutError):
        walked(model, tmp_path, order="nczyx")


def test_planes_that_keras_splits_and_joins_are_an_upsampling(tmp_path: Path) -> None:
    nodes = [
        node("Split", "x", " ".join(f"p{i}" for i in range(6)), axis=2, num_outputs=6),
        node("Concat", " ".join(f"p{i // 2}" for i in range(12)), "a", axis=2),
        node("Split", "a", " ".join(f"q{i}" for i in range(10)), axis=4, num_outputs=10),
        node("Concat", " ".join(f"q{i // 3}" for i in range(30)), axis=4),
    ]
    made = walked(model_of([*nodes, node("Relu", "y", "r")], outputs=["r"]), tmp_path)
    assert layers(made) == ["relu"]
    assert made.outputs["r"].shape == (1, 2, 12, 8, 30)
    conv = model_of([*nodes, node("Conv", "y w", "r")], {"w": KERNEL}, outputs=["r"], dims=(1, 2, 6, 8, 10))
    found = walked(conv, tmp_path)
    assert layers(found) == ["upsample 2x1x3 nearest", "conv 3x3x3 -> 3 none"]


GELU = {
    "x*0.5*(1+erf)": [node("Mul", "x h", "a"), node("Mul", "a t")],
    "0.5*(x*(1+erf))": [node("Mul", "x t", "a"), node("Mul", "h a")],
    "x*(0.5*(1+erf))": [node("Mul", "t h", "a"), node("Mul", "x a")],
}


@pytest.mark.parametrize("order", GELU)
@pytest.mark.parametrize("divided", [True, False])
def test_gelu_spelled_out_is_one_function(order: str, divided: bool, tmp_path: Path) -> None:
    root = one(2**0.5 if divided else 0.5**0.5)
    nodes = [
        node("Conv", "x w", "u"),
        node("Div" if divided else "Mul", "u r", "d"),
        node("Erf", "d", "e"),
        node("Add", "e i", "t"),
        *GELU[order],
    ]
    for step in nodes[4:]:
        step.input[:] = ["u" if name == "x" else name for name in step.input]
    found = assert_same(model_of(nodes, {"w": KERNEL, "r": root, "i": one(1), "h": one(0.5)}), tmp_path)
    assert [str(layer) for layer in found.network.layers] == ["conv 3x3x3 -> 3 gelu"]


def test_functions_spelled_out_are_found(tmp_path: Path) -> None:
    silu = [node("Sigmoid", "x", "a"), node("Mul", "x a")]
    assert layers(walked(model_of(silu), tmp_path)) == ["silu"]
    tanh = [
        node("Pow", "x three", "a"),
        node("Mul", "a k", "b"),
        node("Add", "x b", "c"),
        node("Mul", "c s", "d"),
        node("Tanh", "d", "e"),
        node("Add", "e i", "f"),
        node("Mul", "x f", "g"),
        node("Mul", "g h"),
    ]
    arrays = {"three": one(3), "k": one(0.044715), "s": one(0.7978845608), "i": one(1), "h": one(0.5)}
    assert layers(walked(model_of(tanh, arrays), tmp_path)) == ["gelu_tanh"]
    swish = [
        node("Add", "x three", "a"),
        node("Clip", "a zero six", "b"),
        node("Mul", "x b", "c"),
        node("Div", "c six"),
    ]
    assert layers(walked(model_of(swish, {"three": one(3), "zero": one(0), "six": one(6)}), tmp_path)) == ["hardswish"]
    assert_same(model_of(swish, {"three": one(3), "zero": one(0), "six": one(6)}), tmp_path)
    softplus = [node("Softplus", "x", "a"), node("Greater", "x t", "b"), node("Where", "b x a")]
    assert layers(walked(model_of(softplus, {"t": one(20)}), tmp_path)) == ["softplus"]


def test_other_products_are_no_known_function(tmp_path: Path) -> None:
    nodes = [node("Sigmoid", "x", "a"), node("Mul", "a c", "b"), node("Mul", "x b")]
    found = layers(walked(model_of(nodes, {"c": one(1.001)}), tmp_path))
    assert found == ["sigmoid", "scale none", "multiply none"]
    assert_same(model_of(nodes, {"c": one(1.001)}), tmp_path)


NORMS: Mapping[str, tuple[Nodes, int, str]] = {
    "instance": ([node("InstanceNormalization", "x s b", epsilon=1e-3)], 18, "instance_norm"),
    "group": ([node("GroupNormalization", "x s b", num_groups=1)], 21, "group_norm"),
    "layer": ([node("LayerNormalization", "x o", axis=1)], 18, "layer_norm"),
    "per map": ([node("LayerNormalization", "x o", axis=2)], 18, "instance_norm"),
    "by groups": (
        [
            node("Reshape", "x g", "a"),
            node("InstanceNormalization", "a f f", "c"),
            node("Shape", "x", "n"),
            node("Reshape", "c n"),
        ],
        18,
        "group_norm",
    ),
}


@pytest.mark.parametrize("case", NORMS)
def test_norm_over_space_is_one_layer(case: str, tmp_path: Path) -> None:
    nodes, opset, kind = NORMS[case]
    arrays = {"s": random(2), "b": random(2), "o": one(1), "g": whole(0, 1, -1), "f": floats(1)}
    made = walked(model_of(nodes, arrays, opset=opset), tmp_path)
    scale = ["scale none"] if case in ("instance", "group", "by groups") else []
    assert layers(made)[:1] == [kind]
    assert layers(made)[1:] == scale
    assert made.outputs["y"].shape == (1, 2, 6, 8, 10)
    assert_same(model_of(nodes, arrays, opset=opset), tmp_path)


def test_norm_of_images_keeps_four_dimensions(tmp_path: Path) -> None:
    nodes = [node("GroupNormalization", "x s b", "a", num_groups=2), node("Conv", "a w")]
    arrays = {"s": random(2), "b": random(2), "w": random(3, 2, 3, 3)}
    made = walked(model_of(nodes, arrays, dims=(1, 2, "y", "x"), opset=21), tmp_path, (1, 8, 6))
    assert layers(made) == ["group_norm groups 2", "scale none", "conv 1x3x3 -> 3 none"]
    assert made.outputs["y"].shape == (1, 3, 6, 4)


def test_squeeze_excitation_is_read(tmp_path: Path) -> None:
    for pooled in (
        [node("GlobalAveragePool", "x", "a")],
        [node("ReduceMean", "x axes", "a")],
        [
            node("ReduceMean", "x axes", "p", keepdims=0),
            node("Gemm", "p w c", "q", transB=1),
            node("Reshape", "q shape", "a"),
        ],
    ):
        nodes = [*pooled, node("Sigmoid", "a", "b"), node("Expand", "b full", "c1"), node("Mul", "x c1")]
        arrays = {
            "axes": whole(2, 3, -1),
            "w": random(2, 2),
            "c": random(2),
            "shape": whole(1, 2, 1, 1, 1),
            "full": whole(1, 2, 6, 8, 10),
        }
        made = walked(model_of(nodes, arrays), tmp_path)
        assert layers(made)[0] == "global_pool"
        assert layers(made)[-1] == "multiply none"
        assert made.outputs["y"].shape == (1, 2, 6, 8, 10)
        assert_same(model_of(nodes, arrays), tmp_path, fixed=True)


@pytest.mark.parametrize("kind", ["GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax"])
def test_global_pooling_is_a_mean_or_a_maximum(kind: str, tmp_path: Path) -> None:
    nodes = [node(kind, "x" if kind.startswith("Global") else "x axes", "a"), node("Mul", "x a")]
    made = walked(model_of(nodes, {"axes": whole(2, 3, 4)}), tmp_path)
    assert layers(made)[0] == ("global_pool max" if "Max" in kind else "global_pool")
    if kind != "GlobalMaxPool":  # of which the package onnx gives more dimensions than its text says
        assert_same(model_of(nodes, {"axes": whole(2, 3, 4)}), tmp_path)


def test_shape_arithmetic_is_evaluated(tmp_path: Path) -> None:
    nodes = [
        node("MaxPool", "x", "a", kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
        node("Shape", "x", "n"),
        node("Slice", "n two five", "m"),
        node("Concat", "ones m", "k", axis=0),
        node("Resize", "a - - k", "b", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        node("Concat", "x b", axis=1),
    ]
    assert_same(model_of(nodes, {"two": whole(2), "five": whole(5), "ones": whole(1, 2)}), tmp_path)


def test_layers_have_the_names_of_nodes(tmp_path: Path) -> None:
    made = walked(model_of([node("Relu", "x", "a"), node("Sigmoid", "a", "y")]), tmp_path)
    assert [draft.name for draft in made.builder.drafts] == ["Relu_a", "Sigmoid_y"]
    assert isinstance(made.builder, Builder)


def test_nearest_to_fewer_leaves_out_what_is_behind_the_last_whole_block(tmp_path: Path) -> None:
    nodes = [node("Resize", "x - s", coordinate_transformation_mode="asymmetric", nearest_mode="floor")]
    model = model_of(nodes, {"s": floats(1, 1, 0.5, 1, 0.5)})
    found = read(model, tmp_path)
    image = random(2, 7, 8, 5)
    result = TrainedNetwork(found.network, found.weights)(image, calibrate=False, ram="4G", threads=1)
    np.testing.assert_array_equal(result, image[:, :6:2, :, :4:2])
