"""The division of a layer that takes the least time, found exactly, and what the ZNNi paper's heuristics take.

Candidates   Sizes of the parts of each axis, and both orders. Of a long axis they are the smallest for every number of
             parts, of maps multiples of what tensor cores take too: others differ in what is left for the last part.
Bounds       First what the link takes; then what is computed, in groups of maps of all images and planes at once, which
             is no more than in parts of those; then in their own parts. Candidates are taken by their bounds, the least
             first, and given the next one, until one is followed to its end whose time no bound is below.

So few are followed, and the result is that of following all, provided that parts of the images and planes never take
less than all of them together, as the work of primitives has it (fixed costs, borders, padding).

Source  ZNNi VII-A for the heuristics; bounds are first principles (A*).
Tested  tests/kernels/test_division.py, against all candidates followed; benchmarks/host_ram_divisions.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from math import inf, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels.gpu.host_ram.division import STAGED, Divided, Division, Inner, Order, Parts
from znnpy.kernels.gpu.host_ram.timeline import Speeds, compute_seconds, seconds
from znnpy.kernels.primitive import Footprint
from znnpy.shapes import FLOAT32, ConvShape

FEW = 16  # along an axis: every size is a candidate
TOGETHER = 8  # maps that primitives take at a time, or pad to
_Grid = npt.NDArray[np.int64]  # by input maps, then by output maps


def sizes(length: int, step: int = 0) -> list[int]:
    """Of the parts of an axis: all up to FEW; of longer ones the smallest for each number of parts, those of `step`."""
    if length <= FEW:
        return list(range(1, length + 1))
    alike = {-(-length // parts) for parts in range(1, length + 1)}
    return sorted(alike | (set(range(step, length, step)) if step else set()))


@dataclass(frozen=True, slots=True)
class Found:
    """A division, its predicted seconds, and what the layer needs with it."""

    division: Division
    seconds: float
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched: chunks of images and planes, and numbers of maps."""

    chunks: Sequence[tuple[int, int]]
    maps_in: Sequence[int]
    maps_out: Sequence[int]
    orders: Sequence[Order] = ("outputs", "inputs")

    @classmethod
    def whole(cls, shape: ConvShape) -> Space:
        """All of it. A softmax sees all maps of a voxel at once."""
        planes = shape.out[0]
        images = [(count, planes) for count in sizes(shape.batch)]
        soft = shape.activation == "softmax"
        return cls(
            [*images, *((1, count) for count in sizes(planes) if count < planes)],
            [shape.fin] if soft else sizes(shape.fin, TOGETHER),
            [shape.fout] if soft else sizes(shape.fout, TOGETHER),
        )

    def divisions(self) -> Iterator[Division]:
        for images, planes in self.chunks:
            for maps_in in self.maps_in:
                for maps_out in self.maps_out:
                    for order in self.orders:
                        yield Division(images, planes, maps_in, maps_out, order)


def divide(
    shape: ConvShape,
    vram_bytes: int,
    speeds: Speeds,
    inner: Inner,
    *,
    space: Space | None = None,
    below: float = inf,
    within: float = 0.0,
) -> Found | None:
    """The division in `space` (None: of all) that takes the least time within `vram_bytes` of device memory.

    within  a part of the time: what none can be faster than by more is good enough; 0: the best there is. Many
            divisions are nearly as fast, and most of the search is spent on them.

    None where none takes less than `below` seconds, or not by so much.
    """
    remembered: Inner = cache(inner)
    space = space or Space.whole(shape)
    ahead = _Ahead(shape, vram_bytes, speeds, remembered)
    queue = [(bound, count, division, 0) for bound, count, division in _bounded(ahead, space, below)]
    heapify(queue)
    best: Found | None = None
    while queue:
        bound, count, division, level = heappop(queue)
        least = (1 - within) * (below if best is None else best.seconds)
        if bound >= least:
            break
        if level == 2:
            best = follow(shape, division, vram_bytes, speeds, remembered, below=least) or best
            continue
        better = ahead.bound(division) if level else ahead.groups(division)
        if better is not None and better < least:
            heappush(queue, (max(bound, better), count, division, level + 1))
    return best


