"""The plan of a job as one function: network, volume and limits in, the fastest plan and what there is to say out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from znnpy.admissible import admissible
from znnpy.costs.model import Rates, assumed_rates
from znnpy.costs.store import CostStore
from znnpy.errors import NoPlanError, ShapeError
from znnpy.graph_columns import Area
from znnpy.job import written_dtype
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits, limits_of, this_machine
from znnpy.measure.calibrate import Calibration
from znnpy.measure.rigor import RigorMeasurement, rigor_of
from znnpy.measure.storage_plans import suited_plan
from znnpy.measure.transfers import transfers_of, worth_measuring
from znnpy.messages import option
from znnpy.network import Network
from znnpy.network_files import read_asked
from znnpy.option_declarations import function_of
from znnpy.option_values import COVERS
from znnpy.options import PlanOptions
from znnpy.patches import Box
from znnpy.planner.alternatives import kind_of
from znnpy.planner.modes import make_plan
from znnpy.planner.request import CostModel, PlanRequest, Rigor
from znnpy.planner.run_plan import RunPlan
from znnpy.report.memory_sweep import DevicePlans, Point, points
from znnpy.report.plan_text import predicted
from znnpy.report.rejected import considered
from znnpy.run.asked import AskedDevices, devices_asked
from znnpy.run.choice import Work, request_for
from znnpy.run.masked_plan import fitted_to_mask
from znnpy.run.target import OpenTarget, Targets, elsewhere, for_elsewhere
from znnpy.run_log import log_phase
from znnpy.self_check import check_plan
from znnpy.shapes import FLOAT32, Vec3
from znnpy.volume.base import MissingVoxels, Volume
from znnpy.volume.chunk_layers import layer_bytes
from znnpy.volume.mask import WantedOutputs
from znnpy.volume.registry import open_volume
from znnpy.volume.roi import parse_roi
from znnpy.volume.sliceable import open_given
from znnpy.volume.source import Source, area_of
from znnpy.volume.source import predicted as predicted_of

CURVES_SECONDS = 12.0  # for all curves together: more points would take longer than one waits for a picture
DEFAULT_SHAPE: Vec3 = (1024, 1024, 1024)  # what `plan` assumes when it is told no volume


@function_of(PlanOptions)
def plan(asked: PlanOptions) -> RunPlan:
    """Return the fastest plan for a network, a volume and memory limits; it needs no weights.

    OPTIONS

    NoPlanError names the smallest need when nothing fits, DeviceError says why there is no GPU for device "gpu", and
    ValueError names a value that an argument cannot have.
    """
    return plan_as_asked(asked)


def plan_as_asked(asked: PlanOptions) -> RunPlan:
    """Return the plan that `plan` returns for these options."""
    devices = devices_asked(asked)  # conflicting options are refused before the network is read
    if asked.machine is not None and asked.mode not in ("auto", "cpu", "gpu"):
        raise ValueError(f"{option('machine')} names the costs of one device: leave out {option('mode', asked.mode)}")
    rigor, store = rigor_of(asked.rigor, asked.time_limit), _cost_store(asked)
    asked = replace(asked, threads=store.threads(asked.threads))
    planning = _Planning(asked, _work(asked), rigor, store, RigorMeasurement(asked.tell_progress))
    devices = replace(devices, device=store.meant(devices.device))
    if asked.machine is not None:
        target = elsewhere(store, devices)
        planning = replace(planning, asked=replace(asked, mode=target.device))
        made = for_elsewhere(planning.plan(target), store)
        planning.tell(made, [target])
        return made
    return _here(planning, devices)


def _cost_store(asked: PlanOptions) -> CostStore:
    """Return the costs to plan with; ValueError for conflicting options."""
    if asked.costs is not None and asked.machine is not None:
        raise ValueError("a file of a machine holds its costs: give costs or machine")
    if asked.machine is not None and (asked.rigor != "estimate" or asked.paranoid):
        raise ValueError("layers run on the machine that is here: leave out rigor and paranoid, or machine")
    return CostStore(asked.costs, machine=asked.machine, calibrate=asked.calibrate)


def _here(planning: _Planning, devices: AskedDevices) -> RunPlan:
    """Return the plan for a device of this machine; it tells of the CPU's best plan where "auto" takes a GPU."""
    asked, network = planning.asked, planning.work.network
    with Targets(devices, planning.store) as opened:
        for target in opened:
            with opened.attempt():
                made = planning.plan(target)
                break
        targets = [target]
        if made.device == "gpu" and devices.device == "auto" and asked.vram is None:
            targets.append(OpenTarget(machine=this_machine(), costs=planning.store))
            with suppress(NoPlanError):
                estimated = planning.estimated(targets[1])
                made = replace(made, alternatives=(*made.alternatives, kind_of(network, made, estimated)))
        made = planning.suited(made, target)
        log_phase("planned", predicted(made))
        if asked.paranoid:
            check_plan(made, network, target, asked.tell_progress)
        planning.tell(made, targets)
        return made


