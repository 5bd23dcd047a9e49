"""A network that is made in Python is checked as one from a file: each mistake is an error of one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.seeded_graphs import case
from tests.support.tiers import one_in
from znnpy.errors import NetworkFileError, ShapeError
from znnpy.formats.weights import random_weights
from znnpy.layers import Activate, Add, Concat, Conv, ConvTranspose, Crop, Layer, Maxout, Pool, Scale, Upsample
from znnpy.network import ConvWeights, Network
from znnpy.trained import TrainedNetwork
from znnpy.wiring import Wiring

ONES = (1, 1, 1)
LAYERS: tuple[Layer, ...] = (
    Conv(ONES, 4),
    Pool((2, 2, 2)),
    Conv(ONES, 4),
    Upsample((2, 2, 2)),
    Concat(),
    Conv(ONES, 1),
)
WIRING = Wiring(("a", "down", "b", "up", "both", "last"), ((0,), (1,), (2,), (3,), (1, 4), (5,)), (6,))


def made(layers: tuple[Layer, ...] = LAYERS, **changes: Any) -> Network:
    return Network("net", 1, layers, None, replace(WIRING, **changes))


def with_layer(index: int, layer: Layer, **changes: Any) -> Network:
    return made((*LAYERS[:index], layer, *LAYERS[index + 1 :]), **changes)


WIRINGS = [
    ("cycle", {"sources": ((4,), (1,), (2,), (3,), (1, 4), (5,))},
     "node a (conv 1x1x1 -> 4 none) reads the tensors (4,), and there are 0 to 0 before it: the input and what earlier "
     "layers give; put layers after those that they read"),
    ("itself", {"sources": ((0,), (1,), (3,), (3,), (1, 4), (5,))},
     "node b (conv 1x1x1 -> 4 none) reads the tensors (3,)"),
    ("missing", {"sources": ((0,), (1,), (2,), (3,), (1, 40), (5,))},
     "node both (concat) reads the tensors (1, 40), and"),
    ("negative", {"sources": ((0,), (1,), (-1,), (3,), (1, 4), (5,))},
     "node b (conv 1x1x1 -> 4 none) reads the tensors"),
    ("nothing", {"sources": ((0,), (1,), (), (3,), (1, 4), (5,))},
     "node b (conv 1x1x1 -> 4 none) reads the tensors (),"),
    ("short", {"sources": ((0,), (1,))},
     "the wiring has 6 names and 2 lists of what layers read, and the network has 6"),
    ("twice", {"names": ("a", "down", "a", "up", "both", "last")},
     "node a (conv 1x1x1 -> 4 none) has the name of another"),
    ("input", {"names": ("input", "down", "b", "up", "both", "last")}, "has the name of another node, or of the input"),
    ("no output", {"outputs": ()}, "a network has one output or several different ones; name each once"),
    ("same output", {"outputs": (6, 6)}, "a network has one output or several different ones; name each once"),
    ("input as output", {"outputs": (6, 0)},
     "the outputs are the tensors (6, 0), and layers give 1 to 6; correct them"),
    ("unknown output", {"outputs": (7,)}, "the outputs are the tensors (7,), and layers give 1 to 6; correct them"),
    ("unread", {"sources": ((0,), (1,), (2,), (2,), (1, 4), (5,))},
     "no node reads b, and it is no output; remove it, or add it to output"),
    ("padding", {"pad_to_period": "mirror"},
     "pad_to_period is 'mirror'; choose one of reflect, replicate, zeros, refuse"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), [one[1:] for one in WIRINGS], ids=[one[0] for one in WIRINGS])
def test_wrong_wiring_is_refused(changes: dict[str, Any], said: str) -> None:
    assert made().meaning == "whole"
    with pytest.raises(ShapeError) as refused:
        made(**changes)
    assert str(refused.value).startswith(said) or said in str(refused.value)
    assert "\n" not in str(refused.value)


WRONG: list[tuple[int, Layer, str]] = [
    (2, Conv(ONES, 3, groups=3), "has 3 groups, which do not divide the 4 maps it gets; change groups"),
    (2, Maxout(3), "does not divide the 4 maps it gets; change of, or the number of maps"),
    (2, Conv((0, 1, 1), 4), "has kernel = (0, 1, 1), which must be whole numbers from 1 on; correct it"),
    (2, Conv(ONES, 0), "has out = 0, which must be a whole number from 1 on; correct it"),
    (2, Conv(ONES, 4, padding=((0, 0, 0), (0, -1, 0))), "which must be whole numbers from 0 on; correct it"),
    (2, Conv(ONES, 4, "rleu"), "has activation = 'rleu', which is none of none, relu,"),  # type: ignore[arg-type]
    (2, Activate("bend"), "has function = 'bend', which is none of none, relu,"),  # type: ignore[arg-type]
    (1, Pool((2, 2, 2), padding=((2, 0, 0), (0, 0, 0))), "pads 2x0x0 voxels, which is more than half of its window"),
    (3, ConvTranspose((2, 2, 2), 4, (2, 2, 2), output_padding=(2, 0, 0)),
     "has the output_padding 2x0x0, which must be"),
    (3, Upsample(), "has a factor and a node whose size it gets, or neither; give one of them"),
    (3, Upsample(None, "last"), "gets the size of last, which is no node before it; name an earlier one"),
    (3, Crop(like="gone"), "gets the size of gone, which is no node before it; name an earlier one"),
    (4, Scale(), "reads 2 nodes, a, up, but takes one; join them before it with concat, add or multiply"),
    (5, Add(), "reads both alone, but joins two nodes or more; name them, for example from: [both, OTHER]"),
]  # fmt: skip


@pytest.mark.parametrize(("index", "layer", "said"), WRONG, ids=[str(one[1]) for one in WRONG])
def test_a_layer_that_does_not_fit_is_refused_by_its_name(index: int, layer: Layer, said: str) -> None:
    with pytest.raises(ShapeError) as refused:
        with_layer(index, layer)
    assert str(refused.value).startswith(f"node {WIRING.names[index]} ({layer}) ")
    assert said in str(refused.value)


def test_maps_that_do_not_add_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"^node both \(add none\) joins a of 4 maps with up of 3; give both the same"):
        made((*LAYERS[:2], Conv(ONES, 3), LAYERS[3], Add(), LAYERS[5]))


def test_layers_of_a_chain_are_called_by_their_place() -> None:
    with pytest.raises(ShapeError, match=r"^layer 1 \(maxout of 3\) does not divide the 4 maps"):
        Network("chain", 1, (Conv(ONES, 4), Maxout(3)))
    with pytest.raises(ShapeError, match=r"^layer 1 \(add none\) reads conv0 alone"):
        Network("chain", 1, (Conv(ONES, 4), Add()))


def test_wrong_weights_are_refused_by_their_layer() -> None:
    network = made()
    right = random_weights(network)
    assert TrainedNetwork(network, right).weights == right
    with pytest.raises(NetworkFileError, match=r"^2 weights are given, and net has 3 layers that take some; give"):
        TrainedNetwork(network, right[:2])
    wrong: list[tuple[Any, str]] = [
        (
            right[0].weight[..., 0],
            r"the weight is float32 of shape \(4, 1, 1, 1\), but must be float32 of",
        ),
        (right[0].weight.astype(np.float64), "the weight is float64 of shape"),
    ]
    for changed, said in wrong:
        with pytest.raises(NetworkFileError, match=rf"^node a \(conv 1x1x1 -> 4 none\): {said}"):
            TrainedNetwork(network, (ConvWeights(changed, right[0].bias), *right[1:]))
    with pytest.raises(NetworkFileError, match=r"the bias is float32 of shape \(3,\), but must be float32"):
        TrainedNetwork(network, (ConvWeights(right[0].weight, right[0].bias[:3]), *right[1:]))


def test_sizes_that_do_not_meet_are_refused_by_a_call() -> None:
    network = made((*LAYERS[:3], Upsample((3, 3, 3)), *LAYERS[4:]))
    with pytest.raises(ShapeError, match=r"^node both \(concat\) joins a, one voxel for 1 of the input along z"):
        TrainedNetwork(network, random_weights(network))(np.zeros((8, 8, 8), np.float32), device="cpu")


@pytest.mark.parametrize("seed", one_in(10, range(200)))
def test_networks_that_are_right_pass(seed: int) -> None:
    one = case(seed)
    assert replace(one.network, name="again") != one.network
    assert TrainedNetwork(one.network, one.weights)
