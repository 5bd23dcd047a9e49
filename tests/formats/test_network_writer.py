"""A network that is written as a file and read again is the same, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.formats.test_graph_yaml import LAYERS
from znnpy.formats.network_writer import network_text, weights_bytes
from znnpy.formats.weights import random_weights
from znnpy.formats.wiring import Given, network_of
from znnpy.layers import JOINS, Layer, MaxFilter, Pool, Upsample
from znnpy.network import Network, Normalise
from znnpy.trained import load_network

SAME = MaxFilter((1, 1, 1))  # a layer that changes nothing


def written(network: Network, folder: Path) -> Network:
    """Write a network with random weights, read both again, compare the weights, and return what was read."""
    weights = random_weights(network, seed=3)
    (folder / "net.npz").write_bytes(weights_bytes(network, weights))
    (folder / "net.yaml").write_text(network_text(network, "net.npz", "made: by a test"))
    found = load_network(folder / "net.yaml")
    for one, other in zip(found.weights, weights, strict=True):
        assert np.array_equal(one.weight, other.weight)
        assert np.array_equal(one.bias, other.bias)
    return found.network


@pytest.mark.parametrize("layer", [layer for _, layer in LAYERS], ids=str)
def test_every_layer_is_written_as_it_is_read(layer: Layer, tmp_path: Path) -> None:
    like = getattr(layer, "like", None)
    given = [Given(layer, "b")]
    if isinstance(layer, JOINS):
        given = [Given(SAME, "a"), Given(layer, "b", ("input", "a"))]
    elif isinstance(like, str):
        given = [Given(Pool((2, 2, 2)) if isinstance(layer, Upsample) else SAME, "a"), Given(layer, "b")]
        given += [Given(SAME, like, ("input",))] if like != "input" else []
    outputs = [one.name for one in given if one.name is not None and one.name != "a"]
    try:
        network = network_of("net", 2, given, output=outputs)
    except ValueError:
        network = network_of("net", 4, given, output=outputs)
    found = written(network, tmp_path)
    assert found.nodes == network.nodes or layer.type == "batch_norm"  # which is written as a scale
    assert (found.outputs, found.input_channels) == (network.outputs, network.input_channels)


def test_names_that_yaml_would_take_for_something_else_are_quoted(tmp_path: Path) -> None:
    names = ["true", "1e5", "no", "a:b", "x#y", "[z]", "Ünet/conv.0", "-", "~"]
    given = [Given(Pool((1, 2, 2)), name) for name in names]
    network = network_of("null", 2, given, Normalise((1.5, 2.0), (3.0, 4.0)), pad_to_period="zeros")
    assert written(network, tmp_path) == network
