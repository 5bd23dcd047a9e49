"""Find the fastest division of a layer exactly, or by the heuristics of the ZNNi paper.

Bounds of all candidates are computed at once (bounds.py). The candidate with the smallest bound is examined: first the
computing time of its groups of maps, which improves the bounds of all candidates with such groups; the next time it is
simulated completely. When no bound is below the time of a simulated candidate, that candidate is optimal.

Few candidates are simulated, yet the result equals that of simulating the whole space, provided that parts of the
images and planes never take less time than all of them together. The work of primitives implies that (fixed costs,
borders, padding). Most of the time is spent on querying the inner primitive about sub-layers: space.py explains the
choice of sizes.

Source  ZNNi VII-A for the heuristics; bounds are first principles (best-first branch and bound).
Tested  tests/kernels/gpu/host_ram/test_division.py, against a simulation of all candidates
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf

from znnpy.kernels.contract import Footprint
from znnpy.kernels.gpu.host_ram.bounds import Bounds
from znnpy.kernels.gpu.host_ram.division import Divided, Division, Inner
from znnpy.kernels.gpu.host_ram.space import FEW as FEW
from znnpy.kernels.gpu.host_ram.space import TOGETHER as TOGETHER
from znnpy.kernels.gpu.host_ram.space import Space as Space
from znnpy.kernels.gpu.host_ram.space import sizes as sizes
from znnpy.kernels.gpu.host_ram.timeline import Speeds, seconds
from znnpy.shapes import ConvShape


@dataclass(frozen=True, slots=True)
class Found:
    """A division, its predicted seconds, and the layer's footprint with it."""

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
    """Return the division in `space` (None: the whole space) with the least time within `vram_bytes` of device memory.

    within  relative tolerance: stop once no other can be faster by more; 0: find the optimum. Many divisions are nearly
            as fast, and most of the search is spent on them.

    None if none takes less than `below` seconds, or none can by more than `within`.
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
    """Simulate one division; None if it needs more memory, takes `below` seconds or longer, or does not apply."""
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
    """Return the total bytes of device memory of a layer."""
    return footprint.resident + footprint.working(shape)


def by_heuristics(shape: ConvShape, vram_bytes: int, speeds: Speeds, inner: Inner) -> Found | None:
    """Apply the paper's second heuristic: groups of images with all maps; if none fits, one image and some maps.

    It uses neither planes nor resident sums, so it may find nothing where `divide` does.
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
    """Apply the paper's first heuristic: direct convolution for kernels of 5^3 and smaller, else the FFT."""
    return max(shape.k) <= 5
