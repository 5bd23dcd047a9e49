"""Modules written in unusual ways give what PyTorch gives, or are refused by the name of the node."""

from __future__ import annotations

from typing import Any

import pytest

import znnpy
from tests.importing.test_from_torch import assert_same, conv, module, refused
from znnpy.errors import NetworkFileError

pytestmark = pytest.mark.torch


def two_convolutions(net: Any) -> None:
    net.one, net.two = conv(1, 3), conv(3, 3)


def test_layer_that_reads_another_one_in_larger_volumes_is_refused() -> None:
    """All layers are there at both sizes, with the same weights: only what they read differs."""

    def forward(net: Any, x: Any) -> Any:
        one = net.one(x)
        two = net.two(one)
        return (one if x.shape[2] < 100 else two) + one * two

    refused(module(two_convolutions, forward), "node add ", "one and mul", "two and mul", "size of the volume")


def test_outputs_in_another_order_in_larger_volumes_are_refused() -> None:
    def forward(net: Any, x: Any) -> Any:
        one = net.one(x)
        two = net.two(one)
        return (one, two) if x.shape[2] < 100 else (two, one)

    refused(module(two_convolutions, forward), "outputs are one and two", "two and one", "size of the volume")


def test_axes_that_are_mistaken_for_another_are_refused() -> None:
    """In a cube this changes nothing."""
    from torch.nn.functional import interpolate, max_pool3d

    forwards = (
        lambda net, x: net.one(x).reshape(1, 3, x.shape[3], x.shape[2], x.shape[4]),
        lambda net, x: interpolate(max_pool3d(net.one(x), 2), size=(x.shape[2],) * 3),
        lambda net, x: net.one(x)[:, :, : x.shape[3]],
        lambda net, x: net.one(x)[..., : x.shape[2]],
    )
    for forward in forwards:
        with pytest.raises(NetworkFileError):
            znnpy.from_torch(module(two_convolutions, forward))


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_factor_that_is_not_whole_is_refused_though_the_size_is(mode: str) -> None:
    """64 voxels become 128, as by the factor 2, and yet each lies where the factor 2.001 puts it."""
    import torch

    net = module(
        two_convolutions,
        lambda net, x: torch.nn.functional.interpolate(net.one(x), scale_factor=2.001, mode=mode),
    )
    refused(net, "node upsample_", "64 voxels", "2.001", "128.064", "whole")


def test_division_by_zero_is_refused() -> None:
    refused(module(two_convolutions, lambda net, x: net.one(x) / 0), "node div ", "divides by 0")


def test_celu_of_any_slope_is_computed() -> None:
    """Unlike ELU, it divides its argument by the parameter."""
    import torch

    assert_same(module(two_convolutions, lambda net, x: torch.nn.functional.celu(3 * net.one(x), 2.0)))


def test_softplus_that_becomes_a_line_early_is_refused() -> None:
    import torch

    net = module(two_convolutions, lambda net, x: torch.nn.functional.softplus(net.one(x), threshold=0.5))
    refused(net, "node softplus ", "threshold 0.5", "20")


def test_constants_that_are_rounded_or_of_another_type_are_refused() -> None:
    import torch

    def make(net: Any) -> None:
        two_convolutions(net)
        net.scale = torch.nn.Parameter(torch.tensor([1.7, 2.6]))

    rounded = module(make, lambda net, x: net.one(x) * torch.div(net.scale[0], 1.0, rounding_mode="floor"))
    refused(rounded, "does not depend on the input")
    whole = module(make, lambda net, x: net.one(x) * net.scale.sum(dtype=torch.int32))
    refused(whole, "node sum_1 ", "does not depend on the input")
    squeezed = module(make, lambda net, x: net.one(x) * net.scale.squeeze(0).sum())
    assert_same(squeezed)


def test_indices_of_maxima_are_refused_where_they_are_read() -> None:
    refused(module(two_convolutions, lambda net, x: net.one(x).max(1, keepdim=True)[1]), "indices of maxima")
    refused(
        module(two_convolutions, lambda net, x: net.one(x) * net.one(x).max(1, keepdim=True)[1]), "indices of maxima"
    )


def test_power_that_is_an_array_is_refused() -> None:
    refused(module(two_convolutions, lambda net, x: 2 ** net.one(x)), "node pow_1 ", "power", "array")


def test_tile_of_fewer_dimensions_repeats_the_last_ones() -> None:
    assert_same(module(two_convolutions, lambda net, x: net.one(x).tile((2, 1, 1, 1))))


def test_narrow_counts_from_the_end_where_it_starts_below_zero() -> None:
    assert_same(module(two_convolutions, lambda net, x: net.one(x).narrow(1, -3, 2)))
    refused(module(two_convolutions, lambda net, x: net.one(x).narrow(2, -13, 12)), "node narrow ", "size of the")


def test_shuffled_maps_are_added_to_others() -> None:
    def forward(net: Any, x: Any) -> Any:
        one = net.one(x)
        shuffled = one.reshape(1, 2, 2, *x.shape[2:]).transpose(1, 2).reshape(one.shape)
        return shuffled + net.two(one) * shuffled

    def make(net: Any) -> None:
        net.one, net.two = conv(1, 4), conv(4, 4)

    assert_same(module(make, forward))


def test_absolute_values_and_gates_are_computed() -> None:
    import torch

    def forward(net: Any, x: Any) -> Any:
        return torch.nn.functional.glu(net.one(x), 1) - net.one(x).abs()[:, :1]

    def parts(net: Any) -> None:
        net.one = conv(1, 4)

    assert_same(module(parts, forward))


def test_pixels_that_become_maps_are_computed() -> None:
    import torch

    chain = torch.nn.Sequential(
        torch.nn.PixelUnshuffle(2), torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.PixelShuffle(2)
    )
    x = torch.randn(3, 1, 12, 16)
    with torch.no_grad():
        expected = chain.eval()(x)
    found = znnpy.compile(chain.eval(), threads=1, ram="4G", calibrate=False)(x)
    assert float((found - expected).abs().max()) <= 1e-6
