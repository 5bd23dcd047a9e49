"""Norms and global poolings of PyTorch's modules give what PyTorch gives on whole images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from znnpy.errors import NetworkFileError
from znnpy.importing.finish import Wishes
from znnpy.importing.from_torch import imported_module
from znnpy.kernels.whole import whole
from znnpy.layers import GlobalPool, Norm

pytestmark = pytest.mark.torch

ROUNDING = 1e-9  # of the largest value: both compute in float64


def module(forward: Callable[..., Any], **parts: Any) -> Any:
    """Return a module in evaluation mode with these parts."""
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x: Any) -> Any:
            return forward(self, x)

    torch.manual_seed(3)
    made = Net()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.5)
    return made.eval()


def conv(maps: int, out: int, kernel: int = 3, **options: Any) -> Any:
    import torch

    return torch.nn.Conv3d(maps, out, kernel, **{"padding": kernel // 2, **options})


def assert_same(net: Any, expected: list[Any], size: tuple[int, int, int] = (9, 12, 10)) -> None:
    """Fail unless the network has these layers of whole images, and gives what PyTorch gives in float64."""
    import torch

    example = torch.randn(1, 1, 16, 24, 32, generator=torch.Generator().manual_seed(5))
    made = imported_module(net, example, Wishes(), "net")
    assert [layer for layer in made.network.layers if isinstance(layer, Norm | GlobalPool)] == expected
    x = torch.randn(1, 1, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        exact = net.double()(x)[0].numpy()
    (found,) = whole(made.network, made.weights, x[0].numpy().transpose(1, 2, 3, 0))
    np.testing.assert_allclose(found.transpose(3, 0, 1, 2), exact, rtol=0, atol=ROUNDING * np.abs(exact).max())


def test_norms_equal_pytorch() -> None:
    import torch
    from torch.nn import functional

    net = module(
        lambda self, x: self.third(functional.leaky_relu(self.second(self.low(self.first(self.top(x)).relu())), 0.01)),
        top=conv(1, 6),
        first=torch.nn.InstanceNorm3d(6, affine=True),
        low=conv(6, 8, stride=(1, 2, 2)),
        second=torch.nn.GroupNorm(4, 8, eps=1e-3),
        third=torch.nn.InstanceNorm3d(8),
    )
    layers = [Norm("instance_norm"), Norm("group_norm", 1e-3, 4), Norm("instance_norm")]
    assert_same(net, layers)


def test_layer_norm_of_all_maps_equals_pytorch() -> None:
    from torch.nn import functional

    net = module(lambda self, x: functional.layer_norm(self.top(x), self.top(x).shape[1:], eps=1e-4), top=conv(1, 3))
    assert_same(net, [Norm("layer_norm", 1e-4)])
    each = module(lambda self, x: functional.layer_norm(self.top(x), self.top(x).shape[2:]), top=conv(1, 3))
    assert_same(each, [Norm("instance_norm")])


@pytest.mark.parametrize("largest", [False, True])
def test_squeeze_and_excitation_equals_pytorch(largest: bool) -> None:
    import torch

    pool = torch.nn.AdaptiveMaxPool3d(1) if largest else torch.nn.AdaptiveAvgPool3d(1)
    net = module(
        lambda self, x: self.top(x) * self.excite(self.squeeze(self.pool(self.top(x))).relu()).sigmoid(),
        top=conv(1, 6),
        pool=pool,
        squeeze=conv(6, 2, 1),
        excite=conv(2, 6, 1),
    )
    assert_same(net, [GlobalPool("max" if largest else "average")])
    linear = module(
        lambda self, x: self.top(x) * self.excite(self.top(x).mean((2, 3, 4))).sigmoid().view(1, 6, 1, 1, 1),
        top=conv(1, 6),
        excite=torch.nn.Linear(6, 6),
    )
    assert_same(linear, [GlobalPool()])


def test_image_pooling_equals_pytorch() -> None:
    import torch
    from torch.nn import functional

    def forward(self: Any, x: Any) -> Any:
        features = self.top(x)
        context = self.context(features.mean((2, 3, 4), keepdim=True)).relu()
        spread = functional.interpolate(context, size=features.shape[2:], mode="trilinear", align_corners=False)
        return self.head(torch.cat([features, spread], 1))

    net = module(forward, top=conv(1, 4, stride=2), context=conv(4, 3, 1), head=conv(7, 2, 1))
    assert_same(net, [GlobalPool()])


def test_sums_over_space_and_norms_with_weights_for_each_voxel_are_refused() -> None:
    import torch

    example = torch.zeros(1, 1, 16, 24, 32)
    summed = module(lambda self, x: self.top(x) * self.top(x).sum((2, 3, 4), keepdim=True), top=conv(1, 2))
    with pytest.raises(NetworkFileError, match="is a sum over the dimensions"):
        imported_module(summed, example, Wishes(), "net")
    normed = module(lambda self, x: self.norm(x), norm=torch.nn.LayerNorm((1, 16, 24, 32)))
    with pytest.raises(NetworkFileError, match="multiplies each voxel by a factor of its own"):
        imported_module(normed, example, Wishes(), "net")
