"""Lowered graphs compute the same with fewer layers, and keep what others read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.support.random_graphs import SLOW, graphs, sizes
from znnpy.admissible import admissible
from znnpy.errors import ShapeError
from znnpy.formats.weights import random_weights
from znnpy.formats.wiring import Given, network_of
from znnpy.kernels.whole import whole
from znnpy.layers import Activate, Add, Concat, Conv, ConvTranspose, Crop, Layer, Pad, Pool, Scale, Upsample
from znnpy.lowering import lowered
from znnpy.network import ConvWeights, Network
from znnpy.shapes import Vec3


def coarse(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return values of so few digits that products of three of them are exact in float32."""
    return np.clip(np.round(array * 8) / 8, -4, 4)


def few_digits(network: Network, seed: int) -> list[ConvWeights]:
    return [ConvWeights(coarse(one.weight), coarse(one.bias)) for one in random_weights(network, seed)]


def outputs(network: Network, weights: Sequence[ConvWeights], size: Vec3) -> list[npt.NDArray[np.float64]]:
    image = np.random.default_rng(1).normal(size=(*size, network.input_channels))
    return list(whole(network, weights, image))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(graphs(), sizes(1, 6), st.integers(0, 99))
def test_random_graphs_give_the_same_when_lowered(network: Network, size: Vec3, seed: int) -> None:
    try:
        volume = admissible(network, size).volume
    except ShapeError:
        reject()
    fewer, weights = lowered(network), few_digits(network, seed)
    theirs = [fewer.weights(index, weights) for index in range(len(fewer.network.layers))]
    assert [index for index, one in enumerate(theirs) if one is not None] == list(fewer.network.weighted)
    got = outputs(fewer.network, [one for one in theirs if one is not None], volume)
    for expected, given_ in zip(outputs(network, weights, volume), got, strict=True):
        assert given_.shape == expected.shape
        np.testing.assert_allclose(given_, expected, rtol=0, atol=1e-10 * max(1, np.abs(expected).max()))
    done = sorted(index for origins in fewer.origins for index in origins)
    assert done == list(range(len(network.layers))), "each layer is part of one"


def names_of(*given: Given, output: Sequence[str] | None = None) -> tuple[tuple[str, Layer], ...]:
    network = lowered(network_of("net", 2, given, output=output)).network
    return tuple(zip(network.names, network.layers, strict=True))


NORM = Scale(epsilon=1e-5, type="batch_norm")
ONE = Conv((1, 1, 1), 2)


def test_norm_and_function_become_part_of_the_convolution_before_them() -> None:
    slope = Activate("leaky_relu", (0.1,))
    merged = names_of(Given(ONE, "conv"), Given(NORM, "norm"), Given(slope, "end"))
    assert merged == (("end", Conv((1, 1, 1), 2, "leaky_relu", parameters=(0.1,))),)
    merged = names_of(Given(ConvTranspose((2, 2, 2), 4, (2, 2, 2), groups=2), "up"), Given(NORM, "norm"))
    assert merged == (("norm", ConvTranspose((2, 2, 2), 4, (2, 2, 2), groups=2)),)
    merged = names_of(Given(Add(), "sum", ("input", "input")), Given(Activate("relu"), "relu"))
    assert merged == (("relu", Add("relu")),)


def test_1x1x1_convolutions_come_before_a_nearest_upsampling() -> None:
    up, end = Upsample((2, 2, 2)), Given(Conv((3, 3, 3), 2), "end")
    narrow = Given(ONE, "narrow"), Given(Activate("relu"), "relu")
    moved = ("relu", replace(ONE, activation="relu")), ("up", up), ("end", end.layer)
    assert names_of(Given(up, "up"), *narrow, end) == moved
    again = names_of(Given(up, "up"), *narrow, Given(ONE, "again"), end)
    assert [name for name, _ in again] == ["relu", "again", "up", "end"]
    for other in (Upsample((2, 2, 2), how="linear"), Pool((2, 2, 2))):
        assert names_of(Given(other, "up"), *narrow, end)[0] == ("up", other)
    assert names_of(Given(up, "up"), *narrow)[0] == ("up", up), "the output keeps its name"
    assert names_of(Given(up, "up"), *narrow, end, output=["up", "end"])[0] == ("up", up)


def test_an_upsampling_whose_size_others_take_stays() -> None:
    up, deep = Given(Upsample((2, 2, 2)), "up", ("down",)), Given(Conv((3, 3, 3), 2), "deep", ("down",))
    cut = Given(Crop(like="up"), "cut", ("input",))
    found = names_of(
        Given(Pool((2, 2, 2)), "down"), up, Given(ONE, "narrow"), deep, cut, Given(Concat(), "both", ("narrow", "cut")),
        Given(Conv((3, 3, 3), 2), "end"), output=["end", "deep"],
    )  # fmt: skip
    assert [name for name, _ in found] == ["down", "up", "narrow", "deep", "cut", "both", "end"]


def test_what_is_read_elsewhere_or_is_an_output_stays() -> None:
    read_twice = (Given(ONE, "conv"), Given(NORM, "norm"), Given(Add(), "sum", ("conv", "norm")))
    assert [name for name, _ in names_of(*read_twice)] == ["conv", "norm", "sum"]
    output = (Given(ONE, "conv"), Given(Activate("relu"), "relu"))
    assert [name for name, _ in names_of(*output, output=["conv", "relu"])] == ["conv", "relu"]


def test_functions_with_weights_and_second_functions_stay() -> None:
    assert len(names_of(Given(ONE, "conv"), Given(Activate("prelu"), "prelu"))) == 2
    assert len(names_of(Given(Conv((1, 1, 1), 2, "relu"), "conv"), Given(Activate("tanh"), "tanh"))) == 2
    assert len(names_of(Given(Conv((1, 1, 1), 2, "relu"), "conv"), Given(NORM, "norm"))) == 2


def test_padding_by_reflection_becomes_a_layer() -> None:
    sides = (1, 1, 1), (1, 0, 1)
    found = names_of(Given(Conv((3, 2, 3), 2, padding=sides, padding_mode="reflect"), "conv"), Given(NORM, "norm"))
    assert found == (("conv padding", Pad(*sides, "reflect")), ("norm", Conv((3, 2, 3), 2)))


def test_sizes_of_merged_nodes_are_still_referred_to() -> None:
    found = names_of(
        Given(Conv((3, 3, 3), 2), "conv"),
        Given(NORM, "norm"),
        Given(Crop(like="conv"), "crop", ("input",)),
        Given(Add(), "sum", ("norm", "crop")),
    )
    assert found[1] == ("crop", Crop(like="norm"))
