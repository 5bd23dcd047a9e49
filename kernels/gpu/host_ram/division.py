"""Divide a layer in host memory into sub-layers: parts, order, buffers and bytes.

A sub-layer takes some images, some planes along z if that is one image, some input maps, and computes some output maps.
Images and planes that are processed together are a chunk; chunks follow one after the other. Within a chunk

outputs  output maps are processed group after group, each with all groups of input maps, forwards and backwards in
         turn: of the two groups on the device at the end of a pass, the next one uploads neither.
inputs   input maps are processed group after group, each uploaded once, and the sums of all output maps stay on the
         device.

Sums over groups of input maps are added up on the device, so every output is downloaded once. The parts at the end of
an axis may be smaller: shapes of their own. Arithmetic only.

Source  ZNNi VII-A, sub-layers (S_i, f_i, f'_i); planes, orders and sums on the device are first principles.
Tested  tests/kernels/gpu/host_ram/test_division.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from znnpy.kernels.contract import Footprint, Scratch
from znnpy.shapes import FLOAT32, ConvShape

Order = Literal["outputs", "inputs"]

STAGED = 2  # buffers of each kind: one is filled or emptied while the other is in use
PEAKS_BYTES = 4 * FLOAT32  # for both parts of the input on the device, for partial sums, for the output
BUFFER_ALIGNMENT = 256  # bytes: alignment of each of several buffers


@dataclass(frozen=True, slots=True)
class Sublayer:
    """The time of a sub-layer on the device, and the memory of its primitive."""

    seconds: float
    footprint: Footprint


Inner = Callable[[ConvShape], Sublayer | None]  # for one primitive and variant; None: it does not apply


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """The sizes of a sub-layer."""

    images: int  # S_i
    planes: int  # planes of the output; fewer than all only if `images` is 1
    maps_in: int  # f_i
    maps_out: int  # f'_i
    order: Order = "outputs"


class Visit(NamedTuple):
    """One sub-layer of a chunk. It uses one of two input buffers, which is the newer one from then on."""

    group_in: int
    group_out: int
    uploads: bool  # whether it uploads, into the older buffer
    older: bool  # whether it uses the older buffer
    first: bool  # nothing was added to these outputs before
    last: bool  # the outputs are complete


@lru_cache(maxsize=256)
def visits(groups_in: int, groups_out: int, order: Order) -> tuple[Visit, ...]:
    """Return the sub-layers of one chunk in order."""
    held: list[int] = []  # groups of input maps on the device, the older first
    found = []
    for group_in, group_out, added in _pairs(groups_in, groups_out, order):
        uploads = group_in not in held
        older = uploads or (len(held) == STAGED and held[0] == group_in)
        held = [*(held[-1:] if uploads else [g for g in held if g != group_in]), group_in]
        found.append(Visit(group_in, group_out, uploads, older, added == 0, added == groups_in - 1))
    return tuple(found)


def _pairs(groups_in: int, groups_out: int, order: Order) -> Iterator[tuple[int, int, int]]:
    """Yield groups of input and of output maps, and the number of groups added to these outputs before."""
    if order == "inputs":
        for added, group_out in product(range(groups_in), range(groups_out)):
            yield added, group_out, added
        return
    for group_out, added in product(range(groups_out), range(groups_in)):
        yield (groups_in - 1 - added if group_out % 2 else added), group_out, added


@dataclass(frozen=True, slots=True)
class Parts:
    """An axis divided into parts of equal length and a remainder."""

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
        """Return start and end of a part."""
        return number * self.size, min((number + 1) * self.size, self.length)


def rounded_up(nbytes: int) -> int:
    """Return the bytes of a buffer, rounded up to the start of the next one."""
    return -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


@dataclass(frozen=True)
class Divided:
    """A layer and its division, with all derived sizes."""

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
        """Return whether outputs are sums over groups of input maps."""
        return self.maps_in.count > 1

    @property
    def chunks(self) -> int:
        return self.images.count * self.planes.count

    @property
    def visits(self) -> tuple[Visit, ...]:
        """The sub-layers of every chunk."""
        return visits(self.maps_in.count, self.maps_out.count, self.division.order)

    @property
    def count(self) -> int:
        """The number of sub-layers."""
        return self.chunks * self.maps_in.count * self.maps_out.count

    @property
    def x_buffers(self) -> int:
        return STAGED if self.chunks * self.maps_in.count > 1 else 1

    @property
    def slots(self) -> int:
        """The number of output buffers: one for each group of a chunk if their sums stay, even for one group."""
        if self.division.order == "inputs":
            return self.maps_out.count
        return min(STAGED, self.chunks * self.maps_out.count)

    @property
    def totals(self) -> int:
        """The number of float32 buffers for sums if outputs are float16; otherwise outputs are summed in place."""
        if not self.sums or self.shape.itemsize == FLOAT32:
            return 0
        return self.maps_out.count if self.division.order == "inputs" else 1

    @property
    def x_bytes(self) -> int:
        """The bytes from one input buffer to the next."""
        return rounded_up(self.largest.in_bytes)

    @property
    def out_bytes(self) -> int:
        """The bytes from one output buffer to the next."""
        return rounded_up(self.largest.out_bytes)

    @property
    def download_buffers(self) -> int:
        """The number of host buffers that outputs are downloaded to."""
        return min(STAGED, self.chunks * self.maps_out.count)

    def sublayer(self, images: int, planes: int, maps_in: int, maps_out: int) -> ConvShape:
        """Return the shape of a sub-layer, without activation if its outputs are partial sums."""
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
        """Yield each shape of a sub-layer and how often it occurs."""
        axes = (self.images.sizes, self.planes.sizes, self.maps_in.sizes, self.maps_out.sizes)
        for parts in product(*axes):
            sizes, counts = zip(*parts, strict=True)
            yield self.sublayer(*sizes), prod(counts)

    @property
    def end_bytes(self) -> int:
        """The bytes of the last output that is downloaded."""
        return self.sublayer(self.images.last, self.planes.last, 1, self.maps_out.last).out_bytes

    @property
    def uploaded_bytes(self) -> int:
        """The bytes uploaded for all sub-layers, with shared planes of chunks and repeated groups of maps each time."""
        maps, groups = 0, self.maps_in
        for visit in self.visits:
            if visit.uploads:
                lo, hi = groups.of(visit.group_in)
                maps += hi - lo
        return maps * self.map_bytes

    @property
    def map_bytes(self) -> int:
        """The uploaded bytes of one input map, for all chunks together."""
        shape = self.shape
        planes = shape.out[0] + self.planes.count * (shape.k[0] - 1)
        return shape.batch * planes * prod(shape.n[1:]) * shape.itemsize

    def footprint(self, inner: Inner) -> Footprint | None:
        """Return the layer's footprint; None if `inner` does not apply to some sub-layer.

        Input and output are not tensors of the device: no stage holds them. Kernels of all groups of maps stay there.
        """
        found = []
        for shape, _ in self.shapes():
            sublayer = inner(shape)
            if sublayer is None:
                return None
            found.append(sublayer.footprint)
        return self.around(found)

    def around(self, found: Sequence[Footprint]) -> Footprint:
        """Combine the footprints of the sub-layers' shapes in order; of only the first ones, this is a lower bound.

        The memory of kernels does not depend on images and planes, so those of the first shapes count.
        """
        groups = [m * n for (_, m), (_, n) in product(self.maps_in.sizes, self.maps_out.sizes)]
        stages = max(footprint.stages for footprint in found)
        kernels = list(zip(groups, found, strict=False))  # maps are the axes that vary first
        buffers = self.x_buffers * self.x_bytes + self.download_buffers * self.out_bytes + PEAKS_BYTES
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
        """Return the buffers, which are live in all stages."""
        x, out = self.x_bytes, self.out_bytes
        found = {"x": self.x_buffers * x, "out": self.slots * out, "peaks": PEAKS_BYTES}
        if self.sums:
            found["part"] = out
            if self.totals:
                found["totals"] = self.totals * out * FLOAT32 // self.shape.itemsize
        return [Scratch(f"host_ram.{name}", nbytes, 0, last) for name, nbytes in found.items()]


def _together(footprints: Sequence[Footprint]) -> Iterator[Scratch]:
    """Yield scratch buffers that suffice for all of them, one after the other."""
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
