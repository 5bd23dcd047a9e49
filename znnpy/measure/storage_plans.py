"""Choose a plan whose columns lie along the chunks of the volume, where reading takes longer than computing.

The search for a plan weighs computing alone. Where a network is small, or a volume is slow to read, narrow columns read
many chunks several times. Then plans with wider columns are made too, whose edges lie on those of chunks, and the one
is taken whose longer part, reading or computing, is the shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from znnpy.errors import NoPlanError
from znnpy.measure.transfers import Transfers, read_bytes
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import Vec3
from znnpy.volume.source import Source

WIDTHS = (1, 2, 4)  # columns across y and x that are tried
LEAST_PLANES = 16  # of a patch, where chunks are thinner


def suited_plan(
    plan: RunPlan, transfers: Transfers, network: Network, source: Source, planned: Callable[[Vec3], RunPlan]
) -> tuple[RunPlan, Transfers]:
    """Return the plan that is the fastest with its reading, and what it reads.

    planned  makes the fastest plan whose columns are as wide as a patch, and take its planes in each step, or that
             computes such patches; NoPlanError if none fits
    """
    best, found = max(plan.seconds, transfers.reading), (plan, transfers)
    if transfers.reading <= plan.seconds or plan.main.area is not None:
        return found
    for patch in wide_patches(network, source):
        try:
            other = planned(patch)
        except NoPlanError:
            continue
        here = replace(transfers, read_bytes=read_bytes(other, network, source))
        if max(other.seconds, here.reading) < best:
            best, found = max(other.seconds, here.reading), (other, here)
    return found


def wide_patches(network: Network, source: Source) -> Iterator[Vec3]:
    """Yield patches as wide as the output or a part of it, and a chunk thick, in whole chunks and periods."""
    seen = set()
    for wide in WIDTHS:
        z, y, x = (
            _multiple(max(chunk, LEAST_PLANES) if axis == 0 else -(-size // wide), chunk, period, size)
            for axis, (size, chunk, period) in enumerate(
                zip(source.output, source.volume.chunk_size, network.period, strict=True)
            )
        )
        if (z, y, x) not in seen:
            seen.add((z, y, x))
            yield z, y, x


def _multiple(wanted: int, chunk: int, period: int, size: int) -> int:
    """Return at least `wanted` voxels of whole chunks where these are periods too, at most the output in periods."""
    step = chunk if chunk % period == 0 else period
    return min(-(-wanted // step) * step, -(-size // period) * period)
