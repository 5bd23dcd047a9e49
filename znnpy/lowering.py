"""Rewrite a graph into one with fewer layers that computes the same, and its weights with it.

* A scale (a batch norm) right behind a convolution becomes part of its kernels, and one right behind a norm of the
  whole image its factors and offsets.
* A function of each value becomes the last step of the layer before it.
* A convolution that pads by reflection or replication becomes a padding and a valid convolution; likewise one that pads
  so far that a window would lie in the padding alone.
* A 1x1x1 convolution of a nearest upsampling comes before it, where it computes each voxel once.

A layer is merged with the one before only if nothing else reads what is between, and it is no output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from znnpy.layers import (
    NO_PADDING,
    ONE,
    Activate,
    Add,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    Multiply,
    Norm,
    Pad,
    Scale,
    Upsample,
    has_weights,
)
from znnpy.network import ConvWeights, Network
from znnpy.shapes import turn
from znnpy.wiring import Wiring

ENDED = (Conv, ConvTranspose, Add, Multiply, Scale, Norm)  # layers that may end with a function


@dataclass(frozen=True)
class Lowered:
    """A network of fewer layers, and which layers of the original each stands for."""

    network: Network
    origins: tuple[tuple[int, ...], ...]  # indices of the original's layers, in order
    original: Network

    def weights(self, index: int, weights: Sequence[ConvWeights], axis: int = 0) -> ConvWeights | None:
        """Return the weights of a layer with `axis` as the first axis of its kernels, if it has any.

        weights  those of the original in order, with the axes of kernels as they are

        Those for which `copies` is true are made here: whoever asks holds them beside the original's.
        """
        layer = self.network.layers[index]
        if not has_weights(layer):
            return None
        given = dict(zip(self.original.weighted, weights, strict=True))
        first, *scales = (given[origin] for origin in self.origins[index] if origin in given)
        return _made(layer, first, scales, axis) if self.copies(index, axis) else first

    def copies(self, index: int, axis: int = 0) -> bool:
        """Return whether the weights of a layer are not those of the original: scaled, or with other axes."""
        own = [origin for origin in self.origins[index] if origin in self.original.weighted]
        return isinstance(self.network.layers[index], Conv | ConvTranspose) and (axis != 0 or len(own) > 1)


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
        if isinstance(layer, Conv) and (_pads_with_values(layer) or _reaches_beyond(layer)):
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
    outputs = tuple(tensors[tensor] for tensor in network.outputs)
    at = dict(zip(network.names, tensors[1:], strict=True))
    fixed = {*outputs, *(at[layer.like] for layer in layers if isinstance(layer, Upsample | Crop) and layer.like in at)}
    for index in range(len(layers)):
        if (above := _upsampling_before(layers, sources, fixed, index)) is not None:
            layers[above], layers[index] = layers[index], layers[above]
            names[above], names[index] = names[index], names[above]
            origins[above], origins[index] = origins[index], origins[above]
    renamed = {old: names[tensor - 1] for old, tensor in zip(network.names, tensors[1:], strict=True)}
    layers = [_refers(layer, renamed) for layer in layers]
    wiring = Wiring(tuple(names), tuple(sources), outputs, network.pad_to_period)
    made = replace(network, layers=tuple(layers), wiring=wiring)
    return Lowered(made, tuple(origins), network)


def _upsampling_before(
    layers: Sequence[Layer], sources: Sequence[tuple[int, ...]], fixed: set[int], index: int
) -> int | None:
    """Return the nearest upsampling that a 1x1x1 convolution alone reads; None if there is none.

    fixed  tensors that stay where they are: outputs, and those whose sizes others take
    """
    layer, before = layers[index], sources[index][0] - 1
    if (
        not isinstance(layer, Conv)
        or (layer.reach, layer.stride, layer.padding) != (ONE, ONE, NO_PADDING)
        or before < 0
    ):
        return None
    above = layers[before]
    if not isinstance(above, Upsample) or above.how != "nearest" or not {before + 1, index + 1}.isdisjoint(fixed):
        return None
    readers = sum(reads.count(before + 1) for reads in sources)
    return before if readers == 1 else None


def _pads_with_values(layer: Conv) -> bool:
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
    if isinstance(layer, Scale) and isinstance(before, Norm) and not before.affine:
        return replace(before, affine=True, activation=layer.activation, parameters=layer.parameters)
    return None


def _refers(layer: Layer, renamed: dict[str, str]) -> Layer:
    """Return a layer that refers to another by its new name."""
    if isinstance(layer, Upsample | Crop) and layer.like in renamed:
        return replace(layer, like=renamed[layer.like])
    return layer


def _made(layer: Layer, weights: ConvWeights, scales: Sequence[ConvWeights], axis: int) -> ConvWeights:
    """Return the weights of a layer followed by scales of its maps, with `axis` first; products are rounded once.

    Besides the result there is one kernel at a time: all of them in float64 would take twice the memory.
    """
    import numpy as np

    factors, bias = [scale.weight.astype(np.float64) for scale in scales], weights.bias.astype(np.float64)
    for factor, scale in zip(factors, scales, strict=True):
        bias = bias * factor + scale.bias
    count, per_kernel, *sizes = weights.weight.shape
    order = (0, *(1 + along for along in turn(axis)))
    kernels = np.empty((count, per_kernel, *(sizes[along] for along in turn(axis))), np.float32)
    for number, kernel in enumerate(weights.weight):
        product = kernel.astype(np.float64)
        for factor in factors:
            if isinstance(layer, ConvTranspose):  # (f, f' / groups, k): maps of a group are side by side
                group = number * layer.groups // count
                product *= factor[group * per_kernel : (group + 1) * per_kernel, None, None, None]
            else:
                product *= factor[number]
        kernels[number] = product.transpose(order)
    return ConvWeights(kernels, bias.astype(np.float32))
