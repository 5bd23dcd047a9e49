"""Graphs in network.yaml: names, what nodes read, all layers, and in which words a graph is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.formats.test_networks import refusal, write
from znnpy.admissible import period_of
from znnpy.errors import ShapeError
from znnpy.layers import (
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    GlobalPool,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Norm,
    Pad,
    Pool,
    Scale,
    Upsample,
)
from znnpy.network import Network
from znnpy.network_files import read_network
from znnpy.wiring import Wiring

SIZE = "a whole number from 1 to 1000000 or three of them, [z, y, x]"
SIZE_OR_ZERO = "a whole number from 0 to 1000000 or three of them, [z, y, x]"
UNET = """
input_channels: 1
pad_to_period: replicate
output: [head, enc]
layers:
- {name: enc, type: conv, kernel: 3, out: 4, padding: same}
- {name: enc_norm, type: batch_norm, activation: relu}
- {type: pool, window: 2}
- {name: mid, type: conv, kernel: 3, out: 8, padding: 1, activation: {function: leaky_relu, slope: 0.1}}
- {name: up, type: conv_transpose, kernel: 2, stride: 2, out: 4}
- {name: skip, type: concat, from: [enc_norm, up]}
- {name: head, type: conv, kernel: 1, out: 1, activation: sigmoid}
"""


def net(layers: str, maps: int = 1, **more: str) -> str:
    return "\n".join([f"input_channels: {maps}", *(f"{k}: {v}" for k, v in more.items()), "layers:", layers])


def read(folder: Path, content: str) -> Network:
    return read_network(write(folder, content)).network


def test_unet_is_read(tmp_path: Path) -> None:
    sides = (1, 1, 1), (1, 1, 1)
    assert read(tmp_path, UNET) == Network(
        "net",
        1,
        (
            Conv((3, 3, 3), 4, padding=sides),
            Scale("relu", epsilon=1e-5, type="batch_norm"),
            Pool((2, 2, 2)),
            Conv((3, 3, 3), 8, "leaky_relu", padding=sides, parameters=(0.1,)),
            ConvTranspose((2, 2, 2), 4, (2, 2, 2)),
            Concat(),
            Conv((1, 1, 1), 1, "sigmoid"),
        ),
        None,
        Wiring(
            ("enc", "enc_norm", "pool2", "mid", "up", "skip", "head"),
            ((0,), (1,), (2,), (3,), (4,), (2, 5), (6,)),
            (7, 1),
            "replicate",
        ),
    )


LAYERS: list[tuple[str, Layer]] = [
    ("{type: conv, kernel: 2, out: 2, stride: [1, 2, 3], dilation: 2, groups: 2, padding: [0, 1, 2], "
     "padding_mode: reflect}",
     Conv((2,) * 3, 2, "none", (1, 2, 3), (2,) * 3, 2, ((0, 1, 2),) * 2, "reflect")),
    ("{type: conv, kernel: [1, 3, 5], dilation: [1, 2, 1], out: 2, padding: same}",
     Conv((1, 3, 5), 2, dilation=(1, 2, 1), padding=((0, 2, 2), (0, 2, 2)))),
    ("{type: conv, kernel: 2, out: 2, padding: {behind: 1}}",
     Conv((2,) * 3, 2, padding=((0,) * 3, (1,) * 3))),
    ("{type: conv, kernel: 2, out: 2, padding: {before: [1, 0, 0], behind: [0, 1, 2]}}",
     Conv((2,) * 3, 2, padding=((1, 0, 0), (0, 1, 2)))),
    ("{type: conv, kernel: 2, out: 2, activation: {function: clip, least: -1, most: 6}}",
     Conv((2,) * 3, 2, "clip", parameters=(-1.0, 6.0))),
    ("{type: conv, kernel: 2, out: 2, activation: elu}", Conv((2,) * 3, 2, "elu", parameters=(1.0,))),
    ("{type: pool, window: 3, stride: 2, padding: 1, ceil: true}", Pool((3,) * 3, (2,) * 3, ((1,) * 3,) * 2, True)),
    ("{type: pool, window: 2, stride: 2, ceil: true}", Pool((2,) * 3, None, ceil=True)),
    ("{type: average_pool, window: 3, padding: {before: 1}, count_padding: false}",
     AveragePool((3,) * 3, None, ((1,) * 3, (0,) * 3), count_padding=False)),
    ("{type: maxfilter, window: 2}", MaxFilter((2,) * 3)),
    ("{type: maxout, of: 2}", Maxout(2)),
    ("{type: conv_transpose, kernel: 4, out: 4, stride: 2, padding: 1, output_padding: [0, 1, 1], groups: 2, "
     "activation: silu}",
     ConvTranspose((4,) * 3, 4, (2,) * 3, ((1,) * 3,) * 2, (0, 1, 1), (1,) * 3, 2, "silu")),
    ("{type: upsample, factor: [1, 2, 2], how: linear}", Upsample((1, 2, 2), None, "linear")),
    ("{type: upsample, factor: 2, how: linear, align_corners: true}", Upsample((2,) * 3, None, "linear", True)),
    ("{type: upsample, like: input}", Upsample(None, "input")),
    ("{type: crop, before: 1, behind: [0, 1, 0]}", Crop((1,) * 3, (0, 1, 0))),
    ("{type: crop, like: input}", Crop(like="input")),
    ("{type: pad, before: 1, how: replicate}", Pad((1,) * 3, (0,) * 3, "replicate")),
    ("{type: add, from: [input, input], activation: relu}", Add("relu")),
    ("{type: multiply, from: [input, input]}", Multiply()),
    ("{type: scale, activation: tanh}", Scale("tanh")),
    ("{type: batch_norm, epsilon: 1e-3}", Scale(epsilon=1e-3, type="batch_norm")),
    ("{type: activation, function: leaky_relu}", Activate("leaky_relu", (0.01,))),
    ("{type: activation, function: elu, alpha: 2}", Activate("elu", (2.0,))),
    ("{type: activation, function: prelu}", Activate("prelu")),
    ("{type: instance_norm, epsilon: 1e-3}", Norm("instance_norm", 1e-3)),
    ("{type: instance_norm, affine: true, activation: leaky_relu}",
     Norm("instance_norm", affine=True, activation="leaky_relu", parameters=(0.01,))),
    ("{type: group_norm, groups: 2}", Norm("group_norm", 1e-5, 2)),
    ("{type: layer_norm}", Norm("layer_norm")),
    ("{type: global_pool}", GlobalPool()),
    ("{type: global_pool, how: max}", GlobalPool("max")),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "layer"), LAYERS, ids=range(len(LAYERS)))
def test_every_layer_is_read(entry: str, layer: Layer, tmp_path: Path) -> None:
    network = read(tmp_path, net(f"- {entry}", maps=2))
    assert network.layers == (layer,)
    if not isinstance(layer, MaxFilter | Maxout):
        assert network.wiring is not None
        assert network.names == (f"{layer.type}0",)


def test_order_in_the_file_does_not_matter(tmp_path: Path) -> None:
    first = read(tmp_path, net("- {name: a, type: pool, window: 2}\n- {name: b, type: maxfilter, window: 2}"))
    second = read(
        tmp_path,
        net(
            "- {name: b, type: maxfilter, window: 2, from: a}\n- {name: a, type: pool, window: 2, from: input}",
            output="b",
        ),
    )
    assert first == second
    # A node comes after the one whose size it gets, even if it does not read it.
    network = read(
        tmp_path,
        net(
            "- {name: c, type: crop, like: b, from: input}\n- {name: b, type: maxfilter, window: 3, from: input}\n"
            "- {name: s, type: add, from: [b, c]}"
        ),
    )
    assert network.names == ("b", "c", "s")


def test_chains_have_no_wiring_until_something_is_named(tmp_path: Path) -> None:
    layers = "- {type: conv, kernel: 3, out: 2, activation: relu, stride: 1, padding: 0}\n- {type: pool, window: 2}"
    chain = read(tmp_path, net(layers))
    assert chain.wiring is None
    assert chain == Network("net", 1, (Conv((3,) * 3, 2, "relu"), Pool((2,) * 3)))
    named = read(tmp_path, net(layers.replace("type: pool", "name: last, type: pool")))
    assert named.names == ("conv0", "last")
    assert (named.meaning, named.sha256, named.field_of_view) == ("sliding", chain.sha256, chain.field_of_view)
    assert read(tmp_path, net(layers, output="pool1")).wiring is not None
    assert read(tmp_path, net(layers, pad_to_period="zeros")).wiring is not None
    padded = read(tmp_path, net("- {type: conv, kernel: 3, out: 2, padding: 1}"))
    assert (padded.meaning, padded.names) == ("whole", ("conv0",))


def test_optional_keys_may_be_empty(tmp_path: Path) -> None:
    empty = "- {name: , from: , type: pool, window: 2, stride: }"
    assert read(tmp_path, net(empty, output="", pad_to_period="")).wiring is None


def test_valid_unet_with_crops_is_read(tmp_path: Path) -> None:
    """No multiple of its period suits it, but another residue does."""
    network = read(
        tmp_path,
        net(
            "- {name: a, type: conv, kernel: 3, out: 2}\n- {type: pool, window: 2}\n- {type: conv, kernel: 3, out: 2}\n"
            "- {name: up, type: upsample, factor: 2}\n- {name: cut, type: crop, like: up, from: a}\n"
            "- {name: sum, type: add, from: [cut, up]}"
        ),
    )
    assert network.meaning == "whole"


EQUAL = "\n- {name: sum, type: add, from: [a, b]}"
A = "- {name: a, type: conv, kernel: 1, out: 4}\n"
REFUSED: list[tuple[str, str]] = [
    # the graph
    (net("- {name: a, type: pool, window: 1, from: c}\n- {name: b, type: pool, window: 1}\n"
         "- {name: c, type: pool, window: 1}"),
     "the nodes a -> b -> c -> a form a cycle, in which each waits for the one before it; change what a reads "
     "or takes its size from"),
    (net("- {name: a, type: pool, window: 1, from: a}"),
     "the nodes a -> a form a cycle, in which each waits for the one before it; change what a reads "
     "or takes its size from"),
    (net("- {name: enc1, type: pool, window: 1}\n- {name: cat, type: concat, from: [enc1, enc_1]}"),
     "node cat (concat) reads enc_1, which is not a node; did you mean enc1?"),
    (net("- {name: a, type: crop, like: inpt}"),
     "node a (crop to inpt) gets the size of inpt, which is not a node; did you mean input?"),
    (net("- {name: a, type: pool, window: 1}\n- {type: pool, window: 1}\n- {name: a, type: pool, window: 1}"),
     "the layers 0 and 2 are both called a; give one another name"),
    (net("- {name: a, type: pool, window: 1}\n" * 3), "the layers 0, 1, 2 are all called a; give each another name"),
    (net("- {name: pool1, type: pool, window: 1}\n- {type: pool, window: 1}"),
     "the layers 0 and 1 are both called pool1; give one another name"),
    (net("- {name: input, type: pool, window: 1}"),
     "layer 0 is called input, which is the name of the network's input; give it another name"),
    (net("- {name: a, type: pool, window: 1}\n- {name: b, type: pool, window: 1, from: input}"),
     "no node reads a, and it is no output; remove it, or add it to output"),
    (net("- {name: a, type: pool, window: 1}\n- {name: b, type: pool, window: 1, from: input}\n"
         "- {name: c, type: pool, window: 1, from: input}"),
     "no node reads a, b, and they are no outputs; remove them, or add them to output"),
    (net("- {name: a, type: pool, window: 1}", output="b"), "output names b, which is not a node; use one of a"),
    (net("- {name: a, type: pool, window: 1}", output="input"),
     "output names input, which is the network's input; use one of a"),
    (net("- {name: a, type: pool, window: 1}", output="[a, a]"), "output names a 2 times; name it once"),
    (net("- {name: a, type: pool, window: 1}", output="[]"),
     "output is [], but must be the name of a node, or a list of names; write for example output: conv3"),
    (net("- {name: a, type: pool, window: 1}", pad_to_period="mirror"),
     "pad_to_period is 'mirror', but must be one of reflect, replicate, zeros, refuse; write for example "
     "pad_to_period: reflect"),
    (net("- {name: cat, type: concat}"),
     "node cat (concat) reads input alone, but joins two nodes or more; name them, for example from: [input, OTHER]"),
    (net("- {name: a, type: pool, window: 2}\n- {name: b, type: pool, window: 1, from: [a, input]}"),
     "node b (pool 1x1x1) reads 2 nodes, a, input, but takes one; join them before it with concat, add or multiply"),
    (net("- {name: a b, type: pool, window: 2}"),
     "node a b (pool): name is 'a b', but must be the name of a node, text on one line of at most 200 characters "
     "without spaces; write for example name: conv1"),
    (net("- {name: 3, type: pool, window: 2}"),
     "layer 0 (pool): name is 3, but must be the name of a node, text on one line of at most 200 characters without "
     "spaces; write for example name: conv1"),
    (net("- {name: a, type: pool, window: 2, from: [3]}"),
     "node a (pool): from is [3], but must be the name of a node or input, or a list of names; write for example "
     "from: [conv1, conv2]"),
    (net("- {name: a, type: pool, window: 1}\n" * 501),
     "a network has at most 500 layers, and this one has 501; split it"),
    # maps
    (net(A + "- {name: b, type: conv, kernel: 1, out: 3}" + EQUAL),
     "node sum (add none) joins a of 4 maps with b of 3; give both the same number of maps, or one of them a single "
     "map"),
    (net(A + "- {name: b, type: conv, kernel: 1, out: 3, groups: 3}"),
     "node b (conv 1x1x1 -> 3 none groups 3) has 3 groups, which do not divide the 4 maps it gets; change groups, or "
     "the number of maps"),
    (net(A + "- {name: b, type: conv_transpose, kernel: 1, out: 3, groups: 2}"),
     "node b (conv_transpose 1x1x1 -> 3 none groups 2) has 2 groups, which do not divide the 3 maps it gives; change "
     "groups, or the number of maps"),
    (net(A + "- {name: b, type: maxout, of: 3}"),
     "node b (maxout of 3) does not divide the 4 maps it gets; change of, or the number of maps"),
    # settings
    (net("- {name: a, type: pool, window: 3, padding: 2}"),
     "node a (pool 3x3x3 padding 2x2x2) pads 2x2x2 voxels, which is more than half of its window 3x3x3; write a "
     "smaller padding, or pad in a layer before it"),
    (net("- {name: a, type: conv_transpose, kernel: 2, out: 1, stride: 2, output_padding: 2}"),
     "node a (conv_transpose 2x2x2 -> 1 none stride 2x2x2 output_padding 2x2x2) has the output_padding 2x2x2, which "
     "must be smaller than its stride 2x2x2 or its dilation 1x1x1; write a smaller one"),
    (net("- {name: a, type: conv, kernel: 3, out: 1, stride: 0}"),
     f"node a (conv): stride is 0, but must be {SIZE}; write for example stride: 2"),
    (net("- {name: a, type: conv, kernel: 3, out: 1, padding: -1}"),
     f"node a (conv): padding is -1, but must be {SIZE_OR_ZERO}, or {{before: [z, y, x], behind: [z, y, x]}}, or same; "
     "write for example padding: 1"),
    (net("- {name: a, type: pool, window: 3, padding: same}"),
     f"node a (pool): padding is 'same', but must be {SIZE_OR_ZERO}, or {{before: [z, y, x], behind: [z, y, x]}}; "
     "write for example padding: 1"),
    (net("- {name: a, type: conv, kernel: [3, 2, 3], out: 1, padding: same}"),
     "node a (conv): padding is same, but with the kernel 3x2x3 one side along y gets one voxel more than the other, "
     "and PyTorch and TensorFlow put it behind; write padding: {before: [1, 0, 1], behind: [1, 1, 1]} instead"),
    (net("- {name: a, type: conv, kernel: 3, out: 1, padding: same, stride: 2}"),
     "node a (conv): padding is same, which means an output as large as the input, but stride is 2x2x2; write the "
     "padding as a number, for example padding: 1"),
    (net("- {name: a, type: conv, kernel: 3, out: 1, padding_mode: circular}"),
     "node a (conv): padding_mode is 'circular', but must be one of zeros, reflect, replicate; write for example "
     "padding_mode: reflect"),
    (net("- {name: a, type: upsample}"),
     "node a (upsample): neither factor nor like is given; write one of them, for example factor: 2"),
    (net("- {name: a, type: upsample, factor: 2, like: input}"),
     "node a (upsample): both factor and like are given; write one of them, for example factor: 2"),
    (net("- {name: a, type: upsample, factor: 2, align_corners: true}"),
     "node a (upsample): align_corners means nothing for how: nearest; delete it, or write how: linear"),
    (net("- {name: a, type: upsample, factor: 2, how: cubic}"),
     "node a (upsample): how is 'cubic', but must be one of nearest, linear; write for example how: linear"),
    (net("- {name: a, type: crop}"),
     "node a (crop): none of before, behind and like is given; write before and behind, or the node whose size it "
     "gets, for example like: conv1"),
    (net("- {name: a, type: crop, before: 1, like: input}"),
     "node a (crop): both like and voxels are given; write before and behind, or the node whose size it gets, for "
     "example like: conv1"),
    # functions
    (net("- {name: a, type: conv, kernel: 3, out: 1, activation: prelu}"),
     "node a (conv): activation is prelu, which has weights of its own; write it as a layer, {type: activation, "
     "function: prelu}, behind this one"),
    (net("- {name: a, type: relu}"),
     "node a: type is 'relu', which is not a layer type; write {type: activation, function: relu}"),
    (net("- {name: a, type: activation, function: relu, slope: 1}"),
     "node a (activation): 'slope' is no parameter of relu; delete it"),
    (net("- {name: a, type: activation, function: clip, slope: 1}"),
     "node a (activation): 'slope' is no parameter of clip; use least and most"),
    (net("- {name: a, type: activation, function: clip, least: 1}"),
     "node a (activation): most of clip is missing; add for example most: 1.0"),
    (net("- {name: a, type: activation, function: clip, least: 1, most: 0.5}"),
     "node a (activation): least is 1, which is more than most, 0.5; exchange them"),
    (net("- {name: a, type: activation, function: elu, alpha: .inf}"),
     "node a (activation): alpha is inf, but must be a finite number; write for example alpha: 1.0"),
    (net("- {name: a, type: conv, kernel: 1, out: 1, activation: {function: elu, alpha: yes}}"),
     "node a (conv): alpha is 'yes', but must be a finite number; write for example alpha: 1.0"),
    (net("- {name: a, type: batch_norm, epsilon: 0}"),
     "node a (batch_norm): epsilon is 0, but must be a finite number above 0; write for example epsilon: 1.0e-5"),
    (net("- {name: a, type: group_norm}"), "node a (group_norm): groups is missing; add for example groups: 8"),
    # lattices and sizes
    (net("- {name: a, type: pool, window: [1, 2, 2]}\n- {name: cat, type: concat, from: [input, a]}"),
     "node cat (concat) joins input, one voxel for 1 of the input along y, with a, one for 2; bring both to one "
     "lattice by pooling or upsampling"),
    (net("- {name: a, type: conv, kernel: [3, 1, 1], out: 1}\n- {name: s, type: add, from: [input, a]}"),
     "no size of a volume suits the network: node s (add none) joins input of 13 voxels along z with a of 11, for a "
     "volume of 13 there; crop or pad one of them"),
    (net("- {name: a, type: maxfilter, window: 3}\n- {name: b, type: crop, like: input}"),
     "no size of a volume suits the network: node b (crop to input) gets 9 voxels along z and cannot give 11, for a "
     "volume of 11 there; crop to a smaller node, or pad what it reads"),
    (net("- {type: pool, window: 2, padding: 1}\n" * 11),
     "the strides of the network multiply to a period of 2048 voxels along z, more than 1024; use smaller ones"),
    (net("- {name: a, type: conv, kernel: 3, out: 1, padding: 1}", field_of_view="3"),
     "field_of_view is 3x3x3, but it is checked only for chains without padding, strides and skips; delete the line"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_graph_that_does_not_fit_is_refused_in_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, content)) == message


def test_layers_of_whole_images_are_read_and_refused_by_name_later(tmp_path: Path) -> None:
    network = read(tmp_path, net("- {name: n1, type: instance_norm}\n- {name: c, type: conv, kernel: 1, out: 1}"))
    with pytest.raises(ShapeError, match=r"every voxel of node n1 \(instance_norm\) depends on the whole image"):
        period_of(replace(network, asked_meaning="whole"))
    gate = net("- {name: g, type: global_pool}\n- {name: m, type: multiply, from: [input, g]}")
    assert read(tmp_path, gate).layers[0] == GlobalPool()
