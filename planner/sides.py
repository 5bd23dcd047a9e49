"""A step in two memories: tensors of hosted choices in an arena of the host, those of the others in the GPU's.

Hosted choices run one at a time, each on all images there are. Their activations lie in the host's arena, but for the
last, which is handed over: it lies in memory of its own, page-locked, from which the GPU takes as many images at a time
as its first choice does. A hosted choice that a GPU computes (`IN_HOST_RAM`) has its scratch there; it and the choices
behind do not run at the same time, so they share the GPU's arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from znnpy.kernels.contract import Footprint
from znnpy.planner.layout import Count, Tensor, carried_bytes, chain, loops
from znnpy.shapes import LayerShape

Steps = Sequence[tuple[LayerShape, Footprint]]


@dataclass(frozen=True, slots=True)
class Side:
    """What lies in one memory; tensors are not yet placed."""

    tensors: tuple[Tensor, ...] = ()
    carries: int = 0
    residents: int = 0
    allowance: int = 0  # of the libraries, in that memory
    pinned: int = 0  # kept in page-locked memory of the process


@dataclass(frozen=True, slots=True)
class Sides:
    """Both memories of a step; without hosted choices there is nothing but `device`."""

    host: Side
    device: Side
    handover: Count  # bytes of what is handed over in a step


def lives_with_host(footprint: Footprint) -> bool:
    """Input and output of the primitive are in the memory of the host, though a GPU computes."""
    return footprint.input_until < 0


def sides(steps: Steps, hosted: int, new: int) -> Sides:
    """steps   shape and footprint of every choice
    hosted  of them run with tensors in the memory of the host
    new     planes that a step reads
    """
    if not hosted:
        return Sides(Side(), device_side(steps, 0, new), 0)
    front, back = steps[:hosted], steps[hosted:]
    handover = front[-1][0].out_bytes
    return Sides(host_side(front, new), device_side(back, hosted, front[-1][0].out[0], front), handover)


def host_side(front: Steps, new: int) -> Side:
    """Of hosted choices."""
    held = [(shape, Footprint() if lives_with_host(footprint) else footprint) for shape, footprint in front]
    own = [footprint for _, footprint in front if not lives_with_host(footprint)]
    return Side(
        chain(held, new)[:-1],  # the last is handed over
        carried_bytes([shape for shape, _ in front], new),
        sum(footprint.resident for footprint in own),
        max((footprint.allowance for footprint in own), default=0),
    )


def device_side(back: Steps, hosted: int, new: int, front: Steps = ()) -> Side:
    """Of the choices behind those that are hosted, and what these have of the GPU.

    new  planes of what is handed over, or read where nothing is hosted
    """
    scratches, tick, fed = [], 0, [(i, fp) for i, (_, fp) in enumerate(front) if lives_with_host(fp)]
    for index, footprint in fed:
        for scratch in footprint.scratch:
            first, last = tick + scratch.first, tick + scratch.last
            scratches.append(Tensor(f"step{index}.{scratch.name}", scratch.nbytes, first, last))
        tick += footprint.stages
    later = [replace(t, first=t.first + tick, last=t.last + tick) for t in chain(back, new, first=hosted)]
    every = [footprint for _, footprint in fed] + [footprint for _, footprint in back]
    times = loops([shape for shape, _ in (*front, *back)])[len(front)]
    return Side(
        (*scratches, *later),
        times * carried_bytes([shape for shape, _ in back], new),
        sum(footprint.resident for footprint in every),
        max(footprint.allowance for footprint in every),
        sum(footprint.host for footprint in every),
    )
