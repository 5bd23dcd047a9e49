"""Random graphs by number, with weights and a volume: every layer, up to four levels, strides 1 to 3 along each axis.

A number always gives the same case. Networks are small enough for the definition in float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tests.support.seeded_layers import Builder, vector
from znnpy.admissible import admissible, lattices_of, period_of
from znnpy.errors import ShapeError
from znnpy.geometry import Geometry
from znnpy.kernels.whole import grown_by
from znnpy.layers import Add, Concat, Conv, ConvTranspose, Crop, Multiply, Norm, Scale
from znnpy.network import ConvWeights, Network, Normalise
from znnpy.patches import Box
from znnpy.shapes import Vec3
from znnpy.volume.source import predicted
from znnpy.wiring import PadToPeriod

Family = Literal["same", "valid", "coarser", "finer", "any"]  # what becomes of sizes; of `any`, few suit a volume
FAMILIES: tuple[Family, ...] = ("same", "same", "valid", "coarser", "finer")
MOST_VOXELS = 9000  # of a padded volume
MOST_PERIOD = 12  # along an axis


@dataclass(frozen=True)
class Case:
    """A network with its weights, and a volume (c, z, y, x) that it suits once padded at the far faces."""

    seed: int
    network: Network
    weights: tuple[ConvWeights, ...]
    volume: npt.NDArray[Any]

    @property
    def size(self) -> Vec3:
        return vector(self.volume.shape[1:])

    @property
    def geometry(self) -> Geometry:
        return admissible(self.network, self.size)

    @property
    def grown(self) -> npt.NDArray[np.float64]:
        """The padded volume, normalised, as (z, y, x, c)."""
        more = vector(a - b for a, b in zip(self.geometry.volume, self.size, strict=True))
        how = self.network.pad_to_period
        image = self.volume.transpose(1, 2, 3, 0)
        grown = (image if how == "refuse" else grown_by(image, more, how)).astype(np.float64)
        normalise = self.network.normalise
        if normalise is None:
            return grown
        return np.asarray((grown - np.array(normalise.mean)) / np.array(normalise.std))

    def __str__(self) -> str:
        layers = "; ".join(f"{node.name} = {node.layer} of {', '.join(node.inputs)}" for node in self.network.nodes)
        return f"seed {self.seed}, volume {self.size}, padded {self.geometry.volume}: {layers}"


def case(seed: int) -> Case:
    """Return the case of a number."""
    rng = random.Random(seed)
    while True:
        network = random_network(rng, f"seed{seed}", FAMILIES)
        size = _size(rng, network) if network.meaning == "whole" else None
        if size is not None:
            break
    values = np.random.default_rng(seed)
    shape = (network.input_channels, *size)
    if network.normalise is None:
        return Case(seed, network, weights_of(network, seed), values.standard_normal(shape).astype(np.float32))
    return Case(seed, network, weights_of(network, seed), values.integers(0, 256, shape, np.uint8))


def random_network(rng: random.Random, name: str, families: Sequence[Family]) -> Network:
    """Return a random network of one of these families, which may suit no volume."""
    maps = rng.choice((1, 1, 2, 3))
    graph = _Graph(rng, maps, rng.choice(families))
    return graph.built(name)


def _size(rng: random.Random, network: Network) -> Vec3 | None:
    """Return the size of a volume that is admissible and small enough; None if there seems to be none."""
    try:
        period = period_of(network)
    except ShapeError:
        return None
    for extra in (0, 0, 4, 8, 12, 16, 24):
        size = vector(max(p, p * rng.choice((1, 2, 2, 3, 4)) + rng.randrange(7)) + extra for p in period)
        if network.pad_to_period == "refuse":
            size = _that_needs_no_padding(network, size) or size
        try:
            geometry = admissible(network, size)
            predicted(geometry, size, Box((0, 0, 0), size))
        except ShapeError:
            continue
        if prod(geometry.volume) <= MOST_VOXELS:
            return size
    return None


def _that_needs_no_padding(network: Network, size: Vec3) -> Vec3 | None:
    padded = replace(network, wiring=replace(network.wiring, pad_to_period="zeros"))  # type: ignore[type-var]
    try:
        return admissible(padded, size).volume
    except ShapeError:
        return None


def weights_of(network: Network, seed: int) -> tuple[ConvWeights, ...]:
    """Return random weights with which values keep their scale."""
    rng = np.random.default_rng(seed)
    found = []
    for index in network.weighted:
        layer, maps = network.layers[index], network.maps[network.sources[index][0]]
        match layer:
            case Conv():
                shape: tuple[int, ...] = (layer.out, maps // layer.groups, *layer.kernel)
                weight, outputs = rng.standard_normal(shape) / np.sqrt(prod(shape[1:])), layer.out
            case ConvTranspose():
                shape = (maps, layer.out // layer.groups, *layer.kernel)
                weight, outputs = rng.standard_normal(shape) / np.sqrt(maps // layer.groups), layer.out
            case Scale() | Norm():
                weight, outputs = rng.uniform(0.5, 1.5, maps), maps
            case _:
                found.append(
                    ConvWeights(
                        rng.uniform(0.1, 0.5, rng.choice((1, maps))).astype(np.float32), np.zeros(0, np.float32)
                    )
                )
                continue
        bias = 0.2 * rng.standard_normal(outputs)
        found.append(ConvWeights(weight.astype(np.float32), bias.astype(np.float32)))
    return tuple(found)


class _Graph:
    """Draws one network."""

    def __init__(self, rng: random.Random, maps: int, family: Family) -> None:
        self.rng, self.family = rng, family
        self.builder = Builder(rng, maps)

    def built(self, name: str) -> Network:
        rng, builder = self.rng, self.builder
        levels = rng.choice((2, 2, 2, 2, 3) if self.family == "any" else (1, 2, 2, 3, 3, 4))
        strides = self._strides(levels - 1 if self.family != "coarser" else max(1, levels - 1))
        top, skips = 0, []
        for level in range(len(strides) + 1):
            for _ in range(rng.choice((1, 1, 2)) if level < 2 else 1):
                top = self._block(top)
            if level < len(strides):
                skips.append(top)
                top = self._down(top, strides[level])
        missing = rng.randint(1, len(strides)) if self.family == "coarser" else 0
        for skip, stride in list(zip(skips, strides, strict=True))[missing:][::-1]:
            top = self._block(self._risen(top, skip, stride))
        if self.family == "finer":
            top = builder.up(top, rng.choice(((1, 2, 2), (2, 2, 2), (2, 1, 3), (1, 1, 2))), None)
            if rng.random() < 0.5:
                top = self._block(top)
        outputs = [builder.head(top)]
        if rng.random() < 0.25:
            outputs.append(builder.head(top))
        if rng.random() < 0.15 and top:
            outputs.insert(rng.randint(0, 1), top)  # a node that others read too
        elif self.family == "any" and top > 1:
            outputs.append(rng.randrange(1, top))
        normalise = None
        if rng.random() < 0.25:
            channels = builder.maps[0]
            normalise = Normalise(tuple(rng.uniform(90, 140) for _ in range(channels)), (45.0,) * channels)
        how: PadToPeriod = rng.choice(("reflect", "reflect", "replicate", "zeros", "refuse"))
        return builder.network(name, outputs, how, normalise)

    def _strides(self, count: int) -> list[Vec3]:
        """Draw strides with a period that is not too large."""
        while True:
            found = [vector(self.rng.choice((1, 1, 2, 2, 2, 3)) for _ in range(3)) for _ in range(count)]
            periods = [prod(stride[axis] for stride in found) for axis in range(3)]
            if max(periods) <= MOST_PERIOD and prod(periods) <= MOST_VOXELS // 12:
                return found

    def _block(self, top: int) -> int:
        family = self.rng.choice(("same", "valid")) if self.family == "any" else self.family
        return self.builder.valid(top) if family == "valid" else self.builder.same(top)

    def _down(self, top: int, stride: Vec3) -> int:
        if self.family == "any":
            return self.builder.any_down(top, stride)
        return self.builder.down(top, stride, ceil=self.family != "valid" and self.rng.random() < 0.3)

    def _risen(self, below: int, skip: int, stride: Vec3) -> int:
        """Bring a level to the lattice of the one above, and join it with the skip."""
        rng, builder = self.rng, self.builder
        up = builder.any_up(below, stride, skip) if self.family == "any" else builder.up(below, stride, skip)
        cropped = rng.choice(("skip", "up", "none")) if self.family == "any" else "none"
        if self.family == "valid" or cropped == "skip":
            skip = builder.put(Crop(like=builder.name(up)), skip)
        elif builder.overhangs(up) or cropped == "up":
            up = builder.put(Crop(like=builder.name(skip)), up)
        kind = rng.choice(("concat", "concat", "add", "multiply", "gate"))
        if kind == "concat":
            return builder.put(Concat(), *rng.choice(((skip, up), (up, skip))))
        if kind == "gate":
            gate = builder.put(Conv((1, 1, 1), 1, "sigmoid"), up)
            return builder.put(Multiply(), skip, gate)
        same = builder.put(Conv((1, 1, 1), builder.maps[up]), skip)
        return builder.put(Add("relu") if kind == "add" else Multiply("tanh"), same, up)


def layers_in(cases: Iterable[Case]) -> set[type]:
    """Return the kinds of layers that occur."""
    return {type(layer) for one in cases for layer in one.network.layers}


def lattice_of(network: Network) -> tuple[Any, ...]:
    """Return the size of an output voxel in voxels of the input."""
    return lattices_of(network)[network.outputs[0]]
