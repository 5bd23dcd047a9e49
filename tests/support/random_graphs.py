"""Random small graphs of every layer: blocks that pad to the same size, levels with skips, and crops of valid nets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from hypothesis import HealthCheck, reject
from hypothesis import strategies as st

from znnpy.errors import ShapeError
from znnpy.formats.wiring import Given, network_of
from znnpy.layers import (
    DEFAULT_PARAMETERS,
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
)
from znnpy.network import Network
from znnpy.shapes import Vec3

Draw = Callable[[st.SearchStrategy[Any]], Any]
MAPS = (1, 2, 4)
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much)  # a few graphs in ten suit some size of a volume
ENDS: tuple[Function, ...] = tuple(function for function in FUNCTIONS if function != "prelu")


def sizes(least: int, most: int) -> st.SearchStrategy[Vec3]:
    return st.tuples(*[st.integers(least, most)] * 3)


class _Builder:
    """Adds nodes one by one; `maps` are those of each."""

    def __init__(self, draw: Draw, maps: int) -> None:
        self.draw = draw
        self.given: list[Given] = []
        self.maps = {"input": maps}

    def add(self, layer: Layer, *reads: str) -> str:
        name = f"n{len(self.given)}"
        self.given.append(Given(layer, name, reads))
        maps = [self.maps[read] for read in reads]
        match layer:
            case Conv() | ConvTranspose():
                self.maps[name] = layer.out
            case Maxout():
                self.maps[name] = maps[0] // layer.of
            case Concat():
                self.maps[name] = sum(maps)
            case _:
                self.maps[name] = max(maps)
        return name

    def end(self) -> tuple[Function, tuple[float, ...]]:
        function: Function = "none" if self.draw(st.booleans()) else self.draw(st.sampled_from(ENDS))
        return function, DEFAULT_PARAMETERS.get(function, ())

    def groups(self, maps: int) -> tuple[int, int]:
        """Draw groups and maps, which they divide."""
        groups = self.draw(st.sampled_from([g for g in MAPS if maps % g == 0]))
        return groups, groups * self.draw(st.integers(1, 2))

    def ended(self, reads: str) -> str:
        """Add up to a norm and a function, and may be a sum of what is before and behind them."""
        draw, last = self.draw, reads
        if draw(st.booleans()):
            last = self.add(Scale(*self.end()), last)
        if draw(st.booleans()):
            last = self.add(Activate(draw(st.sampled_from(("relu", "prelu", "elu", "softmax")))), last)
        return self.add(Add(), reads, last) if last != reads and draw(st.booleans()) else last

    def same(self, reads: str, maps: int | None = None) -> str:
        """Add a layer that keeps size and lattice."""
        draw, here = self.draw, self.maps[reads]
        groups, out = (1, maps) if maps else self.groups(here)
        kernel, dilation = draw(sizes(1, 3)), draw(sizes(1, 2))
        more = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        before = _vec(draw(st.integers(0, m)) for m in more)
        padding = before, _vec(m - b for m, b in zip(more, before, strict=True))
        mode = draw(st.sampled_from(PAD_MODES))
        end, parameters = self.end()
        conv = Conv(kernel, out, end, (1, 1, 1), dilation, groups, padding, mode, parameters)
        if maps:
            return self.add(conv, reads)
        ones: tuple[Layer, ...] = (
            Pool((3, 1, 3), (1, 1, 1), ((1, 0, 1), (1, 0, 1))),
            AveragePool((3, 3, 1), (1, 1, 1), ((1, 1, 0), (1, 1, 0)), count_padding=draw(st.booleans())),
        )
        return self.ended(self.add(draw(st.sampled_from((conv, conv, conv, *ones))), reads))

    def valid(self, reads: str) -> str:
        """Add a layer that loses voxels at both faces, or has some more."""
        draw = self.draw
        groups, out = self.groups(self.maps[reads])
        kernel, dilation = draw(sizes(1, 3)), draw(sizes(1, 2))
        ones: list[Layer] = [
            Conv(kernel, out, *self.end()[:1], dilation=dilation, groups=groups),
            MaxFilter(draw(sizes(1, 3))),
            Crop(draw(sizes(0, 1)), draw(sizes(0, 1))),
            Pad(draw(sizes(0, 2)), draw(sizes(0, 2)), draw(st.sampled_from(PAD_MODES))),
        ]
        if self.maps[reads] % 2 == 0:
            ones.append(Maxout(2))
        return self.add(draw(st.sampled_from(ones)), reads)

    def down(self, reads: str, stride: Vec3) -> str:
        """Add a layer to a coarser lattice."""
        draw = self.draw
        groups, out = self.groups(self.maps[reads])
        kernel = draw(sizes(1, 3))
        padding: Sides = (_vec(draw(st.integers(0, k // 2)) for k in kernel),) * 2
        ceil = draw(st.booleans())
        layers: tuple[Layer, ...] = (
            Pool(stride),
            Pool(kernel, stride, padding, ceil),
            AveragePool(kernel, stride, padding, ceil, draw(st.booleans())),
            Conv(kernel, out, "relu", stride, draw(sizes(1, 2)), groups, padding, draw(st.sampled_from(PAD_MODES))),
        )
        return self.add(draw(st.sampled_from(layers)), reads)

    def up(self, reads: str, stride: Vec3, like: str) -> str:
        """Add a layer to a finer lattice."""
        draw = self.draw
        groups, out = self.groups(self.maps[reads])
        kernel = draw(sizes(1, 4))
        padding: Sides = (_vec(draw(st.integers(0, 1)) for _ in kernel), _vec(draw(st.integers(0, 1)) for _ in kernel))
        more = _vec(draw(st.integers(0, s - 1)) for s in stride)
        how: Literal["nearest", "linear"] = draw(st.sampled_from(("nearest", "linear")))
        layers: tuple[Layer, ...] = (
            ConvTranspose(stride, out, stride),
            ConvTranspose(kernel, out, stride, padding, more, draw(sizes(1, 2)), groups),
            Upsample(stride, None, how),
            Upsample(None, like, how),
        )
        return self.add(draw(st.sampled_from(layers)), reads)

    def join(self, *reads: str) -> str:
        """Join nodes of one size."""
        if self.draw(st.booleans()):
            return self.add(Concat(), *reads)
        most = max(self.maps[read] for read in reads)
        fit = [read if self.maps[read] in (1, most) else self.same(read, most) for read in reads]
        return self.add(self.draw(st.sampled_from((Add(*self.end()), Multiply()))), *fit)

    def level(self, reads: str, depth: int) -> str:
        """Add layers, a level below with a skip beside it, and layers."""
        draw = self.draw
        top = reads
        for _ in range(draw(st.integers(0, 2))):
            top = draw(st.sampled_from((self.same, self.valid)))(top)
        if depth:
            stride = draw(sizes(1, 3))
            below = self.level(self.down(top, stride), depth - 1)
            up = self.ended(self.up(below, stride, top))
            skip = top
            match draw(st.integers(0, 3)):
                case 0:
                    skip = self.add(Crop(like=up), top)
                case 1:
                    up = self.add(Crop(like=top), up)
            top = self.join(skip, up)
        elif draw(st.booleans()):
            top = self.join(top, self.same(top))
        return self.same(top) if draw(st.booleans()) else top


def _vec(values: Iterable[int]) -> Vec3:
    z, y, x = values
    return z, y, x


@st.composite
def graphs(draw: Draw, depth: int = 2) -> Network:
    """Return a random graph with at least a layer, which some size of a volume suits."""
    maps = draw(st.integers(1, 2))
    builder = _Builder(draw, maps)
    last = builder.level("input", draw(st.integers(0, depth)))
    if last == "input":
        last = builder.same("input")
    outputs = [last]
    if draw(st.booleans()):
        unread = set(builder.maps) - {last, "input"}
        outputs.append(draw(st.sampled_from(sorted(unread)))) if unread else None
    try:
        return network_of("random", maps, builder.given, None, outputs)
    except ShapeError:
        reject()
