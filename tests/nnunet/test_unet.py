"""Networks are built of plans alone, with the layers that nnU-Net's modules have and arrays by their names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.nnunet.documents import ARCHITECTURE, Array, arrays_for
from znnpy.errors import NetworkFileError
from znnpy.layers import Conv, ConvTranspose, Layer
from znnpy.network import Network
from znnpy.nnunet.architecture import Architecture, architecture_of
from znnpy.nnunet.unet import unet_of

PATCH = (8, 16, 16)
PLAIN = architecture_of({"architecture": ARCHITECTURE}, PATCH, "plans")
RESIDUAL = replace(PLAIN, kind="ResidualEncoderUNet", encoder=(1, 3, 2), stem=4)


def types(network: Network) -> Counter[str]:
    return Counter(layer.type for layer in network.layers)


def layer(network: Network, name: str) -> Layer:
    return network.layers[network.names.index(name)]


def reads(network: Network, name: str) -> list[str]:
    names = ("input", *network.names)
    return [names[tensor] for tensor in network.sources[network.names.index(name)]]


def test_plain_network_has_the_layers_of_its_stages() -> None:
    network = unet_of(PLAIN, 2, 3, "n").network
    convolutions = 2 + 1 + 2 + 1 + 2
    assert types(network) == {
        "conv": convolutions + 1,
        "instance_norm": convolutions,
        "conv_transpose": 2,
        "concat": 2,
    }
    assert (network.input_channels, network.output_maps) == (2, (3,))
    assert layer(network, "encoder.stages.1.0.convs.0.conv") == Conv(
        (3, 3, 3), 8, stride=(1, 2, 2), padding=((1, 1, 1), (1, 1, 1))
    )
    assert layer(network, "encoder.stages.0.0.convs.0.conv") == Conv((1, 3, 3), 4, padding=((0, 1, 1), (0, 1, 1)))
    assert layer(network, "decoder.transpconvs.0") == ConvTranspose((2, 2, 2), 8, (2, 2, 2))
    assert reads(network, "decoder.skips.0") == ["decoder.transpconvs.0", "encoder.stages.1.0.convs.0.norm"]
    assert reads(network, "decoder.skips.1") == ["decoder.transpconvs.1", "encoder.stages.0.0.convs.1.norm"]
    assert reads(network, "decoder.seg_layers.1") == ["decoder.stages.1.convs.1.norm"]


def test_residual_network_has_the_layers_of_its_blocks() -> None:
    network = unet_of(RESIDUAL, 1, 2, "n").network
    projected, averaged, blocks = 2, 2, 6  # the first blocks of the second and the third stage
    convolutions = 1 + 2 * blocks + projected + 1 + 2
    assert types(network) == {
        "conv": convolutions + 1,
        "instance_norm": convolutions,
        "average_pool": averaged,
        "add": blocks,
        "conv_transpose": 2,
        "concat": 2,
    }
    block = "encoder.stages.1.blocks.0"
    assert reads(network, f"{block}.sum") == [f"{block}.conv2.norm", f"{block}.skip.1.norm"]
    assert reads(network, f"{block}.skip.1.conv") == [f"{block}.skip.0"]
    second = "encoder.stages.1.blocks.1"
    assert reads(network, f"{second}.sum") == [f"{second}.conv2.norm", f"{block}.sum"]


def test_parameters_are_those_counted_by_hand() -> None:
    shallow = Architecture("PlainConvUNet", (4, 8), ((3, 3, 3), (3, 3, 3)), ((1, 1, 1), (2, 2, 2)), (1, 1), (1,))
    encoder = (1 * 4 * 27 + 4 + 8) + (4 * 8 * 27 + 8 + 16)
    decoder = (8 * 4 * 8 + 4) + (8 * 4 * 27 + 4 + 8) + (4 * 2 + 2)
    assert unet_of(shallow, 1, 2, "n").network.parameters == encoder + decoder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replace(PLAIN, epsilon=None), {"conv": 9, "conv_transpose": 2, "concat": 2}),
        (replace(PLAIN, affine=False), {"conv": 9, "conv_transpose": 2, "concat": 2, "instance_norm": 8}),
    ],
)
def test_norms_may_be_missing_or_without_weights(change: Architecture, expected: dict[str, int]) -> None:
    assert types(unet_of(change, 1, 2, "n").network) == expected


def test_function_before_the_norm_ends_the_convolution() -> None:
    network = unet_of(replace(PLAIN, function_first=True), 1, 2, "n").network
    first = layer(network, "encoder.stages.0.0.convs.0.conv")
    assert isinstance(first, Conv)
    assert first.activation == "leaky_relu"
    assert str(layer(network, "encoder.stages.0.0.convs.0.norm")) == "instance_norm affine"


@pytest.mark.parametrize("architecture", [PLAIN, RESIDUAL], ids=["plain", "residual"])
def test_weights_are_taken_by_name_in_the_order_of_layers(architecture: Architecture) -> None:
    unet = unet_of(architecture, 2, 3, "n")
    arrays = arrays_for(unet)
    found = unet.weights(dict(reversed(arrays.items())), "checkpoint")
    assert len(found) == len(unet.network.weighted)
    for one, own in zip(unet.arrays, found, strict=True):
        assert np.array_equal(own.weight, arrays[one.weight].array)
        assert np.array_equal(own.bias, arrays[one.bias].array if one.bias else np.zeros(one.biases))


def test_biases_that_plans_deny_are_zero() -> None:
    unet = unet_of(replace(PLAIN, bias=False), 1, 2, "n")
    arrays = arrays_for(unet)
    assert "encoder.stages.0.0.convs.0.conv.bias" not in arrays
    assert "decoder.seg_layers.1.bias" in arrays
    assert not unet.weights(arrays, "checkpoint")[0].bias.any()


def test_arrays_that_predict_nothing_are_left_out() -> None:
    unet = unet_of(PLAIN, 1, 2, "n")
    arrays = arrays_for(unet)
    spare = {
        "decoder.encoder.stages.0.0.convs.0.conv.weight": Array(np.zeros(1, np.float32)),
        "encoder.stages.0.0.convs.0.all_modules.0.weight": Array(np.zeros(1, np.float32)),
        "decoder.seg_layers.0.weight": Array(np.zeros(1, np.float32)),
    }
    assert len(unet.weights(arrays | spare, "checkpoint")) == len(unet.arrays)


FIRST = "encoder.stages.0.0.convs.0.conv.weight"


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        (FIRST, None, f"has no array {FIRST}"),
        (FIRST, np.zeros((4, 1, 3, 3, 3), np.float32), "of shape (4, 1, 3, 3, 3), and the architecture"),
        (FIRST, np.zeros((0,), np.float32), "of shape (0,)"),
        (FIRST, np.full((4, 1, 1, 3, 3), np.nan, np.float32), "36 of 36 values that are not finite"),
        ("encoder.stages.0.0.convs.0.norm.running_mean", np.zeros(4, np.float32), "its trainer made another network"),
        ("decoder.seg_layers.9.weight", np.zeros(4, np.float32), "its trainer made another network"),
    ],
)
def test_arrays_of_another_network_are_refused(name: str, array: np.ndarray | None, said: str) -> None:
    unet = unet_of(PLAIN, 1, 2, "n")
    arrays = arrays_for(unet)
    if array is None:
        del arrays[name]
    else:
        arrays[name] = Array(array)
    with pytest.raises(NetworkFileError, match="checkpoint has") as caught:
        unet.weights(arrays, "checkpoint")
    assert said in str(caught.value)
