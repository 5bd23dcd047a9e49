"""The division of a layer that takes the least time, found exactly, and what the ZNNi paper's heuristics take.

Bounds of all candidates are known at once (bounds.py). The one of the least is looked at: first what its groups of maps
take to compute, which betters the bounds of all that have such groups; the next time it is followed to its end. When no
bound is below the time of one that was followed, that one is the best.

So few are followed, and the result is that of following all in the space, provided that parts of the images and planes
never take less than all of them together, as the work of primitives has it (fixed costs, borders, padding). Most of the
time goes into asking the inner primitive about sub-layers: space.py says why there are no more sizes than there are.

Source  ZNNi VII-A for the heuristics; bounds are first principles (branch and bound, the best first).
Tested  tests/kernels/gpu/test_host_ram_division.py, against all candidates followed; benchmarks/host_ram_divisions.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf

from znnpy.kernels.gpu.host_ram.bounds import Bounds
from znnpy.kernels.gpu.host_ram.division import Divided, Division, Inner
from znnpy.kernels.gpu.host_ram.space import FEW as FEW
from znnpy.kernels.gpu.host_ram.space import TOGETHER as TOGETHER
from znnpy.kernels.gpu.host_ram.space import Space as Space
from znnpy.kernels.gpu.host_ram.space import sizes as sizes
from znnpy.kernels.gpu.host_ram.timeline import Speeds, seconds
from znnpy.kernels.primitive import Footprint
from znnpy.shapes import ConvShape


@dataclass(frozen=True, slots=True)
class Found:
    """A division, its predicted seconds, and what the layer needs with it."""

    division: Division
    seconds: float
    footprint: Footprint


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

    None where none takes less than `below` seconds, or where none can by so much.
    """
    remembered: Inner = cache(inner)
    bounds = Bounds(shape, vram_bytes, speeds, space or Space.whole(shape), remembered)
    best: Found | None = None
    while True:
        bound, at = bounds.least()
        if bound >= (1 - within) * below:
            return best
        if bounds.compute(at):
            continue
        bounds.seconds[at] = inf
        found = follow(shape, bounds.division(at), vram_bytes, speeds, remembered, below=below)
        if found is not None:
            best, below = found, found.seconds


def follow(
    shape: ConvShape, division: Division, vram_bytes: int, speeds: Speeds, inner: Inner, *, below: float = inf
) -> Found | None:
    """One division to its end: None where it needs more memory, takes `below` seconds or longer, or does not apply."""
    divided = Divided(shape, division)
    least = divided.largest.in_bytes / speeds.upload + divided.end_bytes / speeds.download
    footprints: list[Footprint] = []
    for part, count in divided.shapes():  # the largest first
        sublayer = inner(part)
        if sublayer is None:
            return None
        least += count * sublayer.seconds
        footprints.append(sublayer.footprint)
        if least >= below or (len(footprints) == 1 and vram(shape, divided.around(footprints)) > vram_bytes):
            return None
    footprint = divided.around(footprints)
    if vram(shape, footprint) > vram_bytes:
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
