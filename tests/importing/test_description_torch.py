"""A module of PyTorch with what a model description of bioimage.io does before and behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.importing.descriptions import new, step, written
from znnpy.errors import NetworkFileError

pytestmark = pytest.mark.torch


def module() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Conv3d(1, 2, 3, padding=1).eval()


def test_a_module_gets_the_steps_of_a_description(tmp_path: Path) -> None:
    import torch

    pre = [step("scale_range", axes=["z", "y", "x"], min_percentile=1, max_percentile=99), step("clip", min=0, max=1)]
    weights = {"pytorch_state_dict": {"source": "weights.pt"}}
    path = written(new(pre=pre, post=[step("sigmoid")], weights=weights), tmp_path)
    net, volume = module(), np.random.default_rng(0).integers(0, 256, (1, 9, 12, 15), np.uint8)
    made = znnpy.from_torch(net, torch.zeros(1, 1, 16, 16, 16), description=path)
    assert made.network.name == "a small net"
    low, high = np.percentile(volume, (1, 99))
    given = np.clip((volume - low) / (high - low + 1e-6), 0, 1).astype(np.float32)
    with torch.no_grad():
        expected = torch.sigmoid(net(torch.from_numpy(given)[None]))[0].numpy()
    np.testing.assert_allclose(made(volume, calibrate=False, ram="3G"), expected, atol=1e-5)


def test_channels_of_a_module_must_agree(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match="3 channels"):
        znnpy.from_torch(module(), description=written(new(maps=3), tmp_path))


def test_axes_of_a_module_must_agree(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match="bcyx"):
        znnpy.from_torch(module(), description=written(new(axes="bcyx"), tmp_path))
