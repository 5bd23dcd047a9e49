"""The plan that a run takes: the one that it was given, or the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from traceback import clear_frames

from znnpy.errors import NoPlanError, PlanFileError, VramError
from znnpy.graph_columns import Area, TurnedGraph
from znnpy.machine import Limits, give_back_memory, parse_bytes, peak_bytes, process_bytes
from znnpy.measure.calibrate import Calibration
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.planner.memory import MARGIN_BYTES, MIB, baseline_bytes, context_bytes, gathering_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.request import Constraints, CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.run.masked_plan import fitted_to_mask, with_mask
from znnpy.run.target import OpenTarget
from znnpy.shapes import Precision, Vec3, cpu_precision, text
from znnpy.shared_options import PlanningOptions, RunOptions
from znnpy.units import human_bytes
from znnpy.volume.mask import WantedOutputs


def given_plan(asked: RunOptions) -> RunPlan | None:
    """Return the plan that was given, read from its file if need be."""
    return asked.plan if isinstance(asked.plan, RunPlan) or asked.plan is None else RunPlan.load(Path(asked.plan))


@dataclass(frozen=True, slots=True)
class Work:
    """The work to be planned.

    output           voxels (z, y, x) that are predicted
    itemsize_in      bytes per voxel of the volume as stored; itemsize_out: bytes per value of the output
    area             part of a volume, for a graph that is computed whole
    masks            voxels that are not finite are allowed, so each patch comes with a mask of them
    unpacking_bytes  what the process takes to unpack the volume's chunks
    held_bytes       what else it will hold besides the plan, such as weights to be read or an output in memory
    gathered_bytes   of the output, if its chunks are gathered in memory until they are whole
    wanted           where outputs are wanted; None: everywhere
    in_order         patches are to be done in their order, which several devices do not keep
    """

    network: Network
    output: Vec3
    itemsize_in: int
    itemsize_out: int
    area: Area | None = None
    masks: bool = False
    unpacking_bytes: int = 0
    held_bytes: int = 0
    gathered_bytes: int = 0
    wanted: WantedOutputs | None = None
    in_order: bool = False

    def baseline(self, target: OpenTarget, ram_bytes: int) -> int:
        """Return the bytes of the process without the plan, within a limit of them all."""
        held = self.unpacking_bytes + self.held_bytes + gathering_bytes(ram_bytes, self.gathered_bytes)
        mask = 0 if self.wanted is None else self.wanted.held_bytes
        return baseline_bytes() + target.later_bytes + held + mask


def request_for(asked: PlanningOptions, work: Work, target: OpenTarget, limits: Limits) -> PlanRequest:
    """Return the request that options mean on a target."""
    mode = target.device if work.in_order and asked.mode == "auto" else asked.mode
    return PlanRequest(
        network=work.network,
        output=work.output,
        limits=limits,
        target=target.planned(mode),
        itemsize_in=work.itemsize_in,
        itemsize_out=work.itemsize_out,
        constraints=Constraints(asked.patch, asked.names, asked.cover, asked.depth_first),
        baseline=work.baseline(target, limits.ram_bytes),
        masks=work.masks,
        area=work.area,
    )


def choose(asked: RunOptions, work: Work, target: OpenTarget) -> RunPlan:
    """Return the plan that was given, once it is known to run here; else the fastest one."""
    given = given_plan(asked)
    if given is not None:
        return with_mask(_known_to_run(given, asked, work, target), work.network, work.wanted)
    request = request_for(asked, work, target, target.limits(asked.ram, asked.threads, asked.vram))
    try:
        made = _counted_plan(target, request)
        if work.wanted is None:
            return made
        costs = CostModel(target.known_rates(work.network, request.limits, request.target.mode))
        return fitted_to_mask(made, request, costs, work.wanted)
    except NoPlanError as error:
        if not work.unpacking_bytes:
            raise
        raise NoPlanError(
            f"{error}; the process takes {human_bytes(work.unpacking_bytes)} to unpack the volume's large chunks, and "
            "would take nothing for chunks of about 1 MiB"
        ) from None


def _counted_plan(target: OpenTarget, request: PlanRequest) -> RunPlan:
    """Return the fastest plan, which counts what its search takes, and leaves behind in the process."""
    before, earlier = process_bytes(), peak_bytes()
    made = Calibration().best_plan(target, request)
    if made.device == "gpu":  # what CUDA is allowed in the process is far more than a search takes
        return made
    TurnedGraph.of.cache_clear()  # the search kept regions of many sizes, which the run must not hold
    give_back_memory()
    grown = -(-max(0, process_bytes() - before - MARGIN_BYTES) // MIB) * MIB  # beyond what every plan allows for
    counted, limit = _with_baseline(made, made.memory.baseline + grown), request.limits.ram_bytes
    if counted.memory.peak > limit:
        counted = Calibration().best_plan(target, replace(request, baseline=request.baseline + grown))
    most = peak_bytes()
    if most > earlier and counted.memory.peak < most <= limit:  # planning took more than the run will
        counted = _with_baseline(counted, counted.memory.baseline + most - counted.memory.peak)
    return counted


def _with_baseline(made: RunPlan, baseline: int) -> RunPlan:
    """Return a plan of one worker for a process that takes so many bytes without it."""
    (worker,) = made.workers
    plan = replace(worker.plan, memory=replace(worker.plan.memory, baseline=baseline))
    return replace(made, workers=(replace(worker, plan=plan),))


def smaller_plan(asked: RunOptions, work: Work, target: OpenTarget, plan: RunPlan, refused: VramError) -> RunPlan:
    """Return the fastest plan within what the GPU has now that it refused what `plan` needs.

    VramError if the plan was given by the caller, and if nothing fits.
    """
    if asked.plan is not None:
        raise refused
    ram = plan.limits.ram_bytes if asked.ram is None else asked.ram
    asked = replace(asked, ram=ram, vram=target.less_than(plan), threads=plan.limits.threads)
    try:
        return choose(asked, work, replace(target, precision=plan.precision))
    except NoPlanError as error:
        raise VramError(f"{refused}; and {error}") from None


def forgetful(error: VramError) -> VramError:
    """Return an error that refers to nothing that the calls it came through held: the memory is wanted."""
    cause: BaseException | None = error
    while cause is not None:
        clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return error


def _known_to_run(given: RunPlan, asked: RunOptions, work: Work, target: OpenTarget) -> RunPlan:
    """Return a plan, charged with what this process, volume and output take; PlanFileError if that is too much."""
    words = (
        ("threads", asked.threads is not None),
        ("patch", asked.patch is not None),
        ("only", bool(asked.only)),
        ("cover", asked.cover is not None),
        ("depth_first", not asked.depth_first),
        ("device", asked.device not in ("auto", given.device)),
        ("mode", asked.mode not in ("auto", given.mode)),
        ("precision", asked.precision is not None and meant_precision(asked.precision, given) != given.precision),
        ("costs", asked.costs is not None),
    )
    if named := [option(word, False if word == "depth_first" else None) for word, is_given in words if is_given]:
        raise PlanFileError(
            "a plan fixes device, precision, threads, primitives, and patches or columns already; "
            f"leave out {' and '.join(named)}, or leave out {option('plan')}"
        )
    if target.devices > 1 and given.main.offloaded:
        raise PlanFileError(
            f"the plan is of {option('mode', given.mode)}, which runs on one GPU: leave out {option('gpus')}"
        )
    network = work.network
    planned, area = given.main.area, work.area
    if (planned is None) != (area is None):
        made = "sliding" if planned is None else "whole"
        raise PlanFileError(
            f"the plan is for a network of the meaning {made}, and that of {excerpt(network.name, 60)} is "
            f"{network.meaning} here; make one with `znnpy plan NETWORK --meaning {network.meaning}`, or, if the "
            f"network supports it, give {option('meaning', made)}"
        )
    if planned is not None and area is not None and planned != area:
        raise PlanFileError(
            f"the plan is of {_described(planned)}, and this run of {_described(area)}; plans of such "
            "networks are for one volume and region: make one for these with `znnpy plan NETWORK --volume VOLUME`"
        )
    check_runs(given, network, target.machine)  # before its layers and columns are counted for this output
    here = given.with_main(_charged(given.main, work, target)).on_devices(target.devices)
    if here.sharing is not None:
        here = here.with_plans(lambda plan: _stored_as(work, plan).with_transfers(network, masks=work.masks))
    ram_bytes = given.limits.ram_bytes if asked.ram is None else parse_bytes(asked.ram)
    vram_bytes = given.limits.vram_bytes if asked.vram is None else parse_bytes(asked.vram)
    check_runs(here, network, target.machine, ram_bytes=ram_bytes, vram_bytes=vram_bytes)
    target.check_free(here)
    return here


def meant_precision(precision: Precision, plan: RunPlan) -> Precision:
    """Return the precision that is meant where a plan runs."""
    return precision if plan.device == "gpu" else cpu_precision(precision)


def _described(area: Area) -> str:
    """Describe what a plan of a graph is of."""
    return f"{text(area.region.size)} voxels from {area.region.lo} on in a volume of {text(area.volume)}"


def _charged(plan: Plan, work: Work, target: OpenTarget) -> Plan:
    """Return a worker's plan for other work, with the memory that it takes in this process and on this target."""
    held, promised = work.baseline(target, plan.limits.ram_bytes), plan.memory
    here = _stored_as(work, plan).covering(work.output, work.network, masks=work.masks)
    memory = replace(
        promised,
        baseline=held if held > promised.baseline + MARGIN_BYTES else promised.baseline,
        reading=max(here.memory.reading, promised.reading),
        writing=max(here.memory.writing, promised.writing),
        staging=max(here.memory.staging, promised.staging),
        context=max(context_bytes(target.context_bytes) if plan.device == "gpu" else 0, promised.context),
    )
    return replace(here, memory=memory)


def _stored_as(work: Work, plan: Plan) -> Plan:
    """Return a plan for the volume and the output as they are stored."""
    return replace(plan, itemsize_in=work.itemsize_in, itemsize_out=work.itemsize_out)
