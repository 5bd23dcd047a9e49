"""A small network in PyTorch, the same in float64 over numpy arrays, and grey values to run both on."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from znnpy.shapes import Vec3
from znnpy.windows.definition import Values

MAPS = 3


def network() -> Any:
    """Make a network of two padded convolutions, whose results depend on the window's faces and on directions."""
    torch.manual_seed(5)
    layers = (
        torch.nn.Conv3d(2, 4, (3, 5, 3), padding=(1, 2, 1)),
        torch.nn.ReLU(),
        torch.nn.Conv3d(4, MAPS, 3, padding=1),
    )
    return torch.nn.Sequential(*layers).eval()


def in_float64(module: Any) -> Callable[[Values], Values]:
    """Return a copy of a module that computes one window of numpy values in float64."""
    double = deepcopy(module).double()

    def compute(window: Values) -> Values:
        with torch.no_grad():
            result: Values = double(torch.from_numpy(window)[None])[0].numpy()
        return result

    return compute


def grey(size: Vec3) -> NDArray[np.float32]:
    """Make normalised grey values of two channels."""
    return np.random.default_rng(11).standard_normal((2, *size)).astype(np.float32)