def follow(
    shape: ConvShape, division: Division, vram_bytes: int, speeds: Speeds, inner: Inner, *, below: float = inf
) -> Found | None:
    """One division to its end: None where it needs more memory, takes `below` seconds or longer, or does not apply."""
    divided = Divided(shape, division)
    footprint = divided.footprint(inner)
    if footprint is None or vram(shape, footprint) > vram_bytes:
        return None
    spent = seconds(divided, speeds, inner)
    return Found(division, spent, footprint) if spent < below else None


def vram(shape: ConvShape, footprint: Footprint) -> int:
    """Bytes of device memory that a layer takes in all."""
    return footprint.resident + footprint.working(shape)


def by_heuristics(shape: ConvShape, vram_bytes: int, speeds: Speeds, inner: Inner) -> Found | None:
    """The paper's second heuristic: images in groups, all maps at a time; where none fits, one image and some maps.

    It knows neither planes nor sums that stay, so it may find nothing where `divide` does.
    """
    soft = shape.activation == "softmax"
    planes = shape.out[0]
    batches = Space([(count, planes) for count in sizes(shape.batch)], [shape.fin], [shape.fout], ["outputs"])
    found = divide(shape, vram_bytes, speeds, inner, space=batches)
    if found is not None or soft:
        return found
    one = Space([(1, planes)], sizes(shape.fin, TOGETHER), sizes(shape.fout, TOGETHER), ["outputs"])
    return divide(shape, vram_bytes, speeds, inner, space=one)


def takes_direct(shape: ConvShape) -> bool:
    """The paper's first heuristic: direct convolution for kernels of 5^3 and smaller, else the FFT."""
    return max(shape.k) <= 5


class _Ahead:
    """Bounds for divisions of one layer."""

    def __init__(self, shape: ConvShape, vram_bytes: int, speeds: Speeds, inner: Inner) -> None:
        self.shape, self.vram_bytes, self.speeds, self._inner = shape, vram_bytes, speeds, inner
        self._known: dict[tuple[int, int], float] = {}

    def _floor(self, maps_in: int, maps_out: int) -> float:
        """Seconds of arithmetic, at least; 0 where the primitive does not apply: smaller parts it may compute."""
        known = self._known.get((maps_in, maps_out))
        if known is None:
            division = Division(self.shape.batch, self.shape.out[0], maps_in, maps_out)
            known = compute_seconds(Divided(self.shape, division), self._inner) or 0.0
            self._known[maps_in, maps_out] = known
        return known

    def groups(self, division: Division) -> float:
        """Seconds, at least, by the arithmetic of groups of maps of all images and planes."""
        divided, speeds = Divided(self.shape, division), self.speeds
        computing = self._floor(division.maps_in, division.maps_out)
        return divided.largest.in_bytes / speeds.upload + computing + divided.end_bytes / speeds.download

    def bound(self, division: Division) -> float | None:
        """Seconds, at least, by the arithmetic of all parts; None where one does not apply, or the largest not fit."""
        divided, speeds = Divided(self.shape, division), self.speeds
        computing = compute_seconds(divided, self._inner) if self._fits(divided) else None
        if computing is None:
            return None
        d = division
        first = self._inner(divided.sublayer(d.images, d.planes, divided.maps_in.last, d.maps_out))
        assert first is not None, "it applies to all parts"
        chunk = divided.sublayer(d.images, d.planes, self.shape.fin, 1).in_bytes
        return max(
            divided.largest.in_bytes / speeds.upload + computing + divided.end_bytes / speeds.download,
            chunk / speeds.upload + first.seconds + self.shape.out_bytes / speeds.download,
        )

    def _fits(self, divided: Divided) -> bool:
        """The largest sub-layer, its kernels and all buffers do."""
        largest = self._inner(divided.largest)
        if largest is None:
            return False
        return vram(self.shape, divided.around([largest.footprint])) <= self.vram_bytes


