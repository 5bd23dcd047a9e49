"""Write a network of named layers as the text of a network.yaml, and its weights as the bytes of an .npz file."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from znnpy.formats.layer_entries import PARAMETERS
from znnpy.layers import (
    NO_PADDING,
    ONE,
    ZERO,
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    GlobalPool,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Norm,
    Pad,
    Pool,
    Scale,
    Sides,
    Upsample,
)
from znnpy.network import ConvWeights, Network
from znnpy.shapes import Vec3
from znnpy.wiring import INPUT

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")  # words that need no quotes
_RESERVED = ("true", "false", "null", "y", "n", "yes", "no", "on", "off")


def network_text(network: Network, weights: str | None, description: str = "") -> str:
    """Return the text of a network.yaml, from which `read_network` makes an equal network.

    weights  name of the file of weights, beside the network file; None: it names none
    """
    lines = [f"name: {_word(network.name)}"]
    if description:
        lines.append(f"description: {json.dumps(description)}")
    lines.append(f"input_channels: {network.input_channels}")
    if network.statistics is not None:
        what = network.statistics.described
        lines.append(f"normalise: {_flow({'of_volume': what.pop('of'), **what})}")
    elif network.normalise is not None:
        lines.append(f"normalise: {_flow({'mean': network.normalise.mean, 'std': network.normalise.std})}")
    if weights is not None:
        lines.append(f"weights: {_word(weights)}")
    lines.append(f"pad_to_period: {network.pad_to_period}")
    if network.asked_meaning is not None:
        lines.append(f"meaning: {network.asked_meaning}")
    if (windows := network.windows) is not None:
        mirror = ["zyx"[axis] for axis in windows.mirror]
        what = {**windows.described, "mirror": mirror}
        lines.append(f"windows: {_flow({'like' if key == 'rule' else key: value for key, value in what.items()})}")
    tensors = (INPUT, *network.names)
    if network.outputs != (len(network.layers),):
        lines.append(f"output: [{', '.join(_word(tensors[output]) for output in network.outputs)}]")
    lines.append("layers:")
    above = INPUT
    for node in network.nodes:
        entry: dict[str, Any] = {"name": node.name, **layer_entry(node.layer)}
        if node.inputs != (above,):
            entry["from"] = node.inputs if len(node.inputs) > 1 else node.inputs[0]
        lines.append(f"  - {_flow(entry)}")
        above = node.name
    return "\n".join(lines) + "\n"


def weights_bytes(network: Network, weights: Sequence[ConvWeights]) -> bytes:
    """Return the .npz file of a network's weights, with the names that a network of named layers has."""
    arrays = {}
    for index, own in zip(network.weighted, weights, strict=True):
        name = network.names[index]
        arrays[f"{name}.weight"] = own.weight
        if own.bias.size:
            arrays[f"{name}.bias"] = own.bias
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def layer_entry(layer: Layer) -> dict[str, Any]:
    """Return the keys of a layer in a network.yaml, without those that have their usual values."""
    entry: dict[str, Any] = {"type": layer.type}
    match layer:
        case Conv():
            entry |= {"kernel": layer.kernel, "out": layer.out}
            entry |= _unless(stride=(layer.stride, ONE), dilation=(layer.dilation, ONE), groups=(layer.groups, 1))
            entry |= _padding(layer.padding)
            entry |= _unless(padding_mode=(layer.padding_mode, "zeros"))
        case ConvTranspose():
            entry |= {"kernel": layer.kernel, "out": layer.out}
            entry |= _unless(stride=(layer.stride, ONE), dilation=(layer.dilation, ONE), groups=(layer.groups, 1))
            entry |= _padding(layer.padding)
            entry |= _unless(output_padding=(layer.output_padding, ZERO))
        case Pool() | AveragePool():
            entry |= {"window": layer.window}
            entry |= _unless(stride=(layer.stride, None))
            entry |= _padding(layer.padding)
            entry |= _unless(ceil=(layer.ceil, False))
            if isinstance(layer, AveragePool):
                entry |= _unless(count_padding=(layer.count_padding, True))
        case MaxFilter():
            entry |= {"window": layer.window}
        case Maxout():
            entry |= {"of": layer.of}
        case Upsample():
            entry |= _unless(factor=(layer.factor, None), like=(layer.like, None), how=(layer.how, "nearest"))
            entry |= _unless(align_corners=(layer.align_corners, False))
        case Crop(like=like) if like is not None:
            entry |= {"like": like}
        case Crop():
            entry |= {"before": layer.before, "behind": layer.behind}
        case Pad():
            entry |= {"before": layer.before, "behind": layer.behind, "how": layer.how}
        case Scale():
            entry = {"type": "scale"}
        case Activate():
            keys = PARAMETERS.get(layer.function, ())
            entry |= {"function": layer.function, **dict(zip(keys, layer.parameters, strict=False))}
        case Norm():
            entry |= {"epsilon": layer.epsilon}
            entry |= {"groups": layer.groups} if layer.type == "group_norm" else {}
            entry |= _unless(affine=(layer.affine, False))
        case GlobalPool():
            entry |= _unless(how=(layer.how, "average"))
        case Concat() | Add() | Multiply():
            pass
    if isinstance(layer, Conv | ConvTranspose | Add | Multiply | Scale | Norm) and layer.activation != "none":
        keys = PARAMETERS.get(layer.activation, ())
        parameters = dict(zip(keys, layer.parameters, strict=False))
        entry["activation"] = {"function": layer.activation, **parameters} if parameters else layer.activation
    return entry


def _unless(**given: tuple[Any, Any]) -> dict[str, Any]:
    """Return the keys whose values are not the usual ones."""
    return {key: value for key, (value, usual) in given.items() if value != usual}


def _padding(sides: Sides) -> dict[str, Any]:
    before, behind = sides
    if sides == NO_PADDING:
        return {}
    return {"padding": before if before == behind else {"before": before, "behind": behind}}


def _flow(value: Any) -> str:
    """Write a value on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(own)}' for key, own in value.items())}}}"
    if isinstance(value, tuple | list):
        same: Vec3 | tuple[Any, ...] = tuple(value)
        if len(same) == 3 and isinstance(same[0], int) and same[0] == same[1] == same[2]:
            return str(same[0])  # a size that is equal along z, y and x
        return f"[{', '.join(map(_flow, value))}]"
    return _word(value) if isinstance(value, str) else json.dumps(value)


def _word(value: str) -> str:
    return value if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED else json.dumps(value)
