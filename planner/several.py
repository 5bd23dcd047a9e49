"""Plans for several equal GPUs of one machine: one process, the same plan on each, columns from one queue.

Method  A volume that is one column for one GPU has to be cut. Cut into as many equal parts as there are GPUs, along one
        axis or several, the best plan for a part covers the whole as well: every column of it is as fast, and there are
        as many for each. The best plan for the whole is tried too: it may have columns enough. What is lost to the new
        borders is told by `Plan.alone`.
Bound   No cut saves work, so no more than `devices` times the speed of one; what the plan says is this, less the
        borders, less what the last round of columns leaves idle, less what it takes to write the last patches of all,
        which one thread does when nothing is computed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

from znnpy.errors import NoPlanError
from znnpy.machine import Limits
from znnpy.messages import option
from znnpy.network import Network
from znnpy.planner.memory import transfer_bytes
from znnpy.planner.plan import Plan
from znnpy.shapes import Vec3

Make = Callable[[Vec3, Limits], Plan]


def plan_for(
    devices: int, make: Make, network: Network, output: Vec3, limits: Limits, baseline: int, *, masks: bool
) -> Plan:
    """The fastest plan for `devices` equal GPUs.

    make      the best plan for one GPU: of an output (z, y, x), within limits
    limits    of the whole process, and of each GPU
    baseline  bytes of the process without the run
    masks     are counted, of the input voxels that are not finite

    NoPlanError as `make` raises it, for the whole output within one GPU's part of the process's memory.
    """
    each = replace(limits, ram_bytes=baseline + (limits.ram_bytes - baseline) // devices)
    try:
        alone = make(output, each)
    except NoPlanError as error:
        if devices == 1:
            raise
        more = NoPlanError(
            f"{error}; each of {devices} GPUs has {each.ram_bytes:,} bytes of RAM here, {baseline:,} of them the "
            f"process itself: lower {option('gpus')}, or allow {devices} times as much beyond those"
        )
        more.needed_bytes = error.needed_bytes
        raise more from None
    if devices == 1:
        return alone
    found = [alone, *_of_parts(devices, make, output, each)]
    whole = [replace(covering(plan, devices, network, output, masks=masks), limits=limits) for plan in found]
    fitting = [plan for plan in whole if not any(plan.memory.excess(limits))]  # not all of what moves may
    return replace(min(fitting, key=lambda plan: plan.seconds), single_device_seconds=alone.seconds)


def _of_parts(devices: int, make: Make, output: Vec3, each: Limits) -> Iterator[Plan]:
    """The best plan of a part, for every way to cut; columns are no longer than a part is along their axis."""
    for counts in product(range(1, devices + 1), repeat=3):
        if prod(counts) != devices or any(size < count for size, count in zip(output, counts, strict=True)):
            continue
        z, y, x = (-(-size // count) for size, count in zip(output, counts, strict=True))
        try:
            plan = make((z, y, x), each)
        except NoPlanError:  # other parts are thicker
            continue
        if plan.streams:
            step = plan.patch_out[plan.axis]
            plan = replace(plan, column_planes=min(plan.column_planes, -(-(z, y, x)[plan.axis] // step) * step))
        yield plan


def covering(plan: Plan, devices: int, network: Network, output: Vec3, *, masks: bool) -> Plan:
    """The same for the whole output, on so many GPUs: more patches may be on their way than of a slab."""
    cover = replace(plan, output=output).cover(network)
    itemsizes = plan.itemsize_in, plan.itemsize_out
    reading, writing, staging = transfer_bytes(network, cover, plan.patch_in, itemsizes, masks=masks, device="gpu")
    memory = replace(plan.memory, devices=devices, reading=reading, writing=writing, staging=staging)
    # What else there was is of one GPU, and of a part of the output.
    return replace(plan.for_output(output, network, memory), other=None, runners_up=(), alternatives=())
