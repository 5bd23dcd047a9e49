"""The layers that ATen operators stand for: convolutions, norms, poolings, upsampling and padding."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from znnpy.importing.aten_walk import Arguments, aten, many, tensor
from znnpy.importing.builder import Builder
from znnpy.importing.tensors import AXES, LayoutError, Tensor, kinds
from znnpy.layers import PadMode

# --- convolutions ---


@aten("conv2d", "conv3d")
def _conv(builder: Builder, a: Arguments) -> Tensor:
    kernel, dilation = a["weight"].shape[2:], many(a.get("dilation", 1))
    padding = a.get("padding", 0)
    before, behind = many(padding) if padding not in ("same", "valid") else [], None
    if padding == "same":
        dilations = dilation * len(kernel) if len(dilation) == 1 else dilation
        more = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
        before = [n // 2 for n in more]
        behind = [n - b for n, b in zip(more, before, strict=True)]
    return builder.conv(
        a["input"],
        a["weight"],
        a.get("bias"),
        stride=many(a.get("stride", 1)),
        padding=before,
        behind=behind,
        dilation=dilation,
        groups=a.get("groups", 1),
    )


@aten("conv_transpose2d", "conv_transpose3d")
def _conv_transpose(builder: Builder, a: Arguments) -> Tensor:
    return builder.conv_transpose(
        a["input"],
        a["weight"],
        a.get("bias"),
        stride=many(a.get("stride", 1)),
        padding=many(a.get("padding", 0)),
        output_padding=many(a.get("output_padding", 0)),
        dilation=many(a.get("dilation", 1)),
        groups=a.get("groups", 1),
    )


@aten("convolution")
def _convolution(builder: Builder, a: Arguments) -> Tensor:
    made: Tensor = _conv_transpose(builder, a) if a.get("transposed") else _conv(builder, a)
    return made


@aten("linear")
def _linear(builder: Builder, a: Arguments) -> Tensor:
    return builder.linear(a["input"], a["weight"], a.get("bias"))


@aten("matmul", "mm")
def _matmul(builder: Builder, a: Arguments) -> Tensor:
    x, other = a["self"], a.get("other", a.get("mat2"))
    if not isinstance(x, Tensor) or not isinstance(other, np.ndarray):
        raise builder.error("multiplies two arrays of which neither is trained weights, as in attention")
    return builder.linear(x, other.T)


@aten("addmm")
def _addmm(builder: Builder, a: Arguments) -> Tensor:
    return builder.linear(a["mat1"], a["mat2"].T, a["self"])


# --- norms ---


@aten("batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(builder: Builder, a: Arguments) -> Tensor:
    if a.get("training", False):
        raise builder.error(
            "is in training mode, or has no running statistics; call module.eval() before it is exported"
        )
    mean, variance = a["running_mean"], a["running_var"]
    return builder.batch_norm(a["input"], a.get("weight"), a.get("bias"), mean, variance, a["eps"])


@aten("instance_norm")
def _instance_norm(builder: Builder, a: Arguments) -> Tensor:
    x: Tensor = a["input"]
    if not a.get("use_input_stats", True):
        return builder.batch_norm(x, a.get("weight"), a.get("bias"), a["running_mean"], a["running_var"], a["eps"])
    return _affine(builder, builder.norm(x, "instance_norm", a.get("eps", 1e-5)), a)


@aten("group_norm")
def _group_norm(builder: Builder, a: Arguments) -> Tensor:
    return _affine(builder, builder.norm(a["input"], "group_norm", a.get("eps", 1e-5), a["num_groups"]), a)


@aten("layer_norm")
def _layer_norm(builder: Builder, a: Arguments) -> Tensor:
    x: Tensor = a["input"]
    last = x.dims[len(x.dims) - len(a["normalized_shape"]) :]
    over = {axis for dim in last for axis in kinds(dim)}
    if not over & set(AXES):
        raise builder.error("is a norm over the maps of each voxel, which is not supported yet")
    volume = {axis for axis, n in zip(AXES, x.size, strict=True) if n > 1}
    if not volume <= over or ("c" in over and prod(a["normalized_shape"]) != x.maps * prod(x.size)):
        raise builder.error(f"is a norm over {a['normalized_shape']} of {x.shape}, a part of the volume or of its maps")
    made = builder.norm(x, "layer_norm" if "c" in over else "instance_norm", a.get("eps", 1e-5))
    rows = x.maps if kinds(last[0]) == ["c"] else 1
    return _affine(builder, made, {name: _one_per_row(builder, a.get(name), rows) for name in ("weight", "bias")})


def _one_per_row(builder: Builder, array: npt.NDArray[np.generic] | None, rows: int) -> npt.NDArray[np.generic] | None:
    """Return one value for each map of an array that has one for each voxel of it."""
    if array is None:
        return None
    values = array.reshape(rows, -1)
    if (values != values[:, :1]).any():
        raise builder.error(
            "multiplies each voxel by a factor of its own, or adds an offset, so that it is for images of one size; "
            "use a norm with one for each map"
        )
    return values[:, 0]


def _affine(builder: Builder, x: Tensor, a: Arguments) -> Tensor:
    """Multiply by the weight of a norm and add its bias, if it has them."""
    if a.get("weight") is None and a.get("bias") is None:
        return x
    weight, bias = a.get("weight"), a.get("bias")
    factor = 1.0 if weight is None else builder.values(weight, "weight").astype(np.float64)
    return builder.affine(x, factor, 0.0 if bias is None else builder.values(bias, "bias").astype(np.float64))


# --- poolings and sizes ---


def _pool(builder: Builder, a: Arguments, how: Literal["max", "average"]) -> Tensor:
    if any(d != 1 for d in many(a.get("dilation", 1))):
        raise builder.error(f"has dilation {a['dilation']}, and only poolings without are supported")
    if a.get("divisor_override") is not None:
        raise builder.error(f"divides by {a['divisor_override']}, and only the mean is supported")
    window = many(a["kernel_size"])
    return builder.pool(
        a["self"],
        how,
        window * (len(a["self"].dims) - 2) if len(window) == 1 else window,
        stride=many(a.get("stride")),
        padding=many(a.get("padding", 0)),
        ceil=bool(a.get("ceil_mode", False)),
        count_padding=bool(a.get("count_include_pad", True)),
    )


@aten("max_pool2d", "max_pool3d")
def _max_pool(builder: Builder, a: Arguments) -> Tensor:
    return _pool(builder, a, "max")


@aten("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool_with_indices(builder: Builder, a: Arguments) -> list[Any]:
    return [_pool(builder, a, "max"), None]


@aten("avg_pool2d", "avg_pool3d")
def _avg_pool(builder: Builder, a: Arguments) -> Tensor:
    return _pool(builder, a, "average")


@aten("adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg(builder: Builder, a: Arguments) -> Tensor:
    return _adaptive(builder, a, "average")


def _adaptive(builder: Builder, a: Arguments, how: Literal["max", "average"]) -> Tensor:
    x, sizes = a["self"], many(a["output_size"])
    if tuple(sizes) == x.shape[2:]:
        return tensor(x)
    if set(sizes) != {1}:
        raise builder.error(f"gives {sizes} voxels for any volume, so that windows depend on its size")
    return builder.global_pool(x, how, keep=True)


@aten("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(builder: Builder, a: Arguments) -> list[Any]:
    return [_adaptive(builder, a, "max"), None]


@aten("mean")
def _mean(builder: Builder, a: Arguments) -> Tensor:
    return _summed(builder, a, mean=True)


@aten("sum")
def _sum(builder: Builder, a: Arguments) -> Tensor:
    return _summed(builder, a, mean=False)


def _summed(builder: Builder, a: Arguments, *, mean: bool) -> Tensor:
    x, dims, keep = a["self"], [d % len(a["self"].dims) for d in many(a.get("dim"))], bool(a.get("keepdim", False))
    if len(dims) == 1 and set(kinds(x.dims[dims[0]])) <= {"c"}:
        return builder.over_maps(x, dims[0], 1 / x.shape[dims[0]] if mean else 1.0, keep=keep)
    if not mean:
        raise builder.error(f"is a sum over the dimensions {dims} of {x.shape}, and only one over maps can be read")
    return _over_space(builder, x, dims, "average", keep=keep)


@aten("amax")
def _amax(builder: Builder, a: Arguments) -> Tensor:
    x, dims = a["self"], [d % len(a["self"].dims) for d in many(a.get("dim"))]
    keep = bool(a.get("keepdim", False))
    if dims == [1]:
        return builder.largest_map(x, 1, keep=keep)
    return _over_space(builder, x, dims, "max", keep=keep)


def _over_space(builder: Builder, x: Tensor, dims: list[int], how: Literal["max", "average"], *, keep: bool) -> Tensor:
    if sorted(dims) != list(range(2, len(x.dims))):
        raise builder.error(
            f"is over the dimensions {dims} of {x.shape}, and only one over all of space, or over maps, is known"
        )
    return builder.global_pool(x, how, keep=keep)


def _upsample(builder: Builder, a: Arguments, how: Literal["nearest", "linear"]) -> Tensor:
    x: Tensor = a.get("input", a.get("self"))
    sizes, factors = a.get("output_size"), a.get("scale_factors")
    if sizes is None:
        if factors is None:
            raise builder.error("has neither a size nor a factor")
        sizes = [_scaled_size(builder, n, float(f)) for n, f in zip(x.shape[2:], factors, strict=True)]
    return builder.upsample(x, how, many(sizes), align_corners=bool(a.get("align_corners", False)))


def _scaled_size(builder: Builder, n: int, factor: float) -> int:
    """Return how many voxels a factor makes of n. LayoutError if it is cut off: then values lie as the factor says."""
    found = int(n * factor)
    if found != n * factor:
        raise LayoutError(
            f"{builder.here} scales {n} voxels by {factor:g}, which gives {n * factor:g}; use a factor that is whole"
        )
    return found


@aten("upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
def _nearest(builder: Builder, a: Arguments) -> Tensor:
    return _upsample(builder, a, "nearest")


@aten("upsample_bilinear2d", "upsample_trilinear3d")
def _trilinear(builder: Builder, a: Arguments) -> Tensor:
    return _upsample(builder, a, "linear")


_MODES: dict[str, PadMode] = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate"}


@aten("pad", "constant_pad_nd")
def _pad(builder: Builder, a: Arguments) -> Tensor:
    mode, value = a.get("mode", "constant"), a.get("value")
    if mode not in _MODES or value not in (None, 0):
        given = mode if value is None else f"{mode} {value:g}"
        raise builder.error(f"pads with {given}, and only zeros, reflect and replicate are supported")
    return _padded(builder, a["self"], many(a["pad"]), _MODES[mode])


@aten("reflection_pad2d", "reflection_pad3d")
def _reflection_pad(builder: Builder, a: Arguments) -> Tensor:
    return _padded(builder, a["self"], many(a["padding"]), "reflect")


@aten("replication_pad2d", "replication_pad3d")
def _replication_pad(builder: Builder, a: Arguments) -> Tensor:
    return _padded(builder, a["self"], many(a["padding"]), "replicate")


def _padded(builder: Builder, x: Tensor, sizes: Sequence[int], mode: PadMode) -> Tensor:
    """Pad by sizes in PyTorch's order: before and behind the last dimension first."""
    pairs = [(sizes[i], sizes[i + 1]) for i in range(0, len(sizes), 2)][::-1]
    pairs = [(0, 0)] * (len(x.dims) - len(pairs)) + pairs
    if any(pairs[0]):
        raise builder.error("pads the batch, and one volume at a time is computed")
    if any(pairs[1]):
        if mode != "zeros" or min(pairs[1]) < 0:
            raise builder.error(f"pads maps by {pairs[1]} with {mode}, and only maps of zeros can be added")
        x = builder.pad_maps(x, *pairs[1])
    return builder.pad(x, [p[0] for p in pairs[2:]], [p[1] for p in pairs[2:]], mode)
