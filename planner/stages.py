"""The stages of a plan, and the memory that the layers of each need.

Most plans have one stage. A plan with two runs its first layers with tensors in the memory of the host and all others
on a GPU. Layers of the host stage run one at a time, each on all images. Their activations lie in the host's arena,
except the last one, which is handed over: it lies in page-locked memory of its own, from which the GPU takes as many
images at a time as its first layer does. A layer of the host stage that a GPU computes (`IN_HOST_RAM`) has its scratch
on the GPU. It and the layers of the GPU stage never run at the same time, so they share the GPU's arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from znnpy.kernels.contract import Footprint
from znnpy.layer_shapes import LayerShape
from znnpy.option_values import DeviceKind
from znnpy.planner.layout import Tensor, carried_bytes, chain, sub_batch_counts
from znnpy.planner.memory import StageMemory

Steps = Sequence[tuple[LayerShape, Footprint]]


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """The needs of one stage: its tensors, not yet placed, and the bytes besides its arena."""

    tensors: tuple[Tensor, ...]
    memory: StageMemory


def in_host_ram(footprint: Footprint) -> bool:
    """Return whether input and output of a primitive are in the memory of the host although a GPU computes."""
    return footprint.input_until < 0


def stage_needs(steps: Steps, offloaded: int, new: int, device: DeviceKind) -> tuple[StageNeeds, ...]:
    """Return what each stage needs.

    steps      shape and footprint of every choice
    offloaded  leading choices that are a stage of their own, in the memory of the host; 0: there is one stage
    new        planes that a step reads
    device     of the last stage
    """
    if not offloaded:
        return (last_stage(steps, 0, new, device),)
    front, back = steps[:offloaded], steps[offloaded:]
    return host_stage(front, new), last_stage(back, offloaded, front[-1][0].out[0], device, front)


def host_stage(front: Steps, new: int) -> StageNeeds:
    """Return what the choices of a host stage need in the memory of the host."""
    held = [(shape, Footprint() if in_host_ram(footprint) else footprint) for shape, footprint in front]
    own = [footprint for _, footprint in front if not in_host_ram(footprint)]
    memory = StageMemory(
        "cpu",
        carries=carried_bytes([shape for shape, _ in front], new),
        weights=sum(footprint.resident for footprint in own),
        allowance=max((footprint.allowance for footprint in own), default=0),
    )
    return StageNeeds(chain(held, new)[:-1], memory)  # the last tensor is handed over


def last_stage(back: Steps, first: int, new: int, device: DeviceKind, front: Steps = ()) -> StageNeeds:
    """Return what the choices of the last stage need, together with what choices of the host stage take of a GPU.

    first  number of the first of these choices
    new    planes that are read or handed over in a step
    """
    scratches, tick = [], 0
    lent = [(index, footprint) for index, (_, footprint) in enumerate(front) if in_host_ram(footprint)]
    for index, footprint in lent:
        for scratch in footprint.scratch:
            begin, end = tick + scratch.first, tick + scratch.last
            scratches.append(Tensor(f"step{index}.{scratch.name}", scratch.nbytes, begin, end))
        tick += footprint.stages
    later = [replace(t, first=t.first + tick, last=t.last + tick) for t in chain(back, new, first=first)]
    every = [footprint for _, footprint in lent] + [footprint for _, footprint in back]
    times = sub_batch_counts([shape for shape, _ in (*front, *back)])[len(front)]
    memory = StageMemory(
        device,
        carries=times * carried_bytes([shape for shape, _ in back], new),
        weights=sum(footprint.resident for footprint in every),
        allowance=max(footprint.allowance for footprint in every),
        pinned=sum(footprint.host for footprint in every),
    )
    return StageNeeds((*scratches, *later), memory)


def handover_buffers(*, overlap: bool) -> int:
    """Return the number of buffers for handed-over tensors: with overlap one is filled while the other is read."""
    return 2 if overlap else 1
