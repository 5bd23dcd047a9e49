"""A layer of the host's memory in sub-layers: which parts, in which order, in which buffers, in how many bytes.

A sub-layer takes some images, some planes along z where that is one image, some input maps, and gives some output maps.
Images and planes that go together are a chunk; they go one chunk after the other. Within a chunk

outputs  output maps go group after group, and for each the groups of input maps pass, forwards and then backwards: of
         two that are on the device where a pass ends, the next one uploads neither.
inputs   input maps go group after group, each uploaded once, and the sums of all output maps stay on the device.

Sums over groups of input maps are added up on the device, so every output is downloaded once. Parts at the end of an
axis are what is left: shapes of their own. Arithmetic alone.

Source  ZNNi VII-A, sub-layers (S_i, f_i, f'_i); planes, orders and sums on the device are first principles.
Tested  tests/kernels/gpu/test_host_ram_division.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from znnpy.kernels.primitive import Footprint, Scratch
from znnpy.shapes import FLOAT32, ConvShape

Order = Literal["outputs", "inputs"]

STAGED = 2  # buffers of each kind: one is filled or emptied while the other is computed with
PEAKS_BYTES = 4 * FLOAT32  # of both parts of the input that are there, of sums to be added up, of the output
ROOM = 256  # bytes, on which each of several buffers begins


@dataclass(frozen=True, slots=True)
class Sublayer:
    """What is known of a sub-layer: how long it takes on the device, and what its primitive needs."""

    seconds: float
    footprint: Footprint


Inner = Callable[[ConvShape], Sublayer | None]  # of one primitive and variant; None: it does not apply


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """How much a sub-layer takes at a time."""

    images: int  # S_i
    planes: int  # of the output; fewer than all of them only where `images` is 1
    maps_in: int  # f_i
    maps_out: int  # f'_i
    order: Order = "outputs"


class Visit(NamedTuple):
    """One sub-layer of a chunk. Of two buffers for the input it takes one, and that is the newer one from then on."""

    group_in: int
    group_out: int
    uploads: bool  # into the older buffer
    older: bool  # it takes the older buffer
    first: bool  # nothing was added to these outputs before
    last: bool  # they are complete


@lru_cache(maxsize=256)
def visits(groups_in: int, groups_out: int, order: Order) -> tuple[Visit, ...]:
    """Sub-layers of one chunk in their order."""
    held: list[int] = []  # groups of input maps that are on the device, the older first
    found = []
    for group_in, group_out, turn in _pairs(groups_in, groups_out, order):
        uploads = group_in not in held
        older = uploads or (len(held) == STAGED and held[0] == group_in)
        held = [*(held[-1:] if uploads else [g for g in held if g != group_in]), group_in]
        found.append(Visit(group_in, group_out, uploads, older, turn == 0, turn == groups_in - 1))
    return tuple(found)


def _pairs(groups_in: int, groups_out: int, order: Order) -> Iterator[tuple[int, int, int]]:
    """Groups of input and of output maps, and how many groups were added to these outputs before."""
    if order == "inputs":
        for turn, group_out in product(range(groups_in), range(groups_out)):
            yield turn, group_out, turn
        return
    for group_out, turn in product(range(groups_out), range(groups_in)):
        yield (groups_in - 1 - turn if group_out % 2 else turn), group_out, turn


@dataclass(frozen=True, slots=True)
class Parts:
    """An axis in parts of equal length and what is left of it."""

    length: int
    size: int

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    @property
    def last(self) -> int:
        return self.length - (self.count - 1) * self.size

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Each length that occurs, and how often."""
        if self.last == self.size:
            return ((self.size, self.count),)
        return (self.size, self.count - 1), (self.last, 1)

    def of(self, number: int) -> tuple[int, int]:
        """First and end of a part."""
        return number * self.size, min((number + 1) * self.size, self.length)


