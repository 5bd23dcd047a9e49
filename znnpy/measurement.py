"""Measure the speed of this machine with one function: the rates of its units, and the layers of a network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from znnpy.costs.cost_file import Costs
from znnpy.costs.model import Rate, Rates
from znnpy.costs.store import read_stored, stored_path, write_costs
from znnpy.kernels.contract import Unit
from znnpy.kernels.cpu.native.library import why_not_bf16
from znnpy.kernels.table import TABLE
from znnpy.machine import Limits
from znnpy.measure.budget import ON_GPU, LayerTimer, Placement, TimeBudget
from znnpy.measure.layer_timer import timer_on
from znnpy.measure.survey import SURVEY_SHARE, Survey, rate_words, sample_tasks, units_of
from znnpy.messages import option
from znnpy.network import Network
from znnpy.network_files import read_network
from znnpy.options import MeasureOptions
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.request import PlanRequest
from znnpy.run.asked import AskedDevices
from znnpy.run.target import OpenTarget, Targets
from znnpy.run_log import log_phase
from znnpy.shapes import CPU_PRECISIONS, FLOAT32, GPU_PRECISIONS, Precision, Vec3
from znnpy.units import human_seconds

SHAPE: Vec3 = (1024, 1024, 1024)  # size of the volume for which the plans of a network are made


@dataclass(frozen=True)
class Measured:
    """The result of a measurement: the costs, what had been assumed, and the file that keeps them."""

    costs: Costs
    assumed: Rates
    runs: Mapping[Unit, int]  # runs of each unit in this measurement
    layers: int  # layers of the network that were measured now
    seconds: float
    path: Path
    notes: tuple[str, ...]  # sentences on what is not as requested

    def table(self) -> Table:
        """Return a table of units, with their assumed and measured rates and the number of runs."""
        table = Table("unit", "assumed", "measured")
        table.add_column("runs", justify="right")
        for unit in self.runs:
            speed = self.costs.units[unit]
            measured = rate_words(Rate(speed.flops, speed.nbytes))
            table.add_row(unit, rate_words(self.assumed.of(unit)), measured, str(speed.runs))
        return table

    def lines(self) -> list[str]:
        """Return what the table does not hold, as sentences."""
        units = [_counted(len(self.runs), "unit")] if self.runs else []
        layers = [f"{_counted(self.layers, 'layer')} of the network's plans"] if self.layers or not units else []
        by = "" if self.costs.device == "gpu" else f" with {_counted(self.costs.threads, 'thread')}"
        return [
            f"{self.costs.name}{by}: {' and '.join(units + layers)} measured in "
            f"{human_seconds(self.seconds)}; kept in {self.path}",
            *self._memory(),
            *self.notes,
        ]

    def _memory(self) -> list[str]:
        """Return a line on the rate of first writes to memory, if it was measured."""
        measured, assumed = self.costs.first_touch, self.assumed.first_touch
        if measured is None:
            return []
        return [f"memory is first written to at {measured / 2**30:,.3g} GiB/s (assumed: {assumed / 2**30:,.3g})"]

    def as_json(self) -> dict[str, Any]:
        """Return the result as data for `--json`."""
        return {
            "device": self.costs.device,
            "threads": self.costs.threads,
            "seconds": self.seconds,
            "path": str(self.path),
            "layers": self.layers,
            "first_touch": self.costs.first_touch,
            "units": {
                unit: {
                    "assumed": {"flops": self.assumed.of(unit).flops, "nbytes": self.assumed.of(unit).nbytes},
                    "measured": {"flops": speed.flops, "nbytes": speed.nbytes},
                    "runs": speed.runs,
                }
                for unit in self.runs
                for speed in (self.costs.units[unit],)
            },
            "notes": list(self.notes),
        }


def measure(asked: MeasureOptions) -> Measured:
    """Measure the rates of a device of this machine within `minutes`, and keep them for the plans that follow.

    A machine that was measured before is measured again only if no network is given; a calibration does not count. What
    an earlier measurement found is kept if it fits this machine and was not measured again. The file given as `out` is
    written before the layers of the network are measured, and replaced at the end.

    DeviceError if a GPU is requested and there is none to use; NoPlanError if nothing fits the memory or the time.
    """
    threads, precision, minutes, out = asked.threads, asked.precision, asked.minutes, asked.out
    begun = time.monotonic()
    if asked.device == "gpu" and threads is not None:
        raise ValueError(f"{option('threads')} are for the processor, and layers on a GPU do not use them: drop them")
    net = None if asked.network is None else read_network(asked.network, asked.meaning).network
    with Targets(AskedDevices(asked.device, precision=precision)) as targets:
        target = targets.first()
        limits = target.limits(asked.ram, threads, None)
        free = target.free_bytes_within(limits)
        survey = Survey(target.machine, target.device, limits, free)
        tasks = sample_tasks(target.machine, target.device, _precisions(target, precision), limits, free)
        old = read_stored(target.machine, target.device, limits.threads) if out is None else None
        path = out or stored_path(target.machine, target.device, limits.threads)
        log_phase("running", f"measurements on {target.machine.processor}, {minutes:g} minutes at most")
        with _clock(target, limits, 60 * minutes, asked.clock) as timing:
            timer = TimeBudget(60 * minutes, asked.tell)
            known = net is not None and old is not None and units_of(tasks) <= old.units.keys()
            first_touch = survey.touched(old, again=not known)
            if known and old is not None:
                rates, runs = old.rates(TABLE), dict[Unit, int]()
            else:
                rates, runs = survey.survey(tasks, timing, timer, 1.0 if net is None else SURVEY_SHARE)
            if first_touch is not None:
                rates = replace(rates, first_touch=first_touch, first_touch_measured=True)
            if not known:
                first = _joined(old, survey.costs(rates, runs, []))  # there may be no plan for the network
                write_costs(path, first, overwrite=asked.overwrite or out is None)
            layers = [] if net is None else survey.deepen(rates, _request(net, target, limits), timing, timer)
        costs = _joined(old, survey.costs(rates, runs, layers))
        write_costs(path, costs, overwrite=True)  # a file of this call, or one that may be replaced
        spent = time.monotonic() - begun
        log_phase("finished", f"{path} in {human_seconds(spent)}")
        notes = list(target.sentences)
        if target.device == "gpu" and threads is not None:
            notes.append(f"{option('threads')} are for the processor, and the GPU was measured")
        return Measured(costs, survey.assumed, runs, len(layers), spent, path, tuple(notes))


def _joined(old: Costs | None, new: Costs) -> Costs:
    return new if old is None else old.with_newer(new)


def _precisions(target: OpenTarget, asked: Precision | None) -> tuple[Precision, ...]:
    if target.device == "cpu":
        return CPU_PRECISIONS if asked is None and why_not_bf16(target.machine) is None else (target.precision,)
    return GPU_PRECISIONS if asked is None else (asked,)


def _clock(
    target: OpenTarget, limits: Limits, seconds: float, given: LayerTimer | None
) -> AbstractContextManager[LayerTimer]:
    where = Placement("cpu", limits.threads) if target.device == "cpu" else ON_GPU
    return nullcontext(given) if given is not None else timer_on(where, target.gpu, target.machine, seconds)


def _request(network: Network, target: OpenTarget, limits: Limits) -> PlanRequest:
    """Return the request for plans of a network for a large volume, as `znnpy plan` makes them."""
    baseline = baseline_bytes() + target.later_bytes + FLOAT32 * network.parameters
    planned = target.planned(target.device)
    return PlanRequest(network, network.dense_size(SHAPE), limits, planned, baseline=baseline)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
