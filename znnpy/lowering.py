"""Rewrite a graph into one with fewer layers that computes the same, and its weights with it.

* A scale (a batch norm) right behind a convolution becomes part of its kernels.
* A function of each value becomes the last step of the layer before it.
* A convolution that pads by reflection or replication becomes a padding and a valid convolution; likewise one that pads
  so far that a window would lie in the padding alone.

A layer is merged with the one before only if nothing else reads what is between, and it is no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from znnpy.layers import (
    NO_PADDING,
    Activate,
    Add,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    Multiply,
    Pad,
    Scale,
    Upsample,
    has_weights,
)
from znnpy.network import ConvWeights, Network, Wiring

ENDED = (Conv, ConvTranspose, Add, Multiply, Scale)  # layers that may end with a function


@dataclass(frozen=True)
class Lowered:
    """A network of fewer layers, and which layers of the original each stands for."""

    network: Network
    origins: tuple[tuple[int, ...], ...]  # indices of the original's layers, in order
    original: Network

    def weights(self, weights: Sequence[ConvWeights]) -> dict[int, ConvWeights]:
        """Return the weights of those layers that have some, by index, from those of the original in order."""
        given = dict(zip(self.original.weighted, weights, strict=True))
        found = {}
        for index, (layer, origins) in enumerate(zip(self.network.layers, self.origins, strict=True)):
            mine = [origin for origin in origins if origin in given]
            if has_weights(layer):
                first, *scales = mine
                found[index] = _scaled(layer, given[first], [given[scale] for scale in scales])
        return found


def lowered(network: Network) -> Lowered:
    """Return an equivalent network with fewer layers."""
    layers: list[Layer] = []
    names: list[str] = []
    sources: list[tuple[int, ...]] = []
    origins: list[tuple[int, ...]] = []
    tensors = [0]  # the new tensor of each old one
    for index, (name, layer, reads) in enumerate(zip(network.names, network.layers, network.sources, strict=True)):
        inputs = tuple(tensors[source] for source in reads)
        before = inputs[0] - 1
        alone = len(network.readers[reads[0]]) == 1 and reads[0] not in network.outputs
        merged = _merged(layers[before], layer) if before >= 0 and len(inputs) == 1 and alone else None
        if merged is not None:
            layers[before], origins[before] = merged, (*origins[before], index)
            names[before] = name
            tensors.append(inputs[0])
            continue
        if isinstance(layer, Conv) and (_repeats(layer) or _reaches_beyond(layer)):
            layers.append(Pad(*layer.padding, layer.padding_mode))
            names.append(f"{name} padding")
            sources.append(inputs)
            origins.append(())
            inputs, layer = (len(layers),), replace(layer, padding=NO_PADDING, padding_mode="zeros")
        layers.append(layer)
        names.append(name)
        sources.append(inputs)
        origins.append((index,))
        tensors.append(len(layers))
    renamed = {old: names[tensor - 1] for old, tensor in zip(network.names, tensors[1:], strict=True)}
    layers = [_refers(layer, renamed) for layer in layers]
    outputs = tuple(tensors[tensor] for tensor in network.outputs)
    wiring = Wiring(tuple(names), tuple(sources), outputs, network.pad_to_period)
    made = replace(network, layers=tuple(layers), wiring=wiring)
    return Lowered(made, tuple(origins), network)


def _repeats(layer: Conv) -> bool:
    """Return whether a convolution pads with values of the image."""
    return layer.padding_mode != "zeros" and layer.padding != NO_PADDING


def _reaches_beyond(layer: Conv) -> bool:
    """Return whether some window of a convolution lies in its padding alone."""
    return any(more >= reach for side in layer.padding for more, reach in zip(side, layer.reach, strict=True))


def _merged(before: Layer, layer: Layer) -> Layer | None:
    """Return one layer for two, the second of which alone reads the first; None if there is none."""
    if not isinstance(before, ENDED) or before.activation != "none":
        return None
    if isinstance(layer, Activate) and layer.function != "prelu":
        return replace(before, activation=layer.function, parameters=layer.parameters)
    if isinstance(layer, Scale) and isinstance(before, Conv | ConvTranspose):
        return replace(before, activation=layer.activation, parameters=layer.parameters)
    return None


def _refers(layer: Layer, renamed: dict[str, str]) -> Layer:
    """Return a layer that refers to another by its new name."""
    if isinstance(layer, Upsample | Crop) and layer.like in renamed:
        return replace(layer, like=renamed[layer.like])
    return layer


def _scaled(layer: Layer, weights: ConvWeights, scales: Sequence[ConvWeights]) -> ConvWeights:
    """Return the weights of a layer followed by scales of its maps; products are rounded once."""
    import numpy as np

    if not scales:
        return weights
    kernels, bias = weights.weight.astype(np.float64), weights.bias.astype(np.float64)
    for scale in scales:
        factor = scale.weight.astype(np.float64)
        bias = bias * factor + scale.bias
        if isinstance(layer, ConvTranspose):  # (f, f' / groups, k): maps of a group are side by side
            fin, per_group = kernels.shape[:2]
            grouped = factor.reshape(layer.groups, 1, per_group, 1, 1, 1)
            split = kernels.reshape(layer.groups, fin // layer.groups, *kernels.shape[1:])
            kernels = (split * grouped).reshape(kernels.shape)
        else:
            kernels = kernels * factor.reshape(-1, 1, 1, 1, 1)
    return ConvWeights(kernels.astype(np.float32), bias.astype(np.float32))
