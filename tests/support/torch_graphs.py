"""Compute a graph in PyTorch on a whole image, layer by layer with its functions, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from znnpy.layers import (
    DEFAULT_PARAMETERS,
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Pad,
    Pool,
    Scale,
    Sides,
    Upsample,
)
from znnpy.network import ConvWeights, Network
from znnpy.shapes import Vec3

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate"}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "selu": functional.selu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": functional.hardswish,
    "clip": torch.clamp,
    "softmax": lambda x: functional.softmax(x, dim=1),
}


def in_torch(network: Network, weights: Sequence[ConvWeights], image: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return all outputs one after the other, (maps, z, y, x), for an image (z, y, x, c)."""
    of_layer = dict(zip(network.weighted, weights, strict=True))
    tensors = [torch.from_numpy(np.ascontiguousarray(image.transpose(3, 0, 1, 2)[None], np.float64))]
    names = {"input": 0, **{name: index + 1 for index, name in enumerate(network.names)}}
    with torch.no_grad():
        for index, (layer, sources) in enumerate(zip(network.layers, network.sources, strict=True)):
            like = getattr(layer, "like", None)
            size = None if like is None else tuple(tensors[names[like]].shape[2:])
            tensors.append(_computed(layer, of_layer.get(index), [tensors[source] for source in sources], size))
        found = torch.cat([tensors[tensor] for tensor in network.outputs], dim=1)
    return np.asarray(found[0].numpy())


def grown_in_torch(image: npt.NDArray[Any], more: Vec3, how: str) -> npt.NDArray[Any]:
    """Return an image (z, y, x, c) padded behind its far faces."""
    x = torch.from_numpy(np.ascontiguousarray(image.transpose(3, 0, 1, 2)[None], np.float64))
    return np.asarray(_padded(x, ((0, 0, 0), more), how)[0].numpy().transpose(1, 2, 3, 0))


def _computed(layer: Layer, weights: ConvWeights | None, inputs: list[Any], like: tuple[int, ...] | None) -> Any:
    x = inputs[0]
    match layer:
        case Conv():
            weight, bias = _tensors(weights)
            settings = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
            if layer.padding[0] == layer.padding[1] and layer.padding_mode == "zeros":
                x = functional.conv3d(x, weight, bias, padding=layer.padding[0], **settings)
            else:
                x = functional.conv3d(_padded(x, layer.padding, layer.padding_mode), weight, bias, **settings)
            return _end(layer.activation, layer.parameters, x)
        case ConvTranspose():
            weight, bias = _tensors(weights)
            assert layer.padding[0] == layer.padding[1], "PyTorch takes off as much before as behind"
            x = functional.conv_transpose3d(
                x, weight, bias, layer.stride, layer.padding[0], layer.output_padding, layer.groups, layer.dilation
            )
            return _end(layer.activation, layer.parameters, x)
        case Pool() if layer.padding[0] == layer.padding[1]:
            return functional.max_pool3d(x, layer.window, layer.step, layer.padding[0], 1, layer.ceil)
        case Pool():
            assert not layer.ceil, "PyTorch rounds up with equal padding alone"
            return functional.max_pool3d(_padded(x, layer.padding, "zeros", -torch.inf), layer.window, layer.step)
        case AveragePool():
            assert layer.padding[0] == layer.padding[1], "PyTorch pads both sides alike"
            if any(n < window for n, window in zip(x.shape[2:], layer.window, strict=True)):
                return _mean_of_few(layer, x)
            return functional.avg_pool3d(x, layer.window, layer.step, layer.padding[0], layer.ceil, layer.count_padding)
        case MaxFilter():
            return functional.max_pool3d(x, layer.window, 1)
        case Maxout():
            return x.unflatten(1, (x.shape[1] // layer.of, layer.of)).amax(dim=2)
        case Upsample():
            to: dict[str, Any] = {"scale_factor": layer.factor} if like is None else {"size": like}
            if layer.how == "nearest":
                return functional.interpolate(x, mode="nearest", **to)
            return functional.interpolate(x, mode="trilinear", align_corners=False, **to)
        case Crop():
            spare = [a - b for a, b in zip(x.shape[2:], like, strict=True)] if like else None
            before = [one // 2 for one in spare] if spare else layer.before
            behind = [one - one // 2 for one in spare] if spare else layer.behind
            z, y, x_ = (slice(a, n - b) for a, b, n in zip(before, behind, x.shape[2:], strict=True))
            return x[:, :, z, y, x_]
        case Pad():
            return _padded(x, (layer.before, layer.behind), layer.how)
        case Concat():
            return torch.cat(inputs, dim=1)
        case Add():
            return _end(layer.activation, layer.parameters, sum(inputs[1:], x))
        case Multiply():
            for other in inputs[1:]:
                x = x * other
            return _end(layer.activation, layer.parameters, x)
        case Scale():
            weight, bias = _tensors(weights)
            mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
            x = functional.batch_norm(x, mean, variance, weight, bias, eps=0.0)
            return _end(layer.activation, layer.parameters, x)
        case Activate(function="prelu"):
            return functional.prelu(x, _tensors(weights)[0])
        case Activate():
            return _end(layer.function, layer.parameters, x)
        case _:
            raise TypeError(f"no function of PyTorch for {layer}")


def _mean_of_few(layer: AveragePool, x: Any) -> Any:
    """Return the mean over windows of an image smaller than one, which PyTorch refuses: it looks at it unpadded."""
    z, y, x_ = functional.max_pool3d(x, layer.window, layer.step, layer.padding[0], 1, layer.ceil).shape[2:]

    def means(values: Any) -> Any:
        padded = _padded(values, layer.padding, "zeros")
        return functional.avg_pool3d(padded, layer.window, layer.step, 0, layer.ceil, False)[:, :, :z, :y, :x_]

    return means(x) if layer.count_padding else means(x) / means(torch.ones_like(x))


def _tensors(weights: ConvWeights | None) -> tuple[Any, Any]:
    assert weights is not None
    return torch.from_numpy(weights.weight).double(), torch.from_numpy(weights.bias).double()


def _padded(x: Any, sides: Sides, how: str, value: float = 0.0) -> Any:
    before, behind = sides
    flat = [one for axis in (2, 1, 0) for one in (before[axis], behind[axis])]
    if how == "zeros":
        return functional.pad(x, flat, "constant", value)
    return functional.pad(x, flat, MODES[how]) if any(flat) else x


def _end(function: str, parameters: Sequence[float], x: Any) -> Any:
    return FUNCTIONS[function](x, *(parameters or DEFAULT_PARAMETERS.get(function, ())))
