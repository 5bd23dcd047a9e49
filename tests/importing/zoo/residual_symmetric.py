"""Residual symmetric U-Nets of DeepEM, PyTorch Connectomics and Superhuman, from their descriptions; needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import nn

from tests.importing.zoo.unets import FLAT, ISOTROPIC, TWICE, TWICE_IN_PLANE, Sizes

Make = Callable[[int], nn.Module]
WIDE: Sizes = (1, 5, 5)
ACTIVATIONS: dict[str, Make] = {
    "relu": lambda maps: nn.ReLU(inplace=True),
    "elu": lambda maps: nn.ELU(inplace=True),
    "prelu": nn.PReLU,
    "leaky": lambda maps: nn.LeakyReLU(0.01, inplace=True),
}
NORMS: dict[str, Make] = {
    "batch": nn.BatchNorm3d,
    "instance": lambda maps: nn.InstanceNorm3d(maps, affine=True),
    "group": lambda maps: nn.GroupNorm(2, maps),
}


def same(maps: int, out: int, kernel: Sizes, mode: str = "zeros", *, bias: bool = False) -> nn.Conv3d:
    return nn.Conv3d(maps, out, kernel, padding=tuple(k // 2 for k in kernel), bias=bias, padding_mode=mode)


class BilinearUp(nn.Module):  # type: ignore[misc]
    """Interpolation by a depthwise transposed convolution whose kernel is a buffer, and a 1x1x1 convolution."""

    def __init__(self, maps: int, out: int, factor: Sizes = TWICE_IN_PLANE) -> None:
        super().__init__()
        self.maps, self.factor = maps, factor
        self.padding = [ceil((f - 1) / 2) for f in factor]
        weights = torch.ones(1, 1, 1)
        for axis, f in enumerate(factor):
            size = 2 * f - f % 2
            half = ceil(size / 2)
            centre = (2 * half - 1 - half % 2) / (2 * half)
            line = torch.tensor([1 - abs(i / half - centre) for i in range(size)]) if f > 1 else torch.ones(1)
            weights = weights * line.reshape([-1 if axis == at else 1 for at in range(3)])
        self.register_buffer("weight", weights.expand(maps, 1, *weights.shape).clone())
        self.pointwise = nn.Conv3d(maps, out, 1, bias=False)

    def forward(self, x: Any) -> Any:
        x = nn.functional.conv_transpose3d(
            x, self.weight, stride=self.factor, padding=self.padding, groups=self.maps
        )  # fmt: skip
        return self.pointwise(x)


class Residual(nn.Module):  # type: ignore[misc]
    """A convolution before, two with a shortcut around them, and one behind, each after its norm and function."""

    def __init__(self, maps: int, out: int, kernel: Sizes, norm: Make, function: Make, mode: str) -> None:
        super().__init__()

        def step(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(norm(a), function(a), same(a, b, kernel, mode))

        self.pre = step(maps, out)
        self.res = nn.Sequential(step(out, out), step(out, out))
        self.post = step(out, out)

    def forward(self, x: Any) -> Any:
        x = self.pre(x)
        return self.post(x + self.res(x))


class RSUNet(nn.Module):  # type: ignore[misc]
    """The residual symmetric U-Net: skips are added, and a block of the finest levels may be flat.

    factors  of the poolings; flat: levels whose kernels are 1x3x3; mode: of padding
    nearest  upsample by repeating voxels and not by interpolation
    """

    def __init__(
        self,
        norm: str = "batch",
        function: str = "relu",
        factors: Sequence[Sizes] = (TWICE_IN_PLANE, TWICE_IN_PLANE),
        *,
        flat: int = 0,
        mode: str = "zeros",
        nearest: bool = False,
        maps: int = 4,
    ) -> None:
        super().__init__()
        widths = [maps * (level + 1) for level in range(len(factors) + 1)]
        kernels = [FLAT if level < flat else ISOTROPIC for level in range(len(widths))]
        make = (NORMS[norm], ACTIVATIONS[function])
        self.embed = same(1, maps, WIDE, mode)
        self.iconv = Residual(maps, maps, kernels[0], *make, mode)
        self.dconvs = nn.ModuleList(
            Residual(a, b, k, *make, mode) for a, b, k in zip(widths, widths[1:], kernels[1:], strict=False)
        )
        self.pools = nn.ModuleList(nn.MaxPool3d(factor) for factor in factors)
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=f, mode="nearest"), nn.Conv3d(b, a, 1, bias=False))
            if nearest
            else BilinearUp(b, a, f)
            for a, b, f in zip(widths, widths[1:], factors, strict=False)
        )
        self.uconvs = nn.ModuleList(Residual(a, a, k, *make, mode) for a, k in zip(widths, kernels, strict=False))
        self.uconvs = self.uconvs[: len(factors)]
        self.end = nn.Sequential(NORMS[norm](maps), ACTIVATIONS[function](maps), same(maps, 3, WIDE, mode, bias=True))

    def forward(self, x: Any) -> Any:
        skips = [self.iconv(self.embed(x))]
        for pool, conv in zip(self.pools, self.dconvs, strict=True):
            skips.append(conv(pool(skips[-1])))
        found = skips.pop()
        for up, conv, skip in zip(*(list(part)[::-1] for part in (self.ups, self.uconvs)), skips[::-1], strict=True):
            found = conv(up(found) + skip)
        return torch.sigmoid(self.end(found))


class Superhuman(nn.Module):  # type: ignore[misc]
    """Superhuman's residual U-Net: trilinear and 1x1x1 up; the skip is added, then a batch norm and ELU."""

    def __init__(self, factors: Sequence[Sizes] = (TWICE_IN_PLANE, TWICE), maps: int = 4) -> None:
        super().__init__()
        widths = [maps + 2 * level for level in range(len(factors) + 1)]
        make = (NORMS["batch"], ACTIVATIONS["elu"])
        self.embed = same(1, maps, WIDE, bias=True)
        self.down = nn.ModuleList(
            Residual(a, b, ISOTROPIC, *make, "zeros") for a, b in zip([maps, *widths[:-1]], widths, strict=True)
        )
        self.pools = nn.ModuleList(nn.MaxPool3d(factor) for factor in factors)
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=f, mode="trilinear", align_corners=False), nn.Conv3d(b, a, 1))
            for a, b, f in zip(widths, widths[1:], factors, strict=False)
        )
        self.norms = nn.ModuleList(nn.Sequential(nn.BatchNorm3d(a), nn.ELU(inplace=True)) for a in widths[:-1])
        self.convs = nn.ModuleList(Residual(a, a, ISOTROPIC, *make, "zeros") for a in widths[:-1])
        self.end = nn.Conv3d(maps, 3, 1)

    def forward(self, x: Any) -> Any:
        skips = [self.down[0](self.embed(x))]
        for pool, conv in zip(self.pools, list(self.down)[1:], strict=True):
            skips.append(conv(pool(skips[-1])))
        found = skips.pop()
        for level in range(len(self.pools) - 1, -1, -1):
            found = self.convs[level](self.norms[level](self.ups[level](found) + skips[level]))
        return torch.sigmoid(self.end(found))
