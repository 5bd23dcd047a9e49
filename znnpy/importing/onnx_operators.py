"""The layers of ONNX's operators over windows, norms and interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Literal

import numpy as np

from znnpy.formats.files import LARGEST
from znnpy.importing.onnx_arithmetic import scaled
from znnpy.importing.onnx_site import Site, Value, operator
from znnpy.importing.onnx_tensors import Array
from znnpy.importing.tensors import AXES, LayoutError, Tensor, kinds
from znnpy.layers import PadMode
from znnpy.messages import excerpt

_PAD_MODES: dict[str, PadMode] = {"constant": "zeros", "edge": "replicate", "reflect": "reflect"}


def _sides(
    site: Site, sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding before and behind of windows, as `pads` or `auto_pad` say."""
    depth = len(kernel)
    how = site.word("auto_pad", "NOTSET")
    if how == "NOTSET":
        pads = site.sizes("pads", [0] * 2 * depth)
        if len(pads) != 2 * depth:
            raise site.error(
                f"has {len(pads)} pads for {depth} dimensions, which take {2 * depth}; save the model again"
            )
        return pads[:depth], pads[depth:]
    site.only("auto_pad", "VALID", "SAME_UPPER", "SAME_LOWER", usual="NOTSET")
    if how == "VALID":
        return [0] * depth, [0] * depth
    totals = [
        max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
    ]
    return _halves(totals, upper=how == "SAME_UPPER")


