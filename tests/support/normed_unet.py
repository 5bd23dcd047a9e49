"""A U-Net with norms that is computed in windows: its network file, weights and a volume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.formats.weights import random_weights
from znnpy.network import Network
from znnpy.network_files import read_network

LAYERS: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "padding": "same"},
    {"name": "norm", "type": "instance_norm", "affine": True},
    {"name": "bend", "type": "activation", "function": "leaky_relu", "slope": 0.01},
    {"name": "down", "type": "conv", "kernel": 3, "out": 6, "padding": 1, "stride": [1, 2, 2]},
    {"name": "group", "type": "group_norm", "groups": 2},
    {"name": "up", "type": "conv_transpose", "kernel": [1, 2, 2], "out": 4, "stride": [1, 2, 2]},
    {"name": "join", "type": "concat", "from": ["bend", "up"]},
    {"name": "leave", "type": "conv", "kernel": 1, "out": 3},
]
SIZE = (23, 20, 25)
NORMALISE = (127.0, 50.0)


def written(folder: Path, seed: int = 2, **entries: Any) -> Path:
    """Write net.yaml, net.npz and volume.npy; return the path of the first. `entries` are added to the file."""
    rng = np.random.default_rng(6)
    path = folder / "net.yaml"
    what = {
        "name": "normed",
        "input_channels": 1,
        "normalise": {"mean": NORMALISE[0], "std": NORMALISE[1]},
        "weights": "net.npz",
        "layers": LAYERS,
        **entries,
    }
    path.write_text(json.dumps(what))
    network = read_network(path).network
    arrays: dict[str, Any] = {}
    for index, weights in zip(network.weighted, random_weights(network, seed), strict=True):
        arrays |= {f"{network.names[index]}.weight": weights.weight, f"{network.names[index]}.bias": weights.bias}
    np.savez(folder / "net.npz", **arrays)
    np.save(folder / "volume.npy", rng.integers(0, 256, SIZE, np.uint8))
    return path


def network(folder: Path) -> Network:
    """Return the network of the file."""
    return read_network(written(folder)).network
