"""A network densely in PyTorch, both ways a user would write it: the peer of whole networks.

fragments  every max-pooling once for each of its offsets, the results stacked as a batch (shift and pool), put back in
           place at the end; exact, no value twice
dilated    max-pooling becomes a max-filter at every position, and all that follows is dilated by its window

Either gives the network's dense valid output. Maxima are separable passes of `torch.maximum`: `max_pool3d` took four
times as long in the networks of three poolings (2 Zen 5 cores, 2026-11-20), so it would be no fair peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from znnpy.network import Conv, ConvWeights, MaxFilter, Maxout, Network, Pool
from znnpy.shapes import Activation, Vec3, multiply

Method = Literal["fragments", "dilated"]
Precision = Literal["fp64", "fp32", "bf16", "tf32", "fp16"]
Layout = Literal["contiguous", "channels_last_3d"]

Tensor = Any  # torch.Tensor: PyTorch is an extra, and its types are not read

DTYPES: dict[Precision, Any] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,  # on a GPU, as `compute_in` says
    "fp16": torch.float16,
}
ON_THE_CPU: tuple[Precision, ...] = ("fp32", "bf16")
ALGORITHMS = 10  # PyTorch's own limit
LAYOUTS: dict[Layout, Any] = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}


class DenseTorch:
    """A network with weights in one precision and memory format; call it on one input patch.

    device  where it runs, "cpu" or "cuda". What a call returns there is overwritten by the next.
    tried   algorithms of cuDNN for every convolution, those that its heuristics like best: the fastest is taken.
    """

    def __init__(
        self,
        network: Network,
        weights: Sequence[ConvWeights],
        method: Method,
        precision: Precision,
        layout: Layout,
        device: str = "cpu",
        *,
        tried: int = ALGORITHMS,
    ) -> None:
        self._network, self._method = network, method
        self._precision, self._layout, self._device = precision, layout, device
        self._weights = [
            (placed(one.weight, precision, layout, device), as_tensor(one.bias, precision, device)) for one in weights
        ]
        self._pinned: Tensor = None  # what was downloaded last
        if device != "cpu":
            compute_in(precision, tried)

    def __call__(self, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """raw (c, z, y, x), grey values as stored -> (maps, z, y, x) float32 or float64, field of view - 1 smaller.

        With fragments the output has to be a multiple of the network's period along every axis.
        """
        with torch.inference_mode():
            x = self._normalised(raw)[None].to(DTYPES[self._precision])
            x = in_layout(x, self._layout)
            memory_format = LAYOUTS[self._layout]
            weights = iter(self._weights)
            dilation: Vec3 = (1, 1, 1)
            for layer in self._network.layers:
                match layer:
                    case Conv(activation=activation):
                        weight, bias = next(weights)
                        x = self.convolved(x, weight, bias, dilation)
                        x = activated(x, activation).contiguous(memory_format=memory_format)
                    case Pool(window=window) | MaxFilter(window=window):
                        for axis, (extent, step) in enumerate(zip(window, dilation, strict=True), start=2):
                            x = largest(x, axis, extent, step)
                        if isinstance(layer, Pool) and self._method == "fragments":
                            x = fragments(x, window)
                        elif isinstance(layer, Pool):
                            dilation = multiply(dilation, window)
                    case Maxout(of=of):
                        x = x.unflatten(1, (-1, of)).amax(2).contiguous(memory_format=memory_format)
            return self._dense(x)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor, dilation: Vec3) -> Tensor:
        """x (S, f, z, y, x), weight (f', f, k), bias (f') -> the valid part (S, f', z, y, x)."""
        return torch.nn.functional.conv3d(x, weight, bias, dilation=dilation)

    def _normalised(self, raw: npt.NDArray[Any]) -> Tensor:
        x = torch.from_numpy(np.ascontiguousarray(raw)).to(self._device).to(self._dtype)  # bytes go to a GPU
        normalise = self._network.normalise
        if normalise is None:
            return x
        words = {"dtype": self._dtype, "device": self._device}
        mean, std = (torch.tensor(v, **words)[:, None, None, None] for v in (normalise.mean, normalise.std))
        return (x - mean) / std

    @property
    def _dtype(self) -> Any:
        """Of what comes in and goes out."""
        return torch.float64 if self._precision == "fp64" else torch.float32

    def _dense(self, x: Tensor) -> npt.NDArray[Any]:
        """(1 or fragments, maps, z, y, x) as one patch (maps, z, y, x)."""
        windows = [layer.window for layer in self._network.layers if isinstance(layer, Pool)]
        for window in reversed(windows if self._method == "fragments" else []):
            # the last pooling's fragments lie innermost in the batch: (S, oz, oy, ox, f, mz, my, mx)
            x = x.unflatten(0, (-1, *window)).permute(0, 4, 5, 1, 6, 2, 7, 3)
            s, f, mz, pz, my, py, mx, px = x.shape
            x = x.reshape(s, f, mz * pz, my * py, mx * px)
        return self._downloaded(x[0].to(self._dtype).contiguous())

    def _downloaded(self, x: Tensor) -> npt.NDArray[Any]:
        if self._device == "cpu":
            return np.asarray(x.numpy())
        if self._pinned is None or self._pinned.shape != x.shape:
            self._pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._pinned.copy_(x)
        return np.asarray(self._pinned.numpy())


def compute_in(precision: Precision, tried: int = ALGORITHMS) -> None:
    """What cuDNN multiplies float32 in; of the first `tried` of its algorithms the one that runs fastest is taken."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = tried
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def as_tensor(array: npt.NDArray[np.float32], precision: Precision, device: str = "cpu") -> Tensor:
    return torch.from_numpy(array).to(device, DTYPES[precision])


def placed(array: npt.NDArray[np.float32], precision: Precision, layout: Layout, device: str = "cpu") -> Tensor:
    """An array (S, f, z, y, x) in this precision and memory format."""
    return in_layout(as_tensor(array, precision, device), layout)


def in_layout(x: Tensor, layout: Layout) -> Tensor:
    """A tensor (S, f, z, y, x) in this memory format.

    With one map PyTorch takes every array for one of either format, so strides are set by hand: else the convolution
    after it answers in the other format.
    """
    x = x.contiguous(memory_format=LAYOUTS[layout])
    if x.shape[1] == 1 and layout == "channels_last_3d":
        _, _, nz, ny, nx = x.shape
        return x.as_strided(x.shape, (nz * ny * nx, 1, ny * nx, nx, 1))
    return x


def activated(x: Tensor, activation: Activation) -> Tensor:
    """In place, except softmax over the maps."""
    match activation:
        case "none":
            return x
        case "relu":
            return torch.relu_(x)
        case "tanh":
            return torch.tanh_(x)
        case "sigmoid":
            return torch.sigmoid_(x)
        case "softmax":
            return torch.softmax(x, 1)


def largest(x: Tensor, axis: int, extent: int, step: int) -> Tensor:
    """Maximum of `extent` voxels `step` apart along an axis, at every position where they all exist."""
    kept = x.shape[axis] - (extent - 1) * step
    out = x.narrow(axis, 0, kept)
    for i in range(1, extent):
        out = torch.maximum(out, x.narrow(axis, i * step, kept))
    return out


def fragments(x: Tensor, window: Vec3) -> Tensor:
    """A max-filtered batch (S, f, z, y, x), every size a multiple of the window, as (S * P, f, m): all offsets."""
    pz, py, px = window
    s, f, z, y, x_size = x.shape
    layout = (
        torch.channels_last_3d if x.is_contiguous(memory_format=torch.channels_last_3d) else torch.contiguous_format
    )
    size = (s * pz * py * px, f, z // pz, y // py, x_size // px)
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
    by_offset = out.unflatten(0, (s, pz, py, px))
    for oz, oy, ox in product(range(pz), range(py), range(px)):
        by_offset[:, oz, oy, ox].copy_(x[:, :, oz::pz, oy::py, ox::px])
    return out