def _halves(totals: Sequence[int], *, upper: bool) -> tuple[list[int], list[int]]:
    """Return halves of paddings; the larger half of an odd one is behind if `upper`."""
    smaller, larger = [n // 2 for n in totals], [n - n // 2 for n in totals]
    return (smaller, larger) if upper else (larger, smaller)


def _windows(site: Site, depth: int) -> tuple[list[int], list[int]]:
    """Return stride and dilation, one for each spatial dimension."""
    stride, dilation = site.sizes("strides", [1] * depth), site.sizes("dilations", [1] * depth)
    if len(stride) != depth or len(dilation) != depth or min(*stride, *dilation) < 1:
        raise site.error(
            f"has the strides {stride} and dilations {dilation} for {depth} dimensions; save the model again"
        )
    return stride, dilation


def _kernel(site: Site) -> tuple[Tensor, Array, Array | None, int]:
    """Return the array, weights, bias and groups of a convolution, with sizes that fit each other."""
    x, weight, bias = site.tensor(), site.known(1), site.optional(2)
    own = list(weight.shape[2:])
    if weight.ndim not in (4, 5):
        raise site.error(f"is over {weight.ndim - 2} dimensions; volumes of three, and images of two, can be computed")
    if site.sizes("kernel_shape", own) != own:
        raise site.error(
            f"has kernel_shape={site.sizes('kernel_shape')} and weights {weight.shape}; save the model again"
        )
    if len(x.dims) != weight.ndim:
        raise LayoutError(f"{site.builder.here} has weights {weight.shape}, and gets an array of shape {x.shape}")
    groups = site.count("group", 1)
    if groups < 1 or weight.shape[0] % groups or weight.size == 0:
        raise site.error(f"has {groups} groups and weights {weight.shape}; save the model again")
    return x, weight, bias, groups


@operator("Conv")
def _conv(site: Site) -> Value:
    x, weight, bias, groups = _kernel(site)
    stride, dilation = _windows(site, weight.ndim - 2)
    before, behind = _sides(site, x.shape[2:], weight.shape[2:], stride, dilation)
    return site.builder.conv(
        x, weight, bias, stride=stride, padding=before, behind=behind, dilation=dilation, groups=groups
    )


@operator("ConvTranspose")
def _conv_transpose(site: Site) -> Value:
    x, weight, bias, groups = _kernel(site)
    depth = weight.ndim - 2
    stride, dilation = _windows(site, depth)
    added = site.sizes("output_padding", [0] * depth)
    if len(added) != depth:
        raise site.error(f"has {len(added)} sizes output_padding for {depth} dimensions; save the model again")
    how = site.word("auto_pad", "NOTSET")
    wanted = site.sizes("output_shape")
    if not wanted and how in ("NOTSET", "VALID"):
        before, behind = _sides(site, x.shape[2:], weight.shape[2:], stride, dilation)
    else:
        site.only("auto_pad", "NOTSET", "SAME_UPPER", "SAME_LOWER", usual="NOTSET")
        target = wanted or [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
        if len(target) != depth:
            raise site.error(f"has output_shape={target} for {depth} dimensions; save the model again")
        reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
        totals = [
            s * (n - 1) + more + r - to
            for s, n, more, r, to in zip(stride, x.shape[2:], added, reach, target, strict=True)
        ]
        if min(totals) < 0:
            raise site.error(
                f"gives {target} voxels, more than {x.shape[2:]} reach; export it with output_padding instead"
            )
        before, behind = _halves(totals, upper=how == "SAME_UPPER")
    return site.builder.conv_transpose(
        x,
        weight,
        bias,
        stride=stride,
        padding=before,
        behind=behind,
        output_padding=added,
        dilation=dilation,
        groups=groups,
    )


@operator("MaxPool", "AveragePool")
def _pool(site: Site) -> Value:
    x, window = site.tensor(), site.sizes("kernel_shape")
    if len(x.dims) != len(window) + 2:
        raise LayoutError(f"{site.builder.here} has windows {window}, and gets an array of shape {x.shape}")
    stride, dilation = _windows(site, len(window))
    site.only("dilations", [1] * len(window), usual=dilation)
    before, behind = _sides(site, x.shape[2:], window, stride, dilation)
    how: Literal["max", "average"] = "max" if site.step.kind == "MaxPool" else "average"
    return site.builder.pool(
        x,
        how,
        window,
        stride=stride,
        padding=before,
        behind=behind,
        ceil=bool(site.count("ceil_mode", 0)),
        count_padding=bool(site.count("count_include_pad", 0)),
    )


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(site: Site) -> Value:
    how: Literal["average", "max"] = "average" if site.step.kind == "GlobalAveragePool" else "max"
    return site.builder.global_pool(site.tensor(), how, keep=True)


@operator("ReduceMean", "ReduceMax")
def _reduce(site: Site) -> Value:
    x, given = site.tensor(), site.whole(1, "axes")
    rank = len(x.dims)
    if not given and site.count("noop_with_empty_axes", 0):
        return x
    axes = [site.axis(axis, rank) for axis in given or range(rank)]
    rest = [at for at in range(rank) if at not in axes]
    over = {axis for at in axes for axis in kinds(x.dims[at])}
    keep = bool(site.count("keepdims", 1))
    if len(axes) == 1 and over == {"c"}:
        if site.step.kind == "ReduceMean":
            return site.builder.over_maps(x, axes[0], 1 / x.shape[axes[0]], keep=keep)
        return site.builder.largest_map(x, axes[0], keep=keep)
    if len(rest) != 2 or x.shape[rest[0]] != 1 or not over <= set(AXES):
        raise site.error(
            f"is over the dimensions {axes} of {x.shape}, and only a mean or maximum over the whole volume can be read"
        )
    order = [*rest, *sorted(axes)]
    how: Literal["average", "max"] = "average" if site.step.kind == "ReduceMean" else "max"
    made = site.builder.global_pool(x.transposed(order), how, keep=keep)
    return made.transposed([order.index(at) for at in range(rank)]) if keep else made


# --- norms ---


@operator("BatchNormalization")
def _batch_norm(site: Site) -> Value:
    if site.count("training_mode", 0):
        raise site.error("is in training mode; call model.eval() before the export")
    x = site.tensor()
    weight, bias, mean, variance = (site.known(at) for at in (1, 2, 3, 4))
    for what, one in (("weights", weight), ("biases", bias), ("means", mean), ("variances", variance)):
        if one.shape != x.shape[1:2]:
            raise LayoutError(f"{site.builder.here} has {one.shape} {what} for an array of shape {x.shape}")
    return site.builder.batch_norm(x, weight, bias, mean, variance, _epsilon(site))


def _epsilon(site: Site) -> float:
    found = site.real("epsilon", 1e-5)
    if found < 0:
        raise site.error(f"has epsilon={found:g}, which must not be negative; save the model again")
    return found


@operator("InstanceNormalization")
def _instance_norm(site: Site) -> Value:
    """Normalise each part of dimension 1, which is a map, or a group of maps after a reshape."""
    x = site.tensor()
    inner = [factor for dim in x.dims[2:] for factor in dim]
    maps = x.dims[1]
    groups = x.shape[1]
    if (
        x.shape[0] != 1
        or prod(x.shape) != x.maps * prod(x.size)
        or any(factor.of == "copies" for factor in inner)
        or any(factor.of != "c" or factor.step * groups != x.maps for factor in maps)
    ):
        raise LayoutError(f"{site.builder.here} gets an array of shape {x.shape}, and takes (1, maps, z, y, x)")
    if groups == x.maps:
        made = site.builder.norm(x, "instance_norm", _epsilon(site))
    else:
        made = site.builder.norm(x, "group_norm", _epsilon(site), groups)
    return _affine_along(site, made, 1)


@operator("GroupNormalization")
def _group_norm(site: Site) -> Value:
    if site.opset < 21:
        raise site.error(
            f"is that of opset {site.opset}, with a factor per group, which is deprecated; export the model with opset "
            "21 or newer"
        )
    x, groups = site.builder.canonical(site.tensor()), site.count("num_groups", 1)
    if groups < 1 or x.maps % groups:
        raise site.error(f"has {groups} groups for {x.maps} maps; save the model again")
    made = _affine_along(site, site.builder.norm(x, "group_norm", _epsilon(site), groups), 1)
    return made if len(site.tensor().dims) == 5 else replace(made, dims=(*made.dims[:2], *made.dims[3:]))


def _affine_along(site: Site, x: Tensor, dimension: int) -> Tensor:
    """Multiply by the inputs 1 and add the inputs 2, which go along one dimension."""
    shape = (-1, *[1] * (len(x.dims) - dimension - 1))
    return scaled(site, x, site.known(1).reshape(shape), site.known(2).reshape(shape))


@operator("LayerNormalization")
def _layer_norm(site: Site) -> Value:
    """Normalise over the last dimensions, from `axis` on: each map, or all maps together."""
    x = site.tensor()
    axis = site.axis(site.count("axis", -1), len(x.dims))
    over = [factor.of for dim in x.dims[axis:] for factor in dim]
    volume = {of for of, n in zip(AXES, x.size, strict=True) if n > 1}
    if not volume <= set(over) or ("c" in over and prod(x.shape[axis:]) != x.maps * prod(x.size)):
        raise site.error(
            f"is a norm over the dimensions from {axis} on of {x.shape}, and one over the maps of each voxel, or over "
            "a part of the volume, cannot be computed; use a batch norm instead"
        )
    made = site.builder.norm(x, "layer_norm" if "c" in over else "instance_norm", _epsilon(site))
    offset = site.optional(2)
    return scaled(site, made, site.known(1), np.zeros(()) if offset is None else offset)


# --- sizes ---


@operator("Pad")
def _pad(site: Site) -> Value:
    x, pads, axes = site.tensor(), site.whole(1, "pads") or [], site.whole(3, "axes")
    rank = len(x.dims)
    site.only("mode", *_PAD_MODES, usual="constant")
    mode = _PAD_MODES[site.word("mode", "constant")]
    if mode == "zeros" and site.number(2, 0.0) != 0:
        raise site.error(f"pads with {site.number(2, 0.0):g}, and only zeros, `edge` and `reflect` can be computed")
    found = list(range(rank)) if axes is None else [site.axis(axis, rank) for axis in axes]
    if len(pads) != 2 * len(found):
        raise site.error(f"has {len(pads)} pads for {len(found)} dimensions; save the model again")
    sides = {at: (pads[i], pads[len(found) + i]) for i, at in enumerate(found)}
    batch, maps = sides.get(0, (0, 0)), sides.get(1, (0, 0))
    if batch != (0, 0) or (maps != (0, 0) and (mode != "zeros" or min(maps) < 0)):
        raise LayoutError(f"{site.builder.here} pads dimensions 0 and 1 of {x.shape} by {batch} and {maps}")
    volume = [sides.get(at, (0, 0)) for at in range(2, rank)]
    if any(map(any, volume)):
        x = site.builder.pad(x, [before for before, _ in volume], [behind for _, behind in volume], mode)
    return site.builder.pad_maps(x, *maps) if maps != (0, 0) else x


@operator("Resize")
def _resize(site: Site) -> Value:
    x, rank = site.tensor(), len(site.tensor().dims)
    axes = [site.axis(axis, rank) for axis in site.sizes("axes", range(rank))]
    scales, sizes = site.optional(2), site.whole(3, "")
    if sizes is not None:
        site.only("keep_aspect_ratio_policy", "stretch", usual="stretch")
        targets = dict(zip(axes, sizes, strict=False))
    elif scales is not None and scales.size == len(axes):
        scales = scales.reshape(-1)
        if not all(0 < scale <= LARGEST for scale in scales):
            raise site.error(f"has the scales {excerpt(scales.tolist(), 60)}, which are no sensible factors")
        targets = {at: int(np.floor(x.shape[at] * float(scale))) for at, scale in zip(axes, scales, strict=True)}
    else:
        raise site.error("has neither scales nor sizes for its dimensions; save the model again")
    if sizes is not None and len(sizes) != len(axes):
        raise site.error(f"has {len(sizes)} sizes for {len(axes)} dimensions; save the model again")
    if any(targets.get(at, n) != n for at, n in enumerate(x.shape[:2])):
        raise LayoutError(f"{site.builder.here} changes dimensions 0 and 1 of {x.shape} to {targets}")
    was, to = list(x.shape[2:]), [targets.get(at, x.shape[at]) for at in range(2, rank)]
    if min(to, default=0) < 1:
        raise site.error(f"goes from {was} to {to} voxels; give a larger size")
    if was == to:
        return x
    blocks = [n // m if n % m == 0 else 0 for n, m in zip(was, to, strict=True)]
    nearest = site.word("mode", "nearest") == "nearest"
    if scales is not None and sizes is None:
        given = [float(dict(zip(axes, scales, strict=True)).get(at, 1)) for at in range(2, rank)]
        blocks = [round(1 / scale) if abs(1 / scale - round(1 / scale)) < 1e-6 else 0 for scale in given]
        if not nearest or not all(blocks):
            _check_exact(site, was, to, given)
    return _nearest(site, x, was, to, blocks) if nearest else _linear(site, x, was, to)


def _check_exact(site: Site, was: Sequence[int], to: Sequence[int], scales: Sequence[float]) -> None:
    """Raise NetworkFileError if a scale is not the ratio of the sizes, so that positions are not what these say."""
    for n, m, scale in zip(was, to, scales, strict=True):
        if abs(n * scale - m) > 1e-4:
            raise site.error(f"goes from {n} voxels by {scale:g}, which gives {n * scale:g}; use a whole factor")


def _nearest(site: Site, x: Tensor, was: Sequence[int], to: Sequence[int], blocks: Sequence[int]) -> Tensor:
    """Interpolate; `blocks` are the voxels of which one is taken along each axis, 0 where that is no whole number."""
    position = site.word("coordinate_transformation_mode", "half_pixel")
    rounding = site.word("nearest_mode", "round_prefer_floor")
    grows = all(m % n == 0 for n, m in zip(was, to, strict=True))
    middle = ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
    if position == "asymmetric" and rounding == "floor":
        if all(blocks):
            return site.builder.every(x, blocks)
        return site.builder.upsample(x, "nearest", to)
    if position in middle and rounding in ("round_prefer_floor", "round_prefer_ceil") and grows:
        return site.builder.upsample(x, "nearest", to)
    raise site.error(
        f"interpolates {list(was)} to {list(to)} voxels by nearest, {excerpt(position, 40)}, {excerpt(rounding, 40)}, "
        "and what can be computed is asymmetric with floor, or half_pixel with round_prefer_floor by whole factors; "
        "export it so"
    )


def _linear(site: Site, x: Tensor, was: Sequence[int], to: Sequence[int]) -> Tensor:
    site.only("mode", "nearest", "linear", usual="nearest")
    site.only(
        "coordinate_transformation_mode", "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "align_corners",
        usual="half_pixel",
    )  # fmt: skip
    if any(m < n for n, m in zip(was, to, strict=True)):
        raise site.error(
            f"interpolates {list(was)} to {list(to)} voxels, and linear can only be computed to more voxels; use an "
            "average pooling instead"
        )
    corners = site.word("coordinate_transformation_mode", "half_pixel") == "align_corners"
    return site.builder.upsample(x, "linear", to, align_corners=corners)
