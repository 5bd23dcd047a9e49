"""Simulate the time of a layer in sub-layers: uploads, computing and downloads run in parallel, each in its order.

A sub-layer starts when its part of the input has arrived, the previous one is done, and its output buffer is empty. A
part is uploaded when the sub-layers that read the buffer's previous content are done; an output is downloaded when it
is complete. Transfers in both directions overlap.

Repetitions (sub-layers of a pass, passes of a chunk, chunks, images) are not simulated to their end. Once a repetition
advances all active clocks by the same time, the following ones are extrapolated, until one differs: the first, the
last, or a part at the end of an axis. So the cost depends on the kinds of parts, not on their number. Buffers of
resident sums are simulated individually.

Source  ZNNi VII-A, where times add up: there, uploads do not overlap computing.
Tested  tests/kernels/gpu/host_ram/test_division.py, against a simulation of every sub-layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from znnpy.kernels.gpu.host_ram.division import STAGED, Divided, Inner
from znnpy.shapes import FLOAT32

SUMMED = 3 * FLOAT32  # bytes of device memory for each value added to a sum: two reads, one write
ALIKE = 1e-9  # relative difference up to which two repetitions count as equal


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second: to the device and from it, including host copies to pinned memory, and in device memory."""

    upload: float
    download: float
    memory: float


class _Costs(NamedTuple):
    """The seconds for the parts of one chunk; the key True stands for the last group of maps."""

    upload: Mapping[bool, float]  # uploads, by group of input maps
    look: Mapping[bool, float]  # finding the largest value, if the primitive requests it
    compute: Mapping[tuple[bool, bool, bool], float]  # computing, by both groups and whether it is the first sum
    download: Mapping[bool, float]


def seconds(divided: Divided, speeds: Speeds, inner: Inner) -> float:
    """Return the time from the first upload to the last download. ValueError if `inner` does not apply."""
    clocks = _Clocks(divided)
    for images, many in divided.images.sizes:
        chunks = [(_costs(divided, images, planes, speeds, inner), count) for planes, count in divided.planes.sizes]
        clocks.images(chunks, many)
    return clocks.download


def _costs(divided: Divided, images: int, planes: int, speeds: Speeds, inner: Inner) -> _Costs:
    upload, look, compute, download = {}, {}, {}, {}
    groups_in, groups_out = divided.maps_in, divided.maps_out
    for last_in, last_out in product((False, True)[-groups_in.count :], (False, True)[-groups_out.count :]):
        maps_in = groups_in.last if last_in else groups_in.size
        maps_out = groups_out.last if last_out else groups_out.size
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
    """The times at which the three engines finish their work so far, and at which buffers become free."""

    def __init__(self, divided: Divided) -> None:
        self._many_in, self._many_out = divided.maps_in.count, divided.maps_out.count
        self._inputs = divided.division.order == "inputs"
        self.upload = self.compute = self.download = 0.0
        self._there = [0.0] * STAGED  # arrival in both input buffers, the older first
        self._free = [0.0] * STAGED
        self._slots = [0.0] * divided.slots  # the next one first

    def images(self, chunks: list[tuple[_Costs, int]], count: int) -> None:
        """Simulate `count` equal groups of images, in chunks with their numbers of repetitions."""

        def image() -> None:
            for costs, alike in chunks:
                self._repeat(lambda costs=costs: self._chunk(costs), alike)  # type: ignore[misc]

        self._repeat(image, count)

    def _repeat(self, step: Callable[[], None], count: int) -> None:
        """Repeat `step` `count` times, extrapolating once it advances all clocks that it moves by the same time.

        The first repetition is never extrapolated: only a second one shows that a clock which did not move has no
        influence. Anything that waits for such a clock would have waited in the repetition before as well, and would
        not have moved.
        """
        before = self._all
        for done in range(1, count + 1):
            step()
            now = self._all
            moved = [b - a for a, b in zip(before, now, strict=True)]
            spent, before = moved[0], now
            if done > 1 and all(by == 0 or abs(by - spent) <= ALIKE * spent for by in moved):
                again = (count - done) * spent
                self._all = [clock + again if by else clock for clock, by in zip(now, moved, strict=True)]
                return

    @property
    def _all(self) -> list[float]:
        return [self.compute, self.upload, self.download, *self._there, *self._free, *self._slots]

    @_all.setter
    def _all(self, clocks: list[float]) -> None:
        self.compute, self.upload, self.download, *buffers = clocks
        self._there, self._free, self._slots = buffers[:STAGED], buffers[STAGED : 2 * STAGED], buffers[2 * STAGED :]

    def _chunk(self, costs: _Costs) -> None:
        if self._inputs:
            ends = self._many_in - 1
            self._group(costs, 0)
            self._repeat(lambda: self._group(costs, 1), ends - 1)
            if ends:
                self._group(costs, ends)
            return
        ends = self._many_out - 1
        self._pass(costs, 0)
        self._repeat(lambda: self._passes(costs), (ends - 1) // 2)
        if ends > 1 and ends % 2 == 0:
            self._pass(costs, 1)
        if ends:
            self._pass(costs, ends)

    def _group(self, costs: _Costs, position: int) -> None:
        """Simulate a group of input maps with all groups of output maps."""
        ends = self._many_out - 1
        first, last = position == 0, position == self._many_in - 1

        def visit(group_out: int) -> None:
            begins = group_out == 0
            self._visit(costs, (last, group_out == ends), (begins, begins), (first, last), group_out)

        visit(0)
        if first or last:
            for group_out in range(1, ends):
                visit(group_out)
        else:
            self._repeat(lambda: visit(1), ends - 1)
        if ends:
            visit(ends)

    def _passes(self, costs: _Costs) -> None:
        """Simulate one backward and one forward pass."""
        self._pass(costs, 1)
        self._pass(costs, 2)

    def _pass(self, costs: _Costs, group_out: int) -> None:
        """Simulate a group of output maps with all groups of input maps; two are present after a chunk's first pass."""
        ends = self._many_in - 1
        last_out, ending = group_out == self._many_out - 1, 0 if group_out % 2 else ends
        held = STAGED if group_out else 0

        def visit(position: int) -> None:
            uploads = position >= held
            groups, buffer = (position == ending, last_out), (uploads, uploads or position == 1)
            self._visit(costs, groups, buffer, (position == 0, position == ends), 0)

        for position in range(min(ends, STAGED)):
            visit(position)
        self._repeat(lambda: visit(STAGED), ends - STAGED)
        visit(ends)

    def _visit(
        self, costs: _Costs, last: tuple[bool, bool], buffer: tuple[bool, bool], sums: tuple[bool, bool], slot: int
    ) -> None:
        """Simulate one sub-layer (see `Visit`): last groups of maps; uploads, older; first, last."""
        (last_in, last_out), (uploads, older), (first, complete) = last, buffer, sums
        there, free, slots = self._there, self._free, self._slots
        if older:
            there.reverse()
            free.reverse()
        if uploads:
            self.upload = there[1] = max(self.upload, free[1]) + costs.upload[last_in]
        begin = max(self.compute, there[1], slots[slot] if first else 0.0)
        look = costs.look[last_in] if uploads else 0.0
        self.compute = free[1] = begin + look + costs.compute[last_in, last_out, first]
        if complete:
            self.download = max(self.download, self.compute) + costs.download[last_out]
            if self._inputs:
                slots[slot] = self.download
            else:
                slots.append(self.download)
                del slots[0]