def _work(asked: PlanOptions) -> Work:
    """Return what is to be computed of a volume, or of a shape; ValueError where both are given."""
    shape, roi, border = asked.shape, asked.roi, asked.border
    if shape is not None and len(shape) != 3:
        raise ShapeError(f"a shape has three sizes (z, y, x), not {shape}")
    if asked.volume is not None and shape is not None:
        raise ValueError("a volume and a shape both give a size: give one of them")
    if asked.mask is not None and asked.volume is None:
        raise ValueError(f"a mask lies on a volume: give {option('volume')} too, or leave out {option('mask')}")
    network = read_asked(asked.network, asked).network
    itemsize_out = np.dtype(written_dtype(network, asked.output_dtype)).itemsize
    weights = FLOAT32 * network.parameters  # a run holds them
    if asked.volume is not None:
        with _opened(asked) as opened:
            source = _source(asked, opened, network)
            kept = layer_bytes(opened, limits_of(this_machine(), asked.ram).ram_bytes)
            itemsize_in, unpacking = opened.dtype.itemsize, opened.extra_bytes + kept
            wanted = None
            if asked.mask is not None:
                with open_given(asked.mask, None, MissingVoxels()) as mask:
                    wanted = WantedOutputs.of(mask, source)
            return Work(
                network,
                source.output,
                itemsize_in,
                itemsize_out,
                area=source.area,
                unpacking_bytes=unpacking,
                held_bytes=weights,
                wanted=wanted,
            )
    if network.meaning == "windows":
        volume = shape or DEFAULT_SHAPE
        area = Area(volume, parse_roi(roi, volume) if roi else Box((0, 0, 0), volume))
        return Work(network, area.region.size, 1, itemsize_out, area=area, held_bytes=weights)
    if network.meaning == "whole":
        area = _area(network, shape or DEFAULT_SHAPE, roi)
        return Work(network, area.region.size, 1, itemsize_out, area=area, held_bytes=weights)
    size = parse_roi(roi, shape or DEFAULT_SHAPE).size if roi else shape or DEFAULT_SHAPE
    output = size if border == "reflect" else network.dense_size(size)
    return Work(network, output, 1, itemsize_out, held_bytes=weights)


def _opened(asked: PlanOptions) -> Volume:
    """Open the volume that the options name."""
    assert asked.volume is not None
    absent = MissingVoxels(asked.fill_missing)
    return open_volume(asked.volume, asked.dataset, absent, scale=asked.scale, time=asked.time)


def _source(asked: PlanOptions, volume: Volume, network: Network) -> Source:
    """Return what a run with these options reads."""
    region = parse_roi(asked.roi, volume.size, volume.space, volume) if asked.roi else None
    return Source(volume, roi=region, border=asked.border, network=network, allow_nan=False)


def _area(network: Network, volume: Vec3, roi: str | None) -> Area:
    """Return what is predicted of a volume by a graph that is computed whole."""
    region = parse_roi(roi, volume) if roi else Box((0, 0, 0), volume)
    return area_of(volume, predicted_of(admissible(network, volume), volume, region))


