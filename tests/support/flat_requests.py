"""Requests and plans from flat keywords, as tests of the planner write them."""

from __future__ import annotations

from collections.abc import Sequence

from znnpy.costs.model import Rates
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import IN_HOST_RAM, TABLE, DividedPrimitive
from znnpy.machine import Limits, Machine
from znnpy.network import Network
from znnpy.option_values import OFFLOAD_MODES, AskedMode, DeviceKind
from znnpy.planner.memory import CONTEXT_BYTES, baseline_bytes
from znnpy.planner.modes import make_plan as best_of_mode
from znnpy.planner.offload import plan_offloaded
from znnpy.planner.request import Constraints, CostModel, PlanRequest, Target
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import Precision, Vec3


def request_of(
    network: Network,
    output: Vec3,
    machine: Machine,
    limits: Limits,
    *,
    itemsize_in: int = 1,
    itemsize_out: int = 4,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    baseline: int | None = None,
    device: DeviceKind = "cpu",
    devices: int = 1,
    precision: Precision = "fp32",
    context: int = CONTEXT_BYTES,
    masks: bool = False,
    columns: bool | None = None,
    depth_first: bool = True,
    kinds: bool = False,
    baselines: bool = False,
    mode: AskedMode | None = None,
) -> PlanRequest:
    """Return a request for one device, or for a mode."""
    names = (only,) if isinstance(only, str) else tuple(only)
    cover = None if columns is None else "columns" if columns else "patches"
    target = Target(machine, device, devices, precision, context, mode or device)
    return PlanRequest(
        network,
        output,
        limits,
        target,
        itemsize_in,
        itemsize_out,
        Constraints(patch, names, cover, depth_first),  # type: ignore[arg-type]
        baseline_bytes() if baseline is None else baseline,
        masks,
        kinds=kinds,
        baselines=baselines,
    )


def costs_of(
    device: DeviceKind = "cpu",
    *,
    table: tuple[Primitive, ...] = TABLE,
    rates: Rates | None = None,
    host_rates: Rates | None = None,
    in_host_ram: tuple[DividedPrimitive, ...] = IN_HOST_RAM,
) -> CostModel:
    """Return costs with the rates of a device, and of the CPU at its side."""
    known: dict[DeviceKind, Rates] = {}
    if host_rates is not None:
        known["cpu"] = host_rates
    if rates is not None:
        known[device] = rates
    return CostModel(known, table, in_host_ram)


def make_plan(
    network: Network,
    output: Vec3,
    machine: Machine,
    limits: Limits,
    *,
    itemsize_in: int = 1,
    itemsize_out: int = 4,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    table: tuple[Primitive, ...] = TABLE,
    rates: Rates | None = None,
    baseline: int | None = None,
    device: DeviceKind = "cpu",
    precision: Precision = "fp32",
    context: int = CONTEXT_BYTES,
    masks: bool = False,
    columns: bool | None = None,
    depth_first: bool = True,
    kinds: bool = False,
    baselines: bool = False,
    mode: AskedMode | None = None,
    host_rates: Rates | None = None,
    than: RunPlan | None = None,
    in_host_ram: tuple[DividedPrimitive, ...] = IN_HOST_RAM,
) -> RunPlan:
    """Return the best plan of one device, or of a mode.

    than  with a mode of offloaded layers: the plan of the GPU alone, and a faster one is asked for
    """
    device = device if mode is None else "gpu"
    request = request_of(
        network,
        output,
        machine,
        limits,
        itemsize_in=itemsize_in,
        itemsize_out=itemsize_out,
        patch=patch,
        only=only,
        baseline=baseline,
        device=device,
        precision=precision,
        context=context,
        masks=masks,
        columns=columns,
        depth_first=depth_first,
        kinds=kinds,
        baselines=baselines,
        mode=mode,
    )
    costs = costs_of(device, table=table, rates=rates, host_rates=host_rates, in_host_ram=in_host_ram)
    if mode in OFFLOAD_MODES:
        return plan_offloaded(request, costs, than=than)
    return best_of_mode(request, costs)
