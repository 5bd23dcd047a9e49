"""U-Nets without a package, written from their descriptions, with few maps. This module needs PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Sizes = tuple[int, int, int]
ISOTROPIC: Sizes = (3, 3, 3)
FLAT: Sizes = (1, 3, 3)
TWICE: Sizes = (2, 2, 2)
TWICE_IN_PLANE: Sizes = (1, 2, 2)


def convs(maps: int, out: int, kernels: Sequence[Sizes], *, same: bool = False) -> nn.Sequential:
    """Return convolutions that each end with ReLU."""
    parts = []
    for kernel in kernels:
        padding = tuple(k // 2 for k in kernel) if same else 0
        parts += [nn.Conv3d(maps, out, kernel, padding=padding), nn.ReLU()]
        maps = out
    return nn.Sequential(*parts)


def cropped(x: Any, size: Sequence[int]) -> Any:
    """Return the centre of an array, as funlib cuts it."""
    begins = [(a - b) // 2 for a, b in zip(x.shape[2:], size, strict=True)]
    return x[(..., *(slice(begin, begin + n) for begin, n in zip(begins, size, strict=True)))]


class FunlibUNet(nn.Module):  # type: ignore[misc]
    """funlib.learn.torch's U-Net: valid convolutions, skips cut to size, and cut to a multiple of the factors.

    factors   of the poolings, coarsest last; kernels: of all convolutions
    constant  upsample by repeating voxels and not by a transposed convolution
    """

    def __init__(
        self,
        maps: int = 4,
        growth: int = 2,
        factors: Sequence[Sizes] = (TWICE, TWICE),
        kernels: Sequence[Sizes] = (ISOTROPIC, ISOTROPIC),
        *,
        constant: bool = False,
        heads: Sequence[int] = (3,),
    ) -> None:
        super().__init__()
        widths = [maps * growth**level for level in range(len(factors) + 1)]
        self.factors, self.kernels = factors, kernels
        ins = [1, *widths[:-1]]
        self.left = nn.ModuleList(convs(a, b, kernels) for a, b in zip(ins, widths, strict=True))
        self.down = nn.ModuleList(nn.MaxPool3d(factor, stride=factor) for factor in factors)
        self.up = nn.ModuleList(
            nn.Upsample(scale_factor=factor, mode="nearest")
            if constant
            else nn.ConvTranspose3d(width, width, factor, stride=factor)
            for factor, width in zip(factors, widths[1:], strict=True)
        )
        self.right = nn.ModuleList(convs(a + b, a, kernels) for a, b in pairwise(widths))
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv3d(maps, out, 1), nn.Sigmoid()) for out in heads)

    def _to_factor(self, x: Any, level: int) -> Any:
        """Cut so that what is left after the convolutions is a multiple of the factors below, as funlib does."""
        factor = [prod(axis) for axis in zip(*self.factors[level:], strict=True)]
        lost = [sum(kernel[axis] - 1 for kernel in self.kernels) for axis in range(3)]
        size = [(n - k) // f * f + k for n, f, k in zip(x.shape[2:], factor, lost, strict=True)]
        return cropped(x, size)

    def _level(self, level: int, x: Any) -> Any:
        left = self.left[level](x)
        if level == len(self.factors):
            return left
        if any(n % factor for n, factor in zip(left.shape[2:], self.factors[level], strict=True)):
            raise RuntimeError(f"cannot downsample {tuple(left.shape)} by {self.factors[level]}")
        deeper = self.up[level](self._level(level + 1, self.down[level](left)))
        deeper = self._to_factor(deeper, level)
        return self.right[level](torch.cat([cropped(left, deeper.shape[2:]), deeper], dim=1))

    def forward(self, x: Any) -> Any:
        found = self._level(0, x)
        given = [head(found) for head in self.heads]
        return given[0] if len(given) == 1 else tuple(given)


class TopazDenoiser(nn.Module):  # type: ignore[misc]
    """topaz' 3D denoiser: 11x11x11 first, nearest to the size of the skip, and the input itself at the end."""

    def __init__(self, maps: int = 4, levels: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(1 if level == 0 else maps, maps, 11 if level == 0 else 3, padding=5 if level == 0 else 1),
                nn.LeakyReLU(0.1),
                nn.MaxPool3d(2),
            )
            for level in range(levels)
        )
        self.bottom = nn.Sequential(nn.Conv3d(maps, maps, 3, padding=1), nn.LeakyReLU(0.1))
        self.up = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(maps + (maps if level else 1), maps, 3, padding=1),
                nn.LeakyReLU(0.1),
                nn.Conv3d(maps, maps, 3, padding=1),
                nn.LeakyReLU(0.1),
            )
            for level in range(levels)
        )
        self.end = nn.Conv3d(maps, 1, 3, padding=1)

    def forward(self, x: Any) -> Any:
        skips = [x]
        for down in self.down:
            skips.append(down(skips[-1]))
        found = self.bottom(skips.pop())
        for skip, up in zip(skips[::-1], list(self.up)[::-1], strict=True):
            found = functional.interpolate(found, size=skip.size()[2:], mode="nearest")
            found = up(torch.cat([found, skip], dim=1))
        return self.end(found)


