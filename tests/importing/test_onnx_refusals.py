"""Operators of ONNX that cannot be computed are refused with their names and numbers; users may register their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.importing.onnx_models import Array, floats, layers, model_of, node, one, random, walked, whole
from tests.support.messages import assert_holds
from znnpy.errors import NetworkFileError
from znnpy.importing.onnx_site import HANDLERS, Site, Value, register_onnx

KERNEL = random(3, 2, 3, 3, 3)
Nodes = Sequence[Any]

REFUSED: Mapping[str, tuple[Nodes, Mapping[str, Array], tuple[str, ...]]] = {
    "near name": ([node("Relux", "x")], {}, ("Relux_y", "Relux", "Relu", "register_onnx")),
    "own domain": ([node("Conv", "x w", domain="com.microsoft")], {"w": KERNEL}, ("com.microsoft::Conv",)),
    "if": ([node("Greater", "x c", "g"), node("If", "g", then_branch=None)], {"c": one(0)}, ("Greater",)),
    "loop": ([node("Loop", "- - x")], {}, ("Loop", "loops")),
    "divide by array": ([node("Relu", "x", "a"), node("Div", "x a")], {}, ("Div_y",)),
    "divide by zero": ([node("Div", "x c")], {"c": floats(0)}, ("divides by 0",)),
    "power": ([node("Pow", "x c")], {"c": one(3)}, ("exponent 3",)),
    "per voxel": ([node("Add", "x c")], {"c": random(1, 2, 6, 8, 10)}, ("voxel", "(1, 2, 6, 8, 10)")),
    "pad value": ([node("Pad", "x p v")], {"p": whole(0, 0, 1, 0, 0, 0, 0, 0, 0, 0), "v": one(2)}, ("pads with 2",)),
    "wrap": ([node("Pad", "x p", mode="wrap")], {"p": whole(0, 0, 1, 0, 0, 0, 0, 0, 0, 0)}, ("mode=wrap",)),
    "cubic": ([node("Resize", "x - s", mode="cubic")], {"s": floats(1, 1, 2, 2, 2)}, ("mode=cubic",)),
    "nearest ceil": (
        [node("Resize", "x - s", nearest_mode="ceil")],
        {"s": floats(1, 1, 2, 2, 2)},
        ("half_pixel", "ceil"),
    ),
    "linear to fewer": ([node("Resize", "x - s", mode="linear")], {"s": floats(1, 1, 1, 0.5, 0.5)}, ("[6, 4, 5]",)),
    "linear asymmetric": (
        [node("Resize", "x - s", mode="linear", coordinate_transformation_mode="asymmetric")],
        {"s": floats(1, 1, 2, 2, 2)},
        ("coordinate_transformation_mode=asymmetric", "half_pixel"),
    ),
    "fraction": (
        [node("Resize", "x - s", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"s": floats(1, 1, 1.3, 1, 1)},
        ("1.3", "7.8"),
    ),
    "training": (
        [node("BatchNormalization", "x s s s s", training_mode=1)],
        {"s": floats(1, 1)},
        ("training", "eval()"),
    ),
    "group norm of 18": ([node("GroupNormalization", "x s s", num_groups=1)], {"s": floats(1)}, ("opset 18", "21")),
    "layer norm of maps": (
        [node("Transpose", "x", "a", perm=[0, 2, 3, 4, 1]), node("LayerNormalization", "a s")],
        {"s": floats(1, 1)},
        ("maps of each voxel",),
    ),
    "softmax of space": ([node("Softmax", "x")], {}, ("dimension 4",)),
    "indices": (
        [node("MaxPool", "x", "a i", kernel_shape=[2, 2, 2]), node("Relu", "i")],
        {},
        ("reads i", "further output"),
    ),
    "step back": ([node("Slice", "x s e a t")], {"s": whole(9), "e": whole(0), "a": whole(2), "t": whole(-1)}, ("-1",)),
    "reshape": ([node("Reshape", "x n")], {"n": whole(1, 2, 8, 6, 10)}, ("Reshape_y", "(1, 2, 8, 6, 10)")),
    "weights": ([node("Relu", "x", "a"), node("Conv", "x a")], {}, ("Conv_y", "input 1")),
    "conv of vectors": ([node("Conv", "x w")], {"w": random(3, 2, 3)}, ("1 dimensions",)),
    "maps": ([node("Conv", "x w")], {"w": random(3, 4, 1, 1, 1)}, ("4 maps", "gets 2")),
    "float64": ([node("Conv", "x w")], {"w": KERNEL.astype(np.float64)}, ("float64",)),
    "not finite": ([node("Conv", "x w")], {"w": np.full((1, 2, 1, 1, 1), np.nan, np.float32)}, ("2 of 2",)),
    "to int": ([node("Cast", "x", to=7)], {}, ("INT64",)),
    "dropout": ([node("Dropout", "x - t")], {"t": np.asarray(True)}, ("training",)),
    "output": ([node("Identity", "c")], {"c": floats(1)}, ("output y",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operator_that_cannot_be_computed_is_refused(case: str, tmp_path: Path) -> None:
    nodes, arrays, words = REFUSED[case]
    with pytest.raises(NetworkFileError) as caught:
        walked(model_of(nodes, arrays), tmp_path)
    assert_holds(caught.value, *words)
    assert str(caught.value).count("node ") <= 1


def test_registered_operator_is_used(tmp_path: Path) -> None:
    def handler(site: Site) -> Value:
        return site.builder.activation(site.tensor(), "leaky_relu", site.real("slope", 0.5))

    register_onnx("my.domain::Bent", handler)
    try:
        made = walked(model_of([node("Bent", "x", domain="my.domain", slope=0.25)]), tmp_path)
    finally:
        del HANDLERS["my.domain::Bent"]
    assert layers(made) == ["leaky_relu 0.25"]