def _bounded(ahead: _Ahead, space: Space, below: float) -> Iterator[tuple[float, int, Division]]:
    """Bound, number of sub-layers and division, of all whose buffers alone fit and that may take less than `below`."""
    shape = ahead.shape
    maps_in = np.array(space.maps_in, np.int64)[:, np.newaxis]
    maps_out = np.array(space.maps_out, np.int64)[np.newaxis]
    groups = _count(shape.fin, maps_in) * _count(shape.fout, maps_out)
    for size in space.chunks:
        chunk = _Chunk(shape, *size)
        for order in space.orders:
            bound = chunk.bound(maps_in, maps_out, order, ahead.speeds)
            keeps = (bound < below) & (chunk.least_bytes(maps_in, maps_out, order) <= ahead.vram_bytes)
            for f, g in np.argwhere(keeps).tolist():
                division = Division(*size, space.maps_in[f], space.maps_out[g], order)
                yield float(bound[f, g]), chunk.count * int(groups[f, g]), division


def _count(length: int, size: _Grid) -> _Grid:
    return -(-length // size)


class _Chunk:
    """Bounds of all divisions with chunks of some images and planes."""

    def __init__(self, shape: ConvShape, images: int, planes: int) -> None:
        self.shape, self.images, self.planes = shape, images, planes
        parts = Parts(shape.batch, images), Parts(shape.out[0], planes)
        self.count = prod(part.count for part in parts)
        self._divided = Divided(shape, Division(images, planes, 1, 1))
        out = shape.itemsize * prod(shape.out[1:])
        self._map_in = self._divided.sublayer(images, planes, 1, 1).in_bytes  # of the first chunk
        self._map_out = images * planes * out
        self._last_map_out = prod(part.last for part in parts) * out

    def bound(self, maps_in: _Grid, maps_out: _Grid, order: Order, speeds: Speeds) -> Any:
        """Seconds, at least, of the link: uploads or downloads without a pause, and what cannot go beside them.

        No output is complete before all input maps of the first chunk are there. Where none of them comes again, no
        output of the last chunk is complete before all else was uploaded.
        """
        shape = self.shape
        upload = self._divided.map_bytes * self._uploaded(maps_in, maps_out, order) / speeds.upload
        download = shape.out_bytes / speeds.download
        end = self._last_map_out * (shape.fout - (_count(shape.fout, maps_out) - 1) * maps_out) / speeds.download
        complete = self._map_in * shape.fin / speeds.upload
        again = (order == "outputs") & (_count(shape.fin, maps_in) > STAGED)
        left = np.where(again, end, self._last_map_out * shape.fout / speeds.download)
        return np.maximum(upload + left, complete + download)

    def _uploaded(self, maps_in: _Grid, maps_out: _Grid, order: Order) -> _Grid:
        """Input maps that go up for each chunk: all for each group of output maps, but for two groups that stayed."""
        fin, groups, turns = self.shape.fin, _count(self.shape.fin, maps_in), _count(self.shape.fout, maps_out) - 1
        if order == "inputs":
            return np.full(np.broadcast_shapes(maps_in.shape, maps_out.shape), fin)
        last = fin - (groups - 1) * maps_in
        above, below = (turns + 1) // 2, turns // 2  # where passes end
        again = above * (fin - maps_in - last) + below * (fin - STAGED * maps_in)
        return np.where(groups <= STAGED, fin, fin + again)

    def least_bytes(self, maps_in: _Grid, maps_out: _Grid, order: Order) -> _Grid:
        """Of buffers for input, outputs and sums, without what is left free between them."""
        groups_in, groups_out = _count(self.shape.fin, maps_in), _count(self.shape.fout, maps_out)
        slots = groups_out if order == "inputs" else np.minimum(STAGED, self.count * groups_out)
        wide = FLOAT32 // self.shape.itemsize
        totals = np.where(wide > 1, wide * (groups_out if order == "inputs" else 1), 0)
        parts = np.where(groups_in > 1, 1 + totals, 0)
        x: _Grid = np.minimum(STAGED, self.count * groups_in) * self._map_in * maps_in
        return x + (slots + parts) * self._map_out * maps_out
