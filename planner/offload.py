"""Plans whose first layers have their tensors in host memory and whose other layers run on one GPU."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf

from znnpy.errors import NoPlanError
from znnpy.messages import option
from znnpy.option_values import OFFLOAD_MODES
from znnpy.planner.alternatives import kind_of
from znnpy.planner.offload_search import OffloadSearch
from znnpy.planner.request import CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.search import allowed_spaces, check_device, check_request, plan_on_device
from znnpy.planner.sublayers import Sublayers

SUBLAYER_SHARE = 0.75  # share of the GPU's memory besides CUDA's that an offloaded convolution may take


def plan_offloaded(request: PlanRequest, costs: CostModel, *, than: RunPlan | None = None) -> RunPlan:
    """Return the fastest plan of a CPU and one GPU in the request's mode, gpu-host or cpu-to-gpu.

    than  the plan of the GPU alone; then a faster plan is asked for

    The kinds of the plan are those of one device alone. NoPlanError where nothing fits or nothing is fast enough.
    """
    (mode,) = (mode for mode in OFFLOAD_MODES if mode == request.target.mode)
    check_request(request, (*costs.table, *costs.in_host_ram))
    wanted, limits = request.constraints, request.limits
    asked = {primitive.name for primitive in costs.in_host_ram} & set(wanted.only)
    if asked and mode == "cpu-to-gpu":
        raise NoPlanError(
            f"{' and '.join(asked)} runs in mode gpu-host alone; drop {option('only')} or choose "
            f"{option('mode', 'gpu-host')}"
        )
    if request.target.precision == "fp16":
        raise NoPlanError(
            f"mode {mode} hands float32 from the host to the GPU: choose {option('precision', 'tf32')} or "
            f"{option('precision', 'fp32')}"
        )
    if len(request.network.layers) < 2:
        raise NoPlanError(
            f"{request.network.name} has one layer, and mode {mode} needs one for each device; drop {option('mode')}"
        )
    free = replace(wanted, only=tuple(name for name in wanted.only if name not in asked))
    unasked = replace(request, constraints=free)
    on_cpu, on_gpu = unasked.on("cpu"), unasked.on("gpu")
    check_device(on_gpu)
    cpu, gpu = costs.options(on_cpu), costs.options(on_gpu)
    alone = [] if than is None else [than]
    if than is None and (request.kinds or wanted.patch is None):
        for of_device, options in ((on_cpu, cpu), (on_gpu, gpu)):
            with suppress(NoPlanError):
                alone.append(plan_on_device(of_device, costs, options))
    if mode == "cpu-to-gpu":
        host = limits.without_feed_threads(1)
        cpu = costs.slowed("cpu", limits.threads / host.threads).options(replace(on_cpu, limits=host))
    divided = [primitive for primitive in costs.in_host_ram if primitive.name in asked or not asked]
    sublayers = None
    if mode == "gpu-host" and divided:
        target = on_gpu.target
        lent = int(SUBLAYER_SHARE * ((limits.vram_bytes or 0) - target.cuda_bytes))
        sublayers = Sublayers(
            divided, target.machine, limits.threads, lent, cpu.rates, gpu.rates, target.precision, asked=bool(asked)
        )
    search = OffloadSearch(on_gpu, mode, cpu, gpu, sublayers, below=inf if than is None else than.seconds)
    found = search.run(allowed_spaces(on_gpu), wanted.patch, [other.main for other in alone])
    plan = RunPlan.of(request.network, request.target.machine, found)
    kinds = tuple(kind_of(request.network, plan, other) for other in alone) if request.kinds else ()
    return replace(plan, alternatives=kinds)
