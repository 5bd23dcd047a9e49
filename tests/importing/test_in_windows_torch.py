"""Modules with norms become networks in windows, and equal PyTorch on one window and on many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import znnpy
from znnpy.cli import main
from znnpy.errors import NetworkFileError
from znnpy.import_check import compared, run_module
from znnpy.importing.finish import Wishes
from znnpy.importing.from_torch import imported_module
from znnpy.layers import Norm
from znnpy.windows.definition import blended
from znnpy.windows.settings import Windows

pytestmark = pytest.mark.torch


def unet(norm: str = "instance") -> Any:
    """Return a small U-Net with norms over space, and a gate that follows from the whole image."""
    import torch
    from torch import nn

    def normed(maps: int) -> Any:
        return nn.GroupNorm(2, maps) if norm == "group" else nn.InstanceNorm3d(maps, affine=True)

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), normed(4), nn.LeakyReLU(0.01))
            self.low = nn.Sequential(nn.Conv3d(4, 6, 3, stride=2, padding=1), normed(6), nn.ReLU())
            self.gate = nn.Conv3d(6, 6, 1)
            self.up = nn.ConvTranspose3d(6, 4, 2, stride=2)
            self.head = nn.Conv3d(8, 3, 1)

        def forward(self, x: Any) -> Any:
            top = self.top(x)
            low = self.low(top)
            low = low * self.gate(low.mean((2, 3, 4), keepdim=True)).sigmoid()
            return self.head(torch.cat([top, self.up(low)], 1))

    torch.manual_seed(4)
    return Net().eval()


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_from_torch_gives_a_network_in_windows(norm: str) -> None:
    import torch

    module = unet(norm)
    net = znnpy.from_torch(module)
    assert net.network.meaning == "windows"
    volume = np.random.default_rng(3).standard_normal((21, 18, 25), np.float32)
    found = net(volume, window=(12, 10, 14), overlap=0.25, mirror="y", threads=1, calibrate=False)

    def computed(window: Any) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(window)[None])[0].numpy()

    module.double()
    wanted = blended(volume[None].astype(np.float64), computed, Windows((12, 10, 14), (0.25, 0.25, 0.25), mirror=(1,)))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_the_check_of_an_import_computes_one_window() -> None:
    module = unet()
    made = imported_module(module, None, Wishes(), "net")
    size, (one,) = compared(made, run_module(module, made.words, planar=False))
    assert one.within
    assert one.scale > 0
    assert all(n % 2 == 0 for n in size)
    module.top[1].bias.data += 0.1
    _, (other,) = compared(made, run_module(module, made.words, planar=False))
    assert not other.within


def test_a_network_that_gives_more_voxels_for_odd_sizes_is_checked_on_whole_periods() -> None:
    from torch import nn

    module = nn.Sequential(
        nn.Conv3d(1, 2, 3, stride=2, padding=1),
        nn.InstanceNorm3d(2, affine=True),
        nn.ConvTranspose3d(2, 3, 3, stride=2, padding=1, output_padding=1),
    ).eval()
    made = imported_module(module, None, Wishes(), "net")
    size, (one,) = compared(made, run_module(module, made.words, planar=False))
    assert one.within
    assert all(n % 2 == 0 for n in size)


def test_the_command_checks_a_file(tmp_path: Path) -> None:
    import torch

    module = unet("group")
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, (torch.zeros(1, 1, 16, 24, 32),)), path)
    result = CliRunner().invoke(main, ["import", str(path), "--check"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "equal but for rounding" in result.output


def test_align_corners_is_still_refused(tmp_path: Path) -> None:
    import torch
    from torch import nn

    module = nn.Sequential(
        nn.Conv3d(1, 2, 3, stride=2, padding=1), nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True)
    )
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module.eval(), (torch.zeros(1, 1, 16, 24, 32),)), path)
    result = CliRunner().invoke(main, ["import", str(path), "--check"])
    assert result.exit_code == 1
    assert "align_corners" in result.output


def test_norms_of_modules_in_training_mode_are_refused() -> None:
    with pytest.raises(NetworkFileError, match="training mode"):
        znnpy.from_torch(unet().train())


def test_norms_are_kept_as_layers() -> None:
    layers = znnpy.from_torch(unet()).network.layers
    assert sum(isinstance(layer, Norm) for layer in layers) == 2
