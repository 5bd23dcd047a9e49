"""The definitions of graphs' layers equal PyTorch, where it has such a layer, and examples worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from znnpy.graph_shapes import GraphConvShape, PadShape, TransposeShape, UpsampleShape, WindowPoolShape
from znnpy.kernels import definition
from znnpy.layers import DEFAULT_PARAMETERS, FUNCTIONS, Function
from znnpy.network import ConvWeights
from znnpy.shapes import Vec3

RNG = np.random.default_rng(11)
ROUNDING = 1e-12


def random(*size: int) -> Any:
    return RNG.standard_normal(size)


def to_torch(x: Any) -> Any:
    """Return (z, y, x, f) as (1, f, z, y, x)."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(np.asarray(x, np.float64), -1, 0)))[None]


def from_torch(x: Any) -> Any:
    return np.moveaxis(x[0].numpy(), 0, -1)


def error(ours: Any, theirs: Any) -> float:
    """Return the largest difference, relative to values above 1; infinity for arrays of different shapes."""
    if ours.shape != theirs.shape:
        return np.inf
    return float((np.abs(ours - theirs) / (1 + np.abs(theirs))).max())


def test_average_divides_by_padding_but_not_by_overhang() -> None:
    x = np.ones((1, 1, 4, 1))
    shape = WindowPoolShape(1, (1, 1, 4), (1, 1, 3), (1, 1, 2), "average", (0, 0, 1), (0, 0, 2), (0, 0, 1))
    assert definition.pool(shape, x).ravel().tolist() == pytest.approx([2 / 3, 1, 1 / 2], rel=ROUNDING)


def test_transpose_begins_where_the_output_does() -> None:
    x, weights = np.array([1.0, 10.0]).reshape(1, 1, 2, 1), np.array([1, 2, 3], np.float32).reshape(1, 1, 1, 1, 3)
    shape = TransposeShape(1, 1, (1, 1, 2), (1, 1, 8), (1, 1, 3), (0, 0, -1), (1, 1, 2))
    out = definition.transpose(shape, ConvWeights(weights, np.zeros(1, np.float32)), x)
    assert out.ravel().tolist() == [0, 1, 2, 13, 20, 30, 0, 0]


