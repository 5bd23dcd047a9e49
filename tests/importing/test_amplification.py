"""Small files that ask for much memory or time are refused, or take little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.importing.onnx_models import model_of, node, walked, whole
from tests.support.messages import assert_holds
from tests.support.pt2_archives import Archive, ints, payload, read, refused, tensor_meta
from znnpy.errors import NetworkFileError
from znnpy.importing import aten_constants
from znnpy.importing.arranged import MOST_MADE
from znnpy.importing.aten_constants import Evaluation
from znnpy.importing.builder import Builder
from znnpy.importing.drafts import MOST_DRAFTS, MOST_OF_SIZE, Draft
from znnpy.importing.pt2_archive import MOST_REPEATED


def test_kernels_that_move_values_are_counted_together(tmp_path: Path) -> None:
    """Each shuffle of 4096 maps takes 64 MB, and a file of a few lines may hold hundreds."""
    nodes = []
    for at in range(4):
        nodes += [
            node("Reshape", f"x{at} s" if at else "x s", f"a{at}"),
            node("Transpose", f"a{at}", f"b{at}", perm=[0, 2, 1, 3, 4, 5]),
            node("Reshape", f"b{at} t", f"c{at}"),
            node("MaxPool", f"c{at}", f"x{at + 1}", kernel_shape=[1, 1, 1]),
        ]
    arrays = {"s": whole(1, 2, 2048, 2, 2, 2), "t": whole(1, 4096, 2, 2, 2)}
    model = model_of([*nodes, node("Relu", "x4")], arrays, dims=(1, 4096, 2, 2, 2))
    with pytest.raises(NetworkFileError) as caught:
        walked(model, tmp_path, (2, 2, 2))
    assert_holds(caught, "MaxPool_x3", str(4096**2), str(MOST_MADE))


def test_nodes_of_one_size_are_remembered_up_to_a_number() -> None:
    builder = Builder()
    image = builder.input(1, (8, 8, 8))
    for at in range(3 * MOST_OF_SIZE):
        builder.at(f"crop{at}", "Slice")
        builder.crop(image, (0, 0, 0), (1, 1, 1))
    assert max(len(draft.options) for draft in builder.drafts) <= 1 + MOST_OF_SIZE


def test_layers_are_read_up_to_a_number() -> None:
    builder = Builder()
    x = builder.input(1, (8, 8, 8))
    builder.drafts = [Draft(f"{at}", (), ()) for at in range(MOST_DRAFTS)]
    builder.at("last", "Relu")
    with pytest.raises(NetworkFileError) as caught:
        builder.activation(x, "relu")
    assert_holds(caught, "node last", f"{MOST_DRAFTS:,}")


def test_arrays_of_a_program_that_repeat_their_bytes_are_counted_together(tmp_path: Path) -> None:
    made = Archive()
    repeated = tensor_meta((MOST_REPEATED // 2 + 1,), strides=ints([0]))
    made.weights["net.conv.bias"] = payload("weight_1", repeated)
    assert read(tmp_path, made).constants["p_b"].size == MOST_REPEATED // 2 + 1
    made.weights["net.conv.weight"] = payload("weight_0", repeated)
    refused(tmp_path, made, str(MOST_REPEATED // 2 + 1))


def test_known_values_of_a_program_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_constants, "MOST_VALUES", 100)
    stored = np.ones((2, 1), np.float32)
    evaluation = Evaluation.of({"w": stored})
    made = [evaluation.evaluated("expand", {"self": stored, "size": [2, 30]}) for _ in range(4)]
    assert [one is not None for one in made] == [True, True, False, False]  # 132 values, and each has 60
    assert Evaluation(1000).evaluated("add", {"self": stored, "other": np.ones((3, 7), np.float32)}) is None
