"""Join and leave out layers of an imported network without changing what it computes, beyond rounding of weights.

* A layer that changes nothing is left out: a padding or crop of 0 voxels, a factor 1 with offset 0.
* Two scales in a row become one. A scale behind a convolution becomes part of its kernels; so does one before it, if
  the convolution pads nothing, or with values of the image.
* A padding before a convolution that pads nothing becomes its padding.
* A function of each value becomes the last step of the layer before it.

A layer is joined with the one before only if nothing else reads what is between, and it is no output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from znnpy.importing.drafts import Draft
from znnpy.layers import (
    NO_PADDING,
    ZERO,
    Activate,
    Add,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    Multiply,
    Pad,
    Scale,
)
from znnpy.network import ConvWeights


def read_by_outputs(drafts: Sequence[Draft], outputs: Sequence[str]) -> list[Draft]:
    """Return the layers that outputs depend on, in order."""
    needed = set(outputs)
    kept = []
    for draft in reversed(drafts):
        if draft.name in needed:
            kept.append(draft)
            needed |= {*draft.reads, *_likes(draft)}
    return kept[::-1]


def simplified(drafts: Sequence[Draft], outputs: Sequence[str], folded: Counter[str]) -> list[Draft]:
    """Return fewer layers that compute the same; `folded` counts what goes."""
    made: list[Draft] = []
    place: dict[str, int] = {}  # of layers in `made`
    renamed: dict[str, str] = {}
    readers = Counter(read for draft in drafts for read in draft.reads)
    fixed = {*outputs, *(like for draft in drafts for like in _likes(draft))}
    for draft in drafts:
        reads = tuple(renamed.get(read, read) for read in draft.reads)
        layer = draft.layer
        if _changes_nothing(layer, draft.weights) and draft.name not in fixed:
            folded[f"{layer.type} layers that change nothing"] += 1
            renamed[draft.name] = reads[0]
            readers[reads[0]] += readers[draft.name] - 1
            continue
        before = made[place[reads[0]]] if len(reads) == 1 and reads[0] in place else None
        if before is not None and readers[reads[0]] == 1 and reads[0] not in fixed:
            joined = _joined(before, layer, draft.weights)
            if joined is not None:
                folded[joined.what] += 1
                before.options, before.weights = (joined.layer,), joined.weights
                if draft.name in fixed or isinstance(layer, Conv):  # the name of the convolution is the better one
                    place[draft.name], before.name = place.pop(before.name), draft.name
                renamed[draft.name] = before.name
                readers[before.name] = readers[draft.name]
                continue
        place[draft.name] = len(made)
        made.append(replace(draft, options=(layer,), reads=reads))
    return made


def _likes(draft: Draft) -> list[str]:
    return [like for option in draft.options[:1] if (like := getattr(option, "like", None)) is not None]


def _changes_nothing(layer: Layer, weights: ConvWeights | None) -> bool:
    match layer:
        case Pad(before=before, behind=behind):
            return before == behind == ZERO
        case Crop(before=before, behind=behind, like=None):
            return before == behind == ZERO
        case Activate(function="none"):
            return True
        case Scale(activation="none") if weights is not None:
            return bool((weights.weight == 1).all() and not weights.bias.any())
        case _:
            return False


class _Joined(NamedTuple):
    """The layer that two in a row become, and what to call that."""

    layer: Layer
    weights: ConvWeights | None
    what: str


def _joined(before: Draft, layer: Layer, weights: ConvWeights | None) -> _Joined | None:
    """Return what two layers in a row become; None if they stay two."""
    match before.layer, layer:
        case (Conv() | ConvTranspose() | Scale()) as first, Scale() as scale if first.activation == "none":
            made = _scaled(first, _of(before.weights), _of(weights))
            ended = replace(first, activation=scale.activation, parameters=scale.parameters)
            return _Joined(ended, made, "scales (batch norms) that became part of the layer before them")
        case Scale(activation="none"), Conv() as conv if conv.padding == NO_PADDING or conv.padding_mode != "zeros":
            made = _after(conv, _of(before.weights), _of(weights))
            return _Joined(conv, made, "scales (batch norms) that became part of the next layer")
        case Pad(before=near, behind=far, how=how), Conv() as conv if conv.padding == NO_PADDING:
            return _Joined(replace(conv, padding=(near, far), padding_mode=how), weights, "paddings of convolutions")
        case Conv() | ConvTranspose() | Add() | Multiply() | Scale() as body, Activate() as end if (
            body.activation == "none" and end.function != "prelu"
        ):
            whole = replace(body, activation=end.function, parameters=end.parameters)
            return _Joined(whole, before.weights, "functions at the end of the layer before them")
        case _:
            return None


def _of(weights: ConvWeights | None) -> ConvWeights:
    assert weights is not None, "the layer has weights"
    return weights


def _scaled(layer: Conv | ConvTranspose | Scale, weights: ConvWeights, scale: ConvWeights) -> ConvWeights:
    """Return weights whose results are multiplied by a factor per map and moved, computed in float64."""
    factor, offset = scale.weight.astype(np.float64), scale.bias.astype(np.float64)
    bias = weights.bias * factor + offset
    match layer:
        case ConvTranspose():
            shape = (layer.groups, weights.weight.shape[0] // layer.groups, *weights.weight.shape[1:])
            by_group = weights.weight.reshape(shape) * factor.reshape(layer.groups, 1, -1, 1, 1, 1)
            kernels = by_group.reshape(weights.weight.shape)
        case Conv():
            kernels = weights.weight * factor[:, None, None, None, None]
        case _:
            kernels = weights.weight * factor
    return ConvWeights(kernels.astype(np.float32), bias.astype(np.float32))


def _after(layer: Conv, scale: ConvWeights, weights: ConvWeights) -> ConvWeights:
    """Return the weights of a convolution of what was not scaled, computed in float64."""
    each = weights.weight.shape[1]
    factor, offset = (
        np.repeat(one.astype(np.float64).reshape(layer.groups, each), layer.out // layer.groups, axis=0)
        for one in (scale.weight, scale.bias)
    )
    kernels = weights.weight * factor[:, :, None, None, None]
    bias = weights.bias + np.einsum("oizyx,oi->o", weights.weight.astype(np.float64), offset)
    return ConvWeights(kernels.astype(np.float32), bias.astype(np.float32))