def test_linear_upsampling_is_clamped_at_the_ends() -> None:
    x = np.array([0.0, 8.0]).reshape(1, 1, 2, 1)
    shape = UpsampleShape(1, (1, 1, 2), (1, 1, 4), (1, 1, 2), (0, 0, 0), "linear")
    assert definition.upsample(shape, x).ravel().tolist() == [0, 2, 6, 8]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("k", "padding", "stride", "dilation", "groups"),
    [
        ((3, 3, 3), (0, 0, 0), (1, 1, 1), (1, 1, 1), 1),
        ((3, 2, 1), (1, 1, 0), (2, 1, 3), (1, 2, 1), 1),
        ((3, 3, 3), (2, 2, 2), (1, 1, 1), (2, 2, 2), 2),
        ((2, 3, 3), (0, 1, 1), (1, 2, 2), (1, 1, 1), 4),
    ],
)
def test_convolution_is_that_of_pytorch(k: Vec3, padding: Vec3, stride: Vec3, dilation: Vec3, groups: int) -> None:
    from torch.nn.functional import conv3d

    shape = GraphConvShape((3, 1), 8, (7, 8, 9), k, padding, padding, stride, dilation, groups)
    weights = ConvWeights(random(8, 4 // groups, *k).astype(np.float32), random(8).astype(np.float32))
    inputs = [random(7, 8, 9, 3), random(7, 8, 9, 1)]
    theirs = conv3d(
        to_torch(np.concatenate(inputs, -1)), *parameters(weights), stride, padding, dilation=dilation, groups=groups
    )
    assert error(definition.convolve(shape, weights, inputs), from_torch(theirs)) <= ROUNDING


@pytest.mark.torch
@pytest.mark.parametrize(
    ("k", "padding", "stride", "dilation", "groups", "more"),
    [
        ((2, 2, 2), (0, 0, 0), (2, 2, 2), (1, 1, 1), 1, (0, 0, 0)),
        ((3, 4, 2), (1, 2, 0), (2, 2, 3), (1, 1, 1), 2, (1, 0, 2)),
        ((3, 3, 3), (1, 0, 3), (2, 1, 3), (2, 3, 1), 1, (1, 2, 0)),
    ],
)
def test_transposed_convolution_is_that_of_pytorch(
    k: Vec3, padding: Vec3, stride: Vec3, dilation: Vec3, groups: int, more: Vec3
) -> None:
    from torch.nn.functional import conv_transpose3d

    weights = ConvWeights(random(4, 6 // groups, *k).astype(np.float32), random(6).astype(np.float32))
    x = random(4, 3, 5, 4)
    theirs = conv_transpose3d(to_torch(x), *parameters(weights), stride, padding, more, groups, dilation)
    mz, my, mx = theirs.shape[2:]
    shape = TransposeShape(4, 6, (4, 3, 5), (mz, my, mx), k, padding, stride, dilation, groups)
    assert error(definition.transpose(shape, weights, x), from_torch(theirs)) <= ROUNDING


def parameters(weights: ConvWeights) -> tuple[Any, Any]:
    import torch

    return torch.from_numpy(weights.weight.astype(np.float64)), torch.from_numpy(weights.bias.astype(np.float64))


@pytest.mark.torch
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((2, 2, 2), (2, 2, 2), (0, 0, 0)), ((3, 2, 3), (2, 3, 2), (1, 1, 0)), ((3, 3, 3), (2, 2, 2), (1, 1, 1))],
)
def test_poolings_are_those_of_pytorch(window: Vec3, stride: Vec3, padding: Vec3, counts: bool, ceil: bool) -> None:
    from torch.nn.functional import avg_pool3d, max_pool3d

    n: Vec3 = (7, 8, 10)
    x = random(*n, 3)
    most = max_pool3d(to_torch(x), window, stride, padding, ceil_mode=ceil)
    mean = avg_pool3d(to_torch(x), window, stride, padding, ceil_mode=ceil, count_include_pad=counts)
    reached = [(m - 1) * s + w for m, s, w in zip(most.shape[2:], stride, window, strict=True)]
    behind = [r - size - pad for r, size, pad in zip(reached, n, padding, strict=True)]
    overhang = [max(0, b - pad) for b, pad in zip(behind, padding, strict=True)]
    for how, theirs in (("max", most), ("average", mean)):
        shape = WindowPoolShape(
            3, n, window, stride, how, padding, tuple(behind), tuple(overhang), counts  # type: ignore[arg-type]
        )  # fmt: skip
        assert error(definition.pool(shape, x), from_torch(theirs)) <= ROUNDING


@pytest.mark.torch
@pytest.mark.parametrize(("how", "theirs"), [("nearest", "nearest"), ("linear", "trilinear")])
@pytest.mark.parametrize("factor", [(2, 2, 2), (1, 3, 2), (4, 1, 5)])
def test_upsampling_is_that_of_pytorch(how: Any, theirs: str, factor: Vec3) -> None:
    from torch.nn.functional import interpolate

    x, n = random(3, 4, 2, 2), (3, 4, 2)
    m = n[0] * factor[0], n[1] * factor[1], n[2] * factor[2]
    expected = from_torch(interpolate(to_torch(x), scale_factor=factor, mode=theirs))
    assert error(definition.upsample(UpsampleShape(2, n, m, factor, (0, 0, 0), how), x), expected) <= ROUNDING
    part = UpsampleShape(2, n, (1, 2, 2), factor, (2, 1, 1), how)
    assert error(definition.upsample(part, x), expected[2:3, 1:3, 1:3]) <= ROUNDING


@pytest.mark.torch
@pytest.mark.parametrize(("how", "theirs"), [("zeros", "constant"), ("reflect", "reflect"), ("replicate", "replicate")])
def test_padding_is_that_of_pytorch(how: Any, theirs: str) -> None:
    from torch.nn.functional import pad

    x, n = random(4, 5, 3, 2), (4, 5, 3)
    expected = from_torch(pad(to_torch(x), (2, 1, 0, 4, 3, 2), mode=theirs))
    assert error(definition.pad(PadShape(2, n, (9, 9, 6), (-3, 0, -2), (0, 0, 0), n, how), x), expected) <= ROUNDING


@pytest.mark.torch
@pytest.mark.parametrize("function", [function for function in FUNCTIONS if function not in ("none", "prelu")])
def test_functions_are_those_of_pytorch(function: Function) -> None:
    import torch
    from torch.nn import functional

    x = random(3, 4, 5, 6) * 4
    given = DEFAULT_PARAMETERS.get(function, ())
    theirs = {
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "clip": lambda x: torch.clamp(x, *given),
        "softmax": lambda x: functional.softmax(x, dim=1),
        "leaky_relu": lambda x: functional.leaky_relu(x, *given),
        "elu": lambda x: functional.elu(x, *given),
    }.get(function) or getattr(functional, function)
    expected = from_torch(theirs(to_torch(x)))
    bound = 3e-9 if function == "softplus" else ROUNDING  # beyond 20 PyTorch returns x
    assert error(definition.activate(function, (), x), expected) <= bound
