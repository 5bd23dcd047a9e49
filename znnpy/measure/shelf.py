"""Where costs of this machine are kept between runs, and which of them a plan takes.

One file for each device and number of threads, in the cache folder. What does not fit this machine, its libraries and
its primitives is not used at all, and a sentence says which field differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from znnpy.costs.cost_file import AGAIN, Costs
from znnpy.errors import PlanFileError
from znnpy.files import write_asked
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import TABLE
from znnpy.machine import Machine
from znnpy.measure.fftw_wisdom import cache_folder
from znnpy.messages import option
from znnpy.option_values import Device, DeviceKind


class Shelf:
    """Costs by device: those that `znnpy measure` stored of this machine, or those of one file."""

    def __init__(
        self,
        file: str | Path | None = None,
        table: Sequence[Primitive] = TABLE,
        *,
        machine: str | Path | None = None,
    ) -> None:
        """file, machine  one that is taken whatever is stored, and has to fit; `machine` of one that is not here.

        PlanFileError where it cannot be read.
        """
        named = file if machine is None else machine
        self.file, self.table = None if named is None else Path(named), table
        self.named = None if self.file is None else Costs.load(self.file)
        self.sentences: list[str] = []  # on stored costs that were not used
        self._word = "costs" if machine is None else "machine"

    def meant(self, device: Device) -> Device:
        """Return the device that is meant by "auto": that of the file, if there is one."""
        return self.named.device if self.named is not None and device == "auto" else device

    def threads(self, threads: int | None) -> int | None:
        """Return the threads that another machine was measured with, if the caller gave none."""
        there = self.named if self._word == "machine" else None
        return there.threads if threads is None and there and there.device == "cpu" else threads

    def of(self, machine: Machine, device: DeviceKind, threads: int) -> Costs | None:
        """Those of a device of `machine`; None where nothing that fits was stored.

        PlanFileError where a file was named and does not fit.
        """
        if self.named is not None:
            if reason := self._why_not(self.named, machine, device, threads):
                advice = self._advice(self.named, device, threads)
                raise PlanFileError(f"the costs in {self.file} do not fit: {reason}; {advice}")
            return self.named
        path = stored_path(machine, device, threads)
        if not os.path.exists(path):  # a Path's raises where the folder may not be entered
            return None
        try:
            costs = Costs.load(path)
            reason = self._why_not(costs, machine, device, threads)
            sentence = f"stored costs are not used: {reason}; {AGAIN}"
        except PlanFileError as error:
            costs, reason, sentence = None, str(error), f"stored costs are not used: {error}"
        if costs is not None and reason is None:
            return costs
        if sentence not in self.sentences:
            self.sentences.append(sentence)
        return None

    def _why_not(self, costs: Costs, machine: Machine, device: DeviceKind, threads: int) -> str | None:
        if costs.device != device:
            return f"they are of the {costs.device.upper()}, and the plan is for the {device.upper()}"
        return costs.why_not(machine, threads, self.table)

    def _advice(self, costs: Costs, device: DeviceKind, threads: int) -> str:
        """What to do about a file that does not fit."""
        others = device == "cpu" and costs.device == "cpu" and costs.threads != threads
        if self._word == "costs":
            measure = f"`znnpy measure --threads {threads}`" if others else "`znnpy measure`"
            leave = f"leave {option('costs')} out, or measure again with {measure}"
            return f"give {option('threads', costs.threads)}, {leave}" if others else leave
        if others:
            measure = f"`znnpy measure --threads {threads} --export FILE`"
            return f"leave {option('threads')} out, or measure there with {measure}"
        return "measure there with `znnpy measure --export FILE`, by a znnpy of the same version"


def stored(machine: Machine, device: DeviceKind, threads: int, table: Sequence[Primitive] = TABLE) -> Costs | None:
    """What is kept of this machine and fits it; None where there is nothing, or nothing to be used."""
    try:
        costs = Costs.load(stored_path(machine, device, threads))
    except PlanFileError:
        return None
    return costs if costs.device == device and costs.why_not(machine, threads, table) is None else None


def stored_path(machine: Machine, device: DeviceKind, threads: int) -> Path:
    """Machines of one home folder have files of their own, as far as their processors or GPUs differ."""
    gpu = machine.gpu
    of = machine.processor if device == "cpu" or gpu is None else gpu.name
    digest = hashlib.sha256(of.encode()).hexdigest()[:12]
    by = f"-{threads}-threads" if device == "cpu" else ""
    return cache_folder() / f"costs-{device}{by}-{digest}.json"


def write_costs(path: Path, costs: Costs, *, overwrite: bool) -> None:
    """Write the file in one step; OutputError where that cannot be done, and then nothing is left of it."""
    write_asked(path, costs.to_json(), "out", "the costs ", overwrite=overwrite)
