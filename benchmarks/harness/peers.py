"""Run whole networks without znnpy: in PyTorch in three ways that a user might write, and by definition in float64.

plain      The network as it was trained. One run gives every period-th voxel, and the dense output takes a run for each
           of the period^3 offsets.
fragments  Every max-pooling runs once for each of its offsets. The results are stacked as a batch, and put back in
           place at the end. This is exact, and no value is computed twice.
dilated    Max-pooling becomes a max-filter at every position, and everything after it is dilated by its window.

In the last two, maxima are separable passes of `torch.maximum`: `max_pool3d` took four times as long in networks with
three poolings, so it would be no fair peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import log2, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.harness.inputs import GREY, Layer, Vec3, field_of_view, layers_of, period

Method = Literal["plain", "fragments", "dilated"]
Tensor = Any  # torch.Tensor: PyTorch is an extra, and its types are not read

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
ALGORITHMS = 10  # algorithms of cuDNN for each convolution that PyTorch times at most
MOST_TAPS = 4  # size of kernels up to which the definition multiplies tap by tap
MOST_VALUES = 2**31 - 1  # values of a tensor: kernels of PyTorch fail beyond


class DenseTorch:
    """A network of `harness.inputs` in one precision; call it on one input patch.

    folder    folder of NAME.npz, which `network_file` wrote.
    layout    "contiguous" or "channels_last_3d".
    device    "cpu" or "cuda". On "cuda" each call overwrites the result of the previous one.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        method: Method,
        precision: str,
        layout: str = "channels_last_3d",
        device: str = "cpu",
        algorithms: int = ALGORITHMS,
    ) -> None:
        self._layers, self._method, self._layout, self._device = layers_of(name), method, layout, device
        self._dtype = dtype_of(precision)
        self._weights = [
            (placed(weight, precision, layout, device), placed(bias, precision, None, device))
            for weight, bias in weights_of(folder, name)
        ]
        self._pinned: Tensor = None  # host buffer that output is downloaded to
        if device != "cpu":
            compute_in(precision, algorithms)

    def __call__(self, raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the output (maps, z, y, x) for grey values (z, y, x); method plain: every period-th voxel of it.

        With method fragments the output must be a multiple of the network's period along every axis.
        """
        import torch

        with torch.inference_mode():
            x = torch.from_numpy(np.ascontiguousarray(raw)).to(self._device).float()
            x = in_layout(((x - GREY[0]) / GREY[1])[None, None].to(self._dtype), self._layout)
            weights, dilation = iter(self._weights), 1
            for layer in self._layers:
                if layer.maps:
                    x = torch.nn.functional.conv3d(x, *next(weights), dilation=dilation)
                    x = (x if layer.is_last else torch.relu_(x)).contiguous(memory_format=_format(self._layout))
                elif self._method == "plain":
                    x = torch.nn.functional.max_pool3d(x, layer.size)
                else:
                    for axis in (2, 3, 4):
                        x = largest(x, axis, layer.size, dilation)
                    if self._method == "fragments":
                        x = fragments(x, layer.size)
                    else:
                        dilation *= layer.size
            if self._method == "fragments":
                x = joined(x, self._layers)
            return self._downloaded(x[0].float().contiguous())

    def _downloaded(self, x: Tensor) -> npt.NDArray[np.float32]:
        import torch

        if self._device == "cpu":
            return np.asarray(x.numpy())
        if self._pinned is None or self._pinned.shape != x.shape:
            self._pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._pinned.copy_(x)
        return np.asarray(self._pinned.numpy())


def weights_of(folder: Path, name: str) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Return kernels (f', f, k, k, k) and biases (f') of every convolution."""
    with np.load(folder / f"{name}.npz") as arrays:
        return [(arrays[f"conv{i}_weight"], arrays[f"conv{i}_bias"]) for i in range(len(arrays.files) // 2)]


def dtype_of(precision: str) -> Any:
    """Return the type of tensors in a precision; tf32 is float32 with other arithmetic, see `compute_in`."""
    import torch

    return {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]


def compute_in(precision: str, algorithms: int = ALGORITHMS) -> None:
    """Choose how cuDNN multiplies float32, and make it use the fastest of its first `algorithms` algorithms."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = algorithms
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def placed(array: npt.NDArray[np.float32], precision: str, layout: str | None, device: str = "cpu") -> Tensor:
    """Return a tensor on a device, in a precision, and (S, f, z, y, x) in a memory format."""
    import torch

    tensor = torch.from_numpy(array).to(device, dtype_of(precision))
    return tensor if layout is None else in_layout(tensor, layout)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Return a tensor (S, f, z, y, x) in a memory format.

    PyTorch cannot tell the formats apart if there is one map, so strides are set explicitly: otherwise the result of
    the next convolution would have the other format.
    """
    x = x.contiguous(memory_format=_format(layout))
    if x.shape[1] == 1 and layout == "channels_last_3d":
        _, _, nz, ny, nx = x.shape
        return x.as_strided(x.shape, (nz * ny * nx, 1, ny * nx, nx, 1))
    return x


def largest(x: Tensor, axis: int, extent: int, step: int) -> Tensor:
    """Return the maximum of `extent` voxels, `step` apart along an axis, at every position for which all exist."""
    import torch

    kept = x.shape[axis] - (extent - 1) * step
    out = x.narrow(axis, 0, kept)
    for i in range(1, extent):
        out = torch.maximum(out, x.narrow(axis, i * step, kept))
    return out


def fragments(x: Tensor, window: int) -> Tensor:
    """Return a max-filtered batch (S, f, z, y, x), sizes multiples of the window, as (S * window^3, f, ..)."""
    import torch

    last = x.is_contiguous(memory_format=torch.channels_last_3d)
    layout = torch.channels_last_3d if last else torch.contiguous_format
    size = (len(x) * window**3, x.shape[1], *(n // window for n in x.shape[2:]))
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
    by_offset = out.unflatten(0, (len(x), window, window, window))
    for z, y, x0 in product(range(window), repeat=3):
        by_offset[:, z, y, x0].copy_(x[:, :, z::window, y::window, x0::window])
    return out


def joined(x: Any, layers: Sequence[Layer]) -> Any:
    """Return fragments, tensors or arrays (all fragments, f, z, y, x), as one patch (1, f, z, y, x)."""
    for window in (layer.size for layer in reversed(layers) if not layer.maps):
        s, f, mz, my, mx = x.shape  # the last pooling's fragments lie innermost in the batch
        x = x.reshape(s // window**3, window, window, window, f, mz, my, mx)
        axes = (0, 4, 5, 1, 6, 2, 7, 3)
        x = x.transpose(axes) if isinstance(x, np.ndarray) else x.permute(*axes)
        x = x.reshape(s // window**3, f, mz * window, my * window, mx * window)
    return x


def sides(name: str, least: int = 8) -> list[int]:
    """Return output sides of patches for PyTorch: the largest within MOST_VALUES first, then half the volume each."""
    step, maps = period(name), max(layer.maps for layer in layers_of(name))
    field = field_of_view(name)
    side = int((MOST_VALUES / maps) ** (1 / 3) - field) // step * step
    found = []
    while side >= max(least, step):
        found.append(side)
        side = int(side * 0.5 ** (1 / 3)) // step * step
    return found


def operations(name: str, side: int) -> float:
    """Return the multiplications and additions of all convolutions for an output patch, by fragments."""
    total, n, count, fin = 0.0, float(side + field_of_view(name) - 1), 1, 1
    for layer in layers_of(name):
        n = n - layer.size + 1
        if layer.maps:
            total += 2.0 * count * n**3 * fin * layer.maps * layer.size**3
            fin = layer.maps
        else:
            n, count = n / layer.size, count * layer.size**3
    return total


def definition(folder: Path, name: str, raw: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return a network's output (maps, z, y, x) in float64, computed on a GPU if PyTorch finds one.

    Convolutions are products for each tap, or FFTs if kernels are large.

    raw  (z, y, x); the output must be a multiple of the network's period along every axis.
    """
    from benchmarks.harness.machine import torch_sees_a_gpu

    xp: Any = np
    x: Any = (raw[None, None].astype(np.float64) - GREY[0]) / GREY[1]
    weights: Any = [(w.astype(np.float64), b.astype(np.float64)) for w, b in weights_of(folder, name)]
    if torch_sees_a_gpu():
        import torch as xp  # type: ignore[no-redef]

        x = xp.from_numpy(x).cuda()
        weights = [(xp.from_numpy(w).cuda(), xp.from_numpy(b).cuda()) for w, b in weights]
    of_layer = iter(weights)
    for layer in layers_of(name):
        if layer.maps:
            convolved = _by_taps if layer.size <= MOST_TAPS else _by_fft
            x = convolved(xp, x, *next(of_layer))
            if not layer.is_last:
                x[x < 0] = 0
            continue
        size = [n - layer.size + 1 for n in x.shape[2:]]
        offsets = list(product(range(layer.size), repeat=3))
        shifted = (x[:, :, a : a + size[0], b : b + size[1], c : c + size[2]] for a, b, c in offsets)
        highest = next(shifted)
        for other in shifted:
            highest = xp.maximum(highest, other)
        p = layer.size
        parts = [highest[:, :, a::p, b::p, c::p] for a, b, c in offsets]
        x = xp.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
    x = joined(x, layers_of(name))[0]
    return np.asarray(x if xp is np else x.cpu().numpy(), np.float64)


def _by_taps(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Return the valid correlation (S, f', z, y, x) float64 of x (S, f, z, y, x), weight (f', f, k) and bias (f')."""
    valid = [n - k + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True)]
    out = xp.zeros((len(x), len(weight), prod(valid)), dtype=x.dtype, **_where(xp, x))
    for tap in product(*map(range, weight.shape[2:])):
        box = tuple(slice(at, at + size) for at, size in zip(tap, valid, strict=True))
        matrix = 1.0 * weight[(..., *tap)]  # a copy without gaps, which BLAS needs
        out += xp.matmul(matrix, x[(..., *box)].reshape(len(x), x.shape[1], -1))
    return out.reshape(len(x), len(weight), *valid) + bias[:, None, None, None]


def _by_fft(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Return the result of `_by_taps` in a time that hardly depends on the size of the kernels."""
    valid = [n - k + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True)]
    lengths, axes = [good_size(n) for n in x.shape[2:]], (1, 2, 3)
    kept = tuple(slice(size) for size in valid)
    spectra = [xp.fft.rfftn(image, lengths, axes) for image in x]
    out = xp.empty((len(x), len(weight), *valid), dtype=x.dtype, **_where(xp, x))
    for to, (kernels, b) in enumerate(zip(weight, bias, strict=True)):
        kernel = xp.conj(xp.fft.rfftn(kernels, lengths, axes))  # correlation, not convolution
        for image, spectrum in enumerate(spectra):
            out[image, to] = xp.fft.irfftn((spectrum * kernel).sum(0), lengths, (0, 1, 2))[kept] + b
    return out


def _where(xp: Any, x: Any) -> dict[str, Any]:
    return {} if xp is np else {"device": x.device}


def good_size(n: int) -> int:
    """Return the least length of at least n whose prime factors are 2, 3 and 5."""

    def rest(m: int) -> int:
        for prime in (2, 3, 5):
            while m % prime == 0:
                m //= prime
        return m

    return next(m for m in range(n, 2 * n + 1) if rest(m) == 1)


def definition_seconds(name: str, side: int) -> float:
    """Estimate how long numpy takes for `definition`, from trials on two cores."""
    total, n, count, fin = 0.0, float(side + field_of_view(name) - 1), 1, 1
    for layer in layers_of(name):
        if layer.maps:
            if layer.size <= MOST_TAPS:
                total += 0.1 * count * n**3 * fin * layer.maps * layer.size**3
            else:
                total += 5 * n**3 * log2(n**3) * (fin * layer.maps + count * (fin + layer.maps))
                total += 8 * n**3 * fin * layer.maps * count
            n, fin = n - layer.size + 1, layer.maps
        else:
            n, count = (n - layer.size + 1) / layer.size, count * layer.size**3
    return total / 1e9


def difference(exact: npt.NDArray[Any], found: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the largest and the rms error of (maps, z, y, x), as shares of the size of the values.

    The size of a value is the largest of 1, the value and the rms of its map, as in `znnpy verify`. Only the part that
    both arrays have counts; NaN makes both errors NaN.
    """
    size = tuple(slice(min(a, b)) for a, b in zip(exact.shape, found.shape, strict=True))
    a, b = exact[size].astype(np.float64), found[size].astype(np.float64)
    rms = np.sqrt(np.mean(np.square(a), axis=(1, 2, 3), keepdims=True))
    shares = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), rms), 1.0)
    return float(shares.max()), float(np.sqrt(np.mean(np.square(shares))))


def covering(output: Vec3, patch: int) -> int:
    """Return how many cubic patches cover an output."""
    return prod(-(-n // patch) for n in output)


def _format(layout: str) -> Any:
    import torch

    return getattr(torch, "contiguous_format" if layout == "contiguous" else layout)