def norm_of(kind: str | None, maps: int) -> nn.Module:
    """Return a norm as torch-em has them."""
    if kind is None:
        return nn.Identity()
    return nn.InstanceNorm3d(maps) if kind == "instance" else nn.BatchNorm3d(maps)


class TorchEmUNet(nn.Module):  # type: ignore[misc]
    """torch-em's UNet3d and AnisotropicUNet: norm, convolution, ReLU; trilinear and 1x1x1; skips cut to size."""

    def __init__(self, norm: str | None = "instance", factors: Sequence[Sizes] = (TWICE, TWICE), maps: int = 4) -> None:
        super().__init__()
        widths = [maps * 2**level for level in range(len(factors) + 1)]
        kernels = [FLAT if factor[0] == 1 else ISOTROPIC for factor in (*factors, TWICE)]
        self.factors = factors

        def block(a: int, b: int, kernel: Sizes) -> nn.Sequential:
            padding = tuple(k // 2 for k in kernel)
            parts: list[nn.Module] = []
            for into in (a, b):
                parts += [norm_of(norm, into), nn.Conv3d(into, b, kernel, padding=padding), nn.ReLU(inplace=True)]
            return nn.Sequential(*parts)

        self.encoder = nn.ModuleList(
            block(a, b, k) for a, b, k in zip([1, *widths[:-2]], widths[:-1], kernels, strict=False)
        )
        self.poolers = nn.ModuleList(nn.MaxPool3d(factor) for factor in factors)
        self.base = block(widths[-2], widths[-1], kernels[-1])
        self.samplers = nn.ModuleList(nn.Conv3d(b, a, 1) for a, b in pairwise(widths))
        self.decoder = nn.ModuleList(block(2 * a, a, k) for a, k in zip(widths[:-1], kernels, strict=False))
        self.out = nn.Conv3d(maps, 2, 1)

    def forward(self, x: Any) -> Any:
        skips = []
        for encode, pool in zip(self.encoder, self.poolers, strict=True):
            skips.append(encode(x))
            x = pool(skips[-1])
        x = self.base(x)
        for level in range(len(self.factors) - 1, -1, -1):
            scale = tuple(map(float, self.factors[level]))
            x = functional.interpolate(x, scale_factor=scale, mode="trilinear", align_corners=False)
            x = self.samplers[level](x)
            x = self.decoder[level](torch.cat([cropped(skips[level], x.shape[2:]), x], dim=1))
        return torch.sigmoid(self.out(x))


def dilated() -> nn.Module:
    """Return a chain of convolutions with growing dilation."""
    return nn.Sequential(
        nn.Conv3d(1, 4, 3), nn.ELU(),
        nn.Conv3d(4, 4, 3, dilation=2), nn.PReLU(4),
        nn.Conv3d(4, 4, 3, dilation=(1, 4, 4)), nn.LeakyReLU(0.1),
        nn.Conv3d(4, 2, 1), nn.Softmax(1),
    )  # fmt: skip


def over_images() -> nn.Module:
    """Return a network over images, which are the planes of a volume."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding="same"), nn.Hardswish(),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 2, 1), nn.Sigmoid(),
    )  # fmt: skip
