"""How long a layer takes in sub-layers: uploads, computing and downloads side by side, each in its order.

A sub-layer begins when its part of the input is there, the one before is done, and its buffer for outputs is empty. A
part is uploaded when the sub-layers that read what its buffer held are done; an output is downloaded when it is
complete. Host and device send to each other at the same time. Chunks that go on as the one before are not followed.

Source  ZNNi VII-A, where times add up: nothing there is uploaded while something is computed.
Tested  tests/kernels/test_division.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

from znnpy.kernels.gpu.host_ram.division import Divided, Inner
from znnpy.shapes import FLOAT32

SUMMED = 3 * FLOAT32  # bytes of device memory for each value that is added to a sum: two are read, one is written
ALIKE = 1e-9  # of what a chunk takes, by which clocks may differ


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second: to the device and from it, host copies to pinned memory and all, and in its memory."""

    upload: float
    download: float
    memory: float


class _Costs(NamedTuple):
    """Seconds of one chunk's parts; True: of the last group of maps."""

    upload: Mapping[bool, float]  # by group of input maps
    look: Mapping[bool, float]  # for the largest value, where the primitive asks for it
    compute: Mapping[tuple[bool, bool, bool], float]  # by both groups, and whether it is the first sum
    download: Mapping[bool, float]


def seconds(divided: Divided, speeds: Speeds, inner: Inner) -> float:
    """Of the whole layer, from the first upload to the last download. ValueError where `inner` does not apply."""
    clocks = _Clocks(divided)
    known: dict[tuple[int, int], _Costs] = {}
    for (images, planes), alike in groupby(divided.chunk_sizes()):
        costs = known.setdefault((images, planes), _costs(divided, images, planes, speeds, inner))
        clocks.chunks(costs, sum(1 for _ in alike))
    return clocks.download


def compute_seconds(divided: Divided, inner: Inner) -> float | None:
    """Of all sub-layers, without sums and peaks: no less is computed. None where `inner` does not apply to some."""
    total = 0.0
    for shape, count in divided.shapes():
        sublayer = inner(shape)
        if sublayer is None:
            return None
        total += count * sublayer.seconds
    return total


def _costs(divided: Divided, images: int, planes: int, speeds: Speeds, inner: Inner) -> _Costs:
    upload, look, compute, download = {}, {}, {}, {}
    for last_in, last_out in product((False, True), repeat=2):
        maps_in, maps_out = (
            axis.last if last else axis.size
            for axis, last in ((divided.maps_in, last_in), (divided.maps_out, last_out))
        )
        shape = divided.sublayer(images, planes, maps_in, maps_out)
        sublayer = inner(shape)
        if sublayer is None:
            raise ValueError(f"a sub-layer of {divided.division} is {shape}, which its primitive does not compute")
        footprint = sublayer.footprint
        upload[last_in] = shape.in_bytes / speeds.upload
        look[last_in] = shape.in_bytes / speeds.memory if footprint.reads_peak else 0.0
        peak = 0.0 if footprint.raises_peak else shape.out_bytes / speeds.memory
        added = SUMMED * shape.out_bytes // shape.itemsize / speeds.memory
        for first in (False, True):
            compute[last_in, last_out, first] = sublayer.seconds + peak + (0.0 if first else added)
        download[last_out] = shape.out_bytes / speeds.download
    return _Costs(upload, look, compute, download)


class _Clocks:
    """When the three are done with what they were given so far, and the buffers are free."""

    def __init__(self, divided: Divided) -> None:
        self._divided = divided
        self._visits = divided.visits
        self._ends = divided.maps_in.count - 1, divided.maps_out.count - 1
        self.upload = self.compute = self.download = 0.0
        self._there = [0.0] * 2  # of both buffers for the input, the older first
        self._free = [0.0] * 2
        self._slots = [0.0] * divided.slots  # the next one first

    def chunks(self, costs: _Costs, count: int) -> None:
        """`count` chunks that are alike."""
        before: list[float] = []
        while count:
            start = self.compute
            self._chunk(costs)
            count -= 1
            now = [clock - self.compute for clock in self._all]
            spent = self.compute - start
            if before and max(abs(a - b) for a, b in zip(before, now, strict=True)) <= ALIKE * spent:
                self._pass(count * spent)
                return
            before = now

    @property
    def _all(self) -> list[float]:
        return [self.upload, self.download, *self._there, *self._free, *self._slots]

    def _pass(self, spent: float) -> None:
        self.upload += spent
        self.compute += spent
        self.download += spent
        for clocks in (self._there, self._free, self._slots):
            clocks[:] = [clock + spent for clock in clocks]

    def _chunk(self, costs: _Costs) -> None:
        end_in, end_out = self._ends
        there, free, slots = self._there, self._free, self._slots
        inputs = self._divided.division.order == "inputs"
        for group_in, group_out, uploads, older, first, last in self._visits:
            last_in, last_out = group_in == end_in, group_out == end_out
            if older:
                there.reverse()
                free.reverse()
            if uploads:
                self.upload = there[1] = max(self.upload, free[1]) + costs.upload[last_in]
            slot = group_out if inputs else 0
            begin = max(self.compute, there[1], slots[slot] if first else 0.0)
            look = costs.look[last_in] if uploads else 0.0
            self.compute = free[1] = begin + look + costs.compute[last_in, last_out, first]
            if last:
                self.download = max(self.download, self.compute) + costs.download[last_out]
                if inputs:
                    slots[slot] = self.download
                else:
                    slots.append(self.download)
                    del slots[0]
