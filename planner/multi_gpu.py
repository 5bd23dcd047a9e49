"""Plans for several equal GPUs of one machine: one process, the same plan on each, columns from one queue.

Method  The output is cut into as many equal parts as there are GPUs, along one axis or several. The best plan for a
        part covers the whole output as well: each of its columns is as fast, and each GPU has as many. The best plan
        for the whole is tried too, because it may have enough columns.
Bound   The speed is at most `devices` times that of one GPU. The plan subtracts the new borders, the GPUs that are idle
        in the last round of columns, and the time in which one thread writes the last patches of all GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from operator import lt

from znnpy.errors import NoPlanError
from znnpy.messages import option
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.plan import Plan
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.search import plan_on_device
from znnpy.shapes import Vec3, ceil_divide


def plan_on_devices(request: PlanRequest, costs: CostModel) -> RunPlan:
    """Return the fastest plan for the equal devices of a target.

    NoPlanError says what one device lacks for the whole output within its part of the memory of the process.
    """
    devices, limits, baseline = request.target.devices, request.limits, request.baseline
    if devices == 1:
        return plan_on_device(request, costs)
    each = replace(limits, ram_bytes=baseline + (limits.ram_bytes - baseline) // devices)
    one = replace(request.without_alternatives(), limits=each)
    options = costs.options(one)
    try:
        alone = plan_on_device(one, costs, options)
    except NoPlanError as error:
        more = NoPlanError(
            f"{error}; each of {devices} GPUs has {each.ram_bytes:,} bytes of RAM here, {baseline:,} of them the "
            f"process itself: lower {option('gpus')}, or allow {devices} times as much beyond those"
        )
        more.needed_bytes = error.needed_bytes
        raise more from None
    network, output, masks = request.network, request.output, request.masks
    plans = [
        plan.covering(output, network, masks=masks) for plan in (alone.main, *_plans_of_parts(one, costs, options))
    ]
    found = [
        RunPlan.of(network, request.target.machine, replace(plan, limits=limits)).on_devices(devices) for plan in plans
    ]
    fitting = [plan for plan in found if not any(plan.memory.excess(limits))]  # not every plan in flight fits
    return replace(min(fitting, key=lambda plan: plan.seconds), single_device_seconds=alone.seconds)


def _plans_of_parts(request: PlanRequest, costs: CostModel, options: OptionTable) -> Iterator[Plan]:
    """Yield the best plan of a part for every way to cut; columns are no longer than a part is along their axis."""
    devices, output = request.target.devices, request.output
    for counts in product(range(1, devices + 1), range(1, devices + 1), range(1, devices + 1)):
        if prod(counts) != devices or any(map(lt, output, counts)):
            continue
        part = ceil_divide(output, counts)
        if (plan := plan_of_part(request, costs, options, part)) is not None:
            yield plan.in_columns_of(min(plan.column_planes, part[plan.axis]))


def plan_of_part(request: PlanRequest, costs: CostModel, options: OptionTable, output: Vec3) -> Plan | None:
    """Return the best plan of one device for a part of the output; None where the part is too thin for any.

    options  what `costs.options` gave for the request
    """
    with suppress(NoPlanError):
        return plan_on_device(replace(request, output=output), costs, options).main
    return None