def room(nbytes: int) -> int:
    """Of a buffer, and what is left free until the next one begins."""
    return -(-nbytes // ROOM) * ROOM


@dataclass(frozen=True)
class Divided:
    """A layer and its division: all that follows from sizes."""

    shape: ConvShape
    division: Division

    def __post_init__(self) -> None:
        shape, d = self.shape, self.division
        most = (shape.batch, shape.out[0], shape.fin, shape.fout)
        parts = (d.images, d.planes, d.maps_in, d.maps_out)
        if any(not 1 <= part <= length for part, length in zip(parts, most, strict=True)):
            raise ValueError(f"{d} divides no {shape}: parts of {most} are at least 1 and at most all of them")
        if d.images > 1 and d.planes < shape.out[0]:
            raise ValueError(f"{d} takes {d.planes} of {shape.out[0]} planes of {d.images} images: take 1 image")

    @cached_property
    def images(self) -> Parts:
        return Parts(self.shape.batch, self.division.images)

    @cached_property
    def planes(self) -> Parts:
        return Parts(self.shape.out[0], self.division.planes)

    @cached_property
    def maps_in(self) -> Parts:
        return Parts(self.shape.fin, self.division.maps_in)

    @cached_property
    def maps_out(self) -> Parts:
        return Parts(self.shape.fout, self.division.maps_out)

    @property
    def sums(self) -> bool:
        """Outputs are sums over groups of input maps."""
        return self.maps_in.count > 1

    @property
    def chunks(self) -> int:
        return self.images.count * self.planes.count

    @property
    def visits(self) -> tuple[Visit, ...]:
        """Of every chunk."""
        return visits(self.maps_in.count, self.maps_out.count, self.division.order)

    @property
    def count(self) -> int:
        """Sub-layers."""
        return self.chunks * self.maps_in.count * self.maps_out.count

    @property
    def x_buffers(self) -> int:
        return STAGED if self.chunks * self.maps_in.count > 1 else 1

    @property
    def slots(self) -> int:
        """Buffers for outputs: one for each group of a chunk where their sums stay, be it one."""
        if self.division.order == "inputs":
            return self.maps_out.count
        return min(STAGED, self.chunks * self.maps_out.count)

    @property
    def totals(self) -> int:
        """Buffers for sums in float32 where outputs are float16; else outputs are added up where they are."""
        if not self.sums or self.shape.itemsize == FLOAT32:
            return 0
        return self.maps_out.count if self.division.order == "inputs" else 1

    @property
    def x_bytes(self) -> int:
        """From one buffer for the input to the next."""
        return room(self.largest.in_bytes)

    @property
    def out_bytes(self) -> int:
        """From one buffer for outputs to the next."""
        return room(self.largest.out_bytes)

    @property
    def landings(self) -> int:
        """Buffers of the host that outputs are downloaded to."""
        return min(STAGED, self.chunks * self.maps_out.count)

    def sublayer(self, images: int, planes: int, maps_in: int, maps_out: int) -> ConvShape:
        """The shape of one; its activation, unless its outputs are yet to be added up."""
        shape = self.shape
        return replace(
            shape,
            batch=images,
            fin=maps_in,
            fout=maps_out,
            n=(planes + shape.k[0] - 1, *shape.n[1:]),
            activation="none" if self.sums else shape.activation,
        )

    @cached_property
    def largest(self) -> ConvShape:
        d = self.division
        return self.sublayer(d.images, d.planes, d.maps_in, d.maps_out)

    def shapes(self) -> Iterator[tuple[ConvShape, int]]:
        """Each shape of a sub-layer, and how many have it."""
        axes = (self.images.sizes, self.planes.sizes, self.maps_in.sizes, self.maps_out.sizes)
        for parts in product(*axes):
            sizes, counts = zip(*parts, strict=True)
            yield self.sublayer(*sizes), prod(counts)

    @property
    def end_bytes(self) -> int:
        """Of the last output that is downloaded."""
        return self.sublayer(self.images.last, self.planes.last, 1, self.maps_out.last).out_bytes

    @property
    def uploaded_bytes(self) -> int:
        """Of all sub-layers: planes that chunks share, and groups of maps that come again, each time."""
        maps, groups = 0, self.maps_in
        for visit in self.visits:
            if visit.uploads:
                lo, hi = groups.of(visit.group_in)
                maps += hi - lo
        return maps * self.map_bytes

    @property
    def map_bytes(self) -> int:
        """Of one input map, of all chunks together."""
        shape = self.shape
        planes = shape.out[0] + self.planes.count * (shape.k[0] - 1)
        return shape.batch * planes * prod(shape.n[1:]) * shape.itemsize

    def footprint(self, inner: Inner) -> Footprint | None:
        """Of the layer; None where `inner` does not apply to some sub-layer.

        Input and output are no tensors of the device's: no stage holds them. Kernels of all groups of maps stay there.
        """
        found = []
        for shape, _ in self.shapes():
            sublayer = inner(shape)
            if sublayer is None:
                return None
            found.append(sublayer.footprint)
        return self.around(found)

    def around(self, found: Sequence[Footprint]) -> Footprint:
        """The layer's, of those of the shapes of its sub-layers in their order; of the first ones: no more than it is.

        What kernels take does not depend on images and planes: those of the first ones count.
        """
        groups = [m * n for (_, m), (_, n) in product(self.maps_in.sizes, self.maps_out.sizes)]
        stages = max(footprint.stages for footprint in found)
        kernels = list(zip(groups, found, strict=False))  # maps are the axes that change first
        buffers = self.x_buffers * self.x_bytes + self.landings * self.out_bytes + PEAKS_BYTES
        return Footprint(
            resident=sum(n * each.resident for n, each in kernels) + (FLOAT32 * self.shape.fout if self.sums else 0),
            host=sum(n * each.host for n, each in kernels) + buffers,
            input_until=-1,
            output_from=stages,
            stages=stages,
            scratch=(*self._buffers(stages - 1), *_together(found)),
            allowance=max(footprint.allowance for footprint in found),
        )

    def _buffers(self, last: int) -> Sequence[Scratch]:
        """Alive in all stages."""
        x, out = self.x_bytes, self.out_bytes
        found = {"x": self.x_buffers * x, "out": self.slots * out, "peaks": PEAKS_BYTES}
        if self.sums:
            found["part"] = out
            if self.totals:
                found["totals"] = self.totals * out * FLOAT32 // self.shape.itemsize
        return [Scratch(f"host_ram.{name}", nbytes, 0, last) for name, nbytes in found.items()]


def _together(footprints: Sequence[Footprint]) -> Iterator[Scratch]:
    """Scratch that all of them can do with, one after the other."""
    found: dict[str, Scratch] = {}
    for scratch in (scratch for footprint in footprints for scratch in footprint.scratch):
        known = found.get(scratch.name, scratch)
        found[scratch.name] = Scratch(
            scratch.name,
            max(known.nbytes, scratch.nbytes),
            min(known.first, scratch.first),
            max(known.last, scratch.last),
        )
    yield from found.values()
