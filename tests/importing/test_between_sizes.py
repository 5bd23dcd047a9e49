"""A network whose layers differ between sizes that it takes is refused: sizes between periods are tried."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from znnpy.errors import NetworkFileError
from znnpy.importing.finish import Wishes
from znnpy.layers import Conv
from znnpy.network_files import read_model


def model(folder: Path, *, skip: bool, how: str) -> Path:
    """Write a convolution with stride 2 whose padding follows from the size, with or without a skip connection."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((2, 1, 3, 3, 3)), "v": rng.standard_normal((2, 2, 2, 2, 2))}
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], "down", auto_pad=how, strides=[2, 2, 2])]
    if skip:
        nodes.append(helper.make_node("ConvTranspose", ["a", "v"], ["u"], "up", strides=[2, 2, 2]))
        nodes.append(helper.make_node("Concat", ["x", "u"], ["o"], "join", axis=1))
    given, *found = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, maps, "z", "y", "x"])
        for name, maps in (("x", 1), ("o", 3) if skip else ("a", 2))
    )
    arrays = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", [given], found, arrays)
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("how", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_that_follows_from_the_size_is_refused_where_sizes_differ(how: str, tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError) as caught:
        read_model(model(tmp_path, skip=False, how=how), Wishes())
    words = ("node down", "64x64x64", "65x65x65", "0x0x0", "1x1x1", "depends on the size of the volume")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("how", "behind"), [("SAME_UPPER", True), ("SAME_LOWER", False)])
def test_skip_connection_allows_only_sizes_for_which_it_is_the_same(how: str, behind: bool, tmp_path: Path) -> None:
    network = read_model(model(tmp_path, skip=True, how=how), Wishes()).network
    layer = network.layers[0]
    assert isinstance(layer, Conv)
    assert layer.padding == (((0,) * 3, (1,) * 3) if behind else ((1,) * 3, (0,) * 3))
