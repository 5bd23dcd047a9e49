"""A plan for a GPU with the processor beside it: both take cells of the output from one queue, each covers its own.

Method  The output is cut along the grid of the GPU's plan: cells are as many of its columns side by side, and as many
        of its steps behind each other, as give the processor some cells each while the GPU computes the rest. For a few
        such sizes the processor's best plan for one cell is made, in the memory that the GPU leaves of the process's;
        the size that ends soonest is taken. Where that gains much less than both are worth, for the GPU's best plan has
        few steps, plans for parts of the output are tried for the GPU too: smaller steps cost it borders.
Bound   The GPU's voxels per second and those that the processor reaches alone. What is lost to it are the borders of
        the processor's cells, where the volume is not much larger than a field of view, and the end, in which somebody
        waits for the last cell.
Source  ZNNi (SC16), section VII.C has the processor and the GPU share every patch; sharing the volume instead leaves
        neither idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod

from znnpy.errors import NoPlanError
from znnpy.machine import Limits
from znnpy.network import Network
from znnpy.planner.explain import human_seconds
from znnpy.planner.memory import MIB, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.several import Make, covering
from znnpy.shapes import Vec3

SHARES = (2, 4, 8, 16, 32)  # cells that the processor is to compute: more end together, fewer have less borders
ENOUGH = 0.8  # of what the processor is worth: for more the GPU's plan is not made anew


def plan_beside(alone: Plan, make: Make, processor: Make, network: Network, *, masks: bool) -> Plan:
    """The fastest plan for the GPUs of `alone` and the processor; `Plan.dealt` is 0 where that gains nothing.

    alone      the best plan of the GPUs for the output
    make       one GPU's best plan for an output (z, y, x), within limits
    processor  the processor's, within limits of which the process itself takes nothing
    masks      are counted, of the input voxels that are not finite

    NoPlanError where the processor computes no cell within the memory that is left.
    """
    whole = moving_whole(alone, network, masks=masks)
    limits = alone.limits
    left = Limits(max(1, limits.ram_bytes - whole.memory.peak), limits.threads)
    try:
        speed = processor(alone.output, left).voxels_per_second
    except NoPlanError as error:
        if error.needed_bytes is None:
            raise
        needed = whole.memory.peak + error.needed_bytes
        raise NoPlanError(
            f"the GPU's part takes {whole.memory.peak:,} of {limits.ram_bytes:,} bytes of RAM, and the processor needs "
            f"at least {error.needed_bytes:,}; allow at least --ram {-(-needed // MIB)}M, or choose --mode gpu"
        ) from None
    share = speed / (speed + alone.voxels_per_second)
    found = list(_of_cells(whole, alone.seconds, processor, left, share, network, masks=masks))
    if min(plan.seconds for plan in found) > (1 - ENOUGH * share) * alone.seconds:
        for part in _of_parts(alone, make, network, share, masks=masks):
            found += _of_cells(part, alone.seconds, processor, left, share, network, masks=masks)
    fitting = [plan for plan in found if not any(plan.memory.over(limits))]
    if not fitting:
        least = min(plan.memory.peak for plan in found)
        raise NoPlanError(
            f"the GPU's part and the processor's beside it need at least {least:,} bytes of RAM, "
            f"{least - limits.ram_bytes:,} more than the limit; allow at least --ram {-(-least // MIB)}M, or choose "
            "--mode gpu"
        )
    return min(fitting, key=lambda plan: plan.seconds)


def _of_cells(
    gpu: Plan, alone: float, processor: Make, left: Limits, share: float, network: Network, *, masks: bool
) -> Iterator[Plan]:
    """The GPU's plan with the processor beside it, which is to compute a share of the output, in cells of some sizes.

    alone  seconds of the GPU's best plan
    """
    for cell in dict.fromkeys(_cell(gpu, share * prod(gpu.output) / count) for count in SHARES):
        other = moving_whole(processor(cell, left), network, masks=masks)
        memory = replace(gpu.memory, beside=other.memory.peak)
        yield replace(gpu, memory=memory, beside=other, alone=alone, other=None, runners_up=(), kinds=())


def _of_parts(alone: Plan, make: Make, network: Network, share: float, *, masks: bool) -> Iterator[Plan]:
    """The best plans of the GPU for parts of the output, each for all of it."""
    for count in SHARES[1::2]:
        side = (share * prod(alone.output) / count) ** (1 / 3)
        z, y, x = (_even(size, side, step) for size, step in zip(alone.output, network.period, strict=True))
        try:
            part = make((z, y, x), alone.limits)
        except NoPlanError:  # other parts are thicker
            continue
        if part.walks:  # on, from cell to cell
            step, length = part.patch_out[part.axis], alone.output[part.axis]
            part = replace(part, column=ceil(length / step) * step)
        found = covering(part, alone.devices, network, alone.output, masks=masks)
        yield moving_whole(replace(found, limits=alone.limits), network, masks=masks)


def idle(both: Plan) -> str:
    """Why the processor computes nothing."""
    seconds = both.seconds_per_cell
    return (
        f"the GPU is done in {human_seconds(both.seconds)}, and of the parts that suit both the processor takes "
        f"{human_seconds(seconds['cpu'])} for one"
    )


def moving_whole(plan: Plan, network: Network, *, masks: bool) -> Plan:
    """The same with as many patches on their way as there may be, however the output is dealt."""
    seen = network.patch_in(plan.patch_out) if masks else None
    channels, maps, device = network.input_channels, network.output_channels, plan.device
    reading = reading_bytes(channels, plan.patch_in, plan.itemsize_in, seen=seen, device=device)
    writing = writing_bytes(maps, plan.patch_out, plan.itemsize_out, device=device)
    raw, out = channels * prod(plan.patch_in) * plan.itemsize_in, maps * prod(plan.patch_out) * plan.itemsize_out
    staging = staging_bytes(raw, out) if device == "gpu" else 0
    return replace(plan, memory=replace(plan.memory, reading=reading, writing=writing, staging=staging))


def _cell(gpu: Plan, voxels: float) -> Vec3:
    """About so many voxels, as nearly a cube as the grid of the GPU's steps allows; one step at least."""
    side = max(1.0, voxels) ** (1 / 3)
    size = list(gpu.patch_out)
    across = [axis for axis in range(3) if axis != gpu.axis or not gpu.walks]
    for axis in across:
        size[axis] = _multiple(gpu.patch_out[axis], side, gpu.output[axis])
    for axis in set(range(3)) - set(across):
        rest = voxels / prod(size[other] for other in across)
        size[axis] = _multiple(gpu.patch_out[axis], rest, gpu.output[axis])
    z, y, x = size
    return z, y, x


def _even(whole: int, length: float, step: int) -> int:
    """About a length, a multiple of a step but for the whole, so that the parts of the whole come out even."""
    count = max(1, round(whole / length))
    return min(whole, ceil(ceil(whole / count) / step) * step)


def _multiple(step: int, length: float, whole: int) -> int:
    """The multiple of a step that is next to a length, within the one that is no smaller than the whole."""
    return step * min(max(1, round(length / step)), ceil(whole / step))
