"""Random layers and small groups of layers, put one behind the other: those of one size, coarser and finer ones."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Literal

from znnpy.layers import (
    FUNCTIONS,
    PAD_MODES,
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    Function,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Pad,
    Pool,
    Scale,
    Sides,
    Upsample,
    maps_after,
)
from znnpy.network import Network, Normalise
from znnpy.shapes import Vec3
from znnpy.wiring import PadToPeriod, Wiring

ENDS: tuple[Function, ...] = tuple(one for one in FUNCTIONS if one != "prelu")
PARAMETERS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.1,), "elu": (0.7,), "clip": (-0.4, 0.9)}
Blocks = tuple[str, ...]
SAME: Blocks = (
    "conv", "conv", "conv", "residual", "norm", "depthwise", "pad", "average", "max", "maxout", "gate", "branches",
    "activation", "scale", "around",
)  # fmt: skip
VALID: Blocks = ("conv", "conv", "conv", "filter", "crop", "pad", "norm", "maxout", "grouped")


def vector(values: Iterable[int]) -> Vec3:
    z, y, x = values
    return z, y, x


class Builder:
    """Adds layers one by one. Tensor 0 is the input; every method returns the tensor of the last layer that it adds."""

    def __init__(self, rng: random.Random, maps: int) -> None:
        self.rng = rng
        self.layers: list[Layer] = []
        self.sources: list[tuple[int, ...]] = []
        self.maps = [maps]
        self._overhanging: set[int] = set()  # tensors below a pooling that rounds up

    def put(self, layer: Layer, *sources: int) -> int:
        self.layers.append(layer)
        self.sources.append(sources)
        self.maps.append(maps_after(layer, tuple(self.maps[source] for source in sources)))
        if any(source in self._overhanging for source in sources[:1]):
            self._overhanging.add(len(self.layers))
        return len(self.layers)

    def name(self, tensor: int) -> str:
        return "input" if tensor == 0 else f"n{tensor}"

    def overhangs(self, tensor: int) -> bool:
        """Return whether a tensor may be larger than what it came from, since a pooling rounded up."""
        return tensor in self._overhanging

    def network(
        self, name: str, outputs: Iterable[int], how: PadToPeriod, normalise: Normalise | None = None
    ) -> Network:
        names = tuple(self.name(tensor + 1) for tensor in range(len(self.layers)))
        wiring = Wiring(names, tuple(self.sources), tuple(outputs), how)
        return Network(name, self.maps[0], tuple(self.layers), normalise, wiring)

    def end(self) -> tuple[Function, tuple[float, ...]]:
        function = self.rng.choice(ENDS)
        return function, PARAMETERS.get(function, ())

    def size(self, *choices: int) -> Vec3:
        return vector(self.rng.choice(choices) for _ in range(3))

    def width(self) -> int:
        return self.rng.choice((2, 3, 4))

    def groups(self, maps: int, out: int) -> int:
        return self.rng.choice([1] + [g for g in (2, 3) if maps % g == 0 and out % g == 0])

    def conv(self, top: int, out: int) -> int:
        """Add a convolution that keeps the size, with padding divided in any way between both sides."""
        rng, kernel, dilation = self.rng, self.size(1, 2, 3, 3), self.size(1, 1, 2)
        more = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        sides = rng.choice(("middle", "middle", "before", "any"))
        before = vector(m // 2 if sides == "middle" else m if sides == "before" else rng.randint(0, m) for m in more)
        behind = vector(m - b for m, b in zip(more, before, strict=True))
        mode, groups = rng.choice(PAD_MODES), self.groups(self.maps[top], out)
        function, parameters = self.end()
        layer = Conv(kernel, out, function, (1, 1, 1), dilation, groups, (before, behind), mode, parameters)
        return self.put(layer, top)

    def same(self, top: int) -> int:
        """Add layers that together keep the size."""
        rng, out = self.rng, self.width()
        ones: Sides = ((1, 1, 1), (1, 1, 1))
        kind = rng.choice(SAME)
        match kind:
            case "residual":
                first = self.conv(top, out)
                return self.put(Add(*self.end()), first, self.put(Conv((3, 3, 3), out, padding=ones), first))
            case "norm":
                return self._normed(self.put(Conv((3, 1, 3), out, padding=((1, 0, 1), (1, 0, 1))), top))
            case "depthwise":
                maps = self.maps[top]
                top = self.put(Conv((3, 3, 1), maps, padding=((1, 1, 0), (1, 1, 0)), groups=maps), top)
                return self.put(Conv((1, 1, 1), out, "gelu"), top)
            case "pad":
                top = self.put(Pad((1, 0, 1), (0, 2, 0), rng.choice(PAD_MODES)), top)
                kernel = (2, 3, 2)
                return self.put(rng.choice((Conv(kernel, out, "relu"), MaxFilter(kernel))), top)
            case "average":
                return self.put(AveragePool((3, 3, 3), (1, 1, 1), ones, count_padding=rng.random() < 0.5), top)
            case "max":
                return self.put(Pool((3, 2, 3), (1, 1, 1), ((1, 0, 1), (1, 1, 1))), top)
            case "maxout":
                return self.put(Maxout(2), self.conv(top, 2 * out))
            case "gate":
                value = self.conv(top, out)
                return self.put(Multiply(), value, self.put(Conv((1, 1, 1), 1, "sigmoid"), top))
            case "branches":
                parts = [self.conv(top, rng.choice((1, 2))) for _ in range(rng.choice((2, 3)))]
                joined = self.put(Concat(), *parts)
                return self.put(Activate(*self.end()), joined) if rng.random() < 0.5 else self.conv(joined, out)
            case "activation":
                function, parameters = rng.choice((self.end(), ("prelu", ())))
                return self.put(Activate(function, parameters), self.put(Conv((1, 1, 1), out), top))
            case "scale":
                return self.put(Scale(*self.end()), top)
            case "around":  # one node with three kinds of faces
                padded = self.put(Conv((3, 3, 3), out, padding=ones), top)
                mirrored = self.put(Conv((3, 3, 3), out, "relu", padding=ones, padding_mode="reflect"), top)
                pooled = self.put(Pool((3, 3, 3), (1, 1, 1), ones), top)
                return self.put(Concat(), self.put(Add(), padded, mirrored), pooled)
            case _:
                return self.conv(top, out)

    def valid(self, top: int) -> int:
        """Add layers that lose voxels at the faces."""
        rng, out = self.rng, self.width()
        match rng.choice(VALID):
            case "filter":
                return self.put(MaxFilter(self.size(1, 2, 3)), top)
            case "crop":
                return self.put(Crop(self.size(0, 1), self.size(0, 1, 2)), self.put(Conv((1, 1, 1), out), top))
            case "pad":
                top = self.put(Pad(self.size(0, 1), self.size(0, 1), rng.choice(PAD_MODES)), top)
                return self.put(Conv(self.size(2, 3), out, "relu"), top)
            case "norm":
                return self._normed(self.put(Conv(self.size(1, 3), out), top))
            case "maxout":
                return self.put(Maxout(2), self.put(Conv(self.size(1, 2, 3), 2 * out), top))
            case "grouped":
                groups = self.groups(self.maps[top], out)
                return self.put(Conv(self.size(1, 2, 3), out, *self.end()[:1], groups=groups), top)
            case _:
                dilation = rng.choice(((1, 1, 1), self.size(1, 2)))
                return self.put(Conv(self.size(1, 2, 3), out, "elu", dilation=dilation), top)

    def _normed(self, top: int) -> int:
        norm = self.put(Scale(epsilon=1e-5, type="batch_norm"), top)
        return self.put(Activate(self.rng.choice(("relu", "prelu", "elu"))), norm)

    def down(self, top: int, stride: Vec3, *, ceil: bool) -> int:
        """Add a layer to a lattice that is coarser by `stride`; n voxels become n / stride if that is whole."""
        rng = self.rng
        wide, sides = vector(3 if s > 1 else 1 for s in stride), vector(1 if s > 1 else 0 for s in stride)
        out = self.width()
        groups = self.groups(self.maps[top], out)
        counts = rng.random() < 0.5
        mode = rng.choice(PAD_MODES)
        layers: tuple[Layer, ...] = (
            Pool(stride, ceil=ceil),
            Pool(wide, stride, (sides, sides), ceil),
            AveragePool(stride, ceil=ceil, count_padding=counts),
            AveragePool(wide, stride, (sides, sides), ceil, counts),
            Conv(stride, out, "relu", stride),
            Conv(wide, out, "silu", stride, (1, 1, 1), groups, (sides, sides), mode),
            Conv((1, 1, 1), out, "none", stride),
        )
        found = self.put(rng.choice(layers), top)
        if isinstance(self.layers[-1], Pool | AveragePool) and ceil:
            self._overhanging.add(found)
        return found

    def any_down(self, top: int, stride: Vec3) -> int:
        """Add a layer to a lattice that is coarser by `stride`, with any number of voxels."""
        rng, out, kernel = self.rng, self.width(), self.size(1, 2, 3)
        side = vector(rng.randint(0, k // 2) for k in kernel)
        ceil, counts, mode = rng.random() < 0.5, rng.random() < 0.5, rng.choice(PAD_MODES)
        groups = self.groups(self.maps[top], out)
        layers: tuple[Layer, ...] = (
            Pool(stride),
            Pool(kernel, stride, (side, side), ceil),
            AveragePool(kernel, stride, (side, side), ceil, counts),
            Conv(kernel, out, "relu", stride, self.size(1, 2), groups, (side, side), mode),
        )
        return self.put(rng.choice(layers), top)

    def any_up(self, top: int, stride: Vec3, skip: int) -> int:
        """Add a layer to a lattice that is finer by `stride`, with any number of voxels; `skip` is on that lattice."""
        rng, out, kernel = self.rng, self.width(), self.size(1, 2, 3, 4)
        padding = self.size(0, 1), self.size(0, 1)
        more, groups = vector(rng.randrange(s) for s in stride), self.groups(self.maps[top], out)
        how: Literal["nearest", "linear"] = rng.choice(("nearest", "linear"))
        layers: tuple[Layer, ...] = (
            ConvTranspose(stride, out, stride),
            ConvTranspose(kernel, out, stride, padding, more, self.size(1, 2), groups),
            Upsample(stride, how=how),
            Upsample(like=self.name(skip), how=how),
        )
        return self.put(rng.choice(layers), top)

    def up(self, top: int, stride: Vec3, skip: int | None) -> int:
        """Add layers to a lattice that is finer by `stride`: n voxels become n * stride.

        skip  a tensor on that lattice, whose size may be referred to
        """
        rng, out = self.rng, self.width()
        maps = self.maps[top]
        how = rng.choice(("nearest", "linear", "like", "whole", "three", "four", "resized", "one"))
        if skip is None or self.family_of(top):
            how = rng.choice(("nearest", "linear", "whole", "three", "four", "one"))
        threes, fours = vector(3 if s > 1 else 1 for s in stride), vector(s + 2 if s > 1 else 1 for s in stride)
        halves, sides = vector(1 if s == 2 else 0 for s in stride), vector(1 if s > 1 else 0 for s in stride)
        groups = self.groups(maps, out)
        match how:
            case "nearest" | "linear":
                return self.put(Upsample(stride, how=how), top)
            case "like":
                assert skip is not None
                return self.put(Upsample(like=self.name(skip), how=rng.choice(("nearest", "linear"))), top)
            case "whole":
                return self.put(ConvTranspose(stride, out, stride, groups=groups, activation="relu"), top)
            case "three":
                return self.put(ConvTranspose(threes, out, stride, (halves, halves), halves, groups=groups), top)
            case "four":
                return self.put(ConvTranspose(fours, maps, stride, (sides, sides), groups=maps), top)
            case "one":
                more = vector(s - 1 for s in stride)
                return self.put(ConvTranspose((1, 1, 1), out, stride, output_padding=more), top)
            case _:  # 2n - 1 voxels, to which another is put in front
                assert skip is not None
                top = self.put(ConvTranspose(threes, out, stride, (halves, halves), groups=groups), top)
                return self.put(Upsample(like=self.name(skip)), top)

    def family_of(self, tensor: int) -> bool:
        """Return whether a tensor may not be brought to the size of another by its own layer."""
        return tensor in self._overhanging or any(isinstance(layer, MaxFilter | Crop) for layer in self.layers)

    def head(self, top: int) -> int:
        """Add a last layer."""
        function: Function = self.rng.choice(("sigmoid", "none", "softmax", "tanh"))
        return self.put(Conv((1, 1, 1), self.rng.choice((1, 2, 3)), function), top)
