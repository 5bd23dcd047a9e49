"""A U-Net of two levels that is computed in a moment: its network file, weights and a volume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.network import Network
from znnpy.network_files import read_network

LAYERS: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "padding": "same"},
    {"name": "norm", "type": "batch_norm"},
    {"name": "bend", "type": "activation", "function": "relu"},
    {"name": "down", "type": "pool", "window": [1, 2, 2]},
    {"name": "deep", "type": "conv", "kernel": 3, "out": 6, "padding": "same", "activation": "relu"},
    {"name": "up", "type": "upsample", "factor": [1, 2, 2]},
    {"name": "join", "type": "concat", "from": ["bend", "up"]},
    {"name": "leave", "type": "conv", "kernel": 3, "out": 2, "padding": "same", "activation": "sigmoid"},
]
SIZE = (23, 20, 25)


def written(folder: Path) -> Path:
    """Write net.yaml, net.npz and volume.npy; return the path of the first."""
    rng = np.random.default_rng(5)
    arrays: dict[str, Any] = {}
    for name, fout, fin in (("enter", 4, 1), ("deep", 6, 4), ("leave", 2, 10)):
        arrays[f"{name}.weight"] = rng.standard_normal((fout, fin, 3, 3, 3), np.float32) / np.float32(np.sqrt(27 * fin))
        arrays[f"{name}.bias"] = rng.standard_normal(fout, np.float32)
    for value, of in (("weight", 1.0), ("bias", 0.1), ("running_mean", 0.2), ("running_var", 1.5)):
        arrays[f"norm.{value}"] = np.full(4, of, np.float32)
    np.savez(folder / "net.npz", **arrays)
    np.save(folder / "volume.npy", rng.integers(0, 256, SIZE, np.uint8))
    path = folder / "net.yaml"
    what = {"name": "small", "input_channels": 1, "normalise": {"mean": 127.0, "std": 50.0}, "weights": "net.npz"}
    path.write_text(json.dumps({**what, "layers": LAYERS}))
    return path


def network(folder: Path) -> Network:
    """Return the network of the file."""
    return read_network(written(folder)).network