@dataclass(frozen=True, slots=True)
class _Planning:
    """A request for plans with the costs that are known and the measurements made for it."""

    asked: PlanOptions
    work: Work
    rigor: Rigor
    store: CostStore
    measurement: RigorMeasurement

    def request(self, target: OpenTarget) -> PlanRequest:
        """Return the request for a target, whose limits may be beyond what is free."""
        limits = target.limits(self.asked.ram, self.asked.threads, self.asked.vram, beyond=True)
        return replace(request_for(self.asked, self.work, target, limits), rigor=self.rigor)

    def plan(self, target: OpenTarget) -> RunPlan:
        """Return the fastest plan on a target, with the best of every other kind there and what was measured for it."""
        request = replace(self.request(target), kinds=True, baselines=self.asked.tell_why is not None)
        if self.rigor.level == "estimate":
            made = Calibration().best_plan(target, request)
            if self.work.wanted is None:
                return made
            known = target.known_rates(self.work.network, request.limits, self.asked.mode)
            return fitted_to_mask(made, request, CostModel(known), self.work.wanted)
        known = target.known_rates(self.work.network, request.limits, self.asked.mode)
        known = self.measurement.rates(target, request, known)
        made = fitted_to_mask(make_plan(request, CostModel(known)), request, CostModel(known), self.work.wanted)
        return replace(made, rigor=self.measurement.done)

    def suited(self, made: RunPlan, target: OpenTarget) -> RunPlan:
        """Return a plan with wider columns where reading the volume takes longer than computing, and tell of both."""
        asked, network = self.asked, self.work.network
        if asked.volume is None or not asked.calibrate:
            return made
        with _opened(asked) as volume:
            source = _source(asked, volume, network)
            if not worth_measuring(made, network, source):
                return made
            transfers = transfers_of(made, network, source, None)
            if asked.patch is None and asked.cover != "patches" and asked.mask is None:

                def planned(patch: Vec3) -> RunPlan:
                    return replace(self, asked=replace(asked, patch=patch)).plan(target)

                made, transfers = suited_plan(made, transfers, network, source, planned)
        asked.tell(f"{transfers}: a run reads, computes and writes at the same time")
        return made

    def estimated(self, target: OpenTarget) -> RunPlan:
        """Return the fastest plan on another target, for which nothing is measured."""
        request = self.request(target)
        costs = CostModel(target.known_rates(self.work.network, request.limits, self.asked.mode))
        return fitted_to_mask(make_plan(request, costs), request, costs, self.work.wanted)

    def rates(self, target: OpenTarget, limits: Limits) -> Rates:
        """Return the rates that a plan was made with; of another target the rates that are stored or assumed."""
        if (found := self.measurement.found.get(target.device)) is not None:
            return found
        known = target.rates(self.work.network, limits)
        return known or assumed_rates(target.machine, limits.threads, target.device)

    def tell(self, made: RunPlan, targets: Sequence[OpenTarget]) -> None:
        """Tell the caller what there is to say beside the plan.

        targets  where the layers run, and where else they might have run
        """
        asked, target, network = self.asked, targets[0], self.work.network
        sentences = (*target.sentences, *target.beyond(made.limits), *self.store.sentences, *self.measurement.sentences)
        for sentence in sentences:
            asked.tell(sentence)
        if asked.tell_why is not None and made.main.offloaded:
            asked.tell(f"why primitives are not taken is told of layers on one device, not of mode {made.mode}")
        elif asked.tell_why is not None:
            rates = self.rates(target, made.limits)
            asked.tell_why(considered(made.main, network, target.machine, rates, TABLE, asked.names))
        if asked.tell_point is not None:
            for point in self.curves(made, targets):
                asked.tell_point(point)

    def curves(self, made: RunPlan, targets: Sequence[OpenTarget]) -> Iterator[Point]:
        """Yield plans of columns and of patches on each target, up to the machine's memory or the limit beyond it."""
        covers = COVERS if self.asked.cover is None else (self.asked.cover,)
        curves = [(target, self.request(target), cover) for target in targets for cover in covers]
        until = time.monotonic() + CURVES_SECONDS
        for index, (target, asked_for, cover) in enumerate(curves):
            limits, gpu = asked_for.limits, target.machine.gpu
            costs = CostModel({target.device: self.rates(target, limits)})
            options = costs.options(asked_for)
            one = asked_for.on_one_device()
            request = replace(one, constraints=replace(one.constraints, cover=cover))
            if target.device == made.device:
                request = replace(request, baseline=made.memory.baseline)
            most = max(target.machine.ram_bytes, limits.ram_bytes)
            if gpu is not None:
                most = max(gpu.memory_bytes, limits.vram_bytes or 0)
            left = until - time.monotonic()
            plans = DevicePlans(request, costs, options)
            for point in points(plans, most, seconds=left / (len(curves) - index)):
                yield replace(point, done=(index + point.done) / len(curves))
