"""Each simplification of an imported network leaves what it computes as it was, and what others read in its place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.formats.wiring import Given, network_of
from znnpy.importing.builder import Builder
from znnpy.importing.drafts import Draft
from znnpy.importing.simplify import read_by_outputs, simplified
from znnpy.importing.tensors import Tensor
from znnpy.kernels.whole import whole
from znnpy.layers import Conv, ConvTranspose, Crop, PadMode, Upsample, has_weights
from znnpy.network import ConvWeights
from znnpy.shapes import Vec3

Real = npt.NDArray[np.float64]
SIZE: Vec3 = (7, 8, 9)
EXACT = 1e-9  # of the largest value: folded weights have so few digits that float32 holds them


class Net:
    """Layers that are collected one by one, with random weights of few digits."""

    def __init__(self, seed: int = 0, maps: int = 4) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = Builder()
        self.maps = maps
        self.input = self.builder.input(maps, SIZE)

    def digits(self, *shape: int) -> npt.NDArray[np.float32]:
        return (self.rng.integers(-6, 7, shape) / 4).astype(np.float32)

    def named(self, name: str) -> Builder:
        self.builder.at(name, "test")
        return self.builder

    def conv(self, x: Tensor, name: str = "conv", groups: int = 1, kernel: Vec3 = (2, 3, 3), **options: Any) -> Tensor:
        weight = self.digits(x.maps, x.maps // groups, *kernel)
        return self.named(name).conv(x, weight, self.digits(x.maps), groups=groups, **options)

    def up(self, x: Tensor, name: str = "up", groups: int = 1, **options: Any) -> Tensor:
        weight = self.digits(x.maps, x.maps // groups, 3, 2, 2)
        return self.named(name).conv_transpose(x, weight, self.digits(x.maps), groups=groups, **options)

    def scale(self, x: Tensor, name: str = "scale") -> Tensor:
        return self.named(name).affine(x, self.digits(x.maps) + 0.125, self.digits(x.maps))

    def relu(self, x: Tensor, name: str = "relu") -> Tensor:
        return self.named(name).activation(x, "relu")

    def pad(self, x: Tensor, how: PadMode = "zeros", name: str = "pad") -> Tensor:
        return self.named(name).pad(x, (1, 0, 2), (0, 2, 1), how)

    def add(self, x: Tensor, y: Tensor, name: str = "sum") -> Tensor:
        return self.named(name).add(x, y)


def computed(drafts: Sequence[Draft], outputs: Sequence[str], maps: int) -> list[Real]:
    """Return the outputs of layers by their definition in float64."""
    given = [Given(draft.layer, draft.name, draft.reads) for draft in drafts]
    network = network_of("net", maps, given, None, outputs)
    by_name = {draft.name: draft.weights for draft in drafts}
    weights = [by_name[name] for name, layer in zip(network.names, network.layers, strict=True) if has_weights(layer)]
    image = np.random.default_rng(9).integers(-8, 9, (*SIZE, maps)) / 4
    return list(whole(network, [one for one in weights if one is not None], image))


def assert_same(net: Net, outputs: Sequence[str]) -> tuple[list[Draft], Counter[str]]:
    """Return the simplified layers and what was folded; fail unless they give what the layers gave."""
    drafts = read_by_outputs(net.builder.drafts, outputs)
    expected = computed(drafts, outputs, net.maps)
    folded: Counter[str] = Counter()
    fewer = simplified([replace(draft) for draft in drafts], outputs, folded)
    for one, other in zip(computed(fewer, outputs, net.maps), expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= EXACT * max(1.0, np.abs(other).max())
    assert len(fewer) == len(drafts) - folded.total()
    return fewer, folded


def names(drafts: Sequence[Draft]) -> list[str]:
    return [draft.name for draft in drafts]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scale_behind_a_convolution_becomes_part_of_its_kernels(groups: int) -> None:
    net = Net()
    made = net.relu(net.scale(net.conv(net.input, groups=groups, padding=(1, 1, 1))))
    fewer, folded = assert_same(net, [made.node])
    (draft,) = fewer
    assert isinstance(draft.layer, Conv)
    assert (draft.layer.activation, draft.layer.groups, draft.name) == ("relu", groups, "relu")
    assert folded.total() == 2


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scale_behind_a_transposed_convolution_becomes_part_of_its_kernels(groups: int) -> None:
    net = Net()
    made = net.scale(net.up(net.input, groups=groups, stride=(2, 2, 1), padding=(1, 0, 0), output_padding=(1, 0, 0)))
    fewer, _ = assert_same(net, [made.node])
    assert [type(draft.layer) for draft in fewer] == [ConvTranspose]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("how", ["reflect", "replicate"])
def test_scale_before_a_convolution_becomes_part_of_its_kernels(groups: int, how: PadMode) -> None:
    for options in ({}, {"padding": (1, 1, 2), "mode": how}, {"stride": (2, 1, 2)}):
        net = Net()
        made = net.conv(net.scale(net.scale(net.input, "first"), "second"), groups=groups, **options)
        fewer, _ = assert_same(net, [made.node])
        assert names(fewer) == ["conv"]


def test_scale_before_a_convolution_that_pads_zeros_stays() -> None:
    net = Net()
    made = net.conv(net.scale(net.input), padding=(1, 1, 1))
    assert len(assert_same(net, [made.node])[0]) == 2


@pytest.mark.parametrize("how", ["zeros", "reflect", "replicate"])
def test_padding_before_a_convolution_becomes_its_own(how: PadMode) -> None:
    net = Net()
    made = net.relu(net.conv(net.pad(net.input, how), stride=(1, 2, 1)))
    (draft,), _ = assert_same(net, [made.node])
    assert isinstance(draft.layer, Conv)
    assert (draft.layer.padding, draft.layer.padding_mode) == (((1, 0, 2), (0, 2, 1)), how)


def test_padding_before_a_convolution_that_pads_itself_stays() -> None:
    net = Net()
    made = net.conv(net.pad(net.input, "reflect"), padding=(1, 1, 1))
    assert len(assert_same(net, [made.node])[0]) == 2


@pytest.mark.parametrize("how", ["zeros", "reflect", "replicate"])
def test_scale_before_a_padding_that_became_part_of_a_convolution_stays_exact(how: PadMode) -> None:
    net = Net()
    made = net.conv(net.pad(net.scale(net.input), how))
    assert names(assert_same(net, [made.node])[0]) == ["scale", "conv"]


@pytest.mark.parametrize(
    "before",
    [
        lambda net: net.conv(net.input),
        lambda net: net.up(net.input),
        lambda net: net.scale(net.input),
        lambda net: net.add(net.input, net.input),
        lambda net: net.named("product").multiply(net.input, net.input),
    ],
)
def test_function_becomes_the_last_step_of_the_layer_before_it(before: Callable[[Net], Tensor]) -> None:
    net = Net()
    x = before(net)
    made = net.named("end").activation(x, "leaky_relu", 0.125)
    (draft,), _ = assert_same(net, [made.node])
    assert getattr(draft.layer, "parameters", None) == (0.125,)
    assert draft.name == "end"


def test_second_functions_and_slopes_stay() -> None:
    net = Net()
    relu, other = net.relu(net.conv(net.input)), net.conv(net.input, "other")
    made = net.named("tanh").activation(relu, "tanh")
    assert len(assert_same(net, [made.node])[0]) == 2
    made = net.named("prelu").prelu(other, net.digits(4))
    assert len(assert_same(net, [made.node])[0]) == 2


def test_function_of_a_pooling_stays() -> None:
    net = Net()
    made = net.relu(net.named("pool").pool(net.input, "max", (2, 2, 2)))
    assert len(assert_same(net, [made.node])[0]) == 2


def test_scale_behind_a_function_stays() -> None:
    net = Net()
    made = net.scale(net.relu(net.conv(net.input)))
    assert len(assert_same(net, [made.node])[0]) == 2


def without_effect(net: Net, x: Tensor, name: str) -> Tensor:
    return net.named(name).affine(x, 1.0, 0.0)


def test_layers_without_effect_go_and_all_their_readers_read_what_is_before() -> None:
    net = Net()
    x = without_effect(net, net.conv(net.input), "same")
    left, right = net.scale(x, "left"), net.relu(without_effect(net, x, "again"), "right")
    crop = net.builder.crop(net.add(left, right), (0, 0, 0), (0, 0, 0))
    made = net.relu(crop, "end")
    fewer, folded = assert_same(net, [made.node])
    assert names(fewer) == ["conv", "left", "right", "end"]
    assert fewer[1].reads == fewer[2].reads == ("conv",)
    assert folded["scale layers that change nothing"] == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda net: net.named("x").affine(net.input, 1.0, net.digits(4) + 0.125),
        lambda net: net.named("x").affine(net.input, 1.25, 0.0),
        lambda net: net.named("x").pad(net.input, (0, 0, 0), (0, 1, 0), "zeros"),
        lambda net: net.named("x").pad(net.input, (0, 1, 0), (0, 0, 0), "zeros"),
        lambda net: net.builder.crop(net.input, (0, 0, 0), (0, 0, 1)),
        lambda net: net.builder.crop(net.input, (0, 0, 1), (0, 0, 0)),
    ],
)
def test_layers_with_little_effect_stay(make: Callable[[Net], Tensor]) -> None:
    net = Net()
    made = net.named("pool").pool(make(net), "max", (1, 1, 2))
    assert len(assert_same(net, [made.node])[0]) == 2


def test_layer_without_effect_stays_if_it_is_an_output() -> None:
    net = Net()
    made = without_effect(net, net.input, "same")
    assert names(assert_same(net, [made.node])[0]) == ["same"]


def test_what_is_read_twice_or_is_an_output_is_joined_with_nothing_behind_it() -> None:
    net = Net()
    conv = net.conv(net.input)
    scale = net.scale(conv)
    made = net.add(conv, scale)
    assert names(assert_same(net, [made.node])[0]) == ["conv", "scale", "sum"]
    assert names(assert_same(net, [conv.node, scale.node])[0]) == ["conv", "scale"]
    assert names(assert_same(net, [scale.node])[0]) == ["scale"]


def test_readers_are_counted_again_after_a_layer_without_effect_is_gone() -> None:
    net = Net()
    conv = net.conv(net.input)
    same = without_effect(net, conv, "same")
    made = net.add(net.scale(same), net.relu(same))
    assert names(assert_same(net, [made.node])[0]) == ["conv", "scale", "relu", "sum"]


def test_sizes_are_still_taken_from_nodes_that_were_joined() -> None:
    """A node whose size others take keeps its name and stays, and what is joined behind it takes no name away."""
    net = Net()
    skip = net.relu(net.scale(net.conv(net.input, kernel=(1, 1, 1))), "skip")
    down = net.named("down").pool(skip, "max", (1, 2, 1))
    up = net.named("up").upsample(down, "nearest", SIZE)
    (draft,) = (draft for draft in net.builder.drafts if draft.name == up.node)
    draft.options = (Upsample(like="skip"),)
    made = net.relu(net.add(up, net.scale(skip, "other")), "end")
    fewer, _ = assert_same(net, [made.node])
    assert names(fewer) == ["skip", "down", "up", "other", "end"]
    assert fewer[2].layer == Upsample(like="skip")


def test_node_whose_size_alone_is_taken_stays() -> None:
    net = Net()
    size = net.named("size").crop(net.input, (1, 0, 1), (1, 1, 1))
    conv = net.conv(net.input, kernel=(1, 1, 1))
    inner = net.named("inner").crop(conv, (1, 0, 1), (1, 1, 1))
    (draft,) = (draft for draft in net.builder.drafts if draft.name == inner.node)
    assert Crop(like="size") in draft.options
    draft.options = (Crop(like="size"),)
    both = net.add(inner, without_effect(net, size, "same"))
    assert names(assert_same(net, [both.node])[0]) == ["size", "conv", "inner", "sum"]


def _grown(net: Net, rng: random.Random) -> list[Tensor]:
    """Add random layers, each behind one of those before it, and return what they give."""
    made = [net.input]
    groups, how = rng.choice((1, 2, 4)), rng.choice(("zeros", "reflect", "replicate"))
    steps: list[Callable[[Tensor], Tensor]] = [
        lambda x: net.scale(x),
        lambda x: without_effect(net, x, "same"),
        lambda x: net.relu(x),
        lambda x: net.pad(x, how),  # type: ignore[arg-type]
        lambda x: net.conv(x, kernel=(1, 2, 1), groups=groups),
        lambda x: net.conv(x, "wide", kernel=(1, 1, 3), groups=groups, padding=(0, 0, 1), mode=how),
        lambda x: net.up(x, groups=groups),
        lambda x: net.add(x, rng.choice([other for other in made if other.size == x.size])),
    ]
    for _ in range(rng.randint(2, 8)):
        x = made[-1] if rng.random() < 0.75 else rng.choice(made)
        made.append(rng.choice(steps)(x))
    return made


@pytest.mark.parametrize("seed", range(150))
def test_random_networks_compute_the_same(seed: int) -> None:
    rng, net = random.Random(seed), Net(seed)
    made = _grown(net, rng)
    last = made[-1]
    others = [other.node for other in made[1:-1] if other.size == last.size and rng.random() < 0.2]
    assert_same(net, list(dict.fromkeys([last.node, *others])))


def test_random_networks_are_of_all_kinds() -> None:
    folded: Counter[str] = Counter()
    for seed in range(150):
        net = Net(seed)
        made = _grown(net, random.Random(seed))
        simplified(read_by_outputs(net.builder.drafts, [made[-1].node]), [made[-1].node], folded)
    assert len(folded) == 5
    assert min(folded.values()) > 5


def test_weights_that_are_folded_are_float32() -> None:
    net = Net()
    made = net.scale(net.conv(net.scale(net.input, "first")))
    (draft,), _ = assert_same(net, [made.node])
    assert isinstance(draft.weights, ConvWeights)
    assert draft.weights.weight.dtype == draft.weights.bias.dtype == np.float32


def test_layers_that_no_output_needs_are_left_out() -> None:
    net = Net()
    one, other = net.scale(net.input, "one"), net.scale(net.input, "other")
    assert names(read_by_outputs(net.builder.drafts, [one.node])) == ["one"]
    assert names(read_by_outputs(net.builder.drafts, [other.node, one.node])) == ["one", "other"]
    conv = net.conv(one, kernel=(1, 1, 1))
    cut = net.named("cut").crop(conv, (0, 0, 0), (0, 0, 0))
    net.builder.drafts[-1].options = (Crop(like="other"),)
    assert names(read_by_outputs(net.builder.drafts, [cut.node])) == ["one", "other", "conv", "cut"]
